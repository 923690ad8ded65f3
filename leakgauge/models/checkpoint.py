"""Weights from and to files, strictly: a file fits the model entirely or changes nothing.

Read are `.safetensors`, and `.pt` or `.pth` with `torch.load(weights_only=True)`, which refuses
pickles that could run code. Written is `.safetensors`, through a temporary file and a rename, so
that a file of that name is always whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakgauge.errors import CheckpointError, PlanError
from leakgauge.files import read_tensors, some, write_tensors


def load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copies the file's tensors into the model's parameters and buffers.

    Names and shapes must be the model's, values finite; precision is converted. The one tensor a
    file may lack is `num_batches_tracked`: old files do not have this counter, and only a batch
    norm without momentum reads it.
    """
    source = Path(path)
    found = read_tensors(source)
    wanted = model.state_dict()
    optional = {name for name in wanted if name.endswith("num_batches_tracked")}
    missing = wanted.keys() - optional - found.keys()
    unexpected = found.keys() - wanted.keys()
    if missing or unexpected:
        raise CheckpointError(
            f"{source} is for another model: it lacks {some(missing)}; unknown in it: "
            f"{some(unexpected)}. Build the model with the options the file was saved with."
        )
    staged = {name: _fit(source, name, value, wanted[name]) for name, value in found.items()}
    # The optional counters that the file lacks keep their value.
    model.load_state_dict(wanted | staged)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes parameters and buffers as safetensors; a crash half-way leaves the old file."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise CheckpointError(f"A model is saved as .safetensors, got the name {target}.")
    try:
        write_tensors(target, model.state_dict())
    except PlanError as error:
        raise CheckpointError(str(error)) from error


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
