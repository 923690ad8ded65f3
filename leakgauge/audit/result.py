"""From trials to a result: summaries over images × seeds, never the best of one.

The layout of result.json is documented in docs/result-schema.md. Only keys named `times` differ
between two runs of the same plan.
"""

from __future__ import annotations

import platform
import statistics
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from leakgauge import threat
from leakgauge._version import __version__
from leakgauge.audit.cases import Case
from leakgauge.audit.ladder import describe
from leakgauge.audit.plan import Plan, plain
from leakgauge.audit.schema import SCHEMA
from leakgauge.audit.verdict import judge, leaking
from leakgauge.metrics import bootstrap, risk

SUCCESS = 20.0  # dB: from here on the risk is called very high
FALL = 3.0  # dB a rung must fall for its factor to be named as protecting


def assemble(
    plan: Plan,
    model: nn.Module,
    *,
    trials: list[dict[str, Any]],
    control: list[dict[str, Any]],
    rungs: list[tuple[str, Case, list[dict[str, Any]]]],
    not_run: list[dict[str, Any]],
    sensitivity: dict[str, Any] | None,
    wall: float,
    forecast: dict[str, Any] | None,
) -> dict[str, Any]:
    document = plan.document
    limit = plain(document.audit.limit)
    main = [trial for trial in trials if trial["kind"] == "trial"]
    summary = summarise(main, limit["psnr"])
    cpu = sum(trial["times"]["cpu_seconds"] for trial in trials)
    return {
        "schema": SCHEMA,
        "leakgauge": __version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "plan": plain(document),
        "federation": _federation(plan, model),
        "threat": _threat(plan),
        "verdict": judge(summary, trials, control, not_run, limit),
        "control": control,
        "summary": summary,
        "explanation": explain(plan, rungs),
        "sensitivity": sensitivity,
        "trials": trials,
        "not_run": not_run,
        "references": sorted({trial["attack"] for trial in main}),
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


def summarise(trials: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """One row for each stage, defence and attack, in the order of the plan."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["round"], trial["defence"], trial["attack"]), []).append(trial)
    return [
        {"round": stage, "defence": defence, "attack": attack, **_row(group, limit)}
        for (stage, defence, attack), group in groups.items()
    ]


def _row(group: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    done = [trial for trial in group if trial["status"] == "done"]
    row: dict[str, Any] = {
        "trials": len(group),
        "failed": sum(trial["status"] == "failed" for trial in group),
        "not_applicable": sum(trial["status"] == "not applicable" for trial in group),
        "reason": next((trial["error"] for trial in group if trial["error"]), None),
    }
    if not done:
        return row
    psnr = _pooled(done, "psnr")
    named = [trial["labels"] for trial in done if trial["labels"]]
    leaks = [leak for trial in done for leak in leaking(trial, limit)]
    return row | {
        "realism": done[0]["realism"],
        "records": sum(trial["records"] for trial in done),
        "scores": {name: spread(_pooled(done, name)) for name in done[0]["scores"]},
        "baselines": {
            kind: {name: _baseline(done, kind, name) for name in done[0]["baselines"][kind]}
            for kind in ("mean image", "random image")
        }
        | {"identified": done[0]["baselines"]["identified"]},
        "labels": {
            key: statistics.mean(found[key] for found in named)
            for key in ("accuracy", "random", "class prior")
        }
        if named
        else None,
        "success_rate": sum(value >= SUCCESS for value in psnr) / len(psnr),
        "leaking": sum(leaks) / len(leaks),
        "risk": {"median": risk(statistics.median(psnr)), "worst": risk(max(psnr))},
        "caveats": list(dict.fromkeys(c for trial in done for c in trial["caveats"])),
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median with quartiles, extremes and a bootstrap interval of the median."""
    ordered = sorted(values)
    rng = torch.Generator().manual_seed(0)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(values) > 1 else []
    low, high = bootstrap.interval(ordered, rng)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "quartiles": [quartiles[0], quartiles[2]] if quartiles else [ordered[0], ordered[0]],
        "interval": [low, high],
        "least": ordered[0],
        "most": ordered[-1],
        "count": len(ordered),
    }


def explain(
    plan: Plan, rungs: list[tuple[str, Case, list[dict[str, Any]]]]
) -> dict[str, Any] | None:
    """Which factor protects: the rung of the ladder where the median falls most."""
    if not rungs:
        return None
    _, top, _ = rungs[-1]
    scenario = plan.scenario(top.stage, top.defence)
    rows: list[dict[str, Any]] = []
    for factor, _, trials in rungs:
        scores = _pooled([trial for trial in trials if trial["status"] == "done"], "psnr")
        median = statistics.median(scores) if scores else None
        before = rows[-1]["median"] if rows else None
        rows.append(
            {
                "factor": factor,
                "label": describe(scenario, factor),
                "median": median,
                "change": median - before if median is not None and before is not None else None,
                "trials": len(trials),
            }
        )
    return {"attack": top.attack, "rungs": rows, "sentence": _why(rows)}


def _why(rows: list[dict[str, Any]]) -> str:
    falls = [row for row in rows if row["change"] is not None]
    if not falls:
        return "The ladder could not be climbed: too few of its trials were run."
    most = min(falls, key=lambda row: float(row["change"]))
    first, last = rows[0]["median"], rows[-1]["median"]
    if most["change"] <= -FALL:
        return (
            f"What protects most is the {most['factor']} ({most['label']}): with it the median "
            f"falls by {-most['change']:.1f} dB."
        )
    return (
        f"Nothing in this federation protects: the median is {last or 0:.1f} dB with everything in "
        f"place and {first or 0:.1f} dB on its weakest twin."
    )


def _pooled(done: list[dict[str, Any]], name: str) -> list[float]:
    return [value for trial in done for value in trial["scores"][name]]


def _baseline(done: list[dict[str, Any]], kind: str, name: str) -> float:
    values: list[float] = [v for trial in done for v in trial["baselines"][kind][name]]
    return statistics.median(values)
