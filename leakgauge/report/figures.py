"""Figures as marks with a place and a kind, whatever they are drawn on: strips, bars, their axis.

Horizontal places are shares of the width, 0 to 1, and vertical ones are pixels of HEIGHT, so that a
figure fits a phone and a sheet of paper without distorting a dot. `svg` draws them for the page,
where colours and line styles come from its style sheet by the name of the kind; `report.pdf` draws
the same marks on paper. Only numbers enter the SVG: every label is text of the page, escaped there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from markupsafe import Markup, escape

from leakgauge.audit.advice import CAP
from leakgauge.audit.results import Spread

HEIGHT = 34
TALL = 150  # of a figure whose values stand side by side
MARGIN = 0.07  # of its width, for the numbers of its axis
MOST_DOTS = 150  # of one strip
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread dots evenly whatever their number
Shape: TypeAlias = Literal["line", "rect", "dot", "diamond", "bubble", "ring", "text"]


@dataclass(frozen=True)
class Mark:
    """A shape from (x, y) to (x2, y2); any other than a line or a rectangle stands at (x, y). The
    kind of a text ends with its anchor: start, middle or end."""

    shape: Shape
    kind: str
    x: float
    y: float
    x2: float = 0.0
    y2: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Tick:
    """A number below a column of figures."""

    x: float
    text: str
    anchor: Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    cap: float | None = None  # from here on more means nothing

    def place(self, value: float) -> float:
        """Where a value stands, as a share; outside the axis it stands at its end."""
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)


def psnr_axis(values: Sequence[float]) -> Axis:
    """From 0 (or less) in steps of five or ten decibels, to no more than CAP."""
    low = min(0.0, 5 * math.floor(min(values, default=0) / 5))
    high = min(CAP, max(25.0, 5 * math.ceil(max(values, default=0) / 5 + 0.2)))
    step = 5 if high - low <= 30 else 10
    first = math.ceil(low / step)
    ticks = tuple(float(step * i) for i in range(first, math.floor(high / step) + 1))
    return Axis(low, high, ticks, CAP)


def count_axis(most: int) -> Axis:
    """From 0 to at least `most`, in at most five steps of 1, 2 or 5 times a power of ten."""
    scale = 10 ** max(0, len(str(most)) - 2)
    step = next(s * scale for s in (1, 2, 5, 10, 20) if 5 * s * scale >= most)
    high = step * max(1, math.ceil(most / step))
    return Axis(0.0, float(high), tuple(float(tick) for tick in range(0, high + 1, step)))


SHARES = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def strip(
    values: Sequence[float],
    spread: Spread,
    base: float | None,
    limit: float | None,
    axis: Axis,
) -> list[Mark]:
    """One dot per record, the box of the middle half, the median, the baseline and the limit."""
    middle = HEIGHT / 2
    low, high = (axis.place(quartile) for quartile in spread.quartiles)
    marks = [
        *_grid(axis),
        _flat("whisker", axis.place(spread.least), axis.place(spread.most)),
        Mark("rect", "box", low, middle - 8, high, middle + 8),
    ]
    for i, value in enumerate(_thinned(values)):
        y = middle + 14 * ((i * GOLDEN) % 1 - 0.5)
        marks.append(Mark("dot", "dot over" if value > axis.high else "dot", axis.place(value), y))
    marks.append(_upright("median", axis.place(spread.median), middle - 10, middle + 10))
    return marks + _limits(base, limit, axis)


def bar(
    value: float | None,
    interval: Sequence[float] | None,
    base: float | None,
    limit: float | None,
    axis: Axis,
) -> list[Mark]:
    """A bar from zero, with its interval."""
    marks = _grid(axis)
    if value is not None:
        left, right = sorted((axis.place(0), axis.place(value)))
        marks.append(Mark("rect", "bar", left, HEIGHT / 2 - 7, right, HEIGHT / 2 + 7))
    if interval:
        marks.append(_flat("interval", axis.place(interval[0]), axis.place(interval[1])))
    return marks + _limits(base, limit, axis)


def meter(value: float, marks: Sequence[float], axis: Axis = SHARES) -> list[Mark]:
    """A share as a bar, with the shares that guessing reaches."""
    filled = Mark("rect", "bar", 0.0, HEIGHT / 2 - 7, axis.place(value), HEIGHT / 2 + 7)
    places = [_upright("mark", axis.place(mark), 5, HEIGHT - 5) for mark in marks]
    return [*_grid(axis), filled, *places]


@dataclass(frozen=True)
class Point:
    """A median with its interval, and what a mean image has."""

    value: float
    interval: tuple[float, float]
    base: float
    kept: bool = False


def columns(
    points: Sequence[Point | None], limit: float | None, axis: Axis, *, joined: bool
) -> list[Mark]:
    """Values side by side, the axis upright; `joined` where they are numbers in order. A place
    stays empty for what was not measured."""

    def x(i: float) -> float:
        return MARGIN + (1 - MARGIN) * i / len(points)

    def y(value: float) -> float:
        return 6 + (TALL - 12) * (1 - axis.place(value))

    marks = [Mark("line", "grid", MARGIN, y(tick), 1.0, y(tick)) for tick in axis.ticks]
    if limit is not None and axis.low <= limit <= axis.high:
        marks.append(Mark("line", "limit", MARGIN, y(limit), 1.0, y(limit)))
    known = [(i, point) for i, point in enumerate(points) if point]
    for i, point in known:
        marks.append(Mark("line", "baseline", x(i), y(point.base), x(i + 1), y(point.base)))
    for (i, one), (j, other) in pairwise(known):
        if joined:
            ends = x(i + 0.5), y(one.value), x(j + 0.5), y(other.value)
            marks.append(Mark("line", "curve", *ends))
    for i, point in known:
        low, high = point.interval
        marks.append(Mark("line", "interval", x(i + 0.5), y(low), x(i + 0.5), y(high)))
        kind = "point kept" if point.kept else "point"
        marks.append(Mark("dot", kind, x(i + 0.5), y(point.value)))
    return marks


def ticks(axis: Axis) -> list[Tick]:
    """The numbers below a column of figures; shares are given in per cent."""
    found = []
    for tick in axis.ticks:
        text = f"{100 * tick:.0f}" if axis is SHARES else f"{tick:,g}"
        over = "≥ " if tick == axis.cap else ""
        ends: dict[float, Literal["start", "end"]] = {axis.high: "end", axis.ticks[0]: "start"}
        found.append(Tick(axis.place(tick), over + text, ends.get(tick, "middle")))
    return found


def _limits(base: float | None, limit: float | None, axis: Axis) -> list[Mark]:
    marks = []
    if limit is not None and axis.low <= limit <= axis.high:
        marks.append(_upright("limit", axis.place(limit), 0, HEIGHT))
    if base is not None:
        marks.append(Mark("diamond", "base", axis.place(base), HEIGHT / 2))
    return marks


def _grid(axis: Axis) -> list[Mark]:
    return [_upright("grid", axis.place(tick), 0, HEIGHT) for tick in axis.ticks]


def _upright(kind: str, x: float, top: float, bottom: float) -> Mark:
    return Mark("line", kind, x, top, x, bottom)


def _flat(kind: str, left: float, right: float) -> Mark:
    return Mark("line", kind, left, HEIGHT / 2, right, HEIGHT / 2)


def _thinned(values: Sequence[float]) -> list[float]:
    """At most MOST_DOTS of them: evenly spaced by rank, both extremes included."""
    ordered = sorted(values)
    if len(ordered) <= MOST_DOTS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(i * last / (MOST_DOTS - 1))] for i in range(MOST_DOTS)]


# For the page


def svg(marks: Sequence[Mark], height: int = HEIGHT) -> Markup:
    return _figure("figure", height, [_drawn(mark) for mark in marks])


def upright(marks: Sequence[Mark], axis: Axis) -> Markup:
    """A figure of `columns`, with the numbers of its axis at the left."""
    places = [6 + (TALL - 12) * (1 - tick.x) + 4 for tick in ticks(axis)]
    numbers = [
        f'<text x="0" y="{place:.1f}">{tick.text}</text>'
        for place, tick in zip(places, ticks(axis), strict=True)
    ]
    return _figure("figure", TALL, [*numbers, *(_drawn(mark) for mark in marks)])


def scale(axis: Axis) -> Markup:
    return _figure(
        "scale",
        16,
        [f'<text x="{_percent(tick.x)}" y="12" text-anchor="{tick.anchor}">{tick.text}</text>'
         for tick in ticks(axis)],
    )  # fmt: skip


def _drawn(mark: Mark) -> str:
    x, x2, name = _percent(mark.x), _percent(mark.x2), f'class="{mark.kind}"'
    match mark.shape:
        case "line":
            return f'<line {name} x1="{x}" x2="{x2}" y1="{mark.y:.5g}" y2="{mark.y2:.5g}"/>'
        case "rect":
            width, height = _percent(mark.x2 - mark.x), f"{mark.y2 - mark.y:g}"
            size = f'width="{width}" y="{mark.y:g}" height="{height}" rx="2"'
            return f'<rect {name} x="{x}" {size}/>'
        case "dot":
            return f'<circle {name} cx="{x}" cy="{mark.y:.1f}" r="2.2"/>'
        case "bubble" | "ring":
            radius = 9 if mark.shape == "bubble" else 14
            return f'<circle {name} cx="{x}" cy="{mark.y:.1f}" r="{radius}"/>'
        case "text":
            anchor = f'text-anchor="{mark.kind.split()[-1]}"'
            return f'<text {name} x="{x}" y="{mark.y:.1f}" {anchor}>{escape(mark.text)}</text>'
    return (  # a diamond needs pixels around a place in per cent
        f'<svg x="{x}" y="{mark.y:g}" overflow="visible"><path {name} d="M0-6 5 0 0 6-5 0Z"/></svg>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _figure(name: str, height: int, parts: Sequence[str]) -> Markup:
    opened = f'<svg class="{name}" width="100%" height="{height}" aria-hidden="true">'
    return Markup(f"{opened}{''.join(parts)}</svg>")
