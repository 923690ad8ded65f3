"""A plan for rounds that were captured (exchanges.py): the files say what the federation is.

`data = { captured = "DIR" }` names the folder; model, training, record and clients come from it,
and every round in it is an attack stage. Where the records of all rounds were captured too, they
are the data: scores and a control are possible. Where not, every trial ends as unscored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from leakgauge import exchanges
from leakgauge.audit.document import NO_DEFENCE, Document, Federation, Table
from leakgauge.errors import PlanError
from leakgauge.exchanges import Manifest
from leakgauge.records import Scale
from leakgauge.types import Batch, Dataset, Exchange, Round

Manifests: TypeAlias = Sequence[tuple[Path, Manifest]]
ATTACKS: tuple[Table, ...] = (
    {"name": "analytic"},
    {"name": "inverting-gradients", "iterations": 300},
)
"""What is tried where nobody named an attack."""


def found(federation: Federation, folder: Path) -> Manifests:
    """The captured rounds that a plan names: none if they are simulated."""
    if federation.captured is None:
        return []
    if len(federation.data) > 1 or not isinstance(federation.captured, str):
        raise PlanError(
            f'federation.data: expected {{ captured = "DIR" }} alone, got {federation.data}'
        )
    return exchanges.manifests(folder / Path(federation.captured).expanduser())


def table(path: Path) -> Table:
    """The plan of a folder alone."""
    federation = {"data": {"captured": str(path)}}
    return {"federation": federation, "attack": list(ATTACKS), "audit": {"seeds": [0]}}


def filled(document: Document, found: Manifests) -> Document:
    """The document with the federation that the files describe."""
    first = found[0][1]
    for path, other in found[1:]:
        if _kind(other) != _kind(first):
            raise PlanError(
                f"{path} is of another federation than {found[0][0].name} (another model, record, "
                "classes, training or number of clients): audit each in a folder of its own"
            )
    unsaid = Federation(data=document.federation.data)
    said = replace(
        unsaid,
        model=first.made_by,
        training=first.training,
        record=Scale(**{k: tuple(v) for k, v in first.record.items() if k in ("mean", "std")}),
        clients=len(first.sizes),
        records=first.sizes[0] if len({*first.sizes}) == 1 else "all",
        server_lr=first.server_lr,
        rounds=tuple(range(len(found))),
        public=document.federation.public,
    )
    for name in (one.name for one in fields(Federation)):
        given = getattr(document.federation, name)
        if given not in (getattr(said, name), getattr(unsaid, name)):
            raise PlanError(
                f"federation.{name}: the captured rounds say it themselves: leave it out"
            )
    if len(document.audit.seeds) > 1:
        raise PlanError(
            "audit.seeds: a captured round holds the same records for every seed, which would be "
            "counted more than once: give one seed"
        )
    if [one.get("name") for one in document.defence] != [NO_DEFENCE]:
        raise PlanError("defence: a captured update has been sent: no defence changes it any more")
    control = document.audit.control and _known(found)
    audit = replace(document.audit, explain=False, control=control)
    return replace(document, federation=said, audit=audit)


def _kind(manifest: Manifest) -> tuple[object, ...]:
    same = ("made_by", "kind", "record", "classes", "training", "server_lr")
    return len(manifest.sizes), *(getattr(manifest, name) for name in same)


def _known(found: Manifests) -> bool:
    """Whether the truths of all rounds are there."""
    return all(exchanges.TRUTH in manifest.digests for _, manifest in found)


def rounds(found: Manifests, model: nn.Module) -> tuple[Exchange, ...]:
    truths = _known(found)
    return tuple(exchanges.exchange(path, one, model, truths=truths) for path, one in found)


def records(path: Path, first: Manifest) -> Dataset:
    """A data set without records: what is known of their kind."""
    inputs = torch.empty(0, *first.record["shape"])
    labels = torch.empty(0, dtype=torch.long)
    return Dataset(f"captured in {path.parent.name}", inputs, labels, first.classes)


def repeated(rounds: Sequence[Exchange], truth: Batch) -> str | None:
    """A caveat, if some of these records stand in several rounds."""
    every = [t.inputs for one in rounds if isinstance(one, Round) for t in one.truths]
    count = Counter(record.numpy().tobytes() for inputs in every for record in inputs)
    again = sum(count[record.numpy().tobytes()] > 1 for record in truth.inputs)
    if not again:
        return None
    return (
        f"{again} of these {len(truth)} records were captured more than once: they are counted "
        "once per round, so the verdict rests on fewer different records than it says"
    )


def with_truths(empty: Dataset, rounds: tuple[Exchange, ...]) -> Dataset:
    """All records that were captured."""
    truths = [t for one in rounds if isinstance(one, Round) for t in one.truths]
    return replace(
        empty,
        inputs=torch.cat([empty.inputs, *(truth.inputs for truth in truths)]),
        labels=torch.cat([empty.labels, *(truth.labels for truth in truths)]),
    )
