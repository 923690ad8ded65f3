"""What every form of a report says alike: the first screen, reasons once, no invented number."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace
from html import unescape

import pytest
from PIL import Image
from rich.console import Console
from sample_result import failed, invented, measured_by, rederive, rescored, sample, unscored
from test_report_diff import printed
from test_schema import REAL, schema_1, schema_2

from leakgauge.accounting import Spent
from leakgauge.attacks import Exposure, LayerExposure
from leakgauge.audit import advice, schema
from leakgauge.audit.results import Guarantee, Measurement
from leakgauge.audit.verdict import measurements
from leakgauge.metrics import METRICS
from leakgauge.report import (
    charts,
    contents,
    diff,
    figures,
    first_screen,
    html,
    markdown,
    pdf,
    terminal,
    wording,
)

FORMS = ["html", "markdown", "pdf", "terminal"]
FOG = Measurement("fog", "Fog [m] <b>|*", "km", "lower", limit=0.7)
"""A metric that nobody but these tests knows, of a name that would like to be markup."""
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
    worst = first_screen.worst_caption(pair, "blur").split(" Left")[0]
    in_order(
        text[text.index(contents.OUTCOMES[outcome]) :],
        contents.OUTCOMES[outcome],
        made.verdict.headline,
        ("What was measured" if outcome == "failed" else "This verdict")
        + " rests on 12 different records",
        "Pictures recovered",
        figures[0].value,
        "Exposed before any attack: an update here holds 4 records, and layer4.0.conv2 can",
        "More than 31 records per update",
        "other attacks may still work.",
        "The worst picture",
        worst,
        "What to do next",
        made.verdict.next[0].split("--")[0],
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
    assert remedy in made.verdict.next[0]
    assert remedy in told(form, made, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_median_that_was_not_measured_is_no_number(tmp_path, told, form):
    made = sample(tmp_path)
    rungs = tuple(replace(rung, trials=("nowhere",)) for rung in made.explanation.rungs)
    made = replace(made, explanation=replace(made.explanation, rungs=rungs))
    text = told(form, rederive(made), tmp_path)
    assert not re.search(r"(?<!\d)0\.0 dB", text)
    assert "What protects cannot be said" in text


@pytest.mark.parametrize("form", FORMS)
def test_why_an_attack_does_not_apply_is_said_once_and_short(tmp_path, told, form):
    made = sample(tmp_path, outcome="inconclusive")
    ratio = iter(range(100))
    trials = tuple(
        replace(failed(trial, REASON.format(next(ratio) / 100), ""), status="not applicable")
        if trial.attack == "inverting-gradients"
        else trial
        for trial in made.trials
    )
    text = told(form, rederive(replace(made, trials=trials)), tmp_path)
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
    made = replace(
        made,
        plan=replace(made.plan, threat=replace(made.plan.threat, malicious=True)),
        threat=replace(
            made.threat,
            malicious=True,
            realism="active",
            holds=("public", "records", "training"),
            knowledge=made.threat.knowledge | {"public": "images that no client holds"},
        ),
        trials=tuple(
            replace(trial, realism="active") if trial.attack == "analytic" else trial
            for trial in made.trials
        ),
    )
    text = told(form, rederive(made), tmp_path)
    assert "No attacker in this audit manipulates the model" not in text
    assert "The server in this audit manipulates the model that it sends" in text
    assert "A malicious server against client 0. Its numbers are active: the attacker" in text
    assert "holds only what the protocol shows" not in text.split("Realism ledger")[0]
    held = "" if form == "pdf" else r" \|? ?(● )?holds"  # a word laid out once is not seen again
    assert re.search(rf"public \|? ?images that no client holds{held}", text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [schema_1, schema_2, copy.copy])
def test_files_of_older_versions_have_every_form(tmp_path, told, form, make):
    made = schema.check(make(json.loads(REAL.read_text(encoding="utf-8"))))
    text = told(form, made, tmp_path)
    assert tidy(first_screen.headline(made)) in text
    assert ("written before audits gave a verdict" in text) == (make is schema_1)
    for row, found in contents.measured(made):
        assert row.attack in text
        assert f"{found.scores['psnr'].median:.1f}" in text


def test_the_worst_picture_is_never_an_oracle_s(tmp_path):
    made = sample(tmp_path, attacks=("inverting-gradients", "dlg"))
    trials = tuple(
        rescored(trial, psnr=[99.0] * trial.score.records)
        if trial.realism == "oracle" and trial.score
        else trial
        for trial in made.trials
    )
    pair = html.pictures.worst(rederive(replace(made, trials=trials)))
    assert pair.trial.attack == "inverting-gradients"
    assert pair.truth.psnr == max(
        value
        for trial in made.trials
        if trial.kind == "trial" and trial.realism != "oracle"
        for value in trial.score.scores["psnr"]
    )


def test_records_of_oracles_are_no_evidence(tmp_path):
    made = sample(tmp_path)
    assert first_screen.rests_on(made) == (
        "This verdict rests on 12 different records, attacked in 12 trials by 2 attacks."
    )


# Metrics


@pytest.fixture
def foggy(tmp_path):
    made = sample(tmp_path, seeds=2, attacks=("analytic",))
    (lpips,) = measurements({"lpips": METRICS["lpips"]}, made.plan.audit.limit)
    made = measured_by(made, lpips, lambda psnr: 0.9 - psnr / 100)
    return measured_by(made, FOG, lambda psnr: 1 - psnr / 100)


@pytest.mark.parametrize("form", FORMS)
def test_every_metric_is_in_every_form_beside_its_mean_picture(tmp_path, told, form, foggy):
    text = told(form, foggy, tmp_path)
    for row in foggy.summary:
        for metric in foggy.metrics[1:]:
            median = wording.number(row.measured.scores[metric.name].median, metric)
            base = wording.number(row.measured.mean_image[metric.name], metric)
            assert tidy(f"{median} ({base})") in text
            if form != "terminal":  # there it is the head of a column
                assert tidy(f"{metric.label} {median} ({base})") in text
    assert "SSIM: the higher, the closer; LPIPS, Fog [m] <b>|*: the lower, the closer." in text
    assert "fog" not in text.replace('"fog"', "")  # its name is for the plan alone


@pytest.mark.parametrize("form", FORMS)
def test_a_report_without_lpips_says_so_in_every_form(tmp_path, told, form, foggy):
    sentence = "was not measured: put lpips_alex.safetensors into the folder"
    plain_one = sample(tmp_path / "plain", seeds=1)
    assert sentence in told(form, plain_one, tmp_path / "plain")
    bare = rederive(replace(plain_one, metrics=plain_one.metrics[:1]))
    assert sentence in told(form, bare, tmp_path / "plain")
    assert sentence not in told(form, foggy, tmp_path)
    layers = replace(plain_one, federation=replace(plain_one.federation, shape=(5, 16, 16)))
    assert sentence not in told(form, layers, tmp_path / "plain")


def test_every_metric_is_in_a_comparison(foggy):
    text = tidy(printed(diff.compare(foggy, foggy), width=200))
    assert "SSIM LPIPS Fog [m] <b>|* km" in text
    for row in foggy.summary:
        for metric in foggy.metrics[1:]:
            median = f"{row.measured.scores[metric.name].median:.3g}"
            assert f"{median} → {median}" in text


@pytest.mark.parametrize("form", FORMS)
def test_many_metrics_are_shown_whole(tmp_path, told, form):
    made = sample(tmp_path, seeds=1, attacks=("[red]analytic",), defences=("none",))
    for i in range(9):
        made = measured_by(
            made, Measurement(f"m{i}", f"M{i}", "", "lower"), lambda psnr: psnr / 9e4
        )
    number = f"{made.summary[0].measured.scores['m8'].median:.3g}"
    text = told(form, made, tmp_path)
    if form == "terminal":  # cells break where they must
        assert "[red]analytic" in text.split("PSNR: how")[0]  # no markup
        assert printed(diff.compare(made, made)).replace("│", "").count("…") == text.count("…") == 0
    else:
        assert text.count(number) >= 9


@pytest.mark.parametrize("form", FORMS)
def test_a_metric_with_a_limit_is_a_kind_of_leak_in_words_of_its_label(tmp_path, told, form, foggy):
    text = told(form, foggy, tmp_path)
    share = foggy.verdict.kinds["fog"].leak
    assert share.state == "leaks"
    assert "ictures recovered by Fog [m] <b>|*: leaks" in text
    assert f"{round(share.share * share.records)} of 8 records were recovered to Fog [m]" in text
    if form != "terminal":
        assert "rebuilt to Fog [m] <b>|* 0.7 km or lower, and closer than a mean picture" in text
        assert "broke it: pictures recovered, pictures recovered by Fog [m] <b>|*, rec" in text


@pytest.mark.parametrize("form", FORMS)
def test_the_psnr_may_be_the_only_metric(tmp_path, told, form):
    made = sample(tmp_path, seeds=1)
    text = told(form, rederive(replace(made, metrics=made.metrics[:1])), tmp_path)
    assert "SSIM" not in text
    assert "the closer" not in text


# Truths that nobody knows


@pytest.mark.parametrize("form", FORMS)
def test_what_nobody_can_score_has_no_number_and_is_never_green(tmp_path, told, form):
    made = sample(tmp_path, seeds=2, outcome="below the limit")
    trials = tuple(unscored(t) if t.kind == "trial" else t for t in made.trials)
    made = rederive(replace(made, trials=trials))
    assert made.verdict.outcome == "inconclusive"
    text = told(form, made, tmp_path)
    assert "Inconclusive" in text
    assert "nobody knows the truth" in text
    assert "not scored" in text
    assert "Below the limit" not in text
    before = text.split("Positive control")[0].split("How to read")[0]  # of the twin, all is known
    assert not re.search(r"\d+\.\d dB|Risk:? ●|over 50 dB", before)
    assert "Does not apply here" not in text
    if form == "terminal":
        assert text.count("– – – – not scored") == len(made.summary)


@pytest.mark.parametrize("form", ["html", "markdown", "pdf"])
def test_what_could_be_scored_is_told_from_what_could_not(tmp_path, told, form):
    made = sample(tmp_path, seeds=2, outcome="below the limit")
    trials = [unscored(t) if t.kind == "trial" and t.seed else t for t in made.trials]
    made = rederive(replace(made, trials=tuple(trials)))
    text = told(form, made, tmp_path)
    assert "Inconclusive" in text
    assert "1 of 2 trials: nobody knows the truth: not scored" in text
    assert "Of 6 trials nobody knows the truth: not scored." in text


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_what_an_update_shows_before_any_attack(tmp_path, told, form):
    made = sample(tmp_path)
    (one,) = made.exposure
    said = "Exposed before any attack: an update here holds 4 records, and layer4.0.conv2 can show"
    assert said in told(form, made, tmp_path)
    beyond = replace(one, records=16, views=32, steps=2, exposed=False)
    text = told(form, replace(made, exposure=(one, beyond)), tmp_path)
    assert said in text
    assert "16 records, used 32 times: too many for layer4.0.conv2, which can show the" in text
    nothing = replace(one, exposed=False, limit=0, layer=None, layers=(), reason="it is blind.")
    text = told(form, replace(made, exposure=(nothing,)), tmp_path)
    assert "The exact method does not apply here: it is blind." in text
    assert "Exposed" not in text
    assert "before any attack" not in told(form, replace(made, exposure=()), tmp_path)  # older ones


def test_what_would_change_is_counted_in_records_of_a_round():
    layers = (LayerExposure("conv", 16, 512, 31, ""),)
    one = Exposure(8, 16, 4, True, 31, "conv", layers, "")
    assert advice.way_out(one) == (
        "More than 31 records per update, batch size × local steps (15 records in a round like "
        "this), leave this regime. Noise is no sure way out: where we measured, 30 % of the "
        "update's root mean square did not always stop it. "
        "Outside this regime the exact method does not apply; other attacks may still work."
    )
    assert advice.way_out(replace(one, views=32, exposed=False)) == advice.OUTSIDE
    for words in (advice.exposed(one), advice.way_out(one), advice.OUTSIDE):
        assert "safe" not in words


def test_the_bar_of_an_exposure_stands_beside_its_limit(tmp_path):
    made = sample(tmp_path)
    (one,) = made.exposure
    chart = charts.exposure(made)
    (line,) = chart.lines
    (bar,) = [mark for mark in line.marks if mark.kind == "bar"]
    (limit,) = [mark for mark in line.marks if mark.kind == "limit"]
    assert bar.x2 / limit.x == pytest.approx(4 / 31)
    assert (line.number, line.note) == ("4", "exposed")
    beyond = replace(one, records=64, views=64, exposed=False)
    (line,) = charts.exposure(replace(made, exposure=(beyond,))).lines
    (bar,) = [mark for mark in line.marks if mark.kind == "bar"]
    (limit,) = [mark for mark in line.marks if mark.kind == "limit"]
    assert limit.x / bar.x2 == pytest.approx(31 / 64)
    assert line.note == ""


@pytest.mark.parametrize("most", [1, 4, 5, 6, 31, 50, 64, 99, 100, 101, 999, 5000, 12345])
def test_an_axis_of_counts_reaches_its_most(most):
    axis = figures.count_axis(most)
    assert axis.high >= most
    assert axis.ticks[-1] == axis.high
    assert 2 <= len(axis.ticks) <= 6
    assert all("≥" not in tick.text for tick in figures.ticks(axis))


@pytest.mark.parametrize("form", ["html", "markdown", "pdf"])
def test_every_form_says_what_each_defence_spends_over_all_rounds(form, told, tmp_path):
    words = "Over 30 rounds, all updates of a client are protected, quotably."
    told_of = Spent(6.5, 1e-5, "rdp", 30, "update", words)
    promises = (Guarantee("none", "Nothing is promised."), Guarantee("prune", told_of))
    made = replace(sample(tmp_path), privacy=promises)
    text = told(form, made, tmp_path)
    for part in ("Epsilon over all rounds", "6.50", words, "Nothing is promised."):
        assert part in text
    assert "Epsilon over all rounds" not in told(form, replace(made, privacy=()), tmp_path)


# Pictures that a restorer or a prior had a part in.


@pytest.fixture
def both(tmp_path):
    """Two audits: one restores guesses of 58 dB from 52, the other has a generative prior."""
    made = sample(tmp_path, seeds=2, defences=("none",), attacks=("analytic", "dlg"))
    (lpips,) = measurements({"lpips": METRICS["lpips"]}, made.plan.audit.limit)
    made = measured_by(made, lpips, lambda psnr: 0.9 - psnr / 100)
    return [invented(made, tmp_path, restored=restored) for restored in (True, False)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("images", ["show", "hide"])
def test_what_a_prior_helped_to_make_stands_beside_raw_and_unread_numbers(
    tmp_path, told, form, images, both
):
    for made, restored in zip(both, (True, False), strict=True):
        text = told(form, made, tmp_path, images)
        (line,) = contents.sides(made)
        row = made.summary[0].measured
        shown = row.scores
        assert line.attack == "analytic"
        assert line.shown == (
            f"{shown['psnr'].median:.1f}\xa0dB",
            f"LPIPS\xa0{shown['lpips'].median:.3g}",
            f"{shown['identified'].mean:.0%} recognised".replace("%", "\xa0%"),
        )
        assert line.unread == ("7.0\xa0dB", "LPIPS\xa07", "0\xa0% recognised")
        if restored:
            assert row.raw["psnr"].median == pytest.approx(shown["psnr"].median - 6)
            before = f"{row.raw['psnr'].median:.1f}\xa0dB", f"{row.raw['lpips'].median:.3g}"
            assert line.raw == (before[0], f"LPIPS\xa0{before[1]}", "50\xa0% recognised")
        else:
            assert line.raw == ("–",)
        assert tidy(contents.UNREAD) in text
        part = text[text.lower().index("raw guess", text.index(line.attack)) :]
        for k in range(3 if restored else 1):  # in the order of the columns
            in_order(part, *(cell[k] for cell in (line.raw, line.shown, line.unread)))
    plain_one = sample(tmp_path / "plain", seeds=1)
    assert contents.INVENTS not in told(form, plain_one, tmp_path / "plain", images)


def test_the_pictures_of_a_record_stand_side_by_side(tmp_path, both):
    for made, names in zip(
        both,
        (["truth", "raw guess", "restored", "no update"], ["truth", "guess", "no update"]),
        strict=True,
    ):
        pair = html.pictures.worst(made)
        assert pair.invented
        assert [tile.words for tile in pair.tiles] == names
        ends = {"truth": "truth", "raw guess": "raw", "no update": "prior"}
        for tile in pair.tiles:
            assert tile.file.endswith(f"{ends.get(tile.words, 'guess')}.png")
        numbers = {tile.words: tile.numbers for tile in pair.tiles}
        assert numbers["truth"] == ()
        assert numbers["no update"] == ("7.0\xa0dB", "LPIPS\xa07", "not recognised")
        last = numbers["restored" if "restored" in names else "guess"]
        assert last[0] == wording.decibels(pair.truth.psnr)
        if "raw guess" in names:
            assert numbers["raw guess"][0] == wording.decibels(pair.truth.psnr - 6)
        page = html.render(made, tmp_path, "show")
        for name in names:
            assert f'alt="{name} of record {pair.record}, {pair.trial.id}"' in page
        assert "can show detail that no record had</span>" in page
        # Nothing of them is in a page that hides pictures, and blurred ones are blurred.
        assert "<img" not in html.render(made, tmp_path, "hide")
        blurred = html.pictures.load(pair, tmp_path, "blur").pictures
        sizes = {Image.open(io.BytesIO(content)).size for content in blurred}
        assert sizes == {(4, 4)}
        assert "All are blurred" in html.render(made, tmp_path, "blur")


def test_a_result_that_kept_no_raw_pictures_is_still_warned_of(tmp_path, told, both):
    """As those of schema 5: scores of the prior alone, and no pictures of it."""
    made = both[1]

    def before(trial):
        if not (trial.found and trial.found.images):
            return trial
        images = replace(trial.found.images, raws=(), priors=())
        return replace(trial, found=replace(trial.found, images=images))

    made = replace(made, trials=tuple(map(before, made.trials)))
    assert [tile.words for tile in html.pictures.worst(made).tiles] == ["truth", "guess"]
    assert contents.INVENTS in told("html", made, tmp_path)


def test_a_comparison_has_raw_and_unread_medians(tmp_path, both):
    restored, prior = both
    (row,) = (r for r in diff.compare(prior, restored).rows if r.attack == "analytic")
    median = restored.summary[0].measured.raw["psnr"].median
    assert (row.raw.a, row.raw.b) == (None, median)
    assert (row.unread.a, row.unread.b) == (7.0, 7.0)
    text = tidy(printed(diff.compare(prior, restored), width=200))
    shown = f"{row.medians['psnr'].a:.3g}"
    assert f"none analytic – → {median:.3g} {shown} → {shown} 7 → 7" in text
    plain_one = sample(tmp_path / "plain", seeds=1)
    assert "no update" not in printed(diff.compare(plain_one, plain_one))
