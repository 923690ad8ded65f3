"""The board as a picture: one dot an image, a bar at the median. Drawn by `board.py --render`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

OWN, OTHER, BLANK = "#b3261e", "#4a6785", "#999999"


@dataclass(frozen=True)
class Panel:
    """A setup: the PSNR of every image by attack, and that of the mean image."""

    title: str
    scores: dict[str, list[float]]
    blank: list[float]


def draw(panels: list[Panel], own: str, path: Path) -> None:
    """Attacks from best to worst, the one called `own` in another colour."""
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, sharex=True, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        scores = panel.scores
        order = sorted(scores, key=lambda name: statistics.median(scores[name]))
        for place, name in enumerate(order):
            colour = OWN if name == own else OTHER
            axis.scatter(
                scores[name], [place] * len(scores[name]), s=14, alpha=0.45, lw=0, c=colour
            )
            axis.vlines(statistics.median(scores[name]), place - 0.3, place + 0.3, colour, lw=2.5)
        axis.axvline(statistics.median(panel.blank), color=BLANK, lw=0.9, ls="--")
        axis.axvline(20, color=BLANK, lw=0.9, ls=":")
        axis.set_yticks(range(len(order)), order, fontsize=8)
        axis.set_ylim(-0.6, max(len(order), 4) - 0.4)
        axis.set_title(panel.title, fontsize=9, loc="left")
        axis.tick_params(axis="x", labelbottom=True, labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes:  # the last one, if their number is odd
        axis.set_visible(False)
    figure.supxlabel("PSNR in dB; dashed: mean image, dotted: 20 dB", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})
