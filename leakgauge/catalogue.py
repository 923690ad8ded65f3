"""What a plan or a policy can name, in one line each, read from the source without importing it.

Importing the methods imports PyTorch, which takes seconds; a list of names should not. The dicts
(`ATTACKS`, `DEFENCES`, …) stay the only place where a method is entered: their keys, and the first
line of the docstring of what they point to, are read from the package's files as text. What other
packages offer is imported, to say whether it can be used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from leakgauge import outside
from leakgauge.errors import LeakGaugeError


@dataclass(frozen=True)
class Kind:
    """Methods of one kind: what they are, and the dict that holds them, as `module:NAME`. `what`
    is a plan's word for one of them, where other packages can offer more."""

    about: str
    source: str
    what: str = ""


@dataclass(frozen=True)
class Entry:
    """One line of a dict, or what a package offers: its name, what it is, where that is written.
    `problem` says why it cannot be used."""

    name: str
    summary: str
    module: str
    source: str  # the dict it stands in, or itself, as `module:NAME`
    package: str = ""
    problem: str = ""


KINDS: dict[str, Kind] = {
    "attacks": Kind(
        "a server that follows the protocol and reads the update",
        "leakgauge.attacks:ATTACKS",
        "attack",
    ),
    "malicious-servers": Kind(
        "a server that changes the model it sends",
        "leakgauge.attacks.active:ACTIVE_ATTACKS",
        "active attack",
    ),
    "defences": Kind("what a client does to its update", "leakgauge.defences:DEFENCES", "defence"),
    "restorers": Kind(
        "what makes a better picture of a guess, without the update",
        "leakgauge.restore:RESTORERS",
        "restorer",
    ),
    "priors": Kind(
        "what pictures look like, learned by leakgauge prior train",
        "leakgauge.priors:KINDS",
    ),
    "detectors": Kind(
        "what the guard asks of a model it received",
        "leakgauge.detectors:DETECTORS",
        "detector",
    ),
    "models": Kind("the network that clients train", "leakgauge.models:MODELS"),
    "initialisations": Kind("how a fresh network is filled", "leakgauge.models.init:INITS"),
    "data": Kind("records that clients hold", "leakgauge.data:DATASETS"),
    "partitions": Kind(
        "how records are shared out among clients", "leakgauge.fl.partition:PARTITIONS"
    ),
    "metrics": Kind("how close a guess is to the record", "leakgauge.metrics:METRICS", "metric"),
    "labels": Kind("how an attack reads the labels", "leakgauge.attacks._labels:RULES"),
}


def entries(kind: str) -> list[Entry]:
    """The methods of a kind, in the order of their dict, without importing them; then those that
    other packages offer."""
    return [*_read(KINDS[kind].source), *_offered(KINDS[kind].what)]


def load(entry: Entry) -> Any:
    """What the entry stands for. This imports it."""
    module, _, name = entry.source.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found if entry.package else found[entry.name]


@cache
def _offered(what: str) -> tuple[Entry, ...]:
    """Of attacks, those that change the model or those that do not."""
    word = what.rpartition(" ")[2]
    same = [kind for kind in KINDS.values() if kind.what.endswith(word)]
    ours = {entry.name for kind in same for entry in _read(kind.source)}
    found = []
    for offer in outside.offers(word) if word else ():
        summary, problem, active = "", "", False
        try:
            item = outside.load(word, offer.spec, offer.name, ours)
            about = item.score if word == "metric" else item
            summary = (inspect.getdoc(about) or "").partition("\n")[0]
            active = bool(getattr(item, "manipulates", False))
        except LeakGaugeError as error:
            problem = str(error)
        if word != "attack" or active == (what != word):
            module = offer.spec.partition(":")[0]
            found.append(Entry(offer.name, summary, module, offer.spec, offer.package, problem))
    return tuple(found)


@cache
def _read(source: str) -> tuple[Entry, ...]:
    module, _, name = source.partition(":")
    found = []
    for key, value in _items(module, name):
        home, node = _definition(module, value)
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        found.append(Entry(key, summary, home, source))
    return tuple(found)


def _items(module: str, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Keys and values of the dict that a module assigns to this name."""
    for node in _tree(module).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                yield str(key.value), value


def _definition(module: str, value: ast.expr) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """The module and the class or function that an expression in `module` names."""
    if isinstance(value, ast.Call):  # partial(function, …), Metric(function, …)
        value = value.args[0]
    if isinstance(value, ast.Attribute):  # module.function
        module, value = _imported(module, ast.unparse(value.value)), ast.Name(value.attr)
    assert isinstance(value, ast.Name)
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.id:
            return module, node
    return _definition(_imported(module, value.id), value)


def _imported(module: str, name: str) -> str:
    """The module that `name` is imported from, or that it is."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and any(name == alias.name for alias in node.names):
            whole = f"{node.module}.{name}"
            return whole if _path(whole).is_file() else str(node.module)
    raise LookupError(f"{module} imports no {name}")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text("utf-8"))


def _path(module: str) -> Path:
    package = Path(__file__).parent.joinpath(*module.split(".")[1:])
    inside = package / "__init__.py"
    return inside if inside.is_file() else package.with_suffix(".py")
