"""What a report says, in words and numbers, before it has a form.

HTML, markdown and PDF take their text from here, so that they cannot say different things. All
functions are pure; a result is the table that `audit.schema.load` returns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from leakgauge.audit.advice import defended
from leakgauge.errors import InputError
from leakgauge.report.wording import (
    MOST_LISTED,
    NOTHING,
    SPACE,
    brief,
    count,
    decibels,
    listed,
    percent,
    shortened,
    span,
    table,
    tables,
    toml,
)

Result: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
Images: TypeAlias = Literal["show", "blur", "hide"]


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
        "two consecutive global models, and its own records",
        "any other client's update or images",
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
}
NO_VERDICT = "No verdict"
NOT_APPLICABLE = "does not apply"


def check_images(images: str) -> None:
    if images not in get_args(Images):
        raise InputError(f"images: expected show, blur or hide, got {images!r}")


def named(defence: str) -> str:
    return "no defence" if defence == "none" else defence


# Scope and threat


def scope(result: Result) -> list[tuple[str, str]]:
    """What was audited, as label and value."""
    federation, plan = result["federation"], table(result["plan"], "federation")
    training = table(plan, "training")
    channels, height, width = federation["shape"]
    names = federation["classes"]
    classes = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    rows = [
        ("Model", f"{federation['model']}, {federation['parameters']:,} parameters"),
        ("Data", f"{federation['data']}, {count(federation['records'], 'record')}"),
        ("Record", f"{channels} × {height} × {width} (channels × height × width)"),
        ("Classes", f"{len(names):,}: {classes}"),
    ]
    if training:
        rows.append(("Local training", _training(training)))
    if "clients" in plan:
        taking = plan.get("participants")
        part = f"of which {taking} take part in a round" if taking else "all in every round"
        rows.append(("Clients", f"{plan['clients']}, {part}"))
    done = [trial for trial in result["trials"] if trial["kind"] == "trial"]
    rounds = sorted({trial["round"] for trial in done})
    seeds = sorted({trial["seed"] for trial in done})
    rows += [
        ("Attacked rounds", listed(rounds) + " (0 is the untrained model)" if rounds else NOTHING),
        ("Seeds", f"{len(seeds)}: {listed(seeds)}" if seeds else NOTHING),
        ("Trials", _trial_counts(result)),
    ]
    return rows


def _training(training: dict[str, Any]) -> str:
    epochs = training.get("epochs")
    steps = f"epochs {epochs}" if epochs else f"steps {training.get('steps', 1)}"
    words = [f"batch {training.get('batch_size')}", steps, f"lr {training.get('lr')}"]
    words += [str(training["optimiser"])] if "optimiser" in training else []
    words += [f"batch norm {training['batch_norm']}"] if "batch_norm" in training else []
    return ", ".join(words)


def _trial_counts(result: Result) -> str:
    kinds = Counter(trial["kind"] for trial in result["trials"])
    words = [count(kinds["trial"], "trial")]
    words += [count(kinds["control"], "positive control")] if kinds["control"] else []
    words += [f"{kinds['ladder']:,} on the ladder"] if kinds["ladder"] else []
    words += [f"{len(result['not_run']):,} not run"] if result["not_run"] else []
    return ", ".join(words)


@dataclass(frozen=True)
class Knowledge:
    """One line of the knowledge table."""

    item: str
    words: str
    held: bool


def attacker(result: Result) -> str:
    """Who attacks, in a few words."""
    threat = result["threat"]
    if not threat:
        return NOTHING
    return (MALICIOUS if threat.get("malicious") else ACTORS)[threat["actor"]][0]


def threat_sentence(result: Result) -> str:
    threat = result["threat"]
    if not threat:
        return "This result was written before the threat model was part of it; see the plan."
    victim = f" against client {threat['client']}" if threat["actor"] == "server" else ""
    realism = threat["realism"]
    return f"{attacker(result)}{victim}. Its numbers are {realism}: {REALISM[realism]}."


def knowledge(result: Result) -> list[Knowledge]:
    """What the attacker holds and what not."""
    threat = result["threat"]
    if not threat:
        return []
    _, sees, misses = (MALICIOUS if threat.get("malicious") else ACTORS)[threat["actor"]]
    words = threat["knowledge"]
    return [
        Knowledge("sees", sees, True),
        *(Knowledge(item, words.get(item, ""), True) for item in threat["holds"]),
        *(Knowledge(item, words.get(item, ""), False) for item in threat["withheld"]),
        Knowledge("private", misses, False),
    ]


# Findings


def measured(result: Result) -> list[Row]:
    return [row for row in result["summary"] if "scores" in row]


def several_rounds(result: Result) -> bool:
    return len({row["round"] for row in result["summary"]}) > 1


def psnr(row: Row) -> dict[str, Any]:
    spread: dict[str, Any] = row["scores"]["psnr"]
    return spread


def baseline(row: Row) -> float:
    return float(row["baselines"]["mean image"]["psnr"])


def above_baseline(row: Row) -> bool:
    """Whether the median says more than a mean image; below that, no word for a risk fits it."""
    return bool(psnr(row)["median"] > baseline(row))


@dataclass(frozen=True)
class Finding:
    """A row of the summary, every number as text; `state` says why there are none."""

    round: int
    defence: str
    attack: str
    records: str = "0"
    median: str = NOTHING
    interval: str = NOTHING
    quartiles: str = NOTHING
    worst: str = NOTHING
    base: str = NOTHING
    ssim: str = NOTHING
    found: str = NOTHING
    chance: str = NOTHING
    labels: str = NOTHING
    guessing: str = NOTHING
    risk: str | None = None
    realism: str | None = None
    caveats: tuple[str, ...] = ()
    state: str | None = None


def findings(result: Result) -> list[Finding]:
    """Every row that was measured or crashed; see `inapplicable` for the others."""
    return [_finding(row) for row in result["summary"] if "scores" in row or row["failed"]]


def inapplicable(result: Result) -> str | None:
    """The attacks that do not apply, in a sentence; their reasons stand in the coverage alone."""
    where: dict[str, list[str]] = {}
    for row in result["summary"]:
        if "scores" not in row and not row["failed"]:
            where.setdefault(row["attack"], []).append(defended(row["defence"]))
    everywhere = {
        attack
        for attack in where
        if len(where[attack]) == sum(row["attack"] == attack for row in result["summary"])
    }
    parts = [
        attack if attack in everywhere else f"{attack} ({', '.join(dict.fromkeys(defences))})"
        for attack, defences in where.items()
    ]
    if not parts:
        return None
    more = f" and {len(parts) - MOST_LISTED} more" if len(parts) > MOST_LISTED else ""
    return (
        f"Does not apply here: {', '.join(parts[:MOST_LISTED])}{more}. The reasons stand under "
        "“Attacks run and not run”."
    )


def _finding(row: Row) -> Finding:
    head = (row["round"], row["defence"], row["attack"])
    if "scores" not in row:
        return Finding(*head, state=f"failed: {brief(row['reason'] or 'no reason given', 300)}")
    spread, ssim, labels = psnr(row), row["scores"].get("ssim"), row["labels"]
    caveats = list(dict.fromkeys(row["caveats"]))
    if row["failed"]:
        caveats.insert(0, f"{row['failed']} of {count(row['trials'], 'trial')} failed")
    if len(caveats) > 6:
        caveats = [*caveats[:6], f"and {len(caveats) - 6} more in result.json"]
    return Finding(
        *head,
        records=f"{row['records']:,}",
        median=decibels(spread["median"]),
        interval=span(spread["interval"]),
        quartiles=span(spread["quartiles"]),
        worst=decibels(spread["most"]),
        base=decibels(baseline(row)),
        ssim=f"{ssim['median']:.2f}" if ssim else NOTHING,
        found=percent(row["scores"]["identified"]["mean"]),
        chance=f"{100 * row['baselines']['identified']:.2g}{SPACE}%",
        labels=percent(labels["accuracy"] if labels else None),
        guessing=percent(labels["random"] if labels else None),
        risk=row["risk"]["median"] if above_baseline(row) else None,
        realism=row["realism"],
        caveats=tuple(shortened(caveat, 400) for caveat in caveats),
    )


def labelled(result: Result) -> list[Row]:
    return [row for row in measured(result) if row["labels"]]


def strongest(rows: list[Row]) -> Row:
    """The row that leaks most: by the share of pictures recovered, then by the median."""
    return max(rows, key=lambda row: (row["leaks"]["pictures"]["share"], psnr(row)["median"]))


@dataclass(frozen=True)
class Trade:
    """A defence at one stage, judged by the strongest attack that the verdict may use."""

    round: int
    defence: str
    settings: str
    row: Row
    state: str


def trade_off(result: Result) -> list[Trade]:
    """Leak against defence, when there is more than one."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in measured(result):
        if row["realism"] in JUDGED:
            groups.setdefault((row["round"], row["defence"]), []).append(row)
    if len({defence for _, defence in groups}) < 2:
        return []
    best = {key: strongest(rows) for key, rows in groups.items()}
    options = settings(result, "defence")
    return [
        Trade(
            stage,
            defence,
            options.get(defence, ""),
            row,
            STATES[row["leaks"]["pictures"]["state"]],
        )
        for (stage, defence), row in best.items()
    ]


def settings(result: Result, kind: Literal["attack", "defence"]) -> dict[str, str]:
    """Options of each attack or defence as the plan gives them, by the key that names its rows."""
    named: dict[str, str] = {}
    for options in tables(result["plan"], kind):
        name = key = str(options.get("name", ""))
        again = 1
        while key in named:  # as in the plan: a name used again gets a number
            again += 1
            key = f"{name}-{again}"
        named[key] = ", ".join(f"{k} = {toml(v)}" for k, v in options.items() if k != "name")
    return named


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
    options = settings(result, "attack")
    status: dict[str, Counter[str]] = {name: Counter() for name in options}
    reasons: dict[str, Counter[str]] = {}
    for trial in result["trials"]:
        own = trial["kind"] == "trial"
        status.setdefault(trial["attack"], Counter())[trial["status"]] += own
        if trial["status"] == "not applicable" or (own and trial["status"] == "failed"):
            why = f"{trial['status']}: {brief(trial['error'] or 'no reason given')}"
            reasons.setdefault(trial["attack"], Counter())[why] += own
    for entry in result["not_run"]:
        status.setdefault(entry["attack"], Counter())["not run"] += 1
        why = f"not run: {brief(entry['reason'])}"
        reasons.setdefault(entry["attack"], Counter())[why] += 1
    return [
        Coverage(
            attack,
            options.get(attack, ""),
            seen["done"],
            seen["not applicable"],
            seen["failed"],
            seen["not run"],
            _counted(reasons.get(attack, Counter()), 6),
        )
        for attack, seen in status.items()
    ]


def whole_reasons(result: Result) -> list[tuple[str, str]]:
    """Attack and reason why it does not apply, in full, where its first sentence leaves something
    out: one example for each first sentence."""
    found: dict[tuple[str, str], str] = {}
    for trial in result["trials"]:
        reason = trial["error"] or ""
        if trial["status"] == "not applicable" and brief(reason) != reason:
            found.setdefault((trial["attack"], brief(reason)), shortened(reason, 1000))
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
    status = {trial["id"]: trial["status"] for trial in result["trials"]}
    lines = []
    for entry in result["control"]:
        ends = {status[id_] for id_ in entry["trials"]}
        if entry["passed"]:
            kinds = [KINDS[kind].lower() for kind in entry["breaks"]]
            words = f"broke it: {', '.join(kinds)}"
        elif "done" in ends:
            words = f"did not break it: {entry['reason']}"
        else:
            words = "crashed" if "failed" in ends else NOT_APPLICABLE
        lines.append(
            Control(
                entry["attack"],
                decibels(entry["psnr"]),
                decibels(entry["baseline"]),
                entry["passed"],
                words,
            )
        )
    return lines


def _counted(texts: Counter[str], most: int) -> tuple[str, ...]:
    shown = [f"{text} ({n} times)" if n > 1 else text for text, n in texts.most_common(most)]
    return (*shown, f"and {len(texts) - most} more in result.json") if len(texts) > most else (
        *shown,
    )  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """A crash, with the trials that ended in it."""

    error: str
    traceback: str
    trials: int
    example: str


def failures(result: Result) -> tuple[list[Failure], int]:
    """Crashes by their error, the most frequent first, and how many kinds are left out."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for trial in result["trials"]:
        if trial["status"] == "failed":
            groups.setdefault(trial["error"] or "no message", []).append(trial)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    shown = [
        Failure(
            shortened(error),
            shortened(trials[0].get("traceback", "")),
            len(trials),
            trials[0]["id"],
        )
        for error, trials in ordered[:MOST_LISTED]
    ]
    return shown, max(0, len(ordered) - MOST_LISTED)


def notes(result: Result) -> tuple[str, ...]:
    """What the attacks themselves noted, with how often."""
    texts = Counter(
        f"{trial['attack']}: {shortened(note, 300)}"
        for trial in result["trials"]
        if trial["status"] == "done"
        for note in trial["notes"]
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
        rows = [row for row in measured(result) if row["realism"] == realism]
        medians = [psnr(row)["median"] for row in rows]
        lines.append(
            LedgerLine(
                realism,
                meaning,
                len(rows),
                sum(row["records"] for row in rows),
                decibels(max(medians, default=None)),
                realism in JUDGED,
            )
        )
    return lines


def _manipulation(result: Result) -> str:
    rows = measured(result)
    if any(row["realism"] == "active" for row in rows):
        return (
            "The server in this audit manipulates the model that it sends, in the ways listed "
            "under the attacks. One that knows other ways can do more."
        )
    if table(result, "threat").get("malicious"):
        return (
            "The server of this plan may manipulate the model that it sends, but no attack that "
            "does so was run to its end. A malicious server can do more."
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
    fewest = min((row["records"] for row in rows), default=None)
    if fewest is not None and fewest < 10:
        texts[-1] += f" Here the smallest row has {count(fewest, 'record')}."
    if not result["verdict"]:
        texts.insert(0, "There is no verdict and no positive control in this older result.")
    elif not any(entry["passed"] for entry in result["control"]):
        texts.insert(
            0,
            "No attack broke the known-weak twin: a low number here is no evidence of safety.",
        )
    if len({row["defence"] for row in rows}) > 1:
        texts += [
            "A defence is judged by the attacks listed here, not by all there are.",
            "What the defences cost in accuracy was not measured.",
        ]
    if result["not_run"]:
        texts.append(f"{count(len(result['not_run']), 'trial')} of the plan did not run.")
    if images == "blur":
        texts.append(
            "Pictures are reduced to a few blocks before they enter this report; the originals "
            "stay in the folder of the audit."
        )
    return texts
