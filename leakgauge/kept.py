"""What a preparation keeps, on disk: tensors and plain facts, written whole or not at all.

The key names everything that the preparation depends on, so that what was kept for another model,
other options, other public records or another seed is never met again.

A checkpoint holds what an attack saved on its way, and only the attack knows how far that is: it
loads it, and goes on or finds that nothing is left to do. A preparation that changes no model is
the same for every trial with this model, training and public records. An audit therefore keeps it
once more when it is finished, in a file of its own, and does not ask the attack again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from leakgauge.config import plain
from leakgauge.errors import CheckpointError, InputError
from leakgauge.files import read_tensors, write_tensors
from leakgauge.tensors import raw
from leakgauge.types import Attack, Exchange, Kept, Target

FACTS = "facts"  # the tensor that holds the facts, as the bytes of their JSON


@dataclass(frozen=True)
class Checkpoint:
    """A file in which a long preparation is kept now and then, and from which it goes on."""

    path: Path
    key: str

    def save(self, kept: Kept, seconds: float | None = None) -> None:
        """Keep it; `seconds` of CPU time are what a finished one took."""
        content = {"key": self.key, "facts": dict(kept.facts), "seconds": seconds}
        try:
            facts = json.dumps(content).encode()
        except (TypeError, ValueError) as error:
            raise InputError(
                "what a preparation keeps must be tensors and plain facts (numbers, texts, lists "
                f"and tables of them), so that it can lie on disk; its facts are not: {error}"
            ) from error
        text = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
        write_tensors(self.path, {**kept.tensors, FACTS: text})

    def load(self) -> Kept | None:
        """What was kept, or None if nothing was; refused if it is of another preparation."""
        found = self.finished()
        return found and found[0]

    def finished(self) -> tuple[Kept, float] | None:
        """The same, and the seconds that it took."""
        if not self.path.exists():
            return None
        tensors = read_tensors(self.path)
        try:
            content = json.loads(tensors.pop(FACTS).numpy().tobytes())
            key, facts = content["key"], content["facts"]
            seconds = float(content.get("seconds") or 0.0)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} is not what a preparation keeps: remove it to start anew"
            ) from error
        if key != self.key:
            raise CheckpointError(
                f"{self.path} was kept with other options, another model, other public records or "
                "another seed: name another file, or remove it to start anew"
            )
        return Kept(tensors, facts), seconds


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock on this file, which is made for it and gone afterwards; whoever else wants it
    waits. The kernel releases it however its holder ends."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return  # else the holder before us has removed it meanwhile


def key_of(
    attack: Attack,
    target: Target,
    rng: torch.Generator | None = None,
    behind: Exchange | None = None,
) -> str:
    """Differs when a preparation could; `rng` is left out where it is always the same. `behind` is
    the round itself: what queries give follows from its weights and its training, whether or not
    the target holds them."""
    model, told = target.model, plain(target.training)
    if behind is not None:
        model, told = behind.model, [told, plain(behind.training), behind.server_lr]
    elif target.weights is None or (target.training is None and target.query is not None):
        raise InputError(
            "what is kept is found again by the weights and the training behind it, and this "
            "target holds them not: give the round as `behind`"
        )
    options = attack if dataclasses.is_dataclass(attack) else getattr(attack, "__dict__", {})
    content = [
        f"{type(attack).__module__}:{type(attack).__qualname__}", plain(options),
        told, target.records, target.clients,
        str(target.record), str(target.task), str(target.model), target.weights is None,
        target.query is None, target.defence and [target.defence, target.round],
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(content, default=str).encode())
    public = () if target.public is None else (target.public.inputs, target.public.labels)
    drawn = () if rng is None else (rng.get_state(),)
    for tensor in (*model.state_dict().values(), *public, *drawn):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()
