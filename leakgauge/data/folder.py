"""Images in folders: the class is the sub-folder.

    images/cat/1.png  images/cat/2.jpg  images/dog/1.png  …

Classes are the sub-folders in sorted order; names that begin with a dot and files of other kinds
are passed over. An image is turned as its EXIF says, cut to the central square and resized with
antialiasing. Only the formats below are decoded, whatever a file is called.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from leakgauge.data._dataset import make_dataset
from leakgauge.data._options import as_path, check_count, check_memory
from leakgauge.errors import DataError, PlanError
from leakgauge.types import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")


def folder(path: str | Path, size: int = 32, channels: Literal[1, 3] = 3) -> Dataset:
    """Your own images: one sub-folder of `path` per class.

    All of them, (N, channels, size, size); one channel is grey.
    """
    check_count("size", size)
    if channels not in (1, 3):
        raise PlanError(f"channels must be 1 (grey) or 3 (colour), got {channels!r}.")
    top = as_path("path", path)
    if not top.is_dir():
        raise DataError(f"folder: expected a folder of class folders at {top}, found none.")
    classes = sorted(d for d in top.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not classes:
        raise DataError(
            f"folder: expected one sub-folder per class in {top}, found none "
            f"({len(_images(top))} images lie in it directly); move the images of each class into "
            "a sub-folder named after it (two classes at least)."
        )
    files = [(label, file) for label, d in enumerate(classes) for file in _some_images(d)]
    check_memory("folder", len(files), (channels, size, size))
    images = np.stack([_read(file, size, channels) for _, file in files])
    labels = np.asarray([label for label, _ in files])
    return make_dataset(
        f"folder {top.resolve().name}", images, labels, tuple(d.name for d in classes)
    )


def _images(where: Path) -> list[Path]:
    return sorted(
        f
        for f in where.iterdir()
        if f.suffix.lower() in SUFFIXES and not f.name.startswith(".") and f.is_file()
    )


def _some_images(where: Path) -> list[Path]:
    files = _images(where)
    if not files:
        deeper = any(d.is_dir() for d in where.iterdir())
        advice = f"did you mean path={str(where)!r}?" if deeper else "remove or fill the folder."
        raise DataError(
            f"folder: expected images ({', '.join(SUFFIXES)}) in the class folder {where}, "
            f"found none; {advice}"
        )
    return files


def _read(file: Path, size: int, channels: int) -> NDArray[np.uint8]:
    """One image, (channels, size, size)."""
    try:
        with warnings.catch_warnings():
            # Pillow only warns of an image that would fill the memory, up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError(
                        f"{file}: expected 8 bits per channel, got mode {image.mode}, which does "
                        "not say which value is white; save it with 8 bits or use an npz of floats."
                    )
                upright = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
    except DataError:
        raise
    except Exception as error:  # decoders raise anything on damaged bytes
        raise DataError(
            f"{file}: cannot be read as an image ({error}); repair or remove it."
        ) from error
    square = ImageOps.fit(upright, (size, size), Image.Resampling.LANCZOS)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1)
