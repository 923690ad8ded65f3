"""Trials on a Ray cluster, or on a Ray of this machine: `leakgauge audit plan.toml --engine ray`.

No disk is shared. The plan travels by value and once, through Ray's object store: its tables, its
data, the weights of its checkpoint, what its metrics have read, and the Python files beside it.
Other code must be installed on every node, as LeakGauge itself. Trials and pictures come back the
same way. Ray starts nothing again by itself: whose worker died is for the audit to decide.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, TypeAlias

import torch

from leakgauge._version import __version__
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import Work
from leakgauge.audit.engine import Engine, News, Tell
from leakgauge.audit.workers import at_most, attempt, paced
from leakgauge.config import optional
from leakgauge.errors import PlanError

REACHED = 5  # seconds in which the address must accept a connection
JOINED = 15  # seconds in which it must answer as a Ray cluster
PATIENCE = 30  # seconds without any worker, until the user is told
MOST_CODE = 2**25  # bytes of Python files that are sent

Parcel: TypeAlias = tuple[dict[str, str], bytes, dict[str, bytes]]
"""The versions of the audit's side, a bench, pickled, and the files that it needs."""


def engine(address: str | None) -> Callable[[Bench, int | None, Callable[[str], None]], Engine]:
    """For `audit.run`: workers on the cluster at an address, or without one on a Ray of this
    machine, which ends with the audit. Inside a program that has called `ray.init` its Ray is
    used."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
    return partial(_engine, optional("ray", "ray", "--engine ray"), address)


def _engine(
    ray: ModuleType,
    address: str | None,
    bench: Bench,
    jobs: int | None,
    say: Callable[[str], None],
) -> Engine:
    audit = bench.plan.document.audit
    if torch.device(audit.device).type != "cpu":
        raise PlanError(f"audit.device is {audit.device!r}, but trials on Ray run on CPUs: use cpu")
    parcel, own = _packed(bench, ray), not ray.is_initialized()
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if own and address is None:
        jobs = at_most(jobs or os.cpu_count() or 1, say)
        # In this thread: what it starts ends with the thread that started it.
        ray.init("local", num_cpus=jobs * audit.threads, include_dashboard=False, **quiet)
    elif own:
        _join(ray, str(address), quiet)
    free = int(ray.available_resources().get("CPU", 0) // audit.threads)
    return _Ray(ray, parcel, jobs or max(1, free), audit.threads, say, own=own)


def _join(ray: ModuleType, address: str, quiet: dict[str, Any]) -> None:
    """ray.init of a cluster, in a limited time: Ray itself may ask for minutes, or for ever."""
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in host or not host or not port.isdecimal()):
        raise PlanError(
            f"--address {address}: expected auto, or HOST:PORT as `ray start` prints it. A ray:// "
            "address cannot stream results: run the audit on a node of the cluster"
        )
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def join() -> None:
        try:
            if address != "auto":
                socket.create_connection((host, int(port)), REACHED).close()
            answers.put(ray.init(address, **quiet) and None)
        except Exception as error:  # whatever it is, the audit cannot begin
            answers.put(error)

    threading.Thread(target=join, daemon=True).start()
    try:
        problem = answers.get(timeout=JOINED)
    except Empty:
        problem = TimeoutError(f"no answer in {JOINED} s")
    if problem is not None:
        raise PlanError(
            f"there is no Ray to join at {address} ({type(problem).__name__}: {problem}): see "
            "`ray status`, run the audit on a node of the cluster, or leave --address out"
        )


def versions() -> dict[str, str]:
    """What must be the same on every node for the same results."""
    root = Path(__file__).parents[1]
    code = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        code.update(f"{file.relative_to(root)} ".encode() + file.read_bytes())
    return {
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__.partition("+")[0],
        "leakgauge": f"{__version__} (code {code.hexdigest()[:8]})",
    }


def _packed(bench: Bench, ray: ModuleType) -> Parcel:
    plan = bench.plan
    federation, files = plan.document.federation, _code(plan.folder)
    if federation.checkpoint:
        path = plan.folder / Path(federation.checkpoint).expanduser()
        name = f"checkpoint{path.suffix}"
        files[name] = path.read_bytes()
        federation = replace(federation, checkpoint=name)
        plan = replace(plan, document=replace(plan.document, federation=federation))
    try:
        return versions(), ray.cloudpickle.dumps((plan, bench.measures)), files
    except Exception as error:  # pickling fails in a dozen ways
        raise PlanError(f"the plan cannot be sent to Ray's workers ({error})") from error


def _code(folder: Path) -> dict[str, bytes]:
    """The Python files beside a plan, if it has loaded any: those in its folder, and all of each
    package in it that is in use."""
    root = folder.resolve()
    used: set[Path] = set()
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        own = file.is_file() and file.is_relative_to(root) and "site-packages" not in file.parts
        if own and name.partition(".")[0] != "leakgauge":
            used |= {root / file.relative_to(root).parts[0]}
    found = [file for one in used for file in (one.rglob("*.py") if one.is_dir() else [one])]
    found += root.glob("*.py") if used else []
    files = {str(file.relative_to(root)): file.read_bytes() for file in found}
    if sum(map(len, files.values())) > MOST_CODE:
        raise PlanError(
            f"the Python files beside the plan, in {folder}, are more than {MOST_CODE:,} bytes: "
            "put the plan and its own code in a folder by themselves"
        )
    return files


def prepared(parcel: Parcel, folder: Path) -> Bench | Exception:
    """The bench of a worker, whose own folder this is; or what is wrong."""
    here, content, files = parcel
    if versions() != here:
        return PlanError(
            f"the audit has {here}, but the worker on {platform.node()} has {versions()}: install "
            "the same on every node, else the results would differ"
        )
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sys.path.insert(0, str(folder))

    def made() -> Bench:
        plan, measures = pickle.loads(content)
        return Bench(replace(plan, folder=folder), folder / "prepared", measures)

    return attempt(made)


def streamed(bench: Bench, case: Work) -> Iterator[object]:
    """Progress, as tuples, and then the trial or an error."""
    messages: SimpleQueue[object] = SimpleQueue()

    def work() -> None:
        torch.set_num_threads(bench.plan.document.audit.threads)  # of this thread
        messages.put(attempt(lambda: bench.run(case, paced(lambda *step: messages.put(step)))))

    threading.Thread(target=work, daemon=True).start()
    message: object = ()
    while isinstance(message, tuple):
        message = messages.get()
        yield message


def _worker() -> type:
    """The class of Ray's actors. Made in here it travels by value itself: a node on which LeakGauge
    cannot be imported can say so."""

    class Worker:
        def prepare(self, parcel: Parcel) -> Iterator[object]:
            try:
                self.ours = importlib.import_module("leakgauge.integrations.ray")
            except ImportError as error:
                yield ImportError(f"{error}, on {platform.node()}")
                return
            self.folder = tempfile.mkdtemp(prefix="leakgauge-")
            self.bench = self.ours.prepared(parcel, Path(self.folder))
            yield self.bench if isinstance(self.bench, Exception) else "ready"

        def run(self, case: Work) -> Iterator[object]:
            yield from self.ours.streamed(self.bench, case)

        def leave(self) -> None:
            shutil.rmtree(self.folder, ignore_errors=True)

    return Worker


class _Ray:
    """Actors, one per worker. Whatever they are asked for they answer as a stream."""

    def __init__(
        self,
        ray: ModuleType,
        parcel: Parcel,
        width: int,
        threads: int,
        say: Callable[[str], None],
        *,
        own: bool,
    ):
        self.width = width
        self._ray, self._say, self._own = ray, say, own
        self._parcel = ray.put(parcel)
        once = {"max_restarts": 0, "max_task_retries": 0}
        self._class = ray.remote(num_cpus=threads, max_concurrency=2, **once)(_worker())
        self._actors: dict[int, Any] = {}
        self._streams: dict[Any, int] = {}
        self._started = 0
        self._waiting: float | None = time.monotonic()  # for the first worker, since then
        self._stopped = False
        main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._stop) if main else None

    def _stop(self, *_: object) -> None:
        """Ctrl-C. Ray's own code may swallow the exception: the next turn raises it again."""
        self._stopped = True
        raise KeyboardInterrupt

    def start(self) -> int:
        self._started += 1
        actor = self._actors[self._started] = self._class.remote()
        stream = actor.prepare.options(num_returns="streaming").remote(self._parcel)
        self._streams[stream] = self._started
        return self._started

    def give(self, worker: int, case: Work) -> None:
        stream = self._actors[worker].run.options(num_returns="streaming").remote(case)
        self._streams[stream] = worker

    def news(self, tell: Tell) -> Iterable[tuple[int, News]]:
        if self._stopped:
            raise KeyboardInterrupt
        errors, every = self._ray.exceptions, list(self._streams)
        if self._ray.wait(every, timeout=1.0)[0]:
            self._waiting = None
        elif self._waiting and time.monotonic() - self._waiting > PATIENCE:
            self._say("Ray has no free CPU yet for the first trial; see `ray status`")
            self._waiting = None
        for stream in self._ray.wait(every, num_returns=len(every), timeout=0)[0]:
            worker = self._streams[stream]
            try:
                message = self._ray.get(next(stream))
            except errors.RayTaskError:  # not of the trial: that would come as a value
                raise
            except errors.RayError:  # the actor, its process or its node is gone
                self._end(worker)
                yield worker, "died"
                continue
            if isinstance(message, tuple):
                tell(worker, *message)
                continue
            del self._streams[stream]
            if isinstance(message, ImportError):
                raise PlanError(
                    f"a node of the cluster cannot run trials ({message}): install there what this "
                    f"machine has, {versions()}"
                )
            if isinstance(message, Exception):
                raise message
            yield worker, message

    def _end(self, worker: int) -> None:
        self._streams = {s: one for s, one in self._streams.items() if one != worker}
        self._ray.kill(self._actors.pop(worker))

    def close(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        leaving = [actor.leave.remote() for actor in self._actors.values()]
        if leaving:
            self._ray.wait(leaving, num_returns=len(leaving), timeout=2.0)
        for worker in list(self._actors):
            self._end(worker)
        if self._own:
            self._own = False
            self._ray.shutdown()
