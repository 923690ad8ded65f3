"""The audit examines itself: what could make a number look safer than the federation is.

Each check reads what one trial found, or its score, and returns a caveat, in words, or nothing.
Caveats stand beside the number they concern, in the result and in every report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from leakgauge.audit.results import Found, Score, Scores

STILL_FALLING = 0.05  # relative fall of the objective over the last tenth of the run
DISAGREEMENT = 0.5  # relative spread of the objectives of restarts
NO_GAIN = 0.5  # dB above what shows nothing of the update below which a guess adds nothing


def still_falling(found: Found) -> str | None:
    """The budget ended before the attack did: it would have got further."""
    history = [value for value in found.history if value is not None]
    tail = max(2, len(history) // 10)
    if len(history) < 20:
        return None
    before, after = min(history[:-tail]), min(history[-tail:])
    fall = (before - after) / max(abs(before), 1e-12)
    if fall > STILL_FALLING:
        return (
            f"the objective was still falling at the end ({fall:.0%} over the last tenth): "
            "more iterations would leak more"
        )
    return None


def restarts_disagree(found: Found) -> str | None:
    """Restarts ended in different places: the outcome depends on luck."""
    ends = [value for value in found.objectives if value is not None]
    if len(ends) > 1 and (max(ends) - min(ends)) > DISAGREEMENT * max(abs(max(ends)), 1e-12):
        return (
            f"restarts disagree (objectives {min(ends):.2g} to {max(ends):.2g}): "
            "more restarts may find a better one"
        )
    return None


def zero_gradients(found: Found) -> str | None:
    """Whole tensors of the update are zero: frozen layers, dead units, or a broken client."""
    share = found.zero_tensors
    if share > 0:
        return f"{share:.0%} of the update's tensors are zero: is training really happening there?"
    return None


def derivative_differed(found: Found) -> str | None:
    """The fast derivative disagreed with the exact one; the exact one was used."""
    if found.differed is None:
        return None
    return f"a derivative was off by {found.differed:.1e}: a more exact one was used from there on"


def cut_short(found: Found) -> str | None:
    if found.stopped == "time":
        count = f" after {found.iterations} iterations" if found.iterations else ""
        return f"stopped by the time budget{count}: more time would leak more"
    return None


def labels_below_baseline(score: Score) -> str | None:
    """Worse than guessing: label inference misled the attack."""
    labels = score.labels
    if labels and labels.accuracy < labels.random:
        return (
            f"inferred labels ({labels.accuracy:.0%}) are worse than guessing "
            f"({labels.random:.0%}): an attacker who knows the labels may do better"
        )
    return None


def equals_the_prior(score: Score) -> str | None:
    """The guess is no closer than the mean image: nothing was read from the update."""
    gain = _gain(score.scores, score.mean_image)
    if abs(gain) <= NO_GAIN:
        return f"the guess scores like the mean image ({gain:+.1f} dB): it shows the prior"
    return None


def invented(score: Score) -> str | None:
    """What a restorer or a generative prior adds looks real, and need not be in any record."""
    if score.prior_only is None:
        return None
    source = "a generative prior" if score.raw is None else "the restorer"
    words = f"{source} can add detail that no record had"
    if _gain(score.scores, score.prior_only) <= NO_GAIN:
        words += "; the picture is no closer than one made without the update"
    if score.raw is not None and _gain(score.raw, score.scores) > NO_GAIN:
        words += "; the raw guess was closer"
    return words


def _gain(scores: Scores, floor: Scores) -> float:
    """The median number of decibels by which pictures are closer than others of their records."""
    return statistics.median(
        value - base for value, base in zip(scores["psnr"], floor["psnr"], strict=True)
    )


OF_FOUND: dict[str, Callable[[Found], str | None]] = {
    "still falling": still_falling,
    "restarts disagree": restarts_disagree,
    "zero gradients": zero_gradients,
    "derivative differed": derivative_differed,
    "cut short": cut_short,
}
OF_SCORE: dict[str, Callable[[Score], str | None]] = {
    "labels below baseline": labels_below_baseline,
    "equals the prior": equals_the_prior,
    "invented": invented,
}


def caveats(found: Found, score: Score) -> tuple[str, ...]:
    """All caveats of a scored trial."""
    said = [check(found) for check in OF_FOUND.values()]
    said += [check(score) for check in OF_SCORE.values()]
    return tuple(caveat for caveat in said if caveat)
