"""What an evaluation of the guard found: rates with their bounds.

Bounds are one-sided 95 % Clopper–Pearson (exact binomial). They treat the checks as independent;
those of one federation are not, so read them as the best that the numbers can say.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from scipy.stats import beta

Records = list[dict[str, Any]]


def upper(events: int, trials: int) -> float:
    """The largest rate at which so few events still happen once in twenty."""
    return 1.0 if events >= trials else float(beta.ppf(0.95, events + 1, trials - events))


def lower(events: int, trials: int) -> float:
    """The smallest rate at which so many events still happen once in twenty."""
    return 0.0 if not events else float(beta.ppf(0.05, events, trials - events + 1))


def summarise(records: Records, facts: dict[str, Any]) -> dict[str, Any]:
    benign, sent = checks(records, "benign"), checks(records, "attacked")
    attacked = [line for line in sent if line["decision"]]
    decisions = Counter(line["decision"] for line in benign)
    return facts | {
        "federations": sum(r["kind"] == "federation" for r in records),
        "cpu_seconds": sum(r["cpu_seconds"] for r in records),
        "benign": {
            "checks": len(benign),
            **{name: decisions[name] for name in ("ACCEPT", "EXPOSED", "REJECT")},
            "reject_bound": upper(decisions["REJECT"], len(benign)),
            "not_accept_bound": upper(len(benign) - decisions["ACCEPT"], len(benign)),
        },
        "attacked": {
            when: _rate(lines)
            for when, lines in (("round 0", early(attacked)), ("with memory", late(attacked)))
        },
        "tests": {test: _test(test, benign, attacked) for test in tests_of(benign + attacked)},
        "attacks": {
            name: {
                "round 0": _attack(early(attacked), name),
                "with memory": _attack(late(attacked), name),
                "not_applicable": sorted(
                    {line["reason"] for line in sent
                     if line["attack"] == name and not line["decision"]}
                ),
            }
            for name in dict.fromkeys(line["attack"] for line in sent)
        },
        "cost": [
            {k: r[k] for k in ("host", "epoch", "weights")}
            | {"check": median(r["checks"]), "share": median(r["checks"]) / r["epoch"]}
            for r in records
            if r["kind"] == "cost"
        ],
        "recovery": [
            {k: r[k] for k in ("attack", "host", "runs")}
            for r in records
            if r["kind"] == "recovery"
        ],
        "studied": [
            {k: r[k] for k in ("attack", "runs")} for r in records if r["kind"] == "studied"
        ],
        "exposed": dict(_exposed(records)),
        "policies": {
            name: _policy(checks(records, "benign", name), checks(records, "attacked", name))
            for name in _policies(records)
        },
    }  # fmt: skip


def checks(records: Records, kind: str, policy: str = "") -> Records:
    """The checks under one policy; that which is evaluated has no name."""
    federations = [r for r in records if r["kind"] == "federation"]
    return [line for r in federations for line in r[kind] if line["policy"] == policy]


def _policies(records: Records) -> list[str]:
    every = [line["policy"] for r in records if r["kind"] == "federation" for line in r["benign"]]
    return [name for name in dict.fromkeys(every) if name]


def _exposed(records: Records) -> Counter[str]:
    """Honest client-rounds that were EXPOSED, by network."""
    return Counter(
        r["host"]
        for r in records
        if r["kind"] == "federation"
        for line in r["benign"]
        if not line["policy"] and line["decision"] == "EXPOSED"
    )


def _policy(benign: Records, attacked: Records) -> dict[str, Any]:
    """What another policy says of the same models."""
    names = dict.fromkeys(line["attack"] for line in attacked)
    return {
        "benign": dict(Counter(line["decision"] for line in benign)),
        "attacks": {
            name: {"round 0": _attack(early(attacked), name),
                   "with memory": _attack(late(attacked), name)}
            for name in names
        },
        "largest": {
            test: max(line["tests"][test][0] for line in benign if test in line["tests"])
            for test in tests_of(benign)
        },
        "attacked": {
            test: sorted(line["tests"][test][0] for line in attacked if test in line["tests"])
            for test in tests_of(attacked)
        },
    }  # fmt: skip


def early(lines: Records) -> Records:
    return [line for line in lines if not line["round"]]


def late(lines: Records) -> Records:
    return [line for line in lines if line["round"]]


def tests_of(lines: Records) -> list[str]:
    return list(dict.fromkeys(test for line in lines for test in line["tests"]))


def _rate(lines: Records) -> dict[str, Any]:
    caught = sum(line["decision"] != "ACCEPT" for line in lines)
    bound = lower(caught, len(lines)) if lines else None
    return {"checks": len(lines), "caught": caught, "bound": bound}


def _test(test: str, benign: Records, attacked: Records) -> dict[str, Any]:
    """One test by itself: how often it fired, and the extremes of its scores."""
    good = [line["tests"][test] for line in benign if test in line["tests"]]
    bad = [line["tests"][test] for line in attacked if test in line["tests"]]
    fired = sum(one[2] for one in good)
    return {
        "means": (good + bad)[0][3],
        "threshold": (good + bad)[0][1],
        "benign": len(good),
        "benign_fired": fired,
        "benign_max": max((one[0] for one in good), default=None),
        "benign_bound": upper(fired, len(good)) if good else None,
        "attacked": len(bad),
        "attacked_fired": sum(one[2] for one in bad),
        "attacked_above_benign": sum(
            one[0] > max((g[0] for g in good), default=0.0) for one in bad
        ),
    }


def _attack(lines: Records, name: str) -> dict[str, Any]:
    mine = [line for line in lines if line["attack"] == name]
    by = Counter(
        test
        for line in mine
        for test, (_, _, fired, means) in line["tests"].items()
        if fired and means != "report"
    )
    found = Counter(line["decision"] for line in mine)
    return {"checks": len(mine)} | dict(found) | {"by": dict(by.most_common())}
