"""What the server does with the updates of a round.

FedAvg (McMahan et al., 2017): the mean of the updates weighted by the clients' record counts.

Behind secure aggregation (Bonawitz et al., 2017) that mean is all the server learns, of the clients
that did not drop out. With a clip range it is that of whole numbers, as the masks of the protocol
need it: with L = 2**(bits − 1) − 1 and the count n_k of client k (its records, or 1),

    q_k = round(clip(update_k, ±c) · L / c)        sent: n_k·q_k and n_k, mod 2**ring
    mean = (c / L) · Σ n_k·q_k / Σ n_k

A setting in which Σ n_k·q_k could pass ±2**(ring − 1) is refused: the sum would wrap around. The
package `secure` is the protocol itself; its sum is bit for bit the one here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from leakgauge.errors import InputError
from leakgauge.fl.local import Trained
from leakgauge.papers import Paper
from leakgauge.tensors import weighted_mean
from leakgauge.types import Named, SecureSum

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
Whole: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Whole numbers mod 2**32 or 2**64, flat."""

RINGS: dict[int, str] = {32: "<u4", 64: "<u8"}  # the same bytes on every machine


def counts(sizes: Sequence[int], weighting: Weighting) -> tuple[int, ...]:
    """What each client's update counts: its records, or one."""
    if not sizes or min(sizes) < 1:
        raise InputError(f"every client of a round needs at least one record, got sizes {sizes}")
    return tuple(sizes) if weighting == "records" else (1,) * len(sizes)


def weights(sizes: Sequence[int], weighting: Weighting) -> tuple[float, ...]:
    """Aggregation weights that sum to one."""
    found = counts(sizes, weighting)
    return tuple(count / sum(found) for count in found)


def mean(
    updates: Sequence[Named],
    shares: Sequence[float],
    sizes: Sequence[int] = (),
    secure: SecureSum | None = None,
) -> Named:
    """The weighted mean of the updates: all that is learnt behind secure aggregation."""
    if secure is None or secure.clip is None:
        return weighted_mean(updates, shares)
    whole = _counts_of(sizes, shares)
    check_room(secure, sum(whole))
    parts = [encode(one, n, secure) for one, n in zip(updates, whole, strict=True)]
    total = np.add.reduce(parts, dtype=parts[0].dtype)  # numpy would leave the ring of 32 bits
    return decode(total, updates[0], secure)


def step(
    before: Named,
    updates: Sequence[Named],
    shares: Sequence[float],
    lr: float,
    sizes: Sequence[int] = (),
    secure: SecureSum | None = None,
) -> Named:
    """The global parameters after the round: before − lr · weighted mean of the updates."""
    moved = mean(updates, shares, sizes, secure)
    return {name: value - lr * moved[name] for name, value in before.items()}


def merge(
    before: Named,
    trained: Sequence[Trained],
    shares: Sequence[float],
    lr: float,
    sizes: Sequence[int] = (),
    secure: SecureSum | None = None,
) -> tuple[Named, Named]:
    """The global parameters after the round, and the mean of the clients' buffers (batch-norm
    statistics), which the next global model has."""
    floats = [{n: b for n, b in t.buffers.items() if b.is_floating_point()} for t in trained]
    after = step(before, [t.update for t in trained], shares, lr, sizes, secure)
    return after, weighted_mean(floats, shares)


# Secure aggregation


def quorum(clients: int, threshold: int | None = None) -> int:
    """How many of so many clients must stay to the end; by default more than two thirds.

    More than half must: then no server can ask one half of the clients for one secret of a client,
    and the other half for its other one.
    """
    if clients < 2:
        raise InputError(
            f"secure aggregation of {clients} client: the sum would be its own update; use at "
            "least 2"
        )
    chosen = 2 * clients // 3 + 1 if threshold is None else threshold
    if not clients < 2 * chosen <= 2 * clients:
        raise InputError(
            f"threshold is {chosen}; expected more than half of the {clients} clients of a round, "
            f"and at most all: {clients // 2 + 1} to {clients}"
        )
    return chosen


def dropping(clients: int, secure: SecureSum | None) -> int:
    """How many of so many clients drop out of a round; refused if too few stay for a sum."""
    if secure is None:
        return 0
    gone = secure.dropped
    if isinstance(gone, tuple):
        if len({*gone}) < len(gone) or not all(0 <= k < clients for k in gone):
            raise InputError(
                f"dropped is {list(gone)}; expected different clients of the {clients} of a round, "
                f"counted from 0 to {clients - 1}"
            )
        number = len(gone)
    elif 0 <= gone < 1:
        number = math.floor(gone * clients + 1e-9)  # 0.29 · 100 is below 29
    else:
        raise InputError(f"dropped is {gone}; expected a share from 0 to below 1, or a list")
    if clients - number < (least := quorum(clients, secure.threshold)):
        raise InputError(
            f"{number} of {clients} clients drop out, but {least} must stay (threshold), or there "
            "is no sum: lower dropped or threshold, or use more clients"
        )
    return number


def staying(clients: int, secure: SecureSum | None, rng: torch.Generator) -> list[int]:
    """The clients whose updates are in the sum, in order; `rng` draws who drops out."""
    number = dropping(clients, secure)
    if secure is not None and isinstance(secure.dropped, tuple):
        gone = {*secure.dropped}
    else:
        gone = {*torch.randperm(clients, generator=rng)[:number].tolist()} if number else set()
    return [k for k in range(clients) if k not in gone]


def check_room(secure: SecureSum, total: int) -> None:
    """Refuse a ring in which a sum of updates that count `total` together could wrap around."""
    if secure.clip is None:
        return
    if not (math.isfinite(secure.clip) and secure.clip > 0):
        raise InputError(f"clip is {secure.clip}; expected a positive number")
    if secure.ring not in RINGS or not 2 <= secure.bits <= 32:
        raise InputError(
            f"ring is {secure.ring} and bits is {secure.bits}; expected a ring of 32 or 64, and 2 "
            "to 32 bits"
        )
    largest = total * _levels(secure)
    if largest >= 2 ** (secure.ring - 1):
        raise InputError(
            f"a sum of updates of {secure.bits} bits with weights that add up to {total:,} can "
            f"reach ±{largest:,}, which does not fit into whole numbers mod 2**{secure.ring}: "
            'lower bits, set ring = 64, or weigh all clients alike (weighting = "equal")'
        )


def encode(update: Named, count: int, secure: SecureSum) -> Whole:
    """The update as a client gives it to secure aggregation: its values by sorted names, clipped,
    rounded and times `count`; `count` itself comes last."""
    assert secure.clip is not None
    check_room(secure, count)
    flat = [update[n].detach().cpu().double().flatten().numpy() for n in sorted(update)]
    values = np.concatenate(flat)
    if not np.isfinite(values).all():
        raise InputError("an update with NaN or infinite values cannot be made whole numbers")
    levels = _levels(secure)
    rounded = np.rint(np.clip(values / secure.clip, -1, 1) * levels).astype(np.int64)
    return np.append(rounded * count, count).astype(RINGS[secure.ring])


def decode(total: Whole, like: Named, secure: SecureSum) -> Named:
    """The mean behind a sum of encoded updates, in the shapes and types of `like`."""
    assert secure.clip is not None
    signed = total[:-1].view(f"<i{secure.ring // 8}").astype(np.float64)
    values = signed / int(total[-1]) * (secure.clip / _levels(secure))
    found: Named = {}
    for name in sorted(like):
        one, values = values[: like[name].numel()], values[like[name].numel() :]
        found[name] = torch.from_numpy(one).reshape(like[name].shape).to(like[name])
    return {name: found[name] for name in like}


def _levels(secure: SecureSum) -> int:
    """The largest whole number of one value."""
    return int(2 ** (secure.bits - 1) - 1)


def _counts_of(sizes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """The whole numbers behind aggregation weights."""
    rules: tuple[Weighting, ...] = ("equal", "records")
    for rule in rules:
        if weights(sizes, rule) == tuple(shares):
            return counts(sizes, rule)
    raise InputError(
        f"weights are {tuple(shares)}: a sum of whole numbers needs equal ones, or weights by "
        "records"
    )
