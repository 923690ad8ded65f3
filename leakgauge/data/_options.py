"""Options of the loaders, checked in one place and refused in words."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

from leakgauge.errors import DataError, PlanError

Split = Literal["train", "test"]


def check_count(name: str, value: int) -> None:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number, 1 or more, got {value!r}.")


def check_memory(name: str, count: int, shape: tuple[int, ...]) -> None:
    """Refuse float images that would fill more than half of the machine's memory."""
    needed = 4 * count * math.prod(shape)
    held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > held / 2:
        raise DataError(
            f"{name}: {count:,} images of {' × '.join(map(str, shape))} take "
            f"{needed / 2**30:,.1f} GB, more than half of this machine's {held / 2**30:,.1f} GB: "
            "choose a smaller size or fewer images."
        )


def check_split(split: Split) -> None:
    if split not in ("train", "test"):
        raise PlanError(f"split must be 'train' or 'test', got {split!r}.")


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise PlanError(f"{name} must be a path, got {value!r}.")
    return Path(value).expanduser()
