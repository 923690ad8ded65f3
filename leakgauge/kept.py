"""What a preparation keeps, on disk: tensors and plain facts, written whole or not at all.

The key names everything that the preparation depends on, so that what was kept for another model,
other options, other public records or another seed is never met again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from leakgauge.errors import CheckpointError
from leakgauge.files import read_tensors, write_tensors
from leakgauge.tensors import raw
from leakgauge.types import Attack, Kept, Target

FACTS = "facts"  # the tensor that holds the facts, as the bytes of their JSON


@dataclass(frozen=True)
class Checkpoint:
    """A file in which a long preparation is kept now and then, and from which it goes on."""

    path: Path
    key: str

    def save(self, kept: Kept) -> None:
        facts = json.dumps({"key": self.key, "facts": dict(kept.facts)}).encode()
        text = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
        write_tensors(self.path, {**kept.tensors, FACTS: text})

    def load(self) -> Kept | None:
        """What was kept, or None if nothing was; refused if it is of another preparation."""
        if not self.path.exists():
            return None
        tensors = read_tensors(self.path)
        try:
            content = json.loads(tensors.pop(FACTS).numpy().tobytes())
            key, facts = content["key"], content["facts"]
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} is not what a preparation keeps: remove it to start anew"
            ) from error
        if key != self.key:
            raise CheckpointError(
                f"{self.path} was kept with other options, another model, other public records or "
                "another seed: name another file, or remove it to start anew"
            )
        return Kept(tensors, facts)


def key_of(attack: Attack, target: Target, rng: torch.Generator) -> str:
    """Differs when a preparation could."""
    options = dataclasses.asdict(attack) if dataclasses.is_dataclass(attack) else repr(attack)
    told = [
        f"{type(attack).__module__}:{type(attack).__qualname__}", options,
        dataclasses.asdict(target.training), target.records, target.clients,
        str(target.record), str(target.task), str(target.model),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(told, default=str).encode())
    public = () if target.public is None else (target.public.inputs, target.public.labels)
    for tensor in (*target.model.state_dict().values(), *public, rng.get_state()):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()
