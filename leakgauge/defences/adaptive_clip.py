"""DP-SGD whose clipping norm follows a quantile of the records' gradients (G. Andrew, O. Thakkar,
H. B. McMahan, S. Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021,
https://arxiv.org/abs/1905.03871, Algorithm 1).

Every local step is one of DP-SGD (dp_sgd.py) with the norm C that the client has by now, and then

    b = ( #{n: ‖g_n‖ ≤ C} + N(0, s²) ) / B,    C ← C · exp(−η·(b − γ))

so that the share γ of the records' gradients is no longer than C in the end. C is the client's own:
it remembers it over steps and rounds.

The count tells of the records too: with the noise s it is a Gaussian mechanism beside that of the
gradient. Together they are as one with the noise multiplier (Theorem 1)

    z = ( σ⁻² + (2s)⁻² )^(−1/2)

which is what the accountant counts.

Differs from the paper: it clips the updates of many clients to a norm that the server keeps; one
client has no quantile of a single update, so here it is of the records within each step, as in
Opacus. σ is the noise of the gradient itself; the paper names z and derives σ. C stays within a
factor of 1000 of where it began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from leakgauge.defences._local import local_step
from leakgauge.defences._records import clipped_sum, lengths, per_record, refuse_mixing
from leakgauge.defences.dp_sgd import PAPER as ABADI2016
from leakgauge.defences.dp_sgd import noisy_mean, unrecorded
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, Range, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "andrew2021",
    "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
    "Differentially Private Learning with Adaptive Clipping",
    2021,
    "Advances in Neural Information Processing Systems",
    "https://proceedings.neurips.cc/paper/2021/hash/91cff01af640a24e7f9f7a5ab407889f-Abstract.html",
    fields=(("volume", "34"),),
)
NORM = "norm"  # what a client remembers
REACH = 1000.0


@dataclass(frozen=True)
class AdaptiveClip:
    """Clips each record at a norm that follows them, and adds noise."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER, ABADI2016)
    unit: ClassVar[Literal["record"]] = "record"
    sigma: float = option(1.0, FROM_0)
    norm: float = option(1.0, POSITIVE)
    quantile: float = option(0.5, Range(0, 1))
    rate: float = option(0.2, POSITIVE)
    count_noise: float = option(5.0, FROM_0)
    delta: float = option(1e-5, Range(0, 1, open=True))

    def __post_init__(self) -> None:
        for name in ("sigma", "count_noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name in ("norm", "rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must lie in [0, 1], got {self.quantile}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")

    def announced(self) -> dict[str, object]:
        return {
            "norm": self.norm,
            "sigma": self.sigma,
            "clips": "each record",
            "quantile": self.quantile,
            "rate": self.rate,
        }

    def multiplier(self, round_: int) -> float:
        """z: the noise of gradient and count together."""
        if not self.sigma or not self.count_noise:
            return 0.0
        return 1 / math.hypot(1 / self.sigma, 1 / (2 * self.count_noise))

    def check(self, model: nn.Module) -> None:
        refuse_mixing(model, "adaptive-clip")

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        local = local_step(here, "adaptive-clip")
        norm = float(here.memory.get(NORM, torch.tensor(self.norm, dtype=torch.float64)))
        total = {name: torch.zeros_like(g) for name, g in gradient.items()}
        short = 0.0
        for part in per_record(local, list(gradient), here.step, "adaptive-clip"):
            short += float((lengths(part) <= norm).sum())
            for name, value in clipped_sum(part, norm).items():
                total[name] += value
        records = len(local.batch)
        sent = noisy_mean(total, records, self.sigma * norm, rng)
        told = short + self.count_noise * float(torch.randn((), generator=rng))
        moved = norm * math.exp(-self.rate * (told / records - self.quantile))
        kept = min(max(moved, self.norm / REACH), self.norm * REACH)
        here.memory[NORM] = torch.tensor(kept, dtype=torch.float64)
        return sent

    def answered(self, seen: Observation) -> Answer:
        """As for DP-SGD, with the norm that it starts from: where it is by now, the client alone
        knows."""
        return unrecorded(seen, self.norm, self.sigma)
