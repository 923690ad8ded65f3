"""One image from the activations known of it, by L-BFGS in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, fx

from leakgauge.attacks._matching import lbfgs
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable

EXACT = 1e-11  # misfit of activations at which nothing is left to find
FOUND = 1e-8  # misfit below which an image is taken as found
PATIENCE = 75  # evaluations without a tenth of progress after which a search is given up


class _Settled(Exception):
    """Unwinds L-BFGS when the image is found, or nothing moves any more."""


def invert(
    trace: Trace,
    node: fx.Node,
    value: Tensor,
    rng: torch.Generator,
    evaluations: int,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[Tensor, float]:
    """The image (1, …, normalised) with this value at a node, and by how much it misses it."""
    image = 0.1 * torch.randn(1, *trace.shape[trace.input], generator=rng).double()
    image.requires_grad_()
    search = lbfgs([image], evaluations, memory=50)
    best, found, losses = math.inf, image.detach().clone(), []

    def objective() -> Tensor:
        nonlocal best, found
        search.zero_grad()
        loss = missed(trace, node, value, image)
        if not loss.requires_grad:
            raise NotApplicable(f"no derivative leads from {node.name!r} back to the image")
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if losses[-1] < best:
            best, found = losses[-1], image.detach().clone()
        stuck = len(losses) > 2 * PATIENCE and best > 0.9 * min(losses[:-PATIENCE])
        if best < EXACT or stuck or not go_on():
            raise _Settled
        return loss

    with suppress(_Settled):
        search.step(objective)  # type: ignore[no-untyped-call]
    return found, best


def missed(trace: Trace, node: fx.Node, value: Tensor, image: Tensor) -> Tensor:
    """By how much an image misses the value of a node, as a share of its energy."""
    relu = trace.kind[node] == "relu"
    entering = node.all_input_nodes[0] if relu else node  # of an image, a pool: the value itself
    entered = trace.forward(image, [entering])[entering]
    miss = entered - value
    if relu:
        # Convex in what enters the ReLU: active entries are met, inactive ones stay below 0.
        # On what leaves it, an entry that should be active but is not would have no slope.
        miss = torch.where(value > 0, miss, entered.relu())
    found: Tensor = miss.square().sum() / value.square().sum()
    return found
