"""Real photographs that need no download: the files inside scikit-image (the extra `demo`).

Ten photographs, one class each: everyday objects, an animal, people, a printed page, and two
medical ones, a stained tissue section (`ihc`, immunohistochemistry) and the back of an eye
(`retina`, fundus). The docstrings of `skimage.data` name their authors. Left out are drawings, the
faces of `lfw_subset`, and pictures of so little contrast (brick, grass, moon, a field of stars)
that at 16 × 16 pixels a plain grey image resembles them.

A record is a square crop, resized with antialiasing. Level k = 1, 2, 3, … of a photograph with
short side s holds crops of side 2s/(k+1), half overlapping: k × k of them in a square photograph.
Level 1 is the whole photograph, level 5 details of a third of it. Nearly constant crops (night sky,
the middle of the fundus) are left out: a constant image would score 22 dB or more against them, a
leak only in name. No randomness: the same records every time.

The files are opened by name in the package's folder. `skimage.data.*` is never called, because it
may download with pooch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from leakgauge.config import choose, installed
from leakgauge.data._dataset import make_dataset
from leakgauge.data._options import check_count
from leakgauge.errors import DataError, PlanError
from leakgauge.types import Dataset

FILES = {
    "astronaut": "astronaut.png",
    "camera": "camera.png",
    "chelsea": "chelsea.png",
    "coffee": "coffee.png",
    "coins": "coins.png",
    "ihc": "ihc.png",
    "motorcycle": "motorcycle_left.png",
    "page": "page.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
}

LEVELS = 5
CONTRAST = 0.08  # least standard deviation of a crop's brightness; -20 log10(0.08) = 22 dB


def photos(size: int = 32, per_photo: int = 24, only: Sequence[str] = ()) -> Dataset:
    """Crops of ten photographs that need no download.

    Up to `per_photo` crops of each photograph, (N, 3, size, size); large crops come first.

    Records alternate between the classes, so any first few show different photographs. No crop is
    enlarged: a large `size` leaves fewer, and above 191 pixels none of the smallest photograph.
    `only` names the photographs wanted, none means all; the classes, and so the labels, stay.
    """
    check_count("size", size)
    check_count("per_photo", per_photo)
    wanted = _wanted(only)
    columns = [
        _first_crops(file, size, per_photo) if name in wanted else ()
        for name, file in FILES.items()
    ]
    records = [
        (label, crop)
        for row in zip_longest(*columns)
        for label, crop in enumerate(row)
        if crop is not None
    ]
    if not records:
        raise PlanError(
            f"photos: no photograph has {size} pixels per side among {', '.join(wanted)}; "
            "choose a smaller size."
        )
    images = np.stack([crop for _, crop in records]).transpose(0, 3, 1, 2)
    labels = torch.tensor([label for label, _ in records])
    return make_dataset("photos", images, labels, tuple(FILES))


def _wanted(only: Sequence[str]) -> Sequence[str]:
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise PlanError(f"only must be a list of photographs, got {only!r}.")
    for name in only:
        choose(FILES, name, "photograph")
    return only or tuple(FILES)


@lru_cache(maxsize=4 * len(FILES))  # reading the files takes half a second
def _first_crops(file: str, size: int, count: int) -> tuple[NDArray[np.uint8], ...]:
    return tuple(islice(_crops(_open(file), size), count))


def _open(file: str) -> Image.Image:
    folder = installed("skimage", "demo", "the data set 'photos'") / "data"
    try:
        with (folder / file).open("rb") as stream:
            return Image.open(stream, formats=("PNG", "JPEG")).convert("RGB")
    except OSError as error:
        raise DataError(
            f"photos: expected {file} in {folder}, got {error}; reinstall the package with "
            "`pip install --force-reinstall scikit-image`."
        ) from error


def _crops(photo: Image.Image, size: int) -> Iterator[NDArray[np.uint8]]:
    """Crops (size, size, 3) of all levels that show something, the largest first."""
    short = min(photo.size)
    for level in range(1, LEVELS + 1):
        side = 2 * short / (level + 1)
        if side < size:
            return
        for top in _places(photo.height, side):
            for left in _places(photo.width, side):
                box = (left, top, left + side, top + side)
                crop = photo.resize((size, size), Image.Resampling.LANCZOS, box=box)
                if np.asarray(crop.convert("L")).std() >= 255 * CONTRAST:
                    yield np.asarray(crop)


def _places(length: int, side: float) -> NDArray[np.float64]:
    """Where crops of this side start: half overlapping, from edge to edge."""
    count = round((length - side) / (side / 2)) + 1
    return np.linspace(0, length - side, count)
