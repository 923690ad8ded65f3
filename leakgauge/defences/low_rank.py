"""Low rank: send a product of two thin matrices (T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
https://arxiv.org/abs/1905.13727, Algorithm 1 and 2).

Each tensor of two dimensions or more, as a matrix M (first dimension × the others) of the update
and of what was held back, takes one step of the power method from the Q of the round before:

    P = M·Q,   P ← orthonormal columns of P,   Q ← Mᵀ·P,   send P·Qᵀ,   e ← M − P·Qᵀ

Vectors are sent as they are.

Differs from the paper: each client has a Q of its own, for there is no sum of the P of all clients
between the two products; and the update of a round is compressed, not every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defences._feedback import hold_back, recalled, with_owed
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "vogels2019",
    "Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin",
    "{PowerSGD}: Practical Low-Rank Gradient Compression for Distributed Optimization",
    2019,
    "Advances in Neural Information Processing Systems",
    "https://proceedings.neurips.cc/paper/2019/hash/d9fbed9da256e344c1fa46bb46c34c5f-Abstract.html",
    fields=(("volume", "32"),),
)
START = "start/"


@dataclass(frozen=True)
class LowRank:
    """Sends matrices of low rank, the rest in later rounds."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    rank: int = option(2, count(100_000))

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")

    def announced(self) -> dict[str, object]:
        return {"rank": self.rank, "feedback": True}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        whole = with_owed(update, here)
        sent = {
            name: self._thin(name, value, here, rng) if value.dim() > 1 else value.clone()
            for name, value in whole.items()
        }
        hold_back(whole, sent, here)
        return sent

    def _thin(self, name: str, value: Tensor, here: Here, rng: torch.Generator) -> Tensor:
        matrix = value.flatten(1)
        rank = min(self.rank, *matrix.shape)
        fresh = torch.randn(matrix.shape[1], rank, generator=rng, dtype=value.dtype)
        start = recalled(here, START + name, fresh)
        left = torch.linalg.qr(matrix @ (fresh if start is None else start)).Q  # (rows, rank)
        right = matrix.T @ left
        here.memory[START + name] = right
        return torch.mm(left, right.T).view_as(value)

    def answered(self, seen: Observation) -> Answer:
        """P·Qᵀ = P·Pᵀ·M: project candidates on the same P, which what was sent tells."""
        bases = {}
        for name, value in seen.update.items():
            if value.dim() > 1:
                u, s, _ = torch.linalg.svd(value.flatten(1), full_matrices=False)
                bases[name] = u[:, : self.rank] * (s[: self.rank] > 1e-6 * s[0])

        def through(one: Named) -> Named:
            return {
                name: torch.mm(bases[name].to(u), bases[name].to(u).T @ u.flatten(1)).view_as(u)
                if name in bases
                else u
                for name, u in one.items()
            }

        words = "projects its candidates' updates on the directions that were sent"
        return Answer(words, seen.update, through=through)
