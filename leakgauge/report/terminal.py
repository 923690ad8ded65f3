"""The result in a terminal of 80 columns: one table, and what a reader of it must know."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from leakgauge.report import contents, first_screen, wording


def summary_table(result: dict[str, Any]) -> Table:
    """One row for each attack, below its stage and defence: 80 columns wide."""
    rows = result["summary"]
    counts = [row["records"] for row in rows if "scores" in row] or [0]
    images = " to ".join(map(str, sorted({min(counts), max(counts)})))
    table = Table(
        title=f"What leaks: {escape(result['name'])}",
        caption=(
            f"PSNR, SSIM: how alike the pictures are, median over {images} (quartiles).\n"
            "baseline: the PSNR of a mean picture, which shows nothing of the record.\n"
            "found: records recognised, picked out of a gallery by their reconstruction.\n"
            "labels: share of the labels read (what guessing gives).\n"
            "risk: the median PSNR in words; – where it is not above the baseline."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("attack", overflow="fold")
    for name in ("PSNR dB", "baseline", "SSIM", "found", "labels", "risk"):
        table.add_column(name, justify="right", no_wrap=True)
    stages = len({row["round"] for row in rows}) > 1
    section = None
    for row in rows:
        if (row["round"], row["defence"]) != section:
            section = row["round"], row["defence"]
            after = f"round {row['round']}, " if stages else ""
            table.add_section()
            table.add_row(f"[bold]{after}{contents.named(row['defence'])}[/]")
        table.add_row(f"  {row['attack']}", *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if "scores" not in row:
        return ["–"] * 5 + ["failed" if row["failed"] else "n/a"]
    scores, labels = row["scores"], row["labels"]
    psnr, ssim = scores.get("psnr"), scores.get("ssim")
    decibels = baseline = risk = "–"
    if psnr:
        low, high = psnr["quartiles"]
        limit = row["baselines"]["mean image"]["psnr"]
        decibels, baseline = f"{psnr['median']:.1f} ({low:.0f}–{high:.0f})", f"{limit:.1f}"
        risk = row["risk"]["median"] if psnr["median"] > limit else "–"
    return [
        decibels,
        baseline,
        f"{ssim['median']:.2f}" if ssim else "–",
        f"{scores['identified']['mean']:.0%}",
        f"{labels['accuracy']:.0%} ({labels['random']:.0%})" if labels else "–",
        risk,
    ]


def verdict(result: dict[str, Any]) -> list[str]:
    """The verdict as lines of markup: the headline, a line per defence, why, what to do next."""
    lines = ["", f"[bold]{escape(first_screen.headline(result))}[/]"]
    if rests := first_screen.rests_on(result):
        lines.append(escape(rests))
    defences = first_screen.defence_verdicts(result)
    for line in defences if len(defences) > 1 else []:
        states = ", ".join(f"{kind.lower()}: {state}" for kind, _, state in line.kinds)
        lines.append(escape(f"{line.defence}: {line.outcome}" + (f" ({states})" * bool(states))))
    if result["explanation"]:
        lines.append(escape(result["explanation"]["sentence"]))
    steps = first_screen.next_steps(result)
    lines += ["", "[bold]What to do next[/]"] if steps else []
    lines += [f"{i}. {escape(step)}" for i, step in enumerate(steps, start=1)]
    return [*lines, ""]


def notes(result: dict[str, Any], most: int = 8) -> list[str]:
    """What a reader of the table must know: reasons, errors and the attacks' own notes. A reason
    why an attack does not apply is said once, short."""
    notes: dict[str, int] = {}
    for trial in result["trials"]:
        said = list(trial.get("notes", []))
        if trial["error"]:
            word = "does not apply: " if trial["status"] == "not applicable" else ""
            said.insert(0, word + wording.brief(trial["error"]))
        for note in said:
            key = f"{trial['attack']}: {note}"
            notes[key] = notes.get(key, 0) + 1
    lines = [note + (f" ({count} trials)" if count > 1 else "") for note, count in notes.items()]
    more = [f"{len(lines) - most} more notes are in the result"] if len(lines) > most else []
    return lines[:most] + more
