"""LeakGauge measures how much of a client's private data a federated-learning update gives away.

Names are imported when they are first used (PEP 562): `import leakgauge` takes no time, and a
client that uses the guard loads no attack.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from leakgauge._version import __version__

if TYPE_CHECKING:
    from leakgauge import attacks, data, defences, metrics, models
    from leakgauge.exchanges import capture
    from leakgauge.fl import Scenario, simulate
    from leakgauge.guard import Guard
    from leakgauge.threat import check, observe
    from leakgauge.types import (
        Batch,
        Dataset,
        Exchange,
        LocalTraining,
        Observation,
        Reconstruction,
        Resources,
        Round,
        SecureSum,
        Setting,
        ThreatModel,
    )

__all__ = [
    "Batch",
    "Dataset",
    "Exchange",
    "Guard",
    "LocalTraining",
    "Observation",
    "Reconstruction",
    "Resources",
    "Round",
    "Scenario",
    "SecureSum",
    "Setting",
    "ThreatModel",
    "__version__",
    "attacks",
    "capture",
    "check",
    "data",
    "defences",
    "metrics",
    "models",
    "observe",
    "simulate",
]

_HOMES = {
    "exchanges": ("capture",),
    "fl": ("Scenario", "simulate"),
    "guard": ("Guard",),
    "threat": ("check", "observe"),
    "types": (
        "Batch",
        "Dataset",
        "Exchange",
        "LocalTraining",
        "Observation",
        "Reconstruction",
        "Resources",
        "Round",
        "SecureSum",
        "Setting",
        "ThreatModel",
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"leakgauge.{home}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"leakgauge.{name}"):
        return importlib.import_module(f"leakgauge.{name}")
    raise AttributeError(f"module 'leakgauge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
