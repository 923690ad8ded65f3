"""Where trials are run: an engine has workers that take one case at a time.

A trial travels by value. A worker is given a case and gives back the trial with its pictures; it
writes nothing, and whoever asked keeps what comes back. Three engines: `Here`, this process;
`workers.Processes` on this machine; `integrations.ray` on a cluster. `Crew` is the same for all of
them: it hands out the cases, and tries the case of a worker that died once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, Protocol, TypeAlias

from leakgauge.audit.bench import Bench, Done
from leakgauge.audit.cases import Work
from leakgauge.audit.results import Trained
from leakgauge.errors import PlanError

TRIES = 2
PROGRESS_EVERY = 0.2  # seconds between two messages of progress of a worker

Ended: TypeAlias = Done | Trained
News: TypeAlias = Ended | Literal["ready", "died"]
Tell: TypeAlias = Callable[[int, int, int, float], None]
"""Called with a worker, the steps that it has done, steps in all and the objective."""


class Engine(Protocol):
    """Workers by number. `width` is how many may run at a time. They start in their own time:
    `news` says when one is ready for its first case."""

    @property
    def width(self) -> int: ...

    def start(self) -> int: ...

    def give(self, worker: int, case: Work) -> None: ...

    def news(self, tell: Tell) -> Iterable[tuple[int, News]]:
        """What happened to which worker, after a wait if nothing did. An error in what the user
        gave is raised."""
        ...

    def close(self) -> None:
        """End every worker, whatever it is at; more than once does no harm."""
        ...


class Here:
    """One worker: this process."""

    width = 1

    def __init__(self, bench: Bench):
        self._bench = bench
        self._case: Work | None = None

    def start(self) -> int:
        return 0

    def give(self, worker: int, case: Work) -> None:
        self._case = case

    def news(self, tell: Tell) -> Iterable[tuple[int, News]]:
        case, self._case = self._case, None
        return [(0, self._bench.run(case, partial(tell, 0)) if case else "ready")]

    def close(self) -> None:
        self._case = None


@dataclass(frozen=True)
class Hooks:
    """What a crew asks and tells. `may_start` is asked before each case: one that may not is left
    out. `ended` hears of a trial before the next one is asked for. Cases with the same key by
    `shares` (not None) are cheaper in one worker, one after the other."""

    may_start: Callable[[Work], bool]
    ended: Callable[[Work, Ended], None]
    begin: Callable[[Work], None]
    progress: Callable[[Work, int, int, float], None]
    shares: Callable[[Work], object]


class Crew:
    """The workers of an engine. They are started when they are needed, and stay for more cases."""

    def __init__(self, engine: Engine, hooks: Hooks):
        self._engine, self._hooks = engine, hooks
        self._starting: set[int] = set()
        self._idle: list[int] = []
        self._busy: dict[int, Work] = {}
        self._shared: dict[int, object] = {}  # the key of the case that a worker had last

    def run(self, cases: Iterable[Work]) -> Iterator[tuple[Work, Ended | None]]:
        """Each case with its trial as it ends, or with None if two workers died of it."""
        try:
            yield from self._run(list(cases))
        except BaseException:
            self._engine.close()
            raise

    def _run(self, waiting: list[Work]) -> Iterator[tuple[Work, Ended | None]]:
        tries: Counter[Work] = Counter()
        stillborn = 0
        idle, self._idle = self._idle, []
        while len(idle) + len(self._starting) < min(self._engine.width, len(waiting)):
            self._starting.add(self._engine.start())
        for worker in idle:
            self._begin(self._feed(worker, waiting), tries)
        while self._busy or (waiting and self._starting):
            for worker, news in self._engine.news(self._tell):
                case = self._busy.pop(worker, None)
                self._starting.discard(worker)
                done = news if isinstance(news, Done | Trained) else None
                if case is not None and done is not None:
                    self._hooks.ended(case, done)
                if news != "died":
                    stillborn = 0
                    fed = self._feed(worker, waiting)  # before the caller does anything else
                    if case is not None:
                        yield case, done
                    self._begin(fed, tries)
                    continue
                if worker in self._idle:
                    self._idle.remove(worker)
                if case is None:
                    stillborn += 1
                elif tries[case] < TRIES:
                    waiting.insert(0, case)
                else:
                    yield case, None
                alone = not (self._busy or self._starting)
                if alone and stillborn >= TRIES:
                    raise PlanError(
                        f"{stillborn} workers in turn died before their first trial: did the "
                        "memory run out? Use fewer jobs, less data or another machine"
                    )
                if waiting and (alone or case is not None):
                    self._starting.add(self._engine.start())

    def _feed(self, worker: int, waiting: list[Work]) -> Work | None:
        others = {self._shared[one] for one in self._busy} - {None}
        while waiting:
            case = next_of(waiting, self._hooks.shares, self._shared.get(worker), others)
            waiting.remove(case)
            if self._hooks.may_start(case):
                self._busy[worker], self._shared[worker] = case, self._hooks.shares(case)
                self._engine.give(worker, case)
                return case
        self._idle.append(worker)
        return None

    def _begin(self, case: Work | None, tries: Counter[Work]) -> None:
        if case is not None:
            tries[case] += 1
            if tries[case] == 1:
                self._hooks.begin(case)

    def _tell(self, worker: int, done: int, total: int, objective: float) -> None:
        self._hooks.progress(self._busy[worker], done, total, objective)


def next_of(
    waiting: list[Work], shares: Callable[[Work], object], own: object, others: set[object]
) -> Work:
    """The first case of the round that a worker has played itself, else the first of a round that
    no other worker is at, else the first."""
    mine = (case for case in waiting if own is not None and shares(case) == own)
    free = (case for case in waiting if shares(case) not in others)
    return next(chain(mine, free, waiting))
