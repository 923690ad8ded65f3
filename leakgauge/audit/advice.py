"""A verdict in words: its headline, what it rests on, and what to do next, most urgent first.

Pure functions of what `verdict.judge` found. Every sentence that reassures names the number of
records and the attacks behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from leakgauge.attacks.exposure import Exposure
from leakgauge.audit import checks
from leakgauge.audit.document import NO_DEFENCE
from leakgauge.audit.results import (
    Decided,
    Defended,
    Measured,
    Measurement,
    NotRun,
    Outcome,
    Result,
    Row,
    Trial,
)

DECODES = "separate-and-decode"
CAP = 50.0  # dB: from here on a reconstruction is the picture, and more decibels mean nothing


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def capped(psnr: float) -> str:
    """A PSNR in words that mean something."""
    return f"over {CAP:g} dB" if psnr > CAP else f"{psnr:.1f} dB"


def reached(kind: str, metrics: Iterable[Measurement]) -> str:
    """From which score on a record counts as recovered, for a kind of leak that a metric shows."""
    name = "psnr" if kind == "pictures" else kind
    metric = next(one for one in metrics if one.name == name)
    number = f"{metric.limit:g} {metric.unit}".rstrip()
    return (
        f"{number} or better" if name == "psnr" else f"{metric.label} {number} or {metric.better}"
    )


def named(kind: str, metrics: Iterable[Measurement]) -> str:
    """What leaks, in a word or two."""
    label = next((metric.label for metric in metrics if metric.name == kind), None)
    known = {"found": "recognition"} | ({kind: f"pictures by {label}"} if label else {})
    return known.get(kind, kind)


def what_leaks(kind: str, decided: Decided, metrics: Iterable[Measurement]) -> str:
    """One kind of leak in plain words, beginning with how many records."""
    leak = decided.leak
    number = f"{round(leak.share * leak.records)} of {leak.records}"
    if kind == "found":
        return (
            f"{number} records could be picked out of {decided.gallery} pictures by their "
            f"reconstruction (guessing: {leak.chance:.1%})".replace("%", " %")
        )
    if kind == "labels":
        return f"{percent(leak.share)} of the labels were read (guessing: {percent(leak.chance)})"
    return f"{number} records were recovered to {reached(kind, metrics)}"


def headline(
    outcome: Outcome,
    kinds: Mapping[str, Decided],
    records: int,
    reason: tuple[str, str],
    failed: Sequence[Trial],
    metrics: Sequence[Measurement],
) -> str:
    if outcome == "leaks":
        leaks = {kind: one for kind, one in kinds.items() if one.leak.state == "leaks"}
        said = "; ".join([what_leaks(kind, one, metrics) for kind, one in leaks.items()])
        only = " labels" if set(leaks) == {"labels"} else ""
        return f"This federation leaks{only}: {said}."
    if outcome == "failed":
        return f"Part of the audit crashed ({_number(len(failed), 'trial')}): no verdict is given."
    if outcome == "inconclusive":
        return f"Inconclusive: {reason[0]}"
    nouns = {
        "found": "picked out of the gallery beyond guessing",
        "labels": "of the labels read beyond guessing",
    }
    ends = [
        f"at most {percent(one.leak.interval[1])} "
        f"{nouns.get(kind) or f'recovered to {reached(kind, metrics)}'} "
        f"(limit {percent(one.leak.limit)})"
        for kind, one in kinds.items()
    ]
    return (
        f"Below the limit, for the attacks that were run on {_number(records, 'record')}: "
        f"{'; '.join(ends)}."
    )


def why_inconclusive(kinds: Mapping[str, Decided], result: Result) -> tuple[str, str]:
    """Why nothing can be said, and what to do about it."""
    if not kinds:
        return _nothing_judged(result.summary, result.not_run)
    if not result.control:
        return (
            "nothing leaked, but no attack was tried on a known-weak twin, so their failure here "
            "is no evidence of safety.",
            "Set `control = true` in [audit] and run the audit again: it shows whether these "
            "attacks can work at all.",
        )
    without = [kind for kind, one in kinds.items() if one.leak.state == "no control"]
    if set(without) - {"labels"}:
        return (
            "no attack recovered a record of a known-weak twin either, so their failure here is "
            "no evidence of safety.",
            "Give the attacks more iterations or restarts, or name stronger attacks in the plan, "
            "until one of them breaks the twin.",
        )
    if without:
        return (
            "no attack read the labels of a known-weak twin, so that none were read here is no "
            "evidence of safety.",
            "Name an attack in the plan that reads labels, such as inverting-gradients.",
        )
    if any(one.leak.state == "untested" for one in kinds.values()):
        names = _listed(list(dict.fromkeys(_unknown(result))))
        return (
            f"no attack that was run knows {names}, so that it did not leak is no evidence of "
            "safety.",
            "Name an attack that matches updates, such as inverting-gradients, and leave "
            "`adaptive = true` in [audit]. A defence of your own says what an attacker does who "
            "knows it by a method `answered`.",
        )
    if result.plan.federation.hides and {one.leak.state for one in kinds.values()} == {"below"}:
        return (
            "the model has PRECODE, and no attack that was run knows a way around it, so that "
            "nothing leaked is no evidence of safety.",
            "Audit the model without `precode`, and protect it by a defence that attackers know.",
        )
    undecided = [(kind, one.leak) for kind, one in kinds.items() if one.leak.state == "undecided"]
    if not undecided and not result.not_run:
        return _unscored(result.summary)
    if not undecided:
        return (
            f"{_number(len(result.not_run), 'trial')} of the plan did not run "
            f"({result.not_run[0].reason}), and might have leaked.",
            "Raise the budget, and continue with --resume.",
        )
    kind, leak = max(undecided, key=lambda item: item[1].more or math.inf)
    low, high = leak.interval
    so_far = (
        f"too few records. {_number(leak.records, 'record')} cannot show that no more than "
        f"{percent(leak.limit)} {_subject(kind)} (95 % interval {percent(low)} to "
        f"{percent(high)})."
    )
    if leak.more is None:
        key = kind if kind in ("found", "labels") else "share"
        remedy = (
            f"No number of records can show a limit of {leak.limit:.3g}: raise "
            f"`limit.{key}` in [audit]."
        )
    else:
        remedy = (
            f"Attack at least {_number(leak.more, 'more record')}: add `seeds` in [audit]. If "
            "none of them leaks, that decides it."
        )
    return so_far, remedy


def _unknown(result: Result) -> list[str]:
    """Defences that no attacker of some attacked round knows."""
    rows = [row for row in result.summary if row.measured and row.defence != NO_DEFENCE]
    known = {(r.round, r.defence) for r in rows if r.measured and r.measured.adapted}
    return [row.defence for row in rows if (row.round, row.defence) not in known]


def _unscored(summary: Iterable[Row]) -> tuple[str, str]:
    count = _number(sum(row.unscored for row in summary), "trial")
    return (
        f"nobody knows the truth behind {count}: what the attacks made was not scored, and may "
        "show the records.",
        "Look at the pictures yourself (`leakgauge report FOLDER --images show`), or give the true "
        "records with the captured updates.",
    )


def _subject(kind: str) -> str:
    return {
        "found": "of the records can be picked out of the gallery",
        "labels": "of the labels can be read",
    }.get(kind, "of the records can be recovered")


def _nothing_judged(summary: Sequence[Row], not_run: Sequence[NotRun]) -> tuple[str, str]:
    if any(row.unscored for row in summary):
        return _unscored(summary)
    if any(row.measured for row in summary):
        return (
            "every attacker of this audit was told truths that no real one would have; such "
            "numbers are an upper bound, not a verdict.",
            "Take `labels`, `statistics` and `clients` out of `threat.grants` and audit again.",
        )
    if summary and all(row.not_applicable == row.trials for row in summary):
        return (
            "none of the attacks that were run applies to this federation.",
            "Name other attacks in the plan: `leakgauge check` says which apply.",
        )
    why = f" ({not_run[0].reason})" if not_run else ""
    return (
        f"no attack was run to its end{why}.",
        "Raise the budget, and continue with --resume.",
    )


def sentences(
    worst: tuple[Row, Measured] | None, result: Result, failed: Sequence[Trial]
) -> list[str]:
    said = []
    if worst:
        row, measured = worst
        psnr, base = measured.scores["psnr"], measured.mean_image["psnr"]
        low, high = psnr.interval
        said.append(
            f"Strongest attack: {row.attack} at round {row.round}, "
            f"{defended(row.defence)}: median PSNR {capped(psnr.median)} (95 % interval "
            f"{capped(low)} to {capped(high)}, highest {capped(psnr.most)}) over "
            f"{_number(measured.records, 'record')}; a mean image scores {base:.1f} dB."
        )
    passed = [entry.attack for entry in result.control if entry.passed]
    tried = [entry for entry in result.control if entry.psnr is not None]
    if result.control:
        said.append(
            f"Positive control: {len(passed)} of {_number(len(tried), 'attack')} recovered "
            "records of the known-weak twin" + (f" ({', '.join(passed)})." if passed else ".")
        )
    if failed:
        said.append(f"{_number(len(failed), 'trial')} crashed; the errors are below.")
    if unscored := sum(row.unscored for row in result.summary):
        said.append(f"{_number(unscored, 'trial')} not scored: nobody knows the truth.")
    if result.not_run:
        said.append(
            f"{_number(len(result.not_run), 'trial')} not run: "
            f"{result.not_run[0].reason.rstrip('.')}."
        )
    return said


def defended(defence: str) -> str:
    return "no defence" if defence == "none" else f"defence {defence}"


# What an update shows before any attack


OUTSIDE = "Outside this regime the exact method does not apply; other attacks may still work."
NOISE = (
    "Noise is no sure way out: where we measured, 30 % of the update's root mean square did not "
    "always stop it."
)


def exposed(found: Exposure) -> str:
    """What the update of a round shows exactly, and by which layer."""
    if found.layer is None:
        return f"The exact method does not apply here: {found.reason.rstrip('.')}."
    held = _number(found.views, "record")
    if found.views != found.records:
        held = f"{_number(found.records, 'record')}, used {found.views:,} times"
    most = f"the activations of up to {_number(found.limit, 'record')} exactly"
    if found.exposed:
        return (
            f"Exposed before any attack: an update here holds {held}, and {found.layer} can show "
            f"{most}."
        )
    return f"An update here holds {held}: too many for {found.layer}, which can show {most}."


def way_out(found: Exposure) -> str:
    """What would have to change for an update to leave the regime of the exact method."""
    if found.layer is None:
        return "That is no protection: other attacks may still work."
    if not found.exposed:
        return OUTSIDE
    most = f"{found.limit * found.records // found.views:,} records in a round like this"
    also = f" ({most})" if found.views != found.records else ""
    return (
        f"More than {_number(found.limit, 'record')} per update, batch size × local steps{also}, "
        f"leave this regime. {NOISE} {OUTSIDE}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# What to do next


def next_steps(
    outcome: Outcome,
    kinds: Mapping[str, Decided],
    defences: Sequence[Defended],
    reason: tuple[str, str],
    result: Result,
) -> list[str]:
    """What the reader should do, the most urgent first."""
    steps: list[str] = []
    threat, decode = result.plan.threat, _decode_step(kinds, result)
    if outcome == "leaks":
        leaks = [kind for kind, one in kinds.items() if one.leak.state == "leaks"]
        others = {"client": "another client", "eavesdropper": "an eavesdropper"}
        whoever = others.get(threat.actor, "a server")
        can = {"found": "recognise records", "labels": "read labels"}
        does = list(dict.fromkeys(can.get(kind, "rebuild records") for kind in leaks))
        steps.append(
            "Protect updates like the data they come from until the leak is closed: "
            f"{whoever} that sees them can {_listed(does)}."
        )
        if result.plan.federation.captured:
            steps.append(
                "Test defences: describe your federation in a plan with [[defence]] tables, and "
                "audit that. What was captured has been sent; no defence changes it any more."
            )
        elif not result.trained:  # a trade-off says more
            steps += _defence_steps(defences, leaks, result.metrics)
        held = [kind for kind, one in kinds.items() if one.leak.state == "no control"]
        if held:
            names = _listed([named(kind, result.metrics) for kind in held])
            steps.append(
                f"Do not take {names} for safe: no attack succeeded on the known-weak twin either. "
                "Give the attacks more iterations, or name stronger ones."
            )
        steps += decode
        if threat.actor == "eavesdropper":
            steps.append(
                "Encrypt updates on their way, and let no client train on records of strangers: an "
                "eavesdropper needs both. A server reads them all the same: audit it, too, with "
                '`actor = "server"` in [threat].'
            )
        if threat.actor == "server" and not threat.malicious:
            steps.append(
                'Consider secure aggregation, and audit it with `actor = "aggregate"` in '
                "[threat]: it hides single updates, and was not tested here."
            )
    elif outcome == "failed":
        steps.append(
            "Read the errors below, remove their cause, and run the same command with --resume: "
            "finished trials are kept."
        )
    elif outcome == "inconclusive":
        steps += [reason[1], *decode]
    else:
        steps += decode
        steps.append(
            "Audit again when the model, the data, the batch size, the training or the attacked "
            "round changes: this verdict holds for what was audited."
        )
        if threat.actor == "eavesdropper":
            steps.append(
                'Audit with `actor = "server"` in [threat], too: a server holds the weights, which '
                "this eavesdropper lacks, and was not tested here."
            )
        elif not threat.malicious and threat.actor != "client":
            steps.append(
                "Audit with `malicious = true` in [threat] if the server might send a manipulated "
                "model: this audit did not test that."
            )
    if result.not_run and outcome != "inconclusive":
        steps.append(
            f"{_number(len(result.not_run), 'trial')} of the plan did not run: raise the budget "
            "and continue with --resume."
        )
    short = [
        trial.attack for trial in result.trials
        if trial.kind == "trial" and trial.found
        and (checks.still_falling(trial.found) or checks.cut_short(trial.found))
    ]  # fmt: skip
    if short and outcome != "failed":
        steps.append(
            f"Give {_listed(list(dict.fromkeys(short)))} more iterations or time: the search had "
            "not ended, and would have got further."
        )
    return steps


def _decode_step(kinds: Mapping[str, Decided], result: Result) -> list[str]:
    """What to do where an update shows records exactly, and nobody tried to see them."""
    ran = any(trial.attack == DECODES for trial in result.trials if trial.kind == "trial")
    seen = "pictures" in kinds and kinds["pictures"].leak.state == "leaks"
    if (
        not any(one.exposed for one in result.exposure)
        or result.plan.threat.actor != "server"
        or len(result.federation.shape) != 3  # it decodes images
        or ran
        or seen
    ):
        return []
    return [
        f"Name the attack {DECODES} and audit again: an update here shows records exactly, and "
        "that attack goes from there to pictures. It was not run here."
    ]


def _defence_steps(
    defences: Sequence[Defended], leaks: Sequence[str], metrics: Sequence[Measurement]
) -> list[str]:
    """What the tested defences are worth against these kinds of leak, in one step."""
    tested = [entry for entry in defences if entry.defence != "none" and entry.kinds]
    if not tested:
        return [
            "Test defences: add [[defence]] tables to the plan (`leakgauge list defences`) and "
            "audit again. None was tested here."
        ]

    def grouped(entry: Defended) -> list[list[str]]:
        """The kinds that are open, those that are not decided, and those that are closed."""
        states = {kind: one.leak.state for kind, one in entry.kinds.items()}
        groups = (("leaks",), ("undecided", "no control", "untested"), ("below",))
        return [[kind for kind in leaks if states.get(kind) in group] for group in groups]

    def told(kinds: Iterable[str]) -> str:
        return _listed([named(kind, metrics) for kind in kinds])

    best = min(tested, key=lambda entry: [len(kinds) for kinds in grouped(entry)[:2]])
    open_, unknown, closed = grouped(best)
    if not open_ and not unknown:
        records = min(best.kinds[kind].leak.records for kind in closed)
        others = [kind for kind, one in best.kinds.items() if one.leak.state != "below"]
        return [
            f"Use {best.defence}: with it the leak of {told(closed)} was below the limit, on "
            f"{_number(records, 'record')} and against attackers who know it. "
            + (f"Of {told(others)} this audit cannot tell. " if others else "")
            + "Measure what it costs in accuracy first; this audit did not."
        ]
    if len(open_) == len(leaks):
        return ["None of the tested defences closed the leak: test stronger settings, or others."]
    parts = []
    if unknown:
        more = max(best.kinds[kind].leak.more or 0 for kind in unknown)
        evidence = "the known-weak twin gave no evidence"
        if any(best.kinds[kind].leak.state == "untested" for kind in unknown):
            evidence = "no attack that was run knows it"
        elif more:
            evidence = f"at least {_number(more, 'more record')} must show it"
        parts.append(f"it may close the leak of {told(unknown)}, but {evidence}")
    if closed:
        parts.append(f"it closed the leak of {told(closed)}")
    if open_:
        parts.append(f"the leak of {told(open_)} is still open")
    return [f"Look closer at {best.defence}: {'; '.join(parts)}."]


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
