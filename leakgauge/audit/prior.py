"""Priors in a folder: how one is trained into it, and what a plan that names one must know.

What a prior was trained on is knowledge of its attacker, like public records: none of it may be a
client's, and a report says what it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge import priors
from leakgauge.audit.images import contact_sheet
from leakgauge.config import build, choose, plain
from leakgauge.errors import CheckpointError, PlanError
from leakgauge.files import write_atomic
from leakgauge.kept import Checkpoint, alone
from leakgauge.priors import folder as folders
from leakgauge.ranges import check_numbers
from leakgauge.tensors import raw, seeded
from leakgauge.types import Dataset, Kept, Resources

CHECKPOINT, LOCK, SHEET = "training.safetensors", ".training.lock", "samples.png"
SAMPLES = 32  # on a sheet


@dataclass(frozen=True)
class Course:
    """What `train` is asked for: a kind of prior with its options, so many of these records (all,
    if None), and a seed from which all chance follows."""

    kind: str
    options: Mapping[str, Any]
    data: Dataset
    records: int | None = None
    seed: int = 0

    def training(self) -> priors.Training:
        """The options, checked."""
        where = f"prior {self.kind!r}"
        made = build(choose(priors.KINDS, self.kind, "kind of prior"), self.options, where)
        check_numbers(made, where)
        return made

    def public(self) -> Dataset:
        """The records that the prior is trained on."""
        if self.records is None or self.records == len(self.data):
            return self.data
        if self.records > len(self.data):
            raise PlanError(
                f"{self.records:,} records are asked for, and {self.data.name} has only "
                f"{len(self.data):,}"
            )
        order = torch.randperm(len(self.data), generator=seeded("prior records", self.seed))
        chosen = order[: self.records].sort().values
        inputs, labels = self.data.inputs[chosen], self.data.labels[chosen]
        return replace(self.data, inputs=inputs, labels=labels)


def train(
    course: Course, out: Path, *, overwrite: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[Kept, bool]:  # fmt: skip
    """Train a prior into a folder; a training that was stopped there goes on. The prior, and
    whether it was there already."""
    training, public = course.training(), course.public()
    key = _key(course, training, public)
    if out.exists() and not out.is_dir():
        raise PlanError(f"{out} is no folder: name another")
    with alone(out / LOCK):
        if overwrite:
            for name in (folders.FACTS, CHECKPOINT):
                (out / name).unlink(missing_ok=True)
        if (out / folders.FACTS).is_file():
            kept = folders.read(out)
            if kept.facts.get("key") == key:
                return kept, True
            raise PlanError(
                f"{out} holds another prior, or one of other records, options or another seed: "
                "name another folder, or give --overwrite"
            )
        checkpoint = Checkpoint(out / CHECKPOINT, key)
        rng = seeded("prior", course.kind, course.seed)
        try:
            made = training.train(public, rng, Resources(progress=progress, checkpoint=checkpoint))
        except CheckpointError as error:
            raise CheckpointError(f"{error} (--overwrite does that)") from error
        kept = Kept(made.tensors, {**made.facts, "seed": course.seed, "key": key})
        write_atomic(out / SHEET, sampled(kept, course.seed))
        priors.save(kept, out)
        checkpoint.path.unlink(missing_ok=True)
        for half in out.glob(f".{CHECKPOINT}.*.tmp"):  # of a write that was killed
            half.unlink(missing_ok=True)
        return kept, False


def _key(course: Course, training: priors.Training, public: Dataset) -> str:
    options: Any = plain(training) if dataclasses.is_dataclass(training) else None
    content = [course.kind, options, public.name, public.classes, course.seed]
    digest = hashlib.sha256(json.dumps(content, default=str).encode())
    for values in (public.inputs, public.labels):
        digest.update(f"{tuple(values.shape)}".encode())
        digest.update(raw(values))
    return digest.hexdigest()


def sampled(kept: Kept, seed: int = 0, count: int = SAMPLES) -> bytes:
    """What a prior shows without any update, as PNG."""
    return contact_sheet(priors.opened(kept).sample(count, seeded("prior samples", seed)))


def check_clean(described: priors.Described, clients: Tensor, where: str, name: str) -> None:
    """Refuse a prior that was trained on a client's record, bit for bit."""
    if described.digests is None:
        return
    known = {bytes(row) for row in described.digests.numpy()}
    same = sum(bytes(row) in known for row in folders.digests(clients).numpy())
    if same:
        raise PlanError(
            f"{where}: the prior {described.place} was trained on {same} of the clients' records, "
            f"bit for bit ({name}): what it shows would be no work of the attack. Train one on "
            "records that no client holds, such as another split"
        )


def told(described: priors.Described, shape: tuple[int, ...], known: bool = True) -> str:
    """What the knowledge table of a report says of a prior; `known` are the clients' records, or
    not."""
    facts = described.facts
    if described.digests is None:
        return (
            f"a {facts['kind']} that was trained elsewhere ({facts.get('foreign', 'unknown')}): "
            "nobody can check whether a client's record was among what it learned from"
        )
    words = f"a {facts['kind']} trained on {facts['records']:,} records of {facts['data']}"
    if not known:
        return f"{words}; whether one of them is a client's cannot be checked"
    if list(shape) != list(facts["shape"]):
        own = " × ".join(map(str, facts["shape"]))
        return (
            f"{words}, at {own}: whether one of them is a client's cannot be checked at that size"
        )
    return f"{words}; none of them is a client's, bit for bit"
