"""Rounds of a user's own loop: captured, refused when damaged, audited with and without truth."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import leakgauge as lg
from leakgauge import exchanges
from leakgauge.audit import read
from leakgauge.audit.schema import load
from leakgauge.cli import app
from leakgauge.errors import InputError, LeakGaugeError, PlanError, Withheld
from leakgauge.fl import aggregate
from leakgauge.records import Images
from leakgauge.tensors import parameters, subtract
from leakgauge.types import Batch, Exchange, LocalTraining, Round, ThreatModel

EXAMPLE = Path(__file__).parents[1] / "examples" / "own-loop" / "loop.py"
TRAINING = LocalTraining(lr=0.1, batch_size=2)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 36, 3)
        )


def batch(seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor([0, 2]))


def updates(model: nn.Module, clients: int = 2) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [
        {n: 0.01 * torch.randn(p.shape, generator=rng) for n, p in model.named_parameters()}
        for _ in range(clients)
    ]


def captured(folder: Path, **changes: object) -> Path:
    model = network()
    options: dict[str, object] = {
        "made_by": "mynet:make_model",
        "record": Images((1, 8, 8), mean=(0.5,)),
        "classes": ("a", "b", "c"),
        "training": TRAINING,
        "sizes": (2, 2),
        "truths": (batch(0), batch(1)),
    }
    sent = changes.pop("sent", None) or updates(model)
    return exchanges.capture(folder, model, sent, **(options | changes))  # type: ignore[arg-type]


def loaded(path: Path, *, truths: bool = True) -> Exchange:
    return exchanges.exchange(
        path, exchanges.manifests(path.parent)[-1][1], network(7), truths=truths
    )


# What is written is what is read


def test_a_captured_round_is_read_back_as_it_was(tmp_path):
    model, sent = network(), updates(network())
    path = captured(tmp_path, server_lr=0.5, announced={"norm": 1.0})
    found = loaded(path)
    assert isinstance(found, Round)
    for name, value in model.state_dict().items():  # buffers too
        assert torch.equal(found.model.state_dict()[name], value)
    for ours, theirs in zip(found.updates, sent, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    after = aggregate.step(parameters(model), sent, (0.5, 0.5), 0.5)
    assert all(torch.equal(found.after[name], after[name]) for name in after)
    assert found.record == Images((1, 8, 8), mean=(0.5,))
    assert (found.task.count, found.sizes, found.weights) == (3, (2, 2), (0.5, 0.5))
    assert (found.training, found.server_lr, found.announced) == (TRAINING, 0.5, {"norm": 1.0})
    assert torch.equal(found.truths[1].inputs, batch(1).inputs)
    assert type(loaded(path, truths=False)) is Exchange


def test_numbers_of_other_libraries_and_a_count_of_classes_will_do(tmp_path):
    path = captured(tmp_path, classes=3, sizes=np.array([2, 2]), weights=torch.tensor([0.25, 0.75]))
    found = loaded(path)
    assert (found.sizes, found.weights, found.task.count) == ((2, 2), (0.25, 0.75), 3)
    assert exchanges.manifests(tmp_path)[0][1].classes == ("0", "1", "2")


def test_clients_that_send_weights_are_subtracted(tmp_path):
    model = network()
    states = [dict(network(seed).state_dict()) for seed in (1, 2)]
    training = replace(TRAINING, sends="weights")
    found = loaded(captured(tmp_path, sent=states, training=training))
    for update, state in zip(found.updates, states, strict=True):
        expected = subtract(parameters(model), {n: state[n] for n in parameters(model)})
        assert all(torch.equal(update[name], expected[name]) for name in expected)


def test_rounds_are_added_and_never_replaced(tmp_path):
    first, second = captured(tmp_path), captured(tmp_path)
    assert [first.name, second.name] == ["round-000.json", "round-001.json"]
    (tmp_path / "round-002.safetensors").write_bytes(b"of a capture that was killed")
    assert captured(tmp_path).name == "round-003.json"
    assert (tmp_path / "round-002.safetensors").read_bytes() == b"of a capture that was killed"
    files = [p for p in tmp_path.iterdir() if p.name != "round-002.safetensors"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in files)


def test_two_captures_at_once_do_not_overwrite_each_other(tmp_path, monkeypatch):
    captured(tmp_path)
    monkeypatch.setattr(exchanges, "_free", lambda folder: folder / "round-000")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(PlanError, match="round-000"):
        captured(tmp_path, server_lr=0.1)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# What is wrong is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (2,)}, "sizes: expected one per client, 2, got 1"),
        ({"sizes": (2, 0)}, "at least one record"),
        ({"weights": (0.5, 0.6)}, "sum to 1"),
        ({"sent": [{}]}, "no entry for parameter '0.weight'"),
        ({"truths": (batch(),)}, "truths: expected one per client"),
        ({"sizes": (3, 2)}, r"truths\[0\]: expected 3 records"),
        ({"classes": ("a", "b")}, r"truths\[0\]: expected labels from 0 to 1"),
        ({"truths": (Batch(2 * batch().inputs, batch().labels),) * 2}, "values from 0 to 1"),
        ({"after": {"0.weight": torch.zeros(1)}}, "the parameters after the round"),
        ({"made_by": network}, "made_by or announced cannot be written as JSON"),
        ({"announced": {"noise": torch.ones(1)}}, "made_by or announced cannot be written as JSON"),
    ],
)
def test_a_wrong_capture_is_refused_and_writes_nothing(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        captured(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_an_update_with_nan_is_refused(tmp_path):
    sent = updates(network())
    sent[1]["0.weight"][0] = float("nan")
    with pytest.raises(InputError, match=r"client 1 sent: '0.weight' holds 9 NaN"):
        captured(tmp_path, sent=sent)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_text("{"), "not the manifest of a captured round"),
        (lambda p: p.write_text("[]"), "expected version 1, got None"),
        (lambda p: edit(p, "version", 2), "expected version 1, got 2"),
        (lambda p: edit(p, "sizes", ["x"]), "round.sizes"),
        (lambda p: edit(p, "extra", 1), "unknown key 'extra'"),
        (lambda p: p.with_suffix(".safetensors").unlink(), "cannot be read"),
        (lambda p: p.with_suffix(".safetensors").write_bytes(b"x"), "changed or cut short"),
        (lambda p: p.with_suffix(".truth.safetensors").write_bytes(b"x"), "changed or cut short"),
    ],
)
def test_a_damaged_round_is_refused(tmp_path, damage, message):
    path = captured(tmp_path)
    damage(path)
    with pytest.raises(PlanError, match=message):
        loaded(path)


def edit(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_another_network_is_refused(tmp_path):
    path = captured(tmp_path)
    manifest = exchanges.manifests(tmp_path)[0][1]
    with pytest.raises(PlanError, match=r"not the one that was captured; they differ in 0"):
        exchanges.exchange(path, manifest, nn.Sequential(nn.Conv2d(1, 3, 3)), truths=False)


def test_nothing_but_the_folder_itself_is_read(tmp_path):
    with pytest.raises(PlanError, match="no captured round"):
        exchanges.manifests(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="is a file"):
        captured(tmp_path / "file")


# What an attacker sees of it


def test_without_truths_no_truth_is_granted(tmp_path):
    found = loaded(captured(tmp_path), truths=False)
    seen = lg.observe(found, ThreatModel())
    assert seen.labels is None
    assert seen.records == 2
    for threat in (
        ThreatModel(grants=frozenset({"labels"})),
        ThreatModel(grants=frozenset({"statistics"})),
        ThreatModel("client"),
    ):
        with pytest.raises(Withheld, match="nobody knows the truth"):
            lg.observe(found, threat)


# An own loop, audited


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's two rounds: `captured` with truths, `private` without."""
    folder = tmp_path_factory.mktemp("loop")
    shutil.copy(EXAMPLE, folder)
    for arguments in (["captured"], ["private", "--private"]):
        subprocess.run([sys.executable, "loop.py", *arguments], cwd=folder, check=True)
    return folder


def audit(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["audit", name, "--overwrite", *more])
    return done.exit_code, done.output


def test_a_loop_with_truths_is_scored(loop, monkeypatch):
    code, said = audit(loop, "captured", monkeypatch)
    assert code == 1, said
    result = load(loop / "leakgauge-audit" / "captured" / "result.json")
    assert result.verdict is not None
    assert result.verdict.outcome == "leaks"
    assert result.verdict.records == 8  # of client 0, in two rounds
    assert {trial.round for trial in result.trials if trial.kind == "trial"} == {0, 1}
    assert result.control  # the twin of a captured federation is simulated
    rows = {row.round: row for row in result.summary if row.attack == "inverting-gradients"}
    assert all(row.measured and row.measured.scores["psnr"].median > 30 for row in rows.values())
    assert "add [[defence]]" not in said  # what was sent is sent
    (shown,) = result.exposure  # client 0 has as many records in both rounds
    assert (shown.records, shown.steps) == (4, 1)
    assert "an update here holds 4 records" in " ".join(said.split()).lower()
    page = (loop / "leakgauge-audit" / "captured" / "report.html").read_text()
    assert "captured in captured" in page


def test_a_loop_without_truths_is_not_scored_and_never_green(loop, monkeypatch):
    code, said = audit(loop, "private", monkeypatch)
    assert code == 4, said
    assert "nobody knows the truth" in " ".join(said.split())
    result = load(loop / "leakgauge-audit" / "private" / "result.json")
    assert result.verdict is not None
    assert result.verdict.outcome == "inconclusive"
    attacked = [t for t in result.trials if t.attack == "inverting-gradients"]
    assert [t.status for t in attacked] == ["unscored", "unscored"]
    assert not result.control
    for trial in attacked:
        assert trial.score is None
        assert trial.found is not None
        assert trial.found.images is not None
        assert len(trial.found.images.guesses) == 4
        assert trial.found.images.truths == ()
    page = (loop / "leakgauge-audit" / "private" / "report.html").read_text()
    assert "not scored" in page


def test_the_guesses_are_the_same_with_and_without_truth(loop, monkeypatch):
    for name in ("captured", "private"):
        audit(loop, name, monkeypatch)
    found = [
        [t.found for t in load(loop / "leakgauge-audit" / name / "result.json").trials
         if t.kind == "trial" and t.attack == "inverting-gradients"]
        for name in ("captured", "private")
    ]  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert (one.residual, one.labels, one.history) == (
            other.residual,
            other.labels,
            other.history,
        )


def test_two_jobs_give_the_same(loop, monkeypatch):
    audit(loop, "captured", monkeypatch)
    place = loop / "leakgauge-audit" / "captured" / "result.json"
    alone = load(place).summary
    audit(loop, "captured", monkeypatch, "--jobs", "2")
    assert load(place).summary == alone


PLAN = """
[federation]
data = {{ captured = "{folder}" }}
{more}
[[attack]]
name = "inverting-gradients"
iterations = 2
[audit]
seeds = [0]
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("clients = 3", "federation.clients: the captured rounds say it themselves"),
        ('model = "lenet-zhu"', "federation.model: the captured rounds say it themselves"),
        ("[audit]\nseeds = [0, 1]", "counted more than once"),
        ('[[defence]]\nname = "prune"', "no defence changes it any more"),
        ("[threat]\nclient = 2", "threat.client is 2"),
    ],
)
def test_what_the_files_say_cannot_be_said_otherwise(loop, monkeypatch, more, message):
    monkeypatch.chdir(loop)
    text = PLAN.format(folder="private", more=more)
    if "[audit]" in more:
        text = text.replace("[audit]\nseeds = [0]\n", "")
    Path("plan.toml").write_text(text)
    with pytest.raises(LeakGaugeError, match=message):
        read(Path("plan.toml"))


def test_a_plan_names_attacks_for_captured_rounds(loop, monkeypatch):
    monkeypatch.chdir(loop)
    Path("plan.toml").write_text(PLAN.format(folder="private", more=""))
    plan = read(Path("plan.toml"))
    assert plan.asked == ("inverting-gradients",)
    assert len(plan.captured) == 2
    other = read(Path("captured"))
    assert plan.fingerprint != other.fingerprint


def test_records_that_were_captured_twice_are_told(loop, monkeypatch):
    """A loop that trains on the same records in every round."""
    monkeypatch.chdir(loop)
    Path("again").mkdir()
    for file in Path("captured").glob("round-000.*"):
        for name in (file.name, file.name.replace("000", "001")):
            shutil.copy(file, Path("again", name))
    audit(loop, "again", monkeypatch)
    audit(loop, "captured", monkeypatch)
    for name, said in (("again", ["4 of these 4 records"] * 2), ("captured", [])):
        result = load(loop / "leakgauge-audit" / name / "result.json")
        caveats = [c for t in result.trials if t.kind == "trial" and t.score
                   for c in t.score.caveats if "captured more than once" in c]  # fmt: skip
        assert [c[:20] for c in caveats] == said


def test_the_twin_of_a_captured_federation_has_its_weights(loop, monkeypatch):
    monkeypatch.chdir(loop)
    plan = read(Path("captured"))
    model = plan.scenario(0, "none").make_model()
    for name, value in plan.captured[0].model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_rounds_of_different_federations_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captured(tmp_path / "two")
    captured(tmp_path / "two", training=replace(TRAINING, lr=0.2))
    with pytest.raises(PlanError, match="of another federation"):
        read(tmp_path / "two")
