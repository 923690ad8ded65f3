"""The public records of a plan: what any attacker may hold, and no client does; and how records
are set aside at all.

`federation.public` is a number of the plan's own records, set aside before the clients share out
the rest; or another data set; or nothing. Then a malicious server is given a quarter of the plan's
records, and a plan with an attack that needs public records has the photographs that come with the
package. No public record equals a client's, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from leakgauge import data
from leakgauge.audit.document import Federation, Table
from leakgauge.audit.results import Public, Source
from leakgauge.errors import LeakGaugeError, PlanError
from leakgauge.tensors import raw
from leakgauge.types import Dataset

GREY = (0.299, 0.587, 0.114)  # of red, green and blue
EVERY = 1000  # crops of a photograph: more than it has


def shared_out(
    federation: Federation,
    records: Dataset,
    load: Callable[[str | Table], Dataset],
    *,
    malicious: bool,
    needed: bool,
) -> tuple[Dataset, Source, Dataset]:
    """The public records, where they are from, and the records of the clients. `load` reads the
    data set that the plan names; `needed` says that an attack of the plan needs some."""
    declared = federation.public
    if declared is not None and not isinstance(declared, int):
        return _named(load(declared), records), "named", records
    if federation.captured is not None and declared:
        raise PlanError(
            f"federation.public = {declared}: captured records have been trained on, and none can "
            'be set aside; name a data set, such as { folder = "…", size = 32 }, or leave it out'
        )
    if declared is None and needed and not malicious and (found := _embedded(records)) is not None:
        return found, "embedded", records
    if declared is None and federation.captured is None and (malicious or needed):
        declared = min(1000, len(records) // 4)
    if declared and declared >= len(records):
        raise PlanError(
            f"federation.public sets {declared} records aside, but {records.name} has only "
            f"{len(records)}: leave some for the clients"
        )
    public, private = set_aside(records, declared or 0, torch.Generator().manual_seed(0))
    if needed and not len(public):
        raise PlanError(
            f"an attack of the plan needs public records, and {records.name} has none to spare "
            "that no client holds: name a data set in federation.public, or leave the attack out"
        )
    return public, "set aside", private


def set_aside(records: Dataset, count: int, rng: torch.Generator) -> tuple[Dataset, Dataset]:
    """So many records and the others, the same in every trial. One whose equal is among the others,
    because the set holds it twice, is left out."""
    order = torch.randperm(len(records), generator=rng)
    chosen, rest = order[:count].sort().values, order[count:].sort().values
    aside, others = (
        replace(records, inputs=records.inputs[i], labels=records.labels[i]) for i in (chosen, rest)
    )
    return without(aside, others), others


def without(records: Dataset, others: Dataset) -> Dataset:
    """Those records that equal none of the others, bit for bit."""
    own = ~_shared(records.inputs, others.inputs)
    return replace(records, inputs=records.inputs[own], labels=records.labels[own])


def _named(public: Dataset, clients: Dataset) -> Dataset:
    """Another data set, if its records are of the same shape and no client's."""
    if public.inputs.shape[1:] != clients.inputs.shape[1:]:
        raise PlanError(
            f"federation.public: the records of {public.name} are {_times(public.inputs)}, those "
            f"of the clients {_times(clients.inputs)}, and none is resized or converted: give "
            "public records of the same shape (a folder has the options size and channels)"
        )
    if same := int(_shared(public.inputs, clients.inputs).sum()):
        raise PlanError(
            f"federation.public: {same} of the {len(public):,} records of {public.name} are also "
            f"the clients', bit for bit ({clients.name}): public records must be no client's. "
            "Give another data set or split, or a number of records to set aside"
        )
    return _labelled(public, clients)


def _embedded(clients: Dataset) -> Dataset | None:
    """Crops of the photographs that come with the package, in the shape of the clients' records;
    None if the clients hold such crops themselves."""
    channels, height, width = clients.inputs.shape[1:]
    if channels not in (1, 3):
        raise PlanError(
            f"an attack of the plan needs public records, and the photographs that serve where "
            f"none are declared have 1 or 3 channels, the clients' records {channels}: declare "
            "federation.public"
        )
    try:
        photos = data.load("photos", size=max(height, width), per_photo=EVERY)
    except LeakGaugeError as error:
        raise PlanError(
            "an attack of the plan needs public records, and the photographs that serve where none "
            f"are declared cannot be used ({error}). Declare federation.public instead"
        ) from error
    top, left = (photos.inputs.shape[2] - height) // 2, (photos.inputs.shape[3] - width) // 2
    inputs = photos.inputs[:, :, top : top + height, left : left + width]
    if channels == 1:
        inputs = (inputs * inputs.new_tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)
    if _shared(inputs, clients.inputs).any():
        return None
    return _labelled(replace(photos, inputs=inputs.clamp(0, 1).contiguous()), clients)


def told(public: Public) -> str:
    """What the knowledge table of a report says of them."""
    words = {
        "set aside": f"{public.records:,} records of {public.data} that were set aside before the "
        "clients shared out the rest",
        "named": f"{public.records:,} records of {public.data}, which the plan names",
        "embedded": f"{public.records:,} crops of the photographs that come with the package, "
        "because the plan declares no public records",
    }[public.source]
    words += (
        "; none of them is a client's"
        if public.checked
        else "; whether one of them is a client's cannot be checked, as nobody kept the truth"
    )
    if public.source == "set aside" and public.data == "photos":
        words += ", but they are crops of the same photographs, which overlap"
    if public.source == "embedded":
        words += f". {COST}"
    return words


COST = (
    "What is fitted on a few photographs is weaker than what public records of the clients' own "
    "kind would give: declare federation.public to measure that"
)


def _shared(public: Tensor, private: Tensor) -> Tensor:
    """Which public records a client holds too, bit for bit."""
    held = {_digest(record) for record in private} if len(public) else set()
    return torch.tensor([_digest(record) in held for record in public], dtype=torch.bool)


def _digest(record: Tensor) -> bytes:
    return hashlib.blake2b(raw(record), digest_size=16).digest()


def _labelled(public: Dataset, clients: Dataset) -> Dataset:
    """With the labels of the clients' classes, by their names; -1 for any other class."""
    known = {name: label for label, name in enumerate(clients.classes)}
    labels = torch.tensor([known.get(name, -1) for name in public.classes])[public.labels]
    return replace(public, labels=labels, classes=clients.classes)


def _times(records: Tensor) -> str:
    return " × ".join(map(str, records.shape[1:]))
