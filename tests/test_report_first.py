"""What every form of a report says alike: the first screen, reasons once, no invented number."""

from __future__ import annotations

import re
from html import unescape

import pytest
from rich.console import Console
from sample_result import failed, rederive, sample

from leakgauge.report import contents, first_screen, html, markdown, pdf, terminal, wording

FORMS = ["html", "markdown", "pdf", "terminal"]
REASON = "no layer tells its records apart. fc2: the ratio is {:.2f}; fc1: it is no linear layer"


@pytest.fixture
def told(monkeypatch):
    """The text of a result in a form, on one line, in the order in which it is read."""

    def text(form, result, folder, images="blur"):
        if form == "html":
            page = re.sub(r"<(style|script)>.*?</\1>", "", html.render(result, folder, images))
            return tidy(unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :])))
        if form == "markdown":
            return tidy(re.sub(r"\\(.)", r"\1", unescape(markdown.render(result, folder))))
        if form == "pdf":
            fpdf = pytest.importorskip("fpdf", reason="fpdf2 (the extra [pdf]) is not installed")
            laid = []
            for name in ("multi_cell", "cell"):
                original = getattr(fpdf.FPDF, name)

                def kept(self, w=None, h=None, text="", *args, original=original, **kwargs):
                    if not kwargs.get("dry_run"):
                        laid.append(text)
                    return original(self, w, h, text, *args, **kwargs)

                monkeypatch.setattr(fpdf.FPDF, name, kept)
            pdf.render(result, folder, images)
            return tidy(" ".join(dict.fromkeys(laid)))  # cells of tables are laid out twice
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(terminal.summary_table(result))
        for line in [*terminal.notes(result), *terminal.verdict(result)]:
            console.print(line)
        return tidy(console.export_text())

    return text


def tidy(text):
    return " ".join(text.replace("\xa0", " ").replace("`", " ").split())


def in_order(text, *parts):
    place = 0
    for part in parts:
        found = text.find(tidy(part), place)
        assert found >= 0, f"{part!r} is not after what it should follow, in {text[place:][:2000]}"
        place = found


@pytest.mark.parametrize("form", ["html", "markdown", "pdf"])
@pytest.mark.parametrize("outcome", ["leaks", "below the limit", "inconclusive", "failed"])
def test_the_first_screen_has_all_its_parts_in_order(tmp_path, told, form, outcome):
    made = sample(tmp_path, outcome=outcome)
    text = told(form, made, tmp_path)
    figures = first_screen.key_figures(made)
    pair = html.pictures.worst(made)
    worst = first_screen.worst_caption(pair.trial, pair.record, "blur").split(" Left")[0]
    in_order(
        text[text.index(contents.OUTCOMES[outcome]) :],
        contents.OUTCOMES[outcome],
        made["verdict"]["headline"],
        ("What was measured" if outcome == "failed" else "This verdict")
        + " rests on 12 different records",
        "Pictures recovered",
        figures[0].value,
        "The worst picture",
        worst,
        "What to do next",
        made["verdict"]["next"][0].split("--")[0],
        "The verdict on each defence",
        "no defence",
        "share = 0.99",
        "Findings",
    )
    for figure in figures:
        assert tidy(figure.note) in text
        assert tidy(figure.against) in text
    assert len(figures) == 5


@pytest.mark.parametrize("form", FORMS)
def test_inconclusive_names_its_remedy(tmp_path, told, form):
    made = sample(tmp_path, outcome="inconclusive")
    remedy = "until one of them breaks the twin"
    assert remedy in made["verdict"]["next"][0]
    assert remedy in told(form, made, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_median_that_was_not_measured_is_no_number(tmp_path, told, form):
    made = sample(tmp_path)
    for rung in made["explanation"]["rungs"]:
        rung["trials"] = ["nowhere"]
    text = told(form, rederive(made), tmp_path)
    assert not re.search(r"(?<!\d)0\.0 dB", text)
    assert "What protects cannot be said" in text


@pytest.mark.parametrize("form", FORMS)
def test_why_an_attack_does_not_apply_is_said_once_and_short(tmp_path, told, form):
    made = sample(tmp_path, outcome="inconclusive")
    ratio = iter(range(100))
    made["trials"] = [
        failed(trial, REASON.format(next(ratio) / 100), "") | {"status": "not applicable"}
        if trial["attack"] == "inverting-gradients"
        else trial
        for trial in made["trials"]
    ]
    text = told(form, rederive(made), tmp_path)
    short = "no layer tells its records apart"
    whole = text.count(REASON.format(0))  # in full, at most once
    assert whole == (form != "terminal")
    assert text.count(short) - whole == 1
    assert "the ratio is 0.01" not in text


def test_a_reason_is_cut_at_its_first_end():
    assert wording.brief("one. two; three") == "one"
    assert wording.brief("one; two. three") == "one"
    assert wording.brief("a ratio of 0.93 is low") == "a ratio of 0.93 is low"
    assert wording.brief("x" * 200) == "x" * 159 + "…"


@pytest.mark.parametrize("form", ["html", "markdown", "pdf"])
def test_decibels_beyond_fifty_are_not_counted_in_cards_and_captions(tmp_path, told, form):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",))
    text = told(form, made, tmp_path)
    first = text[: text.index("Findings")]
    assert "over 50 dB" in first
    assert not re.search(r"\b[5-9]\d\.\d dB", first.split("How to read")[0])


@pytest.mark.parametrize("form", ["html", "markdown", "pdf"])
def test_a_server_that_manipulates_is_called_so(tmp_path, told, form):
    made = sample(tmp_path)
    made["plan"]["threat"]["malicious"] = True
    made["threat"] |= {
        "malicious": True,
        "realism": "active",
        "holds": ["public", "records", "training"],
        "knowledge": made["threat"]["knowledge"] | {"public": "images that no client holds"},
    }
    for trial in made["trials"]:
        if trial["attack"] == "analytic":
            trial["realism"] = "active"
    text = told(form, rederive(made), tmp_path)
    assert "No attacker in this audit manipulates the model" not in text
    assert "The server in this audit manipulates the model that it sends" in text
    assert "A malicious server against client 0. Its numbers are active: the attacker" in text
    assert "holds only what the protocol shows" not in text.split("Realism ledger")[0]
    held = "" if form == "pdf" else r" \|? ?(● )?holds"  # a word laid out once is not seen again
    assert re.search(rf"public \|? ?images that no client holds{held}", text)


def test_the_worst_picture_is_never_an_oracle_s(tmp_path):
    made = sample(tmp_path, attacks=("inverting-gradients", "dlg"))
    for trial in made["trials"]:
        if trial["realism"] == "oracle" and trial["status"] == "done":
            trial["scores"]["psnr"] = [99.0] * trial["records"]
    pair = html.pictures.worst(rederive(made))
    assert pair.trial["attack"] == "inverting-gradients"
    assert pair.leak == max(
        value
        for trial in made["trials"]
        if trial["kind"] == "trial" and trial["realism"] != "oracle"
        for value in trial["scores"]["psnr"]
    )


def test_records_of_oracles_are_no_evidence(tmp_path):
    made = sample(tmp_path)
    assert first_screen.rests_on(made) == (
        "This verdict rests on 12 different records, attacked in 12 trials by 2 attacks."
    )
