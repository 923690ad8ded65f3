"""Top-k with memory: send the largest entries now, the others later (S. U. Stich,
J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
https://arxiv.org/abs/1809.07599, Algorithm 1).

    p = u + e,   send top_k(p),   e ← p − top_k(p)

where top_k keeps the k entries of largest magnitude of each tensor, k = `keep` of them and at least
one; e starts at zero and belongs to the client.

Differs from the paper: k is a share of each tensor, not a number for the whole vector, and it works
on the update of a round, which is one step of SGD or several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.defences._answers import unsent
from leakgauge.defences._feedback import hold_back, with_owed
from leakgauge.defences.prune import largest
from leakgauge.papers import Paper
from leakgauge.ranges import SHARE, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "stich2018",
    "Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin",
    "Sparsified {SGD} with Memory",
    2018,
    "Advances in Neural Information Processing Systems",
    "https://proceedings.neurips.cc/paper/2018/hash/b440509a0106086a67bc2ea9df0a1dab-Abstract.html",
    fields=(("volume", "31"),),
)


@dataclass(frozen=True)
class TopK:
    """Sends the largest entries now, the others in later rounds."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    keep: float = option(0.01, SHARE)

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must lie in (0, 1], got {self.keep}")

    def announced(self) -> dict[str, object]:
        return {"keep": self.keep, "feedback": True}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        whole = with_owed(update, here)
        sent = {n: v * largest(v.flatten(), 1 - self.keep).view_as(v) for n, v in whole.items()}
        hold_back(whole, sent, here)
        return sent

    def answered(self, seen: Observation) -> Answer:
        """As with pruning. What is owed from earlier rounds stays in: nobody tells it."""
        return unsent(seen)
