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
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from leakgauge.audit.advice import defended
from leakgauge.audit.results import Result
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
from leakgauge.report.contents import Images
from leakgauge.report.gists import gists
from leakgauge.report.pictures import Pair, Shown

RISK_PIPS = {"low": 1, "medium": 2, "high": 3, "very high": 4}


def render(result: Result, folder: Path, images: Images = "blur") -> str:
    """The page for a result whose result.json and pictures are in `folder`."""
    contents.check_images(images)
    style, script = inline("page.css"), inline("page.js")
    shown, left_out = pictures.embedded(result, folder, images)
    worst = pictures.worst(result)
    return template("page.html").render(
        policy=policy(style, script),
        style=style,
        script=script,
        pips=RISK_PIPS,
        defended=defended,
        images=images,
        result=result,
        annex=annex.annex(result, folder),
        contents=contents,
        figures=figures,
        pictures=pictures,
        wording=wording,
        headline=first_screen.headline(result),
        plan=annex.plan_text(result.plan),
        outcome=first_screen.outcome(result),
        level=first_screen.risk_level(result),
        rests_on=first_screen.rests_on(result),
        key_figures=first_screen.key_figures(result),
        worst=worst and pictures.load(worst, folder, images),
        worst_caption=worst and first_screen.worst_caption(worst, images),
        steps=first_screen.next_steps(result),
        defences=first_screen.defence_verdicts(result),
        evidence=first_screen.evidence(result),
        exposure=charts.exposure(result),
        exposed=first_screen.exposed(result),
        gists=gists(result, images, shown),
        findings=contents.findings(result),
        sides=contents.sides(result),
        directions=contents.directions(result),
        inapplicable=contents.inapplicable(result),
        several_rounds=contents.several_rounds(result),
        knowledge=contents.knowledge(result),
        control=contents.control(result),
        shown=shown,
        left_out=left_out,
        by_id=_places(shown, lambda pair: (pair.trial.id, pair.record)),
        by_attack=_places(shown, lambda pair: (pair.trial.attack, pair.trial.defence)),
        unscored=contents.unscored(result),
        distribution=charts.distribution(result),
        labels=charts.labels(result),
        ladder=charts.ladder(result),
        trades=charts.defences(result),
        privacy=contents.privacy(result),
        tradeoff=result.tradeoff,
        protection=protection,
        scatter=scatter,
        coverage=contents.coverage(result),
        whole_reasons=contents.whole_reasons(result),
        failures=contents.failures(result),
        notes=contents.notes(result),
    )


def _places(shown: list[Shown], key: Callable[[Pair], tuple[str, int | str]]) -> list[int]:
    """The rank of each item under another order; equal ones keep the order they have."""
    ordered = sorted(range(len(shown)), key=lambda i: key(shown[i].pair))
    return [ordered.index(i) for i in range(len(shown))]


@cache
def template(name: str) -> Template:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters["code"] = _code
    return environment.get_template(name)


def _code(text: str) -> Markup:
    """Escaped text in which `code` and --options are set as such."""
    parts = re.split(r"`([^`]+)`|(?<!\S)(--[a-z-]+)", wording.tidy(text))
    return Markup("").join(
        part if i % 3 == 0 else Markup("<code>{}</code>").format(part)
        for i, part in enumerate(parts)
        if part is not None
    )


def _finalize(value: object) -> object:
    """The last gate of every value of the page."""
    return (
        wording.tidy(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )


def _read(name: str) -> str:
    return resources.files("leakgauge.report").joinpath(name).read_text("utf-8")


@cache
def inline(name: str) -> Markup:
    """A file of this package, which is ours and needs no escaping."""
    return Markup(_read(name))


def policy(style: str, script: str | None = None) -> str:
    """What a page may do: nothing but this style sheet, this script and pictures within it."""
    allowed = f"'{_hash(script)}'" if script else "'none'"
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src {allowed}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
