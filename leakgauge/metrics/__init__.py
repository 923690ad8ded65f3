"""How close a guess is to the truth: one score per sample, never pooled over a batch.

A metric is a function `(guess, truth) -> (N,)`; `assign` pairs the two first, `baselines` makes
the guesses to beat, `bootstrap` says how far a summary can be trusted. LPIPS needs a file of
weights: it stands in `LOADED`, by the function that makes it.
"""

from collections.abc import Callable

from leakgauge.metrics import assign, baselines, bootstrap
from leakgauge.metrics.identify import reidentified
from leakgauge.metrics.lpips import load_lpips
from leakgauge.metrics.pixels import (
    PSNR_CAP,
    affine_psnr,
    mse,
    pairwise_contrast_free,
    pairwise_mse,
    psnr,
)
from leakgauge.metrics.risk import Risk, risk
from leakgauge.metrics.ssim import ssim
from leakgauge.types import Metric

__all__ = [
    "LOADED",
    "METRICS",
    "PSNR_CAP",
    "Risk",
    "affine_psnr",
    "assign",
    "baselines",
    "bootstrap",
    "load_lpips",
    "mse",
    "pairwise_contrast_free",
    "pairwise_mse",
    "psnr",
    "reidentified",
    "risk",
    "ssim",
]

METRICS: dict[str, Metric] = {
    "affine-psnr": affine_psnr,
    "mse": mse,
    "psnr": psnr,
    "ssim": ssim,
}

LOADED: dict[str, Callable[[], Metric]] = {"lpips": load_lpips}
"""Metrics that read a file first, by what reads it."""
