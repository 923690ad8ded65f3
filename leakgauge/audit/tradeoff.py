"""What protection costs: each setting's accuracy beside its leak, and which setting to take.

Pure functions of what result.json keeps. A setting is a defence of the plan, no defence among them.

Accuracy is the share of held-out records that the trained model names rightly, one number per seed.
Its mean has a 95 % interval over seeds (Student's t). The cost of a defence is the accuracy without
one minus that with it, seed by seed, since both train on the same records from the same weights:
that the mean of these differences is given, not the difference of two means, makes its interval
narrower.

The leak of a setting is that of the kind (pictures, found, labels) which has used up most of what
the plan allows: its share beyond guessing over its limit, so that 1 is the limit. A kind of which
the plan allows everything does not count beside others. A setting meets
the limit when the verdict on this defence alone says so and nothing of it failed or was left out.
It is on the Pareto front when no other setting has as much accuracy and as little leak, and more
accuracy or less leak.

Recommended is, of the settings that meet the limit, the one with the highest mean accuracy. Others
that meet it and whose accuracy cannot be told from that one's, by the interval of the difference
paired by seed, are its ties.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from scipy.special import stdtrit

from leakgauge.audit.advice import percent, what_leaks
from leakgauge.audit.document import NO_DEFENCE, settings
from leakgauge.audit.results import (
    Budget,
    Defended,
    Estimate,
    Leak,
    Outcome,
    Result,
    Row,
    Tradeoff,
    Trained,
    Weighed,
    Worst,
)
from leakgauge.audit.verdict import tested, worst_of

LEAST_LIMIT = 0.01  # a limit below it counts as this one where leaks are compared
EXIT = {"recommended": 0, "none": 1, "failed": 3, "undecided": 4}


def compare(result: Result) -> Tradeoff | None:
    """The trade-off of a result whose verdict is known; None if nothing was trained for one."""
    asked, verdict = result.plan.tradeoff, result.verdict
    if asked is None or verdict is None:
        return None
    done = [one for one in result.trained if one.rounds[-1:] == (asked.rounds,)]
    if not done:
        return None
    entries = {one.defence: Defended(one.defence, "inconclusive", {}) for one in result.trained}
    entries |= {entry.defence: entry for entry in verdict.defences}
    seeds = result.plan.audit.seeds
    free = _accuracies(done, NO_DEFENCE, seeds)
    weighed = [
        _weighed(result, entry, _accuracies(done, defence, seeds), free, _spent(done, defence))
        for defence, entry in entries.items()
    ]
    marked = tuple(replace(one, front=on_front(one, weighed)) for one in weighed)
    ends = [trial.status for trial in result.trials] + [one.status for one in result.trained]
    return _chosen(
        result,
        Tradeoff(
            rounds=asked.rounds,
            seeds=seeds,
            records=done[0].records,
            chance=done[0].chance,
            settings=marked,
            choice="undecided",
            exit_code=EXIT["failed"] if "failed" in ends else EXIT["undecided"],
            recommended=None,
            ties=(),
            nearest=None,
            sentence="",
        ),
    )


# One setting


def _accuracies(done: Iterable[Trained], defence: str, seeds: Sequence[int]) -> tuple[float, ...]:
    """The last accuracy for each seed; nothing unless every seed was trained to the end."""
    last = {one.seed: one.accuracy[-1] for one in done if one.defence == defence}
    return tuple(last[seed] for seed in seeds) if last.keys() >= {*seeds} else ()


def _spent(done: Iterable[Trained], defence: str) -> Budget | None:
    return next((one.spent for one in done if one.defence == defence), None)


def _weighed(
    result: Result,
    entry: Defended,
    accuracies: tuple[float, ...],
    free: tuple[float, ...],
    spent: Budget | None,
) -> Weighed:
    rows = [row for row in result.summary if row.defence == entry.defence]
    worst = max(entry.kinds, key=lambda kind: _severity(entry.kinds[kind].leak), default=None)
    return Weighed(
        defence=entry.defence,
        accuracies=accuracies,
        accuracy=estimate(accuracies, least=0.0) if accuracies else None,
        cost=estimate(_differences(free, accuracies)) if accuracies and free else None,
        outcome=_outcome(result, entry, rows),
        worst=worst,
        leak=entry.kinds[worst] if worst else None,
        strongest=_strongest(rows),
        front=False,
        spent=spent,
    )


def estimate(values: Sequence[float], least: float = -1.0) -> Estimate:
    """The mean of one number per seed, with its interval (Student 1908), which ends at `least` and
    at 1: no share goes beyond."""
    mean = statistics.fmean(values)
    # Rounded, so that another version of the library that computes it gives the same interval.
    quantile = round(float(stdtrit(len(values) - 1, 0.975)), 4)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, (max(least, mean - half), min(1.0, mean + half)))


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a - b for a, b in zip(left, right, strict=True)]


def used(leak: Leak) -> float:
    """How much of what the limit allows has leaked: 1 is the limit."""
    return as_multiple(leak.beyond, leak)


def as_multiple(share: float, leak: Leak) -> float:
    """A share beyond guessing as a multiple of the limit of this leak."""
    return share / max(leak.limit, LEAST_LIMIT)


def _severity(leak: Leak) -> tuple[float, ...]:
    order = {"leaks": 3, "undecided": 2, "below": 0}  # any other state shows nothing
    bounded = leak.limit < 1  # a limit of 1 allows everything, and says nothing
    return order.get(leak.state, 1), bounded, used(leak), as_multiple(leak.interval[1], leak)


def _outcome(result: Result, entry: Defended, rows: Sequence[Row]) -> Outcome:
    """The verdict on this defence alone, unless part of what it should rest on is missing."""
    if entry.outcome == "leaks":
        return "leaks"
    if any(row.failed for row in rows):
        return "failed"
    starts = tuple(f"round{stage}.{entry.defence}." for stage in result.plan.federation.rounds)
    missing = any(one.id.startswith(starts) for one in result.not_run)
    if missing or any(row.unscored for row in rows):
        return "inconclusive"
    return entry.outcome


def _strongest(rows: Iterable[Row]) -> Worst | None:
    """The row with the highest median PSNR, of attackers who were told no truths."""
    judged = [(r, r.measured) for r in rows if r.measured and r.measured.realism != "oracle"]
    if not judged:
        return None
    return worst_of(*max(judged, key=lambda pair: pair[1].scores["psnr"].median))


def on_front(one: Weighed, every: Iterable[Weighed]) -> bool:
    """Whether no other setting is at least as good in both, and better in one."""
    if one.accuracy is None or one.leak is None:
        return False
    accuracy, leak = one.accuracy.mean, used(one.leak.leak)
    for other in every:
        if other.accuracy is None or other.leak is None:
            continue
        more, less = other.accuracy.mean - accuracy, leak - used(other.leak.leak)
        if min(more, less) >= 0 and max(more, less) > 0:
            return False
    return True


# Which one to take


def _chosen(result: Result, given: Tradeoff) -> Tradeoff:
    """With the recommendation, or with what is nearest to one."""
    meet = [one for one in given.settings if one.outcome == "below the limit"]
    known = [(one, one.cost) for one in meet if one.cost]
    if meet and len(known) == len(meet):
        best = max(meet, key=lambda one: one.accuracy.mean if one.accuracy else 0.0)
        ties = tuple(
            one.defence for one in meet
            if one is not best
            and estimate(_differences(best.accuracies, one.accuracies)).interval[0] <= 0
        )  # fmt: skip
        chosen = replace(given, recommended=best.defence, ties=ties)
        return _ended(result, chosen, "recommended", _recommended(result, chosen, best, len(meet)))
    if meet:
        names = _listed([_named(result, one.defence) for one in meet if not one.cost])
        return _ended(
            result,
            given,
            "undecided",
            f"No setting can be recommended yet: {names} stayed below the limit, but what that "
            "costs is not known, since not every seed was trained to the end. Continue with "
            "--resume, or raise the budget.",
        )
    measured = [one for one in given.settings if one.leak]
    nearest = min(measured, key=lambda one: used(one.leak.leak) if one.leak else 0.0, default=None)
    chosen = replace(given, nearest=nearest.defence if nearest else None)
    open_ = [one for one in given.settings if one.outcome != "leaks"]
    choice: Literal["undecided", "none"] = "undecided" if open_ else "none"
    return _ended(result, chosen, choice, _none(result, chosen, nearest, open_))


def _ended(
    result: Result,
    given: Tradeoff,
    choice: Literal["recommended", "none", "undecided"],
    sentence: str,
) -> Tradeoff:
    code = given.exit_code if given.exit_code == EXIT["failed"] else EXIT[choice]
    return replace(given, choice=choice, exit_code=code, sentence=sentence)


def _recommended(result: Result, given: Tradeoff, best: Weighed, meeting: int) -> str:
    assert best.accuracy is not None
    assert best.cost is not None
    kinds = _judged(result, best.defence).kinds.values()
    records = min(decided.leak.records for decided in kinds)
    bounded = [one.leak for one in kinds if one.leak.limit < 1]
    high = max((as_multiple(leak.interval[1], leak) for leak in bounded), default=1.0)
    attacks = {
        row.attack for row in result.summary
        if row.defence == best.defence and row.measured and tested(row, row.measured)
    }  # fmt: skip
    knowing = "" if best.defence == NO_DEFENCE else " by attackers who know it"
    evidence = (
        f"The leak there is at most {percent(high)} of what the plan allows (95 % interval), on "
        f"{_number(records, 'record')} of {_number(len(given.seeds), 'seed')}, against "
        f"{_number(len(attacks), 'attack')} ({_listed(sorted(attacks))}){knowing}."
    )
    free = next(one for one in given.settings if one.defence == NO_DEFENCE)
    learned = ""
    if best.accuracy.interval[0] <= given.chance:
        learned = (
            f" But with it the model learns little: always naming the most frequent class gives "
            f"{share(given.chance)}."
        )
    if best.defence == NO_DEFENCE:
        return (
            f"No defence is needed to stay below the plan's limit, at an accuracy of "
            f"{share(best.accuracy.mean)}. {evidence}{learned}"
        )
    assert free.accuracy is not None
    low, top = best.cost.interval
    among = f", the least of the {meeting} settings that do" if meeting > 1 else ""
    ties = ""
    if given.ties:
        names = _listed([_named(result, name) for name in given.ties])
        ties = f" {names} cannot be told from it in accuracy."
    only = "" if meeting > 1 else "It is the only setting that does. "
    return (
        f"Use {_named(result, best.defence)}: it stays below the plan's limit and costs "
        f"{points(best.cost.mean)} of accuracy{among} (95 % interval {points(low, '')} to "
        f"{points(top, '')}; {share(best.accuracy.mean)} instead of {share(free.accuracy.mean)} "
        f"after {given.rounds} rounds, on {_number(given.records, 'held-out record')}).{ties} "
        f"{only}{evidence}{learned}"
    )


def _none(
    result: Result, given: Tradeoff, nearest: Weighed | None, open_: Collection[Weighed]
) -> str:
    tested = _number(len(given.settings), "tested setting")
    if not nearest or not nearest.leak or not nearest.worst:
        return f"None of the {tested} was measured to the end: continue with --resume."
    said = what_leaks(nearest.worst, nearest.leak, result.metrics)
    came = f"Nearest to it came {_named(result, nearest.defence)}: {said}"
    if nearest.cost:
        came += f", at a cost of {points(nearest.cost.mean)} of accuracy"
    if not open_:
        return (
            f"None of the {tested} stays below the plan's limit. {came}. Test stronger settings or "
            "other defences, larger batches, or secure aggregation."
        )
    names = _listed([_named(result, one.defence) for one in open_])
    more = max((one.leak.leak.more or 0 for one in open_ if one.leak), default=0)
    remedy = f" Attack at least {_number(more, 'more record')}: add `seeds` in [audit]."
    return (
        f"None of the {tested} is shown to stay below the plan's limit; of {names} this cannot be "
        f"told yet. {came}.{remedy if more else ''}"
    )


def _judged(result: Result, defence: str) -> Defended:
    assert result.verdict is not None
    return next(entry for entry in result.verdict.defences if entry.defence == defence)


# Words


def _named(result: Result, defence: str) -> str:
    options = settings(result.plan.defence).get(defence)
    name = "no defence" if defence == NO_DEFENCE else defence
    return f"{name} ({options})" if options else name


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def points(value: float, unit: str = " points") -> str:
    """A difference of two shares, in percentage points."""
    return f"{100 * value:.1f}{unit}".replace("-", "\N{MINUS SIGN}")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
