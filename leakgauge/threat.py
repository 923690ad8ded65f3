"""The wall between what is private and what an attacker holds.

`observe` is the only way from a Round to an Observation. Possession, not flags: what the threat
model does not grant is not in the observation. Everything handed over is a detached copy, so no
autograd graph, no gradient slot and no shared storage leads back to the truth.

| actor     | sees                                                     |
|-----------|----------------------------------------------------------|
| server    | the global model and one client's own update             |
| aggregate | the global model and the weighted mean of all updates    |
| client    | two consecutive global models, and its own records       |

A *malicious* server or aggregate may also change the model that it sends, keeps what it needs to
read the updates by, and holds public images of the same kind if the plan sets some aside.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from leakgauge.errors import PlanError, Withheld
from leakgauge.fl.local import ready
from leakgauge.fl.statistics import batch_statistics
from leakgauge.tensors import check_like, subtract, weighted_mean
from leakgauge.types import (
    ActiveAttack,
    Actor,
    Attack,
    Batch,
    Knowledge,
    LocalTraining,
    Observation,
    Realism,
    Round,
    Statistics,
    ThreatModel,
)

PUBLIC = "public"  # held or not; never granted, and no attack reads it after the round

KNOWLEDGE: dict[str, str] = {
    "training": "learning rate, steps, batch size and modes of the local training",
    "records": "the number of records behind the update",
    "labels": "the true labels",
    "own": "the attacking client's own records",
    "statistics": "mean and variance of the private batch at every batch-norm layer",
    PUBLIC: "images of the same kind that belong to no client",
}

PROTOCOL: dict[Actor, frozenset[Knowledge]] = {  # what each actor is told in any case
    "server": frozenset({"training", "records"}),
    "aggregate": frozenset({"training", "records"}),
    "client": frozenset({"training", "own"}),
}


def observe(round_: Round, threat: ThreatModel) -> Observation:
    """What the attacker of this threat model holds after this round."""
    if not 0 <= threat.client < len(round_.updates):
        raise PlanError(
            f"threat.client is {threat.client}, but {len(round_.updates)} clients took part"
        )
    before = {n: p.detach() for n, p in round_.model.named_parameters() if p.requires_grad}
    seen = victims(round_, threat)
    if threat.actor == "client":
        check_like(round_.after, before.items(), "the global model after the round")
        update = subtract(before, round_.after)
    else:
        for k in seen:
            check_like(round_.updates[k], before.items(), f"the update of client {k}")
        if threat.actor == "server":
            update = round_.updates[threat.client]
        else:
            update = weighted_mean(round_.updates, round_.weights)
    model = copy.deepcopy(round_.model)
    model.zero_grad(set_to_none=True)
    own = round_.truths[threat.client] if threat.actor == "client" else None
    records = sum(round_.sizes[k] for k in seen)
    return Observation(
        model=model,
        update={name: value.detach().clone() for name, value in update.items()},
        shape=round_.shape,
        classes=round_.classes,
        training=_training(round_, threat) if "training" in threat.grants else None,
        records=records if "records" in threat.grants else None,
        labels=covered(round_, threat).labels.clone() if "labels" in threat.grants else None,
        own=Batch(own.inputs.clone(), own.labels.clone()) if own is not None else None,
        statistics=_statistics(round_, threat) if "statistics" in threat.grants else None,
        secret=round_.secret if threat.malicious else None,
    )


def _training(round_: Round, threat: ThreatModel) -> LocalTraining:
    """The training behind the observed update. An aggregate looks like that of one *super-client*
    whose batches hold a batch of every client (exact for one step, an approximation beyond)."""
    batch_size = round_.training.batch_size * len(victims(round_, threat))
    return replace(round_.training, batch_size=batch_size)


def _statistics(round_: Round, threat: ThreatModel) -> Statistics:
    """Those of all covered records in one batch, at the global weights."""
    model = ready(round_.model, round_.training)
    with torch.no_grad():
        return batch_statistics(model, covered(round_, threat).inputs, round_.training)


def covered(round_: Round, threat: ThreatModel) -> Batch:
    """The records behind the observed update: what a reconstruction is judged against."""
    truths = [round_.truths[k] for k in victims(round_, threat)]
    return Batch(
        torch.cat([truth.inputs for truth in truths]), torch.cat([truth.labels for truth in truths])
    )


def victims(round_: Round, threat: ThreatModel) -> list[int]:
    """The clients whose records are behind the observed update."""
    return [threat.client] if threat.actor == "server" else list(range(len(round_.updates)))


def holds(threat: ThreatModel, public: int = 0) -> frozenset[str]:
    """All knowledge of this attacker: what is granted, and what the actor has by itself.

    Only a client has records of its own, and only a malicious server or aggregate holds the
    `public` records that were set aside (in its `Target`): no grant gives them to another.
    """
    held: set[str] = set(threat.grants - {"own"})
    if threat.actor == "client":
        held.add("own")
    elif threat.malicious and public:
        held.add(PUBLIC)
    return frozenset(held)


def check(name: str, attack: Attack, threat: ThreatModel) -> None:
    """Refuse an attack that needs what is withheld, before it runs, with the remedy."""
    if isinstance(attack, ActiveAttack) and (not threat.malicious or threat.actor == "client"):
        raise Withheld(
            f"attack {name!r} changes the model that clients receive, which this {threat.actor!r} "
            'does not: set threat.malicious = true with actor "server" or "aggregate" if your '
            "server might, or leave the attack out"
        )
    missing = sorted(attack.needs - holds(threat))
    if missing:
        what = "; ".join(f"{item!r} ({KNOWLEDGE[item]})" for item in missing)
        remedies = ['set threat.actor = "client"'] if "own" in missing else []
        if grants := [item for item in missing if item != "own"]:
            remedies.append(f"add {grants} to threat.grants if your attacker would know it")
        raise Withheld(
            f"attack {name!r} needs {what}, which this {threat.actor!r} does not hold: "
            f"{' and '.join(remedies)}, or leave the attack out"
        )


def realism(threat: ThreatModel, attack: Attack | None = None) -> Realism:
    """The tag that stands beside every number: what the attacker did and had been given.

    *realistic*: only looks, at what the protocol shows this actor anyway; *active*: changes the
    model that the clients receive; *informed*: only looks, but knows more, of a kind that is not
    private (a client that knows how many records took part); *oracle*: was told truths that no
    attacker would have. An `attack` that only looks is not active, whoever runs it; without one,
    the tag is that of the strongest attack that the threat model allows.
    """
    if threat.grants & {"labels", "statistics"}:
        return "oracle"
    manipulates = attack is None or isinstance(attack, ActiveAttack)
    if threat.malicious and threat.actor != "client" and manipulates:
        return "active"
    return "informed" if threat.grants - PROTOCOL[threat.actor] - {"own"} else "realistic"
