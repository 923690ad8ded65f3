"""Inline SVG for the page: strips, bars and their axis.

Horizontal positions are percentages and vertical ones pixels, so that a figure fits a phone and a
sheet of paper without distorting a dot. Colours and line styles come from the page's style sheet by
class name. Only numbers enter these strings: every label is text of the page, escaped there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

CEILING = 50.0  # dB: above it two pictures look the same, so the axis ends here
HEIGHT = 34
MOST_DOTS = 150  # of one strip
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread dots evenly whatever their number


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> str:
        """Where a value stands, in per cent; outside the axis it stands at its end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return f"{100 * share:.2f}%"


def psnr_axis(values: Sequence[float]) -> Axis:
    """From 0 (or less) in steps of five or ten decibels, to no more than CEILING."""
    low = min(0.0, 5 * math.floor(min(values, default=0) / 5))
    high = min(CEILING, max(25.0, 5 * math.ceil(max(values, default=0) / 5 + 0.2)))
    step = 5 if high - low <= 30 else 10
    first = math.ceil(low / step)
    ticks = tuple(float(step * i) for i in range(first, math.floor(high / step) + 1))
    return Axis(low, high, ticks)


SHARES = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def strip(
    values: Sequence[float],
    spread: dict[str, Any],
    base: float | None,
    limit: float | None,
    axis: Axis,
) -> Markup:
    """One dot a record, the box of the middle half, the median, the baseline and the limit."""
    middle = HEIGHT / 2
    low, high = (axis.place(quartile) for quartile in spread["quartiles"])
    parts = [
        _grid(axis),
        _line("whisker", axis.place(spread["least"]), axis.place(spread["most"])),
        f'<rect class="box" x="{low}" width="{_width(low, high)}" y="{middle - 8:g}" height="16"/>',
    ]
    for i, value in enumerate(_thinned(values)):
        y = middle + 14 * ((i * GOLDEN) % 1 - 0.5)
        kind = "dot over" if value > axis.high else "dot"
        parts.append(f'<circle class="{kind}" cx="{axis.place(value)}" cy="{y:.1f}" r="2.2"/>')
    median = axis.place(spread["median"])
    parts.append(_upright("median", median, middle - 10, middle + 10))
    parts += _marks(base, limit, axis)
    return _svg(parts)


def bar(
    value: float | None,
    interval: Sequence[float] | None,
    base: float | None,
    limit: float | None,
    axis: Axis,
) -> Markup:
    """A bar from zero, with its interval."""
    parts = [_grid(axis)]
    if value is not None:
        left, right = sorted((axis.place(0), axis.place(value)), key=lambda p: float(p[:-1]))
        parts.append(
            f'<rect class="bar" x="{left}" width="{_width(left, right)}" '
            f'y="{HEIGHT / 2 - 7:g}" height="14" rx="2"/>'
        )
    if interval:
        parts.append(_line("interval", axis.place(interval[0]), axis.place(interval[1])))
    parts += _marks(base, limit, axis)
    return _svg(parts)


def meter(value: float, marks: Sequence[float], axis: Axis = SHARES) -> Markup:
    """A share as a bar, with the shares that guessing reaches."""
    places = [_upright("mark", axis.place(mark), 5, HEIGHT - 5) for mark in marks]
    width = axis.place(value)
    filled = f'<rect class="bar" x="0%" width="{width}" y="{HEIGHT / 2 - 7:g}" height="14" rx="2"/>'
    return _svg([_grid(axis), filled, *places])


def scale(axis: Axis, percent: bool = False) -> Markup:
    """The numbers below a column of figures."""
    labels = []
    for tick in axis.ticks:
        text = f"{100 * tick:.0f}" if percent else f"{tick:g}"
        over = tick == CEILING and not percent
        anchor = "start" if tick == axis.ticks[0] else "end" if tick == axis.high else "middle"
        labels.append(
            f'<text x="{axis.place(tick)}" y="12" text-anchor="{anchor}">'
            f"{'≥ ' if over else ''}{text}</text>"
        )
    return _svg(labels, height=16, name="scale")


def _marks(base: float | None, limit: float | None, axis: Axis) -> list[str]:
    parts = []
    if limit is not None and axis.low <= limit <= axis.high:
        parts.append(_upright("limit", axis.place(limit), 0, HEIGHT))
    if base is not None:  # a diamond needs pixels around a place in per cent
        parts.append(
            f'<svg x="{axis.place(base)}" y="{HEIGHT / 2:g}" overflow="visible">'
            '<path class="base" d="M0-6 5 0 0 6-5 0Z"/></svg>'
        )
    return parts


def _grid(axis: Axis) -> str:
    return "".join(_upright("grid", axis.place(tick), 0, HEIGHT) for tick in axis.ticks)


def _upright(name: str, x: str, top: float, bottom: float) -> str:
    return f'<line class="{name}" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'


def _line(name: str, left: str, right: str) -> str:
    return (
        f'<line class="{name}" x1="{left}" x2="{right}" y1="{HEIGHT / 2:g}" y2="{HEIGHT / 2:g}"/>'
    )


def _width(left: str, right: str) -> str:
    return f"{float(right[:-1]) - float(left[:-1]):.2f}%"


def _thinned(values: Sequence[float]) -> list[float]:
    """At most MOST_DOTS of them: evenly spaced by rank, both extremes included."""
    ordered = sorted(values)
    if len(ordered) <= MOST_DOTS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(i * last / (MOST_DOTS - 1))] for i in range(MOST_DOTS)]


def _svg(parts: Sequence[str], height: int = HEIGHT, name: str = "figure") -> Markup:
    opened = f'<svg class="{name}" width="100%" height="{height}" aria-hidden="true">'
    return Markup(f"{opened}{''.join(parts)}</svg>")
