"""report.md: all numbers, and no markup but ours, as another library (markdown-it) reads it."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from sample_result import HOSTILE, older, sample

from leakgauge.report import markdown

MARKDOWN = MarkdownIt("commonmark").enable("table").enable("strikethrough")


@pytest.fixture
def result(tmp_path):
    return sample(tmp_path)


def test_it_says_what_the_audit_found(result, tmp_path):
    text = markdown.render(result, tmp_path).replace("\xa0", " ")
    assert text.startswith("# hospital: Leaks\n")
    assert result.verdict.headline in text
    assert "Risk: **very high**" in text
    for row in result.summary:
        median = f"{row.measured.scores['psnr'].median:.1f} dB [1]"
        assert f"| 0 | {row.defence} | {row.attack} | 12 | {median} |" in text
    assert "[1] the objective was still falling at the end" in text
    assert "[2]" not in text  # the same caveat has the same mark
    assert text.count("needs a linear layer → there is none") == 1
    assert "| dlg | – | – | does not apply |" in text
    assert "not run: the budget of 10 min was spent (2 times)" in text
    assert "−17.0 dB" in text
    assert "| defence prune share = 0.99 | analytic |" in text
    assert "https://doi.org/10.1109/TIFS.2017.2787987" in text
    assert "result.json, sha256" in text
    assert "sha256" not in markdown.render(result).split("Plan, sha256")[0]


def test_every_table_is_whole(result):
    html = MARKDOWN.render(markdown.render(result))
    assert html.count("<table>") == 11
    for row in re.findall(r"<tr>(.*?)</tr>", html, re.S):
        assert row.count("<td") + row.count("<th") >= 2
    assert "|---" not in html


def test_an_older_result_has_a_report(result):
    text = markdown.render(older(result))
    assert text.startswith("# hospital: No verdict\n")
    assert "No positive control is part of this result" in text


def test_hostile_text_stays_text(tmp_path):
    result = sample(tmp_path, text=HOSTILE, seeds=1)
    plain = sample(tmp_path / "plain", seeds=1)
    html, ours = (MARKDOWN.render(markdown.render(r)) for r in (result, plain))
    assert set(re.findall(r"<[^>]+>", html)) <= set(re.findall(r"<[^>]+>", ours))
    for tag in ("<table>", "<tr>", "<td>", "<h2>"):
        assert html.count(tag) == ours.count(tag)
    assert unescape(html).count(HOSTILE) > 40


@given(st.text("ab<>&\"'`*_[]()#+-.!|~$\\/:@ \n1=w{}^%é"))
def test_any_text_comes_out_as_it_went_in(text):
    shown = " ".join(text.split())
    rendered = MARKDOWN.render(f"| a |\n|---|\n| {markdown.escape(text)} |\n")
    cell = re.search(r"<td>(.*?)</td>", rendered, re.S)
    assert cell, rendered
    assert unescape(cell[1]) == shown


@given(st.text("ab<>&\"'`*_[]()#+-.!|~$\\/:@ \n1=w)"))
def test_a_line_of_a_list_stays_one_line(text):
    rendered = MARKDOWN.render(f"- {markdown.escape(text)}\n")
    assert re.fullmatch(r"<ul>\n<li>[^<>]*</li>\n</ul>\n", rendered), rendered


def test_addresses_are_not_made_links():
    for address in ("http://e.example", "www.e.example", "a@e.example"):
        assert address not in markdown.escape(address)
        assert f"<p>{address}</p>" in MARKDOWN.render(markdown.escape(address))
