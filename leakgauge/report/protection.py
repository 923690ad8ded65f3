"""What protection costs: the words, numbers and figure of a trade-off. Pure functions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from leakgauge.audit.advice import what_leaks
from leakgauge.audit.document import settings
from leakgauge.audit.results import Budget, Estimate, Result, Tradeoff, Weighed
from leakgauge.audit.tradeoff import as_multiple, points, used
from leakgauge.report import contents
from leakgauge.report.figures import Mark
from leakgauge.report.scatter import Point, State, scatter
from leakgauge.report.wording import NOTHING, SPACE, count, decibels

TITLE = "What protection costs"
UPWARDS = "Accuracy on held-out records: higher is better"
RIGHTWARDS = "Leak, as a multiple of what the plan allows (1 is the limit): further left is better"
MOST_COLUMNS = 8  # rounds in the table of accuracies on the way
STATES: dict[str, State] = {"below the limit": "meets", "leaks": "leaks"}


@dataclass(frozen=True)
class Priced:
    """A setting as a line of the table, every number as text."""

    number: int
    setting: str
    options: str
    accuracy: str
    accuracy_interval: str
    cost: str
    cost_interval: str
    leak: str
    leak_interval: str
    worst: str
    median: str
    spent: str
    outcome: str
    state: State
    front: bool
    mark: str


def lead(given: Tradeoff) -> str:
    """What was done, in a sentence or two."""
    return (
        f"The federation was trained for {count(given.rounds, 'round')} under each setting, with "
        f"{count(len(given.seeds), 'seed')}. Accuracy is measured on "
        f"{count(given.records, 'record')} that no client and no attacker holds, the leak on "
        "rounds of the same federations."
    )


def priced(result: Result, given: Tradeoff) -> list[Priced]:
    """One line for each setting, in the order of the plan."""
    options = settings(result.plan.defence)
    return [
        _priced(result, given, one, number, options.get(one.defence, ""))
        for number, one in enumerate(given.settings, start=1)
    ]


def _priced(result: Result, given: Tradeoff, one: Weighed, number: int, options: str) -> Priced:
    leak, leak_interval, worst = NOTHING, "", "nothing was measured"
    if one.leak and one.worst:
        found = one.leak.leak
        low, high = (as_multiple(end, found) for end in found.interval)
        leak, leak_interval = f"{_multiple(used(found))}{SPACE}×", _range(low, high)
        worst = what_leaks(one.worst, one.leak, result.metrics)
    mark = "recommended" if one.defence == given.recommended else ""
    mark = "tie" if one.defence in given.ties else mark
    return Priced(
        number=number,
        setting=contents.named(one.defence),
        options=options,
        accuracy=share(one.accuracy.mean) if one.accuracy else NOTHING,
        accuracy_interval=_span(one.accuracy),
        cost=_cost(given, one),
        cost_interval=_span(one.cost) if one.defence != "none" else "",
        leak=leak,
        leak_interval=leak_interval,
        worst=worst,
        median=decibels(one.strongest.median if one.strongest else None),
        spent=_budget(one.spent, given.rounds),
        outcome=contents.OUTCOMES[one.outcome],
        state=STATES.get(one.outcome, "open"),
        front=one.front,
        mark=mark,
    )


def _cost(given: Tradeoff, one: Weighed) -> str:
    if one.defence == "none":
        return "reference"
    return points(one.cost.mean) if one.cost else NOTHING


def share(value: float) -> str:
    return f"{100 * value:.1f}{SPACE}%"


def _span(found: Estimate | None) -> str:
    if found is None:
        return ""
    low, high = (points(end, "") for end in found.interval)
    return f"{low} to {high}" if found.interval[0] < 0 else f"{low}–{high}"


def _multiple(value: float) -> str:
    """Of the limit."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def _range(low: float, high: float) -> str:
    return f"{_multiple(low)}–{_multiple(high)}"


def _budget(spent: Budget | None, rounds: int) -> str:
    if spent is None or spent.epsilon is None:
        return ""
    size = f"{spent.epsilon:,.0f}" if spent.epsilon >= 100 else f"{spent.epsilon:.3g}"
    delta = f", δ = {spent.delta:g}" if spent.delta is not None else ""
    return f"over {rounds} rounds ε = {size}{delta}"


def figure(given: Tradeoff) -> list[Mark]:
    """The settings whose accuracy and leak are known."""
    drawn = [
        Point(
            number=number,
            leak=used(one.leak.leak),
            leaks=_multiples(one),
            accuracy=one.accuracy.mean,
            accuracies=one.accuracy.interval,
            state=STATES.get(one.outcome, "open"),
            front=one.front,
            chosen=one.defence == given.recommended,
        )
        for number, one in enumerate(given.settings, start=1)
        if one.accuracy and one.leak
    ]
    return scatter(drawn) if drawn else []


def _multiples(one: Weighed) -> tuple[float, float]:
    assert one.leak is not None
    low, high = one.leak.leak.interval
    return as_multiple(low, one.leak.leak), as_multiple(high, one.leak.leak)


def keys(given: Tradeoff) -> list[tuple[str, str]]:
    """What the marks of the figure mean; kinds that it does not have are left out."""
    states = {STATES.get(one.outcome, "open") for one in given.settings}
    words = [
        ("meets", "meets the plan's limit", "meets" in states),
        ("leaks", "leaks more than the plan allows", "leaks" in states),
        ("open", "not shown to meet the limit", "open" in states),
        ("chosen", "recommended", given.recommended is not None),
        ("cross", f"95{SPACE}% intervals", True),
        ("front", "efficient: no other setting has less leak and as much accuracy", True),
        ("limit", "the plan's limit; what the plan allows is tinted", True),
    ]
    return [(kind, text) for kind, text, shown in words if shown]


def on_the_way(result: Result, given: Tradeoff) -> tuple[list[str], list[list[str]]]:
    """The mean accuracy after some of the rounds: a heading and a line per setting. Nothing where
    it was measured at the end alone."""
    every = sorted({number for one in result.trained for number in one.rounds})
    step = -(-len(every) // MOST_COLUMNS) or 1
    shown = every[::-1][::step][::-1]
    if len(shown) < 2:
        return [], []
    lines = []
    for one in given.settings:
        runs = [run for run in result.trained if run.defence == one.defence and run.rounds]
        if runs:
            found = [dict(zip(run.rounds, run.accuracy, strict=True)) for run in runs]
            means = [statistics.fmean(by_round[number] for by_round in found) for number in shown]
            lines.append([contents.named(one.defence), *map(share, means)])
    return [f"round {number}" for number in shown], lines


def gist(given: Tradeoff) -> str:
    """The section in a line."""
    if given.recommended is not None:
        return f"recommended: {contents.named(given.recommended)}"
    return {
        "none": "no setting meets the limit",
        "undecided": "no setting is shown to meet the limit",
    }[given.choice]


def limits(given: Tradeoff) -> list[str]:
    """What a trade-off does not say."""
    return [
        f"Accuracy is that after {count(given.rounds, 'round')}. A federation that trains longer "
        "may lose more or less to the same defence.",
        "Intervals of accuracy and cost are Student's t over seeds. The held-out records are the "
        "same for all settings and seeds: how far these stand for all records of their kind is "
        "not in the interval.",
        "A recommendation is a choice among the settings that were tested, by the attacks that "
        "were run. Check it by an audit of that setting alone, on seeds that the trade-off did "
        "not use.",
    ]
