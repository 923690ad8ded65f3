"""The result in a terminal of 80 columns: a table or two, and what a reader of them must know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from leakgauge.attacks.exposure import Exposure
from leakgauge.audit.advice import exposed, way_out
from leakgauge.audit.document import BLIND
from leakgauge.audit.fit import Fit
from leakgauge.audit.protocol import Protocol
from leakgauge.audit.results import Measured, Result, Row, Tradeoff
from leakgauge.report import annex, contents, first_screen, protection, protocol, wording


def summary_table(result: Result) -> Group:
    """One row for each attack, below its stage and defence. The metrics beside the PSNR have a
    table of their own."""
    measured = contents.measured(result)
    counts = [found.records for _, found in measured] or [0]
    unknown = any(contents.unknown(row) for row, _ in measured)
    blind = any(row.attack.endswith(BLIND) for row, _ in measured)
    images = " to ".join(map(str, sorted({min(counts), max(counts)})))
    leaks = _table(
        result,
        f"What leaks: {escape(result.name)}",
        f"PSNR: how alike the pictures are, median over {images} (quartiles).\n"
        "baseline: the PSNR of a mean picture, which shows nothing of the record.\n"
        "found: records recognised, picked out of a gallery by their reconstruction.\n"
        "labels: share of the labels read (what guessing gives).\n"
        "risk: the median PSNR in words; – where it is not above the baseline."
        + ("\nignoring it: the same attack, by who ignores the defence." if blind else "")
        + ("\nuntested: this attack does not know the defence." if unknown else ""),
        ("PSNR dB", "baseline", "found", "labels", "risk"),
        ((row, _cells(row, row.measured)) for row in result.summary),
    )
    metrics = contents.further(result)
    said = Text(contents.directions(result), "table.caption")
    more = _sides(result)
    if not measured or not metrics:
        return Group(leaks, *([said] if measured and said else []), *more)
    others = _table(
        result,
        "Other metrics",
        None,
        [escape(metric.label) for metric in metrics],
        ((row, [escape(contents.beside(found, m)) for m in metrics]) for row, found in measured),
    )
    return Group(leaks, "", others, said, *more)


def _sides(result: Result) -> list[Table | Text | str]:
    """What a restorer or a prior had a part in, beside what they show without the update."""
    if not (lines := contents.sides(result)):
        return []
    table = Table(title="Restored and generated pictures", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("attack", overflow="fold")
    for name in ("raw guess", "restored or\ngenerated", "no update"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        after = f"round {line.round}, " if contents.several_rounds(result) else ""
        name = f"{line.attack}, {after}{contents.named(line.defence)}"
        cells = ("\n".join(cell) for cell in (line.raw, line.shown, line.unread))
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/]", *cells)
    return ["", table, Text(contents.UNREAD, "table.caption")]


def _table(
    result: Result,
    title: str,
    caption: str | None,
    columns: Iterable[str],
    rows: Iterable[tuple[Row, list[str]]],
) -> Table:
    table = Table(
        title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0
    )
    table.add_column("attack", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=bool(caption), overflow="fold")
    section = None
    for row, cells in rows:
        if (row.round, row.defence) != section:
            section = row.round, row.defence
            after = f"round {row.round}, " if contents.several_rounds(result) else ""
            table.add_section()
            table.add_row(f"[bold]{after}{escape(contents.named(row.defence))}[/]")
        name = f"  {escape(row.attack)}{contents.unknown(row)}"
        table.add_row("    ignoring it" if row.attack.endswith(BLIND) else name, *cells)
    return table


def tradeoff_table(result: Result, given: Tradeoff) -> Table:
    """One row for each setting: what it costs, and what leaks."""
    table = Table(
        title=protection.TITLE,
        caption="accuracy: on held-out records (95 % interval).\n"
        "cost: accuracy without a defence minus with it, in points (95 % interval).\n"
        "leak: what leaks most, as a multiple of what the plan allows.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("setting", overflow="fold")
    for name in ("accuracy", "cost", "leak", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in protection.priced(result, given):
        name = escape(line.setting)
        interval = f" ({line.cost_interval})" if line.cost_interval else ""
        table.add_row(
            f"[bold]{name}[/]" if line.mark else name,
            f"{line.accuracy} ({line.accuracy_interval})",
            f"{line.cost.removesuffix(' points')}{interval}",
            line.leak,
            line.mark or line.outcome,
        )
    return table


def _cells(row: Row, found: Measured | None) -> list[str]:
    if not found:
        why = "failed" if row.failed else "not scored" if row.unscored else "n/a"
        return ["–"] * 4 + [why]
    psnr, labels = contents.psnr(found), found.labels
    low, high = psnr.quartiles
    return [
        f"{psnr.median:.1f} ({low:.0f}–{high:.0f})",
        f"{contents.baseline(found):.1f}",
        f"{found.scores['identified'].mean:.0%}",
        f"{labels.accuracy:.0%} ({labels.random:.0%})" if labels else "–",
        found.risk if contents.above_baseline(found) else "–",
    ]


def protocol_tables(found: Protocol) -> Group:
    """A table for each mode of batch norm: a line per value, the kept ones marked."""
    tables = []
    for one in found.passes:
        table = Table(title=escape(protocol.mode(found, one)), box=box.SIMPLE_HEAD, padding=0)
        table.add_column("factor and value", overflow="fold")
        for name in ("PSNR dB", "baseline", "found", "labels", "risk"):
            table.add_column(name, justify="right", no_wrap=True)
        factor = None
        for line in protocol.table(one):
            if line.factor != factor:
                factor = line.factor
                table.add_row(f"[bold]{escape(factor)}[/]")
            mark = "[bold]›[/] " if line.kept else "  "
            cells = line.median, line.base, line.found, line.labels, line.risk or "–"
            table.add_row(mark + escape(line.value), *cells)
        tables.append(table)
    return Group(*tables, Text("› kept for the factors that follow", "table.caption"))


def verdict(result: Result) -> list[str]:
    """The verdict as lines of markup: the headline, a line per defence, why, what to do next."""
    lines = ["", f"[bold]{escape(first_screen.headline(result))}[/]"]
    if rests := first_screen.rests_on(result):
        lines.append(escape(rests))
    defences = first_screen.defence_verdicts(result)
    for line in defences if len(defences) > 1 else []:
        states = ", ".join(f"{contents.within(kind)}: {state}" for kind, _, state in line.kinds)
        lines.append(escape(f"{line.defence}: {line.outcome}" + (f" ({states})" * bool(states))))
    if result.explanation:
        lines.append(escape(result.explanation.sentence))
    lines += [escape(exposed(one)) for one in result.exposure]
    steps = first_screen.next_steps(result)
    lines += ["", "[bold]What to do next[/]"] if steps else []
    lines += [f"{i}. {escape(step)}" for i, step in enumerate(steps, start=1)]
    return [*lines, ""]


def notes(result: Result, most: int = 8) -> list[str]:
    """What a reader of the table must know: reasons, errors and the attacks' own notes. A reason
    why an attack does not apply is said once, short."""
    notes: Counter[str] = Counter()
    for trial in result.trials:
        said = list(trial.found.notes) if trial.found else []
        if trial.error:
            word = "does not apply: " if trial.status == "not applicable" else ""
            said.insert(0, word + wording.brief(trial.error))
        notes.update(f"{trial.attack}: {note}" for note in said)
    lines = [f"{attack}: fitted in {words}" for attack, words in annex.fits(result).items()]
    lines += [note + (f" ({count} trials)" if count > 1 else "") for note, count in notes.items()]
    more = [f"{len(lines) - most} more notes are in the result"] if len(lines) > most else []
    return lines[:most] + more


def fit_table(name: str, fits: Sequence[Fit]) -> Group:
    """What is to be prepared, with its cost, and what is there already."""
    table = Table(title=f"What is prepared for {escape(name)}", box=box.SIMPLE_HEAD)
    for title in ("attack", "for", "seed", "trials", "CPU s"):
        side: Literal["left", "right"] = "left" if title in ("attack", "for") else "right"
        table.add_column(title, justify=side, overflow="fold")
    for one in fits:
        cost = "does not apply" if one.reason else f"about {one.cpu_seconds:.1f}"
        cost = f"done ({one.cpu_seconds:.1f})" if one.done else cost
        case = one.case
        place = f"round {case.stage}, {contents.named(case.defence)}"
        if case.kept is not None:
            place = " + ".join(("the weak twin", *case.kept))
        cells = escape(case.attack), escape(place), str(case.seed), str(one.trials), cost
        table.add_row(*cells)
    left = [one.cpu_seconds for one in fits if not one.done and not one.reason]
    words = f"{wording.count(len(left), 'fit')} to make, about {sum(left):.1f} CPU seconds in all"
    return Group(table, Text(words if left else "all of it is there"))


def exposure_table(found: Exposure, most: int = 5) -> Group:
    """The highest layers that tell records apart, or why the highest do not; and what follows."""
    telling = [one for one in found.layers if one.limit]
    table = Table(title="What an update shows exactly, before any attack", box=box.SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    for name in ("windows", "outputs", "records at most"):
        table.add_column(name, justify="right")
    for one in (telling or found.layers)[:most]:
        cells = f"{one.positions:,}", f"{one.outputs:,}"
        table.add_row(escape(one.name), *cells, f"{one.limit:,}" if one.limit else "–")
    words = Text(f"{exposed(found)} {way_out(found)}")
    return Group(table, words) if found.layers else Group(words)
