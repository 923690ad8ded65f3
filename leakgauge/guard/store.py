"""What a client remembers of one federation, on disk: one file, replaced whole or not at all.

    STORE/history.safetensors   the last accepted model and an older one; in the header what else a
                                History holds, the client's secret with it
    STORE/overrides.jsonl       what an operator vouched for: one line each
    STORE/.lock                 held while a round is added

Folder and files belong to their owner alone (0700, 0600): who knows the secret knows what the guard
will sample.
Weights and header are one file, so a crash leaves the old round or the new one, never a mixture.
The header also names the federation, by the names, shapes and types of the client's own network,
and a digest of it all: what was damaged, or made for another network, is an error and never an
empty memory. Nothing in the file can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from leakgauge.errors import CheckpointError, PlanError
from leakgauge.files import write_atomic
from leakgauge.types import History, Named

FORMAT = "leakgauge-guard-2"
ANCHOR = "anchor/"  # before the names of the older model
PATIENCE = 10.0  # seconds to wait for another process
KEPT = 1000  # rounds of which digests and snapshots are kept


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Of a federation: the names, shapes and types of its network's tensors."""
    layout = [(name, list(t.shape), str(t.dtype)) for name, t in sorted(state.items())]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def read(folder: Path, federation: str) -> History | None:
    """The memory of this federation; None if no round was ever accepted in this folder."""
    path = folder / "history.safetensors"
    if not path.exists():
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file: name a folder for the guard's store.")
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header.get("format") != FORMAT:
            raise ValueError("it was not written by this guard, or by an older one")
        if header.pop("digest", None) != _digest(state, header):
            raise ValueError("its contents are not those that were written")
        history = _history(state, json.loads(header["memory"]))
    except Exception as error:  # the reader answers a damaged file with a dozen kinds of error
        raise CheckpointError(
            f"the guard's store {path} cannot be used ({error}): put back a copy, or remove the "
            "folder if the client is to start again without a memory."
        ) from error
    if header["federation"] != federation:
        raise CheckpointError(
            f"the guard's store {folder} belongs to another network than this client builds: give "
            "each federation a store of its own."
        )
    return history


def add(folder: Path, federation: str, history: History, after: int) -> None:
    """Replace the memory, if it is still the one that ended with round number `after`."""
    with _locked(folder):
        found = read(folder, federation)
        rounds = found.rounds if found else 0
        if rounds != after:
            raise CheckpointError(
                f"the guard's store {folder} holds {rounds} rounds, expected {after}: another "
                "process accepted a round meanwhile. Check the model again, and give each client "
                "a store of its own."
            )
        tensors = dict(history.state) | {ANCHOR + n: t for n, t in history.anchor.items()}
        state = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        memory = {
            "rounds": history.rounds,
            "own": dict(history.own),
            "since": dict(history.since),
            "age": history.age,
            "digests": list(history.digests[-KEPT:]),
            "snapshots": [[dict(one) for one in snap] for snap in history.snapshots[-KEPT:]],
            "secret": history.secret.hex(),
        }
        header = {
            "format": FORMAT,
            "federation": federation,
            "memory": json.dumps(memory, allow_nan=False),
        }
        header["digest"] = _digest(state, header)
        try:
            content = safetensors.torch.save(state, header)
            write_atomic(folder / "history.safetensors", content, private=True)
        except PlanError as error:
            raise CheckpointError(str(error)) from error


def _digest(state: Named, header: Mapping[str, str]) -> str:
    total = hashlib.sha256(json.dumps(dict(sorted(header.items()))).encode())
    for name, tensor in sorted(state.items()):
        total.update(name.encode() + b"\0")
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _history(tensors: Named, memory: dict[str, Any]) -> History:
    return History(
        state={n: t for n, t in tensors.items() if not n.startswith(ANCHOR)},
        rounds=int(memory["rounds"]),
        own=_norms(memory["own"]),
        anchor={n.removeprefix(ANCHOR): t for n, t in tensors.items() if n.startswith(ANCHOR)},
        since=_norms(memory["since"]),
        age=int(memory["age"]),
        digests=tuple(map(str, memory["digests"])),
        snapshots=tuple(
            tuple({n: _three(v) for n, v in one.items()} for one in snap)
            for snap in memory["snapshots"]
        ),
        secret=bytes.fromhex(memory["secret"]),
    )


def _norms(table: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in table.items()}


def _three(values: Any) -> tuple[float, float, float]:
    mean, std, largest = map(float, values)
    return mean, std, largest


def log(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add a line to the folder's overrides.jsonl."""
    with _locked(folder), open(folder / "overrides.jsonl", "a", opener=_private) as file:
        file.write(json.dumps(dict(entry), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _owned(folder: Path) -> None:
    """The folder, for its owner alone: also one that was made with other rights."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other process adds a round meanwhile. The system releases the lock when we end."""
    import fcntl  # not on Windows, where only the guard's store is missing

    try:
        _owned(folder)
        file = open(folder / ".lock", "a", opener=_private)  # noqa: SIM115  closed below
    except OSError as error:
        raise CheckpointError(
            f"the guard's store {folder} cannot be written: {error.strerror}; name another folder"
        ) from error
    with file:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"another process holds the guard's store {folder}: give each client a "
                        "store of its own, or wait for it to end."
                    ) from error
                time.sleep(0.05)
        yield
