"""Files, safely: written whole or not at all, and read without running what is in them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from leakgauge.errors import CheckpointError, PlanError
from leakgauge.types import Named


def write_atomic(path: Path, content: bytes) -> None:
    """Write beside the target and rename: readers see the old file or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written: {error.strerror}; make room, or name another folder"
        ) from error


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def read_plain(path: Path) -> bytes:
    """The content of a plain file. What may never end (a pipe, a socket, a device) is an OSError,
    without being opened."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, expected a plain file")
    return path.read_bytes()


def read_tensors(path: Path) -> Named:
    """The tensors of a `.safetensors`, `.pt` or `.pth` file; what could run code is refused."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise CheckpointError(f"A checkpoint ends in .safetensors, .pt or .pth, got {path}.")
    if not path.is_file():
        raise CheckpointError(f"There is no file of weights at {path}: check the path.")
    try:
        content: Any = (
            safetensors.torch.load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a plain file of tensors, and unpickling it could run code: refused. "
            "Save model.state_dict(), best as .safetensors."
        ) from error
    except Exception as error:  # the readers answer a damaged file with a dozen kinds of error
        raise CheckpointError(
            f"{path} could not be read ({type(error).__name__}): it is truncated, damaged or "
            f"not a {path.suffix} file. Copy or download it again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, expected names and tensors: "
            "save model.state_dict()."
        )
    others = {str(k) for k, v in content.items() if not (type(k) is str and isinstance(v, Tensor))}
    if others:
        raise CheckpointError(
            f"{path} holds {some(others)}, which is not a named tensor: a training checkpoint? "
            "Save model.state_dict() alone."
        )
    return content


def write_tensors(path: Path, tensors: Named) -> None:
    """Named tensors as `.safetensors`. Cloned, because the format refuses shared memory."""
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    write_atomic(path, safetensors.torch.save(plain))


def some(names: Iterable[str]) -> str:
    """The first names in words: "nothing", or "a, b, c and 7 more"."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "nothing"
