"""`result.json` read back: checked in every part a report relies on, or refused in words.

docs/result-schema.md says what each key means. The version stands in `schema`; an older file is
migrated, with nothing made up: what it did not measure stays empty. A newer one is refused. Keys
beyond the documented ones are ignored, so that a version can grow without a new number. What
follows from the trials, the verdict above all, is derived again and must agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from leakgauge._version import __version__
from leakgauge.audit import references
from leakgauge.audit.document import Document, Limit, Table
from leakgauge.audit.results import Explanation, Outcome, Result, Trial
from leakgauge.audit.summary import derived
from leakgauge.audit.verdict import measurements
from leakgauge.config import build, plain, shown
from leakgauge.errors import InputError, PlanError
from leakgauge.files import read_plain
from leakgauge.metrics import METRICS

SCHEMA = 4
DERIVED = ("summary", "control", "verdict", "explanation")
WORDS = {"headline", "next", "sentences", "sentence", "reason"}
LARGEST = 1e300  # beyond it a number cannot be drawn or added
T = TypeVar("T")


@dataclass(frozen=True)
class _Versioned:
    schema: int


@dataclass(frozen=True)
class _Ended:
    outcome: Outcome
    exit_code: int


@dataclass(frozen=True)
class _Tried:
    trials: tuple[str, ...]


@dataclass(frozen=True)
class _Told:
    """What is needed to derive the rest from the trials, and to see whether it agrees."""

    summary: tuple[object, ...]
    control: tuple[_Tried, ...]
    verdict: _Ended | None
    explanation: Explanation | None


def load(path: Path) -> Result:
    """The result in a file, at the current version; refused in words if it is not one."""
    try:
        return check(json.loads(read_plain(path).decode(), parse_constant=_no_constant))
    except FileNotFoundError:
        raise InputError(f"no result at {path}: give the path of a result.json") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the path of the result.json in it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a result of an audit") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise InputError(
            f"{path} is not valid JSON ({error}): it was cut short or edited; finish the audit "
            "with --resume to write it again"
        ) from error


def check(value: Any) -> Result:
    """A result at the current version, migrated if it is older; InputError names what is wrong."""
    _printable(value, "result")
    version = _version(value)
    table: Table = MIGRATIONS.get(version, dict)(value)
    told = _built(_Told, table, "result")
    if version >= 3 and told.verdict is None:
        raise InputError("result.verdict: expected a table, got None")
    empty: Table = {"summary": [], "control": [], "verdict": None, "explanation": None}
    result = _built(Result, table | empty, "result")
    controls = [trial for entry in told.control for trial in entry.trials]
    found = derived(result, controls, told.explanation)
    if told.verdict:
        _compare(table, told.verdict, found, same_shape=version == SCHEMA)
    return replace(found, verdict=None) if version == 1 else found


def check_trial(value: Any, id_: str) -> Trial:
    """The trial of this id as it was written by itself; InputError names what is wrong."""
    _printable(value, "trial")
    trial = _built(Trial, value, "trial")
    if trial.id != id_:
        raise InputError(f"trial.id: expected {id_!r}, got {trial.id!r}")
    return trial


def _built(cls: type[T], table: Any, where: str) -> T:
    try:
        return build(cls, table, where, lenient=True)
    except PlanError as error:
        raise InputError(str(error)) from error


def _compare(table: Table, told: _Ended, found: Result, same_shape: bool) -> None:
    """Where the file says something else than its trials it was edited, and is refused; another
    version may count differently, but not come to another outcome."""
    true = found.verdict
    assert true is not None
    for key in ("outcome", "exit_code"):
        one, other = getattr(told, key), getattr(true, key)
        if one != other:
            _edited(f"verdict.{key}", f"it says {one!r}, they say {other!r}")
    same = found.leakgauge == __version__ and found.versions.get("torch") == _torch()
    for key in DERIVED if same and same_shape else ():
        if _wordless(table[key]) != _wordless(plain(getattr(found, key))):
            _edited(key, "its numbers differ")


def _wordless(value: Any) -> Any:
    """Without the sentences, which may be put better while the numbers stay."""
    if isinstance(value, dict):
        return {key: _wordless(item) for key, item in value.items() if key not in WORDS}
    return [_wordless(item) for item in value] if isinstance(value, list) else value


def _edited(key: str, how: str) -> NoReturn:
    raise InputError(
        f"{key} does not follow from the trials in this file ({how}): it was edited; run the audit "
        "again with --resume to write it anew"
    )


def _torch() -> str:
    return str(torch.__version__)


def _version(value: Any) -> int:
    version = _built(_Versioned, value, "result").schema
    if version > SCHEMA:
        raise InputError(
            f"written by a newer LeakGauge: its schema is {version}, this version reads up to "
            f"{SCHEMA}; upgrade leakgauge"
        )
    if version < 1:
        raise InputError(f"result.schema: expected 1 to {SCHEMA}, got {version}")
    return version


# Older versions: tables in, tables out


def _from_1(old: Table) -> Table:
    """Schema 1 knew no verdict, control, explanation, threat words, forecast or caveats. It keeps
    none: what it measured was judged by nobody."""
    model = _get(old, "result", "plan", "federation", "model")
    name = model.get("name") if isinstance(model, dict) else model
    trials = [
        {"kind": "trial", "caveats": []} | _table(trial, f"result.trials[{i}]")
        for i, trial in enumerate(_list(old, "result", "trials"))
    ]
    empty = dict.fromkeys(("threat", "verdict", "explanation", "sensitivity"))
    return _from_3(
        old
        | empty
        | {"summary": [], "control": [], "not_run": [], "references": [], "trials": trials}
        | {"federation": {"model": name} | _table(_get(old, "result", "federation"), "federation")}
        | {
            "times": {"wall_seconds": None, "forecast": None, "finished": None}
            | _table(_get(old, "result", "times"), "result.times")
        }
    )


def _from_2(old: Table) -> Table:
    """Schema 2 judged pictures alone: its trials are judged anew, by the limits of today where its
    plan names none. Its ladder did not say which trials it used, and is left out."""
    entries = enumerate(_list(old, "result", "control"))
    control = [{"trials": [_get(entry, f"result.control[{i}]", "trial")]} for i, entry in entries]
    return _from_3(old | {"verdict": None, "explanation": None, "control": control})


def _from_3(old: Table) -> Table:
    """Schema 3 kept what a trial found and its score in one table, and signs of the search among
    the attack's own facts and notes."""
    plan = _rescaled(_table(_get(old, "result", "plan"), "result.plan"))
    trials = [
        _trial_from_3(_table(trial, f"result.trials[{i}]"), f"result.trials[{i}]")
        for i, trial in enumerate(_list(old, "result", "trials"))
    ]
    audit = _table(plan.get("audit", {}), "result.plan.audit")
    limit = _built(Limit, audit.get("limit", {}), "result.plan.audit.limit")
    scores: object = next((trial["score"]["scores"] for trial in trials if trial.get("score")), {})
    names = dict.fromkeys(("psnr", *_table(scores, "result.trials.scores")))
    metrics = measurements({name: METRICS[name] for name in names if name in METRICS}, limit)
    document = _built(Document, plan, "result.plan")
    papers = references.known(document, map(str, _list(old, "result", "references")))
    new = {"schema": SCHEMA, "plan": plan, "trials": trials}
    return old | new | {"metrics": plain(metrics), "references": plain(papers)}


def _rescaled(plan: Table) -> Table:
    """Schema 3 normalised in the table of the training."""
    federation = _table(plan.get("federation", {}), "result.plan.federation")
    training = _table(federation.get("training", {}), "result.plan.federation.training")
    scale = {key: training[key] for key in ("mean", "std") if key in training}
    return plan | {"federation": federation | {"record": scale}}


def _trial_from_3(old: Table, path: str) -> Table:
    if old.get("status") != "done":
        return old
    facts = dict(_table(_get(old, path, "facts"), f"{path}.facts"))
    signs = ("iterations", "objectives", "zero_tensors", "sparsity", "guard")
    labels = _get(old, path, "labels")
    read = None if labels is None else dict(_table(labels, f"{path}.labels"))
    notes = [note for note in _list(old, path, "notes") if isinstance(note, str)]
    found = {key: _get(old, path, key) for key in ("guesses", "residual", "history", "images")} | {
        "labels": read and read.pop("guess", None),
        "distances": old.get("distances", []),
        "notes": old["notes"],
        # It said so in words alone.
        "stopped": "time" if any("time budget" in note for note in notes) else "done",
        **{key: facts.pop(key) for key in signs if key in facts},
        "facts": facts,
    }
    score = {key: _get(old, path, key) for key in ("records", "scores", "caveats")} | {
        "mean_image": _get(old, path, "baselines", "mean image"),
        "random_image": _get(old, path, "baselines", "random image"),
        "identified": _get(old, path, "baselines", "identified"),
        "labels": read and {key.replace(" ", "_"): value for key, value in read.items()},
    }
    return old | {"found": found, "score": score}


MIGRATIONS: dict[int, Callable[[Table], Table]] = {1: _from_1, 2: _from_2, 3: _from_3}


def _get(table: Any, path: str, *keys: str) -> Any:
    """What stands at this place of an older file."""
    for key in keys:
        if key not in _table(table, path):
            raise InputError(f"{path}: key {key!r} is missing")
        table, path = table[key], f"{path}.{key}"
    return table


def _table(value: Any, path: str) -> Table:
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a table, got {shown(value)}")
    return value


def _list(table: Table, path: str, key: str) -> list[Any]:
    value = _get(table, path, key)
    if not isinstance(value, list):
        raise InputError(f"{path}.{key}: expected a list, got {shown(value)}")
    return value


# Any JSON


def _printable(value: Any, path: str) -> None:
    """Raise unless every number is finite and every text can be written."""
    if isinstance(value, dict):
        for key, item in value.items():
            _printable(key, path)
            _printable(item, f"{path}.{key}")
    elif isinstance(value, list):
        if not all(type(item) is float and abs(item) < LARGEST for item in value):
            for i, item in enumerate(value):
                _printable(item, f"{path}[{i}]")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            raise InputError(f"{path}: expected text, got {shown(value)}") from None
    elif isinstance(value, int | float) and not abs(value) < LARGEST:
        raise InputError(f"{path}: expected a finite number, got {shown(value)}")


def _no_constant(name: str) -> None:
    raise InputError(f"expected finite numbers, got {name}")
