"""The report as markdown, for a wiki, an issue or a job summary: no pictures, all numbers.

Every text that is not ours is escaped, so that a name can neither become HTML nor a link, a
heading or a new cell of a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from leakgauge.audit.advice import defended
from leakgauge.audit.results import Result, Tradeoff
from leakgauge.report import annex, contents, first_screen, pictures, protection, wording

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
_START = re.compile(r"^(\d+)([.)])|^([-+=])")


def render(result: Result, folder: Path | None = None) -> str:
    """The text of report.md; `folder` holds the result.json whose checksum it carries."""
    lines = [f"# {escape(result.name)}: {first_screen.outcome(result)}", ""]
    lines += [f"**{escape(first_screen.headline(result))}**", ""]
    if level := first_screen.risk_level(result):
        lines += [f"Risk: **{level}** ({contents.RISKS[level]}).", ""]
    if rests := first_screen.rests_on(result):
        lines += [rests, ""]
    if figures := first_screen.key_figures(result):
        cards = ((f"**{escape(f.label)}**", f.value, escape(f.note), f.against) for f in figures)
        lines += [*_table(("", "", "", ""), cards), ""]
    for said, change in first_screen.exposed(result):
        lines += [f"{escape(said)} {escape(change)}", ""]
    if pair := pictures.worst(result):
        lines += [f"The worst picture: {escape(first_screen.worst_caption(pair, 'hide'))}", ""]
    if steps := first_screen.next_steps(result):
        lines += ["## What to do next", ""]
        lines += [f"{i}. {escape(step)}" for i, step in enumerate(steps, 1)]
    if defences := first_screen.defence_verdicts(result):
        lines += ["", "## The verdict on each defence", "", *_defences(defences)]
    if result.tradeoff:
        lines += ["", f"## {protection.TITLE}", "", *_tradeoff(result, result.tradeoff)]
    lines += ["", "## Findings", "", *_findings(result)]
    lines += _list(first_screen.evidence(result))
    if sides := contents.sides(result):
        lines += ["", "## Restored and generated pictures", "", *_sides(sides)]
    if trades := contents.trade_off(result):
        lines += ["", "## Defences", "", *_trades(trades)]
    if promises := contents.privacy(result):
        rows = ((escape(one.defence), one.epsilon, escape(one.words)) for one in promises)
        header = ("Defence", "Epsilon over all rounds", "In words")
        lines += ["", "## Differential privacy", "", *_table(header, rows)]
    lines += ["", "## Why", "", *_why(result)]
    lines += ["", "## Positive control", "", *_control(result)]
    lines += ["", "## Threat model", "", escape(contents.threat_sentence(result)), ""]
    if known := contents.knowledge(result):
        held = {True: "holds", False: "does not hold"}
        rows = ((escape(line.item), escape(line.words), held[line.held]) for line in known)
        lines += _table(("Knowledge", "What it is", "Attacker"), rows)
    lines += ["", "## Scope", "", *_table(("", ""), _escaped(contents.scope(result)))]
    lines += ["", "## Attacks run and not run", "", *_coverage(result)]
    limits = contents.limits(result, "hide")
    limits += protection.limits(result.tradeoff) if result.tradeoff else []
    lines += ["", "## Limits", "", *_list(limits)]
    lines += ["", "## Realism ledger", "", *_ledger(result)]
    papers = result.references
    lines += ["", "## References", ""]
    lines += [f"{i}. {escape(p.line())} <{p.link}>" for i, p in enumerate(papers, 1)]
    lines += ["", "## Annex", "", *_table(("", ""), _escaped(annex.annex(result, folder)))]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text that markdown shows as it is, on one line."""
    text = " ".join(wording.tidy(text).split())
    text = "".join(_ENTITIES.get(character, character) for character in text)
    text = _SPECIAL.sub(r"\\\1", text)
    text = _START.sub(lambda m: f"{m[1]}\\{m[2]}" if m[1] else f"\\{m[3]}", text)
    # Renderers make links of bare addresses: an entity in them shows the same and links nothing.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def _defences(verdicts: list[first_screen.DefenceVerdict]) -> list[str]:
    rows = []
    for line in verdicts:
        found = "; ".join(f"{kind}: {state} ({words})" for kind, words, state in line.kinds)
        name = escape(f"{line.defence} {line.settings}".rstrip())
        rows.append((name, f"**{line.outcome}**", escape(found) or "nothing was measured"))
    return _table(("Defence", "Verdict", "What was found"), rows)


def _tradeoff(result: Result, given: Tradeoff) -> list[str]:
    rows = []
    for line in protection.priced(result, given):
        mark = f" **{line.mark}**" if line.mark else ""
        name = escape(" ".join(filter(None, (line.setting, line.options, line.spent))))
        rows.append(
            (
                str(line.number),
                name + mark,
                f"{line.accuracy} ({line.accuracy_interval})",
                f"{line.cost} ({line.cost_interval})" if line.cost_interval else line.cost,
                f"{line.leak} ({line.leak_interval})",
                escape(line.worst),
                line.median,
                f"**{line.outcome}**",
                "yes" if line.front else "no",
            )
        )
    header = ("", "Setting", "Accuracy", "Cost", "Leak, × the limit", "What leaks most",
              "Typical picture", "Verdict", "Efficient")  # fmt: skip
    lines = [escape(protection.lead(given)), "", *_table(header, rows), ""]
    rounds, means = protection.on_the_way(result, given)
    if means:
        cells = ([escape(name), *rest] for name, *rest in means)
        lines += ["Accuracy on the way:", "", *_table(("Setting", *rounds), cells), ""]
    return [*lines, escape(given.sentence)]


def _findings(result: Result) -> list[str]:
    rows: list[tuple[str, ...]] = []
    caveats: dict[str, int] = {}  # rows with the same caveats share a mark
    for finding in contents.findings(result):
        head = (str(finding.round), escape(finding.defence), escape(finding.attack))
        if finding.state:
            rows.append((*head, "0", *["–"] * 7, escape(finding.state), "–", "–"))
            continue
        noted = escape("; ".join(finding.caveats))
        mark = f" [{caveats.setdefault(noted, len(caveats) + 1)}]" if noted else ""
        rows.append(
            (
                *head,
                finding.records,
                f"{finding.median}{mark}",
                finding.interval,
                finding.worst,
                finding.base,
                f"{finding.found} ({finding.chance})",
                f"{finding.labels} ({finding.guessing})",
                finding.risk or "–",
                finding.realism or "–",
                escape(finding.knows) or "–",
                escape(finding.further) or "–",
            )
        )
    header = ("Round", "Defence", "Attack", "Records", "Median PSNR", "95 % interval", "Highest",
              "Mean picture", "Recognised (chance)", "Labels (guessing)", "Risk",
              "Realism", "The attacker", "Other metrics")  # fmt: skip
    notes = [contents.directions(result), contents.inapplicable(result)]
    return [
        *_table(header, rows),
        "",
        *_list_marked(caveats),
        *(line for note in notes if note for line in (escape(note), "")),
    ]


def _sides(sides: list[contents.Sides]) -> list[str]:
    rows = (
        (
            *(str(one.round), escape(one.defence), escape(one.attack)),
            *(", ".join(cell) for cell in (one.raw, one.shown, one.unread)),
        )
        for one in sides
    )
    header = ("Round", "Defence", "Attack", "Raw guess", "Restored or generated", "No update")
    return [escape(contents.UNREAD), "", *_table(header, rows)]


def _control(result: Result) -> list[str]:
    if not result.control:
        return [
            "No positive control is part of this result: a low number is no evidence of safety."
        ]
    lines = contents.control(result)
    rows = ((escape(line.attack), line.psnr, line.base, escape(line.words)) for line in lines)
    return _table(("Attack", "PSNR on the twin", "Mean picture", "Control"), rows)


def _why(result: Result) -> list[str]:
    lines = ["The ladder that explains a result was not run."]
    if explanation := result.explanation:
        rows = []
        for rung in explanation.rungs:
            numbers = wording.decibels(rung.median), wording.change(rung.change)
            rows.append((escape(rung.factor), escape(rung.label), *numbers))
        header = ("Factor put back", "", "Median PSNR", "Change")
        lines = [escape(explanation.sentence), "", *_table(header, rows)]
    if result.sensitivity:
        lines += ["", f"Noise-to-gradient sensitivity: {escape(result.sensitivity.words)}"]
    return lines


def _trades(trades: list[contents.Trade]) -> list[str]:
    rows = []
    for trade in trades:
        name = escape(f"{defended(trade.defence)} {trade.settings}".rstrip())
        median = wording.decibels(contents.psnr(trade.numbers).median)
        rows.append((str(trade.round), name, escape(trade.attack), median, trade.state))
    return _table(("Round", "Defence", "Strongest attack", "Median PSNR", "Pictures"), rows)


def _ledger(result: Result) -> list[str]:
    rows = []
    for line in contents.ledger(result):
        counts = "yes" if line.counts else "never"
        numbers = str(line.rows), str(line.records), line.highest
        rows.append((line.realism, line.meaning, *numbers, counts))
    header = ("Tag", "Meaning", "Rows", "Records", "Highest median", "In the verdict")
    return _table(header, rows)


def _coverage(result: Result) -> list[str]:
    rows = []
    for line in contents.coverage(result):
        counts = map(str, (line.done, line.not_applicable, line.failed, line.not_run))
        reasons = escape("; ".join(line.reasons)) or "–"
        rows.append((escape(line.attack), escape(line.settings), *counts, reasons))
    header = ("Attack", "Settings", "Done", "Not applicable", "Failed", "Not run", "Reason")
    lines = _table(header, rows)
    if whole := contents.whole_reasons(result):
        lines += ["", "Why attacks do not apply, in full:", ""]
        lines += _list(f"{attack}: {reason}" for attack, reason in whole)
    if notes := contents.notes(result):
        lines += ["", "Notes of the attacks:", "", *_list(notes)]
    return lines


def _escaped(rows: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    return ((escape(label), escape(value)) for label, value in rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Cells must be escaped already."""
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _list_marked(marks: dict[str, int]) -> list[str]:
    return [line for text, mark in marks.items() for line in (f"[{mark}] {text}", "")]


def _list(texts: Iterable[str]) -> list[str]:
    return [f"- {escape(text)}" for text in texts]
