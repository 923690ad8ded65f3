"""The forecast and the budget, with costs that are counted, not timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from leakgauge.attacks import Analytic, Begun
from leakgauge.audit import Plan, Store, Watch, forecast, parse, run
from leakgauge.audit import fit as fitting
from leakgauge.audit.fit import fit
from leakgauge.errors import NotApplicable
from leakgauge.types import (
    Here,
    Kept,
    Knowledge,
    LocalTraining,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)


class Clock:
    """Time passes only where a test says so."""

    now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ours = Clock()
    monkeypatch.setattr(time, "process_time", lambda: ours.now)
    monkeypatch.setattr(time, "monotonic", lambda: ours.now)
    return ours


def records(training: LocalTraining) -> int:
    return training.steps * training.batch_size


@dataclass(frozen=True)
class Search:
    """Costs a set-up, and for each iteration something for each record; restarts repeat half."""

    clock: Clock
    iterations: int = 100
    restarts: int = 1
    setup: float = 2.0
    each: float = 0.1
    value: float = 0.5
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records"})

    def shortened(self, iterations: int, restarts: int) -> Search:
        return replace(self, iterations=iterations, restarts=restarts)

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        assert seen.training is not None
        work = records(seen.training)
        self.clock.spend(self.setup)
        self.clock.spend(self.each * work * self.iterations)
        self.clock.spend((self.restarts - 1) * (0.5 + self.each * work * self.iterations / 2))
        return Reconstruction(
            torch.full((seen.records or 1, *seen.record.shape), self.value), None, residual=0.0
        )


@dataclass(frozen=True)
class Whole:
    """Costs what it costs: there is nothing to shorten."""

    clock: Clock
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        self.clock.spend(7.0)
        return Reconstruction(
            torch.zeros(seen.records or 1, *seen.record.shape), None, residual=0.0
        )


@dataclass(frozen=True)
class Never(Whole):
    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        raise NotApplicable("not here")


@dataclass(frozen=True)
class Slow:
    """A defence that takes its time, on every client of every round."""

    clock: Clock

    def announced(self) -> dict[str, object]:
        return {}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        self.clock.spend(0.25)
        return update


def planned(clock: Clock, attacks: dict[str, Any], **tables: Any) -> Plan:
    table: dict[str, Any] = {
        "federation": {"data": "digits", "model": {"name": "mlp", "hidden": [8]}},
        "attack": [{"name": "analytic"}],
        "audit": {"seeds": [0, 1, 2], "gallery": 20, "exact": False},
    }
    for key, value in tables.items():
        table[key] = table[key] | value
    plan = parse(table, "counted", Path.cwd())
    return replace(plan, attacks=attacks, asked=tuple(attacks))


def spent(result: dict[str, Any]) -> float:
    return float(result.times.cpu_seconds)


HARD = {"training": {"batch_size": 4, "steps": 3, "momentum": 0.5}}


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        ({"audit": {"control": False}}, {}),
        ({"audit": {"control": False}}, {"iterations": 5}),
        ({"audit": {"control": False}}, {"iterations": 5000}),
        ({"audit": {"control": False}}, {"each": 1e-5, "iterations": 20_000}),
        ({"audit": {"control": False}}, {"restarts": 4}),
        ({"audit": {"explain": False}, "federation": HARD}, {}),
        ({"federation": HARD}, {}),
        ({"federation": HARD}, {"restarts": 3}),
        ({}, {}),
    ],
)
def test_a_forecast_of_counted_costs_is_what_the_audit_takes(
    tmp_path: Path, clock: Clock, tables: dict[str, Any], options: dict[str, Any]
) -> None:
    plan = planned(clock, {"search": Search(clock, **options)}, **tables)
    found = forecast(plan)
    actual = spent(run(plan, Store(tmp_path)))
    assert actual > 0
    assert found.cpu_seconds == pytest.approx(actual, rel=1e-6)
    assert found.low == pytest.approx(0.75 * actual, rel=1e-6)
    assert found.high == pytest.approx(1.25 * actual, rel=1e-6)


def test_the_start_of_a_hybrid_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    first, search = Search(clock, setup=30.0), Search(clock, iterations=60)
    attacks = {"first": first, "hybrid": Begun(first, search)}
    plan = planned(clock, attacks, audit={"control": False})
    found = forecast(plan)
    assert {one.attack: one.cpu_seconds for one in found.attacks} == pytest.approx(
        {"first": 30 + 10, "hybrid": 30 + 10 + 2 + 6}
    )
    assert found.cpu_seconds == pytest.approx(spent(run(plan, Store(tmp_path))), rel=1e-6)


def test_every_attack_of_a_plan_is_counted(tmp_path: Path, clock: Clock) -> None:
    attacks = {"search": Search(clock), "whole": Whole(clock), "never": Never(clock)}
    plan = planned(clock, attacks, audit={"explain": False}, federation=HARD)
    heard: list[str] = []
    found = forecast(plan, heard.append)
    assert found.cpu_seconds == pytest.approx(spent(run(plan, Store(tmp_path))), rel=1e-6)
    assert {one.attack: one.reason for one in found.attacks} == {
        "search": None, "whole": None, "never": "not here",
    }  # fmt: skip
    assert {one.attack: one.cpu_seconds for one in found.attacks} == pytest.approx(
        {"search": 2 + 0.1 * 12 * 100, "whole": 7.0, "never": 0.0}
    )
    assert set(heard) == set(attacks)


def test_the_interval_holds_whichever_attack_climbs_the_ladder(
    tmp_path: Path, clock: Clock
) -> None:
    costs = {"cheap": Search(clock, each=0.01), "dear": Search(clock, each=1.0, value=0.2)}
    plan = planned(clock, dict(costs), federation=HARD)
    found = forecast(plan)
    actual = spent(run(plan, Store(tmp_path)))
    assert found.low < actual < found.high
    assert found.low < 0.75 * found.cpu_seconds
    assert found.high > 1.25 * found.cpu_seconds


@dataclass(frozen=True)
class Exact:
    """Reads the picture itself where it can, for what it costs."""

    clock: Clock
    needs: ClassVar[frozenset[Knowledge]] = Analytic.needs

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        self.clock.spend(1.0)
        return Analytic().reconstruct(seen, rng)


def test_an_attack_that_is_exact_on_the_twin_is_the_one_that_climbs(
    tmp_path: Path, clock: Clock
) -> None:
    attacks = {"costly": Search(clock, each=1.0), "exact": Exact(clock)}
    plan = planned(clock, attacks, federation=HARD | {"model": {"name": "mlp", "hidden": [64]}})
    found = forecast(plan)
    result = run(plan, Store(tmp_path))
    assert result.explanation.attack == "exact"
    assert found.cpu_seconds == pytest.approx(spent(result), rel=1e-6)


def test_rounds_that_are_played_before_are_counted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = {"clients": 2, "rounds": [0, 5]}
    plan = planned(
        clock, {"search": Search(clock)}, federation=federation, audit={"control": False}
    )
    plan = replace(plan, defences={"slow": Slow(clock), "slow-2": Slow(clock)})
    made = type(plan)._make_model

    def slowly(self: Plan) -> nn.Module:
        clock.spend(3.0)
        return made(self)

    monkeypatch.setattr(type(plan), "_make_model", slowly)
    found = forecast(plan)
    assert found.cpu_seconds == pytest.approx(spent(run(plan, Store(tmp_path))), rel=1e-6)


def test_a_limit_of_seconds_is_in_the_forecast(clock: Clock) -> None:
    audit = {"control": False, "seconds": 4.0}
    plan = planned(clock, {"search": Search(clock)}, audit=audit)
    [one] = forecast(plan).attacks
    assert one.cpu_seconds == pytest.approx(2 + 3 * 0.1 + 4.0)


@dataclass(frozen=True)
class Fit(Search):
    """Fits something first: so many steps, a second each and one for the start."""

    steps: int = 50
    shows: bool = True
    wrong: Exception | None = None
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        assert resources is not None
        self.clock.spend(1.0)
        if self.wrong:
            raise self.wrong
        ends = self.clock.now + (resources.seconds or 1e9)
        for step in range(self.steps):
            if self.clock.now >= ends and self.shows:
                break
            self.clock.spend(1.0)
            if resources.progress and self.shows:
                resources.progress(step + 1, self.steps, 0.1)
        return Preparation(Kept())


@dataclass(frozen=True)
class FitAlone(Whole):
    """It prepares, and has no iterations."""

    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        self.clock.spend(20.0)
        return Preparation(Kept())


@pytest.mark.parametrize(
    "tables",
    [
        {"audit": {"control": False}},
        {"federation": HARD},
        {"federation": HARD | {"rounds": [0, 2]}, "audit": {"explain": False}},
        {"federation": HARD | {"checkpoint": True}},
    ],
)
@pytest.mark.parametrize("shows", [True, False])
def test_what_is_prepared_is_counted_once_for_the_trials_that_share_it(
    tmp_path: Path, clock: Clock, tables: dict[str, Any], shows: bool
) -> None:
    federation = tables.get("federation", {})
    if "checkpoint" in federation:
        weights = tmp_path / "weights.pt"
        torch.save(planned(clock, {})._make_model().state_dict(), weights)
        tables = tables | {"federation": federation | {"checkpoint": str(weights)}}
    plan = planned(clock, {"fit": Fit(clock, shows=shows)}, **tables)
    plan = replace(plan, defences={"none": None, "same": None})
    found = forecast(plan)
    [one] = found.attacks
    assert one.preparing == pytest.approx(51)
    work = records(plan.document.federation.training)
    assert one.cpu_seconds == pytest.approx(2 + 0.1 * work * 100)
    assert clock.now < 51 or not shows or federation
    result = run(plan, Store(tmp_path / "out"))
    prepared = sum(trial.times.preparing for trial in result.trials)
    assert prepared == pytest.approx(51 * round(prepared / 51))
    assert prepared < 51 * len(result.trials)
    assert found.cpu_seconds == pytest.approx(spent(result), rel=1e-6)


class Idle(Slow):
    """A defence that does nothing."""

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return update


def test_a_rung_that_meets_what_a_trial_prepared_costs_no_more(
    tmp_path: Path, clock: Clock
) -> None:
    """The last rung but one is the trial without its defence, which changes no model."""
    plan = planned(clock, {"fit": Fit(clock)}, federation=HARD)
    plan = replace(plan, defences={"idle": Idle(clock)})
    found = forecast(plan)
    result = run(plan, Store(tmp_path))
    assert result.explanation.rungs[-1].factor == "defence"
    assert found.cpu_seconds == pytest.approx(spent(result), rel=1e-6)


def test_a_preparation_of_an_attack_without_iterations_is_counted(
    tmp_path: Path, clock: Clock
) -> None:
    plan = planned(clock, {"alone": FitAlone(clock)}, audit={"control": False})
    found = forecast(plan)
    assert [(one.cpu_seconds, one.preparing) for one in found.attacks] == [(7.0, 20.0)]
    assert found.cpu_seconds == pytest.approx(spent(run(plan, Store(tmp_path)))) == 3 * 27


def test_what_was_fitted_before_is_not_counted_again(tmp_path: Path, clock: Clock) -> None:
    plan = planned(clock, {"fit": Fit(clock)}, federation=HARD)
    [*made] = fit(plan, Store(tmp_path))
    assert [one.cpu_seconds for one in made] == [51.0] * len(made)
    result = run(plan, Store(tmp_path), calibrate=True)
    assert not any(trial.times.preparing for trial in result.trials)
    assert {trial.times.fit for trial in result.trials} == {51.0}
    assert result.times.forecast is not None
    assert result.times.forecast.cpu_seconds == pytest.approx(spent(result), rel=1e-6)


def test_a_forecast_of_fits_is_what_they_take(tmp_path: Path, clock: Clock) -> None:
    plan = planned(clock, {"fit": Fit(clock)}, federation=HARD)
    told = fitting.planned(plan, tmp_path)
    assert [one.cpu_seconds for one in told] == [51.0] * len(told)
    listed: list[float] = []
    fit(plan, Store(tmp_path), fitting.Watch(listed=lambda _: listed.append(clock.now)))
    assert clock.now - listed[0] == pytest.approx(51.0 * len(told))


def test_a_limit_of_seconds_is_one_of_the_preparation_too(clock: Clock) -> None:
    plan = planned(clock, {"fit": Fit(clock)}, audit={"control": False, "seconds": 10.0})
    [one] = forecast(plan).attacks
    assert one.preparing == 10


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (NotApplicable("not this model"), "not this model"),
        (ValueError("oh"), "it crashes (ValueError: oh)"),
    ],
)
def test_why_nothing_can_be_prepared_is_said(clock: Clock, wrong: Exception, words: str) -> None:
    plan = planned(clock, {"fit": Fit(clock, wrong=wrong)}, audit={"control": False})
    [one] = forecast(plan).attacks
    assert (one.reason, one.preparing) == (words, 0.0)


def test_a_watcher_hears_of_the_calibration(tmp_path: Path, clock: Clock) -> None:
    heard: list[Any] = []
    watch = Watch(calibrate=heard.append, expect=heard.append)
    plan = planned(clock, {"whole": Whole(clock)}, audit={"control": False})
    result = run(plan, Store(tmp_path), calibrate=True, watch=watch)
    assert heard == ["whole", 3]
    assert result.times.forecast.low == pytest.approx(0.75 * 21)
    assert result.times.forecast.error == pytest.approx(0)


# ---------------------------------------------------------------- budget


@pytest.mark.parametrize(("budget", "done"), [(6.0, 1), (13.9, 1), (14.0, 2), (20.9, 2), (21.0, 3)])
def test_a_trial_starts_only_if_its_like_would_end_in_time(
    tmp_path: Path, clock: Clock, budget: float, done: int
) -> None:
    plan = planned(clock, {"whole": Whole(clock)}, audit={"control": False})
    result = run(plan, Store(tmp_path), budget=budget)
    assert [trial.seed for trial in result.trials] == list(range(done))
    assert clock.now == 7 * done
    assert len(result.not_run) == 3 - done
