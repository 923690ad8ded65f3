"""What a new user meets first: help, lists and imports that load only what they need."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import leakgauge
from leakgauge import catalogue, cli, cli_guard, cli_prior

HEAVY = {"torch", "numpy", "scipy", "PIL", "jinja2", "safetensors"}


def loaded(code: str) -> list[set[str]]:
    """What a fresh Python has loaded at each `loaded()` in this code, and at its end."""
    script = f"import sys\ndef loaded():\n    print('loaded', *sys.modules)\n{code}\nloaded()"
    got = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    lines = got.stdout.splitlines()
    return [set(line.split()[1:]) for line in lines if line.startswith("loaded ")]


CALL = """
def call(line):
    sys.argv = ["leakgauge", *line.split()]
    try:
        main()
    except SystemExit:
        pass
"""


# Nothing is imported that is not needed.


def test_what_needs_no_tensor_loads_no_torch():
    commands = [
        "--version",
        "--help",
        "list",
        "list models",
        "list atacks",
        "audit --help",
        "guard --help",
        "guard check --help",
        "data fetch --help",
        "prior train --help",
    ]
    calls = "".join(f"call({command!r}); loaded()\n" for command in commands)
    code = f"import leakgauge; loaded()\nfrom leakgauge.cli import main\n{CALL}{calls}"
    package, *after, at_last = loaded(f"{code}call('list clip')")
    assert {m for m in package if m.startswith("leakgauge")} == {"leakgauge", "leakgauge._version"}
    for command, modules in zip(commands, after, strict=True):
        assert not modules & HEAVY, command
    assert "torch" in at_last  # the details of a method do load it: the above would notice


GUARDED = """
import leakgauge.guard; loaded()
from leakgauge import Batch, Guard, LocalTraining; loaded()
import torch
make = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
guard, sent = Guard(make, LocalTraining(batch_size=2)), make().state_dict()
guard.check(sent); loaded()
guard.check(sent, Batch(torch.rand(2, 3, 2, 2), torch.arange(2)))
"""


def test_the_guard_loads_no_attack():
    *before, audited = loaded(GUARDED)
    module, _, checked = before
    assert "leakgauge.guard.guard" in module
    assert "leakgauge.detectors" in checked
    unwanted = ("leakgauge.attacks", "leakgauge.audit", "leakgauge.report", "typer", "rich")
    assert not [m for modules in before for m in modules if m.startswith(unwanted)]
    # The self-audit asks what the exact separation reads of the client's own pictures.
    assert "leakgauge.attacks.exposure" in audited
    assert not [m for m in audited if m.startswith(unwanted[1:])]


# Without the extras.

BARE = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
found, missing = PathFinder.find_spec, ("skimage", "sklearn", "matplotlib", "fpdf", "cryptography")
PathFinder.find_spec = lambda name, *rest: None if name in missing else found(name, *rest)
import numpy as np
import leakgauge
for module in pkgutil.walk_packages(leakgauge.__path__, "leakgauge."):
    importlib.import_module(module.name)

from leakgauge import cli
def call(*arguments):
    sys.argv = ["leakgauge", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        print("code", end.code or 0)

rng = np.random.default_rng(0)
np.savez("mine.npz", images=rng.random((12, 8, 8), np.float32), labels=np.arange(12) % 2)
open("plan.toml", "w").write('''
[federation]
data = { npz = "mine.npz" }
model = { name = "mlp", hidden = [8] }
[[attack]]
name = "analytic"
[audit]
seeds = [0]
explain = false
exact = false
limit = { share = 1.0 }
''')
call("audit", "plan.toml", "--out", "out")
call("report", "out")
call("report", "out", "--pdf")
call("audit", "--demo")
from leakgauge import data
try:
    data.load("digits")
except leakgauge.errors.MissingExtra as error:
    print("error:", error, file=sys.stderr)
from leakgauge import secure
try:
    secure.run([np.zeros(1, "<u4")] * 2)
except leakgauge.errors.MissingExtra as error:
    print("error:", error, file=sys.stderr)
"""


def test_without_the_extras_all_works_or_says_what_to_install(tmp_path):
    got = subprocess.run(
        [sys.executable, "-c", BARE],
        capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert got.returncode == 0, got.stderr
    codes = [line for line in got.stdout.splitlines() if line.startswith("code ")]
    assert codes[0] in ("code 0", "code 1", "code 4")  # of an audit that was made
    assert (tmp_path / "out" / "report.html").is_file()
    assert codes[1:] == ["code 0", "code 2", "code 2"]
    assert got.stderr.splitlines() == [
        f"error: {use} needs the package {package!r}, which is not installed: "
        f"pip install 'leakgauge[{extra}]'"
        for use, package, extra in [
            ("a PDF", "fpdf", "pdf"),
            ("the data set 'photos'", "skimage", "demo"),
            ("the data set 'digits'", "sklearn", "demo"),
            ("the protocol of secure aggregation", "cryptography", "secure"),
        ]
    ]


# The public names are all there.


def test_every_public_name_is_what_its_module_holds():
    for name in leakgauge.__all__:
        value = getattr(leakgauge, name)
        home = getattr(value, "__module__", "")
        assert name == "__version__" or inspect.ismodule(value) or home.startswith("leakgauge.")
    assert leakgauge.Batch is leakgauge.types.Batch
    assert leakgauge.attacks is sys.modules["leakgauge.attacks"]
    assert set(leakgauge.__all__) <= set(dir(leakgauge))
    namespace: dict[str, object] = {}
    exec("from leakgauge import *", namespace)
    assert set(leakgauge.__all__) <= set(namespace)


def test_the_type_checker_is_told_the_same_names():
    """A name is imported for type checkers from the module that it is looked up in."""
    tree = ast.parse(Path(str(leakgauge.__file__)).read_text("utf-8"))
    told = {
        (alias.name, str(node.module))
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    looked_up = {(n, f"leakgauge.{home}") for home, ns in leakgauge._HOMES.items() for n in ns}
    modules = {(name, module) for name, module in told if module == "leakgauge"}
    assert told == looked_up | modules
    assert {name for name, _ in told} | {"__version__"} == set(leakgauge.__all__)


def test_a_name_that_is_not_there_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'Bacth'"):
        leakgauge.Bacth  # noqa: B018
    with pytest.raises(ImportError, match="Bacth"):
        exec("from leakgauge import Bacth")
    assert not hasattr(leakgauge, "__wrapped__")


# The catalogue is what the dicts hold.


@pytest.mark.parametrize("kind", catalogue.KINDS)
def test_the_catalogue_reads_what_an_import_finds(kind):
    entries = catalogue.entries(kind)
    module, _, name = catalogue.KINDS[kind].source.partition(":")
    wanted = getattr(__import__(module, fromlist=[name]), name)
    assert [entry.name for entry in entries] == list(wanted)
    for entry in entries:
        item = wanted[entry.name]
        assert catalogue.load(entry) is item
        made = item.func if isinstance(item, partial) else getattr(item, "score", item)
        assert entry.module == made.__module__
        assert entry.summary == inspect.getdoc(made).partition("\n")[0]


def test_every_dict_of_methods_is_in_the_catalogue():
    """A kind that is added, or a dict that is, shows up in `leakgauge list`."""
    known = {kind.source for kind in catalogue.KINDS.values()}
    root = Path(str(leakgauge.__file__)).parent
    found = set()
    for path in root.rglob("__init__.py"):
        module = ".".join(path.relative_to(root.parent).parts[:-1])
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
                found.add(f"{module}:{ast.unparse(node.target)}")
    assert "leakgauge.attacks:ATTACKS" in found
    assert found <= known


# Help says what everything is.


def commands(app: typer.Typer, *before: str):
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        yield (*before, name), command.callback
    for group in app.registered_groups:
        yield from commands(group.typer_instance, *before, str(group.name))


COMMANDS = dict(commands(cli.app))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_describes_every_argument_and_option(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    got = CliRunner().invoke(cli.app, [*path, "--help"])
    assert got.exit_code == 0
    words = " ".join(got.output.split())
    for name, hint in typing.get_type_hints(COMMANDS[path], include_extras=True).items():
        if name != "return":
            (told,) = typing.get_args(hint)[1:]
            assert told.help, f"{path}: {name} has no description"
            assert " ".join(told.help.split()) in words, "typer 0.20 with click 8.5 drops it"


def test_all_commands_were_found():
    assert {("audit",), ("list",), ("data", "fetch"), ("guard", "check")} <= set(COMMANDS)
    others = (cli_guard.app.registered_commands, cli_prior.app.registered_commands)
    assert len(COMMANDS) == len(cli.app.registered_commands) + 1 + sum(map(len, others))


# Progress.


def test_before_the_number_of_trials_is_known_progress_says_calibrating(monkeypatch):
    page = Console(file=StringIO(), force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(cli, "console", page)

    def shown() -> str:
        page.file.truncate(0)
        page.print(progress)
        return page.file.getvalue()

    progress = cli._progress()
    watch = cli._watch(progress)
    assert "calibrating" in shown()
    assert "/?" not in shown()
    watch.expect(3)
    assert "calibrating" not in shown()
    assert "trials" in shown()
    assert "0/3" in shown()


def test_a_reader_that_stops_is_no_error_of_the_plan():
    """`leakgauge list | head -1`: quiet, and with the code of a broken pipe."""
    for _ in range(3):
        listing = subprocess.Popen(
            [sys.executable, "-m", "leakgauge.cli", "list", "--long"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.close()  # before it has written
        said = listing.stderr.read().decode()
        assert (listing.wait(), said) == (141, "")
