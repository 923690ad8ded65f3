"""From trials to a result: summaries over images × seeds, never the best of one.

`result.json` holds `schema` (version of this layout), `leakgauge` and `versions`, `plan`,
`federation` (what was audited), `summary` (one row for each stage × defence × attack) and `trials`.
Only keys named `times` differ between two runs of the same plan.
"""

from __future__ import annotations

import platform
import statistics
from typing import Any

import torch
from torch import nn

from leakgauge._version import __version__
from leakgauge.audit.plan import Plan, plain
from leakgauge.metrics import bootstrap, risk

SCHEMA = 1
SUCCESS = 20.0  # dB: from here on METHODS calls the risk very high


def assemble(plan: Plan, model: nn.Module, trials: list[dict[str, Any]]) -> dict[str, Any]:
    _, channels, height, width = plan.data.inputs.shape
    return {
        "schema": SCHEMA,
        "leakgauge": __version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "plan": plain(plan.document),
        "federation": {
            "data": plan.data.name,
            "records": len(plan.data),
            "shape": [channels, height, width],
            "classes": list(plan.data.classes),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "summary": summarise(trials),
        "trials": trials,
        "times": {
            "cpu_seconds": sum(trial["times"]["cpu_seconds"] for trial in trials),
        },
    }


def summarise(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each stage, defence and attack, in the order of the plan."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["round"], trial["defence"], trial["attack"]), []).append(trial)
    return [
        {"round": stage, "defence": defence, "attack": attack, **_row(group)}
        for (stage, defence, attack), group in groups.items()
    ]


def _row(group: list[dict[str, Any]]) -> dict[str, Any]:
    done = [trial for trial in group if trial["status"] == "done"]
    row: dict[str, Any] = {
        "trials": len(group),
        "failed": sum(trial["status"] == "failed" for trial in group),
        "not_applicable": sum(trial["status"] == "not applicable" for trial in group),
        "reason": next((trial["error"] for trial in group if trial["error"]), None),
    }
    if not done:
        return row
    row["realism"] = done[0]["realism"]
    row["records"] = sum(trial["records"] for trial in done)
    row["scores"] = {name: spread(_pooled(done, "scores", name)) for name in done[0]["scores"]}
    row["baselines"] = {
        kind: {name: _median_of(done, kind, name) for name in done[0]["baselines"][kind]}
        for kind in ("mean image", "random image")
    }
    row["baselines"]["identified"] = done[0]["baselines"]["identified"]
    named = [trial["labels"] for trial in done if trial["labels"]]
    row["labels"] = (
        {key: statistics.mean(found[key] for found in named)
         for key in ("accuracy", "random", "class prior")} if named else None
    )  # fmt: skip
    psnr = _pooled(done, "scores", "psnr")
    if psnr:
        row["success_rate"] = sum(value >= SUCCESS for value in psnr) / len(psnr)
        row["risk"] = {"median": risk(statistics.median(psnr)), "worst": risk(max(psnr))}
    return row


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


def _pooled(done: list[dict[str, Any]], part: str, name: str) -> list[float]:
    return [value for trial in done for value in trial[part].get(name, [])]


def _median_of(done: list[dict[str, Any]], kind: str, name: str) -> float:
    return float(statistics.median(v for trial in done for v in trial["baselines"][kind][name]))
