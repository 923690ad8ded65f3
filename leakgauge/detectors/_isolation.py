"""Which records one step's update shows alone: by a unit, by the difference of two, by thresholds.

The formulas are in `probe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakgauge.detectors._passes import Passed
from leakgauge.detectors._products import Run

ALONE = 0.99
"""The share of a unit's gradient from which it belongs to one record."""
CROWD = 128
"""Records at most of which a share is taken: as many images are as bad a leak in a larger batch."""
ALIKE = 0.98
"""The rank correlation from which two units measure the same."""
RANKED = 1024
"""Rows (records, or tokens of them) at most by which units are compared."""
MOST = 16384
"""Pairs at most that are looked at, of 512 units: a model could be made to have millions."""


@dataclass(frozen=True)
class Isolation:
    """How many records (or tokens) one step's update shows exactly, in the worst hidden layer.

    `layer` is None when no weight but the head's meets data: nothing to read this way.
    """

    share: float
    count: int
    total: int
    unit: Literal["images", "tokens"]
    layer: str | None
    tensor: str | None = None


def most_isolated(passed: Passed) -> Isolation:
    """The product in which most records are isolated."""
    records = len(passed.logits)
    best = Isolation(0.0, 0, records, "images", None)
    for seen in passed.runs:
        if seen is passed.head or seen.kind == "norm" or seen.gradient is None:
            continue
        total = seen.gradient.numel() // seen.gradient.shape[seen.units]
        unit: Literal["images", "tokens"] = "images" if total == records else "tokens"
        count = _count(seen, seen.gradient, total)
        share = count / total
        if share > best.share or best.layer is None or (share, unit) == (best.share, "images"):
            best = Isolation(share, count, total, unit, seen.layer, seen.name)
    return best


def _count(seen: Run, gradient: Tensor, total: int) -> int:
    """How many records, or tokens, this product isolates."""
    if total > RANKED:  # of so many tokens only one that a unit is on for alone can be told
        size = gradient.abs().movedim(seen.units, 0).flatten(1)
        sums = size.sum(1)
        alone = (size.amax(1) > ALONE * sums) & (sums > 1e-6 * sums.max())
        return len(torch.unique(size[alone].argmax(1))) if alone.any() else 0
    delta = seen.rows(gradient)
    found = subtracted(delta, seen.rows(seen.left))
    if seen.kind not in ("linear", "convolution"):
        return int((found | _alone(delta)).sum())
    return int((found | isolated(delta, seen.weights(), seen.bias)).sum())


def isolated(delta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Which rows of δ (records, units) a unit, or the difference of two neighbours, shows alone."""
    found = _alone(delta)
    if bias is not None and delta.shape[1] > 1:
        order = (bias / weight.norm(dim=1).clamp_min(1e-30)).argsort(stable=True)
        left, right = delta[:, order[:-1]], delta[:, order[1:]]
        apart = left - right
        # What two units share cancels but for rounding.
        apart[apart.abs() < 1e-4 * torch.maximum(left.abs(), right.abs())] = 0.0
        found |= _alone(apart)
    return found


def subtracted(delta: Tensor, values: Tensor) -> Tensor:
    """Which rows of δ the difference of two units shows alone, one of them rescaled to fit."""
    found = torch.zeros(len(delta), dtype=torch.bool)
    for part in torch.split(neighbours(values), 4096):
        left, right, rows = part.T
        one, two = delta[:, left].double(), delta[:, right].double()  # (rows, pairs)
        here = torch.arange(len(rows))
        mine = one[rows, here], two[rows, here]
        one[rows, here] = two[rows, here] = 0.0
        scale = (one * two).sum(0) / (two * two).sum(0).clamp_min(1e-300)
        others = (one - scale * two).abs().sum(0)
        apart = (mine[0] - scale * mine[1]).abs()
        shared = one.abs().sum(0) > 0  # with nothing to fit, it is the unit alone
        counts = shared & (apart > ALONE * (apart + others)) & (apart > 1e-4 * one.abs().amax(0))
        found[rows[counts]] = True
    return found


def separated(passed: Passed) -> dict[str, float]:
    """By weight, the share of records (or tokens) alone between two thresholds of like units; of
    128 at most."""
    shares: dict[str, float] = {}
    for seen in passed.runs:
        if seen is passed.head:
            continue
        total = seen.left.numel() // seen.left.shape[seen.units]
        few = max(1, RANKED * len(seen.left) // total)  # records, where each has many tokens
        values = seen.rows(seen.left[:few] if total > RANKED else seen.left)
        pairs = neighbours(values)
        share = len(torch.unique(pairs[:, 2])) / min(len(values), CROWD)
        shares[seen.name] = max(share, shares.get(seen.name, 0.0))
    return shares


def neighbours(values: Tensor, block: int = 512) -> Tensor:
    """(pairs, 3): units j and k that rank all rows of `values` (rows, units) alike or in reverse,
    and the one row that only one of them is on for (in reverse: that both are on or off for)."""
    ranks = values.argsort(0).argsort(0).to(torch.float32)
    ranks = torch.nn.functional.normalize(ranks - ranks.mean(0), dim=0)
    on = (values > 0).to(torch.float32)
    sums = on.sum(0)
    found = []
    for start in range(0, values.shape[1], block):
        part = slice(start, start + block)
        alike = ranks[:, part].T @ ranks
        apart = sums[part, None] + sums - 2 * (on[:, part].T @ on)
        apart = torch.where(alike > 0, apart, len(values) - apart)
        hits = ((alike.abs() > ALIKE) & (apart == 1)).nonzero()
        hits[:, 0] += start
        found.append(hits[:: 1 + len(hits) // MOST])
    pairs = torch.cat(found)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    left, right = on[:, pairs[:, 0]], on[:, pairs[:, 1]]
    differs = left != right
    reverse = differs.sum(0) > 1
    rows = torch.where(reverse, ~differs, differs).to(torch.float32).argmax(0)
    return torch.cat([pairs, rows[:, None]], 1)


def _alone(delta: Tensor) -> Tensor:
    size = delta.abs()
    total = size.sum(0)
    counts = (size > ALONE * total) & (total > 1e-6 * total.max())
    return counts.any(1)
