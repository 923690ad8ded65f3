"""From the activations of one node to the images, all records of a round together (our own).

Given t, what left a ReLU for every record, up to one common factor, and images to start from (a
decoder's), the images are searched whose pre-activations p explain t in the modes of the training:

    Σ_active (p − s·t)² + Σ_inactive relu(p)²  over  s²·Σ t²,      s = Σ p·t / Σ t²

Active are the entries with t > 0. The sum runs over all steps of the round, each with its own
weights and, where batch norm is in train mode, its own batch. L-BFGS in single precision does it;
it is the start that decides: from a decoder's images the misfit falls to rounding, from noise the
search sticks.

Batch norm in train mode leaves the contrast of a batch open: a·x gives the activations of x, but
for the norm's ε. A decoder's image is about the mean of all images with such activations, so that
what it lacks is orthogonal to it: a = ‖d‖²/⟨d, x⟩.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leakgauge.attacks._matching import lbfgs
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable

ROUNDING = 1e-9  # misfit at which single precision has nothing left to give
PATIENCE = 40  # evaluations without a tenth of progress after which the search ends
MEMORY = 30  # pairs of L-BFGS
PROBE, OPEN = 1.1, 1e-4  # contrast is open if this factor changes the misfit by less than that


class _Ended(Exception):
    """Unwinds L-BFGS when nothing is left to find, or no time."""


def finish(
    traces: Sequence[Trace],
    groups: Sequence[Tensor],
    node: str,
    value: Tensor,
    start: Tensor,
    *,
    free_scale: bool,
    evaluations: int = 600,
    go_on: Callable[[float], bool] = lambda misfit: True,
) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W), as they enter the model, with these values (N, …) at a node, and by how
    much each misses its own, Σ miss² / Σ t².

    Step k of the round ran `traces[k]` on the records `groups[k]`: every record is in one group.
    `start` are the decoder's images, as they enter the model. `free_scale` says that the values are
    known up to one common factor. `go_on` hears of every evaluation, and says whether there is time
    for another.
    """
    misses = _Misses(traces, groups, node, value, free_scale)
    _check(groups, value, start)
    found = _searched(misses, start.detach().float(), evaluations, go_on)
    with torch.no_grad():
        found = _contrasted(misses, found, start.float())
        return found, misses.by_record(found)


class _Misses:
    """What images lack to explain the values at a node."""

    def __init__(
        self, traces: Sequence[Trace], groups: Sequence[Tensor], node: str, value: Tensor,
        free_scale: bool,
    ) -> None:  # fmt: skip
        self.node, self.groups, self._free = node, groups, free_scale
        self._relu = traces[0].kind[traces[0].named(node)] == "relu"
        self._light = [trace.single() for trace in traces]
        self._size = value.double().square().mean().sqrt().clamp_min(1e-30)
        unit = (value / self._size if free_scale else value).float()
        self._wanted = [unit[group].contiguous() for group in groups]
        self._total = sum(float(t.double().square().sum()) for t in self._wanted)

    def _entering(self, images: Tensor, step: int) -> Tensor:
        """What enters the activation; of a pool, a sum or a layer, its value itself."""
        light = self._light[step]
        at = light.named(self.node)
        at = at.all_input_nodes[0] if self._relu else at
        batch = images[self.groups[step]].contiguous(memory_format=torch.channels_last)
        found: Tensor = light.forward(batch, [at])[at]
        return found

    def of(self, images: Tensor) -> list[Tensor]:
        """The misses of every group, in units of its values: their common factor is divided out."""
        found = [self._entering(images, step) for step in range(len(self.groups))]
        scale: Tensor | float = 1.0
        if self._free:
            scale = sum((p * t).sum() for p, t in zip(found, self._wanted, strict=True))
            scale = (scale / self._total).clamp_min(1e-3)
        misses = []
        for p, t in zip(found, self._wanted, strict=True):
            # Convex in what enters the ReLU: on what leaves it, an entry that should be active but
            # is not would have no slope.
            miss = torch.where(t > 0, p - scale * t, p.relu()) if self._relu else p - scale * t
            misses.append(miss / scale)
        return misses

    def total(self, images: Tensor) -> Tensor:
        return torch.stack([miss.square().sum() for miss in self.of(images)]).sum() / self._total

    def by_record(self, images: Tensor) -> Tensor:
        misfits = images.new_zeros(len(images))
        for group, miss, t in zip(self.groups, self.of(images), self._wanted, strict=True):
            size = t.square().flatten(1).sum(1).clamp_min(1e-30)
            misfits[group] = miss.square().flatten(1).sum(1) / size
        return misfits


def _searched(
    misses: _Misses, start: Tensor, evaluations: int, go_on: Callable[[float], bool]
) -> Tensor:
    """L-BFGS from the start, and again from the best point when its line search gives up."""
    best, found, history = math.inf, start.clone(), [math.inf]
    ended = False
    while not ended and len(history) <= evaluations:
        before = len(history)
        image = found.contiguous().clone().requires_grad_()
        search = lbfgs([image], evaluations - before + 1, MEMORY)

        def evaluated(image: Tensor = image, search: torch.optim.LBFGS = search) -> Tensor:
            nonlocal best, found
            search.zero_grad()
            with torch.enable_grad():
                loss = misses.total(image)
            if not loss.requires_grad:
                raise NotApplicable(f"no derivative leads from {misses.node!r} back to the image")
            loss.backward()  # type: ignore[no-untyped-call]
            if (now := float(loss.detach())) < best:
                best, found = now, image.detach().clone()
            history.append(best)
            stuck = len(history) > PATIENCE and best > 0.9 * history[-PATIENCE]
            if not go_on(best) or best < ROUNDING or stuck:
                raise _Ended
            return loss

        try:
            search.step(evaluated)  # type: ignore[no-untyped-call]
            ended = len(history) - before < 3  # no progress is possible from here
        except _Ended:
            ended = True
    return found


def _contrasted(misses: _Misses, found: Tensor, start: Tensor) -> Tensor:
    """The images with the contrast of the start in every group whose values leave it open."""
    found = found.clone()
    for group in misses.groups:
        probe = found.clone()
        probe[group] *= PROBE
        if abs(float(misses.total(probe) - misses.total(found))) < OPEN:
            d, x = start[group], found[group]
            share = float((d * d).sum() / (d * x).sum())
            if share > 0:
                found[group] = share * x
    return found


def _check(groups: Sequence[Tensor], value: Tensor, start: Tensor) -> None:
    rows = torch.cat(list(groups)).sort().values
    if len(value) != len(start) or not torch.equal(rows, torch.arange(len(value))):
        raise InputError(
            "the finish needs every record in one group, with its value and its start; got "
            f"{len(value)} values, {len(start)} starts and groups of {rows.tolist()}"
        )
