"""AGIC — J. Xu, C. Hong, J. Huang, L. Y. Chen, J. Decouchant: "AGIC: Approximate Gradient Inversion
Attack on Federated Learning", SRDS 2022, https://arxiv.org/abs/2204.13784

    min_x  Σ_l w_l·(1 − ⟨g'_l(x), g_l⟩ / (‖g'_l(x)‖‖g_l‖)) / Σ_l w_l + α·TV(x),   x in [0, 1]

with weights w_l that grow with depth. An update of several steps or batches is taken for a multiple
of *one* gradient, on the union of the batches at the initial weights: the cosine does not see the
multiple, and no step is replayed. An iteration costs as much as against a single step.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`,
from the whole of the local training.
Differs from the paper: a layer is a weight of two dimensions or more (biases and normalisations,
which have a cosine each but little to say, are left out), its w_l rises evenly from 1 to `last`;
several rounds of one client are not joined, for an observation is of one round; the best iterate is
returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import Adam, LabelledSearch, constant, match, steps
from leakgauge.attacks._objectives import Distance, cosine, matrices, ramp
from leakgauge.attacks._priors import total_variation
from leakgauge.errors import NotApplicable
from leakgauge.fl.local import minibatches
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "xu2022",
    "Xu, Jin and Hong, Chi and Huang, Jiyue and Chen, Lydia Y. and Decouchant, Jérémie",
    "{AGIC}: Approximate Gradient Inversion Attack on Federated Learning",
    2022,
    "41st International Symposium on Reliable Distributed Systems",
    "https://arxiv.org/abs/2204.13784",
    fields=(("pages", "12--22"),),
)


@dataclass(frozen=True)
class AGIC(LabelledSearch):
    """Treats several local steps as one gradient (Xu 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    last: float = option(10.0, POSITIVE)
    tv: float = 1e-4

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"last must be at least 1: weights grow with depth, got {self.last}")

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        once, notes = at_once(seen)
        found = match(
            once,
            by_layer(self.last),
            self,
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, steps(), signed=True),
            rng=rng,
            resources=resources,
        )
        return replace(found, notes=(*notes, *found.notes))


def at_once(seen: Observation) -> tuple[Observation, tuple[str, ...]]:
    """The observation as if its update were one step of SGD on all records together, and a note
    where it was not."""
    training, records = told(seen, "gradient matching")
    if training.optimiser != "sgd":
        raise NotApplicable(
            f"AGIC takes an update for a multiple of a gradient, but one by "
            f"{training.optimiser!r} is rescaled entry by entry: use 'inverting-gradients'"
        )
    taken = len(minibatches(records, training))
    once = replace(training, steps=1, epochs=None, batch_size=records, momentum=0.0)
    note = f"{taken} local steps were approximated by one gradient at the initial weights"
    return replace(seen, training=once), (note,) if taken > 1 else ()


def by_layer(last: float) -> Distance:
    """The weighted mean of the layers' cosine distances. A layer that either gradient does not
    reach has distance 1 and no slope."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        layers = matrices(target)
        weights = ramp(len(layers), last)
        value = 0.0
        for k, ours in enumerate(guess):
            if k not in layers:
                ours.zero_()
                continue
            share = weights[layers.index(k)] / sum(weights)
            if ours.any() and target[k].any():
                apart, _ = cosine([ours], [target[k]])  # leaves its slope in `ours`
                value += share * float(apart)
                ours.mul_(share)
            else:
                value += share
                ours.zero_()
        return torch.tensor(value, dtype=torch.float64), guess

    return distance
