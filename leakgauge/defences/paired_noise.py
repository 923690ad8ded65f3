"""Noise that another client takes away again: in proportion to the update's entries, and gone from
the mean (M. Fan, F. Wang, C. Chen, J. Zhou, "Boosting Gradient Leakage Attacks: Data Reconstruction
in Realistic FL Settings" (FedLeak), USENIX Security 2025, §7,
https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting).

Client k draws M_k = scale · |u_k| · N(0, 1), entry by entry, adds it to its update and tells it to
the next client of the round, which takes it away from its own:

    send u_k + M_k − (w_{k−1} / w_k) · M_{k−1}

with the aggregation weights w, so that the weighted mean of the round is what it was without noise;
with equal weights so is the sum. The last client draws none.

Differs from the paper, which describes the idea in a few sentences and does not test it: who tells
whom and the weights are ours. A client that is alone in its round adds noise that nobody takes
away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.papers import FAN2025, Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.types import Answer, Here, Named, Observation


@dataclass(frozen=True)
class PairedNoise:
    """Adds noise that the next client takes away."""

    papers: ClassVar[tuple[Paper, ...]] = (FAN2025,)
    scale: float = option(1.0, POSITIVE)

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")

    def announced(self) -> dict[str, object]:
        return {"scale": self.scale, "cancels": "in the weighted mean of the round"}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        among = here.among
        last = among.client == among.clients - 1 and among.clients > 1
        sent = {}
        for name, value in update.items():
            letter = f"{among.client}/{name}"
            noisy = value.clone()
            if not last:
                drawn = torch.randn(value.shape, generator=rng, dtype=value.dtype)
                noise = self.scale * value.abs() * drawn
                noisy += noise
                among.letters[letter] = among.weight * noise
            if among.client:
                noisy -= among.letters[f"{among.client - 1}/{name}"] / among.weight
            sent[name] = noisy
        return sent

    def answered(self, seen: Observation) -> Answer:
        """Weigh every entry by the size of its noise, which is about its own. In a sum of all
        clients there is no noise."""
        sizes = {}
        for name, value in seen.update.items():
            floor = value.square().mean().sqrt().clamp_min(1e-30)
            sizes[name] = (value.square() + floor.square()).sqrt() / floor

        def through(one: Named) -> Named:
            return {name: u / sizes[name].to(u) for name, u in one.items()}

        words = "weighs every entry by the size that its noise has"
        return Answer(
            words,
            seen.update,
            through=through,
            again=lambda rng: self.on_update(seen.update, Here(seen.setting), rng),
        )
