"""Distances between gradients, with their slope.

A distance takes the guessed and the observed gradient, tensor by tensor, and returns its value and
v = ∂D/∂g'. It may overwrite `guess` to hold v, which spares a copy of the whole model; the caller
may overwrite v in turn; the target stays as it is. Sums run per tensor and are added in double
precision: a flat float32 sum over 11 M elements is off by 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from leakgauge.errors import NotApplicable


class Distance(Protocol):
    def __call__(
        self, guess: list[Tensor], target: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]: ...


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Inner product over all tensors, a double-precision scalar."""
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(left, right, strict=True)]
    return torch.stack(parts).double().sum()


def squared(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """D = Σ‖g' − g‖²,  v = 2(g' − g)."""
    torch._foreach_sub_(guess, list(target))
    value = dot(guess, guess)
    torch._foreach_mul_(guess, 2.0)
    return value, guess


def relative_squared(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """D = Σ‖g' − g‖² / Σ‖g‖²,  v = 2(g' − g) / Σ‖g‖²: of order 1, as L-BFGS likes it at first."""
    unit = 1 / dot(target, target).clamp_min(1e-30)
    value, v = squared(guess, target)
    torch._foreach_mul_(v, float(unit))
    return value * unit, v


def cosine(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """D = 1 − ⟨g', g⟩ / (‖g'‖‖g‖),  v = (cos·g'/‖g'‖ − g/‖g‖) / ‖g'‖."""
    ours = dot(guess, guess).sqrt().clamp_min(1e-30)
    theirs = dot(target, target).sqrt().clamp_min(1e-30)
    cos = dot(guess, target) / (ours * theirs)
    torch._foreach_mul_(guess, float(cos / ours**2))
    # Beyond what float32 can hold both are zero, and so is the slope.
    torch._foreach_add_(guess, list(target), alpha=-min(float(1 / (ours * theirs)), 1e30))
    return 1 - cos, guess


def matrices(tensors: Sequence[Tensor]) -> list[int]:
    """Where the weights of two dimensions or more are: the layers, without biases and
    normalisations."""
    found = [k for k, tensor in enumerate(tensors) if tensor.ndim > 1]
    if not found:
        raise NotApplicable(
            "this attack compares the gradients of weight matrices, and the update holds none: "
            "only biases and norms are trained"
        )
    return found


def ramp(count: int, last: float) -> list[float]:
    """Weights of `count` layers in the order of the model, evenly from 1 at the first to `last`."""
    return [1 + (last - 1) * k / max(count - 1, 1) for k in range(count)]


def absolute(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """D = Σ|g' − g|,  v = sign(g' − g)."""
    torch._foreach_sub_(guess, list(target))
    value = _sum(guess)
    torch._foreach_sign_(guess)
    return value, guess


def relative_l1(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """D = Σ|g' − g| / Σ|g|,  v = sign(g' − g) / Σ|g|."""
    unit = 1 / _sum(target).clamp_min(1e-30)
    value, v = absolute(guess, target)
    torch._foreach_mul_(v, float(unit))
    return value * unit, v


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of absolute values over all tensors, a double-precision scalar."""
    return torch.stack([t.abs().sum() for t in tensors]).double().sum()


def weighted(*terms: tuple[float, Distance]) -> Distance:
    """D = Σ weight·D_k,  v = Σ weight·v_k."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros((), dtype=torch.float64, device=guess[0].device)
        slope: list[Tensor] = []
        for weight, term in terms:
            value, v = term([g.clone() for g in guess], target)
            total = total + weight * value
            torch._foreach_mul_(v, weight)
            slope = list(torch._foreach_add(slope, v)) if slope else v
        return total, slope

    return distance


def by_autograd(
    function: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
) -> Distance:
    """Any differentiable distance; its slope comes from autograd instead of a formula. It may leave
    tensors out of account: their slope is zero."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [g.detach().requires_grad_() for g in guess]
        with torch.enable_grad():
            value = function(leaves, target)
        v = torch.autograd.grad(value, leaves, materialize_grads=True)
        return value.detach().double(), [d.clone() for d in v]  # autograd may share or expand them

    return distance
