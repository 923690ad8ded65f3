"""The verbs around an audit: init, check, report, diff, cite; budgets and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from leakgauge import audit, cli
from leakgauge.audit.document import Limit, duration
from leakgauge.errors import PlanError

PLAN = """
[federation]
data = "digits"
model = {{ name = "{model}" }}
training = {{ batch_norm = "eval" }}

[[attack]]
name = "{attack}"
{more}

[audit]
seeds = [0, 1]
gallery = 20
exact = false
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", sys.path[:])

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["leakgauge", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=printed.out, err=printed.err)

    return called


def write(model: str = "mlp", attack: str = "analytic", more: str = "", name: str = "plan") -> Path:
    path = Path(f"{name}.toml")
    path.write_text(PLAN.format(model=model, attack=attack, more=more))
    return path


def test_a_leak_is_code_1_and_leaves_reports(call):
    got = call("audit", write())
    assert got.code == 1, got.err
    folder = Path("leakgauge-audit/plan")
    page = (folder / "report.html").read_text()
    assert "This federation leaks" in page
    assert "This federation leaks" in (folder / "report.md").read_text()
    assert str(folder / "report.html") in got.out
    assert (
        json.loads((folder / "result.json").read_text())["times"]["forecast"]["error"] is not None
    )


def test_an_attack_that_breaks_nothing_is_code_4(call):
    write("lenet-zhu", "inverting-gradients", "iterations = 1\nlr = 1e-9")
    with Path("plan.toml").open("a") as file:
        file.write("limit = { labels = 1.0 }\n")  # labels are read at once
    got = call("audit", "plan.toml")
    assert got.code == 4, got.err
    assert "Inconclusive: no attack recovered a record" in " ".join(got.out.split())


def test_a_limit_that_is_not_passed_is_code_0(call):
    write()
    with Path("plan.toml").open("a") as file:
        file.write("limit = { share = 0.9, found = 0.9, labels = 0.95 }\n")
        file.write('[[defence]]\nname = "clip-and-noise"\nepsilon = 0.1\n')
    got = call("audit", "plan.toml")
    assert got.code == 0, got.out
    assert "Below the limit, for the attacks that were run on 2 records" in " ".join(
        got.out.split()
    )


def test_the_starter_is_a_valid_plan(call):
    assert call("init", "mine.toml").code == 0
    plan = audit.read(Path("mine.toml"))
    assert plan.document.audit.limit == Limit()
    assert call("init", "mine.toml").code == 2


def test_check_says_what_applies_and_what_it_costs(call):
    write("lenet-zhu", "inverting-gradients", "iterations = 30")
    with Path("plan.toml").open("a") as file:
        file.write('[[attack]]\nname = "analytic"\n')
    got = call("check", "plan.toml")
    assert got.code == 0, got.err
    assert "yes" in got.out
    assert "no: the analytic" in " ".join(got.out.split())
    assert "CPU seconds" in got.out
    said = " ".join(got.out.split())
    assert "What an update shows exactly, before any attack" in said
    assert "Exposed before any attack: an update here holds 1 record, and fc.0 can show" in said
    assert not Path("leakgauge-audit").exists()
    assert call("check", write("lenet-zhu", "analytic")).code == 2


def test_reports_can_be_written_again_with_other_pictures(call):
    call("audit", write())
    page = Path("leakgauge-audit/plan/report.html")
    blurred = page.read_text()
    assert call("report", "leakgauge-audit/plan", "--images", "hide", "--pdf").code == 0
    assert "data:image" not in page.read_text()
    assert "data:image" in blurred
    assert (page.parent / "report.pdf").read_bytes().startswith(b"%PDF")
    assert call("report", "nowhere").code == 2


def test_diff_and_cite(call):
    call("audit", write(), "--out", "a")
    call("audit", write(attack="inverting-gradients", more="iterations = 3"), "--out", "b")
    got = call("diff", "a", "b")
    assert got.code == 0
    assert "analytic" in got.out
    assert "inverting-gradients" in got.out
    got = call("diff", "a", "a", "--gate")
    assert got.code == 0
    assert "Nothing got worse." in got.out
    got = call("diff", "b", "a", "--gate")
    assert got.code == 1
    assert "worse: analytic, no defence, round 0: pictures recovered: leaks" in got.out
    assert call("diff", "a", "nowhere", "--gate").code == 2
    got = call("cite", "b")
    assert got.code == 0
    assert got.out.count("@") >= 1
    assert "Geiping" in got.out
    Path("a/result.json").write_text('{"schema": 99}')
    refused = call("diff", "a", "b")
    assert refused.code == 2
    assert "99" in refused.err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("5", 5)])
def test_budgets_are_read(text, seconds):
    assert duration(text, "budget") == seconds


@pytest.mark.parametrize("text", ["", "m", "-3s", "ten", "0", "nan"])
def test_budgets_that_are_none_are_refused(text):
    with pytest.raises(PlanError, match="90s, 10m or 2h"):
        duration(text, "budget")


def test_a_plan_may_set_its_budget(call):
    write()
    with Path("plan.toml").open("a") as file:
        file.write('budget = "0.001s"\n')
    got = call("audit", "plan.toml")
    assert got.code == 4
    result = json.loads(Path("leakgauge-audit/plan/result.json").read_text())
    assert len(result["not_run"]) == 2
    assert call("audit", "plan.toml", "--resume", "--budget", "5m").code == 1
