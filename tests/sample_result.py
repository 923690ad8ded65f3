"""A result as an audit writes it, with its pictures, of any size: for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from leakgauge import __version__
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.summary import derived

ATTACKS = ("analytic", "inverting-gradients", "dlg")
DEFENCES = ("none", "prune")
SEES = {  # dB each attack reaches without a defence; a defence takes some away
    "analytic": 58.0,
    "inverting-gradients": 24.0,
    "dlg": 14.0,
}
HOSTILE = "<script>window.__pwned=1</script><img src=x onerror='window.__pwned=1'>\"'`|*[x](http://e.example)"


def sample(
    folder: Path,
    *,
    rounds: tuple[int, ...] = (0,),
    defences: tuple[str, ...] = DEFENCES,
    attacks: tuple[str, ...] = ATTACKS,
    seeds: int = 3,
    records: int = 4,
    shape: tuple[int, int, int] = (3, 16, 16),
    outcome: str = "leaks",
    pool: int | None = None,
    text: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Make one in `folder` that ends in this outcome. `pool` lets trials share that many pairs of
    pictures; `text` is put into every text that a user, a file or an error can choose."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    trials = [
        _trial(folder, rng, stage, defence + text, attack + text, s, records, shape, pool, text)
        for stage in rounds
        for defence in defences
        for s in range(seeds)
        for attack in attacks
    ]
    if outcome != "leaks":
        for trial in trials:
            _protect(trial)
    if outcome == "failed":
        trials[0] = failed(trials[0], f"RuntimeError: it broke{text}", f"Traceback{text}")
    first = trials[-1]
    twin = _other(first, "control", f"control.{attacks[0]}", attacks[0] + text, 61.0)
    cannot = {k: twin[k] for k in ("round", "defence", "seed", "realism", "times", "kind")} | {
        "id": f"control.{attacks[-1]}.none",
        "attack": attacks[-1] + text,
        "status": "not applicable",
        "error": "needs a linear layer → there is none" + text,
    }
    rungs = [_other(first, "ladder", f"ladder.{dB}", attacks[0] + text, dB) for dB in (33.0, 17.5)]
    extra = [twin, cannot, *rungs] if outcome != "inconclusive" else [cannot, *rungs]
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "leakgauge": __version__,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu" + text},
        "name": "hospital" + text,
        "fingerprint": "04fe4d7bb2e8052115a2d11ca9706a988b8d17305fc45bc5f5e2672c49933451",
        "plan": _plan(rounds, defences, attacks, seeds, text),
        "federation": {
            "model": "resnet-10" + text,
            "data": "photos" + text,
            "records": 240,
            "shape": list(shape),
            "classes": [f"{name}{text}" for name in ("astronaut", "coffee", "retina", "rocket")],
            "parameters": 4_903_242,
        },
        "threat": {
            "actor": "server",
            "client": 0,
            "holds": ["records", "training"],
            "withheld": ["labels", "own"],
            "realism": "realistic",
            "knowledge": {
                "training": "learning rate, steps, batch size and modes of the local training",
                "records": "the number of records behind the update" + text,
                "labels": "the true labels",
                "own": "the attacking client's own records",
            },
        },
        "control": [{"trials": [trial["id"]]} for trial in (twin, cannot)],
        "explanation": {
            "attack": attacks[0] + text,
            "rungs": [
                _rung("twin", "batch 1, one step, untrained" + text, twin["id"]),
                _rung("batch", "batch 1 → 8", rungs[0]["id"]),
                _rung("batch norm", "eval → train batch norm", rungs[1]["id"]),
                _rung("defence", f"no defence → prune{text}", trials[-1]["id"]),
            ],
        },
        "sensitivity": {
            "noise": 0.01,
            "cosine_distance": 0.0171,
            "words": f"The gradient follows the pixels closely: matching it is well posed.{text}",
        },
        "trials": [*trials, *extra],
        "not_run": [
            {"id": f"round0.none.dlg.seed{7 + i}", "attack": attacks[-1] + text,
             "reason": "the budget of 10 min was spent" + text}
            for i in range(2)
        ],
        "references": ["ssim"],
        "times": {
            "cpu_seconds": 812.4,
            "wall_seconds": 431.0,
            "forecast": {"cpu_seconds": 700.0, "megabytes": 512.0, "error": 0.16},
            "finished": "2026-01-05T10:20:30Z",
        },
    }  # fmt: skip
    if outcome == "below the limit":  # some dozen records can show no lower limit
        result["plan"]["audit"]["limit"] |= {"share": 0.5, "found": 0.5}
        result["not_run"] = []
    rederive(result)
    assert result["verdict"]["outcome"] == outcome
    save(folder, result)
    return result


def rederive(result: dict[str, Any]) -> dict[str, Any]:
    """Bring what follows from the trials up to them, after an edit."""
    controls = [trial for entry in result["control"] for trial in entry["trials"]]
    result |= derived(
        result["plan"], result["trials"], controls, result["explanation"], result["not_run"]
    )
    return result


def save(folder: Path, result: dict[str, Any]) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(result, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def failed(trial: dict[str, Any], error: str, traceback: str) -> dict[str, Any]:
    """The same trial, had it crashed."""
    keys = ("id", "kind", "round", "defence", "attack", "seed", "realism", "times")
    return {key: trial[key] for key in keys} | {
        "status": "failed",
        "error": error,
        "traceback": traceback,
    }


def _protect(trial: dict[str, Any]) -> None:
    """The same trial, had it recovered nothing."""
    count = trial["records"]
    trial["scores"] = trial["scores"] | {"psnr": [9.0] * count, "identified": [0.0] * count}
    trial["labels"] = trial["labels"] | {"accuracy": 0.25}


def _other(trial: dict[str, Any], kind: str, name: str, attack: str, psnr: float) -> dict[str, Any]:
    """The same trial with another score, of another kind."""
    count = trial["records"]
    scores = {"psnr": [psnr] * count, "ssim": [0.9] * count, "identified": [1.0] * count}
    return trial | {
        "id": name, "kind": kind, "attack": attack, "realism": "realistic", "scores": scores,
        "labels": trial["labels"] | {"accuracy": 1.0},
    }  # fmt: skip


def picture(shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """A scene with an edge, a gradient and some texture, (H, W, C) in 0 to 1."""
    channels, height, width = shape
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    a, b, c = rng.uniform(0, 1, (3, channels))
    disc = ((x - rng.uniform(0.3, 0.7)) ** 2 + (y - rng.uniform(0.3, 0.7)) ** 2) < 0.06
    scene = x[..., None] * a + y[..., None] * b + disc[..., None] * (c - 0.5)
    return np.clip(scene + 0.1 * rng.standard_normal((height, width, channels)), 0, 1)


def _pair(
    folder: Path, stem: str, shape: tuple[int, int, int], noise: float, rng: np.random.Generator
) -> list[str]:
    names = [f"{stem}-truth.png", f"{stem}-guess.png"]
    if not (folder / names[1]).exists():
        truth = picture(shape, rng)
        guess = np.clip(truth + noise * rng.standard_normal(truth.shape), 0, 1)
        for name, pixels in zip(names, (truth, guess), strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            grid = (pixels * 255).round().astype(np.uint8)
            Image.fromarray(grid[..., 0] if grid.shape[-1] == 1 else grid).save(folder / name)
    return names


def _trial(
    folder: Path,
    rng: np.random.Generator,
    stage: int,
    defence: str,
    attack: str,
    seed: int,
    records: int,
    shape: tuple[int, int, int],
    pool: int | None,
    text: str,
) -> dict[str, Any]:
    name = f"round{stage}.{defence}.{attack}.seed{seed}"
    reach = next((dB for key, dB in SEES.items() if attack.startswith(key)), 18.0)
    reach -= 0 if defence.startswith("none") else 12.0
    psnr = (reach + 4 * rng.standard_normal(records)).clip(4, 150).tolist()
    shown = [
        _pair(
            folder,
            f"images/{name.replace('/', '_')[:120]}/{i:03}"
            if pool is None
            else f"images/pool/{rng.integers(pool):03}",
            shape,
            10 ** (-psnr[i] / 20),
            rng,
        )
        for i in range(records if pool is None else 1)
    ]
    if pool is not None:  # a few files for many records
        shown *= records
    labels = rng.integers(0, 4, records)
    base = (11 + rng.standard_normal(records)).tolist()
    return {
        "id": name,
        "kind": "trial",
        "round": stage,
        "defence": defence,
        "attack": attack,
        "seed": seed,
        "realism": "oracle" if attack.startswith("dlg") else "realistic",
        "status": "done",
        "error": None,
        "records": records,
        "guesses": records,
        "scores": {
            "psnr": psnr,
            "ssim": [min(1.0, max(0.0, value / 50)) for value in psnr],
            "identified": [float(value > 16) for value in psnr],
        },
        "baselines": {
            "mean image": {"psnr": base, "ssim": [0.05] * records},
            "random image": {"psnr": [value - 1.5 for value in base], "ssim": [0.01] * records},
            "identified": 1 / 204,
        },
        "labels": {
            "guess": sorted(labels.tolist()),
            "truth": sorted(labels.tolist()),
            "accuracy": 0.875,
            "random": 0.3,
            "class prior": 0.34,
        },
        "residual": 0.01,
        "history": np.geomspace(1, 0.01, 200).tolist(),
        "notes": ["the fast derivative was off by 2 % at the start" + text] if seed == 0 else [],
        "facts": {"objective": 0.01, "kind": text},
        "caveats": ["the objective was still falling at the end" + text] if seed == 0 else [],
        "images": {
            "sheet": f"images/{'pool' if pool is not None else 'sheet'}/sheet.png",
            "truths": [pair[0] for pair in shown],
            "guesses": [pair[1] for pair in shown],
        },
        "times": {"wall_seconds": 1.5, "cpu_seconds": 1.4},
    }


def _rung(factor: str, label: str, *trials: str) -> dict[str, Any]:
    return {"factor": factor, "label": label, "trials": list(trials)}


def _plan(
    rounds: tuple[int, ...],
    defences: tuple[str, ...],
    attacks: tuple[str, ...],
    seeds: int,
    text: str,
) -> dict[str, Any]:
    options = {"prune": {"share": 0.99}, "clip-and-noise": {"epsilon": 100.0, "norm": 0.05}}
    return {
        "federation": {
            "model": "resnet-10" + text,
            "data": {"name": "photos", "size": 16},
            "checkpoint": None,
            "training": {
                "lr": 0.01,
                "batch_size": 8,
                "steps": 1,
                "epochs": None,
                "optimiser": "sgd",
                "batch_norm": "train",
                "mean": [0.5],
            },
            "clients": 4,
            "participants": None,
            "rounds": list(rounds),
        },
        "attack": [{"name": attack + text, "iterations": 300} for attack in attacks],
        "threat": {"actor": "server", "grants": ["records", "training"], "client": 0},
        "defence": [{"name": defence + text} | options.get(defence, {}) for defence in defences],
        "audit": {
            "limit": {"psnr": 15.0, "share": 0.1, "found": 0.1, "labels": 0.5},
            "seeds": list(range(seeds)),
            "metrics": ["psnr", "ssim"],
            "note": text,
        },
    }
