"""The nouns of an audit: what a trial measured, what follows from all trials, and the result.

Frozen data without behaviour, as the types of the library. `result.json` is a `Result` written
field by field, and read back by the code that reads plans (config.build); docs/result-schema.md
says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PureWindowsPath
from typing import Literal, TypeAlias

from leakgauge.accounting import Spent
from leakgauge.attacks.exposure import Exposure
from leakgauge.audit.document import Document, Limit
from leakgauge.papers import Paper
from leakgauge.types import Actor, Realism, Stopped

Status: TypeAlias = Literal["done", "unscored", "not applicable", "failed"]
Outcome: TypeAlias = Literal["leaks", "below the limit", "inconclusive", "failed"]
Source: TypeAlias = Literal["set aside", "named", "embedded"]
State: TypeAlias = Literal["leaks", "below", "undecided", "no control", "untested"]
Scores: TypeAlias = dict[str, tuple[float, ...]]
"""By metric, one number per record."""

SCORED = ("scores", "mean_image", "random_image", "raw", "prior_only")
"""The tables of a score that hold one number per record; the last two may be absent."""


def _share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{key}: expected a share between 0 and 1, got {value}")


# What one trial measured


@dataclass(frozen=True)
class Times:
    """`preparing` are the CPU seconds, of all, in which the attack worked before the round: next to
    none where it met what had been prepared before. `fit` is what that took once, in whichever
    trial or command: trials that share it say the same number."""

    wall_seconds: float
    cpu_seconds: float
    preparing: float = 0.0
    fit: float = 0.0


@dataclass(frozen=True)
class Pictures:
    """PNG files by their path below the folder of the result; no truths if none are known. `raws`
    are the guesses before they were restored, if they were; `priors` what is shown without the
    update, of restored guesses and of those with a prior of their own."""

    sheet: str
    truths: tuple[str, ...]
    guesses: tuple[str, ...]
    raws: tuple[str, ...] = ()
    priors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("truths", "raws", "priors"):
            if (number := len(getattr(self, key))) not in (0, len(self.guesses)):
                raise ValueError(
                    f"{key}: expected one beside each guess, got {number} beside "
                    f"{len(self.guesses)} guesses"
                )
        for name in (self.sheet, *self.truths, *self.guesses, *self.raws, *self.priors):
            windows = PureWindowsPath(name)  # it takes both slashes as separators
            if name[:1] == "/" or windows.anchor or ".." in windows.parts or "\0" in name:
                raise ValueError(f"expected a path below the folder of the result, got {name!r}")


@dataclass(frozen=True)
class Found:
    """What an attack returned, before anybody held it against a truth.

    `history` and `distances` are thinned. `objectives` are those that the restarts ended with;
    `stopped` says why the search ended. `differed` is the error of a fast derivative that was not
    used. `zero_tensors` and `sparsity` describe the observed update. `guard` is what the guard of
    the attacked client said of the model that a malicious server sent. `adapted` says what the
    attacker did who knows the defence; None if there is none, or if it did not adapt. `prepared`
    tells what the attack found prepared from what others found.
    """

    guesses: int
    labels: tuple[int, ...] | None
    residual: float | None
    history: tuple[float | None, ...] = ()
    distances: tuple[float | None, ...] = ()
    iterations: int = 0
    objectives: tuple[float | None, ...] = ()
    stopped: Stopped = "done"
    differed: float | None = None
    notes: tuple[str, ...] = ()
    facts: dict[str, object] = field(default_factory=dict)
    zero_tensors: float = 0.0
    sparsity: float = 0.0
    guard: str | None = None
    adapted: str | None = None
    prepared: str | None = None
    images: Pictures | None = None


@dataclass(frozen=True)
class LabelScore:
    """Labels named (as a multiset), beside what guessing gives."""

    truth: tuple[int, ...]
    accuracy: float
    random: float
    class_prior: float

    def __post_init__(self) -> None:
        for key in ("accuracy", "random", "class_prior"):
            _share(key, getattr(self, key))


@dataclass(frozen=True)
class Score:
    """What an attack found, held against the truth; each number beside its baseline.

    `scores` are those of the attack's picture: of the restored one, where a restorer worked on it,
    and `raw` are then those before that. `prior_only` are those of what is shown without the
    update: of the attack's own prior, or of what the restorer makes of noise.
    """

    records: int
    scores: Scores
    mean_image: Scores
    random_image: Scores
    identified: float  # the chance to pick a record out of the gallery
    labels: LabelScore | None
    raw: Scores | None = None
    prior_only: Scores | None = None
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.records < 1:
            raise ValueError(f"records: expected at least 1, got {self.records}")
        _share("identified", self.identified)
        for where in SCORED:
            table: Scores = getattr(self, where) or {}
            for share in table.get("identified", ()):
                _share(f"{where}.identified", share)
            for metric, values in table.items():
                if len(values) != self.records:
                    raise ValueError(
                        f"{where}.{metric}: expected {self.records} numbers, one per record, got "
                        f"{len(values)}"
                    )


@dataclass(frozen=True)
class Trial:
    """One attack on one round for one seed. `found` is None unless the attack ran to its end,
    `score` also when nobody knows the truth: the trial is then *unscored*."""

    id: str
    kind: Literal["trial", "control", "ladder"]
    round: int
    defence: str
    attack: str
    seed: int
    realism: Realism
    status: Status
    error: str | None
    times: Times
    traceback: str | None = None
    found: Found | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        ended = {"found": ("done", "unscored"), "score": ("done",)}
        for key, statuses in ended.items():
            if (getattr(self, key) is not None) != (self.status in statuses):
                expected = "a table" if self.status in statuses else "nothing"
                raise ValueError(f"{key}: expected {expected} where status is {self.status!r}")
        shown = len(self.found.images.truths) if self.found and self.found.images else 0
        if shown > (self.score.records if self.score else 0):
            raise ValueError(f"found.images: expected at most one truth per record, got {shown}")


@dataclass(frozen=True)
class Budget:
    """The privacy budget of a defence over all rounds that were trained."""

    epsilon: float | None
    delta: float | None
    words: str


@dataclass(frozen=True)
class Trained:
    """One federation trained under one defence for one seed. `accuracy[i]` is the share of the
    held-out `records` that its model names rightly after `rounds[i]` rounds; always naming their
    most frequent class gives `chance`."""

    id: str
    defence: str
    seed: int
    status: Literal["done", "failed"]
    error: str | None
    times: Times
    rounds: tuple[int, ...] = ()
    accuracy: tuple[float, ...] = ()
    records: int = 0
    chance: float = 0.0
    spent: Budget | None = None

    def __post_init__(self) -> None:
        for share in (self.chance, *self.accuracy):
            _share("accuracy", share)
        if len(self.rounds) != len(self.accuracy):
            raise ValueError(
                f"accuracy: expected {len(self.rounds)} numbers, one per round, got "
                f"{len(self.accuracy)}"
            )
        if bool(self.rounds) != (self.status == "done"):
            expected = "numbers" if self.status == "done" else "nothing"
            raise ValueError(f"accuracy: expected {expected} where status is {self.status!r}")


@dataclass(frozen=True)
class NotRun:
    id: str
    attack: str
    reason: str


# What follows from trials


@dataclass(frozen=True)
class Spread:
    mean: float
    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]  # 95 %, of the median
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Leak:
    """One kind of leak of one row: its share beyond guessing against its limit."""

    share: float
    chance: float
    records: int
    beyond: float
    interval: tuple[float, float]
    limit: float
    state: State
    more: int | None


@dataclass(frozen=True)
class LabelShare:
    accuracy: float
    random: float
    class_prior: float


@dataclass(frozen=True)
class Measured:
    """The numbers of a row, over all its scored trials. `adapted` says what the attacker did who
    knows the defence. `raw` and `prior_only` are over the trials that have them: of restored
    guesses, and of those with a prior of their own."""

    realism: Realism
    records: int
    scores: dict[str, Spread]
    mean_image: dict[str, float]
    random_image: dict[str, float]
    identified: float
    labels: LabelShare | None
    leaks: dict[str, Leak]
    success_rate: float
    risk: str  # of the median
    worst_risk: str
    caveats: tuple[str, ...]
    adapted: str | None = None
    raw: dict[str, Spread] | None = None
    prior_only: dict[str, Spread] | None = None


@dataclass(frozen=True)
class Row:
    """All trials of one attack at one stage under one defence."""

    round: int
    defence: str
    attack: str
    trials: int
    failed: int
    not_applicable: int
    unscored: int
    reason: str | None
    measured: Measured | None


@dataclass(frozen=True)
class Control:
    """What one attack showed on the known-weak twin."""

    attack: str
    psnr: float | None
    baseline: float | None
    breaks: tuple[str, ...]
    passed: bool
    reason: str | None
    trials: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """A kind of leak and the row that decides it."""

    round: int
    defence: str
    attack: str
    leak: Leak
    gallery: int | None = None  # of the kind "found"


@dataclass(frozen=True)
class Defended:
    """The verdict on one defence alone."""

    defence: str
    outcome: Outcome
    kinds: dict[str, Decided]


@dataclass(frozen=True)
class Worst:
    round: int
    defence: str
    attack: str
    median: float
    interval: tuple[float, float]
    most: float
    share: float
    records: int


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    exit_code: int
    headline: str
    next: tuple[str, ...]
    sentences: tuple[str, ...]
    risk: str | None
    limit: Limit
    records: int
    kinds: dict[str, Decided]
    defences: tuple[Defended, ...]
    worst: Worst | None


@dataclass(frozen=True)
class Rung:
    factor: str
    label: str
    trials: tuple[str, ...]
    median: float | None = None
    change: float | None = None


@dataclass(frozen=True)
class Explanation:
    attack: str
    rungs: tuple[Rung, ...]
    sentence: str = ""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its 95 % interval (Student's t)."""

    mean: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Weighed:
    """One setting of a trade-off: the accuracy that it leaves and what leaks under it.

    `accuracies` are by seed, in the order of the seeds; `cost` is the accuracy without a defence
    minus that with this one, paired by seed. Both are unknown unless every seed was trained to the
    end. `worst` names the kind of leak that is furthest above its limit, or nearest to it, and
    `leak` is what decides that kind; `strongest` is the row with the highest median PSNR. `outcome`
    is the verdict on this defence alone, but not *below the limit* where trials of it are missing.
    `front`: no other setting is better in accuracy or leak and as good in the other.
    """

    defence: str
    accuracies: tuple[float, ...]
    accuracy: Estimate | None
    cost: Estimate | None
    outcome: Outcome
    worst: str | None
    leak: Decided | None
    strongest: Worst | None
    front: bool
    spent: Budget | None


@dataclass(frozen=True)
class Tradeoff:
    """What each setting costs in accuracy and what leaks under it, and which one to take.

    `ties` are the settings that meet the limit too and whose accuracy cannot be told from that of
    the `recommended` one; `nearest` is the setting that came nearest to the limit where none meets
    it.
    """

    rounds: int
    seeds: tuple[int, ...]
    records: int
    chance: float
    settings: tuple[Weighed, ...]
    choice: Literal["recommended", "none", "undecided"]
    exit_code: int
    recommended: str | None
    ties: tuple[str, ...]
    nearest: str | None
    sentence: str


# The whole


@dataclass(frozen=True)
class Measurement:
    """A metric as a reader needs it: how it is called, and which way is closer. A record counts as
    recovered from `limit` on, if it has one, and where it is closer than its own mean image by
    `margin`."""

    name: str
    label: str
    unit: str
    better: Literal["higher", "lower"]
    limit: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class Audited:
    """What was audited."""

    model: str
    data: str
    records: int
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class Public:
    """The public records that the attacker holds. `checked` says that none equals a client's, which
    cannot be known where nobody knows the clients' records."""

    data: str
    records: int
    source: Source
    checked: bool = True


@dataclass(frozen=True)
class Attacker:
    actor: Actor
    client: int
    malicious: bool
    holds: tuple[str, ...]
    withheld: tuple[str, ...]
    realism: Realism
    knowledge: dict[str, str]
    public: Public | None = None


@dataclass(frozen=True)
class Guarantee:
    """What a defence of the plan spends of privacy over all planned rounds, or one sentence why
    nothing is promised."""

    defence: str
    spent: Spent | str


@dataclass(frozen=True)
class Sensitivity:
    noise: float
    cosine_distance: float
    words: str


@dataclass(frozen=True)
class Forecasted:
    cpu_seconds: float
    low: float | None
    high: float | None
    megabytes: float
    error: float | None  # forecast / actual − 1


@dataclass(frozen=True)
class RunTimes:
    cpu_seconds: float
    wall_seconds: float | None
    forecast: Forecasted | None
    finished: str | None


@dataclass(frozen=True)
class Result:
    """Everything an audit found. Only `times` differ between two runs of the same plan."""

    schema: int
    leakgauge: str
    versions: dict[str, str]
    name: str
    fingerprint: str
    plan: Document
    federation: Audited
    threat: Attacker | None
    metrics: tuple[Measurement, ...]
    summary: tuple[Row, ...]
    control: tuple[Control, ...]
    verdict: Verdict | None
    explanation: Explanation | None
    sensitivity: Sensitivity | None
    trials: tuple[Trial, ...]
    not_run: tuple[NotRun, ...]
    references: tuple[Paper, ...]
    times: RunTimes
    interrupted: bool = False
    exposure: tuple[Exposure, ...] = ()  # one for each number of records behind an update
    privacy: tuple[Guarantee, ...] = ()  # one for each defence of the plan
    trained: tuple[Trained, ...] = ()
    tradeoff: Tradeoff | None = None

    def __post_init__(self) -> None:
        limits = {metric.name: metric.limit for metric in self.metrics}
        asked = {"psnr": self.plan.audit.limit.psnr} | self.plan.audit.limit.scores
        for name, limit in asked.items():
            if name not in limits or limits[name] != limit:
                raise ValueError(f"metrics: expected {name} with the limit {limit:g} of the plan")
        for i, trial in enumerate(self.trials):
            for key in SCORED if trial.score else ():
                wanted = set(limits) | ({"identified"} if key in ("scores", "raw") else set())
                table = getattr(trial.score, key)
                if table is not None and (absent := sorted(wanted - set(table))):
                    raise ValueError(f"trials[{i}].score.{key}: key {absent[0]!r} is missing")
