"""Quantisation: k bits for each entry (D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic,
"QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017,
https://arxiv.org/abs/1610.02132, §3).

Each tensor is rounded to 2^k levels at equal distances over its own range:

    s = (max u − min u) / (2^k − 1),   u ← min u + s · round((u − min u) / s)

Stochastic rounding goes up with a probability equal to the fraction, so that the mean of what is
sent is u; rounding to the nearest level errs less and is biased.

Differs from the paper: the levels lie between the smallest and the largest entry, not between minus
and plus the norm, so that k bits mean 2^k levels; nothing is encoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge.defences._answers import beyond, shrunk
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "alistarh2017",
    "Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan",
    "{QSGD}: Communication-Efficient {SGD} via Gradient Quantization and Encoding",
    2017,
    "Advances in Neural Information Processing Systems",
    "https://proceedings.neurips.cc/paper/2017/hash/6c340f25839e6acdc73414517203f5f0-Abstract.html",
    fields=(("volume", "30"),),
)


@dataclass(frozen=True)
class Quantise:
    """Rounds every entry to one of 2^bits levels."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    bits: int = option(8, count(32))
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 32:
            raise ValueError(f"bits must lie between 1 and 32, got {self.bits}")

    def announced(self) -> dict[str, object]:
        return {"bits": self.bits, "rounding": self.rounding}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return {name: self._rounded(value, rng) for name, value in update.items()}

    def _rounded(self, value: Tensor, rng: torch.Generator) -> Tensor:
        exact = value.double()  # 2^32 levels are more than a float32 can count
        low, high = exact.min(), exact.max()
        size = (high - low) / (2**self.bits - 1)
        if size == 0:  # one level is enough
            return value.clone()
        place = (exact - low) / size
        if self.rounding == "stochastic":
            place = (place + torch.rand(place.shape, generator=rng, dtype=place.dtype)).floor()
        level = place.round().clamp(0, 2**self.bits - 1)
        return torch.add(low, size * level).to(value.dtype)

    def answered(self, seen: Observation) -> Answer:
        """Take rounding for noise of a known size, and candidates for right that would have been
        rounded to what was sent."""
        sent = seen.update
        steps = {name: float(u.max() - u.min()) / (2**self.bits - 1) for name, u in sent.items()}
        variance = 1 / 12 if self.rounding == "nearest" else 1 / 6  # of a fraction, evenly spread
        cleared = shrunk(sent, {name: s * math.sqrt(variance) for name, s in steps.items()})
        cleared = {n: u - beyond(u, sent[n], steps[n] * self._reach) for n, u in cleared.items()}
        if self.rounding == "stochastic":
            words = (
                "takes the rounding for noise of known size, and takes that away as far as it can"
            )
            return Answer(
                words,
                cleared,
                restored=True,
                again=lambda rng: self.on_update(cleared, Here(seen.setting), rng),
            )

        def through(one: Named) -> Named:
            return {name: sent[name].to(u) + beyond(u, sent[name].to(u), steps[name] * self._reach)
                    for name, u in one.items()}  # fmt: skip

        words = "takes every candidate for right that would have been rounded to what was sent"
        return Answer(words, cleared, restored=True, through=through)

    @property
    def _reach(self) -> float:
        """How far rounding moves a value at most, in steps."""
        return 0.5 if self.rounding == "nearest" else 1.0
