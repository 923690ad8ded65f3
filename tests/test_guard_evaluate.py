"""The evaluation of the guard: its arithmetic, that it can be continued, and what it finds."""

from __future__ import annotations

import json
from dataclasses import replace

import guard_cases
import guard_evaluate
import guard_findings
import guard_units
import pytest
import torch

from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.guard import Policy
from leakgauge.types import Batch


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One small evaluation, and where it is."""
    out = tmp_path_factory.mktemp("evaluation")
    return guard_evaluate.run(out, quick=True), out


@pytest.mark.parametrize("n", [1, 20, 300])
def test_bounds_are_those_of_the_binomial(n):
    """None of n: (1 − p)^n = 0.05 at the bound; all of n: p^n = 0.05."""
    assert (1 - guard_findings.upper(0, n)) ** n == pytest.approx(0.05)
    assert guard_findings.lower(n, n) ** n == pytest.approx(0.05)
    assert guard_findings.upper(n, n) == 1.0
    assert guard_findings.lower(0, n) == 0.0


def test_a_bound_with_events_sums_the_binomial():
    p = guard_findings.upper(1, 20)
    assert (1 - p) ** 20 + 20 * p * (1 - p) ** 19 == pytest.approx(0.05)


def test_honest_clients_are_not_rejected(quick):
    result, _ = quick
    assert result["benign"]["checks"] >= 12
    assert result["benign"]["REJECT"] == 0


def test_every_manipulated_model_is_caught_with_and_without_a_memory(quick):
    """But for trap weights that hardly work: on images of 16 × 16, without a memory, only what they
    expose gives them away, and that is what the policy tolerates."""
    _, out = quick
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    lines = [line for r in records for line in r.get("attacked", ()) if line["decision"]]
    assert sum(line["round"] == 0 for line in lines) >= 30
    assert sum(line["round"] > 0 for line in lines) >= 30
    for line in lines:
        if line["decision"] == "ACCEPT":
            assert (line["attack"], line["round"]) == ("trap-weights", 0)
            assert line["tests"]["isolation"][0] <= 0.2


def test_what_could_not_be_made_is_in_the_result(quick):
    """Fishing by a feature needs more public images of a class than the photographs have."""
    result, _ = quick
    assert "public images" in result["attacks"]["fishing (by feature)"]["not_applicable"][0]


def test_the_self_audit_says_how_many_images_are_recovered(quick):
    result, _ = quick
    runs = [run for one in result["recovery"] for run in one["runs"]]
    assert len(runs) == 15
    assert max(run["recovered"] for run in runs) >= 20
    assert all(abs(run["said"] - run["recovered"]) <= 6 for run in runs)


def test_a_second_run_computes_nothing_and_says_the_same(quick, monkeypatch):
    result, out = quick
    lines = (out / "records.jsonl").read_text()
    monkeypatch.setattr(guard_evaluate, "play", lambda *_: pytest.fail("a unit was run again"))
    assert guard_evaluate.run(out, quick=True) == result
    assert (out / "records.jsonl").read_text() == lines
    assert json.loads((out / "result.json").read_text()) == result
    assert (out / "figure.png").stat().st_size > 10_000
    assert "| attack |" in (out / "table.md").read_text()


def test_the_command_prints_the_table_and_refuses_a_wrong_policy(quick, tmp_path, capsys):
    _, out = quick
    assert guard_evaluate.main(["--quick", "--out", str(out)]) == 0
    assert capsys.readouterr().out == (
        (out / "table.md").read_text() + f"\nresult    {out / 'result.json'}\n"
    )
    (tmp_path / "policy.toml").write_text("refuse_exposd = false\n")
    words = ["--policy", str(tmp_path / "policy.toml"), "--out", str(tmp_path / "none")]
    assert guard_evaluate.main(words) == 2
    assert "refuse_exposed" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit, match="2"):
        guard_evaluate.main(["--most", "-1"])


def test_a_line_that_a_crash_cut_off_is_run_again(quick, tmp_path):
    _, out = quick
    *whole, last = (out / "records.jsonl").read_text().splitlines()
    (tmp_path / "records.jsonl").write_text("\n".join([*whole, last[:40]]))
    guard_evaluate.run(tmp_path, quick=True)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()
             if line != last[:40]]  # fmt: skip
    assert [line["id"] for line in lines] == [json.loads(one)["id"] for one in [*whole, last]]


def test_another_policy_is_another_evaluation(quick, tmp_path):
    """Its units are not taken for those of this one."""
    _, out = quick
    (tmp_path / "records.jsonl").write_bytes((out / "records.jsonl").read_bytes())
    data = guard_cases.load_data(quick=True)
    ran = []
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(
            guard_evaluate, "units", lambda *_: {"cost/mlp": lambda: ran.append(1) or COST}
        )
        guard_evaluate.run(tmp_path, quick=True, policy=Policy(refuse_exposed=False))
    assert ran == [1]
    assert data.private.name == "photos"


COST = {"kind": "cost", "host": "mlp", "epoch": 1.0, "checks": [0.1], "weights": 1}


def test_clients_and_server_share_no_image_and_no_initialisation():
    data = guard_cases.load_data(quick=True)
    private = {one.numpy().tobytes() for one in data.private.inputs}
    assert not private & {one.numpy().tobytes() for one in data.public.inputs}
    case = guard_cases.Federation("mlp")
    make = guard_units._maker(case, data)
    one, two = (
        guard_units._started(make, case, data, torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    assert not torch.equal(one.fc1.weight, two.fc1.weight)


def test_a_zero_head_and_a_pretrained_start_are_what_they_say():
    data = guard_cases.load_data(quick=True)
    zero = guard_cases.Federation("mlp", start="zero-head")
    rng = torch.Generator().manual_seed(0)
    model = guard_units._started(guard_units._maker(zero, data), zero, data, rng)
    assert not model.fc3.weight.any()
    case = replace(zero, start="pretrained")
    model = guard_units._started(guard_units._maker(case, data), case, data, rng)
    batch = Batch(data.public.inputs, data.public.labels)
    record = guard_units._setting(model, data.public).record
    right = model(record.entering(batch.inputs)).argmax(1) == batch.labels
    assert right.float().mean() > 0.6


def test_every_active_attack_is_evaluated():
    assert set(ACTIVE_ATTACKS) == {variant.attack for variant in guard_cases.VARIANTS}
    hosts = {host for variant in guard_cases.VARIANTS for host in variant.hosts}
    cases = guard_cases.federations(quick=False)
    assert {case.host for case in cases if case.attacks} == hosts == set(guard_cases.HOSTS)
