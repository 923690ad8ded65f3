"""C2F — K. Zhu, J. Yang, S. Guo, H. Qin, T. Wang, J. Wang, Y. Nan, Z. Zheng: "Cracking Federated
Privacy: Initialization-Resilient Gradient Inversion with Fine-Grained Reconstruction",
https://doi.org/10.5281/zenodo.17979356

    coarse:  min_x  1 − cos(g', g) + λ₁·(1 − cos(g'_S, g_S)) + R(x),   S = {i: g_i ≠ 0}    (Eq. 1)
    fine:    min_x  1 − cos(g', g) + λ₂·Σ_j |g'_j − g_j| / (1 + |g_j|) + R(x)               (Eq. 2)
    R(x) = λ_TV·Σ_ij ((x_i,j+1 − x_ij)² + (x_i+1,j − x_ij)²)^(β/2),   β = 4
    λ_TV = −0.00008·log(scale) + 0.0005                                                     (Eq. 3)

The coarse stage finds the direction of the gradient: signed Adam, learning rate 0.1 in IG's steps,
λ₁ = 0.05 in its last 40 %. Its best iterate goes on to the fine stage, which matches the magnitudes
too: Adam, learning rate 0.01, cosine decay after a third, λ₂ = 1/number of gradient elements.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Facts: where the coarse stage ended, by iteration, objective and distance. To measure what the fine
stage adds, run `coarse=1.0` with the coarse iterations alone: the same seed gives the same images.
Differs from the paper: 600 iterations instead of 30 000 + 30 000; the TV weight of Eq. 3 also for
large images, where the stated 0.005 contradicts it; `scale` is read as the longer side, `log` as
the natural logarithm (the stated 0.0002 at 32 × 32); the TV of a batch is the mean over its
records; images stay in [0, 1], and R is taken of them after normalisation, as the model sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine import Trust
from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import (
    Adam,
    LabelledSearch,
    Phases,
    Search,
    constant,
    joined,
    match,
    shared,
    steps,
)
from leakgauge.attacks._matching import cosine as cosine_decay
from leakgauge.attacks._objectives import Distance, cosine, dot
from leakgauge.errors import Withheld
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, SHARE, option
from leakgauge.records import pictures
from leakgauge.types import Observation, Reconstruction, Resources

BETA = 4
LATE = 0.6  # share of the coarse stage after which λ₁ is on


PAPER = Paper(
    "zhu2025",
    "Zhu, Kaiming and Yang, Jinsheng and Guo, Siyang and Qin, Huaqian and Wang, Taiyu and Wang, "
    "Junbo and Nan, Yuhong and Zheng, Zibin",
    "Cracking Federated Privacy: Initialization-Resilient Gradient Inversion with Fine-Grained "
    "Reconstruction",
    2025,
    "Sun Yat-sen University; code on Zenodo",
    "https://doi.org/10.5281/zenodo.17979356",
    kind="misc",
)


@dataclass(frozen=True)
class CoarseToFine(LabelledSearch):
    """Finds the direction first, then the detail (Zhu 2025).

    `space` and `restarts` are of the coarse stage: the fine stage moves its pixels on."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 600
    coarse: float = option(0.5, SHARE)  # share of the iterations
    lr: float = 0.1
    fine_lr: float = option(0.01, POSITIVE)
    support: float = option(0.05, FROM_0)  # λ₁
    tv: float | None = None  # λ_TV; None: Eq. 3

    def __post_init__(self) -> None:
        if not 0 < self.coarse <= 1:
            raise ValueError(f"coarse must be a share in (0, 1], got {self.coarse}")

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        if seen.training is None:
            raise Withheld("coarse-to-fine needs 'training' in the observation")
        coarse = min(max(1, round(self.coarse * self.iterations)), self.iterations)
        fine = self.iterations - coarse
        labels = infer(seen, self.labels, rng)
        record = pictures(seen.record)
        weight = tv_weight(max(record.shape[1:])) if self.tv is None else self.tv
        priors = ((total_variation(record.std), constant(weight)),)
        share = shared(resources, coarse * self.restarts + fine)
        late, trust = support(self.support), Trust()
        first = match(
            seen,
            Phases(lambda done: cosine if done < LATE else late),  # Eq. 1
            replace(self, iterations=coarse),
            labels=labels,
            priors=priors,
            optimiser=Adam(self.lr, steps(), signed=True),
            trust=trust,
            rng=rng,
            resources=share(0),
        )
        rest = share(first.iterations)
        if fine == 0 or rest.seconds == 0:
            return first
        second = match(
            seen,
            reweighted,  # Eq. 2
            Search(fine, derivative=self.derivative),  # moves pixels
            labels=labels,
            priors=priors,
            optimiser=Adam(self.fine_lr, cosine_decay(1 / 3)),
            begin=first.inputs,
            trust=trust,
            rng=rng,
            resources=rest,
        )
        return joined(
            _named("coarse", first),
            _named("fine", second),
            coarse_iterations=len(first.history),
            coarse_objective=min(first.objectives),
            coarse_distance=first.residual,
        )


def _named(stage: str, guess: Reconstruction) -> Reconstruction:
    """The guess, with notes that name its stage."""
    return replace(guess, notes=tuple(f"{stage} stage: {note}" for note in guess.notes))


def tv_weight(scale: int) -> float:
    """λ_TV of Eq. 3 for images of this many pixels per side; beyond 518 it would be negative."""
    return max(0.0, -0.00008 * math.log(scale) + 0.0005)


def total_variation(std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """R_TV of normalised images, mean over the records."""

    def penalty(x: Tensor) -> Tensor:
        x = x / x.new_tensor(std).view(1, -1, 1, 1)
        across = x.diff(dim=-1, append=x[..., -1:])
        down = x.diff(dim=-2, append=x[..., -1:, :])
        return ((across.square() + down.square()) ** (BETA / 2)).sum() / len(x)

    return penalty


def support(weight: float) -> Distance:
    """Eq. 1. Off the support of g, the second term and its slope are zero."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        on = [g * (t != 0) for g, t in zip(guess, target, strict=True)]
        value_on, v_on = cosine(on, target)
        value, v = cosine(guess, target)
        torch._foreach_add_(v, v_on, alpha=weight)
        return value + weight * value_on, v

    return distance


def reweighted(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Eq. 2 with λ₂ = 1/number of gradient elements; to the slope of the cosine it adds
    λ₂·sign(g' − g)/(1 + |g|)."""
    weight = 1 / sum(t.numel() for t in target)
    gaps = torch._foreach_sub(guess, list(target))
    scaled = [weight / (1 + t.abs()) for t in target]
    magnitude = dot([g.abs() for g in gaps], scaled)
    value, v = cosine(guess, target)
    for d, gap, s in zip(v, gaps, scaled, strict=True):
        d.addcmul_(gap.sign_(), s)
    return value + magnitude, v
