"""Learned inversion, measured: LTI and GIT beside searches that know the weights.

    python benchmarks/learned.py table      LeNet, a residual network, a transformer: every attack
    python benchmarks/learned.py hybrid     GIT+IG beside GIT and beside IG, same iterations
    python benchmarks/learned.py robust     noise and pruning, inside the pairs and in the update
    python benchmarks/learned.py volume     1,000 to 10,000 pairs
    python benchmarks/learned.py shift      public images of other classes, and of another kind
    python benchmarks/learned.py drift      updates of weights that moved on since the pairs
    python benchmarks/learned.py exact      the weights that the exact recursion finds

Every row is one line of the file --out, written when it ends: start again to go on; --show prints
the tables and runs nothing. CIFAR-10, 32 × 32, from the folder named by LEAKGAUGE_DATA: pairs are
of training images (10,000 are all there are in one file of it), one step of SGD on one record.
Judged are test images: every tenth, nothing was chosen on them. The weights are one draw; --seed
makes another. LTI is given as many parameters as GIT, the same pairs and the same steps. --keep DIR
keeps what was fitted: remove it when the code has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from board import images, rng_of
from sources import commit
from torch import Tensor, nn

from leakgauge import data, metrics, models
from leakgauge.attacks import DLG, GIT, LTI, InvertingGradients, begun
from leakgauge.defences import Prune
from leakgauge.fl import setting
from leakgauge.fl.local import train
from leakgauge.fl.model import stripped
from leakgauge.kept import Checkpoint
from leakgauge.types import (
    Attack,
    Batch,
    Dataset,
    Defence,
    Here,
    Kept,
    LocalTraining,
    Named,
    Observation,
    Resources,
    Setting,
    Target,
)

TRAINING = LocalTraining(lr=1.0, batch_norm="eval")  # the update is the gradient itself
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lenet": ("lenet-zhu", "wide-uniform", {}),
    "resnet": ("resnet-10", "torch", {"width": 0.25}),
    "vit": ("vit-small", "torch", {"dim": 64, "depth": 4, "heads": 4}),
}
PAPER = {  # MSE and PSNR of the GIT paper (Tables 2, 4, 5, 8, 9), by row
    "lenet DLG": (0.073, 11.3), "lenet IG": (0.082, 11.3),
    "lenet LTI": (0.015, 19.2), "lenet GIT": (0.010, 20.4),
    "resnet LTI": (0.035, 15.3), "resnet GIT": (0.032, 15.5),
    "vit LTI": (0.046, 13.4), "vit GIT": (0.034, 15.3),
    "hybrid IG": (0.082, 11.3), "hybrid GIT": (0.010, 20.4), "hybrid GIT+IG": (0.001, 31.3),
    "hybrid LTI+IG": (0.002, 30.9),
    "noise 0.01 GIT": (0.010, 20.4), "noise 0.1 GIT": (0.010, 20.4),
    "noise 0.1 LTI": (0.015, 19.2), "noise 0.01 IG": (0.105, 9.8), "noise 0.1 IG": (0.162, 9.2),
    "pruned 90% GIT": (0.010, None), "pruned 99% GIT": (0.016, None),
    "pruned 99.9% GIT": (0.040, None), "pruned 90% LTI": (0.016, None),
    "pruned 99% LTI": (0.021, None), "pruned 99.9% LTI": (0.049, None),
    "1,000 pairs GIT": (0.027, None), "2,000 pairs GIT": (0.021, None),
    "5,000 pairs GIT": (0.015, None), "10,000 pairs GIT": (0.010, None),
    "1,000 pairs LTI": (0.039, None), "2,000 pairs LTI": (0.033, None),
    "5,000 pairs LTI": (0.027, None), "10,000 pairs LTI": (0.015, None),
    "classes 1–8 → 3–10 GIT": (0.020, 17.4), "classes 1–8 → 3–10 LTI": (0.029, 15.4),
    "drift 0 GIT": (0.010, None), "drift 10 GIT": (0.013, None), "drift 20 GIT": (0.017, None),
    "drift 0 LTI": (0.015, None), "drift 10 LTI": (0.019, None), "drift 20 LTI": (0.023, None),
}  # fmt: skip

Outcome = dict[str, Any]
FIRST = [0]  # the first test image that is judged


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of this deviation on every entry of the gradient."""

    std: float

    def announced(self) -> dict[str, object]:
        return {"name": "noise", "std": self.std}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return {n: u + self.std * torch.randn(u.shape, generator=rng) for n, u in update.items()}


@dataclass(frozen=True)
class World:
    """One model, the public images, and the clients' defence."""

    model: str
    seed: int
    public: str = "cifar10"
    defence: Defence | None = None

    @property
    def setting(self) -> Setting:
        return _setting(self.model, self.seed)

    def update(self, batch: Batch, rng: torch.Generator, live: Setting | None = None) -> Named:
        return train(live or self.setting, batch, TRAINING, rng, self.defence).update

    @property
    def target(self) -> Target:
        held = replace(self.setting, model=stripped(self.setting.model))
        name = None if self.defence is None else repr(self.defence)
        return Target(held, None, 1, public=public(self.public), query=self.update, defence=name)


@cache
def _setting(model: str, seed: int) -> Setting:
    name, init, options = MODELS[model]
    rng = torch.Generator().manual_seed(seed)
    made = models.make(name, shape=(3, 32, 32), classes=10, init=init, rng=rng, **options)
    return setting(made, (3, 32, 32), classes=10)


@cache
def public(name: str) -> Dataset:
    if name == "photographs":
        found = data.load("photos", size=32, per_photo=1000)
        return replace(found, labels=found.labels * 0 - 1)
    found = images("cifar10", "train", 32)
    if name == "classes 1–8":
        own = found.labels < 8
        return replace(found, inputs=found.inputs[own], labels=found.labels[own])
    return found


def judged(count: int, classes: range = range(10)) -> Batch:
    """Every tenth test image from --first on, if it is of these classes."""
    test = images("cifar10", "test", 32)
    tenth = range(FIRST[0], len(test), 10)
    rows = [k for k in tenth if int(test.labels[k]) in classes][:count]
    return Batch(test.inputs[rows], test.labels[rows])


# --- what is measured -----------------------------------------------------------------------------


def matched(git: GIT, world: World) -> LTI:
    """LTI with as many parameters as GIT, pairs and steps."""
    wanted = git.network(world.setting, 1).parameters

    def of(hidden: int) -> LTI:
        return LTI(
            pairs=git.pairs, hidden=hidden, entries=git.entries, steps=git.steps, batch=git.batch
        )

    def far(hidden: int) -> int:
        return abs(of(hidden).network(world.setting, 1).parameters - wanted)

    return of(min(range(10, 3000, 5), key=far))


def fitted(attack: GIT | LTI, world: World, given: argparse.Namespace) -> Kept:
    told = f"{attack!r} {world!r}"
    key = hashlib.sha256(told.encode()).hexdigest()
    place = Checkpoint(given.keep / f"{key}.safetensors", key)
    if (found := place.load()) is None:
        resources = Resources(folder=given.keep / "pairs")
        found = attack.prepare(world.target, rng_of("learned", world.seed), resources).kept
        for file in (given.keep / "pairs").glob("*"):
            file.unlink()
        place.save(found)
    return found


def scored(
    attack: Attack, world: World, truths: Batch, kept: Kept | None, live: Setting | None = None
) -> Outcome:
    """Scores of one attack on each of these records by itself."""
    shown, seconds = [], 0.0
    for k, (x, y) in enumerate(zip(truths.inputs, truths.labels, strict=True)):
        update = world.update(Batch(x[None], y[None]), rng_of("update", k), live)
        held = world.setting
        if kept is not None:  # who learned holds no weights
            held = replace(held, model=stripped(held.model))
        if not isinstance(attack, GIT | LTI):
            held = live or world.setting
        seen = Observation(held, update, TRAINING, 1, kept=kept)
        began = time.process_time()
        shown.append(attack.reconstruct(seen, rng_of("attack", k)).inputs)
        seconds += time.process_time() - began
    return measures(torch.cat(shown), truths.inputs) | {"seconds": seconds / len(truths)}


def measures(guess: Tensor, truth: Tensor) -> Outcome:
    found = {
        "mse": metrics.mse(guess, truth).tolist(),
        "psnr": metrics.psnr(guess, truth).tolist(),
        "ssim": metrics.ssim(guess, truth).tolist(),
    }
    if os.environ.get("LEAKGAUGE_WEIGHTS"):
        scorer = metrics.loaded(metrics.METRICS["lpips"])
        found["lpips"] = scorer(guess, truth).tolist()
    return found


def learned(
    attack: GIT | LTI, world: World, given: argparse.Namespace, truths: Batch | None = None
) -> Outcome:
    kept = fitted(attack, world, given)
    truths = judged(given.images) if truths is None else truths
    facts = {k: kept.facts[k] for k in ("pairs", "steps", "parameters", "cpu_seconds", "entries")}
    return scored(attack, world, truths, kept) | {"fit": facts}


def searched(
    attack: Attack, world: World, given: argparse.Namespace, kept: Kept | None = None
) -> Outcome:
    return scored(attack, world, judged(given.searched), kept)


def git_of(given: argparse.Namespace, **options: Any) -> GIT:
    given_ = {"pairs": given.pairs, "steps": given.steps, "hidden": given.hidden} | options
    return GIT(entries=given.entries, **given_)


Rows = dict[str, Callable[[], Outcome]]


def table(given: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for model in given.model or MODELS:
        world = World(model, given.seed)
        git = git_of(given, steps_of="module" if model == "vit" else "coarse")
        rows[f"{model} LTI"] = lambda w=world, g=git: learned(matched(g, w), w, given)
        rows[f"{model} GIT"] = lambda w=world, g=git: learned(g, w, given)
        if model == "lenet":
            printed = replace(git, known=False)
            rows[f"{model} GIT, nothing computed"] = lambda w=world, g=printed: learned(g, w, given)
            ig = InvertingGradients(iterations=given.iterations)
            rows[f"{model} IG"] = lambda w=world, a=ig: searched(a, w, given)
            rows[f"{model} DLG"] = lambda w=world: searched(
                DLG(iterations=given.iterations), w, given
            )
    return rows


def hybrid(given: argparse.Namespace) -> Rows:
    world, git = World("lenet", given.seed), git_of(given)
    lti = matched(git, world)
    ig = InvertingGradients(iterations=given.iterations)
    careful = replace(ig, lr=ig.lr / 10)  # larger steps lose a good start

    def from_(first: GIT | LTI) -> Outcome:
        return searched(begun(first, careful), world, given, fitted(first, world, given))

    return {
        "hybrid GIT": lambda: searched(git, world, given, fitted(git, world, given)),
        "hybrid IG": lambda: searched(ig, world, given),
        "hybrid IG, a tenth of the learning rate": lambda: searched(careful, world, given),
        "hybrid LTI+IG": lambda: from_(lti),
        "hybrid GIT+IG": lambda: from_(git),
    }


def robust(given: argparse.Namespace) -> Rows:
    rows: Rows = {}
    ig = InvertingGradients(iterations=given.iterations)
    worlds: dict[str, Defence | None] = {"clean": None}
    worlds |= {f"noise {std:g}": Noise(std) for std in (0.01, 0.1)}
    worlds |= {f"pruned {share:.3g}%": Prune(share=share / 100) for share in (90, 99, 99.9)}
    for name, defence in worlds.items():
        world = World("lenet", given.seed, defence=defence)
        git = git_of(given)
        rows[f"{name} GIT"] = lambda w=world, g=git: learned(g, w, given)
        rows[f"{name} LTI"] = lambda w=world, g=git: learned(matched(g, w), w, given)
        rows[f"{name} IG"] = lambda w=world: searched(ig, w, given)
    return rows


def volume(given: argparse.Namespace) -> Rows:
    rows: Rows = {}
    world = World("lenet", given.seed)
    for count in (1000, 2000, 5000, 10_000):
        git = git_of(given, pairs=count)
        rows[f"{count:,} pairs GIT"] = lambda g=git: learned(g, world, given)
        rows[f"{count:,} pairs LTI"] = lambda g=git: learned(matched(g, world), world, given)
    return rows


def shift(given: argparse.Namespace) -> Rows:
    rows: Rows = {}
    git = git_of(given)
    for name, source, classes in (
        ("classes 1–8 → 3–10", "classes 1–8", range(2, 10)),
        ("photographs → CIFAR-10", "photographs", range(10)),
    ):
        world = World("lenet", given.seed, source)
        truths = judged(given.images, classes)
        rows[f"{name} GIT"] = lambda w=world, t=truths: learned(git, w, given, t)
        rows[f"{name} LTI"] = lambda w=world, t=truths: learned(matched(git, w), w, given, t)
    return rows


def drift(given: argparse.Namespace) -> Rows:
    """Updates of a client that has trained so many epochs on 500 images since the pairs."""
    rows: Rows = {}
    world = World("lenet", given.seed)
    git = git_of(given)
    for epochs in (0, 1, 10, 20):
        live = replace(world.setting, model=_moved(world.setting.model, epochs))
        for name, attack in (("GIT", git), ("LTI", matched(git, world))):
            rows[f"drift {epochs} {name}"] = lambda a=attack, s=live: scored(
                a, world, judged(given.images), fitted(a, world, given), s
            )
    return rows


def _moved(model: nn.Module, epochs: int) -> nn.Module:
    if not epochs:
        return model
    test = images("cifar10", "test", 32)
    own = Batch(test.inputs[5:5000:10], test.labels[5:5000:10])  # none of those that are judged
    training = LocalTraining(lr=1e-4, batch_size=32, epochs=epochs)
    start = setting(model, (3, 32, 32), classes=10)
    moved = train(start, own, training, rng_of("drift")).update
    after = {n: p.detach() - moved[n] for n, p in model.named_parameters()}
    made = models.make(
        MODELS["lenet"][0], shape=(3, 32, 32), classes=10, rng=torch.Generator().manual_seed(0)
    )
    made.load_state_dict(after)
    return made


def exact(given: argparse.Namespace) -> Rows:
    """A perceptron with 16 and 8 hidden units on handwritten digits: the errors at its logits have
    nine dimensions, so that updates show all of its weights but for a shift of the last layer."""

    def run() -> Outcome:
        digits = data.load("digits")
        model = models.make(
            "mlp", shape=(1, 8, 8), classes=10, rng=torch.Generator().manual_seed(given.seed),
            hidden=[16, 8], activation="tanh",
        )  # fmt: skip
        live = setting(model, (1, 8, 8), classes=10)
        own = replace(digits, inputs=digits.inputs[300:], labels=digits.labels[300:])
        target = Target(
            live, None, 1, public=own, query=lambda b, rng: train(live, b, TRAINING, rng).update
        )
        found = []
        for steps in (1, 300, 1000, 3000):
            git = GIT(steps_of="exact", pairs=1400, steps=steps, lr=0.02, batch=64)
            kept = git.prepare(target, rng_of("exact", given.seed)).kept
            distances = {}
            for name in ("fc2.weight", "fc3.weight"):
                truth, guess = dict(model.named_parameters())[name].detach(), kept.tensors[name]
                if name == "fc3.weight":  # errors sum to zero: a shift of all classes is not seen
                    truth, guess = truth - truth.mean(0), guess - guess.mean(0)
                distances[name] = float((truth - guess).norm() / truth.norm())
            errors = []
            for k in range(100):
                batch = Batch(digits.inputs[k : k + 1], digits.labels[k : k + 1])
                update = train(live, batch, TRAINING, rng_of(k)).update
                seen = Observation(live, update, TRAINING, 1, kept=kept)
                guess = git.reconstruct(seen, rng_of(k)).inputs
                errors.append(float((guess - batch.inputs).square().mean()))
            found.append([steps, distances, statistics.median(errors)])
        return {"curve": found}

    return {"exact": run}


TABLES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "table": table, "hybrid": hybrid, "robust": robust, "volume": volume, "shift": shift,
    "drift": drift, "exact": exact,
}  # fmt: skip


# --- lines and tables -----------------------------------------------------------------------------


def line(name: str, o: Outcome) -> str:
    if "curve" in o:
        return "\n".join(
            f"| {steps} | {d['fc2.weight']:.3f} | {d['fc3.weight']:.3f} | {error:.1e} |"
            for steps, d, error in o["curve"]
        )
    mse, psnr = PAPER.get(name, (None, None))
    paper = " / ".join("–" if v is None else f"{v:g}" for v in (mse, psnr)) if mse else "–"
    fit = o.get("fit", {})
    size = f"{fit['parameters'] / 1e6:.1f} M, {fit['cpu_seconds']:.0f}" if fit else "–"
    lpips = f"{statistics.median(o['lpips']):.3f}" if "lpips" in o else "–"
    ends = statistics.quantiles(o["psnr"], n=4)
    return (
        f"| {name} | {len(o['mse'])} | {statistics.mean(o['mse']):.4f} "
        f"| {statistics.median(o['psnr']):.1f} ({ends[0]:.1f}–{ends[2]:.1f}) "
        f"| {statistics.median(o['ssim']):.2f} | {lpips} | {size} | {1000 * o['seconds']:.0f} "
        f"| {paper} |"
    )


HEAD = (
    "row | images | MSE, mean | PSNR, median (quartiles) | SSIM | LPIPS | parameters, CPU-s of the "
    "fit | ms per image | paper: MSE / PSNR"
)
CURVE = "steps | distance of fc2 | distance of fc3 | MSE of images held out, median"


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=TABLES)
    add("--out", type=Path, default=Path("learned.jsonl"), help="a line per row")
    add("--show", action="store_true", help="print what the file holds, run nothing")
    add("--keep", type=Path, default=Path("learned"), help="folder of what was fitted")
    add("--seed", type=int, default=0, help="of the weights")
    add("--first", type=int, default=0, help="the first test image that is judged")
    add("--model", nargs="+", choices=MODELS)
    add("--pairs", type=int, default=GIT.pairs)
    add("--steps", type=int, default=GIT.steps)
    add("--hidden", type=int, default=GIT.hidden)
    add("--entries", type=int, default=GIT.entries)
    add("--iterations", type=int, default=500, help="of IG")
    add("--images", type=int, default=200, help="judged by what is fitted")
    add("--searched", type=int, default=20, help="judged by what searches")
    given = parser.parse_args(arguments)
    FIRST[0] = given.first
    head = CURVE if given.what == "exact" else HEAD
    print(f"| {head} |\n|{'---|' * len(head.split(' | '))}", flush=True)
    names = ("seed", "pairs", "steps", "hidden", "entries", "iterations", "images", "searched")
    options = {name: getattr(given, name) for name in names}
    if given.first:
        options["first"] = given.first
    known = {}
    if given.out.exists():
        for text in given.out.read_text(encoding="utf-8").splitlines():
            one = json.loads(text)
            if one["what"] == given.what and one["options"] == options:
                known[one["row"]] = one
    for name, run in TABLES[given.what](given).items():
        if name not in known and not given.show:
            key = {"what": given.what, "row": name, "options": options, "commit": commit()}
            known[name] = key | run()
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name], ensure_ascii=False) + "\n")
        if name in known:
            print(line(name, known[name]), flush=True)


if __name__ == "__main__":
    main()
