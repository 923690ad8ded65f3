"""Two audits compared: numbers side by side, what only one has, plans key by key."""

from __future__ import annotations

import copy

import pytest
from sample_result import failed, rederive, sample
from test_schema import schema_1

from leakgauge.audit import schema
from leakgauge.errors import InputError
from leakgauge.report import diff


@pytest.fixture
def a(tmp_path):
    return sample(tmp_path, seeds=1, records=4)


@pytest.fixture
def b(a):
    return copy.deepcopy(a)


def rows(a, b):
    return {(row.defence, row.attack): row for row in diff.compare(a, b).rows}


def test_an_audit_does_not_differ_from_itself(a, b):
    compared = diff.compare(a, b)
    assert compared.plans == ()
    assert len(compared.rows) == len(a["summary"])
    for row in compared.rows:
        assert row.psnr.change == row.ssim.change == row.labels.change == 0
        assert not row.clear
        assert row.only is None


def test_medians_stand_side_by_side_with_their_change(a, b):
    spread = b["summary"][0]["scores"]["psnr"]
    before = spread["median"]
    spread["median"] -= 7.5
    b["summary"][0]["scores"]["ssim"]["median"] = 0.25
    b["summary"][0]["labels"]["accuracy"] = 0.5
    row = rows(a, b)[("none", "analytic")]
    assert (row.psnr.a, row.psnr.b) == (before, before - 7.5)
    assert row.psnr.change == pytest.approx(-7.5)
    assert row.ssim.b == 0.25
    assert row.labels.change == pytest.approx(-0.375)


@pytest.mark.parametrize(
    ("first", "second", "clear"),
    [
        ([1.0, 2.0], [3.0, 4.0], True),
        ([3.0, 4.0], [1.0, 2.0], True),
        ([1.0, 3.0], [2.0, 4.0], False),
        ([1.0, 2.0], [2.0, 3.0], False),
        ([1.0, 9.0], [2.0, 3.0], False),
    ],
)
def test_a_change_is_clear_when_the_intervals_stand_apart(a, b, first, second, clear):
    a["summary"][0]["scores"]["psnr"]["interval"] = first
    b["summary"][0]["scores"]["psnr"]["interval"] = second
    assert rows(a, b)[("none", "analytic")].clear is clear
    assert ("0.0 *" in diff.text(diff.compare(a, b))) is clear


def test_rows_of_one_audit_alone_are_named(a, b):
    del b["summary"][0]
    del a["summary"][-1]
    found = rows(a, b)
    assert found[("none", "analytic")].only == "old"
    assert found[("none", "analytic")].psnr.change is None
    assert found[("prune", "dlg")].only == "new"
    assert list(found)[-1] == ("prune", "dlg")
    text = diff.text(diff.compare(a, b))
    assert "only in old" in text
    assert "only in new" in text


def test_rounds_are_kept_apart(tmp_path):
    two = sample(tmp_path, rounds=(0, 5), seeds=1, records=1)
    compared = diff.compare(two, two)
    assert sorted({row.round for row in compared.rows}) == [0, 5]
    assert len(compared.rows) == 12


def test_rows_without_numbers_are_compared_as_such(a, b):
    row = b["summary"][0]
    keys = ("round", "defence", "attack", "trials")
    b["summary"][0] = {key: row[key] for key in keys} | {
        "failed": 1, "not_applicable": 0, "reason": "boom",
    }  # fmt: skip
    found = rows(a, b)[("none", "analytic")]
    assert found.psnr.a is not None
    assert found.psnr.b is None
    assert found.only is None
    a["summary"][1]["labels"] = None
    assert rows(a, b)[("none", "inverting-gradients")].labels.a is None


def test_plans_are_compared_key_by_key(a, b):
    b["plan"]["federation"]["training"]["batch_size"] = 32
    b["plan"]["federation"]["rounds"] = [0, 1]
    b["plan"]["attack"][1]["iterations"] = 50
    b["plan"]["attack"].append({"name": "idlg"})
    del b["plan"]["audit"]["metrics"]
    b["plan"]["federation"]["participants"] = None
    assert diff.compare(a, b).plans == (
        ("federation.training.batch_size", 8, 32),
        ("federation.rounds", [0], [0, 1]),
        ("attack[1].iterations", 300, 50),
        ("attack[3]", None, {"name": "idlg"}),
        ("audit.metrics", ["psnr", "ssim"], None),
    )
    text = diff.text(diff.compare(a, b))
    assert "federation.training.batch_size" in text
    assert "32" in text


def test_the_text_shows_names_verdicts_and_numbers(a, b):
    b["verdict"]["outcome"] = "below the limit"
    b["name"] = "[bold]second\x1b[31m"
    text = diff.text(diff.compare(a, b))
    assert "Below the limit" in text
    assert "[bold]second" in text  # no markup
    assert "\x1b" not in text
    for row in a["summary"]:
        assert f"{row['scores']['psnr']['median']:.1f}" in text


# The gate


@pytest.fixture
def sound(tmp_path):
    """An audit that is below its limits, on many records."""
    return sample(
        tmp_path, attacks=("analytic",), seeds=4, records=10, pool=2, outcome="below the limit"
    )


def edited(result, change, *, defence="prune", kinds=("trial",)):
    """A copy in which `change` was done to every trial of a defence."""
    new = copy.deepcopy(result)
    for trial in new["trials"]:
        if trial["kind"] in kinds and trial["status"] == "done" and trial["defence"] == defence:
            change(trial)
    return rederive(new)


def scored(value):
    def change(trial):
        trial["scores"]["psnr"] = [value] * trial["records"]

    return change


def recognised(number):
    def change(trial):
        hits = [1.0] * number + [0.0] * (trial["records"] - number)
        trial["scores"]["identified"] = hits

    return change


def test_nothing_got_worse_in_the_same_audit_or_a_better_one(a, b, sound):
    assert diff.worse(a, b) == []
    assert diff.worse(sound, copy.deepcopy(sound)) == []
    better = edited(a, scored(5.0))
    assert diff.worse(a, better) == []


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
    assert new["verdict"]["outcome"] == "inconclusive"
    found = diff.worse(sound, new)
    assert "The verdict went from “below the limit” to “inconclusive”." in found
    assert any("too few records to tell" in sentence for sentence in found)


def test_a_share_that_rose_clearly_is_worse_even_below_its_limit(sound):
    loose = copy.deepcopy(sound)
    loose["plan"]["audit"]["limit"]["found"] = 0.95
    rederive(loose)
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


def test_a_leak_that_was_not_there_before_is_worse(a, b):
    old = copy.deepcopy(a)
    old["trials"] = [t for t in old["trials"] if t["attack"] != "inverting-gradients"]
    found = diff.worse(rederive(old), b)
    assert any("inverting-gradients, no defence, round 0" in sentence for sentence in found)
    assert all("not measured before" in sentence for sentence in found)
    assert diff.worse(b, old) == []  # what is gone is no leak


def test_attackers_who_were_told_truths_do_not_count(a):
    def told(trial):
        if trial["realism"] == "oracle":
            scored(90.0)(trial)

    assert diff.worse(a, edited(edited(a, told), told, defence="none")) == []


def test_a_crash_is_worse(a, b):
    b["trials"][0] = failed(b["trials"][0], "boom", "")
    assert diff.worse(a, rederive(b)) == ["1 trial crashed, where none did before."]
    assert diff.worse(b, b) == []


def test_raising_a_limit_hides_nothing(sound):
    new = edited(sound, scored(30.0))
    new["plan"]["audit"]["limit"] |= {"psnr": 90.0}
    rederive(new)
    assert diff.worse(sound, new)[0] == "The verdict went from “below the limit” to “leaks”."


def test_a_result_without_a_verdict_cannot_be_a_gate(a):
    with pytest.raises(InputError, match="no verdict"):
        diff.worse(schema.check(schema_1(a)), a)
