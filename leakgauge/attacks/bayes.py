"""BayesAttack — M. Balunović, D. I. Dimitrov, R. Staab, M. Vechev: "Bayesian Framework for Gradient
Leakage", ICLR 2022, https://arxiv.org/abs/2111.04706

    max_x  log p(g | x) + log p(x),   −log p(x) = α·TV(x),   x in [0, 1]

The best attacker knows what the defence does to a gradient and asks how likely the observed one is
for a candidate. Of a client that adds noise of standard deviation σ to each element,

    −log p(g | x) = ‖g'(x) − g‖² / (2σ²)    Gaussian noise
                  = √2·‖g'(x) − g‖₁ / σ     Laplace noise

up to a constant. Without noise p is taken as one of directions, 1 − cos(g', g), which makes it IG.
Of a client that prunes (`pruned`), elements that are zero in the update are unknown: they are left
out, of g' too.

α is in nats where there is noise: `tv=None` takes one for every unit of difference between
neighbouring pixels; without noise it is IG's 1e-4.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Knowing the defence is what an attacker is assumed to (Kerckhoffs); σ is an option of the attack.
Differs from the paper: TV is the prior of images, where the paper also tries others and a generator
trained on the data; the expectation over a ball around x is taken at its centre.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import Adam, LabelledSearch, constant, match, steps
from leakgauge.attacks._objectives import Distance, absolute, cosine, squared, weighted
from leakgauge.attacks._priors import total_variation
from leakgauge.fl.local import minibatches
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.types import Observation, Reconstruction, Resources

Noise: TypeAlias = Literal["gaussian", "laplace", "none"]


PAPER = Paper(
    "balunovic2022",
    "Balunović, Mislav and Dimitrov, Dimitar I. and Staab, Robin and Vechev, Martin",
    "{Bayesian} Framework for Gradient Leakage",
    2022,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2111.04706",
)


@dataclass(frozen=True)
class BayesAttack(LabelledSearch):
    """Matches gradients behind known noise (Balunović 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    noise: Noise = "none"
    sigma: float = option(0.01, POSITIVE)
    pruned: bool = False
    tv: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be positive and finite, got {self.sigma}")

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        training, records = told(seen, "the likelihood")
        # σ is that of the update; gradients are matched in units of lr·steps.
        unit = training.lr * len(minibatches(records, training))
        distance = surprise(self.noise, self.sigma / unit)
        tv = self.tv
        if tv is None:
            tv = 1e-4 if self.noise == "none" else float(records * math.prod(seen.record.shape))
        return match(
            seen,
            where_sent(distance) if self.pruned else distance,
            self,
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(tv)),),
            optimiser=Adam(self.lr, steps(), signed=True),
            rng=rng,
            resources=resources,
        )


def surprise(noise: Noise, sigma: float) -> Distance:
    """−log p(g | g') up to a constant, for noise of standard deviation `sigma` in the gradient."""
    chosen: dict[Noise, Distance] = {
        "gaussian": weighted((0.5 / sigma**2, squared)),
        "laplace": weighted((math.sqrt(2) / sigma, absolute)),
        "none": cosine,
    }
    return chosen[noise]


def where_sent(distance: Distance) -> Distance:
    """The distance over the elements that are not zero in the observed gradient."""

    def masked(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return distance([g.mul_(t != 0) for g, t in zip(guess, target, strict=True)], target)

    return masked
