"""The nouns of LeakGauge: frozen data and one-method protocols, no behaviour.

Images are float tensors (N, C, H, W) with values in [0, 1]; normalisation belongs to the local
training. An update is *before − after*, keyed by parameter name, never by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

Named: TypeAlias = dict[str, Tensor]
"""Tensors keyed by parameter name."""

Statistics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Mean and variance by channel of what enters a batch-norm layer, keyed by the layer's name."""

Actor: TypeAlias = Literal["server", "aggregate", "client"]
Knowledge: TypeAlias = Literal["training", "records", "labels", "own", "statistics"]
Stopped: TypeAlias = Literal["done", "time", "patience"]
Realism: TypeAlias = Literal["realistic", "active", "informed", "oracle"]


@dataclass(frozen=True)
class Batch:
    """Private inputs (N, C, H, W) in [0, 1] and labels (N,). Attacks never hold one of a victim."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Dataset:
    """A labelled image set in memory: `classes[k]` names label k."""

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
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    sends: Literal["update", "weights"] = "update"


@dataclass(frozen=True)
class Round:
    """One round as it really happened. Private: only `threat.observe` and the audit read it.

    `model` holds the global weights before the round, `after` those after it (parameters only).
    `truths[k]`, `updates[k]` and the record count `sizes[k]` belong to client k; `weights` are the
    aggregation weights (sum 1). `defence` is what every client of the round did to protect itself.
    """

    model: nn.Module
    truths: tuple[Batch, ...]
    updates: tuple[Named, ...]
    weights: tuple[float, ...]
    after: Named
    training: LocalTraining
    sizes: tuple[int, ...]
    shape: tuple[int, int, int]
    classes: int
    index: int = 0
    server_lr: float = 1.0
    defence: Defence | None = None
    secret: Mapping[str, Any] | None = None  # of a malicious server


@dataclass(frozen=True)
class ThreatModel:
    """Who attacks and what is granted beyond the actor's own view.

    `client` is the victim of a server, and the attacker itself when the actor is a client.
    `malicious` servers may change the model that they send; others only look.
    """

    actor: Actor = "server"
    grants: frozenset[Knowledge] = frozenset({"training", "records"})
    client: int = 0
    malicious: bool = False


@dataclass(frozen=True)
class Observation:
    """All an attacker holds. A field is None exactly when it is withheld.

    `update` is before − after: of one client (server), or of the whole round (aggregate, client).
    `secret` is what a malicious server kept when it changed the model; `model` is then what it sent
    (to the victim, where each client got its own; to the first one behind an aggregate).
    """

    model: nn.Module
    update: Named
    shape: tuple[int, int, int]
    classes: int
    training: LocalTraining | None = None
    records: int | None = None
    labels: Tensor | None = None
    own: Batch | None = None
    statistics: Statistics | None = None
    secret: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Resources:
    """Where and how long an attack may compute: parameters of the run, never of the method.

    `dtype=None` leaves the precision to the attack; `progress(done, total, objective)` is called
    once per iteration.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None
    seconds: float | None = None
    progress: Callable[[int, int, float], None] | None = None


@dataclass(frozen=True)
class Reconstruction:
    """An attack's guess with the attack's own residual: it never knew how good the guess is.

    `history` is its objective per iteration, `distances` the gradient distance in it; `objectives`
    are those that the restarts ended with after `iterations` in all, `stopped` says why they ended.
    `differed` is the relative error of a fast derivative that was therefore not used.
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
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


class Attack(Protocol):
    """`needs` names the knowledge it reads; the observation must hold it."""

    @property
    def needs(self) -> frozenset[Knowledge]: ...

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction: ...


@dataclass(frozen=True)
class Target:
    """What a malicious server holds before a round: the honest global model, what the protocol
    tells it, and `public` images of the same kind that are no client's."""

    model: nn.Module
    shape: tuple[int, int, int]
    classes: int
    training: LocalTraining
    records: int  # behind the update that it will read
    clients: int = 1
    public: Dataset | None = None


@dataclass(frozen=True)
class Tampered:
    """What a malicious server sends: one model for all clients or one each, in their order; and
    the `secret` that it keeps to read the updates by."""

    models: tuple[nn.Module, ...]
    secret: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class ActiveAttack(Attack, Protocol):
    """Changes the model before the round, and reads the update after it."""

    def tamper(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Tampered: ...


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


@runtime_checkable
class BatchDefence(Protocol):
    """Changes the records before local training."""

    def on_batch(self, batch: Batch, rng: torch.Generator) -> Batch: ...


@runtime_checkable
class GradientDefence(Protocol):
    """Changes the gradient of every local step."""

    def on_gradient(self, gradient: Named, rng: torch.Generator) -> Named: ...


@runtime_checkable
class UpdateDefence(Protocol):
    """Changes the update before it leaves the client."""

    def on_update(self, update: Named, rng: torch.Generator) -> Named: ...


Defence: TypeAlias = BatchDefence | GradientDefence | UpdateDefence
"""What a client does to protect itself: it implements the hooks it needs, others pass through."""


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
