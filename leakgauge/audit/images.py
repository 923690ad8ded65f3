"""Truths, guesses and what is shown without the update as PNG: each by itself at its own size, and
a sheet to look at."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from PIL import Image, ImageDraw
from torch import Tensor

from leakgauge.audit.results import Pictures, Score, Scores

TILE = 128  # pixels of an image on the sheet
LIMIT = 64  # images of a trial that are kept; scores cover all


@dataclass(frozen=True)
class Panel:
    """Pictures of the same records, in the same order; None where there are none. A guess that has
    a raw one beside it is a restored one; `prior` is shown without the update."""

    guess: Tensor
    truth: Tensor | None = None
    raw: Tensor | None = None
    prior: Tensor | None = None


def names(restored: bool) -> dict[str, str]:
    """What the pictures of a panel are called, in the order in which they stand."""
    return {
        "truth": "truth",
        "raw": "raw guess",
        "guess": "restored" if restored else "guess",
        "prior": "no update",
    }


def tables(score: Score) -> dict[str, Scores | None]:
    """The scores of the pictures of a panel; a truth has none."""
    return {"raw": score.raw, "guess": score.scores, "prior": score.prior_only}


def drawn(
    trial: str, panel: Panel, score: Score | None = None
) -> tuple[Pictures, dict[str, bytes]]:
    """Their paths below the audit's folder, and what is to stand there; guesses alone where nobody
    knows the truth."""
    base = f"images/{trial}"
    kept = {
        one.name: [picture(image) for image in images[:LIMIT]]
        for one in fields(panel)
        if (images := getattr(panel, one.name)) is not None
    }
    paths = {
        key: tuple(f"{base}/{i:03}-{key}.png" for i in range(len(images)))
        for key, images in kept.items()
    }
    found = Pictures(
        sheet=f"{base}/sheet.png",
        truths=paths.get("truth", ()),
        guesses=paths["guess"],
        raws=paths.get("raw", ()),
        priors=paths.get("prior", ()),
    )
    files = {found.sheet: _png(sheet(kept, score))}
    for key, images in kept.items():
        files |= {path: _png(one) for path, one in zip(paths[key], images, strict=True)}
    return found, files


def picture(image: Tensor) -> Image.Image:
    """(C, H, W) in [0, 1] as an 8-bit picture, grey or RGB (other channel counts: the first)."""
    channels = image if image.shape[0] in (1, 3) else image[:1]
    pixels = (channels.detach().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)


def sheet(kept: Mapping[str, Sequence[Image.Image]], score: Score | None) -> Image.Image:
    """Truths above guesses, eight to a row, with their PSNR. Where there is more beside them, each
    line says what it shows."""
    lines = {key: words for key, words in names("raw" in kept).items() if key in kept}
    scores = tables(score) if score else {}
    count = len(kept["guess"])
    columns = max(1, min(8, count))
    rows = -(-count // columns)
    caption, gap = 18, 6
    margin = 70 if len(lines) > 2 else 0
    heights = {key: TILE + (caption if scores.get(key) else 2) for key in lines}
    width, height = TILE + gap, sum(heights.values()) + gap
    page = Image.new("RGB", (margin + columns * width + gap, rows * height + gap), "white")
    draw = ImageDraw.Draw(page)
    for i in range(count):
        x, y = margin + gap + (i % columns) * width, gap + (i // columns) * height
        for key, words in lines.items():
            if margin and i % columns == 0:
                draw.text((gap, y + TILE // 2), words, fill="black")
            tile = kept[key][i].convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST)
            page.paste(tile, (x, y))
            if table := scores.get(key):
                draw.text((x + 2, y + TILE + 2), f"{table['psnr'][i]:.1f} dB", fill="black")
            y += heights[key]
    return page


def contact_sheet(images: Tensor) -> bytes:
    """Pictures side by side, eight to a row, as PNG."""
    tiles = [picture(image).convert("RGB") for image in images]
    columns, gap = max(1, min(8, len(tiles))), 4
    factor = max(1, TILE // 2 // max(1, tiles[0].height))
    wide, high = (factor * side + gap for side in tiles[0].size)
    page = Image.new("RGB", (columns * wide + gap, -(-len(tiles) // columns) * high + gap), "white")
    for i, tile in enumerate(tiles):
        grown = tile.resize((wide - gap, high - gap), Image.Resampling.NEAREST)
        page.paste(grown, (gap + (i % columns) * wide, gap + (i // columns) * high))
    return _png(page)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
