"""The reproduction board: its rows, its state on disk, its page, and the rows that CI runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import board
import board_rows
import pytest
import sources
import torch

from leakgauge import attacks
from leakgauge.errors import DataError, PlanError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def threads():
    """The board sets one thread for itself."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def row():
    """The cheapest row there is."""
    rows = {r.id: r for r in board.ROWS}
    return replace(rows["ci/inverting-gradients"], options={"iterations": 2}, runs=2)


@pytest.fixture
def only(row, monkeypatch):
    """A board of this row alone."""
    monkeypatch.setattr(board, "ROWS", [row])
    return row


def lines(state):
    return [json.loads(line) for file in state.glob("*.jsonl") for line in file.open()]


# --- the rows -------------------------------------------------------------------------------------


def test_every_row_can_be_built():
    for row in board.ROWS:
        board.attack_of(row)
        assert row.setup in board_rows.SETUPS
        assert row.setup.init in board.models.INITS


def test_rows_and_setups_have_names_of_their_own():
    for names in ([r.id for r in board.ROWS], [s.name for s in board_rows.SETUPS]):
        assert len(set(names)) == len(names)
    prints = [r.fingerprint for r in board.ROWS]
    assert len(set(prints)) == len(prints)


def test_rows_to_be_run_here_judge_at_least_ten_pairs_or_three():
    """A claim rests on ten image × seed pairs; fewer are a glimpse, shown as such."""
    glimpses = {row.id: row.runs for row in board.ROWS if row.setup.model == "resnet-18"}
    assert set(glimpses.values()) <= {3, 4, 10}
    glimpses |= {f"twin-normal/coarse-to-fine-{name}": 4 for name in board_rows.TWO_STAGES.values()}
    glimpses |= {f"twin-normal/coarse-to-fine-{name}": 4 for name in board_rows.TWO_STAGES}
    for row in board.ROWS:
        if row.here and not row.setup.cheap:
            pairs = row.runs * row.setup.batch * row.setup.steps
            assert pairs >= 10 or pairs == glimpses.get(row.id), row.id


def test_a_fingerprint_follows_what_changes_an_outcome(row):
    other = replace(row, options={"iterations": 3})
    assert other.fingerprint != row.fingerprint
    assert replace(row, setup=replace(row.setup, batch=2)).fingerprint != row.fingerprint
    assert replace(row, paper=1.0, runs=9, here=False).fingerprint == row.fingerprint


def test_tune_and_judge_never_meet():
    """Other images (another split) and other weights."""
    assert board.judged(1, 0) == ([10], 0)
    assert board.judged(4, 2) == ([90, 100, 110, 120], 2)
    assert board.tuned(1, 7) == ([7], 107)
    assert not {board.judged(1, k)[1] for k in range(100)} & {
        board.tuned(1, k)[1] for k in range(8)
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attack": "inverting-gradient"}, "did you mean 'inverting-gradients'"),
        ({"options": {"iteration": 2}}, "did you mean 'iterations'"),
    ],
)
def test_an_unknown_attack_or_option_is_an_error_before_anything_runs(
    only, change, words, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(board, "ROWS", [only, replace(only, **change)])
    assert board.main(["--cheap", "--state", str(tmp_path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert lines(tmp_path) == []


def test_unknown_rows_are_an_error():
    with pytest.raises(PlanError, match="no-such-row"):
        board.select(["no-such-row"], cheap=False)


def test_the_data_folder_must_be_named(monkeypatch):
    monkeypatch.delenv("LEAKGAUGE_DATA", raising=False)
    board.images.cache_clear()
    with pytest.raises(DataError, match="LEAKGAUGE_DATA"):
        board.images("cifar10", "test", 32)


# --- running --------------------------------------------------------------------------------------


def test_runs_are_kept_one_by_one_and_not_repeated(only, tmp_path):
    arguments = ["--cheap", "--state", str(tmp_path)]
    assert board.main(arguments) == 0
    first = lines(tmp_path)
    assert [(o["run"], o["status"], len(o["psnr"])) for o in first] == [
        (0, "done", 1),
        (1, "done", 1),
    ]
    assert board.main(arguments) == 0
    assert lines(tmp_path) == first


def test_a_killed_board_goes_on_where_it_was(only, monkeypatch, tmp_path):
    """The second run dies; what it left is a torn line. The next process runs that one only."""
    execute = board.execute

    def dies(row, run):
        if run == 1:
            raise KeyboardInterrupt
        return execute(row, run)

    monkeypatch.setattr(board, "execute", dies)
    with pytest.raises(KeyboardInterrupt):
        board.main(["--cheap", "--state", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as torn:
        torn.write('{"row": "' + only.fingerprint)
    ran = []
    monkeypatch.setattr(board, "execute", lambda row, run: ran.append(run) or execute(row, run))
    board.main(["--cheap", "--state", str(tmp_path)])
    assert ran == [1]
    assert list(board.outcomes(tmp_path, only)) == [0, 1]


def test_a_run_notes_the_commit_and_the_code_that_made_it(only, monkeypatch, tmp_path):
    monkeypatch.setattr(board, "commit", lambda: "c0ffee")
    board.main(["--cheap", "--state", str(tmp_path)])
    code = sources.digest("leakgauge.attacks.inverting_gradients")
    assert [(o["commit"], o["code"]) for o in lines(tmp_path)] == [("c0ffee", code)] * 2


def test_again_runs_what_is_older_than_its_code(only, monkeypatch, tmp_path):
    kept(only, tmp_path, 0, [10.0], code="of another day")
    kept(only, tmp_path, 1, [10.0])
    ran, execute = [], board.execute
    monkeypatch.setattr(board, "execute", lambda row, run: ran.append(run) or execute(row, run))
    for again, runs in (([], []), (["--again"], [0]), (["--again"], [0])):
        assert board.main(["--cheap", "--state", str(tmp_path), *again]) == 0
        assert ran == runs


def test_the_same_run_gives_the_same_outcome(row):
    first, second = (board.execute(row, 1) for _ in range(2))
    for outcome in (first, second):
        outcome.pop("cpu_seconds")
    assert first == second


def test_a_changed_row_is_run_anew(only, monkeypatch, tmp_path):
    board.main(["--cheap", "--state", str(tmp_path)])
    other = replace(only, options={"iterations": 1})
    assert board.outcomes(tmp_path, other) == {}
    assert len(board.outcomes(tmp_path, only)) == 2


def test_a_failure_is_kept_reported_and_tried_again(only, monkeypatch, tmp_path):
    def fails(self, *_):
        raise RuntimeError("out of luck")

    attack = attacks.ATTACKS[only.attack]
    with monkeypatch.context() as patch:
        patch.setattr(attack, "reconstruct", fails)
        assert board.main(["--cheap", "--state", str(tmp_path)]) == 3
    assert {o["error"] for o in lines(tmp_path)} == {"RuntimeError: out of luck"}
    assert "failed in 2 runs: RuntimeError: out of luck" in board.render(tmp_path, [only])
    assert board.main(["--cheap", "--state", str(tmp_path)]) == 0
    assert {o["status"] for o in board.outcomes(tmp_path, only).values()} == {"done"}


def test_no_run_is_started_when_the_time_is_up(only, tmp_path):
    assert board.main(["--cheap", "--state", str(tmp_path), "--seconds", "0"]) == 0
    assert lines(tmp_path) == []


def test_two_processes_share_the_runs(row, tmp_path):
    """A run that another process has claimed is left to it, until that process ends."""
    held = (
        "import sys, pathlib, board\n"
        "from dataclasses import replace\n"
        "row = {r.id: r for r in board.ROWS}['ci/inverting-gradients']\n"
        "row = replace(row, options={'iterations': 2}, runs=2)\n"
        "with board.claims(pathlib.Path(sys.argv[1])) as claim:\n"
        "    print(claim(row, 0), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    other = subprocess.Popen(
        [sys.executable, "-c", held, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert other.stdout.readline() == "True\n"
    with board.claims(tmp_path) as claim:
        assert [claim(row, 0), claim(row, 1)] == [False, True]
        other.kill()
        other.wait()
        assert claim(row, 0)


def test_the_attack_sees_the_observation_only(row, monkeypatch):
    """The truth is handed to the scores after the attack has returned, never before."""
    attack = attacks.ATTACKS[row.attack]
    real, seen = attack.reconstruct, []

    def spied(self, observation, rng, resources):
        seen.append(observation)
        return real(self, observation, rng, resources)

    monkeypatch.setattr(attack, "reconstruct", spied)
    board.execute(row, 0)
    assert seen[0].labels is None
    assert seen[0].own is None


# --- the page -------------------------------------------------------------------------------------


def kept(row, state, run, psnr, **more):
    outcome = {
        "row": row.fingerprint, "run": run, "status": "done", "weights": run, "cpu_seconds": 7.0,
        "psnr": psnr, "affine_psnr": [p + 1 for p in psnr], "mean_image_psnr": [9.0] * len(psnr),
        "mean_image_affine_psnr": [11.0] * len(psnr), "labels": 1.0, "options": {},
        "facts": {"iterations": 40}, "commit": "c0ffee0" * 5, "code": board.code_of(row),
    }  # fmt: skip
    board.keep(state, row, outcome | more)


def test_a_row_of_the_page(row, tmp_path):
    row = replace(row, runs=5, paper=22.65)
    for run, value in enumerate([10.0, 20.0, 30.0, 40.0]):
        kept(row, tmp_path, run, [value])
    page = board.render(tmp_path, [row])
    assert (
        "| inverting-gradients | 22.65 | 25.0 (17.5 to 32.5) | 75% | 40 | 7 | 1 × 4 of 5 |" in page
    )
    assert "| *mean image (knows nothing)* | – | 9.0 (9.0 to 9.0) | 0% | – | – | 4 |" in page
    assert "affine |" not in page


def test_rows_that_are_older_than_their_code_are_marked(row, tmp_path):
    row = replace(row, runs=4)
    kept(row, tmp_path, 0, [10.0])
    page = board.render(tmp_path, [row])
    assert "| inverting-gradients | –" in page
    assert "0 of 1 rows were from before runs noted their\ncommit (†), and of 0 the code" in page
    kept(row, tmp_path, 1, [10.0], code="of another day")
    kept(row, tmp_path, 2, [10.0], code="of another day", commit="beef" * 10 + " with changes")
    page = board.render(tmp_path, [row])
    assert "| inverting-gradients ‡ c0ffee0, beefbee with changes |" in page
    assert "and of 1 the code had changed" in page
    board.keep(tmp_path, row, old := board.outcomes(tmp_path, row)[0] | {"run": 3})
    assert "‡" in board.render(tmp_path, [row])
    del old["code"], old["commit"]
    board.keep(tmp_path, row, old)
    page = board.render(tmp_path, [row])
    assert "| inverting-gradients † |" in page
    assert "1 of 1 rows were from before" in page


def test_train_mode_shows_the_affine_score(row, monkeypatch, tmp_path):
    setup = replace(row.setup, batch=2, batch_norm="train")
    monkeypatch.setattr("board_page.SETUPS", [setup])
    row = replace(row, setup=setup, runs=1)
    kept(row, tmp_path, 0, [10.0, 20.0])
    page = board.render(tmp_path, [row])
    assert "| 15.0 (12.5 to 17.5) | 50% | 16.0 | 40 | 7 | 2 × 1 |" in page


def test_a_glance_has_one_line_a_setup_with_the_best_in_bold(row, monkeypatch, tmp_path):
    setup = replace(row.setup, cheap=False)
    monkeypatch.setattr("board_page.SETUPS", [setup])
    ig, c2f, dlg, idlg, exact = rows = [
        replace(row, setup=setup, attack=attack, runs=3, options={})
        for attack in (row.attack, "coarse-to-fine", "dlg", "idlg", "exact-recursion")
    ]
    kept(ig, tmp_path, 0, [10.0])
    assert "At a glance" not in board.render(tmp_path, rows)  # nothing to compare with
    for other, value in ((c2f, 12.0), (dlg, 13.0), (idlg, 11.0), (exact, 90.0)):
        kept(other, tmp_path, 0, [value])
    kept(ig, tmp_path, 1, [12.0])
    kept(ig, tmp_path, 2, [40.0])  # medians count, not the best run
    page = board.render(tmp_path, rows)
    assert f"| {setup.title} | 9.0 | 12.0 | 12.0 | – | **13.0** (dlg) | 90.0 |" in page


def test_missing_and_not_run_rows_say_so(row, tmp_path):
    page = board.render(tmp_path, [replace(row, here=False)])
    assert "| not run |" in page
    assert "what was not run: `python benchmarks/board.py --rows 'ci/*'`" in page
    assert "| missing |" in board.render(tmp_path, [row])


def test_wrong_labels_facts_and_changed_options_are_noted(row, tmp_path):
    row = replace(row, facts=("layers",))
    facts = {"iterations": 2, "layers": 5}
    kept(row, tmp_path, 0, [10.0], labels=0.0, facts=facts, options={"lr": 12.0})
    page = board.render(tmp_path, [row])
    assert "labels were wrong in 1 of 1 runs" in page
    assert "layers: 5 (1 ×)" in page
    assert "default options have changed" in page


def test_not_applicable_gives_its_reason(row, tmp_path):
    outcome = {"row": row.fingerprint, "run": 0, "status": "not applicable", "error": "no ReLU"}
    board.keep(tmp_path, row, outcome)
    assert "not applicable in 1 runs: no ReLU" in board.render(tmp_path, [row])


def test_the_forecast_is_what_runs_took_else_what_was_calibrated(row, tmp_path):
    assert board.forecast(tmp_path, row) is None
    (tmp_path / "pace.json").write_text(json.dumps({row.id: 3.0}))
    assert board.forecast(tmp_path, row) == 3.0
    kept(row, tmp_path, 0, [10.0])
    assert board.forecast(tmp_path, row) == 7.0


def test_a_pace_covers_all_iterations(row):
    """Twenty iterations cost more than two, and the probe does not run them all."""
    assert board.pace(replace(row, options={"iterations": 5000}), probe=0.05) > 10 * board.pace(row)


# --- the cheap rows -------------------------------------------------------------------------------

TOLERANCE = 3.0  # dB; machines round differently, and a search amplifies it


def test_cheap_rows_give_what_the_board_publishes(tmp_path, monkeypatch):
    """The first run of each, image by image."""
    rows = [replace(row, runs=1) for row in board.ROWS if row.setup.cheap]
    assert rows
    monkeypatch.setattr(board, "ROWS", rows)
    assert board.main(["--cheap", "--state", str(tmp_path)]) == 0
    for row in rows:
        ours, published = (board.outcomes(state, row)[0] for state in (tmp_path, board.STATE))
        assert ours["psnr"] == pytest.approx(published["psnr"], abs=TOLERANCE), row.id


def test_the_page_is_that_of_the_state():
    """docs/board.md was rendered after the last run. Its marks are of the code of that day."""

    def unmarked(page: str) -> str:
        page = re.sub(r"\*\*Age\.\*\*.*?\n\n", "", page, count=1, flags=re.DOTALL)
        return re.sub(r" [†‡][^|\n]* \|", " |", page)

    written = board.PAGE.read_text(encoding="utf-8")
    assert "**Age.**" in written
    assert unmarked(written) == unmarked(board.render(board.STATE, board.ROWS))


def test_tuning_runs_on_tune_pairs_and_keeps_nothing(row, monkeypatch, tmp_path, capsys):
    asked = []
    real = board.round_of

    def round_of(row, run, *, judge=True):
        asked.append((row.options, run, judge))
        return real(row, run, judge=judge)

    monkeypatch.setattr(board, "round_of", round_of)
    monkeypatch.setattr(board, "ROWS", [row])
    given = ["--state", str(tmp_path), "--rows", row.id, "--tune", "2", "--set", "iterations=2"]
    assert board.main([*given, "tv=0.5"]) == 0
    changed = row.options | {"iterations": 2, "tv": 0.5}
    assert asked == [(changed, 0, False), (changed, 1, False)]
    assert "median" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert board.main([*given, "tw=0.5"]) == 2
    assert "unknown key 'tw'" in capsys.readouterr().err
    assert board.main([*given, "tv:0.5"]) == 2
    assert "key=value" in capsys.readouterr().err
