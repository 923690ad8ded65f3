"""`leakgauge guard`: verdicts as exit codes, and mistakes in words."""

from __future__ import annotations

import json
import pickle
import sys

import numpy as np
import pytest
import torch

from leakgauge import cli
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
    (tmp_path / "policy.toml").write_text("[training]\nlr = 0.1\nbatch_size = 16\n")
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


OWN = ("--make", "ours:make", "--data", "own.npz", "--policy", "policy.toml")


def test_an_honest_model_exits_with_0_and_says_what_was_not_tested(desk, monkeypatch, capsys):
    assert leakgauge(monkeypatch, "check", "good.safetensors", *OWN) == 0
    out = capsys.readouterr().out
    assert "ACCEPT" in out
    assert "not tested: continuity: no round has been accepted yet" in out
    assert "of your 64 images could be read exactly" in out


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
        (("check", "good.safetensors", *OWN[:2], "--data", "digitz"), "did you mean 'digits'"),
        (("check", "good.safetensors", *OWN[:2], "--policy", "no.toml"), "no policy at no.toml"),
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
    words = ("check", "good.safetensors", *OWN, *store, "--json", "v.json")
    assert leakgauge(monkeypatch, *words) == 0
    assert json.loads((desk / "v.json").read_text())["rounds"] == 1


def test_calibration_writes_a_policy_that_can_be_used(desk, monkeypatch):
    (desk / "policy.toml").write_text(
        "continuity = { threshold = 0.001 }\n[training]\nlr = 0.1\nbatch_size = 16\n"
    )
    words = ("calibrate", *OWN, "--out", "mine.toml")
    assert leakgauge(monkeypatch, *words) == 0
    written = policies.read(desk / "mine.toml")
    assert written.policy.thresholds["continuity"] > 0.001
    assert written.training.batch_size == 16
    assert leakgauge(monkeypatch, *words) == 2  # it replaces nothing
