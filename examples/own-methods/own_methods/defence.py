"""Uniform rounding of an update: an example, from no paper.

u ← s · round(u / s),   s = max|u| / levels, for each tensor
"""

from dataclasses import dataclass

import torch

from leakgauge.ranges import count, option
from leakgauge.types import Here, Named


@dataclass(frozen=True)
class RoundOff:
    """Rounds every entry of the update to a grid."""

    levels: int = option(4, count(1000))

    def announced(self) -> dict[str, object]:
        return {"levels": self.levels}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        rounded = {}
        for name, value in update.items():
            step = value.abs().max().clamp_min(1e-30) / self.levels
            rounded[name] = (value / step).round() * step
        return rounded
