"""What the gradient of one layer spans: the windows that it saw, and the records' maps behind them.

The weight gradient of a layer, as a matrix (outputs × inputs·k²), is G = L·A: the rows of A are the
windows the layer saw (P positions of B records; one per record in a linear layer), the columns of L
the error signals at its output. While P·B is below the number of outputs,

1. *Rank*. The right singular vectors V of G span the windows: A = R·Vᵀ.
2. *Overlap*. Windows of one record that look at the same pixel agree, and are zero over the
   padding. These equations in R (P × rank) have exactly B independent solutions: the span of the
   maps.

*Batch norm in train mode* behind the layer makes the signals of a step sum to zero, so that V lacks
one direction per step, its mean window. A record's windows are then R·Vᵀ + m, with m free and the
same at all its positions. With T the projection "windows agree, padding is zero" and J the stacked
identities that repeat m, T − TJ(JᵀTJ)⁻¹JᵀT in place of T leaves m out; and as an R that is the same
at all positions could hide in m, Σ_p R_p = 0. docs/methods/separation.md has the algebra.

The rank is that of SPEAR (Dimitrov et al., NeurIPS 2024, https://arxiv.org/abs/2403.03945); the
overlap is ours.
"""

from __future__ import annotations

import math
from typing import Any

import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.attacks._linear import smallest, smallest_of
from leakgauge.errors import NotApplicable

RANK = 3e-6  # singular values below this share of the largest are rounding
LARGE = 6000  # unknowns beyond which no matrix of their equations is made
GAP = 0.25  # a solution's eigenvalue, as a share of the first that is none (of order 0.1)
EDGE = 0.5  # the first singular value that is none of the windows', as a share of their last


def windows(maps: Tensor, layer: nn.Conv2d | nn.Linear) -> Tensor:
    """What a layer looks at: (N, positions, inputs·k²)."""
    if isinstance(layer, nn.Linear):
        return maps.flatten(1)[:, None]
    assert not isinstance(layer.padding, str)  # the trace takes such a layer for no layer
    return F.unfold(maps, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(
        1, 2
    )


def row_space(
    gradient: Tensor, records: int, positions: int, lost: int = 0
) -> tuple[Tensor, float]:
    """V (inputs·k² × rank): the span of the windows, but for `lost` directions, one mean per step;
    and how rough it is at the most: what is left of the gradient beside its weakest direction.
    Refuses when the rank cannot tell it."""
    outputs, inputs = gradient.shape
    rank = records * positions - lost
    if rank >= min(outputs, inputs):
        raise NotApplicable(
            f"{records} records × {positions} positions are {rank} windows, and a gradient of "
            f"{outputs} × {inputs} can span at most {min(outputs, inputs) - 1} of them and show it"
        )
    _, values, right = torch.linalg.svd(gradient, full_matrices=False)
    if not values[0] > 0:
        raise NotApplicable("the layer's gradient is zero: no signal reached it")
    found = int((values > RANK * values[0]).sum())
    drops = values[1:] / values[:-1].clamp_min(1e-300)
    ratio = float(drops[rank - 1])
    if ratio > EDGE or ratio > float(drops[rank // 2 : rank].min()):
        raise NotApplicable(
            f"the gradient's singular values show no edge after {rank} (ratio {ratio:.2g}; above "
            f"rounding: {found}): noise, pruning or another number of records"
        )
    return right[:rank].T, ratio


def common_maps(
    basis: Tensor,
    layer: nn.Conv2d | nn.Linear,
    shape: tuple[int, ...],
    records: int,
    *,
    centred: bool = False,
) -> tuple[Tensor, float]:
    """S (pixels × records): the span of the records' maps, and how rough it is: by what share the
    windows of a map fail to agree, 0 if it has only one. `centred`: the basis lacks the mean
    window, and every record may have any."""
    if isinstance(layer, nn.Linear):
        if centred:
            raise NotApplicable("the batch norm behind it hides what its records have in common")
        return basis, 0.0
    channels, height, width = shape
    pixel = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    seen = windows(pixel, layer)[0].long()  # (positions, k²): pixel number, 0 over the padding
    positions, area = seen.shape
    rank = basis.shape[1]
    parts = basis.reshape(channels, area, rank)
    project = _agreement(seen)
    mean = torch.zeros(0)
    free = torch.eye(positions, dtype=basis.dtype)
    if centred:
        stack = torch.eye(area, dtype=basis.dtype).repeat(positions, 1)  # J
        inner = stack.T @ project @ stack
        if positions < 2 or float(torch.linalg.eigvalsh(inner)[0]) < 1e-6:
            raise NotApplicable(
                "the batch norm behind it hides the mean of its windows, and they do not overlap "
                "enough to tell it"
            )
        mean = project @ stack @ torch.linalg.inv(inner)
        project = project - mean @ stack.T @ project
        free = torch.from_numpy(scipy.linalg.helmert(positions))  # Σ_p R_p = 0
    kept = len(free)
    if kept * rank > LARGE:
        values, vectors = smallest_of(
            lambda block: _missed(block, free, parts, project), kept * rank, records + 1
        )
    else:
        values, vectors = smallest(_normal(free, parts, project), records + 1)
    # A single window per record has no other to agree with: everything in its span is a map.
    if len(values) > records and max(values[records - 1], 1e-9) > GAP * values[records]:
        raise NotApplicable(
            f"the overlap of its windows does not single out {records} maps (eigenvalues "
            f"{values[records - 1]:.1e} and then {values[records]:.1e}): it has none, or noise "
            "hides it"
        )
    solutions = torch.from_numpy(vectors[:, :records].T.copy()).view(records, kept, rank)
    solutions = torch.einsum("ip,nir->npr", free, solutions)
    by_pixel = torch.einsum("npr,car->npca", solutions, parts)
    if centred:
        by_channel = by_pixel.transpose(1, 2).reshape(records, channels, -1)
        by_pixel = by_pixel - (by_channel @ mean)[:, None]
    # Every view of a pixel agrees; one that no window looks at stays unknown, at zero.
    maps = torch.zeros(records, channels, height * width, dtype=basis.dtype)
    for p in range(positions):
        inside = seen[p] > 0
        maps[:, :, seen[p][inside] - 1] = by_pixel[:, p, :, inside]
    orthonormal: Tensor = torch.linalg.qr(maps.flatten(1).T).Q
    apart = math.sqrt(max(float(values[records - 1]), 0.0)) if positions > 1 else 0.0
    return orthonormal, apart


def _normal(free: Tensor, parts: Tensor, project: Tensor) -> Any:
    """The normal matrix of the equations T·x_c = 0 in R = freeᵀ·(kept × rank)."""
    kept, positions = free.shape
    area, rank = parts.shape[1:]
    agree = project.view(positions, area, positions, area)
    agree = torch.einsum("ip,paqb,jq->ijab", free, agree, free).flatten(2).flatten(0, 1)
    gram = torch.einsum("car,cbs->abrs", parts, parts).flatten(2).flatten(0, 1)
    normal = (agree @ gram).view(kept, kept, rank, rank).transpose(1, 2)
    return normal.reshape(kept * rank, -1).numpy()


def _missed(block: Any, free: Tensor, parts: Tensor, project: Tensor) -> Any:
    """`_normal` by a block of vectors (kept·rank × count), without the matrix."""
    (kept, positions), (channels, area, rank) = free.shape, parts.shape
    spread = free.T @ torch.from_numpy(block).reshape(kept, -1)
    flat = spread.view(positions, rank, -1).transpose(1, 2) @ parts.flatten(0, 1).T
    views = flat.view(positions, -1, channels, area).movedim(3, 1).reshape(positions * area, -1)
    left = (project @ views).view(positions, area, -1, channels).movedim(1, 3).flatten(2)
    found = free @ (left @ parts.flatten(0, 1)).transpose(1, 2).reshape(positions, -1)
    return found.view(kept * rank, -1).numpy()


def _agreement(seen: Tensor) -> Tensor:
    """T: what views (positions·k²) miss when the views of one pixel are to agree, and those of the
    padding to be zero."""
    pixels = seen.flatten()
    same = ((pixels[:, None] == pixels[None]) & (pixels > 0)).double()
    return torch.eye(len(pixels), dtype=torch.float64) - same / same.sum(1).clamp_min(1)
