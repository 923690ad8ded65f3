"""The first screen of a report: what an officer reads, and perhaps nothing else.

The verdict, on how much evidence it rests, its key figures, the worst picture, what to do next, and
a verdict on each defence. All functions are pure, as those of `contents`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leakgauge.audit.advice import capped, defended, what_leaks
from leakgauge.report.contents import (
    JUDGED,
    KINDS,
    NO_VERDICT,
    OUTCOMES,
    STATES,
    Images,
    Result,
    Row,
    above_baseline,
    baseline,
    named,
    settings,
)
from leakgauge.report.wording import SPACE, count, percent, table


@dataclass(frozen=True)
class Figure:
    """A number of the first page: what it says in plain words, and what it is measured against."""

    label: str
    value: str
    note: str
    against: str


def outcome(result: Result) -> str:
    """The verdict in a word or two."""
    return OUTCOMES[result["verdict"]["outcome"]] if result["verdict"] else NO_VERDICT


def headline(result: Result) -> str:
    if result["verdict"]:
        return str(result["verdict"]["headline"])
    return "This result was written before audits gave a verdict: run the audit again to get one."


def risk_level(result: Result) -> str | None:
    """The risk in a word, where the strongest attack did better than a mean image."""
    worst = table(result, "verdict", "worst")
    if not worst or not above_baseline(_row_of(result, worst)):
        return None
    return str(result["verdict"]["risk"])


def key_figures(result: Result) -> list[Figure]:
    """What an officer reads first: what was recovered, recognised and read, and how well."""
    worst = table(result, "verdict", "worst")
    if not worst:
        return []
    kinds, limit = result["verdict"]["kinds"], result["verdict"]["limit"]
    base = baseline(_row_of(result, worst))
    return [
        *(
            Figure(KINDS[kind], _share(leak), _meaning(kind, leak, limit), _measured(leak))
            for kind, leak in kinds.items()
        ),
        Figure(
            "Typical picture",
            capped(worst["median"]),
            "median likeness (PSNR) of the strongest attack's pictures",
            f"a mean picture, which shows nothing of the record, has {capped(base)}",
        ),
        Figure(
            "Worst picture",
            capped(worst["most"]),
            f"the picture most like its record, of {worst['records']:,}",
            "attacking more records can only raise it",
        ),
    ]


def _share(leak: dict[str, Any]) -> str:
    hits = leak["share"] * leak["records"]
    return f"{round(hits)} of {leak['records']:,}"


def _meaning(kind: str, leak: dict[str, Any], limit: dict[str, Any]) -> str:
    if kind == "pictures":
        return f"rebuilt to {limit['psnr']:g}{SPACE}dB or better, well above a mean picture"
    if kind == "found":
        return (
            f"picked out of {leak['gallery']:,} pictures by their reconstruction; guessing finds "
            f"{100 * leak['chance']:.2g}{SPACE}%"
        )
    return f"classes named rightly; guessing names {percent(leak['chance'])}"


def _measured(leak: dict[str, Any]) -> str:
    low, high = leak["interval"]
    beyond = " beyond guessing" if leak["chance"] else ""
    return (
        f"limit {percent(leak['limit'])}, measured{beyond} {percent(low)} to {percent(high)} "
        f"(95{SPACE}% interval): {STATES[leak['state']]}"
    )


def next_steps(result: Result) -> list[str]:
    """What to do, the most urgent first."""
    return list(result["verdict"]["next"]) if result["verdict"] else []


def rests_on(result: Result) -> str | None:
    """How much evidence the verdict has."""
    if not result["verdict"]:
        return None
    done = [
        trial
        for trial in result["trials"]
        if trial["kind"] == "trial" and trial["status"] == "done" and trial["realism"] in JUDGED
    ]
    attacks = len({trial["attack"] for trial in done})
    what = "What was measured" if result["verdict"]["outcome"] == "failed" else "This verdict"
    return (
        f"{what} rests on {count(result['verdict']['records'], 'different record')}, "
        f"attacked in {count(len(done), 'trial')} by {count(attacks, 'attack')}."
    )


@dataclass(frozen=True)
class DefenceVerdict:
    """What the verdict is with one defence alone. `kinds`: name, in words, state in words."""

    defence: str
    settings: str
    outcome: str
    kinds: tuple[tuple[str, str, str], ...]


def defence_verdicts(result: Result) -> list[DefenceVerdict]:
    """One line for each defence of the plan, no defence included."""
    if not result["verdict"]:
        return []
    options, limit = settings(result, "defence"), result["verdict"]["limit"]
    return [
        DefenceVerdict(
            named(entry["defence"]),
            options.get(entry["defence"], ""),
            OUTCOMES[entry["outcome"]],
            tuple(
                (KINDS[kind], what_leaks(kind, leak, limit["psnr"]), STATES[leak["state"]])
                for kind, leak in entry["kinds"].items()
            ),
        )
        for entry in result["verdict"]["defences"]
    ]


def _row_of(result: Result, worst: dict[str, Any]) -> Row:
    keys = ("round", "defence", "attack")
    return next(row for row in result["summary"] if all(row[key] == worst[key] for key in keys))


def evidence(result: Result) -> list[str]:
    """What the verdict rests on, in sentences."""
    return list(result["verdict"]["sentences"]) if result["verdict"] else []


def worst_caption(trial: dict[str, Any], record: int, images: Images) -> str:
    """What stands below the picture that leaked most."""
    base = trial["baselines"]["mean image"]["psnr"][record]
    both = "Left the record, right what the attacker made of the update."
    shown = {
        "show": both,
        "blur": f"{both} Both are blurred in this report.",
        "hide": "The picture is in the folder of the audit; this report does not show it.",
    }
    return (
        f"{trial['attack']}, {defended(trial['defence'])}, round {trial['round']}, seed "
        f"{trial['seed']}: {capped(trial['scores']['psnr'][record])}; a mean picture has "
        f"{capped(base)} for this record. {shown[images]}"
    )
