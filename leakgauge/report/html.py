"""The report as one HTML page that needs nothing else: no network, no file beside it.

Every text is escaped by the template engine. The page's own policy allows no request at all, and
only the one style sheet and the one script (it sorts pictures and unfolds sections) that are
written into it, by their hashes: text that should ever slip through unescaped could still not
run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from leakgauge.audit.advice import defended
from leakgauge.report import (
    annex,
    charts,
    contents,
    figures,
    first_screen,
    pictures,
    references,
    wording,
)
from leakgauge.report.contents import Images, Result
from leakgauge.report.gists import gists

RISK_PIPS = {"low": 1, "medium": 2, "high": 3, "very high": 4}


def render(result: Result, folder: Path, images: Images = "blur") -> str:
    """The page for a result whose result.json and pictures are in `folder`."""
    contents.check_images(images)
    style, script = _inline("page.css"), _inline("page.js")
    gallery = _gallery(result, folder, images)
    return _template().render(
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        pips=RISK_PIPS,
        risks=contents.RISKS,
        decibels=wording.decibels,
        defended=defended,
        svg=figures.svg,
        scale=figures.scale,
        images=images,
        result=result,
        outcome=first_screen.outcome(result),
        headline=first_screen.headline(result),
        level=first_screen.risk_level(result),
        rests_on=first_screen.rests_on(result),
        key_figures=first_screen.key_figures(result),
        worst=_worst(result, folder, images),
        steps=first_screen.next_steps(result),
        defences=first_screen.defence_verdicts(result),
        evidence=first_screen.evidence(result),
        gists=gists(result, images, len(gallery["cards"])),
        findings=contents.findings(result),
        inapplicable=contents.inapplicable(result),
        several_rounds=contents.several_rounds(result),
        scope=contents.scope(result),
        threat=contents.threat_sentence(result),
        knowledge=contents.knowledge(result),
        control=contents.control(result),
        gallery=gallery,
        distribution=charts.distribution(result),
        labels=charts.labels(result),
        ladder=charts.ladder(result),
        trades=charts.defences(result),
        coverage=contents.coverage(result),
        whole_reasons=contents.whole_reasons(result),
        failures=contents.failures(result),
        notes=contents.notes(result),
        limits=contents.limits(result, images),
        ledger=contents.ledger(result),
        references=references.used(result),
        annex=annex.annex(result, folder),
        plan=annex.plan_text(result),
    )


def _worst(result: Result, folder: Path, images: Images) -> dict[str, Any] | None:
    """The picture that leaked most, and the words below it."""
    pair = pictures.worst(result)
    if not pair:
        return None
    files = [pictures.png(folder, name, images) for name in (pair.truth, pair.guess)]
    return {
        "caption": first_screen.worst_caption(pair.trial, pair.record, images),
        "pictures": [pictures.data_uri(png) if png else None for png in files]
        if images != "hide"
        else [],
    }


def _gallery(result: Result, folder: Path, images: Images) -> dict[str, Any]:
    """Cards in the order of the worst leak, each with its place in the other two orders."""
    shown, left_out = pictures.embedded(result, folder, images)
    by_id = _places(shown, lambda item: (item.pair.trial["id"], item.pair.record))
    by_attack = _places(shown, lambda item: (item.pair.trial["attack"], item.pair.trial["defence"]))
    cards = [
        {
            "trial": item.pair.trial,
            "record": item.pair.record,
            "psnr": item.pair.leak,
            "truth": pictures.data_uri(item.truth) if item.truth else None,
            "guess": pictures.data_uri(item.guess) if item.guess else None,
            "worst": i,
            "by_id": by_id[i],
            "by_attack": by_attack[i],
        }
        for i, item in enumerate(shown)
    ]
    return {"cards": cards, "left_out": left_out, "total": left_out + len(cards)}


def _places(shown: list[pictures.Shown], key: Any) -> list[int]:
    """The rank of each item under another order; equal ones keep the order they have."""
    ordered = sorted(range(len(shown)), key=lambda i: key(shown[i]))
    places = [0] * len(shown)
    for place, i in enumerate(ordered):
        places[i] = place
    return places


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters["code"] = _code
    return environment.from_string(_read("page.html"))


def _code(text: str) -> Markup:
    """Escaped text in which `code` and --options are set as such."""
    parts = re.split(r"`([^`]+)`|(?<!\S)(--[a-z-]+)", wording.tidy(text))
    return Markup("").join(
        part if i % 3 == 0 else Markup("<code>{}</code>").format(part)
        for i, part in enumerate(parts)
        if part is not None
    )


def _finalize(value: Any) -> Any:
    """The last gate of every value of the page."""
    return (
        wording.tidy(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
    )


def _read(name: str) -> str:
    return resources.files("leakgauge.report").joinpath(name).read_text("utf-8")


@cache
def _inline(name: str) -> Markup:
    """A file of this package, which is ours and needs no escaping."""
    return Markup(_read(name))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
