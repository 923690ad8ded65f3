"""Nonsense in a plan is refused at once and in words: every number of every table, endless sizes,
files that never end, and code that leaves."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import socket
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leakgauge import cli, data
from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS
from leakgauge.audit import forecast, parse, read
from leakgauge.audit.document import Comparison, Federation, Limit, Measure
from leakgauge.data._dataset import make_dataset
from leakgauge.defences import DEFENCES
from leakgauge.errors import DataError, LeakGaugeError, PlanError
from leakgauge.fl import PARTITIONS
from leakgauge.ranges import FINITE, OF_METHODS, OF_PLANS, Range
from leakgauge.records import Scale
from leakgauge.types import LocalTraining, SecureSum, ThreatModel

PLAN: dict[str, Any] = {
    "federation": {"data": "digits", "model": "mlp"},
    "attack": [{"name": "analytic"}],
    "audit": {"seeds": [0], "control": False, "explain": False, "exact": False},
}
TABLES: dict[str, type[Any]] = {
    "federation": Federation,
    "federation.training": LocalTraining,
    "federation.record": Scale,
    "federation.secure": SecureSum,
    "threat": ThreatModel,
    "audit": Measure,
    "audit.limit": Limit,
    "tradeoff": Comparison,
}
KINDS: dict[str, dict[str, type[Any]]] = {
    "attack": ATTACKS | ACTIVE_ATTACKS,
    "defence": DEFENCES,
    "partition": PARTITIONS,
}
NONSENSE = (-5, math.nan, math.inf, -math.inf, 10**40)


def numbers(kind: type[Any]) -> list[tuple[str, Any]]:
    """The options of a class that take a number, and whether they take a list or table of them."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        parts = {hint, *typing.get_args(hint)}
        parts |= {inner for part in parts for inner in typing.get_args(part)}
        if parts & {int, float} and name in {f.name for f in dataclasses.fields(kind) if f.init}:
            found.append((name, typing.get_origin(hint)))
    return found


def planned(where: str, kind: type[Any], name: str, value: Any) -> dict[str, Any]:
    """A plan with one option changed."""
    table: dict[str, Any] = {**PLAN, "federation": dict(PLAN["federation"])}
    if where in TABLES:
        *outer, last = where.split(".")
        place = table
        for key in outer:
            place[key] = dict(place.get(key, {}))
            place = place[key]
        required = {"rounds": 3} if kind is Comparison else {}
        place[last] = required | dict(place.get(last, {})) | {name: value}
        return table
    key = next(k for k, known in KINDS[where].items() if known is kind)
    entry = {"name": key, name: value}
    if where == "partition":
        table["federation"]["partition"] = entry
        return table
    if kind in ACTIVE_ATTACKS.values():
        table["threat"] = {"malicious": True}
    return table | {where: [entry]}


def range_of(where: str, kind: type[Any], name: str) -> Range | None:
    named = OF_PLANS if where in TABLES else OF_METHODS
    return kind.__dataclass_fields__[name].metadata.get("range") or named.get(name)


OPTIONS = [
    pytest.param(where, kind, name, held, id=f"{where}.{kind.__name__}.{name}")
    for where, kind in [
        *TABLES.items(),
        *(
            (where, kind)
            for where, known in KINDS.items()
            for kind in dict.fromkeys(known.values())
        ),
    ]
    for name, held in numbers(kind)
]


@pytest.mark.parametrize(("where", "kind", "name", "held"), OPTIONS)
def test_a_number_that_makes_no_sense_is_refused(
    where: str, kind: type[Any], name: str, held: Any
) -> None:
    allowed = range_of(where, kind, name)
    assert allowed is not None, f"say the range of {kind.__name__}.{name}: option(…, POSITIVE)"
    for value in NONSENSE:
        if allowed is FINITE and math.isfinite(value):
            continue
        if value in allowed and not isinstance(value, float):
            continue  # 10**40 is odd, but a number like others where there is no upper end
        given = {tuple: [value], dict: {"ssim": value}}.get(held, value)
        table = planned(where, kind, name, given)
        with pytest.raises(LeakGaugeError, match=name) as refusal:
            parse(table, "nonsense", Path.cwd())
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(("where", "kind", "name", "held"), OPTIONS)
def test_every_default_is_in_its_range(where: str, kind: type[Any], name: str, held: Any) -> None:
    allowed, default = range_of(where, kind, name), kind.__dataclass_fields__[name].default
    assert allowed is not None
    values = default if held is tuple else (default,)
    assert all(value in allowed for value in values if isinstance(value, int | float))


def test_no_range_is_of_an_option_that_does_not_exist() -> None:
    used = {(param.values[0] in TABLES, param.values[2]) for param in OPTIONS}
    assert {(True, name) for name in OF_PLANS} | {(False, name) for name in OF_METHODS} <= used


@pytest.mark.parametrize(
    ("where", "kind", "name", "value", "words"),
    [
        ("attack", ATTACKS["dlg"], "iterations", -5, "iterations must be between 1 and 10,000,000"),
        ("attack", ATTACKS["dlg"], "restarts", 0, "restarts must be between 1 and 10,000, got 0"),
        ("audit.limit", Limit, "psnr", math.nan, "psnr: expected a finite number, got nan"),
        ("audit.limit", Limit, "share", 2, "share must lie between 0 and 1, got 2.0"),
        ("federation.training", LocalTraining, "momentum", 2, "momentum must be between 0 and"),
        ("federation.training", LocalTraining, "momentum", 1.0, "momentum must be between 0 and"),
        ("federation.training", LocalTraining, "lr", -0.1, "lr must be positive"),
        ("federation", Federation, "rounds", [10**9], "rounds must be between 0 and 100,000"),
        ("federation.training", LocalTraining, "steps", 10**9, "steps must be between 1 and"),
        ("audit", Measure, "gallery", 10**9, "gallery must be between 2 and 100,000"),
        ("threat", ThreatModel, "client", 1, "client is 1, but 1 clients take part"),
    ],
)
def test_the_sentence(where: str, kind: type[Any], name: str, value: Any, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        parse(planned(where, kind, name, value), "nonsense", Path.cwd())


def test_a_client_cannot_be_malicious() -> None:
    with pytest.raises(PlanError, match="a client sends no model to others"):
        parse(PLAN | {"threat": {"actor": "client", "malicious": True}}, "x", Path.cwd())


def test_epochs_without_an_end_are_refused() -> None:
    training = {"epochs": 10_000, "batch_size": 1}
    table = PLAN | {"federation": PLAN["federation"] | {"training": training, "records": "all"}}
    with pytest.raises(PlanError, match=r"epochs = 10000 is up to 17,970,000 steps"):
        parse(table, "x", Path.cwd())


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        ({"training": {"batch_size": 10**8}}, "has only 1797: lower batch_size"),
        ({"training": {"batch_size": 10**9}}, "batch_size must be between 1 and 100,000,000"),
        ({"clients": 10**6}, "1000000"),
        ({"model": {"name": "mlp", "hidden": [-5]}}, "-5"),
        ({"model": {"name": "mlp", "hidden": [10**12]}}, "federation.model: 'mlp' cannot be bui"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(federation: Any, words: str) -> None:
    table = PLAN | {"federation": PLAN["federation"] | federation}
    with pytest.raises(LeakGaugeError, match=words):
        forecast(parse(table, "x", Path.cwd()))


# ---------------------------------------------------------------- data without end


def test_a_label_far_too_high_is_refused_without_counting_up_to_it() -> None:
    images = torch.zeros(2, 1, 4, 4)
    for top in (3_000_000, 2**62):
        with pytest.raises(DataError, match="at most 100,000 classes"):
            make_dataset("x", images, torch.tensor([0, top]))
    names = tuple(map(str, range(100_001)))
    with pytest.raises(DataError, match="at most 100,000 classes, got 100,001"):
        make_dataset("x", images, torch.tensor([0, 1]), names)


def picture(folder: Path) -> Path:
    from PIL import Image

    for name in "ab":
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / name / "1.png")
    return folder


def test_images_that_fill_the_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 images of 3 × 100000 × 100000 take 223\.5 GB"):
        data.load("folder", path=picture(tmp_path / "set"), size=10**5)
    with pytest.raises(PlanError, match="no photograph has 100000 pixels"):
        data.load("photos", size=10**5)


def endless(path: Path, kind: str) -> Path:
    """Something at this path that is no plain file and would be read for ever."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.chdir(path.parent)  # a socket's path may be no longer than 107 bytes
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    return path


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_a_file_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"plan\.toml cannot be read: it is a pipe, a socket or a"):
        read(endless(tmp_path / "plan.toml", kind))
    with pytest.raises(DataError, match="no plain file"):
        data.load("npz", path=endless(tmp_path / "x.npz", kind))
    endless(tmp_path / "w.pt", kind)
    table = PLAN | {"federation": PLAN["federation"] | {"checkpoint": "w.pt"}}
    with pytest.raises(LeakGaugeError, match=r"w\.pt"):
        forecast(parse(table, "x", tmp_path))
    folder = picture(tmp_path / "set")
    endless(folder / "a" / "2.png", kind)
    assert len(data.load("folder", path=folder)) == 2
    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    endless(batches / "data_batch_1", kind)
    with pytest.raises(DataError, match="expected data_batch"):
        data.load("cifar10", root=tmp_path)


def test_a_plan_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 20_000)
    with pytest.raises(PlanError, match="nested too deeply"):
        read(tmp_path / "deep.toml")
    (tmp_path / "long.toml").write_text("a = " + "9" * 5000)
    with pytest.raises(PlanError, match="not valid TOML"):
        read(tmp_path / "long.toml")


# ---------------------------------------------------------------- code that leaves

MODULE = """
import sys, torch
from torch import nn
calls = 0
def exit_in_factory(shape, classes):
    sys.exit(0)
class Leaves(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.when, self.calls, self.fc = when, 0, nn.Linear(64, 10)
    def forward(self, x):
        self.calls += 1
        if self.calls >= self.when:
            sys.exit(0)
        return self.fc(x.flatten(1))
def exit_in_forward():
    return Leaves(1)
def exit_in_training():
    return Leaves(2)
def exit_in_data():
    sys.exit(0)
"""


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["leakgauge", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "source", "module", "words"),
    [
        ("own:exit_in_factory", "digits", MODULE, "'own:exit_in_factory' could not be built"),
        ("own:exit_in_forward", "digits", MODULE, "'own:exit_in_forward' failed on two blank"),
        ("own:exit_in_training", "digits", MODULE, "failed (SystemExit: 0)"),
        ("mlp", "own:exit_in_data", MODULE, "data: 'own:exit_in_data' failed (SystemExit: 0)"),
        ("own:anything", "digits", "raise SystemExit", "could not be imported (SystemExit"),
    ],
)
@pytest.mark.parametrize("command", ["check", "audit"])
def test_code_that_leaves_is_an_error_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    model: str,
    source: str,
    module: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(module)
    (tmp_path / "plan.toml").write_text(
        f'[federation]\nmodel = "{model}"\ndata = "{source}"\n[[attack]]\nname = "analytic"\n'
        "[audit]\nseeds = [0, 1]\nexact = false\n"
    )
    code, said = called(monkeypatch, capsys, command, "plan.toml")
    assert code == 2
    assert said.startswith("error: ")
    assert words in said


# ---------------------------------------------------------------- what nobody expected


def broken(*arguments: Any, **options: Any) -> Any:
    raise KeyError("nobody [bold] knows")


def test_an_unexpected_error_has_a_code_of_its_own_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("leakgauge.audit.read", broken)
    code, said = called(monkeypatch, capsys, "check", "plan.toml")
    assert code == 70
    assert said.startswith("error: LeakGauge did not expect this error: KeyError: 'nobody [bold]")
    assert "Traceback" not in said
    assert "Please report it" in said
    [log] = tmp_path.glob("leakgauge-*.log")
    assert str(log) in said.replace("\n", "")
    assert "Traceback" in log.read_text()


def test_with_debug_the_traceback_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("leakgauge.audit.read", broken)
    code, said = called(monkeypatch, capsys, "--debug", "check", "plan.toml")
    assert code == 70
    assert "Traceback" in said
    assert not list(tmp_path.iterdir())


def test_an_interrupt_is_not_a_leak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("leakgauge.audit.read", interrupted)
    assert called(monkeypatch, capsys, "check", "plan.toml")[0] == 130


@pytest.mark.parametrize("arguments", [["chekc"], ["check"], ["audit", "--jobs", "0", "x.toml"]])
def test_a_command_that_is_not_well_formed_is_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, said = called(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "Traceback" not in said


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "leakgauge.cli", *arguments],
        capture_output=True,
        check=False,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_with_few_characters_is_no_traceback(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "plän–.toml").write_text(
        '[federation]\nmodel = "mlp"\ndata = "digits"\n[[attack]]\nname = "analytic"\n'
        "[audit]\nseeds = [0]\nexact = false\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    got = program("audit", "plän–.toml", env=environment, cwd=tmp_path)
    assert got.returncode in (0, 1, 4), got
    assert b"Traceback" not in got.stderr
    assert len(list(tmp_path.glob("leakgauge-audit/*/result.json"))) == 1


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    with open(folder + b"/\xff.toml", "w", encoding="utf-8") as file:
        file.write('[federation]\nmodel = "mlp"\ndata = "digits"\n[[attack]]\nname = "analytic"\n')
    plan = read(tmp_path / os.fsdecode(b"\xff.toml"))
    assert plan.name.encode()
