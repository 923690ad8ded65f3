"""report.pdf: its words and pictures are in the file, whatever characters a name has."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from sample_result import HOSTILE, failed, measured_by, older, rederive, sample, unscored

from leakgauge.audit.results import Measurement
from leakgauge.errors import InputError, MissingExtra
from leakgauge.report import annex, charts, pdf, write

fpdf = pytest.importorskip("fpdf", reason="fpdf2 (the extra [pdf]) is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def result(folder):
    return sample(folder)


@pytest.fixture
def words(monkeypatch):
    """Every text that is laid out, as fpdf2 receives it."""
    seen: list[str] = []
    original = fpdf.FPDF.multi_cell

    def kept(self, w, h=None, text="", *args, **kwargs):
        seen.append(text)
        return original(self, w, h, text, *args, **kwargs)

    monkeypatch.setattr(fpdf.FPDF, "multi_cell", kept)
    return seen


def pictures(content: bytes) -> list[tuple[int, int]]:
    """Width and height of every picture in the file."""
    objects = re.findall(rb"<<(?:(?!>>\nstream).)*?/Subtype /Image.*?>>\nstream", content, re.S)
    return [
        (int(re.search(rb"/Width (\d+)", o)[1]), int(re.search(rb"/Height (\d+)", o)[1]))
        for o in objects
    ]


@pytest.fixture(scope="module")
def shown(result, folder):
    return pdf.render(result, folder, "show")


def test_it_is_a_pdf_with_the_verdict_and_the_tables(result, folder, shown, words):
    content = pdf.render(result, folder, "show")
    assert content == shown  # the same result gives the same bytes
    assert content.startswith(b"%PDF-1.")
    assert content.rstrip().endswith(b"%%EOF")
    text = "\n".join(words).replace("\xa0", " ")
    assert "Risk: very high" in text
    assert result.verdict.headline in text
    for row in result.summary:
        assert f"{row.measured.scores['psnr'].median:.1f} dB" in text
    assert "needs a linear layer → there is none" in text
    assert "the objective was still falling at the end" in text
    assert "Hannah Dröge" in text
    assert annex.checksum(folder) in text
    assert "batch_size = 8" in text


def test_charts_are_drawn_as_on_the_page(result, folder, monkeypatch):
    drawn = []
    original = pdf._draw

    def kept(page, mark, left, top, width):
        assert page.l_margin < left < left + width < page.w - page.r_margin
        assert page.t_margin < top < top + pdf.FIGURE < page.h - page.b_margin
        drawn.append(mark)
        return original(page, mark, left, top, width)

    monkeypatch.setattr(pdf, "_draw", kept)
    pdf.render(result, folder, "hide")
    made = [
        chart(result)
        for chart in (charts.defences, charts.distribution, charts.labels, charts.ladder)
    ]
    assert drawn == [mark for chart in made for line in chart.lines for mark in line.marks]
    assert len(drawn) > 100
    assert set(pdf.KINDS) - {"dot over"} <= {mark.kind for mark in drawn} <= set(pdf.KINDS)


def test_reasons_have_the_whole_width(result, folder, monkeypatch):
    widths = {}
    original = fpdf.FPDF.multi_cell

    def kept(self, w, h=None, text="", *args, **kwargs):
        widths[text] = w / self.epw
        return original(self, w, h, text, *args, **kwargs)

    monkeypatch.setattr(fpdf.FPDF, "multi_cell", kept)
    pdf.render(result, folder, "hide")
    reasons = {text: width for text, width in widths.items() if "10 min was spent (2" in text}
    assert len(reasons) == 1
    assert min(reasons.values()) > 0.95


def test_the_first_page_is_one_page_and_the_findings_begin_the_next(result, folder, monkeypatch):
    pages = {}
    original = pdf._text

    def kept(page, words, **kwargs):
        pages.setdefault(words, page.page)
        return original(page, words, **kwargs)

    monkeypatch.setattr(pdf, "_text", kept)
    pdf.render(result, folder, "hide")
    assert pages["What to do next"] == pages["The verdict on each defence"] == 1
    assert pages["Findings"] == 2


def test_a_first_page_with_many_kinds_of_leak_stays_readable(result, folder, monkeypatch):
    for i in range(4):
        metric = Measurement(f"m{i}", f"Metric {i}", "", "higher", 0.1)
        result = measured_by(result, metric, lambda psnr: psnr / 100)
    pages, cards = {}, {}
    heading, card = pdf._heading, pdf._card

    def headed(page, words, *rest):
        heading(page, words, *rest)
        pages[words] = page.page

    def laid(page, figure, top, width, dry):
        cards[figure.label] = (top, width)
        return card(page, figure, top, width, dry)

    monkeypatch.setattr(pdf, "_heading", headed)
    monkeypatch.setattr(pdf, "_card", laid)
    pdf.render(result, folder, "hide")
    assert len(cards) == 9
    assert len({top for top, _ in cards.values()}) == 2  # in two rows
    assert min(width for _, width in cards.values()) > 25
    assert pages["Findings"] == 2  # what did not fit stands above it, not on a page of its own


def test_pictures_are_shown_blurred_or_left_out(result, folder, shown):
    assert len(pictures(shown)) == 2 * pdf.MOST_PICTURES  # the worst one is in the file once
    assert set(pictures(shown)) == {(16, 16)}
    assert set(pictures(pdf.render(result, folder))) == {(4, 4)}  # blur is the default
    assert pictures(pdf.render(result, folder, "hide")) == []


@pytest.mark.parametrize(
    "text",
    [" → ≥ – é č Ω “x” 日本 🙂 \u202e\x1b[31m", HOSTILE + "x" * 900],
    ids=["unicode", "long"],
)
def test_any_characters_are_laid_out(tmp_path, text, words):
    made = sample(tmp_path, seeds=1, records=1, attacks=("analytic",), pool=2, text=text)
    made = replace(made, trials=(*made.trials, failed(made.trials[0], text, text)))
    assert pdf.render(made, tmp_path).startswith(b"%PDF")
    laid = "".join(words)
    if "→" in text:
        assert "hospital → ≥ – é č Ω “x” □□ □ ��[31m" in laid
    assert not set(laid) & set("\x1b\u202e日🙂")


def test_results_of_any_state_are_printed(tmp_path, result, folder):
    assert pdf.render(older(result), folder, "hide").startswith(b"%PDF")
    made = sample(tmp_path, seeds=1, records=1)
    made = replace(made, trials=(), explanation=None, sensitivity=None, control=())
    made = replace(made, times=replace(made.times, finished=None))
    assert pdf.render(rederive(made), tmp_path).startswith(b"%PDF")


def test_guesses_whose_truth_nobody_knows_stand_alone(tmp_path, words):
    made = sample(tmp_path, seeds=1, attacks=("analytic",), defences=("none",), records=3)
    trials = (unscored(made.trials[0]), *made.trials[1:])
    content = pdf.render(rederive(replace(made, trials=trials)), tmp_path, "show")
    assert pictures(content) == [(16, 16)] * 3
    assert words.count("not scored analytic, no defence") == 3
    assert any("Each guess stands alone: nobody knows the truth" in text for text in words)


def test_long_tables_are_cut_and_say_so(tmp_path, words):
    made = sample(
        tmp_path, rounds=tuple(range(20)), defences=("none", "prune"), attacks=("analytic", "dlg"),
        seeds=1, records=1, pool=1,
    )  # fmt: skip
    pdf.render(made, tmp_path, "hide")
    assert "20 more rows are in result.json." in words


@pytest.mark.parametrize("package", ["fpdf", "matplotlib"])
def test_without_a_package_of_the_extra_the_remedy_is_said(result, folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'leakgauge\[pdf\]'"):
        pdf.render(result, folder)


def test_write_makes_it_when_asked(tmp_path):
    sample(tmp_path, seeds=1, records=1)
    assert write(tmp_path, "hide", with_pdf=True)[-1] == tmp_path / "report.pdf"
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")


def test_an_unknown_way_to_show_images_is_refused(result, folder):
    with pytest.raises(InputError, match="expected show, blur or hide"):
        pdf.render(result, folder, "some")
