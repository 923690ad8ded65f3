"""The charts of a report: which rows are drawn, on which axis, with which words beside them.

The page and the PDF draw the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.audit.advice import defended
from leakgauge.report import contents, figures
from leakgauge.report.contents import Result, Row
from leakgauge.report.figures import Axis, Mark
from leakgauge.report.wording import change, decibels, percent

MOST_LINES = 60  # rows drawn; the tables have all


@dataclass(frozen=True)
class Line:
    """One figure with its words: a name and more about it at the left, numbers at the right."""

    name: str
    about: str
    realism: str | None
    marks: list[Mark]
    number: str
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Figures on one axis. `label` names the axis, `number` the column at the right; `keys` says
    what the kinds of marks mean."""

    lines: list[Line]
    axis: Axis
    label: str
    number: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    left_out: int = 0


def distribution(result: Result) -> Chart:
    """A strip for each row: those with the highest medians, in the order of the table."""
    rows = contents.measured(result)
    highest = sorted(rows, key=lambda row: -contents.psnr(row)["median"])[:MOST_LINES]
    kept = {id(row) for row in highest}
    drawn = [row for row in rows if id(row) in kept]
    ends = [contents.psnr(row)[end] for row in drawn for end in ("least", "most")]
    axis = figures.psnr_axis([*ends, *map(contents.baseline, drawn)])
    limit, values = _limit(result), _values(result)
    lines = [
        Line(
            row["attack"],
            _where(result, row),
            row["realism"],
            figures.strip(
                values.get(_key(row), []), contents.psnr(row), contents.baseline(row), limit, axis
            ),
            decibels(contents.psnr(row)["median"]),
        )
        for row in drawn
    ]
    keys = (
        ("dot", "a record"),
        ("box", "middle half, with the median"),
        ("diamond", "mean picture, which shows nothing of the record"),
        *_limit_key(limit),
    )
    return Chart(lines, axis, "PSNR, dB", "median", keys, len(rows) - len(drawn))


def labels(result: Result) -> Chart:
    """Labels read, beside guessing."""
    rows = contents.labelled(result)
    lines = [
        Line(
            row["attack"],
            _where(result, row),
            row["realism"],
            figures.meter(found["accuracy"], [found["random"], found["class prior"]]),
            percent(found["accuracy"]),
            f"random {percent(found['random'])}, class prior {percent(found['class prior'])}",
        )
        for row in rows[:MOST_LINES]
        if (found := row["labels"])
    ]
    keys = (("bar", "labels read"), ("mark", "guessing at random, and by class frequency"))
    return Chart(lines, figures.SHARES, "labels read, %", keys=keys)


def ladder(result: Result) -> Chart:
    """The median of each rung, from the known-weak twin up."""
    explanation, limit = result["explanation"], _limit(result)
    rungs = explanation["rungs"] if explanation else []
    axis = figures.psnr_axis([rung["median"] for rung in rungs if rung["median"] is not None])
    lines = [
        Line(
            rung["factor"],
            rung["label"],
            None,
            figures.bar(rung["median"], None, None, limit, axis),
            "not run" if rung["median"] is None else decibels(rung["median"]),
            "" if rung["change"] is None else change(rung["change"]),
        )
        for rung in rungs
    ]
    return Chart(lines, axis, "median PSNR, dB", keys=_limit_key(limit))


def defences(result: Result) -> Chart:
    """Each defence at each stage, by the strongest attack that the verdict may use."""
    trades, limit = contents.trade_off(result), _limit(result)
    several = contents.several_rounds(result)
    axis = figures.psnr_axis([contents.psnr(trade.row)["interval"][1] for trade in trades])
    lines = [
        Line(
            defended(trade.defence),
            ", ".join(
                [*([f"round {trade.round}"] if several else []),
                 *([trade.settings] if trade.settings else []), trade.row["attack"]]
            ),
            trade.row["realism"],
            figures.bar(
                contents.psnr(trade.row)["median"],
                contents.psnr(trade.row)["interval"],
                contents.baseline(trade.row),
                limit,
                axis,
            ),
            decibels(contents.psnr(trade.row)["median"]),
            f"pictures: {trade.state}",
        )
        for trade in trades
    ]  # fmt: skip
    keys = (
        ("bar", "median PSNR, with its 95 % interval"),
        ("diamond", "mean picture, which shows nothing of the record"),
        *_limit_key(limit),
    )
    return Chart(lines, axis, "median PSNR, dB", keys=keys)


def _where(result: Result, row: Row) -> str:
    several = contents.several_rounds(result)
    return defended(row["defence"]) + (f" · round {row['round']}" if several else "")


def _key(entry: Row) -> tuple[int, str, str]:
    return entry["round"], entry["defence"], entry["attack"]


def _values(result: Result) -> dict[tuple[int, str, str], list[float]]:
    """The PSNR of every record, by the row it belongs to."""
    values: dict[tuple[int, str, str], list[float]] = {}
    for trial in result["trials"]:
        if trial["kind"] == "trial" and trial["status"] == "done":
            values.setdefault(_key(trial), []).extend(trial["scores"]["psnr"])
    return values


def _limit(result: Result) -> float | None:
    return float(result["verdict"]["limit"]["psnr"]) if result["verdict"] else None


def _limit_key(limit: float | None) -> tuple[tuple[str, str], ...]:
    return () if limit is None else (("limit", f"limit of {decibels(limit)}"),)
