"""Files, safely: written whole or not at all, and read without running what is in them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import pickletools
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from leakgauge.errors import CheckpointError, PlanError
from leakgauge.types import Named


def write_atomic(path: Path, content: bytes, *, private: bool = False, fresh: bool = False) -> None:
    """Write beside the target and rename: readers see the old file or the new one, never half.

    A `private` file can be read and written by its owner alone, from its first byte on. A `fresh`
    one replaces none.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                os.link(temporary, path)
                temporary.unlink()
            else:
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written: {error.strerror}; make room, or name another folder"
        ) from error


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, f"{json_text(value)}\n".encode())


def read_plain(path: Path) -> bytes:
    """The content of a plain file. What may never end (a pipe, a socket, a device) is an OSError,
    without being opened."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, expected a plain file")
    return path.read_bytes()


def read_tensors(path: Path, most: int | None = None) -> Named:
    """The tensors of a `.safetensors`, `.pt` or `.pth` file; what could run code is refused.

    So is a file that would grow in memory beyond its own size, or beyond `most` bytes of tensors:
    both are known from what it declares, before any tensor is read.
    """
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise CheckpointError(f"A checkpoint ends in .safetensors, .pt or .pth, got {path}.")
    if not path.is_file():
        raise CheckpointError(f"There is no file of weights at {path}: check the path.")
    declared = _declared(path)
    if most is not None and path.suffix != ".safetensors" and not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not a file of torch.save, or of PyTorch before 1.6, whose sizes cannot be "
            "known before it is read: refused. Save model.state_dict(), best as .safetensors."
        )
    if most is not None and declared > most:
        raise CheckpointError(
            f"{path} declares {declared:,} bytes of tensors, expected {most:,} at most for this "
            "network: it was not read."
        )
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


def _declared(path: Path) -> int:
    """The bytes of tensors that a file says it holds, without reading one.

    0 for what is no such file at all, or in the oldest format of torch.save: its reader says so.
    """
    try:
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    return 0
                header = json.loads(file.read(size))
            tensors = (v for k, v in header.items() if k != "__metadata__")
            return sum(int(end) - int(start) for start, end in (t["data_offsets"] for t in tensors))
        if not zipfile.is_zipfile(path):
            return 0
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in parts):
                raise CheckpointError(
                    f"{path} is a compressed archive, which torch.save never writes: it could fill "
                    "the memory, and was not read. Save model.state_dict(), best as .safetensors."
                )
            declared = sum(one.file_size for one in parts)
            if declared > path.stat().st_size:
                raise CheckpointError(
                    f"{path} declares {declared:,} bytes but has {path.stat().st_size:,}: it is "
                    "damaged or made to fill the memory, and was not read."
                )
            for one in parts:
                if one.filename.rpartition("/")[2] == "data.pkl":
                    strange = sorted(set(_called(archive.read(one))))
                    if strange:
                        raise pickle.UnpicklingError(strange[0])
            return declared
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a plain file of tensors: it asks for {error}, and unpickling it could "
            "run code: refused. Save model.state_dict(), best as .safetensors."
        ) from error
    except Exception:  # a damaged file: the reader itself says so
        return 0


def _called(pickled: bytes) -> Iterator[str]:
    """What a pickle would call that is neither PyTorch's nor a dict. PyTorch's own reader allows a
    few more, among them one that allocates as much memory as it is told."""
    for code, value, _ in pickletools.genops(pickled):
        if code.name == "STACK_GLOBAL":  # torch.save writes none
            yield "a name that it puts together itself"
        elif code.name == "GLOBAL":
            module, _, name = str(value).rpartition(" ")
            if module.split(".")[0] != "torch" and (module, name) != ("collections", "OrderedDict"):
                yield f"{module}.{name}"


def write_tensors(path: Path, tensors: Named) -> None:
    write_atomic(path, tensor_bytes(tensors))


def tensor_bytes(tensors: Named) -> bytes:
    """Named tensors as `.safetensors`. Cloned, because the format refuses shared memory."""
    return safetensors.torch.save(
        {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    )


def some(names: Iterable[str]) -> str:
    """The first names in words: "nothing", or "a, b, c and 7 more"."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "nothing"
