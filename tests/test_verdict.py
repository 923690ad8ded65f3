"""What an audit says of itself: controls, ladder, checks, verdict, exit codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakgauge.attacks import Exposure, LayerExposure
from leakgauge.audit import Store, forecast, parse, run, schema
from leakgauge.audit.advice import capped
from leakgauge.audit.cases import controls, ladder, trials
from leakgauge.audit.checks import OF_FOUND, OF_SCORE, caveats
from leakgauge.audit.document import Document, Federation, Limit, Measure
from leakgauge.audit.ladder import FACTORS, describe, factors, weakened
from leakgauge.audit.results import (
    Audited,
    Explanation,
    Found,
    LabelScore,
    NotRun,
    Result,
    Rung,
    RunTimes,
    Score,
    Times,
    Trial,
    Verdict,
)
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.summary import derived, explain, summarise
from leakgauge.audit.verdict import beyond, leaking, measurements, recognised, weigh, wilson
from leakgauge.defences import Clip
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.fl import Scenario
from leakgauge.metrics import METRICS
from leakgauge.types import Dataset, LocalTraining, Metric, Reconstruction, ThreatModel

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
    assert describe(HARD, factor, "clip") != describe(weakened(HARD, ()), factor, "none")


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
    assert [case.seed for case in last] == [0, 1, 2]  # all of the plan: the number of the table
    for (_, below), (factor, above) in pairwise(rungs):
        gained = set(factors(above[0].scenario(plan), "server")) - set(
            factors(below[0].scenario(plan), "server")
        )
        assert gained == {factor}


def ladder_of(*steps: tuple[str, float | None]) -> tuple[Explanation, dict[str, Trial]]:
    """A ladder of (factor, median), and its trials."""
    found = {
        str(i): trial(psnr, records=1) for i, (_, psnr) in enumerate(steps) if psnr is not None
    }
    rungs = [Rung(factor, f"to {factor}", (str(i),)) for i, (factor, _) in enumerate(steps)]
    return Explanation("ig", tuple(rungs)), found


LEAKS = Verdict("leaks", 1, "", (), (), None, Limit(), 0, {}, (), None)


def test_the_rung_that_falls_most_is_named_with_what_is_left() -> None:
    told = explain(*ladder_of(("twin", 40.0), ("batch", 35.0), ("steps", 12.0)), LEAKS)
    assert [row.change for row in told.rungs] == [None, -5.0, -23.0]
    assert "the steps (to steps): the median falls from 35.0 dB to 12.0 dB, below the limit" in (
        told.sentence
    )
    assert "no protection" not in told.sentence
    layers = (LayerExposure("conv", 16, 512, 31, ""),)
    shown = Exposure(8, 8, 2, True, 31, "conv", layers, "")
    for factor, words in {
        "steps": True,
        "batch norm": True,
        "batch": True,
        "defence": False,
    }.items():
        rungs = ladder_of(("twin", 40.0), (factor, 12.0))
        hidden = replace(shown, views=32, exposed=False)
        assert ("That is no protection" in explain(*rungs, LEAKS, [shown]).sentence) == words
        assert "That is no protection" not in explain(*rungs, LEAKS, [hidden]).sentence
    left = explain(*ladder_of(("twin", 150.0), ("defence", 27.0)), LEAKS)
    assert "from over 50 dB to 27.0 dB, still above the limit of 15 dB" in left.sentence
    assert "the attack does not know it" in left.sentence
    ladder, found = ladder_of(("twin", 150.0), ("defence", 27.0))
    knowing = {id_: replace(one, found=Found(1, None, 0.0, adapted="knows"))
               for id_, one in found.items()}  # fmt: skip
    assert "still above the limit of 15 dB, from an attacker who knows it." in (
        explain(ladder, knowing, LEAKS).sentence
    )
    assert left.rungs[1].change == -23.0  # decibels beyond 50 are no difference


def test_where_nothing_falls_both_ends_are_named() -> None:
    even = explain(*ladder_of(("twin", 40.0), ("batch", 39.0)), LEAKS)
    assert "No factor that was tested hinders ig" in even.sentence
    assert "40.0 dB on the weakest twin and 39.0 dB" in even.sentence


@pytest.mark.parametrize("steps", [
    [("twin", 40.0), ("batch", None)],
    [("twin", None), ("batch", 20.0)],
    [("twin", 40.0), ("batch", 20.0), ("steps", None)],
    [("twin", None), ("batch", None)],
])  # fmt: skip
def test_no_number_is_invented_for_a_rung_that_was_not_run(steps: list[Any]) -> None:
    told = explain(*ladder_of(*steps), LEAKS).sentence
    assert "too few trials" in told
    assert "0.0 dB" not in told


@pytest.mark.parametrize("outcome", ["inconclusive", "failed"])
def test_what_protects_is_not_said_without_a_verdict(outcome: str) -> None:
    told = explain(*ladder_of(("twin", 40.0), ("batch", 12.0)), replace(LEAKS, outcome=outcome))
    assert told.sentence.startswith("What protects cannot be said")


def test_a_plan_that_was_not_run_whole_is_not_called_below() -> None:
    skipped = NotRun("x", "ig", "the budget of 9 s was spent")
    verdict = audited(trial(), not_run=(skipped,)).verdict
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 4)
    assert "1 trial of the plan did not run (the budget" in verdict.headline
    assert "--resume" in verdict.next[0]


def test_a_psnr_beyond_meaning_is_capped_in_words() -> None:
    assert [capped(50.0), capped(50.1), capped(-1.0)] == ["50.0 dB", "over 50 dB", "-1.0 dB"]


# Checks.


SOUND = Found(
    guesses=2,
    labels=(0, 1),
    residual=0.0,
    history=tuple(1.0 / (i + 1) ** 0.01 for i in range(100)),
    iterations=100,
    objectives=(0.5,),
)


def scored(psnr: tuple[float, ...] = (20.0, 22.0), accuracy: float = 0.5) -> Score:
    base = {"psnr": (11.0, 12.0)}
    return Score(2, {"psnr": psnr}, base, base, 0.1, LabelScore((0, 1), accuracy, 0.2, 0.2))


SUSPECT: dict[str, tuple[Found, Score]] = {
    "still falling": (replace(SOUND, history=tuple(100.0 - i for i in range(100))), scored()),
    "restarts disagree": (replace(SOUND, objectives=(0.1, None, 0.9)), scored()),
    "zero gradients": (replace(SOUND, zero_tensors=0.25), scored()),
    "derivative differed": (replace(SOUND, differed=0.1), scored()),
    "cut short": (replace(SOUND, stopped="time", iterations=5), scored()),
    "labels below baseline": (SOUND, scored(accuracy=0.1)),
    "equals the prior": (SOUND, scored((11.2, 12.1))),
    "invented": (SOUND, replace(scored(), prior_only={"psnr": (7.0, 9.0)})),
}


def test_a_sound_trial_has_no_caveat() -> None:
    assert caveats(SOUND, scored()) == ()
    assert caveats(replace(SOUND, stopped="patience", notes=("a time budget",)), scored()) == ()


def test_every_check_has_a_case() -> None:
    assert set(SUSPECT) == set(OF_FOUND) | set(OF_SCORE)


@pytest.mark.parametrize("name", SUSPECT)
def test_each_check_speaks_for_itself_alone(name: str) -> None:
    found, score = SUSPECT[name]
    (said,) = caveats(found, score)
    assert said == (OF_FOUND[name](found) if name in OF_FOUND else OF_SCORE[name](score))


def test_what_a_prior_adds_is_said_with_what_it_is_worth() -> None:
    prior = replace(scored(), prior_only={"psnr": (7.0, 9.0)})
    assert OF_SCORE["invented"](prior) == "a generative prior can add detail that no record had"
    raw = replace(prior, raw={"psnr": (20.4, 22.4)})
    assert OF_SCORE["invented"](raw) == "the restorer can add detail that no record had"
    worse = replace(raw, raw={"psnr": (21.0, 24.0)}, prior_only={"psnr": (20.0, 22.0)})
    assert OF_SCORE["invented"](worse) == (
        "the restorer can add detail that no record had; the picture is no closer than one made "
        "without the update; the raw guess was closer"
    )


def test_a_search_that_time_ended_is_said_with_its_iterations() -> None:
    (said,) = caveats(*SUSPECT["cut short"])
    assert said == "stopped by the time budget after 5 iterations: more time would leak more"


@pytest.mark.parametrize(
    ("gain", "shown"), [(-0.6, False), (-0.4, True), (0.4, True), (0.6, False), (4.0, False)]
)
def test_the_prior_is_what_scores_within_half_a_decibel_of_the_mean_image(
    gain: float, shown: bool
) -> None:
    said = caveats(SOUND, scored((11.0 + gain, 12.0 + gain)))
    assert any("the mean image" in caveat for caveat in said) == shown


# The verdict.


(PSNR,) = measurements({"psnr": METRICS["psnr"]}, Limit())


def test_a_record_leaks_above_the_limit_and_above_its_own_baseline() -> None:
    base = {"psnr": (5.0, 12.0, 29.0, 15.0)}
    score = Score(4, {"psnr": (14.9, 15.0, 30.0, 17.9)}, base, base, 0.1, None)
    assert leaking(score, PSNR, 15.0) == [False, True, False, False]


def test_what_the_prior_shows_as_well_was_not_read_from_the_update() -> None:
    base = {"psnr": (5.0,) * 4}
    score = Score(4, {"psnr": (20.0,) * 4}, base, base, 0.1, None)
    unread = replace(score, prior_only={"psnr": (17.1, 17.0, 30.0, 6.0)})
    assert leaking(score, PSNR, 15.0) == [True] * 4
    assert leaking(unread, PSNR, 15.0) == [False, True, False, True]


def test_who_restores_holds_the_raw_picture_too() -> None:
    """A restorer that takes detail away, or whose prior is as close, hides no leak."""
    base = {"psnr": (5.0, 5.0, 13.0, 5.0)}
    score = Score(4, {"psnr": (9.0, 20.0, 20.0, 20.0)}, base, base, 0.1, None)
    score = replace(score, raw={"psnr": (15.0, 15.0, 15.9, 14.9)}, prior_only={"psnr": (18.0,) * 4})
    assert leaking(score, PSNR, 15.0) == [True, True, False, False]


def test_a_record_is_recognised_where_the_prior_alone_does_not_suffice() -> None:
    base = {"psnr": (5.0,) * 4}
    score = Score(4, base | {"identified": (1.0, 1.0, 0.0, 0.0)}, base, base, 0.1, None)
    assert recognised(score) == [True, True, False, False]
    unread = replace(score, prior_only=base | {"identified": (0.0, 1.0, 1.0, 0.0)})
    assert recognised(unread) == [True, False, False, False]
    assert recognised(replace(unread, prior_only=base)) == [True, True, False, False]  # schema 5
    raw = replace(unread, raw=base | {"identified": (0.0, 0.0, 0.0, 1.0)})
    assert recognised(raw) == [True, False, False, True]
    limit, metrics = Limit(), measurements({"psnr": METRICS["psnr"]}, Limit())
    trial = replace(BROKEN, score=raw)
    (row,) = summarise([trial], limit, metrics)
    assert (row.measured.leaks["found"].share, row.measured.leaks["found"].chance) == (0.5, 0.2)
    assert row.measured.identified == 0.1
    assert row.measured.scores["identified"].mean == 0.5
    assert row.measured.prior_only["identified"].mean == 0.5
    assert row.measured.raw["identified"].mean == 0.25


def test_a_record_leaks_below_the_limit_of_a_metric_whose_lower_scores_are_closer() -> None:
    base = {"blur": (0.5, 0.5, 0.1, 0.2)}
    score = Score(4, {"blur": (0.3, 0.2, 0.1, 0.15)}, base, base, 0.1, None)
    (blur,) = measurements({"blur": BLUR}, Limit(scores={"blur": 0.2}))
    # too far, at the limit, no closer than the mean image, closer
    assert leaking(score, blur, 0.2) == [False, True, False, True]
    assert leaking(score, replace(blur, margin=0.1), 0.2) == [False, True, False, False]
    unread = replace(score, prior_only={"blur": (0.9, 0.1, 0.9, 0.16)})
    assert leaking(unread, blur, 0.2) == [False, False, False, True]


def test_a_share_counts_beyond_guessing() -> None:
    assert beyond(0.5, 0.5) == 0.0
    assert beyond(0.75, 0.5) == 0.5
    assert beyond(0.2, 0.5) == 0.0
    assert beyond(1.0, 1.0) == 0.0  # guessing is always right


@pytest.mark.parametrize(
    ("share", "chance", "records", "state"),
    [
        (1.0, 0.0, 3, "leaks"),
        (1 / 3, 0.005, 3, "leaks"),
        (0.0, 0.0, 3, "undecided"),
        (0.0, 0.0, 34, "undecided"),
        (0.0, 0.0, 35, "below"),  # z² / (n + z²) is 0.0989 there
        (0.1, 0.0, 1000, "undecided"),  # at the limit, and its interval is not below
        (0.101, 0.0, 1000, "leaks"),
        (1.0, 1 / 3, 1, "undecided"),  # one of three by luck
        (1.0, 0.5, 2, "undecided"),
        (1.0, 0.5, 12, "leaks"),
        (0.5, 0.5, 1000, "below"),
    ],
)
def test_a_kind_of_leak_against_its_limit(
    share: float, chance: float, records: int, state: str
) -> None:
    assert weigh(share, chance, records, 0.1).state == state


@pytest.mark.parametrize(("hits", "records"), [(0, 3), (0, 20), (1, 30), (6, 100)])
def test_as_many_records_as_were_asked_for_decide_it(hits: int, records: int) -> None:
    found = weigh(hits / records, 0.0, records, 0.1)
    assert found.state == "undecided"
    more = found.more
    assert weigh(hits / (records + more), 0.0, records + more, 0.1).state == "below"
    less = records + more - 1
    assert weigh(hits / less, 0.0, less, 0.1).state == "undecided"


def test_no_number_of_records_shows_a_limit_of_nothing() -> None:
    assert weigh(0.0, 0.0, 10, 0.0).more is None
    assert weigh(0.0, 0.0, 10, 1.0).state == "below"


def test_the_interval_widens_with_fewer_records() -> None:
    assert wilson(0.0, 3)[1] > wilson(0.0, 30)[1] > 0


BLUR = Metric(lambda guess, truth: (guess - truth).abs().flatten(1).mean(1), "Blur", "px", "lower")


def trial(psnr: float = 9.0, found: float = 0.0, labels: float | None = 0.1, **more: Any) -> Trial:
    """A finished trial of forty records, all alike: enough for a limit of a tenth. Its attacker
    knows the defence unless it is `blind`."""
    count, blur = more.pop("records", 40), more.pop("blur", 0.5)
    blind = more.pop("blind", more.get("defence", "none") == "none")
    other: dict[str, Any] = {"kind": "trial", "seed": 0} | more
    name = "-".join(str(v) for v in other.values())
    score = Score(
        records=count,
        scores={"psnr": (psnr,) * count, "blur": (blur,) * count, "identified": (found,) * count},
        mean_image={"psnr": (10.0,) * count, "blur": (0.4,) * count},
        random_image={"psnr": (9.0,) * count, "blur": (0.6,) * count},
        identified=0.005,
        labels=None if labels is None else LabelScore((), labels, 0.1, 0.12),
    )
    given: dict[str, Any] = {
        "id": name, "round": 0, "defence": "none", "attack": "ig", "realism": "realistic",
        "status": "done", "error": None, "times": Times(1.0, 1.0),
        "found": Found(count, None, 0.0, adapted=None if blind else "knows"), "score": score,
    }  # fmt: skip
    return Trial(**(given | other))


def unscored(**more: Any) -> Trial:
    """A trial on records that nobody knows."""
    return replace(trial(**more), status="unscored", score=None)


BROKEN = trial(30.0, 1.0, 1.0, kind="control", id="twin", blur=0.1)
UNBROKEN = trial(9.0, 0.0, 0.1, kind="control", id="twin")


def audited(
    *trials_: Trial,
    control: Trial | None = BROKEN,
    not_run: tuple[NotRun, ...] = (),
    scores: dict[str, float] | None = None,
    **limit: float,
) -> Result:
    """What follows from these trials; `scores` are limits of further metrics."""
    measure = Measure(metrics=("psnr", "blur"), limit=Limit(**limit, scores=scores or {}))
    given = Result(
        schema=SCHEMA,
        leakgauge="",
        versions={},
        name="",
        fingerprint="",
        plan=Document(Federation("mlp", "digits"), (), ThreatModel(), audit=measure),
        federation=Audited("mlp", "digits", 40, (1, 8, 8), (), 1),
        threat=None,
        metrics=measurements({"psnr": METRICS["psnr"], "blur": BLUR}, measure.limit),
        summary=(),
        control=(),
        verdict=None,
        explanation=None,
        sensitivity=None,
        trials=(*trials_, control) if control else trials_,
        not_run=not_run,
        references=(),
        times=RunTimes(0.0, None, None, None),
    )
    return derived(given, ["twin"], None)


def said(*trials_: Trial, **more: Any) -> tuple[str, int]:
    verdict = audited(*trials_, **more).verdict
    return verdict.outcome, verdict.exit_code


CANNOT = replace(
    trial(), attack="bad", id="bad", status="not applicable", error="no linear layer",
    found=None, score=None,
)  # fmt: skip
CRASH = replace(CANNOT, status="failed", error="RuntimeError: no")


@pytest.mark.parametrize(
    ("trials_", "control", "outcome", "code"),
    [
        ([trial(30.0)], BROKEN, "leaks", 1),
        ([trial(30.0)], None, "leaks", 1),
        ([trial()], BROKEN, "below the limit", 0),
        ([trial(found=1.0)], BROKEN, "leaks", 1),  # recognised at 9 dB
        ([trial(labels=1.0)], BROKEN, "leaks", 1),
        ([trial(labels=None)], BROKEN, "below the limit", 0),
        ([trial(records=3)], BROKEN, "inconclusive", 4),
        ([trial()], UNBROKEN, "inconclusive", 4),
        ([trial()], None, "inconclusive", 4),
        ([trial(), CRASH], BROKEN, "failed", 3),
        ([trial(30.0), CRASH], BROKEN, "leaks", 3),
        ([trial(30.0, realism="oracle")], BROKEN, "inconclusive", 4),
        ([trial(30.0, realism="oracle", attack="o"), trial()], BROKEN, "below the limit", 0),
        ([trial(30.0, realism="active")], BROKEN, "leaks", 1),
        ([CANNOT], BROKEN, "inconclusive", 4),
        ([unscored()], BROKEN, "inconclusive", 4),
        ([unscored(attack="u"), trial()], BROKEN, "inconclusive", 4),  # it might have leaked
        ([unscored(attack="u"), trial(30.0)], BROKEN, "leaks", 1),
        ([unscored(), CRASH], BROKEN, "failed", 3),
        ([], BROKEN, "inconclusive", 4),
    ],
)
def test_the_outcome_and_its_code(
    trials_: list[Any], control: Any, outcome: str, code: int
) -> None:
    assert said(*trials_, control=control) == (outcome, code)


@pytest.mark.parametrize("kind", ["pictures", "found", "labels"])
def test_a_kind_that_the_control_did_not_show_is_not_called_below(kind: str) -> None:
    shows = {"pictures": 30.0, "found": 1.0, "labels": 1.0}
    lacks = shows | {kind: {"pictures": 9.0, "found": 0.0, "labels": 0.1}[kind]}
    control = trial(*lacks.values(), kind="control", id="twin")
    verdict = audited(trial(), control=control).verdict
    assert verdict.outcome == "inconclusive"
    assert verdict.kinds[kind].leak.state == "no control"
    assert [k for k, one in verdict.kinds.items() if one.leak.state == "below"] == [
        k for k in shows if k != kind
    ]


@pytest.mark.parametrize(
    ("key", "more"),
    [("share", {"psnr": 30.0}), ("found", {"found": 0.75}), ("labels", {"labels": 0.9})],
)
def test_each_kind_has_its_own_limit_and_a_limit_of_one_allows_all(
    key: str, more: dict[str, float]
) -> None:
    assert said(trial(**more)) == ("leaks", 1)
    assert said(trial(**more), **{key: 1.0}) == ("below the limit", 0)
    assert said(trial(**more), control=UNBROKEN, **{key: 1.0}) == ("inconclusive", 4)


def test_controls_are_not_pooled_into_the_summary() -> None:
    result = audited(trial(12.0), control=BROKEN)
    assert [(row.trials, row.measured.records) for row in result.summary] == [(1, 40)]
    assert result.summary[0].measured.scores["psnr"].most == 12.0
    assert result.verdict.records == 40


def test_records_that_several_attacks_and_defences_meet_count_once() -> None:
    result = audited(
        trial(), trial(attack="b"), trial(defence="clip"), trial(seed=1), trial(seed=2, round=7)
    )
    assert result.verdict.records == 120  # two seeds of round 0, one of round 7


def test_why_it_is_inconclusive_is_said_with_its_remedy() -> None:
    few = audited(trial(records=3)).verdict
    assert "too few records. 3 records cannot show" in few.headline
    assert few.next[0].startswith("Attack at least 34 more records: add `seeds`")
    absent = audited(trial(), control=None).verdict
    assert "no attack was tried on a known-weak twin" in absent.headline
    assert "control = true" in absent.next[0]
    unbroken = audited(trial(), control=UNBROKEN).verdict
    assert "no attack recovered a record of a known-weak twin" in unbroken.headline
    assert "more iterations" in unbroken.next[0]
    oracle = audited(trial(30.0, realism="oracle")).verdict
    assert "told truths" in oracle.headline
    cannot = audited(CANNOT).verdict
    assert "none of the attacks that were run applies" in cannot.headline
    assert "run to its end" in audited().verdict.headline


def test_a_green_headline_names_its_evidence() -> None:
    headline = audited(trial()).verdict.headline
    assert headline.startswith("Below the limit, for the attacks that were run on 40 records")
    assert "at most 9 % recovered to 15 dB or better (limit 10 %)" in headline


def test_a_leak_of_labels_alone_is_called_so() -> None:
    assert audited(trial(labels=1.0)).verdict.headline == (
        "This federation leaks labels: 100 % of the labels were read (guessing: 12 %)."
    )


def test_each_defence_has_a_verdict_of_its_own() -> None:
    result = audited(
        trial(30.0, 1.0, 1.0),
        trial(9.0, 0.0, 0.1, defence="clip"),
        trial(9.0, 0.0, 1.0, defence="prune"),
    )
    found = {entry.defence: entry.outcome for entry in result.verdict.defences}
    assert found == {"none": "leaks", "clip": "below the limit", "prune": "leaks"}
    use = next(step for step in result.verdict.next if step.startswith("Use clip"))
    assert "pictures, recognition and labels was below the limit, on 40 records" in use
    assert "cannot tell" not in use
    assert not any("for safe" in step for step in result.verdict.next)


def test_a_defence_that_no_attack_knows_is_untested_never_safe() -> None:
    held = trial(9.0, 0.0, 0.1, defence="clip", blind=True)
    verdict = audited(held).verdict
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 4)
    assert {one.leak.state for one in verdict.kinds.values()} == {"untested"}
    assert "no attack that was run knows clip" in verdict.headline
    assert "inverting-gradients" in verdict.next[0]
    verdict = audited(trial(30.0, 1.0, 1.0), held).verdict
    assert [entry.outcome for entry in verdict.defences] == ["leaks", "inconclusive"]
    assert not any(step.startswith("Use clip") for step in verdict.next)
    assert any("no attack that was run knows it" in step for step in verdict.next)
    # One who knows it decides, whatever the others found below.
    both = audited(held, trial(9.0, 0.0, 0.1, defence="clip", attack="b")).verdict
    assert both.outcome == "below the limit"
    # The worst row counts all the same: who ignores a defence may do better than who knows it.
    knows = trial(9.0, 0.0, 0.1, defence="clip", attack="b")
    some = replace(held, score=trial(9.0, 0.0, 0.1, records=3).score)
    assert audited(some, knows).verdict.outcome == "inconclusive"
    assert {one.leak.state for one in audited(some, knows).verdict.kinds.values()} >= {"undecided"}
    # What leaks, leaks, whoever found it.
    assert audited(replace(held, score=trial(30.0).score)).verdict.outcome == "leaks"
    # One stage that was tested says nothing of another.
    other = trial(9.0, 0.0, 0.1, defence="clip", round=5)
    assert audited(held, other).verdict.outcome == "inconclusive"
    # A row of trials of which one did not know it was not tested.
    mixed = audited(trial(defence="clip", seed=1), trial(defence="clip", seed=2, blind=True))
    assert mixed.verdict.outcome == "inconclusive"


def test_the_next_steps_follow_from_what_was_tested() -> None:
    bare = audited(trial(30.0)).verdict.next
    assert bare[0].startswith("Protect updates like the data")
    assert "None was tested here" in bare[1]
    weak = audited(trial(30.0, 1.0, 1.0), trial(30.0, 1.0, 1.0, defence="clip")).verdict.next
    assert any("None of the tested defences" in step for step in weak)
    part = audited(trial(30.0), trial(9.0, 0.0, 1.0, defence="clip")).verdict.next
    assert any("closed the leak of pictures" in step for step in part)
    assert any("the leak of labels is still open" in step for step in part)
    reader = trial(9.0, 0.0, 1.0, kind="control", id="twin")  # it reads labels, and no more
    labels = audited(trial(labels=1.0), trial(defence="clip"), control=reader).verdict.next
    assert "a server that sees them can read labels." in labels[0]
    assert not any("leak of pictures" in step for step in labels)  # none was found
    assert any(
        step.startswith("Use clip: with it the leak of labels was below the limit, on 40 records")
        and "Of pictures and recognition this audit cannot tell." in step
        for step in labels
    )
    assert any("Do not take pictures and recognition for safe" in step for step in labels)
    few = audited(trial(30.0, records=3), trial(9.0, defence="clip", records=3)).verdict.next
    assert any("at least 32 more records must show it" in step for step in few)


def test_who_is_exposed_is_told_which_attack_decodes() -> None:
    layers = (LayerExposure("conv", 16, 512, 31, ""),)
    shown = Exposure(8, 8, 1, True, 31, "conv", layers, "")
    hidden = Exposure(32, 32, 1, False, 31, "conv", layers, "")

    def told(result: Result, exposure: Exposure = shown) -> list[int]:
        """At which places of the next steps it is said."""
        steps = derived(replace(result, exposure=(exposure,)), ["twin"], None).verdict.next
        return [i for i, step in enumerate(steps) if "separate-and-decode" in step]

    below, unsure = audited(trial(9.0, 0.0, 0.1)), audited(trial(9.0, 0.0, 0.1, records=3))
    assert (below.verdict.outcome, unsure.verdict.outcome) == ("below the limit", "inconclusive")
    assert told(below) == [0]  # before all that reassures
    assert told(unsure) == [1]
    assert len(told(audited(trial(9.0, 0.0, 1.0)))) == 1  # labels leak, pictures do not
    assert not told(audited(trial(30.0)))  # pictures leak as it is
    assert not told(below, hidden)
    assert not told(audited(trial(9.0, 0.0, 0.1, attack="separate-and-decode")))
    for changed in (
        replace(below, federation=replace(below.federation, shape=(8,))),
        replace(below, plan=replace(below.plan, threat=ThreatModel(actor="eavesdropper"))),
    ):
        assert not told(changed)


def test_the_worst_row_is_the_one_that_leaks_most() -> None:
    half = trial(18.0, attack="b")
    score = replace(half.score, scores=half.score.scores | {"psnr": (9.0,) * 10 + (18.0,) * 30})
    half = replace(half, score=score)
    result = audited(trial(9.0, attack="a"), half)
    assert result.verdict.worst.attack == "b"
    assert result.verdict.worst.share == 0.75


def test_labels_are_weighed_by_records() -> None:
    rows = summarise(
        [trial(labels=1.0, records=1), trial(labels=0.0, records=3, seed=1)], Limit(), [PSNR]
    )
    assert rows[0].measured.labels.accuracy == 0.25


def test_a_control_is_judged_by_the_limits_of_the_plan() -> None:
    passed = audited(trial(), control=trial(16.0, 0.0, 0.1, kind="control", id="twin")).control
    assert (passed[0].passed, passed[0].breaks) == (True, ("pictures",))
    close = audited(trial(), control=trial(14.9, 0.0, 0.1, kind="control", id="twin")).control
    assert not close[0].passed
    assert "14.9 dB where a mean image has 10.0" in close[0].reason
    known = audited(trial(), control=trial(9.0, 1.0, 0.1, kind="control", id="twin")).control
    assert (known[0].passed, known[0].breaks) == (True, ("found",))
    crash = audited(trial(), control=replace(CRASH, id="twin", kind="control")).control
    assert not crash[0].passed


# Metrics with a limit of their own, and trials without truth.


def test_a_metric_without_a_limit_decides_nothing() -> None:
    result = audited(trial(blur=0.0))
    assert set(result.verdict.kinds) == {"pictures", "found", "labels"}
    assert result.summary[0].measured.scores["blur"].median == 0.0
    assert result.verdict.outcome == "below the limit"


def test_a_metric_with_a_limit_is_a_kind_of_leak_in_its_own_words() -> None:
    leaks = audited(trial(blur=0.2), scores={"blur": 0.2}).verdict
    assert (leaks.outcome, leaks.exit_code) == ("leaks", 1)
    assert leaks.headline == (
        "This federation leaks: 40 of 40 records were recovered to Blur 0.2 px or lower."
    )
    assert "a server that sees them can rebuild records." in leaks.next[0]
    assert leaks.kinds["blur"].leak.limit == 0.1  # of the share
    below = audited(trial(blur=0.3), scores={"blur": 0.2}).verdict
    assert below.outcome == "below the limit"
    assert "at most 9 % recovered to Blur 0.2 px or lower (limit 10 %)" in below.headline
    none = audited(trial(blur=0.0), scores={"blur": 0.2}, share=1.0).verdict
    assert none.outcome == "below the limit"
    few = audited(trial(blur=0.3, records=3), scores={"blur": 0.2}, share=0.0, found=1.0).verdict
    assert "raise `limit.share`" in few.next[0]


def test_a_metric_that_the_control_did_not_show_is_not_called_below() -> None:
    control = trial(30.0, 1.0, 1.0, kind="control", id="twin")
    verdict = audited(trial(), control=control, scores={"blur": 0.2}).verdict
    assert verdict.kinds["blur"].leak.state == "no control"
    assert verdict.outcome == "inconclusive"
    leaks = audited(trial(30.0), control=control, scores={"blur": 0.2}).verdict
    assert any("Do not take pictures by Blur for safe" in step for step in leaks.next)
    shown = trial(9.0, 0.0, 0.1, kind="control", id="twin", blur=0.1)
    (entry,) = audited(trial(), control=shown, scores={"blur": 0.2}).control
    assert (entry.passed, entry.breaks) == (True, ("blur",))


def test_a_defence_is_judged_by_every_metric_with_a_limit() -> None:
    verdict = audited(
        trial(30.0, blur=0.1), trial(9.0, defence="clip", blur=0.1), scores={"blur": 0.2}
    ).verdict
    assert {one.defence: one.outcome for one in verdict.defences} == dict.fromkeys(
        ("none", "clip"), "leaks"
    )
    assert any("the leak of pictures by Blur is still open" in step for step in verdict.next)


def test_a_row_that_leaks_by_another_metric_is_worse_than_one_that_is_recognised() -> None:
    verdict = audited(
        trial(14.0, 1.0, attack="found"), trial(attack="blur", blur=0.1), scores={"blur": 0.2}
    ).verdict
    assert verdict.worst.attack == "blur"


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"lpips": 0.2}, "limit.scores names 'lpips', which is not measured"),
        ({"psnr": 9.0}, "set that of psnr as `psnr`"),
        ({"ssim": "high"}, "scores.ssim: expected a number"),
    ],
)
def test_a_limit_of_what_is_not_measured_is_refused(limit: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        tiny(audit={"metrics": ["psnr", "ssim"], "limit": {"scores": limit}})


@pytest.mark.parametrize("name", ["pictures", "found", "labels", "identified"])
def test_a_metric_has_no_name_of_another_kind_of_leak(name: str, tmp_path: Path) -> None:
    plan = replace(tiny(), metrics={"psnr": METRICS["psnr"], name: BLUR})
    with pytest.raises(PlanError, match=f"cannot be called '{name}'"):
        run(plan, Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_new_metric_is_measured_and_judged_by_its_value_alone(tmp_path: Path) -> None:
    plan = tiny(audit={"seeds": [0], "explain": False})
    limited = replace(BLUR, limit=0.5)
    plan = replace(plan, metrics=plan.metrics | {"blur": limited})
    result = run(plan, Store(tmp_path))
    (metric,) = (one for one in result.metrics if one.name == "blur")
    assert (metric.label, metric.unit, metric.better, metric.limit) == ("Blur", "px", "lower", 0.5)
    assert "blur" in result.verdict.kinds
    assert schema.load(tmp_path / "result.json") == result


def test_trials_without_truth_are_counted_and_said() -> None:
    alone = audited(unscored(), unscored(seed=1))
    (row,) = alone.summary
    assert (row.trials, row.unscored, row.measured) == (2, 2, None)
    assert "nobody knows the truth behind 2 trials" in alone.verdict.headline
    assert "not scored" in alone.verdict.headline
    assert "2 trials not scored: nobody knows the truth." in alone.verdict.sentences
    assert alone.verdict.next[0].startswith("Look at the pictures yourself")
    assert (alone.verdict.risk, alone.verdict.worst, alone.verdict.records) == (None, None, 0)
    mixed = audited(unscored(attack="u"), trial()).verdict
    assert "nobody knows the truth behind 1 trial:" in mixed.headline


# Whole audits.


class Fixed:
    """An attack that returns the same grey, whatever it sees."""

    needs = frozenset({"records"})

    def reconstruct(self, seen, rng, resources=None):
        return Reconstruction(torch.full((seen.records, *seen.record.shape), 0.9), None, 0.0)


class Crash:
    needs = frozenset()

    def reconstruct(self, seen, rng, resources=None):
        raise RuntimeError("it broke")


def test_an_audit_whose_control_fails_is_inconclusive(tmp_path: Path) -> None:
    plan = replace(tiny(), attacks={"grey": Fixed()}, asked=("grey",))
    verdict = run(plan, Store(tmp_path)).verdict
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 4)


def test_an_audit_with_a_crash_says_so(tmp_path: Path) -> None:
    plan = replace(tiny(), attacks={"bad": Crash(), "grey": Fixed()}, asked=("bad", "grey"))
    result = run(plan, Store(tmp_path))
    assert result.verdict.exit_code == 3
    assert any("it broke" in (trial.error or "") for trial in result.trials)


def test_an_audit_of_a_leaking_federation_says_why(tmp_path: Path) -> None:
    plan = tiny(
        federation={"data": "digits", "model": {"name": "mlp", "hidden": [64]},
                    "training": {"batch_size": 1, "batch_norm": "eval"}},
        defence=[{"name": "none"}, {"name": "clip-and-noise", "epsilon": 1.0}],
    )  # fmt: skip
    result = run(plan, Store(tmp_path), calibrate=True)
    assert (result.verdict.outcome, result.verdict.exit_code) == ("leaks", 1)
    assert [entry.passed for entry in result.control] == [True]
    assert "the defence (no defence → clip-and-noise)" in result.explanation.sentence
    assert result.sensitivity.cosine_distance < 0.5
    assert result.times.forecast.cpu_seconds > 0
    assert result.not_run == ()


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
    assert result.trials == ()
    assert [entry.id for entry in result.not_run] == [case.id for case in trials(plan)]
    assert "budget" in result.not_run[0].reason
    assert result.verdict.outcome == "inconclusive"
    whole = run(plan, Store(tmp_path), resume=True)
    assert len(whole.trials) == 3
    assert whole.not_run == ()


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
    assert result.interrupted
    assert len(result.trials) == 1
    assert [entry.reason for entry in result.not_run] == ["interrupted"] * 2


def test_nothing_is_an_audit_if_nothing_applies(tmp_path: Path) -> None:
    plan = tiny(federation={"data": "digits", "model": "lenet-zhu"})
    with pytest.raises(NotApplicable):
        run(plan, Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_model_with_precode_is_never_below_the_limit() -> None:
    plain = audited(trial())
    assert plain.verdict.outcome == "below the limit"
    federation = replace(plain.plan.federation, model={"name": "mlp", "precode": True})
    hidden = replace(plain, plan=replace(plain.plan, federation=federation))
    verdict = derived(hidden, ["twin"], None).verdict
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 4)
    assert verdict.defences[0].outcome == "inconclusive"
    assert "the model has PRECODE" in verdict.headline
    assert "without `precode`" in verdict.next[0]
