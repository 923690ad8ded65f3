"""What an audit needs is made before it, listed with its cost; the audit goes on from there."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learned_attack
import pytest
from learned_attack import Nearest

from leakgauge import audit, cli
from leakgauge.audit import Store, fit, parse, run
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.report import annex, terminal
from leakgauge.types import Preparation

PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "clients": 2,
        "public": 40,
    },
    "threat": {"actor": "eavesdropper"},
    "attack": [{"name": "learned_attack:Nearest"}],
    "defence": [{"name": "none"}, {"name": "clip", "norm": 0.01}],
    "audit": {"seeds": [0, 1], "gallery": 20, "control": False},
}


def plan(**changes: Any) -> audit.Plan:
    table = copy.deepcopy(PLAN) | changes
    return parse(table, "plan", Path.cwd())


@pytest.fixture(autouse=True)
def forgotten() -> None:
    learned_attack.CALLED.clear()
    learned_attack.SEEN.clear()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with the path of imports given back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line; its exit code and what it printed."""

    def called(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["leakgauge", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=printed.out, err=printed.err)

    return called


def test_what_is_fitted_is_listed_first_and_an_audit_goes_on_from_it(tmp_path: Path) -> None:
    out, told = tmp_path / "out", list[Any]()
    watch = fit.Watch(
        listed=lambda fits: told.append(("listed", fits, out.exists() and any(out.iterdir()))),
        begin=lambda one: told.append(("begin", one, None)),
        end=lambda one: told.append(("end", one, None)),
    )
    made = fit.fit(plan(), Store(out), watch)
    assert [word for word, *_ in told] == ["listed", *["begin", "end"] * 4]
    [(_, fits, _), *_] = told
    places = [(one.case.defence, one.case.seed, one.trials, one.done) for one in fits]
    assert places == [(d, s, 1, False) for d in ("none", "clip") for s in (0, 1)]
    assert all(one.cpu_seconds > 0 for one in fits)
    assert all(one.done and one.cpu_seconds > 0 for one in made)
    assert {path.name for path in out.iterdir()} == {"plan.json", "prepared"}
    asked = len(learned_attack.CALLED)

    result = run(plan(), Store(out))  # without resume
    assert len(learned_attack.CALLED) == asked
    assert {trial.status for trial in result.trials} == {"done"}
    took = {one.cpu_seconds for one in made}
    assert {trial.times.fit for trial in result.trials} == took
    words = annex.fits(result)["Nearest"]
    assert words.endswith("of CPU time, 4 fits for 4 trials")
    assert ("Fit of Nearest", words) in annex.annex(result, None)
    assert terminal.notes(result)[0] == f"Nearest: fitted in {words}"
    direct = run(plan(), Store(tmp_path / "direct"))
    for one, other in zip(result.trials, direct.trials, strict=True):
        assert (one.found, one.score) == (other.found, other.score)


def test_what_is_done_is_not_made_or_tried_again(tmp_path: Path) -> None:
    fit.fit(plan(), Store(tmp_path))
    asked = len(learned_attack.CALLED)
    begun: list[fit.Fit] = []
    again = fit.fit(plan(), Store(tmp_path), fit.Watch(begin=begun.append))
    assert not begun
    assert all(one.done for one in again)
    assert len(learned_attack.CALLED) == asked
    result = run(plan(), Store(tmp_path))
    assert len(fit.fit(plan(), Store(tmp_path))) == 4  # also in the folder of an audit
    assert json.loads((tmp_path / "result.json").read_text())["name"] == result.name


@pytest.mark.parametrize(
    ("attack", "fits"),
    [
        ({"name": "rog", "steps": 2}, 1),
        ({"name": "guided-diffusion", "training": 1}, 1),
        ({"name": "lti", "pairs": 24, "steps": 2}, 2),
    ],
)
def test_what_needs_no_model_is_made_once(
    tmp_path: Path, attack: dict[str, Any], fits: int
) -> None:
    """Two seeds are two models: what learns their pairs is made for each, a prior once."""
    one = plan(attack=[attack], threat={"actor": "server"}, defence=[{"name": "none"}])
    made = fit.fit(one, Store(tmp_path))
    assert len(made) == fits
    assert [found.reason for found in made] == [None] * fits
    assert sum(found.trials for found in made) == 2


def test_controls_and_rungs_of_the_only_attack_are_made(tmp_path: Path) -> None:
    surely = plan(audit=PLAN["audit"] | {"control": True})
    made = fit.fit(surely, Store(tmp_path))
    assert {one.case.kind for one in made} == {"control", "ladder", "trial"}
    asked = len(learned_attack.CALLED)
    result = run(surely, Store(tmp_path))
    assert {trial.kind for trial in result.trials} == {"control", "ladder", "trial"}
    assert len(learned_attack.CALLED) == asked


class Killed(BaseException):
    """As if the process had ended: nothing catches it."""


def test_a_fit_that_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = fit.fit(plan(), Store(tmp_path / "whole"))

    def stop(done: int, total: int, objective: float) -> None:
        if done == 5:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        fit.fit(plan(), Store(out), fit.Watch(progress=stop))
    steps: list[int] = []
    watch = fit.Watch(progress=lambda done, total, objective: steps.append(done))
    made = fit.fit(plan(), Store(out), watch)
    assert steps[:8] == list(range(6, 13)) + [1]
    assert [one.case for one in made] == [one.case for one in whole]
    for path in (tmp_path / "whole" / "prepared").iterdir():
        assert (out / "prepared" / path.name).exists()


SLOW = """
import time
from learned_attack import Nearest

class Slow(Nearest):
    def prepare(self, target, rng, resources=None):
        resources = resources or __import__("leakgauge.types").types.Resources()
        tell = resources.progress
        def slowly(*step):
            tell and tell(*step)
            time.sleep(0.15 if resources.seconds is None else 0)
        from dataclasses import replace
        return super().prepare(target, rng, replace(resources, progress=slowly))
"""


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "slow_attack.py").write_text(SLOW)
    (tmp_path / "plan.toml").write_text(
        '[federation]\nmodel = "mlp"\ndata = "digits"\npublic = 40\n'
        '[threat]\nactor = "eavesdropper"\n[[attack]]\nname = "slow_attack:Slow"\npairs = 16\n'
        "[audit]\nseeds = [0]\ncontrol = false\nexplain = false\n"
    )
    roots = Path(__file__).parent, Path(cli.__file__).parents[1]
    paths = os.pathsep.join(map(str, roots))
    command = [sys.executable, "-c", "from leakgauge.cli import main; main()",
               "fit", "plan.toml", "--out", "out"]  # fmt: skip
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": paths}}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    ends = time.monotonic() + 60
    prepared = tmp_path / "out" / "prepared"
    while not list(prepared.glob("*.safetensors")) and time.monotonic() < ends:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [before] = prepared.glob("*.safetensors")
    assert "finished" not in before.name
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert "1 fit to make, about" in done.stdout
    [after] = prepared.iterdir()
    assert after.name == before.name.replace(".safetensors", ".finished.safetensors")


def test_another_plan_is_refused(tmp_path: Path) -> None:
    fit.fit(plan(), Store(tmp_path))
    other = plan(audit=PLAN["audit"] | {"seeds": [0, 1, 2]})
    with pytest.raises(PlanError, match="holds an audit already"):
        run(other, Store(tmp_path))
    for begin in (
        lambda: run(other, Store(tmp_path), resume=True),
        lambda: fit.fit(other, Store(tmp_path)),
    ):
        with pytest.raises(PlanError, match="holds an audit of a different plan"):
            begin()
    run(other, Store(tmp_path), overwrite=True)
    assert len(list((tmp_path / "prepared").iterdir())) == 6


def test_a_folder_with_a_trial_is_an_audit(tmp_path: Path) -> None:
    fit.fit(plan(), Store(tmp_path))
    assert Store(tmp_path).only_fitted
    (tmp_path / "trials").mkdir()
    assert not Store(tmp_path).only_fitted
    with pytest.raises(PlanError, match="holds an audit already"):
        run(plan(), Store(tmp_path))


@dataclass(frozen=True)
class Never(Nearest):
    """It does not apply, or crashes."""

    error: str = "applies"

    def prepare(self, *_: Any, **__: Any) -> Any:
        raise NotApplicable("not here") if self.error == "applies" else ZeroDivisionError("oh")


@dataclass(frozen=True)
class Counting(Nearest):
    """It knows itself what it took, before it was stopped too."""

    def prepare(self, *args: Any, **options: Any) -> Preparation:
        made = super().prepare(*args, **options)
        return replace(made, kept=replace(made.kept, facts={"cpu_seconds": 1234.5}))


def test_what_a_fit_took_is_what_the_attack_says_that_it_took(tmp_path: Path) -> None:
    counting = plan(attack=[{"name": "test_fit:Counting"}])
    assert {one.cpu_seconds for one in fit.fit(counting, Store(tmp_path))} == {1234.5}
    result = run(counting, Store(tmp_path))
    assert {trial.times.fit for trial in result.trials} == {1234.5}
    assert annex.fits(result)["Counting"].endswith("4 fits for 4 trials")


def write(folder: Path, *attacks: str, more: str = "") -> Path:
    tables = "".join(f"[[attack]]\n{attack}\n" for attack in attacks)
    path = folder / "plan.toml"
    path.write_text(
        '[federation]\nmodel = { name = "mlp", hidden = [8] }\ndata = "digits"\npublic = 40\n'
        f"{tables}[audit]\nseeds = [0]\ncontrol = false\nexplain = false\nexact = false\n{more}"
    )
    return path


def test_the_command_lists_makes_and_says_what_follows(desk: Path, call: Any) -> None:
    write(desk, 'name = "learned_attack:Nearest"')
    got = call("fit", "plan.toml", "--out", "out")
    assert got.code == 0, got.err
    assert "1 fit to make, about" in got.out
    assert got.out.index("to make") < got.out.index("1 of 1 fits are there")
    assert "`leakgauge audit plan.toml --out out` goes on from here" in got.out
    again = call("fit", "plan.toml", "--out", "out")
    assert "done (" in again.out
    assert "all of it is there" in again.out
    asked = len(learned_attack.CALLED)
    audited = call("audit", "plan.toml", "--out", "out")
    assert audited.code in (0, 1, 4), audited.err
    assert "Nearest: fitted in" in audited.out
    # The forecast tries it in a folder of its own; the trial finds what was fitted.
    assert len(learned_attack.CALLED) <= asked + 1


def test_nothing_to_fit_is_said(desk: Path, call: Any) -> None:
    write(desk, 'name = "analytic"')
    got = call("fit", "plan.toml", "--out", "out")
    assert got.code == 0
    assert "nothing to fit: no attack of plan prepares what several trials share" in got.out
    assert not (desk / "out").exists()


@pytest.mark.parametrize(
    ("attacks", "code", "words"),
    [
        (['name = "test_fit:Never"'], 2, "Never: not here"),
        (['name = "test_fit:Never"\nerror = "crash"', 'name = "learned_attack:Nearest"'], 3,
         r"Never: it crashes \(ZeroDivisionError: oh\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_said(
    desk: Path, call: Any, attacks: list[str], code: int, words: str
) -> None:
    write(desk, *attacks)
    got = call("fit", "plan.toml", "--out", "out")
    assert got.code == code, got.err
    assert re.search(words, got.out)
    assert "does not apply" in got.out


def test_an_interrupt_says_that_the_same_command_goes_on(
    desk: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(desk, 'name = "learned_attack:Nearest"')

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("leakgauge.audit.bench.Bench.fitted", stop)
        got = call("fit", "plan.toml", "--out", "out")
    assert got.code == 130
    assert "the same command goes on" in got.err


def test_a_protocol_is_many_audits(tmp_path: Path) -> None:
    varied = plan(protocol={"batch_size": [1, 2]})
    with pytest.raises(PlanError, match="which is many audits"):
        fit.fit(varied, Store(tmp_path))
