"""An attack that learns from pairs of public records and the updates that they cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.errors import Withheld
from leakgauge.types import (
    Batch,
    Kept,
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

CALLED: list[Target] = []  # the targets of every prepare() in this process
SEEN: list[Observation] = []  # what every reconstruct() was given


@dataclass(frozen=True)
class Nearest:
    """The public record whose update is most like the one that was sent.

    It asks for one update after the other, keeps them after each, and goes on from there."""

    pairs: int = 12
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records", "public"})
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        CALLED.append(target)
        resources = resources or Resources()
        public, query = target.public, target.query
        if public is None or query is None:
            raise Withheld("nearest asks what updates public records cause")
        found: list[torch.Tensor] = []
        if resources.checkpoint and (before := resources.checkpoint.load()):
            found = list(before.tensors["updates"])
        for i in range(len(found), self.pairs):
            labels = public.labels[i : i + 1].clamp_min(0)  # of no class: any will do
            batch = Batch(public.inputs[i : i + 1], labels)
            update = query(batch, torch.Generator().manual_seed(i))
            found.append(torch.cat([value.flatten() for value in update.values()]))
            if resources.folder:
                resources.folder.mkdir(parents=True, exist_ok=True)
                (resources.folder / "pairs").write_bytes(b"bulky")
            if resources.checkpoint:
                resources.checkpoint.save(Kept({"updates": torch.stack(found)}))
            if resources.progress:
                resources.progress(i + 1, self.pairs, 1.0)
        records = public.inputs[: self.pairs]
        return Preparation(Kept({"updates": torch.stack(found), "records": records}))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        SEEN.append(seen)
        if seen.kept is None or seen.records is None:
            raise Withheld("nearest needs 'records' and what its prepare() kept")
        sent = torch.cat([value.flatten() for value in seen.update.values()])
        likeness = torch.cosine_similarity(seen.kept.tensors["updates"], sent[None])
        order = likeness.argsort(descending=True)[: seen.records]
        guess = seen.kept.tensors["records"][order]
        return Reconstruction(guess, None, residual=1 - float(likeness.max()))
