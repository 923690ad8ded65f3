"""LeakGauge measures how much of a client's private data a federated-learning update gives away."""

from leakgauge import attacks, data, defences, metrics, models
from leakgauge._version import __version__
from leakgauge.fl import Scenario, simulate
from leakgauge.guard import Guard
from leakgauge.threat import check, observe
from leakgauge.types import (
    Batch,
    Dataset,
    LocalTraining,
    Observation,
    Reconstruction,
    Resources,
    Round,
    ThreatModel,
)

__all__ = [
    "Batch",
    "Dataset",
    "Guard",
    "LocalTraining",
    "Observation",
    "Reconstruction",
    "Resources",
    "Round",
    "Scenario",
    "ThreatModel",
    "__version__",
    "attacks",
    "check",
    "data",
    "defences",
    "metrics",
    "models",
    "observe",
    "simulate",
]
