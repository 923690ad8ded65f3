"""A schema-2 result as an audit writes it, with its pictures, of any size: for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ATTACKS = ("analytic", "inverting-gradients", "dlg")
DEFENCES = ("none", "prune")
EXIT = {"leaks": 1, "below the limit": 0, "inconclusive": 4, "failed": 3}
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
    """Make one in `folder`. `pool` lets trials share that many pairs of pictures; `text` is put
    into every text that a user, a file or an error can choose."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    trials = [
        _trial(folder, rng, stage, defence + text, attack + text, s, records, shape, pool, text)
        for stage in rounds
        for defence in defences
        for s in range(seeds)
        for attack in attacks
    ]
    summary = _summary(trials)
    best = max(summary, key=lambda row: row["scores"]["psnr"]["median"])
    psnr = best["scores"]["psnr"]
    result: dict[str, Any] = {
        "schema": 2,
        "leakgauge": "0.1.0",
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
        "verdict": {
            "outcome": outcome,
            "exit_code": EXIT[outcome],
            "headline": f"This federation leaks: {best['attack']} recovered 92 % of the attacked "
            "records beyond 15 dB.",
            "sentences": [
                f"Positive control: 2 of 3 attacks broke the known-weak twin (analytic).{text}",
                f"With defence prune{text}: 0 % of the records leak.",
            ],
            "risk": best["risk"]["median"],
            "limit": {"psnr": 15.0, "share": 0.1},
            "worst": {
                "round": best["round"],
                "defence": best["defence"],
                "attack": best["attack"],
                "median": psnr["median"],
                "interval": psnr["interval"],
                "most": psnr["most"],
                "share": 0.92,
                "records": best["records"],
            },
        },
        "control": [
            {
                "attack": attacks[0] + text,
                "psnr": 61.2,
                "baseline": 11.0,
                "passed": True,
                "reason": None,
                "trial": "control.a",
            },
            {
                "attack": attacks[-1] + text,
                "psnr": None,
                "baseline": None,
                "passed": False,
                "reason": "needs a linear layer → there is none" + text,
                "trial": "control.b",
            },
        ],
        "summary": summary,
        "explanation": {
            "attack": attacks[0] + text,
            "rungs": [
                _rung("twin", "batch 1, one step, untrained" + text, 61.0, None),
                _rung("batch", "batch 1 → 8", 33.0, -28.0),
                _rung("batch norm", "eval → train batch norm", 17.5, -15.5),
                _rung("defence", f"no defence → prune{text}", None, None),
            ],
            "sentence": f"The batch size protects most: it takes 28 dB away.{text}",
        },
        "sensitivity": {
            "noise": 0.01,
            "cosine_distance": 0.0171,
            "words": f"The gradient follows the pixels closely: matching it is well posed.{text}",
        },
        "trials": trials,
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
    save(folder, result)
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


def spread(values: list[float]) -> dict[str, Any]:
    low, q1, median, q3, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    half = 1.6 * (q3 - q1) / len(values) ** 0.5
    return {
        "mean": float(np.mean(values)),
        "median": median,
        "quartiles": [q1, q3],
        "interval": [max(low, median - half), min(high, median + half)],
        "least": low,
        "most": high,
        "count": len(values),
    }


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


def _summary(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["round"], trial["defence"], trial["attack"]), []).append(trial)
    rows = []
    for (stage, defence, attack), group in groups.items():
        pooled = {
            metric: [v for trial in group for v in trial["scores"][metric]]
            for metric in group[0]["scores"]
        }
        median = float(np.median(pooled["psnr"]))
        rows.append(
            {
                "round": stage,
                "defence": defence,
                "attack": attack,
                "trials": len(group),
                "failed": 0,
                "not_applicable": 0,
                "reason": None,
                "realism": group[0]["realism"],
                "records": sum(trial["records"] for trial in group),
                "scores": {metric: spread(values) for metric, values in pooled.items()},
                "baselines": {
                    "mean image": {"psnr": 11.2, "ssim": 0.05},
                    "random image": {"psnr": 9.7, "ssim": 0.01},
                    "identified": 1 / 204,
                },
                "labels": {"accuracy": 0.875, "random": 0.3, "class prior": 0.34},
                "success_rate": float(np.mean(np.array(pooled["psnr"]) >= 20)),
                "risk": {"median": _risk(median), "worst": _risk(max(pooled["psnr"]))},
                "leaking": float(np.mean(np.array(pooled["psnr"]) >= 15)),
                "caveats": list(
                    dict.fromkeys(caveat for trial in group for caveat in trial["caveats"])
                ),
            }
        )
    return rows


def _risk(psnr: float) -> str:
    return (
        "very high" if psnr >= 20 else "high" if psnr >= 15 else "medium" if psnr >= 10 else "low"
    )


def _rung(factor: str, label: str, median: float | None, change: float | None) -> dict[str, Any]:
    return {"factor": factor, "label": label, "median": median, "change": change, "trials": 3}


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
            "seeds": list(range(seeds)),
            "metrics": ["psnr", "ssim"],
            "note": text,
        },
    }
