"""The papers behind an audit, as its methods name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS
from leakgauge.attacks._labels import PAPERS as OF_RULES
from leakgauge.attacks.begun import Begun
from leakgauge.audit.document import CHAIN, Document, Table
from leakgauge.defences import DEFENCES
from leakgauge.fl.aggregate import PAPER as FEDERATION
from leakgauge.metrics import METRICS
from leakgauge.papers import FAN2025 as RISK
from leakgauge.papers import Paper


def of(methods: Iterable[object]) -> tuple[Paper, ...]:
    """Those of methods and of the rules by which they read labels, each once; then those of what
    every audit uses."""
    found: list[Paper] = []
    for method in (part for whole in methods for part in _parts(whole)):
        found += getattr(method, "papers", ())
        found += OF_RULES.get(getattr(method, "labels", ""), ())
    return tuple(dict.fromkeys([*found, RISK, FEDERATION]))


def _parts(method: object) -> Iterator[object]:
    """Of a hybrid all that it is made of, else the method itself."""
    if isinstance(method, Begun):
        yield from _parts(method.first)
        yield from (method.restore, method.search)
    else:
        yield method


def known(document: Document, also: Iterable[str] = ()) -> tuple[Paper, ...]:
    """Those of the methods that a plan names, and of further attacks, as far as this version knows
    them: for results of older versions, which hold names only."""
    methods: list[object] = []
    for table in (*document.attack, *({"name": name} for name in also)):
        one = (ATTACKS | ACTIVE_ATTACKS).get(str(table.get("name")))
        rule = str(table.get("labels", getattr(one, "labels", "")))
        methods.append(SimpleNamespace(papers=getattr(one, "papers", ()), labels=rule))
    methods += [DEFENCES.get(name) for name in _defences(document.defence)]
    methods.append(document.federation.secure)
    return of([*methods, *(METRICS.get(name) for name in document.audit.metrics)])


def _defences(tables: Iterable[str | Table]) -> list[str]:
    """Their names, of a chain those of its parts."""
    names: list[str] = []
    for table in tables:
        if isinstance(table, str):
            names.append(table)
        elif table.get("name") == CHAIN:
            names += _defences(table.get("defences", ()))
        else:
            names.append(str(table.get("name")))
    return names
