"""A result as an audit writes it, with its pictures, of any size: for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from leakgauge import __version__
from leakgauge.attacks import Exposure, LayerExposure
from leakgauge.audit import references
from leakgauge.audit.document import Document, Federation, Limit, Measure
from leakgauge.audit.results import (
    Attacker,
    Audited,
    Explanation,
    Forecasted,
    Found,
    LabelScore,
    Measurement,
    NotRun,
    Pictures,
    Result,
    Rung,
    RunTimes,
    Score,
    Sensitivity,
    Times,
    Trial,
)
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.summary import derived
from leakgauge.audit.verdict import measurements
from leakgauge.config import plain
from leakgauge.metrics import METRICS
from leakgauge.records import Scale
from leakgauge.types import LocalTraining

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
) -> Result:
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
        trials = [_protected(trial) for trial in trials]
    if outcome == "failed":
        trials[0] = failed(trials[0], f"RuntimeError: it broke{text}", f"Traceback{text}")
    first = trials[-1]
    twin = replace(_other(first, f"control.{attacks[0]}", attacks[0] + text, 61.0), kind="control")
    cannot = replace(
        twin,
        id=f"control.{attacks[-1]}.none",
        attack=attacks[-1] + text,
        status="not applicable",
        error="needs a linear layer → there is none" + text,
        found=None,
        score=None,
    )
    rungs = [
        replace(_other(first, f"ladder.{dB}", attacks[0] + text, dB), kind="ladder")
        for dB in (33.0, 17.5)
    ]
    extra = [twin, cannot, *rungs] if outcome != "inconclusive" else [cannot, *rungs]
    limit = Limit()
    if outcome == "below the limit":  # some dozen records can show no lower limit
        limit = Limit(share=0.5, found=0.5)
    plan = _plan(rounds, defences, attacks, seeds, limit, text)
    result = Result(
        schema=SCHEMA,
        leakgauge=__version__,
        versions={"python": "3.11.7", "torch": "2.13.0+cpu" + text},
        name="hospital" + text,
        fingerprint="04fe4d7bb2e8052115a2d11ca9706a988b8d17305fc45bc5f5e2672c49933451",
        plan=plan,
        federation=Audited(
            model="resnet-10" + text,
            data="photos" + text,
            records=240,
            shape=shape,
            classes=tuple(f"{name}{text}" for name in ("astronaut", "coffee", "retina", "rocket")),
            parameters=4_903_242,
        ),
        threat=Attacker(
            actor="server",
            client=0,
            malicious=False,
            holds=("records", "training"),
            withheld=("labels", "own"),
            realism="realistic",
            knowledge={
                "training": "learning rate, steps, batch size and modes of the local training",
                "records": "the number of records behind the update" + text,
                "labels": "the true labels",
                "own": "the attacking client's own records",
            },
        ),
        metrics=measurements({name: METRICS[name] for name in ("psnr", "ssim")}, limit),
        summary=(),
        control=(),
        verdict=None,
        explanation=None,
        sensitivity=Sensitivity(
            noise=0.01,
            cosine_distance=0.0171,
            words=f"The gradient follows the pixels closely: matching it is well posed.{text}",
        ),
        exposure=(
            Exposure(
                records=4,
                views=4,
                steps=1,
                exposed=True,
                limit=31,
                layer="layer4.0.conv2" + text,
                layers=(
                    LayerExposure("fc" + text, 1, 10, 0, "its input mixes activations" + text),
                    LayerExposure("layer4.0.conv2" + text, 16, 512, 31, ""),
                ),
                reason="",
            ),
        ),
        trials=(*trials, *extra),
        not_run=()
        if outcome == "below the limit"
        else tuple(
            NotRun(
                id=f"round0.none.dlg.seed{7 + i}",
                attack=attacks[-1] + text,
                reason="the budget of 10 min was spent" + text,
            )
            for i in range(2)
        ),
        references=tuple(
            replace(paper, title=paper.title + text, venue=paper.venue + text)
            for paper in references.known(plan)
        ),
        times=RunTimes(
            cpu_seconds=812.4,
            wall_seconds=431.0,
            forecast=Forecasted(700.0, None, None, megabytes=512.0, error=0.16),
            finished="2026-01-05T10:20:30Z",
        ),
    )
    ladder = Explanation(
        attack=attacks[0] + text,
        rungs=(
            Rung("twin", "batch 1, one step, untrained" + text, (twin.id,)),
            Rung("batch", "batch 1 → 8", (rungs[0].id,)),
            Rung("batch norm", "eval → train batch norm", (rungs[1].id,)),
            Rung("defence", f"no defence → prune{text}", (first.id,)),
        ),
    )
    result = derived(result, [trial.id for trial in (twin, cannot)], ladder)
    assert result.verdict is not None
    assert result.verdict.outcome == outcome
    save(folder, result)
    return result


def rederive(result: Result) -> Result:
    """What follows from the trials brought up to them, after an edit."""
    controls = [trial for entry in result.control for trial in entry.trials]
    return derived(result, controls, result.explanation)


def save(folder: Path, result: Result) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(plain(result), ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def older(result: Result) -> Result:
    """The same audit as it is read from a file of the first schema: it judged nothing."""
    return replace(
        result,
        threat=None,
        control=(),
        verdict=None,
        explanation=None,
        sensitivity=None,
        trials=tuple(trial for trial in result.trials if trial.kind == "trial"),
        not_run=(),
        references=(),
        times=RunTimes(result.times.cpu_seconds, None, None, None),
    )


def failed(trial: Trial, error: str, traceback: str) -> Trial:
    """The same trial, had it crashed."""
    return replace(trial, status="failed", error=error, traceback=traceback, found=None, score=None)


def unscored(trial: Trial) -> Trial:
    """The same trial, had nobody known the truth."""
    assert trial.found is not None
    assert trial.found.images is not None
    images = replace(trial.found.images, truths=())
    return replace(trial, status="unscored", found=replace(trial.found, images=images), score=None)


def rescored(trial: Trial, labels: float | None = None, **scores: Sequence[float]) -> Trial:
    """The same trial with other scores, and another share of the labels."""
    assert trial.score is not None
    score = replace(
        trial.score,
        scores=trial.score.scores | {name: tuple(values) for name, values in scores.items()},
    )
    if labels is not None and score.labels:
        score = replace(score, labels=replace(score.labels, accuracy=labels))
    return replace(trial, score=score)


def measured_by(result: Result, metric: Measurement, score: Callable[[float], float]) -> Result:
    """The same audit, had it this metric as well: `score` makes its numbers from the PSNR."""

    def also(trial: Trial) -> Trial:
        if trial.score is None:
            return trial
        tables = {
            key: (old := getattr(trial.score, key)) | {metric.name: tuple(map(score, old["psnr"]))}
            for key in ("scores", "mean_image", "random_image")
        }
        return replace(trial, score=replace(trial.score, **tables))

    audit = replace(result.plan.audit, metrics=(*result.plan.audit.metrics, metric.name))
    return rederive(
        replace(
            result,
            plan=replace(result.plan, audit=audit),
            metrics=(*result.metrics, metric),
            trials=tuple(map(also, result.trials)),
        )
    )


def invented(result: Result, folder: Path, *, restored: bool = True) -> Result:
    """The same audit, had its first attack restored its guesses (6 dB above the raw ones), or had
    a generative prior; what is shown without the update has 7 dB and is never recognised."""
    first = result.trials[0].attack

    def also(trial: Trial) -> Trial:
        if trial.score is None or trial.found is None or trial.attack != first:
            return trial
        count, scores, images = trial.score.records, trial.score.scores, trial.found.images
        raw = {name: tuple(value - 6 for value in scores[name]) for name in scores}
        raw |= {"identified": (0.0, 1.0) * (count // 2)}
        score = replace(
            trial.score,
            raw=raw if restored else None,
            prior_only=dict.fromkeys(scores, (7.0,) * count) | {"identified": (0.0,) * count},
        )
        assert images is not None
        kinds = {"raws": "raw", "priors": "prior"} if restored else {"priors": "prior"}
        more = {
            key: tuple(name.replace("guess", kind) for name in images.guesses)
            for key, kind in kinds.items()
        }
        for k, names in enumerate(more.values()):
            for i, name in enumerate(names):
                Image.new("RGB", (16, 16), (90 * k, 10 * i, 200)).save(folder / name)
        found = replace(trial.found, images=replace(images, **more))
        return replace(trial, score=score, found=found)

    return rederive(replace(result, trials=tuple(map(also, result.trials))))


def _protected(trial: Trial) -> Trial:
    """The same trial, had it recovered nothing."""
    assert trial.score is not None
    count = trial.score.records
    return rescored(trial, labels=0.25, psnr=[9.0] * count, identified=[0.0] * count)


def _other(trial: Trial, name: str, attack: str, psnr: float) -> Trial:
    """The same trial with another score and name."""
    assert trial.score is not None
    count = trial.score.records
    scores = {"psnr": [psnr] * count, "ssim": [0.9] * count, "identified": [1.0] * count}
    return replace(
        rescored(trial, labels=1.0, **scores), id=name, attack=attack, realism="realistic"
    )


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
) -> Trial:
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
    return Trial(
        id=name,
        kind="trial",
        round=stage,
        defence=defence,
        attack=attack,
        seed=seed,
        realism="oracle" if attack.startswith("dlg") else "realistic",
        status="done",
        error=None,
        times=Times(wall_seconds=1.5, cpu_seconds=1.4),
        found=Found(
            guesses=records,
            labels=tuple(sorted(labels.tolist())),
            residual=0.01,
            history=tuple(np.geomspace(1, 0.01, 200).tolist()),
            iterations=200,
            objectives=(0.01,),
            notes=("the fast derivative was off by 2 % at the start" + text,) if seed == 0 else (),
            facts={"objective": 0.01, "kind": text},
            adapted=None if defence.startswith("none") else "matches only what was sent" + text,
            images=Pictures(
                sheet=f"images/{'pool' if pool is not None else 'sheet'}/sheet.png",
                truths=tuple(pair[0] for pair in shown),
                guesses=tuple(pair[1] for pair in shown),
            ),
        ),
        score=Score(
            records=records,
            scores={
                "psnr": tuple(psnr),
                "ssim": tuple(min(1.0, max(0.0, value / 50)) for value in psnr),
                "identified": tuple(float(value > 16) for value in psnr),
            },
            mean_image={"psnr": tuple(base), "ssim": (0.05,) * records},
            random_image={
                "psnr": tuple(value - 1.5 for value in base),
                "ssim": (0.01,) * records,
            },
            identified=1 / 204,
            labels=LabelScore(
                truth=tuple(sorted(labels.tolist())), accuracy=0.875, random=0.3, class_prior=0.34
            ),
            caveats=("the objective was still falling at the end" + text,) if seed == 0 else (),
        ),
    )


def _plan(
    rounds: tuple[int, ...],
    defences: tuple[str, ...],
    attacks: tuple[str, ...],
    seeds: int,
    limit: Limit,
    text: str,
) -> Document:
    options = {"prune": {"share": 0.99}, "clip-and-noise": {"epsilon": 100.0, "norm": 0.05}}
    return Document(
        federation=Federation(
            model="resnet-10" + text,
            data={"name": "photos", "size": 16},
            training=LocalTraining(batch_size=8),
            record=Scale(mean=(0.5,)),
            clients=4,
            rounds=rounds,
        ),
        attack=tuple({"name": attack + text, "iterations": 300} for attack in attacks),
        defence=tuple({"name": defence + text} | options.get(defence, {}) for defence in defences),
        audit=Measure(seeds=tuple(range(seeds)), metrics=("psnr", "ssim"), limit=limit),
    )
