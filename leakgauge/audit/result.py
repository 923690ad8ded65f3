"""From trials to a result: what was audited, every trial, and what follows from them.

The layout of result.json is documented in docs/result-schema.md. Only keys named `times` differ
between two runs of the same plan.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import torch
from torch import nn

from leakgauge import threat
from leakgauge._version import __version__
from leakgauge.attacks import Exposure
from leakgauge.audit import prior, references
from leakgauge.audit.cases import Case
from leakgauge.audit.document import name_of
from leakgauge.audit.forecast import Forecast
from leakgauge.audit.ladder import describe
from leakgauge.audit.plan import PRIOR, Plan
from leakgauge.audit.privacy import guarantees
from leakgauge.audit.public import told
from leakgauge.audit.results import (
    Attacker,
    Audited,
    Explanation,
    Forecasted,
    NotRun,
    Public,
    Result,
    Rung,
    RunTimes,
    Sensitivity,
    Trained,
    Trial,
)
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.summary import derived
from leakgauge.audit.verdict import measurements
from leakgauge.models.precode import Bottleneck
from leakgauge.types import Round


def assemble(
    plan: Plan,
    model: nn.Module,
    *,
    trials: Sequence[Trial],
    trained: Sequence[Trained],
    controls: Iterable[Case],
    rungs: Sequence[tuple[str, list[Case]]],
    not_run: Iterable[NotRun],
    sensitivity: Sensitivity | None,
    wall: float,
    forecast: Forecast | None,
    interrupted: bool,
    exposure: tuple[Exposure, ...],
) -> Result:
    times = [*(trial.times for trial in trials), *(one.times for one in trained)]
    cpu = sum(one.cpu_seconds for one in times)
    tried = {*plan.asked, *(trial.attack for trial in trials if trial.kind == "trial")}
    attacks = [attack for name, attack in plan.attacks.items() if name in tried]
    others = [v for kind in (plan.restorers, plan.defences, plan.metrics) for v in kind.values()]
    layers = [layer.options for layer in model.modules() if isinstance(layer, Bottleneck)]
    given = Result(
        schema=SCHEMA,
        leakgauge=__version__,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        name=plan.name,
        fingerprint=plan.fingerprint,
        plan=plan.document,
        federation=_federation(plan, model),
        threat=_threat(plan),
        metrics=measurements(plan.metrics, plan.document.audit.limit),
        summary=(),
        control=(),
        verdict=None,
        explanation=None,
        sensitivity=sensitivity,
        trials=tuple(trials),
        not_run=tuple(not_run),
        references=references.of([*attacks, *others, plan.document.federation.secure, *layers]),
        times=RunTimes(
            cpu_seconds=cpu,
            wall_seconds=wall,
            forecast=_forecasted(forecast, cpu) if forecast else None,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        interrupted=interrupted,
        exposure=exposure,
        privacy=guarantees(plan),
        trained=tuple(trained),
    )
    return derived(given, [case.id for case in controls], _ladder(plan, rungs))


def _forecasted(told: Forecast, cpu: float) -> Forecasted:
    error = told.cpu_seconds / cpu - 1 if cpu else None
    return Forecasted(told.cpu_seconds, told.low, told.high, told.megabytes, error)


def _federation(plan: Plan, model: nn.Module) -> Audited:
    return Audited(
        model=name_of(plan.document.federation.model),
        data=plan.data.name,
        records=len(plan.data),
        shape=tuple(plan.data.inputs.shape[1:]),
        classes=plan.data.classes,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _threat(plan: Plan) -> Attacker:
    model, public = plan.document.threat, described(plan)
    held = threat.holds(model, len(plan.public)) | ({PRIOR} if plan.priors else set())
    known = all(isinstance(one, Round) for one in plan.captured)
    shape = tuple(plan.data.inputs.shape[1:])
    priors = "; ".join(prior.told(one, shape, known) for one in plan.priors.values())
    return Attacker(
        actor=model.actor,
        client=model.client,
        malicious=model.malicious,
        holds=tuple(sorted(held)),
        withheld=tuple(sorted(set(threat.KNOWLEDGE) - held)),
        realism=threat.realism(model),
        knowledge=threat.KNOWLEDGE
        | ({threat.PUBLIC: told(public)} if public else {})
        | ({PRIOR: priors} if plan.priors else {}),
        public=public,
    )


def described(plan: Plan) -> Public | None:
    """The public records of a plan, if it has some."""
    if not len(plan.public):
        return None
    known = all(isinstance(one, Round) for one in plan.captured)
    return Public(plan.public.name, len(plan.public), plan.public_source, known)


def _ladder(plan: Plan, rungs: Sequence[tuple[str, list[Case]]]) -> Explanation | None:
    """The rungs that were climbed, each with its factor in words and the ids of its trials."""
    if not rungs:
        return None
    top = rungs[-1][1][0]
    scenario = plan.scenario(top.stage, top.defence)
    return Explanation(
        attack=top.attack,
        rungs=tuple(
            Rung(factor, describe(scenario, factor, top.defence), tuple(case.id for case in cases))
            for factor, cases in rungs
        ),
    )
