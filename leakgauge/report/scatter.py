"""The figure of a trade-off: accuracy upwards, leak to the right, one numbered point per setting.

Marks as those of `figures`: horizontal places are shares of the width, vertical ones pixels. The
leak is drawn on a root scale, which leaves room around the limit, where settings crowd. A number
whose point has no room for it stands beside, with a line to its point. Only numbers are in it: what
they stand for is text of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from leakgauge.report.figures import Mark

HEIGHT = 340
WIDTH = 560  # pixels for which numbers are kept apart; wider figures have more room
LEFT, RIGHT = 0.09, 0.97
TOP, BOTTOM = 14, HEIGHT - 28
RADIUS = 9  # of a numbered bubble
TICKS = (0, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)  # multiples of the limit
State: TypeAlias = Literal["meets", "leaks", "open"]


@dataclass(frozen=True)
class Point:
    """A setting: its leak as a multiple of the limit, its accuracy as a share, with their
    intervals."""

    number: int
    leak: float
    leaks: tuple[float, float]
    accuracy: float
    accuracies: tuple[float, float]
    state: State
    front: bool
    chosen: bool


def scatter(points: Sequence[Point]) -> list[Mark]:
    """All marks, those behind first."""
    most = max([2.0, *(point.leaks[1] for point in points)])
    low, high, step = _range([end for point in points for end in point.accuracies])

    def x(leak: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.sqrt(max(0.0, leak) / most)

    def y(accuracy: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (accuracy - low) / (high - low)

    marks = [Mark("rect", "allowed", LEFT, TOP, x(1), BOTTOM)]
    for i in range(round((high - low) / step) + 1):
        level = low + i * step
        marks.append(Mark("line", "grid", LEFT, y(level), RIGHT, y(level)))
        marks.append(_text(f"{100 * level:.0f} %", LEFT - 0.012, y(level) + 4, "scale end"))
    for tick in (one for one in TICKS if one <= most):
        marks.append(Mark("line", "grid", x(tick), BOTTOM, x(tick), BOTTOM + 5))
        marks.append(_text(f"{tick:g}", x(tick), BOTTOM + 19, "scale middle"))
    marks.append(Mark("line", "limit", x(1), TOP - 8, x(1), BOTTOM))
    front = sorted((p for p in points if p.front), key=lambda p: (p.leak, p.accuracy))
    for one, other in pairwise(front):
        ends = x(one.leak), y(one.accuracy), x(other.leak), y(other.accuracy)
        marks.append(Mark("line", "front", *ends))
    for p in points:
        marks.append(
            Mark("line", "cross", x(p.leaks[0]), y(p.accuracy), x(p.leaks[1]), y(p.accuracy))
        )
        marks.append(
            Mark("line", "cross", x(p.leak), y(p.accuracies[1]), x(p.leak), y(p.accuracies[0]))
        )
    at = [(x(point.leak), y(point.accuracy)) for point in points]
    places = apart(
        [(WIDTH * left, top) for left, top in at],
        WIDTH * x(1),
        first=next((i for i, point in enumerate(points) if point.chosen), 0),
    )
    for point, true, (left, top) in zip(points, at, places, strict=True):
        there = left / WIDTH, top
        if math.hypot(left - WIDTH * true[0], top - true[1]) > 1:
            marks.append(Mark("line", "lead", *true, *there))
            marks.append(Mark("dot", "dot over", *true))
        if point.chosen:
            marks.append(Mark("ring", "chosen", *there))
        marks.append(Mark("bubble", f"bubble {point.state}", *there))
        kind = "inside" if point.state == "meets" else "outside"
        marks.append(_text(str(point.number), there[0], top + 4, f"{kind} middle"))
    return marks


def _text(text: str, x: float, y: float, kind: str) -> Mark:
    return Mark("text", kind, x, y, text=text)


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    """The lowest and the highest level of the axis, and the step between levels: at most six."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    for step in (0.01, 0.02, 0.05, 0.1, 0.2):
        low, high = math.floor(least / step), math.ceil(most / step)
        high = max(high, low + 1)
        if high - low <= 6:
            break
    return low * step, high * step, step


def apart(
    points: Sequence[tuple[float, float]], limit: float, first: int = 0
) -> list[tuple[float, float]]:
    """A place for the number of each point, in pixels: on the point if that is free, else as near
    as there is room: on no other number, on no other point, and on the same side of the limit. The
    number of the `first` point stands on it."""
    placed: dict[int, tuple[float, float]] = {}

    def free(place: tuple[float, float], i: int) -> bool:
        x, y = place
        others = [point for k, point in enumerate(points) if k != i]
        return (
            WIDTH * LEFT + RADIUS <= x <= WIDTH - RADIUS
            and RADIUS <= y <= BOTTOM - RADIUS
            and (x <= limit) == (points[i][0] <= limit)
            and all(math.dist(place, one) >= 2 * RADIUS + 3 for one in placed.values())
            and all(math.dist(place, one) >= RADIUS + 5 for one in others)
        )

    for i in sorted(range(len(points)), key=lambda i: i != first):
        x, y = points[i]
        around = [
            (x + far * math.cos(turn * math.pi / 8), y - far * math.sin(turn * math.pi / 8))
            for far in range(24, 400, 12)
            for turn in (2, 14, 6, 10, 4, 12, 0, 8, 1, 15, 7, 9, 3, 13, 5, 11)
        ]
        wanted = [(x, y), *around] if i != first else []
        placed[i] = next((place for place in wanted if free(place, i)), (x, y))
    return [placed[i] for i in range(len(points))]
