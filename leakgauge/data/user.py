"""Data from the user's own code: `module:callable`.

The callable takes the plan's options and returns a `Dataset`, or a pair (inputs, labels) with
inputs (N, C, H, W), uint8 or floats in [0, 1]. It is the user's code and it runs as such: name only
modules you trust.
"""

from __future__ import annotations

import re

import numpy as np
from torch import Tensor

from leakgauge.data._dataset import make_dataset
from leakgauge.errors import DataError
from leakgauge.types import Dataset


def is_spec(name: str) -> bool:
    """Does it read `module:callable`?"""
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", name) is not None


def as_dataset(spec: str, result: object) -> Dataset:
    """What the callable returned, checked as every other set."""
    if isinstance(result, Dataset):
        return make_dataset(result.name, result.inputs, result.labels, result.classes)
    if isinstance(result, tuple | list) and len(result) == 2:
        inputs, labels = result
        if isinstance(inputs, Tensor | np.ndarray) and isinstance(labels, Tensor | np.ndarray):
            return make_dataset(spec, inputs, labels)
    raise DataError(
        f"data {spec!r}: expected a leakgauge Dataset or a pair (inputs, labels) of tensors or "
        f"arrays, got {type(result).__name__}."
    )
