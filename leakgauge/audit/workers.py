"""Trials in parallel processes, safe against any of them being killed.

Each worker holds its own copy of the plan, runs one case at a time and writes the trial to disk
itself before it reports: what is reported is durable. A worker that dies is replaced and its case
is tried once more; a worker whose parent died leaves at the next sign of progress.

Workers are forked from a process that has imported the library and done nothing else (a fork
server): `warm` starts it while the caller still does other things. They stay for further cases
until `close`. Cases of one expensive round go to the worker that has played it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from leakgauge.audit.results import Trial
from leakgauge.config import no_exit
from leakgauge.errors import LeakGaugeError

Case = TypeVar("Case")
Run = Callable[[Any, Callable[[int, int, float], None]], Trial]
"""Runs one case with a progress callback and returns its trial."""

TRIES = 2
PROGRESS_EVERY = 0.2  # seconds between two progress messages of a worker


@dataclass
class _Worker(Generic[Case]):
    process: BaseProcess
    pipe: Connection
    case: Case | None = None
    key: object = None  # of the round it has played last


def _serve(prepare: Callable[[], Run], pipe: Connection) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    last = 0.0

    def progress(done: int, total: int, objective: float) -> None:
        nonlocal last
        if time.monotonic() - last < PROGRESS_EVERY:
            return
        last = time.monotonic()
        _send(pipe, ("progress", (done, total, objective)))

    run: Run | None = None
    while True:
        try:
            case = pipe.recv()
        except EOFError:  # the parent is gone or done
            return
        try:
            with no_exit():  # its end would look like a kill
                run = run or prepare()
                trial = run(case, progress)
            _send(pipe, ("trial", trial))
        except LeakGaugeError as error:
            _send(pipe, ("error", error))
        except Exception as error:  # not every error can be sent as it is
            _send(pipe, ("error", RuntimeError(f"{type(error).__name__}: {error} in a worker")))


def _send(pipe: Connection, message: tuple[str, Any]) -> None:
    try:
        pipe.send(message)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # nobody listens any more; what was finished is on disk


CONTEXT = multiprocessing.get_context("forkserver")


def warm() -> None:
    """Start the process from which workers are forked; it imports the library by itself."""
    CONTEXT.set_forkserver_preload(["leakgauge.audit.run"])
    forkserver.ensure_running()


def next_of(
    waiting: list[Case], shares: Callable[[Case], object], own: object, others: set[object]
) -> Case:
    """The first case of the round that a worker has played itself, else the first of a round that
    no other worker is at, else the first."""
    mine = (case for case in waiting if own is not None and shares(case) == own)
    free = (case for case in waiting if shares(case) not in others)
    return next(chain(mine, free, waiting))


class Workers(Generic[Case]):
    """Processes that run cases; each is prepared once, by its first case."""

    def __init__(self, prepare: Callable[[], Run], jobs: int):
        self._prepare, self._jobs = prepare, jobs
        self._idle: list[_Worker[Case]] = []
        self._busy: list[_Worker[Case]] = []
        warm()

    def close(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.process.kill()
            worker.pipe.close()
        self._idle, self._busy = [], []

    def run(
        self,
        cases: list[Case],
        *,
        may_start: Callable[[Case], bool],
        on_start: Callable[[Case], None],
        on_progress: Callable[[Case, int, int, float], None],
        shares: Callable[[Case], object] = lambda case: None,
    ) -> Iterator[tuple[Case, Trial | None]]:
        """Yield each case with its trial as it ends, or with None if its worker died twice.

        `may_start` is asked before each case; once it says no, that case is skipped. Cases with
        the same key by `shares` (not None) are cheaper in one worker, one after the other.
        """
        waiting = list(cases)
        tries: dict[Case, int] = {}

        def feed(worker: _Worker[Case]) -> None:
            while waiting:
                others = {one.key for one in self._busy} - {None}
                case = next_of(waiting, shares, worker.key, others)
                waiting.remove(case)
                if may_start(case):
                    worker.case, worker.key = case, shares(case)
                    tries[case] = tries.get(case, 0) + 1
                    on_start(case)
                    self._busy.append(worker)
                    worker.pipe.send(case)
                    return
            self._idle.append(worker)

        while len(self._idle) < min(self._jobs, len(cases)):
            self._idle.append(self._start())
        ready, self._idle = self._idle, []
        for worker in ready:
            feed(worker)
        try:
            while self._busy:
                for pipe in wait([worker.pipe for worker in self._busy]):
                    worker = next(w for w in self._busy if w.pipe is pipe)
                    case = worker.case
                    assert case is not None
                    try:
                        kind, content = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):  # the worker was killed
                        self._busy.remove(worker)
                        if tries[case] < TRIES:
                            waiting.insert(0, case)
                        else:
                            yield case, None
                        feed(self._start())
                        continue
                    if kind == "progress":
                        on_progress(case, *content)
                        continue
                    if kind == "error":
                        raise content
                    self._busy.remove(worker)
                    feed(worker)  # before the caller does anything else
                    yield case, content
        except BaseException:
            self.close()
            raise

    def _start(self) -> _Worker[Case]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(self._prepare, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)
