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


def risk(psnr: float) -> Risk:
    """The risk level of a PSNR in decibels; a level begins at its limit."""
    if math.isnan(psnr):
        raise InputError("psnr: expected a number of decibels, got NaN; score the guess first")
    if psnr >= 20:
        return "very high"
    if psnr >= 15:
        return "high"
    if psnr >= 10:
        return "medium"
    return "low"
