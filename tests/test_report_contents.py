"""Words and numbers of a report: checked against the definitions they claim."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_result import failed, sample, unscored
from scipy.stats import binomtest

from leakgauge.audit import verdict
from leakgauge.audit.document import Document, Federation
from leakgauge.audit.results import Measurement, NotRun, Spread
from leakgauge.config import plain
from leakgauge.report import annex, contents, figures, first_screen, wording


@pytest.fixture
def result(tmp_path):
    return sample(tmp_path, seeds=2, records=2)


@pytest.mark.parametrize(("hits", "records"), [(0, 5), (5, 5), (3, 8), (40, 100), (1, 1)])
def test_the_interval_of_a_share_is_wilson_s(hits, records):
    known = binomtest(hits, records).proportion_ci(method="wilson")
    assert verdict.wilson(hits / records, records) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (7384, "2 h 3 min"),
    ],
)
def test_durations_read_well(seconds, text):
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.8341, "", "0.834"),
        (150.0, "dB", "150\xa0dB"),
        (0.000412, "", "0.000412"),
        (0, "s", "0\xa0s"),
    ],
)
def test_scores_by_any_metric_read_well(value, unit, text):
    assert wording.number(value, Measurement("x", "X", unit, "lower")) == text


def test_numbers_read_well():
    assert wording.decibels(21.449) == "21.4\xa0dB"
    assert wording.decibels(None) == wording.percent(None) == wording.change(None) == "–"
    assert wording.percent(0.125) == "12\xa0%"
    assert wording.change(-3.14) == "−3.1\xa0dB"
    assert wording.change(2.0) == "+2.0\xa0dB"
    assert wording.span((1.0, 2.25)) == "1.0–2.2"
    assert wording.span((-1.0, 2.0)) == "-1.0 to 2.0"
    assert wording.count(1, "trial") == "1 trial"
    assert wording.count(1200, "trial") == "1,200 trials"
    assert wording.shortened("abc", 3) == "abc"
    assert wording.shortened("abcd", 3) == "abc … (1 more characters)"


@given(st.text())
def test_tidy_text_steers_nothing(text):
    tidied = wording.tidy(text)
    assert len(tidied) == len(text)
    steering = {*map(chr, range(9)), *map(chr, range(11, 32)), "\x7f", "\u202e", "\u2066", "\x9b"}
    assert not set(tidied) & steering
    assert wording.tidy("é→≥–日本\n\t🙂") == "é→≥–日本\n\t🙂"


plans = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9999, 9999)
    | st.floats(-1e6, 1e6)
    | st.text("ab\"'\\é\n #"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab -.é"), inner, max_size=5)
    ),
    max_leaves=12,
)


def without_none(value):
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value


def has_none_in_list(value):
    if isinstance(value, dict):
        return any(has_none_in_list(v) for v in value.values())
    return isinstance(value, list) and any(v is None or has_none_in_list(v) for v in value)


@given(st.dictionaries(st.text("ab -.é"), plans, max_size=5))
def test_the_plan_is_printed_as_toml_that_reads_back(free):
    if not has_none_in_list(free):  # TOML has no null
        plan = Document(Federation(model=free, data="photos"), attack=(free, {"name": "dlg"}))
        assert tomllib.loads(annex.plan_text(plan)) == without_none(plain(plan))


def test_settings_are_named_like_the_rows_of_the_plan():
    methods = (
        {"name": "none"},
        {"name": "prune", "share": 0.5},
        {"name": "prune", "share": 0.9, "scope": "layer"},
    )
    assert contents.settings(methods) == {
        "none": "",
        "prune": "share = 0.5",
        "prune-2": 'share = 0.9, scope = "layer"',
    }


def test_coverage_counts_every_end_a_trial_can_have(result):
    trials = list(result.trials)
    control = replace(failed(trials[6], "control", ""), kind="control")
    trials[0] = failed(trials[0], "boom", "")
    trials[3] = replace(failed(trials[3], "no layer", ""), status="not applicable")
    trials[6] = unscored(trials[6])
    made = replace(result, trials=(*trials, control))
    first = contents.coverage(made)[0]
    assert (first.attack, first.done, first.not_applicable, first.failed, first.not_run) == (
        "analytic", 2, 1, 1, 0,
    )  # fmt: skip
    assert set(first.reasons) == {
        "failed: boom", "not applicable: no layer", "nobody knows the truth: not scored",
    }  # fmt: skip
    assert contents.coverage(made)[2].not_run == 2


def test_an_attack_that_never_ran_is_listed(result):
    plan = replace(result.plan, attack=(*result.plan.attack, {"name": "idlg"}))
    made = replace(result, plan=plan, not_run=(NotRun("x", "idlg", "budget"),))
    last = contents.coverage(made)[-1]
    assert (last.attack, last.done, last.not_run, last.reasons) == (
        "idlg",
        0,
        1,
        ("not run: budget",),
    )


def test_the_ledger_counts_every_measured_row_once(result):
    lines = {line.realism: line for line in contents.ledger(result)}
    assert {name: line.rows for name, line in lines.items()} == {
        "realistic": 4, "active": 0, "informed": 0, "oracle": 2,
    }  # fmt: skip
    assert {name: line.counts for name, line in lines.items()} == {
        "realistic": True, "active": True, "informed": True, "oracle": False,
    }  # fmt: skip
    rows = [row.measured for row in result.summary]
    best = max(row.scores["psnr"].median for row in rows if row.realism == "oracle")
    assert lines["oracle"].highest == wording.decibels(best)
    assert lines["informed"].highest == "–"


def test_limits_follow_the_result(result):
    texts = " ".join(contents.limits(result, "blur"))
    assert "the smallest row has 4 records" in texts
    assert "2 trials of the plan did not run" in texts
    assert "reduced to a few blocks" in texts
    assert "known-weak twin" not in texts
    control = tuple(replace(entry, passed=False) for entry in result.control)
    texts = " ".join(contents.limits(replace(result, not_run=(), control=control), "show"))
    assert "No attack broke the known-weak twin" in texts
    assert "did not run" not in texts
    assert "few blocks" not in texts


def test_failed_trials_of_a_row_are_a_caveat_of_it(result):
    row = result.summary[0]
    found = replace(row.measured, caveats=tuple(f"caveat {i}" for i in range(9)))
    made = replace(result, summary=(replace(row, failed=1, measured=found),))
    caveats = contents.findings(made)[0].caveats
    assert caveats[0] == "1 of 2 trials failed"
    assert caveats[1:6] == tuple(f"caveat {i}" for i in range(5))
    assert caveats[6] == "and 4 more in result.json"


def test_no_risk_is_named_where_a_mean_image_does_as_well(result):
    row = result.summary[0]
    assert (row.defence, row.attack) == ("none", "analytic")
    assert contents.findings(result)[0].risk == first_screen.risk_level(result) == "very high"
    found = replace(
        row.measured, mean_image={"psnr": row.measured.scores["psnr"].median, "ssim": 0.0}
    )
    made = replace(result, summary=(replace(row, measured=found), *result.summary[1:]))
    assert contents.findings(made)[0].risk is None
    assert first_screen.risk_level(made) is None


@pytest.mark.parametrize(("error", "text"), [(0.16, "16\xa0% too high"), (-0.4, "40\xa0% too low")])
def test_the_forecast_says_how_wrong_it_was(result, error, text):
    times = replace(result.times, forecast=replace(result.times.forecast, error=error))
    assert text in dict(annex.annex(replace(result, times=times), None))["Forecast"]


def test_many_classes_and_seeds_are_listed_in_part(result):
    audited = replace(result.federation, classes=tuple(f"c{i}" for i in range(1000)))
    scope = dict(contents.scope(replace(result, federation=audited)))
    assert scope["Classes"].startswith("1,000: c0, c1")
    assert scope["Classes"].endswith("c9 and 990 more")
    assert wording.listed(list(range(25))).endswith("19 and 5 more")


def test_a_checksum_that_cannot_be_made_is_said(tmp_path, result):
    (tmp_path / "result.json").unlink()
    assert "was not beside this report" in annex.checksum(tmp_path)


# Figures


def test_places_are_shares_of_the_axis():
    axis = figures.Axis(0, 40, (0.0, 20.0, 40.0))
    assert [axis.place(v) for v in (0, 10, 40)] == [0, 0.25, 1]
    assert (axis.place(-5), axis.place(99)) == (0, 1)


@given(st.lists(st.floats(-30, 150).map(lambda value: round(value, 3)), max_size=8))
def test_an_axis_holds_what_it_must(values):
    axis = figures.psnr_axis(values)
    assert axis.low <= 0
    assert 25 <= axis.high <= figures.CAP
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert 3 <= len(axis.ticks) <= 9
    for value in values:
        assert axis.low <= value
        assert value <= axis.high or axis.high == figures.CAP


def test_a_strip_draws_a_dot_a_record_and_its_marks():
    axis = figures.Axis(0, 40, (0.0, 40.0))
    spread = Spread(18.0, 20.0, (10.0, 24.0), (5.0, 30.0), least=5.0, most=30.0, count=3)
    svg = figures.svg(figures.strip([5.0, 20.0, 30.0], spread, 12.0, 15.0, axis))
    assert svg.count('<circle class="dot"') == 3
    assert 'cx="12.50%"' in svg
    assert '<rect class="box" x="25.00%" width="35.00%"' in svg
    assert '<line class="median" x1="50.00%"' in svg
    assert '<line class="whisker" x1="12.50%" x2="75.00%"' in svg
    assert '<svg x="30.00%"' in svg
    assert '<line class="limit" x1="37.50%"' in svg
    assert 'class="base"' not in figures.svg(figures.strip([5.0], spread, None, None, axis))


def test_many_dots_are_thinned_with_both_ends_kept():
    values = [float(v) for v in range(1000)]
    thinned = figures._thinned(values[::-1])
    assert len(thinned) == figures.MOST_DOTS
    assert (thinned[0], thinned[-1]) == (0.0, 999.0)
    steps = [b - a for a, b in pairwise(thinned)]
    assert max(steps) - min(steps) <= 1


def test_a_bar_reaches_from_zero_to_its_value():
    axis = figures.Axis(-10, 40, (0.0,))

    def bar(value, interval=None):
        return figures.svg(figures.bar(value, interval, None, None, axis))

    assert 'x="20.00%" width="40.00%"' in bar(20.0)
    assert 'x="10.00%" width="10.00%"' in bar(-5.0)
    assert "<rect" not in bar(None)
    assert 'class="interval" x1="40.00%" x2="80.00%"' in bar(20.0, [10.0, 30.0])


def test_the_end_of_a_full_axis_says_that_more_is_beyond():
    assert "≥ 50<" in figures.scale(figures.psnr_axis([80.0]))
    assert "≥" not in figures.scale(figures.psnr_axis([30.0]))
    assert math.isclose(figures.psnr_axis([80.0]).high, figures.CAP)
