"""TOML or JSON table → frozen dataclass: strict, typed, with "did you mean".

The dataclass *is* the schema: its fields are the keys, its annotations the types, its defaults the
defaults. Nothing is guessed; every message names the key by its full path. Nothing is ignored
either, unless the reader is `lenient`: a file of another version may know more keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from leakgauge.errors import MissingExtra, PlanError

T = TypeVar("T")
LARGEST = sys.float_info.max


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; it takes none"


def choose(table: Mapping[str, T], name: object, what: str) -> T:
    """`table[name]`, or a PlanError that suggests the known name."""
    if not isinstance(name, str) or name not in table:
        raise PlanError(f"unknown {what} {name!r}{did_you_mean(str(name), table)}")
    return table[name]


def optional(module: str, extra: str, use: str) -> types.ModuleType:
    """A package that only an extra of ours installs, for this use of it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # it is there, and broken
        raise _missing(package, extra, use) from None


def installed(package: str, extra: str, use: str) -> Path:
    """The folder of such a package, which is not imported: that can take a second."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(package, extra, use)
    return Path(spec.submodule_search_locations[0])


def _missing(package: str, extra: str, use: str) -> MissingExtra:
    return MissingExtra(
        f"{use} needs the package {package!r}, which is not installed: "
        f"pip install 'leakgauge[{extra}]'"
    )


def imported(
    spec: str,
    what: str,
    expected: str = "a callable",
    fits: Callable[[object], bool] = callable,
) -> Any:
    """What "module:name" names, if it fits. It is the user's code: importing it runs it."""
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise PlanError(
            f"{what} {spec!r} could not be imported ({type(error).__name__}: {error}): expected "
            f'"module:{name}", with the module on the Python path or in the folder you run from'
        ) from error
    found = getattr(module, name, None)
    if not fits(found):
        others = [n for n, v in vars(module).items() if fits(v) and not n.startswith("_")]
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise PlanError(
            f"{what} {spec!r}: expected {expected} {name} in {module_name}, got {kind}"
            + did_you_mean(name, others)
        )
    return found


@contextmanager
def no_exit() -> Iterator[None]:
    """Code of the user's that calls sys.exit() may not end the audit as if it were done."""
    try:
        yield
    except SystemExit as error:
        raise PlanError(
            f"code that the plan names ended the program with sys.exit({error.code!r}): remove "
            "that call, or raise an error that says what is wrong"
        ) from error


def build(cls: type[T], table: Mapping[str, Any], where: str, *, lenient: bool = False) -> T:
    """An instance of the dataclass `cls` from a table; `where` is its path for messages. A lenient
    one leaves out the keys that it does not know."""
    if not isinstance(table, Mapping):
        raise PlanError(f"{where}: expected a table, got {shown(table)}")
    hints, required = _fields(typing.cast("Any", cls))
    for key in () if lenient else table:
        if key not in hints:
            raise PlanError(f"{where}: unknown key {key!r}{did_you_mean(key, hints)}")
    known = [key for key in table if key in hints]
    values = {k: convert(table[k], hints[k], f"{where}.{k}", lenient=lenient) for k in known}
    for name in required:
        if name not in values:
            raise PlanError(f"{where}: key {name!r} is missing")
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass rejects a value in its __post_init__
        raise PlanError(f"{where}: {error}") from error


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], list[str]]:
    """The keys of a dataclass with their types, and those that a table must have."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    hints = typing.get_type_hints(cls)
    absent = dataclasses.MISSING
    required = [f.name for f in fields if f.default is absent and f.default_factory is absent]
    return {f.name: hints[f.name] for f in fields}, required


def convert(value: Any, hint: Any, where: str, *, lenient: bool = False) -> Any:
    """`value` as the annotated type; no silent change of kind except int → float, list → tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return value
    if origin is typing.Literal:
        if (type(value), value) not in [(type(arg), arg) for arg in args]:  # True is not 1
            hint_text = did_you_mean(str(value), map(str, args))
            raise PlanError(f"{where}: {shown(value)} is not a choice{hint_text}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, where, lenient)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, where, lenient=lenient)
    if origin in (tuple, frozenset):
        if not isinstance(value, list | tuple | set | frozenset):
            raise PlanError(f"{where}: expected a list, got {shown(value)}")
        item = args[0] if origin is frozenset or args[1:] == (Ellipsis,) else None
        if item in (float, float | None) and all(type(v) is float and isfinite(v) for v in value):
            return origin(value)  # most of a result is such lists
        hints = [item] * len(value) if item is not None else list(args)
        if len(hints) != len(value):
            raise PlanError(f"{where}: expected {len(hints)} values, got {len(value)}")
        pairs = enumerate(zip(value, hints, strict=True))
        return origin(convert(v, h, f"{where}[{i}]", lenient=lenient) for i, (v, h) in pairs)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise PlanError(f"{where}: expected a table, got {shown(value)}")
        items = value.items()
        return {k: convert(v, args[1], f"{where}.{k}", lenient=lenient) for k, v in items}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= LARGEST:  # NaN too; a TOML integer may exceed any float
            raise PlanError(f"{where}: expected a finite number, got {shown(value)}")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise PlanError(f"{where}: expected {kind.get(hint, hint.__name__)}, got {shown(value)}")
    return value


def plain(value: Any) -> Any:
    """Dataclasses, tuples and sets as the tables and lists of JSON, which has no NaN: null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def toml(value: object) -> str:
    """A value as TOML writes it, on one line; keys without a value are left out."""
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(k)} = {toml(v)}" for k, v in value.items() if v is not None]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    words = isinstance(value, bool | str | None)
    return json.dumps(value, ensure_ascii=False) if words else repr(value)


def toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else json.dumps(key, ensure_ascii=False)


def shown(value: object) -> str:
    """A value in a message: a number of a thousand digits is not shown whole."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}…"


def _convert_union(value: Any, args: tuple[Any, ...], where: str, lenient: bool) -> Any:
    if value is None and type(None) in args:
        return None
    problems = []
    for arg in args:
        if arg is type(None):
            continue
        try:
            return convert(value, arg, where, lenient=lenient)
        except PlanError as error:
            problems.append(str(error))
    raise PlanError(" or ".join(dict.fromkeys(problems)))
