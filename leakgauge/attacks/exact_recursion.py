"""Exact separation and recursion: images by linear algebra, record by record (our own).

It joins the recursion of R-GAP (J. Zhu, M. Blaschko, ICLR 2021, https://arxiv.org/abs/2010.07733)
and the low rank and ReLU sparsity of SPEAR (D. I. Dimitrov et al., NeurIPS 2024,
https://arxiv.org/abs/2403.03945) with the overlap of convolution windows:

1. *Separate* (`_separation`). The gradient of one layer behind a ReLU gives every record's
   activations there, and with them every record's error signal, scale and label.
2. *Peel* (`_peeling`). Below, layer after layer is linear: least squares for the whole batch.
3. *Finish*. Each image alone, from the lowest activations a_k known of it:
   min_x Σ_k ‖f_k(x) − a_k‖²/‖a_k‖², unless the peeling reached the image itself.

Batch norm in train mode and several local steps are no obstacle to the first two; they tie the
images of a batch together, so that the third is a search for all of them at once, which needs a
start: see separate_and_decode.py.

Needs: the local training (SGD) and the number of records. No labels, no statistics, no prior on
images. It says in words where it cannot apply. All is double precision on the CPU but that search.
The residual is the relative distance of the update that the found batch leads to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from leakgauge.attacks._finish import finish, stretched
from leakgauge.attacks._invert import FOUND, invert, missed
from leakgauge.attacks._layers import told
from leakgauge.attacks._peeling import Watch, peel
from leakgauge.attacks._separation import gradient_of, separate, traced
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError
from leakgauge.fl.local import advance, minibatches, outputs, ready, start
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.tensors import parameters
from leakgauge.types import (
    Knowledge,
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
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})

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
        _, records = told(seen, NAME)
        read = Read(seen, rng, resources, records)
        begun, done, watch = read.begun, read.done, read.watch
        search = self._alone if done.trace.alone else self._together
        images, misfits = search(read, rng)
        chosen = begun.once(records)
        inputs = seen.record.leaving(images[chosen]).clamp(0, 1)
        misfits = [misfits[i] for i in chosen.tolist()]
        met = sum(misfit < FOUND for misfit in misfits)
        notes = [f"the peeling stopped at {done.stopped}"] if done.stopped else []
        if not done.trace.alone:
            notes.append(
                "batch norm ties the images of a batch together: they are searched at once, which "
                "needs a start: the attack separate-and-decode has one, this attack has none"
            )
        if met < len(chosen):
            notes.append(f"{met} of {len(chosen)} images meet the activations known of them")
        labels = begun.labels[chosen]
        return Reconstruction(
            inputs=inputs.float(),
            labels=labels,
            residual=read.residual(inputs, labels),
            stopped="time" if watch.notes else "done",
            notes=tuple(notes + watch.notes),
            facts=read.facts() | {"images_met": met, "misfits": misfits},
        )

    def _together(self, read: Read, rng: torch.Generator) -> tuple[Tensor, list[float]]:
        """Normalised images, searched at once from faint noise, and how far each misses the
        activations known of it."""
        shape = (len(read.begun.maps), *read.trace.shape[read.trace.input])
        begin = 0.1 * torch.randn(shape, generator=rng)
        images, misfits = read.finish(begin, self.evaluations // 4)
        return images.double(), misfits.tolist()

    def _alone(self, read: Read, rng: torch.Generator) -> tuple[Tensor, list[float]]:
        """Normalised images, searched one by one, and how far each misses the activations known of
        it. Steps that were told apart are taken in turn: with the images of one its training is
        replayed, which gives the weights of all layers that the next began with."""
        node, steps = read.done.lowest, read.begun.steps
        value, misfits = read.done.known[node], [0.0] * len(read.begun.maps)
        if node is read.trace.input:
            return value, misfits
        images = torch.zeros(len(value), *read.trace.shape[read.trace.input]).to(value)
        for number, step in enumerate(steps):
            trace = read.trace.moved(read.weights[number])
            for n in step.tolist():
                images[n] = self._found(trace, node, value[n : n + 1], rng, read.watch)[0]
            if trace.norms:
                images[step] = stretched(images[step], pictures(read.seen.record))
            for n in step.tolist():
                misfits[n] = float(missed(trace, node, value[n : n + 1], images[n : n + 1]))
            if number + 1 < len(steps):
                read.weights, _ = read.replayed(images)
        return images, misfits

    def _found(
        self, trace: Trace, node: fx.Node, value: Tensor, rng: torch.Generator, watch: Watch
    ) -> Tensor:
        tries: list[tuple[float, Tensor]] = []
        while not tries or (
            len(tries) < self.restarts and min(t[0] for t in tries) > FOUND and watch.open()
        ):
            image, misfit = invert(trace, node, value, rng, self.evaluations, watch.open)
            tries.append((misfit, image))
        misfit, image = min(tries, key=lambda one: one[0])
        watch(misfit)
        return image


class Read:
    """What the update tells of every record without a search: separated, then peeled."""

    def __init__(
        self,
        seen: Observation,
        rng: torch.Generator,
        resources: Resources,
        more: int = 0,
        reach: str = "",
        enough: float = math.inf,
        brief: bool = False,
    ) -> None:
        self.gradient = gradient_of(seen)
        self.seen = seen
        self.training, records = told(seen, NAME)
        self.trace = traced(seen)
        begun = separate(self.trace, self.gradient, records, rng, self.training)
        depth = self.trace.depth(begun.source)
        self.watch = Watch(resources, total=depth + (more or len(begun.steps)))
        self.watch(begun.misfit)
        self.done = peel(
            self.trace, self.gradient, begun, self.watch, reach, rng, enough, brief=brief
        )
        # A layer below may tell steps apart that the first one does not.
        last = self.done.start
        self.begun = replace(begun, steps=last.steps, path=last.path)
        self.weights: tuple[Named, ...] = self.begun.path.weights

    def facts(self) -> dict[str, Any]:
        return {
            "separated_at": str(self.begun.layer.target),
            "separated_again_at": [str(layer.target) for layer in self.done.again],
            "separation_misfit": self.begun.misfit,
            "peeled_to": self.done.lowest.name,
            "peeled": len(self.done.known),
            "local_steps": len(minibatches(told(self.seen, NAME)[1], self.training)),
        }

    def finish(self, begin: Tensor, evaluations: int) -> tuple[Tensor, Tensor]:
        """Normalised images from `begin`, by the lowest activations known, and how far each misses
        them: step after step, each with as many evaluations. Once the images of a step are found,
        its training is replayed, which gives the weights of all layers that the next began with."""
        node, begin = self.done.lowest, begin.float()
        if node is self.trace.input:
            return self.done.known[node], torch.zeros(len(begin))
        images, misfits = begin.clone(), torch.zeros(len(begin), dtype=torch.float64)
        for number, step in enumerate(self.begun.steps):
            images[step], misfits[step] = finish(
                [self.trace.moved(self.weights[number])],
                [torch.arange(len(step))],
                node.name,
                self.done.known[node][step],
                begin[step],
                pictures(self.seen.record),
                free_scale=bool(self.trace.norms),
                evaluations=evaluations,
                go_on=lambda misfit: self.watch.open(),
            )
            self.watch(float(misfits[step].mean()))
            if number + 1 < len(self.begun.steps):
                self.weights, _ = self.replayed(images)
        return images, misfits

    def replayed(self, images: Tensor) -> tuple[tuple[Named, ...], Named]:
        """The weights that each step begins with, and the update, when the client trains on these
        normalised images, one per appearance, with the labels found. It trains in the client's own
        precision: in another, masks and so the weights after a step differ. Appearances that no
        batch norm told apart by step are taken in the order in which they were found."""
        live = ready(self.seen.model, self.training)
        before = parameters(live)
        names, buffers = list(before), {n: b.clone() for n, b in live.named_buffers()}
        state = start([before[name].detach() for name in names], self.training)
        weights = []
        steps: Sequence[Tensor] = self.begun.steps
        sizes = [len(rows) for rows in minibatches(told(self.seen, NAME)[1], self.training)]
        if len(steps) < len(sizes):
            steps = torch.cat(self.begun.steps).split_with_sizes(sizes)
        for number, step in enumerate(steps):
            values = dict(zip(names, state.weights, strict=True))
            weights.append({name: value.detach() for name, value in values.items()})
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            with torch.enable_grad():
                batch = images[step].to(next(iter(before.values())))
                out = outputs(live, leaves | buffers, batch, self.training, number)
                objective = self.seen.task.loss(out, self.begun.labels[step])
            slope = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
            with torch.no_grad():
                state = advance(state, slope, self.training)
        return tuple(weights), dict(zip(names, state.moved, strict=True))

    def residual(self, inputs: Tensor, labels: Tensor) -> float:
        """‖u' − u‖/‖u‖ for these images, one per record and in the order of `once`."""
        chosen = self.begun.once(len(inputs))
        rows = torch.nn.functional.normalize(self.begun.maps.flatten(1))
        nearest = (rows @ rows[chosen].T).argmax(1)
        entering = self.seen.record.entering(inputs.double())[nearest]
        _, found = self.replayed(entering)
        return _norm([found[n] - u for n, u in self.seen.update.items()]) / _norm(
            list(self.seen.update.values())
        )


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())
