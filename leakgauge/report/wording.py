"""Numbers and texts as a report writes them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from leakgauge.audit.results import Measurement

NOTHING = "–"
SPACE = "\N{NO-BREAK SPACE}"
MOST_LISTED = 20  # entries of a list that could be as long as the audit
MOST_CHARACTERS = 4_000  # of one error or one traceback


def decibels(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}{SPACE}dB"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.0f}{SPACE}%"


def number(value: float, metric: Measurement) -> str:
    """A score by any metric, with its unit."""
    return f"{value:.3g}" + (f"{SPACE}{metric.unit}" if metric.unit else "")


def span(pair: tuple[float, float]) -> str:
    low, high = f"{pair[0]:.1f}", f"{pair[1]:.1f}"
    return f"{low} to {high}" if "-" in low + high else f"{low}–{high}"


def change(value: float | None) -> str:
    """A difference in decibels, with its sign."""
    return NOTHING if value is None else f"{value:+.1f}{SPACE}dB".replace("-", "\N{MINUS SIGN}")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:MOST_LISTED])
    return shown + (f" and {len(numbers) - MOST_LISTED:,} more" * (len(numbers) > MOST_LISTED))


def duration(seconds: float) -> str:
    whole = round(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def tidy(text: str) -> str:
    """Text without characters that steer a terminal or turn the reading direction."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or _harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _harmless(character: str) -> bool:
    # Cc: control; Cs: half a character; Cf: invisible, among them those that turn the direction
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _TURNS


_TURNS = {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def brief(text: str, most: int = 160) -> str:
    """The first sentence or clause of a reason; the whole of it is in result.json."""
    ends = [end for mark in ("; ", ". ") if (end := text.find(mark)) > 0]
    first = text[: min(ends, default=len(text))]
    return first if len(first) <= most else f"{first[: most - 1].rstrip()}…"
