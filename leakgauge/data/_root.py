"""Where data sets on disk are looked for, and what is said when they are not there."""

from __future__ import annotations

import os
from pathlib import Path

from leakgauge.data._options import as_path
from leakgauge.data._remotes import by_hand
from leakgauge.errors import DataError

VARIABLE = "LEAKGAUGE_DATA"


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The option `root`, else the variable LEAKGAUGE_DATA, else ~/.cache/leakgauge/data."""
    if root is not None:
        return as_path("root", root)
    return Path(os.environ.get(VARIABLE) or "~/.cache/leakgauge/data").expanduser()


def find_folder(name: str, inside: str, pattern: str, root: str | os.PathLike[str] | None) -> Path:
    """The folder with a file of this pattern: `inside` the root, or the root itself.

    The root itself counts only when it was named by the option: MNIST and Fashion-MNIST have files
    of the same names, and a shared folder must not pass one off as the other.
    """
    base = data_root(root)
    places = [base / inside] + ([base] if root is not None else [])
    for place in places:
        if any(file.is_file() for file in place.glob(pattern)):
            return place
    looked = " or ".join(str(place) for place in places)
    raise DataError(
        f"{name}: expected {pattern} in {looked}, found none. Run `leakgauge data fetch {name}`, "
        f"or name the folder that holds it with the option `root` or the variable {VARIABLE}.\n"
        + by_hand(name, base)
    )
