"""The gist of each section of the page: the line that a reader sees while it is folded."""

from __future__ import annotations

from leakgauge.audit.results import Result
from leakgauge.report import contents, first_screen, protection
from leakgauge.report.contents import Images
from leakgauge.report.pictures import Shown
from leakgauge.report.wording import NOTHING, count, percent


def gists(result: Result, images: Images, shown: list[Shown]) -> dict[str, str]:
    """By section; `shown` are the pictures that the report shows."""
    return {
        "findings": _findings(result),
        "reconstructions": "hidden" if images == "hide" else _pictures(shown),
        "tradeoff": protection.gist(result.tradeoff) if result.tradeoff else "",
        "defences": _defences(result),
        "privacy": _privacy(result),
        "distributions": "the likeness of every record, not the median alone",
        "labels": _labels(result),
        "why": _why(result),
        "control": _control(result),
        "threat": contents.attacker(result),
        "scope": f"{result.federation.model} on {result.federation.data}",
        "coverage": _coverage(result),
        "limits": "what this audit cannot say",
        "ledger": "what the attacker was given for each number",
        "references": count(len(result.references), "paper"),
        "annex": "plan, versions, seeds, checksum",
    }


def _findings(result: Result) -> str:
    rows = contents.findings(result)
    leaking = sum(
        found.realism in contents.JUDGED
        and any(leak.state == "leaks" for leak in found.leaks.values())
        for _, found in contents.measured(result)
    )
    return count(len(rows), "row") + (f", {leaking} of them above a limit" if leaking else "")


def _pictures(shown: list[Shown]) -> str:
    alone = sum(item.pair.truth is None for item in shown)
    pairs = f"{count(len(shown) - alone, 'pair')} of pictures"
    words = f"{count(alone, 'picture')} not scored"
    return pairs if not alone else words if alone == len(shown) else f"{pairs}, {words}"


def _defences(result: Result) -> str:
    verdicts = first_screen.defence_verdicts(result)
    below = sum(line.outcome == contents.OUTCOMES["below the limit"] for line in verdicts)
    return f"{len(verdicts)} compared, {below} below the limit"


def _privacy(result: Result) -> str:
    lines = contents.privacy(result)
    held = [line for line in lines if line.epsilon != NOTHING]
    if not held:
        return "no defence of this plan promises any"
    few = ", ".join(f"{line.defence} {line.epsilon}" for line in held[:3])
    return f"epsilon over all rounds: {few}" + (f" and {len(held) - 3} more" * (len(held) > 3))


def _labels(result: Result) -> str:
    read = [found.labels.accuracy for _, found in contents.measured(result) if found.labels]
    if read:
        return f"up to {percent(max(read))} read"
    return "no attack named any" if contents.measured(result) else "not scored"


def _why(result: Result) -> str:
    if not result.explanation:
        return "not run"
    return f"{count(len(result.explanation.rungs) - 1, 'step')} up from the known-weak twin"


def _control(result: Result) -> str:
    tried = [line for line in contents.control(result) if line.words != contents.NOT_APPLICABLE]
    if not tried:
        return "none was run"
    broke = sum(line.passed for line in tried)
    return f"{broke} of {len(tried)} attacks broke the twin"


def _coverage(result: Result) -> str:
    lines = contents.coverage(result)
    words = {
        "run": sum(line.done > 0 for line in lines),
        "not applicable": sum(line.not_applicable > 0 and not line.done for line in lines),
        "with crashes": sum(line.failed > 0 for line in lines),
        "not run to the end": sum(line.not_run > 0 for line in lines),
    }
    return ", ".join(f"{number} {word}" for word, number in words.items() if number) or "none"
