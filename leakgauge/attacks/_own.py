"""What an attacking client makes of its own part in an update: it knows its records and what it
sent, and is after the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakgauge.attacks._layers import told
from leakgauge.errors import InputError, Withheld
from leakgauge.types import Batch, LocalTraining, Observation, Reconstruction


def others(seen: Observation) -> Observation:
    """The same update without the attacking client's own part, as if it had not been there.

    The mean is u = Σ w_k·u_k, so that of the others is (u − w·own) / (1 − w), exactly, whatever
    clients do before they send. Their training is that of a super-client of theirs.
    """
    if seen.own is None or seen.own_update is None or seen.share is None or seen.records is None:
        raise Withheld(
            "to leave out its own part, a client must hold its records, its update and its weight "
            "in the mean: that is known with 'records' where updates are weighted by them"
        )
    w, records = seen.share, seen.records - len(seen.own)
    if not 0 < w < 1 or records < 1:
        raise InputError(
            f"own records: expected a weight between 0 and 1 and records of others, got weight {w} "
            f"and {len(seen.own)} own records of {seen.records}"
        )
    update = {n: (u - w * seen.own_update[n]) / (1 - w) for n, u in seen.update.items()}
    training = seen.training and resized(seen.training, seen.records, records)
    labels = None if seen.labels is None else left(seen.labels, seen.own.labels)
    clients = None if seen.clients is None else _left_clients(seen.clients, seen.own)
    return replace(
        seen,
        update=update,
        training=training,
        records=records,
        labels=labels,
        clients=clients,
        begin=seen.begin and apart(seen.begin, seen),
        earlier=tuple(others(one) for one in seen.earlier),
        own=None,
        own_update=None,
        share=None,
    )


def resized(training: LocalTraining, before: int, after: int) -> LocalTraining:
    """The training of a super-client of `after` records, where that of `before` is known: batches
    hold the same share of the records."""
    size = min(after, max(1, round(training.batch_size * after / before)))
    return replace(training, batch_size=size)


def left(labels: Tensor, own: Tensor) -> Tensor:
    """The labels without the client's own, each once; where an own label is not among them, the
    last goes in its place."""
    gone = Counter(own.tolist())
    kept = []
    for label in labels.tolist():
        if gone[label]:
            gone[label] -= 1
        else:
            kept.append(label)
    return torch.tensor(kept[: len(labels) - len(own)], dtype=labels.dtype)


def apart(guess: Reconstruction, seen: Observation) -> Reconstruction:
    """The guess without what shows the attacking client's own records, by what it holds itself: its
    own images, each laid over the nearest guess of its label, one guess each. No more are left out
    than there are guesses beyond the others' records: an attack may have left them out itself."""
    if seen.own is None or seen.records is None:
        return guess
    surplus = min(len(seen.own), len(guess.inputs) - (seen.records - len(seen.own)))
    if surplus <= 0:
        return guess
    cost = apart_by(guess.inputs, seen.own.inputs)
    if guess.labels is not None:  # more than any two images in [0, 1] differ
        cost = cost + 2.0 * (seen.own.labels[:, None] != guess.labels[None, :])
    mine, shown = linear_sum_assignment(cost.numpy())
    order = cost[mine, shown].argsort(stable=True)[:surplus]
    kept = torch.ones(len(guess.inputs), dtype=torch.bool)
    kept[torch.from_numpy(shown)[order]] = False
    return replace(
        guess,
        inputs=guess.inputs[kept],
        labels=None if guess.labels is None else guess.labels[kept],
        prior=None if guess.prior is None else guess.prior[kept],
        notes=(*guess.notes, f"left out: {surplus} guesses of the attacking client's own records"),
    )


def apart_by(guess: Tensor, own: Tensor) -> Tensor:
    """Mean squared error of every own image and every guess: (own, guesses), double precision."""
    distances = torch.cdist(own.double().flatten(1), guess.double().flatten(1))
    return distances.square() / own[0].numel()


def shows(guess: Tensor, own: Tensor) -> float:
    """How well a guess shows the client's own images: their mean squared error by the best
    one-to-one pairing."""
    cost = apart_by(guess, own)
    return float(cost[linear_sum_assignment(cost.numpy())].mean())


def beside(seen: Observation, explicit: bool) -> Tensor:
    """Where candidates stand when the client's own records are among them: indices into the others'
    followed by its own. Every batch of the super-client holds a part of both; client by client, if
    each is played by itself."""
    assert seen.own is not None
    training, records = told(seen, "a client with records of its own")
    mine, theirs = len(seen.own), records - len(seen.own)
    own, rest = list(range(theirs, records)), list(range(theirs))
    order: list[int] = []
    if explicit and seen.clients is not None:
        place = _place(seen.clients, seen.own)
        for i, (_, labels) in enumerate(seen.clients):
            order += own if i == place else rest[: len(labels)]
            rest = rest if i == place else rest[len(labels) :]
        return torch.tensor(order)
    some = min(mine, max(1, round(training.batch_size * mine / records)))
    more = max(1, training.batch_size - some)
    while own or rest:
        order += rest[:more] + own[:some]
        rest, own = rest[more:], own[some:]
    return torch.tensor(order)


def same_records(first: Batch | None, second: Batch | None) -> bool:
    """Whether both are known and hold the same images, in any order."""
    if first is None or second is None:
        return False

    def sorted_bytes(batch: Batch) -> list[bytes]:
        return sorted(image.numpy().tobytes() for image in batch.inputs)

    return sorted_bytes(first) == sorted_bytes(second)


def _left_clients(
    clients: tuple[tuple[float, Tensor], ...], own: Batch
) -> tuple[tuple[float, Tensor], ...]:
    """The clients without one that holds the own labels: which of several does not matter."""
    place = _place(clients, own)
    rest = clients[:place] + clients[place + 1 :]
    whole = sum(weight for weight, _ in rest)
    return tuple((weight / whole, labels) for weight, labels in rest)


def _place(clients: tuple[tuple[float, Tensor], ...], own: Batch) -> int:
    mine = sorted(own.labels.tolist())
    return next(i for i, (_, labels) in enumerate(clients) if sorted(labels.tolist()) == mine)
