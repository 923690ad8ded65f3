"""Behind a group norm: every record is normalised by itself, a group of channels at a time.

A layer norm is one with a single group. Nothing ties the records of a step together, and the rank
of a gradient is that without a norm. What the norm does to a record's signals follows from its map.
docs/methods/separation.md has the algebra.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from leakgauge.attacks._steps import silent
from leakgauge.attacks._trace import Trace


def groups_of(norm: nn.Module) -> int:
    """How many groups of a record's channels a norm sees by themselves; 0 for a batch norm."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups
    return int(isinstance(norm, nn.LayerNorm))


def means(x: Tensor, groups: int) -> Tensor:
    """What a norm subtracts of values (channels, N, positions): the mean of every channel over the
    records of a step or, with groups, of every group over a record."""
    if not groups:
        return x.mean((1, 2), keepdim=True)
    parts = x.reshape(groups, -1, *x.shape[1:])
    found = parts.mean((1, 3), keepdim=True).expand(*parts.shape[:3], 1)
    return found.reshape(*x.shape[:2], 1)


def behind_own_norm(
    trace: Trace, layer: fx.Node, norm: fx.Node, source: fx.Node, maps: Tensor, signals: Tensor
) -> Tensor:
    """The signals behind a layer's group norm, from those at the layer (N, channels, …).

    The norm passes back δ_u = (γδ − mean γδ − û·mean(γδ·û))/σ, a group of a record at a time; û and
    σ follow from the map. Where the ReLU above is off δ is zero: of σ·δ_u + a + b·û = γδ the two
    unknowns of every group are those that leave many entries of several channels at zero.
    """
    module: Any = trace.module.get_submodule(str(norm.target))
    groups = groups_of(module)
    u = trace.affine(layer, {source: maps}, {}).transpose(0, 1)
    u, given = (x.reshape(*x.shape[:2], -1) for x in (u, signals.transpose(0, 1)))
    u = u - means(u, groups)
    sigma = (means(u.square(), groups) + module.eps).sqrt()

    def rows(x: Tensor) -> Tensor:  # (groups·N, channels of a group × positions)
        return x.reshape(groups, -1, *x.shape[1:]).transpose(1, 2).flatten(2).flatten(0, 1)

    x, normal = rows(given * sigma), rows(u / sigma)
    shift, slope, _ = silent(x, normal, len(u) // groups, tries=500, part=8)
    y = (x + shift + slope * normal).view(groups, len(maps), -1, given.shape[2])
    y = y.transpose(1, 2).reshape(given.shape)
    if module.weight is not None:
        gamma = module.weight.where(module.weight.abs() > 1e-12, torch.inf)  # it is switched off
        y = y / gamma[:, None, None]
    return y.transpose(0, 1).reshape(signals.shape).contiguous()
