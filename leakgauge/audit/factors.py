"""The factors of the evaluation protocol: where each stands in a plan, and how it is said.

Fan et al., Boosting gradient leakage attacks, USENIX Security 2025 (FedLeak), §5 and Table 12, in
the order of its §6.3; the clients behind a secure sum come last (its Fig. 7). The data set, which
the paper counts among its factors, is the plan's: its heterogeneity is varied here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from leakgauge.audit.document import NO_DEFENCE, Document
from leakgauge.config import plain, toml
from leakgauge.errors import PlanError
from leakgauge.threat import granted


@dataclass(frozen=True)
class Factor:
    """`key` is its list in [protocol]; `of` reads its value from a document, `put` writes one."""

    key: str
    name: str
    of: Callable[[Document], Any]
    put: Callable[[Document, Any], Document]


def _federation(document: Document, **changes: Any) -> Document:
    return replace(document, federation=replace(document.federation, **changes))


def _training(document: Document, **changes: Any) -> Document:
    return _federation(document, training=replace(document.federation.training, **changes))


def _init(document: Document) -> str | dict[str, Any]:
    federation = document.federation
    return {"checkpoint": federation.checkpoint} if federation.checkpoint else federation.init


def _put_init(document: Document, value: str | dict[str, Any]) -> Document:
    if isinstance(value, str):
        return _federation(document, init=value, checkpoint=None)
    return _federation(document, init="torch", checkpoint=value["checkpoint"])


def _put_training(document: Document, **changes: int) -> Document:
    """Each local step takes new records, as in the paper."""
    document = _training(document, **changes)
    training = document.federation.training
    new = training.batch_size * training.steps
    return _federation(document, records=new if training.steps > 1 else None)


FACTORS = (
    Factor(
        "partition",
        "Heterogeneity",
        lambda document: document.federation.partition,
        lambda document, value: _federation(document, partition=value),
    ),
    Factor("init", "Initialisation", _init, _put_init),
    Factor(
        "model",
        "Architecture",
        lambda document: document.federation.model,
        lambda document, value: _federation(document, model=value),
    ),
    Factor(
        "rounds",
        "Attack stage",
        lambda document: document.federation.rounds[0],
        lambda document, value: _federation(document, rounds=(value,)),
    ),
    Factor(
        "batch_size",
        "Batch size",
        lambda document: document.federation.training.batch_size,
        lambda document, value: _put_training(document, batch_size=value),
    ),
    Factor(
        "steps",
        "Local steps",
        lambda document: document.federation.training.steps,
        lambda document, value: _put_training(document, steps=value),
    ),
    Factor(
        "grants",
        "Auxiliary knowledge",
        lambda document: granted(document.threat),
        lambda document, value: replace(document, threat=replace(document.threat, grants=value)),
    ),
    Factor(
        "defence",
        "Defence",
        lambda document: document.defence[0],
        lambda document, value: replace(
            document, defence=({"name": value} if isinstance(value, str) else value,)
        ),
    ),
    Factor(
        "clients",
        "Clients behind a secure sum",
        lambda document: document.federation.clients,
        lambda document, value: _federation(document, clients=value),
    ),
)


def with_batch_norm(document: Document, mode: str) -> Document:
    return _training(document, batch_norm=mode)


def seed_of(document: Document) -> Document:
    """The configuration that a protocol starts from: the plan's own, if it is one."""
    varied, federation = document.protocol, document.federation
    if varied is None:
        raise PlanError(
            "the plan has no [protocol]: list there the values of each factor to try, such as "
            "batch_size = [1, 4, 16]"
        )
    if federation.captured:
        raise PlanError(
            "a protocol changes the federation, and captured rounds are over: name data that can "
            "be simulated"
        )
    for key, listed in (("rounds", federation.rounds), ("defence", document.defence)):
        if len(listed) > 1:
            raise PlanError(
                f"a protocol starts from one configuration, but the plan lists {len(listed)} under "
                f"{key!r}: leave one there, and list the others in [protocol] as {key}"
            )
    if varied.batch_size or varied.steps:
        if federation.records is not None:
            raise PlanError(
                f"federation.records is {federation.records!r}, but a protocol that varies "
                "batch_size or steps has each local step take new records: leave records out"
            )
        if federation.training.epochs is not None:
            raise PlanError(
                "federation.training.epochs counts passes, but this protocol varies batch_size or "
                "steps: write steps instead"
            )
    if varied.clients:
        if document.threat.actor != "aggregate" or federation.secure is None:
            raise PlanError(
                "protocol.clients varies how many updates stand behind a sum: set "
                '[threat] actor = "aggregate" and give the plan a table [federation.secure] (it '
                f"may be empty), got actor {document.threat.actor!r}"
                + (" and no such table" if federation.secure is None else "")
            )
        if federation.participants is not None:
            raise PlanError(
                "protocol.clients counts the clients of a round: leave federation.participants out"
            )
    seed = replace(document, protocol=None)
    if varied.batch_size or varied.steps:
        seed = _put_training(seed)
    return seed


def as_run(document: Document) -> Document:
    """The tables of an audit of this configuration: one client alone has no sum to hide in."""
    alone = document.federation.clients == 1
    return _federation(document, secure=None) if alone else document


def same(one: Any, other: Any) -> bool:
    """Whether two values of a factor mean the same: a name is a table with that name alone."""
    return bool(_normal(one) == _normal(other))


def _normal(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else plain(value)


def values(factor: Factor, document: Document, listed: tuple[Any, ...]) -> list[Any]:
    """Those to compare: what the factor stands at comes first unless it is listed itself."""
    now = factor.of(document)
    return list(listed) if any(same(now, value) for value in listed) else [now, *listed]


def words(factor: Factor, value: Any) -> str:
    """A value as a table shows it."""
    if factor.key == "rounds":
        rounds = "1 round" if value == 1 else f"{value} rounds"
        return f"after {rounds}" if value else "untrained"
    if factor.key == "grants":
        return ", ".join(sorted(value)) or "nothing"
    if factor.key == "clients":
        return "1, no sum" if value == 1 else str(value)
    if not isinstance(value, dict):
        return "no defence" if value == NO_DEFENCE else str(value)
    if factor.key == "init":
        return f"weights of {PurePath(value['checkpoint']).name}"
    options = [f"{key} {_option(one)}" for key, one in value.items() if key != "name"]
    name = words(factor, str(value.get("name")))
    return f"{name} ({', '.join(options)})" if options else name


def _option(value: Any) -> str:
    return value if isinstance(value, str) else toml(value)
