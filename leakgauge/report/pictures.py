"""Truths beside guesses, small enough to embed, and blurred for good when asked.

A blurred picture is reduced to at most BLOCKS averages per side *before* it enters a report: the
file holds no more than those few numbers, whatever a viewer does with it. All pictures of a record
are blurred, since a good guess shows the same person as the truth.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from leakgauge.audit.images import names, tables
from leakgauge.audit.results import Pictures, Result, Score, Scores, Trial
from leakgauge.report.contents import JUDGED, Images, scored, unscored
from leakgauge.report.wording import SPACE, decibels, number

MOST_PAIRS = 120
MOST_BYTES = 6_000_000  # of all pictures in one report, as base64
SIDE = 96  # pixels; larger pictures are scaled down
BLOCKS = 6  # averages per side that are left of a blurred picture, fewer of a small one
MOST_PIXELS = 64_000_000  # a file that claims more is not decoded


@dataclass(frozen=True)
class Tile:
    """One picture: what it is called, its file and, beside others of its record, its numbers."""

    words: str
    file: str
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Truth:
    """A guess held against it: the PSNR of the guess and of a mean picture, and why that number may
    be too low."""

    psnr: float
    base: float
    caveats: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """The pictures of a record: its truth, if anybody knows it, and the guess. One that may be
    `invented`, since a restorer or a prior had a part in it, has the raw guess and the picture
    without the update beside it, where they were kept."""

    trial: Trial
    record: int
    tiles: tuple[Tile, ...]
    truth: Truth | None
    invented: bool = False

    def order(self) -> float:
        """The worst leak comes first, what nobody can score last."""
        return -self.truth.psnr if self.truth else math.inf


@dataclass(frozen=True)
class Shown:
    """A pair ready to embed, a picture for each of its tiles; None where it could not be read."""

    pair: Pair
    pictures: tuple[bytes | None, ...]


def pairs(result: Result) -> list[Pair]:
    """All pairs of the audit's own trials, the worst leak first."""
    known = [
        Pair(
            trial,
            i,
            _tiles(result, found.images, i, score),
            Truth(score.scores["psnr"][i], score.mean_image["psnr"][i], score.caveats),
            score.prior_only is not None,
        )
        for trial, found, score in scored(result)
        if found.images
        for i in range(len(found.images.truths))  # not every record has its pictures kept
    ]
    unknown = [
        Pair(trial, i, _tiles(result, files, i, None), None, bool(files.priors))
        for trial in unscored(result)
        if trial.found and (files := trial.found.images)
        for i in range(len(files.guesses))
    ]
    return sorted([*known, *unknown], key=Pair.order)  # stable: equal ones keep the plan's order


def _tiles(result: Result, files: Pictures, record: int, score: Score | None) -> tuple[Tile, ...]:
    kept = {"truth": files.truths, "raw": files.raws, "guess": files.guesses, "prior": files.priors}
    scores = tables(score) if score and score.prior_only else {}
    return tuple(
        Tile(words, kept[key][record], _numbers(result, scores.get(key), record))
        for key, words in names(bool(files.raws)).items()
        if kept[key]
    )


def _numbers(result: Result, table: Scores | None, record: int) -> tuple[str, ...]:
    """The numbers of one picture among several of its record."""
    if table is None:
        return ()
    lpips = [metric for metric in result.metrics if metric.name == "lpips"]
    likeness = [f"{one.label}{SPACE}{number(table[one.name][record], one)}" for one in lpips]
    known = {1.0: "recognised", 0.0: "not recognised"}
    found = [known[value] for value in table.get("identified", ())[record : record + 1]]
    return decibels(table["psnr"][record]), *likeness, *found


def worst(result: Result) -> Pair | None:
    """The pair that leaked most, of attackers who were told no truths."""
    return next((p for p in pairs(result) if p.truth and p.trial.realism in JUDGED), None)


def chosen(found: list[Pair], most: int = MOST_PAIRS) -> list[Pair]:
    """The pairs to show, in order of importance: the worst of each attack × defence, then the
    middle one of each (the worst alone would mislead), then the worst of all."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        groups.setdefault((pair.trial.attack, pair.trial.defence), []).append(pair)
    heads = [group[0] for group in groups.values()]
    middles = [group[len(group) // 2] for group in groups.values()]
    return list({id(pair): pair for pair in [*heads, *middles, *found]}.values())[:most]


def embedded(result: Result, folder: Path, images: Images) -> tuple[list[Shown], int]:
    """The pictures of a report, the worst leak first, and how many pairs it leaves out."""
    found = pairs(result)
    if images == "hide":
        return [], len(found)
    shown: list[Shown] = []
    size = 0
    for pair in chosen(found):
        item = load(pair, folder, images)
        size += sum(len(png) * 4 // 3 for png in item.pictures if png)
        if size > MOST_BYTES:
            break
        shown.append(item)
    shown.sort(key=lambda item: item.pair.order())
    return shown, len(found) - len(shown)


def load(pair: Pair, folder: Path, images: Images) -> Shown:
    return Shown(pair, tuple(png(folder, tile.file, images) for tile in pair.tiles))


def png(folder: Path, name: str, images: Images) -> bytes | None:
    """The picture as it may be shown, encoded anew; None if it cannot be read."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):  # a link that leads out of the audit
        return None
    try:
        with Image.open(path, formats=["PNG"]) as file:
            if file.width * file.height > MOST_PIXELS:
                return None
            picture = file.convert("L" if file.mode in ("1", "L", "I", "I;16") else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None  # missing or damaged: the report says so in its place
    if images == "blur":
        picture = blurred(picture)
    else:
        picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)  # never enlarges
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=False)
    return buffer.getvalue()


def blurred(picture: Image.Image) -> Image.Image:
    """The averages of a few blocks, and nothing else."""
    width, height = picture.size
    blocks = max(1, min(BLOCKS, max(width, height) // 4))
    scale = blocks / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return picture.resize(size, Image.Resampling.BOX)


def data_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
