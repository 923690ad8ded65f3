"""Learned inversion: a network from what is read of an update to the images behind it.

An attack says what it reads of an update and how its network makes images of that; here the pairs
are asked for, the network is fitted to them, and the update of a client is put through it. What is
read is brought to mean zero and deviation one, entry by entry, as the pairs have it. Several
records behind one update come in no order: they are paired with what the network gives by the
smallest squared error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakgauge.attacks._pairs import Pairs, Reader, check
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fitting import Clock, Lesson, Pace, fit
from leakgauge.records import pictures
from leakgauge.tensors import seeded
from leakgauge.types import Batch, Kept, Named, Observation, Reconstruction, Resources, Target

LOOKS = 30  # at the pairs held out, in a whole fit
TRIED = 5  # steps, to tell how long one takes
FAR = 10.0  # deviations: what is read that lies further off counts as this far

Weights: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """`forward(weights, rows)` makes pixels (N, outputs) of rows (N, entries), with weights of
    these `shapes`. `last` names the bias of the outputs, if a sigmoid follows it: there a fit
    begins at the mean image. `raw` rows are not standardised. `words` say what was built;
    `also` is lowered with the error of the images."""

    reader: Reader
    shapes: Mapping[str, tuple[int, ...]]
    forward: Callable[[Weights, Tensor], Tensor]
    last: str | None = None
    raw: bool = False
    words: str = ""
    also: Callable[[Weights, Tensor], Tensor] | None = None

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def drawn(self, mean: Tensor, rng: torch.Generator) -> Named:
        """First weights, normal by the number of inputs, which give about the mean image."""
        weights: Named = {}
        for name, shape in self.shapes.items():
            spread = math.sqrt(2 / max(1, shape[-1])) if len(shape) > 1 else 0.0
            weights[name] = torch.randn(shape, generator=rng) * spread
        if self.last is not None:
            (outputs,), end = self.shapes[self.last], self.last.rpartition(".")[0]
            for name, weight in weights.items():
                weight *= 0.1 if name.startswith(f"{end}.") and len(weight) == outputs else 1.0
            weights[self.last] = torch.logit(mean.clamp(0.01, 0.99)).repeat(outputs // len(mean))
        return weights


@dataclass(frozen=True)
class Course:
    """How a network is fitted: on so many pairs, in so many steps, each of `batch` pairs."""

    pairs: int
    steps: int
    batch: int
    lr: float


def learn(
    network: Network, course: Course, target: Target, rng: torch.Generator,
    resources: Resources | None = None,
) -> Kept:  # fmt: skip
    """The network's weights after its fit, with facts: how well it does on pairs held out (`psnr`,
    decibels; `mse`; `mean_psnr` of their mean image) and what it was fitted on."""
    resources = resources or Resources()
    clock = Clock.of(resources)
    check(target, course.pairs)
    gauge = _Gauge.of(network, course, target, resources)
    pairs = Pairs.asked_of(target, course.pairs, network.reader, resources, clock, gauge.asked)
    with closing(pairs):
        return _fitted(network, course, pairs, rng, resources, clock, gauge)


def _fitted(
    network: Network, course: Course, pairs: Pairs, rng: torch.Generator, resources: Resources,
    clock: Clock, gauge: _Gauge,
) -> Kept:  # fmt: skip
    target = pairs.target
    lesson = _Lesson.of(network, pairs, course.batch)
    pace = Pace(course.steps, course.lr, every=max(1, course.steps // LOOKS))
    shown = replace(resources, progress=gauge.stepped if resources.progress else None)
    done = fit(lesson.lesson(rng), pace, rng, shown, clock)
    assert target.public is not None
    facts = {
        "psnr": done.score,
        "mse": lesson.mse(done.weights),
        "mean_psnr": lesson.mean_psnr(),
        "pairs": len(pairs),
        "held_out": pairs.held,
        "variants": pairs.variants,
        "entries": pairs.read.shape[1],
        "parameters": network.parameters,
        "public": target.public.name,
        "public_images": len(target.public),
        "records": target.records,
        "defence": target.defence,
        "steps": done.steps,
        "cpu_seconds": done.cpu_seconds,
    }
    return Kept(done.weights | {"read.mean": lesson.mean, "read.scale": lesson.scale}, facts)


def recall(network: Network, seen: Observation) -> Reconstruction:
    """What a fitted network makes of an update. The residual is the error that it had on pairs held
    out: it cannot tell how good this very guess is."""
    if seen.kept is None or seen.records is None:
        raise Withheld("learned inversion needs 'records' and what its prepare() kept")
    facts, tensors = seen.kept.facts, seen.kept.tensors
    if seen.records != facts["records"]:
        raise NotApplicable(
            f"it learned from updates of {facts['records']} records, and this one is of "
            f"{seen.records}"
        )
    sent = seen.sent or seen.update  # the pairs are of what clients send
    row = network.reader({n: u.float().cpu() for n, u in sent.items()})
    rows = _standard(row[None], tensors["read.mean"], tensors["read.scale"])
    shape = (seen.records, *pictures(seen.record).shape)
    with torch.no_grad():
        inputs = network.forward(tensors, rows).view(shape).clamp(0, 1)
    through = "" if facts["defence"] is None else ", which had passed the clients' defence"
    note = (
        f"learned from {facts['pairs']:,} pairs of public images of {facts['public']} and their "
        f"updates{through}"
    )
    unsaid = ("defence", "cpu_seconds")  # a note has the one, the audit tells the other
    told = {f"learned_{key}": value for key, value in facts.items() if key not in unsaid}
    told |= {"network": network.words.splitlines()} if network.words else {}
    return Reconstruction(
        inputs=inputs,
        labels=None,
        residual=facts["mse"],
        notes=(note,),
        facts=told,
    )


def _standard(rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Rows in deviations from the mean of the pairs; with none of either they stay as they are."""
    return ((rows - mean) / scale).clamp(-FAR, FAR) if len(mean) else rows


@dataclass(frozen=True)
class _Lesson:
    """Pairs as a network learns them."""

    network: Network
    pairs: Pairs
    batch: int
    mean: Tensor
    scale: Tensor
    truths: Tensor  # of the pairs held out
    image: Tensor  # the mean of the others

    @classmethod
    def of(cls, network: Network, pairs: Pairs, batch: int) -> _Lesson:
        some = range(pairs.held, min(len(pairs), pairs.held + 2000))
        image = torch.stack([pairs.inputs([k])[0].mean(0) for k in some]).mean(0)
        truths = pairs.inputs(range(pairs.held))
        if network.raw:
            return cls(network, pairs, batch, torch.empty(0), torch.empty(0), truths, image)
        own = pairs.read[pairs.held :]
        mean = torch.stack([part.double().sum(0) for part in torch.split(own, 500)]).sum(0) / len(
            own
        )
        square = sum((part.double() - mean).square().sum(0) for part in torch.split(own, 500))
        spread = (torch.as_tensor(square) / len(own)).sqrt()
        # What never changes tells nothing, whatever it is in the update that is attacked.
        scale = torch.where(spread > 1e-6 * spread.max(), spread, math.inf)
        return cls(network, pairs, batch, mean.float(), scale.float(), truths, image)

    def lesson(self, rng: torch.Generator) -> Lesson:
        return Lesson(
            begin=lambda: self.network.drawn(self.image.flatten(), rng),
            error=self.error,
            score=lambda weights: float((-10 * self._held(weights).log10()).mean()),
        )

    def error(self, weights: Weights, rng: torch.Generator) -> Tensor:
        rows = torch.randint(self.pairs.held, len(self.pairs), (self.batch,), generator=rng)
        read = self.pairs.read[rows]
        error = _errors(self._shown(weights, read), self.pairs.inputs(rows.tolist())).mean()
        return error if self.network.also is None else error + self.network.also(weights, read)

    def mse(self, weights: Weights) -> float:
        with torch.no_grad():
            return float(self._held(weights).mean())

    def mean_psnr(self) -> float:
        errors = (self.truths - self.image).square().flatten(2).mean(2)
        return float((-10 * errors.clamp_min(1e-12).log10()).mean())

    def _held(self, weights: Weights) -> Tensor:
        """The squared error per pixel of every record of the pairs held out."""
        rows = self.pairs.read[: self.pairs.held]
        parts = zip(torch.split(rows, 100), torch.split(self.truths, 100), strict=True)
        found = [_errors(self._shown(weights, row), truth) for row, truth in parts]
        return torch.cat(found).flatten().clamp_min(1e-12)

    def _shown(self, weights: Weights, rows: Tensor) -> Tensor:
        pixels = self.network.forward(weights, _standard(rows, self.mean, self.scale))
        return pixels.view(len(rows), *self.truths.shape[1:])


def _errors(shown: Tensor, truths: Tensor) -> Tensor:
    """Squared errors per pixel (pairs, records), each record with the image that is its own."""
    shown, truths = shown.flatten(2), truths.flatten(2)
    if shown.shape[1] > 1:
        with torch.no_grad():
            costs = torch.cdist(shown, truths).square().numpy()
            order = torch.stack([torch.as_tensor(linear_sum_assignment(c.T)[1]) for c in costs])
        shown = torch.stack([one[o] for one, o in zip(shown, order, strict=True)])
    return (shown - truths).square().mean(2)


@dataclass(frozen=True)
class _Gauge:
    """Progress over pairs and steps together, in thousandths of the CPU seconds that they take."""

    resources: Resources
    course: Course
    pair: float  # seconds
    step: float

    @classmethod
    def of(cls, network: Network, course: Course, target: Target, resources: Resources) -> _Gauge:
        """A pair and some steps are tried, if anybody wants to know."""
        if resources.progress is None:
            return cls(resources, course, 1.0, 1.0)
        assert target.public is not None
        assert target.query is not None
        picked = torch.arange(target.records)
        batch = Batch(target.public.inputs[picked].float(), picked % target.task.count)
        began = time.process_time()
        row = network.reader(target.query(batch, seeded("tried")))
        asked = time.process_time()
        rows = row.expand(course.batch, -1)

        def error(weights: Weights, rng: torch.Generator) -> Tensor:
            truths = torch.stack([batch.inputs for _ in range(course.batch)])
            return _errors(network.forward(weights, rows).view(truths.shape), truths).mean()

        mean = batch.inputs.mean(0).flatten()
        lesson = Lesson(lambda: network.drawn(mean, seeded("tried")), error, lambda weights: 0.0)
        fit(lesson, Pace(TRIED, course.lr), seeded("tried"), Resources(), Clock(0.0, math.inf))
        return cls(resources, course, asked - began, (time.process_time() - asked) / TRIED)

    def asked(self, pairs: int) -> None:
        self._tell(pairs * self.pair, 0.0)

    def stepped(self, step: int, steps: int, error: float) -> None:
        self._tell(self.course.pairs * self.pair + step * self.step, error)

    def _tell(self, seconds: float, error: float) -> None:
        total = self.course.pairs * self.pair + self.course.steps * self.step
        if self.resources.progress is not None:
            self.resources.progress(round(1000 * seconds), round(1000 * total), error)
