"""What the server does with the updates of a round.

FedAvg (McMahan et al., 2017): the mean of the updates weighted by the clients' record counts.
Behind secure aggregation that mean is all the server learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from leakgauge.errors import InputError
from leakgauge.fl.local import Trained
from leakgauge.papers import Paper
from leakgauge.tensors import weighted_mean
from leakgauge.types import Named

PAPER = Paper(
    "mcmahan2017",
    "McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and {Agüera y Arcas},"
    " Blaise",
    "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    2017,
    "20th International Conference on Artificial Intelligence and Statistics",
    "https://proceedings.mlr.press/v54/mcmahan17a.html",
    fields=(
        ("series", "Proceedings of Machine Learning Research"),
        ("volume", "54"),
        ("pages", "1273--1282"),
    ),
)

Weighting: TypeAlias = Literal["records", "equal"]


def weights(sizes: Sequence[int], weighting: Weighting) -> tuple[float, ...]:
    """Aggregation weights that sum to one."""
    if not sizes or min(sizes) < 1:
        raise InputError(f"every client of a round needs at least one record, got sizes {sizes}")
    counts = list(sizes) if weighting == "records" else [1] * len(sizes)
    return tuple(count / sum(counts) for count in counts)


def step(before: Named, updates: Sequence[Named], shares: Sequence[float], lr: float) -> Named:
    """The global parameters after the round: before − lr · weighted mean of the updates."""
    mean = weighted_mean(updates, shares)
    return {name: value - lr * mean[name] for name, value in before.items()}


def merge(
    before: Named, trained: Sequence[Trained], shares: Sequence[float], lr: float
) -> tuple[Named, Named]:
    """The global parameters after the round, and the mean of the clients' buffers (batch-norm
    statistics), which the next global model has."""
    floats = [{n: b for n, b in t.buffers.items() if b.is_floating_point()} for t in trained]
    return step(before, [t.update for t in trained], shares, lr), weighted_mean(floats, shares)
