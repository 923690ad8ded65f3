"""The gradient of a weight by record, as norms, and how far one record outweighs the others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.detectors._products import Run

SLOTS = 64
"""Records at most whose gradients are set against each other."""


def dominance(norms: Tensor) -> float:
    """Eq. 1 for one weight: the largest norm over the sum of the others."""
    most, total = float(norms.max()), float(norms.sum())
    rest = total - most
    return most / rest if rest else math.inf if most else 0.0


def slot_norms(seen: Run) -> Tensor:
    """‖δ_iᵀ·a_i‖ by record i, of the first 64, in double precision."""
    assert seen.gradient is not None
    if seen.kind == "linear":
        a, delta = (
            t[:SLOTS].reshape(min(len(t), SLOTS), -1, t.shape[-1])
            for t in (seen.entered, seen.gradient)
        )
        # ‖Σ_t δ_t a_tᵀ‖² = Σ_ts (a_t·a_s)(δ_t·δ_s): the gradient itself is never formed.
        products = (a @ a.mT).double() * (delta @ delta.mT).double()
        return products.sum((1, 2)).clamp_min(0).sqrt()
    return torch.cat([part.double().flatten(1).norm(dim=1) for part in _conv_gradients(seen)])


def _conv_gradients(seen: Run, chunk: int = 8) -> Iterator[Tensor]:
    """∂L/∂W by record, (chunk, …) at a time: records side by side as groups of one convolution."""
    assert seen.gradient is not None
    stride, padding, dilation, groups = seen.options
    kernel = seen.weight.shape[2:]
    entered = pad(seen.entered[:SLOTS], _sides(padding, kernel, dilation))
    gradient = seen.gradient[:SLOTS]
    for a, delta in zip(torch.split(entered, chunk), torch.split(gradient, chunk), strict=True):
        n = len(a)
        shape = (n * seen.weight.shape[0], *seen.weight.shape[1:])
        _, weight, _ = torch.ops.aten.convolution_backward(
            delta.flatten(0, 1)[None],
            a.flatten(0, 1)[None],
            a.new_empty(shape),
            None,
            stride,
            [0] * len(stride),
            dilation,
            False,
            [0] * len(stride),
            n * groups,
            [False, True, False],
        )
        yield weight.view(n, *seen.weight.shape)


def _sides(padding: object, kernel: torch.Size, dilation: list[int]) -> list[int]:
    """What a convolution adds before and behind, the last dimension first, as `pad` takes it."""
    sides = []
    for k, (size, step) in enumerate(zip(kernel, dilation, strict=True)):
        if padding == "same":
            total = step * (size - 1)
            sides.append((total // 2, total - total // 2))
        elif isinstance(padding, list | tuple):
            sides.append((int(padding[k % len(padding)]),) * 2)
        else:
            sides.append((0 if padding == "valid" else int(str(padding)),) * 2)
    return [n for pair in reversed(sides) for n in pair]
