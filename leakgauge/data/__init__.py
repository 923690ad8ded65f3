"""Data sets by name. Nothing is downloaded on import or on load; `fetch.fetch` does, when asked.

`photos` and `digits` come with the installed packages. The others are read from disk: `folder` and
`npz` from the option `path`, the public sets from the option `root`, else LEAKGAUGE_DATA, else
~/.cache/leakgauge/data. A name of the form `module:callable` is the user's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from leakgauge.config import did_you_mean, imported
from leakgauge.data import cifar, digits, fetch, folder, mnist, npz, photos, user
from leakgauge.data._root import data_root
from leakgauge.errors import PlanError
from leakgauge.types import Dataset

__all__ = ["DATASETS", "data_root", "fetch", "load"]

DATASETS: dict[str, Callable[..., Dataset]] = {
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "digits": digits.digits,
    "fashion-mnist": mnist.fashion_mnist,
    "folder": folder.folder,
    "mnist": mnist.mnist,
    "npz": npz.npz,
    "photos": photos.photos,
}


def load(name: str, /, **options: Any) -> Dataset:
    """The data set of this name, or what `module:callable` returns, with these options."""
    if user.is_spec(name):
        make = imported(name, "data")
        _check_options(name, make, options)
        return user.as_dataset(name, make(**options))
    if name not in DATASETS:
        raise PlanError(
            f"unknown data set {name!r}{did_you_mean(name, DATASETS)} "
            "(or name your own code as 'module:callable')"
        )
    _check_options(name, DATASETS[name], options)
    return DATASETS[name](**options)


def _check_options(name: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for option in options:
            if option not in known:
                hint = did_you_mean(option, known)
                raise PlanError(f"data {name!r}: unknown option {option!r}{hint}")
    for p in parameters:
        named = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if named and p.default is p.empty and p.name not in options:
            raise PlanError(f"data {name!r}: the option {p.name!r} is missing.")
