"""Trials in processes of this machine, safe against any of them being killed.

Each worker gets the plan by value and runs one case at a time. One whose parent died leaves at the
next sign of progress. Workers are forked from a process that has imported the library and done
nothing else (a fork server): `warm` starts it while the caller still does other things.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from leakgauge.audit.bench import Bench, Progress
from leakgauge.audit.cases import Work
from leakgauge.audit.engine import PROGRESS_EVERY, Ended, Engine, Here, News, Tell
from leakgauge.config import no_exit
from leakgauge.errors import LeakGaugeError, PlanError

T = TypeVar("T")
Run: TypeAlias = Callable[[Work, Progress], Ended]
CONTEXT = multiprocessing.get_context("forkserver")


def local(bench: Bench, jobs: int | None, say: Callable[[str], None]) -> Engine:
    """This process, or as many others as were asked for; never more than there are cores."""
    if jobs is None or jobs == 1:
        return Here(bench)
    return Processes(partial(_packed, bench), at_most(jobs, say))


def at_most(jobs: int, say: Callable[[str], None]) -> int:
    """As many workers as this machine has cores: more of them would only wait for each other."""
    cores = os.cpu_count() or 1
    if jobs > cores:
        say(f"--jobs {jobs}: this machine has fewer cores; trials at a time: {cores}")
    return min(jobs, cores)


def _packed(bench: Bench) -> Callable[[], Run]:
    """How a worker makes a bench like this one."""
    try:
        plan = pickle.dumps(bench.plan)
    except Exception as error:  # pickling fails in a dozen ways
        raise PlanError(
            f"the plan cannot be sent to another process ({error}): write its classes and "
            "functions at the top level of a module, or use one job"
        ) from error
    return partial(_unpacked, plan, bench.prepared)


def _unpacked(plan: bytes, prepared: Path) -> Run:
    bench = Bench(pickle.loads(plan), prepared)
    torch.set_num_threads(bench.plan.document.audit.threads)
    return bench.run


def paced(send: Progress) -> Progress:
    """Of many messages of progress those that somebody could read."""
    last = 0.0

    def progress(done: int, total: int, objective: float) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY:
            last = time.monotonic()
            send(done, total, objective)

    return progress


def attempt(make: Callable[[], T]) -> T | Exception:
    """What it makes, or the error that ends the audit, as a value that can be sent."""
    try:
        with no_exit():  # the end of a worker would look like a kill
            return make()
    except LeakGaugeError as error:
        return error
    except Exception as error:  # not every error can be sent as it is
        return RuntimeError(f"{type(error).__name__}: {error} in a worker")


def _serve(prepare: Callable[[], Run], pipe: Connection) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    progress = paced(lambda *step: _send(pipe, step))
    run = attempt(prepare)
    _send(pipe, run if isinstance(run, Exception) else "ready")
    while not isinstance(run, Exception):
        try:
            case = pipe.recv()
        except EOFError:  # the parent is gone or done
            return
        _send(pipe, attempt(partial(run, case, progress)))


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # nobody listens any more


def warm() -> None:
    """Start the process from which workers are forked; it imports the library by itself."""
    CONTEXT.set_forkserver_preload(["leakgauge.audit.workers"])
    forkserver.ensure_running()


class Processes:
    """Worker processes, each prepared once by what `pack` makes for it."""

    def __init__(self, pack: Callable[[], Callable[[], Run]], width: int):
        self.width = width
        self._pack = pack
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}
        self._started = 0
        warm()

    def start(self) -> int:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(self._pack(), theirs), daemon=True)
        process.start()
        theirs.close()
        self._started += 1
        self._workers[self._started] = (process, ours)
        return self._started

    def give(self, worker: int, case: Work) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `news` will say that it died
            self._workers[worker][1].send(case)

    def news(self, tell: Tell) -> Iterable[tuple[int, News]]:
        of = {pipe: worker for worker, (_, pipe) in self._workers.items()}
        for pipe in wait(list(of)):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):  # the worker was killed
                del self._workers[of[pipe]]
                yield of[pipe], "died"
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, tuple):
                tell(of[pipe], *message)
            else:
                yield of[pipe], message

    def close(self) -> None:
        for process, pipe in self._workers.values():
            process.kill()
            pipe.close()
        self._workers.clear()
