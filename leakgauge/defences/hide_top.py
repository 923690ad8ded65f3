"""Hide the largest entries: the server reads the small ones alone (M. Fan, F. Wang, C. Chen,
J. Zhou, "Boosting Gradient Leakage Attacks: Data Reconstruction in Realistic FL Settings"
(FedLeak), USENIX Security 2025, §7,
https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting).

The `share` of the entries of each tensor that is largest by magnitude becomes zero: the opposite of
pruning. FedLeak rebuilds images from the largest fifth about as well as from all entries, and
hardly from the smallest fifth.

Differs from the paper: there the largest entries are encrypted and still reach the sum of all
clients; here they are not sent at all, so that training loses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.papers import FAN2025, Paper
from leakgauge.ranges import SHARE, option
from leakgauge.types import Answer, Here, Named, Observation


@dataclass(frozen=True)
class HideTop:
    """Sends only the smallest entries of the update."""

    papers: ClassVar[tuple[Paper, ...]] = (FAN2025,)
    share: float = option(0.8, SHARE)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}")

    def announced(self) -> dict[str, object]:
        return {"hidden": self.share}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return {name: value * self._small(value.flatten()).view_as(value)
                for name, value in update.items()}  # fmt: skip

    def answered(self, seen: Observation) -> Answer:
        """Match what was sent, and hold the rest to be larger."""
        sent = {name: value != 0 for name, value in seen.update.items()}
        large = {name: value.abs().max() for name, value in seen.update.items()}

        def through(one: Named) -> Named:
            return {
                name: torch.where(
                    sent[name].to(u.device),
                    u,
                    u.sign() * (u.abs() - large[name].to(u)).clamp_max(0),
                )
                for name, u in one.items()
            }

        words = "matches only what was sent, and holds the rest to be larger"
        return Answer(words, seen.update, through=through)

    def _small(self, values: Tensor) -> Tensor:
        """Mask of the entries that are sent; exact under ties. At least one entry is hidden."""
        # A share such as 0.8 is no exact number: what it asks for must not be rounded up by that.
        hidden = max(1, math.ceil(self.share * len(values) - 1e-9))
        largest = values.abs().argsort(stable=True, descending=True)[:hidden]
        return torch.ones_like(values, dtype=torch.bool).index_fill_(0, largest, False)
