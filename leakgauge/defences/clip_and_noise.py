"""Clip and add Gaussian noise calibrated to (ε, δ): the Gaussian mechanism on one client's update.

    u ← clip_C(u) + N(0, (σC)²)

`calibration="exact"` takes the smallest σ that is (ε, δ)-differentially private for sensitivity C,
from the exact condition of B. Balle and Y.-X. Wang ("Improving the Gaussian Mechanism for
Differential Privacy", ICML 2018, Theorem 8), valid for every ε:

    Φ(1/(2σ) − εσ) − e^ε · Φ(−1/(2σ) − εσ) ≤ δ

`calibration="papers"` takes σ = √(2 ln(1/δ)) / ε as the attack papers do (FedLeak §6); its proof
asks for ε < 1, so for larger ε we do not call it differential privacy.

`epsilon` sets the noise of one round. What all rounds spend is more: leakgauge/accounting.py counts
it, for the updates of one client against empty ones (add or remove).
`norm` is in units of the update: for one step of SGD, learning rate × gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from leakgauge.defences._answers import shrunk
from leakgauge.defences.clip import clipped, shortened
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, Range, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "balle2018",
    "Balle, Borja and Wang, Yu-Xiang",
    "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and "
    "Optimal Denoising",
    2018,
    "35th International Conference on Machine Learning",
    "https://proceedings.mlr.press/v80/balle18a.html",
    fields=(
        ("series", "Proceedings of Machine Learning Research"),
        ("volume", "80"),
        ("pages", "394--403"),
    ),
)


@dataclass(frozen=True)
class ClipAndNoise:
    """Limits the update and adds noise, the same in every round."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    unit: ClassVar[Literal["update"]] = "update"
    epsilon: float = option(100.0, POSITIVE)
    delta: float = option(1e-5, Range(0, 1, open=True))
    norm: float = option(1.0, POSITIVE)
    calibration: Literal["exact", "papers"] = "exact"

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("norm", self.norm)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")

    def announced(self) -> dict[str, object]:
        return {"norm": self.norm, "sigma": self.sigma()}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return noised(update, self.norm, self.sigma(), rng)

    def multiplier(self, round_: int) -> float:
        return self.sigma()

    def answered(self, seen: Observation) -> Answer:
        return unnoised(seen, self.norm, self.sigma())

    def sigma(self) -> float:
        """Noise multiplier: the standard deviation for a norm of 1."""
        if self.calibration == "papers":
            return math.sqrt(2 * math.log(1 / self.delta)) / self.epsilon
        return gaussian_sigma(self.epsilon, self.delta)


def noised(update: Named, norm: float, sigma: float, rng: torch.Generator) -> Named:
    """clip_C(u) + N(0, (σC)²)"""
    spread = sigma * norm
    return {
        name: value + spread * torch.randn(value.shape, generator=rng, dtype=value.dtype)
        for name, value in clipped(update, norm).items()
    }


def unnoised(seen: Observation, norm: float, sigma: float) -> Answer:
    """The answer to `noised`: take from each layer the noise that its singular values cannot hold,
    and clip what a candidate would have sent."""
    update = shrunk(seen.update, dict.fromkeys(seen.update, sigma * norm))
    return Answer(
        "takes away the noise as far as its known size allows, and clips its candidates' updates "
        "by the same rule",
        update,
        restored=True,
        through=lambda one: shortened(one, norm),
        again=lambda rng: noised(update, norm, sigma, rng),
    )


@cache
def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Smallest σ with which the Gaussian mechanism of sensitivity 1 is (ε, δ)-private."""

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        near, far = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        # e^ε·Φ(far) in logarithms: e^ε alone overflows for the ε that papers sweep.
        return float(ndtr(near) - math.exp(epsilon + log_ndtr(far)) - delta)

    return math.exp(brentq(excess, math.log(1e-9), math.log(1e9), xtol=1e-12))
