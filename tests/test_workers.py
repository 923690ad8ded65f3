"""Trials in processes: any of them may be killed at any time, and nothing is lost or doubled."""

from __future__ import annotations

import dataclasses
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

from leakgauge.attacks import Analytic
from leakgauge.audit import Store, Watch, parse, read, run
from leakgauge.audit.bench import Done
from leakgauge.audit.cases import Case
from leakgauge.audit.engine import Crew, Here, Hooks, next_of
from leakgauge.audit.results import Times, Trial
from leakgauge.audit.workers import Processes
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


def case(what: str, folder: Path) -> Case:
    """What a bench for tests is to do: in a folder, where it leaves marks."""
    return Case("trial", 0, str(folder), what, 0)


def prepare() -> Callable[[Case, Callable[[int, int, float], None]], Done]:
    """A bench for tests."""

    def work(case: Case, progress: Callable[[int, int, float], None]) -> Done:
        what = case.attack
        marks = Path(case.defence) / what.replace(" ", "-")
        marks.mkdir(exist_ok=True)
        tries = len(list(marks.iterdir()))
        (marks / str(tries)).touch()
        progress(1, 1, 0.5)
        if what == "die always" or (what == "die once" and tries == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "slow":
            time.sleep(1)
        if what == "crash":
            raise ZeroDivisionError("by hand")
        if what == "leave":
            sys.exit(0)
        if what == "refuse":
            raise InputError("not like this")
        name = f"{tries + 1} {os.getpid()}"
        times = Times(0.0, 0.0)
        return Done(Trial(name, "trial", 0, "", what, 0, "realistic", "failed", "", times))

    return work


def unprepared() -> Callable[[Case, Callable[[int, int, float], None]], Done]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hooked(**options: Any) -> Hooks:
    hooks: dict[str, Any] = {
        "may_start": lambda case: True,
        "ended": lambda case, done: None,
        "begin": lambda case: None,
        "progress": lambda case, done, total, objective: None,
        "shares": lambda case: None,
    }
    return Hooks(**hooks | options)


def told(done: Done | None) -> tuple[int, int] | None:
    """At which try a trial was done, and by which process."""
    return None if done is None else tuple(map(int, done.trial.id.split()))


def played(
    names: list[str], folder: Path, jobs: int, prepare: Any = prepare, **options: Any
) -> dict[str, tuple[int, int] | None]:
    engine = Processes(lambda: prepare, jobs)
    crew = Crew(engine, hooked(**options))
    try:
        return {c.attack: told(d) for c, d in crew.run([case(name, folder) for name in names])}
    finally:
        engine.close()


def test_cases_are_shared_out_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """What may not start is skipped; the case of a worker that died is tried once more."""
    names = ["not this", "die once", "work 0", "die always", "work 1", "work 2", "work 3"]
    steps, begun, ended = [], [], []
    got = played(
        names,
        tmp_path,
        2,
        progress=lambda case, *step: steps.append(case.attack),
        may_start=lambda case: case.attack != "not this",
        begin=lambda case: begun.append(case.attack),
        ended=lambda case, done: ended.append(case.attack),
    )
    assert set(got) == set(names[1:])
    assert {got[name][0] for name in names if name.startswith("work")} == {1}
    assert got["die once"][0] == 2
    assert got["die always"] is None
    assert len(list((tmp_path / "die-always").iterdir())) == 2
    assert os.getpid() not in {one[1] for one in got.values() if one}
    assert {"work 0", "work 1"} & set(steps)
    assert "not this" not in steps
    assert sorted(begun) == sorted(names[1:])  # once each, however often it was tried
    assert sorted(ended) == sorted(set(names[1:]) - {"die always"})


def test_a_trial_is_known_before_the_next_is_asked_for_and_kept_before_it_is_shown() -> None:
    """The budget counts it; and whoever is killed at the next one has not lost it."""
    events: list[str] = []

    class Bench:
        def run(self, case: Case, progress: Any) -> Done:
            events.append(f"run {case.attack}")
            times = Times(0.0, 0.0)
            return Done(Trial("", "trial", 0, "", "", 0, "realistic", "failed", "", times))

    hooks = hooked(
        may_start=lambda case: events.append(f"may {case.attack}") or True,
        ended=lambda case, done: events.append(f"ended {case.attack}"),
        begin=lambda case: events.append(f"begin {case.attack}"),
    )
    for one, _ in Crew(Here(Bench()), hooks).run([case("a", Path()), case("b", Path())]):
        events.append(f"kept {one.attack}")
    assert events == [
        "may a", "begin a", "run a", "ended a", "may b", "kept a", "begin b", "run b", "ended b",
        "kept b",
    ]  # fmt: skip


def test_workers_that_die_before_their_first_case_end_the_audit(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^2 workers in turn died before their first"):
        played(["work 0", "work 1"], tmp_path, 2, unprepared)


def test_a_worker_that_died_idle_is_replaced(tmp_path: Path) -> None:
    engine = Processes(lambda: prepare, 1)
    crew = Crew(engine, hooked())
    try:
        ((_, first),) = crew.run([case("work 1", tmp_path)])
        os.kill(told(first)[1], signal.SIGKILL)
        ((_, second),) = crew.run([case("work 2", tmp_path)])
    finally:
        engine.close()
    assert told(second)[0] == 1
    assert told(second)[1] != told(first)[1]


def test_an_error_of_the_user_ends_the_audit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not like this"):
        played(["refuse"], tmp_path, 2)


def test_an_error_that_nobody_expected_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: by hand in a worker"):
        played(["crash"], tmp_path, 2)
    assert len(list((tmp_path / "crash").iterdir())) == 1


def test_code_that_leaves_a_worker_is_an_error_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"ended the program with sys.exit\(0\)"):
        played(["leave", "work"], tmp_path, 2)


def test_workers_stay_for_more_cases(tmp_path: Path) -> None:
    engine = Processes(lambda: prepare, 2)
    crew = Crew(engine, hooked())
    try:
        one, two = (list(crew.run([case(name, tmp_path)])) for name in ("work 1", "work 2"))
    finally:
        engine.close()
    assert told(one[0][1])[1] == told(two[0][1])[1]


def test_a_worker_that_died_idle_beside_a_busy_one_is_given_nothing(tmp_path: Path) -> None:
    engine = Processes(lambda: prepare, 2)
    crew = Crew(engine, hooked())
    try:
        for one, done in crew.run([case("slow", tmp_path), case("work 0", tmp_path)]):
            if one.attack == "work 0":
                os.kill(told(done)[1], signal.SIGKILL)
        more = list(crew.run([case("work 1", tmp_path), case("work 2", tmp_path)]))
    finally:
        engine.close()
    assert [told(done)[0] for _, done in more] == [1, 1]


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


TINY = {
    "federation": {"data": "digits", "model": {"name": "mlp", "hidden": [8]}},
    "attack": [{"name": "analytic"}],
    "audit": {"seeds": [0, 1, 2], "gallery": 20, "exact": False, "explain": False},
}


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
    one, two = (without_times(plain(result)) for result in results)
    assert one == two
    pictures = [
        {path.relative_to(tmp_path / jobs): path.read_bytes() for path in images}
        for jobs in "12"
        if (images := sorted((tmp_path / jobs / "images").rglob("*.png")))
    ]
    assert pictures[0] == pictures[1]


def test_no_more_processes_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    widths, said = [], []
    start = Processes.start
    monkeypatch.setattr(Processes, "start", lambda self: widths.append(self.width) or start(self))
    plan = parse(TINY, "tiny", tmp_path)
    run(plan, Store(tmp_path / "out"), jobs=1000, watch=Watch(say=said.append))
    assert widths == [1]
    assert said == ["--jobs 1000: this machine has fewer cores; trials at a time: 1"]


def test_a_plan_that_was_changed_in_python_is_run_as_it_is(tmp_path: Path) -> None:
    """It travels by value: a worker does not read its file again."""
    plan = parse(TINY, "tiny", tmp_path)
    changed = dataclasses.replace(plan, attacks={"mine": Analytic()}, asked=("mine",))
    result = run(changed, Store(tmp_path / "out"), jobs=2)
    assert {trial.attack for trial in result.trials} == {"mine"}

    class Local(Analytic):
        pass

    local = dataclasses.replace(plan, attacks={"mine": Local()}, asked=("mine",))
    with pytest.raises(PlanError, match=r"cannot be sent to another process .*Local.*use one job"):
        run(local, Store(tmp_path / "local"), jobs=2)
    assert not (tmp_path / "local").exists()


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
        without_times(plain(run(read(plan), Store(out), resume=True)))
        for out in (tmp_path / "never killed", killed)
    ]
    assert whole[0] == whole[1]
    left = [path for path in killed.rglob(".*") if path.is_file()]
    assert len(left) <= len(KILLED) * 2  # what a kill interrupted is hidden, and nobody reads it
