"""Run a plan: controls, trials, trainings and ladder, on any engine, within a budget.

Trials are written one by one as they end, and so are the federations that are trained for a
trade-off; an audit that was killed, ran out of budget or was interrupted can be resumed and loses
at most what is running. What failed is tried again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import nn

from leakgauge.attacks import Exposure
from leakgauge.audit import cases
from leakgauge.audit.bench import Bench, Done
from leakgauge.audit.cases import Case, Training, Work
from leakgauge.audit.engine import Crew, Ended, Engine, Hooks
from leakgauge.audit.exposed import begun, exposures
from leakgauge.audit.forecast import forecast
from leakgauge.audit.plan import Plan
from leakgauge.audit.result import assemble
from leakgauge.audit.results import NotRun, Result, Times, Trained, Trial
from leakgauge.audit.store import Store
from leakgauge.audit.workers import local
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.types import PreparedAttack


@dataclass(frozen=True)
class Watch:
    """What a caller may want to see while an audit runs. All optional."""

    expect: Callable[[int], None] = lambda total: None
    begin: Callable[[Work], None] = lambda case: None
    progress: Callable[[Work, int, int, float], None] = lambda case, done, total, objective: None
    end: Callable[[Work, Trial | Trained], None] = lambda case, ended: None
    say: Callable[[str], None] = lambda words: None
    calibrate: Callable[[str], None] = lambda attack: None


def run(
    plan: Plan,
    store: Store,
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    budget: float | None = None,
    calibrate: bool = False,
    tradeoff: bool = False,
    watch: Watch | None = None,
    engine: Callable[[Bench, int | None, Callable[[str], None]], Engine] = local,
) -> Result:
    """Run every trial that is not done yet, as far as `budget` seconds reach, and write
    result.json. Ctrl-C ends the audit early with a valid result. When no attack applies there is no
    audit: an error, and nothing is written. `calibrate` forecasts the cost first, so that the
    result can say how far the forecast was off. `engine` makes the workers that run `jobs` trials
    at a time: this process and others like it, or those of a cluster (integrations.ray). With
    `tradeoff` the federation is also trained under each defence of the plan, whose [tradeoff] says
    how long."""
    single(plan)
    if tradeoff and plan.document.tradeoff is None:
        raise PlanError(
            f"{plan.name} has no table [tradeoff]: add one that says how many rounds the "
            "federation is trained, such as `rounds = 30`"
        )
    torch.set_num_threads(plan.document.audit.threads)
    # Build the model once before anything is written: a wrong one is the user's to know now.
    start = begun(plan)
    model, exposure = start[0], exposures(plan, start)
    bench, watch = Bench(plan, store.prepared), watch or Watch()

    def opened() -> None:
        store.open(plan.document, plan.fingerprint, resume=resume, overwrite=overwrite)

    opened()  # refused here, the folder is not even locked
    with store.locked():
        opened()  # another audit may have ended in it meanwhile
        began = time.monotonic()
        with closing(engine(bench, jobs, watch.say)) as workers:
            session = _Session(bench, store, workers, began, budget, watch)
            return _audit(session, model, exposure, calibrate, tradeoff)


def single(plan: Plan) -> None:
    """Refuse a plan that is many audits."""
    if plan.document.protocol is not None:
        raise PlanError(
            f"{plan.name} has a [protocol], which is many audits: run `leakgauge protocol`, or "
            "leave the table out"
        )


def _audit(
    session: _Session,
    model: nn.Module,
    exposure: tuple[Exposure, ...],
    calibrate: bool,
    tradeoff: bool,
) -> Result:
    bench, plan, store = session.bench, session.bench.plan, session.store
    expected = None
    controls = cases.controls(plan) if plan.document.audit.control else []
    trainings = cases.trainings(plan) if tradeoff else []
    rungs: list[tuple[str, list[Case]]] = []
    try:
        if calibrate:  # what was fitted before is in no trial's time
            fitted = store.prepared if store.only_fitted else None
            expected = forecast(plan, session.watch.calibrate, trainings, fitted)
        session.run([*controls, *cases.trials(plan)])
        if trainings:
            session.train(trainings)
        if plan.document.audit.explain and controls:
            best = _best(session.pick(controls))
            rungs = cases.ladder(plan, best) if best else []
            session.run([case for _, rung in rungs for case in rung])
    except KeyboardInterrupt:
        session.interrupted = True
    finished = session.finished
    if finished and all(t.status == "not applicable" for t in finished.values()):
        reasons = dict.fromkeys(f"{t.attack}: {t.error}" for t in finished.values())
        raise NotApplicable("no attack of the plan applies. " + "; ".join(reasons))
    for trial in finished.values():  # something was run: what does not apply is a finding too
        if trial.status == "not applicable":
            store.keep(trial)
    result = assemble(
        plan,
        model,
        trials=session.pick([*controls, *cases.trials(plan), *(c for _, r in rungs for c in r)]),
        trained=[session.trained[one.id] for one in trainings if one.id in session.trained],
        controls=controls,
        rungs=rungs,
        not_run=session.not_run(cases.trials(plan)),
        sensitivity=bench.sensitivity(cases.trials(plan)[0])
        if plan.document.audit.explain
        else None,
        wall=session.elapsed(),
        forecast=expected,
        interrupted=session.interrupted,
        exposure=exposure,
    )
    store.finish(result)
    return result


def _best(trials: list[Trial]) -> str | None:
    """The attack that did best on the control, if any could be run."""
    scores: dict[str, list[float]] = {}
    for trial in trials:
        if trial.score:
            scores.setdefault(trial.attack, []).extend(trial.score.scores["psnr"])
    return max(scores, key=lambda attack: statistics.median(scores[attack]), default=None)


@dataclass
class _Session:
    """The cases of one call of `run`: what is finished, what was skipped and why. It alone writes
    to the folder of the audit."""

    bench: Bench
    store: Store
    engine: Engine
    began: float
    budget: float | None
    watch: Watch
    finished: dict[str, Trial] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)
    interrupted: bool = False
    _skipped: dict[str, str] = field(default_factory=dict)
    _expected: int = 0

    def __post_init__(self) -> None:
        hooks = Hooks(
            may_start=self._may_start,
            ended=self._ended,
            begin=self._begin,
            progress=self.watch.progress,
            shares=_expensive_round,
        )
        self._crew = Crew(self.engine, hooks)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def pick(self, wanted: list[Case]) -> list[Trial]:
        """The finished trials of these cases, once each, in this order."""
        ids = dict.fromkeys(case.id for case in wanted)
        return [self.finished[id_] for id_ in ids if id_ in self.finished]

    def not_run(self, wanted: list[Case]) -> list[NotRun]:
        return [
            NotRun(case.id, case.attack, self._skipped.get(case.id, "interrupted"))
            for case in wanted
            if case.id not in self.finished
        ]

    def run(self, wanted: list[Case]) -> None:
        todo = []
        for case in dict.fromkeys(wanted):
            known = self.finished.get(case.id)
            if known is None:
                known = self.store.done(case.id, self.watch.say)
                if known is None or known.status == "failed":
                    todo.append(case)
                    continue
            self.finished[case.id] = known
        if self.budget is None and self.engine.width > 1:
            # Nothing is cut: the longest first, so that all workers end together.
            todo.sort(key=lambda case: -cases.effort(self.bench.plan, case.attack))
        self._do(todo)

    def train(self, wanted: list[Training]) -> None:
        """Every federation that is not trained yet."""
        known = {one.id: self.store.trained(one.id, self.watch.say) for one in wanted}
        self.trained |= {i: one for i, one in known.items() if one and one.status == "done"}
        self._do([one for one in wanted if one.id not in self.trained])

    def _do(self, todo: Sequence[Work]) -> None:
        self._expected += len(todo)
        self.watch.expect(self._expected)
        for work, ended in self._crew.run(todo):
            done = ended or self._killed(work)
            if isinstance(done, Trained):
                self.store.keep_trained(done)
                self.watch.end(work, done)
                continue
            if done.trial.status != "not applicable":  # that is known again in a moment
                self.store.keep(done.trial, done.pictures.items())
            self.watch.end(work, done.trial)

    def _killed(self, work: Work) -> Ended:
        words, times = "was killed twice (out of memory?)", Times(0.0, 0.0)
        done: Ended
        if isinstance(work, Training):
            words = f"the process of this training {words}"
            done = Trained(work.id, work.defence, work.seed, "failed", words, times)
        else:
            words = f"the process of this trial {words}"
            done = Done(work.crashed(self.bench.plan, times, words))
        self._ended(work, done)
        return done

    def _ended(self, work: Work, done: Ended) -> None:
        if isinstance(done, Trained):
            self.trained[work.id] = done
        else:
            self.finished[work.id] = done.trial

    def _begin(self, work: Work) -> None:
        attack = self.bench.plan.attacks[work.attack] if isinstance(work, Case) else None
        if isinstance(attack, PreparedAttack):
            self.store.begin()  # it may keep something there
        self.watch.begin(work)

    def _may_start(self, case: Work) -> bool:
        """Whether the budget still holds what a trial of this attack, or a training, took so
        far."""
        if self.budget is None:
            return True
        if isinstance(case, Training):
            took = [one.times.wall_seconds for one in self.trained.values()]
        else:
            took = [t.times.wall_seconds for t in self.finished.values() if t.attack == case.attack]
        need = sum(took) / len(took) if took else 0.0
        if self.elapsed() + need <= self.budget:
            return True
        self._skipped[case.id] = f"the budget of {self.budget:g} s was spent"
        return False


def _expensive_round(case: Work) -> object:
    """What cases share whose round is played after honest ones; another round costs little."""
    if isinstance(case, Training):
        return None
    stage = case.stage if case.keeps("stage") else 0
    return (case.stage, case.defence, case.seed, case.kept) if stage else None
