"""The findings of the guard's evaluation as a table and a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from guard_findings import Records, checks, early, late, tests_of
from matplotlib.figure import Figure

FLOOR = 1e-4  # of score / threshold in the figure


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


def figure(records: Records, path: Path) -> None:
    """Every score as a multiple of its threshold: honest rounds above, attacks below."""
    benign = checks(records, "benign")
    attacked = [line for line in checks(records, "attacked") if line["decision"]]
    names = [
        test
        for test in tests_of(benign + attacked)
        if test != "structure" and _threshold(test, benign + attacked) > 0
    ]
    page = Figure(figsize=(9, 0.5 * len(names) + 1.2), layout="constrained")
    axes = page.subplots()
    groups = (
        ("honest", benign, "#2b6cb0", -0.26),
        ("attack, round 0", early(attacked), "#dd6b20", 0.0),
        ("attack, with memory", late(attacked), "#9b2c2c", 0.26),
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
