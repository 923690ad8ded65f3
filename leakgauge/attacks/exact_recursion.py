"""Exact separation and recursion: images by linear algebra, record by record (our own).

It joins the recursion of R-GAP (J. Zhu, M. Blaschko, ICLR 2021, https://arxiv.org/abs/2010.07733)
and the low rank and ReLU sparsity of SPEAR (D. I. Dimitrov et al., NeurIPS 2024,
https://arxiv.org/abs/2403.03945) with the overlap of convolution windows:

1. *Separate* (`_separation`). The gradient of one layer behind a ReLU gives every record's
   activations there, and with them every record's error signal, scale and label.
2. *Peel* (`_peeling`). Below, layer after layer is linear: least squares for the whole batch.
3. *Finish*. Each image alone, from the lowest activations a_k known of it:
   min_x Σ_k ‖f_k(x) − a_k‖²/‖a_k‖², unless the peeling reached the image itself.

Needs: the local training (one step of SGD, batch norm in eval mode or none) and the number of
records. No labels, no statistics, no prior on images. It says in words where it cannot apply.
All is double precision on the CPU. The residual is the relative distance of the found batch's
gradient from the observed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from leakgauge.attacks._layers import gradient_sum, told
from leakgauge.attacks._peeling import FOUND, Peeled, Watch, invert, peel
from leakgauge.attacks._separation import Separated, separate
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl.local import loss, ready
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.tensors import parameters
from leakgauge.types import (
    Knowledge,
    LocalTraining,
    Named,
    Observation,
    Reconstruction,
    Resources,
)

NAME = "the exact recursion"

ZHU2021 = Paper(
    "zhu2021",
    "Zhu, Junyi and Blaschko, Matthew B.",
    "{R-GAP}: Recursive Gradient Attack on Privacy",
    2021,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2010.07733",
)

DIMITROV2024 = Paper(
    "dimitrov2024",
    "Dimitrov, Dimitar I. and Baader, Maximilian and Müller, Mark Niklas and Vechev, Martin",
    "{SPEAR}: Exact Gradient Inversion of Batches in Federated Learning",
    2024,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/2403.03945",
    fields=(("volume", "37"),),
)


@dataclass(frozen=True)
class ExactRecursion:
    """Solves for images layer by layer, no search (our own)."""

    papers: ClassVar[tuple[Paper, ...]] = (ZHU2021, DIMITROV2024)
    evaluations: int = option(400, count(10_000_000))  # of the finish, an image
    restarts: int = 2  # of the finish, while an image does not meet its activations
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records"})

    def __post_init__(self) -> None:
        if self.evaluations < 1 or self.restarts < 1:
            raise InputError(
                "exact-recursion needs evaluations and restarts of at least 1, got "
                f"{self.evaluations} and {self.restarts}"
            )

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        resources = resources or Resources()
        gradient = gradient_of(seen)
        training, records = told(seen, NAME)
        trace = Trace(seen.model, seen.record.shape, train=training.batch_norm == "train")
        begun = separate(trace, gradient, records, rng, training)
        watch = Watch(resources, total=trace.depth(begun.source) + records)
        watch(begun.misfit)
        done = peel(trace, gradient, begun, watch)
        images, misfits = self._finish(done, records, rng, watch)
        inputs = seen.record.leaving(images).clamp(0, 1)
        met = sum(misfit < FOUND for misfit in misfits)
        notes = [f"the peeling stopped at {done.stopped}"] if done.stopped else []
        if met < records:
            notes.append(f"{met} of {records} images meet the activations known of them")
        return Reconstruction(
            inputs=inputs.float(),
            labels=begun.labels,
            residual=_distance(seen, training, gradient, inputs, begun.labels),
            stopped="time" if watch.notes else "done",
            notes=tuple(notes + watch.notes),
            facts={
                "separated_at": str(begun.layer.target),
                "separation_misfit": begun.misfit,
                "peeled_to": done.lowest.name,
                "peeled": len(done.known),
                "images_met": met,
                "misfits": misfits,
            },
        )

    def _finish(
        self, done: Peeled, records: int, rng: torch.Generator, watch: Watch
    ) -> tuple[Tensor, list[float]]:
        """Normalised images, and how far each misses the activations known of it."""
        trace = done.trace
        if trace.input in done.known:
            return done.known[trace.input], [0.0] * records
        images, misfits = [], []
        for n in range(records):
            value = done.known[done.lowest][n : n + 1]
            tries: list[tuple[float, Tensor]] = []
            while not tries or (
                len(tries) < self.restarts and min(t[0] for t in tries) > FOUND and watch.open()
            ):
                image, misfit = invert(trace, done.lowest, value, rng, self.evaluations, watch.open)
                tries.append((misfit, image))
            misfit, image = min(tries, key=lambda one: one[0])
            images.append(image)
            misfits.append(misfit)
            watch(misfit)
        return torch.cat(images), misfits


def separable(seen: Observation, rng: torch.Generator) -> Separated:
    """A client's check before sending: what a server could read of each record in this update,
    without any search. Raises NotApplicable, with the reason, when the records cannot be told apart
    in this way."""
    gradient = gradient_of(seen)
    training, records = told(seen, NAME)
    trace = Trace(seen.model, seen.record.shape, train=training.batch_norm == "train")
    return separate(trace, gradient, records, rng, training)


def gradient_of(seen: Observation) -> Named:
    """The sum of the gradients of all local steps behind an update, in double precision."""
    training, _ = told(seen, NAME)
    pictures(seen.record)
    _check(seen.model, training)
    return {name: gradient_sum(seen, name).cpu() / training.lr for name in seen.update}


def _check(model: nn.Module, training: LocalTraining) -> None:
    refusals = {
        f"an update by {training.optimiser!r} is rescaled entry by entry": (
            training.optimiser != "sgd"
        ),
        "dropout hides part of the network": training.dropout != "off" and _has(model, _DropoutNd),
    }
    for reason, holds in refusals.items():
        if holds:
            raise NotApplicable(f"{NAME} needs plain steps of SGD, but {reason}")


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _distance(
    seen: Observation, training: LocalTraining, gradient: Named, inputs: Tensor, labels: Tensor
) -> float:
    """‖g' − g‖/‖g‖ for these images."""
    live = replace(seen.setting, model=ready(seen.model, training).double())
    values = {name: p.detach().requires_grad_() for name, p in parameters(live.model).items()}
    with torch.enable_grad():
        found = torch.autograd.grad(
            loss(live, values, inputs, labels, training),
            list(values.values()),
            materialize_grads=True,  # a parameter the loss does not use stays
        )
    return _norm([f - gradient[n] for n, f in zip(values, found, strict=True)]) / _norm(
        list(gradient.values())
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())
