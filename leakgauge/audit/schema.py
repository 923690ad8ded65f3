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
from leakgauge.audit.results import Explanation, Outcome, Result, Trained, Trial
from leakgauge.audit.summary import derived
from leakgauge.audit.verdict import measurements
from leakgauge.config import build, convert, plain, shown
from leakgauge.errors import InputError, PlanError
from leakgauge.files import read_plain
from leakgauge.metrics import METRICS

T = TypeVar("T")
One = TypeVar("One", Trial, Trained)
SCHEMA = 6
UNTESTED = 5  # the first schema in which a defence that no attacker knows is untested
BEYOND_PRIOR = 6  # the first in which a picture that a prior alone shows as well is no leak
DOUBTED: tuple[Outcome, Outcome] = ("below the limit", "inconclusive")
DERIVED = ("summary", "control", "verdict", "explanation", "tradeoff")
WORDS = {"headline", "next", "sentences", "sentence", "reason"}
LARGEST = 1e300  # beyond it a number cannot be drawn or added


@dataclass(frozen=True)
class _Ended:
    outcome: Outcome
    exit_code: int


@dataclass(frozen=True)
class _Chosen:
    recommended: str | None
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
    tradeoff: _Chosen | None = None


def load(path: Path) -> Result:
    """The result in a file, at the current version; refused in words if it is not one."""
    return read(path, check, "result", "audit")


def read(path: Path, check: Callable[[Any], T], what: str, run: str) -> T:
    """What `check` makes of a JSON file, WHAT.json, which a RUN writes."""
    try:
        return check(json.loads(read_plain(path).decode(), parse_constant=_no_constant))
    except FileNotFoundError:
        raise InputError(f"no {what} at {path}: give the path of a {what}.json") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the path of the {what}.json in it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a {what}") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise InputError(
            f"{path} is not valid JSON ({error}): it was cut short or edited; finish the {run} "
            "with --resume to write it again"
        ) from error


def check(value: Any) -> Result:
    """A result at the current version, migrated if it is older; InputError names what is wrong."""
    try:
        return _read(value)
    except PlanError as error:
        raise InputError(str(error)) from error


def check_trial(value: Any, id_: str) -> Trial:
    """The trial of this id as it was written by itself; InputError names what is wrong."""
    return _alone(Trial, value, "trial", id_)


def check_trained(value: Any, id_: str) -> Trained:
    """The same of a federation that was trained."""
    return _alone(Trained, value, "trained", id_)


def _alone(kind: type[One], value: Any, where: str, id_: str) -> One:
    _printable(value, where)
    try:
        found = build(kind, value, where, lenient=True)
    except PlanError as error:
        raise InputError(str(error)) from error
    if found.id != id_:
        raise InputError(f"{where}.id: expected {id_!r}, got {found.id!r}")
    return found


def _read(value: Any) -> Result:
    _printable(value, "result")
    version: int = _get(value, int, "result", "schema")
    if version > SCHEMA:
        raise InputError(
            f"written by a newer LeakGauge: its schema is {version}, this version reads up to "
            f"{SCHEMA}; upgrade leakgauge"
        )
    if version < 1:
        raise InputError(f"result.schema: expected 1 to {SCHEMA}, got {version}")
    table: Table = MIGRATIONS.get(version, dict)(value)
    told = build(_Told, table, "result", lenient=True)
    if version >= 3 and told.verdict is None:
        raise InputError("result.verdict: expected a table, got None")
    table |= {"summary": [], "control": [], "verdict": None, "explanation": None, "tradeoff": None}
    result = build(Result, table, "result", lenient=True)
    controls = [trial for entry in told.control for trial in entry.trials]
    found = derived(result, controls, told.explanation)
    if told.verdict:
        _compare(value, told.verdict, told.tradeoff, found)
    return replace(found, verdict=None) if version == 1 else found


def _compare(table: Table, told: _Ended, chosen: _Chosen | None, found: Result) -> None:
    """Where the file says something else than its trials it was edited, and is refused; another
    version may count differently, but not come to another outcome."""
    true = found.verdict
    assert true is not None
    if table["schema"] < UNTESTED and (told.outcome, true.outcome) == DOUBTED:
        return
    if table["schema"] < BEYOND_PRIOR and any(t.score and t.score.prior_only for t in found.trials):
        return
    for key in ("outcome", "exit_code"):
        one, other = getattr(told, key), getattr(true, key)
        if one != other:
            _edited(f"verdict.{key}", f"it says {one!r}, they say {other!r}")
    given = found.tradeoff
    choice = _Chosen(given.recommended, given.exit_code) if given else None
    if chosen != choice:
        _edited("tradeoff", "another setting is recommended")
    version = table["schema"], found.leakgauge, found.versions.get("torch")
    for key in DERIVED if version == (SCHEMA, __version__, _torch()) else ():
        if _wordless(table.get(key)) != _wordless(plain(getattr(found, key))):
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


# Older versions: tables in, tables out


def _from_1(old: Table) -> Table:
    """Schema 1 knew no verdict, control, explanation, threat words, forecast or caveats. It keeps
    none: what it measured was judged by nobody."""
    model = _get(old, Any, "result", "plan", "federation", "model")
    name = model.get("name") if isinstance(model, dict) else model
    trials = _get(old, tuple[Table, ...], "result", "trials")
    federation = _get(old, Table, "result", "federation")
    times = _get(old, Table, "result", "times")
    return _from_3(
        old
        | dict.fromkeys(("threat", "verdict", "explanation", "sensitivity"))
        | {"summary": [], "control": [], "not_run": [], "references": []}
        | {
            "trials": [{"kind": "trial", "caveats": []} | trial for trial in trials],
            "federation": {"model": name} | federation,
            "times": {"wall_seconds": None, "forecast": None, "finished": None} | times,
        }
    )


def _from_2(old: Table) -> Table:
    """Schema 2 judged pictures alone: its trials are judged anew, by the limits of today where its
    plan names none. Its ladder did not say which trials it used, and is left out."""
    entries = _get(old, tuple[Table, ...], "result", "control")
    control = [{"trials": [_get(entry, Any, "result.control", "trial")]} for entry in entries]
    return _from_3(old | {"verdict": None, "explanation": None, "control": control})


def _from_3(old: Table) -> Table:
    """Schema 3 kept what a trial found and its score in one table, and signs of the search among
    the attack's own facts and notes."""
    plan = _rescaled(_get(old, Table, "result", "plan"))
    before = _get(old, tuple[Table, ...], "result", "trials")
    trials = [_trial_from_3(trial, f"result.trials[{i}]") for i, trial in enumerate(before)]
    audit = convert(plan.get("audit", {}), Table, "result.plan.audit")
    limit = build(Limit, audit.get("limit", {}), "result.plan.audit.limit", lenient=True)
    scores: object = next((trial["score"]["scores"] for trial in trials if trial.get("score")), {})
    names = dict.fromkeys(("psnr", *convert(scores, Table, "result.trials.scores")))
    metrics = measurements({name: METRICS[name] for name in names if name in METRICS}, limit)
    document = build(Document, plan, "result.plan", lenient=True)
    used = _get(old, tuple[str, ...], "result", "references")
    threat = _get(old, Table | None, "result", "threat")
    times = _get(old, Table, "result", "times")
    forecast = _get(times, Table | None, "result.times", "forecast")
    return _from_4(old) | {
        "plan": plan,
        "trials": trials,
        "metrics": plain(metrics),
        "references": plain(references.known(document, used)),
        # Keys that came while it was the schema
        "threat": threat and {"malicious": False} | threat,
        "times": times | {"forecast": forecast and {"low": None, "high": None} | forecast},
    }


def _rescaled(plan: Table) -> Table:
    """Schema 3 normalised in the table of the training."""
    federation = convert(plan.get("federation", {}), Table, "result.plan.federation")
    training = convert(federation.get("training", {}), Table, "result.plan.federation.training")
    scale = {key: training[key] for key in ("mean", "std") if key in training}
    return plan | {"federation": federation | {"record": scale}}


def _trial_from_3(old: Table, path: str) -> Table:
    if old.get("status") != "done":
        return old
    facts = _get(old, Table, path, "facts")
    signs = ("iterations", "objectives", "zero_tensors", "sparsity", "guard")
    labels = _get(old, Table | None, path, "labels")
    notes = _get(old, tuple[str, ...], path, "notes")
    kept = ("guesses", "residual", "history", "images")
    found = {key: _get(old, Any, path, key) for key in kept} | {
        "labels": labels and labels.get("guess"),
        "distances": old.get("distances", []),
        "notes": notes,
        # It said so in words alone.
        "stopped": "time" if any("time budget" in note for note in notes) else "done",
        **{key: facts.pop(key) for key in signs if key in facts},
        "facts": facts,
    }
    score = {key: _get(old, Any, path, key) for key in ("records", "scores", "caveats")} | {
        "mean_image": _get(old, Any, path, "baselines", "mean image"),
        "random_image": _get(old, Any, path, "baselines", "random image"),
        "identified": _get(old, Any, path, "baselines", "identified"),
        "labels": labels and {key.replace(" ", "_"): value for key, value in labels.items()},
    }
    return old | {"found": found, "score": score}


def _from_4(old: Table) -> Table:
    """Schema 4 knew no attackers who know the defence: one that held is untested now."""
    return _from_5(old)


def _from_5(old: Table) -> Table:
    """Schema 5 kept no raw guess beside a restored one, and did not ask whether a record is
    recognised by the prior alone. Its restored guesses are judged anew, against the prior."""
    return old | {"schema": SCHEMA}


MIGRATIONS: dict[int, Callable[[Table], Table]] = {
    1: _from_1,
    2: _from_2,
    3: _from_3,
    4: _from_4,
    5: _from_5,
}


def _get(table: Any, kind: Any, path: str, *keys: str) -> Any:
    """What stands at this place of a file that may be damaged, if it is of this kind."""
    for key in keys:
        if key not in convert(table, Table, path):
            raise PlanError(f"{path}: key {key!r} is missing")
        table, path = table[key], f"{path}.{key}"
    return convert(table, kind, path)


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
