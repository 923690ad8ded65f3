"""Truths and guesses as PNG files: each by itself at its own size, and a sheet to look at."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from leakgauge.audit.results import Pictures
from leakgauge.files import write_atomic

TILE = 128  # pixels of an image on the sheet
LIMIT = 64  # images of a trial that are written; scores cover all


def save(folder: Path, truth: Tensor, guess: Tensor, psnr: Sequence[float] | None) -> Pictures:
    """Write them, and return their paths below the audit's folder."""
    pairs = [(picture(t), picture(g)) for t, g in zip(truth[:LIMIT], guess[:LIMIT], strict=True)]
    for i, (true, guessed) in enumerate(pairs):
        _write(folder / f"{i:03}-truth.png", true)
        _write(folder / f"{i:03}-guess.png", guessed)
    _write(folder / "sheet.png", sheet(pairs, psnr))
    base = f"{folder.parent.name}/{folder.name}"
    return Pictures(
        sheet=f"{base}/sheet.png",
        truths=tuple(f"{base}/{i:03}-truth.png" for i in range(len(pairs))),
        guesses=tuple(f"{base}/{i:03}-guess.png" for i in range(len(pairs))),
    )


def picture(image: Tensor) -> Image.Image:
    """(C, H, W) in [0, 1] as an 8-bit picture, grey or RGB (other channel counts: the first)."""
    channels = image if image.shape[0] in (1, 3) else image[:1]
    pixels = (channels.detach().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)


def sheet(
    pairs: list[tuple[Image.Image, Image.Image]], psnr: Sequence[float] | None
) -> Image.Image:
    """Truths above guesses, eight to a row, with their PSNR."""
    columns = min(8, len(pairs))
    rows = -(-len(pairs) // columns)
    caption, gap = 18, 6
    cell = (TILE + gap, 2 * TILE + caption + 2 * gap)
    page = Image.new("RGB", (columns * cell[0] + gap, rows * cell[1] + gap), "white")
    draw = ImageDraw.Draw(page)
    for i, (true, guessed) in enumerate(pairs):
        x, y = gap + (i % columns) * cell[0], gap + (i // columns) * cell[1]
        for image, top in ((true, y), (guessed, y + TILE + 2)):
            page.paste(
                image.convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST), (x, top)
            )
        if psnr is not None:
            draw.text((x + 2, y + 2 * TILE + 4), f"{psnr[i]:.1f} dB", fill="black")
    return page


def _write(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_atomic(path, buffer.getvalue())
