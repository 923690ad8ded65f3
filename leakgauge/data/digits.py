"""Handwritten digits, 8 × 8, grey: 1797 records inside scikit-learn (the extra `demo`).

The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI, 1998).
A pixel counts the ink in a 4 × 4 block of the scan, 0 … 16; divided by 16 here.

The file is read in the package's folder: importing scikit-learn takes a second.
"""

from __future__ import annotations

import gzip

import numpy as np

from leakgauge.config import installed
from leakgauge.data._dataset import make_dataset
from leakgauge.errors import DataError
from leakgauge.types import Dataset

FILE = "datasets/data/digits.csv.gz"


def digits() -> Dataset:
    """Handwritten digits that need no download: grey, 8 × 8.

    All 1797 of them, (1797, 1, 8, 8).
    """
    file = installed("sklearn", "demo", "the data set 'digits'") / FILE
    try:
        with gzip.open(file, "rt") as lines:
            rows = np.loadtxt(lines, delimiter=",", dtype=np.int64)  # 64 pixels and the digit
        images = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"digits: expected rows of 65 numbers in {file}, got {error}; reinstall the package "
            "with `pip install --force-reinstall scikit-learn`."
        ) from error
    return make_dataset("digits", images, rows[:, -1], tuple(str(k) for k in range(10)))
