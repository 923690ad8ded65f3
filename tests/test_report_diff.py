"""Two audits compared: numbers side by side, what only one has, plans key by key."""

from __future__ import annotations

import copy

import pytest
from sample_result import sample

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
    assert found[("none", "analytic")].only == "A"
    assert found[("none", "analytic")].psnr.change is None
    assert found[("prune", "dlg")].only == "B"
    assert list(found)[-1] == ("prune", "dlg")
    text = diff.text(diff.compare(a, b))
    assert "only in A" in text
    assert "only in B" in text


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
