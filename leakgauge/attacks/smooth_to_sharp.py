"""Smooth to sharp: an attack of this project, for updates that no exact method reads.

    min_x  1 − cos(g'(x), g) + Σ|g'(x) − g| / Σ|g| + α·TV(x),   x in [0, 1]

1. Signed Adam in stages, each begun afresh where the last one ended: half of the iterations at
   (`lr`, `tv`), a third at (0.08·`lr`, 0.1·`tv`), a sixth at (0.01·`lr`, 0.01·`tv`). In each the
   learning rate falls by half a cosine. Long steps under a strong smoothness prior first: they find
   the shapes. Then the prior lets go, and the details come.
2. When the distance is below `basin` before the last stage, that stage is L-BFGS in float64 on
   Σ‖g'(x) − g‖² / Σ‖g‖²: near the solution it is exact where first-order steps only approach.

In the first two stages the loss is Σ⟨e_i, logits(x_i)⟩ in place of the cross-entropy. A record's
error e_i = ∂L/∂logits_i is its softmax minus its label, over n; the last bias's gradient is the sum
of them. So for one record that *is* e, and for more, e_i = (p̄ − y_i)/n with the p̄ that makes the
sum right. Errors then need not be found by way of images: where logits are large, as after
training or with fan-in weights, the candidates' own softmax is far from the truth for long, and
misleads. Where they are small it is near the truth from the start, and its slope helps one record a
little. So `errors="auto"` reads them in a batch, and for one record when smooth random images, in
the modes of the training, have a softmax that misses the record's p by more than STRAY of its
error: mean_s Σ|p_s − p| > STRAY·Σ|p − y|. The last stage is the plain problem again.

With `space="generator"` the first stage moves the weights of a random generator instead, with a
twentieth of `lr` and a quarter of `tv`, and the others move its images on as pixels: for batches
under batch norm in train mode, where pixels alone go astray.

The relative L1 distance stands on equal footing with the cosine: its slope keeps its size where the
cosine has become flat, and it sees the length of the gradient. The prior pays twice: with α = 0.2
the search ended at a *smaller* distance than with less. Beginning Adam afresh matters too: its
memory of the smooth stage's slopes would carry over into the next.

With `activations` > 0 the search also meets what the exact separation and recursion (see
exact_recursion.py) read of the records without reaching the images: the mean over the known
activations a of Σ‖a(x) − a‖² / Σ‖a‖² is added with that weight, and the labels are those read with
them, record by record. Where nothing can be read the notes say why, and the search does without.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Facts: `search_iterations` and `search_distance`, where the last stage began; `finish`, its kind;
`errors`: read or the candidates' own, and why.
What was tried on the way here, with its numbers: docs/methods/smooth-to-sharp.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.attacks._engine import Trust
from leakgauge.attacks._labels import STAND_IN_SEED, infer, smooth_noise
from leakgauge.attacks._layers import gradient_sum, last_linear, told
from leakgauge.attacks._matching import (
    Adam,
    LabelledSearch,
    Lbfgs,
    Prior,
    Search,
    constant,
    joined,
    match,
    shared,
)
from leakgauge.attacks._matching import cosine as cosine_decay
from leakgauge.attacks._objectives import cosine, relative_l1, relative_squared, weighted
from leakgauge.attacks._peeling import Watch, peel
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._separation import gradient_of, separate, traced
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl.local import logits, minibatches, ready
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, option
from leakgauge.records import pictures
from leakgauge.types import Observation, Reconstruction, Resources

ErrorRule: TypeAlias = Literal["auto", "read", "own"]

distance = weighted((1.0, cosine), (1.0, relative_l1))

STAGES = ((1 / 2, 1.0, 1.0), (1 / 3, 0.08, 0.1), (1 / 6, 0.01, 0.01))
"""Of each stage: its share of the iterations, and its factors of `lr` and of `tv`."""
BALANCE = 0.05  # by how much of its size the gradient of the last bias may miss zero in sum
STRAY = 0.1  # by how much of an error random images' own may miss it, and still be taken
STAND_INS = 32  # random images that tell it
OWN = "the candidates' own"
GENERATOR = (0.05, 0.25)
"""The first stage's factors where it moves the weights of a generator, which is a prior itself."""


@dataclass(frozen=True)
class SmoothToSharp(LabelledSearch):
    """Finds a smooth image, then sharpens it (our own).

    `lr` and `tv` are those of the first stage. `basin` is the distance below which the last is
    L-BFGS. `space` and `restarts` are of the first stage: the others move its pixels on. `errors`
    are read for the first two stages, or the candidates' own; "auto" reads those of a batch, and
    of one record where logits are large."""

    papers: ClassVar[tuple[Paper, ...]] = InvertingGradients.papers  # our own, on its ground
    iterations: int = 600
    lr: float = 0.2
    tv: float = 0.2
    basin: float = option(0.02, FROM_0)
    activations: float = option(0.0, FROM_0)
    errors: ErrorRule = "auto"

    def __post_init__(self) -> None:
        if self.errors not in get_args(ErrorRule):
            raise ValueError(f'errors must be "auto", "read" or "own", got {self.errors!r}')

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return staged(self, seen, rng, resources)


def staged(
    attack: SmoothToSharp,
    seen: Observation,
    rng: torch.Generator,
    resources: Resources | None = None,
    begin: Tensor | None = None,
    labels: Tensor | None = None,
) -> Reconstruction:
    """The attack's stages. `begin` are images that another method made, for the first stage to
    start from, and `labels` those of these images, in their order."""
    if begin is not None:
        if labels is None or len(labels) != len(begin) or attack.activations:
            raise InputError(
                "images to begin from need their labels, one for each in the same order, and no "
                f"activations, which have an order of their own: got {len(begin)} images, "
                f"{'no' if labels is None else len(labels)} labels, "
                f"activations = {attack.activations:g}"
            )
        attack = replace(attack, restarts=1)  # another would begin and end as the first
    if labels is None:
        labels = infer(seen, attack.labels, rng)
    priors: list[Prior] = []
    notes: tuple[str, ...] = ()
    if attack.activations:
        try:
            penalty, labels, read = recovered(seen, rng, resources)
            priors = [(penalty, constant(attack.activations))]
        except NotApplicable as reason:
            read = f"no activations to meet: {reason}"
        notes = (read,)
    errors, source = held(seen, attack.errors, labels)
    counts = lengths(attack.iterations)
    left = shared(resources, attack.iterations + (attack.restarts - 1) * counts[0])
    run: Reconstruction | None = None
    trust = Trust()
    for number, (count, (_, rate, weight)) in enumerate(zip(counts, STAGES, strict=True)):
        rest = left(run.iterations if run else 0)
        if run and (not count or rest.seconds == 0):
            break
        if run is None and attack.space == "generator":
            rate, weight = GENERATOR
        near = run is not None and number == len(STAGES) - 1 and run.residual < attack.basin
        search = Search(count, derivative=attack.derivative)  # moves pixels on
        stage = match(
            seen,
            relative_squared if near else distance,
            search if run else replace(attack, iterations=max(count, 1)),
            labels=labels,
            priors=() if near else (*priors, (total_variation, constant(weight * attack.tv))),
            optimiser=Lbfgs() if near else Adam(rate * attack.lr, cosine_decay(), signed=True),
            begin=run.inputs if run else begin,
            box="none" if near else "clamp",
            errors=None if number == len(STAGES) - 1 else errors,
            dtype=torch.float64 if near else torch.float32,
            trust=trust,
            rng=rng,
            resources=rest,
        )
        if run is None:
            run = stage
            continue
        run = joined(
            run,
            stage,
            search_iterations=run.iterations,
            search_distance=run.residual,
            finish="second order" if near else "first order",
        )
    assert run is not None
    return replace(run, notes=notes + run.notes, facts=run.facts | {"errors": source})


def held(seen: Observation, rule: ErrorRule, labels: Tensor) -> tuple[Tensor | None, str]:
    """The errors that the first stages hold, None for the candidates' own; and in words which."""
    if rule == "own":
        return None, OWN
    try:
        errors = errors_of(seen, labels)
    except NotApplicable as reason:
        return None, f"{OWN}: {reason}"
    if rule == "read":
        return errors, "read"
    if len(errors) > 1:
        return errors, "read: several records"
    off = stray(seen, errors[0], labels[0])
    words = f"errors of random images miss the one read by {off:.1%} (limit {STRAY:.0%})"
    return (None, f"{OWN}: {words}") if off <= STRAY else (errors, f"read: {words}")


def stray(seen: Observation, error: Tensor, label: Tensor) -> float:
    """How far the candidate's own error will be from the one read while it looks like nothing: the
    mean of Σ|p_s − p| over smooth random images, in units of Σ|p − y|."""
    training, _ = told(seen, "smooth-to-sharp")
    setting = replace(seen.setting, model=ready(seen.model, training).float())
    rng = torch.Generator().manual_seed(STAND_IN_SEED)
    images = smooth_noise((STAND_INS, *pictures(seen.record).shape), rng)
    with torch.no_grad():  # one by one, as the client had its record
        said = [logits(setting, {}, image, training) for image in torch.split(images, 1)]
    own = torch.cat(said).softmax(1)
    p = error + F.one_hot(label, len(error)).to(error)
    return float((own - p).abs().sum(1).mean() / error.abs().sum())


def errors_of(seen: Observation, labels: Tensor) -> Tensor:
    """∂L/∂logits of the records (N, C), as the gradient of the head's bias tells it: their mean is
    what it says, and their softmaxes are taken to be equal. Exact for one record."""
    training, records = told(seen, "smooth-to-sharp")
    head = last_linear(seen.model, seen.record.shape)
    if head.bias is None:
        raise NotApplicable("the last layer has no bias to read them from")
    if not any(value.dim() > 1 for value in seen.update.values()):
        raise NotApplicable("only biases and norms are trained: errors alone make their gradients")
    if len(minibatches(records, training)) > 1 or training.optimiser != "sgd":
        raise NotApplicable("the update is not one step of SGD")
    mean = gradient_sum(seen, head.bias, torch.float32) / training.lr
    if not mean.sum().abs() < BALANCE * mean.abs().sum():
        raise NotApplicable(
            "the gradient of the last bias does not add up to zero, as that of a softmax does: the "
            "update was changed on the way"
        )
    actual = F.one_hot(labels, len(mean)).to(mean)
    return (mean + actual.mean(0) - actual) / records


def recovered(
    seen: Observation, rng: torch.Generator, resources: Resources | None = None
) -> tuple[Callable[[Tensor], Tensor], Tensor, str]:
    """How far images miss the activations that the update tells, the labels in the order of those
    activations, and what was read in words."""
    gradient = gradient_of(seen)
    training, records = told(seen, "smooth-to-sharp")
    trace = traced(seen)
    if trace.norms or len(minibatches(records, training)) > 1:
        raise NotApplicable(
            "the search meets activations of known size, at the weights that were sent"
        )
    begun = separate(trace, gradient, records, rng)
    watch = Watch(replace(resources or Resources(), progress=None), total=1)
    known = peel(trace, gradient, begun, watch, rng=rng).known
    known.pop(trace.input, None)
    size = {node: float(value.square().sum()) for node, value in known.items()}

    def penalty(x: Tensor) -> Tensor:
        trace.module.to(x)  # it was double to read with
        found = trace.forward(seen.record.entering(x), list(known))
        off = [(found[n] - known[n].to(x)).square().sum() / size[n] for n in known]
        return torch.stack(off).mean()

    words = f"meets the activations read of {len(known)} layers, down to {list(known)[-1].name}"
    return penalty, begun.labels, words


def lengths(iterations: int) -> list[int]:
    """Iterations of each stage."""
    first = [round(share * iterations) for share, _, _ in STAGES[:-1]]
    return [*first, iterations - sum(first)]
