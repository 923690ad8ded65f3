"""The evaluation protocol: one factor at a time, keeping the value that leaks least.

Fan et al., Boosting gradient leakage attacks, USENIX Security 2025 (FedLeak), §5. From the seed
configuration of a plan, every listed value of a factor is audited with the others as they stand;
the hardest one (the lowest median PSNR of the strongest attack, over images × seeds) stays for the
factors that follow. Batch norm in train and in eval mode are gone through apart.

Every value is an ordinary audit in a folder of its own, OUT/audits/ID, so it can be resumed, run in
parallel and read by itself; the same configuration is audited once. The audit of the seed
configuration holds the positive control of the whole. `protocol.json` keeps the scores of all
trials: what follows from them is derived again when it is read, and must agree.

Differs from the paper: the value that stands is always compared too; the exact recursion is among
the attacks unless the plan leaves it out; differences above 50 dB, which nobody sees, do not count.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge._version import __version__
from leakgauge.attacks.exposure import Exposure
from leakgauge.audit import factors, schema
from leakgauge.audit.advice import CAP
from leakgauge.audit.document import Document
from leakgauge.audit.exposed import begun
from leakgauge.audit.factors import FACTORS, Factor
from leakgauge.audit.forecast import MARGIN, forecast
from leakgauge.audit.plan import Plan, load_data, parse
from leakgauge.audit.results import Control, Decided, Found, Measurement, Row, Trial
from leakgauge.audit.run import Watch
from leakgauge.audit.run import run as run_audit
from leakgauge.audit.store import Store
from leakgauge.audit.summary import judged, summarise
from leakgauge.audit.verdict import decided, measurements
from leakgauge.config import build, plain
from leakgauge.errors import (
    CheckpointError,
    InputError,
    LeakGaugeError,
    NotApplicable,
    PlanError,
)
from leakgauge.files import json_text, write_json
from leakgauge.threat import sees_one

SCHEMA = 1
Mode: TypeAlias = Literal["train", "eval"]
_Key: TypeAlias = tuple[bool, str]


# What is kept


@dataclass(frozen=True)
class Part:
    """One audit of the protocol: its tables, the scores of its trials, and in which folder below
    audits/ it lies. `controls` are the ids of the trials on the known-weak twin. `reason` says why
    this configuration could not be audited."""

    folder: str
    plan: Document
    batch_norm: bool  # whether the model has any
    trials: tuple[Trial, ...] = ()
    controls: tuple[str, ...] = ()
    exposure: tuple[Exposure, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Value:
    """What one value of a factor gave: the row of the strongest attack, every kind of leak, and
    whether records could be told apart by their number alone. `folder` is None if it was not
    run. The factor stood at it before (`stands`), or stands at it from here on (`kept`)."""

    value: object
    words: str
    folder: str | None
    row: Row | None
    leaks: dict[str, Decided]
    exposed: bool
    failed: int
    reason: str | None
    stands: bool = False
    kept: bool = False


@dataclass(frozen=True)
class Step:
    """One factor: its values, and which of them is kept."""

    factor: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Pass:
    """One way through the factors, in one mode of batch norm; `finished` unless values are left to
    run."""

    batch_norm: Mode
    steps: tuple[Step, ...]
    finished: bool


@dataclass(frozen=True)
class Times:
    cpu_seconds: float
    wall_seconds: float
    forecast: tuple[float, float] | None
    finished: str


@dataclass(frozen=True)
class Protocol:
    """Everything that a protocol found. `modes` are those of batch norm, one where no model has
    any (`normed`)."""

    schema: int
    leakgauge: str
    versions: dict[str, str]
    name: str
    fingerprint: str
    plan: Document
    metrics: tuple[Measurement, ...]
    modes: tuple[Mode, ...]
    normed: bool
    parts: tuple[Part, ...]
    control: tuple[Control, ...]
    passes: tuple[Pass, ...]
    times: Times
    interrupted: bool = False

    @property
    def unfinished(self) -> bool:
        return not all(one.finished for one in self.passes)

    @property
    def failed(self) -> int:
        """Trials that crashed."""
        return sum(trial.status == "failed" for part in self.parts for trial in part.trials)

    @property
    def skipped(self) -> list[str]:
        """The factors that were left as they are."""
        varied = self.plan.protocol
        return [factor.name for factor in FACTORS if not getattr(varied, factor.key)]

    @property
    def exit_code(self) -> int:
        """3 a trial failed, 4 part was not run or no attack broke the known-weak twin, else 0: a
        protocol compares, and gives no verdict."""
        if self.failed:
            return 3
        return 4 if self.unfinished or not any(one.passed for one in self.control) else 0


# From scores to choices

_Ask: TypeAlias = Callable[[Factor, Any, Document], Value]


def derived(protocol: Protocol) -> Protocol:
    """The protocol with everything that its parts decide."""
    known, control = _known(protocol.parts), _control(protocol)

    def value(factor: Factor, one: Any, document: Document) -> Value:
        return _value(factor, one, _found(known, document), protocol, control)

    return replace(protocol, control=control, passes=_passes(protocol, value))


def _passes(protocol: Protocol, value: _Ask) -> tuple[Pass, ...]:
    return tuple(_passed(protocol.plan, mode, value) for mode in protocol.modes)


def _passed(plan: Document, mode: Mode, value: _Ask) -> Pass:
    """Factor by factor; it ends where a value is left to run, for what to keep is not known."""
    now = factors.with_batch_norm(factors.seed_of(plan), mode)
    steps: list[Step] = []
    for factor in FACTORS:
        listed = getattr(plan.protocol, factor.key)
        if not listed:
            continue
        tried = factors.values(factor, now, listed)
        found = [
            replace(
                value(factor, one, factor.put(now, one)), stands=factors.same(one, factor.of(now))
            )
            for one in tried
        ]
        if any(one.folder is None for one in found):
            return Pass(mode, (*steps, Step(factor.name, tuple(found))), finished=False)
        kept = _hardest(found)
        now = factor.put(now, tried[kept])
        chosen = tuple(replace(one, kept=i == kept) for i, one in enumerate(found))
        steps.append(Step(factor.name, chosen))
    return Pass(mode, tuple(steps), finished=True)


def _known(parts: Iterable[Part]) -> dict[_Key, Part]:
    return {_key(part.plan, part.batch_norm): part for part in parts}


def _found(known: Mapping[_Key, Part], document: Document) -> Part | None:
    """The audit of a configuration. Whether its model has batch norm, the part knows."""
    keys = [_key(document, batch_norm) for batch_norm in (True, False)]
    return next((known[key] for key in keys if key in known), None)


def _key(document: Document, batch_norm: bool) -> _Key:
    """The same for audits that measure the same: which of them has the control makes no difference,
    nor does the mode of batch norm to a model without it."""
    document = replace(
        document, audit=replace(document.audit, control=False, explain=False, budget=None)
    )
    one = document if batch_norm else factors.with_batch_norm(document, "train")
    return batch_norm, json_text(plain(one))


def _hardest(found: Sequence[Value]) -> int:
    """The value that leaks least; what stands wins a tie, and stays where nothing was measured. A
    crash is no safety: a value with failed trials is not kept."""
    order = sorted(range(len(found)), key=lambda i: not found[i].stands)
    leaks = {
        i: min(row.measured.scores["psnr"].median, CAP)
        for i in order
        if (row := found[i].row) and row.measured and not found[i].failed
    }
    return min(leaks, key=lambda i: leaks[i], default=order[0])


def _value(
    factor: Factor,
    one: Any,
    part: Part | None,
    protocol: Protocol,
    control: tuple[Control, ...],
) -> Value:
    value, words = plain(one), factors.words(factor, one)
    if part is None:
        return Value(value, words, None, None, {}, False, 0, "not run")
    trials = [trial for trial in part.trials if trial.kind == "trial"]
    rows = summarise(trials, protocol.plan.audit.limit, protocol.metrics)
    return Value(
        value=value,
        words=words,
        folder=part.folder,
        row=_strongest(rows),
        leaks=decided(rows, control),
        exposed=any(one.exposed for one in part.exposure),
        failed=sum(trial.status == "failed" for trial in part.trials),
        reason=part.reason or next((row.reason for row in rows if row.failed), None),
    )


def _strongest(rows: Iterable[Row]) -> Row | None:
    """The attack with the highest median."""
    scored = [(row.measured.scores["psnr"].median, row) for row in rows if row.measured]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _control(protocol: Protocol) -> tuple[Control, ...]:
    """What each attack showed on the known-weak twin of the seed configuration."""
    wanted = {(part.folder, id_) for part in protocol.parts for id_ in part.controls}
    trials = [
        trial
        for part in protocol.parts
        for trial in part.trials
        if (part.folder, trial.id) in wanted
    ]
    return judged(trials, protocol.plan.audit.limit, protocol.metrics)


# Running it


@dataclass(frozen=True)
class Outlook:
    """How many audits a protocol has at most, and the CPU seconds that they should take."""

    audits: int
    trials: int
    low: float
    high: float


class Bench:
    """The seed configuration of a plan, checked with every value that is to be tried."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.seed = factors.seed_of(plan.document)
        self._loaded = load_data(plan)
        varied = plan.document.protocol
        assert varied is not None  # the seed was refused otherwise
        normed = [_normed(self.derived(self.seed))]
        for factor in FACTORS:
            for i, value in enumerate(getattr(varied, factor.key)):
                try:
                    made = self.derived(factor.put(self.seed, value))
                    if factor.key in ("model", "init"):
                        normed.append(_normed(made))
                except LeakGaugeError as error:
                    raise PlanError(f"protocol.{factor.key}[{i}]: {error}") from error
        self.normed = any(normed)
        own = self.seed.federation.training.batch_norm
        self.modes: tuple[Mode, ...] = varied.batch_norm if self.normed else (own,)

    def derived(self, document: Document) -> Plan:
        """The plan of one configuration. The records are read once for all of them."""
        table = plain(factors.as_run(document))
        return parse(table, self.plan.name, self.plan.folder, self._loaded)

    def audited(self, document: Document) -> Document:
        """What is run of a configuration: the seed alone has the control, none has a ladder."""
        first = factors.with_batch_norm(self.seed, self.modes[0])
        control = self.seed.audit.control and document == first
        measure = replace(self.seed.audit, control=control, explain=False, budget=None)
        return replace(document, audit=measure)

    def outlook(self, tell: Callable[[str], None] = lambda attack: None) -> Outlook:
        """Try each model for a moment in the seed configuration; the rest follows from how many
        records go through it. Low if every factor keeps what it has, high if it keeps its most
        costly value."""
        costs: dict[str, float] = {}
        audits, low, high = 0, 0.0, 0.0

        def cost(document: Document) -> float:
            return self._cost(document, costs, tell)

        for mode in self.modes:
            least = most = factors.with_batch_norm(self.seed, mode)
            audits, low, high = audits + 1, low + cost(least), high + cost(least)
            for factor in FACTORS:
                listed = getattr(self.plan.document.protocol, factor.key)
                new = [one for one in listed if not factors.same(one, factor.of(least))]
                audits += len(new)
                low += sum(cost(factor.put(least, one)) for one in new)
                costly = [factor.put(most, one) for one in new]
                high += sum(map(cost, costly))
                most = max([most, *costly], key=cost)
        trials = len(self.seed.audit.seeds) * len(self.plan.attacks)
        return Outlook(audits, trials, (1 - MARGIN) * low, (1 + MARGIN) * high)

    def _cost(
        self, document: Document, costs: dict[str, float], tell: Callable[[str], None]
    ) -> float:
        model = str(document.federation.model)
        if model not in costs:
            alone = FACTORS[2].put(self.seed, document.federation.model)
            alone = replace(alone, audit=replace(alone.audit, control=False, explain=False))
            found = forecast(self.derived(alone), tell)
            costs[model] = found.cpu_seconds / _work(alone)
        return costs[model] * _work(document)


def _normed(plan: Plan) -> bool:
    """Whether the first model of a plan has batch norm."""
    return any(isinstance(layer, _BatchNorm) for layer in begun(plan)[0].modules())


def _work(document: Document) -> int:
    """Records that go through the network for one simulated update."""
    training = document.federation.training
    clients = 1 if sees_one(document.threat.actor) else document.federation.clients
    return training.batch_size * training.steps * clients


def run(
    bench: Bench,
    store: Store,
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    budget: float | None = None,
    expect: Callable[[Outlook], None] | None = None,
    watch: Callable[[str], Watch] = lambda words: Watch(),
) -> Protocol:
    """Audit value by value, as far as `budget` seconds reach, and write protocol.json. `expect`, if
    given, is told the forecast; `watch` is told which value comes next, and gives what watches its
    audit."""
    plan = bench.plan

    def opened() -> None:
        store.open(plan.document, plan.fingerprint, resume=resume, overwrite=overwrite)

    opened()  # refused here, the folder is not even locked
    with store.locked():
        opened()  # another protocol may have ended in it meanwhile
        expected = bench.outlook() if expect else None
        if expect and expected:
            expect(expected)
        store.begin()  # what the audits write below it belongs to this plan
        session = _Session(bench, store.out / "audits", jobs, budget, watch)
        protocol = session.run(_empty(bench))
        spent = [trial.times.cpu_seconds for part in protocol.parts for trial in part.trials]
        protocol = replace(
            protocol,
            times=Times(
                cpu_seconds=sum(spent),
                wall_seconds=session.elapsed(),
                forecast=(expected.low, expected.high) if expected else None,
                finished=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )
        write_json(store.result, plain(protocol))
        return protocol


class _Session:
    """The audits of one call of `run`, each run once. Nothing more is begun after an interrupt or
    beyond the budget."""

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        jobs: int | None,
        budget: float | None,
        watch: Callable[[str], Watch],
    ):
        self._bench, self._folder, self._jobs, self._watch = bench, folder, jobs, watch
        self._budget, self._began = budget, time.monotonic()
        self._parts: list[Part] = []
        self._stopped = self._interrupted = False

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self, protocol: Protocol) -> Protocol:
        def value(factor: Factor, one: Any, document: Document) -> Value:
            mode = document.federation.training.batch_norm
            words = f"{mode}, {factor.name.lower()}: {factors.words(factor, one)}"
            return _value(factor, one, self._part(document, words), protocol, ())

        first = factors.with_batch_norm(self._bench.seed, self._bench.modes[0])
        self._part(first, "seed configuration")  # with the control: without it nothing counts
        _passes(protocol, value)
        made = replace(protocol, parts=tuple(self._parts), interrupted=self._interrupted)
        return derived(made)

    def _part(self, document: Document, words: str) -> Part | None:
        known = _found(_known(self._parts), document)
        if known is None and not self._stopped:
            known = self._audited(self._bench.audited(document), words)
            self._parts += [known] if known else []
        return known

    def _audited(self, document: Document, words: str) -> Part | None:
        """The audit of one configuration, if it could be run to its end."""
        left = None if self._budget is None else self._budget - self.elapsed()
        if left is not None and left <= 0:
            self._stopped = True
            return None
        name, normed = "", True
        try:
            plan = self._bench.derived(document)
            normed, name = _normed(plan), plan.fingerprint[:12]
            result = run_audit(
                plan,
                Store(self._folder / name),
                resume=True,
                jobs=self._jobs,
                budget=left,
                watch=self._watch(words),
            )
        except (InputError, NotApplicable, CheckpointError) as error:
            return Part(name, document, normed, reason=str(error))
        except KeyboardInterrupt:
            self._stopped = self._interrupted = True
            return None
        if result.interrupted or result.not_run:
            self._stopped, self._interrupted = True, result.interrupted
            return None
        return Part(
            folder=name,
            plan=document,
            batch_norm=normed,
            trials=tuple(_stripped(trial) for trial in result.trials),
            controls=tuple(id_ for entry in result.control for id_ in entry.trials),
            exposure=result.exposure,
        )


def _stripped(trial: Trial) -> Trial:
    """A trial without what only its own audit needs."""
    if trial.found is None:
        return trial
    kept = trial.found
    found = Found(kept.guesses, kept.labels, kept.residual, adapted=kept.adapted)
    return replace(trial, found=found)


def _empty(bench: Bench) -> Protocol:
    plan = bench.plan
    return Protocol(
        schema=SCHEMA,
        leakgauge=__version__,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        name=plan.name,
        fingerprint=plan.fingerprint,
        plan=plan.document,
        metrics=measurements(plan.metrics, plan.document.audit.limit),
        modes=bench.modes,
        normed=bench.normed,
        parts=(),
        control=(),
        passes=(),
        times=Times(0.0, 0.0, None, ""),
    )


# Reading it back


def load(path: Path) -> Protocol:
    """The protocol in a file; refused in words if it is not one, or not what its trials say."""
    return schema.read(path, _check, "protocol", "protocol")


def _check(value: Any) -> Protocol:
    schema._printable(value, "protocol")
    try:
        told = build(Protocol, value, "protocol", lenient=True)
        if told.schema != SCHEMA:
            raise InputError(
                f"its schema is {told.schema}, this version of LeakGauge reads {SCHEMA}: upgrade "
                "leakgauge, or run the protocol again"
            )
        found = derived(told)
    except PlanError as error:
        raise InputError(str(error)) from error
    if (told.leakgauge, told.versions.get("torch")) == (__version__, torch.__version__):
        for key in ("control", "passes"):
            if plain(getattr(told, key)) != plain(getattr(found, key)):
                raise InputError(
                    f"{key} does not follow from the trials in this file: it was edited; run the "
                    "protocol again with --resume to write it anew"
                )
    return found
