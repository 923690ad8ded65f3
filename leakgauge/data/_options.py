"""Options of the loaders, checked in one place and refused in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from leakgauge.errors import PlanError

Split = Literal["train", "test"]


def check_count(name: str, value: int) -> None:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number, 1 or more, got {value!r}.")


def check_split(split: Split) -> None:
    if split not in ("train", "test"):
        raise PlanError(f"split must be 'train' or 'test', got {split!r}.")


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise PlanError(f"{name} must be a path, got {value!r}.")
    return Path(value).expanduser()
