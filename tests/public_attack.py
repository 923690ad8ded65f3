"""An attack that fits something to public records and changes no model, as a plan names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.errors import NotApplicable
from leakgauge.types import (
    Kept,
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

CALLED: list[Target] = []  # the targets of every prepare() in this process
WHILE: list[Callable[[], None]] = []  # what happens during it


@dataclass(frozen=True)
class MeanPublic:
    """The mean public record, dimmed by a number drawn when it was prepared.

    It adds up records one by one, keeps the sum after each, and goes on from there."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records", "public"})
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        resources = resources or Resources()
        CALLED.append(target)
        if target.public is None:
            raise NotApplicable("there are no public records")
        dimmed = torch.rand((), generator=rng)
        total, done = torch.zeros(target.record.shape), 0
        if resources.checkpoint and (before := resources.checkpoint.load()):
            total, done = before.tensors["total"], before.facts["done"]
        for one in target.public.inputs[done:]:
            total, done = total + one, done + 1
            if resources.checkpoint:
                resources.checkpoint.save(Kept({"total": total}, {"done": done}))
            if resources.progress:
                resources.progress(done, len(target.public), 1.0)
            for happens in WHILE:
                happens()
        return Preparation(Kept({"mean": dimmed * total / done}, {"pair": (1, done)}))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        assert seen.kept is not None
        assert seen.kept.facts == {"pair": [1, seen.kept.facts["pair"][1]]}  # as it is on disk
        guess = seen.kept.tensors["mean"].expand(seen.records, *seen.record.shape)
        facts = {"mean": float(guess.mean()), "public": seen.kept.facts["pair"][1]}
        return Reconstruction(guess.contiguous(), None, residual=0.0, facts=facts)


@dataclass(frozen=True)
class Unprepared:
    """It needs public records, and never meets them."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({"public"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        raise NotImplementedError


def two_channels() -> tuple[torch.Tensor, torch.Tensor]:
    """Records that are neither grey nor coloured."""
    return torch.rand(8, 2, 6, 6), torch.arange(8) % 2
