"""The tables of a plan as they are written: the file's schema, and nothing else.

Values are checked here as far as they need nothing of the machine: a plan can be read back from a
result anywhere. Names, data and devices are resolved in plan.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from leakgauge.config import toml
from leakgauge.errors import PlanError
from leakgauge.fl.aggregate import Weighting
from leakgauge.outside import unused
from leakgauge.ranges import Range, count, option
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.types import Knowledge, LocalTraining, SecureSum, ThreatModel

Table = dict[str, Any]
NO_DEFENCE = "none"
ANNOUNCED = "announced"  # the defence of captured rounds, which only their clients know
BLIND = "-blind"  # ends the name of an attack that ignores the defence
CHAIN = "chain"  # of several defences
RESTORE = "restore"  # the key of an [[attack]] that names what restores its guess
BEGIN = "begin"  # the key of an [[attack]] that names the attack whose guess it begins from


@dataclass(frozen=True)
class Federation:
    """The user's own system. `model` and `data` are a name or a table with a name and options;
    `data = { folder = "…" }` and `{ npz = "…" }` are short for those two loaders, and `{ captured =
    "…" }` names a folder of captured rounds, which say themselves what follows (model, training,
    record, clients). `record` says how records are normalised before they enter the model. `rounds`
    lists the attack stages: honest rounds played before the one that is attacked; `planned_rounds`
    is how many the federation will have in all, over which privacy is spent. `public` records
    are held by the attacker and by no client: so many of the data, set aside, or a data set, named
    as in `data` (default: see public.py). `secure` aggregation shows no server a single update."""

    data: str | Table
    model: str | Table | None = None
    init: str = "torch"
    checkpoint: str | None = None
    training: LocalTraining = field(default_factory=LocalTraining)
    record: Scale = AS_THEY_ARE
    clients: int = 1
    participants: int | None = None
    records: int | Literal["all"] | None = None
    server_lr: float = 1.0
    weighting: Weighting = "records"
    partition: str | Table = "iid"
    rounds: tuple[int, ...] = (0,)
    planned_rounds: int | None = None
    public: int | str | Table | None = None
    secure: SecureSum | None = None

    @property
    def hides(self) -> bool:
        """Whether the model has a bottleneck that draws (PRECODE)."""
        return isinstance(self.model, dict) and bool(self.model.get("precode"))

    @property
    def captured(self) -> str | None:
        """The folder of captured rounds, if they are not simulated."""
        return self.data.get("captured") if isinstance(self.data, dict) else None

    def __post_init__(self) -> None:
        if not self.rounds or min(self.rounds) < 0 or len(set(self.rounds)) < len(self.rounds):
            raise ValueError(
                f"rounds must list different stages from 0 up, got {list(self.rounds)}"
            )
        if self.planned_rounds is not None and self.planned_rounds <= max(self.rounds):
            raise ValueError(
                f"planned_rounds must be above the last attacked round, {max(self.rounds)} "
                f"(they count from 0), got {self.planned_rounds}"
            )
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if isinstance(self.public, int) and self.public < 0:
            raise ValueError(f"public must be 0 or more records, got {self.public}")
        if not 0 < self.training.lr < math.inf:
            raise ValueError(
                f"training.lr must be positive and finite, got {self.training.lr}: "
                "a client that takes no step sends nothing"
            )


@dataclass(frozen=True)
class Limit:
    """What a federation may leak: at most `share` of the records recovered to `psnr` dB (and well
    above the mean image), at most `found` of them picked out of the gallery, at most `labels` of
    their labels read; the last two beyond guessing. More is a leak, and exit code 1. `scores` sets
    for further metrics, by name, from which score on a record counts as recovered: at most `share`
    of them may be."""

    psnr: float = 15.0
    share: float = 0.1
    found: float = 0.1
    labels: float = 0.5
    scores: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.psnr):
            raise ValueError(f"psnr must be a finite number of decibels, got {self.psnr}")
        for key in ("share", "found", "labels"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} must lie between 0 and 1, got {getattr(self, key)}")
        if "psnr" in self.scores:
            raise ValueError("scores sets limits of other metrics: set that of psnr as `psnr`")


@dataclass(frozen=True)
class Measure:
    """What is measured, how often, on what. `control` breaks a known-weak twin first, `explain`
    climbs from it to the audited federation. No trial starts beyond `budget`, a time such as "10m";
    `seconds` limits each attack. `exact` runs the exact recursion before the attacks of the plan.
    `adaptive` attackers know the defence and do what it says one does who knows it. A plan that
    names no `metrics` measures LPIPS too, where its file of weights is found.
    `threads` is fixed, not the number of cores, so that a plan gives the same bytes on one core and
    on many."""

    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("psnr", "affine-psnr", "ssim", "mse")
    assignment: Literal["optimal", "best-match"] = "optimal"
    gallery: int = 200
    limit: Limit = Limit()
    control: bool = True
    explain: bool = True
    exact: bool = True
    adaptive: bool = True
    budget: str | None = None
    seconds: float | None = None
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be a list of different numbers, got {list(self.seeds)}")
        measured = [name.rpartition(":")[2] for name in self.metrics]  # of module:NAME, the name
        if unmeasured := [name for name in self.limit.scores if name not in measured]:
            raise ValueError(
                f"limit.scores names {unmeasured[0]!r}, which is not measured: expected one of "
                f"metrics = {measured}"
            )
        if self.budget is not None:
            duration(self.budget, "budget")
        if self.gallery < 2:
            raise ValueError(f"gallery must hold at least 2 images, got {self.gallery}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be positive and finite, got {self.seconds}")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


@dataclass(frozen=True)
class Comparison:
    """What `leakgauge tradeoff` trains: the federation for so many `rounds` under each defence and
    for each seed. Accuracy is measured on `held_out` records, a number or a share of the data, that
    no client and no attacker holds: after the last round, and also after `every` so many."""

    rounds: int = field(metadata={"range": count(100_000)})
    held_out: int | float = option(0.2, Range(0, 1e8, open=True))
    every: int | None = option(None, count(100_000))

    def __post_init__(self) -> None:
        if isinstance(self.held_out, float) and not 0 < self.held_out < 1:
            raise ValueError(
                "held_out must be a whole number of records, or a share of them between 0 and 1, "
                f"got {self.held_out}"
            )


@dataclass(frozen=True)
class Varied:
    """The values that a protocol tries, by factor; a factor without values stays as the plan has
    it. `init` takes `{ checkpoint = "…" }` too. `clients` are those behind one secure sum.
    `batch_norm` lists the modes that are gone through, each by itself."""

    partition: tuple[str | Table, ...] = ()
    init: tuple[str | Table, ...] = ()
    model: tuple[str | Table, ...] = ()
    rounds: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    grants: tuple[frozenset[Knowledge], ...] = ()
    defence: tuple[str | Table, ...] = ()
    clients: tuple[int, ...] = ()
    batch_norm: tuple[Literal["train", "eval"], ...] = ("train", "eval")

    def __post_init__(self) -> None:
        tried = {one.name: getattr(self, one.name) for one in fields(self)}
        if not any(values for key, values in tried.items() if key != "batch_norm"):
            keys = ", ".join(key for key in tried if key != "batch_norm")
            raise ValueError(f"lists no values to try: give a list for one of {keys}")
        if not self.batch_norm:
            raise ValueError('batch_norm lists no mode: expected "train", "eval" or both')
        for key, values in tried.items():
            if any(value in values[:i] for i, value in enumerate(values)):
                raise ValueError(f"{key} lists a value twice: {list(values)}")
        for i, value in enumerate(self.init):
            if isinstance(value, dict) and set(value) != {"checkpoint"}:
                raise ValueError(
                    f'init[{i}]: expected a name or {{ checkpoint = "…" }}, got {value}'
                )


@dataclass(frozen=True)
class Document:
    """The tables of the file, as they are written. With `protocol`, the others are the
    configuration that it starts from."""

    federation: Federation
    attack: tuple[Table, ...]
    threat: ThreatModel = field(default_factory=ThreatModel)
    defence: tuple[Table, ...] = ({"name": NO_DEFENCE},)
    audit: Measure = field(default_factory=Measure)
    tradeoff: Comparison | None = None
    protocol: Varied | None = None

    def __post_init__(self) -> None:
        if not self.defence:
            raise ValueError(f"no [[defence]]; leave the key out, or name {NO_DEFENCE!r}")


def name_of(value: str | Table | None) -> str:
    """The name in what is a name, or a table with a name and options."""
    return value if isinstance(value, str) else str((value or {}).get("name"))


def settings(methods: Sequence[Table]) -> dict[str, str]:
    """Options of each attack or defence as the plan gives them, by the key that names its rows."""
    named: dict[str, str] = {}
    for options in methods:
        key = unused(_row(options), named)  # as in the plan
        named[key] = ", ".join(f"{k} = {toml(v)}" for k, v in options.items() if k != "name")
    return named


def _row(method: str | Table) -> str:
    """What rows of a method are called: after those before it, and with what restores its guess."""
    table: Table = {"name": method} if isinstance(method, str) else method
    before = [_row(table[BEGIN])] if BEGIN in table else []
    own = [name_of(one) for one in (table, table.get(RESTORE)) if one is not None]
    return "+".join([*before, *(re.sub(r"^[\w.]+:(\w+)$", r"\1", name) for name in own)])


def duration(text: str, where: str) -> float:
    """Seconds of '90s', '10m', '2h' or a plain number."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise PlanError(f"{where}: expected a time such as 90s, 10m or 2h, got {text!r}")
    return seconds
