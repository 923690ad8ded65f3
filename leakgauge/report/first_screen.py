"""The first screen of a report: what an officer reads, and perhaps nothing else.

The verdict, on how much evidence it rests, its key figures, the worst picture, what to do next, and
a verdict on each defence. All functions are pure, as those of `contents`.
"""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.audit import advice
from leakgauge.audit.advice import capped, defended, reached, what_leaks
from leakgauge.audit.document import BLIND
from leakgauge.audit.results import Decided, Leak, Measured, Result
from leakgauge.report import contents
from leakgauge.report.contents import Images
from leakgauge.report.pictures import Pair
from leakgauge.report.wording import SPACE, count, percent


@dataclass(frozen=True)
class Figure:
    """A number of the first page: what it says in plain words, and what it is measured against."""

    label: str
    value: str
    note: str
    against: str


def outcome(result: Result) -> str:
    """The verdict in a word or two."""
    return contents.OUTCOMES[result.verdict.outcome] if result.verdict else contents.NO_VERDICT


def headline(result: Result) -> str:
    if result.verdict:
        return result.verdict.headline
    return "This result was written before audits gave a verdict: run the audit again to get one."


def _strongest(result: Result) -> Measured | None:
    """The numbers of the row that the verdict calls the worst."""
    worst = result.verdict and result.verdict.worst
    if not worst:
        return None
    place = contents.place(worst)
    return next(row.measured for row in result.summary if contents.place(row) == place)


def risk_level(result: Result) -> str | None:
    """The risk in a word, where the strongest attack did better than a mean image."""
    strongest = _strongest(result)
    return strongest.risk if strongest and contents.above_baseline(strongest) else None


def key_figures(result: Result) -> list[Figure]:
    """What an officer reads first: what was recovered, recognised and read, and how well."""
    verdict, strongest = result.verdict, _strongest(result)
    if not verdict or not strongest:
        return []
    psnr, base = contents.psnr(strongest), contents.baseline(strongest)
    return [
        *(
            Figure(
                contents.kind_of_leak(result, kind),
                f"{round(found.leak.share * found.leak.records)} of {found.leak.records:,}",
                _meaning(result, kind, found),
                _measured(found.leak),
            )
            for kind, found in verdict.kinds.items()
        ),
        Figure(
            "Typical picture",
            capped(psnr.median),
            "median likeness (PSNR) of the strongest attack's pictures",
            f"a mean picture, which shows nothing of the record, has {capped(base)}",
        ),
        Figure(
            "Worst picture",
            capped(psnr.most),
            f"the picture most like its record, of {strongest.records:,}",
            "attacking more records can only raise it",
        ),
    ]


def _meaning(result: Result, kind: str, found: Decided) -> str:
    leak = found.leak
    if kind == "found":
        return (
            f"picked out of {found.gallery:,} pictures by their reconstruction; guessing finds "
            f"{100 * leak.chance:.2g}{SPACE}%"
        )
    if kind == "labels":
        return f"classes named rightly; guessing names {percent(leak.chance)}"
    above = "well above" if kind == "pictures" else "and closer than"
    return f"rebuilt to {reached(kind, result.metrics)}, {above} a mean picture"


def _measured(leak: Leak) -> str:
    low, high = leak.interval
    beyond = " beyond guessing" if leak.chance else ""
    return (
        f"limit {percent(leak.limit)}, measured{beyond} {percent(low)} to {percent(high)} "
        f"(95{SPACE}% interval): {contents.STATES[leak.state]}"
    )


def next_steps(result: Result) -> tuple[str, ...]:
    """What to do, the most urgent first: the setting that a trade-off recommends, if there is
    one."""
    steps = result.verdict.next if result.verdict else ()
    return (result.tradeoff.sentence, *steps) if result.tradeoff else steps


def rests_on(result: Result) -> str | None:
    """How much evidence the verdict has."""
    if not result.verdict:
        return None
    done = [trial for trial, _, _ in contents.scored(result) if trial.realism in contents.JUDGED]
    attacks = len({trial.attack.removesuffix(BLIND) for trial in done})
    what = "What was measured" if result.verdict.outcome == "failed" else "This verdict"
    said = (
        f"{what} rests on {count(result.verdict.records, 'different record')}, "
        f"attacked in {count(len(done), 'trial')} by {count(attacks, 'attack')}."
    )
    if not (blind := contents.unscored(result)):
        return said
    said = said if done else "Nothing was measured."
    return f"{said} Of {count(len(blind), 'trial')} {contents.NOT_SCORED}."


@dataclass(frozen=True)
class DefenceVerdict:
    """What the verdict is with one defence alone. `kinds`: name, in words, state in words."""

    defence: str
    settings: str
    outcome: str
    kinds: tuple[tuple[str, str, str], ...]


def defence_verdicts(result: Result) -> list[DefenceVerdict]:
    """One line for each defence of the plan, no defence included."""
    if not result.verdict:
        return []
    options = contents.protections(result)
    return [
        DefenceVerdict(
            contents.named(entry.defence),
            options.get(entry.defence, ""),
            contents.OUTCOMES[entry.outcome],
            tuple(
                (contents.kind_of_leak(result, kind), what_leaks(kind, one, result.metrics),
                 contents.STATES[one.leak.state])
                for kind, one in entry.kinds.items()
            ),
        )
        for entry in result.verdict.defences
    ]  # fmt: skip


def exposed(result: Result) -> list[tuple[str, str]]:
    """What updates show before any attack, and what would change that; one for each number of
    records behind an update."""
    return [(advice.exposed(one), advice.way_out(one)) for one in result.exposure]


def evidence(result: Result) -> tuple[str, ...]:
    """What the verdict rests on, in sentences."""
    return result.verdict.sentences if result.verdict else ()


def worst_caption(pair: Pair, images: Images) -> str:
    """What stands below the picture that leaked most."""
    both = "Left the record, right what the attacker made of the update."
    hidden = "The picture is in the folder of the audit; this report does not show it."
    if pair.invented:
        numbers = {tile.words: ", ".join(tile.numbers) for tile in pair.tiles if tile.numbers}
        sides = "; ".join(f"{words} {number}" for words, number in numbers.items())
        both, hidden = contents.INVENTS, f"{sides}. {contents.INVENTS} {hidden}"
    shown = {
        "show": both,
        "blur": f"{both} {'All' if pair.invented else 'Both'} are blurred in this report.",
        "hide": hidden,
    }
    trial, truth = pair.trial, pair.truth
    likeness = contents.NOT_SCORED
    if truth:
        likeness = f"{capped(truth.psnr)}; a mean picture has {capped(truth.base)} for this record"
    return (
        f"{trial.attack}, {defended(trial.defence)}, round {trial.round}, seed {trial.seed}: "
        f"{likeness}. {shown[images]}"
    )
