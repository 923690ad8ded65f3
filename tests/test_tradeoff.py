"""Trade-offs: what is held out, what is trained, what that costs, which setting is recommended."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_result import HOSTILE, failed, rederive, save
from sample_tradeoff import traded
from scipy import stats
from torch import nn
from typer.testing import CliRunner

from leakgauge import threat
from leakgauge.audit import Plan, Store, Watch, cases, forecast, parse, run, schema
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import Training
from leakgauge.audit.results import Budget, NotRun, Result, Tradeoff, Weighed
from leakgauge.audit.tradeoff import compare, estimate, on_front, used
from leakgauge.audit.training import accuracy, trained
from leakgauge.cli import app
from leakgauge.errors import InputError, PlanError
from leakgauge.fl import Scenario, played, simulate
from leakgauge.report import html, markdown, pdf, protection, scatter, terminal, write
from leakgauge.tensors import seeded
from leakgauge.types import Dataset, LocalTraining

TINY: dict[str, Any] = {
    "federation": {
        "data": "digits",
        "model": {"name": "mlp", "hidden": [8]},
        "clients": 3,
        "training": {"batch_size": 2, "lr": 0.1},
    },
    "attack": [{"name": "analytic"}],
    "defence": [{"name": "none"}, {"name": "prune", "share": 0.5}],
    "audit": {"seeds": [0, 1], "gallery": 20, "explain": False, "exact": False},
    "tradeoff": {"rounds": 3, "held_out": 60},
}


def planned(**tables: Any) -> Plan:
    """TINY with these keys in its tables; a list replaces the table, None a key."""
    table = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in TINY.items()}
    for name, keys in tables.items():
        if not isinstance(keys, dict):
            table[name] = keys
            continue
        table[name] = {k: v for k, v in (table.get(name, {}) | keys).items() if v is not None}
    return parse({k: v for k, v in table.items() if v is not None}, "tiny", Path.cwd())


def without_times(path: Path) -> Any:
    """A result but for what differs between two runs of the same plan."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items() if key != "times"}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return cut(json.loads(path.read_text("utf-8")))


def of(result: Result) -> Tradeoff:
    assert result.tradeoff is not None
    return result.tradeoff


def settings(result: Result) -> dict[str, Weighed]:
    return {one.defence: one for one in of(result).settings}


# The plan


def digests(records: Dataset) -> set[bytes]:
    return {record.numpy().tobytes() for record in records.inputs}


@pytest.mark.parametrize("public", [None, 100])
def test_held_out_records_are_with_no_client_and_no_attacker(public):
    plan = planned(federation={"public": public})
    assert plan.held_out is not None
    held = digests(plan.held_out)
    assert len(plan.held_out) == 60
    assert not held & digests(plan.data)
    assert not held & digests(plan.public)
    assert len(plan.data) + len(plan.public) + 60 == 1797
    for defence in plan.defences:  # what clients really train on, and what attackers are given
        for seed in plan.document.audit.seeds:
            rounds = played(plan.scenario(0, defence), seeded(seed, "federation"))
            for _, (round_, _) in zip(range(3), rounds, strict=False):
                for truth in round_.truths:
                    assert not held & digests(replace(plan.data, inputs=truth.inputs))
                seen = threat.observe(round_, replace(plan.document.threat, actor="client"))
                assert seen.own is not None
                assert not held & digests(replace(plan.data, inputs=seen.own.inputs))


def test_a_public_record_is_not_held_out(monkeypatch):
    """One that a named data set holds too is left out of the held-out ones."""
    whole = planned().held_out
    assert whole is not None
    some = replace(whole, name="others", inputs=whole.inputs[:7], labels=whole.labels[:7])
    load = parse.__globals__["_load"]
    monkeypatch.setitem(
        parse.__globals__, "_load",
        lambda value, folder, where: some if value == "others" else load(value, folder, where),
    )  # fmt: skip
    left = planned(federation={"public": "others"}).held_out
    assert left is not None
    assert len(left) == 53
    assert not digests(left) & digests(some)


def test_a_share_is_held_out():
    assert len(planned(tradeoff={"held_out": 0.25}).held_out or ()) == round(0.25 * 1797)


def test_no_defence_is_always_measured_and_the_first_and_last_round_are_attacked():
    plan = planned(defence=[{"name": "prune"}])
    assert [*plan.defences] == ["none", "prune"]
    assert plan.document.federation.rounds == (0, 2)
    assert planned(tradeoff={"rounds": 1}).document.federation.rounds == (0,)
    assert planned(federation={"rounds": [1]}).document.federation.rounds == (1,)
    assert [*planned().defences] == ["none", "prune"]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"tradeoff": {"rounds": None}}, "tradeoff: key 'rounds' is missing"),
        ({"tradeoff": {"rounds": 0}}, "tradeoff.rounds must be between 1 and 100,000, got 0"),
        ({"tradeoff": {"rouns": 3}}, "unknown key 'rouns'; did you mean 'rounds'"),
        ({"tradeoff": {"held_out": 1.0}}, "held_out must be a whole number of records, or a share"),
        ({"tradeoff": {"held_out": 0}}, "held_out must be between 0 and"),
        ({"tradeoff": {"held_out": 1797}}, "held_out sets 1797 records aside, but digits has only"),
        ({"tradeoff": {"every": 4}}, "every is 4, but only 3 rounds are trained"),
        ({"federation": {"rounds": [0, 3]}}, "attacks stage 3, but tradeoff.rounds trains 3"),
        ({"audit": {"seeds": [0]}}, "one seed shows no spread"),
    ],
)
def test_a_wrong_table_is_refused_in_words(tables, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        planned(**tables)


def test_captured_rounds_are_not_trained(tmp_path):
    with pytest.raises(PlanError, match="captured rounds have been played"):
        planned(federation={"data": {"captured": str(tmp_path)}})


def test_a_plan_without_the_table_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(PlanError, match=r"no table \[tradeoff\]"):
        run(planned(tradeoff=None), Store(tmp_path / "out"), tradeoff=True)
    assert not (tmp_path / "out").exists()


# Training


def test_accuracy_and_leak_are_of_the_same_federation():
    """The trained federation stands, at an attacked stage, where the attacked round begins."""
    plan = planned(defence=[{"name": "none"}, {"name": "top-k", "keep": 0.1}])
    for defence in plan.defences:
        rounds = played(plan.scenario(0, defence), seeded(1, "federation"))
        models = [{n: v.clone() for n, v in m.state_dict().items()} for _, (_, m) in
                  zip(range(3), rounds, strict=False)]  # fmt: skip
        attacked = simulate(plan.scenario(2, defence), seeded(1, "federation"))
        for name, value in attacked.model.state_dict().items():
            assert torch.equal(value, models[1][name])
        end = Bench(plan, Path()).run(Training(defence, 1), lambda *step: None)
        scenario = plan.scenario(0, defence)
        model = scenario.make_model()
        model.load_state_dict(models[2])
        assert plan.held_out is not None
        assert end.accuracy == (accuracy(scenario, model, plan.held_out),)


def test_accuracy_is_the_share_of_records_named_rightly():
    class Told(nn.Module):
        """Names the class that the first pixel holds; batch norm and dropout must be at rest."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.drop = nn.Dropout(0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told = (x[:, 0, 0, 0] * 10).round().long()
            return self.drop(nn.functional.one_hot(told, 10) * self.weight)

    labels = torch.arange(10).repeat(60)
    inputs = (labels / 10).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()
    inputs[:150] = 0.0  # of these, 15 are of class 0
    data = Dataset("told", inputs, labels, tuple("0123456789"))
    scenario = Scenario(Told, data, LocalTraining())
    assert accuracy(scenario, Told(), data) == (450 + 15) / 600
    lost = Told()
    lost.weight.data.fill_(math.nan)
    assert accuracy(scenario, lost, data) == 0.0


def test_a_model_that_fails_in_eval_mode_is_named():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 1:
                raise RuntimeError("one at a time")
            return self.fc(x.flatten(1))

    data = Dataset("x", torch.rand(4, 1, 2, 2), torch.zeros(4).long(), ("a", "b"))
    with pytest.raises(InputError, match=r"eval mode on 4 held-out .*one at a time"):
        accuracy(Scenario(Picky, data), Picky(), data)


def test_accuracy_is_measured_on_the_way_and_the_defence_is_in_it():
    plan = planned(
        defence=[{"name": "clip", "norm": 1e-9}],
        tradeoff={"rounds": 5, "every": 2},
        federation={"training": {"batch_size": 32, "lr": 0.5}},
    )
    steps: list[tuple[int, int]] = []
    free = trained(plan, Training("none", 0), lambda *step: steps.append(step))
    still = trained(plan, Training("clip", 0), lambda *step: None)
    assert free.rounds == (2, 4, 5)
    assert steps == [(i, 5) for i in range(1, 6)]
    assert len(set(still.accuracy)) == 1  # nothing is learned from updates of length 1e-9
    assert len(set(free.accuracy)) > 1
    assert plan.held_out is not None
    assert free.chance == max(torch.bincount(plan.held_out.labels)).item() / 60


# Running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tradeoff") / "out"
    run(planned(), Store(out), tradeoff=True)
    return out


def test_every_setting_is_trained_for_every_seed(whole):
    result = schema.load(whole / "result.json")
    pairs = [(one.defence, one.seed) for one in result.trained]
    assert pairs == [("none", 0), ("none", 1), ("prune", 0), ("prune", 1)]
    assert [*settings(result)] == ["none", "prune"]
    assert len(list((whole / "trained").iterdir())) == 4


class Killed(BaseException):
    """Whatever ends a process."""


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_killed_between_two_units_loses_none(tmp_path, whole, after):
    done: list[str] = []

    def end(work: cases.Work, ended: object) -> None:
        if isinstance(work, Training):
            done.append(work.id)
            if len(done) == after:
                raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(planned(), Store(out), tradeoff=True, watch=Watch(end=end))
    kept = {path: path.stat().st_mtime_ns for path in (out / "trained").iterdir()}
    assert len(kept) == after
    again: list[str] = []
    watch = Watch(begin=lambda work: again.append(work.id))
    run(planned(), Store(out), tradeoff=True, resume=True, watch=watch)
    assert len(again) == 4 - after  # and no trial
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert without_times(out / "result.json") == without_times(whole / "result.json")


def test_one_and_two_jobs_give_the_same(tmp_path, whole):
    run(planned(), Store(tmp_path / "out"), tradeoff=True, jobs=2)
    assert without_times(tmp_path / "out" / "result.json") == without_times(whole / "result.json")


def test_an_audit_of_the_same_plan_trains_nothing_and_a_trade_off_continues_it(tmp_path, whole):
    out = tmp_path / "out"
    result = run(planned(), Store(out))
    assert result.trained == ()
    assert result.tradeoff is None
    begun: list[object] = []
    run(planned(), Store(out), tradeoff=True, resume=True, watch=Watch(begin=begun.append))
    assert all(isinstance(work, Training) for work in begun)
    assert without_times(out / "result.json") == without_times(whole / "result.json")


def test_what_was_trained_for_another_plan_is_not_used(tmp_path):
    store = Store(tmp_path / "out")
    plan = planned()
    run(plan, store, tradeoff=True)
    path = store.out / "trained" / "none.seed0.json"
    path.write_text(path.read_text("utf-8").replace(plan.fingerprint, "0" * 64), "utf-8")
    said: list[str] = []
    watch = Watch(say=said.append)
    run(plan, Store(store.out), tradeoff=True, resume=True, watch=watch)
    assert len(said) == 1
    assert "its federation is trained again: it is of another plan" in said[0]


def test_without_budget_nothing_is_trained_and_no_setting_is_recommended(tmp_path):
    result = run(planned(), Store(tmp_path / "out"), tradeoff=True, budget=1e-9)
    assert result.trained == ()
    assert result.tradeoff is None


def test_a_training_that_was_killed_twice_is_a_failure_and_is_tried_again(tmp_path, monkeypatch):
    plan, out = planned(), tmp_path / "out"
    crew = run.__globals__["Crew"]

    class Deadly(crew):  # type: ignore[valid-type,misc]
        def run(self, work: Iterable[Any]) -> Any:
            for one, ended in super().run(work):
                yield one, None if one == Training("prune", 1) else ended

    monkeypatch.setitem(run.__globals__, "Crew", Deadly)
    result = run(plan, Store(out), tradeoff=True)
    assert [one.status for one in result.trained] == ["done", "done", "done", "failed"]
    assert of(result).exit_code == 3
    assert settings(result)["prune"].accuracy is None
    monkeypatch.undo()
    result = run(plan, Store(out), tradeoff=True, resume=True)
    assert {one.status for one in result.trained} == {"done"}


def test_a_forecast_holds_the_trainings():
    plan = planned()
    alone, both = forecast(plan), forecast(plan, trainings=cases.trainings(plan))
    assert (alone.trainings, alone.training_seconds) == (0, 0.0)
    assert both.trainings == 4
    assert 0 < both.training_seconds < both.cpu_seconds
    longer = planned(tradeoff={"rounds": 300})
    much = forecast(longer, trainings=cases.trainings(longer))
    assert much.training_seconds > 10 * both.training_seconds


# What follows


def test_an_interval_is_that_of_student():
    values = [0.91, 0.94, 0.9, 0.93, 0.97]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 4, statistics.fmean(values), stats.sem(values))
    assert found.interval == pytest.approx((low, high), abs=1e-5)
    assert estimate([0.99, 1.0, 0.95], least=0.0).interval[1] == 1.0


def test_cost_is_paired_by_seed(tmp_path):
    """Seeds differ by far more than the defence costs: only pairs show that it costs something."""
    free = [0.5, 0.7, 0.9]
    result = traded(
        tmp_path, {"none": free, "prune": [a - c for a, c in zip(free, (0.01, 0.02, 0.03),
        strict=True)]}, {"none": 1.0, "prune": 0.0},
    )  # fmt: skip
    cost = settings(result)["prune"].cost
    assert cost is not None
    assert cost.mean == pytest.approx(0.02)
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert cost.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-5)
    assert settings(result)["none"].cost == estimate([0.0] * 3)


ACCURATE = {"none": [0.92, 0.94, 0.93], "prune": [0.9, 0.91, 0.92], "sign": [0.8, 0.82, 0.81]}


def test_the_front_is_what_nothing_beats(tmp_path):
    names = ("none", "prune", "sign", "top-k", "clip")
    means = (0.9, 0.8, 0.85, 0.7, 0.7)
    shares = (1.0, 0.5, 0.5, 0.2, 0.2)
    spread = (-0.01, 0.0, 0.01)
    result = traded(
        tmp_path,
        {name: [mean + one for one in spread] for name, mean in zip(names, means, strict=True)},
        dict(zip(names, shares, strict=True)),
    )
    assert [name for name, one in settings(result).items() if one.front] == [
        "none",
        "sign",  # beats prune: as little leak, more accuracy
        "top-k",  # and clip, which is its equal
        "clip",
    ]
    lone = settings(result)["prune"]
    assert on_front(lone, [lone])


def test_the_setting_that_meets_the_limit_at_the_least_cost_is_recommended(tmp_path):
    leaks = {"none": 1.0, "prune": 0.0, "sign": 0.0}
    given = of(result := traded(tmp_path, ACCURATE, leaks))
    assert (given.choice, given.recommended, given.ties) == ("recommended", "prune", ())
    assert given.exit_code == 0
    words = given.sentence
    assert words.startswith("Use prune (share = 0.99): it stays below the plan's limit and costs")
    assert "costs 2.0 points of accuracy, the least of the 2 settings that do" in words
    assert "91.0 % instead of 93.0 % after 20 rounds, on 400 held-out records" in words
    # What reassures carries its evidence.
    assert "on 60 records of 3 seeds, against 2 attacks (analytic and inverting-gradients)" in words
    found = settings(result)["prune"].leak
    assert found is not None
    assert f"at most {100 * found.leak.interval[1] / 0.2:.0f} % of what the plan allows" in words
    assert "learns little" not in words


def test_the_plan_s_order_does_not_matter(tmp_path):
    turned = dict(reversed(ACCURATE.items()))
    given = of(traded(tmp_path, turned, {"none": 1.0, "prune": 0.0, "sign": 0.0}))
    assert given.recommended == "prune"


def test_ties_are_named(tmp_path):
    near = ACCURATE | {"sign": [0.91, 0.9, 0.91]}
    given = of(traded(tmp_path, near, {"none": 1.0, "prune": 0.0, "sign": 0.0}))
    assert (given.recommended, given.ties) == ("prune", ("sign",))
    assert "sign cannot be told from it in accuracy." in given.sentence


def test_a_tie_is_judged_by_pairs(tmp_path):
    """Their intervals overlap, but one is better for every seed, by as much."""
    free = [0.6, 0.75, 0.9]
    near = {"none": free, "prune": [a - 0.02 for a in free], "sign": [a - 0.03 for a in free]}
    given = of(result := traded(tmp_path, near, {"none": 1.0, "prune": 0.0, "sign": 0.0}))
    prune, sign = (settings(result)[name].accuracy for name in ("prune", "sign"))
    assert prune is not None
    assert sign is not None
    assert prune.interval[0] < sign.mean
    assert given.ties == ()


def test_no_defence_can_be_recommended(tmp_path):
    given = of(traded(tmp_path, ACCURATE, dict.fromkeys(ACCURATE, 0.0)))
    assert given.recommended == "none"
    assert given.sentence.startswith("No defence is needed to stay below the plan's limit")


def test_a_setting_that_learns_nothing_is_said_to(tmp_path):
    lost = ACCURATE | {"prune": [0.1, 0.11, 0.12]}
    given = of(traded(tmp_path, lost, {"none": 1.0, "prune": 0.0, "sign": 1.0}))
    assert given.recommended == "prune"
    assert "It is the only setting that does." in given.sentence
    assert "the model learns little: always naming the most frequent class gives 11.0 %" in (
        given.sentence
    )


def test_none_is_recommended_where_none_meets_the_limit_and_the_nearest_is_named(tmp_path):
    given = of(traded(tmp_path, ACCURATE, {"none": 1.0, "prune": 0.6, "sign": 0.8}))
    assert (given.choice, given.exit_code, given.nearest) == ("none", 1, "prune")
    assert given.recommended is None
    assert given.sentence.startswith("None of the 3 tested settings stays below the plan's limit.")
    assert "Nearest to it came prune (share = 0.99): 36 of 60 records" in given.sentence


def test_an_inconclusive_setting_is_never_recommended(tmp_path):
    """Cheaper than the one that is taken, but on too few records."""
    leaks = {"none": 1.0, "prune": 0.15, "sign": 0.0}
    given = of(result := traded(tmp_path, ACCURATE, leaks))
    assert settings(result)["prune"].outcome == "inconclusive"
    assert given.recommended == "sign"
    leaks["sign"] = 0.15
    given = of(traded(tmp_path / "both", ACCURATE, leaks))
    assert (given.choice, given.exit_code, given.recommended) == ("undecided", 4, None)
    assert "of prune (share = 0.99) and sign this cannot be told yet" in given.sentence
    assert re.search(r"Attack at least \d+ more records: add `seeds` in \[audit\]", given.sentence)


LEAKS = {"none": 1.0, "prune": 0.0, "sign": 0.0}


def crashed(result: Result) -> Result:
    def one(trial: Any) -> Any:
        hit = trial.kind == "trial" and trial.defence == "prune" and trial.seed == 0
        return failed(trial, "it broke", "") if hit else trial

    return replace(result, trials=tuple(map(one, result.trials)))


def cut(result: Result) -> Result:
    return replace(result, not_run=(NotRun("round0.prune.dlg.seed7", "dlg", "no time"),))


def untrained(result: Result) -> Result:
    left = [o for o in result.trained if (o.defence, o.seed) != ("prune", 2)]
    return replace(result, trained=tuple(left))


@pytest.mark.parametrize(
    ("change", "outcome", "recommended", "code"),
    [
        (crashed, "failed", "sign", 3),
        (cut, "inconclusive", "sign", 0),
        (untrained, "below the limit", None, 4),
    ],
)
def test_a_setting_of_which_something_is_missing_is_not_recommended(
    tmp_path, change: Callable[[Result], Result], outcome, recommended, code
):
    result = rederive(change(traded(tmp_path, ACCURATE, LEAKS)))
    assert settings(result)["prune"].outcome == outcome
    assert (of(result).recommended, of(result).exit_code) == (recommended, code)
    if change is untrained:
        assert "prune (share = 0.99) stayed below the limit, but what that costs is not known" in (
            of(result).sentence
        )


def test_without_the_reference_nothing_is_recommended(tmp_path):
    result = traded(tmp_path, ACCURATE, LEAKS)
    gone = [one for one in result.trained if (one.defence, one.seed) != ("none", 0)]
    result = rederive(replace(result, trained=tuple(gone)))
    assert of(result).recommended is None


def test_a_kind_of_which_everything_is_allowed_does_not_count(tmp_path):
    """All labels are read under every setting, which the plan allows."""
    worst = {one.worst for one in settings(traded(tmp_path, ACCURATE, LEAKS)).values()}
    assert worst <= {"pictures", "found"}


def test_a_leak_is_a_multiple_of_its_limit(tmp_path):
    found = settings(traded(tmp_path, ACCURATE, {"none": 1.0, "prune": 0.4, "sign": 0.0}))
    leaks = {name: one.leak.leak for name, one in found.items() if one.leak}
    assert used(leaks["prune"]) == pytest.approx(0.4 / 0.2, abs=0.01)
    assert used(leaks["none"]) == pytest.approx(5.0)
    assert used(replace(leaks["prune"], limit=0.0)) == pytest.approx(40, abs=1)


def test_a_result_without_trainings_has_no_trade_off(tmp_path):
    result = traded(tmp_path, ACCURATE, LEAKS)
    assert compare(replace(result, trained=())) is None
    assert compare(replace(result, plan=replace(result.plan, tradeoff=None))) is None


# The file


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads(path.read_text("utf-8"))
    change(table)
    path.write_text(json.dumps(table), "utf-8")


def lie(table: dict[str, Any]) -> None:
    table["tradeoff"]["recommended"] = "sign"


def cheaper(table: dict[str, Any]) -> None:
    table["tradeoff"]["settings"][1]["cost"]["mean"] = 0.001


def better(table: dict[str, Any]) -> None:
    table["trained"][3]["accuracy"] = [0.99]


def drop(table: dict[str, Any]) -> None:
    table["tradeoff"] = None


@pytest.mark.parametrize("change", [lie, cheaper, better, drop])
def test_an_edited_result_is_refused(tmp_path, change):
    result = traded(tmp_path, ACCURATE, LEAKS)
    result = replace(result, versions=result.versions | {"torch": str(torch.__version__)})
    path = save(tmp_path, result)
    assert schema.load(path) == result
    edited(path, change)
    with pytest.raises(InputError, match="tradeoff does not follow from the trials in this file"):
        schema.load(path)


@pytest.mark.parametrize("change", [lie, drop])
def test_another_version_may_count_differently_but_recommend_nothing_else(tmp_path, change):
    result = traded(tmp_path, ACCURATE, LEAKS)
    path = save(tmp_path, replace(result, versions=result.versions | {"torch": "0.0"}))
    edited(path, cheaper)
    assert of(schema.load(path)).recommended == "prune"
    edited(path, change)
    with pytest.raises(InputError, match="another setting is recommended"):
        schema.load(path)


def longer(table: dict[str, Any]) -> None:
    table["trained"][0]["accuracy"] = [0.5, 0.6]


def impossible(table: dict[str, Any]) -> None:
    table["trained"][0]["accuracy"] = [1.5]


@pytest.mark.parametrize(
    ("change", "words"),
    [(longer, "expected 1 numbers, one per round"), (impossible, "between 0 and 1")],
)
def test_impossible_trainings_are_refused(tmp_path, change, words):
    traded(tmp_path, ACCURATE, LEAKS)
    edited(tmp_path / "result.json", change)
    with pytest.raises(InputError, match=words):
        schema.load(tmp_path / "result.json")


def test_a_file_without_trainings_is_read_as_before(tmp_path, whole):
    run(planned(), Store(tmp_path / "out"))
    path = tmp_path / "out" / "result.json"
    edited(path, lambda table: (table.pop("trained"), table.pop("tradeoff")))
    assert schema.load(path).tradeoff is None


# The report


def test_the_report_says_it_first_and_shows_the_figure_before_the_table(tmp_path):
    spent = {"prune": Budget(8.25, 1e-5, "over 20 rounds")}
    result = traded(tmp_path, ACCURATE, LEAKS, every=5, spent=spent)
    page = unescape(html.render(result, tmp_path)).replace("\xa0", " ")
    first = page.split("</section>")[0]
    assert "Use prune (share = 0.99): it stays below" in first
    section = page.split('<section id="tradeoff">')[1].split("</section>")[0]
    assert section.index("<svg") < section.index("<table")
    assert section.index("<table") < section.index("Recommendation.")
    for words in ("93.0 %", "reference", "2.0 points", "recommended", "rounds ε = 8.25, δ = 1e-05",
                  "no defence", "round 5", "meets the plan's limit"):  # fmt: skip
        assert words in section
    assert "in accuracy was not measured" not in page
    assert page.index('id="tradeoff"') < page.index('id="findings"')


def test_without_a_trade_off_the_page_says_that_cost_was_not_measured(tmp_path):
    result = replace(traded(tmp_path, ACCURATE, LEAKS), trained=(), tradeoff=None)
    page = html.render(result, tmp_path)
    assert 'id="tradeoff"' not in page
    assert "in accuracy was not measured" in page


def test_markdown_pdf_and_terminal_say_the_same(tmp_path, capsys):
    result = traded(tmp_path, ACCURATE, LEAKS, every=5)
    text = markdown.render(result, tmp_path).replace("\xa0", " ")
    assert "## What protection costs" in text
    assert "| 2 | prune share = 0.99 **recommended** | 91.0 % (" in text
    assert "Use prune (share = 0.99)" in text
    written = write(tmp_path, "hide", with_pdf=True)
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert len(written) == 3
    from rich.console import Console

    console = Console(width=80)
    console.print(terminal.tradeoff_table(result, of(result)))
    shown = capsys.readouterr().out
    assert "recommended" in shown
    assert "…" not in shown


def test_no_name_becomes_a_tag(tmp_path):
    result = traded(tmp_path, ACCURATE, LEAKS, text=HOSTILE)
    page = html.render(result, tmp_path)
    assert "<script>window" not in page
    assert "<img src=x" not in page


def point(number: int, leak: float, accuracy: float, **changes: Any) -> scatter.Point:
    given: dict[str, Any] = {
        "leaks": (leak, leak + 0.1), "accuracies": (accuracy - 0.01, accuracy + 0.01),
        "state": "meets", "front": False, "chosen": False,
    } | changes  # fmt: skip
    return scatter.Point(number=number, leak=leak, accuracy=accuracy, **given)


@pytest.mark.parametrize("count", [1, 2, 12, 30])
def test_numbers_do_not_overlap_and_stay_on_their_side_of_the_limit(count):
    crowd = [point(i, 0.9 + 0.02 * i, 0.9 + 0.001 * i, chosen=i == 3) for i in range(count)]
    marks = scatter.scatter(crowd)
    (limit,) = [mark for mark in marks if mark.kind == "limit"]
    bubbles = [mark for mark in marks if mark.shape == "bubble"]
    assert len(bubbles) == count
    for i, one in enumerate(bubbles):
        assert scatter.LEFT <= one.x <= 1
        assert 0 < one.y < scatter.BOTTOM
        # A point may stand on its own place; displaced, it stays on its side of the limit.
        assert (one.x <= limit.x + 1e-9) == (crowd[i].leak <= 1)
        for other in bubbles[i + 1 :]:
            far = math.hypot((one.x - other.x) * scatter.WIDTH, one.y - other.y)
            assert far >= 2 * scatter.RADIUS
    assert len([mark for mark in marks if mark.shape == "ring"]) == (count > 3)


def test_the_paper_knows_every_mark():
    crowd = [point(i, 0.5, 0.9, front=True, chosen=i == 1) for i in range(4)]
    others = [point(5, 2.0, 0.8, state="leaks"), point(6, 0.7, 0.7, state="open")]
    kinds = {mark.kind for mark in scatter.scatter([*crowd, *others])}
    assert pdf.OF_SCATTER.keys() <= kinds <= (pdf.KINDS | pdf.OF_SCATTER).keys()


def test_the_figure_places_leak_to_the_right_and_accuracy_upwards():
    marks = scatter.scatter([point(1, 0.0, 0.5), point(2, 4.0, 0.9, state="leaks")])
    one, two = (mark for mark in marks if mark.shape == "bubble")
    (limit,) = (mark for mark in marks if mark.kind == "limit")
    assert one.x < limit.x < two.x
    assert two.y < one.y
    assert (one.kind, two.kind) == ("bubble meets", "bubble leaks")


def test_a_setting_that_was_not_trained_is_in_the_table_and_not_in_the_figure(tmp_path):
    result = rederive(untrained(traded(tmp_path, ACCURATE, LEAKS)))
    assert sum(mark.shape == "bubble" for mark in protection.figure(of(result))) == 2
    assert protection.priced(result, of(result))[1].accuracy == "–"


# The command


PLAN = """
[federation]
data = "digits"
model = { name = "mlp", hidden = [8] }
clients = 2
training = { batch_size = 1 }
rounds = [0]
[[attack]]
name = "analytic"
[[defence]]
name = "prune"
[audit]
seeds = [0, 1]
gallery = 20
explain = false
exact = false
[tradeoff]
rounds = 2
"""


def test_the_command_ends_with_the_code_of_the_choice(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, "utf-8")
    out = tmp_path / "out"
    ended = CliRunner().invoke(app, ["tradeoff", str(path), "--out", str(out)])
    result = schema.load(out / "result.json")
    assert ended.exit_code == of(result).exit_code
    assert "What protection costs" in ended.output
    assert (out / "report.html").exists()
    loose = PLAN.replace("[audit]", "[audit]\nlimit = { share = 1.0, found = 1.0, labels = 1.0 }")
    path.write_text(loose, "utf-8")
    ended = CliRunner().invoke(app, ["tradeoff", str(path), "--out", str(out), "--overwrite"])
    assert ended.exit_code == 0
    assert "No defence is needed" in " ".join(ended.output.split())
    checked = CliRunner().invoke(app, ["check", str(path)])
    assert "and 4 trainings" in checked.output


def test_a_budget_that_trains_nothing_is_inconclusive(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, "utf-8")
    ended = CliRunner().invoke(
        app, ["tradeoff", str(path), "--out", str(tmp_path / "out"), "--budget", "0.000001s"]
    )
    assert ended.exit_code == 4
