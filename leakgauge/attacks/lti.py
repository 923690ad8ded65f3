"""LTI — R. Wu, X. Chen, C. Guo, K. Q. Weinberger: "Learning to Invert: Simple Adaptive Attacks for
Gradient Inversion in Federated Learning", UAI 2023, https://arxiv.org/abs/2210.10880

    min_θ  Σ ‖f_θ(g) − x‖²   over pairs of public records x and their updates g

f is a perceptron on the flattened update. It needs neither weights nor labels, and learns a defence
with the rest: the pairs have passed it.

Needs: the number of records, public records, and a client that tells what update they cause
(`Target.query`). Differs from the paper: what is read is brought to mean zero and deviation one,
entry by entry; tensors of more than `entries` numbers pass a sparse random projection each (the
paper hashes the whole gradient); 400 units in each of two hidden layers by default instead of
3,000, and 1,500 steps (20 passes over 10,000 pairs) instead of 200 passes: both are options.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.attacks._learned import Course, Network, Weights, learn, recall
from leakgauge.attacks._pairs import sketched
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Knowledge,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Setting,
    Target,
)

PAPER = Paper(
    "wu2023",
    "Wu, Ruihan and Chen, Xiangyu and Guo, Chuan and Weinberger, Kilian Q.",
    "Learning to Invert: Simple Adaptive Attacks for Gradient Inversion in Federated Learning",
    2023,
    "Conference on Uncertainty in Artificial Intelligence",
    "https://arxiv.org/abs/2210.10880",
    fields=(("pages", "2293--2303"),),
)


@dataclass(frozen=True)
class LTI:
    """Learns images from public pairs (Wu 2023)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    pairs: int = option(10_000, count(100_000_000))
    hidden: int = option(400, count(100_000))
    layers: int = option(2, count(20))  # hidden ones; the paper's code has 2, GIT's authors say 3
    entries: int = option(8192, count(100_000_000))  # of one tensor, at most
    steps: int = option(1500, count(100_000_000))
    batch: int = option(128, count(1_000_000))
    lr: float = 1e-3
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records", "public"})
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        course = Course(self.pairs, self.steps, self.batch, self.lr)
        network = self.network(target.setting, target.records)
        return Preparation(learn(network, course, target, rng, resources))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return recall(self.network(seen.setting, seen.records or 1), seen)

    def network(self, setting: Setting, records: int) -> Network:
        """The perceptron for the updates of this model."""

        def read(update: Named) -> Tensor:
            return torch.cat([sketched(n, u.flatten(), self.entries) for n, u in update.items()])

        trained = [p for p in setting.model.parameters() if p.requires_grad]
        entries = sum(min(p.numel(), self.entries) for p in trained)
        channels, height, width = pictures(setting.record).shape
        widths = [entries, *[self.hidden] * self.layers, records * channels * height * width]
        shapes: dict[str, tuple[int, ...]] = {}
        for k, (inputs, outputs) in enumerate(pairwise(widths)):
            shapes |= {f"{k}.weight": (outputs, inputs), f"{k}.bias": (outputs,)}
        return Network(read, shapes, self._forward, f"{self.layers}.bias")

    def _forward(self, weights: Weights, rows: Tensor) -> Tensor:
        for k in range(self.layers):
            rows = F.linear(rows, weights[f"{k}.weight"], weights[f"{k}.bias"]).relu()
        last = weights[f"{self.layers}.weight"], weights[f"{self.layers}.bias"]
        return F.linear(rows, *last).sigmoid()
