"""Which numbers an option of a plan may take, by its name.

A name means the same in every table; where a class differs, "Class.name" stands beside it. A class
may refuse more by itself. The upper ends are far beyond any use: they refuse at once what would
never end or fill the memory. A test asserts that no numeric option is missing here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from leakgauge.config import shown
from leakgauge.errors import PlanError


@dataclass(frozen=True)
class Range:
    """Numbers between `least` and `most`; `open` leaves these two out."""

    least: float
    most: float
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least < value < self.most if self.open else self.least <= value <= self.most

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "finite"
        if self.most == math.inf:
            return "above 0" if self.open else f"at least {self.least:g}"
        between = f"between {self.least:,.10g} and {self.most:,.10g}"
        return f"{between}, both excluded" if self.open else between


FINITE = Range(-math.inf, math.inf, open=True)
POSITIVE = Range(0, math.inf, open=True)
FROM_0 = Range(0, 1e300)
SHARE = Range(0, 1)


def _count(most: int, least: int = 1) -> Range:
    return Range(least, most)


RANGES: dict[str, Range] = {
    # [federation]
    "clients": _count(1_000_000),
    "participants": _count(1_000_000),
    "records": _count(100_000_000),
    "public": _count(100_000_000, 0),
    "server_lr": POSITIVE,
    "rounds": _count(100_000, 0),
    # [federation.training]
    "lr": POSITIVE,
    "batch_size": _count(100_000_000),
    "steps": _count(100_000),
    "epochs": _count(10_000),
    "momentum": Range(0, 0.9999999999),
    "weight_decay": Range(0, 1e6),
    "dropout_seed": _count(2**62, 0),
    "mean": FINITE,
    "std": POSITIVE,
    # [threat], [audit]
    "client": _count(1_000_000, 0),
    "seeds": _count(2**62, 0),
    "gallery": _count(100_000, 2),
    "seconds": POSITIVE,
    "threads": _count(1024),
    "psnr": Range(0, 200),
    "share": SHARE,
    "found": SHARE,
    "Limit.labels": SHARE,
    # [[attack]]
    "iterations": _count(10_000_000),
    "Fishing.iterations": _count(10_000_000, 0),
    "Seer.steps": _count(10_000_000),
    "restarts": _count(10_000),
    "evaluations": _count(10_000_000),
    "stages": _count(1000),
    "GradInversion.seeds": _count(1000),
    "median": _count(999),
    "fine_lr": POSITIVE,
    "tv": FROM_0,
    "l2": FROM_0,
    "bn": FROM_0,
    "group": FROM_0,
    "prior": FROM_0,
    "noise": FROM_0,
    "support": FROM_0,
    "activation": FROM_0,
    "activations": FROM_0,
    "basin": FROM_0,
    "reach": FROM_0,
    "tolerance": POSITIVE,
    "sigma": POSITIVE,
    "width": POSITIVE,
    "last": POSITIVE,
    "coarse": SHARE,
    "growth": SHARE,
    "keep": SHARE,
    "blend": SHARE,
    # of malicious servers
    "bins": _count(100_000, 2),
    "rows": _count(100_000),
    "gain": POSITIVE,
    "scale": POSITIVE,
    "TrapWeights.scale": Range(0, 1, open=True),
    "label": _count(1_000_000, 0),
    "bias": FROM_0,
    "row": FINITE,
    "camouflage": FROM_0,
    "voice": POSITIVE,
    "side": _count(1024),
    "Seer.width": _count(100_000),
    "entries": _count(10_000_000),
    "alpha_first": POSITIVE,
    "alpha_last": POSITIVE,
    "every": _count(10_000_000),
    # [[defence]]
    "norm": POSITIVE,
    "epsilon": POSITIVE,
    "delta": Range(0, 1, open=True),
    # partitions
    "classes": _count(1_000_000),
    "smallest": _count(100_000_000),
    "largest": _count(100_000_000),
    "groups": _count(1_000_000),
    "alpha": POSITIVE,
}


def range_of(kind: type[Any], name: str) -> Range | None:
    return RANGES.get(f"{kind.__name__}.{name}") or RANGES.get(name)


def check_numbers(options: Any, where: str) -> None:
    """Refuse a dataclass that holds a number outside the range of its name, also further in."""
    for field in dataclasses.fields(options):
        path = f"{where}.{field.name}"
        value = getattr(options, field.name)
        allowed = range_of(type(options), field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):
                check_numbers(item, path)
            elif allowed is None or isinstance(item, bool) or not isinstance(item, int | float):
                continue
            elif item not in allowed:
                raise PlanError(f"{path} must be {allowed}, got {shown(item)}")
