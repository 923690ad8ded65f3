"""Which numbers an option may take: what an author says beside its default, or its name.

    sigma: float = option(0.01, POSITIVE)

A class may refuse more by itself. The upper ends are far beyond any use: they refuse at once what
would never end or fill the memory. A test asserts that no numeric option of this package is without
a range; those of other packages need none, and are finite numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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


def count(most: int, least: int = 1) -> Range:
    return Range(least, most)


def option(default: Any, allowed: Range) -> Any:
    """A field of a dataclass: a number, or None, with this default, in this range."""
    return field(default=default, metadata={"range": allowed})


OF_METHODS: dict[str, Range] = {
    "iterations": count(10_000_000),
    "restarts": count(10_000),
    "lr": POSITIVE,
    "tv": FROM_0,
}
"""Options that mean the same wherever they occur."""

OF_PLANS: dict[str, Range] = {
    # [federation]
    "clients": count(1_000_000),
    "participants": count(1_000_000),
    "records": count(100_000_000),
    "public": count(100_000_000, 0),
    "server_lr": POSITIVE,
    "rounds": count(100_000, 0),
    "planned_rounds": count(100_000),
    # [federation.training]
    "lr": POSITIVE,
    "batch_size": count(100_000_000),
    "steps": count(100_000),
    "epochs": count(10_000),
    "momentum": Range(0, 0.9999999999),
    "weight_decay": Range(0, 1e6),
    "dropout_seed": count(2**62, 0),
    # [federation.record]
    "mean": FINITE,
    "std": POSITIVE,
    # [federation.secure]
    "dropped": count(1_000_000, 0),
    "threshold": count(1_000_000),
    "clip": POSITIVE,
    "bits": count(32, 2),
    # [threat], [audit]
    "client": count(1_000_000, 0),
    "seeds": count(2**62, 0),
    "gallery": count(100_000, 2),
    "seconds": POSITIVE,
    "threads": count(1024),
    "psnr": Range(0, 200),
    "share": SHARE,
    "found": SHARE,
    "labels": SHARE,
    "scores": FINITE,
}
"""The keys of a plan's own tables."""


def check_numbers(options: Any, where: str, named: Mapping[str, Range] = OF_METHODS) -> None:
    """Refuse a dataclass that holds a number outside its range, also further in."""
    for one in dataclasses.fields(options):
        path = f"{where}.{one.name}"
        value = getattr(options, one.name)
        allowed = one.metadata.get("range") or named.get(one.name)
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):
                check_numbers(item, path, named)
            elif allowed is None or isinstance(item, bool) or not isinstance(item, int | float):
                continue
            elif item not in allowed:
                raise PlanError(f"{path} must be {allowed}, got {shown(item)}")
