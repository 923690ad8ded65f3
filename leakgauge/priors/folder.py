"""A prior in a folder: its weights, and what it is and was trained on.

`prior.safetensors` holds the tensors of a `Kept`, `prior.json` its facts. Facts that every prior
has: `kind`, `shape` (C, H, W), `options` of its training, `data` and `records` (the name and the
number of what it was trained on). The tensor `digests` (records, 16) holds a digest of each of
these records, so that whoever uses the prior against a client can check that the client's records
were not among them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.errors import CheckpointError
from leakgauge.files import read_plain, read_tensors, write_atomic, write_json, write_tensors
from leakgauge.tensors import raw
from leakgauge.types import Kept

WEIGHTS, FACTS = "prior.safetensors", "prior.json"
DIGESTS = "digests"


def write(kept: Kept, folder: Path, beside: Mapping[str, bytes] | None = None) -> None:
    """Each file whole or not at all; the facts last, so that a folder with facts is complete.
    `beside` are files of another form of the same prior."""
    (folder / FACTS).unlink(missing_ok=True)
    for name, content in (beside or {}).items():
        write_atomic(folder / name, content)
    write_tensors(folder / WEIGHTS, kept.tensors)
    write_json(folder / FACTS, dict(kept.facts))


def read(folder: Path) -> Kept:
    """The prior in a folder."""
    facts = read_facts(folder)
    return Kept(read_tensors(folder / WEIGHTS), facts)


def read_facts(folder: Path) -> dict[str, Any]:
    """What a prior is and was trained on, without its weights."""
    try:
        facts = json.loads(read_plain(folder / FACTS))
    except FileNotFoundError:
        raise CheckpointError(
            f"no prior in {folder}: expected a folder with {FACTS} and {WEIGHTS}, as `leakgauge "
            "prior train` makes it"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / FACTS} cannot be read ({error}): train it anew"
        ) from error
    needed = {"kind": str, "shape": list, "options": dict, "data": str, "records": int}
    for key, kind in needed.items():
        if not isinstance(facts, dict) or not isinstance(facts.get(key), kind):
            raise CheckpointError(
                f"{folder / FACTS} is not that of a prior: expected {key!r} of type "
                f"{kind.__name__}; train it anew with `leakgauge prior train`"
            )
    found: dict[str, Any] = facts
    return found


def digests(records: Tensor) -> Tensor:
    """One digest (16 bytes) per record."""
    each = [hashlib.blake2b(raw(record), digest_size=16).digest() for record in records]
    return torch.frombuffer(bytearray(b"".join(each)), dtype=torch.uint8).view(-1, 16)
