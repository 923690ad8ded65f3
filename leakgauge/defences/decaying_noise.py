"""Clip the update and add Gaussian noise that grows smaller from round to round, after adaptive
differential privacy (J. Fu, Z. Chen, X. Han, "Adap DP-FL: Differentially Private Federated Learning
with Adaptive Noise", TrustCom 2022, https://arxiv.org/abs/2211.15893).

    u ← clip_C(u) + N(0, (σ_r C)²),    σ_r = max(σ · decay^r, floor)    in round r = 0, 1, …

Early updates are large and can bear noise that later ones cannot. Rounds with less noise spend more
privacy: leakgauge/accounting.py adds up rounds of different noise.

Differs from the paper: it lowers the noise as it sees the model converge, and fits the clipping to
each client and round. Here the schedule is fixed before the first round and the norm stays, so that
neither tells anything of the records. `norm` is in units of the update: for one step of SGD,
learning rate × gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakgauge.defences.clip_and_noise import noised, unnoised
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, SHARE, Range, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "fu2022",
    "Fu, Jie and Chen, Zhili and Han, Xiao",
    "Adap {DP-FL}: Differentially Private Federated Learning with Adaptive Noise",
    2022,
    "IEEE International Conference on Trust, Security and Privacy in Computing and Communications",
    "https://arxiv.org/abs/2211.15893",
    fields=(("pages", "656--663"),),
)


@dataclass(frozen=True)
class DecayingNoise:
    """Limits the update and adds noise that shrinks over the rounds."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    unit: ClassVar[Literal["update"]] = "update"
    sigma: float = option(1.0, POSITIVE)
    decay: float = option(0.99, SHARE)
    floor: float = option(0.1, FROM_0)
    norm: float = option(1.0, POSITIVE)
    delta: float = option(1e-5, Range(0, 1, open=True))

    def __post_init__(self) -> None:
        for name in ("sigma", "norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")
        if not 0 <= self.floor <= self.sigma:
            raise ValueError(f"floor must lie between 0 and sigma = {self.sigma}, got {self.floor}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")

    def announced(self) -> dict[str, object]:
        return {"norm": self.norm, "sigma": self.sigma, "decay": self.decay, "floor": self.floor}

    def multiplier(self, round_: int) -> float:
        """σ_r"""
        return max(self.sigma * self.decay**round_, self.floor)

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return noised(update, self.norm, self.multiplier(here.round), rng)

    def answered(self, seen: Observation) -> Answer:
        """As for constant noise, with that of the round: a later round is an easier one."""
        return unnoised(seen, self.norm, self.multiplier(seen.round))
