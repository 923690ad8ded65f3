"""The shape of the package: imports point one way, and what DESIGN rules out is not there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import leakgauge

ROOT = Path(leakgauge.__file__).parent
FILES = {
    ".".join(("leakgauge", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}

GROUND = {"_version", "errors", "papers", "types"}
TOOLS = GROUND | {"config", "files", "outside", "ranges", "tensors"}
FEDERATION = TOOLS | {"fl", "threat"}
METHODS = {
    "attacks", "data", "defences", "detectors", "diagnostics", "metrics", "models", "restore",
}  # fmt: skip
AUDIT = FEDERATION | METHODS | {"audit", "guard"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "papers": set(),
    "types": {"errors", "papers"},
    "config": GROUND,
    "files": GROUND,
    "outside": GROUND | {"config", "ranges"},
    "ranges": GROUND | {"config"},
    "tensors": GROUND,
    "fl": TOOLS,
    "threat": TOOLS | {"fl"},
    **dict.fromkeys(METHODS, FEDERATION),
    "attacks": TOOLS | {"fl"},  # not the wall, nor a metric, nor data: an attack holds what it sees
    "audit": FEDERATION | METHODS | {"guard"},
    "guard": FEDERATION | METHODS,
    "report": AUDIT,
    "integrations": AUDIT | {"report"},
    "leakgauge": AUDIT | {"report"},  # the public names
    "catalogue": GROUND | {"outside"},
    "cli": AUDIT | {"catalogue", "cli_guard", "integrations", "report"},
    "cli_guard": AUDIT | {"integrations", "report"},
    "__main__": {"cli"},
}
"""What each part may import besides itself. `cli` is in nobody's set but `__main__`'s."""

ONLY_INTEGRATIONS = {"flwr", "opacus", "ray"}


def imports(source: str, module: str, known: set[str]) -> set[str]:
    """Full names of all modules that a source imports, also inside functions."""
    found = set()
    package = (
        module if FILES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *([origin] if origin else [])])
            for alias in node.names:  # `from package import module` names a module
                name = f"{origin}.{alias.name}"
                found.add(name if name in known else origin)
    return found


def part(module: str) -> str:
    """The part of the package that a module belongs to: its first name below leakgauge."""
    return module.split(".")[1] if "." in module else module


def wrong(source: str, module: str) -> list[str]:
    """The imports of a module that point the wrong way."""
    own = part(module)
    bad = []
    for name in sorted(imports(source, module, set(FILES))):
        if name.split(".")[0] == "leakgauge":
            if part(name) != own and part(name) not in MAY_IMPORT[own]:
                bad.append(name)
        elif name.split(".")[0] in ONLY_INTEGRATIONS and own != "integrations":
            bad.append(name)
    return bad


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    assert part(module) in MAY_IMPORT, f"say in MAY_IMPORT what {part(module)} may import"
    assert wrong(FILES[module].read_text(encoding="utf-8"), module) == []


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


def test_the_command_line_is_on_top():
    assert [name for name, allowed in MAY_IMPORT.items() if "cli" in allowed] == ["__main__"]


@pytest.mark.parametrize("module", FILES)
def test_every_module_says_what_it_is(module):
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
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
