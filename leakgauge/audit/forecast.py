"""What an audit will cost, from a short calibration: a few iterations of each attack, timed.

The forecast is CPU time, because that does not depend on how busy the machine is. How far it was
off stands in the result beside the actual time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leakgauge import threat
from leakgauge.audit import cases
from leakgauge.audit.bench import Bench, rng_of
from leakgauge.audit.plan import Plan
from leakgauge.audit.store import Store
from leakgauge.errors import NotApplicable
from leakgauge.types import Attack

SHORT, LONG = (
    2,
    12,
)  # iterations of the two calibration runs: their difference has no start-up in it


@dataclass(frozen=True)
class Applicability:
    """Whether an attack of the plan applies, why not, and what one trial of it costs."""

    attack: str
    reason: str | None
    cpu_seconds: float


@dataclass(frozen=True)
class Forecast:
    """CPU seconds and peak memory of a whole audit."""

    attacks: tuple[Applicability, ...]
    trials: int
    cpu_seconds: float
    megabytes: float

    def plain(self) -> dict[str, Any]:
        return {"cpu_seconds": self.cpu_seconds, "megabytes": self.megabytes}


def forecast(plan: Plan) -> Forecast:
    """Try every attack for a moment on the first round of the plan. Nothing is written."""
    bench = Bench(plan, Store(Path()))  # a bench that is only asked to simulate writes nothing
    first = cases.trials(plan)[0]
    began = time.process_time()
    round_ = bench.simulated(first)
    simulation = time.process_time() - began
    threat.observe(round_, first.threat(plan))  # a wrong threat model is no attack's mistake

    def timed(attack: Attack) -> float:
        began, rng = time.process_time(), rng_of(0, "calibration")
        played = bench.played(first, attack, round_, rng)
        attack.reconstruct(threat.observe(played, first.threat(plan)), rng)
        return time.process_time() - began

    found = tuple(_try(name, attack, timed) for name, attack in plan.attacks.items())
    planned = cases.trials(plan)
    controls = cases.controls(plan) if plan.document.audit.control else []
    extra = [case for case in controls if case.kind == "control"]
    cost = {one.attack: one.cpu_seconds for one in found}
    count = Counter(case.attack for case in [*planned, *extra])
    rounds = {(case.stage, case.defence, case.seed) for case in planned}
    played = sum(1 + stage for stage, _, _ in rounds) * simulation / (1 + first.stage)
    total = played + sum(cost[name] * number for name, number in count.items())
    return Forecast(found, len(planned) + len(extra), total, _peak_megabytes())


def _try(name: str, attack: Attack, timed: Callable[[Attack], float]) -> Applicability:
    try:
        effort = _effort(attack)
        if effort is None:
            return Applicability(name, None, timed(attack))
        wanted = getattr(attack, effort) * getattr(attack, "restarts", 1)
        timed(_shortened(attack, 1))  # warms up
        short, long = (timed(_shortened(attack, count)) for count in (SHORT, LONG))
        each = max(0.0, long - short) / (LONG - SHORT)
        return Applicability(name, None, short + each * max(0, wanted - SHORT))
    except NotApplicable as reason:
        return Applicability(name, str(reason), 0.0)
    except Exception as error:  # the audit will keep it, trial by trial
        return Applicability(name, f"it crashes ({type(error).__name__}: {error})", 0.0)


def _effort(attack: Attack) -> str | None:
    """The option that says how long an attack searches, or trains, if it does."""
    return next((key for key in ("iterations", "steps") if getattr(attack, key, 0)), None)


def _shortened(attack: Attack, count: int) -> Attack:
    """The attack with `count` iterations, once, and without a folder to continue in."""
    fixed = {"restarts": 1, "folder": None, _effort(attack): count}
    change = {key: value for key, value in fixed.items() if key and hasattr(attack, key)}
    short: Attack = replace(attack, **change)  # type: ignore[type-var]
    return short


def _peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
