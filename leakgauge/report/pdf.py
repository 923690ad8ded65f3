"""The report on paper: verdict, tables and a page of pictures.

Needs fpdf2 (`pip install 'leakgauge[pdf]'`), which is imported only when a PDF is made. The fonts
are the DejaVu that come with matplotlib: the fonts built into PDF know no "→", "≥" or "č". A
character they do not have either is printed as "□".
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leakgauge.config import optional
from leakgauge.report import annex, contents, pictures, references, wording
from leakgauge.report.contents import Images, Result

if TYPE_CHECKING:
    from fpdf import FPDF

INK, MUTED, LINE, ACCENT = (27, 36, 48), (90, 102, 116), (205, 210, 216), (0, 114, 178)
TONES = {
    "Leaks": (192, 74, 0),
    "Below the limit": (0, 120, 90),
    "Inconclusive": (138, 90, 0),
    "Failed": (140, 23, 70),
    contents.NO_VERDICT: (138, 90, 0),
}
MOST_ROWS = 60
MOST_PICTURES = 32
MOST_IN_CELL = 400  # characters: a row must fit on a page


def render(result: Result, folder: Path, images: Images = "blur") -> bytes:
    """The PDF for a result whose result.json and pictures are in `folder`."""
    contents.check_images(images)
    pdf = _document(result)
    _first_page(pdf, result)
    _findings(pdf, result)
    _pictures(pdf, result, folder, images)
    _heading(pdf, "Scope")
    _facts(pdf, contents.scope(result))
    _heading(pdf, "Threat model")
    _text(pdf, contents.threat_sentence(result))
    if known := contents.knowledge(result):
        _table(
            pdf,
            ("Knowledge", "What it is", "Attacker"),
            [(k.item, k.words, "holds" if k.held else "does not hold") for k in known],
            (2, 6, 2),
        )
    _control(pdf, result)
    _why(pdf, result)
    _defences(pdf, result)
    _coverage(pdf, result)
    _heading(pdf, "Limits")
    _list(pdf, contents.limits(result, images))
    _heading(pdf, "Realism ledger")
    _table(
        pdf,
        ("Tag", "Meaning", "Rows", "Highest median", "In the verdict"),
        [
            (line.realism, line.meaning, str(line.rows), line.highest, _yes(line.counts))
            for line in contents.ledger(result)
        ],
        (2, 7, 1, 2, 2),
    )
    _heading(pdf, "References")
    _list(pdf, [f"{paper.line()} {paper.link}" for paper in references.used(result)])
    _heading(pdf, "Annex")
    _facts(pdf, annex.annex(result, folder))
    _text(pdf, annex.plan_text(result), font="mono", size=7)
    return bytes(pdf.output())


def check() -> None:
    """Say at once if no PDF can be made, before an audit is run for it."""
    for package in ("fpdf", "matplotlib"):  # of matplotlib, the fonts
        optional(package, "pdf", "a PDF")


def _document(result: Result) -> FPDF:
    check()
    from fpdf import FPDF
    from matplotlib import get_data_path

    pdf = FPDF(format="A4")
    fonts = Path(get_data_path()) / "fonts" / "ttf"
    pdf.add_font("sans", "", fonts / "DejaVuSans.ttf")
    pdf.add_font("sans", "B", fonts / "DejaVuSans-Bold.ttf")
    pdf.add_font("mono", "", fonts / "DejaVuSansMono.ttf")
    pdf.set_margin(16)
    pdf.set_auto_page_break(True, 16)
    # The same result gives the same bytes: the date is that of the audit, not of the printing.
    pdf.set_creation_date(_date(result["times"]["finished"]))
    pdf.set_title(_known(pdf, f"{result['name']}: {contents.outcome(result)}"))
    pdf.set_creator(f"LeakGauge {wording.tidy(result['leakgauge'])}")
    pdf.add_page()
    return pdf


def _date(finished: str | None) -> datetime.datetime:
    try:
        date = datetime.datetime.fromisoformat(finished or "")
    except ValueError:
        date = datetime.datetime(1970, 1, 1)
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


def _first_page(pdf: FPDF, result: Result) -> None:
    word = contents.outcome(result)
    _text(pdf, f"LeakGauge audit · {result['name']}", size=9, colour=MUTED)
    pdf.ln(4)
    level = contents.risk_level(result)
    _text(pdf, word + (f" · risk {level}" if level else ""), size=13, bold=True, colour=TONES[word])
    pdf.ln(1)
    _text(pdf, contents.headline(result), size=17, bold=True)
    pdf.ln(4)
    figures = contents.key_figures(result)
    if figures:
        rows = [(figure.label, figure.value, figure.note) for figure in figures]
        _table(pdf, ("", "", ""), rows, (3, 2, 9), size=9)
        _text(pdf, f"Strongest attack: {contents.strongest_setting(result)}.", colour=MUTED)
    pdf.ln(2)
    _list(pdf, result["verdict"]["sentences"] if result["verdict"] else [])
    levels = "; ".join(f"{level}, {meaning}" for level, meaning in contents.RISKS.items())
    pdf.ln(2)
    _text(
        pdf,
        "PSNR compares a reconstruction with the true picture, pixel by pixel, in decibels: the "
        f"higher, the more has leaked. Risk: {levels}.",
        size=8,
        colour=MUTED,
    )


def _findings(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Findings")
    found = contents.findings(result)
    rows = []
    for finding in found[:MOST_ROWS]:
        head = f"{finding.attack}, defence {finding.defence}, round {finding.round}"
        if finding.state:
            rows.append((head, "0", "–", "–", "–", "–", "–", finding.state))
            continue
        rows.append(
            (
                " ⚠ ".join([f"{head} ({finding.realism})", *finding.caveats]),
                finding.records,
                f"{finding.median} ({finding.interval})",
                finding.worst,
                finding.base,
                f"{finding.found} ({finding.chance})",
                f"{finding.labels} ({finding.guessing})",
                finding.risk or "–",
            )
        )
    header = ("Attack", "Records", "Median PSNR (95 %)", "Highest", "Mean image",
              "Found (chance)", "Labels (guessing)", "Risk")  # fmt: skip
    _table(pdf, header, rows, (9, 3, 5, 3, 3, 3, 4, 3), size=7)
    if len(found) > MOST_ROWS:
        _text(pdf, f"{len(found) - MOST_ROWS} more rows are in result.json.", colour=MUTED)


def _pictures(pdf: FPDF, result: Result, folder: Path, images: Images) -> None:
    found = pictures.pairs(result)
    if images == "hide" or not found:
        return
    pdf.add_page()
    _heading(pdf, "Reconstructions")
    chosen = sorted(pictures.chosen(found, MOST_PICTURES), key=lambda pair: -pair.leak)
    _text(
        pdf,
        "The truth on the left, the guess on the right"
        + (", both blurred" if images == "blur" else "")
        + f". {len(chosen)} of {len(found)} pairs, the worst leak first.",
        colour=MUTED,
    )
    pdf.ln(2)
    columns, gap = 4, 4.0
    width = (pdf.epw - (columns - 1) * gap) / columns
    side, top = (width - 1) / 2, pdf.get_y()
    height = side + 9
    for i, pair in enumerate(chosen):
        x = pdf.l_margin + (i % columns) * (width + gap)
        if i % columns == 0 and i:
            top += height
            if top + height > pdf.h - pdf.b_margin:
                pdf.add_page()
                top = pdf.t_margin
        for k, name in enumerate((pair.truth, pair.guess)):
            if content := pictures.png(folder, name, images):
                pdf.image(content, x + k * (side + 1), top, side, side, keep_aspect_ratio=True)
        pdf.set_xy(x, top + side)
        score = wording.decibels(pair.leak) if "psnr" in pair.trial["scores"] else ""
        caption = f"{score} {pair.trial['attack']}, {pair.trial['defence']}"
        _text(pdf, wording.shortened(caption, 60), size=6, width=width)
    pdf.set_xy(pdf.l_margin, top + height)


def _control(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Positive control")
    if not result["control"]:
        _text(pdf, "None is part of this result: a low number in it is no evidence of safety.")
        return
    rows = [
        (
            entry["attack"],
            wording.decibels(entry["psnr"]),
            wording.decibels(entry["baseline"]),
            "broke it" if entry["passed"] else f"did not break it: {entry['reason'] or '–'}",
        )
        for entry in result["control"]
    ]
    _table(pdf, ("Attack", "PSNR on the twin", "Mean image", "Control"), rows, (3, 2, 2, 5))


def _why(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Why")
    if explanation := result["explanation"]:
        _text(pdf, explanation["sentence"])
        rows = [
            (
                rung["factor"],
                rung["label"],
                wording.decibels(rung["median"]),
                wording.change(rung["change"]),
            )
            for rung in explanation["rungs"]
        ]
        _table(pdf, ("Factor put back", "", "Median PSNR", "Change"), rows, (2, 5, 2, 2))
    else:
        _text(pdf, "The ladder that explains a result was not run.")
    if result["sensitivity"]:
        _text(pdf, f"Noise-to-gradient sensitivity: {result['sensitivity']['words']}")


def _defences(pdf: FPDF, result: Result) -> None:
    trades = contents.trade_off(result)
    if not trades:
        return
    _heading(pdf, "Defences")
    rows = [
        (
            f"{trade.defence} {trade.settings}",
            str(trade.round),
            trade.row["attack"],
            wording.decibels(trade.row["scores"]["psnr"]["median"]),
            trade.state,
            trade.accuracy or "not measured",
        )
        for trade in trades[:MOST_ROWS]
    ]
    header = ("Defence", "Round", "Strongest attack", "Median PSNR", "Pictures", "Accuracy")
    _table(pdf, header, rows, (4, 1, 3, 2, 2, 2))


def _coverage(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Attacks run and not run")
    rows = [
        (
            f"{line.attack} {line.settings}",
            *map(str, (line.done, line.not_applicable, line.failed, line.not_run)),
            "; ".join(line.reasons) or "–",
        )
        for line in contents.coverage(result)[:MOST_ROWS]
    ]
    header = ("Attack", "Done", "Not applicable", "Failed", "Not run", "Reason")
    _table(pdf, header, rows, (4, 1, 2, 1, 1, 5))


def _heading(pdf: FPDF, words: str) -> None:
    if pdf.get_y() > pdf.h - 45:  # not alone at the foot of a page
        pdf.add_page()
    pdf.ln(5)
    _text(pdf, words, size=12, bold=True, colour=ACCENT)
    pdf.ln(1)


def _text(
    pdf: FPDF,
    words: str,
    *,
    size: float = 9,
    bold: bool = False,
    colour: tuple[int, int, int] = INK,
    font: str = "sans",
    width: float = 0,
) -> None:
    pdf.set_font(font, "B" if bold else "", size)
    pdf.set_text_color(*colour)
    pdf.multi_cell(width, size * 0.5, _known(pdf, words), align="L", new_x="LMARGIN", new_y="NEXT")


def _list(pdf: FPDF, texts: Iterable[str]) -> None:
    for text in texts:
        _text(pdf, f"• {text}", size=8.5)
        pdf.ln(0.8)


def _facts(pdf: FPDF, rows: Sequence[tuple[str, str]]) -> None:
    _table(pdf, ("", ""), rows, (2, 7))


def _table(
    pdf: FPDF,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    size: float = 8,
) -> None:
    from fpdf.fonts import FontFace

    pdf.set_font("sans", "", size)
    pdf.set_text_color(*INK)
    pdf.set_draw_color(*LINE)
    with pdf.table(
        col_widths=tuple(widths),
        text_align="LEFT",
        v_align="TOP",
        line_height=size * 0.5,
        borders_layout="HORIZONTAL_LINES",
        padding=(0.8, 1.5, 0.8, 0),
        headings_style=FontFace(emphasis="BOLD", color=MUTED),
        first_row_as_headings=any(header),
    ) as drawn:
        for cells in [header, *rows] if any(header) else rows:
            row = drawn.row()
            for cell in cells:
                row.cell(_known(pdf, wording.shortened(cell, MOST_IN_CELL)))
    pdf.ln(1)


def _known(pdf: FPDF, text: str) -> str:
    """The text with a box for each character that the fonts lack."""
    known = pdf.fonts["sans"].cmap  # type: ignore[union-attr]
    return "".join(c if c in "\n" or ord(c) in known else "□" for c in wording.tidy(text))


def _yes(value: bool) -> str:
    return "yes" if value else "never"
