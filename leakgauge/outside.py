"""Methods from outside this package: the user's own code, named `module:NAME`, and what installed
packages offer under a name of their own (entry points).

Both run with the user's rights. A name of this package always means its own method.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from leakgauge.config import build, did_you_mean, imported
from leakgauge.errors import LeakGaugeError, PlanError
from leakgauge.papers import Paper
from leakgauge.ranges import check_numbers

MUST_HAVE: dict[str, tuple[tuple[str, ...], ...]] = {
    "attack": (("needs",), ("reconstruct",)),
    "defence": (("on_batch", "on_gradient", "on_update"), ("announced",)),
    "detector": (("inspect",),),
    "restorer": (("restore",),),
    "metric": (),
}
"""What a class of each kind has: of every group one name at least. A metric is a value."""


@dataclass(frozen=True, order=True)
class Offer:
    """What an installed package offers: a name for `module:NAME`."""

    name: str
    spec: str
    package: str
    version: str


@dataclass(frozen=True)
class Method:
    """What a plan's name stands for. `key` is how reports call it; `spec` says where it comes from
    if not from this package, and `package` which version of what offers it."""

    key: str
    item: Any
    spec: str = ""
    package: str = ""

    def make(self, options: Mapping[str, Any], where: str) -> Any:
        """An instance of this class, its options in their ranges."""
        try:
            made = build(self.item, options, where)
        except (Exception, SystemExit) as error:
            if isinstance(error, LeakGaugeError) or not self.spec:
                raise
            raise PlanError(  # whatever the user's own code raised
                f"{where} could not be made ({type(error).__name__}: {error})"
            ) from error
        check_numbers(made, where)
        return made


def offers(what: str) -> list[Offer]:
    """What installed packages offer of a kind; they are not imported."""
    found: dict[tuple[str, str], Offer] = {}
    for one in metadata.distributions():
        if f"leakgauge.{what}s" not in (one.read_text("entry_points.txt") or ""):
            continue
        package, version = str(one.metadata["Name"]), one.version
        try:
            named = [(p.name, p.value) for p in one.entry_points if p.group == f"leakgauge.{what}s"]
        except Exception:  # its list of entry points is not well formed
            named = [("?", "")]
        for name, spec in named:  # of two copies of a package the first is imported
            spec = spec.partition("[")[0].strip()
            found.setdefault((package, name), Offer(name, spec, package, version))
    return sorted(found.values())


def find(what: str, name: str, ours: Mapping[str, Any], folder: Path | None = None) -> Method:
    """What a name stands for: ours, an offered one, or `module:NAME` (beside the plan first)."""
    if name in ours:
        return Method(name, ours[name])
    if ":" in name:
        if folder is not None:
            import_from(folder, name)
        key, spec, package = name.partition(":")[2], name, ""
    else:
        known = offers(what)
        fitting = [offer for offer in known if offer.name == name]
        if not fitting:
            raise PlanError(
                f"unknown {what} {name!r}{did_you_mean(name, {*ours, *(o.name for o in known)})}"
            )
        if len(fitting) > 1:
            packages = " and by ".join(offer.package for offer in fitting)
            raise PlanError(
                f"{what} {name!r} is offered by {packages}: say which, as in {fitting[0].spec!r}"
            )
        key, spec = name, fitting[0].spec
        package = f"{fitting[0].package} {fitting[0].version}"
    return Method(key, load(what, spec, key, ours), spec, package)


def unused(name: str, taken: Collection[str]) -> str:
    """The name, with a number if it is taken: name-2, name-3, …"""
    key, count = name, 1
    while key in taken:
        count += 1
        key = f"{name}-{count}"
    return key


def load(what: str, spec: str, key: str, ours: Collection[str]) -> Any:
    """The class (of a metric, the value) that `module:NAME` names, if it is one of its kind."""
    if ":" not in spec:
        raise PlanError(f'{what} {key!r}: expected an entry point "module:NAME", got {spec!r}')
    if what == "metric":
        from leakgauge.types import Metric  # not for a mere list of names: it imports PyTorch

        item = imported(spec, what, "a Metric", lambda value: isinstance(value, Metric))
    else:
        item = imported(spec, what, "a class", lambda value: isinstance(value, type))
    if key in ours:
        raise PlanError(f"{what} {spec!r}: {key!r} is a name of LeakGauge's own: choose another")
    if not re.fullmatch(r"[^\W_][\w-]{0,59}", key):
        raise PlanError(
            f"{what} {spec!r}: {key!r} cannot name files: start with a letter, and use letters, "
            "digits, - and _, 60 at most"
        )
    if what != "metric" and not dataclasses.is_dataclass(item):
        raise PlanError(
            f"{what} {spec!r} is no dataclass: write @dataclass(frozen=True) above the class; its "
            "fields are the options"
        )
    papers = getattr(item, "papers", ())
    if not isinstance(papers, tuple) or not all(isinstance(one, Paper) for one in papers):
        raise PlanError(f"{what} {spec!r}: its papers must be a tuple of leakgauge.papers.Paper")
    for names in MUST_HAVE[what]:
        if not any(hasattr(item, n) or n in item.__dataclass_fields__ for n in names):
            raise PlanError(
                f"{what} {spec!r} has no {' or '.join(names)}: expected what "
                f"leakgauge.types.{what.capitalize()} describes"
            )
    if hasattr(item, "prepare") != hasattr(item, "manipulates"):
        raise PlanError(
            f"{what} {spec!r}: expected prepare and manipulates together, or none of them: see "
            "leakgauge.types.PreparedAttack"
        )
    return item


def import_from(folder: Path, name: str) -> None:
    """Let `module:NAME` find its module beside the plan: also when another plan in this process
    brought another module of that name."""
    module, colon, _ = name.partition(":")
    if not colon:
        return
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    place = folder.joinpath(*module.split("."))
    here = [place.with_suffix(".py"), place / "__init__.py"]
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded and Path(loaded) not in here and any(file.is_file() for file in here):
        top = module.partition(".")[0]
        for other in [key for key in sys.modules if key.partition(".")[0] == top]:
            del sys.modules[other]
    importlib.invalidate_caches()


def own_files(name: str, folder: Path) -> list[Path]:
    """The files behind `module:NAME`: that of the module, and those of what it imports from the
    plan's folder or from its own package. None for another name."""
    start, colon, _ = name.partition(":")
    module = sys.modules.get(start)
    if not colon or module is None or not getattr(module, "__file__", None):
        return []
    own = Path(str(module.__file__)).resolve()
    roots = (folder.resolve(), own.parents[start.count(".")])
    found: dict[str, Path] = {}
    waiting = [start]
    while waiting:
        here = waiting.pop()
        loaded = sys.modules.get(here)
        file = getattr(loaded, "__file__", None)
        if here in found or not file or not _belongs(Path(file).resolve(), roots):
            continue
        found[here] = Path(file).resolve()
        for value in list(vars(loaded).values()):
            other = value.__name__ if isinstance(value, ModuleType) else _home(value)
            waiting += [other] if isinstance(other, str) else []
        waiting += _imports(found[here], here)
    return [found[key] for key in sorted(found)]


def _imports(file: Path, module: str) -> list[str]:
    """What a file imports, or may: `from a import b` is of a, and of a.b if that is a module."""
    names: list[str] = []
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    with suppress(SyntaxError, ValueError, ImportError):  # no source, or not ours to judge
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = resolve_name("." * node.level + (node.module or ""), package)
                names += [start, *(f"{start}.{alias.name}" for alias in node.names)]
    return names


def _belongs(file: Path, roots: tuple[Path, ...]) -> bool:
    """The user's own: below a root, and not installed there."""
    installed = "site-packages" in file.parts or "dist-packages" in file.parts
    return not installed and file.is_file() and any(file.is_relative_to(root) for root in roots)


def _home(value: object) -> object:
    """The module in which a class or a function was written."""
    return getattr(value, "__module__", None) if callable(value) else None
