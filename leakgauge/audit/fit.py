"""Prepare what an audit needs, and nothing else: `leakgauge fit`.

What an attack prepares that changes no model is made once for each model, training and set of
public records, and lies in OUT/prepared. An audit makes what is missing there, in its first trial
that needs it. Here all of it is listed with its cost, and made, before any trial: an audit of the
same plan in the same folder goes on from there. A preparation that was stopped goes on from its
checkpoint.

The ladder is climbed by the attack that did best on the twin. Where the plan asks for one attack
alone that is known, and what its rungs need is made, too; else the audit makes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from leakgauge.attacks.begun import parts
from leakgauge.audit import cases
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import Case
from leakgauge.audit.exposed import begun
from leakgauge.audit.forecast import Refused, Trying, shares
from leakgauge.audit.plan import Plan
from leakgauge.audit.run import single
from leakgauge.audit.store import Store
from leakgauge.errors import NotApplicable
from leakgauge.types import Learned, Resources


@dataclass(frozen=True)
class Fit:
    """A preparation that so many `trials` share, by the first of them. `cpu_seconds` are forecast,
    or what it took if it is `done`; `reason` says why it cannot be made."""

    case: Case
    trials: int
    cpu_seconds: float
    done: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Watch:
    """What a caller may want to see. All optional."""

    listed: Callable[[tuple[Fit, ...]], None] = lambda fits: None
    calibrate: Callable[[str], None] = lambda attack: None
    begin: Callable[[Fit], None] = lambda fit: None
    progress: Callable[[int, int, float], None] = lambda done, total, objective: None
    end: Callable[[Fit], None] = lambda fit: None


def fit(plan: Plan, store: Store, watch: Watch | None = None) -> tuple[Fit, ...]:
    """Make every preparation of the plan that is not there yet, after `watch.listed` was told what
    they will cost; as they are in the end. Nothing is written where there is nothing to make."""
    watch = watch or Watch()
    single(plan)
    torch.set_num_threads(plan.document.audit.threads)
    begun(plan)  # a model that is wrong is the user's to know now
    bench, audit = Bench(plan, store.prepared), plan.document.audit

    def opened() -> None:
        store.open(plan.document, plan.fingerprint, resume=True, overwrite=False)

    opened()  # refused here, the folder is not even locked
    with store.locked():
        opened()  # another one may have ended in it meanwhile
        fits = planned(plan, store.prepared, watch.calibrate)
        watch.listed(fits)
        ended = []
        for one in fits:
            if one.done or one.reason is not None:
                ended.append(one)
                continue
            store.begin()
            watch.begin(one)
            resources = Resources(audit.device, seconds=audit.seconds, progress=watch.progress)
            ended.append(_made(bench, one, resources))
            watch.end(ended[-1])
        return tuple(ended)


def _made(bench: Bench, fit: Fit, resources: Resources) -> Fit:
    try:
        round_ = bench.simulated(fit.case)
        bench.fitted(fit.case, round_, resources)
    except NotApplicable as error:
        return Fit(fit.case, fit.trials, 0.0, reason=str(error))
    except Exception as error:  # an audit will keep it, trial by trial
        return Fit(
            fit.case, fit.trials, 0.0, reason=f"it crashes ({type(error).__name__}: {error})"
        )
    return Fit(fit.case, fit.trials, bench.fitted_before(fit.case, round_) or 0.0, done=True)


def planned(
    plan: Plan, prepared: Path, tell: Callable[[str], None] = lambda attack: None
) -> tuple[Fit, ...]:
    """Every preparation that trials of the plan share, once. What is not there is tried for a
    moment to tell its cost; `tell` hears the name of its attack."""
    wanted = dict.fromkeys(case for case in _cases(plan) if shares(plan.attacks[case.attack]))
    if not wanted:
        return ()
    there = Bench(plan, prepared)
    with tempfile.TemporaryDirectory(prefix="leakgauge-") as folder:
        trying = Trying(plan, Path(folder), tell)
        together: dict[object, list[Case]] = {}
        for case in wanted:
            together.setdefault(trying.preparation(case), []).append(case)
        costs: dict[object, tuple[float, str | None]] = {}

        def cost(case: Case) -> tuple[float, str | None]:
            attack = plan.attacks[case.attack]
            like = case.attack, case.kept, isinstance(parts(attack)[0], Learned) and case.defence
            if like not in costs:
                tell(case.attack)
                try:
                    costs[like] = trying.preparing(case, attack), None
                except Refused as reason:
                    costs[like] = 0.0, str(reason)
            return costs[like]

        fits = []
        for first, *others in together.values():
            took = there.fitted_before(first, there.simulated(first))
            seconds, reason = cost(first) if took is None else (took, None)
            fits.append(Fit(first, 1 + len(others), seconds, took is not None, reason))
    return tuple(fits)


def _cases(plan: Plan) -> list[Case]:
    """What an audit will surely run, in its order."""
    audit = plan.document.audit
    controls = cases.controls(plan) if audit.control else []
    surely = [*controls, *cases.trials(plan)]
    if audit.explain and controls and len(plan.asked) == 1:
        surely += [case for _, rung in cases.ladder(plan, plan.asked[0]) for case in rung]
    return surely
