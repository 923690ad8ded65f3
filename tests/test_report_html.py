"""The page: what it says, that it loads nothing, and that no text in it can act."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_result import HOSTILE, failed, older, rederive, rescored, sample, save, unscored

from leakgauge.audit import schema
from leakgauge.errors import InputError
from leakgauge.report import html, write

FIRST = ("truth", "guess")


class Page(HTMLParser):
    """Tags with their attributes, and the text of each section."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.inline: dict[str, str] = {}
        self._section, self._open = "", ""
        self.feed(text)
        self.text = {k: " ".join(v.split()).replace("\xa0", " ") for k, v in self.text.items()}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "section":
            self._section = dict(attrs)["id"]

    def handle_endtag(self, tag):
        self._open = ""
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if self._open in ("script", "style"):
            self.inline[self._open] = self.inline.get(self._open, "") + data
        self.text[self._section] = self.text.get(self._section, "") + " " + data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def plain(step: str) -> str:
    """A step as the page has it, where code is an element of its own."""
    return " ".join(re.sub(r"`([^`]*)`|(--\w+)", r" \1\2 ", step).split())


def edited(result, which, psnr):
    """The result with another PSNR in those of its own trials."""
    trials = tuple(
        rescored(t, psnr=[psnr] * t.score.records) if t.kind == "trial" and which(t) else t
        for t in result.trials
    )
    return rederive(replace(result, trials=trials))


def cards(page: Page) -> list[dict[str, str | None]]:
    """The pictures of the gallery, without the two of the first screen."""
    return [img for img in page.all("img") if img["alt"] not in FIRST]


def images(page: Page, first: bool = False) -> list[Image.Image]:
    shown = [img for img in page.all("img") if (img["alt"] in FIRST) == first]
    sources = [str(attributes["src"]) for attributes in shown]
    head = "data:image/png;base64,"
    assert all(source.startswith(head) for source in sources)
    return [
        Image.open(io.BytesIO(base64.b64decode(source.removeprefix(head)))) for source in sources
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def result(folder):
    return sample(folder)


@pytest.fixture(scope="module")
def page(result, folder):
    return Page(html.render(result, folder, "show"))


def test_the_first_page_is_the_verdict(page, result):
    first = next(attributes for name, attributes in page.tags if name == "section")
    assert first["id"] == "verdict"
    text = page.text["verdict"]
    assert result.verdict.headline in text
    assert "Leaks" in text
    assert "Risk ●●●● very high" in text
    assert "Pictures recovered 12 of 12" in text
    assert "Records recognised 12 of 12" in text
    assert "picked out of 204 pictures by their reconstruction" in text
    assert "Labels read 10 of 12" in text
    assert "Typical picture over 50 dB" in text
    assert "Worst picture over 50 dB" in text
    assert "limit 10 %, measured 76 % to 100 % (95 % interval): leaks" in text
    assert "This verdict rests on 12 different records, attacked in 12 trials by 2 attacks" in text
    assert "dB" not in text.split("over 50 dB")[0].replace("15 dB", "")  # no 58 dB and the like
    for sentence in [*result.verdict.sentences, *map(plain, result.verdict.next)]:
        assert sentence in text
    assert "analytic, no defence, round 0, seed 2: over 50 dB" in text
    assert "prune share = 0.99 Leaks Pictures recovered: leaks." in text


def test_findings_stand_beside_their_baselines_tags_and_caveats(page, result):
    text = page.text["findings"]
    for row in result.summary:
        assert row.attack in text
        assert f"{row.measured.scores['psnr'].median:.1f} dB" in text
        assert f"{row.measured.mean_image['psnr']:.1f} dB" in text
        assert f"SSIM {row.measured.scores['ssim'].median:.3g} (0.05)" in text
    assert "chance 0.49 %" in text
    assert "guessing 30 %" in text
    assert text.count("the objective was still falling at the end") == len(result.summary)
    assert text.count("oracle") == 2
    assert text.count("realistic") == 4


def test_every_section_says_its_part(page, result):
    text = page.text
    assert "4,903,242 parameters" in text["scope"]
    assert "batch 8, steps 1, lr 0.01, sgd, batch norm train" in text["scope"]
    assert "18 trials, 2 positive controls, 2 on the ladder, 2 not run" in text["scope"]
    assert "An honest-but-curious server against client 0" in text["threat"]
    assert "labels the true labels ○ does not hold" in text["threat"]
    assert "● holds" in text["threat"]
    assert "61.0 dB 10.6 dB ✓ broke it: pictures recovered" in text["control"]
    assert "✗ does not apply" in text["control"]
    assert "not applicable: needs a linear layer → there is none" in text["coverage"]
    assert "PSNR, dB" in text["distributions"]
    assert "random 30 %, class prior 34 %" in text["labels"]
    assert "What hinders analytic most is the batch (batch 1 → 8)" in text["why"]
    assert "from over 50 dB to 33.0 dB, still above the limit of 15 dB" in text["why"]
    assert "33.0 dB −17.0 dB" in text["why"]
    assert "The gradient follows the pixels closely: matching it is well posed." in text["why"]
    assert "share = 0.99" in text["defences"]
    assert "not run: the budget of 10 min was spent (2 times)" in text["coverage"]
    assert "An audit attacks; it does not prove" in text["limits"]
    assert "oracle the attacker was told truths" in text["ledger"]
    assert "Jonas Geiping" in text["references"]
    assert "2.13.0+cpu" in text["annex"]
    assert "batch_size = 8" in text["annex"]


def test_the_annex_carries_the_checksum_of_the_result(page, folder):
    digest = hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()
    assert digest in page.text["annex"]


def test_the_strongest_attack_on_a_defence_is_never_an_oracle(folder, result):
    told = sample(folder / "told", attacks=("inverting-gradients", "dlg"))
    told = edited(told, lambda t: t.realism == "oracle", 99.0)
    text = Page(html.render(told, folder / "told", "hide")).text["defences"]
    assert "inverting-gradients" in text
    assert "dlg" not in text


def test_a_defence_is_shown_by_what_is_left_and_whether_it_is_below_the_limit(tmp_path):
    made = sample(tmp_path, attacks=("analytic",))
    limit = replace(made.plan.audit.limit, share=0.5)
    plan = replace(made.plan, audit=replace(made.plan.audit, limit=limit))
    made = edited(replace(made, plan=plan), lambda t: t.defence == "prune", 12.3)
    text = Page(html.render(made, tmp_path, "hide")).text["defences"]
    assert re.search(r"no defence analytic realistic \d\d\.\d dB pictures: leaks", text)
    assert "defence prune share = 0.99, analytic realistic 12.3 dB pictures: below" in text
    assert "what it costs in accuracy was not measured" in text


def test_one_defence_is_no_trade_off(tmp_path):
    single = sample(tmp_path, defences=("none",), seeds=1)
    assert "defences" not in Page(html.render(single, tmp_path, "hide")).text


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        ("leaks", "Leaks"),
        ("below the limit", "Below the limit"),
        ("inconclusive", "Inconclusive"),
        ("failed", "Failed"),
    ],
)
def test_each_outcome_has_its_word_and_its_colour(tmp_path, outcome, word):
    made = sample(tmp_path, outcome=outcome)
    page = Page(html.render(made, tmp_path, "hide"))
    first = next(attributes for name, attributes in page.tags if name == "section")
    assert page.text["verdict"].startswith(word)
    assert first["class"] == f"verdict {outcome.replace(' ', '-')}"


def test_an_older_result_has_a_page_without_a_verdict(folder, result):
    old = older(result)
    page = Page(html.render(old, folder, "show"))
    assert page.text["verdict"].startswith("No verdict")
    assert "No positive control is part of this result" in page.text["control"]
    assert "There is no verdict" in page.text["limits"]
    assert len(images(page)) == 2 * 72


def test_crashes_are_on_the_page_with_their_error(tmp_path):
    made = sample(tmp_path, outcome="failed")
    trials = tuple(
        failed(t, "RuntimeError: boom", "File x.py, line 3") if t.attack == "dlg" else t
        for t in made.trials
    )
    made = rederive(replace(made, trials=trials))
    page = Page(html.render(made, tmp_path, "hide"))
    assert "failed: RuntimeError: boom" in page.text["findings"]
    assert "failed: RuntimeError: boom (6 times)" in page.text["coverage"]
    assert "File x.py, line 3" in page.text["coverage"]
    assert '<section id="coverage">\n<details class="fold" open>' in html.render(
        made, tmp_path, "hide"
    )  # "read the errors below": they are to be seen


def test_a_thousand_different_crashes_are_listed_in_part(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=1, records=1)
    crashed = [failed(made.trials[0], f"error {i} " + "x" * 9000, "y" * 9000) for i in range(1000)]
    made = rederive(replace(made, trials=(*made.trials, *crashed)))
    text = html.render(made, tmp_path, "hide")
    assert "980 more kinds of errors are in result.json" in text
    assert len(text) < 500_000


def test_nothing_measured_is_said(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=1, records=1)
    made = replace(made, trials=(), explanation=None, sensitivity=None, control=())
    page = Page(html.render(rederive(made), tmp_path, "show"))
    assert "No trial of this audit was run to its end" in page.text["findings"]
    assert "no trial finished" in page.text["reconstructions"]
    assert "was not run" in page.text["why"]


def test_metrics_without_ssim_have_a_page(tmp_path):
    made = sample(tmp_path, seeds=1)
    page = Page(html.render(rederive(replace(made, metrics=made.metrics[:1])), tmp_path, "show"))
    assert "SSIM" not in page.text["findings"]
    assert len(images(page)) == 2 * 24


def test_guesses_whose_truth_nobody_knows_stand_alone(tmp_path):
    made = sample(tmp_path, seeds=2, attacks=("analytic",), defences=("none",), records=3)
    first, second, *others = made.trials
    some = rederive(replace(made, trials=(first, unscored(second), *others)))
    none = rederive(replace(made, trials=(unscored(first), unscored(second), *others)))
    for result, pairs, alone in ((some, 3, 3), (none, 0, 6)):
        text = html.render(result, tmp_path, "show")
        page = Page(text)
        assert len(images(page)) == 2 * pairs + alone
        alts = [str(img["alt"]) for img in cards(page)]
        assert sum(alt.startswith("truth") for alt in alts) == pairs
        shown = page.text["reconstructions"]
        assert shown.count("not scored realistic") == alone
        assert "nobody knows the truth: not scored." in shown
        assert len(re.findall(r"\d dB realistic", shown)) == pairs
        assert text.count('<div class="pair alone">') == alone
        assert ("The worst picture" in page.text["verdict"]) == bool(pairs)
        assert f"{alone} pictures not scored" in shown
    findings = Page(html.render(none, tmp_path, "blur")).text["findings"]
    assert "analytic no defence nobody knows the truth: not scored" in findings
    hidden = Page(html.render(none, tmp_path, "hide"))
    assert hidden.all("img") == []
    assert "The audit has 6 pictures in its folder" in hidden.text["reconstructions"]


# Pictures


def worst(result):
    """The trial and the record that leaked most."""
    own = [trial for trial in result.trials if trial.kind == "trial"]
    trial = max(own, key=lambda trial: max(trial.score.scores["psnr"]))
    return trial, int(np.argmax(trial.score.scores["psnr"]))


def test_shown_pictures_are_the_files(page, result, folder):
    trial, record = worst(result)
    truth, guess = images(page)[:2]  # the worst pair comes first
    for shown, name in ((truth, "truths"), (guess, "guesses")):
        original = Image.open(folder / getattr(trial.found.images, name)[record])
        assert np.array_equal(np.asarray(shown), np.asarray(original))


def test_the_worst_leak_comes_first(page):
    values = re.findall(r"(\d+\.\d) dB (?:realistic|oracle)", page.text["reconstructions"])
    numbers = [float(value) for value in values]
    assert len(numbers) == 72
    assert numbers == sorted(numbers, reverse=True)


def test_each_card_has_its_place_in_every_order(page, result):
    figures = page.all("figure")
    alts = [str(a["alt"]) for a in cards(page)][::2]
    ids = [(alt.split(", ")[1], int(re.search(r"record (\d+)", alt)[1])) for alt in alts]
    for order, key in (("data-id", lambda i: ids[i]), ("data-worst", lambda i: i)):
        places = [int(str(card[order])) for card in figures]
        ranked = sorted(range(len(figures)), key=lambda i: places[i])
        assert ranked == sorted(range(len(figures)), key=key)
    attack = {trial.id: trial.attack for trial in result.trials}
    by_attack = sorted(range(len(figures)), key=lambda i: int(str(figures[i]["data-attack"])))
    named = [attack[ids[i][0]] for i in by_attack]
    assert named == sorted(named)


def test_blur_is_in_the_pixels(result, folder):
    blurred = images(Page(html.render(result, folder)))  # blur is the default
    shown = images(Page(html.render(result, folder, "show")))
    assert len(blurred) == len(shown) == 144
    for small, whole in zip(blurred, shown, strict=True):
        assert small.size == (4, 4)
        pixels = np.asarray(whole, dtype=float).reshape(4, 4, 4, 4, -1).mean((1, 3))
        assert np.abs(np.asarray(small, dtype=float).reshape(4, 4, -1) - pixels).max() <= 1


@pytest.mark.parametrize(
    ("size", "left"),
    [
        ((1, 1), (1, 1)),
        ((8, 8), (2, 2)),
        ((28, 28), (6, 6)),
        ((300, 150), (6, 3)),
        ((2, 90), (1, 6)),
    ],
)
def test_blur_leaves_few_blocks_of_any_picture(size, left):
    noise = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    assert html.pictures.blurred(Image.fromarray(noise)).size == left


def test_hidden_pictures_are_not_there(result, folder):
    text = html.render(result, folder, "hide")
    assert "<img" not in text
    assert "data:image" not in text
    assert "72 pairs" in Page(text).text["reconstructions"]


def test_large_pictures_are_scaled_down(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=1, shape=(3, 200, 300))
    assert {picture.size for picture in images(Page(html.render(made, tmp_path, "show")))} == {
        (96, 64)
    }


def test_grey_pictures_stay_grey(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=1, shape=(1, 12, 12))
    assert {picture.mode for picture in images(Page(html.render(made, tmp_path, "show")))} == {"L"}


def test_missing_damaged_and_foreign_pictures_are_named(tmp_path):
    made = sample(tmp_path / "audit", attacks=("analytic",), defences=("none",), seeds=1, records=3)
    secret = tmp_path / "secret.png"
    Image.new("RGB", (4, 4), "red").save(secret)
    truths = [tmp_path / "audit" / name for name in made.trials[0].found.images.truths]
    truths[0].unlink()
    truths[1].write_bytes(truths[1].read_bytes()[:60])
    truths[2].unlink()
    truths[2].symlink_to(secret)
    page = Page(html.render(made, tmp_path / "audit", "show"))
    assert page.text["reconstructions"].count("picture missing") == 3
    assert page.text["verdict"].count("picture missing") == 1
    assert len(page.all("img")) == 3 + 1


def test_only_png_is_opened(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=1, records=1)
    Image.new("RGB", (4, 4)).save(tmp_path / made.trials[0].found.images.truths[0], "GIF")
    assert "picture missing" in html.render(made, tmp_path, "show")


def test_the_worst_and_the_middle_of_each_are_chosen_and_then_the_worst_of_all(result):
    found = html.pictures.pairs(result)
    leaks = [pair.truth.psnr for pair in found]
    assert len(found) == 72
    assert leaks == sorted(leaks, reverse=True)
    groups = {}
    for pair in found:
        place = pair.trial.attack, pair.trial.defence
        groups.setdefault(place, []).append(pair.truth.psnr)
    chosen = [pair.truth.psnr for pair in html.pictures.chosen(found, 20)]
    assert chosen[:6] == [max(group) for group in groups.values()]
    assert chosen[6:12] == [sorted(group)[len(group) // 2 - 1] for group in groups.values()]
    rest = [leak for leak in leaks if leak not in chosen[:12]]
    assert chosen[12:] == rest[:8]


def test_controls_and_the_ladder_are_not_reconstructions(tmp_path):
    made = sample(tmp_path, attacks=("analytic",), defences=("none",), seeds=3, records=2)
    kinds = [trial.kind for trial in made.trials if trial.status == "done"]
    assert kinds == ["trial"] * 3 + ["control"] + ["ladder"] * 2
    page = Page(html.render(made, tmp_path, "show"))
    assert len(page.all("figure")) == 3 * 2
    assert "3 trials, 2 positive controls, 2 on the ladder" in page.text["scope"]


def test_an_unknown_way_to_show_images_is_refused(result, folder):
    with pytest.raises(InputError, match="expected show, blur or hide, got 'all'"):
        html.render(result, folder, "all")


def test_the_worst_picture_is_on_the_first_screen_as_it_may_be_shown(result, folder):
    trial, record = worst(result)
    shown = images(Page(html.render(result, folder, "show")), first=True)
    files = [names[record] for names in (trial.found.images.truths, trial.found.images.guesses)]
    for picture, name in zip(shown, files, strict=True):
        assert np.array_equal(np.asarray(picture), np.asarray(Image.open(folder / name)))
    blurred = Page(html.render(result, folder, "blur"))
    assert [picture.size for picture in images(blurred, first=True)] == [(4, 4)] * 2
    assert "Both are blurred in this report" in blurred.text["verdict"]
    hidden = Page(html.render(result, folder, "hide"))
    assert images(hidden, first=True) == []
    assert "this report does not show it" in hidden.text["verdict"]


def test_sections_fold_and_say_their_gist(page, result):
    ids = [str(attributes["id"]) for attributes in page.all("section")]
    folds = [fold for fold in page.all("details") if fold.get("class") == "fold"]
    opened = [id_ for id_, fold in zip(ids[1:], folds, strict=True) if "open" in fold]
    assert opened == ["findings", "reconstructions", "defences"]
    links = [a["href"] for a in page.all("a") if str(a["href"]).startswith("#")]
    assert links == [f"#{id_}" for id_ in ids[1:]]
    assert page.text["findings"].startswith("Findings 6 rows, 4 of them above a limit")
    assert page.text["control"].startswith("Positive control 1 of 1 attacks broke the twin")
    assert page.text["reconstructions"].startswith("Reconstructions 72 pairs of pictures")
    assert page.text["defences"].startswith("Defences 2 compared, 0 below the limit")
    assert page.text["why"].startswith("Why 3 steps up from the known-weak twin")


# Safety


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    made = sample(folder, text=HOSTILE, seeds=1)
    crash = replace(failed(made.trials[0], HOSTILE, HOSTILE), attack=HOSTILE, defence=HOSTILE)
    save(folder, rederive(replace(made, trials=(*made.trials, crash))))
    return Page(html.render(schema.load(folder / "result.json"), folder, "show")), folder


def test_no_text_becomes_a_tag(hostile):
    page, _ = hostile
    assert len(page.all("script")) == 1
    assert len(cards(page)) == 2 * 24
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "style" not in attributes  # the policy would block it
    assert "window.__pwned" not in page.inline["script"]


def test_the_text_is_still_there_to_be_read(hostile):
    page, _ = hostile
    shown = " ".join(HOSTILE.split())
    for section in ("verdict", "findings", "scope", "threat", "control", "reconstructions",
                    "distributions", "labels", "why", "defences", "coverage", "annex"):  # fmt: skip
        assert shown in page.text[section], section


def test_links_leave_no_trace_and_nothing_else_points_outside(hostile):
    page, _ = hostile
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "background"):
            value = attributes.get(name)
            if value is None:
                continue
            if tag == "a" and not value.startswith("#"):
                assert value.startswith("https://")
                assert attributes["rel"] == "noreferrer noopener"
                assert "e.example" not in value
            else:
                assert value.startswith(("#", "data:"))
    assert not re.search(r"url\(|@import|@font-face", page.inline["style"])
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML", page.inline["script"])


def test_the_policy_allows_the_page_s_own_style_and_script_alone(page):
    policies = [
        str(attributes["content"])
        for attributes in page.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    rules = dict(rule.strip().split(" ", 1) for rule in policies[0].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for kind in ("style", "script"):
        digest = hashlib.sha256(page.inline[kind].encode()).digest()
        assert rules[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert set(rules) == {
        "default-src", "img-src", "style-src", "script-src", "base-uri", "form-action",
    }  # fmt: skip


def test_characters_that_steer_are_shown_as_harmless(tmp_path):
    made = sample(tmp_path, seeds=1, text="\x1b[31m\u202eevil\x07")
    text = html.render(made, tmp_path, "hide")
    assert not set("\x1b\u202e\x07") & set(text)
    assert "�[31m�evil�" in text


# Size, sameness


def test_two_thousand_trials_stay_small(tmp_path):
    made = sample(
        tmp_path,
        rounds=(0, 1, 2, 3, 4),
        defences=("none", "prune", "clip", "clip-and-noise", "other"),
        attacks=("analytic", "inverting-gradients", "dlg", "idlg"),
        seeds=20,
        records=8,
        shape=(3, 96, 96),
        pool=30,
    )
    assert [trial.kind for trial in made.trials].count("trial") == 2000
    loaded = schema.load(tmp_path / "result.json")
    text = html.render(loaded, tmp_path, "show")
    assert len(text.encode()) < 10_000_000
    page = Page(text)
    alts = [str(attributes["alt"]) for attributes in page.all("img")]
    assert 60 < len(page.all("figure")) <= 120
    for defence in ("none", "prune", "clip", "clip-and-noise", "other"):
        for attack in ("analytic", "inverting-gradients", "dlg", "idlg"):
            assert any(f".{defence}.{attack}." in alt for alt in alts)
    left = 16_000 - len(page.all("figure"))
    assert f"{left} are not shown" in page.text["reconstructions"]
    assert "40 more are in the table of findings" in page.text["distributions"]


def test_pictures_keep_within_their_budget(tmp_path, monkeypatch):
    made = sample(tmp_path, seeds=1)
    monkeypatch.setattr(html.pictures, "MOST_BYTES", 12_000)
    page = Page(html.render(made, tmp_path, "show"))
    size = sum(len(str(attributes["src"])) for attributes in cards(page))
    assert 6_000 < size < 13_000
    assert f"{24 - len(page.all('figure'))} are not shown" in page.text["reconstructions"]


def test_the_same_result_gives_the_same_page(result, folder):
    assert html.render(result, folder) == html.render(result, folder)
    assert html.render(schema.load(folder / "result.json"), folder) == html.render(result, folder)


def test_rendering_leaves_the_result_alone(folder, result):
    before = str(result)
    html.render(result, folder, "show")
    assert str(result) == before


def test_write_puts_the_reports_beside_the_result(tmp_path):
    made = sample(tmp_path, seeds=1)
    paths = write(tmp_path, "hide")
    assert paths == [tmp_path / "report.html", tmp_path / "report.md"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html.render(
        made, tmp_path, "hide"
    )
    digest = hashlib.sha256((tmp_path / "result.json").read_bytes()).hexdigest()
    assert digest in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_page_s_files_are_in_the_package():
    files = {path.name for path in Path(html.__file__).parent.iterdir() if path.suffix != ".py"}
    assert files - {"__pycache__"} == {
        "macros.html", "page.html", "page.css", "page.js", "protocol.html",
    }  # fmt: skip
