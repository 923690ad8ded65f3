"""`leakgauge guard`: verdicts as exit codes, and mistakes in words."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import leakgauge.guard as guard_package
from leakgauge import cli
from leakgauge._version import __version__
from leakgauge.files import read_tensors, write_tensors
from leakgauge.guard import policy as policies

MODULE = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 4))

def wrong():
    return 3

def needy(x):
    return x
"""


@pytest.fixture
def desk(tmp_path, monkeypatch, easy):
    """A folder with the client's code, records, policy and an honest model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    (tmp_path / "ours.py").write_text(MODULE)
    np.savez(tmp_path / "own.npz", images=easy.inputs.numpy(), labels=easy.labels.numpy())
    (tmp_path / "policy.toml").write_text("[training]\nlr = 0.1\nbatch_size = 16\nsteps = 4\n")
    images = easy.inputs.numpy()
    np.savez(tmp_path / "small.npz", images=images[..., :4, :4], labels=easy.labels.numpy())
    np.savez(tmp_path / "many.npz", images=images, labels=np.arange(len(images)) % 9)
    torch.manual_seed(1)
    namespace: dict = {}
    exec(MODULE, namespace)
    model = namespace["make"]()
    write_tensors(tmp_path / "good.safetensors", model.state_dict())
    bad = model.state_dict()
    bad["3.weight"][1:] = 0.0
    bad["3.bias"][1:] = 1000.0
    write_tensors(tmp_path / "bad.safetensors", bad)
    yield tmp_path
    sys.modules.pop("ours", None)


def leakgauge(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leakgauge", "guard", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


KNOWN = ("--make", "ours:make", "--data", "own.npz", "--policy", "policy.toml")
OWN = (*KNOWN, "--first")


def test_an_honest_model_exits_with_0_and_says_what_was_not_tested(desk, monkeypatch, capsys):
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN) == 0
    out = capsys.readouterr().out
    assert "ACCEPT" in out
    assert "not tested: continuity: no round has been accepted yet" in out
    assert "no proof that none can be read" in " ".join(out.split())


def test_a_manipulated_model_exits_with_5_and_names_the_tensor(desk, monkeypatch, capsys):
    assert leakgauge(monkeypatch, "check", "bad.safetensors", *OWN) == 5
    out = capsys.readouterr().out
    assert "REJECT" in out
    assert "3.weight" in out


def test_names_from_the_server_cannot_speak_to_the_terminal(desk, monkeypatch, capsys):
    state = read_tensors(desk / "good.safetensors")
    state["\x1b[2J[red]evil\r[/]"] = torch.zeros(1)
    write_tensors(desk / "loud.safetensors", state)
    assert leakgauge(monkeypatch, "check", "loud.safetensors", *OWN) == 5
    out = capsys.readouterr().out
    assert "[red]evil" in out
    assert not {"\x1b", "\r"} & set(out)


def test_json_is_all_that_is_on_stdout(desk, monkeypatch, capsys):
    assert leakgauge(monkeypatch, "check", "bad.safetensors", *OWN, "--json", "-") == 5
    told = json.loads(capsys.readouterr().out)
    assert told["decision"] == "REJECT"
    assert "bias-dominance" in [d["test"] for d in told["detections"] if d["fired"]]
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN, "--json", "v.json") == 0
    assert json.loads((desk / "v.json").read_text())["decision"] == "ACCEPT"


def test_an_exposed_model_exits_with_1_unless_the_policy_tolerates_it(desk, monkeypatch):
    (desk / "policy.toml").write_text("probe = { isolation = 0.0, d_snr = 0.0 }")
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN) == 1
    (desk / "policy.toml").write_text(
        "refuse_exposed = false\nprobe = { isolation = 0.0, d_snr = 0.0 }"
    )
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN) == 0


class Harmful:
    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("kind", ["pickle", "torn", "module", "name"])
def test_a_file_that_cannot_be_read_safely_is_rejected(desk, monkeypatch, capsys, kind):
    path = desk / ("got.txt" if kind == "name" else "got.pt")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Harmful()))
    elif kind == "module":
        torch.save(torch.nn.Linear(2, 2), path)
    else:
        path.write_bytes(b"PK\x03\x04 no zip")
    assert leakgauge(monkeypatch, "check", path.name, *OWN) == 5
    assert not (desk / "ran").exists()
    assert "REJECT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "no.pt", *OWN), "there is no model at no.pt"),
        (("check", "good.safetensors", "--make", "ours:mak"), "did you mean 'make'"),
        (("check", "good.safetensors", "--make", "theirs:make"), "could not be imported"),
        (("check", "good.safetensors", "--make", "ours:wrong"), "gave a int"),
        (("check", "good.safetensors", "--make", "ours:needy"), "without arguments"),
        (("check", "good.safetensors", "--make", "ours:nn"), "expected a callable"),
        (
            ("calibrate", "--make", "ours:needy", *KNOWN[2:], "--out", "new.toml"),
            "without arguments",
        ),
        (("check", "good.safetensors", *OWN[:2], "--data", "digitz"), "did you mean 'digits'"),
        (("check", "good.safetensors", *OWN[:2], "--policy", "no.toml"), "no policy at no.toml"),
        (("check", "good.safetensors", *OWN, "--data", "small.npz"), "cannot run on your records"),
        (("check", "good.safetensors", *OWN, "--data", "many.npz"), "your network has 4 classes"),
        (("check", "good.safetensors", *OWN, "--store", "ours.py"), "is a file"),
        (("check", "good.safetensors", *OWN, "--restart", ""), "in words"),
    ],
)
def test_a_mistake_of_the_operators_exits_with_2(desk, monkeypatch, capsys, words, message):
    assert leakgauge(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_policy_with_a_wrong_key_exits_with_2(desk, monkeypatch, capsys):
    (desk / "policy.toml").write_text("continuty = 'off'")
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN) == 2
    assert "did you mean 'continuity'" in capsys.readouterr().err


def test_rounds_are_remembered_after_training_and_only_if_accepted(desk, monkeypatch):
    store = ("--store", "memory")
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN, *store) == 0
    assert not (desk / "memory").exists()
    words = ("remember", "bad.safetensors", "good.safetensors", *OWN, *store)
    assert leakgauge(monkeypatch, *words) == 5
    assert not (desk / "memory").exists()
    words = ("remember", "good.safetensors", "good.safetensors", *OWN, *store)
    assert leakgauge(monkeypatch, *words) == 0
    words = ("check", "good.safetensors", *KNOWN, *store, "--json", "v.json")
    assert leakgauge(monkeypatch, *words) == 0
    assert json.loads((desk / "v.json").read_text())["rounds"] == 1


def test_what_is_missing_exits_with_4_and_says_what_to_do(desk, monkeypatch, capsys):
    assert leakgauge(monkeypatch, "check", "good.safetensors", *KNOWN) == 4
    out = capsys.readouterr().out.replace("\n", " ")
    assert "INCONCLUSIVE" in out
    assert "--first" in out
    assert leakgauge(monkeypatch, "check", "good.safetensors", *KNOWN[:2], "--first") == 4
    assert "no records of yours were given" in capsys.readouterr().out.replace("\n", " ")


def test_a_restart_is_logged_in_the_store(desk, monkeypatch, capsys):
    store = ("--store", "memory")
    words = ("remember", "good.safetensors", "good.safetensors", *OWN, *store)
    assert leakgauge(monkeypatch, *words) == 0
    torch.manual_seed(5)
    state = {n: torch.randn_like(v) * v.std() for n, v in
             read_tensors(desk / "good.safetensors").items()}  # fmt: skip
    write_tensors(desk / "other.safetensors", state)
    assert leakgauge(monkeypatch, "check", "other.safetensors", *KNOWN, *store) == 5
    words = ("check", "other.safetensors", *KNOWN, *store, "--restart", "a new start, as agreed")
    assert leakgauge(monkeypatch, *words) == 0
    assert "a new start, as agreed (excused: continuity)" in capsys.readouterr().out
    assert "a new start" in (desk / "memory" / "overrides.jsonl").read_text()


def test_the_verdict_names_model_policy_version_and_round(desk, monkeypatch):
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN, "--json", "v.json") == 0
    told = json.loads((desk / "v.json").read_text())
    assert len(told["model"]) == len(told["policy"]) == 64
    assert (told["version"], told["round"]) == (__version__, 1)


def test_a_policy_without_a_training_is_said(desk, monkeypatch, capsys):
    words = ("check", "good.safetensors", *KNOWN[:4], "--first")
    assert leakgauge(monkeypatch, *words) == 0
    assert "one step of 64 records is probed" in capsys.readouterr().err
    assert leakgauge(monkeypatch, "calibrate", *KNOWN[:4], "--out", "mine.toml") == 2
    assert "[training]" in capsys.readouterr().err


def bomb(path, kind):
    """Files of weights that would take far more memory than they have bytes."""
    plain = path.with_name("plain.pt")
    torch.save({"w": torch.zeros(2_000_000)}, plain)
    with zipfile.ZipFile(plain) as source:
        parts = {one.filename: source.read(one) for one in source.infolist()}
    if kind == "deflated":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in parts.items():
                file.writestr(name, content)
    elif kind == "overlapping":  # every storage is the same bytes of the file
        with zipfile.ZipFile(path, "w") as file:
            for name, content in parts.items():
                file.writestr(name, content)
            data = next(one for one in file.filelist if one.filename.endswith("/0"))
            for k in range(1, 50):
                twin = copy.copy(data)
                twin.filename = data.filename[:-1] + str(k)
                file.filelist.append(twin)
    elif kind == "allocating":  # a call that PyTorch allows, for as many bytes as it is told
        with zipfile.ZipFile(path, "w") as file:
            for name, content in parts.items():
                if name.endswith("data.pkl"):
                    content = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x94\x35\x77\x85R."
                file.writestr(name, content)
    else:
        torch.save({"w": torch.zeros(2_000_000)}, path)  # plain, and far larger than the network
    plain.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("deflated", "is a compressed archive"),
        ("overlapping", "made to fill the memory"),
        ("allocating", "bytearray"),
        ("large", "declares 8,00"),
    ],
)
def test_a_file_that_would_fill_the_memory_is_rejected_unread(
    desk, monkeypatch, capsys, kind, message
):
    bomb(desk / "got.pt", kind)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    assert leakgauge(monkeypatch, "check", "got.pt", *OWN) == 5
    out = capsys.readouterr().out.replace("\n", " ")
    assert message in out


def test_a_large_safetensors_file_is_rejected_unread(desk, monkeypatch, capsys):
    write_tensors(desk / "got.safetensors", {"w": torch.zeros(2_000_000)})
    monkeypatch.setattr(safetensors.torch, "load_file", lambda *_: pytest.fail("it was read"))
    assert leakgauge(monkeypatch, "check", "got.safetensors", *OWN) == 5
    assert "declares 8,000,000 bytes" in capsys.readouterr().out.replace("\n", " ")


def test_plain_files_of_torch_are_read(desk, monkeypatch):
    state = read_tensors(desk / "good.safetensors")
    torch.save(state, desk / "got.pt")
    assert leakgauge(monkeypatch, "check", "got.pt", *OWN) == 0
    halves = {n: torch.nn.Parameter(v.half()) for n, v in state.items()}
    torch.save(OrderedDict(halves), desk / "got.pth")
    assert leakgauge(monkeypatch, "check", "got.pth", *OWN) == 0


def test_the_guard_asks_for_no_attack():
    """What a client imports on every start."""
    for path in Path(guard_package.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "attacks" not in ast.unparse(node), path


def test_calibration_writes_a_policy_that_can_be_used(desk, monkeypatch):
    (desk / "policy.toml").write_text(
        "continuity = { threshold = 0.001 }\n[training]\nlr = 0.1\nbatch_size = 16\n"
    )
    words = ("calibrate", *KNOWN, "--out", "mine.toml")
    assert leakgauge(monkeypatch, *words) == 0
    written = policies.read(desk / "mine.toml")
    assert written.policy.thresholds["continuity"] > 0.001
    assert written.training.batch_size == 16
    assert leakgauge(monkeypatch, *words) == 2  # it replaces nothing
