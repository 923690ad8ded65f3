"""The verdict: from numbers to words and an exit code.

Kinds of leak are weighed, each against its own limit of the plan:

| kind     | a record counts when                                                       | limit    |
|----------|----------------------------------------------------------------------------|----------|
| pictures | its PSNR reaches `limit.psnr` and stands 3 dB above its own mean image     | `share`  |
| a metric | it is as close as the limit of that metric, and closer than its mean image | `share`  |
| found    | its reconstruction is nearer to it than to every other gallery picture     | `found`  |
| labels   | its label is among those that the attack named                             | `labels` |

What a restorer or a generative prior shows without the update is no leak: where there is such a
picture, the guess must be closer than that as well, by the same margin, and what it alone is
recognised by does not count as found. Who restores a guess holds the raw one too: a record counts
when either of the two shows it. The raw one has the mean image to beat.

Shares are taken beyond guessing, (share − chance) / (1 − chance), with a 95 % interval. A row
(stage × defence × attack) then

- *leaks* when its share is above the limit and guessing does not explain it;
- is *below* when the upper end of the interval is not above the limit;
- is *undecided* otherwise: it rests on too few records.

A limit of 1 allows everything: that kind is below it, whatever happens.

| outcome         | when, first that applies                                          | exit code |
|-----------------|-------------------------------------------------------------------|-----------|
| leaks           | some row leaks, judged on attackers that are not told truths      | 1         |
| failed          | a trial crashed                                                   | 3         |
| inconclusive    | a kind is undecided, or no attack showed it on the known-weak     | 4         |
|                 | twin, or no attacker knew the defence, or part of the plan was    |           |
|                 | not run or not scored                                             |           |
| below the limit | every kind is below its limit                                     | 0         |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from leakgauge.audit import advice
from leakgauge.audit.document import NO_DEFENCE, Limit
from leakgauge.audit.results import (
    Control,
    Decided,
    Defended,
    Leak,
    Measured,
    Measurement,
    Outcome,
    Result,
    Row,
    Score,
    Scores,
    State,
    Trial,
    Verdict,
    Worst,
)
from leakgauge.errors import PlanError
from leakgauge.types import Metric

EXIT: dict[Outcome, int] = {"below the limit": 0, "leaks": 1, "failed": 3, "inconclusive": 4}
ORDER: dict[State, int] = {"leaks": 2, "undecided": 1, "below": 0}  # of a row, the worst first
MOST_RECORDS = 10**7  # beyond this many, no number of records is called enough


def measurements(metrics: Mapping[str, Metric], limit: Limit) -> tuple[Measurement, ...]:
    """Metrics as a result tells them, with the limits of the plan."""
    for name in ("pictures", "found", "labels", "identified"):
        if name in metrics:
            raise PlanError(f"a metric cannot be called {name!r}: choose another name")
    limits = {"psnr": limit.psnr} | limit.scores
    return tuple(
        Measurement(
            name, one.label, one.unit, one.better, limits.get(name, one.limit), one.margin
        )
        for name, one in metrics.items()
    )  # fmt: skip


# One row


def kind_of(metric: Measurement) -> str:
    """The kind of leak that a metric with a limit shows."""
    return "pictures" if metric.name == "psnr" else metric.name


def leaking(score: Score, metric: Measurement, limit: float) -> list[bool]:
    """For each record of a scored trial: does a picture of it leak, by this metric?"""
    sign = 1 if metric.better == "higher" else -1

    def shows(table: Scores, *floors: Scores | None) -> list[bool]:
        known = [table[metric.name], *(floor[metric.name] for floor in floors if floor)]
        signed = [[sign * value for value in values] for values in known]
        return [
            value >= sign * limit and value > max(least) and value >= max(least) + metric.margin
            for value, *least in zip(*signed, strict=True)
        ]

    guess = shows(score.scores, score.mean_image, score.prior_only)
    raw = shows(score.raw, score.mean_image) if score.raw else guess
    return [one or other for one, other in zip(guess, raw, strict=True)]


def recognised(score: Score) -> list[bool]:
    """For each record of a scored trial: is it recognised by a picture that needed the update?"""
    guess = score.scores["identified"]
    unread = (score.prior_only or {}).get("identified", (0.0,) * score.records)
    raw = score.raw["identified"] if score.raw else (0.0,) * score.records
    return [bool((a and not b) or c) for a, b, c in zip(guess, unread, raw, strict=True)]


def weigh(share: float, chance: float, records: int, limit: float) -> Leak:
    """One kind of leak of one row: its share beyond guessing against its limit."""
    low, high = (beyond(end, chance) for end in wilson(share, records))
    above = beyond(share, chance)
    state: State = "undecided"
    if above > limit and low > 0:
        state = "leaks"
    elif high <= limit:
        state = "below"
    more = _more(share, chance, records, limit) if state == "undecided" else None
    return Leak(share, chance, records, above, (low, high), limit, state, more)


def beyond(share: float, chance: float) -> float:
    """The share that guessing does not explain; nothing where guessing is always right."""
    return max(0.0, (share - chance) / (1 - chance)) if chance < 1 else 0.0


def wilson(share: float, records: float) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): stays within 0 and 1, and is honest at both ends."""
    z = 1.96
    centre = share + z * z / (2 * records)
    half = z * math.sqrt(share * (1 - share) / records + z * z / (4 * records * records))
    scale = 1 + z * z / records
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _more(share: float, chance: float, records: int, limit: float) -> int | None:
    """How many more records, none of which leaks, would bring the interval below the limit."""

    def enough(number: int) -> bool:
        hits = share * records + chance * (number - records)  # guessing still finds its share
        return beyond(wilson(min(1.0, hits / number), number)[1], chance) <= limit

    low, high = records, 2 * records
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST_RECORDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high - records


# All rows


def judge(result: Result) -> Verdict:
    """The verdict on an audit whose rows and controls are known."""
    summary = result.summary
    shown = {kind for entry in result.control for kind in entry.breaks}
    failed = [trial for trial in result.trials if trial.status == "failed"]
    rows = _judged(summary)
    kinds = _kinds(rows, shown)
    defences = []
    for defence in dict.fromkeys(row.defence for row in summary):  # each by itself
        alone = _kinds([pair for pair in rows if pair[0].defence == defence], shown)
        defences.append(Defended(defence, _outcome(alone, result), alone))
    outcome = _outcome(kinds, result)
    if outcome == "below the limit" and (result.not_run or any(row.unscored for row in summary)):
        outcome = "inconclusive"  # what was left out might have leaked
    if failed and outcome != "leaks":
        outcome = "failed"
    worst = max(rows, key=_severity, default=None)
    records = _records(result.trials)
    reason = advice.why_inconclusive(kinds, result)
    return Verdict(
        outcome=outcome,
        exit_code=3 if failed else EXIT[outcome],
        headline=advice.headline(outcome, kinds, records, reason, failed, result.metrics),
        next=tuple(advice.next_steps(outcome, kinds, defences, reason, result)),
        sentences=tuple(advice.sentences(worst, result, failed)),
        risk=worst[1].risk if worst else None,
        limit=result.plan.audit.limit,
        records=records,
        kinds=kinds,
        defences=tuple(defences),
        worst=worst_of(*worst) if worst else None,
    )


def decided(summary: Iterable[Row], control: Iterable[Control]) -> dict[str, Decided]:
    """Each kind of leak with the row that decides it, after a control that may be another audit's:
    what no attack showed on the twin is not below its limit."""
    return _kinds(_judged(summary), {kind for entry in control for kind in entry.breaks})


def _judged(rows: Iterable[Row]) -> list[tuple[Row, Measured]]:
    """The rows that a verdict rests on: an attacker who is told truths decides nothing."""
    scored = [(row, row.measured) for row in rows if row.measured]
    return [(row, measured) for row, measured in scored if measured.realism != "oracle"]


def tested(row: Row, measured: Measured) -> bool:
    """Whether a row can show that a defence protects: its attacker knows the defence."""
    return row.defence == NO_DEFENCE or measured.adapted is not None


def _severity(judged: tuple[Row, Measured]) -> tuple[bool | float, ...]:
    """Rows in the order of what they give away: leaking kinds, pictures first, then the PSNR."""
    leaks, psnr = judged[1].leaks, judged[1].scores["psnr"]
    open_ = {kind for kind, leak in leaks.items() if leak.state == "leaks"}
    others = open_ - {"pictures", "found", "labels"}
    order = ("pictures" in open_, bool(others), "found" in open_, "labels" in open_)
    return *order, leaks["pictures"].share, psnr.median


def _kinds(rows: Sequence[tuple[Row, Measured]], shown: Collection[str]) -> dict[str, Decided]:
    """For each kind of leak the row that decides it, and whether it is shown to be below. The worst
    row counts, whoever attacked; but that nothing leaks is only shown where an attacker knew the
    defence, among others."""
    found = {}
    for kind in dict.fromkeys(kind for _, measured in rows for kind in measured.leaks):
        row, measured = max(
            (pair for pair in rows if kind in pair[1].leaks),
            key=lambda pair: (ORDER[pair[1].leaks[kind].state], pair[1].leaks[kind].beyond),
        )
        leak = measured.leaks[kind]
        if leak.state != "leaks" and leak.limit < 1:
            if kind not in shown:
                leak = replace(leak, state="no control", more=None)
            elif _untested(rows, kind):
                leak = replace(leak, state="untested", more=None)
        gallery = None
        if kind == "found" and measured.identified:
            gallery = round(1 / measured.identified)
        found[kind] = Decided(row.round, row.defence, row.attack, leak, gallery)
    return found


def _untested(rows: Sequence[tuple[Row, Measured]], kind: str) -> bool:
    """Whether some stage and defence of these rows has no attacker who knows the defence."""
    places: dict[tuple[int, str], bool] = {}
    for one, measured in rows:
        if kind in measured.leaks:
            place = one.round, one.defence
            places[place] = places.get(place, False) or tested(one, measured)
    return not all(places.values())


def _outcome(kinds: Mapping[str, Decided], result: Result) -> Outcome:
    """A model that hides its records in its own way has no attacker here who knows that way."""
    states = {decided.leak.state for decided in kinds.values()}
    if "leaks" in states:
        return "leaks"
    below = states == {"below"} and not result.plan.federation.hides
    return "below the limit" if below else "inconclusive"


def _records(trials: Iterable[Trial]) -> int:
    """On how many different records the verdict rests: those of one stage and seed are the same
    whoever attacks them, under whatever defence."""
    seen: dict[tuple[int, int], int] = {}
    for trial in trials:
        if trial.kind == "trial" and trial.score and trial.realism != "oracle":
            place = trial.round, trial.seed
            seen[place] = max(seen.get(place, 0), trial.score.records)
    return sum(seen.values())


def judge_control(row: Row, trials: Iterable[Trial]) -> Control:
    """Which kinds of leak an attack showed on the known-weak twin, by the limits of the plan."""
    psnr = base = None
    breaks: tuple[str, ...] = ()
    reason = row.reason
    if row.measured:
        psnr, base = row.measured.scores["psnr"].median, row.measured.mean_image["psnr"]
        breaks = tuple(k for k, leak in row.measured.leaks.items() if leak.beyond > leak.limit)
        reason = f"{psnr:.1f} dB where a mean image has {base:.1f}, and no record was recognised"
    passed = bool(set(breaks) - {"labels"})
    return Control(
        attack=row.attack,
        psnr=psnr,
        baseline=base,
        breaks=breaks,
        passed=passed,
        reason=None if passed else reason,
        trials=tuple(trial.id for trial in trials),
    )


def worst_of(row: Row, measured: Measured) -> Worst:
    """A row as what leaks most."""
    psnr = measured.scores["psnr"]
    return Worst(
        round=row.round,
        defence=row.defence,
        attack=row.attack,
        median=psnr.median,
        interval=psnr.interval,
        most=psnr.most,
        share=measured.leaks["pictures"].share,
        records=measured.records,
    )
