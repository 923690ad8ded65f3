"""What an audit says of itself: controls, ladder, checks, verdict, exit codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakgauge.audit import Store, forecast, parse, run
from leakgauge.audit.cases import Case, controls, ladder, trials
from leakgauge.audit.checks import CHECKS, caveats
from leakgauge.audit.ladder import FACTORS, describe, factors, weakened
from leakgauge.audit.result import explain
from leakgauge.audit.verdict import judge, judge_control, leaking
from leakgauge.defences import Clip
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario
from leakgauge.types import Dataset, LocalTraining, Reconstruction

DATA = Dataset("d", torch.rand(40, 1, 4, 4), torch.arange(40) % 2, ("a", "b"))
HARD = Scenario(
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
    DATA,
    LocalTraining(batch_size=4, steps=3, momentum=0.9, batch_norm="train", dropout="replayed"),
    clients=5,
    records=8,
    rounds=6,
    defence=Clip(),
)


# The weak twin and the ladder.


def test_the_weakest_twin_is_weak_in_everything() -> None:
    weak = weakened(HARD, ())
    assert (weak.training.batch_size, weak.records, weak.training.steps) == (1, None, 1)
    assert (weak.training.momentum, weak.training.optimiser) == (0.0, "sgd")
    assert (weak.training.batch_norm, weak.training.dropout) == ("eval", "off")
    assert (weak.participants, weak.rounds, weak.defence) == (1, 0, None)
    assert factors(weak, "aggregate") == []


def test_keeping_every_factor_is_the_scenario_itself() -> None:
    assert weakened(HARD, FACTORS) == HARD
    assert factors(HARD, "aggregate") == list(FACTORS)
    assert factors(HARD, "server") == [f for f in FACTORS if f != "aggregation"]


@pytest.mark.parametrize("factor", FACTORS)
def test_each_factor_is_put_back_by_itself(factor: str) -> None:
    kept = ("batch", factor) if factor == "steps" else (factor,)  # 8 records need a batch of 4
    assert factors(weakened(HARD, kept), "aggregate") == [f for f in FACTORS if f in kept]
    assert describe(HARD, factor) != describe(weakened(HARD, ()), factor)


def tiny(**changes: Any):
    table: dict[str, Any] = {
        "federation": {
            "data": "digits",
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"batch_size": 2, "batch_norm": "eval"},
        },
        "attack": [{"name": "analytic"}],
        "audit": {"seeds": [0, 1, 2], "gallery": 20, "exact": False},
    }
    for key, value in changes.items():
        table[key] = table[key] | value if isinstance(value, dict) and key in table else value
    return parse(table, "tiny", Path.cwd())


WEAK = {"federation": {"data": "digits", "model": {"name": "mlp", "hidden": [8]},
                       "training": {"batch_size": 1, "batch_norm": "eval"}}}  # fmt: skip


def test_controls_run_each_attack_on_the_twin() -> None:
    plan = tiny(attack=[{"name": "analytic"}, {"name": "dlg", "iterations": 2}])
    found = controls(plan)
    assert {(case.kind, case.kept, case.attack, case.seed) for case in found} == {
        ("control", (), attack, seed) for attack in ("analytic", "dlg") for seed in (0, 1)
    }
    assert factors(found[0].scenario(plan), "server") == []


def test_an_audit_of_the_twin_needs_no_other_control() -> None:
    plan = tiny(**WEAK)
    assert set(controls(plan)) <= set(trials(plan))
    assert ladder(plan, "analytic") == []


def test_cheap_attacks_come_first() -> None:
    plan = tiny(
        attack=[
            {"name": "inverting-gradients", "iterations": 9},
            {"name": "dlg", "iterations": 3},
            {"name": "analytic"},
        ]
    )
    assert [case.attack for case in trials(plan)[:3]] == ["analytic", "dlg", "inverting-gradients"]


def test_the_ladder_climbs_from_the_twin_to_the_trials() -> None:
    plan = tiny(
        federation={"data": "digits", "model": "mlp", "rounds": [0, 2],
                    "training": {"batch_size": 2, "steps": 2, "batch_norm": "eval"}},
        defence=[{"name": "none"}, {"name": "clip"}],
    )  # fmt: skip
    rungs = ladder(plan, "analytic")
    assert [factor for factor, _ in rungs] == ["twin", "batch", "steps", "stage", "defence"]
    first, *_, last = (cases for _, cases in rungs)
    assert first == [case for case in controls(plan) if case.attack == "analytic"]
    assert {(case.kind, case.stage, case.defence) for case in last} == {("trial", 2, "clip")}
    for (_, below), (factor, above) in pairwise(rungs):
        gained = set(factors(above[0].scenario(plan), "server")) - set(
            factors(below[0].scenario(plan), "server")
        )
        assert gained == {factor}


def rung(factor: str, psnr: float | None) -> tuple[str, Case, list[dict[str, Any]]]:
    done = {"status": "done", "scores": {"psnr": [psnr]}}
    case = Case("trial", 0, "none", "analytic", 0)
    return factor, case, [done] if psnr is not None else []


def test_the_rung_that_falls_most_protects() -> None:
    plan = tiny()
    told = explain(plan, [rung("twin", 40.0), rung("batch", 35.0), rung("steps", 12.0)])
    assert told is not None
    assert [row["change"] for row in told["rungs"]] == [None, -5.0, -23.0]
    assert "the steps" in told["sentence"]
    assert "23.0 dB" in told["sentence"]
    even = explain(plan, [rung("twin", 40.0), rung("batch", 39.0)])
    assert even is not None
    assert "Nothing in this federation protects" in even["sentence"]
    cut = explain(plan, [rung("twin", 40.0), rung("batch", None)])
    assert cut is not None
    assert "too few" in cut["sentence"]


# Checks.


def finished(**changes: Any) -> dict[str, Any]:
    return {
        "history": [1.0 / (i + 1) ** 0.01 for i in range(100)],
        "facts": {"objectives": [0.5], "zero_tensors": 0.0},
        "notes": [],
        "labels": {"accuracy": 0.5, "random": 0.2},
        "scores": {"psnr": [20.0, 22.0]},
        "baselines": {"mean image": {"psnr": [11.0, 12.0]}},
    } | changes


SUSPECT = {
    "still falling": {"history": [float(100 - i) for i in range(100)]},
    "restarts disagree": {"facts": {"objectives": [0.1, 0.9], "zero_tensors": 0.0}},
    "zero gradients": {"facts": {"objectives": [0.5], "zero_tensors": 0.25}},
    "derivative differed": {"notes": ["the finite-difference derivative was off by 1e-1"]},
    "cut short": {"notes": ["stopped by the time budget of 3 s after 5 of 9 iterations"]},
    "labels below baseline": {"labels": {"accuracy": 0.1, "random": 0.2}},
    "equals the prior": {"scores": {"psnr": [11.2, 12.1]}},
}


def test_a_sound_trial_has_no_caveat() -> None:
    assert caveats(finished()) == []


def test_every_check_has_a_case() -> None:
    assert set(SUSPECT) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_speaks_for_itself_alone(name: str) -> None:
    trial = finished(**SUSPECT[name])
    assert len(caveats(trial)) == 1
    assert caveats(trial) == [CHECKS[name](trial)]


@pytest.mark.parametrize(
    ("gain", "shown"), [(-0.6, False), (-0.4, True), (0.4, True), (0.6, False), (4.0, False)]
)
def test_the_prior_is_what_scores_within_half_a_decibel_of_the_mean_image(
    gain: float, shown: bool
) -> None:
    trial = finished(scores={"psnr": [11.0 + gain, 12.0 + gain]})
    assert any("the mean image" in caveat for caveat in caveats(trial)) == shown


# The verdict.


def test_a_record_leaks_above_the_limit_and_above_its_own_baseline() -> None:
    trial = {
        "scores": {"psnr": [14.9, 15.0, 30.0, 17.9]},
        "baselines": {"mean image": {"psnr": [5.0, 12.0, 29.0, 15.0]}},
    }
    assert leaking(trial, 15.0) == [False, True, False, False]


def row(leak: float, median: float = 20.0, **more: Any) -> dict[str, Any]:
    spread = {"median": median, "interval": [median - 1, median + 1], "most": median + 2}
    return {
        "round": 0, "defence": "none", "attack": "ig", "records": 4, "leaking": leak,
        "realism": "realistic", "scores": {"psnr": spread},
        "baselines": {"mean image": {"psnr": 10.0}}, "risk": {"median": "very high"},
    } | more  # fmt: skip


LIMIT = {"psnr": 15.0, "share": 0.1}
PASSED = [{"attack": "ig", "passed": True}]
FAILED = [{"attack": "ig", "passed": False}]
CRASH = [{"status": "failed"}]


@pytest.mark.parametrize(
    ("rows", "trials_", "control", "outcome", "code"),
    [
        ([row(0.5)], [], PASSED, "leaks", 1),
        ([row(0.5)], [], FAILED, "leaks", 1),
        ([row(0.1)], [], PASSED, "below the limit", 0),
        ([row(0.0)], [], FAILED, "inconclusive", 4),
        ([row(0.0)], [], [], "inconclusive", 4),
        ([row(0.0)], CRASH, PASSED, "failed", 3),
        ([row(0.5)], CRASH, PASSED, "leaks", 3),
        ([row(0.9, realism="oracle")], [], PASSED, "inconclusive", 4),
        ([row(0.9, realism="oracle"), row(0.0)], [], PASSED, "below the limit", 0),
        ([], [], PASSED, "inconclusive", 4),
    ],
)
def test_the_outcome_and_its_code(
    rows: list[Any], trials_: list[Any], control: list[Any], outcome: str, code: int
) -> None:
    verdict = judge(rows, trials_, control, [], LIMIT)
    assert (verdict["outcome"], verdict["exit_code"]) == (outcome, code)


def test_a_control_that_was_not_run_is_not_said_to_have_failed() -> None:
    failed, absent = (judge([row(0.0)], [], c, [], LIMIT)["headline"] for c in (FAILED, []))
    assert "no attack broke" in failed
    assert "no attack was tried on a known-weak twin" in absent


def test_the_worst_row_is_the_one_that_leaks_most() -> None:
    verdict = judge([row(0.2, 40.0), row(0.6, 18.0, attack="b")], [], PASSED, [], LIMIT)
    assert verdict["worst"]["attack"] == "b"


def test_a_control_must_stand_above_the_mean_image() -> None:
    trial = {"attack": "a", "id": "t", "status": "done", "error": None,
             "scores": {"psnr": [14.0]}, "baselines": {"mean image": {"psnr": [11.0]}}}  # fmt: skip
    assert judge_control(trial)["passed"]
    assert not judge_control(trial | {"scores": {"psnr": [13.9]}})["passed"]
    assert not judge_control(trial | {"status": "failed", "error": "boom"})["passed"]


# Whole audits.


class Fixed:
    """An attack that returns the same grey, whatever it sees."""

    needs = frozenset({"records"})

    def reconstruct(self, seen, rng, resources=None):
        return Reconstruction(torch.full((seen.records, *seen.shape), 0.9), None, 0.0)


class Crash:
    needs = frozenset()

    def reconstruct(self, seen, rng, resources=None):
        raise RuntimeError("it broke")


def test_an_audit_whose_control_fails_is_inconclusive(tmp_path: Path) -> None:
    plan = replace(tiny(), attacks={"grey": Fixed()}, asked=("grey",))
    verdict = run(plan, Store(tmp_path))["verdict"]
    assert (verdict["outcome"], verdict["exit_code"]) == ("inconclusive", 4)


def test_an_audit_with_a_crash_says_so(tmp_path: Path) -> None:
    plan = replace(tiny(), attacks={"bad": Crash(), "grey": Fixed()}, asked=("bad", "grey"))
    result = run(plan, Store(tmp_path))
    assert result["verdict"]["exit_code"] == 3
    assert any("it broke" in (trial["error"] or "") for trial in result["trials"])


def test_an_audit_of_a_leaking_federation_says_why(tmp_path: Path) -> None:
    plan = tiny(
        federation={"data": "digits", "model": {"name": "mlp", "hidden": [64]},
                    "training": {"batch_size": 1, "batch_norm": "eval"}},
        defence=[{"name": "none"}, {"name": "clip-and-noise", "epsilon": 1.0}],
    )  # fmt: skip
    result = run(plan, Store(tmp_path), calibrate=True)
    assert (result["verdict"]["outcome"], result["verdict"]["exit_code"]) == ("leaks", 1)
    assert [entry["passed"] for entry in result["control"]] == [True]
    assert "the defence" in result["explanation"]["sentence"]
    assert result["sensitivity"]["cosine_distance"] < 0.5
    assert result["times"]["forecast"]["cpu_seconds"] > 0
    assert result["not_run"] == []


def test_a_forecast_tells_what_applies() -> None:
    plan = tiny(
        federation={"data": "digits", "model": "lenet-zhu"},
        attack=[{"name": "analytic"}, {"name": "inverting-gradients", "iterations": 40}],
    )
    found = forecast(plan)
    reasons = {one.attack: one.reason for one in found.attacks}
    assert reasons["inverting-gradients"] is None
    assert "linear layer" in str(reasons["analytic"])
    assert found.trials == len(trials(plan)) + len(controls(plan))
    assert found.cpu_seconds > 0
    assert found.megabytes > 50


def test_a_budget_stops_in_order_and_says_what_was_not_run(tmp_path: Path) -> None:
    plan = tiny(audit={"control": False, "explain": False})
    result = run(plan, Store(tmp_path), budget=1e-9)
    assert result["trials"] == []
    assert [entry["id"] for entry in result["not_run"]] == [case.id for case in trials(plan)]
    assert "budget" in result["not_run"][0]["reason"]
    assert result["verdict"]["outcome"] == "inconclusive"
    whole = run(plan, Store(tmp_path), resume=True)
    assert len(whole["trials"]) == 3
    assert whole["not_run"] == []


def test_an_interrupt_leaves_a_valid_result(tmp_path: Path) -> None:
    seen = []

    class Interrupt(Fixed):
        def reconstruct(self, observed, rng, resources=None):
            seen.append(observed)
            if len(seen) == 2:
                raise KeyboardInterrupt
            return super().reconstruct(observed, rng)

    plan = tiny(audit={"control": False, "explain": False})
    result = run(replace(plan, attacks={"grey": Interrupt()}, asked=("grey",)), Store(tmp_path))
    assert result["interrupted"]
    assert len(result["trials"]) == 1
    assert [entry["reason"] for entry in result["not_run"]] == ["interrupted"] * 2


def test_nothing_is_an_audit_if_nothing_applies(tmp_path: Path) -> None:
    plan = tiny(federation={"data": "digits", "model": "lenet-zhu"})
    with pytest.raises(NotApplicable):
        run(plan, Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
