"""CIFAR-10 and CIFAR-100 in the Python layout people already have on disk.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html. Colour photographs of 32 × 32 pixels.

    cifar-10-batches-py/   data_batch_1 … data_batch_5, test_batch, batches.meta
    cifar-100-python/      train, test, meta

The files are pickles; `_unpickle` reads them without running what is in them. Of the five training
batches of CIFAR-10 those present are loaded, and the set's name says how many they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakgauge.data._dataset import make_dataset
from leakgauge.data._options import Split, check_split
from leakgauge.data._root import find_folder
from leakgauge.data._unpickle import as_text, read_pickle
from leakgauge.errors import DataError
from leakgauge.types import Dataset


def cifar10(split: Split = "train", root: str | Path | None = None) -> Dataset:
    """CIFAR-10: colour, 32 × 32, ten classes.

    (50000 or 10000, 3, 32, 32); `root` holds `cifar-10-batches-py`.
    """
    check_split(split)
    pattern = "data_batch_[1-5]" if split == "train" else "test_batch"
    folder = find_folder("cifar10", "cifar-10-batches-py", pattern, root)
    files = sorted(file for file in folder.glob(pattern) if file.is_file())
    part = f" ({len(files)} of 5 batches)" if split == "train" and len(files) < 5 else ""
    return _load(f"cifar10 {split}{part}", files, "labels", folder / "batches.meta", "label_names")


def cifar100(split: Split = "train", root: str | Path | None = None) -> Dataset:
    """CIFAR-100: colour, 32 × 32, with its 100 fine labels.

    (50000 or 10000, 3, 32, 32); `root` holds `cifar-100-python`.
    """
    check_split(split)
    folder = find_folder("cifar100", "cifar-100-python", split, root)
    files = [folder / split]
    return _load(f"cifar100 {split}", files, "fine_labels", folder / "meta", "fine_label_names")


def _load(name: str, files: list[Path], labels: str, meta: Path, names: str) -> Dataset:
    if not meta.is_file():
        raise DataError(f"{name}: expected the class names in {meta}, found no such file; add it.")
    batches = [_batch(file, labels) for file in files]
    return make_dataset(
        name,
        np.concatenate([images for images, _ in batches]),
        np.concatenate([targets for _, targets in batches]),
        tuple(as_text(c) for c in _entry(meta, read_pickle(meta), names, list)),
    )


def _batch(file: Path, key: str) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Images (N, 3, 32, 32) and labels (N,) of one file: a row is red, green, blue, 1024 each."""
    content = read_pickle(file)
    rows = _entry(file, content, "data", np.ndarray)
    labels = _entry(file, content, key, list)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        raise DataError(
            f"{file}: expected rows of 3072 bytes, got {rows.dtype} of shape {rows.shape}."
        )
    if len(labels) != len(rows) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{file}: expected {len(rows)} whole numbers in {key!r}, got {len(labels)} entries, "
            f"the first {labels[:1]}."
        )
    return rows.reshape(-1, 3, 32, 32), np.asarray(labels)


def _entry(file: Path, content: dict[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise DataError(
            f"{file}: expected a {kind.__name__} under {key!r}, got "
            f"{type(value).__name__} (keys: {', '.join(sorted(content)) or 'none'})."
        )
    return value
