"""MNIST and Fashion-MNIST from idx files, gzipped or not.

Y. LeCun, C. Cortes, C. Burges, the MNIST database of handwritten digits; H. Xiao, K. Rasul,
R. Vollgraf, "Fashion-MNIST", 2017, https://arxiv.org/abs/1708.07747. Grey, 28 × 28, ten classes,
60000 records to train and 10000 to test.

An idx file is a magic number (2051 images, 2049 labels) and the sizes, all 32-bit big-endian, and
then one byte a value. The files are looked for in `MNIST/raw` or `FashionMNIST/raw` (the layout of
torchvision), or directly in the folder that the option `root` names.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leakgauge.data._dataset import make_dataset
from leakgauge.data._options import Split, check_split
from leakgauge.data._root import find_folder
from leakgauge.errors import DataError
from leakgauge.types import Dataset

DIGITS = tuple(str(k) for k in range(10))
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MOST = 1_000_000  # records; a larger count in a header is damage, and would fill the memory


def mnist(split: Split = "train", root: str | Path | None = None) -> Dataset:
    """MNIST, handwritten digits: grey, 28 × 28.

    (60000 or 10000, 1, 28, 28).
    """
    return _load("mnist", "MNIST/raw", DIGITS, split, root)


def fashion_mnist(split: Split = "train", root: str | Path | None = None) -> Dataset:
    """Fashion-MNIST, pieces of clothing: grey, 28 × 28.

    (60000 or 10000, 1, 28, 28).
    """
    return _load("fashion-mnist", "FashionMNIST/raw", CLOTHES, split, root)


def _load(
    name: str, inside: str, classes: tuple[str, ...], split: Split, root: str | Path | None
) -> Dataset:
    check_split(split)
    stem = "train" if split == "train" else "t10k"
    folder = find_folder(name, inside, f"{stem}-images-idx3-ubyte*", root)
    images = _idx(folder, f"{stem}-images-idx3-ubyte", (28, 28))
    labels = _idx(folder, f"{stem}-labels-idx1-ubyte", ())
    return make_dataset(f"{name} {split}", images[:, None], labels, classes)


def _idx(folder: Path, stem: str, record: tuple[int, ...]) -> NDArray[np.uint8]:
    """Values (N, *record) of the file `stem` or `stem`.gz."""
    file = next((f for f in (folder / stem, folder / f"{stem}.gz") if f.is_file()), None)
    if file is None:
        raise DataError(f"{folder}: expected {stem} or {stem}.gz, found neither; add it.")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            axes = 1 + len(record)
            header = stream.read(4 * (1 + axes))
            if len(header) < 4 * (1 + axes):
                raise DataError(f"{file}: ends within its header; get the file again.")
            magic, count, *sizes = struct.unpack(f">{1 + axes}I", header)
            if magic != 2048 + axes:
                raise DataError(
                    f"{file}: expected magic number {2048 + axes}, got {magic}; "
                    "this is not the idx file its name says."
                )
            if tuple(sizes) != record or count > MOST:
                raise DataError(
                    f"{file}: expected up to {MOST} records of {record or 'one byte'}, got "
                    f"{count} of {tuple(sizes) or 'one byte'}; get the file again."
                )
            length = count * math.prod(record)
            data = stream.read(length + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); get the file again.") from error
    if len(data) != length:
        found = f"only {len(data)}" if len(data) < length else "more"
        raise DataError(f"{file}: expected {length} bytes of data, got {found}; get it again.")
    return np.frombuffer(data, np.uint8).reshape(count, *record)
