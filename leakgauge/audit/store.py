"""Where an audit lives on disk: one file per trial, written whole or not at all.

    OUT/plan.json        the plan and its fingerprint
    OUT/trials/ID.json   one finished trial each
    OUT/trained/ID.json  one federation each that was trained for a trade-off
    OUT/images/ID/…      truths and guesses, and a sheet of both
    OUT/prepared/KEY     what a long preparation of an attack keeps, to go on from
    OUT/result.json      everything, when the audit is done

A trial counts once its JSON file is there, and so does a training; a killed audit therefore loses
only what is running. The file carries the fingerprint of its plan: one of another plan, or one that
is damaged, is not used. Nothing is written, nor anything replaced, before the first trial has ended
or the first preparation has begun. A folder that holds nothing but preparations (`leakgauge fit`)
is where an audit of the same plan begins. While an audit runs it holds a lock on OUT/.lock, which
the kernel releases however the audit ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from leakgauge.audit.document import Document, Table
from leakgauge.audit.results import Result, Trained, Trial
from leakgauge.audit.schema import check_trained, check_trial
from leakgauge.config import plain
from leakgauge.errors import InputError, PlanError
from leakgauge.files import read_plain, write_atomic, write_json

T = TypeVar("T")
LOCK = ".lock"


class Store:
    """The folder of one audit, or of a protocol, whose audits lie below it."""

    def __init__(self, out: Path, result: str = "result.json"):
        self.out = out
        self._fingerprint = ""  # of the plan whose trials these are
        self.prepared = out / "prepared"
        self.result = out / result
        self._marker = out / "plan.json"
        self._content: Table | None = None  # of the marker, until it is written
        self._replace = False

    def open(self, plan: Document, fingerprint: str, *, resume: bool, overwrite: bool) -> None:
        """Say why the folder cannot be used, if so. It is left as it is until `begin`."""
        nearest = next(p for p in (self.out, *self.out.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise PlanError(f"{nearest} is a file: name a folder for the audit's output")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PlanError(f"you may not write to {nearest}: name another folder with --out")
        if self._marker.exists():
            found = _fingerprint(self._marker)
            if not (resume or overwrite or (found == fingerprint and self.only_fitted)):
                raise PlanError(
                    f"{self.out} holds an audit already: continue it with --resume, replace it "
                    "with --overwrite, or name another folder with --out"
                )
            if not overwrite and found != fingerprint:
                raise PlanError(
                    f"{self.out} holds an audit of a different plan (or of other data, weights or "
                    f"another version){_other_metrics(self._marker, plan)}: name another folder "
                    "with --out, or replace it with --overwrite"
                )
        elif self.out.exists() and any(path.name != LOCK for path in self.out.iterdir()):
            raise PlanError(f"{self.out} is not empty and holds no audit: name another folder")
        self._replace = overwrite
        self._fingerprint = fingerprint
        self._content = {"fingerprint": fingerprint, "plan": plain(plan)}

    @property
    def only_fitted(self) -> bool:
        """Whether the folder holds what attacks prepared, and no trial yet."""
        ours = {self._marker.name, self.prepared.name, LOCK}
        if self._replace or not self.prepared.is_dir():
            return False
        return {path.name for path in self.out.iterdir()} <= ours

    def begin(self) -> None:
        """Make the folder ready, once."""
        if self._replace:
            for part in ("trials", "trained", "images", "prepared", "audits"):
                shutil.rmtree(self.out / part, ignore_errors=True)
            self.result.unlink(missing_ok=True)
            self._replace = False
        if self._content is not None:
            write_json(self._marker, self._content)
            self._content = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this audit alone; PlanError says who holds it otherwise. What was
        made for the lock is gone afterwards if nothing else was written."""
        made = [p for p in (self.out, *self.out.absolute().parents) if not p.exists()]
        path = self.out / LOCK
        with _lock(path) as file:
            began = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"process": os.getpid(), "host": platform.node(), "began": began}
            file.truncate()
            file.write(json.dumps(holder))
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                for folder in made:
                    with suppress(OSError):  # it holds the audit
                        folder.rmdir()

    def done(self, trial: str, say: Callable[[str], None] = lambda words: None) -> Trial | None:
        """A finished trial, or None. What may not be of this plan is left out: `say` is told."""
        return self._load(self._path(trial), partial(check_trial, id_=trial), say, "trial is run")

    def trained(
        self, training: str, say: Callable[[str], None] = lambda words: None
    ) -> Trained | None:
        """A federation that was trained, or None, by the same rules."""
        path = self._trained(training)
        return self._load(path, partial(check_trained, id_=training), say, "federation is trained")

    def _load(
        self, path: Path, check: Callable[[Any], T], say: Callable[[str], None], what: str
    ) -> T | None:
        if self._replace or not path.exists():
            return None
        try:
            content = json.loads(read_plain(path).decode())
            loaded = check(content)
            if content.get("fingerprint") != self._fingerprint:
                raise InputError("it is of another plan")
        except (OSError, InputError, ValueError, RecursionError) as error:
            say(f"{path} is not used, its {what} again: {error}")
            return None
        return loaded

    def keep(self, trial: Trial, pictures: Iterable[tuple[str, bytes]] = ()) -> None:
        """Write a trial after its pictures, which are named by their paths below the folder."""
        self.begin()
        for name, content in pictures:
            write_atomic(self.out / name, content)
        write_json(self._path(trial.id), plain(trial) | {"fingerprint": self._fingerprint})

    def keep_trained(self, trained: Trained) -> None:
        self.begin()
        content = plain(trained) | {"fingerprint": self._fingerprint}
        write_json(self._trained(trained.id), content)

    def finish(self, result: Result) -> None:
        self.begin()
        write_json(self.result, plain(result))

    def _path(self, trial: str) -> Path:
        return self.out / "trials" / f"{trial}.json"

    def _trained(self, training: str) -> Path:
        return self.out / "trained" / f"{training}.json"


@contextmanager
def _lock(path: Path) -> Iterator[IO[str]]:
    """An exclusive lock on a file, made if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break  # else the holder before us has just removed it
            except BlockingIOError:
                file.seek(0)
                raise PlanError(
                    f"{path.parent} is in use by another audit ({_holder(file.read())}): wait for "
                    "it to end, or name another folder with --out"
                ) from None
            except BaseException:
                file.close()
                raise
            file.close()
    except OSError as error:
        raise PlanError(
            f"{path} cannot be locked ({error.strerror}): name another folder with --out"
        ) from error
    with file:  # closing it releases the lock
        yield file


def _holder(text: str) -> str:
    try:
        found = json.loads(text)
        return f"process {found['process']} on {found['host']}, begun {found['began']}"
    except (ValueError, KeyError, TypeError):  # it has just taken the lock
        return "it has just begun"


def _other_metrics(marker: Path, plan: Document) -> str:
    """What that audit measures, if it is not what the plan measures on this machine."""
    stored = json.loads(read_plain(marker).decode()).get("plan")
    audit = stored.get("audit") if isinstance(stored, dict) else None
    before = audit.get("metrics") if isinstance(audit, dict) else None
    now = list(plan.audit.metrics)
    if not isinstance(before, list) or before == now:
        return ""
    one, other = (", ".join(map(str, names)) for names in (before, now))
    why = "; LPIPS is measured where its file of weights is found" * ("lpips" in {*before, *now})
    return f". It measures {one}, this plan here measures {other}{why}"


def _fingerprint(marker: Path) -> str:
    """The plan of the audit in a folder. What is not surely an audit is never replaced."""
    try:
        return str(json.loads(read_plain(marker).decode())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{marker} is damaged or of something else ({error}): remove the folder yourself, or "
            "name another with --out"
        ) from error
