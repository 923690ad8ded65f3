"""The report as one HTML page that needs nothing else: no network, no file beside it.

Every text is escaped by the template engine. The page's own policy allows no request at all, and
only the one style sheet and the one script (it sorts pictures) that are written into it, by their
hashes: text that should ever slip through unescaped could still not run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from leakgauge.report import annex, contents, figures, pictures, references, wording
from leakgauge.report.contents import Images, Result

MOST_STRIPS = 60  # rows drawn; the table has all

RISK_PIPS = {"low": 1, "medium": 2, "high": 3, "very high": 4}


def render(result: Result, folder: Path, images: Images = "blur") -> str:
    """The page for a result whose result.json and pictures are in `folder`."""
    contents.check_images(images)
    style, script = _inline("page.css"), _inline("page.js")
    return _template().render(
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        pips=RISK_PIPS,
        risks=contents.RISKS,
        decibels=wording.decibels,
        percent=wording.percent,
        change=wording.change,
        images=images,
        result=result,
        outcome=contents.outcome(result),
        headline=contents.headline(result),
        level=contents.risk_level(result),
        key_figures=contents.key_figures(result),
        setting=contents.strongest_setting(result),
        findings=contents.findings(result),
        several_rounds=len({row["round"] for row in result["summary"]}) > 1,
        scope=contents.scope(result),
        threat=contents.threat_sentence(result),
        knowledge=contents.knowledge(result),
        gallery=_gallery(result, folder, images),
        distribution=_distribution(result),
        labels=_labels(result),
        ladder=_ladder(result),
        trades=_trades(result),
        coverage=contents.coverage(result),
        failures=contents.failures(result),
        notes=contents.notes(result),
        limits=contents.limits(result, images),
        ledger=contents.ledger(result),
        references=references.used(result),
        annex=annex.annex(result, folder),
        plan=annex.plan_text(result),
    )


def _gallery(result: Result, folder: Path, images: Images) -> dict[str, Any]:
    """Cards in the order of the worst leak, each with its place in the other two orders."""
    shown, left_out = pictures.embedded(result, folder, images)
    by_id = _places(shown, lambda item: (item.pair.trial["id"], item.pair.record))
    by_attack = _places(shown, lambda item: (item.pair.trial["attack"], item.pair.trial["defence"]))
    cards = [
        {
            "trial": item.pair.trial,
            "record": item.pair.record,
            "psnr": item.pair.leak if "psnr" in item.pair.trial["scores"] else None,
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


def _distribution(result: Result) -> dict[str, Any]:
    """A strip for each row, on one axis."""
    rows = [row for row in contents.measured(result) if contents.psnr(row)]
    drawn = rows
    if len(rows) > MOST_STRIPS:
        highest = sorted(rows, key=lambda row: -row["scores"]["psnr"]["median"])[:MOST_STRIPS]
        kept = {id(row) for row in highest}
        drawn = [row for row in rows if id(row) in kept]
    values = _values(result)
    bases = [base for row in drawn if (base := contents.baseline(row)) is not None]
    ends = [row["scores"]["psnr"][end] for row in drawn for end in ("least", "most")]
    axis = figures.psnr_axis([*ends, *bases])
    limit = _limit(result)
    strips = [
        {
            "row": row,
            "svg": figures.strip(
                values.get((row["round"], row["defence"], row["attack"]), []),
                row["scores"]["psnr"],
                contents.baseline(row),
                limit,
                axis,
            ),
        }
        for row in drawn
    ]
    return {
        "strips": strips,
        "scale": figures.scale(axis),
        "limit": limit,
        "left_out": len(rows) - len(drawn),
    }


def _values(result: Result) -> dict[tuple[int, str, str], list[float]]:
    """The PSNR of every record, by the row it belongs to."""
    values: dict[tuple[int, str, str], list[float]] = {}
    for trial in result["trials"]:
        if trial["kind"] == "trial" and trial["status"] == "done":
            key = (trial["round"], trial["defence"], trial["attack"])
            values.setdefault(key, []).extend(trial["scores"].get("psnr", []))
    return values


def _limit(result: Result) -> float | None:
    return float(result["verdict"]["limit"]["psnr"]) if result["verdict"] else None


def _labels(result: Result) -> dict[str, Any]:
    rows = [
        {
            "row": row,
            "svg": figures.meter(
                row["labels"]["accuracy"], [row["labels"]["random"], row["labels"]["class prior"]]
            ),
        }
        for row in contents.labelled(result)[:MOST_STRIPS]
    ]
    return {"rows": rows, "scale": figures.scale(figures.SHARES, percent=True)}


def _ladder(result: Result) -> dict[str, Any]:
    explanation = result["explanation"]
    rungs = explanation["rungs"] if explanation else []
    axis = figures.psnr_axis([rung["median"] for rung in rungs if rung["median"] is not None])
    return {
        "rungs": [
            {"rung": rung, "svg": figures.bar(rung["median"], None, None, _limit(result), axis)}
            for rung in rungs
        ],
        "scale": figures.scale(axis),
    }


def _trades(result: Result) -> dict[str, Any]:
    trades = contents.trade_off(result)
    axis = figures.psnr_axis([trade.row["scores"]["psnr"]["interval"][1] for trade in trades])
    return {
        "rows": [
            {
                "trade": trade,
                "svg": figures.bar(
                    trade.row["scores"]["psnr"]["median"],
                    trade.row["scores"]["psnr"]["interval"],
                    contents.baseline(trade.row),
                    _limit(result),
                    axis,
                ),
            }
            for trade in trades
        ],
        "scale": figures.scale(axis),
        "accuracy": any(trade.accuracy for trade in trades),
    }


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    return environment.from_string(_read("page.html"))


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
