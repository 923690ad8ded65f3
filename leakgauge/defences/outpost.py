"""OUTPOST: noise and pruning where the risk is, in ever fewer steps (F. Wang, E. Hugh, B. Li, "More
than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production Federated
Learning", IEEE INFOCOM 2023 and IEEE/ACM Transactions on Networking 2024,
https://doi.org/10.1109/TNET.2024.3377655).

Local step t of a round (t = 0, 1, …) is defended with probability 1 / (1 + β·t). Then

    risk_l = min(var(w_l), 1)                        of each tensor l of the weights
    g_l ← prune(g_l) + N(0, (λ·risk_l)²) · mask_l    prune: the smallest `prune` of |g_l| become 0

where the mask is 1 on the share φ of the whole gradient with the largest g² (the diagonal of the
empirical Fisher information).

Differs from the paper: t starts at 0, so that the first step, which is all of FedSGD, is always
defended; public code counts from 1 and sends every ninth as it is. The Fisher information is of
single entries, not of means over the first dimension of a tensor. One public implementation
computes the defended gradient and then returns the one it was given; a test asserts that this one
does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defences._answers import sent_alone
from leakgauge.defences._local import local_step
from leakgauge.defences.prune import largest
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, SHARE, option
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "wang2024",
    "Wang, Fei and Hugh, Ethan and Li, Baochun",
    "More Than Enough is Too Much: Adaptive Defenses Against Gradient Leakage in Production "
    "Federated Learning",
    2024,
    "IEEE/ACM Transactions on Networking",
    "https://doi.org/10.1109/TNET.2024.3377655",
    kind="article",
)


@dataclass(frozen=True)
class Outpost:
    """Prunes and adds noise where it tells most, ever less often."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    prune: float = option(0.8, SHARE)
    noise: float = option(0.8, FROM_0)
    top: float = option(0.4, SHARE)
    decay: float = option(0.125, FROM_0)

    def __post_init__(self) -> None:
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune must lie in [0, 1), got {self.prune}")
        for name, value in (("noise", self.noise), ("decay", self.decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not 0 < self.top <= 1:
            raise ValueError(f"top must lie in (0, 1], got {self.top}")

    def announced(self) -> dict[str, object]:
        return {"prune": self.prune, "noise": self.noise, "top": self.top, "decay": self.decay}

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        weights = local_step(here, "outpost").values
        if float(torch.rand((), generator=rng)) >= 1 / (1 + self.decay * here.step):
            return {name: g.clone() for name, g in gradient.items()}
        fisher = torch.cat([g.flatten() for g in gradient.values()]).square()
        masks = torch.split(largest(fisher, 1 - self.top), [g.numel() for g in gradient.values()])
        defended = {}
        for (name, g), mask in zip(gradient.items(), masks, strict=True):
            noise = torch.randn(g.shape, generator=rng, dtype=g.dtype) * mask.view_as(g)
            pruned = g * largest(g.flatten(), self.prune).view_as(g)
            defended[name] = pruned + self.noise * risk(weights[name]) * noise
        return defended

    def answered(self, seen: Observation) -> Answer:
        """Leave out what was pruned, and count each tensor by the share of it that is not noise,
        whose size the weights tell. A step that was not defended has no zeros, and little noise is
        expected of it."""
        assert seen.training is not None  # who is not told of it does not know the defence
        weights = dict(seen.model.named_parameters())
        left = sent_alone(seen.update)
        trust, spreads = {}, {}
        for name, value in seen.update.items():
            spread = spreads[name] = self.noise * risk(weights[name].detach()) * seen.training.lr
            energy = float(value.double().square().sum())
            noise = min(int((value != 0).sum()) * spread**2, energy)
            defended = bool((value == 0).any())
            trust[name] = math.sqrt(1 - noise / energy) if energy and defended else 1.0
        if not any(trust.values()):
            trust = dict.fromkeys(trust, 1.0)

        def through(one: Named) -> Named:
            return {name: trust[name] * u for name, u in left(one).items()}

        def again(rng: torch.Generator) -> Named:
            return {
                name: u + spreads[name] * torch.randn(u.shape, generator=rng) * (u != 0)
                for name, u in seen.update.items()
            }

        return Answer(
            "leaves out what was pruned, and weighs each layer by what is not noise in it",
            seen.update,
            through=through,
            again=again,
        )


def risk(weights: Tensor) -> float:
    """The spread of a tensor's weights, 1 at most: wide weights make inversion easier."""
    return min(float(weights.var(correction=int(weights.numel() > 1))), 1.0)
