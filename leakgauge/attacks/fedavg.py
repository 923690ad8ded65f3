"""FedAvg epochs — D. I. Dimitrov, M. Balunović, N. Konstantinov, M. Vechev: "Data Leakage in
Federated Averaging", TMLR 2022, https://openreview.net/forum?id=e7A0B99zJf

A client that shuffles its N records before each of E local epochs puts every record into batches
nobody else knows. The attack gives each epoch its own N candidates, replays all local steps on
them, and asks that the epochs' sets be equal in any order:

    min  1 − cos(g', g) + α·TV(x) + λ·mean over epochs e, e' of ‖a(x_e) − a(x_e')‖² / dim a

a(x_e) joins the mean and the maximum over the set x_e of a random convolution's features (96
kernels of 3 × 3): a permutation leaves it as it is. At the end the epochs are laid over the first
one by optimal assignment, record to record of the same label, and averaged.

With one epoch, or `epochs="shared"`, this is plain matching: Inverting Gradients. `epochs="auto"`
searches separate candidates only where the client shuffles: with a fixed order every epoch holds
the same batches, and one set of candidates replays them exactly.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`;
the rule `counts` follows the local models from first to last, as the paper does. The batches of an
epoch share the inferred labels out evenly.
Applies to whole epochs of equal batches: `batch_size` divides the records.
Differs from the paper: cosine distance and IG's optimiser (signed Adam, learning rate 0.1 in
steps); the prior joins both aggregates, where the paper picks one per data set (for CIFAR the
maximum); candidates are cut to [0, 1] instead of penalised outside; the labels of an epoch are
dealt out, not drawn; the best iterate by the objective is returned, across restarts too, where the
authors' code picks the restart that is nearest to the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import (
    Adam,
    LabelledSearch,
    Prior,
    constant,
    in_order,
    match,
    steps,
)
from leakgauge.attacks._objectives import cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.errors import NotApplicable
from leakgauge.fl.local import minibatches
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, option
from leakgauge.types import LocalTraining, Observation, Reconstruction, Resources

KERNELS = 96


PAPER = Paper(
    "dimitrov2022",
    "Dimitrov, Dimitar I. and Balunović, Mislav and Konstantinov, Nikola and Vechev, Martin",
    "Data Leakage in Federated Averaging",
    2022,
    "Transactions on Machine Learning Research",
    "https://openreview.net/forum?id=e7A0B99zJf",
    kind="article",
)


@dataclass(frozen=True)
class FedAvgEpochs(LabelledSearch):
    """Matches whole epochs of local training (Dimitrov 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    tv: float = 1e-4  # α
    prior: float = option(0.005, FROM_0)  # λ
    epochs: Literal["auto", "separate", "shared"] = "auto"

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        training, records = told(seen, "fedavg-epochs")
        labels = infer(seen, self.labels, rng)
        if self.labels != "known":
            labels = dealt(labels, training.batch_size)
        apart = {"auto": training.order == "shuffled", "separate": True, "shared": False}
        epochs = whole_epochs(records, training) if apart[self.epochs] else 1
        priors: list[Prior] = [(total_variation, constant(self.tv))]
        if epochs > 1:
            priors.append((agreement(epochs, seen.record.shape[0], rng), constant(self.prior)))
            # One epoch over E·N candidates: the steps are the client's, each with its own images.
            begin = seen.begin and repeated(seen.begin, labels, epochs)
            once = replace(training, epochs=1)
            seen = replace(seen, records=epochs * records, training=once, begin=begin)
        guess = match(
            seen,
            cosine,
            self,
            labels=labels.repeat(epochs),
            priors=tuple(priors),
            optimiser=Adam(self.lr, steps(), signed=True),
            rng=rng,
            resources=resources,
        )
        sets = guess.inputs.view(epochs, records, *seen.record.shape)
        return replace(
            guess,
            inputs=aligned(sets, labels).mean(0),
            labels=labels,
            facts=guess.facts | {"epochs": epochs},
        )


def whole_epochs(records: int, training: LocalTraining) -> int:
    """How many times the client goes through its records, in equal batches."""
    taken = len(minibatches(records, training)) * training.batch_size
    if records % training.batch_size or taken % records:
        raise NotApplicable(
            f"separate candidates for each epoch need whole epochs of equal batches; this client "
            f"takes batches of {training.batch_size} of {records} records, {taken} in all: "
            "set epochs = 'shared'"
        )
    return taken // records


def repeated(guess: Reconstruction, labels: Tensor, epochs: int) -> Reconstruction:
    """An earlier guess in the order of the labels, once for every epoch."""
    images = in_order(guess, labels).repeat(epochs, 1, 1, 1)
    return replace(guess, inputs=images, labels=labels.repeat(epochs))


def dealt(labels: Tensor, batch_size: int) -> Tensor:
    """Sorted labels in an order that spreads every class over the batches."""
    batches = -(-len(labels) // batch_size)
    return torch.cat([labels[b::batches] for b in range(batches)])


def agreement(epochs: int, channels: int, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Mean squared difference between epochs of what is invariant to the order within them."""
    kernels = torch.randn(KERNELS, channels, 3, 3, generator=rng) / (9 * channels) ** 0.5

    def penalty(x: Tensor) -> Tensor:
        features = F.conv2d(x, kernels.to(x), padding=1)
        sets = features.view(epochs, -1, *features.shape[1:])
        invariant = torch.stack([sets.mean(1), sets.amax(1)], 1)
        # The mean over all pairs of (a_e − a_e')² is twice the variance over the epochs.
        return 2 * invariant.var(0, unbiased=False).mean()

    return penalty


def aligned(sets: Tensor, labels: Tensor) -> Tensor:
    """The sets (E, N, …), each in the order that brings it nearest to the first; a record only
    takes the place of one with the same label."""
    first = sets[0].flatten(1)
    # More than any assignment costs in [0, 1]: that of each record to itself is allowed.
    barred = (labels[:, None] != labels[None, :]) * (1.0 + first.numel())
    ordered = []
    for images in sets:
        cost = torch.cdist(first, images.flatten(1)).square() + barred
        ordered.append(images[linear_sum_assignment(cost.numpy())[1]])
    return torch.stack(ordered)
