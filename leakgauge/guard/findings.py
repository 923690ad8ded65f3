"""What an evaluation of the guard found: rates with their bounds, a table, and a figure.

Bounds are one-sided 95 % Clopper–Pearson (exact binomial). They treat the checks as independent;
those of one federation are not, so read them as the best that the numbers can say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from scipy.stats import beta

from leakgauge.config import optional
from leakgauge.files import write_atomic, write_json

Records = list[dict[str, Any]]
FLOOR = 1e-4  # of score / threshold in the figure


def upper(events: int, trials: int) -> float:
    """The largest rate at which so few events still happen once in twenty."""
    return 1.0 if events >= trials else float(beta.ppf(0.95, events + 1, trials - events))


def lower(events: int, trials: int) -> float:
    """The smallest rate at which so many events still happen once in twenty."""
    return 0.0 if not events else float(beta.ppf(0.05, events, trials - events + 1))


def summarise(records: Records, facts: dict[str, Any]) -> dict[str, Any]:
    benign, sent = _lines(records, "benign"), _lines(records, "attacked")
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
            for when, lines in (("round 0", _early(attacked)), ("with memory", _late(attacked)))
        },
        "tests": {test: _test(test, benign, attacked) for test in _names(benign + attacked)},
        "attacks": {
            name: {
                "round 0": _attack(_early(attacked), name),
                "with memory": _attack(_late(attacked), name),
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
            name: _policy(_lines(records, "benign", name), _lines(records, "attacked", name))
            for name in _policies(records)
        },
    }  # fmt: skip


def _lines(records: Records, kind: str, policy: str = "") -> Records:
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
            name: {"round 0": _attack(_early(attacked), name),
                   "with memory": _attack(_late(attacked), name)}
            for name in names
        },
        "largest": {
            test: max(line["tests"][test][0] for line in benign if test in line["tests"])
            for test in _names(benign)
        },
        "attacked": {
            test: sorted(line["tests"][test][0] for line in attacked if test in line["tests"])
            for test in _names(attacked)
        },
    }  # fmt: skip


def _early(lines: Records) -> Records:
    return [line for line in lines if not line["round"]]


def _late(lines: Records) -> Records:
    return [line for line in lines if line["round"]]


def _names(lines: Records) -> list[str]:
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


def markdown(result: dict[str, Any]) -> str:
    benign, lines = result["benign"], []
    lines += [
        f"Data: {result['data']}, seed {result['seed']}, {result['federations']} federations, "
        f"{result['cpu_seconds'] / 60:.0f} CPU-minutes.",
        "",
        f"Honest client-rounds: **{benign['checks']}**, of them {benign['ACCEPT']} ACCEPT, "
        f"{benign['EXPOSED']} EXPOSED, **{benign['REJECT']} REJECT** (rate of false REJECT at most "
        f"{benign['reject_bound']:.2%}, one-sided 95 %).",
        "",
    ]
    if result["exposed"]:
        hosts = ", ".join(f"{count} {host}" for host, count in result["exposed"].items())
        lines += [f"EXPOSED were: {hosts}.", ""]
    for when, rate in result["attacked"].items():
        if rate["checks"]:
            lines.append(
                f"Manipulated models, {when}: **{rate['caught']} of {rate['checks']}** EXPOSED or "
                f"REJECT (rate at least {rate['bound']:.1%})."
            )
            lines.append("")
    lines += ["| attack | round 0 | with memory | fired most often |", "|---|---|---|---|"]
    for name, one in result["attacks"].items():
        by = Counter(one["round 0"]["by"]) + Counter(one["with memory"]["by"])
        cells = (_counts(one["round 0"]), _counts(one["with memory"]))
        first = ", ".join(test for test, _ in by.most_common(3))
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {first} |")
    lines += [
        "",
        "| test | stands for | threshold | honest: fired | honest: largest | rate at most | "
        "attacks: fired | attacks above every honest score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for test, one in result["tests"].items():
        bound = "–" if one["benign_bound"] is None else f"{one['benign_bound']:.2%}"
        largest = "–" if one["benign_max"] is None else f"{one['benign_max']:.3g}"
        lines.append(
            f"| {test} | {one['means']} | {one['threshold']:g} | "
            f"{one['benign_fired']} of {one['benign']} | {largest} | {bound} | "
            f"{one['attacked_fired']} of {one['attacked']} | {one['attacked_above_benign']} |"
        )
    for name, one in result["policies"].items():
        for attack, found in one["attacks"].items():
            lines += [
                "",
                f"With the {name} on, {attack} is {_counts(found['round 0'])} at round 0 and "
                f"{_counts(found['with memory'])} with memory; honest: {_counts(one['benign'])}.",
            ]
    lines += [
        "",
        "| network | weights | check, CPU s | local epoch (2000 records), CPU s | share |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {c['host']} | {c['weights']:,} | {c['check']:.3f} | {c['epoch']:.2f} | "
        f"{c['share']:.1%} |"
        for c in result["cost"]
    ]
    lines += [
        "",
        "| attack | network | guard said | recovered above 50 dB |",
        "|---|---|---|---|",
    ]
    for r in result["recovery"]:
        said = ", ".join("–" if one["said"] is None else f"{one['said']:.0f}" for one in r["runs"])
        got = ", ".join(f"{one['recovered']} of {one['records']}" for one in r["runs"])
        lines.append(f"| {r['attack']} | {r['host']} | {said} | {got} |")
    lines += [
        "",
        "| a server that studied the guard | verdict | fired | guard said | read above 50 dB | "
        "with noise: above 50 dB | above 20 dB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result["studied"]:
        runs = r["runs"]
        verdicts = _counts(dict(Counter(one["decision"] for one in runs)))
        fired = ", ".join(dict.fromkeys(test for one in runs for test in one["fired"])) or "–"
        counts = [
            ", ".join(f"{one[key]:.0f}" for one in runs)
            for key in ("said", "plain", "noised", "noised_seen")
        ]
        lines.append(f"| {r['attack']} | {verdicts} | {fired} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def _counts(one: dict[str, Any]) -> str:
    names = ("REJECT", "EXPOSED", "INCONCLUSIVE", "ACCEPT")
    parts = [f"{one[name]} {name}" for name in names if one.get(name)]
    return ", ".join(parts) or "–"


def write(result: dict[str, Any], records: Records, out: Path) -> None:
    write_json(out / "result.json", result)
    write_atomic(out / "table.md", markdown(result).encode())
    figure(records, out / "figure.png")


def figure(records: Records, path: Path) -> None:
    """Every score as a multiple of its threshold: honest rounds above, attacks below."""
    drawing = optional("matplotlib.figure", "figures", "the figure of the evaluation")
    benign = _lines(records, "benign")
    attacked = [line for line in _lines(records, "attacked") if line["decision"]]
    names = [
        test
        for test in _names(benign + attacked)
        if test != "structure" and _threshold(test, benign + attacked) > 0
    ]
    page = drawing.Figure(figsize=(9, 0.5 * len(names) + 1.2), layout="constrained")
    axes = page.subplots()
    groups = (
        ("honest", benign, "#2b6cb0", -0.26),
        ("attack, round 0", _early(attacked), "#dd6b20", 0.0),
        ("attack, with memory", _late(attacked), "#9b2c2c", 0.26),
    )
    for label, lines, colour, offset in groups:
        x, y = [], []
        for row, test in enumerate(names):
            scores = [line["tests"][test] for line in lines if test in line["tests"]]
            x += [min(max(s[0] / s[1], FLOOR), 1e9) for s in scores]
            y += [row + offset + 0.08 * _spread(i) for i in range(len(scores))]
        axes.scatter(x, y, s=7, color=colour, alpha=0.45, linewidths=0, label=label)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("score / threshold: right of the line the test fires; the ends hold 0 and ∞")
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", alpha=0.3)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    page.legend(loc="outside upper center", ncols=3, markerscale=3, frameon=False)
    page.savefig(path, dpi=140)


def _threshold(test: str, lines: Iterable[dict[str, Any]]) -> float:
    return next(float(line["tests"][test][1]) for line in lines if test in line["tests"])


def _spread(index: int) -> float:
    """−1 … 1, so that equal scores do not hide each other."""
    return (index * 0.618034 % 1.0) * 2 - 1
