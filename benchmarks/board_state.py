"""The board's runs on disk: one line of STATE/ROW.jsonl each. See `board.py`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from board_rows import Row
from sources import digest

from leakgauge import attacks
from leakgauge.config import build, choose
from leakgauge.types import Attack

Outcome = dict[str, Any]


def path_of(state: Path, row: Row) -> Path:
    return state / f"{row.id.replace('/', '.')}.jsonl"


def outcomes(state: Path, row: Row) -> dict[int, Outcome]:
    """The latest outcome of every run of the row as it stands today; torn lines are no runs."""
    found: dict[int, Outcome] = {}
    path = path_of(state, row)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            outcome = json.loads(line)
        except ValueError:
            continue
        if outcome.get("row") == row.fingerprint:
            found[outcome["run"]] = outcome
    return dict(sorted(found.items()))


def keep(state: Path, row: Row, outcome: Outcome) -> None:
    """Append one line in one write; a line that a crash left unended is ended first."""
    path = path_of(state, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(outcome, ensure_ascii=False, allow_nan=False) + "\n"
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("ab", buffering=0) as file:
        file.write((b"\n" if torn else b"") + line.encode())
        os.fsync(file.fileno())


@contextmanager
def claims(state: Path) -> Iterator[Any]:
    """A function that claims a run for this process, and says whether it could."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / ".lock").open("a+b") as file:

        def claim(row: Row, run: int) -> bool:
            digest = hashlib.sha256(f"{row.fingerprint}/{run}".encode()).digest()
            try:
                fcntl.lockf(
                    file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int.from_bytes(digest[:7], "big")
                )
            except OSError:
                return False
            return True

        yield claim


def attack_of(row: Row) -> Attack:
    """The attack of a row with its options; an unknown name or option is an error."""
    return build(choose(attacks.ATTACKS, row.attack, "attack"), row.options, f"row {row.id}")


def code_of(row: Row) -> str:
    """A digest of the code that the row measures: its attack, and what that imports."""
    return digest(type(attack_of(row)).__module__)


def plain(value: Any) -> Any:
    """What JSON can hold; what it cannot is written as words."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def paces(state: Path) -> dict[str, float]:
    path = state / "pace.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def forecast(state: Path, row: Row) -> float | None:
    """CPU-seconds per run: what finished runs took, else what was calibrated."""
    took = [o["cpu_seconds"] for o in outcomes(state, row).values() if o["status"] == "done"]
    return statistics.median(took) if took else paces(state).get(row.id)
