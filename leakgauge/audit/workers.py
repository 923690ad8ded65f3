"""Trials in parallel processes, safe against any of them being killed.

Each worker holds its own copy of the plan, runs one case at a time and writes the trial to disk
itself before it reports: what is reported is durable. A worker that dies is replaced and its case
is tried once more; a worker whose parent died leaves at the next sign of progress.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from leakgauge.config import no_exit
from leakgauge.errors import LeakGaugeError

Case = TypeVar("Case")
Run = Callable[[Any, Callable[[int, int, float], None]], dict[str, Any]]
"""Runs one case with a progress callback and returns its trial."""

TRIES = 2
PROGRESS_EVERY = 0.2  # seconds between two progress messages of a worker


@dataclass
class _Worker(Generic[Case]):
    process: BaseProcess
    pipe: Connection
    case: Case | None = None


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


def in_processes(
    prepare: Callable[[], Run],
    cases: list[Case],
    jobs: int,
    *,
    may_start: Callable[[Case], bool],
    on_start: Callable[[Case], None],
    on_progress: Callable[[Case, int, int, float], None],
) -> Iterator[tuple[Case, dict[str, Any] | None]]:
    """Yield each case with its trial as it ends, or with None if its worker died twice.

    `may_start` is asked before each case; once it says no, that case is skipped.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(cases)
    tries: dict[Case, int] = {}
    workers: list[_Worker[Case]] = []

    def start() -> _Worker[Case]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(prepare, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def feed(worker: _Worker[Case]) -> bool:
        while waiting:
            case = waiting.pop(0)
            if may_start(case):
                worker.case = case
                tries[case] = tries.get(case, 0) + 1
                on_start(case)
                worker.pipe.send(case)
                return True
        return False

    try:
        for _ in range(min(jobs, len(cases))):
            worker = start()
            if not feed(worker):
                worker.pipe.close()
                break
            workers.append(worker)
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(w for w in workers if w.pipe is pipe)
                case = worker.case
                assert case is not None
                try:
                    kind, content = worker.pipe.recv()
                except (EOFError, ConnectionResetError):  # the worker was killed
                    workers.remove(worker)
                    if tries[case] < TRIES:
                        waiting.insert(0, case)
                    else:
                        yield case, None
                    replacement = start()
                    if feed(replacement):
                        workers.append(replacement)
                    else:
                        replacement.pipe.close()
                    continue
                if kind == "progress":
                    on_progress(case, *content)
                    continue
                if kind == "error":
                    raise content
                yield case, content
                if not feed(worker):
                    workers.remove(worker)
                    worker.pipe.close()
    finally:
        for worker in workers:
            worker.process.kill()
