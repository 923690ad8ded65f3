"""The gist of each section of the page: the line that a reader sees while it is folded."""

from __future__ import annotations

from leakgauge.report import contents, first_screen, references
from leakgauge.report.contents import Images, Result
from leakgauge.report.wording import count, percent


def gists(result: Result, images: Images, pairs: int) -> dict[str, str]:
    """By section; `pairs` is the number of pairs of pictures that the report shows."""
    return {
        "findings": _findings(result),
        "reconstructions": "hidden" if images == "hide" else f"{count(pairs, 'pair')} of pictures",
        "defences": _defences(result),
        "distributions": "the likeness of every record, not the median alone",
        "labels": _labels(result),
        "why": _why(result),
        "control": _control(result),
        "threat": contents.attacker(result),
        "scope": f"{result['federation']['model']} on {result['federation']['data']}",
        "coverage": _coverage(result),
        "limits": "what this audit cannot say",
        "ledger": "what the attacker was given for each number",
        "references": count(len(references.used(result)), "paper"),
        "annex": "plan, versions, seeds, checksum",
    }


def _findings(result: Result) -> str:
    rows = contents.findings(result)
    leaking = [
        row
        for row in contents.measured(result)
        if row["realism"] in contents.JUDGED
        and any(leak["state"] == "leaks" for leak in row["leaks"].values())
    ]
    return count(len(rows), "row") + (f", {len(leaking)} of them above a limit" if leaking else "")


def _defences(result: Result) -> str:
    verdicts = first_screen.defence_verdicts(result)
    below = sum(line.outcome == contents.OUTCOMES["below the limit"] for line in verdicts)
    return f"{len(verdicts)} compared, {below} below the limit"


def _labels(result: Result) -> str:
    read = [row["labels"]["accuracy"] for row in contents.labelled(result)]
    return f"up to {percent(max(read))} read" if read else "no attack named any"


def _why(result: Result) -> str:
    explanation = result["explanation"]
    if not explanation:
        return "not run"
    return f"{count(len(explanation['rungs']) - 1, 'step')} up from the known-weak twin"


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
