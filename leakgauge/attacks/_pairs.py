"""Pairs of public records and the update that they cause: what learned inversion learns from.

Each pair is asked of `Target.query`: a client of the attacked round, which trains on records that
the attacker gives it, under the defence that the attacker would meet. The weights of that client
need not be known. What an attack reads of an update (`Reader`) goes to disk as it comes, in a file
that is mapped into memory; a run that was killed goes on behind the last whole piece. The records
of pair k, and all chance in it, follow from k alone: they are not stored, and every attack with as
many pairs of the same public records learns from the same ones.

Where there are fewer public records than pairs ask for, random variants of them (crops, mirrors,
changes of light) make up the number. The first `held` pairs are held out of the fit, and none of
their records is in a later pair.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._decoder import varied
from leakgauge.errors import InputError, NotApplicable, Withheld
from leakgauge.files import read_plain, write_json
from leakgauge.fitting import Clock
from leakgauge.records import pictures
from leakgauge.tensors import seeded
from leakgauge.types import Batch, Named, Resources, Target

HELD = 500  # pairs held out, and at most a tenth of all
LEAST = 20  # pairs without which nothing is learned
PIECE = 50  # pairs between two notes of how far it went

Reader: TypeAlias = Callable[[Named], Tensor]
"""What an attack reads of an update: a row of numbers, always as many."""


@dataclass(frozen=True)
class Pairs:
    """`read[k]` is what was read of the update that `inputs(k)` caused."""

    target: Target
    asked: int  # how many there should be; with fewer the time was up
    read: Tensor  # (N, entries), mapped into memory
    held: int
    fresh: Tensor  # public records for the pairs that learn, in their order
    aside: Tensor  # public records of the pairs held out
    _place: contextlib.ExitStack = field(repr=False)  # a folder that goes with it

    def __len__(self) -> int:
        return len(self.read)

    def close(self) -> None:
        """Leave the folder, which is gone then if it was a temporary one."""
        self._place.close()

    def inputs(self, rows: Sequence[int]) -> Tensor:
        """The records of these pairs: (rows, records, C, H, W)."""
        return torch.stack([self._batch(k).inputs for k in rows])

    @property
    def variants(self) -> int:
        """How many pairs hold records that were shown before."""
        return max(0, len(self) - self.held - len(self.fresh) // self.target.records)

    def _batch(self, k: int) -> Batch:
        public, size, rng = self.target.public, self.target.records, seeded("pair", k)
        assert public is not None
        own, first = (self.aside, k) if k < self.held else (self.fresh, k - self.held)
        shown = first * size + torch.arange(size)
        chosen = own[shown % len(own)]
        inputs, labels = public.inputs[chosen].float(), public.labels[chosen]
        if (again := shown >= len(own)).any():
            inputs[again] = varied(inputs[again], rng)
        other = torch.randint(self.target.task.count, (size,), generator=rng)
        return Batch(inputs, torch.where(labels < 0, other, labels))

    @classmethod
    def asked_of(
        cls,
        target: Target,
        count: int,
        reader: Reader,
        resources: Resources,
        clock: Clock,
        progress: Callable[[int], None],
    ) -> Pairs:
        """So many pairs, or as many as there is time for; `progress` hears how many there are."""
        public, size = target.public, target.records
        assert public is not None
        order = torch.randperm(len(public), generator=seeded("pairs", len(public)))
        held = min(HELD, count // 10, max(1, len(public) // (10 * size)))
        aside, fresh = order[: held * size], order[held * size :]
        with torch.no_grad():
            width = len(reader({n: torch.zeros(p.shape) for n, p in _trained(target)}))
        with contextlib.ExitStack() as stack:
            folder = resources.folder
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            read, done = _mapped(folder, count, width)
            pairs = cls(target, count, read, held, fresh, aside, stack)
            while done < count and not clock.up:
                end = min(count, done + PIECE)
                for k in range(done, end):
                    read[k] = pairs._read(k, reader)
                done = end
                _note(folder, count, width, done)
                progress(done)
            if done < min(count, max(LEAST, 2 * held)):
                raise NotApplicable(
                    f"the time was up after {done} of {count} pairs, too few to learn from: give "
                    "the attack more seconds, or fewer pairs"
                )
            return cls(target, count, read[:done], held, fresh, aside, stack.pop_all())

    def _read(self, k: int, reader: Reader) -> Tensor:
        assert self.target.query is not None
        update = self.target.query(self._batch(k), seeded("query", k))
        row = reader(update)
        if not row.isfinite().all():
            raise InputError(
                f"the update of public records is not finite (pair {k}): lower the learning rate "
                "of the local training, or check the model"
            )
        return row


def _trained(target: Target) -> list[tuple[str, Tensor]]:
    return [(n, p) for n, p in target.model.named_parameters() if p.requires_grad]


def _mapped(folder: Path, count: int, width: int) -> tuple[Tensor, int]:
    """The file of what was read, as a tensor, and how many of its rows are there."""
    place, note = folder / "pairs.f32", folder / "pairs.json"
    try:
        found: Any = json.loads(read_plain(note)) if note.exists() and place.exists() else {}
    except ValueError:
        found = {}
    same = isinstance(found, dict) and (found.get("count"), found.get("width")) == (count, width)
    need, room = 4 * count * width, shutil.disk_usage(folder).free
    if not same and need > room:
        raise InputError(
            f"{count:,} pairs of {width:,} numbers take {need / 2**30:.1f} GiB in {folder}, and "
            f"{room / 2**30:.1f} GiB are free: ask for fewer pairs or entries, or make room"
        )
    done = int(found["done"]) if same else 0
    if not same:
        note.unlink(missing_ok=True)
        place.unlink(missing_ok=True)
    rows = torch.from_file(str(place), shared=True, size=count * width, dtype=torch.float32)
    return rows.view(count, width), done


def _note(folder: Path, count: int, width: int, done: int) -> None:
    write_json(folder / "pairs.json", {"count": count, "width": width, "done": done})


def check(target: Target, count: int) -> None:
    """Refuse what no pairs can be made of."""
    record = pictures(target.record)
    public = target.public
    if public is None or not len(public):
        raise Withheld("learned inversion learns from public records, and holds none")
    if target.query is None:
        raise Withheld(
            "learned inversion asks what update its public records cause, and has nobody to ask: "
            "give a target with a query, as fl.target makes it"
        )
    if tuple(public.inputs.shape[1:]) != record.shape:
        raise InputError(
            f"the public images are {tuple(public.inputs.shape[1:])} and the clients' records "
            f"{record.shape}: resize them"
        )
    if count < LEAST:
        raise InputError(f"learned inversion needs at least {LEAST} pairs, got {count}")
    if len(public) < 2 * target.records:
        raise InputError(
            f"an update of {target.records} records needs at least {2 * target.records} public "
            f"images, half of them to be judged on, got {len(public)}"
        )


def sketched(name: str, row: Tensor, most: int) -> Tensor:
    """At most so many numbers in place of a longer row: each entry is added, with a random sign, to
    one of `most` places (a sparse random projection, count sketch). They follow from the name."""
    if len(row) <= most:
        return row
    place, sign = _places(name, len(row), most)
    spread = torch.zeros(most).index_add_(0, place, row * sign)
    return spread / math.sqrt(len(row) / most)


@lru_cache(maxsize=512)
def _places(name: str, entries: int, most: int) -> tuple[Tensor, Tensor]:
    rng = seeded("sketch", name, entries, most)
    place = torch.randint(most, (entries,), generator=rng)
    return place, torch.randint(2, (entries,), generator=rng) * 2.0 - 1.0
