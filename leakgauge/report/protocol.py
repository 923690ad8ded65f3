"""The report of a protocol: its tables and figures, and what they say in plain English.

`protocol.html` and `protocol.md` take their words from here. All functions but `write` are pure.
There are no pictures of records in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leakgauge.audit import protocol as protocols
from leakgauge.audit.advice import CAP, capped
from leakgauge.audit.factors import FACTORS
from leakgauge.audit.protocol import Pass, Protocol, Step, Value
from leakgauge.audit.results import Measured, Spread
from leakgauge.files import write_atomic
from leakgauge.report import annex, contents, figures, html, markdown, wording
from leakgauge.report.figures import Axis, Mark, Point
from leakgauge.report.wording import NOTHING, SPACE, count, percent

CLIENTS = FACTORS[-1].name
NUMBERS = {factor.name for factor in FACTORS if factor.key in ("rounds", "batch_size", "steps")}
FEDLEAK = (
    "Fan et al., Boosting gradient leakage attacks, USENIX Security 2025 (FedLeak), §5 and Table 2"
)


def write(folder: Path) -> list[Path]:
    """Write the reports of the protocol in this folder beside its protocol.json; their paths."""
    found = protocols.load(folder / "protocol.json")
    digest = hashlib.sha256((folder / "protocol.json").read_bytes()).hexdigest()
    texts = {"protocol.html": page(found, digest), "protocol.md": text(found, digest)}
    for name, content in texts.items():
        write_atomic(folder / name, content.encode())
    return [folder / name for name in texts]


# In words


def mode(found: Protocol, one: Pass) -> str:
    return f"batch norm in {one.batch_norm} mode" if found.normed else "no batch norm"


def _measured(value: Value | None) -> Measured | None:
    return value.row.measured if value and value.row else None


def _seed(one: Pass) -> Value:
    return next(value for value in one.steps[0].values if value.stands)


def _last(one: Pass) -> Value:
    """What the hardest values together gave, as far as it was run."""
    kept = [value for step in one.steps for value in step.values if value.kept]
    return kept[-1] if kept else _seed(one)


def _reached(value: Value) -> str:
    numbers = _measured(value)
    if not numbers:
        return "nothing that could be measured"
    psnr, base = contents.psnr(numbers), contents.baseline(numbers)
    told = f"a median of {capped(psnr.median)}"
    if psnr.median <= CAP:
        told += f" ({_interval(psnr)})"
    if contents.above_baseline(numbers):
        told += f", risk {numbers.risk}"
    else:
        told += f", no more than a mean picture ({capped(base)})"
    found = percent(numbers.scores["identified"].mean)
    return f"{told}, and {found} of the records were recognised"


def _interval(spread: Spread) -> str:
    low, high = spread.interval
    if low > CAP:
        return f"over {CAP:g}"
    return f"{low:.1f} to over {CAP:g}" if high > CAP else wording.span(spread.interval)


def headlines(found: Protocol) -> list[str]:
    """For each mode: from where to where the leak fell."""
    lines = []
    for one in found.passes:
        name, varied = mode(found, one), count(len(one.steps), "factor")
        after = f"with the hardest value of {varied}" if one.finished else "where it was stopped"
        lines.append(
            f"{name[:1].upper()}{name[1:]}: in the seed configuration the strongest attack reached "
            f"{_reached(_seed(one))}; {after}, {_reached(_last(one))}."
        )
    return lines


def rests_on(found: Protocol) -> str:
    """How much evidence there is, and the attacks behind it."""
    seeds = count(len(found.plan.audit.seeds), "seed")
    trials = [trial for part in found.parts for trial in part.trials if trial.kind == "trial"]
    attacks = list(dict.fromkeys(trial.attack for trial in trials if trial.score))
    numbers = [
        numbers.records
        for one in found.passes
        for step in one.steps
        for value in step.values
        if (numbers := _measured(value))
    ]
    fewest, most = min(numbers, default=0), max(numbers, default=0)
    records = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return (
        f"Each number is over {records} records, images × {seeds}; intervals are 95{SPACE}% of the "
        f"median. It rests on {count(len(found.parts), 'audit')} and on the attacks that worked: "
        f"{', '.join(attacks) or 'none'}. Others may do better."
    )


def control(found: Protocol) -> str:
    """What the one positive control showed."""
    if not found.control:
        return (
            "No attack was tried on a known-weak twin: low numbers here are no evidence of safety."
        )
    passed = [one for one in found.control if one.passed and one.psnr is not None]
    if not passed:
        return (
            "No attack recovered a record of the known-weak twin of the seed configuration: low "
            "numbers here are no evidence of safety."
        )
    told = ", ".join(f"{one.attack} ({capped(one.psnr or 0.0)})" for one in passed)
    return f"Positive control: on the known-weak twin of the seed configuration {told} worked."


def not_varied(found: Protocol) -> str:
    plan = found.plan
    names = [name[:1].lower() + name[1:] for name in found.skipped]
    left = [name for name in names if name != CLIENTS.lower() or plan.threat.actor == "aggregate"]
    also = ["the data set", "the learning rate", "the optimiser", "the attacker's place"]
    if found.normed and len(found.modes) == 1:
        also.append(f"batch norm, which was in {found.modes[0]} mode alone")
    return f"Not varied, and so nothing is said about: {', '.join([*left, *also])}."


def choices(found: Protocol, one: Pass) -> list[str]:
    """For each factor, what was kept and how sure that is."""
    lines = []
    for step in one.steps:
        kept = next((value for value in step.values if value.kept), None)
        numbers = _measured(kept)
        if kept is None or numbers is None:
            lines.append(f"{step.factor}: not decided.")
            continue
        own = contents.psnr(numbers)
        others = [
            contents.psnr(other)
            for value in step.values
            if value is not kept and (other := _measured(value))
        ]
        if all(own.interval[1] < other.interval[0] for other in others) and others:
            sure = "its interval is below all others"
        elif own.median > CAP:
            sure = f"above {CAP:g} dB there is no difference: the value stays"
        else:
            sure = "the intervals overlap, so another value may be as hard"
        lines.append(f"{step.factor}: {kept.words} is kept; {sure}.")
    return lines


# Clients until safe


def clients(found: Protocol) -> list[tuple[str, list[str]]]:
    """For each mode, what follows from the number of clients behind a sum."""
    told = []
    for one in found.passes:
        step = next((step for step in one.steps if step.factor == CLIENTS), None)
        if step is not None and all(value.folder is not None for value in step.values):
            told.append((mode(found, one), _until_safe(found, step)))
    return told


def _until_safe(found: Protocol, step: Step) -> list[str]:
    ordered = sorted(step.values, key=_number)
    kinds = dict.fromkeys(kind for value in ordered for kind in value.leaks)
    labels = {metric.name: metric.label for metric in found.metrics}
    lines = []
    for kind in kinds:
        name = contents.KINDS.get(kind) or f"{contents.KINDS['pictures']} by {labels[kind]}"
        lines.append(f"{name}: {_safe_from(ordered, kind)}")
    shown = [_number(value) for value in ordered if value.exposed]
    tried = ", ".join(str(_number(value)) for value in ordered)
    lines.append(
        f"Told apart exactly, by their number alone: the records of up to {max(shown)} clients "
        f"(of {tried} that were tried)."
        if shown
        else f"Told apart exactly, by their number alone: at no number of clients (of {tried})."
    )
    lines.append(
        "Below the limit is a statement about the attacks that were run; no number of clients is "
        "promised to be safe."
    )
    return lines


def _safe_from(ordered: Sequence[Value], kind: str) -> str:
    """From which number of clients on a kind of leak was below its limit."""
    safe: Value | None = None
    for value in reversed(ordered):
        if kind not in value.leaks or value.leaks[kind].leak.state != "below":
            break
        safe = value
    if safe is not None:
        leak = safe.leaks[kind].leak
        return (
            f"below the limit of {percent(leak.limit)} from {count(_number(safe), 'client')} on "
            f"(there at most {percent(leak.interval[1])} by the 95{SPACE}% interval, on "
            f"{count(leak.records, 'record')}){_still(safe)}."
        )
    last = ordered[-1]
    if kind not in last.leaks:
        return f"not measured at {count(_number(last), 'client')}."
    leak = last.leaks[kind].leak
    told = "no number of clients that was tried was enough"
    if leak.state != "leaks":
        told = "not shown to be below the limit at the largest number that was tried"
    chance = f", by chance {percent(leak.chance)}" if leak.chance else ""
    return (
        f"{told}; at {count(_number(last), 'client')} it is {percent(leak.share)} of "
        f"{count(leak.records, 'record')}{chance} ({contents.STATES[leak.state]})."
    )


def _still(value: Value) -> str:
    told = "; its records can still be told apart exactly, so another attack may do better"
    return told if value.exposed else ""


def _number(value: Value) -> int:
    assert isinstance(value.value, int)  # of the factor that counts clients
    return value.value


# Table and figures


@dataclass(frozen=True)
class Line:
    """One value of one factor as text; `state` says why there are no numbers."""

    factor: str
    value: str
    kept: bool
    folder: str
    records: str = NOTHING
    median: str = NOTHING
    interval: str = NOTHING
    base: str = NOTHING
    ssim: str = NOTHING
    found: str = NOTHING
    labels: str = NOTHING
    risk: str | None = None
    attack: str = NOTHING
    realism: str | None = None
    state: str | None = None


def table(one: Pass) -> list[Line]:
    """A line per value, in the order of the protocol."""
    return [_line(step.factor, value) for step in one.steps for value in step.values]


def _line(factor: str, value: Value) -> Line:
    numbers, state = _measured(value), None
    if value.failed:
        state = f"{count(value.failed, 'trial')} crashed ({value.reason}): it is not kept"
    elif numbers is None:
        state = wording.brief(value.reason or "no attack could be scored")
    head = Line(factor, value.words, value.kept, value.folder or NOTHING, state=state)
    if numbers is None or value.row is None:
        return head
    psnr, read = contents.psnr(numbers), numbers.labels
    ssim = numbers.scores.get("ssim")
    return Line(
        factor=factor,
        value=value.words,
        kept=value.kept,
        folder=head.folder,
        records=f"{numbers.records:,}",
        median=capped(psnr.median),
        interval=_interval(psnr),
        base=f"{contents.baseline(numbers):.1f}",
        ssim=f"{ssim.median:.2f}" if ssim else NOTHING,
        found=percent(numbers.scores["identified"].mean),
        labels=percent(read.accuracy) if read else NOTHING,
        risk=numbers.risk if contents.above_baseline(numbers) else None,
        attack=value.row.attack + contents.unknown(value.row),
        realism=numbers.realism,
        state=state,
    )


@dataclass(frozen=True)
class Plot:
    """One factor in one mode: values on the x axis."""

    factor: str
    mode: str
    names: tuple[str, ...]
    marks: list[Mark]
    axis: Axis


def plots(found: Protocol) -> list[Plot]:
    """By factor, a figure for each mode of batch norm."""
    every = [
        numbers
        for one in found.passes
        for step in one.steps
        for value in step.values
        if (numbers := _measured(value))
    ]
    ends = [end for numbers in every for end in contents.psnr(numbers).interval]
    axis = figures.psnr_axis([*ends, *(contents.baseline(numbers) for numbers in every)])
    names = dict.fromkeys(step.factor for one in found.passes for step in one.steps)
    return [_plot(found, one, name, axis) for name in names for one in found.passes]


def _plot(found: Protocol, one: Pass, name: str, axis: Axis) -> Plot:
    values = [value for step in one.steps if step.factor == name for value in step.values]
    if name in NUMBERS or name == CLIENTS:
        values.sort(key=lambda value: value.value if isinstance(value.value, int) else 0)
    points = [_point(value) for value in values]
    limit, joined = found.plan.audit.limit.psnr, name in NUMBERS or name == CLIENTS
    marks = figures.columns(points, limit, axis, joined=joined)
    return Plot(name, mode(found, one), tuple(value.words for value in values), marks, axis)


def _point(value: Value) -> Point | None:
    numbers = _measured(value)
    if numbers is None:
        return None
    psnr = contents.psnr(numbers)
    return Point(psnr.median, psnr.interval, contents.baseline(numbers), value.kept)


# Forms


def _facts(found: Protocol, digest: str) -> list[tuple[str, str]]:
    times = found.times
    rows = [
        ("protocol.json, sha256", digest),
        ("Plan, sha256", found.fingerprint),
        ("LeakGauge", found.leakgauge),
        *found.versions.items(),
        ("Finished", times.finished),
        ("CPU time of all trials", wording.duration(times.cpu_seconds)),
        ("Wall time of the last run", wording.duration(times.wall_seconds)),
    ]
    if times.forecast:
        low, high = map(wording.duration, times.forecast)
        rows.append(("Forecast", f"{low} to {high} of CPU time"))
    return rows


def page(found: Protocol, digest: str) -> str:
    """The text of protocol.html."""
    style = html.inline("page.css")
    return html.template("protocol.html").render(
        policy=html.policy(style),
        style=style,
        pips=html.RISK_PIPS,
        figures=figures,
        found=found,
        headlines=headlines(found),
        rests=rests_on(found),
        control=control(found),
        not_varied=not_varied(found),
        clients=clients(found),
        passes=[(mode(found, one), table(one), choices(found, one)) for one in found.passes],
        plots=plots(found),
        risks=contents.RISKS,
        limit=wording.decibels(found.plan.audit.limit.psnr),
        plan=annex.plan_text(found.plan),
        facts_=_facts(found, digest),
        source=FEDLEAK,
        stopped=found.unfinished,
    )


def text(found: Protocol, digest: str) -> str:
    """The text of protocol.md."""
    escape = markdown.escape
    lines = [f"# {escape(found.name)}: evaluation protocol", ""]
    for line in headlines(found):
        lines += [f"**{escape(line)}**", ""]
    for line in (rests_on(found), control(found), not_varied(found)):
        lines += [escape(line), ""]
    for name, told in clients(found):
        lines += [f"## How many clients: {name}", "", *(f"- {escape(one)}" for one in told), ""]
    for one in found.passes:
        lines += [f"## {mode(found, one).capitalize()}", "", *_rows(one), ""]
        lines += [*(f"- {escape(line)}" for line in choices(found, one)), ""]
    lines += ["## Annex", "", f"After {escape(FEDLEAK)}.", ""]
    lines += [f"- {escape(label)}: {escape(value)}" for label, value in _facts(found, digest)]
    return "\n".join(lines) + "\n"


def _rows(one: Pass) -> list[str]:
    header = ("Factor", "Value", "Records", "Median PSNR", "95 % interval", "Mean picture", "SSIM",
              "Recognised", "Labels", "Risk", "Attack", "Kept")  # fmt: skip
    rows = []
    for line in table(one):
        numbers = (line.records, line.median, line.interval, line.base, line.ssim, line.found,
                   line.labels, line.risk or NOTHING)  # fmt: skip
        attack = f"{line.attack} ({line.realism})" if line.realism else ""
        attack = "; ".join(filter(None, (attack, line.state)))
        kept = "**kept**" if line.kept else ""
        escape = markdown.escape
        rows.append((line.factor, escape(line.value), *numbers, escape(attack), kept))
    return markdown._table(header, rows)
