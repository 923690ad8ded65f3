"""The one place where a data set is made: every loader ends here, so every set is checked alike.

Images may be bytes (0…255) or floats in [0, 1], NumPy or torch; what leaves is float32
(N, C, H, W) in [0, 1] with int64 labels, each the index of a class name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakgauge.errors import DataError
from leakgauge.types import Dataset

Array = Tensor | NDArray[Any]
MOST_CLASSES = 100_000  # the largest public sets have some 20 000


def make_dataset(
    name: str, images: Array, labels: Array, classes: Sequence[str] | None = None
) -> Dataset:
    """Check images (N, C, H, W) and labels (N,); without names, the classes are numbered."""
    inputs = _images(name, _tensor(name, images))
    targets = _labels(name, _tensor(name, labels))
    if len(inputs) != len(targets):
        raise DataError(
            f"{name}: expected one label per image, got {len(inputs)} images and "
            f"{len(targets)} labels."
        )
    top = int(targets.max())
    if max(top + 1, len(classes or ())) > MOST_CLASSES:
        raise DataError(
            f"{name}: expected at most {MOST_CLASSES:,} classes, got "
            f"{max(top + 1, len(classes or ())):,} (labels are 0 to {top:,} in {len(targets):,} "
            "records); number the classes from 0 without gaps."
        )
    names = tuple(str(k) for k in range(top + 1)) if classes is None else tuple(classes)
    names = tuple(c.encode(errors="replace").decode() for c in names)  # of files: may be no text
    if top >= len(names):
        raise DataError(
            f"{name}: labels must be below the number of classes ({len(names)}), got {top}; "
            "name every class or correct the labels."
        )
    if len(set(names)) != len(names):
        twice = next(c for c in names if names.count(c) > 1)
        raise DataError(f"{name}: class names must differ, got {twice!r} twice.")
    return Dataset(name, inputs, targets, names)


def _tensor(name: str, values: Array) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name}: expected arrays of numbers, got dtype {array.dtype}.")
    # torch takes only the machine's byte order, and no long double.
    kind = array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else np.dtype(np.float64)
    return torch.from_numpy(np.array(array, dtype=kind))


def _images(name: str, images: Tensor) -> Tensor:
    if images.ndim != 4:
        raise DataError(f"{name}: images must be (N, C, H, W), got shape {tuple(images.shape)}.")
    if images.numel() == 0:
        raise DataError(f"{name}: expected at least one image, got shape {tuple(images.shape)}.")
    if images.dtype == torch.uint8:
        return images.to(torch.float32).div_(255).contiguous()
    if not images.is_floating_point():
        raise DataError(
            f"{name}: images must be uint8 (0 to 255) or floats in [0, 1], got {images.dtype}."
        )
    images = images.to(torch.float32).contiguous()
    low, high = (float(v) for v in images.aminmax())  # one NaN makes both NaN
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"{name}: float images must be finite and in [0, 1], got values from {low:g} to "
            f"{high:g}; scale them first (bytes: divide by 255) and leave the subtraction of a "
            "mean to `mean` and `std` in the plan's table [federation.record]."
        )
    return images


def _labels(name: str, labels: Tensor) -> Tensor:
    if labels.ndim != 1:
        raise DataError(f"{name}: labels must be (N,), one per record, got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"{name}: labels must be whole numbers, got {labels.dtype}.")
    labels = labels.to(torch.int64)
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{name}: labels count from 0, got {int(labels.min())}.")
    return labels
