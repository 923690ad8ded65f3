"""The charts of a report: which rows are drawn, on which axis, with which words beside them.

The page and the PDF draw the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.audit.advice import defended
from leakgauge.audit.results import Result, Row
from leakgauge.report import contents, figures
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
    highest = sorted(rows, key=lambda pair: -contents.psnr(pair[1]).median)[:MOST_LINES]
    kept = {id(row) for row, _ in highest}
    drawn = [(row, found) for row, found in rows if id(row) in kept]
    spreads = [contents.psnr(found) for _, found in drawn]
    bases = [contents.baseline(found) for _, found in drawn]
    ends = [end for spread in spreads for end in (spread.least, spread.most)]
    axis = figures.psnr_axis([*ends, *bases])
    limit, values = _limit(result), _values(result)
    lines = [
        Line(
            row.attack,
            _where(result, row),
            found.realism,
            figures.strip(values[contents.place(row)], spread, base, limit, axis),
            decibels(spread.median),
        )
        for (row, found), spread, base in zip(drawn, spreads, bases, strict=True)
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
    lines = [
        Line(
            row.attack,
            _where(result, row),
            found.realism,
            figures.meter(read.accuracy, [read.random, read.class_prior]),
            percent(read.accuracy),
            f"random {percent(read.random)}, class prior {percent(read.class_prior)}",
        )
        for row, found in contents.measured(result)
        if (read := found.labels)
    ]
    keys = (("bar", "labels read"), ("mark", "guessing at random, and by class frequency"))
    return Chart(lines[:MOST_LINES], figures.SHARES, "labels read, %", keys=keys)


def ladder(result: Result) -> Chart:
    """The median of each rung, from the known-weak twin up."""
    limit = _limit(result)
    rungs = result.explanation.rungs if result.explanation else ()
    axis = figures.psnr_axis([rung.median for rung in rungs if rung.median is not None])
    lines = [
        Line(
            rung.factor,
            rung.label,
            None,
            figures.bar(rung.median, None, None, limit, axis),
            "not run" if rung.median is None else decibels(rung.median),
            "" if rung.change is None else change(rung.change),
        )
        for rung in rungs
    ]
    return Chart(lines, axis, "median PSNR, dB", keys=_limit_key(limit))


def defences(result: Result) -> Chart:
    """Each defence at each stage, by the strongest attack that the verdict may use."""
    limit, several = _limit(result), contents.several_rounds(result)
    trades = [(trade, contents.psnr(trade.numbers)) for trade in contents.trade_off(result)]
    axis = figures.psnr_axis([spread.interval[1] for _, spread in trades])
    lines = []
    for trade, spread in trades:
        about = [f"round {trade.round}" if several else "", trade.settings, trade.attack]
        base = contents.baseline(trade.numbers)
        lines.append(
            Line(
                defended(trade.defence),
                ", ".join(filter(None, about)),
                trade.numbers.realism,
                figures.bar(spread.median, spread.interval, base, limit, axis),
                decibels(spread.median),
                f"pictures: {trade.state}",
            )
        )
    keys = (
        ("bar", "median PSNR, with its 95 % interval"),
        ("diamond", "mean picture, which shows nothing of the record"),
        *_limit_key(limit),
    )
    return Chart(lines, axis, "median PSNR, dB", keys=keys)


def exposure(result: Result) -> Chart:
    """The records behind an update, against the most that a layer can show."""
    known = [one for one in result.exposure if one.layer is not None]
    most = max((max(one.views, one.limit) for one in known), default=1)
    axis = figures.count_axis(most)
    lines = [
        Line(
            "records per update",
            "",
            None,
            figures.bar(one.views, None, None, one.limit, axis),
            f"{one.views:,}",
            "exposed" if one.exposed else "",
        )
        for one in known
    ]
    limits = {one.layer: one.limit for one in known}
    keys = [
        ("limit", f"the most that {layer} can show: {limit:,}") for layer, limit in limits.items()
    ]
    return Chart(lines, axis, "records", keys=tuple(keys))


def _where(result: Result, row: Row) -> str:
    several = contents.several_rounds(result)
    return defended(row.defence) + (f" · round {row.round}" if several else "")


def _values(result: Result) -> dict[contents.Place, list[float]]:
    """The PSNR of every record, by the row it belongs to."""
    values: dict[contents.Place, list[float]] = {}
    for trial, _, score in contents.scored(result):
        values.setdefault(contents.place(trial), []).extend(score.scores["psnr"])
    return values


def _limit(result: Result) -> float | None:
    return result.verdict.limit.psnr if result.verdict else None


def _limit_key(limit: float | None) -> tuple[tuple[str, str], ...]:
    return () if limit is None else (("limit", f"limit of {decibels(limit)}"),)
