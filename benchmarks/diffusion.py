"""Diffusion priors, measured: what they add to a guess, and what they draw led by a gradient.

    leakgauge prior train --data cifar10 --records 9000 --out cifar-ddpm
    python benchmarks/diffusion.py --prior cifar-ddpm

    restore   guesses of a search in pixels (noisy) and at low resolution (blurred), before and
              after DDRM, MDE and total variation; beside each what it makes of noise alone
    guided    the guided sampler beside the search in pixels at the same CPU time, beside DDRM after
              a shorter search, and beside samples of its prior that saw no update; `hard` is the
              same on a network on which the search in pixels fails

CIFAR-10, 32 × 32, from the folder named by LEAKGAUGE_DATA: the prior knows 9,000 training images.
Judged are 24 test images, every 400th, in batches of four; one step of SGD; the weights of the
network are drawn anew for each batch; labels are inferred. Options of the methods were chosen on
twelve training images that the prior did not know. Re-identification is among the 24 and 976 other
test images, by the smallest squared error. `manifold` is the prior's own error on its pictures: the
mean squared error with which it predicts noise that was added to them at level LEVEL of 1,000.

Every batch is a line of the file --out, written when it ends: start again to go on; --show prints
the tables and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sources import commit
from torch import Tensor

from leakgauge import data, metrics, models, priors
from leakgauge.attacks import GuidedDiffusion, InvertingGradients
from leakgauge.fl.local import train
from leakgauge.metrics import bootstrap
from leakgauge.metrics.identify import reidentified
from leakgauge.records import Classes, Images
from leakgauge.restore import DDRM, MDE, TotalVariation
from leakgauge.tensors import seeded
from leakgauge.types import Batch, Dataset, LocalTraining, Observation, Restorer, Setting

SIZE, BATCHES, APART, GALLERY = 4, 6, 400, 976
LEVEL, DRAWS = 150, 4
SHAPE = (3, 32, 32)
TRAINING = LocalTraining(lr=1.0, batch_size=SIZE)
RAW: dict[str, tuple[str, str, InvertingGradients]] = {
    "noisy": ("lenet-5", "torch", InvertingGradients(iterations=400)),
    "blurred": (
        "lenet-zhu",
        "wide-uniform",
        InvertingGradients(iterations=400, space="low-resolution"),
    ),
}
HARD = "lenet-zhu", "wide-uniform", InvertingGradients(iterations=400)
ROWS = ("guided", "noisy", "blurred", "manifold", "guided, hard")


@cache
def judged() -> Dataset:
    return data.load("cifar10", split="test")


def places(batch: int) -> list[int]:
    return [(batch * SIZE + k) * APART for k in range(SIZE)]


@cache
def gallery() -> Tensor:
    own = [place for batch in range(BATCHES) for place in places(batch)]
    others = [i for i in range(len(judged())) if i not in set(own)][:GALLERY]
    return judged().inputs[own + others]


@cache
def lpips() -> Any:
    return metrics.loaded(metrics.METRICS["lpips"])


def played(network: str, init: str, batch: int) -> tuple[Observation, Batch]:
    """The update of one batch, and its truth."""
    model = models.make(
        network, shape=SHAPE, classes=10, init=init, rng=seeded("weights", network, batch)
    )
    setting = Setting(model, Images(SHAPE), Classes(10))
    truth = Batch(judged().inputs[places(batch)], judged().labels[places(batch)])
    update = train(setting, truth, TRAINING, seeded("train", batch)).update
    return Observation(setting, update, TRAINING, SIZE), truth


def scored(guess: Tensor, truth: Tensor, batch: int, model: priors.Diffusion) -> dict[str, Any]:
    """Numbers of each truth, paired with the guess that is its own."""
    order = metrics.assign.optimal(guess, truth)
    guess = guess[order]
    own = torch.arange(batch * SIZE, (batch + 1) * SIZE)
    return {
        "psnr": metrics.psnr(guess, truth).tolist(),
        "lpips": lpips()(guess, truth).tolist(),
        "found": reidentified(guess, own, gallery()).tolist(),
        "manifold": manifold(model, guess).tolist(),
    }


@torch.no_grad()
def manifold(model: priors.Diffusion, images: Tensor) -> Tensor:
    """How well the prior predicts noise on these pictures: small on those that it would draw."""
    x, alpha = images * 2 - 1, model.alphas[LEVEL]
    errors = []
    for draw in range(DRAWS):
        noise = torch.randn(x.shape, generator=seeded("manifold", draw))
        _, found = model.clean(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, LEVEL)
        errors.append((found - noise).square().flatten(1).mean(1))
    return torch.stack(errors).mean(0)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def restore(kind: str, batch: int, place: str, model: priors.Diffusion) -> dict[str, Any]:
    network, init, attack = RAW[kind]
    seen, truth = played(network, init, batch)
    guess, cpu = timed(lambda: attack.reconstruct(seen, seeded("attack", kind, batch)))
    rows = {"raw": scored(guess.inputs, truth.inputs, batch, model) | {"cpu": cpu}}
    noise = torch.rand(guess.inputs.shape, generator=seeded("noise", batch))
    restorers: dict[str, Restorer] = {
        "total-variation": TotalVariation(), "ddrm": DDRM(place), "mde": MDE(place),
    }  # fmt: skip
    for name, one in restorers.items():
        rng = seeded("restore", name, batch)
        better, cpu = timed(
            lambda one=one, rng=rng: one.restore(guess.inputs, seen.record, rng, guess.labels)
        )
        rows[name] = scored(better, truth.inputs, batch, model) | {"cpu": cpu}
        if name == "mde":
            started = replace(one, iterations=1, lr=1e-12)  # what its first noise shows
            first = started.restore(guess.inputs, seen.record, seeded("restore", name, batch))
            far = [(x - guess.inputs).square().flatten(1).mean(1) for x in (first, better)]
            rows[name] |= {"objective": [one.tolist() for one in far]}
        alone = one.restore(noise, seen.record, rng, guess.labels)
        rows[f"{name}, noise alone"] = scored(alone, truth.inputs, batch, model)
    return rows


def guided(kind: str, batch: int, place: str, model: priors.Diffusion) -> dict[str, Any]:
    network, init, search = RAW["noisy"] if kind == "guided" else HARD
    seen, truth = played(network, init, batch)
    known = replace(seen, kept=priors.load(place))
    rng = seeded("attack", "guided", batch)
    led, cpu = timed(lambda: GuidedDiffusion(place).reconstruct(known, rng))
    rows = {"guided": scored(led.inputs, truth.inputs, batch, model) | {"cpu": cpu}}
    rows["guided"] |= {"distance": [led.residual]}
    rows["prior alone"] = scored(led.prior, truth.inputs, batch, model)
    short, took = timed(lambda: search.reconstruct(seen, seeded("attack", "noisy", batch)))
    longer = replace(search, iterations=max(1, round(search.iterations * cpu / took)))
    same, cpu = timed(lambda: longer.reconstruct(seen, seeded("attack", "same", batch)))
    rows["search, same CPU"] = scored(same.inputs, truth.inputs, batch, model) | {"cpu": cpu}
    rows["search, same CPU"] |= {"distance": [same.residual], "iterations": [longer.iterations]}
    ddrm = DDRM(place)
    better, more = timed(lambda: ddrm.restore(short.inputs, seen.record, seeded("r", batch)))
    rows["search of 400, ddrm"] = scored(better, truth.inputs, batch, model) | {"cpu": took + more}
    return rows


def drawn(batch: int, model: priors.Diffusion) -> dict[str, Any]:
    """What `manifold` says of true pictures and of the prior's own."""
    truth = judged().inputs[places(batch)]
    shown = model.sample(SIZE, seeded("samples", batch))
    return {
        "test images": {"manifold": manifold(model, truth).tolist()},
        "samples of the prior": {"manifold": manifold(model, shown).tolist()},
        "noise": {"manifold": manifold(model, torch.rand(truth.shape)).tolist()},
    }


def run(out: Path, place: str) -> None:
    model = priors.diffusion(place, "the benchmark")
    done = {(row["kind"], row["batch"]) for row in read(out)}
    for kind in ROWS:
        for batch in range(BATCHES):
            if (kind, batch) in done:
                continue
            if kind.startswith("guided"):
                rows = guided(kind, batch, place, model)
            elif kind == "manifold":
                rows = drawn(batch, model)
            else:
                rows = restore(kind, batch, place, model)
            line = {"kind": kind, "batch": batch, "commit": commit(), "rows": rows}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(kind, batch, flush=True)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def spread(values: list[float], digits: int) -> str:
    low, high = bootstrap.interval(values, seeded("interval"))
    middle = float(bootstrap.median(torch.tensor(values, dtype=torch.float64)))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def show(out: Path) -> None:
    for kind in ROWS:
        lines = [line["rows"] for line in read(out) if line["kind"] == kind]
        if not lines:
            continue
        print(f"\n{kind}, {len(lines) * SIZE} images\n")
        print("| | PSNR, dB | LPIPS | re-identified | manifold | CPU s a batch |")
        print("|---|---|---|---|---|---|")
        for name in lines[0]:
            rows = [line[name] for line in lines]

            def every(key: str, rows: list[dict[str, Any]] = rows) -> list[float]:
                return [value for row in rows for value in row.get(key, [])]

            cells = [name]
            for key, digits in (("psnr", 1), ("lpips", 3)):
                cells.append(spread(every(key), digits) if every(key) else "")
            found = every("found")
            cells.append(f"{sum(found):.0f} of {len(found)}" if found else "")
            cells.append(spread(every("manifold"), 4))
            cpu = [row["cpu"] for row in rows if "cpu" in row]
            cells.append(f"{sum(cpu) / len(cpu):.1f}" if cpu else "")
            print(f"| {' | '.join(cells)} |")
            for key in ("objective", "distance", "iterations"):
                if key == "objective" and every(key):
                    first, last = ([v for row in rows for v in row[key][end]] for end in (0, 1))
                    print(f"  objective {spread(first, 4)} at first, {spread(last, 4)} at the end")
                elif every(key):
                    print(f"  {key} {spread(every(key), 5)}")
        gains(kind, lines)


def gains(kind: str, lines: list[dict[str, Any]]) -> None:
    """Differences image by image, of the pairs that matter."""
    led = [("guided", "prior alone"), ("guided", "search, same CPU")]
    restored = [("ddrm", "raw"), ("mde", "raw"), ("total-variation", "raw")]
    restored += [("ddrm", "ddrm, noise alone"), ("mde", "mde, noise alone")]
    pairs = {"guided": led, "guided, hard": led, "manifold": []}.get(kind, restored)
    for one, other in pairs:
        words = []
        for key, digits in (("psnr", 1), ("lpips", 3)):
            left, right = ([v for line in lines for v in line[n][key]] for n in (one, other))
            words.append(
                f"{key} {spread([a - b for a, b in zip(left, right, strict=True)], digits)}"
            )
        print(f"  {one} minus {other}: {', '.join(words)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prior", help="folder of the trained prior")
    parser.add_argument(
        "--out", type=Path, default=Path("diffusion.jsonl"), help="a line per batch"
    )
    parser.add_argument("--show", action="store_true", help="print the tables and run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.show:
        if not given.prior:
            parser.error("--prior is needed: train one by the command above")
        run(given.out, str(Path(given.prior).resolve()))
    show(given.out)


if __name__ == "__main__":
    main()
