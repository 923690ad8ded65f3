"""A verdict in words: its headline, what it rests on, and what to do next, most urgent first.

Pure functions of what `verdict.judge` found. Every sentence that reassures names the number of
records and the attacks behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from leakgauge.audit import checks

Row = dict[str, Any]

LIMITS = {"pictures": "share", "found": "found", "labels": "labels"}
"""The key of `limit` in a plan that bounds each kind of leak."""

CAP = 50.0  # dB: from here on a reconstruction is the picture, and more decibels mean nothing
NOUNS = {
    "pictures": "recovered to {psnr:g} dB or better",
    "found": "picked out of the gallery beyond guessing",
    "labels": "of the labels read beyond guessing",
}


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def capped(psnr: float) -> str:
    """A PSNR in words that mean something."""
    return f"over {CAP:g} dB" if psnr > CAP else f"{psnr:.1f} dB"


def what_leaks(kind: str, leak: Mapping[str, Any], psnr: float) -> str:
    """One kind of leak in plain words, beginning with how many records."""
    number = f"{round(leak['share'] * leak['records'])} of {leak['records']}"
    if kind == "pictures":
        return f"{number} records were recovered to {psnr:g} dB or better"
    if kind == "found":
        return (
            f"{number} records could be picked out of {leak['gallery']} pictures by their "
            f"reconstruction (guessing: {leak['chance']:.1%})".replace("%", " %")
        )
    return f"{percent(leak['share'])} of the labels were read (guessing: {percent(leak['chance'])})"


def headline(
    outcome: str,
    kinds: dict[str, Any],
    limit: Mapping[str, float],
    records: int,
    reason: tuple[str, str],
    failed: list[dict[str, Any]],
) -> str:
    if outcome == "leaks":
        leaks = {kind: leak for kind, leak in kinds.items() if leak["state"] == "leaks"}
        said = "; ".join([what_leaks(kind, leak, limit["psnr"]) for kind, leak in leaks.items()])
        only = " labels" if set(leaks) == {"labels"} else ""
        return f"This federation leaks{only}: {said}."
    if outcome == "failed":
        return f"Part of the audit crashed ({_number(len(failed), 'trial')}): no verdict is given."
    if outcome == "inconclusive":
        return f"Inconclusive: {reason[0]}"
    ends = [
        f"at most {percent(leak['interval'][1])} {NOUNS[kind].format(psnr=limit['psnr'])} "
        f"(limit {percent(leak['limit'])})"
        for kind, leak in kinds.items()
    ]
    return (
        f"Below the limit, for the attacks that were run on {_number(records, 'record')}: "
        f"{'; '.join(ends)}."
    )


def why_inconclusive(
    kinds: dict[str, Any],
    control: list[dict[str, Any]],
    summary: list[Row],
    not_run: list[dict[str, Any]],
) -> tuple[str, str]:
    """Why nothing can be said, and what to do about it."""
    if not kinds:
        return _nothing_judged(summary, not_run)
    if not control:
        return (
            "nothing leaked, but no attack was tried on a known-weak twin, so their failure here "
            "is no evidence of safety.",
            "Set `control = true` in [audit] and run the audit again: it shows whether these "
            "attacks can work at all.",
        )
    without = [kind for kind, leak in kinds.items() if leak["state"] == "no control"]
    if "pictures" in without or "found" in without:
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
    undecided = [(kind, leak) for kind, leak in kinds.items() if leak["state"] == "undecided"]
    if not undecided:
        return (
            f"{_number(len(not_run), 'trial')} of the plan did not run"
            + (f" ({not_run[0]['reason']})" if not_run else "")
            + ", and might have leaked.",
            "Raise the budget, and continue with --resume.",
        )
    kind, leak = max(undecided, key=lambda item: item[1]["more"] or math.inf)
    low, high = leak["interval"]
    so_far = (
        f"too few records. {_number(leak['records'], 'record')} cannot show that no more than "
        f"{percent(leak['limit'])} {_subject(kind)} (95 % interval {percent(low)} to "
        f"{percent(high)})."
    )
    if leak["more"] is None:
        remedy = (
            f"No number of records can show a limit of {leak['limit']:.3g}: raise "
            f"`limit.{LIMITS[kind]}` in [audit]."
        )
    else:
        remedy = (
            f"Attack at least {_number(leak['more'], 'more record')}: add `seeds` in [audit]. If "
            "none of them leaks, that decides it."
        )
    return so_far, remedy


def _subject(kind: str) -> str:
    return {
        "pictures": "of the records can be recovered",
        "found": "of the records can be picked out of the gallery",
        "labels": "of the labels can be read",
    }[kind]


def _nothing_judged(summary: list[Row], not_run: list[dict[str, Any]]) -> tuple[str, str]:
    if any("scores" in row for row in summary):
        return (
            "every attacker of this audit was told truths that no real one would have; such "
            "numbers are an upper bound, not a verdict.",
            "Take `labels` and `statistics` out of `threat.grants` and run the audit again.",
        )
    if summary and all(row["not_applicable"] == row["trials"] for row in summary):
        return (
            "none of the attacks that were run applies to this federation.",
            "Name other attacks in the plan: `leakgauge check` says which apply.",
        )
    why = f" ({not_run[0]['reason']})" if not_run else ""
    return (
        f"no attack was run to its end{why}.",
        "Raise the budget, and continue with --resume.",
    )


def sentences(
    worst: Row | None,
    control: list[dict[str, Any]],
    not_run: list[dict[str, Any]],
    failed: list[dict[str, Any]],
) -> list[str]:
    said = []
    if worst:
        psnr, base = worst["scores"]["psnr"], worst["baselines"]["mean image"]["psnr"]
        low, high = psnr["interval"]
        said.append(
            f"Strongest attack: {worst['attack']} at round {worst['round']}, "
            f"{defended(worst['defence'])}: median PSNR {capped(psnr['median'])} (95 % interval "
            f"{capped(low)} to {capped(high)}, highest {capped(psnr['most'])}) over "
            f"{_number(worst['records'], 'record')}; a mean image scores {base:.1f} dB."
        )
    passed = [entry["attack"] for entry in control if entry["passed"]]
    tried = [entry for entry in control if entry["psnr"] is not None]
    if control:
        said.append(
            f"Positive control: {len(passed)} of {_number(len(tried), 'attack')} recovered "
            "records of the known-weak twin" + (f" ({', '.join(passed)})." if passed else ".")
        )
    if failed:
        said.append(f"{_number(len(failed), 'trial')} crashed; the errors are below.")
    if not_run:
        said.append(
            f"{_number(len(not_run), 'trial')} not run: {not_run[0]['reason'].rstrip('.')}."
        )
    return said


def defended(defence: str) -> str:
    return "no defence" if defence == "none" else f"defence {defence}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# What to do next


def next_steps(
    outcome: str,
    kinds: dict[str, Any],
    defences: list[dict[str, Any]],
    reason: tuple[str, str],
    not_run: list[dict[str, Any]],
    done: list[dict[str, Any]],
    plan: Mapping[str, Any],
) -> list[str]:
    """What the reader should do, the most urgent first."""
    steps = []
    threat = plan["threat"]
    if outcome == "leaks":
        leaks = [kind for kind, leak in kinds.items() if leak["state"] == "leaks"]
        whoever = "a server" if threat["actor"] != "client" else "another client"
        can = {"pictures": "rebuild records", "found": "recognise records", "labels": "read labels"}
        steps.append(
            "Protect updates like the data they come from until the leak is closed: "
            f"{whoever} that sees them can {_listed([can[kind] for kind in leaks])}."
        )
        steps += _defence_steps(defences, leaks)
        held = [kind for kind, leak in kinds.items() if leak["state"] == "no control"]
        if held:
            names = _listed([{"found": "recognition"}.get(kind, kind) for kind in held])
            steps.append(
                f"Do not take {names} for safe: no attack succeeded on the known-weak twin either. "
                "Give the attacks more iterations, or name stronger ones."
            )
        if threat["actor"] == "server" and not threat.get("malicious"):
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
        steps.append(reason[1])
    else:
        steps.append(
            "Audit again when the model, the data, the batch size, the training or the attacked "
            "round changes: this verdict holds for what was audited."
        )
        if not threat.get("malicious") and threat["actor"] != "client":
            steps.append(
                "Audit with `malicious = true` in [threat] if the server might send a manipulated "
                "model: this audit did not test that."
            )
    if not_run and outcome != "inconclusive":
        steps.append(
            f"{_number(len(not_run), 'trial')} of the plan did not run: raise the budget and "
            "continue with --resume."
        )
    short = [t["attack"] for t in done if checks.still_falling(t) or checks.cut_short(t)]
    if short and outcome != "failed":
        steps.append(
            f"Give {_listed(list(dict.fromkeys(short)))} more iterations or time: the search had "
            "not ended, and would have got further."
        )
    return steps


def _defence_steps(defences: list[dict[str, Any]], leaks: list[str]) -> list[str]:
    """What the tested defences are worth against these kinds of leak, in one step."""
    tested = [entry for entry in defences if entry["defence"] != "none" and entry["kinds"]]
    if not tested:
        return [
            "Test defences: add [[defence]] tables to the plan (`leakgauge list defences`) and "
            "audit again. None was tested here."
        ]

    def having(entry: dict[str, Any], *states: str) -> list[str]:
        kinds = entry["kinds"]
        return [kind for kind in leaks if kind in kinds and kinds[kind]["state"] in states]

    def rank(entry: dict[str, Any]) -> tuple[int, int]:
        return len(having(entry, "leaks")), len(having(entry, "undecided", "no control"))

    best = min(tested, key=rank)
    name, words = best["defence"], {"pictures": "pictures", "found": "recognition"}
    named = {
        state: _listed([words.get(kind, kind) for kind in having(best, *states)] or ["nothing"])
        for state, states in {
            "open": ("leaks",), "closed": ("below",), "unknown": ("undecided", "no control")
        }.items()
    }  # fmt: skip
    left, unknown = rank(best)
    if not left and not unknown:
        records = min(best["kinds"][kind]["records"] for kind in having(best, "below"))
        open_ = [words.get(k, k) for k, leak in best["kinds"].items() if leak["state"] != "below"]
        return [
            f"Use {name}: with it the leak of {named['closed']} was below the limit, on "
            f"{_number(records, 'record')} and against attacks that do not adapt to it. "
            + (f"Of {_listed(open_)} this audit cannot tell. " if open_ else "")
            + "Measure what it costs in accuracy first; this audit did not."
        ]
    if left == len(leaks):
        return ["None of the tested defences closed the leak: test stronger settings, or others."]
    parts = []
    if unknown:
        more = max(
            best["kinds"][kind]["more"] or 0 for kind in having(best, "undecided", "no control")
        )
        evidence = (
            f"at least {_number(more, 'more record')} must show it"
            if more
            else "the known-weak twin gave no evidence"
        )
        parts.append(f"it may close the leak of {named['unknown']}, but {evidence}")
    if having(best, "below"):
        parts.append(f"it closed the leak of {named['closed']}")
    if left:
        parts.append(f"the leak of {named['open']} is still open")
    return [f"Look closer at {name}: {'; '.join(parts)}. The attacks did not adapt to it."]


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
