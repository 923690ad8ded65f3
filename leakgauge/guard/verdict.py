"""What the guard says of a model, in words and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from leakgauge._version import __version__
from leakgauge.detectors import fires
from leakgauge.types import Detection

Decision: TypeAlias = Literal["ACCEPT", "EXPOSED", "INCONCLUSIVE", "REJECT"]


@dataclass(frozen=True)
class Verdict:
    """What the guard found, test by test.

    `train` says whether the policy lets the client train on this model. `missing` names what the
    policy requires and was not there, `untested` what could not be tested and why. `exposure` is
    what an honest-but-curious reader of the update could take from the probed records; None when no
    probe was made. `override` is the operator's reason for a restart, and `excused` the tests that
    had fired. `round` is this round by the client's own count; `model` and `policy` are digests.
    """

    decision: Decision
    train: bool
    detections: tuple[Detection, ...]
    untested: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    exposure: str | None = None
    rounds: int = 0  # accepted before, with which it was compared
    round: int = 1
    model: str | None = None  # None when it does not fit the network
    policy: str | None = None
    override: str | None = None
    excused: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def fired(self) -> tuple[Detection, ...]:
        """The detections that decided, gravest first."""
        bad = [d for d in self.detections if fires(d) and d.means != "report"]
        return tuple(sorted(bad, key=lambda d: d.means != "reject"))

    def __str__(self) -> str:
        if self.fired and self.decision != "INCONCLUSIVE":
            return f"{self.decision}: {'; '.join(d.reason.rstrip('.') for d in self.fired)}."
        if self.decision == "INCONCLUSIVE":
            return f"INCONCLUSIVE: {'; '.join(self.missing.values())}."
        missing = f"; not tested: {', '.join(self.untested)}" if self.untested else ""
        return f"{self.decision}: {len(self.detections)} tests passed{missing}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN and no infinity: they become text."""
        detections = [
            {k: _plain(v) for k, v in asdict(d).items()} | {"fired": fires(d)}
            for d in self.detections
        ]
        head = {"decision": self.decision, "train": self.train, "summary": str(self)}
        replaced = {"detections": detections, "excused": list(self.excused)}
        return head | asdict(self) | replaced | {"version": __version__}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
