"""Attacks with a generative prior, measured: each beside what its prior shows without the update.

    python benchmarks/generative.py plain       GIAS, GGL, ROG, CI-Net and IG on plain updates
    python benchmarks/generative.py pruned      the same where 99 % of the update were not sent
    python benchmarks/generative.py noisy       the same after clipping and noise
    python benchmarks/generative.py inversion   FedInverse beside IG on a model that has learned

Every row is one line of the file --out, written when it ends: start again to go on; --show prints
the tables and runs nothing. The data come from the folder named by LEAKGAUGE_DATA, the priors from
--priors, where these commands made them:

    leakgauge prior train --data cifar10 --kind gan --out PRIORS/cifar-gan
    leakgauge prior train --data cifar10 --kind autoencoder --steps 1000 --out PRIORS/cifar-ae
    leakgauge prior train --data mnist --kind gan --records 10000 --steps 1000 \\
        --out PRIORS/mnist-gan

Judged are test images: every tenth, each with weights of its own draw; options were chosen on test
images between them (--tune). LeNet, 32 × 32, one step of SGD on one record, which gives its label
away. The attacker is not told of a defence: what GGL knows of it, it has estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from board import images, rng_of
from sources import commit
from torch import Tensor, nn

from leakgauge import data, metrics, models
from leakgauge.attacks import GGL, GIAS, ROG, CINet, FedInverse, InvertingGradients
from leakgauge.defences import ClipAndNoise, Prune
from leakgauge.fl import Scenario, setting, simulate
from leakgauge.fl.local import train
from leakgauge.kept import Checkpoint
from leakgauge.metrics.bootstrap import interval
from leakgauge.types import (
    Attack,
    Batch,
    Dataset,
    Defence,
    Kept,
    LocalTraining,
    Observation,
    PreparedAttack,
    Reconstruction,
    Setting,
    Target,
)

TRAINING = LocalTraining(lr=0.1)
Outcome = dict[str, Any]
DEFENCES: dict[str, Defence | None] = {
    "plain": None,
    "pruned": Prune(share=0.99),
    "noisy": ClipAndNoise(epsilon=2000.0, norm=1.0),
}


def model_of(seed: int) -> Setting:
    rng = torch.Generator().manual_seed(seed)
    made = models.make("lenet-zhu", shape=(3, 32, 32), classes=10, init="wide-uniform", rng=rng)
    return setting(made, (3, 32, 32), classes=10)


def pairs(count: int, tune: bool) -> list[tuple[Batch, int]]:
    """Test images, one each, with the seed of their weights."""
    test = images("cifar10", "test", 32)
    rows = [10 * (k + 1) + (5 if tune else 0) for k in range(count)]
    seeds = [(1000 if tune else 0) + k for k in range(count)]
    return [
        (Batch(test.inputs[[r]], test.labels[[r]]), s) for r, s in zip(rows, seeds, strict=True)
    ]


@cache
def public() -> Dataset:
    return images("cifar10", "train", 32)


def attacks(given: argparse.Namespace) -> dict[str, Attack]:
    gan, coder = (str(given.priors / name) for name in ("cifar-gan", "cifar-ae"))
    found: dict[str, Attack] = {
        "GIAS": GIAS(prior=gan),
        "GIAS, latents alone": GIAS(prior=gan, latent=1.0, iterations=180),
        "GGL": GGL(prior=gan),
        "ROG, bicubic, factor 4": ROG(),
        "ROG, bicubic, factor 2": ROG(factor=2),
        "ROG, autoencoder": ROG(prior=coder),
        "CI-Net": CINet(),
        "IG": InvertingGradients(iterations=given.iterations),
    }
    for text in given.set:
        name, _, value = text.partition(":")
        key, _, value = value.partition("=")
        found[name] = replace(found[name], **{key: json.loads(value)})  # type: ignore[type-var]
    return {name: one for name, one in found.items() if not given.rows or name in given.rows}


@cache
def prepared(attack: Attack, keep: Path) -> Kept | None:
    """What an attack prepares is the same for all models: it reads public images alone."""
    if not isinstance(attack, PreparedAttack):
        return None
    key = repr(attack)
    place = Checkpoint(keep / f"{abs(hash_of(key)):x}.safetensors", key)
    if (found := place.load()) is None:
        target = Target(model_of(0), TRAINING, 1, public=public())
        found = attack.prepare(target, rng_of("prepare", key)).kept
        keep.mkdir(parents=True, exist_ok=True)
        place.save(found)
    return found


def hash_of(text: str) -> int:
    return int(rng_of(text).initial_seed())


def scores(guess: Tensor, truth: Tensor) -> dict[str, float]:
    found = {"psnr": float(metrics.psnr(guess, truth)), "ssim": float(metrics.ssim(guess, truth))}
    if os.environ.get("LEAKGAUGE_WEIGHTS"):
        found["lpips"] = float(_lpips()(guess, truth))
    return found


@cache
def _lpips() -> Any:
    return metrics.loaded(metrics.METRICS["lpips"])


def run(attack: Attack, defence: Defence | None, given: argparse.Namespace) -> Outcome:
    kept = prepared(attack, given.keep)
    rows = []
    for k, (batch, seed) in enumerate(pairs(given.images, given.tune)):
        here = model_of(seed)
        update = train(here, batch, TRAINING, rng_of("update", k), defence).update
        seen = Observation(here, update, TRAINING, 1, labels=batch.labels, kept=kept)
        if defence is not None:  # label inference under a defence is another question
            attack = replace(attack, labels="known")  # type: ignore[type-var]
        began = time.process_time()
        guess = attack.reconstruct(seen, rng_of("attack", k))
        spent = time.process_time() - began
        row: Outcome = {"guess": scores(guess.inputs, batch.inputs), "seconds": spent}
        if guess.prior is not None:
            row["prior"] = scores(guess.prior, batch.inputs)
        rows.append(row)
    return {"rows": rows, "prepared": (kept or Kept()).facts.get("cpu_seconds")}


def baseline(given: argparse.Namespace) -> Outcome:
    mean = public().inputs.mean(0, keepdim=True)
    found = [scores(mean, batch.inputs) for batch, _ in pairs(given.images, given.tune)]
    return {"rows": [{"guess": one, "seconds": 0.0} for one in found], "prepared": None}


def matching(name: str, given: argparse.Namespace) -> dict[str, Callable[[], Outcome]]:
    rows: dict[str, Callable[[], Outcome]] = {"mean image": lambda: baseline(given)}
    for row, attack in attacks(given).items():
        rows[row] = lambda a=attack: run(a, DEFENCES[name], given)  # type: ignore[misc]
    return rows


# --- model inversion ------------------------------------------------------------------------------


@cache
def digits(split: str) -> Dataset:
    found = data.load("mnist", split=split)
    return replace(found, inputs=found.inputs[:10_000], labels=found.labels[:10_000])


@cache
def learned(seed: int) -> tuple[nn.Module, float]:
    """LeNet-5 after forty rounds of a federation of ten clients, and its accuracy. They hold images
    of the test split, which the prior was not trained on."""
    own = digits("test")
    held = replace(own, inputs=own.inputs[:8000], labels=own.labels[:8000])

    def make() -> nn.Module:
        rng = torch.Generator().manual_seed(seed)
        return models.make("lenet-5", shape=(1, 28, 28), classes=10, rng=rng, activation="relu")

    how = LocalTraining(lr=0.1, batch_size=32, steps=25)
    scenario = Scenario(make, held, how, clients=10, participants=4, rounds=40)
    model = simulate(scenario, rng_of("federation", seed)).model.eval()
    with torch.no_grad():
        guess = model(own.inputs[8000:]).argmax(1)
    return model, float((guess == own.labels[8000:]).double().mean())


def inversion(given: argparse.Namespace) -> dict[str, Callable[[], Outcome]]:
    prior = str(given.priors / "mnist-gan")
    inverse = FedInverse(prior=prior, images="classes", candidates=4, iterations=200)

    def prototypes(attack: FedInverse, weights: int) -> Outcome:
        model, accuracy = learned(weights)
        own = digits("test")
        here = setting(model, (1, 28, 28), classes=10)
        kept = attack.prepare(Target(here, TRAINING, 1), rng_of("prepare")).kept
        seen = Observation(here, {}, None, None, kept=kept)
        began = time.process_time()
        guess = attack.reconstruct(seen, rng_of("attack", weights))
        spent = time.process_time() - began
        return _against(guess, model, own, guess.labels, spent, accuracy)

    def individual(weights: int) -> Outcome:
        """IG on one step of one record of each class, by that same model."""
        model, accuracy = learned(weights)
        own = digits("test")
        rows = [int((own.labels[:8000] == c).nonzero()[weights]) for c in range(10)]
        here = setting(model, (1, 28, 28), classes=10)
        shown, spent = [], 0.0
        attack = InvertingGradients(iterations=300)
        for k, row in enumerate(rows):
            batch = Batch(own.inputs[[row]], own.labels[[row]])
            update = train(here, batch, TRAINING, rng_of("update", k)).update
            began = time.process_time()
            shown.append(
                attack.reconstruct(Observation(here, update, TRAINING, 1), rng_of("attack", k))
            )
            spent += time.process_time() - began
        guess = Reconstruction(torch.cat([one.inputs for one in shown]), None, 0.0)
        found = _against(guess, model, own, torch.arange(10), spent, accuracy)
        found["truth"] = metrics.psnr(guess.inputs, own.inputs[rows]).tolist()
        return found

    rows: dict[str, Callable[[], Outcome]] = {}
    for weights in range(given.draws):
        mi = replace(inverse, hsic=0.0)
        rows[f"MI {weights}"] = lambda w=weights, a=mi: prototypes(a, w)  # type: ignore[misc]
        rows[f"MI-HSIC {weights}"] = lambda w=weights: prototypes(inverse, w)  # type: ignore[misc]
        rows[f"IG {weights}"] = lambda w=weights: individual(w)  # type: ignore[misc]
    return rows


def _against(
    guess: Reconstruction, model: nn.Module, own: Dataset, labels: Tensor | None, spent: float,
    accuracy: float,
) -> Outcome:  # fmt: skip
    """Each picture beside the nearest record of its class, and the same for the prior's sample."""
    assert labels is not None
    found: Outcome = {"accuracy": accuracy, "seconds": spent, "pictures": guess.inputs.tolist()}
    with torch.no_grad():
        sure = model(guess.inputs).softmax(1)
    found["confidence"] = sure.gather(1, labels[:, None])[:, 0].tolist()
    shown = {"guess": guess.inputs} | ({} if guess.prior is None else {"prior": guess.prior})
    for name, pictures in shown.items():
        nearest, lpips = [], []
        for picture, label in zip(pictures, labels, strict=True):
            mates = own.inputs[:8000][own.labels[:8000] == label]
            psnr = metrics.psnr(picture[None].expand_as(mates), mates)
            nearest.append(float(psnr.max()))
            if os.environ.get("LEAKGAUGE_WEIGHTS"):
                best = mates[psnr.argmax()][None].repeat(1, 3, 1, 1)
                lpips.append(float(_lpips()(picture[None].repeat(1, 3, 1, 1), best)))
        found[name] = {"nearest": nearest, "lpips": lpips}
    return found


# --- lines and tables -----------------------------------------------------------------------------

HEAD = (
    "attack | images | PSNR, median (quartiles) | LPIPS | its prior alone: PSNR | LPIPS | "
    "margin, PSNR (95 % interval) | margin, LPIPS | CPU-s per image"
)
INVERTED = (
    "attack | models, accuracy | pictures | confidence | PSNR with the nearest of its class | "
    "LPIPS with that | prior alone: PSNR | LPIPS | PSNR with the record | CPU-s per picture"
)


def _spread(values: list[float], digits: int = 1) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _margin(rows: list[Outcome], key: str, digits: int) -> str:
    gaps = [row["guess"][key] - row["prior"][key] for row in rows]
    low, high = interval(gaps, rng_of("bootstrap"))
    return f"{statistics.median(gaps):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def line(name: str, o: Outcome) -> str:
    rows = o["rows"]
    seconds = statistics.mean(row["seconds"] for row in rows)
    mine = _spread([row["guess"]["psnr"] for row in rows])
    lpips = statistics.median(row["guess"].get("lpips", float("nan")) for row in rows)
    alone = ["–"] * 4
    if "prior" in rows[0]:
        alone = [
            f"{statistics.median(row['prior'][key] for row in rows):.{n}f}"
            for key, n in (("psnr", 1), ("lpips", 3))
        ] + [_margin(rows, "psnr", 1), _margin(rows, "lpips", 3)]
    cells = [name, str(len(rows)), mine, f"{lpips:.3f}", *alone, f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} |"


def inverted(name: str, outcomes: list[Outcome]) -> str:
    def every(*path: str) -> list[float]:
        found = []
        for one in outcomes:
            for key in path:
                one = one.get(key, {})
            found += list(one)
        return found

    def median(*path: str, digits: int = 1) -> str:
        values = every(*path)
        return f"{statistics.median(values):.{digits}f}" if values else "–"

    accuracy = statistics.mean(one["accuracy"] for one in outcomes)
    count = len(every("confidence"))
    cells = [
        name, f"{len(outcomes)}, {accuracy:.1%}", str(count), median("confidence", digits=3),
        _spread(every("guess", "nearest")), median("guess", "lpips", digits=3),
        median("prior", "nearest"), median("prior", "lpips", digits=3), median("truth"),
        f"{sum(one['seconds'] for one in outcomes) / count:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def figure(known: dict[str, Outcome], path: Path) -> None:
    """Records, MI, MI-HSIC and IG, a row each: the first model."""
    from PIL import Image

    own = digits("test")
    rows = [int((own.labels[:8000] == c).nonzero()[0]) for c in range(10)]
    shown = [own.inputs[rows]]
    shown += [torch.tensor(known[f"{name} 0"]["pictures"]) for name in ("IG", "MI", "MI-HSIC")]
    sheet = torch.cat([torch.cat(list(row[:, 0]), 1) for row in shown])
    grey = (sheet.clamp(0, 1) * 255).round().byte().numpy()
    picture = Image.fromarray(grey)
    picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST).save(path)


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=[*DEFENCES, "inversion"])
    add("--out", type=Path, default=Path("generative.jsonl"), help="a line per row")
    add("--show", action="store_true", help="print what the file holds, run nothing")
    add("--priors", type=Path, default=Path("priors"), help="folder of the trained priors")
    add("--keep", type=Path, default=Path("generative"), help="folder of what was fitted")
    add("--images", type=int, default=20)
    add("--draws", type=int, default=3, help="of the models that FedInverse inverts")
    add("--iterations", type=int, default=1000, help="of IG")
    add("--rows", nargs="+", default=[], help="these attacks alone")
    add("--set", nargs="+", default=[], metavar="ATTACK:KEY=VALUE", help="an option of an attack")
    add("--tune", action="store_true", help="on images that are not judged")
    add("--figure", type=Path, help="draw the pictures of `inversion`")
    given = parser.parse_args(arguments)
    inverting = given.what == "inversion"
    head = INVERTED if inverting else HEAD
    print(f"| {head} |\n|{'---|' * len(head.split(' | '))}", flush=True)
    options = {key: getattr(given, key) for key in ("images", "iterations", "set", "tune")}
    known: dict[str, Outcome] = {}
    if given.out.exists():
        for text in given.out.read_text(encoding="utf-8").splitlines():
            one = json.loads(text)
            if one["what"] == given.what and one["options"] == options:
                known[one["row"]] = one
    rows = inversion(given) if inverting else matching(given.what, given)
    for name, work in rows.items():
        if name not in known and not given.show:
            key = {"what": given.what, "row": name, "options": options, "commit": commit()}
            known[name] = key | work()
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name]) + "\n")
        if name in known and not inverting:
            print(line(name, known[name]), flush=True)
    for kind in ("MI", "MI-HSIC", "IG") if inverting else ():
        found = [one for name, one in known.items() if name.rpartition(" ")[0] == kind]
        if found:
            print(inverted(kind, found), flush=True)
    if given.figure:
        figure(known, given.figure)


if __name__ == "__main__":
    main()
