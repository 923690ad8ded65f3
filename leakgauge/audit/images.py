"""Truths and guesses as PNG: each by itself at its own size, and a sheet to look at."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw
from torch import Tensor

from leakgauge.audit.results import Pictures

TILE = 128  # pixels of an image on the sheet
LIMIT = 64  # images of a trial that are kept; scores cover all


def drawn(
    trial: str, truth: Tensor | None, guess: Tensor, psnr: Sequence[float] | None
) -> tuple[Pictures, dict[str, bytes]]:
    """Their paths below the audit's folder, and what is to stand there; guesses alone where nobody
    knows the truth."""
    truths = [None] * len(guess[:LIMIT]) if truth is None else [picture(t) for t in truth[:LIMIT]]
    pairs = list(zip(truths, [picture(g) for g in guess[:LIMIT]], strict=True))
    base = f"images/{trial}"
    paths = Pictures(
        sheet=f"{base}/sheet.png",
        truths=tuple(f"{base}/{i:03}-truth.png" for i, (true, _) in enumerate(pairs) if true),
        guesses=tuple(f"{base}/{i:03}-guess.png" for i in range(len(pairs))),
    )
    files = {paths.sheet: _png(sheet(pairs, psnr))}
    files |= {path: _png(true) for path, true in zip(paths.truths, truths, strict=False) if true}
    files |= {path: _png(one) for path, (_, one) in zip(paths.guesses, pairs, strict=True)}
    return paths, files


def picture(image: Tensor) -> Image.Image:
    """(C, H, W) in [0, 1] as an 8-bit picture, grey or RGB (other channel counts: the first)."""
    channels = image if image.shape[0] in (1, 3) else image[:1]
    pixels = (channels.detach().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)


def sheet(
    pairs: Sequence[tuple[Image.Image | None, Image.Image]], psnr: Sequence[float] | None
) -> Image.Image:
    """Truths above guesses, eight to a row, with their PSNR."""
    columns = max(1, min(8, len(pairs)))
    rows = -(-len(pairs) // columns)
    caption, gap = 18, 6
    cell = (TILE + gap, 2 * TILE + caption + 2 * gap)
    page = Image.new("RGB", (columns * cell[0] + gap, rows * cell[1] + gap), "white")
    draw = ImageDraw.Draw(page)
    for i, (true, guessed) in enumerate(pairs):
        x, y = gap + (i % columns) * cell[0], gap + (i // columns) * cell[1]
        for image, top in ((true, y), (guessed, y + TILE + 2)):
            if image is not None:
                tile = image.convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST)
                page.paste(tile, (x, top))
        if psnr is not None:
            draw.text((x + 2, y + 2 * TILE + 4), f"{psnr[i]:.1f} dB", fill="black")
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
