"""A word for a PSNR.

Fan et al., Boosting gradient leakage attacks, USENIX Security 2025 (FedLeak), Table 2, on 0 to 1
images: from 20 dB nearly all, from 15 dB most, from 10 dB a small portion of the clients' data can
be recognised. The paper names three levels; below 10 dB is ours to call low.

The word belongs to a PSNR that stands above the no-information baseline: on CIFAR-10 the mean image
of other pictures alone has a median of 12.5 dB and would be called medium.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from leakgauge.errors import InputError

Risk: TypeAlias = Literal["very high", "high", "medium", "low"]
LEVELS: dict[Risk, float] = {"very high": 20, "high": 15, "medium": 10}


def risk(psnr: float) -> Risk:
    """The risk level of a PSNR in decibels; a level begins at its limit."""
    if math.isnan(psnr):
        raise InputError("psnr: expected a number of decibels, got NaN; score the guess first")
    return next((level for level, least in LEVELS.items() if psnr >= least), "low")
