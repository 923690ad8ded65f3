"""TOML table → frozen dataclass: strict, typed, with "did you mean".

The dataclass *is* the schema: its fields are the keys, its annotations the types, its defaults the
defaults. Nothing is ignored and nothing is guessed; every message names the key by its full path.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `cls` from a table; `where` is its path for messages."""
    if not isinstance(table, Mapping):
        raise PlanError(f"{where}: expected a table, got {table!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in fields:
            raise PlanError(f"{where}: unknown key {key!r}{did_you_mean(key, fields)}")
    values = {k: convert(v, hints[k], f"{where}.{k}") for k, v in table.items()}
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise PlanError(f"{where}: key {name!r} is missing")
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass rejects a value in its __post_init__
        raise PlanError(f"{where}: {error}") from error


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type; no silent change of kind except int → float, list → tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Literal:
        if (type(value), value) not in [(type(arg), arg) for arg in args]:  # True is not 1
            hint_text = did_you_mean(str(value), map(str, args))
            raise PlanError(f"{where}: {value!r} is not a choice{hint_text}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, where)
    if origin in (tuple, frozenset):
        if not isinstance(value, list | tuple | set | frozenset):
            raise PlanError(f"{where}: expected a list, got {value!r}")
        item = args[0] if origin is frozenset or args[1:] == (Ellipsis,) else None
        hints = [item] * len(value) if item is not None else list(args)
        if len(hints) != len(value):
            raise PlanError(f"{where}: expected {len(hints)} values, got {len(value)}")
        pairs = enumerate(zip(value, hints, strict=True))
        return origin(convert(v, h, f"{where}[{i}]") for i, (v, h) in pairs)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise PlanError(f"{where}: expected a table, got {value!r}")
        return {k: convert(v, args[1], f"{where}.{k}") for k, v in value.items()}
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
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def shown(value: object) -> str:
    """A value in a message: a number of a thousand digits is not shown whole."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}…"


def _convert_union(value: Any, args: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in args:
        return None
    problems = []
    for arg in args:
        if arg is type(None):
            continue
        try:
            return convert(value, arg, where)
        except PlanError as error:
            problems.append(str(error))
    raise PlanError(" or ".join(dict.fromkeys(problems)))
