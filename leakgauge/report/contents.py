"""What a report says, in words and numbers, before it has a form.

HTML, markdown and PDF take their text from here, so that they cannot say different things. All
functions are pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from leakgauge.accounting import Spent, shown
from leakgauge.audit.advice import defended
from leakgauge.audit.document import BLIND, NO_DEFENCE, settings
from leakgauge.audit.results import (
    Attacker,
    Found,
    Guarantee,
    Measured,
    Measurement,
    Result,
    Row,
    Score,
    Spread,
    Trial,
    Worst,
)
from leakgauge.audit.verdict import tested
from leakgauge.errors import InputError
from leakgauge.metrics import lpips
from leakgauge.report.wording import (
    MOST_LISTED,
    NOTHING,
    SPACE,
    brief,
    count,
    decibels,
    listed,
    number,
    percent,
    shortened,
    span,
)
from leakgauge.threat import sees_one
from leakgauge.types import LocalTraining, SecureSum

Images: TypeAlias = Literal["show", "blur", "hide"]
Place: TypeAlias = tuple[int, str, str]


REALISM = {
    "realistic": "the attacker holds only what the protocol shows anyway",
    "active": "the attacker changes the model that clients receive",
    "informed": "the attacker holds more, of a kind that a determined one could obtain",
    "oracle": "the attacker was told truths that none would have: an upper bound",
}
JUDGED = ("realistic", "active", "informed")
"""The verdict rests on these alone."""

ACTORS = {
    "server": (
        "An honest-but-curious server",
        "the global model and one client's own update",
        "the client's images",
    ),
    "aggregate": (
        "A server behind secure aggregation",
        "the global model and the weighted mean of the round's updates",
        "any single client's update, any client's images",
    ),
    "client": (
        "A curious client",
        "two consecutive global models, its own records, and the update that it sent itself",
        "any other client's update or images",
    ),
    "eavesdropper": (
        "An eavesdropper",
        "one client's own update, and the updates that records of its own cause when that client "
        "trains on them",
        "the client's images",
    ),
}
MALICIOUS = {
    actor: (who, f"{ACTORS[actor][1]}; it may change the model that it sends", ACTORS[actor][2])
    for actor, who in {
        "server": "A malicious server",
        "aggregate": "A malicious server behind secure aggregation",
    }.items()
}
RISKS = {
    "low": "below 10 dB: little can be recognised",
    "medium": "from 10 dB: a small portion of the records can be recognised",
    "high": "from 15 dB: most records can be recognised",
    "very high": "from 20 dB: nearly all records can be recognised",
}
OUTCOMES = {
    "leaks": "Leaks",
    "below the limit": "Below the limit",
    "inconclusive": "Inconclusive",
    "failed": "Failed",
}
KINDS = {
    "pictures": "Pictures recovered",
    "found": "Records recognised",
    "labels": "Labels read",
}
STATES = {
    "leaks": "leaks",
    "below": "below the limit",
    "undecided": "too few records to tell",
    "no control": "no evidence, the weak twin held too",
    "untested": "untested, no attack knew the defence",
}
UNTESTED = "untested"
NO_VERDICT = "No verdict"
INVENTS = (
    "A picture that a restorer or a generative prior helped to make can show detail that no record "
    "had."
)
UNREAD = (
    f"{INVENTS} “No update” is what the same prior shows without the update: a record that this "
    "shows as well was not read from the update, and does not count as recovered or recognised "
    "unless the raw guess shows it."
)
NO_LPIPS = (
    "LPIPS, the likeness that is nearest to what people see, was not measured: put "
    f"{lpips.FILE} into the folder that the environment variable LEAKGAUGE_WEIGHTS names, and "
    "leave metrics out of the plan or name lpips among them."
)
NOT_SCORED = "nobody knows the truth: not scored"
NOT_APPLICABLE = "does not apply"


def check_images(images: str) -> None:
    if images not in get_args(Images):
        raise InputError(f"images: expected show, blur or hide, got {images!r}")


def named(defence: str) -> str:
    return "no defence" if defence == "none" else defence


def kind_of_leak(result: Result, kind: str) -> str:
    """Its name. One that a metric judges is named by the metric."""
    labels = {metric.name: metric.label for metric in result.metrics}
    return KINDS[kind] if kind in KINDS else f"{KINDS['pictures']} by {labels[kind]}"


def within(words: str) -> str:
    """A name as it stands within a sentence; what follows its first letter may be a name itself."""
    return words[:1].lower() + words[1:]


def place(entry: Row | Trial | Worst) -> Place:
    """The row of the summary that it belongs to."""
    return entry.round, entry.defence, entry.attack


def scored(result: Result) -> list[tuple[Trial, Found, Score]]:
    """The trials of the plan that were held against the truth."""
    return [
        (trial, trial.found, trial.score)
        for trial in result.trials
        if trial.kind == "trial" and trial.found and trial.score
    ]


def unscored(result: Result) -> list[Trial]:
    """Those that ran to their end, and whose truth nobody knows."""
    return [trial for trial in result.trials if trial.status == "unscored"]


# Scope and threat


def scope(result: Result) -> list[tuple[str, str]]:
    """What was audited, as label and value."""
    audited, plan = result.federation, result.plan.federation
    names = audited.classes
    classes = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    axes = " (channels × height × width)" if len(audited.shape) == 3 else ""
    taking = plan.participants
    part = f"of which {taking} take part in a round" if taking else "all in every round"
    if plan.secure is not None:
        part += f"; {_secure(plan.secure)}"
    done = [trial for trial in result.trials if trial.kind == "trial"]
    rounds = sorted({trial.round for trial in done})
    seeds = sorted({trial.seed for trial in done})
    return [
        ("Model", f"{audited.model}, {audited.parameters:,} parameters"),
        ("Data", f"{audited.data}, {count(audited.records, 'record')}"),
        ("Record", " × ".join(map(str, audited.shape)) + axes),
        ("Classes", f"{len(names):,}: {classes}"),
        ("Local training", _training(plan.training)),
        ("Clients", f"{plan.clients}, {part}"),
        ("Attacked rounds", listed(rounds) + " (0 is the untrained model)" if rounds else NOTHING),
        ("Seeds", f"{len(seeds)}: {listed(seeds)}" if seeds else NOTHING),
        ("Trials", _trial_counts(result)),
    ]


def _secure(secure: SecureSum) -> str:
    gone = secure.dropped
    few = f"clients {listed(gone)} drop" if isinstance(gone, tuple) else f"{gone:.0%} drop"
    words = "secure aggregation" + (f", {few} out" if gone else "")
    if secure.clip is None:
        return words
    return f"{words}, values cut at ±{secure.clip:g} and rounded to {secure.bits} bits"


def _training(training: LocalTraining) -> str:
    steps = f"epochs {training.epochs}" if training.epochs else f"steps {training.steps}"
    return (
        f"batch {training.batch_size}, {steps}, lr {training.lr}, {training.optimiser}, "
        f"batch norm {training.batch_norm}"
    )


def _trial_counts(result: Result) -> str:
    kinds = Counter(trial.kind for trial in result.trials)
    words = [count(kinds["trial"], "trial")]
    words += [count(kinds["control"], "positive control")] if kinds["control"] else []
    words += [f"{kinds['ladder']:,} on the ladder"] if kinds["ladder"] else []
    words += [f"{len(unscored(result)):,} not scored"] if unscored(result) else []
    words += [f"{len(result.not_run):,} not run"] if result.not_run else []
    return ", ".join(words)


@dataclass(frozen=True)
class Knowledge:
    """One line of the knowledge table."""

    item: str
    words: str
    held: bool


def _roles(threat: Attacker) -> tuple[str, str, str]:
    """Who attacks, what it sees, what it does not see."""
    return (MALICIOUS if threat.malicious else ACTORS)[threat.actor]


def attacker(result: Result) -> str:
    """Who attacks, in a few words."""
    return _roles(result.threat)[0] if result.threat else NOTHING


def threat_sentence(result: Result) -> str:
    threat = result.threat
    if not threat:
        return "This result was written before the threat model was part of it; see the plan."
    victim = f" against client {threat.client}" if sees_one(threat.actor) else ""
    who, tag = attacker(result), threat.realism
    return f"{who}{victim}. Its numbers are {tag}: {REALISM[tag]}."


def knowledge(result: Result) -> list[Knowledge]:
    """What the attacker holds and what not."""
    threat = result.threat
    if not threat:
        return []
    _, sees, misses = _roles(threat)
    words = threat.knowledge
    return [
        Knowledge("sees", sees, True),
        *(Knowledge(item, words.get(item, ""), True) for item in threat.holds),
        *(Knowledge(item, words.get(item, ""), False) for item in threat.withheld),
        Knowledge("private", misses, False),
    ]


# Findings


def measured(result: Result) -> list[tuple[Row, Measured]]:
    return [(row, row.measured) for row in result.summary if row.measured]


def several_rounds(result: Result) -> bool:
    return len({row.round for row in result.summary}) > 1


def psnr(numbers: Measured) -> Spread:
    return numbers.scores["psnr"]


def baseline(numbers: Measured) -> float:
    return numbers.mean_image["psnr"]


def above_baseline(numbers: Measured) -> bool:
    """Whether the median says more than a mean image; below that, no word for a risk fits it."""
    return psnr(numbers).median > baseline(numbers)


def further(result: Result) -> list[Measurement]:
    """The metrics beside the PSNR."""
    return [metric for metric in result.metrics if metric.name != "psnr"]


def beside(found: Measured, metric: Measurement) -> str:
    """The median by a metric, and in brackets that of a mean picture."""
    values = found.scores[metric.name].median, found.mean_image[metric.name]
    return "{} ({})".format(*(number(value, metric) for value in values))


def directions(result: Result) -> str:
    """How to read the metrics beside the PSNR, and what to do for the one that needs a file."""
    absent = lpips.fits(result.federation.shape) and "lpips" not in {m.name for m in result.metrics}
    missing = NO_LPIPS if absent else ""
    if not (metrics := further(result)):
        return missing
    ways = {way: [m.label for m in metrics if m.better == way] for way in ("higher", "lower")}
    closer = [
        f"{', '.join(labels)}: the {way}, the closer" for way, labels in ways.items() if labels
    ]
    said = f"Other metrics: medians, in brackets those of a mean picture. {'; '.join(closer)}."
    return f"{said} {missing}".rstrip()


@dataclass(frozen=True)
class Finding:
    """A row of the summary, every number as text; `state` says why there are none. `further`
    has the medians of the metrics beside the PSNR, in brackets those of a mean picture."""

    round: int
    defence: str
    attack: str
    records: str = "0"
    median: str = NOTHING
    interval: str = NOTHING
    quartiles: str = NOTHING
    worst: str = NOTHING
    base: str = NOTHING
    further: str = ""
    found: str = NOTHING
    chance: str = NOTHING
    labels: str = NOTHING
    guessing: str = NOTHING
    risk: str | None = None
    realism: str | None = None
    caveats: tuple[str, ...] = ()
    state: str | None = None
    knows: str = ""  # what the attacker makes of knowing the defence


def findings(result: Result) -> list[Finding]:
    """Every row that was measured, crashed or could not be scored; see `inapplicable` for the
    others."""
    return [
        _finding(result, row)
        for row in result.summary
        if row.measured or row.failed or row.unscored
    ]


def inapplicable(result: Result) -> str | None:
    """The attacks that do not apply, in a sentence; their reasons stand in the coverage alone."""
    where: dict[str, list[str]] = {}
    for row in result.summary:
        if not (row.measured or row.failed or row.unscored):
            where.setdefault(row.attack, []).append(defended(row.defence))
    rows = Counter(row.attack for row in result.summary)
    parts = [
        attack if len(among) == rows[attack] else f"{attack} ({', '.join(dict.fromkeys(among))})"
        for attack, among in where.items()
    ]
    if not parts:
        return None
    more = f" and {len(parts) - MOST_LISTED} more" if len(parts) > MOST_LISTED else ""
    return (
        f"Does not apply here: {', '.join(parts[:MOST_LISTED])}{more}. The reasons stand under "
        "“Attacks run and not run”."
    )


def _finding(result: Result, row: Row) -> Finding:
    caveats = [f"{row.failed} of {count(row.trials, 'trial')} failed"] if row.failed else []
    if row.unscored:
        caveats.append(f"{row.unscored} of {count(row.trials, 'trial')}: {NOT_SCORED}")
    found = row.measured
    if not found:
        why = f"failed: {brief(row.reason or 'no reason given', 300)}"
        return Finding(*place(row), state=why if row.failed else NOT_SCORED)
    caveats += dict.fromkeys(found.caveats)
    if len(caveats) > 6:
        caveats = [*caveats[:6], f"and {len(caveats) - 6} more in result.json"]
    spread, labels = psnr(found), found.labels
    return Finding(
        *place(row),
        records=f"{found.records:,}",
        median=decibels(spread.median),
        interval=span(spread.interval),
        quartiles=span(spread.quartiles),
        worst=decibels(spread.most),
        base=decibels(baseline(found)),
        further=", ".join(f"{m.label} {beside(found, m)}" for m in further(result)),
        found=percent(found.scores["identified"].mean),
        chance=f"{100 * found.identified:.2g}{SPACE}%",
        labels=percent(labels.accuracy if labels else None),
        guessing=percent(labels.random if labels else None),
        risk=found.risk if above_baseline(found) else None,
        realism=found.realism,
        caveats=tuple(shortened(caveat, 400) for caveat in caveats),
        knows=knows(row, found),
    )


@dataclass(frozen=True)
class Sides:
    """A row in which a prior had a part. Medians and the share recognised, as texts: of the raw
    guesses, of the pictures that the attacker ends with, of those made without the update."""

    round: int
    defence: str
    attack: str
    raw: tuple[str, ...]
    shown: tuple[str, ...]
    unread: tuple[str, ...]


def sides(result: Result) -> list[Sides]:
    """One for each row with restored guesses or a generative prior."""
    return [
        Sides(
            *place(row),
            *(_side(result, table) for table in (found.raw, found.scores, found.prior_only)),
        )
        for row, found in measured(result)
        if found.prior_only
    ]


def _side(result: Result, table: dict[str, Spread] | None) -> tuple[str, ...]:
    if table is None:
        return (NOTHING,)
    lpips = [metric for metric in result.metrics if metric.name == "lpips"]
    likeness = [f"{m.label}{SPACE}{number(table[m.name].median, m)}" for m in lpips]
    known = table.get("identified")
    found = [f"{percent(known.mean)} recognised"] if known else []
    return decibels(table["psnr"].median), *likeness, *found


def unknown(row: Row) -> str:
    """The mark of an attack that does not know the defence, though it was not to ignore it."""
    known = not row.measured or tested(row, row.measured) or row.attack.endswith(BLIND)
    return "" if known else f" ({UNTESTED})"


def knows(row: Row, found: Measured) -> str:
    """What the attacker of a row makes of knowing the defence."""
    if row.defence == NO_DEFENCE:
        return ""
    if row.attack.endswith(BLIND):
        return "the same attack, ignoring the defence"
    if found.adapted is None:
        return f"{UNTESTED}: does not know the defence"
    return f"knows the defence: {found.adapted}"


@dataclass(frozen=True)
class Trade:
    """A defence at one stage, judged by the strongest attack that the verdict may use."""

    round: int
    defence: str
    settings: str
    attack: str
    numbers: Measured
    state: str


def trade_off(result: Result) -> list[Trade]:
    """Leak against defence, when there is more than one."""
    groups: dict[tuple[int, str], list[tuple[Row, Measured]]] = {}
    for row, found in measured(result):
        if found.realism in JUDGED:
            groups.setdefault((row.round, row.defence), []).append((row, found))
    if len({defence for _, defence in groups}) < 2:
        return []
    options = protections(result)
    trades = []
    for (stage, defence), rows in groups.items():
        # The row that leaks most: by the share of pictures recovered, then by the median.
        row, found = max(
            rows, key=lambda pair: (pair[1].leaks["pictures"].share, psnr(pair[1]).median)
        )
        state = STATES[found.leaks["pictures"].state]
        if found.leaks["pictures"].state != "leaks" and not any(tested(*pair) for pair in rows):
            state = STATES["untested"]
        trades.append(Trade(stage, defence, options.get(defence, ""), row.attack, found, state))
    return trades


def protections(result: Result) -> dict[str, str]:
    """Options of each defence, and beside them what it spends of privacy over all rounds: an
    epsilon of one round never stands alone."""
    promises = {one.defence: one.spent for one in result.privacy}
    options = dict.fromkeys(promises, "") | settings(result.plan.defence)
    for name, text in options.items():
        told = promises.get(name)
        if isinstance(told, Spent):
            words = f"over {count(told.rounds, 'round')} epsilon = {shown(told.epsilon)}"
        elif "epsilon = " in text:
            words = "its epsilon promises nothing over the rounds"
        else:
            continue
        options[name] = f"{text}; {words}" if text else words
    return options


@dataclass(frozen=True)
class Promise:
    """What a defence promises over all rounds; `epsilon` is a dash where that is nothing."""

    defence: str
    epsilon: str
    words: str


def privacy(result: Result) -> list[Promise]:
    """One for each defence of the plan; none in results from before it was counted."""
    return [
        Promise(named(one.defence), shown(one.spent.epsilon), one.spent.words)
        if isinstance(one.spent, Spent)
        else Promise(named(one.defence), NOTHING, one.spent)
        for one in result.privacy
    ]


def promised(one: Guarantee) -> str:
    """What a defence spends over all rounds, on one line."""
    words = one.spent.words if isinstance(one.spent, Spent) else one.spent
    return f"privacy with {named(one.defence)}: {words}"


@dataclass(frozen=True)
class Coverage:
    """What became of one attack of the plan."""

    attack: str
    settings: str
    done: int
    not_applicable: int
    failed: int
    not_run: int
    reasons: tuple[str, ...]


def coverage(result: Result) -> list[Coverage]:
    """Attacks run and not run, with the reasons: each once, in its first sentence."""
    options = settings(result.plan.attack)
    status: dict[str, Counter[str]] = {name: Counter() for name in options}
    reasons: dict[str, Counter[str]] = {}
    for trial in result.trials:
        own = trial.kind == "trial"
        status.setdefault(trial.attack, Counter())[trial.status] += own
        if trial.status == "not applicable" or (own and trial.status == "failed"):
            why = f"{trial.status}: {brief(trial.error or 'no reason given')}"
            reasons.setdefault(trial.attack, Counter())[why] += own
        elif own and trial.status == "unscored":
            reasons.setdefault(trial.attack, Counter())[NOT_SCORED] += 1
    for entry in result.not_run:
        status.setdefault(entry.attack, Counter())["not run"] += 1
        why = f"not run: {brief(entry.reason)}"
        reasons.setdefault(entry.attack, Counter())[why] += 1
    lines = []
    for attack, seen in status.items():
        ended = seen["done"] + seen["unscored"]
        counts = ended, seen["not applicable"], seen["failed"], seen["not run"]
        said = _counted(reasons.get(attack, Counter()), 6)
        lines.append(Coverage(attack, options.get(attack, ""), *counts, said))
    return lines


def whole_reasons(result: Result) -> list[tuple[str, str]]:
    """Attack and reason why it does not apply, in full, where its first sentence leaves something
    out: one example for each first sentence."""
    found: dict[tuple[str, str], str] = {}
    for trial in result.trials:
        reason = trial.error or ""
        if trial.status == "not applicable" and brief(reason) != reason:
            found.setdefault((trial.attack, brief(reason)), shortened(reason, 1000))
    return [(attack, reason) for (attack, _), reason in found.items()][:MOST_LISTED]


@dataclass(frozen=True)
class Control:
    """What one attack did to the known-weak twin."""

    attack: str
    psnr: str
    base: str
    passed: bool
    words: str


def control(result: Result) -> list[Control]:
    """One line for each attack; why one does not apply or crashed stands in the coverage."""
    status = {trial.id: trial.status for trial in result.trials}
    lines = []
    for entry in result.control:
        ends = {status[id_] for id_ in entry.trials}
        if entry.passed:
            kinds = [within(kind_of_leak(result, kind)) for kind in entry.breaks]
            words = f"broke it: {', '.join(kinds)}"
        elif "done" in ends:
            words = f"did not break it: {entry.reason}"
        else:
            words = "crashed" if "failed" in ends else NOT_APPLICABLE
        numbers = decibels(entry.psnr), decibels(entry.baseline)
        lines.append(Control(entry.attack, *numbers, entry.passed, words))
    return lines


def _counted(texts: Counter[str], most: int) -> tuple[str, ...]:
    shown = [f"{text} ({n} times)" if n > 1 else text for text, n in texts.most_common(most)]
    more = [f"and {len(texts) - most} more in result.json"] if len(texts) > most else []
    return (*shown, *more)


@dataclass(frozen=True)
class Failure:
    """A crash, with the trials that ended in it."""

    error: str
    traceback: str
    trials: int
    example: str


def failures(result: Result) -> tuple[list[Failure], int]:
    """Crashes by their error, the most frequent first, and how many kinds are left out."""
    groups: dict[str, list[Trial]] = {}
    for trial in result.trials:
        if trial.status == "failed":
            groups.setdefault(trial.error or "no message", []).append(trial)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    shown = [
        Failure(shortened(error), shortened(group[0].traceback or ""), len(group), group[0].id)
        for error, group in ordered[:MOST_LISTED]
    ]
    return shown, max(0, len(ordered) - MOST_LISTED)


def notes(result: Result) -> tuple[str, ...]:
    """What the attacks themselves noted, with how often."""
    texts = Counter(
        f"{trial.attack}: {shortened(note, 300)}"
        for trial in result.trials
        if trial.found
        for note in trial.found.notes
    )
    return _counted(texts, MOST_LISTED)


@dataclass(frozen=True)
class LedgerLine:
    """All numbers that were made with one kind of help."""

    realism: str
    meaning: str
    rows: int
    records: int
    highest: str
    counts: bool


def ledger(result: Result) -> list[LedgerLine]:
    """Every number by what the attacker was granted; all kinds but the last count."""
    lines = []
    for realism, meaning in REALISM.items():
        rows = [found for _, found in measured(result) if found.realism == realism]
        highest = decibels(max((psnr(found).median for found in rows), default=None))
        records = sum(found.records for found in rows)
        counts = realism in JUDGED
        lines.append(LedgerLine(realism, meaning, len(rows), records, highest, counts))
    return lines


def _manipulation(result: Result) -> str:
    if any(found.realism == "active" for _, found in measured(result)):
        return (
            "The server in this audit manipulates the model that it sends, in the ways listed "
            "under the attacks. One that knows other ways can do more."
        )
    if result.threat and result.threat.malicious:
        return (
            "The server of this plan may manipulate the model that it sends, but no attack that "
            "does so was run to its end. A malicious server can do more."
        )
    if result.threat and "weights" in result.threat.withheld:
        return (
            "The attacker in this audit does not know the weights of the model. One that does, as "
            "every server, can do more, and one that manipulates them more still."
        )
    return (
        "No attacker in this audit manipulates the model it sends. A malicious server can do more."
    )


def limits(result: Result, images: Images) -> list[str]:
    """What this report does not say."""
    rows = measured(result)
    texts = [
        "An audit attacks; it does not prove. What these attacks did not recover may still be "
        "recoverable: a stronger attack, more iterations or more knowledge can only raise a leak.",
        "The numbers hold for this model, data, protocol, training stage and threat model. Another "
        "batch size, learning rate or round needs an audit of its own.",
        _manipulation(result),
        "Likeness (PSNR) compares pixels. A face can be recognised at a low PSNR, and a flat "
        "picture scores high against any grey guess: read every number beside its baseline.",
        "Intervals are a 95 % bootstrap of the median over records, which are taken as "
        "independent. Records of one batch are not, and with fewer than ten records the interval "
        "is too narrow.",
    ]
    fewest = min((found.records for _, found in rows), default=None)
    if fewest is not None and fewest < 10:
        texts[-1] += f" Here the smallest row has {count(fewest, 'record')}."
    if not result.verdict:
        texts.insert(0, "There is no verdict and no positive control in this older result.")
    elif not any(entry.passed for entry in result.control):
        texts.insert(
            0,
            "No attack broke the known-weak twin: a low number here is no evidence of safety.",
        )
    public = result.threat.public if result.threat else None
    if public and public.source == "embedded":
        texts.append(
            f"Attacks that work with public records had {count(public.records, 'crop')} of a few "
            "photographs. With public records of the clients' own kind they can recover more."
        )
    if len({row.defence for row, _ in rows}) > 1:
        texts.append("A defence is judged by the attacks listed here, not by all there are.")
        if not result.tradeoff:
            texts.append("What the defences cost in accuracy was not measured.")
    if blind := unscored(result):
        texts.append(
            f"{count(len(blind), 'trial')}: {NOT_SCORED}. Look at the pictures; how much of the "
            "records is in them, this audit cannot say."
        )
    if result.not_run:
        texts.append(f"{count(len(result.not_run), 'trial')} of the plan did not run.")
    if images == "blur":
        texts.append(
            "Pictures are reduced to a few blocks before they enter this report; the originals "
            "stay in the folder of the audit."
        )
    return texts
