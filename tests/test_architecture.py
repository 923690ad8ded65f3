"""The shape of the package: imports point one way, and what DESIGN rules out is not there."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from sources import FILES, imports

SOURCES = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}

GROUND = {"_version", "errors", "papers", "records", "types"}
TOOLS = GROUND | {"config", "files", "fitting", "outside", "ranges", "tensors"}
FEDERATION = TOOLS | {"fl", "threat"}
METHODS = {
    "attacks", "data", "defences", "detectors", "diagnostics", "metrics", "models", "restore",
}  # fmt: skip
AUDIT = FEDERATION | METHODS | {"accounting", "audit", "exchanges", "guard", "kept", "priors"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "papers": set(),
    "records": {"errors"},
    "types": {"errors", "papers", "records"},
    "config": GROUND,
    "files": GROUND,
    "outside": GROUND | {"config", "ranges"},
    "fitting": GROUND,
    "ranges": GROUND | {"config"},
    "tensors": GROUND,
    "fl": TOOLS,
    "threat": TOOLS | {"fl"},
    "kept": TOOLS,
    "exchanges": TOOLS | {"fl"},
    "secure": TOOLS | {"fl"},
    **dict.fromkeys(METHODS, FEDERATION),
    "priors": TOOLS,
    "restore": TOOLS | {"priors"},
    "attacks": TOOLS
    | {"fl", "priors"},  # not the wall, nor a metric, nor data: an attack holds what it sees
    "accounting": TOOLS | {"defences"},
    "audit": FEDERATION | METHODS | {"accounting", "exchanges", "guard", "kept", "priors"},
    "guard": FEDERATION | METHODS,
    "report": AUDIT,
    "integrations": AUDIT | {"report"},
    "leakgauge": AUDIT | {"report"},  # the public names
    "catalogue": GROUND | {"outside"},
    "cli": AUDIT | {"catalogue", "cli_guard", "cli_prior", "integrations", "report"},
    "cli_guard": AUDIT | {"integrations", "report"},
    "cli_prior": AUDIT | {"cli_guard"},
    "__main__": {"cli"},
}
"""What each part may import besides itself. `cli` is in nobody's set but `__main__`'s."""

ONLY_INTEGRATIONS = {"flwr", "opacus", "ray"}


def part(module: str) -> str:
    """The part of the package that a module belongs to: its first name below leakgauge."""
    return module.split(".")[1] if "." in module else module


def wrong(source: str, module: str) -> list[str]:
    """The imports of a module that point the wrong way."""
    own = part(module)
    bad = []
    for name in sorted(imports(source, module)):
        if name.split(".")[0] == "leakgauge":
            if part(name) != own and part(name) not in MAY_IMPORT[own]:
                bad.append(name)
        elif name.split(".")[0] in ONLY_INTEGRATIONS and own != "integrations":
            bad.append(name)
    return bad


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    assert part(module) in MAY_IMPORT, f"say in MAY_IMPORT what {part(module)} may import"
    assert wrong(SOURCES[module], module) == []


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("leakgauge.attacks.x", "from leakgauge.metrics import psnr", ["leakgauge.metrics"]),
        ("leakgauge.attacks.x", "import leakgauge.threat", ["leakgauge.threat"]),
        ("leakgauge.attacks.x", "from leakgauge import data, tensors", ["leakgauge.data"]),
        ("leakgauge.attacks.x", "import leakgauge as lg", ["leakgauge"]),
        ("leakgauge.attacks.x", "from ..metrics.pixels import psnr", ["leakgauge.metrics.pixels"]),
        ("leakgauge.attacks.x", "from . import dlg", []),
        ("leakgauge.attacks.x", "def f():\n    from leakgauge import audit", ["leakgauge.audit"]),
        ("leakgauge.fl.x", "from leakgauge.threat import observe", ["leakgauge.threat"]),
        ("leakgauge.audit.x", "from leakgauge.cli import main", ["leakgauge.cli"]),
        ("leakgauge.audit.x", "import ray.data", ["ray.data"]),
        ("leakgauge.integrations.x", "import flwr\nfrom leakgauge.audit import run", []),
        ("leakgauge", "from leakgauge import cli", ["leakgauge.cli"]),
        ("leakgauge.defences.x", "from leakgauge.tensors import norm\nimport torch", []),
    ],
)
def test_a_wrong_import_would_be_found(module, source, bad):
    assert wrong(source, module) == bad


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Names that lead back to the first of them; none if there is no such way."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module imports of the others (one may name itself: a class that travels does)."""
    every = {module: imports(source, module) & FILES.keys() for module, source in sources.items()}
    return {module: found - {module} for module, found in every.items()}


def test_no_way_of_imports_leads_back():
    """Between modules, and between the parts by what they may import: then no import points up."""
    assert circle(graph_of(SOURCES)) == []
    assert circle(MAY_IMPORT) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("leakgauge.fl.local", "from leakgauge.fl.simulate import simulate"),
        ("leakgauge.tensors", "def f():\n    import leakgauge.threat"),
        ("leakgauge.attacks._spaces", "from . import dlg"),
        ("leakgauge.fl.model", "from leakgauge.fl import Scenario"),
    ],
)
def test_a_way_back_would_be_found(module, line):
    found = circle(graph_of(SOURCES | {module: f"{SOURCES[module]}\n{line}\n"}))
    assert found[0] == found[-1]
    assert module in found


def shared_part(module: str) -> bool:
    return module.rpartition(".")[2].startswith("_")


@pytest.mark.parametrize("module", [m for m in FILES if shared_part(m)])
def test_a_shared_part_imports_no_method_beside_it(module):
    """`attacks/_engine.py` serves the attacks: it knows none of them."""
    package = module.rpartition(".")[0]
    beside = {m for m in imports(SOURCES[module], module) if m.rpartition(".")[0] == package}
    assert [m for m in beside if not shared_part(m)] == []


def test_the_command_line_is_on_top():
    assert [name for name, allowed in MAY_IMPORT.items() if "cli" in allowed] == ["__main__"]


@pytest.mark.parametrize("module", FILES)
def test_every_module_says_what_it_is(module):
    tree = ast.parse(SOURCES[module])
    assert ast.get_docstring(tree)


def test_no_module_has_a_name_that_says_nothing():
    parts = {word.lstrip("_") for module in FILES for word in module.split(".")}
    nothing = {"base", "common", "core", "helper", "helpers", "misc", "util", "utils"}
    assert not parts & nothing


def test_torchvision_is_absent():
    """Its mere presence breaks torchmetrics on a machine without its CUDA libraries."""
    assert importlib.util.find_spec("torchvision") is None


def test_the_package_was_found():
    assert {"leakgauge", "leakgauge.errors", "leakgauge.fl.local"} <= set(FILES)
