"""Magnitude pruning: send only the largest entries (Y. Lin et al., "Deep Gradient Compression",
ICLR 2018; as a defence in L. Zhu et al., DLG, 2019, §5).

The smallest `share` of the entries by magnitude becomes zero, in each tensor or over the whole
update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge.defences._answers import unsent
from leakgauge.papers import Paper
from leakgauge.ranges import SHARE, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "lin2018",
    "Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.",
    "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
    2018,
    "International Conference on Learning Representations",
    "https://openreview.net/forum?id=SkhQHMW0W",
)


@dataclass(frozen=True)
class Prune:
    """Sends only the largest entries of the update."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    share: float = option(0.9, SHARE)
    scope: Literal["layer", "whole"] = "layer"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share must lie in [0, 1), got {self.share}")

    def announced(self) -> dict[str, object]:
        return {"share": self.share, "scope": self.scope}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        if self.scope == "layer":
            return {n: v * largest(v.flatten(), self.share).view_as(v) for n, v in update.items()}
        keep = largest(torch.cat([v.flatten() for v in update.values()]), self.share)
        parts = torch.split(keep, [v.numel() for v in update.values()])
        return {n: v * k.view_as(v) for (n, v), k in zip(update.items(), parts, strict=True)}

    def answered(self, seen: Observation) -> Answer:
        """Match what was sent; hold the rest to be smaller; complete matrices of known rank."""
        return unsent(seen)


def largest(values: Tensor, share: float) -> Tensor:
    """Mask of all but the smallest `share` of the entries by magnitude; exact under ties. At
    least one entry stays, so that a small tensor is never lost whole."""
    drop = min(round(share * len(values)), len(values) - 1)
    dropped = values.abs().argsort(stable=True)[:drop]
    return torch.ones_like(values, dtype=torch.bool).index_fill_(0, dropped, False)
