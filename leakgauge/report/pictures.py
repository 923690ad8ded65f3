"""Truths beside guesses, small enough to embed, and blurred for good when asked.

A blurred picture is reduced to at most BLOCKS averages per side *before* it enters a report: the
file holds no more than those few numbers, whatever a viewer does with it. Both halves of a pair are
blurred, since a good guess shows the same person as the truth.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from leakgauge.audit.results import Result, Trial
from leakgauge.report.contents import JUDGED, Images, scored, unscored

MOST_PAIRS = 120
MOST_BYTES = 6_000_000  # of all pictures in one report, as base64
SIDE = 96  # pixels; larger pictures are scaled down
BLOCKS = 6  # averages per side that are left of a blurred picture, fewer of a small one
MOST_PIXELS = 64_000_000  # a file that claims more is not decoded


@dataclass(frozen=True)
class Truth:
    """The picture that a guess is held against: its file, the PSNR of the guess and of a mean
    picture, and why that number may be too low."""

    file: str
    psnr: float
    base: float
    caveats: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """A guess and its truth; None if nobody knows it."""

    trial: Trial
    record: int
    guess: str
    truth: Truth | None

    def order(self) -> float:
        """The worst leak comes first, what nobody can score last."""
        return -self.truth.psnr if self.truth else math.inf


@dataclass(frozen=True)
class Shown:
    """A pair ready to embed; a picture that could not be read is None."""

    pair: Pair
    truth: bytes | None
    guess: bytes | None


def pairs(result: Result) -> list[Pair]:
    """All pairs of the audit's own trials, the worst leak first."""
    known = [
        Pair(trial, i, guess, Truth(file, psnr, base, score.caveats))
        for trial, found, score in scored(result)
        if found.images
        for i, (guess, file, psnr, base) in enumerate(
            zip(
                found.images.guesses,
                found.images.truths,
                score.scores["psnr"],
                score.mean_image["psnr"],
                strict=False,  # not every record has its pictures kept
            )
        )
    ]
    unknown = [
        Pair(trial, i, guess, None)
        for trial in unscored(result)
        if trial.found and trial.found.images
        for i, guess in enumerate(trial.found.images.guesses)
    ]
    return sorted([*known, *unknown], key=Pair.order)  # stable: equal ones keep the plan's order


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
        size += sum(len(png) * 4 // 3 for png in (item.truth, item.guess) if png)
        if size > MOST_BYTES:
            break
        shown.append(item)
    shown.sort(key=lambda item: item.pair.order())
    return shown, len(found) - len(shown)


def load(pair: Pair, folder: Path, images: Images) -> Shown:
    names = (pair.truth.file if pair.truth else None, pair.guess)
    return Shown(pair, *(png(folder, name, images) if name else None for name in names))


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
