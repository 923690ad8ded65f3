"""What follows from the trials of an audit: rows, controls, explanation, verdict.

Pure functions of what result.json keeps, so that whoever reads the file can derive them again:
medians are over images × seeds, never the best of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from leakgauge.audit.advice import CAP, capped
from leakgauge.audit.verdict import judge, judge_control, leaking, weigh
from leakgauge.metrics import bootstrap, risk

SUCCESS = 20.0  # dB: from here on the risk is called very high
FALL = 3.0  # dB a rung must fall for its factor to be named as protecting


def derived(
    plan: Mapping[str, Any],
    trials: list[dict[str, Any]],
    controls: list[str],
    ladder: dict[str, Any] | None,
    not_run: list[dict[str, Any]],
) -> dict[str, Any]:
    """Everything in a result that its trials decide. `controls` are the ids of trials on the
    known-weak twin; `ladder` holds `attack` and `rungs`, each with the ids of its trials."""
    limit = plan["audit"]["limit"]
    by_id = {trial["id"]: trial for trial in trials}
    summary = summarise([trial for trial in trials if trial["kind"] == "trial"], limit)
    control = judged([by_id[id_] for id_ in controls if id_ in by_id], limit)
    verdict = judge(summary, trials, control, not_run, plan)
    return {
        "summary": summary,
        "control": control,
        "verdict": verdict,
        "explanation": explain(ladder, by_id, verdict) if ladder else None,
    }


def judged(trials: list[dict[str, Any]], limit: Mapping[str, float]) -> list[dict[str, Any]]:
    """One control entry per attack."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault(trial["attack"], []).append(trial)
    return [
        judge_control({"attack": attack, **_row(group, limit)}, group)
        for attack, group in groups.items()
    ]


def summarise(trials: list[dict[str, Any]], limit: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row for each stage, defence and attack, in the order of the plan."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["round"], trial["defence"], trial["attack"]), []).append(trial)
    return [
        {"round": stage, "defence": defence, "attack": attack, **_row(group, limit)}
        for (stage, defence, attack), group in groups.items()
    ]


def _row(group: list[dict[str, Any]], limit: Mapping[str, float]) -> dict[str, Any]:
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
    return row | {
        "realism": done[0]["realism"],
        "records": sum(trial["records"] for trial in done),
        "scores": {name: spread(_pooled(done, name)) for name in done[0]["scores"]},
        "baselines": {
            kind: {name: _baseline(done, kind, name) for name in done[0]["baselines"][kind]}
            for kind in ("mean image", "random image")
        }
        | {"identified": _weighted(done, lambda trial: trial["baselines"]["identified"])},
        "labels": _labels(done),
        "leaks": _leaks(done, limit),
        "success_rate": sum(value >= SUCCESS for value in psnr) / len(psnr),
        "risk": {"median": risk(statistics.median(psnr)), "worst": risk(max(psnr))},
        "caveats": list(dict.fromkeys(c for trial in done for c in trial["caveats"])),
    }


def _labels(done: list[dict[str, Any]]) -> dict[str, float] | None:
    """Labels read, and what guessing gives, over the records of all trials that named any."""
    named = [trial for trial in done if trial["labels"]]
    if not named:
        return None
    return {
        key: _weighted(named, lambda trial, key=key: trial["labels"][key])
        for key in ("accuracy", "random", "class prior")
    }


def _leaks(done: list[dict[str, Any]], limit: Mapping[str, float]) -> dict[str, Any]:
    """The kinds of leak that these trials measured, each against its limit."""
    records = sum(trial["records"] for trial in done)
    pictures = [leak for trial in done for leak in leaking(trial, limit["psnr"])]
    found = _pooled(done, "identified")
    chance = _weighted(done, lambda trial: trial["baselines"]["identified"])
    leaks = {
        "pictures": weigh(sum(pictures) / records, 0.0, records, limit["share"]),
        "found": weigh(sum(found) / records, chance, records, limit["found"]),
    }
    if labels := _labels(done):
        guessing = max(labels["random"], labels["class prior"])
        number = sum(trial["records"] for trial in done if trial["labels"])
        leaks["labels"] = weigh(labels["accuracy"], guessing, number, limit["labels"])
    return leaks


def _weighted(done: list[dict[str, Any]], value: Any) -> float:
    """The mean over records of a number that each trial has once."""
    total = sum(trial["records"] for trial in done)
    return float(sum(value(trial) * trial["records"] for trial in done) / total)


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
    ladder: dict[str, Any], trials: Mapping[str, dict[str, Any]], verdict: dict[str, Any]
) -> dict[str, Any]:
    """Which factor protects: the rung of the ladder where the median falls most. Decibels beyond
    CAP are no difference that anybody could see, and do not count."""
    rows: list[dict[str, Any]] = []
    for rung in ladder["rungs"]:
        known = [trials[id_] for id_ in rung["trials"] if id_ in trials]
        scores = _pooled([trial for trial in known if trial["status"] == "done"], "psnr")
        median = statistics.median(scores) if scores else None
        before: float | None = rows[-1]["median"] if rows else None
        change = None
        if median is not None and before is not None:
            change = min(median, CAP) - min(before, CAP)
        rows.append(rung | {"median": median, "change": change})
    return {
        "attack": ladder["attack"],
        "rungs": rows,
        "sentence": _why(ladder["attack"], rows, verdict),
    }


def _why(attack: str, rows: list[dict[str, Any]], verdict: dict[str, Any]) -> str:
    falls = [row for row in rows[1:] if row["change"] is not None]
    if verdict["outcome"] == "inconclusive":
        return "What protects cannot be said: the audit is inconclusive."
    if verdict["outcome"] == "failed":
        return "What protects cannot be said: part of the audit crashed."
    if len(falls) < len(rows) - 1 or not falls:
        return "What protects cannot be said: too few trials of the ladder were run."
    most = min(falls, key=lambda row: float(row["change"]))
    limit = verdict["limit"]["psnr"]
    if most["change"] > -FALL:
        return (
            f"No factor that was tested hinders {attack} by {FALL:g} dB or more: its median is "
            f"{capped(rows[0]['median'])} on the weakest twin and {capped(rows[-1]['median'])} "
            "with everything in place."
        )
    before = rows[rows.index(most) - 1]["median"]
    left = "still above" if most["median"] >= limit else "below"
    adapts = "; the attack does not adapt to it" if most["factor"] == "defence" else ""
    return (
        f"What hinders {attack} most is the {most['factor']} ({most['label']}): the median falls "
        f"from {capped(before)} to {capped(most['median'])}, {left} the limit of {limit:g} dB"
        f"{adapts}."
    )


def _pooled(done: list[dict[str, Any]], name: str) -> list[float]:
    return [value for trial in done for value in trial["scores"][name]]


def _baseline(done: list[dict[str, Any]], kind: str, name: str) -> float:
    values: list[float] = [v for trial in done for v in trial["baselines"][kind][name]]
    return statistics.median(values)
