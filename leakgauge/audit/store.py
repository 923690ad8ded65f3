"""Where an audit lives on disk: one file a trial, written whole or not at all.

    OUT/plan.json        the plan and its fingerprint
    OUT/trials/ID.json   one finished trial each
    OUT/images/ID/…      truths and guesses, and a sheet of both
    OUT/result.json      everything, when the audit is done

A trial counts once its JSON file is there; a killed audit therefore loses only the running trial.
Nothing is written, nor anything replaced, before the first trial has ended.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from leakgauge.errors import PlanError
from leakgauge.files import write_json


class Store:
    """The folder of one audit."""

    def __init__(self, out: Path):
        self.out = out
        self.images = out / "images"
        self.result = out / "result.json"
        self._marker = out / "plan.json"
        self._content: dict[str, Any] | None = None  # of the marker, until it is written
        self._replace = False

    def open(
        self, plan: dict[str, Any], fingerprint: str, *, resume: bool, overwrite: bool
    ) -> None:
        """Say why the folder cannot be used, if so. It is left as it is until `begin`."""
        nearest = next(p for p in (self.out, *self.out.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise PlanError(f"{nearest} is a file: name a folder for the audit's output")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PlanError(f"you may not write to {nearest}: name another folder with --out")
        if self._marker.exists():
            found = _fingerprint(self._marker)
            if not (resume or overwrite):
                raise PlanError(
                    f"{self.out} holds an audit already: continue it with --resume, replace it "
                    "with --overwrite, or name another folder with --out"
                )
            if not overwrite and found != fingerprint:
                raise PlanError(
                    f"{self.out} holds an audit of a different plan (or of other data, weights or "
                    "another version): name another folder with --out, or replace it with "
                    "--overwrite"
                )
        elif self.out.exists() and any(self.out.iterdir()):
            raise PlanError(f"{self.out} is not empty and holds no audit: name another folder")
        self._replace = overwrite
        self._content = {"fingerprint": fingerprint, "plan": plan}

    def begin(self) -> None:
        """Make the folder ready, once."""
        if self._replace:
            for part in ("trials", "images"):
                shutil.rmtree(self.out / part, ignore_errors=True)
            self.result.unlink(missing_ok=True)
            self._replace = False
        if self._content is not None:
            write_json(self._marker, self._content)
            self._content = None

    def done(self, trial: str) -> dict[str, Any] | None:
        """A finished trial, or None; a damaged file is no finished trial."""
        if self._replace:
            return None
        try:
            loaded: dict[str, Any] = json.loads(self._path(trial).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return loaded

    def keep(self, trial: str, value: dict[str, Any]) -> None:
        self.begin()
        write_json(self._path(trial), value)

    def _path(self, trial: str) -> Path:
        return self.out / "trials" / f"{trial}.json"


def _fingerprint(marker: Path) -> str:
    """The plan of the audit in a folder. What is not surely an audit is never replaced."""
    try:
        return str(json.loads(marker.read_text(encoding="utf-8"))["fingerprint"])
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{marker} is damaged or of something else ({error}): remove the folder yourself, or "
            "name another with --out"
        ) from error
