"""Two audits side by side: what leaks more, what less, in what their plans differ, and whether the
second is worse than the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table
from rich.text import Text

from leakgauge.audit.advice import CAP, capped, defended
from leakgauge.audit.document import Limit
from leakgauge.audit.results import Measured, Measurement, Result, Row, Spread
from leakgauge.audit.summary import derived
from leakgauge.config import plain, toml
from leakgauge.errors import InputError
from leakgauge.report import contents, first_screen, wording
from leakgauge.report.contents import Place
from leakgauge.report.wording import NOTHING


@dataclass(frozen=True)
class Both:
    """One number in both audits, None where it was not measured; `clear` is whether the two
    intervals of a median stand apart."""

    a: float | None
    b: float | None
    clear: bool = False

    @property
    def change(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True)
class Change:
    """A row of the summary in both audits: the medians by metric, and labels read. `raw` and
    `unread` are medians of the PSNR before restoring, and without the update. `only` names the
    audit that alone has it (old or new)."""

    round: int
    defence: str
    attack: str
    medians: dict[str, Both]
    labels: Both
    raw: Both
    unread: Both
    only: str | None


@dataclass(frozen=True)
class Comparison:
    """`plans` lists what differs as (key, old value, new value); None where a key is absent."""

    names: tuple[str, str]
    outcomes: tuple[str, str]
    metrics: tuple[Measurement, ...]
    rows: tuple[Change, ...]
    plans: tuple[tuple[str, object, object], ...]


def compare(a: Result, b: Result) -> Comparison:
    """Rows in the order of the old audit `a`, then those that only the new audit `b` has."""
    of_a, of_b = ({contents.place(row): row for row in audit.summary} for audit in (a, b))
    metrics = {metric.name: metric for metric in (*a.metrics, *b.metrics)}
    return Comparison(
        names=(a.name, b.name),
        outcomes=(first_screen.outcome(a), first_screen.outcome(b)),
        metrics=tuple(metrics.values()),
        rows=tuple(_change(key, of_a.get(key), of_b.get(key), metrics) for key in of_a | of_b),
        plans=tuple(_differences(plain(a.plan), plain(b.plan), "")),
    )


def tables(comparison: Comparison) -> list[Table]:
    """For a terminal of 80 columns. Names are text, never markup."""
    head = Table(title="Two audits", title_justify="left", box=box.SIMPLE_HEAD)
    head.add_column("", no_wrap=True)
    for name in ("old", "new"):
        head.add_column(name, overflow="fold")
    head.add_row("name", *map(_text, comparison.names))
    head.add_row("verdict", *comparison.outcomes)
    for key, *values in comparison.plans:
        head.add_row(_text(key), *(NOTHING if v is None else _text(toml(v)) for v in values))
    rows = _numbers(
        comparison,
        "Medians of the PSNR in dB, and labels read",
        ["old", "new", "change", "labels old", "new"],
        [_cells(row) for row in comparison.rows],
    )
    further = [metric for metric in comparison.metrics if metric.name != "psnr"]
    sides = [[_both(row.raw), _both(row.medians["psnr"]), _both(row.unread)]
             for row in comparison.rows]  # fmt: skip
    beside = _numbers(
        comparison,
        "Medians of the PSNR in dB where a prior had a part, old → new",
        ["raw guess", "restored or generated", "no update"],
        sides,
        no_wrap=False,
    )
    found = [head, rows] + [beside] * any(_both(row.unread) != NOTHING for row in comparison.rows)
    if not further:
        return found
    more = _numbers(
        comparison,
        "Medians of the other metrics, old → new",
        [f"{metric.label} {metric.unit}".rstrip() for metric in further],
        [[_both(row.medians[metric.name]) for metric in further] for row in comparison.rows],
        no_wrap=False,  # there may be many
    )
    return [*found, more]


def _numbers(
    comparison: Comparison,
    title: str,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    no_wrap: bool = True,
) -> Table:
    """A line of numbers for each row that was compared."""
    table = Table(
        title=title,
        title_justify="left",
        caption="* the 95 % intervals of the two medians stand apart",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    stages = len({row.round for row in comparison.rows}) > 1
    for name in [*(["round"] if stages else []), "defence", "attack"]:
        table.add_column(name, overflow="fold")
    for name in columns:
        table.add_column(_text(name), justify="right", no_wrap=no_wrap, overflow="fold")
    for row, numbers in zip(comparison.rows, cells, strict=True):
        stage = [str(row.round)] if stages else []
        table.add_row(*stage, _text(row.defence), _text(row.attack), *numbers)
    return table


# The gate

GAP = 1.0  # dB between two intervals of the median, from which on the second is worse
STEP = 0.05  # the same for another metric, as a share of the old median
OUTCOMES = ("below the limit", "inconclusive", "leaks")
STATES = ("below", "undecided", "leaks")


def worse(old: Result, new: Result) -> list[str]:
    """What got worse, a sentence each; both audits are judged by the limits of the old one, so that
    raising a limit hides nothing. Rows of attackers who were told truths do not count.

    A crash is no evidence of safety: trials that crash are worse than none that do."""
    if not old.verdict or not new.verdict:
        raise InputError(
            "a result of schema 1 has no verdict to compare: run its audit again, or leave out "
            "--gate"
        )
    judged = _by_the_limits_of(old, old.verdict.limit, new)
    after = judged.verdict.outcome if judged.verdict else None
    found = []
    if _rank(OUTCOMES, after) > _rank(OUTCOMES, old.verdict.outcome):
        found.append(f"The verdict went from “{old.verdict.outcome}” to “{after}”.")
    crashed = sum(trial.status == "failed" for trial in new.trials)
    if crashed and not any(trial.status == "failed" for trial in old.trials):
        found.append(f"{wording.count(crashed, 'trial')} crashed, where none did before.")
    measured = {metric.name for metric in new.metrics}
    found += [
        f"{metric.label} had a limit, and is not measured any more."
        for metric in old.metrics
        if metric.limit is not None and metric.name not in measured
    ]
    known = _counting(old)
    for key, numbers in _counting(judged).items():
        found += _worse_row(judged, key, known.get(key), numbers)
    return found


def _by_the_limits_of(old: Result, limit: Limit, new: Result) -> Result:
    """The new audit, had its plan the limits of the old one; those of metrics stand with them."""
    limits = {metric.name: metric.limit for metric in old.metrics}
    metrics = tuple(replace(m, limit=limits.get(m.name, m.limit)) for m in new.metrics)
    audit = replace(new.plan.audit, limit=replace(limit, scores={}))
    controls = [id_ for entry in new.control for id_ in entry.trials]
    judged = replace(new, plan=replace(new.plan, audit=audit), metrics=metrics)
    return derived(judged, controls, new.explanation)


def _rank(order: tuple[str, ...], word: str | None) -> int:
    """Of outcomes: one that failed says nothing, and stands at the bottom."""
    return order.index(word) if word in order else -1


def _counting(result: Result) -> dict[Place, Measured]:
    """The numbers that a verdict may use, by their row."""
    return {
        contents.place(row): found
        for row, found in contents.measured(result)
        if found.realism in contents.JUDGED
    }


def _worse_row(result: Result, key: Place, old: Measured | None, new: Measured) -> list[str]:
    stage, defence, attack = key
    place = f"{attack}, {defended(defence)}, round {stage}"
    found = []
    for kind, leak in new.leaks.items():
        was = old.leaks.get(kind) if old else None
        name = f"{place}: {contents.within(contents.kind_of_leak(result, kind))}"
        share = f"{wording.percent(leak.share)} of {wording.count(leak.records, 'record')}"
        if was is None:
            if leak.state == "leaks":
                found.append(f"{name}: leaks ({share}), and was not measured before.")
        elif _rank(STATES, leak.state) > _rank(STATES, was.state):
            states = [contents.STATES[entry.state] for entry in (was, leak)]
            found.append(f"{name}: went from “{states[0]}” to “{states[1]}” ({share}).")
        elif leak.interval[0] > was.interval[1]:
            found.append(
                f"{name}: {share}, up from {wording.percent(was.share)}; the 95 % intervals "
                "stand apart."
            )
    moved = [_closer(m, old, new) for m in result.metrics if old and m.name in old.scores]
    return found + [f"{place}: {words}" for words in moved if words]


def _closer(metric: Measurement, old: Measured, new: Measured) -> str | None:
    """Whether the median of a metric that has a limit came clearly closer to the truth."""
    sign = 1 if metric.better == "higher" else -1
    was, now = old.scores[metric.name], new.scores[metric.name]
    if metric.limit is None or sign * now.median <= sign * new.mean_image[metric.name]:
        return None
    far, near = max(sign * end for end in was.interval), min(sign * end for end in now.interval)
    gap = STEP * abs(was.median)
    medians = [wording.number(spread.median, metric) for spread in (was, now)]
    if metric.name == "psnr":
        far, near, gap = min(far, CAP), min(near, CAP), GAP
        medians = [capped(spread.median) for spread in (was, now)]
    if near - far <= gap:
        return None
    moved = "rose" if sign > 0 else "fell"
    return (
        f"the median {metric.label} {moved} from {medians[0]} to {medians[1]}; the 95 % intervals "
        "stand apart."
    )


def _change(key: Place, a: Row | None, b: Row | None, metrics: Iterable[str]) -> Change:
    both = old, new = [row.measured if row else None for row in (a, b)]
    return Change(
        *key,
        medians={n: _medians(n, [one.scores if one else None for one in both]) for n in metrics},
        raw=_medians("psnr", [one.raw if one else None for one in both]),
        unread=_medians("psnr", [one.prior_only if one else None for one in both]),
        labels=Both(_accuracy(old), _accuracy(new)),
        only="old" if b is None else "new" if a is None else None,
    )


def _medians(metric: str, tables: Iterable[Mapping[str, Spread] | None]) -> Both:
    a, b = (table.get(metric) if table else None for table in tables)
    apart = a and b and (a.interval[1] < b.interval[0] or b.interval[1] < a.interval[0])
    return Both(a.median if a else None, b.median if b else None, bool(apart))


def _accuracy(found: Measured | None) -> float | None:
    return found.labels.accuracy if found and found.labels else None


def _differences(a: object, b: object, path: str) -> list[tuple[str, object, object]]:
    """Keys whose values differ, each by its whole path; attacks and defences by their place."""
    old, new = _keyed(a), _keyed(b)
    if old is None or new is None or isinstance(a, dict) != isinstance(b, dict):
        return [] if a == b else [(path, a, b)]
    return [
        found
        for key in old | new
        for found in _differences(old.get(key), new.get(key), _join(path, key))
    ]


def _keyed(value: object) -> dict[str | int, object] | None:
    """The entries of a table by their key, of a list of tables by their place."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def _join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _cells(row: Change) -> list[str]:
    psnr, labels = row.medians["psnr"], row.labels
    change = NOTHING if psnr.change is None else f"{psnr.change:+.1f}{' *' * psnr.clear}"
    return [
        *(NOTHING if value is None else f"{value:.1f}" for value in (psnr.a, psnr.b)),
        f"only in {row.only}" if row.only else change,
        *map(wording.percent, (labels.a, labels.b)),
    ]


def _both(median: Both) -> str:
    numbers = [NOTHING if value is None else f"{value:.3g}" for value in (median.a, median.b)]
    return NOTHING if set(numbers) == {NOTHING} else " → ".join(numbers) + " *" * median.clear


def _text(value: str) -> Text:
    return Text(wording.tidy(value))
