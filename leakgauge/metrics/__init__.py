"""How close a guess is to the truth: one score per sample, never pooled over a batch.

A metric is a function `(guess, truth) -> (N,)` with what a reader of its numbers must know;
`assign` pairs the two first, `baselines` makes the guesses to beat, `bootstrap` says how far a
summary can be trusted.
"""

from leakgauge.metrics import assign, baselines, bootstrap, lpips
from leakgauge.metrics.identify import reidentified
from leakgauge.metrics.lpips import load_lpips
from leakgauge.metrics.pixels import PSNR_CAP, affine_psnr, mse, pairwise_mse, psnr
from leakgauge.metrics.risk import Risk, risk
from leakgauge.metrics.ssim import PAPER as SSIM
from leakgauge.metrics.ssim import ssim
from leakgauge.types import Metric, Scorer

__all__ = [
    "METRICS",
    "PSNR_CAP",
    "Risk",
    "affine_psnr",
    "assign",
    "baselines",
    "bootstrap",
    "load_lpips",
    "loaded",
    "mse",
    "pairwise_mse",
    "psnr",
    "reidentified",
    "risk",
    "ssim",
]

METRICS: dict[str, Metric] = {
    "affine-psnr": Metric(affine_psnr, "affine PSNR", "dB"),
    "lpips": Metric(load_lpips, "LPIPS", better="lower", loads=True, papers=(lpips.PAPER,)),
    "mse": Metric(mse, "MSE", better="lower"),
    "psnr": Metric(psnr, "PSNR", "dB", limit=15.0, margin=3.0),
    "ssim": Metric(ssim, "SSIM", papers=(SSIM,)),
}


def loaded(metric: Metric) -> Scorer:
    """The function `(guess, truth) -> (N,)` of a metric; what it reads must be there."""
    scorer: Scorer = metric.score() if metric.loads else metric.score
    return scorer
