"""Rounds of a federation: the part of the audit that plays the user's own system."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.fl import aggregate
from leakgauge.fl.local import attempt, minibatches, ready, train
from leakgauge.fl.model import plain
from leakgauge.fl.partition import Iid, Partition
from leakgauge.tensors import check_like, parameters
from leakgauge.types import (
    Batch,
    Dataset,
    Defence,
    LocalTraining,
    Round,
    Tampered,
    Target,
)


@dataclass(frozen=True)
class Scenario:
    """A federation under audit.

    `make_model()` takes no argument and returns the global model of round 0; torch's global
    generator is seeded for it. Each round, `participants` of the `clients` train on `records` of
    their own records (default: one batch; "all": their whole share, whose size then weighs in the
    aggregate). `rounds` honest rounds come before the attacked one.
    """

    make_model: Callable[[], nn.Module]
    data: Dataset
    training: LocalTraining = field(default_factory=LocalTraining)
    clients: int = 1
    participants: int | None = None
    records: int | Literal["all"] | None = None
    rounds: int = 0
    server_lr: float = 1.0
    weighting: aggregate.Weighting = "records"
    partition: Partition = field(default_factory=Iid)
    defence: Defence | None = None


def simulate(
    scenario: Scenario,
    rng: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> Round:
    """Play the federation up to the attacked round and return that round, truths included."""
    _check(scenario)
    model = initial_model(scenario, rng)
    shards = scenario.partition.split(scenario.data, scenario.clients, rng)
    for k, shard in enumerate(shards):
        records = _records(scenario, len(shard))
        if len(shard) < records or not len(shard):
            raise InputError(
                f"client {k} holds {len(shard)} records of {scenario.data.name} but a round takes "
                f"{records}: use fewer clients, a smaller batch or another partition"
            )
        _check_reach(records, scenario.training)
    for index in range(scenario.rounds):
        played, buffers = _play(scenario, model, shards, index, rng)
        model.load_state_dict(played.after | buffers, strict=False)
        if progress:
            progress(index + 1, scenario.rounds)
    return _play(scenario, model, shards, scenario.rounds, rng)[0]


def target(round_: Round, public: Dataset | None = None, victims: Sequence[int] = (0,)) -> Target:
    """What a malicious server holds before this round. Nothing in it comes from a client but the
    number of records, of those `victims` whose update it will read: one client, or all of them
    behind an aggregate, whose training then looks like that of one client with all batches."""
    training = round_.training
    return Target(
        model=copy.deepcopy(round_.model),
        shape=round_.shape,
        classes=round_.classes,
        training=replace(training, batch_size=training.batch_size * len(victims)),
        records=sum(round_.sizes[k] for k in victims),
        clients=len(round_.truths),
        public=public,
    )


def tampered(round_: Round, sent: Tampered, rng: torch.Generator, victim: int = 0) -> Round:
    """The same round, had the server sent `sent`: the same clients, records, training, defence and
    server. Its `model` is the one that the `victim` got."""
    clients = len(round_.truths)
    models = sent.models * clients if len(sent.models) == 1 else sent.models
    if len(models) != clients:
        raise InputError(
            f"the attack made {len(models)} models for {clients} clients: expected one, or one each"
        )
    trained = [
        train(model, truth, round_.training, rng, round_.defence)
        for model, truth in zip(models, round_.truths, strict=True)
    ]
    updates = tuple(one.update for one in trained)
    model = models[victim]
    after = aggregate.step(parameters(model), updates, round_.weights, round_.server_lr)
    return replace(
        round_,
        model=copy.deepcopy(model),
        updates=updates,
        after=after,
        secret=sent.secret,
    )


def initial_model(scenario: Scenario, rng: torch.Generator) -> nn.Module:
    """The model of round 0: the same for the same `rng`, whatever the global generator holds."""
    seed = int(torch.randint(0, 2**62, (), generator=rng))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = plain(scenario.make_model(), "make_model()")
        _try_out(model, scenario)
    return model


def _try_out(model: nn.Module, scenario: Scenario) -> None:
    """One step of local training on the smallest batch that a client meets, of blank records: what
    is wrong with the model is said before anything is run."""
    training, data = scenario.training, scenario.data
    records = _records(scenario, len(data))
    size = max(1, min(training.batch_size, records))
    count = records % size or size
    blank = data.inputs.new_zeros(count, *data.inputs.shape[1:])
    labels = data.labels.new_full((count,), len(data.classes) - 1)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(
                f"make_model() gave a model whose lazy {name!r} has no size yet: call the model on "
                "a batch of images once before you return it"
            )
    live = ready(model, training)
    values = {name: p.requires_grad_() for name, p in parameters(model).items()}
    attempt(live, values | dict(live.named_buffers()), blank, labels, training)


def _records(scenario: Scenario, held: int) -> int:
    """How many records a client that holds so many trains on in a round."""
    if scenario.records == "all":
        return held
    return scenario.training.batch_size if scenario.records is None else scenario.records


def _check(scenario: Scenario) -> None:
    """Refuse sizes that cannot be, before anything is drawn."""
    training, total = scenario.training, len(scenario.data)
    records = _records(scenario, total)
    if records > total:
        raise InputError(
            f"a client would train on {records} records (batch_size {training.batch_size}) but "
            f"{scenario.data.name} has only {total}: lower batch_size or use more data"
        )
    if scenario.records != "all":
        _check_reach(records, training)
    if scenario.participants is not None and not 1 <= scenario.participants <= scenario.clients:
        raise InputError(
            f"participants is {scenario.participants}; expected 1 to {scenario.clients} (clients)"
        )
    if scenario.rounds < 0:
        raise InputError(f"rounds is {scenario.rounds}; expected 0 or more honest rounds")


def _check_reach(records: int, training: LocalTraining) -> None:
    reached = len(minibatches(records, training)) * training.batch_size
    if reached < records:
        raise InputError(
            f"a client trains on {records} records, but its steps of batch_size "
            f"{training.batch_size} reach only {reached}: lower records, raise steps or use epochs"
        )


def _play(
    scenario: Scenario,
    model: nn.Module,
    shards: list[Tensor],
    index: int,
    rng: torch.Generator,
) -> tuple[Round, dict[str, Tensor]]:
    """One round, and the buffers (batch-norm statistics) of the next global model."""
    data = scenario.data
    chosen = torch.randperm(len(shards), generator=rng)[: scenario.participants or len(shards)]
    truths = []
    for k in chosen.sort().values.tolist():
        shard = shards[k]
        records = _records(scenario, len(shard))
        picked = shard[torch.randperm(len(shard), generator=rng)[:records]]
        truths.append(Batch(data.inputs[picked], data.labels[picked]))
    trained = [train(model, truth, scenario.training, rng, scenario.defence) for truth in truths]
    for k, one in enumerate(trained):
        check_like(one.update, parameters(model).items(), f"round {index}, client {k}: its update")
    sizes = tuple(len(truth) for truth in truths)
    shares = aggregate.weights(sizes, scenario.weighting)
    after, buffers = aggregate.merge(parameters(model), trained, shares, scenario.server_lr)
    channels, height, width = (1, 1, *data.inputs.shape[1:])[-3:]  # (1, 1, T) of texts (N, T)
    return Round(
        model=copy.deepcopy(model),
        truths=tuple(truths),
        updates=tuple(one.update for one in trained),
        weights=shares,
        after=after,
        training=scenario.training,
        sizes=sizes,
        shape=(channels, height, width),
        classes=len(data.classes),
        index=index,
        server_lr=scenario.server_lr,
        defence=scenario.defence,
    ), buffers
