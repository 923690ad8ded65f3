"""Two audits compared: numbers side by side, what only one has, plans key by key."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_result import failed, measured_by, rederive, rescored, sample

from leakgauge.audit.results import LabelShare, Measurement
from leakgauge.errors import InputError
from leakgauge.report import diff


@pytest.fixture
def a(tmp_path):
    return sample(tmp_path, seeds=1, records=4)


def printed(comparison, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    for table in diff.tables(comparison):
        console.print(table)
    return console.export_text()


def rows(a, b):
    return {(row.defence, row.attack): row for row in diff.compare(a, b).rows}


def first_row(result, **changes):
    """The result with other numbers in the first row of its summary."""
    row = result.summary[0]
    row = replace(row, measured=replace(row.measured, **changes))
    return replace(result, summary=(row, *result.summary[1:]))


def first_spread(result, metric, **changes):
    scores = result.summary[0].measured.scores
    return first_row(result, scores=scores | {metric: replace(scores[metric], **changes)})


def test_an_audit_does_not_differ_from_itself(a):
    compared = diff.compare(a, a)
    assert compared.plans == ()
    assert len(compared.rows) == len(a.summary)
    for row in compared.rows:
        assert set(row.medians) == {"psnr", "ssim"}
        assert {both.change for both in (*row.medians.values(), row.labels)} == {0}
        assert not any(both.clear for both in row.medians.values())
        assert row.only is None


def test_medians_stand_side_by_side_with_their_change(a):
    before = a.summary[0].measured.scores["psnr"].median
    b = first_spread(first_spread(a, "psnr", median=before - 7.5), "ssim", median=0.25)
    row = rows(a, first_row(b, labels=LabelShare(0.5, 0.3, 0.3)))[("none", "analytic")]
    psnr = row.medians["psnr"]
    assert (psnr.a, psnr.b) == (before, before - 7.5)
    assert psnr.change == pytest.approx(-7.5)
    assert row.medians["ssim"].b == 0.25
    assert row.labels.change == pytest.approx(-0.375)


@pytest.mark.parametrize(
    ("first", "second", "clear"),
    [
        ((1.0, 2.0), (3.0, 4.0), True),
        ((3.0, 4.0), (1.0, 2.0), True),
        ((1.0, 3.0), (2.0, 4.0), False),
        ((1.0, 2.0), (2.0, 3.0), False),
        ((1.0, 9.0), (2.0, 3.0), False),
    ],
)
@pytest.mark.parametrize("metric", ["psnr", "ssim"])
def test_a_change_is_clear_when_the_intervals_stand_apart(a, first, second, clear, metric):
    old, new = (first_spread(a, metric, interval=interval) for interval in (first, second))
    medians = rows(old, new)[("none", "analytic")].medians
    assert [name for name, both in medians.items() if both.clear] == [metric] * clear
    text = printed(diff.compare(old, new)).replace("* the 95 % intervals", "")
    assert ("0.0 *" in text) is (clear and metric == "psnr")
    assert ("1 → 1 *" in text) is (clear and metric == "ssim")


def test_rows_of_one_audit_alone_are_named(a):
    old, new = replace(a, summary=a.summary[:-1]), replace(a, summary=a.summary[1:])
    found = rows(old, new)
    assert found[("none", "analytic")].only == "old"
    assert found[("none", "analytic")].medians["psnr"].change is None
    assert found[("prune", "dlg")].only == "new"
    assert list(found)[-1] == ("prune", "dlg")
    text = printed(diff.compare(old, new))
    assert "only in old" in text
    assert "only in new" in text


def test_rounds_are_kept_apart(tmp_path):
    two = sample(tmp_path, rounds=(0, 5), seeds=1, records=1)
    compared = diff.compare(two, two)
    assert sorted({row.round for row in compared.rows}) == [0, 5]
    assert len(compared.rows) == 12


def test_rows_without_numbers_are_compared_as_such(a):
    crashed = replace(a.summary[0], failed=1, reason="boom", measured=None)
    b = replace(a, summary=(crashed, *a.summary[1:]))
    found = rows(a, b)[("none", "analytic")]
    assert found.medians["psnr"].a is not None
    assert found.medians["psnr"].b is None
    assert found.only is None
    assert rows(first_row(a, labels=None), b)[("none", "analytic")].labels.a is None


def test_a_metric_of_one_audit_alone_is_shown(a):
    b = foggy(a)
    row = rows(a, b)[("none", "analytic")]
    assert row.medians["fog"].a is None
    assert row.medians["fog"].b == b.summary[0].measured.scores["fog"].median
    assert not row.medians["fog"].clear
    text = printed(diff.compare(a, b), width=200)
    assert "Fog [m] km" in text  # no markup
    assert f"– → {row.medians['fog'].b:.3g}" in text


def test_plans_are_compared_key_by_key(a):
    plan = a.plan
    federation = replace(
        plan.federation, training=replace(plan.federation.training, batch_size=32), rounds=(0, 1)
    )
    attacks = (
        plan.attack[0],
        plan.attack[1] | {"iterations": 50},
        plan.attack[2],
        {"name": "idlg"},
    )
    audit = replace(plan.audit, metrics=("psnr",), budget="10m")
    b = replace(a, plan=replace(plan, federation=federation, attack=attacks, audit=audit))
    assert diff.compare(a, b).plans == (
        ("federation.training.batch_size", 8, 32),
        ("federation.rounds", [0], [0, 1]),
        ("attack[1].iterations", 300, 50),
        ("attack[3]", None, {"name": "idlg"}),
        ("audit.metrics", ["psnr", "ssim"], ["psnr"]),
        ("audit.budget", None, "10m"),
    )
    text = printed(diff.compare(a, b))
    assert "federation.training.batch_size" in text
    assert "32" in text


def test_the_text_shows_names_verdicts_and_numbers(a):
    safe = replace(a.verdict, outcome="below the limit")
    text = printed(diff.compare(a, replace(a, verdict=safe, name="[bold]second\x1b[31m")))
    assert "Below the limit" in text
    assert "[bold]second" in text  # no markup
    assert "\x1b" not in text
    for row in a.summary:
        assert f"{row.measured.scores['psnr'].median:.1f}" in text
        assert f"{row.measured.scores['ssim'].median:.3g} → " in text


# The gate


@pytest.fixture
def sound(tmp_path):
    """An audit that is below its limits, on many records."""
    return sample(
        tmp_path, attacks=("analytic",), seeds=4, records=10, pool=2, outcome="below the limit"
    )


def edited(result, change, *, defence="prune"):
    """A copy in which `change` was done to every trial of a defence."""
    trials = [
        change(trial)
        if trial.kind == "trial" and trial.score and trial.defence == defence
        else trial
        for trial in result.trials
    ]
    return rederive(replace(result, trials=tuple(trials)))


def limited(result, **limits):
    """The same audit by other limits."""
    limit = replace(result.plan.audit.limit, **limits)
    metrics = tuple(
        replace(metric, limit=limit.psnr) if metric.name == "psnr" else metric
        for metric in result.metrics
    )
    plan = replace(result.plan, audit=replace(result.plan.audit, limit=limit))
    return rederive(replace(result, plan=plan, metrics=metrics))


def scored(value):
    return lambda trial: rescored(trial, psnr=[value] * trial.score.records)


def recognised(number):
    def change(trial):
        hits = [1.0] * number + [0.0] * (trial.score.records - number)
        return rescored(trial, identified=hits)

    return change


def test_nothing_got_worse_in_the_same_audit_or_a_better_one(a, sound):
    assert diff.worse(a, a) == []
    assert diff.worse(sound, sound) == []
    assert diff.worse(a, edited(a, scored(5.0))) == []


def test_a_worse_verdict_and_its_row_are_said(sound):
    new = edited(sound, scored(30.0))
    found = diff.worse(sound, new)
    assert found[0] == "The verdict went from “below the limit” to “leaks”."
    place = "analytic, defence prune, round 0"
    assert found[1] == (
        f"{place}: pictures recovered: went from “below the limit” to “leaks” "
        "(100\xa0% of 40 records)."
    )
    assert found[2] == (
        f"{place}: the median PSNR rose from 9.0 dB to 30.0 dB; the 95 % intervals stand apart."
    )
    assert len(found) == 3


def test_too_few_records_to_tell_is_worse_than_below_the_limit(sound):
    new = edited(sound, recognised(4))
    assert new.verdict.outcome == "inconclusive"
    found = diff.worse(sound, new)
    assert "The verdict went from “below the limit” to “inconclusive”." in found
    assert any("too few records to tell" in sentence for sentence in found)


def test_a_share_that_rose_clearly_is_worse_even_below_its_limit(sound):
    loose = limited(sound, found=0.95)
    new = edited(loose, recognised(4))
    (sentence,) = diff.worse(loose, new)
    assert "records recognised: 40\xa0% of 40 records, up from 0\xa0%" in sentence


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [(20.0, 20.9, 0), (20.0, 21.2, 1), (21.2, 20.0, 0), (60.0, 140.0, 0), (49.5, 140.0, 0),
     (5.0, 8.0, 0)],
)  # fmt: skip
def test_decibels_count_above_the_mean_picture_and_below_fifty(a, before, after, count):
    found = diff.worse(edited(a, scored(before)), edited(a, scored(after)))
    assert len([sentence for sentence in found if "median PSNR" in sentence]) == count * 2


def test_a_leak_that_was_not_there_before_is_worse(a):
    kept = tuple(t for t in a.trials if t.attack != "inverting-gradients")
    old = rederive(replace(a, trials=kept))
    found = diff.worse(old, a)
    assert any("inverting-gradients, no defence, round 0" in sentence for sentence in found)
    assert all("not measured before" in sentence for sentence in found)
    assert diff.worse(a, old) == []  # what is gone is no leak


def test_attackers_who_were_told_truths_do_not_count(a):
    def told(trial):
        return scored(90.0)(trial) if trial.realism == "oracle" else trial

    assert diff.worse(a, edited(edited(a, told), told, defence="none")) == []


def test_a_crash_is_worse(a):
    b = rederive(replace(a, trials=(failed(a.trials[0], "boom", ""), *a.trials[1:])))
    assert diff.worse(a, b) == ["1 trial crashed, where none did before."]
    assert diff.worse(b, b) == []


def test_raising_a_limit_hides_nothing(sound):
    new = limited(edited(sound, scored(30.0)), psnr=50.0)
    assert new.verdict.outcome == "below the limit"
    assert diff.worse(sound, new)[0] == "The verdict went from “below the limit” to “leaks”."


def test_a_result_without_a_verdict_cannot_be_a_gate(a):
    with pytest.raises(InputError, match="no verdict"):
        diff.worse(replace(a, verdict=None), a)


# A metric of which the less, the closer


def foggy(result, limit=None):
    """The audit, had it a metric that nobody but this test knows."""
    fog = Measurement("fog", "Fog [m]", "km", "lower", limit)
    return measured_by(result, fog, lambda psnr: 1 - psnr / 100)


def misted(value):
    return lambda trial: rescored(trial, fog=[value] * trial.score.records)


def test_the_gate_judges_a_metric_by_its_direction(sound):
    old = foggy(sound, limit=0.7)
    assert old.verdict.kinds["fog"].leak.state == "below"
    assert diff.worse(old, edited(old, misted(0.98))) == []
    place = "analytic, defence prune, round 0"
    assert diff.worse(old, edited(old, misted(0.5))) == [
        "The verdict went from “below the limit” to “leaks”.",
        f"{place}: pictures recovered by Fog [m]: went from “below the limit” to “leaks” "
        "(100\xa0% of 40 records).",
        f"{place}: the median Fog [m] fell from 0.91\xa0km to 0.5\xa0km; the 95 % intervals stand "
        "apart.",
    ]


@pytest.mark.parametrize(("value", "count"), [(0.80, 1), (0.87, 0), (0.95, 0)])
def test_a_metric_counts_from_a_twentieth_on_and_beyond_the_mean_picture(sound, value, count):
    old = foggy(sound, limit=0.1)
    assert len(diff.worse(old, edited(old, misted(value)))) == count
    assert diff.worse(foggy(sound), edited(foggy(sound), misted(value))) == []  # it has no limit


def test_neither_a_loose_limit_of_a_metric_nor_leaving_it_out_hides_anything(sound):
    old = foggy(sound, limit=0.7)
    loose = edited(foggy(sound, limit=0.45), misted(0.5))
    assert loose.verdict.outcome == "below the limit"
    assert "The verdict went from “below the limit” to “leaks”." in diff.worse(old, loose)
    assert diff.worse(old, sound) == ["Fog [m] had a limit, and is not measured any more."]
    assert diff.worse(foggy(sound), sound) == []
