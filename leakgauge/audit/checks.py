"""The audit examines itself: what could make a number look safer than the federation is.

Each check reads one finished trial and returns a caveat, in words, or nothing. Caveats stand beside
the number they concern, in the result and in every report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Trial = dict[str, Any]

STILL_FALLING = 0.05  # relative fall of the objective over the last tenth of the run
DISAGREEMENT = 0.5  # relative spread of the objectives of restarts
NO_GAIN = 0.5  # dB above the mean image below which a guess is called the prior


def still_falling(trial: Trial) -> str | None:
    """The budget ended before the attack did: it would have got further."""
    history = [value for value in trial["history"] if value is not None]
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


def restarts_disagree(trial: Trial) -> str | None:
    """Restarts ended in different places: the outcome depends on luck."""
    ends = trial["facts"].get("objectives", [])
    if len(ends) > 1 and (max(ends) - min(ends)) > DISAGREEMENT * max(abs(max(ends)), 1e-12):
        return (
            f"restarts disagree (objectives {min(ends):.2g} to {max(ends):.2g}): "
            "more restarts may find a better one"
        )
    return None


def zero_gradients(trial: Trial) -> str | None:
    """Whole tensors of the update are zero: frozen layers, dead units, or a broken client."""
    share = trial["facts"].get("zero_tensors", 0.0)
    if share > 0:
        return f"{share:.0%} of the update's tensors are zero: is training really happening there?"
    return None


def derivative_differed(trial: Trial) -> str | None:
    """The fast derivative disagreed with the exact one; the exact one was used."""
    for note in trial["notes"]:
        if "derivative was off" in note:
            return str(note)
    return None


def cut_short(trial: Trial) -> str | None:
    for note in trial["notes"]:
        if "time budget" in note:
            return f"{note}: more time would leak more"
    return None


def labels_below_baseline(trial: Trial) -> str | None:
    """Worse than guessing: label inference misled the attack."""
    labels = trial["labels"]
    if labels and labels["accuracy"] < labels["random"]:
        return (
            f"inferred labels ({labels['accuracy']:.0%}) are worse than guessing "
            f"({labels['random']:.0%}): an attacker who knows the labels may do better"
        )
    return None


def equals_the_prior(trial: Trial) -> str | None:
    """The guess is no closer than the mean image: nothing was read from the update."""
    if "psnr" not in trial["scores"]:
        return None
    gain = statistics.median(
        score - base
        for score, base in zip(
            trial["scores"]["psnr"], trial["baselines"]["mean image"]["psnr"], strict=True
        )
    )
    if abs(gain) <= NO_GAIN:
        return f"the guess scores like the mean image ({gain:+.1f} dB): it shows the prior"
    return None


CHECKS: dict[str, Callable[[Trial], str | None]] = {
    "still falling": still_falling,
    "restarts disagree": restarts_disagree,
    "zero gradients": zero_gradients,
    "derivative differed": derivative_differed,
    "cut short": cut_short,
    "labels below baseline": labels_below_baseline,
    "equals the prior": equals_the_prior,
}


def caveats(trial: Trial) -> list[str]:
    """All caveats of a finished trial, in the order of CHECKS."""
    found = (check(trial) for check in CHECKS.values())
    return [caveat for caveat in found if caveat]
