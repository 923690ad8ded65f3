"""Guardian: the noise that costs least for a bound on the reconstruction — **our reading** of
M. Fan, Y. Liu, C. Chen, C. Wang, M. Qiu, W. Zhou, "Guardian: Guarding against Gradient Leakage with
Provable Defense for Federated Learning", WSDM 2024, https://doi.org/10.1145/3616855.3635758

There is no public code. From its abstract, and from FedLeak (USENIX Security 2025, §6.4), we know
that a transformed gradient is found that trades a measure of performance against a measure of
privacy, with a strength β. Our measures are:

    performance   the squared distance to the gradient, E‖g′ − g‖² = Σ_i σ_i² for g′ = g + N(0, σ²)
    privacy       the Cramér–Rao bound: who estimates the d values of x from g′ without bias errs by
                  E‖x̂ − x‖² ≥ d² / I,   I = Σ_i s_i² / σ_i²,   s_i = ‖∂g_i/∂x‖

To minimise Σ_i σ_i² + c·I is to add to every entry noise of

    σ_i² = β · ‖g‖² · s_i / Σ_j s_j

if c is chosen such that E‖g′ − g‖² = β·‖g‖²: β is the squared relative distance. No other noise of
independent entries has so large a bound at that distance. s_i² is the mean square of (∂g/∂x)·v over
random directions v, by differences of gradients.

Differs from the paper: most likely in all but the idea. The bound is of an estimate without bias,
to first order in x, and knows of no labels: it is no proof for this setting or another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defences._local import copied, local_step, loss_at
from leakgauge.fl.local import ready
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.records import floats
from leakgauge.tensors import norm, parameters
from leakgauge.types import Answer, Batch, Here, Local, Named, Observation

PAPER = Paper(
    "fan2024",
    "Fan, Mingyuan and Liu, Yang and Chen, Cen and Wang, Chengyu and Qiu, Minghui and "
    "Zhou, Wenmeng",
    "Guardian: Guarding against Gradient Leakage with Provable Defense for Federated Learning",
    2024,
    "17th ACM International Conference on Web Search and Data Mining",
    "https://doi.org/10.1145/3616855.3635758",
    fields=(("pages", "190--198"),),
)
STEP = 0.01  # of a difference, in standard deviations of the records
FLOOR = 0.3  # of the mean noise: an attacker trusts no entry more than if it had that


@dataclass(frozen=True)
class Guardian:
    """Adds noise that bounds reconstructions (our reading)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    beta: float = option(1.0, POSITIVE)
    probes: int = option(4, count(10_000))

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta must be positive and finite, got {self.beta}")
        if self.probes < 1:
            raise ValueError(f"probes must be at least 1, got {self.probes}")

    def announced(self) -> dict[str, object]:
        return {"beta": self.beta, "probes": self.probes}

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        local = local_step(here, "guardian")
        sensitive = sensitivity(here, local, list(gradient), self.probes, rng)
        total = sum(float(s.double().sum()) for s in sensitive.values())
        if not 0 < total < math.inf:  # nothing is known of where it leaks: everywhere alike
            sensitive = {name: torch.ones_like(g) for name, g in gradient.items()}
            total = float(sum(g.numel() for g in gradient.values()))
        spread = math.sqrt(self.beta / total) * norm(gradient)
        return {
            name: g + spread * sensitive[name].sqrt().to(g) * torch.randn(
                g.shape, generator=rng, dtype=g.dtype
            )
            for name, g in gradient.items()
        }  # fmt: skip

    def answered(self, seen: Observation) -> Answer:
        """Weigh every entry by the noise that it would have if the records were random."""
        assert seen.training is not None  # who is not told of it does not know the defence
        rng = torch.Generator().manual_seed(0)
        count = seen.records or 1
        batch = Batch(
            torch.rand(count, *seen.record.shape, generator=rng),
            torch.randint(seen.task.count, (count,), generator=rng),
        )
        live = replace(seen.setting, model=ready(seen.model, seen.training))
        values = {**parameters(live.model), **dict(live.model.named_buffers())}
        local = Local(live, seen.training, batch, values)
        here = Here(live, local=local)
        spread = {
            name: s.sqrt()
            for name, s in sensitivity(here, local, list(seen.update), self.probes, rng).items()
        }
        total = sum(float(s.double().square().sum()) for s in spread.values())
        mean = math.sqrt(total / sum(s.numel() for s in spread.values())) or 1.0
        # ‖g′‖² = (1 + β)·‖g‖² in the mean.
        size = math.sqrt(self.beta / (1 + self.beta) / max(total, 1e-300)) * norm(seen.update)

        def again(rng: torch.Generator) -> Named:
            return {
                name: u + size * spread[name] * torch.randn(u.shape, generator=rng)
                for name, u in seen.update.items()
            }

        def through(one: Named) -> Named:
            return {
                name: u * mean / (spread[name].square() + (FLOOR * mean) ** 2).sqrt().to(u)
                for name, u in one.items()
            }

        return Answer(
            "weighs every entry by the noise that random records would have given it",
            seen.update,
            through=through,
            again=again,
        )


def sensitivity(
    here: Here, local: Local, names: list[str], probes: int, rng: torch.Generator
) -> Named:
    """s_i = ‖∂g_i/∂x‖ of every entry, estimated from so many random directions of the records."""
    floats(local.setting.record)
    inputs = local.batch.inputs
    size = STEP * (float(inputs.std(correction=0)) or 1.0)
    squares = {name: torch.zeros_like(local.values[name]) for name in names}
    for _ in range(probes):
        way = size * torch.randn(inputs.shape, generator=rng, dtype=inputs.dtype)
        up, down = (_gradient(here, local, names, inputs + s * way) for s in (1, -1))
        for name, above, below in zip(names, up, down, strict=True):
            squares[name] += ((above - below) / (2 * size)).square() / probes
    return {name: square.sqrt() for name, square in squares.items()}


def _gradient(here: Here, local: Local, names: list[str], inputs: Tensor) -> tuple[Tensor, ...]:
    values = copied(local)
    weights = [values[name].requires_grad_() for name in names]
    objective = loss_at(here, local, values, inputs)
    return torch.autograd.grad(objective, weights, materialize_grads=True)
