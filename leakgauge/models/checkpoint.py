"""Weights from and to files, strictly: a file fits the model entirely or changes nothing.

Read are `.safetensors`, and `.pt` or `.pth` with `torch.load(weights_only=True)`, which refuses
pickles that could run code. Written is `.safetensors`, through a temporary file and a rename, so
that a file of that name is always whole.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from leakgauge.errors import CheckpointError
from leakgauge.types import Named


def load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copies the file's tensors into the model's parameters and buffers.

    Names and shapes must be the model's, values finite; precision is converted. The one tensor a
    file may lack is `num_batches_tracked`: old files do not have this counter, and only a batch
    norm without momentum reads it.
    """
    source = Path(path)
    found = _read(source)
    wanted = model.state_dict()
    optional = {name for name in wanted if name.endswith("num_batches_tracked")}
    missing = wanted.keys() - optional - found.keys()
    unexpected = found.keys() - wanted.keys()
    if missing or unexpected:
        raise CheckpointError(
            f"{source} is for another model: it lacks {_some(missing)}; unknown in it: "
            f"{_some(unexpected)}. Build the model with the options the file was saved with."
        )
    staged = {name: _fit(source, name, value, wanted[name]) for name, value in found.items()}
    # The optional counters that the file lacks keep their value.
    model.load_state_dict(wanted | staged)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes parameters and buffers as safetensors; a crash half-way leaves the old file."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise CheckpointError(f"A model is saved as .safetensors, got the name {target}.")
    # Cloned because the format refuses tensors that share memory, such as tied weights.
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(safetensors.torch.save(tensors))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never came to be
            temporary.unlink()


def _read(source: Path) -> Named:
    if source.suffix not in (".safetensors", ".pt", ".pth"):
        raise CheckpointError(f"A checkpoint ends in .safetensors, .pt or .pth, got {source}.")
    if not source.is_file():
        raise CheckpointError(f"There is no file of weights at {source}: check the path.")
    try:
        content: Any = (
            safetensors.torch.load_file(source)
            if source.suffix == ".safetensors"
            else torch.load(source, map_location="cpu", weights_only=True)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} is not a plain file of tensors, and unpickling it could run code: refused. "
            "Save model.state_dict(), best as .safetensors."
        ) from error
    except Exception as error:  # the readers answer a damaged file with a dozen kinds of error
        raise CheckpointError(
            f"{source} could not be read ({type(error).__name__}): it is truncated, damaged or "
            f"not a {source.suffix} file. Copy or download it again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{source} holds a {type(content).__name__}, expected names and tensors: "
            "save model.state_dict()."
        )
    others = {str(k) for k, v in content.items() if not (type(k) is str and isinstance(v, Tensor))}
    if others:
        raise CheckpointError(
            f"{source} holds {_some(others)}, which is not a named tensor: a training checkpoint? "
            "Save model.state_dict() alone."
        )
    return content


def _fit(source: Path, name: str, value: Tensor, target: Any) -> Tensor:
    """`value` in the target's precision, if it can stand in its place."""
    if not isinstance(target, Tensor):
        raise CheckpointError(f"The model's state {name} is not a tensor: {source} cannot set it.")
    if value.shape != target.shape:
        raise CheckpointError(
            f"{source}: {name} has shape {tuple(value.shape)}, the model's has "
            f"{tuple(target.shape)}. Build the model with the options the file was saved with."
        )
    plain = value.layout == torch.strided and value.device.type == "cpu"
    if not plain or _kind(value) != _kind(target):
        raise CheckpointError(
            f"{source}: {name} is a {value.dtype} tensor ({value.layout}, {value.device.type}), "
            f"expected a plain {target.dtype} one."
        )
    fitted = value.to(target.dtype)
    if not torch.isfinite(fitted).all():
        raise CheckpointError(
            f"{source}: {name} holds NaN or infinite values: the training that saved it diverged."
        )
    return fitted


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _some(names: Iterable[str]) -> str:
    """The first names in words: "nothing", or "a, b, c and 7 more"."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "nothing"
