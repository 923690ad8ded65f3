"""Total-variation denoising — L. I. Rudin, S. Osher, E. Fatemi: "Nonlinear total variation based
noise removal algorithms", Physica D 60, 1992, by the algorithm of A. Chambolle: "An Algorithm for
Total Variation Minimization and Applications", Journal of Mathematical Imaging and Vision 20, 2004.

    x = argmin ½‖x − g‖² + weight · Σ |∇x|

for the guess g, channel by channel: x = g − weight · div p with |p| ≤ 1, where p comes from
iterating p ← (p + τ∇u) / (1 + τ|∇u|), u = div p − g/weight. It flattens noise and keeps edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, count, option
from leakgauge.records import Record, pictures

RUDIN = Paper(
    "rudin1992",
    "Rudin, Leonid I. and Osher, Stanley and Fatemi, Emad",
    "Nonlinear total variation based noise removal algorithms",
    1992,
    "Physica D: Nonlinear Phenomena",
    "https://doi.org/10.1016/0167-2789(92)90242-F",
    kind="article",
    fields=(("volume", "60"), ("pages", "259--268")),
)
CHAMBOLLE = Paper(
    "chambolle2004",
    "Chambolle, Antonin",
    "An Algorithm for Total Variation Minimization and Applications",
    2004,
    "Journal of Mathematical Imaging and Vision",
    "https://doi.org/10.1023/B:JMIV.0000011325.36760.1e",
    kind="article",
    fields=(("volume", "20"), ("pages", "89--97")),
)
STEP = 0.248  # τ: the iteration converges up to 1/4


@dataclass(frozen=True)
class TotalVariation:
    """Flattens noise and keeps edges (Rudin 1992)."""

    weight: float = option(0.05, FROM_0)
    iterations: int = option(100, count(100_000))
    papers: ClassVar[tuple[Paper, ...]] = (RUDIN, CHAMBOLLE)

    def restore(
        self,
        guess: Tensor,
        record: Record,
        rng: torch.Generator,
        labels: Tensor | None = None,
    ) -> Tensor:
        pictures(record)
        if not self.weight:
            return guess
        aim = guess / self.weight
        down, across = torch.zeros_like(guess), torch.zeros_like(guess)
        for _ in range(self.iterations):
            u = _divergence(down, across) - aim
            below, beside = _slope(u, -2), _slope(u, -1)
            size = 1 + STEP * (below.square() + beside.square()).sqrt()
            down, across = (down + STEP * below) / size, (across + STEP * beside) / size
        return (guess - self.weight * _divergence(down, across)).clamp(0, 1)


def _slope(u: Tensor, dim: int) -> Tensor:
    """Forward difference, zero at the border."""
    return torch.cat([u.diff(dim=dim), torch.zeros_like(u.narrow(dim, 0, 1))], dim)


def _divergence(down: Tensor, across: Tensor) -> Tensor:
    """Minus the adjoint of the slopes."""

    def back(p: Tensor, dim: int) -> Tensor:
        inner = p.narrow(dim, 0, p.shape[dim] - 1)
        zero = torch.zeros_like(p.narrow(dim, 0, 1))
        return inner.diff(dim=dim, prepend=zero, append=zero)

    return back(down, -2) + back(across, -1)
