"""The nouns of LeakGauge: frozen data and one-method protocols, no behaviour.

What a record is and how a model sees it stands in records.py: images are float tensors (N, C, H, W)
with values in [0, 1]. An update is *before − after*, keyed by parameter name, never by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from leakgauge.papers import BONAWITZ2017, Paper
from leakgauge.records import Record, Task

Named: TypeAlias = dict[str, Tensor]
"""Tensors keyed by parameter name."""

Statistics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Mean and variance by channel of what enters a batch-norm layer, keyed by the layer's name."""

Actor: TypeAlias = Literal["server", "aggregate", "client", "eavesdropper"]
Knowledge: TypeAlias = Literal[
    "training", "records", "labels", "own", "statistics", "clients", "public", "weights"
]
Stopped: TypeAlias = Literal["done", "time", "patience"]
Realism: TypeAlias = Literal["realistic", "active", "informed", "oracle"]


@dataclass(frozen=True)
class Batch:
    """Private inputs (N, …) and labels (N,). Attacks never hold one of a victim."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Dataset:
    """A labelled set of records in memory: `classes[k]` names label k."""

    name: str
    inputs: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class LocalTraining:
    """What a client does with its records in one round. One SGD step *is* FedSGD.

    `epochs`, when given, replaces `steps`: that many passes over the client's records.
    `batch_norm="train"` normalises by the batch, `"eval"` by the running statistics.
    `dropout="replayed"` draws the masks of step t from `dropout_seed + t`, on both sides.
    `sends="weights"` rounds as clients do that send their new weights: the difference of two
    float32 weights keeps fewer digits than the update itself.
    """

    lr: float = 0.01
    batch_size: int = 1
    steps: int = 1
    epochs: int | None = None
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    order: Literal["fixed", "shuffled"] = "fixed"
    batch_norm: Literal["train", "eval"] = "train"
    dropout: Literal["off", "replayed"] = "off"
    dropout_seed: int = 0
    sends: Literal["update", "weights"] = "update"


@dataclass(frozen=True)
class SecureSum:
    """Secure aggregation as the server meets it: a sum of those that stay, and nothing else.

    `dropped` is the share of a round's clients whose updates do not arrive, drawn again each round,
    or the list of them; fewer than `threshold` that stay give no sum (default: more than two
    thirds must). With `clip`, values beyond ±clip are cut and all are rounded to `bits` bits; they
    are summed mod 2**`ring`. Without it the sum is not rounded.
    """

    papers: ClassVar[tuple[Paper, ...]] = (BONAWITZ2017,)
    dropped: float | tuple[int, ...] = 0.0
    threshold: int | None = None
    clip: float | None = None
    bits: int = 16
    ring: Literal[32, 64] = 32


@dataclass(frozen=True)
class Setting:
    """A model, the records that enter it, and what it learns of them."""

    model: nn.Module
    record: Record
    task: Task


@dataclass(frozen=True)
class _Set:
    """What holds a setting names its parts directly."""

    setting: Setting

    @property
    def model(self) -> nn.Module:
        return self.setting.model

    @property
    def record(self) -> Record:
        return self.setting.record

    @property
    def task(self) -> Task:
        return self.setting.task


@dataclass(frozen=True)
class _Seen(_Set):
    """What may be held without the values of the model's weights: it is then on the device "meta",
    layers and shapes without numbers."""

    @property
    def weights(self) -> Named | None:
        held: Named = dict(self.model.named_parameters())
        return None if any(value.is_meta for value in held.values()) else held


@dataclass(frozen=True)
class Exchange(_Set):
    """What travelled in one round, simulated or captured.

    The setting holds the global model before the round, `after` its parameters after it.
    `updates[k]` and the record count `sizes[k]` belong to client k; `weights` are the aggregation
    weights (sum 1). `sent` are the models that a malicious server sent instead, one per client.
    `announced` is what the clients' defence tells of itself. Behind `secure` aggregation no server
    saw one of the updates: they are those of the clients that did not drop out. `earlier` are the
    rounds just before it that were kept, in their order.
    """

    updates: tuple[Named, ...]
    weights: tuple[float, ...]
    after: Named
    training: LocalTraining
    sizes: tuple[int, ...]
    index: int = 0
    server_lr: float = 1.0
    sent: tuple[nn.Module, ...] = ()
    announced: Mapping[str, object] | None = None
    secure: SecureSum | None = None
    earlier: tuple[Exchange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Round(Exchange):
    """An exchange of which the truth is known, because it was simulated or its owner recorded it.
    Private: only `threat.observe` and the audit read it.

    `truths[k]` are the records of client k, `defence` what every client did to protect itself, and
    `memory[k]` what that defence remembered of client k's earlier rounds.
    """

    truths: tuple[Batch, ...]
    defence: Defence | None = None
    memory: tuple[Memory, ...] = ()


@dataclass(frozen=True)
class ThreatModel:
    """Who attacks and what is granted beyond the actor's own view.

    `grants=None` leaves it to the actor what it knows (`threat.granted`). `client` is the victim of
    a server or an eavesdropper, and the attacker itself when the actor is a client. `malicious`
    servers may change the model that they send; others only look. `rounds` is how many consecutive
    rounds it saw, of which the attacked one is the last.
    """

    actor: Actor = "server"
    grants: frozenset[Knowledge] | None = None
    client: int = 0
    malicious: bool = False
    rounds: int = 1


@dataclass(frozen=True)
class Kept:
    """What an attack keeps of its preparation until it reads the update: tensors and plain facts
    (numbers, texts, lists and tables of them), so that it can lie on disk."""

    tensors: Named = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation(_Seen):
    """All an attacker holds. A field is None exactly when it is withheld.

    `update` is before − after: of one client (server, eavesdropper), or of the whole round
    (aggregate, client). An attacking client has its own records in it (`own`), of `own_update` what
    it sent itself, and of `share` its weight in the mean, where that follows from what it knows.
    `clients` are the weight and the labels of every client behind the update. `earlier` is what it
    held after the rounds just before, if it saw several.
    `kept` is what the attack kept when it was prepared; the model is then what a malicious server
    sent (to the victim, where each client got its own; to the first one behind an aggregate).
    `announced` is what the clients' defence tells of itself, known with the training. `answer` is
    what its attacker makes of knowing that defence (threat.adapted); `update` is then the answer's,
    and `sent` what the client sent.
    `round` is the number of the round. `begin` is the attacker's own earlier guess, from which a
    search starts; nobody else gives it.
    """

    update: Named
    training: LocalTraining | None = None
    records: int | None = None
    labels: Tensor | None = None
    own: Batch | None = None
    own_update: Named | None = None
    share: float | None = None
    statistics: Statistics | None = None
    clients: tuple[tuple[float, Tensor], ...] | None = None
    earlier: tuple[Observation, ...] = ()
    kept: Kept | None = None
    announced: Mapping[str, object] | None = None
    answer: Answer | None = None
    sent: Named | None = None
    round: int = 0
    begin: Reconstruction | None = None


class Keeps(Protocol):
    """Where a preparation is kept (kept.py)."""

    def save(self, kept: Kept) -> None: ...

    def load(self) -> Kept | None: ...


@dataclass(frozen=True)
class Resources:
    """Where and how long an attack may compute: parameters of the run, never of the method.

    `dtype=None` leaves the precision to the attack; `progress(done, total, objective)` is called
    once per iteration. A long preparation is kept in `checkpoint`, and goes on from there; `folder`
    is where it may put what is too large for that. Whoever writes there makes the folder; it is
    removed when the preparation is finished.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None
    seconds: float | None = None
    progress: Callable[[int, int, float], None] | None = None
    checkpoint: Keeps | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Reconstruction:
    """An attack's guess with the attack's own residual: it never knew how good the guess is.

    `history` is its objective per iteration, `distances` the gradient distance in it; `objectives`
    are those that the restarts ended with after `iterations` in all, `stopped` says why they ended.
    `differed` is the relative error of a fast derivative that was therefore not used. `adapted`:
    candidates were compared by what the defence leaves of them. `prior` is what the attack's own
    idea of a picture shows without the update, as many images as guesses: the score of a guess
    stands beside the score of that. `raw` is the guess before the attack itself restored it.
    """

    inputs: Tensor
    labels: Tensor | None
    residual: float
    history: tuple[float, ...] = ()
    distances: tuple[float, ...] = ()
    iterations: int = 0
    objectives: tuple[float, ...] = ()
    stopped: Stopped = "done"
    differed: float | None = None
    adapted: bool = False
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    prior: Tensor | None = None
    raw: Tensor | None = None


class Attack(Protocol):
    """`needs` names the knowledge it reads; the observation must hold it."""

    @property
    def needs(self) -> frozenset[Knowledge]: ...

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction: ...


@runtime_checkable
class Iterative(Attack, Protocol):
    """An attack that searches or trains step by step: `iterations` times in each of its restarts.
    `shortened` is the same attack with fewer, which tells what the whole will cost."""

    @property
    def iterations(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    def shortened(self, iterations: int, restarts: int) -> Attack: ...


class Restorer(Protocol):
    """A guess (N, …) in, a better guess out: it sees neither the update nor the truth. `labels`
    (N,) are those that the attack guessed with the images, if it guessed any."""

    def restore(
        self,
        guess: Tensor,
        record: Record,
        rng: torch.Generator,
        labels: Tensor | None = None,
    ) -> Tensor: ...


Query: TypeAlias = Callable[[Batch, torch.Generator], Named]
"""Records to the update that they cause: detached, float32, on the CPU."""


@dataclass(frozen=True)
class Target(_Seen):
    """What an attacker can prepare for before a round: the honest global model, what the protocol
    tells it, and `public` records of the same kind that are no client's.

    `query(batch, rng)` is the update that would be sent of these records, as many as `records`:
    with this model and training, and after the `defence` that is named here, whose memory is fresh.
    One who does not hold the weights, or does not know the training, has it from a client that it
    got to train on records of its own.
    """

    training: LocalTraining | None
    records: int  # behind the update that it will read
    clients: int = 1
    public: Dataset | None = None
    query: Query | None = None
    defence: str | None = None
    round: int = 0


@dataclass(frozen=True)
class Preparation:
    """What an attack made before the round: what it keeps, and the models that a malicious server
    sends, one for all clients or one each, in their order; none if it sends what it should."""

    kept: Kept
    models: tuple[nn.Module, ...] = ()


@runtime_checkable
class PreparedAttack(Attack, Protocol):
    """Works before it sees an update: it changes the model (`manipulates`), or fits something to
    public records."""

    @property
    def manipulates(self) -> bool: ...

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation: ...


@runtime_checkable
class Learned(PreparedAttack, Protocol):
    """Learns from so many `pairs` of public records and the updates that they cause
    (`Target.query`). A defence is inside those pairs: it reads updates as they were sent."""

    @property
    def pairs(self) -> int: ...


@runtime_checkable
class Unaimed(PreparedAttack, Protocol):
    """Prepares with public records alone: it is given no model and no training, and what it makes
    serves every model."""

    @property
    def unaimed(self) -> Literal[True]: ...


@dataclass(frozen=True)
class History:
    """What a client remembers of the rounds it accepted: weights and sizes, never its records.

    `state` is the last accepted model; `own` the size of the client's own last update, by tensor,
    as Euclidean norms. `anchor` is an older accepted model, `age` rounds before the last one, and
    `since` the sum of the client's own updates since then. `missed` counts the rounds since the
    last accepted one: 1 when none was missed. `digests` are those of the accepted models, oldest
    first. `snapshots` holds, for each accepted round in which the warm-up was run, (mean, std,
    largest magnitude) of every tensor after each of its steps, the model as received first.
    `secret` is the client's own: what it samples is drawn from it.
    """

    state: Named
    rounds: int
    own: Mapping[str, float]
    anchor: Named = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    age: int = 0
    missed: int = 1
    digests: tuple[str, ...] = ()
    snapshots: tuple[tuple[Mapping[str, tuple[float, float, float]], ...], ...] = ()
    secret: bytes = b""


@dataclass(frozen=True)
class Received:
    """What a client holds when a model arrives.

    `state` is as it came: anything may be in it. `model` is the client's own network with that
    state, or None when it did not fit; `fresh` the same network as the client itself initialises
    it. A detector changes neither. `make` initialises more of them, from torch's global generator.
    `batch` holds the client's records as they enter its network.
    """

    state: Mapping[str, Any]
    fresh: nn.Module
    model: nn.Module | None
    training: LocalTraining
    batch: Batch | None = None
    history: History | None = None
    make: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Detection:
    """One test of a received model. It fires unless `score <= threshold` (so NaN fires); `means`
    says what that stands for. `tensor` is the worst one, `reason` one sentence for an operator;
    `unit` says what a score counts that counts parts of the records."""

    test: str
    score: float
    threshold: float
    means: Literal["reject", "exposed", "report"]
    reason: str
    tensor: str | None = None
    unit: Literal["images", "tokens"] = "images"


class Detector(Protocol):
    """Tests a received model. No detection for a test that cannot be made: no history, no data."""

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]: ...


Memory: TypeAlias = dict[str, Tensor]
"""What a defence remembers of one client, over its steps and rounds; it starts empty, and the
defence changes it in place."""


@dataclass(frozen=True)
class Among:
    """A client's place in a round: number `client` of `clients`, whose update has this `weight` in
    the aggregate. `letters` is what the clients of the round tell each other, in the order of their
    numbers; the server never reads it."""

    client: int = 0
    clients: int = 1
    weight: float = 1.0
    letters: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """A local step before it is taken: its records, the model in the modes of the training, and the
    parameters and buffers (`values`) that it has by now. A defence changes none of it."""

    setting: Setting
    training: LocalTraining
    batch: Batch
    values: Named


@dataclass(frozen=True)
class Here:
    """Where a defence is called: the setting it trains in, the round, the local step, what it
    remembers of this client, and the client's place in the round. `local` is what a step is
    computed from; only `on_gradient` has it."""

    setting: Setting
    round: int = 0
    step: int = 0
    memory: Memory = field(default_factory=dict)
    among: Among = field(default_factory=Among)
    local: Local | None = None


@dataclass(frozen=True)
class Answer:
    """What an attacker does who knows a defence; `words` say it in one sentence.

    `update` is the update as far as it can be told from what was sent. It is `restored` if there is
    a way to tell more than what was sent, whether or not it told more here. Attacks that match
    updates compare `through(candidate's update)` with `through(update)`: what the defence would
    have left of the candidate with what it left of the truth. `again` is what would have been sent
    of that update had chance been another: it tells how much of a distance is noise. `whole` is
    False where a part of several defences says no way.
    """

    words: str
    update: Named
    restored: bool = False
    whole: bool = True
    through: Callable[[Named], Named] | None = None
    again: Callable[[torch.Generator], Named] | None = None


@runtime_checkable
class Answered(Protocol):
    """A defence that says what an attacker does who knows it."""

    def answered(self, seen: Observation) -> Answer: ...


class Announces(Protocol):
    """Every defence says what an attacker who knows the protocol knows of it."""

    def announced(self) -> Mapping[str, object]: ...


@runtime_checkable
class BatchDefence(Announces, Protocol):
    """Changes the records before local training."""

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch: ...


@runtime_checkable
class GradientDefence(Announces, Protocol):
    """Changes the gradient of every local step."""

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named: ...


@runtime_checkable
class UpdateDefence(Announces, Protocol):
    """Changes the update before it leaves the client."""

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named: ...


@runtime_checkable
class Selective(Protocol):
    """A defence that not every model can have: `check` refuses one, in the modes of its training,
    in words."""

    def check(self, model: nn.Module) -> None: ...


Defence: TypeAlias = BatchDefence | GradientDefence | UpdateDefence
"""What a client does to protect itself: it implements the hooks it needs, others pass through. Its
randomness is its own: it never moves which records are drawn, or in which order."""


Scorer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Guesses (N, C, H, W) and truths of the same shape to one number per sample, (N,)."""


@dataclass(frozen=True)
class Metric:
    """How close guesses are to truths: `score` is a Scorer or, with `loads`, makes one from a file.

    A record counts as recovered when it is at least as close as `limit`, and closer than its own
    mean image by `margin`; a metric without a limit is only shown, unless a plan gives it one.
    """

    score: Callable[..., Any]
    label: str
    unit: str = ""
    better: Literal["higher", "lower"] = "higher"
    record: Literal["images"] = "images"
    limit: float | None = None
    margin: float = 0.0
    loads: bool = False
    papers: tuple[Paper, ...] = ()
