"""Two audits side by side: what leaks more, what less, in what their plans differ, and whether the
second is worse than the first."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakgauge.audit.advice import CAP, capped, defended
from leakgauge.audit.summary import derived
from leakgauge.errors import InputError
from leakgauge.report import contents, first_screen, wording
from leakgauge.report.contents import Result, Row
from leakgauge.report.wording import NOTHING

Key = tuple[int, str, str]


@dataclass(frozen=True)
class Both:
    """One number in both audits; None where it was not measured."""

    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True)
class Change:
    """A row of the summary in both audits. `only` names the audit that alone has it (old or new);
    `clear` is whether the two intervals of the median stand apart."""

    round: int
    defence: str
    attack: str
    psnr: Both
    ssim: Both
    labels: Both
    clear: bool
    only: str | None


@dataclass(frozen=True)
class Comparison:
    """`plans` lists what differs as (key, old value, new value); None where a key is absent."""

    names: tuple[str, str]
    outcomes: tuple[str, str]
    rows: tuple[Change, ...]
    plans: tuple[tuple[str, Any, Any], ...]


def compare(a: Result, b: Result) -> Comparison:
    """Rows in the order of the old audit `a`, then those that only the new audit `b` has."""
    of_a, of_b = _rows(a), _rows(b)
    return Comparison(
        names=(a["name"], b["name"]),
        outcomes=(first_screen.outcome(a), first_screen.outcome(b)),
        rows=tuple(_change(key, of_a.get(key), of_b.get(key)) for key in of_a | of_b),
        plans=tuple(_differences(a["plan"], b["plan"], "")),
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
        head.add_row(
            _text(key), *(NOTHING if v is None else _text(wording.toml(v)) for v in values)
        )
    rows = Table(
        title="Medians of the PSNR in dB, and labels read",
        title_justify="left",
        caption="* the 95 % intervals of the two medians stand apart",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    stages = len({row.round for row in comparison.rows}) > 1
    for name in [*(["round"] if stages else []), "defence", "attack"]:
        rows.add_column(name, overflow="fold")
    for name in ("old", "new", "change", "labels old", "new"):
        rows.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        stage = [str(row.round)] if stages else []
        rows.add_row(*stage, _text(row.defence), _text(row.attack), *_cells(row))
    return [head, rows]


def text(comparison: Comparison, width: int = 80) -> str:
    """The same as plain text."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    for table in tables(comparison):
        console.print(table)
    return file.getvalue()


# The gate

GAP = 1.0  # dB between two intervals of the median, from which on the second is worse
OUTCOMES = ("below the limit", "inconclusive", "leaks")
STATES = ("below", "undecided", "leaks")


def worse(old: Result, new: Result) -> list[str]:
    """What got worse, a sentence each; both audits are judged by the limits of the old one, so that
    raising a limit hides nothing. Rows of attackers who were told truths do not count.

    A crash is no evidence of safety: trials that crash are worse than none that do."""
    if not old["verdict"] or not new["verdict"]:
        raise InputError(
            "a result of schema 1 has no verdict to compare: run its audit again, or leave out "
            "--gate"
        )
    plan = new["plan"] | {"audit": new["plan"]["audit"] | {"limit": old["verdict"]["limit"]}}
    controls = [id_ for entry in new["control"] for id_ in entry["trials"]]
    judged = derived(plan, new["trials"], controls, new["explanation"], new["not_run"])
    before, after = old["verdict"]["outcome"], judged["verdict"]["outcome"]
    found = []
    if _rank(OUTCOMES, after) > _rank(OUTCOMES, before):
        found.append(f"The verdict went from “{before}” to “{after}”.")
    crashed = sum(trial["status"] == "failed" for trial in new["trials"])
    if crashed and not any(trial["status"] == "failed" for trial in old["trials"]):
        found.append(f"{wording.count(crashed, 'trial')} crashed, where none did before.")
    known = {key: row for key, row in _rows(old).items() if _counts(row)}
    for key, row in _rows(judged).items():
        if _counts(row):
            found += _worse_row(_place(key), known.get(key), row)
    return found


def _rank(order: tuple[str, ...], word: str) -> int:
    """Of outcomes: one that failed says nothing, and stands at the bottom."""
    return order.index(word) if word in order else -1


def _counts(row: Row) -> bool:
    return "scores" in row and row["realism"] in contents.JUDGED


def _place(key: Key) -> str:
    stage, defence, attack = key
    return f"{attack}, {defended(defence)}, round {stage}"


def _worse_row(place: str, old: Row | None, new: Row) -> list[str]:
    found = []
    for kind, leak in new["leaks"].items():
        was = old["leaks"].get(kind) if old else None
        name = f"{place}: {contents.KINDS[kind].lower()}"
        share = f"{wording.percent(leak['share'])} of {wording.count(leak['records'], 'record')}"
        if was is None:
            if leak["state"] == "leaks":
                found.append(f"{name}: leaks ({share}), and was not measured before.")
        elif _rank(STATES, leak["state"]) > _rank(STATES, was["state"]):
            states = [contents.STATES[entry["state"]] for entry in (was, leak)]
            found.append(f"{name}: went from “{states[0]}” to “{states[1]}” ({share}).")
        elif leak["interval"][0] > was["interval"][1]:
            found.append(
                f"{name}: {share}, up from {wording.percent(was['share'])}; the 95 % intervals "
                "stand apart."
            )
    if old and contents.above_baseline(new):
        high, low = contents.psnr(old)["interval"][1], contents.psnr(new)["interval"][0]
        if min(low, CAP) - min(high, CAP) > GAP:
            medians = [capped(contents.psnr(row)["median"]) for row in (old, new)]
            found.append(
                f"{place}: the median PSNR rose from {medians[0]} to {medians[1]}; the 95 % "
                "intervals stand apart."
            )
    return found


def _rows(result: Result) -> dict[Key, Row]:
    return {(row["round"], row["defence"], row["attack"]): row for row in result["summary"]}


def _change(key: Key, a: Row | None, b: Row | None) -> Change:
    return Change(
        *key,
        psnr=Both(_median(a), _median(b)),
        ssim=Both(_median(a, "ssim"), _median(b, "ssim")),
        labels=Both(_accuracy(a), _accuracy(b)),
        clear=_apart(_interval(a), _interval(b)),
        only="old" if b is None else "new" if a is None else None,
    )


def _median(row: Row | None, metric: str = "psnr") -> float | None:
    value: float | None = wording.table(row, "scores", metric).get("median")
    return value


def _interval(row: Row | None) -> list[float] | None:
    value: list[float] | None = wording.table(row, "scores", "psnr").get("interval")
    return value


def _apart(a: list[float] | None, b: list[float] | None) -> bool:
    return bool(a and b and (a[1] < b[0] or b[1] < a[0]))


def _accuracy(row: Row | None) -> float | None:
    value: float | None = wording.table(row, "labels").get("accuracy")
    return value


def _differences(a: Any, b: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, each by its whole path; attacks and defences by their place."""
    if isinstance(a, list) and isinstance(b, list) and _of_tables(a) and _of_tables(b):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [(path, a, b)]
    return [
        found
        for key in a | b
        for found in _differences(a.get(key), b.get(key), _join(path, key))
    ]  # fmt: skip


def _of_tables(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _cells(row: Change) -> list[str]:
    if row.only:
        change = f"only in {row.only}"
    else:
        difference = row.psnr.change
        change = NOTHING if difference is None else f"{difference:+.1f}{' *' * row.clear}"
    return [
        *_each(row.psnr, lambda value: f"{value:.1f}"),
        change,
        *_each(row.labels, wording.percent),
    ]


def _each(both: Both, show: Callable[[float], str]) -> list[str]:
    return [NOTHING if value is None else show(value) for value in (both.a, both.b)]


def _text(value: str) -> Text:
    return Text(wording.tidy(value))
