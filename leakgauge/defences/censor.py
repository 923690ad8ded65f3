"""CENSOR: a step at right angles to the gradient (K. Zhang, S. Cheng, G. Shen, B. Ribeiro, S. An,
P.-Y. Chen, X. Zhang, N. Li, "CENSOR: Defense Against Gradient Inversion via Orthogonal Subspace
Bayesian Sampling", NDSS 2025, https://arxiv.org/abs/2501.15718).

In every local step, for each of `trials` draws and each tensor

    z ~ N(0, I),   z ← z − (⟨z, g⟩ / ‖g‖²) · g,   z ← z · ‖g‖ / ‖z‖

and of the draws the one is taken that has the lowest loss of the batch after a step of it. The
gradient itself is never sent: where no direction is at right angles to it, in a tensor of one
entry, zero is sent.

Differs from the paper: the trial step is one of SGD with the client's learning rate, and every step
of every round is defended, not the first epochs alone. Public code divides the projection by ‖g‖
once, which leaves no right angle, and sends the gradient itself where no draw lowers the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defences._local import copied, local_step, loss_at
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "zhang2025",
    "Zhang, Kaiyuan and Cheng, Siyuan and Shen, Guangyu and Ribeiro, Bruno and An, Shengwei and "
    "Chen, Pin-Yu and Zhang, Xiangyu and Li, Ninghui",
    "{CENSOR}: Defense Against Gradient Inversion via Orthogonal Subspace {Bayesian} Sampling",
    2025,
    "Network and Distributed System Security Symposium",
    "https://doi.org/10.14722/ndss.2025.230915",
)


@dataclass(frozen=True)
class Censor:
    """Steps at right angles to the gradient, the best of several."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    trials: int = option(20, count(100_000))

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")

    def announced(self) -> dict[str, object]:
        return {"trials": self.trials, "angle": "90 degrees to the gradient of each tensor"}

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        local = local_step(here, "censor")
        chosen: Named | None = None
        least = torch.inf
        for _ in range(self.trials):
            tried = {name: orthogonal(g, rng) for name, g in gradient.items()}
            values = copied(local)
            for name, z in tried.items():
                values[name] -= local.training.lr * z
            with torch.no_grad():
                found = float(loss_at(here, local, values, local.batch.inputs))
            if chosen is None or found < least:  # a loss that is NaN chooses the first
                chosen, least = tried, found
        assert chosen is not None  # there is one trial at least
        return chosen

    def answered(self, seen: Observation) -> Answer:
        """What was sent tells of each tensor its length, and one direction in which it is zero: see
        candidates by these two numbers alone."""
        ways, others = {}, {}
        for name, value in seen.update.items():
            ways[name] = value / value.norm().clamp_min(1e-30)
            other = orthogonal(value, torch.Generator().manual_seed(0))
            others[name] = other / other.norm().clamp_min(1e-30)

        def through(one: Named) -> Named:
            found = {}
            for name, u in one.items():
                way, other = ways[name].to(u), others[name].to(u)
                along = (u * way).sum()
                length = u.square().sum().add(1e-30).sqrt()
                found[name] = along * way + length * other
            return found

        update = {name: value.norm() * others[name] for name, value in seen.update.items()}
        words = "holds each tensor to be as long as what was sent, and at right angles to it"
        return Answer(words, update, through=through)


def orthogonal(g: Tensor, rng: torch.Generator) -> Tensor:
    """A random tensor at right angles to g and as long; zero where there is none."""
    flat = g.flatten().double()
    z = torch.randn(flat.shape, generator=rng, dtype=torch.float64)
    length = flat.norm()
    if length == 0 or len(flat) < 2:
        return torch.zeros_like(g)
    way = flat / length
    for _ in range(2):  # the second time takes away what rounding left of the first
        z = z - (z @ way) * way  # ⟨z, g⟩ / ‖g‖² · g
    return z.mul(length / z.norm()).to(g.dtype).view_as(g)
