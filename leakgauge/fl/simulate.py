"""Rounds of a federation: the part of the audit that plays the user's own system."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

import torch
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.fl import aggregate
from leakgauge.fl.local import attempt, minibatches, ready, together, train
from leakgauge.fl.model import plain, setting
from leakgauge.fl.partition import Iid, Partition
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.tensors import check_like, parameters, seeded, spawned
from leakgauge.types import (
    Among,
    Batch,
    Dataset,
    Defence,
    Exchange,
    LocalTraining,
    Memory,
    Named,
    Preparation,
    Query,
    Round,
    SecureSum,
    Setting,
    Target,
)


@dataclass(frozen=True)
class Scenario:
    """A federation under audit.

    `make_model()` takes no argument and returns the global model of round 0; torch's global
    generator is seeded for it. Each round, `participants` of the `clients` train on `records` of
    their own records (default: one batch; "all": their whole share, whose size then weighs in the
    aggregate). `rounds` honest rounds come before the attacked one. `scale` normalises the records.
    With `secure` aggregation, clients may drop out of a round and the mean may be rounded.
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
    scale: Scale = AS_THEY_ARE
    secure: SecureSum | None = None

    @property
    def present(self) -> int:
        """How many clients send an update in a round."""
        taking = self.participants or self.clients
        return taking - aggregate.dropping(taking, self.secure)

    def setting(self, model: nn.Module) -> Setting:
        """This model, with the records and the task of the federation."""
        return setting(model, self.data.inputs, len(self.data.classes), self.scale)


def simulate(
    scenario: Scenario,
    rng: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
    keep: int = 0,
) -> Round:
    """Play the federation up to the attacked round and return that round, truths included, with the
    `keep` rounds before it, as many as there are."""
    rounds, kept = played(scenario, rng), deque[Round](maxlen=keep)
    for index in range(scenario.rounds):
        kept.append(next(rounds)[0])
        if progress:
            progress(index + 1, scenario.rounds)
    return replace(next(rounds)[0], earlier=tuple(kept))


def played(scenario: Scenario, rng: torch.Generator) -> Iterator[tuple[Round, nn.Module]]:
    """Every round of the federation in turn, without end, and the global model after it: the same
    rounds for the same `rng`, whoever asks for them."""
    _check(scenario)
    model = initial_model(scenario, rng)
    shards = shards_of(scenario, rng)
    memory: list[Memory] = [{} for _ in shards]
    for index in count():
        round_, buffers = _play(scenario, model, shards, memory, index, rng)
        model.load_state_dict(round_.after | buffers, strict=False)
        yield round_, model


def target(
    exchange: Exchange,
    public: Dataset | None = None,
    victims: Sequence[int] = (0,),
    defence: Defence | None = None,
) -> Target:
    """What an attacker can prepare for before this round. Nothing in it comes from a client but the
    number of records, of those `victims` whose update it will read: one client, or all of them
    behind an aggregate, whose training then looks like that of one client with all batches.
    `defence` is what its queries pass through."""
    training = together(exchange.training, len(victims))
    return Target(
        setting=replace(exchange.setting, model=copy.deepcopy(exchange.model)),
        training=training,
        records=sum(exchange.sizes[k] for k in victims),
        clients=len(exchange.updates),
        public=public,
        query=_query(exchange.setting, training, defence, exchange.index),
        defence=None if defence is None else repr(defence),
        round=exchange.index,
    )


def _query(setting: Setting, training: LocalTraining, defence: Defence | None, index: int) -> Query:
    """A client of this round that trains on whatever records it is given, alone."""
    setting = replace(setting, model=copy.deepcopy(setting.model))

    def query(batch: Batch, rng: torch.Generator) -> Named:
        wrong = int(((batch.labels < 0) | (batch.labels >= setting.task.count)).sum())
        if wrong:
            raise InputError(
                f"a client trains on labels from 0 to {setting.task.count - 1}, and {wrong} of "
                f"these {len(batch)} are others (-1: of no class that clients have): draw them"
            )
        # What training draws beside the order it draws from where a generator is: move it on.
        own = seeded(int(torch.randint(2**62, (), generator=rng)))
        found = train(setting, batch, training, own, defence, round_=index)
        return {name: value.detach().float().cpu() for name, value in found.update.items()}

    return query


def tampered(round_: Round, made: Preparation, rng: torch.Generator) -> Round:
    """The same round, had the server sent the models of this preparation: the same clients,
    records, training, defence and server."""
    clients = len(round_.truths)
    sent = made.models * clients if len(made.models) == 1 else made.models
    if len(sent) != clients:
        raise InputError(
            f"the attack made {len(sent)} models for {clients} clients: expected one, or one each"
        )
    memory = copy.deepcopy(round_.memory) or tuple({} for _ in sent)
    return _trained(replace(round_, sent=sent), memory, rng)[0]


def _trained(planned: Round, memory: Sequence[Memory], rng: torch.Generator) -> tuple[Round, Named]:
    """One round of federated averaging on given truths: every client trains on the model sent to
    it and changes its memory, the server takes the weighted mean. Also the buffers (batch-norm
    statistics) of the next global model."""
    clients = range(len(planned.truths))
    sent = planned.sent or (planned.model,) * len(clients)
    letters: Memory = {}
    trained = [
        train(
            replace(planned.setting, model=sent[k]), planned.truths[k], planned.training, rng,
            planned.defence, round_=planned.index, memory=memory[k],
            among=Among(k, len(clients), planned.weights[k], letters),
        )
        for k in clients
    ]  # fmt: skip
    before = parameters(sent[0])
    for k, one in enumerate(trained):
        check_like(one.update, before.items(), f"round {planned.index}, client {k}: its update")
    after, buffers = aggregate.merge(
        before, trained, planned.weights, planned.server_lr, planned.sizes, planned.secure
    )
    updates = tuple(one.update for one in trained)
    return replace(planned, updates=updates, after=after), buffers


def initial_model(scenario: Scenario, rng: torch.Generator) -> nn.Module:
    """The model of round 0: the same for the same `rng`, whatever the global generator holds."""
    with torch.random.fork_rng():
        torch.manual_seed(model_seed(rng))
        model = plain(scenario.make_model(), "make_model()")
        _try_out(model, scenario)
    return model


def model_seed(rng: torch.Generator) -> int:
    """What the first model is drawn from: the first that a federation draws."""
    return int(torch.randint(0, 2**62, (), generator=rng))


def _try_out(model: nn.Module, scenario: Scenario) -> None:
    """One step of local training on the smallest batch that a client meets, of blank records: what
    is wrong with the model is said before anything is run."""
    training, data = scenario.training, scenario.data
    records = records_of(scenario, len(data))
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
    live = scenario.setting(ready(model, training))
    values = {name: p.requires_grad_() for name, p in parameters(model).items()}
    attempt(live, values | dict(live.model.named_buffers()), blank, labels, training)


def shards_of(scenario: Scenario, rng: torch.Generator) -> list[Tensor]:
    """Which records each client holds: enough for a round."""
    _check(scenario)
    shards = scenario.partition.split(scenario.data, scenario.clients, rng)
    for k, shard in enumerate(shards):
        records = records_of(scenario, len(shard))
        if len(shard) < records or not len(shard):
            raise InputError(
                f"client {k} holds {len(shard)} records of {scenario.data.name} but a round takes "
                f"{records}: use fewer clients, a smaller batch or another partition"
            )
        _check_reach(records, scenario.training)
    return shards


def records_of(scenario: Scenario, held: int) -> int:
    """How many records a client that holds so many trains on in a round."""
    if scenario.records == "all":
        return held
    return scenario.training.batch_size if scenario.records is None else scenario.records


def _check(scenario: Scenario) -> None:
    """Refuse sizes that cannot be, before anything is drawn."""
    training, total = scenario.training, len(scenario.data)
    records = records_of(scenario, total)
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
    check_secure(scenario)


def check_secure(scenario: Scenario) -> None:
    """Refuse secure aggregation that cannot give a sum, or one that could wrap around."""
    if scenario.secure is None:
        return
    aggregate.dropping(taking := scenario.participants or scenario.clients, scenario.secure)
    if scenario.weighting == "equal":
        most = taking
    elif scenario.records == "all":
        most = len(scenario.data)  # no record goes to two clients
    else:
        most = taking * records_of(scenario, len(scenario.data))
    aggregate.check_room(scenario.secure, most)


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
    memory: list[Memory],
    index: int,
    rng: torch.Generator,
) -> tuple[Round, Named]:
    """One round, and the buffers of the next global model."""
    data = scenario.data
    chosen = torch.randperm(len(shards), generator=rng)[: scenario.participants or len(shards)]
    clients = chosen.sort().values.tolist()
    truths = []
    for k in clients:
        shard = shards[k]
        records = records_of(scenario, len(shard))
        picked = shard[torch.randperm(len(shard), generator=rng)[:records]]
        truths.append(Batch(data.inputs[picked], data.labels[picked]))
    # Who drops out is not in the round; those who stay have the records that they had without it.
    stay = aggregate.staying(len(clients), scenario.secure, spawned(rng, f"dropped/{index}"))
    clients, truths = [clients[k] for k in stay], [truths[k] for k in stay]
    sizes = tuple(len(truth) for truth in truths)
    own = [memory[k] for k in clients]
    planned = Round(
        setting=scenario.setting(copy.deepcopy(model)),
        updates=(),
        weights=aggregate.weights(sizes, scenario.weighting),
        after={},
        training=scenario.training,
        sizes=sizes,
        index=index,
        server_lr=scenario.server_lr,
        announced=scenario.defence.announced() if scenario.defence else None,
        secure=scenario.secure,
        truths=tuple(truths),
        defence=scenario.defence,
        memory=copy.deepcopy(tuple(own)),
    )
    return _trained(planned, own, rng)
