"""Trials in processes: any of them may be killed at any time, and nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakgauge.audit import Store, parse, read, run
from leakgauge.audit.workers import Workers, next_of
from leakgauge.config import plain
from leakgauge.errors import InputError, PlanError

KILLED = (2, 1, 2, 1, 2)  # the jobs of each run that is killed

PLAN = """
[federation]
data = "digits"
model = { name = "mlp", hidden = [16] }
training = { batch_size = 2 }

[[attack]]
name = "inverting-gradients"
iterations = 60

[[defence]]
name = "none"
[[defence]]
name = "clip"

[audit]
seeds = [%s]
gallery = 20
exact = false
explain = false
"""


def prepare() -> Callable[[Any, Any], dict[str, Any]]:
    """A bench for tests: cases are (what to do, a folder)."""

    def work(case: tuple[str, str], progress: Callable[[int, int, float], None]) -> dict[str, Any]:
        what, folder = case
        marks = Path(folder) / what.replace(" ", "-")
        marks.mkdir(exist_ok=True)
        tries = len(list(marks.iterdir()))
        (marks / str(tries)).touch()
        progress(1, 1, 0.5)
        if what == "die always" or (what == "die once" and tries == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "crash":
            raise ZeroDivisionError("by hand")
        if what == "leave":
            sys.exit(0)
        if what == "refuse":
            raise InputError("not like this")
        return {"what": what, "tries": tries + 1, "pid": os.getpid()}

    return work


def played(cases: list[tuple[str, str]], jobs: int, **options: Any) -> dict[str, Any]:
    hooks: dict[str, Any] = {
        "may_start": lambda case: True,
        "on_start": lambda case: None,
        "on_progress": lambda case, done, total, objective: None,
    } | options
    workers: Workers[tuple[str, str]] = Workers(prepare, jobs)
    try:
        return {case[0]: trial for case, trial in workers.run(cases, **hooks)}
    finally:
        workers.close()


def test_cases_are_shared_out_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """What may not start is skipped; the case of a worker that died is tried once more."""
    names = ["not this", "die once", "work 0", "die always", "work 1", "work 2", "work 3"]
    told = []
    got = played(
        [(name, str(tmp_path)) for name in names],
        2,
        on_progress=lambda case, *step: told.append(case[0]),
        may_start=lambda case: case[0] != "not this",
    )
    assert set(got) == set(names[1:])
    assert {got[name]["tries"] for name in names if name.startswith("work")} == {1}
    assert got["die once"]["tries"] == 2
    assert got["die always"] is None
    assert len(list((tmp_path / "die-always").iterdir())) == 2
    assert os.getpid() not in {trial["pid"] for trial in got.values() if trial}
    assert {"work 0", "work 1"} & set(told)
    assert "not this" not in told


def test_an_error_of_the_user_ends_the_audit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not like this"):
        played([("refuse", str(tmp_path))], 2)


def test_an_error_that_nobody_expected_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: by hand in a worker"):
        played([("crash", str(tmp_path))], 2)
    assert len(list((tmp_path / "crash").iterdir())) == 1


def test_code_that_leaves_a_worker_is_an_error_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"ended the program with sys.exit\(0\)"):
        played([("leave", str(tmp_path)), ("work", str(tmp_path))], 2)


def test_workers_stay_for_more_cases(tmp_path: Path) -> None:
    workers: Workers[tuple[str, str]] = Workers(prepare, 2)
    hooks: dict[str, Any] = {
        "may_start": lambda case: True,
        "on_start": lambda case: None,
        "on_progress": lambda *step: None,
    }
    try:
        pids = [
            {trial["pid"] for _, trial in workers.run([(name, str(tmp_path))], **hooks) if trial}
            for name in ("work 1", "work 2")
        ]
    finally:
        workers.close()
    assert pids[0] == pids[1]


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        ("b", {"a"}, "b1"),  # the round it has played
        (None, {"a"}, "b1"),  # one that nobody is at
        (None, {"a", "b"}, "-1"),  # one that costs nothing
        ("c", {"a", "b"}, "-1"),
        (None, set(), "a1"),  # the first
    ],
)
def test_cases_of_one_round_go_to_the_worker_that_played_it(
    own: object, others: set[object], chosen: str
) -> None:
    def key(case: str) -> object:
        return None if case[0] == "-" else case[0]

    assert next_of(["a1", "a2", "b1", "-1", "b2"], key, own, others) == chosen
    assert next_of(["a1", "a2"], key, own, {"a"}) == "a1"  # rather that than none


def without_times(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "times"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_jobs_do_not_change_the_result(tmp_path: Path) -> None:
    table = {
        "federation": {"data": "digits", "model": {"name": "mlp", "hidden": [8]}},
        "attack": [{"name": "analytic"}, {"name": "inverting-gradients", "iterations": 5}],
        "audit": {"seeds": [0, 1], "gallery": 20, "exact": False},
    }
    results = [
        run(parse(table, "tiny", tmp_path), Store(tmp_path / str(jobs)), jobs=jobs)
        for jobs in (1, 2)
    ]
    one, two = map(without_times, results)
    assert one == two


def finished(out: Path) -> int:
    return len(list((out / "trials").glob("*.json")))


def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    """The audit is killed, with and without processes of its own, and then goes on."""
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN % ", ".join(map(str, range(12))))
    killed = tmp_path / "killed"
    program = (
        "import sys\nfrom pathlib import Path\nfrom leakgauge.audit import Store, read, run\n"
        "plan, out = map(Path, sys.argv[1:3])\n"
        "run(read(plan), Store(out), resume=True, jobs=int(sys.argv[3]))"
    )
    chance = random.Random(0)
    for jobs in KILLED:
        before = finished(killed)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(plan), str(killed), str(jobs)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and finished(killed) == before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))  # somewhere within a trial, or between two
        assert process.poll() is None, "there was nothing left to kill"
        process.kill()
        process.wait()
    assert not (killed / "result.json").exists()
    whole = [
        without_times(run(read(plan), Store(out), resume=True))
        for out in (tmp_path / "never killed", killed)
    ]
    assert whole[0] == whole[1]
    left = [path for path in killed.rglob(".*") if path.is_file()]
    assert len(left) <= len(KILLED) * 2  # what a kill interrupted is hidden, and nobody reads it
