"""GradInversion — H. Yin, A. Mallya, A. Vahdat, J. M. Alvarez, J. Kautz, P. Molchanov: "See through
Gradients: Image Batch Recovery via GradInversion", CVPR 2021, https://arxiv.org/abs/2104.07586

    min_x  ‖g'(x) − g‖²/‖g‖² + α_tv·TV(x) + α_l2·‖x‖² + α_bn·R_bn(x) + α_group·‖x − x̄‖²

R_bn asks that a batch look to the batch-norm layers as the private one did. Several seeds search
side by side in four rounds; after each, x̄ is the mean of them all, and from the second on each is
drawn to it. The seed with the smallest gradient distance is returned. Adam with Langevin noise and
a cosine schedule.

Needs: the local training and the number of records; with `statistics="granted"` also the private
batch's statistics at every batch-norm layer, which no honest server sees: an oracle. `"running"`
takes the model's own running statistics in their place, which are public, and say something about
the batch only once the model is trained. `"none"` goes without R_bn, and a note says so. Labels are
inferred unless `labels="known"`.
Differs from the paper: the distance and R_bn are relative, so that weights carry over from model to
model; ‖x‖² is the mean square around grey; x̄ is taken without registering the images first, and
each round begins with a fresh state of Adam; one seed by default. Records of one class may change
places between seeds: x̄ then blurs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge.attacks._engine import Trust
from leakgauge.attacks._labels import YIN2021, infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import (
    Adam,
    LabelledSearch,
    Prior,
    constant,
    first_of,
    match,
    shared,
)
from leakgauge.attacks._matching import cosine as cosine_schedule
from leakgauge.attacks._objectives import relative_squared
from leakgauge.attacks._priors import batch_norm, total_variation
from leakgauge.errors import Withheld
from leakgauge.fl.statistics import running_statistics
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, count, option
from leakgauge.types import Knowledge, Observation, Reconstruction, Resources

ROUNDS = 4  # the paper switches the consensus on after a quarter of the iterations


@dataclass(frozen=True)
class GradInversion(LabelledSearch):
    """Matches gradients with several image priors (Yin 2021)."""

    papers: ClassVar[tuple[Paper, ...]] = (YIN2021,)
    lr: float = 0.1
    tv: float = 1e-3
    l2: float = option(1e-6, FROM_0)
    bn: float = option(0.1, FROM_0)
    group: float = option(0.01, FROM_0)
    seeds: int = option(1, count(1_000))
    noise: float = option(0.01, FROM_0)
    statistics: Literal["none", "running", "granted"] = "none"

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.seeds > 1 and (self.space != "pixels" or self.restarts > 1):
            raise ValueError(
                f"seeds agree on images: {self.seeds} of them need space = 'pixels' and restarts "
                f"= 1, got {self.space!r} and {self.restarts}"
            )

    @property
    def needs(self) -> frozenset[Knowledge]:
        needed = super().needs
        return needed | {"statistics"} if self.statistics == "granted" else needed

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        labels = infer(seen, self.labels, rng)
        batch, notes = self._batch_norm(seen)
        trust = Trust()
        priors: tuple[Prior, ...] = (
            *batch,
            (total_variation, constant(self.tv)),
            (lambda x: (x - 0.5).square().mean(), constant(self.l2)),
        )

        def search(stretch: Stretch, resources: Resources | None) -> Reconstruction:
            first, last = stretch.first, stretch.last

            def rate(done: float) -> float:
                return cosine_schedule()((first + done * (last - first)) / self.iterations)

            centre = stretch.centre
            group: tuple[Prior, ...] = ()
            if centre is not None:
                group = ((lambda x: (x - centre.to(x)).square().mean(), constant(self.group)),)
            return match(
                seen,
                relative_squared,
                replace(self, iterations=last - first),
                labels=labels,
                priors=(*priors, *group),
                optimiser=Adam(self.lr, rate, noise=self.noise),
                begin=stretch.begin,
                trust=trust,
                rng=rng,
                resources=resources,
            )

        if self.seeds == 1:
            found = search(Stretch(0, self.iterations), resources)
        else:
            found = together(search, self.seeds, self.iterations, resources)
        return replace(found, notes=(*notes, *found.notes))

    def _batch_norm(self, seen: Observation) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
        """R_bn with its weight, or nothing and the reason."""
        if self.statistics == "none":
            return (), ("no batch-norm prior: statistics = 'none'",)
        expected = running_statistics(seen.model)
        if self.statistics == "granted":
            if seen.statistics is None:
                raise Withheld("statistics = 'granted', but the observation holds none")
            expected = seen.statistics
        training, _ = told(seen, "gradient matching")
        if not expected:
            return (), ("no batch-norm prior: the model has no batch-norm layer to compare",)
        return ((batch_norm(seen.setting, training, expected), constant(self.bn)),), ()


@dataclass(frozen=True)
class Stretch:
    """A seed's search from the `first` to before the `last` iteration, drawn to `centre`."""

    first: int
    last: int
    begin: Tensor | None = None
    centre: Tensor | None = None


def together(
    search: Callable[[Stretch, Resources], Reconstruction],
    seeds: int,
    iterations: int,
    resources: Resources | None = None,
) -> Reconstruction:
    """All seeds in rounds, each round drawn to the mean of the last; the one that fits best."""
    left, done = shared(resources, iterations * seeds), 0
    bounds = sorted({iterations * k // ROUNDS for k in range(ROUNDS + 1)})
    guesses: list[Reconstruction] = []
    notes: list[str] = []
    for first, last in pairwise(bounds):
        before, centre = guesses, None
        if before:
            centre = torch.stack([g.inputs for g in before]).mean(0)
        guesses = []
        for seed in range(seeds):
            begin = before[seed].inputs if before else None
            found = search(Stretch(first, last, begin, centre), left(done))
            notes += [note for note in found.notes if note not in notes]
            done += found.iterations
            if before:
                history = before[seed].history + found.history
                distances = before[seed].distances + found.distances
                found = replace(found, history=history, distances=distances)
            guesses.append(found)
            if left(done).seconds == 0:
                return _best([*guesses, *before[seed + 1 :]], notes, done)
    return _best(guesses, notes, done)


def _best(guesses: list[Reconstruction], notes: list[str], done: int) -> Reconstruction:
    best = min(guesses, key=lambda guess: guess.residual)
    return replace(
        best,
        iterations=done,
        stopped=first_of({guess.stopped for guess in guesses}),
        differed=next((g.differed for g in guesses if g.differed is not None), None),
        notes=tuple(notes),
        facts=best.facts | {"residuals": [guess.residual for guess in guesses]},
    )
