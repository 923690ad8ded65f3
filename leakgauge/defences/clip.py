"""Norm clipping: bound the length of what leaves the client.

    u ← u · min(1, C / ‖u‖)

flat (one norm for the whole update) or per layer (one for each tensor). Clipping alone keeps the
direction, which is what cosine-matching attacks use: it is the first half of differential privacy,
not a defence by itself.

`norm` is in units of the update: for one step of SGD, learning rate × gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from leakgauge.ranges import POSITIVE, option
from leakgauge.tensors import norm as length
from leakgauge.tensors import scale
from leakgauge.types import Answer, Here, Named, Observation


@dataclass(frozen=True)
class Clip:
    """Limits the length of the update."""

    norm: float = option(1.0, POSITIVE)
    scope: Literal["whole", "layer"] = "whole"

    def __post_init__(self) -> None:
        if not 0 < self.norm < math.inf:
            raise ValueError(f"norm must be positive and finite, got {self.norm}")

    def announced(self) -> dict[str, object]:
        return {"norm": self.norm, "scope": self.scope}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        if self.scope == "whole":
            return clipped(update, self.norm)
        return {name: clipped({name: u}, self.norm)[name] for name, u in update.items()}

    def answered(self, seen: Observation) -> Answer:
        """Clip what a candidate would have sent by the same rule. What reads the update itself
        needs its direction alone."""
        update = seen.update

        def through(one: Named) -> Named:
            if self.scope == "whole":
                return shortened(one, self.norm)
            return {name: shortened({name: u}, self.norm)[name] for name, u in one.items()}

        words = "clips its candidates' updates by the same rule"
        return Answer(words, update, restored=True, through=through)


def clipped(update: Named, norm: float) -> Named:
    """The update, shortened to `norm` if it is longer."""
    return scale(update, min(1.0, norm / max(length(update), 1e-30)))


def shortened(update: Named, norm: float) -> Named:
    """The same as a function that can be differentiated."""
    size = torch.stack([u.square().sum() for u in update.values()]).sum().sqrt().clamp_min(1e-30)
    factor = (norm / size).clamp_max(1.0)
    return {name: u * factor for name, u in update.items()}
