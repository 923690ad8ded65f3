"""Arrays in a NumPy archive: `images`, `labels` and, if wanted, `classes`.

`images` is (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3, uint8 or floats in [0, 1];
`labels` (N,) whole numbers; `classes` the class names. Pickled objects are refused
(`allow_pickle=False`), so opening a file runs nothing. `np.savez(path, images=…, labels=…)` makes
such a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakgauge.data._dataset import make_dataset
from leakgauge.data._options import as_path
from leakgauge.errors import DataError
from leakgauge.types import Dataset


def npz(path: str | Path) -> Dataset:
    """Your own labelled images in one npz file."""
    file = as_path("path", path)
    arrays = _read(file)
    for key in ("images", "labels"):
        if key not in arrays:
            raise DataError(
                f"{file}: expected an array {key!r}, got {', '.join(sorted(arrays)) or 'nothing'}; "
                "save it with np.savez(path, images=…, labels=…)."
            )
    classes = _names(file, arrays["classes"]) if "classes" in arrays else None
    images = _channels_first(file, arrays["images"])
    return make_dataset(f"npz {file.name}", images, arrays["labels"], classes)


def _read(file: Path) -> dict[str, NDArray[Any]]:
    if not file.is_file():  # a pipe, a socket or a device may never end
        found = "something that is no plain file" if file.exists() else "none"
        raise DataError(f"npz: expected a file at {file}, found {found}.")
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # damage in a zip or in an array's header raises anything
        raise DataError(
            f"{file}: expected a NumPy archive (npz) of plain arrays, got {error}; "
            "save it with np.savez(path, images=…, labels=…), without objects."
        ) from error


def _channels_first(file: Path, images: NDArray[Any]) -> NDArray[Any]:
    """Any of the three layouts -> (N, C, H, W)."""
    shape = images.shape
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4:
        first, last = shape[1] in (1, 3), shape[3] in (1, 3)
        if first and last:
            raise DataError(
                f"{file}: images of shape {shape} may be (N, C, H, W) or (N, H, W, C); "
                "leave the axis of a single channel out, or use larger images."
            )
        if first or last:
            return images if first else images.transpose(0, 3, 1, 2)
    raise DataError(
        f"{file}: images must be (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, "
        f"got shape {shape}."
    )


def _names(file: Path, classes: NDArray[Any]) -> tuple[str, ...]:
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise DataError(
            f"{file}: classes must be a list of names, got {classes.dtype} of shape "
            f"{classes.shape}."
        )
    return tuple(str(name) for name in classes)
