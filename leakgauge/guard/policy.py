"""What a client tolerates: which tests it makes, and with which thresholds.

A policy belongs to whoever runs the client. It is built in their code or read from their file
before a model arrives; nothing that a server, or the submitter of a run, says is merged into it.

    warm_up = {}                # on, with its defaults
    probe = { isolation = 0.3 } # another threshold
    first_conv = "off"
    averaging = "plain"         # the server averages undefended updates: the head invariant holds
    require = ["batch"]         # an ACCEPT without a memory is enough

    [[detector]]                # one of your own; its class is looked for beside the policy first
    name = "ours.guard:Ours"
    threshold = 0.5

    [training]                  # what local training does, as in a plan
    lr = 0.01
    batch_size = 32
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from leakgauge.config import build, convert, did_you_mean, toml
from leakgauge.detectors import (
    DSNR,
    Continuity,
    FirstConv,
    HeadInvariant,
    Probe,
    Replay,
    Structure,
    WarmUp,
    Weights,
)
from leakgauge.errors import PlanError
from leakgauge.files import write_atomic
from leakgauge.outside import find, unused
from leakgauge.records import AS_THEY_ARE, Scale, refuse_moved
from leakgauge.types import Detector, LocalTraining

Off: TypeAlias = Literal["off"]
Required: TypeAlias = Literal["batch", "memory", "coverage"]
MEMORY = frozenset({"continuity", "drift", "replay", "head-invariant", "warm-up"})
"""The tests that compare with earlier rounds: what an operator's restart excuses."""
TESTS = frozenset(
    {"continuity", "drift", "replay", "head-invariant", "duplicate-rows", "zero-rows",
     "near-zero-entries", "bias-dominance", "stable-rank", "magnitude-pairs", "first-conv",
     "isolation", "bins", "d-snr", "coverage", "head-gain", "loss", "exact-d-snr", "warm-up"}
)  # fmt: skip
"""The tests whose threshold a policy may set. Faults of structure are not among them."""


@dataclass(frozen=True)
class Policy:
    """A test is its detector with its options, or "off".

    `require` names what an ACCEPT needs: "batch" records for the probe, "memory" an accepted round
    before this one (or the operator's word that it is the first, or a restart), "coverage" that the
    probe saw every weight matrix. Without it the verdict is INCONCLUSIVE. `refuse_exposed` says
    whether a model whose update would show single records is refused, though nothing shows that it
    was made so. `averaging` is
    "plain" only if the operator knows that the server averages, and that no client adds noise: the
    head invariant is then tested where local training is SGD without weight decay. `most_missed`
    bounds the rounds that a client can say it missed, because tolerance grows with them.
    `thresholds` overrule those of the detectors, by the name of the test. `detector` holds further
    ones, from outside this package.
    """

    continuity: Continuity | Off = field(default_factory=Continuity)
    replay: Replay | Off = field(default_factory=Replay)
    head_invariant: HeadInvariant | Off = field(default_factory=HeadInvariant)
    weights: Weights | Off = field(default_factory=Weights)
    first_conv: FirstConv | Off = field(default_factory=FirstConv)
    probe: Probe | Off = field(default_factory=Probe)
    exact_d_snr: DSNR | Off = "off"
    warm_up: WarmUp | Off = "off"
    require: tuple[Required, ...] = ("batch", "memory")
    refuse_exposed: bool = True
    averaging: Literal["plain", "unknown"] = "unknown"
    most_missed: int = 10
    thresholds: dict[str, float] = field(default_factory=dict)
    detector: tuple[Detector, ...] = ()

    def __post_init__(self) -> None:
        if self.most_missed < 1:
            raise ValueError(f"most_missed must be at least 1, got {self.most_missed}")
        for one in self.detector:
            if not dataclasses.is_dataclass(one) or isinstance(one, type):
                raise ValueError(f"a detector must be an instance of a dataclass, got {one!r}")
        for name, value in self.thresholds.items():
            if name not in TESTS:
                raise ValueError(f"unknown test {name!r} in thresholds{did_you_mean(name, TESTS)}")
            if not value >= 0:
                raise ValueError(f"the threshold of {name} must be 0 or more, got {value}")

    def tests(self, training: LocalTraining) -> dict[str, Detector | str]:
        """Every test but that of structure, always made: its detector, or why it is off."""
        chosen: dict[str, Detector | Off] = {
            "continuity": self.continuity,
            "replay": self.replay,
            "head_invariant": self.head_invariant,
            "weights": self.weights,
            "first_conv": self.first_conv,
            "probe": self.probe,
            "exact_d_snr": self.exact_d_snr,
            "warm_up": self.warm_up,
        }
        found: dict[str, Detector | str] = {
            name: "the policy turns it off" if test == "off" else test
            for name, test in chosen.items()
        }
        if not isinstance(found["head_invariant"], str):
            if self.averaging != "plain":
                found["head_invariant"] = 'the policy does not say averaging = "plain"'
            elif training.optimiser != "sgd" or training.weight_decay:
                found["head_invariant"] = "local training is not SGD without weight decay"
        for test in self.detector:
            found[unused(type(test).__name__, found)] = test
        return found


STRUCTURE = Structure()
"""Always made, and with no threshold to raise."""


@dataclass(frozen=True)
class Settings:
    """What an operator's file holds: the policy, what local training does, and how it normalises
    records."""

    policy: Policy = field(default_factory=Policy)
    training: LocalTraining | None = None  # where the file does not say
    record: Scale = AS_THEY_ARE


def read(path: Path) -> Settings:
    """The settings in a TOML file: the keys of `Policy`, those of `LocalTraining` in a table
    [training], and `mean` and `std` in a table [record]. Unknown keys are errors."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no policy at {path}: check the path") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} is not a policy (a TOML file): {error}") from error
    return parse(table, path.name, path.resolve().parent)


def parse(table: Mapping[str, Any], where: str = "policy", folder: Path | None = None) -> Settings:
    """The settings of a table; detectors of the operator's own are looked for in `folder` first."""
    apart = ("training", "record", "detector")
    rest = {key: value for key, value in table.items() if key not in apart}
    training = None
    if "training" in table:
        refuse_moved(table["training"], f"{where}: training", "[record]")
        training = build(LocalTraining, table["training"], f"{where}: training")
    record = build(Scale, table.get("record", {}), f"{where}: record")
    policy = build(Policy, rest, where)
    further = convert(table.get("detector", []), tuple[dict[str, Any], ...], f"{where}: detector")
    made = tuple(_detector(one, f"{where}: detector", folder) for one in further)
    return Settings(dataclasses.replace(policy, detector=made), training, record)


def _detector(options: dict[str, Any], where: str, folder: Path | None) -> Detector:
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise PlanError(f'{where}: expected name = "module:Class", got {name!r}')
    fixed = {one.name for one in dataclasses.fields(Policy)}
    if name.replace("-", "_") in fixed:
        raise PlanError(f"{where}: {name!r} is a key of the policy itself: {name} = {{ … }}")
    made: Detector = find("detector", name, dict.fromkeys(fixed), folder).make(
        options, f"{where} {name!r}"
    )
    return made


def digest(policy: Policy, training: LocalTraining, scale: Scale) -> str:
    """SHA-256 of all settings, defaults included."""
    every = {"policy": dataclasses.asdict(policy), "training": dataclasses.asdict(training)}
    every["record"] = dataclasses.asdict(scale)
    further = every["policy"].pop("detector")
    if further:
        every["detector"] = {"names": [_spec(one) for one in policy.detector], "of": further}
    return hashlib.sha256(json.dumps(every, sort_keys=True, default=str).encode()).hexdigest()


def write(path: Path, settings: Settings, notes: list[str]) -> None:
    """The settings as TOML, what differs from the defaults only, below the notes as comments."""
    lines = [f"# {note}" for note in notes]
    lines += _lines(settings.policy, Policy())
    if settings.training is not None:
        lines += ["", "[training]", *_lines(settings.training, LocalTraining())]
    if settings.record != AS_THEY_ARE:
        lines += ["", "[record]", *_lines(settings.record, AS_THEY_ARE)]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def _lines(value: Any, default: Any) -> list[str]:
    lines = []
    for one in dataclasses.fields(value):
        mine, theirs = getattr(value, one.name), getattr(default, one.name)
        if mine == theirs:
            continue
        if one.name == "detector":
            mine = [{"name": _spec(test)} | _set(test) for test in mine]
        elif dataclasses.is_dataclass(mine) and not isinstance(mine, type):
            mine = _set(mine)
        lines.append(f"{one.name} = {toml(mine)}")
    return lines


def _set(options: Any) -> dict[str, Any]:
    """The options that differ from their defaults."""
    known = {one.name: one.default for one in dataclasses.fields(options)}
    chosen = {name: getattr(options, name) for name in known}
    return {name: value for name, value in chosen.items() if value != known[name]}


def _spec(test: Detector) -> str:
    return f"{type(test).__module__}:{type(test).__name__}"
