"""The report on paper: the verdict on its first page, tables, pictures and charts.

Needs fpdf2 (`pip install 'leakgauge[pdf]'`), which is imported only when a PDF is made. The fonts
are the DejaVu that come with matplotlib: the fonts built into PDF know no "→", "≥" or "č". A
character they do not have either is printed as "□".
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from leakgauge.audit.advice import defended
from leakgauge.audit.results import Result, Tradeoff
from leakgauge.config import optional
from leakgauge.report import (
    annex,
    charts,
    contents,
    figures,
    first_screen,
    pictures,
    protection,
    scatter,
    wording,
)
from leakgauge.report.charts import Chart
from leakgauge.report.contents import Images
from leakgauge.report.figures import Mark

if TYPE_CHECKING:
    from fpdf import FPDF

Colour: TypeAlias = tuple[int, int, int]
INK, MUTED, LINE, ACCENT = (27, 36, 48), (90, 102, 116), (205, 210, 216), (0, 114, 178)
PANEL, MARK, LIMIT = (238, 243, 247), (179, 71, 0), (192, 74, 0)
GREEN, AMBER = (0, 120, 90), (138, 90, 0)
TONES: dict[str, Colour] = {
    "Leaks": (192, 74, 0),
    "Below the limit": (0, 120, 90),
    "Inconclusive": (138, 90, 0),
    "Failed": (140, 23, 70),
    contents.NO_VERDICT: (138, 90, 0),
}
MOST_ROWS = 60
MOST_LINES = 24  # of one chart
FIGURE = 7.5  # mm: the height of one figure
MOST_PICTURES = 32
MOST_IN_CELL = 1000  # characters: a row must fit on a page

DEFENCES = "Each defence against the strongest attack that the verdict may use."
UNKNOWN = " What it costs in accuracy was not measured."
DISTRIBUTIONS = "PSNR of every record: the spread over records and seeds is the finding."
LABELS = "The share of the batch's labels that an attack named, beside what guessing reaches."


def render(result: Result, folder: Path, images: Images = "blur") -> bytes:
    """The PDF for a result whose result.json and pictures are in `folder`."""
    contents.check_images(images)
    pdf = _document(result)
    _first_page(pdf, result, folder, images)
    if pdf.page == 1:
        pdf.add_page()
    if result.tradeoff:
        _tradeoff(pdf, result, result.tradeoff)
    _findings(pdf, result)
    _sides(pdf, result)
    _pictures(pdf, result, folder, images)
    for title, chart, words in (
        ("Defences", charts.defences(result), DEFENCES + ("" if result.tradeoff else UNKNOWN)),
        ("Distributions", charts.distribution(result), DISTRIBUTIONS),
        ("Labels", charts.labels(result), LABELS),
    ):
        if chart.lines:
            _heading(pdf, title)
            _text(pdf, words, size=8, colour=MUTED)
            _plot(pdf, chart)
    if promises := contents.privacy(result):
        _heading(pdf, "Differential privacy")
        said = [(one.defence, one.epsilon, one.words) for one in promises]
        _table(pdf, ("Defence", "Epsilon over all rounds", "In words"), said, (3, 2, 9))
    _why(pdf, result)
    _control(pdf, result)
    _heading(pdf, "Threat model")
    _text(pdf, contents.threat_sentence(result))
    if known := contents.knowledge(result):
        held = [(k.item, k.words, "holds" if k.held else "does not hold") for k in known]
        _table(pdf, ("Knowledge", "What it is", "Attacker"), held, (2, 6, 2))
    _heading(pdf, "Scope")
    _table(pdf, ("", ""), contents.scope(result), (2, 7))
    _coverage(pdf, result)
    _heading(pdf, "Limits")
    _list(pdf, contents.limits(result, images))
    _list(pdf, protection.limits(result.tradeoff) if result.tradeoff else [])
    _heading(pdf, "Realism ledger")
    yes = {True: "yes", False: "never"}
    ledger = contents.ledger(result)
    rows = [(x.realism, x.meaning, str(x.rows), x.highest, yes[x.counts]) for x in ledger]
    header = ("Tag", "Meaning", "Rows", "Highest median", "In the verdict")
    _table(pdf, header, rows, (2, 7, 1, 2, 2))
    _heading(pdf, "References")
    _list(pdf, [f"{paper.line()} {paper.link}" for paper in result.references])
    _heading(pdf, "Annex")
    _table(pdf, ("", ""), annex.annex(result, folder), (2, 7))
    _text(pdf, annex.plan_text(result.plan), font="mono", size=7)
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
    pdf.c_margin = 0  # words begin where boxes and pictures do
    pdf.set_auto_page_break(True, 16)
    # The same result gives the same bytes: the date is that of the audit, not of the printing.
    pdf.set_creation_date(_date(result.times.finished))
    pdf.set_title(_known(pdf, f"{result.name}: {first_screen.outcome(result)}"))
    pdf.set_creator(f"LeakGauge {wording.tidy(result.leakgauge)}")
    pdf.add_page()
    return pdf


def _date(finished: str | None) -> datetime.datetime:
    try:
        date = datetime.datetime.fromisoformat(finished or "")
    except ValueError:
        date = datetime.datetime(1970, 1, 1)
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


def _first_page(pdf: FPDF, result: Result, folder: Path, images: Images) -> None:
    """All that an officer needs: the same parts as on the page, in the same order."""
    word = first_screen.outcome(result)
    _text(pdf, f"LeakGauge audit · {result.name}", size=8, colour=MUTED)
    pdf.ln(3)
    level = first_screen.risk_level(result)
    _badge(pdf, word, 11)
    _text(pdf, f"   Risk: {level}" if level else "", size=10, colour=MUTED)
    pdf.ln(4)
    _text(pdf, first_screen.headline(result), size=15, bold=True)
    pdf.ln(1.5)
    if rests := first_screen.rests_on(result):
        _text(pdf, rests, colour=MUTED)
    pdf.ln(3)
    _cards(pdf, first_screen.key_figures(result))
    for said, change in first_screen.exposed(result):
        _text(pdf, f"{said} {change}", size=8)
        pdf.ln(2)
    _worst_and_next(pdf, result, folder, images)
    if defences := first_screen.defence_verdicts(result):
        _heading(pdf, "The verdict on each defence")
        rows = []
        for line in defences:
            found = "\n".join(f"{kind}: {state}. {words}" for kind, words, state in line.kinds)
            name = f"{line.defence} {line.settings}".rstrip()
            rows.append((name, line.outcome, found or "nothing was measured"))
        header = ("Defence", "Verdict", "What was found")
        _table(pdf, header, rows, (3, 2, 9), tones={1: TONES})
    levels = "; ".join(f"{level}, {meaning}" for level, meaning in contents.RISKS.items())
    pdf.ln(2)
    _text(
        pdf,
        "PSNR compares a reconstruction with the true picture, pixel by pixel, in decibels: the "
        f"higher, the more has leaked. Above 50 dB the two look the same. Risk: {levels}.",
        size=7.5,
        colour=MUTED,
    )


def _badge(pdf: FPDF, word: str, size: float) -> None:
    """The outcome in its colour; what follows stands beside it."""
    pdf.set_font("sans", "B", size)
    width, height, tone = pdf.get_string_width(word) + 6, size * 0.6, TONES[word]
    pdf.set_draw_color(*tone)
    pdf.set_fill_color(*_soft(tone))
    x, y = pdf.get_x(), pdf.get_y()
    pdf.rect(x, y, width, height, style="DF", round_corners=True, corner_radius=height / 2)
    pdf.set_text_color(*tone)
    pdf.cell(width, height, word, align="C")


def _soft(tone: Colour, share: float = 0.12) -> Colour:
    """A colour on white, at this share."""
    red, green, blue = (round(255 - share * (255 - part)) for part in tone)
    return red, green, blue


def _cards(pdf: FPDF, figures_: Sequence[first_screen.Figure]) -> None:
    """The key figures side by side, at most six."""
    if not figures_:
        return
    figures_, rest = figures_[:6], figures_[6:]
    gap, top = 2.5, pdf.get_y()
    width = (pdf.epw - gap * (len(figures_) - 1)) / len(figures_)
    # The boxes are as high as the longest words need.
    tallest = max(_card(pdf, figure, top, width, dry=True) for figure in figures_)
    for i, figure in enumerate(figures_):
        pdf.set_xy(pdf.l_margin + i * (width + gap), top)
        pdf.set_fill_color(*PANEL)
        pdf.rect(pdf.get_x(), top, width, tallest, style="F", round_corners=True, corner_radius=1.8)
        _card(pdf, figure, top, width, dry=False)
    pdf.set_xy(pdf.l_margin, top + tallest + (gap if rest else 0))
    _cards(pdf, rest)


def _card(pdf: FPDF, figure: first_screen.Figure, top: float, width: float, dry: bool) -> float:
    """One key figure; its height."""
    x, y = pdf.get_x(), top + 2.2
    for words, size, bold, colour in (
        (figure.label, 7, True, MUTED),
        (figure.value, 11.5, True, INK),
        (figure.note, 7.5, False, INK),
        (figure.against, 7, False, MUTED),
    ):
        pdf.set_xy(x + 2, y)
        y += _lines(pdf, words, width - 4, size, bold, colour, dry=dry) + 0.9
    pdf.set_xy(x, top)
    return y - top + 1


def _lines(
    pdf: FPDF, words: str, width: float, size: float, bold: bool, colour: Colour, dry: bool
) -> float:
    """Lay out words in a column; the height they take. `dry` only measures."""
    pdf.set_font("sans", "B" if bold else "", size)
    pdf.set_text_color(*colour)
    step = size * 0.47
    text = _known(pdf, words)
    height = pdf.multi_cell(width, step, text, align="L", dry_run=dry, output="HEIGHT")
    return cast(float, height)


def _worst_and_next(pdf: FPDF, result: Result, folder: Path, images: Images) -> None:
    """The worst picture at the left, what to do next at the right."""
    pair, steps = pictures.worst(result), first_screen.next_steps(result)
    top = pdf.get_y() + 5
    left = 76.0 if pair else 0.0
    lowest = top
    if pair:
        pdf.set_xy(pdf.l_margin, top)
        _text(pdf, "The worst picture", size=10.5, bold=True, colour=ACCENT, width=left)
        number = max(2, len(pair.tiles))
        y, side = pdf.get_y() + 1.5, (left - 3 - number) / number
        shown = images != "hide" and _pair(pdf, pair, folder, images, pdf.l_margin, y, side)
        pdf.set_xy(pdf.l_margin, (shown or y - 1.5) + 1.5)
        caption = first_screen.worst_caption(pair, images)
        _text(pdf, caption, size=7.5, colour=MUTED, width=left - 4)
        lowest = pdf.get_y()
    if steps:
        old, x = pdf.l_margin, pdf.l_margin + left
        pdf.set_left_margin(x)
        pdf.set_xy(x, top)
        _text(pdf, "What to do next", size=10.5, bold=True, colour=ACCENT)
        pdf.ln(1.5)
        for i, step in enumerate(steps, 1):
            _text(pdf, f"{i}.  {step.replace('`', '')}", size=9.5)
            pdf.ln(1.2)
        pdf.set_left_margin(old)
        lowest = max(lowest, pdf.get_y()) if pdf.page == 1 else pdf.get_y()
    pdf.set_xy(pdf.l_margin, lowest)


def _tradeoff(pdf: FPDF, result: Result, given: Tradeoff) -> None:
    """The figure, what its numbers stand for, the table and the recommendation."""
    scale = FIGURE / figures.HEIGHT
    _heading(pdf, protection.TITLE, scale * scatter.HEIGHT + 20)
    _text(pdf, protection.lead(given), size=8, colour=MUTED)
    lines = protection.priced(result, given)
    if drawn := protection.figure(given):
        pdf.ln(2)
        _text(pdf, protection.UPWARDS, size=7.5, colour=MUTED)
        top = pdf.get_y()
        for mark in drawn:
            _draw(pdf, mark, pdf.l_margin, top, pdf.epw)
        pdf.set_xy(pdf.l_margin, top + scale * scatter.HEIGHT)
        _text(pdf, protection.RIGHTWARDS, size=7.5, colour=MUTED)
        signs = {"meets": "●", "leaks": "○", "open": "◌", "chosen": "◎", "cross": "┼",
                 "front": "─", "limit": "┆"}  # fmt: skip
        keys = "    ".join(f"{signs[kind]} {words}" for kind, words in protection.keys(given))
        _text(pdf, keys, size=7, colour=MUTED)
        pdf.ln(2)
    rows = [
        (
            str(line.number),
            " ".join(filter(None, (line.setting, line.options, line.spent)))
            + (f"\n{line.mark}" if line.mark else ""),
            f"{line.accuracy}\n{line.accuracy_interval}",
            f"{line.cost}\n{line.cost_interval}",
            f"{line.leak}\n{line.leak_interval}",
            line.worst,
            line.outcome,
        )
        for line in lines
    ]
    header = ("", "Setting", "Accuracy", "Cost", "Leak", "What leaks most", "Verdict")
    _table(pdf, header, rows, (1, 6, 4, 4, 4, 7, 4), size=7, tones={6: TONES})
    rounds, means = protection.on_the_way(result, given)
    if means:
        _text(pdf, "Accuracy on the way", size=8, colour=MUTED)
        _table(pdf, ("Setting", *rounds), means, (3, *[2] * len(rounds)), size=7)
    _text(pdf, given.sentence.replace("`", ""))


def _findings(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Findings")
    found = contents.findings(result)
    rows: list[Sequence[str]] = []
    for finding in found[:MOST_ROWS]:
        where = f"{defended(finding.defence)}, round {finding.round}"
        if finding.state:
            rows += [(f"{finding.attack}, {where}", *["–"] * 7), (finding.state,)]
            continue
        rows.append(
            (
                f"{finding.attack}, {where} ({finding.realism})",
                finding.records,
                f"{finding.median}\n{finding.interval}",
                finding.worst,
                finding.base,
                f"{finding.found}\n({finding.chance})",
                f"{finding.labels}\n({finding.guessing})",
                finding.risk or "–",
            )
        )
        rows += [(words,) for words in (finding.knows, finding.further) if words]
        if finding.caveats:
            rows.append(("⚠ " + " ⚠ ".join(finding.caveats),))
    header = ("Attack", "Records", "Median PSNR (95 %)", "Highest", "Mean picture",
              "Recognised (chance)", "Labels (guessing)", "Risk")  # fmt: skip
    _table(pdf, header, rows, (9, 4, 5, 4, 4, 5, 5, 4), size=7)
    if len(found) > MOST_ROWS:
        _text(pdf, f"{len(found) - MOST_ROWS} more rows are in result.json.", colour=MUTED)
    for note in filter(None, (contents.directions(result), contents.inapplicable(result))):
        _text(pdf, note, size=8, colour=MUTED)
    _list(pdf, first_screen.evidence(result))


def _sides(pdf: FPDF, result: Result) -> None:
    """What a restorer or a prior had a part in, beside what they show without the update."""
    if not (lines := contents.sides(result)):
        return
    _heading(pdf, "Restored and generated pictures")
    _text(pdf, f"⚠ {contents.UNREAD}", size=8)
    pdf.ln(1)
    rows = [
        (
            f"{line.attack}, {defended(line.defence)}, round {line.round}",
            *("\n".join(cell) for cell in (line.raw, line.shown, line.unread)),
        )
        for line in lines[:MOST_ROWS]
    ]
    header = ("Attack", "Raw guess", "Restored or generated", "No update")
    _table(pdf, header, rows, (6, 3, 3, 3), size=7)


def _pictures(pdf: FPDF, result: Result, folder: Path, images: Images) -> None:
    found = pictures.pairs(result)
    if images == "hide" or not found:
        return
    columns, gap = 4, 4.0
    width = (pdf.epw - (columns - 1) * gap) / columns
    side = (width - 1) / 2
    several = any(pair.invented for pair in found)
    height = side + (22 if several else 9)
    _heading(pdf, "Reconstructions", height)
    chosen = sorted(pictures.chosen(found, MOST_PICTURES), key=pictures.Pair.order)
    known = sum(pair.truth is not None for pair in chosen)
    both, it = (", both blurred", ", blurred") if images == "blur" else ("", "")
    both = both.replace("both", "all") if several else both
    named = "; pictures in which a prior had a part have their names" if several else ""
    words = f"The truth on the left, the guess on the right{named}{both}. " if known else ""
    if known < len(chosen):
        who = "Some guesses stand" if known else "Each guess stands"
        words += f"{who} alone{it}: {contents.NOT_SCORED}. "
    words += f"{len(chosen)} of {len(found)}" + (" pairs, the worst leak first." if known else ".")
    _text(pdf, words, colour=MUTED)
    pdf.ln(2)
    top = pdf.get_y()
    place = 0
    for pair in chosen:
        wide = 2 if len(pair.tiles) > 2 else 1
        if place + wide > columns:
            place = 0
            top += height
            if top + height > pdf.h - pdf.b_margin:
                pdf.add_page()
                top = pdf.t_margin
        x = pdf.l_margin + place * (width + gap)
        place += wide
        lowest = _pair(pdf, pair, folder, images, x, top, side) or top + side
        pdf.set_xy(x, lowest)
        score = wording.decibels(pair.truth.psnr) if pair.truth else "not scored"
        caption = f"{score} {pair.trial.attack}, {defended(pair.trial.defence)}"
        caption = wording.shortened(caption, 60)
        if pair.invented:
            caption += "\n⚠ can show detail that no record had"
        _text(pdf, caption, size=6, width=wide * width)
    pdf.set_xy(pdf.l_margin, top + height)


def _pair(
    pdf: FPDF, pair: pictures.Pair, folder: Path, images: Images, x: float, y: float, side: float
) -> float | None:
    """The truth at the left, the guess at the right, among others their names and numbers; where
    that ends, if there was anything to show."""
    shown = pictures.load(pair, folder, images)
    lowest = y + side
    for k, (tile, content) in enumerate(zip(pair.tiles, shown.pictures, strict=True)):
        left = x + k * (side + 1)
        if content:
            pdf.image(content, left, y, side, side, keep_aspect_ratio=True)
        if pair.invented:
            pdf.set_xy(left, y + side + 0.5)
            words = "\n".join((tile.words, *tile.numbers))
            height = _lines(pdf, words, side, 5.5, False, MUTED, dry=False)
            lowest = max(lowest, y + side + 0.5 + height)
    return lowest if any(shown.pictures) else None


def _control(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Positive control")
    if not result.control:
        _text(pdf, "None is part of this result: a low number in it is no evidence of safety.")
        return
    rows = [(line.attack, line.psnr, line.base, line.words) for line in contents.control(result)]
    _table(pdf, ("Attack", "PSNR on the twin", "Mean picture", "Control"), rows, (3, 2, 2, 6))


def _why(pdf: FPDF, result: Result) -> None:
    _heading(pdf, "Why")
    if explanation := result.explanation:
        _text(pdf, explanation.sentence)
        pdf.ln(1)
        _text(
            pdf,
            "From the known-weak twin, the factors of this federation are put back one by one "
            f"({explanation.attack}):",
            size=8,
            colour=MUTED,
        )
        _plot(pdf, charts.ladder(result))
    else:
        _text(pdf, "The ladder that explains a result was not run.")
    if result.sensitivity:
        _text(pdf, f"Noise-to-gradient sensitivity: {result.sensitivity.words}")


def _coverage(pdf: FPDF, result: Result) -> None:
    """Counts in columns; settings and reasons below them, over the whole width."""
    _heading(pdf, "Attacks run and not run")
    rows: list[Sequence[str]] = []
    for line in contents.coverage(result)[:MOST_ROWS]:
        counts = map(str, (line.done, line.not_applicable, line.failed, line.not_run))
        rows.append((line.attack, *counts))
        words = [line.settings] if line.settings else []
        if words or line.reasons:
            rows.append(("\n".join([*words, *line.reasons]),))
    _table(pdf, ("Attack", "Done", "Not applicable", "Failed", "Not run"), rows, (6, 2, 2, 2, 2))
    for attack, reason in contents.whole_reasons(result):
        _text(pdf, f"{attack}, in full: {reason}", size=7.5, colour=MUTED)
        pdf.ln(0.8)


# Charts

KINDS: dict[str, tuple[Colour, float, float]] = {  # colour, opacity, width of the line in mm
    "grid": (LINE, 1.0, 0.15),
    "whisker": (ACCENT, 0.5, 0.25),
    "box": (ACCENT, 0.16, 0.0),
    "dot": (ACCENT, 0.55, 0.0),
    "dot over": (ACCENT, 1.0, 0.0),
    "median": (INK, 1.0, 0.7),
    "bar": (ACCENT, 0.75, 0.0),
    "interval": (INK, 1.0, 0.5),
    "base": (MARK, 1.0, 0.4),
    "limit": (LIMIT, 1.0, 0.35),
    "mark": (MARK, 1.0, 0.6),
}
"""How each kind of mark looks on paper, after page.css."""

OF_SCATTER: dict[str, tuple[Colour, float, float]] = {
    "allowed": (GREEN, 0.09, 0.0),
    "cross": (INK, 0.45, 0.2),
    "front": (ACCENT, 1.0, 0.5),
    "lead": (MUTED, 0.7, 0.2),
    "chosen": (GREEN, 1.0, 0.6),
    "bubble meets": (GREEN, 1.0, 0.3),
    "bubble leaks": (LIMIT, 1.0, 0.4),
    "bubble open": (AMBER, 1.0, 0.4),
    "scale middle": (MUTED, 1.0, 0.0),
    "scale end": (MUTED, 1.0, 0.0),
    "inside middle": ((255, 255, 255), 1.0, 0.0),
    "outside middle": (INK, 1.0, 0.0),
}
"""The same for what the figure of a trade-off has beside them."""


def _plot(pdf: FPDF, chart: Chart) -> None:
    """The figures of a chart below each other, with their words at both sides."""
    names, numbers = 0.34 * pdf.epw, 0.2 * pdf.epw
    x, width = pdf.l_margin + names, pdf.epw - names - numbers - 2
    pdf.ln(1)
    for i, line in enumerate(chart.lines[:MOST_LINES]):
        words = f"{line.name}  {line.about}" + (f" ({line.realism})" if line.realism else "")
        words = wording.shortened(words, 160)
        texts = [part for part in (line.number, line.note) if part]
        height = max(
            FIGURE, _lines(pdf, words, names - 3, 7.5, False, INK, dry=True),
            sum(_lines(pdf, part, numbers, 7.5, False, INK, dry=True) for part in texts),
        ) + 2  # fmt: skip
        if pdf.get_y() + height > pdf.h - pdf.b_margin - 8:  # room for the scale as well
            if i:
                _scale(pdf, chart, x, width)
            pdf.add_page()
        top = pdf.get_y()
        pdf.set_xy(pdf.l_margin, top + 1)
        _lines(pdf, words, names - 3, 7.5, False, INK, dry=False)
        y = top + 1
        for part, colour in zip(texts, (INK, MUTED), strict=False):
            pdf.set_xy(x + width + 2, y)
            y += _lines(pdf, part, numbers, 7.5, colour == INK, colour, dry=False)
        for mark in line.marks:
            _draw(pdf, mark, x, top + (height - FIGURE) / 2, width)
        pdf.set_xy(pdf.l_margin, top + height)
        pdf.set_draw_color(*LINE)
        pdf.set_line_width(0.1)
        pdf.line(pdf.l_margin, top + height, pdf.l_margin + pdf.epw, top + height)
    _scale(pdf, chart, x, width)
    if left := chart.left_out + max(0, len(chart.lines) - MOST_LINES):
        _text(pdf, f"{left} more rows are not drawn.", size=7.5, colour=MUTED)
    marks = {"dot": "●", "box": "▭", "diamond": "◇", "limit": "┆", "bar": "▬", "mark": "|"}
    keys = "    ".join(f"{marks[kind]} {words}" for kind, words in chart.keys)
    _text(pdf, keys, size=7, colour=MUTED)
    pdf.ln(1)


def _scale(pdf: FPDF, chart: Chart, x: float, width: float) -> None:
    top = pdf.get_y() + 0.6
    pdf.set_font("sans", "", 7)
    pdf.set_text_color(*MUTED)
    pdf.set_xy(pdf.l_margin, top)
    pdf.cell(x - pdf.l_margin, 3.5, chart.label)
    for tick in figures.ticks(chart.axis):
        long = pdf.get_string_width(tick.text) + 2 * pdf.c_margin
        shift = {"start": pdf.c_margin, "middle": long / 2, "end": long - pdf.c_margin}[tick.anchor]
        pdf.set_xy(x + tick.x * width - shift, top)
        pdf.cell(long, 3.5, tick.text)
    pdf.set_xy(x + width + 2, top)
    pdf.cell(0, 3.5, chart.number)
    pdf.set_xy(pdf.l_margin, top + 4.5)


def _draw(pdf: FPDF, mark: Mark, left: float, top: float, width: float) -> None:
    """One mark in the figure whose upper left corner is given."""
    colour, opacity, line = (KINDS | OF_SCATTER)[mark.kind]
    scale = FIGURE / figures.HEIGHT
    x, y = left + mark.x * width, top + mark.y * scale
    x2, y2 = left + mark.x2 * width, top + mark.y2 * scale
    pdf.set_draw_color(*_soft(colour, opacity))
    pdf.set_fill_color(*_soft(colour, opacity))
    pdf.set_line_width(line or 0.2)
    match mark.shape:
        case "line":
            if mark.kind == "limit":
                pdf.set_dash_pattern(dash=0.9, gap=0.7)
            pdf.line(x, y, x2, y2)
            pdf.set_dash_pattern()
        case "rect":
            pdf.rect(x, y, max(x2 - x, 0.1), y2 - y, style="F")
        case "dot":
            pdf.ellipse(x - 0.5, y - 0.5, 1.0, 1.0, style="F")
        case "bubble" | "ring":
            radius = scale * (9 if mark.shape == "bubble" else 14)
            if mark.kind != "bubble meets":
                pdf.set_fill_color(255, 255, 255)
            box = x - radius, y - radius, 2 * radius, 2 * radius
            pdf.ellipse(*box, style="DF" if mark.shape == "bubble" else "D")
        case "text":
            pdf.set_font("sans", "B" if "side" in mark.kind else "", 7)
            pdf.set_text_color(*colour)
            long = pdf.get_string_width(mark.text)
            pdf.text(x - long * (0.5 if mark.kind.endswith("middle") else 1), y, mark.text)
        case "diamond":
            pdf.set_fill_color(255, 255, 255)
            pdf.polygon([(x, y - 1.4), (x + 1.2, y), (x, y + 1.4), (x - 1.2, y)], style="DF")


# Words and tables


def _heading(pdf: FPDF, words: str, below: float = 12) -> None:
    if pdf.get_y() + 20 + below > pdf.h - pdf.b_margin:  # not alone at the foot of a page
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


def _table(
    pdf: FPDF,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    size: float = 8,
    tones: Mapping[int, Mapping[str, Colour]] | None = None,
) -> None:
    """A row of one cell belongs to the row above it, and takes the whole width. `tones` colours
    the words of a column."""
    from fpdf.enums import TableBordersLayout
    from fpdf.fonts import FontFace

    pdf.set_font("sans", "", size)
    pdf.set_text_color(*INK)
    pdf.set_draw_color(*LINE)
    pdf.set_fill_color(0)  # the colour that leaves cells unfilled
    pdf.set_line_width(0.2)
    with pdf.table(
        col_widths=tuple(widths),
        text_align="LEFT",
        v_align="TOP",
        line_height=size * 0.5,
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        padding=(0.8, 1.5, 0.8, 0),
        headings_style=FontFace(emphasis="BOLD", color=MUTED),
        first_row_as_headings=any(header),
    ) as drawn:
        for cells in [header, *rows] if any(header) else rows:
            row = drawn.row()
            wide = len(widths) if len(cells) == 1 < len(widths) else 1
            for i, cell in enumerate(cells):
                tone = (tones or {}).get(i, {}).get(cell, MUTED if wide > 1 else None)
                row.cell(
                    _known(pdf, wording.shortened(cell, MOST_IN_CELL)),
                    colspan=wide,
                    style=FontFace(color=tone, emphasis=None if wide > 1 else "BOLD")
                    if tone
                    else None,
                )
    pdf.ln(1)


def _known(pdf: FPDF, text: str) -> str:
    """The text with a box for each character that the fonts lack."""
    known = pdf.fonts["sans"].cmap  # type: ignore[union-attr]
    return "".join(c if c in "\n" or ord(c) in known else "□" for c in wording.tidy(text))
