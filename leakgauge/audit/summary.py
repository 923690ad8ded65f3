"""What follows from the trials of an audit: rows, controls, explanation, verdict.

Pure functions of what result.json keeps, so that whoever reads the file can derive them again:
medians are over images × seeds, never the best of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from leakgauge.attacks.exposure import Exposure
from leakgauge.audit.advice import CAP, capped
from leakgauge.audit.document import Limit
from leakgauge.audit.results import (
    Control,
    Explanation,
    LabelShare,
    Leak,
    Measured,
    Measurement,
    Result,
    Row,
    Rung,
    Score,
    Scores,
    Spread,
    Trial,
    Verdict,
)
from leakgauge.audit.tradeoff import compare
from leakgauge.audit.verdict import judge, judge_control, kind_of, leaking, recognised, weigh
from leakgauge.metrics import bootstrap, risk

SUCCESS = 20.0  # dB: from here on the risk is called very high
FALL = 3.0  # dB a rung must fall for its factor to be named as hindering


def derived(result: Result, controls: Iterable[str], ladder: Explanation | None) -> Result:
    """The result with everything that its trials decide. `controls` are the ids of trials on the
    known-weak twin; the rungs of `ladder` hold the ids of theirs."""
    by_id = {trial.id: trial for trial in result.trials}
    limit, metrics = result.plan.audit.limit, result.metrics
    summary = summarise([t for t in result.trials if t.kind == "trial"], limit, metrics)
    control = judged([by_id[id_] for id_ in controls if id_ in by_id], limit, metrics)
    verdict = judge(replace(result, summary=summary, control=control))
    given = replace(result, summary=summary, control=control, verdict=verdict)
    return replace(
        given,
        explanation=explain(ladder, by_id, verdict, result.exposure) if ladder else None,
        tradeoff=compare(given),
    )


def judged(
    trials: Iterable[Trial], limit: Limit, metrics: Sequence[Measurement]
) -> tuple[Control, ...]:
    """One control entry per attack."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.attack, []).append(trial)
    return tuple(judge_control(_row(group, limit, metrics), group) for group in groups.values())


def summarise(
    trials: Iterable[Trial], limit: Limit, metrics: Sequence[Measurement]
) -> tuple[Row, ...]:
    """One row for each stage, defence and attack, in the order of the plan."""
    groups: dict[tuple[int, str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.round, trial.defence, trial.attack), []).append(trial)
    return tuple(_row(group, limit, metrics) for group in groups.values())


def _row(group: Sequence[Trial], limit: Limit, metrics: Sequence[Measurement]) -> Row:
    first = group[0]
    scored = [(trial, trial.score) for trial in group if trial.score]
    return Row(
        round=first.round,
        defence=first.defence,
        attack=first.attack,
        trials=len(group),
        failed=sum(trial.status == "failed" for trial in group),
        not_applicable=sum(trial.status == "not applicable" for trial in group),
        unscored=sum(trial.status == "unscored" for trial in group),
        reason=next((trial.error for trial in group if trial.error), None),
        measured=_measured([score for _, score in scored], _least_adapted(scored), limit, metrics)
        if scored
        else None,
    )


def _least_adapted(scored: Sequence[tuple[Trial, Score]]) -> Trial:
    """A trial that stands for all in a row: one that did not adapt, if there is one."""
    return min((trial for trial, _ in scored), key=lambda t: bool(t.found and t.found.adapted))


def _measured(
    scores: Sequence[Score], first: Trial, limit: Limit, metrics: Sequence[Measurement]
) -> Measured:
    psnr = _pooled(scores, "psnr")
    names = [metric.name for metric in metrics]
    return Measured(
        realism=first.realism,
        records=sum(score.records for score in scores),
        scores={name: spread(_pooled(scores, name)) for name in (*names, "identified")},
        mean_image={
            n: statistics.median(v for s in scores for v in s.mean_image[n]) for n in names
        },
        random_image={
            n: statistics.median(v for s in scores for v in s.random_image[n]) for n in names
        },
        identified=_chance(scores),
        labels=_labels(scores),
        leaks=_leaks(scores, limit, metrics),
        success_rate=sum(value >= SUCCESS for value in psnr) / len(psnr),
        risk=risk(statistics.median(psnr)),
        worst_risk=risk(max(psnr)),
        caveats=tuple(dict.fromkeys(c for score in scores for c in score.caveats)),
        adapted=first.found.adapted if first.found else None,
        raw=_spreads([score.raw for score in scores if score.raw]),
        prior_only=_spreads([score.prior_only for score in scores if score.prior_only]),
    )


def _spreads(tables: Sequence[Scores]) -> dict[str, Spread] | None:
    """By metric, over the trials that have such a table."""
    known = [name for name in tables[0] if all(name in table for table in tables)] if tables else []
    pooled = {name: [value for table in tables for value in table[name]] for name in known}
    return {name: spread(values) for name, values in pooled.items()} or None


def _labels(scores: Iterable[Score]) -> LabelShare | None:
    """Labels read, and what guessing gives, over the records of all trials that named any."""
    named = [(score.records, score.labels) for score in scores if score.labels]
    total = sum(records for records, _ in named)
    if not named:
        return None
    return LabelShare(
        accuracy=sum(labels.accuracy * records for records, labels in named) / total,
        random=sum(labels.random * records for records, labels in named) / total,
        class_prior=sum(labels.class_prior * records for records, labels in named) / total,
    )


def _leaks(
    scores: Sequence[Score], limit: Limit, metrics: Sequence[Measurement]
) -> dict[str, Leak]:
    """The kinds of leak that these trials measured, each against its limit."""
    records = sum(score.records for score in scores)
    leaks = {}
    for metric in metrics:
        if metric.limit is not None:
            count = sum(leak for score in scores for leak in leaking(score, metric, metric.limit))
            leaks[kind_of(metric)] = weigh(count / records, 0.0, records, limit.share)
    count = sum(sum(recognised(score)) for score in scores)
    # Who holds a raw picture beside the restored one may guess twice.
    chance = min(1.0, _chance(scores) * (2 if any(score.raw for score in scores) else 1))
    leaks["found"] = weigh(count / records, chance, records, limit.found)
    if labels := _labels(scores):
        guessing = max(labels.random, labels.class_prior)
        number = sum(score.records for score in scores if score.labels)
        leaks["labels"] = weigh(labels.accuracy, guessing, number, limit.labels)
    return leaks


def spread(values: Sequence[float]) -> Spread:
    """Median with quartiles, extremes and a bootstrap interval of the median."""
    ordered = sorted(values)
    rng = torch.Generator().manual_seed(0)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(values) > 1 else []
    return Spread(
        mean=statistics.fmean(ordered),
        median=statistics.median(ordered),
        quartiles=(quartiles[0], quartiles[2]) if quartiles else (ordered[0], ordered[0]),
        interval=bootstrap.interval(ordered, rng),
        least=ordered[0],
        most=ordered[-1],
        count=len(ordered),
    )


def explain(
    ladder: Explanation,
    trials: Mapping[str, Trial],
    verdict: Verdict,
    exposure: Sequence[Exposure] = (),
) -> Explanation:
    """Which factor hinders the attack most: the rung of the ladder where the median falls most.
    Decibels beyond CAP are no difference that anybody could see, and do not count."""
    rungs: list[Rung] = []
    for rung in ladder.rungs:
        known = [trials[id_].score for id_ in rung.trials if id_ in trials]
        scores = _pooled([score for score in known if score], "psnr")
        median = statistics.median(scores) if scores else None
        before = rungs[-1].median if rungs else None
        change = None
        if median is not None and before is not None:
            change = min(median, CAP) - min(before, CAP)
        rungs.append(replace(rung, median=median, change=change))
    ended = ladder.rungs[-1].trials if ladder.rungs else ()
    last = [trials[id_].found for id_ in ended if id_ in trials]
    adapts = bool(last) and all(found and found.adapted for found in last)
    said = _why(ladder.attack, rungs, verdict, exposure, adapts)
    return Explanation(ladder.attack, tuple(rungs), said)


def _why(
    attack: str,
    rungs: Sequence[Rung],
    verdict: Verdict,
    exposure: Sequence[Exposure],
    adapts: bool,
) -> str:
    if verdict.outcome == "inconclusive":
        return "What protects cannot be said: the audit is inconclusive."
    if verdict.outcome == "failed":
        return "What protects cannot be said: part of the audit crashed."
    medians = [rung.median for rung in rungs if rung.median is not None]
    if len(medians) < len(rungs) or len(rungs) < 2:
        return "What protects cannot be said: too few trials of the ladder were run."
    changes = [rung.change or 0.0 for rung in rungs]
    most = min(range(1, len(rungs)), key=lambda i: changes[i])
    limit = verdict.limit.psnr
    if changes[most] > -FALL:
        return (
            f"No factor that was tested hinders {attack} by {FALL:g} dB or more: its median is "
            f"{capped(medians[0])} on the weakest twin and {capped(medians[-1])} "
            "with everything in place."
        )
    rung = rungs[most]
    left = "still above" if medians[most] >= limit else "below"
    known = more = ""
    if rung.factor == "defence":
        known = (
            ", from an attacker who knows it"
            if adapts
            else ("; the attack does not know it, so this is no protection that was tested")
        )
    if rung.factor in ("steps", "batch norm", "batch") and any(one.exposed for one in exposure):
        more = (
            " That is no protection: by their number alone these records can still be told apart "
            "exactly."
        )
    return (
        f"What hinders {attack} most is the {rung.factor} ({rung.label}): the median falls "
        f"from {capped(medians[most - 1])} to {capped(medians[most])}, {left} the limit of "
        f"{limit:g} dB{known}.{more}"
    )


def _pooled(scores: Iterable[Score], name: str) -> list[float]:
    return [value for score in scores for value in score.scores[name]]


def _chance(scores: Sequence[Score]) -> float:
    """The chance to pick a record out of the gallery, over all records."""
    total = sum(score.records for score in scores)
    return sum(score.identified * score.records for score in scores) / total
