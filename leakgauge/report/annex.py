"""The annex of a report: what is needed to find and repeat an audit."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from leakgauge.audit.document import Document
from leakgauge.audit.results import Result
from leakgauge.config import plain, toml, toml_key
from leakgauge.report.wording import NOTHING, count, duration, listed, percent, shortened


def annex(result: Result, folder: Path | None) -> list[tuple[str, str]]:
    """What is needed to find and repeat this audit."""
    times = result.times
    rows = [
        *([("result.json, sha256", checksum(folder))] if folder else []),
        ("Plan, sha256", result.fingerprint),
        ("Schema", str(result.schema)),
        ("LeakGauge", result.leakgauge),
        *((name, version) for name, version in result.versions.items()),
        ("Seeds", listed(sorted({trial.seed for trial in result.trials})) or NOTHING),
        ("Finished", times.finished or NOTHING),
        ("CPU time", duration(times.cpu_seconds)),
    ]
    if preparing := sum(trial.times.preparing for trial in result.trials):
        rows.append(("of it preparing attacks", duration(preparing)))
    rows += [(f"Fit of {attack}", words) for attack, words in fits(result).items()]
    if times.wall_seconds is not None:
        rows.append(("Wall time", duration(times.wall_seconds)))
    if forecast := times.forecast:
        words = f"{duration(forecast.cpu_seconds)} of CPU time, {forecast.megabytes:.0f} MB"
        if (error := forecast.error) is not None:
            words += f"; it was {percent(abs(error))} too {'high' if error > 0 else 'low'}"
        rows.append(("Forecast", words))
    return rows


def fits(result: Result) -> dict[str, str]:
    """What attacks prepared before the round that trials share: by attack, what it cost."""
    fits: dict[str, dict[str, float]] = {}
    trials: Counter[str] = Counter()
    for trial in result.trials:
        if trial.found and trial.found.prepared:
            trials[trial.attack] += 1
            fits.setdefault(trial.attack, {})[trial.found.prepared] = trial.times.fit
    return {
        attack: f"{duration(sum(seconds.values()))} of CPU time, "
        f"{count(len(seconds), 'fit')} for {count(trials[attack], 'trial')}"
        for attack, seconds in fits.items()
    }


def checksum(folder: Path) -> str:
    """sha256 of the result.json in this folder, by which a report belongs to it."""
    try:
        return hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()
    except OSError:
        return "result.json was not beside this report when it was made"


def plan_text(plan: Document) -> str:
    """The plan as TOML; keys without a value are left out."""
    return shortened("\n".join(_toml_lines(plain(plan), ())).strip() + "\n", 40_000)


def _toml_lines(content: dict[str, object], path: tuple[str, ...]) -> list[str]:
    lines, below = [], []
    for key, value in content.items():
        name = ".".join(toml_key(part) for part in (*path, key))
        if value is None:
            continue
        if isinstance(value, dict) and (not path or len(value) > 3):
            below += ["", f"[{name}]", *_toml_lines(value, (*path, key))]
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for item in value:
                below += ["", f"[[{name}]]", *_toml_lines(item, (*path, key))]
        else:
            lines.append(f"{toml_key(key)} = {toml(value)}")
    return lines + below
