"""`result.json` read back: checked in every part a report relies on, or refused in words.

docs/result-schema.md says what each key means. The version stands in `schema`; an older file is
migrated, with nothing made up: what it did not measure stays empty. A newer one is refused. Keys
beyond the documented ones are kept and ignored, so that a version can grow without a new number.
What follows from the trials, the verdict above all, is derived again and must agree.

A shape below is a type; `[shape]` for a list; a tuple of shapes for a list of that length; a set of
words, one of which it must be; `{key: shape}` for a table, where "key?" may be absent; `Maybe` if
it may be null; `Each` for a table whose keys are free.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, TypeAlias

import torch

from leakgauge._version import __version__
from leakgauge.audit.summary import derived
from leakgauge.errors import InputError
from leakgauge.files import read_plain

SCHEMA = 3

Result: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Maybe:
    shape: Any


@dataclass(frozen=True)
class Each:
    shape: Any


REALISM = {"realistic", "active", "informed", "oracle"}
TRIAL = {
    "id": str,
    "kind": {"trial", "control", "ladder"},
    "round": int,
    "defence": str,
    "attack": str,
    "seed": int,
    "realism": REALISM,
    "status": {"done", "not applicable", "failed"},
    "error": Maybe(str),
    "traceback?": str,
    "times": {"wall_seconds": float, "cpu_seconds": float},
}
FINISHED_TRIAL = TRIAL | {
    "records": int,
    "guesses": int,
    "scores": Each([float]),
    "baselines": {"mean image": Each([float]), "random image": Each([float]), "identified": float},
    "labels": Maybe(
        {"guess": [int], "truth": [int], "accuracy": float, "random": float, "class prior": float}
    ),
    "residual": Maybe(float),
    "history": [Maybe(float)],
    "distances?": [Maybe(float)],
    "notes": [str],
    "facts": dict,
    "caveats": [str],
    "images": {"sheet": str, "truths": [str], "guesses": [str]},
}
OUTCOME = {"leaks", "below the limit", "inconclusive", "failed"}
LIMIT = {"psnr": float, "share": float, "found": float, "labels": float}
GIVEN = {
    "schema": int,
    "leakgauge": str,
    "versions": Each(str),
    "name": str,
    "fingerprint": str,
    "plan": dict,
    "federation": {
        "model": str,
        "data": str,
        "records": int,
        "shape": (int, int, int),
        "classes": [str],
        "parameters": int,
    },
    "threat": Maybe(
        {
            "actor": {"server", "aggregate", "client"},
            "client": int,
            "malicious?": bool,
            "holds": [str],
            "withheld": [str],
            "realism": REALISM,
            "knowledge": Each(str),
        }
    ),
    "sensitivity": Maybe({"noise": float, "cosine_distance": float, "words": str}),
    "trials": [TRIAL],
    "not_run": [{"id": str, "attack": str, "reason": str}],
    "references": [str],
    "times": {
        "cpu_seconds": float,
        "wall_seconds": Maybe(float),
        "forecast": Maybe(
            {
                "cpu_seconds": float,
                "low?": float,
                "high?": float,
                "megabytes": float,
                "error": Maybe(float),
            }
        ),
        "finished": Maybe(str),
    },
}
"""What an audit measured and was told."""

WORDS = {"headline", "next", "sentences", "sentence", "reason"}
TOLD = {
    "plan": {"audit": {"limit": LIMIT}, "threat": {"actor": str, "malicious?": bool}},
    "verdict": {"outcome": OUTCOME, "exit_code": int},
    "control": [{"trials": [str]}],
    "explanation": Maybe(
        {"attack": str, "rungs": [{"factor": str, "label": str, "trials": [str]}]}
    ),
    "summary": [dict],
}
"""What is needed to derive the rest from the trials, and to see whether it agrees."""


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
    _expect(value, dict, "")
    _expect(value, {"schema": int}, "")
    version = value["schema"]
    if version > SCHEMA:
        raise InputError(
            f"written by a newer LeakGauge: its schema is {version}, this version reads up to "
            f"{SCHEMA}; upgrade leakgauge"
        )
    if version < 1:
        raise InputError(f"schema: expected 1 to {SCHEMA}, got {version}")
    result: Result = {1: _from_1, 2: _from_2}.get(version, dict)(value)
    _expect(result, GIVEN, "")
    for i, trial in enumerate(result["trials"]):
        if trial["status"] == "done":
            _expect(trial, FINISHED_TRIAL, f"trials[{i}]")
            _agree(trial, f"trials[{i}]")
    if version == 1:
        return result | {"summary": _derived(result)["summary"]}
    if version == 2:
        return result | _derived(result)
    _expect(result, TOLD, "")
    return _verified(result)


def _verified(result: Result) -> Result:
    """The result with everything that follows from its trials derived again, the words too. Where
    the file says something else it was edited, and is refused; another version may count
    differently, but not come to another outcome."""
    found = _derived(result)
    same = result["leakgauge"] == __version__ and result["versions"].get("torch") == _torch()
    told, true = result["verdict"], found["verdict"]
    for key in ("outcome", "exit_code"):
        if told[key] != true[key]:
            _edited(f"verdict.{key}", f"it says {told[key]!r}, they say {true[key]!r}")
    for key in found if same else ():
        if _wordless(result[key]) != _wordless(found[key]):
            _edited(key, "its numbers differ")
    return result | found


def _wordless(value: Any) -> Any:
    """Without the sentences, which may be put better while the numbers stay."""
    if isinstance(value, dict):
        return {key: _wordless(item) for key, item in value.items() if key not in WORDS}
    return [_wordless(item) for item in value] if isinstance(value, list) else value


def _edited(key: str, how: str) -> None:
    raise InputError(
        f"{key} does not follow from the trials in this file ({how}): it was edited; run the audit "
        "again with --resume to write it anew"
    )


def _derived(result: Result) -> Result:
    controls = [trial for entry in result["control"] for trial in entry["trials"]]
    found = derived(
        result["plan"], result["trials"], controls, result["explanation"], result["not_run"]
    )
    as_written: Result = json.loads(json.dumps(found))
    return as_written


def _torch() -> str:
    return str(torch.__version__)


def check_trial(value: Any, id_: str) -> dict[str, Any]:
    """The trial of this id as it was written by itself; InputError names what is wrong."""
    _expect(value, TRIAL | {"id": {id_}}, "")
    if value["status"] == "done":
        _expect(value, FINISHED_TRIAL, "")
        _agree(value, "")
    trial: dict[str, Any] = value
    return trial


def _from_1(old: Result) -> Result:
    """Schema 1 knew no verdict, control, explanation, threat words, forecast or caveats. It keeps
    none: what it measured was judged by nobody."""
    _expect(old, {"plan": {"federation": dict}, "federation": dict, "times": dict}, "")
    _expect(old, {"trials": [dict]}, "")
    model = old["plan"]["federation"].get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return old | {
        "schema": SCHEMA,
        "plan": _limited(old["plan"]),
        "federation": {"model": name} | old["federation"],
        "threat": None,
        "verdict": None,
        "control": [],
        "explanation": None,
        "sensitivity": None,
        "trials": [{"kind": "trial", "caveats": []} | trial for trial in old["trials"]],
        "not_run": [],
        "references": [],
        "times": {"wall_seconds": None, "forecast": None, "finished": None} | old["times"],
    }  # fmt: skip


def _from_2(old: Result) -> Result:
    """Schema 2 judged pictures alone: its trials are judged anew, by the limits of today where its
    plan names none. Its ladder did not say which trials it used, and is left out."""
    _expect(old, {"plan": dict, "control": [{"trial": str}]}, "")
    return old | {
        "schema": SCHEMA,
        "plan": _limited(old["plan"]),
        "control": [{"trials": [entry["trial"]]} for entry in old["control"]],
        "explanation": None,
    }


def _limited(plan: Result) -> Result:
    """An older plan with the limits and the threat that it left to the defaults."""
    _expect(plan, {"audit?": {"limit?": dict}}, "plan")
    audit = plan.get("audit", {})
    limits = {"psnr": 15.0, "share": 0.1, "found": 0.1, "labels": 0.5} | audit.get("limit", {})
    whole = {"threat": {"actor": "server"}} | plan | {"audit": audit | {"limit": limits}}
    _expect({"plan": whole}, {"plan": TOLD["plan"]}, "")
    return whole


def _agree(trial: dict[str, Any], path: str) -> None:
    """What a shape cannot say: what the verdict reads is there, with one score per record; a guess
    stands beside each truth; no way leads out of OUT."""
    _expect(trial["scores"], {"psnr": list, "identified": list}, f"{path}.scores")
    _expect(trial["baselines"]["mean image"], {"psnr": list}, f"{path}.baselines.mean image")
    tables = {"scores": trial["scores"]} | {
        f"baselines.{kind}": trial["baselines"][kind] for kind in ("mean image", "random image")
    }
    for where, table in tables.items():
        for metric, values in table.items():
            if len(values) != trial["records"]:
                raise InputError(
                    f"{path}.{where}.{metric}: expected {trial['records']} numbers, one per "
                    f"record, got {len(values)}"
                )
    pictures = trial["images"]
    truths, guesses = len(pictures["truths"]), len(pictures["guesses"])
    if truths != guesses or truths > trial["records"]:
        raise InputError(
            f"{path}.images: expected a guess beside each truth, at most {trial['records']} pairs, "
            f"got {truths} truths and {guesses} guesses"
        )
    for name in [pictures["sheet"], *pictures["truths"], *pictures["guesses"]]:
        if not _inside(name):
            raise InputError(
                f"{path}.images: expected a path below the folder of the result, got {name!r}"
            )


def _inside(name: str) -> bool:
    windows = PureWindowsPath(name)  # it takes both slashes as separators
    return not (name.startswith("/") or windows.anchor or ".." in windows.parts or "\0" in name)


def _expect(value: Any, shape: Any, path: str) -> None:
    """Raise unless the value has the shape; the message begins with the path of the key."""
    match shape:
        case Maybe(inner):
            if value is not None:
                _expect(value, inner, path)
        case set():
            if not isinstance(value, str) or value not in shape:
                _refuse(value, f"one of {', '.join(map(repr, sorted(shape)))}", path)
        case tuple():
            if not isinstance(value, list) or len(value) != len(shape):
                _refuse(value, f"a list of {len(shape)}", path)
            for i, (item, inner) in enumerate(zip(value, shape, strict=True)):
                _expect(item, inner, f"{path}[{i}]")
        case [inner]:
            if not isinstance(value, list):
                _refuse(value, "a list", path)
            numbers = inner is float or inner == Maybe(float)
            if numbers and all(type(v) is float and math.isfinite(v) for v in value):
                return  # most of a result is such lists
            for i, item in enumerate(value):
                _expect(item, inner, f"{path}[{i}]")
        case Each(inner):
            _expect(value, dict, path)
            for key, item in value.items():
                _expect(item, inner, _join(path, key))
        case dict():
            if not isinstance(value, dict):
                _refuse(value, "a table", path)
            for key, inner in shape.items():
                name = key.removesuffix("?")
                if name in value:
                    _expect(value[name], inner, _join(path, name))
                elif not key.endswith("?"):
                    raise InputError(f"{_join(path, name)}: expected, but it is missing")
        case _:
            _expect_type(value, shape, path)


def _expect_type(value: Any, kind: type[Any], path: str) -> None:
    if kind is float:
        if type(value) not in (int, float) or not abs(value) < 1e300:  # finite, and printable
            _refuse(value, "a finite number", path)
    elif type(value) is not kind:
        _refuse(value, _KINDS[kind], path)
    elif kind is str:
        _text(value, path)
    elif kind is dict:
        _plain(value, path)


def _plain(value: Any, path: str) -> None:
    """Free content (a plan, facts): any JSON, as long as it can be printed."""
    if isinstance(value, dict):
        for key, item in value.items():
            _text(key, path)
            _plain(item, _join(path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _plain(item, f"{path}[{i}]")
    elif isinstance(value, str):
        _text(value, path)
    elif type(value) in (int, float):
        _expect_type(value, float, path)


def _text(value: str, path: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can spell it, no file can hold it
        _refuse(value, "text", path)


_KINDS = {
    bool: "true or false",
    dict: "a table",
    list: "a list",
    int: "a whole number",
    str: "text",
}


def _refuse(value: Any, expected: str, path: str) -> None:
    shown = json.dumps(value)
    got = shown if len(shown) <= 60 else f"{shown[:57]}…"
    raise InputError(f"{path or 'the file'}: expected {expected}, got {got}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _no_constant(name: str) -> None:
    raise InputError(f"expected finite numbers, got {name}")
