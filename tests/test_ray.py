"""Trials on Ray: the same results as here, whoever dies, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from leakgauge import models
from leakgauge.attacks import Analytic
from leakgauge.audit import Store, Watch, parse, read, run
from leakgauge.audit.bench import Bench
from leakgauge.errors import InputError, MissingExtra, PlanError
from leakgauge.integrations import ray as ours
from leakgauge.tensors import seeded

TINY: dict[str, Any] = {
    "federation": {
        "data": "digits",
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch_size": 2},
    },
    "attack": [{"name": "inverting-gradients", "iterations": 20}],
    "defence": [{"name": "none"}, {"name": "clip"}],
    "audit": {
        "seeds": [0, 1, 2, 3], "gallery": 20, "exact": False, "explain": False, "control": False,
    },
}  # fmt: skip
FORTY = TINY | {"audit": TINY["audit"] | {"seeds": list(range(20))}}


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the attacks below
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def kept(out: Path) -> dict[str, Any]:
    """Every trial without its times, and every picture."""
    found: dict[str, Any] = {
        str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.png"))
    }
    for path in (out / "trials").iterdir():
        found[path.name] = json.loads(path.read_text(encoding="utf-8"))
        del found[path.name]["times"]
    return found


@dataclass(frozen=True)
class Deadly:
    """Kills the process of one trial, as often as it is told to."""

    marks: Path
    seed: int
    times: int
    needs = Analytic.needs

    def reconstruct(self, seen, rng, resources=None):
        mark = self.marks / uuid.uuid4().hex
        if rng.initial_seed() == self.seed and len(list(self.marks.iterdir())) < self.times:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Analytic().reconstruct(seen, rng, resources)


@dataclass(frozen=True)
class Refusing:
    """An error in what the user gave, which only a worker meets."""

    def announced(self):
        return {}

    def on_gradient(self, gradient, here, rng):
        return gradient

    def on_update(self, update, here, rng):
        return update

    def on_batch(self, batch, here, rng):
        raise InputError("not like this")


# The same results.


def test_forty_trials_on_two_workers_are_those_of_two_processes(two_cpus, tmp_path):
    plan, steps, said = parse(FORTY, "forty", tmp_path), [], []
    run(plan, Store(tmp_path / "here"), jobs=2)
    watch = Watch(progress=lambda case, *step: steps.append(step), say=said.append)
    result = run(plan, Store(tmp_path / "ray"), engine=ours.engine(None), watch=watch)
    assert len(result.trials) == 40 + 20  # blind ones too
    assert {trial.status for trial in result.trials} == {"done"}
    assert kept(tmp_path / "ray") == kept(tmp_path / "here")
    assert {total for _, total, _ in steps} == {20}
    busy = "Ray has no free CPU yet for the first trial"  # where other tests have all of them
    assert [line for line in said if not line.startswith(busy)] == []


def test_killed_workers_change_nothing_else(two_cpus, tmp_path):
    """A trial whose worker is killed is tried once more; one that is killed twice has failed."""
    begun, ended, attacks = [], [], {}
    for name, times in (("once", 1), ("always", 9)):
        (tmp_path / name).mkdir()
        seed = seeded(2, f"attack/{name}").initial_seed()
        attacks[name] = Deadly(tmp_path / name, seed, times)
    plan = parse(TINY | {"defence": [{"name": "none"}]}, "tiny", tmp_path)
    plan = dataclasses.replace(plan, attacks=attacks, asked=tuple(attacks))
    watch = Watch(
        begin=lambda case: begun.append(case.id), end=lambda case, trial: ended.append(case.id)
    )
    result = run(plan, Store(tmp_path / "ray"), engine=ours.engine(None), watch=watch)
    failed = "round0.none.always.seed2"
    assert [t.id for t in result.trials if t.status != "done"] == [failed]
    assert sorted(begun) == sorted(ended) == sorted(t.id for t in result.trials)
    assert [len(list((tmp_path / name).iterdir())) for name in attacks] == [1, 2]
    for name in attacks:  # marks enough: nobody dies any more
        for i in range(9):
            (tmp_path / name / str(i)).touch()
    run(plan, Store(tmp_path / "calm"))
    calm, killed = (kept(tmp_path / name) for name in ("calm", "ray"))
    assert "killed twice" in killed.pop(f"{failed}.json")["error"]
    assert killed.items() <= calm.items()
    assert {key.partition(failed)[1] for key in calm.keys() - killed.keys()} == {failed}


@pytest.mark.parametrize("first", ["here", "ray"])
def test_an_interrupted_audit_goes_on_elsewhere(two_cpus, tmp_path, first):
    plan = parse(TINY, "tiny", tmp_path)
    engines = {"here": {"jobs": 2}, "ray": {"engine": ours.engine(None)}}
    second = "ray" if first == "here" else "here"
    ended = []

    def end(case, trial):
        ended.append(case.id)
        if len(ended) == 3:
            raise KeyboardInterrupt

    store = Store(tmp_path / "out")
    result = run(plan, store, watch=Watch(end=end), **engines[first])
    assert result.interrupted
    assert len(result.trials) == 3
    assert {one.reason for one in result.not_run} == {"interrupted"}
    assert json.loads(store.result.read_text())["interrupted"]
    whole = run(plan, Store(tmp_path / "out"), resume=True, watch=Watch(end=end), **engines[second])
    assert len(ended) == len(set(ended)) == len(whole.trials) == 8 + 4
    run(plan, Store(tmp_path / "never"))
    assert kept(tmp_path / "out") == kept(tmp_path / "never")


# By value.

OWN = """
from torch import nn
from ray_parts.layers import head

def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 8), nn.ReLU(),
                         head(classes))
"""
PLAN = """
[federation]
data = { npz = "records.npz" }
model = "ray_own_model:make"
checkpoint = "weights.safetensors"
training = { batch_size = 2 }
[[attack]]
name = "inverting-gradients"
iterations = 5
[audit]
metrics = ["ssim"]
seeds = [0, 1]
gallery = 20
exact = false
control = false
explain = false
"""


def test_a_plan_needs_no_disk_of_the_workers(two_cpus, tmp_path, monkeypatch):
    """Its folder is gone before the first worker starts: code, data and weights have travelled."""
    home = tmp_path / "home"
    (home / "ray_parts").mkdir(parents=True)
    (home / "ray_parts" / "__init__.py").touch()
    (home / "ray_parts" / "layers.py").write_text(
        "from torch import nn\ndef head(classes):\n    from ray_parts import later\n"
        "    return nn.Linear(8, classes)\n"
    )
    (home / "ray_parts" / "later.py").touch()
    (home / "ray_own_model.py").write_text(OWN)
    (home / "plan.toml").write_text(PLAN)
    rng = np.random.default_rng(0)
    records = rng.random((40, 1, 4, 4), dtype=np.float32)
    np.savez(home / "records.npz", images=records, labels=np.arange(40) % 4)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(5)
    sys.path.insert(0, str(home))
    import ray_own_model

    models.save(ray_own_model.make((1, 4, 4), 4), home / "weights.safetensors")
    run(read(home / "plan.toml"), Store(tmp_path / "here"))

    def gone(total):
        home.rename(tmp_path / "gone")

    plan = read(home / "plan.toml")
    run(plan, Store(tmp_path / "ray"), engine=ours.engine(None), watch=Watch(expect=gone))
    assert kept(tmp_path / "ray") == kept(tmp_path / "here")


def test_code_beside_the_plan_travels_within_reason(tmp_path, monkeypatch):
    assert ours._code(tmp_path) == {}
    (tmp_path / "ray_beside.py").write_text("x = 1")
    (tmp_path / "ray_lazy.py").write_text("y = 1")
    assert ours._code(tmp_path) == {}  # nothing of it is in use
    monkeypatch.syspath_prepend(str(tmp_path))
    import ray_beside  # noqa: F401

    assert ours._code(tmp_path) == {"ray_beside.py": b"x = 1", "ray_lazy.py": b"y = 1"}
    monkeypatch.setattr(ours, "MOST_CODE", 9)
    with pytest.raises(PlanError, match=r"more than 9 bytes: put the plan .* by themselves"):
        ours._code(tmp_path)
    assert not ours._code(Path(ours.__file__).parents[2] / "leakgauge")


# What goes wrong.


def test_an_error_of_the_user_is_raised_as_it_is(two_cpus, tmp_path):
    plan = parse(TINY | {"defence": [{"name": "none"}]}, "tiny", tmp_path)
    plan = dataclasses.replace(plan, defences={"none": None, "mine": Refusing()})
    with pytest.raises(InputError, match="not like this"):
        run(plan, Store(tmp_path / "out"), engine=ours.engine(None))


def test_a_worker_with_other_versions_is_refused(tmp_path):
    refused = ours.prepared(({"torch": "1.0"}, b"", {}), tmp_path)
    assert isinstance(refused, PlanError)
    assert "the audit has {'torch': '1.0'}, but the worker on" in str(refused)
    assert str(ours.versions()) in str(refused)


BLIND = """
import pickle, sys
sys.modules["leakgauge"] = None
sys.stdout.buffer.write(pickle.dumps(list(pickle.load(sys.stdin.buffer)().prepare(None))))
"""


def test_a_node_without_leakgauge_is_named(two_cpus, tmp_path):
    """The class of the workers can be unpickled there, and what it answers is understood."""
    ended = subprocess.run(
        [sys.executable, "-c", BLIND], input=ray.cloudpickle.dumps(ours._worker()),
        capture_output=True, check=True,
    )  # fmt: skip
    answers = pickle.loads(ended.stdout)

    class Blind:
        def prepare(self, parcel):
            yield from answers

        def leave(self):
            pass

    bench = Bench(parse(TINY, "tiny", tmp_path), tmp_path / "prepared")
    with closing(ours.engine(None)(bench, 1, print)) as engine:
        engine._class = ray.remote(Blind)
        engine.start()
        with pytest.raises(PlanError, match=r"cannot run trials \(.*leakgauge.*, on .*install"):
            drained(engine)


def drained(engine):
    for _ in range(60):
        list(engine.news(print))


def test_a_gpu_is_refused(two_cpus, tmp_path):
    plan = parse(TINY, "tiny", tmp_path)
    audit = dataclasses.replace(plan.document.audit, device="cuda")
    plan = dataclasses.replace(plan, document=dataclasses.replace(plan.document, audit=audit))
    with pytest.raises(PlanError, match=r"audit.device is 'cuda', but trials on Ray run on CPUs"):
        ours.engine(None)(Bench(plan, tmp_path), 1, print)


def test_without_the_extra_it_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"--engine ray needs .* pip install 'leakgauge\[ray\]'"):
        ours.engine(None)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "localhost", ":6379", "host:port", ""])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(PlanError, match=r"expected auto, or HOST:PORT"):
        ours._join(ray, address, {})


def test_an_address_where_nobody_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PlanError, match=rf"no Ray to join at 127.0.0.1:{port} \(ConnectionRefused"):
        ours._join(ray, f"127.0.0.1:{port}", {})


def test_a_listener_that_is_no_ray_is_given_up(tmp_path):
    program = (
        "import sys\nfrom leakgauge import cli\nfrom leakgauge.integrations import ray\n"
        "ray.JOINED = 1\n"
        "sys.argv[1:] = ['audit', '--demo', '--engine', 'ray', '--address', sys.argv[1]]\n"
        "cli.main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-c", program, address],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 2
    assert f"no Ray to join at {address} (TimeoutError: no answer in 1 s)" in ended.stderr


def test_an_interrupt_that_ray_swallowed_is_raised_at_the_next_turn(two_cpus):
    before = signal.getsignal(signal.SIGINT)
    workers = ours._Ray(ray, ({}, b"", {}), 1, 1, print, own=False)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(workers.news(print))
    workers.close()
    assert signal.getsignal(signal.SIGINT) is before


# The command, with a Ray of its own.


def alive(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_ctrl_c_ends_its_own_ray_and_leaves_a_valid_result(tmp_path):
    plan, mark = tmp_path / "plan.toml", uuid.uuid4().hex
    plan.write_text(
        '[federation]\ndata = "digits"\nmodel = { name = "mlp", hidden = [8] }\n'
        '[[attack]]\nname = "analytic"\n[[attack]]\nname = "inverting-gradients"\n'
        "iterations = 100000\n[audit]\nseeds = [0, 1]\ngallery = 20\nexact = false\n"
        "control = false\nexplain = false\n"
    )
    command = [sys.executable, "-m", "leakgauge.cli", "audit", "plan.toml", "--out", "out"]
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--jobs", "2", "--budget", "1h"],
        cwd=tmp_path, env=os.environ | {"LEAKGAUGE_TEST": mark}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    trials = tmp_path / "out" / "trials"
    while process.poll() is None and len(list(trials.glob("*.json"))) < 2:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    assert len(alive(mark)) > 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["interrupted"]
    assert [t["attack"] for t in result["trials"]] == ["analytic"] * 2
    assert [t["attack"] for t in result["not_run"]] == ["inverting-gradients"] * 2
    for _ in range(100):
        if not alive(mark):
            break
        time.sleep(0.1)
    assert alive(mark) == []
    shutil.rmtree(tmp_path / "out")
