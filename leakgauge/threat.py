"""The wall between what is private and what an attacker holds.

`observe` is the only way from an Exchange to an Observation. Possession, not flags: what the threat
model does not grant is not in the observation. Everything handed over is a detached copy, so no
autograd graph, no gradient slot and no shared storage leads back to the truth.

| actor        | sees                                                    |
|--------------|---------------------------------------------------------|
| server       | the global model and one client's own update            |
| aggregate    | the global model and the weighted mean of all updates,  |
|              | which secure aggregation may have rounded               |
| client       | two consecutive global models, its own records, and the |
|              | update that it sent itself                              |
| eavesdropper | one client's own update, and of the model its layers    |
|              | and shapes alone: the weights have no values (`meta`)   |

A *malicious* server or aggregate may also change the model that it sends. A client is after the
records of the others: what it guesses is judged on those alone. One that knows the training knows
`server_lr`, too, and undoes it. Any of them may have seen several consecutive rounds.

An eavesdropper reads what a client sends and got that client to train on records of its own, so
that it knows which update a record causes (`Target.query`) without knowing by what weights.

Any of them may hold *public* records of the same kind, which are no client's: they are not granted,
as anybody can have some. It prepares with them before the round (`before` is what it holds then)
and keeps what it made of them (`Observation.kept`). A plan declares them as `federation.public`,
and only there they can be withheld, with `public = 0`. Where it says nothing, a malicious server is
given some of its records, and an attack that needs public records the photographs that come with
the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from leakgauge.errors import PlanError, Withheld
from leakgauge.files import some
from leakgauge.fl import aggregate
from leakgauge.fl.local import ready, together
from leakgauge.fl.model import stripped
from leakgauge.fl.simulate import target
from leakgauge.fl.statistics import batch_statistics
from leakgauge.tensors import check_like, scale, subtract
from leakgauge.types import (
    Actor,
    Answered,
    Attack,
    Batch,
    Dataset,
    Defence,
    Exchange,
    Kept,
    Knowledge,
    Named,
    Observation,
    PreparedAttack,
    Query,
    Realism,
    Round,
    Setting,
    Statistics,
    Target,
    ThreatModel,
)

PUBLIC: Knowledge = "public"  # held or not; never granted, and not in an observation
TRUTHS: frozenset[Knowledge] = frozenset({"labels", "statistics", "clients"})  # oracle help
ALONE = (
    'threat.actor is "client", but it is the only client of the round: there are no records of '
    'others to reconstruct. Let at least 2 clients take part, or use actor "server"'
)

KNOWLEDGE: dict[str, str] = {
    "training": "learning rate, steps, batch size and modes of the local training",
    "records": "the number of records behind the update",
    "labels": "the true labels",
    "own": "the attacking client's own records",
    "statistics": "mean and variance of the private batch at every batch-norm layer",
    "clients": "which labels belong to which client, and the weight of each client in the mean",
    PUBLIC: "public records of the same kind, which are no client's",
    "weights": "the values of the global model's weights",
}

PROTOCOL: dict[Actor, frozenset[Knowledge]] = {  # what each actor is told in any case
    "server": frozenset({"training", "records", "weights"}),
    "aggregate": frozenset({"training", "records", "weights"}),
    "client": frozenset({"training", "own", "weights"}),
    "eavesdropper": frozenset({"records"}),
}


def observe(exchange: Exchange, threat: ThreatModel, *, kept: Kept | None = None) -> Observation:
    """What the attacker of this threat model holds after this exchange; `kept` is its own.

    Only a `Round` has truths: of any other exchange the true labels, the statistics and the
    attacking client's own records cannot be granted, whatever the threat model says.
    """
    if not 0 <= threat.client < len(exchange.updates):
        raise PlanError(
            f"threat.client is {threat.client}, but {len(exchange.updates)} clients took part"
        )
    if exchange.secure is not None and sees_one(threat.actor):
        raise PlanError(
            f'threat.actor is "{threat.actor}", but behind secure aggregation nobody sees the '
            'update of one client: use actor "aggregate", or leave federation.secure out'
        )
    if threat.actor == "client" and len(exchange.updates) == 1:
        raise PlanError(ALONE)
    seen = victims(exchange, threat)
    model = sent_to(exchange, threat)
    before = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    grants = granted(threat)
    told, counted = "training" in grants, "records" in grants
    if threat.actor == "client":
        check_like(exchange.after, before.items(), "the global model after the round")
        update = subtract(before, exchange.after)
        if told:
            update = {name: value / exchange.server_lr for name, value in update.items()}
    else:
        for k in seen:
            check_like(exchange.updates[k], before.items(), f"the update of client {k}")
        if sees_one(threat.actor):
            update = exchange.updates[threat.client]
        else:
            update = aggregate.mean(
                exchange.updates, exchange.weights, exchange.sizes, exchange.secure
            )
    # A client that does not know how many records took part knows the training of one client.
    playing = 1 if threat.actor == "client" and not counted else len(seen)
    return Observation(
        setting=_held(replace(exchange.setting, model=model), threat),
        update={name: value.detach().clone() for name, value in update.items()},
        training=together(exchange.training, playing) if told else None,
        records=sum(exchange.sizes[k] for k in seen) if counted else None,
        earlier=_earlier(exchange, threat),
        kept=kept,
        announced=exchange.announced if told else None,
        round=exchange.index,
        **_own(exchange, threat),
        **_truths(exchange, threat),
    )


def _own(exchange: Exchange, threat: ThreatModel) -> dict[str, Any]:
    """What an attacking client knows of its own part in the update, by the name of its field: what
    became of the update that it sent, and its weight, where the number of all records tells it."""
    if threat.actor != "client":
        return {}
    k, sizes = threat.client, exchange.sizes
    check_like(exchange.updates[k], exchange.after.items(), f"the update of client {k}")
    sent = aggregate.mean((exchange.updates[k],), (1.0,), (sizes[k],), exchange.secure)
    told = "records" in granted(threat) and exchange.weights == aggregate.weights(sizes, "records")
    return {
        "own_update": {name: value.detach().clone() for name, value in sent.items()},
        "share": exchange.weights[k] if told else None,
    }


def _earlier(exchange: Exchange, threat: ThreatModel) -> tuple[Observation, ...]:
    """What the attacker held after each of the rounds before that it saw."""
    wanted = threat.rounds - 1
    if wanted < 0:
        raise PlanError(f"threat.rounds is {threat.rounds}: expected 1 or more")
    if not wanted:
        return ()
    if len(exchange.earlier) < wanted:
        raise PlanError(
            f"threat.rounds is {threat.rounds}, but {len(exchange.earlier)} rounds before the "
            f"attacked one were kept: simulate(…, keep={wanted}) after at least as many rounds"
        )
    rounds = exchange.earlier[-wanted:]
    if any(len(one.updates) != len(exchange.updates) for one in rounds):
        raise PlanError(
            f"threat.rounds is {threat.rounds}, but not the same number of clients took part in "
            "all of these rounds: several rounds are of use where every client is in each of them"
        )
    return tuple(observe(one, replace(threat, rounds=1)) for one in rounds)


def before(
    exchange: Exchange,
    threat: ThreatModel,
    public: Dataset | None = None,
    *,
    adaptive: bool = True,
) -> Target:
    """What the attacker of this threat model can prepare with before this round. A client sees what
    the server makes of updates: unless it knows the training and undoes it, `server_lr` is in what
    it reads, and in its queries."""
    defence = passed(exchange, threat, adaptive=adaptive)
    aim = target(exchange, public, victims(exchange, threat), defence)
    query = aim.query
    told = "training" in granted(threat)
    if threat.actor == "client" and query is not None and not told:
        query = _scaled(query, exchange.server_lr)
    training = aim.training if told else None
    return replace(aim, setting=_held(aim.setting, threat), training=training, query=query)


def passed(exchange: Exchange, threat: ThreatModel, *, adaptive: bool = True) -> Defence | None:
    """The defence that this attacker's queries pass through. Of captured rounds nobody knows it."""
    behind = len(victims(exchange, threat))
    if not isinstance(exchange, Round) or not defends(threat, behind, adaptive=adaptive):
        return None
    return exchange.defence


def defends(threat: ThreatModel, behind: int, *, adaptive: bool = True) -> bool:
    """Whether queries pass through the defence of the round. The client that an eavesdropper got to
    train on its records applies it unasked. Any other attacker plays the client, and applies what
    it knows: it was told of the training, it is `adaptive`, and one client is `behind` the
    update."""
    knows = adaptive and "training" in granted(threat) and behind == 1
    return threat.actor == "eavesdropper" or knows


def _scaled(query: Query, factor: float) -> Query:
    def scaled(batch: Batch, rng: torch.Generator) -> Named:
        return scale(query(batch, rng), factor)

    return scaled


def _held(setting: Setting, threat: ThreatModel) -> Setting:
    """A copy of the setting as this attacker holds it: with the weights, or without values."""
    if "weights" not in holds(threat):
        return replace(setting, model=stripped(setting.model))
    model = copy.deepcopy(setting.model)
    model.zero_grad(set_to_none=True)
    return replace(setting, model=model)


def adapted(seen: Observation, defence: Defence | None) -> Observation:
    """What the attacker holds once it has done what one does who knows this defence: its rule and
    its numbers, never its memory or its randomness. Unchanged where there is no defence, where it
    says no way, or where the attacker was not told of it or lacks the weights, by which an answer
    may run the model."""
    if seen.announced is None or seen.weights is None or not isinstance(defence, Answered):
        return seen
    answer = defence.answered(seen)
    return replace(seen, update=answer.update, sent=seen.update, answer=answer)


def _truths(exchange: Exchange, threat: ThreatModel) -> dict[str, Any]:
    """What is granted of the truth, by the name of its field."""
    wanted = set(granted(threat) & TRUTHS)
    wanted |= {"own"} if threat.actor == "client" else set()
    if not wanted:
        return {}
    if not isinstance(exchange, Round):
        raise Withheld(
            f"nobody knows the truth behind these updates, so {some(wanted)} cannot be granted: "
            "leave it out of threat.grants, choose another threat.actor, or record the truths"
        )
    found: dict[str, Any] = {}
    if "labels" in wanted:
        found["labels"] = behind(exchange, threat).labels.clone()
    if "statistics" in wanted:
        found["statistics"] = _statistics(exchange, threat)
    if "clients" in wanted:
        seen = victims(exchange, threat)
        whole = sum(exchange.weights[k] for k in seen)
        found["clients"] = tuple(
            (exchange.weights[k] / whole, exchange.truths[k].labels.clone()) for k in seen
        )
    if "own" in wanted:
        own = exchange.truths[threat.client]
        found["own"] = Batch(own.inputs.clone(), own.labels.clone())
    return found


def _statistics(round_: Round, threat: ThreatModel) -> Statistics:
    """Those of all records behind the update in one batch, at the global weights."""
    live = replace(round_.setting, model=ready(round_.model, round_.training))
    with torch.no_grad():
        return batch_statistics(live, behind(round_, threat).inputs, round_.training)


def behind(round_: Round, threat: ThreatModel) -> Batch:
    """The records behind the observed update, client by client."""
    return _joined([round_.truths[k] for k in victims(round_, threat)])


def covered(round_: Round, threat: ThreatModel) -> Batch:
    """What a reconstruction is judged against: the records behind the observed update, without
    those that an attacking client holds itself."""
    if threat.actor == "client" and len(round_.truths) == 1:
        raise PlanError(ALONE)
    own = threat.client if threat.actor == "client" else None
    return _joined([round_.truths[k] for k in victims(round_, threat) if k != own])


def _joined(truths: Sequence[Batch]) -> Batch:
    return Batch(
        torch.cat([truth.inputs for truth in truths]), torch.cat([truth.labels for truth in truths])
    )


def victims(exchange: Exchange, threat: ThreatModel) -> list[int]:
    """The clients whose records are behind the observed update."""
    return [threat.client] if sees_one(threat.actor) else list(range(len(exchange.updates)))


def sees_one(actor: Actor) -> bool:
    """Whether it reads the update of one client, not what became of all of them."""
    return actor in ("server", "eavesdropper")


def granted(threat: ThreatModel) -> frozenset[Knowledge]:
    """What is granted. A threat model that does not say it grants the training and the number of
    records, and an eavesdropper that number alone: it makes its own pairs of so many records."""
    if threat.grants is not None:
        return threat.grants
    if threat.actor == "eavesdropper":
        return PROTOCOL["eavesdropper"]
    return frozenset({"training", "records"})


def sent_to(exchange: Exchange, threat: ThreatModel) -> nn.Module:
    """The model behind the observed update: the global one, or what the (first) victim got of a
    malicious server, and an attacking client itself."""
    who = threat.client if threat.actor == "client" else victims(exchange, threat)[0]
    return exchange.sent[who] if exchange.sent else exchange.model


def holds(threat: ThreatModel, public: int = 0) -> frozenset[str]:
    """All knowledge of this attacker: what is granted, and what the actor has by itself.

    Only a client has records of its own, and everybody the `public` records, if there are any: no
    grant gives either. Everybody but an eavesdropper has the weights.
    """
    held: set[str] = set(granted(threat) - {"own", PUBLIC})
    if threat.actor == "client":
        held.add("own")
    if threat.actor != "eavesdropper":
        held.add("weights")
    if public:
        held.add(PUBLIC)
    return frozenset(held)


def check(name: str, attack: Attack, threat: ThreatModel, *, public: bool = True) -> None:
    """Refuse an attack that needs what is withheld, before it runs, with the remedy. `public` says
    whether this attacker has public records."""
    if manipulates(attack) and not (threat.malicious and sends(threat.actor)):
        raise Withheld(
            f"attack {name!r} changes the model that clients receive, which this {threat.actor!r} "
            'does not: set threat.malicious = true with actor "server" or "aggregate" if your '
            "server might, or leave the attack out"
        )
    missing = sorted(attack.needs - holds(threat, public))
    if missing:
        what = "; ".join(f"{item!r} ({KNOWLEDGE[item]})" for item in missing)
        remedies = ['set threat.actor = "client"'] if "own" in missing else []
        if PUBLIC in missing:
            remedies.append("give federation.public more than 0 records, or a data set")
        if grants := [item for item in missing if item not in ("own", PUBLIC)]:
            remedies.append(f"add {grants} to threat.grants if your attacker would know it")
        raise Withheld(
            f"attack {name!r} needs {what}, which this {threat.actor!r} does not hold: "
            f"{' and '.join(remedies)}, or leave the attack out"
        )


def manipulates(attack: Attack) -> bool:
    """Whether it changes the model that clients receive."""
    return isinstance(attack, PreparedAttack) and attack.manipulates


def sends(actor: Actor) -> bool:
    """Whether it sends the clients their model, and so could change it."""
    return actor in ("server", "aggregate")


def realism(threat: ThreatModel, attack: Attack | None = None) -> Realism:
    """The tag that stands beside every number: what the attacker did and had been given.

    *realistic*: only looks, at what the protocol shows this actor anyway; *active*: changes the
    model that the clients receive; *informed*: only looks, but knows more, of a kind that is not
    private (a client that knows how many records took part, an eavesdropper that knows the
    weights); *oracle*: was told truths that no attacker would have. Public records change no tag:
    anybody can have some. An `attack` that only looks is not active, whoever runs it; without one,
    the tag is that of the strongest attack that the threat model allows.
    """
    grants = granted(threat)
    if grants & TRUTHS:
        return "oracle"
    if threat.malicious and sends(threat.actor) and (attack is None or manipulates(attack)):
        return "active"
    more = grants - PROTOCOL[threat.actor] - {"own", PUBLIC}
    return "informed" if more else "realistic"
