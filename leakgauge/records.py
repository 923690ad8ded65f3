"""What is attacked: the kind of a record, how the model sees it, and what the model is asked of it.

A record kind knows the shape of one record and the way from its values to what enters the model; a
task knows the loss. Nothing else in the library knows that records are pictures but the attacks
and metrics that say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from leakgauge.errors import InputError, NotApplicable, PlanError


@dataclass(frozen=True)
class Images:
    """Pictures (C, H, W) with values in [0, 1]. The model sees (x − mean) / std, by channel."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def entering(self, values: Tensor) -> Tensor:
        """What the model sees of records."""
        return (values - _spread(self.mean, values)) / _spread(self.std, values)

    def leaving(self, entering: Tensor) -> Tensor:
        """The records of which the model sees this."""
        return entering * _spread(self.std, entering) + _spread(self.mean, entering)


@dataclass(frozen=True)
class Tokens:
    """Texts of as many whole numbers; the model sees them as they are."""

    shape: tuple[int]

    def entering(self, values: Tensor) -> Tensor:
        return values

    def leaving(self, entering: Tensor) -> Tensor:
        return entering


@dataclass(frozen=True)
class Columns:
    """Lines of a table: one number per column. The model sees (x − mean) / std, by column."""

    shape: tuple[int]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def entering(self, values: Tensor) -> Tensor:
        return (values - values.new_tensor(self.mean)) / values.new_tensor(self.std)

    def leaving(self, entering: Tensor) -> Tensor:
        return entering * entering.new_tensor(self.std) + entering.new_tensor(self.mean)


Record: TypeAlias = Images | Tokens | Columns


def _spread(by_channel: Sequence[float], images: Tensor) -> Tensor:
    return images.new_tensor(by_channel).view(1, -1, 1, 1)


@dataclass(frozen=True)
class Scale:
    """How records are normalised before they enter the model: one number for all channels or
    columns, or one each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not all(0 < std < math.inf for std in self.std):
            raise ValueError(f"std must be positive and finite, got {list(self.std)}")


AS_THEY_ARE = Scale()


def refuse_moved(training: object, where: str, table: str) -> None:
    """Older files normalise in the table of the training."""
    if isinstance(training, Mapping) and {"mean", "std"} & set(training):
        raise PlanError(
            f"{where}: mean and std say how records are normalised: move them to the table {table}"
        )


def record_of(inputs: Tensor, scale: Scale = AS_THEY_ARE) -> Record:
    """The kind of these records, told by their type and dimensions."""
    shape = tuple(inputs.shape[1:])
    parts = "columns" if len(shape) == 1 else "channels"
    for key, count in (("mean", len(scale.mean)), ("std", len(scale.std))):
        if shape and count not in (1, shape[0]):
            raise InputError(
                f"{key} has {count} values, but the records have {shape[0]} {parts}: give one "
                f"value for all or {shape[0]}"
            )
    if len(shape) == 3 and inputs.is_floating_point():
        return Images((shape[0], shape[1], shape[2]), scale.mean, scale.std)
    if len(shape) == 1 and inputs.is_floating_point():
        return Columns((shape[0],), scale.mean, scale.std)
    if len(shape) == 1:
        return Tokens((shape[0],))
    raise InputError(
        "records are pictures (N, C, H, W), texts of whole numbers (N, T) or lines of a table "
        f"(N, columns); got {tuple(inputs.shape)} of {inputs.dtype}"
    )


def pictures(record: Record) -> Images:
    """The record kind of an attack that reads pictures and nothing else."""
    if not isinstance(record, Images):
        raise NotApplicable(
            f"it reads pictures, and these records are {type(record).__name__.lower()}"
        )
    return record


def floats(record: Record) -> Images | Columns:
    """The record kind of an attack that computes with values, between which others lie."""
    if isinstance(record, Tokens):
        raise NotApplicable("it computes with the values of records, and these records are tokens")
    return record


@dataclass(frozen=True)
class Classes:
    """Each record is of one of so many classes; the loss is the mean cross-entropy."""

    count: int

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`labels` are classes (N,) or probabilities (N, count)."""
        return F.cross_entropy(outputs, labels)

    def check(self, outputs: object, labels: Tensor, where: str) -> Tensor:
        """What the model gave for these labels, or in words why it cannot be."""
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"{where}, gave a {type(outputs).__name__}. Expected logits, a tensor (records, "
                "classes): let forward return them alone."
            )
        most = int(labels.max()) + 1
        if outputs.dim() != 2 or len(outputs) != len(labels) or outputs.shape[1] < most:
            raise InputError(
                f"{where}, gave a tensor {tuple(outputs.shape)}. Expected logits ({len(labels)}, "
                f"classes) for at least {most} classes."
            )
        return outputs


Task: TypeAlias = Classes
"""What the model learns of a record: its class, so far."""
