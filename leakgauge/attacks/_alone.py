"""Behind a group norm: every record is normalised by itself, a group of channels at a time.

A layer norm is one with a single group. Nothing ties the records of a step together, and the rank
of a gradient is that without a norm. What the norm does to a record's signals follows from its map.
docs/methods/separation.md has the algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakgauge.attacks._path import Path
from leakgauge.attacks._span import windows
from leakgauge.attacks._steps import silent
from leakgauge.attacks._trace import Trace
from leakgauge.types import Named

APART = 0.1  # a step's records are nearer to zero than this share of the nearest other


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


@dataclass(frozen=True)
class Passed:
    """Records at a group norm: the signals behind it, what it puts out but for its affine part (N,
    channels, …), and how far from zero the signals of each are that should be zero."""

    signals: Tensor
    normal: Tensor
    far: Tensor


@dataclass
class OwnNorm:
    """The group norm that the output of a layer enters, which sees what left the ReLU `source`;
    `path` learns the parts of each step in the gradients of both."""

    trace: Trace
    gradient: Named
    layer: fx.Node
    norm: fx.Node
    source: fx.Node
    path: Path

    def in_steps(
        self, maps: Tensor, signals: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Which records were in which local step, of these sizes; None if that does not show.

        Only at the weights of its own step does a record's norm leave zeros where the ReLU above is
        off. Those of the first step are known, its records tell the weights of the next, and so on.
        """
        left, steps = torch.arange(len(maps)), []
        for number, size in enumerate(sizes):
            with self.trace.holding(self.path.weights[number]):
                far = self.passed(maps[left], signals[left]).far
            order = far.argsort()
            if len(left) > size and far[order[size - 1]] > APART * far[order[size]]:
                return None
            steps.append(left[order[:size].sort().values])
            left = left[order[size:].sort().values]
            self.behind(maps, signals, steps)
        return tuple(steps)

    def behind(self, maps: Tensor, signals: Tensor, steps: Sequence[Tensor]) -> Tensor:
        """The signals behind the norm, each record's at the weights of its step: of the first steps
        alone if the others are not told yet."""
        layer = self.trace.layer(self.layer)
        names = {
            (node, key): self.trace.told(node, key, self.gradient)
            for node in (self.layer, self.norm)
            for key in ("weight", "bias")
        }
        parts = {
            name: maps.new_zeros(self.path.steps, *self.gradient[name].shape)
            for name in names.values()
            if name is not None
        }
        found = torch.zeros_like(signals)
        for number, step in enumerate(steps):
            with self.trace.holding(self.path.weights[number]):
                one = self.passed(maps[step], signals[step])
            found[step] = one.signals
            sent = _rows(signals[step])
            part = {
                (self.norm, "bias"): _rows(one.signals).sum(0),
                (self.norm, "weight"): _rows(one.signals * one.normal).sum(0),
                (self.layer, "bias"): sent.sum(0),
                (self.layer, "weight"): sent.T @ windows(maps[step], layer).flatten(0, 1),
            }
            for key, name in names.items():
                if name is not None:
                    parts[name][number] = part[key].view(parts[name].shape[1:])
                    self.path.learn(name, parts[name])
        return found

    def passed(self, maps: Tensor, signals: Tensor) -> Passed:
        """The norm passes back δ_u = (γδ − mean γδ − û·mean(γδ·û))/σ, a group of a record at a
        time; û and σ follow from the map. Where the ReLU above is off δ is zero: of σ·δ_u + a + b·û
        = γδ the two unknowns of every group are those that leave many entries of several channels
        at zero."""
        module: Any = self.trace.module.get_submodule(str(self.norm.target))
        groups = groups_of(module)
        u = self.trace.affine(self.layer, {self.source: maps}, {}).transpose(0, 1)
        u, given = (x.reshape(*x.shape[:2], -1) for x in (u, signals.transpose(0, 1)))
        u = u - means(u, groups)
        sigma = (means(u.square(), groups) + module.eps).sqrt()

        def rows(x: Tensor) -> Tensor:  # (groups·N, channels of a group × positions)
            return x.reshape(groups, -1, *x.shape[1:]).transpose(1, 2).flatten(2).flatten(0, 1)

        x, normal = rows(given * sigma), rows(u / sigma)
        shift, slope, far = silent(x, normal, len(u) // groups, tries=500, part=8)
        y = (x + shift + slope * normal).view(groups, len(maps), -1, given.shape[2])
        y = y.transpose(1, 2).reshape(given.shape)
        if module.weight is not None:
            gamma = module.weight.where(module.weight.abs() > 1e-12, torch.inf)  # it is off
            y = y / gamma[:, None, None]
        far = (far / x.square().mean(1).sqrt().clamp_min(1e-30)).view(groups, -1).median(0).values
        y, normal = (one.transpose(0, 1).reshape(signals.shape) for one in (y, u / sigma))
        return Passed(y.contiguous(), normal, far)


def _rows(x: Tensor) -> Tensor:
    """Values (N, channels, …) as (N·positions, channels)."""
    return x.reshape(*x.shape[:2], -1).transpose(1, 2).flatten(0, 1)
