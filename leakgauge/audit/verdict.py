"""The verdict: from numbers to words and an exit code.

Three kinds of leak are weighed, each against its own limit of the plan:

| kind     | a record counts when                                                       | limit    |
|----------|----------------------------------------------------------------------------|----------|
| pictures | its PSNR reaches `limit.psnr` and stands MARGIN above its own mean image   | `share`  |
| found    | its reconstruction is nearer to it than to every other gallery picture     | `found`  |
| labels   | its label is among those that the attack named                             | `labels` |

Shares are taken beyond guessing, (share − chance) / (1 − chance), with a 95 % interval. A row
(stage × defence × attack) then

- *leaks* when its share is above the limit and guessing does not explain it;
- is *below* when the upper end of the interval is not above the limit;
- is *undecided* otherwise: it rests on too few records.

A limit of 1 allows everything: that kind is below it, whatever happens.

| outcome         | when, first that applies                                          | exit code |
|-----------------|-------------------------------------------------------------------|-----------|
| leaks           | some row leaks, judged on attackers that are not told truths      | 1         |
| failed          | a trial crashed                                                   | 3         |
| inconclusive    | a kind is undecided, or no attack showed it on the known-weak     | 4         |
|                 | twin, or part of the plan was not run                             |           |
| below the limit | every kind is below its limit                                     | 0         |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from leakgauge.audit import advice

MARGIN = 3.0  # dB above the mean image
EXIT = {"below the limit": 0, "leaks": 1, "failed": 3, "inconclusive": 4}
KINDS = ("pictures", "found", "labels")
MOST_RECORDS = 10**7  # beyond this many, no number of records is called enough
Row = dict[str, Any]


# One row


def leaking(trial: Mapping[str, Any], limit: float) -> list[bool]:
    """For each record of a finished trial: does its picture leak?"""
    base = trial["baselines"]["mean image"]["psnr"]
    return [
        score >= limit and score >= floor + MARGIN
        for score, floor in zip(trial["scores"]["psnr"], base, strict=True)
    ]


def weigh(share: float, chance: float, records: int, limit: float) -> dict[str, Any]:
    """One kind of leak of one row: its share beyond guessing against its limit."""
    low, high = (beyond(end, chance) for end in wilson(share, records))
    above = beyond(share, chance)
    if above > limit and low > 0:
        state = "leaks"
    elif high <= limit:
        state = "below"
    else:
        state = "undecided"
    return {
        "share": share,
        "chance": chance,
        "records": records,
        "beyond": above,
        "interval": [low, high],
        "limit": limit,
        "state": state,
        "more": _more(share, chance, records, limit) if state == "undecided" else None,
    }


def beyond(share: float, chance: float) -> float:
    """The share that guessing does not explain; nothing where guessing is always right."""
    return max(0.0, (share - chance) / (1 - chance)) if chance < 1 else 0.0


def wilson(share: float, records: float) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): stays within 0 and 1, and is honest at both ends."""
    z = 1.96
    centre = share + z * z / (2 * records)
    half = z * math.sqrt(share * (1 - share) / records + z * z / (4 * records * records))
    scale = 1 + z * z / records
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _more(share: float, chance: float, records: int, limit: float) -> int | None:
    """How many more records, none of which leaks, would bring the interval below the limit."""

    def enough(number: int) -> bool:
        hits = share * records + chance * (number - records)  # guessing still finds its share
        return beyond(wilson(min(1.0, hits / number), number)[1], chance) <= limit

    low, high = records, 2 * records
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST_RECORDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high - records


# All rows


def judge(
    summary: list[Row],
    trials: list[dict[str, Any]],
    control: list[dict[str, Any]],
    not_run: list[dict[str, Any]],
    plan: Mapping[str, Any],
) -> dict[str, Any]:
    """The verdict on an audit; `trials` are all of them, controls included."""
    limit = plan["audit"]["limit"]
    rows = [row for row in summary if "scores" in row and row["realism"] != "oracle"]
    shown = {kind for kind in KINDS if any(kind in entry["breaks"] for entry in control)}
    failed = [trial for trial in trials if trial["status"] == "failed"]
    kinds = _kinds(rows, shown)
    defences = [
        _defended(defence, [row for row in rows if row["defence"] == defence], shown)
        for defence in dict.fromkeys(row["defence"] for row in summary)
    ]
    outcome = _outcome(kinds)
    if outcome == "below the limit" and not_run:
        outcome = "inconclusive"  # what was left out might have leaked
    if failed and outcome != "leaks":
        outcome = "failed"
    worst = max(rows, key=_severity, default=None)
    records = _records(trials)
    reason = advice.why_inconclusive(kinds, control, summary, not_run)
    done = [t for t in trials if t["kind"] == "trial" and t["status"] == "done"]
    return {
        "outcome": outcome,
        "exit_code": 3 if failed else EXIT[outcome],
        "headline": advice.headline(outcome, kinds, limit, records, reason, failed),
        "next": advice.next_steps(outcome, kinds, defences, reason, not_run, done, plan),
        "sentences": advice.sentences(worst, control, not_run, failed),
        "risk": worst["risk"]["median"] if worst else None,
        "limit": limit,
        "records": records,
        "kinds": kinds,
        "defences": defences,
        "worst": _worst(worst) if worst else None,
    }


def _severity(row: Row) -> tuple[int, float, float]:
    """Rows in the order of what they give away: leaking kinds, pictures first, then the PSNR."""
    leaks = row["leaks"]
    rank = sum(
        weight
        for kind, weight in (("pictures", 4), ("found", 2), ("labels", 1))
        if kind in leaks and leaks[kind]["state"] == "leaks"
    )
    return rank, leaks["pictures"]["share"], row["scores"]["psnr"]["median"]


def _kinds(rows: list[Row], shown: Iterable[str]) -> dict[str, Any]:
    """For each kind of leak the row that decides it, and whether it is shown to be below."""
    found: dict[str, Any] = {}
    order = {"leaks": 2, "undecided": 1, "below": 0}
    for kind in KINDS:
        having = [row for row in rows if kind in row["leaks"]]
        if not having:
            continue
        row = max(
            having, key=lambda r: (order[r["leaks"][kind]["state"]], r["leaks"][kind]["beyond"])
        )
        leak = dict(row["leaks"][kind])
        unlimited = leak["limit"] >= 1
        if leak["state"] != "leaks" and kind not in shown and not unlimited:
            leak |= {"state": "no control", "more": None}
        places = {key: row[key] for key in ("round", "defence", "attack")}
        found[kind] = places | leak
        if kind == "found":
            found[kind]["gallery"] = round(1 / row["baselines"]["identified"])
    return found


def _outcome(kinds: dict[str, Any]) -> str:
    states = {leak["state"] for leak in kinds.values()}
    if "leaks" in states:
        return "leaks"
    return "below the limit" if states == {"below"} else "inconclusive"


def _defended(defence: str, rows: list[Row], shown: Iterable[str]) -> dict[str, Any]:
    """The verdict on one defence alone."""
    kinds = _kinds(rows, shown)
    return {"defence": defence, "outcome": _outcome(kinds), "kinds": kinds}


def _records(trials: list[dict[str, Any]]) -> int:
    """On how many different records the verdict rests: those of one stage and seed are the same
    whoever attacks them, under whatever defence."""
    seen: dict[tuple[int, int], int] = {}
    for trial in trials:
        if trial["kind"] == "trial" and trial["status"] == "done" and trial["realism"] != "oracle":
            place = trial["round"], trial["seed"]
            seen[place] = max(seen.get(place, 0), trial["records"])
    return sum(seen.values())


def judge_control(row: Row, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Which kinds of leak an attack showed on the known-weak twin, by the limits of the plan."""
    done = "scores" in row
    psnr = row["scores"]["psnr"]["median"] if done else None
    base = row["baselines"]["mean image"]["psnr"] if done else None
    leaks = row["leaks"] if done else {}
    breaks = [kind for kind, leak in leaks.items() if leak["beyond"] > leak["limit"]]
    passed = "pictures" in breaks or "found" in breaks
    reason = row["reason"]
    if done and not passed:
        reason = f"{psnr:.1f} dB where a mean image has {base:.1f}, and no record was recognised"
    return {
        "attack": row["attack"],
        "psnr": psnr,
        "baseline": base,
        "breaks": breaks,
        "passed": passed,
        "reason": None if passed else reason,
        "trials": [trial["id"] for trial in trials],
    }


def _worst(row: Row) -> dict[str, Any]:
    psnr = row["scores"]["psnr"]
    return {
        "round": row["round"],
        "defence": row["defence"],
        "attack": row["attack"],
        "median": psnr["median"],
        "interval": psnr["interval"],
        "most": psnr["most"],
        "share": row["leaks"]["pictures"]["share"],
        "records": row["records"],
    }
