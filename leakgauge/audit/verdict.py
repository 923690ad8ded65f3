"""The verdict: from numbers to words and an exit code.

A record *leaks* when its PSNR reaches the limit **and** stands MARGIN above its own mean-image
baseline: a flat photograph scores well against any grey guess. A row (stage × defence × attack)
leaks when more than the limit's share of its records do.

| outcome         | when                                                             | exit code |
|-----------------|------------------------------------------------------------------|-----------|
| leaks           | some row leaks, judged on realistic and informed attackers only  | 1         |
| failed          | a trial crashed                                                  | 3         |
| inconclusive    | nothing leaks, but no attack broke the known-weak twin either,   | 4         |
|                 | or none was tried on it                                          |           |
| below the limit | nothing leaks, and at least one attack broke the twin            | 0         |
"""

from __future__ import annotations

import statistics
from typing import Any

MARGIN = 3.0  # dB above the mean image
EXIT = {"below the limit": 0, "leaks": 1, "failed": 3, "inconclusive": 4}


def leaking(trial: dict[str, Any], limit: float) -> list[bool]:
    """For each record of a finished trial: does it leak?"""
    base = trial["baselines"]["mean image"]["psnr"]
    return [
        score >= limit and score >= floor + MARGIN
        for score, floor in zip(trial["scores"]["psnr"], base, strict=True)
    ]


def judge(
    summary: list[dict[str, Any]],
    trials: list[dict[str, Any]],
    control: list[dict[str, Any]],
    not_run: list[dict[str, Any]],
    limit: dict[str, float],
) -> dict[str, Any]:
    """The verdict on an audit; `trials` are all of them, controls included."""
    rows = [row for row in summary if "scores" in row and row["realism"] != "oracle"]
    rows.sort(key=lambda row: (-row["leaking"], -row["scores"]["psnr"]["median"]))
    worst = rows[0] if rows else None
    failed = [trial for trial in trials if trial["status"] == "failed"]
    if worst and worst["leaking"] > limit["share"]:
        outcome = "leaks"
    elif failed:
        outcome = "failed"
    elif worst and any(entry["passed"] for entry in control):
        outcome = "below the limit"
    else:
        outcome = "inconclusive"
    return {
        "outcome": outcome,
        "exit_code": 3 if failed else EXIT[outcome],
        "headline": _headline(outcome, worst, control, limit, failed),
        "sentences": _sentences(worst, rows, control, not_run, failed),
        "risk": worst["risk"]["median"] if worst else None,
        "limit": limit,
        "worst": _worst(worst) if worst else None,
    }


def judge_control(trial: dict[str, Any]) -> dict[str, Any]:
    """Did this attack break the known-weak twin? Its median must stand MARGIN above the mean."""
    entry = {
        "attack": trial["attack"],
        "psnr": None,
        "baseline": None,
        "passed": False,
        "reason": trial["error"],
        "trial": trial["id"],
    }
    if trial["status"] == "done":
        psnr = statistics.median(trial["scores"]["psnr"])
        base = statistics.median(trial["baselines"]["mean image"]["psnr"])
        passed = psnr >= base + MARGIN
        reason = None if passed else f"{psnr:.1f} dB is not {MARGIN:g} dB above the mean image"
        entry |= {"psnr": psnr, "baseline": base, "passed": passed, "reason": reason}
    return entry


def _worst(row: dict[str, Any]) -> dict[str, Any]:
    psnr = row["scores"]["psnr"]
    return {
        "round": row["round"],
        "defence": row["defence"],
        "attack": row["attack"],
        "median": psnr["median"],
        "interval": psnr["interval"],
        "most": psnr["most"],
        "share": row["leaking"],
        "records": row["records"],
    }


def _headline(
    outcome: str,
    worst: dict[str, Any] | None,
    control: list[dict[str, Any]],
    limit: dict[str, float],
    failed: list[dict[str, Any]],
) -> str:
    if outcome == "leaks" and worst:
        return (
            f"This federation leaks: {worst['attack']} recovered {worst['leaking']:.0%} of the "
            f"attacked records beyond {limit['psnr']:g} dB."
        )
    if outcome == "failed":
        return f"Part of the audit crashed ({len(failed)} trials): no verdict is given."
    if outcome == "inconclusive" and not worst:
        return "Inconclusive: no realistic attack was run to its end."
    if outcome == "inconclusive" and not control:
        return (
            "Inconclusive: nothing leaked, but no attack was tried on a known-weak twin, so their "
            "failure here is no evidence of safety."
        )
    if outcome == "inconclusive":
        return (
            "Inconclusive: no attack broke a known-weak twin, so their failure here is no "
            "evidence of safety."
        )
    return (
        f"No more than {limit['share']:.0%} of the attacked records were recovered beyond "
        f"{limit['psnr']:g} dB by the attacks that were run."
    )


def _sentences(
    worst: dict[str, Any] | None,
    rows: list[dict[str, Any]],
    control: list[dict[str, Any]],
    not_run: list[dict[str, Any]],
    failed: list[dict[str, Any]],
) -> list[str]:
    sentences = []
    if worst:
        psnr, base = worst["scores"]["psnr"], worst["baselines"]["mean image"]["psnr"]
        low, high = psnr["interval"]
        sentences.append(
            f"Strongest attack: {worst['attack']} at round {worst['round']}, defence "
            f"{worst['defence']}: median PSNR {psnr['median']:.1f} dB (95 % interval {low:.1f} to "
            f"{high:.1f}, highest {psnr['most']:.1f}) over {worst['records']} records; a mean "
            f"image scores {base:.1f} dB."
        )
    for defence in dict.fromkeys(row["defence"] for row in rows):
        best = max((r for r in rows if r["defence"] == defence), key=lambda r: float(r["leaking"]))
        if worst and defence != worst["defence"]:
            sentences.append(
                f"With defence {defence}: {best['leaking']:.0%} of the records leak, median "
                f"{best['scores']['psnr']['median']:.1f} dB ({best['attack']})."
            )
    passed = [entry["attack"] for entry in control if entry["passed"]]
    if control:
        sentences.append(
            f"Positive control: {len(passed)} of {len(control)} attacks broke the known-weak twin"
            + (f" ({', '.join(passed)})." if passed else ".")
        )
    if failed:
        sentences.append(f"{len(failed)} trials crashed; their errors are below.")
    if not_run:
        sentences.append(f"{len(not_run)} trials were not run: {not_run[0]['reason']}.")
    return sentences
