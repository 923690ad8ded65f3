"""DP-SGD: every local step clips the gradient of each record and adds Gaussian noise (M. Abadi,
A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang, "Deep Learning with
Differential Privacy", CCS 2016, https://arxiv.org/abs/1607.00133, Algorithm 1).

    g ← ( Σ_n g_n · min(1, C / ‖g_n‖)  +  N(0, (σC)²) ) / B

for the gradients g_n of the B records of the step: one record moves the sum by C at most. On the
mean that is sent, the noise has the standard deviation σC/B.

What it gives is for one record; leakgauge/accounting.py counts what the rounds spend. `norm` is in
units of the gradient, not of the update: the learning rate comes after it.

Differs from the paper: batches are those of the federation, of one size and drawn without
replacement, where the paper draws each record by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from leakgauge.defences._answers import shrunk
from leakgauge.defences._local import local_step
from leakgauge.defences._records import clipped_sum, per_record, refuse_mixing
from leakgauge.defences.clip import shortened
from leakgauge.fl.local import minibatches
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, Range, option
from leakgauge.tensors import norm as length
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "abadi2016",
    "Abadi, Martín and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and "
    "Talwar, Kunal and Zhang, Li",
    "Deep Learning with Differential Privacy",
    2016,
    "ACM SIGSAC Conference on Computer and Communications Security",
    "https://doi.org/10.1145/2976749.2978318",
    fields=(("pages", "308--318"),),
)


@dataclass(frozen=True)
class DpSgd:
    """Clips each record's gradient and adds noise in every step."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    unit: ClassVar[Literal["record"]] = "record"
    sigma: float = option(1.0, FROM_0)
    norm: float = option(1.0, POSITIVE)
    delta: float = option(1e-5, Range(0, 1, open=True))

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be at least 0 and finite, got {self.sigma}")
        if not 0 < self.norm < math.inf:
            raise ValueError(f"norm must be positive and finite, got {self.norm}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")

    def announced(self) -> dict[str, object]:
        return {"norm": self.norm, "sigma": self.sigma, "clips": "each record"}

    def multiplier(self, round_: int) -> float:
        """The noise of a step, for a record that moves it by 1 at most."""
        return self.sigma

    def check(self, model: nn.Module) -> None:
        refuse_mixing(model, "dp-sgd")

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        local = local_step(here, "dp-sgd")
        total = {name: torch.zeros_like(g) for name, g in gradient.items()}
        for part in per_record(local, list(gradient), here.step, "dp-sgd"):
            for name, value in clipped_sum(part, self.norm).items():
                total[name] += value
        return noisy_mean(total, len(local.batch), self.sigma * self.norm, rng)

    def answered(self, seen: Observation) -> Answer:
        return unrecorded(seen, self.norm, self.sigma)


def unrecorded(seen: Observation, norm: float, sigma: float) -> Answer:
    """The answer to steps of DP-SGD: take away the noise of all of them, whose size is known; clip
    what a single record would have sent, and of several, which are cut by factors that nobody
    knows, compare the direction alone."""
    training, records = seen.training, seen.records
    assert training is not None  # who is not told of it does not know the defence
    steps = minibatches(records or training.batch_size, training)
    spread = training.lr * sigma * norm * math.sqrt(sum(1 / len(step) ** 2 for step in steps))
    update = shrunk(seen.update, dict.fromkeys(seen.update, spread))
    longest = training.lr * norm * len(steps)
    if max(map(len, steps)) > 1:
        longest = min(longest, length(update))

    def again(rng: torch.Generator) -> Named:
        return {n: u + spread * torch.randn(u.shape, generator=rng) for n, u in update.items()}

    return Answer(
        "takes away the noise as far as its known size allows, and clips its candidates' updates",
        update,
        restored=True,
        through=lambda one: shortened(one, longest),
        again=again,
    )


def noisy_mean(total: Named, records: int, spread: float, rng: torch.Generator) -> Named:
    """The sum of so many records with noise of this standard deviation, by their number."""
    return {
        name: (g + spread * torch.randn(g.shape, generator=rng, dtype=g.dtype)) / records
        for name, g in total.items()
    }
