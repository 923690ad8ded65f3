"""Tests that a client makes of a model it received: one file each.

A detector has its thresholds as fields, each named as its test (`duplicate_rows` decides
"duplicate-rows"), or `threshold` where there is one test only.
"""

from leakgauge.detectors._isolation import Isolation
from leakgauge.detectors.continuity import Continuity
from leakgauge.detectors.dsnr import DSNR
from leakgauge.detectors.first_conv import FirstConv
from leakgauge.detectors.head_invariant import HeadInvariant
from leakgauge.detectors.probe import Probe, isolation
from leakgauge.detectors.replay import Replay
from leakgauge.detectors.structure import Structure
from leakgauge.detectors.warm_up import WarmUp, snapshots
from leakgauge.detectors.weights import Weights
from leakgauge.types import Detection, Detector

DETECTORS: dict[str, type[Detector]] = {
    "structure": Structure,
    "continuity": Continuity,
    "replay": Replay,
    "head-invariant": HeadInvariant,
    "weights": Weights,
    "first-conv": FirstConv,
    "probe": Probe,
    "d-snr": DSNR,
    "warm-up": WarmUp,
}


def fires(detection: Detection) -> bool:
    """Whether the score is above its threshold, or no number."""
    return not detection.score <= detection.threshold


__all__ = [
    "DETECTORS",
    "DSNR",
    "Continuity",
    "FirstConv",
    "HeadInvariant",
    "Isolation",
    "Probe",
    "Replay",
    "Structure",
    "WarmUp",
    "Weights",
    "fires",
    "isolation",
    "snapshots",
]
