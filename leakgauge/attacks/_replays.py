"""Trainings of more than one client or round, played on candidates: each part by an engine of its
own, the derivative put together from theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakgauge.attacks._engine import Engine, Mode, Replay, Slope, held_to
from leakgauge.attacks._objectives import Distance
from leakgauge.types import LocalTraining, Observation


class _Parts:
    """What several replays say of themselves."""

    def __init__(self, parts: Sequence[Replay]):
        self._parts = parts
        first = parts[0]
        self.names, self.target, self.unit = first.names, first.target, first.unit
        self.values, self.device, self.dtype = first.values, first.device, first.dtype

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for part in self._parts for note in part.notes))

    @property
    def mode(self) -> str:
        return ", ".join(sorted({part.mode for part in self._parts}))

    @property
    def differed(self) -> float | None:
        return max((d for part in self._parts if (d := part.differed) is not None), default=None)


class Rounds(_Parts):
    """The same records in several rounds: the distances of all rounds add up."""

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        found = [part.slope(inputs, labels, distance) for part in self._parts]
        soft = [one.labels for one in found if one.labels is not None]
        return Slope(
            sum(one.value for one in found),
            torch.stack([one.inputs for one in found]).sum(0),
            torch.stack(soft).sum(0) if soft else None,
        )


class Clients(_Parts):
    """Every client played by itself, as the round was:  g' = Σ w_k·g'_k(x_k).

    `groups` are weight and number of records of each client; candidates stand client by client.
    With v = ∂D/∂g' at the sum, dD/dx_k = w_k·∇_x ⟨v, g'_k(x_k)⟩.
    """

    def __init__(
        self,
        seen: Observation,
        training: LocalTraining,
        groups: Sequence[tuple[float, int]],
        *,
        device: str,
        dtype: torch.dtype,
        mode: Mode,
    ):
        self._sizes = [size for _, size in groups]
        engines = [
            Engine(seen, alone(training, size, sum(self._sizes), len(groups)), size,
                   device=device, dtype=dtype, mode=mode)
            for size in self._sizes
        ]  # fmt: skip
        super().__init__(engines)
        self._engines = engines
        self.values = sum(engine.values for engine in engines)
        # Units differ where clients of different sizes take different numbers of steps.
        self._shares = [w * self.unit / e.unit for (w, _), e in zip(groups, engines, strict=True)]

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        images, said = torch.split(inputs, self._sizes), torch.split(labels, self._sizes)
        total = [torch.zeros_like(t) for t in self.target]
        for engine, share, x, y in zip(self._engines, self._shares, images, said, strict=True):
            torch._foreach_add_(total, engine.gradient(x, y), alpha=share)
        value, v = distance([t.detach().clone() for t in total], self.target)
        found = [
            engine.slope(x, y, held_to([d * share for d in v]))
            for engine, share, x, y in zip(self._engines, self._shares, images, said, strict=True)
        ]
        soft = [one.labels for one in found if one.labels is not None]
        moved = torch.cat([one.inputs for one in found])
        return Slope(float(value), moved, torch.cat(soft) if soft else None)


def alone(training: LocalTraining, size: int, records: int, clients: int) -> LocalTraining:
    """The training of one client of so many, from that of all together as one super-client: where
    its batches held all records, a client's batch is all that it has."""
    whole = training.batch_size >= records
    batch = size if whole else min(size, max(1, training.batch_size // clients))
    return replace(training, batch_size=batch)
