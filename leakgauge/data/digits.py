"""Handwritten digits, 8 × 8, grey: 1797 records inside scikit-learn (the extra `demo`).

The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI, 1998).
A pixel counts the ink in a 4 × 4 block of the scan, 0 … 16; divided by 16 here.
"""

from __future__ import annotations

import numpy as np

from leakgauge.config import optional
from leakgauge.data._dataset import make_dataset
from leakgauge.types import Dataset


def digits() -> Dataset:
    """Handwritten digits that need no download: grey, 8 × 8.

    All 1797 of them, (1797, 1, 8, 8).
    """
    # Here: it takes a second to import.
    bunch = optional("sklearn.datasets", "demo", "the data set 'digits'").load_digits()
    images = (bunch.images / 16).astype(np.float32)[:, None]  # (N, 8, 8) -> (N, 1, 8, 8)
    return make_dataset("digits", images, bunch.target, tuple(str(k) for k in range(10)))
