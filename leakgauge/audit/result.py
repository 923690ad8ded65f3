"""From trials to a result: what was audited, every trial, and what follows from them.

The layout of result.json is documented in docs/result-schema.md. Only keys named `times` differ
between two runs of the same plan.
"""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from leakgauge import threat
from leakgauge._version import __version__
from leakgauge.audit.cases import Case
from leakgauge.audit.ladder import describe
from leakgauge.audit.plan import Plan
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.summary import derived
from leakgauge.config import plain


def assemble(
    plan: Plan,
    model: nn.Module,
    *,
    trials: list[dict[str, Any]],
    controls: list[Case],
    rungs: list[tuple[str, list[Case]]],
    not_run: list[dict[str, Any]],
    sensitivity: dict[str, Any] | None,
    wall: float,
    forecast: dict[str, Any] | None,
) -> dict[str, Any]:
    document = plain(plan.document)
    cpu = sum(trial["times"]["cpu_seconds"] for trial in trials)
    return {
        "schema": SCHEMA,
        "leakgauge": __version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "plan": document,
        "federation": _federation(plan, model),
        "threat": _threat(plan),
        **derived(document, trials, [case.id for case in controls], _ladder(plan, rungs), not_run),
        "sensitivity": sensitivity,
        "trials": trials,
        "not_run": not_run,
        "references": sorted({trial["attack"] for trial in trials if trial["kind"] == "trial"}),
        "times": {
            "cpu_seconds": cpu,
            "wall_seconds": wall,
            "forecast": forecast
            and forecast | {"error": forecast["cpu_seconds"] / cpu - 1 if cpu else None},
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }


def _federation(plan: Plan, model: nn.Module) -> dict[str, Any]:
    named = plan.document.federation.model
    return {
        "model": named if isinstance(named, str) else str(named.get("name")),
        "data": plan.data.name,
        "records": len(plan.data),
        "shape": list(plan.data.inputs.shape[1:]),
        "classes": list(plan.data.classes),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _threat(plan: Plan) -> dict[str, Any]:
    model = plan.document.threat
    held = threat.holds(model, len(plan.public))
    return {
        "actor": model.actor,
        "client": model.client,
        "malicious": model.malicious,
        "holds": sorted(held),
        "withheld": sorted(set(threat.KNOWLEDGE) - held),
        "realism": threat.realism(model),
        "knowledge": dict(threat.KNOWLEDGE),
    }


def _ladder(plan: Plan, rungs: list[tuple[str, list[Case]]]) -> dict[str, Any] | None:
    """The rungs that were climbed, each with its factor in words and the ids of its trials."""
    if not rungs:
        return None
    top = rungs[-1][1][0]
    return {
        "attack": top.attack,
        "rungs": [
            {
                "factor": factor,
                "label": describe(plan.scenario(top.stage, top.defence), factor, top.defence),
                "trials": [case.id for case in cases],
            }
            for factor, cases in rungs
        ],
    }
