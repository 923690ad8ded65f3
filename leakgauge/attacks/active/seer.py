"""SEER — K. Garov, D. I. Dimitrov, N. Jovanović, M. Vechev: "Hiding in Plain Sight: Disguising Data
Stealing Attacks in Federated Learning", ICLR 2024, https://arxiv.org/abs/2306.03013

The server trains the model that it sends together with a secret decoder, on public images: a linear
disaggregator d and a reconstructor r. In a batch of B, one image has a property (here: it is the
brightest) and all others are to vanish from the sum of gradients g = Σ_i g_i:

    L = ‖r(d(g_rec)) − x_rec‖² / (1 + α)  +  α · Σ_{i ≠ rec} ‖d(g_i)‖² / (1 + α)

d is linear, so d(g) = d(g_rec) + Σ d(g_i): what is left of the sum is the image with the property.
Nothing in the weights stands out, because they were trained and not written: that is the point of
the paper, and why a guard cannot rely on looking at weights.

Needs: `training`, `records`, public labelled images, one local step on one batch of the size that
the model was trained for, a model that can be differentiated twice. One low-resolution image of the
batch is all it returns.
Differs from the paper: made for a CPU. r is linear and gives `side` × `side` pixels; the sum over
the other images is estimated by one random combination of signs, Σ s_i g_i, which has it as its
expectation, beside their plain sum, which is what the server will meet; both are measured after r,
in pixels, since d could otherwise shrink while r grows; α rises from `alpha_first` to `alpha_last`
over the first 60 % of the steps; of a large model, `entries` gradient entries drawn once at random
are read.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.attacks._layers import gradient_sum, rehearsing
from leakgauge.errors import InputError, NotApplicable, PlanError, Withheld
from leakgauge.fl.local import State, advance, loss, minibatches, ready, start
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.records import pictures
from leakgauge.tensors import parameters
from leakgauge.types import (
    Batch,
    Dataset,
    Kept,
    Knowledge,
    LocalTraining,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Setting,
    Target,
)

EVERY = 250  # steps between two checkpoints


PAPER = Paper(
    "garov2024",
    "Garov, Kostadin and Dimitrov, Dimitar I. and Jovanović, Nikola and Vechev, Martin",
    "Hiding in Plain Sight: Disguising Data Stealing Attacks in Federated Learning",
    2024,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2306.03013",
)


@dataclass(frozen=True)
class Seer:
    """A trained model lets one record through (Garov 2024)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    steps: int = option(2500, count(10_000_000))
    lr: float = 1e-3
    side: int = option(8, count(1_024))
    width: int = option(192, count(100_000))  # numbers that the disaggregator makes of a gradient
    entries: int = option(16384, count(10_000_000))
    alpha_first: float = option(0.25, POSITIVE)
    alpha_last: float = option(8.0, POSITIVE)
    restarts: ClassVar[int] = 1
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key in ("steps", "side", "width", "entries"):
            if getattr(self, key) < 1:
                raise PlanError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("lr", "alpha_first", "alpha_last"):
            if not getattr(self, key) > 0:
                raise PlanError(f"{key} must be positive, got {getattr(self, key)}")

    @property
    def iterations(self) -> int:
        return self.steps

    def shortened(self, iterations: int, restarts: int) -> Seer:
        return replace(self, steps=iterations)

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        public = _check(target)
        resources = resources or Resources()
        live = replace(target.setting, model=ready(target.model, rehearsing(target, "SEER")))
        joint = _begin(self, target, public, live, rng)
        checkpoint = resources.checkpoint
        if checkpoint is not None and (before := checkpoint.load()):
            joint = _continued(joint, before, rng)
        deadline = math.inf if resources.seconds is None else time.monotonic() + resources.seconds
        while joint.step < self.steps and time.monotonic() < deadline:
            joint, objective = _trained(self, joint, target, public, live, rng)
            if checkpoint is not None and (joint.step % EVERY == 0 or joint.step == self.steps):
                checkpoint.save(_kept(joint, rng))
            if resources.progress is not None:
                resources.progress(joint.step, self.steps, objective)
        sent = copy.deepcopy(target.model)
        sent.load_state_dict(joint.named(joint.model) | joint.buffers, strict=False)
        chosen = {} if joint.chosen is None else {"chosen": joint.chosen}
        facts = {
            "names": list(joint.model),
            "records": target.records,
            "side": self.side,
            "error": math.sqrt(float(joint.error)),
            "steps": joint.step,
        }
        tensors = joint.named(DECODER) | {"scale": joint.scale} | chosen
        return Preparation(Kept(tensors, facts), (sent,))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        small = picture(seen)[None]
        assert seen.kept is not None
        facts = seen.kept.facts
        done, side = facts["steps"], facts["side"]
        notes = [f"one image: the brightest of its batch, {side} × {side} pixels enlarged"]
        if done < self.steps:
            notes.append(f"the joint training was stopped after {done} of {self.steps} steps")
        return Reconstruction(
            inputs=F.interpolate(small, pictures(seen.record).shape[1:], mode="bilinear").clamp(
                0, 1
            ),
            labels=None,
            residual=facts["error"],
            notes=tuple(notes),
            facts={"entries": seen.kept.tensors["d.weight"].shape[1], "steps": done},
        )


def picture(seen: Observation) -> Tensor:
    """What the secret decoder makes of an update: (C, side, side)."""
    if seen.training is None or seen.records is None or seen.kept is None:
        raise Withheld("SEER needs 'training', 'records' and what its prepare() kept")
    tensors, facts = seen.kept.tensors, seen.kept.facts
    _check_step(seen.training, seen.records)
    if seen.records != facts["records"]:
        raise NotApplicable(
            f"SEER was trained for batches of {facts['records']} and this update is of "
            f"{seen.records}: the property is that of one image in a batch"
        )
    # The client sends lr · mean gradient, and the decoder knows the sum.
    times = seen.records / seen.training.lr
    gradient = [times * gradient_sum(seen, name, torch.float32) for name in facts["names"]]
    decoder = {name: tensors[name] for name in DECODER}
    code = disaggregate(read(gradient, tensors.get("chosen")) * tensors["scale"], decoder)
    channels, side = pictures(seen.record).shape[0], facts["side"]
    return decode(code, decoder).view(channels, side, side).clamp(0, 1)


DECODER = ("d.weight", "r.weight", "r.bias")
"""The secret: the disaggregator (width, entries) and the reconstructor (pixels, width)."""


@dataclass(frozen=True)
class Joint:
    """All that the joint training changes. `adam` holds the model's weights and the decoder's."""

    model: tuple[str, ...]  # the names of the model's weights, in the order of the gradient
    adam: State
    buffers: Named
    chosen: Tensor | None  # which gradient entries are read: all when None
    scale: Tensor  # brings a gradient to length one, about
    error: Tensor  # running mean of the squared error a pixel
    step: int = 0

    def named(self, names: tuple[str, ...]) -> Named:
        every = dict(zip((*self.model, *DECODER), self.adam.weights, strict=True))
        return {name: every[name].detach() for name in names}


def brightest(images: Tensor) -> int:
    """The image of a batch that has the property."""
    return int(images.flatten(1).mean(1).argmax())


def read(gradient: Iterable[Tensor], chosen: Tensor | None) -> Tensor:
    """The gradient entries that the decoder is given, in one row."""
    row = torch.cat([part.flatten() for part in gradient])
    return row if chosen is None else row[chosen]


def disaggregate(gradient: Tensor, decoder: Named) -> Tensor:
    """d: (…, entries) -> (…, width). It has no bias: d of a sum is the sum of the d."""
    return gradient @ decoder["d.weight"].T


def decode(code: Tensor, decoder: Named) -> Tensor:
    """r: (…, width) -> (…, pixels)."""
    return code @ decoder["r.weight"].T + decoder["r.bias"]


def gradients(
    live: Setting, values: Named, buffers: Named, batch: Batch, shares: Tensor,
    training: LocalTraining,
) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """Σ_i share_i · g_i for every row of `shares` (rows, B), differentiable in `values`.

    g_i is the gradient of record i's own loss inside its batch: batch norm sees all of it. The
    loss is linear in its labels, so the derivative by their weight is the loss of each record.
    """
    weight = torch.ones(len(batch), 1, requires_grad=True)
    labels = F.one_hot(batch.labels, live.task.count) * weight
    mean = loss(live, values | buffers, batch.inputs, labels, training)
    (parts,) = torch.autograd.grad(mean, weight, create_graph=True)
    losses = parts.flatten() * len(batch)
    return [
        torch.autograd.grad(
            losses @ share, list(values.values()), create_graph=True, materialize_grads=True
        )
        for share in shares
    ]


def shares_of(chosen: int, signs: Tensor) -> Tensor:
    """The weights (3, B) of g_rec, Σ g_i and Σ s_i g_i over the others, both over √(B − 1)."""
    shares = torch.stack([torch.zeros_like(signs), torch.ones_like(signs), signs])
    shares /= max(1, len(signs) - 1) ** 0.5
    shares[:, chosen] = torch.tensor([1.0, 0.0, 0.0])
    return shares


def objective(rows: Tensor, picture: Tensor, decoder: Named, alpha: float) -> tuple[Tensor, Tensor]:
    """The loss, and its first term per pixel, from the gradients (3, entries) of `shares_of`."""
    code = disaggregate(rows, decoder)
    error = (decode(code[0], decoder) - picture).square().mean()
    left = (code[1:] @ decoder["r.weight"].T).square().mean()
    return (error + alpha * left) / (1 + alpha), error


def _trained(
    options: Seer, joint: Joint, target: Target, public: Dataset, live: Setting,
    rng: torch.Generator,
) -> tuple[Joint, float]:  # fmt: skip
    """One step of the joint training, on a batch of public images."""
    picked = torch.randint(len(public), (target.records,), generator=rng)
    batch = Batch(public.inputs[picked], public.labels[picked])
    signs = torch.randint(2, (target.records,), generator=rng) * 2.0 - 1.0
    chosen = brightest(batch.inputs)
    shares = shares_of(chosen, signs)
    leaves = [w.detach().requires_grad_() for w in joint.adam.weights]
    values = dict(zip((*joint.model, *DECODER), leaves, strict=True))
    weights = {name: values[name] for name in joint.model}
    decoder = {name: values[name] for name in DECODER}
    buffers = {name: value.clone() for name, value in joint.buffers.items()}
    found = gradients(live, weights, buffers, batch, shares, rehearsing(target, "SEER"))
    rows = torch.stack([read(gradient, joint.chosen) for gradient in found]) * joint.scale
    goal = F.adaptive_avg_pool2d(batch.inputs[chosen], options.side).flatten()
    alpha, lr = _schedule(options, joint.step)
    total, error = objective(rows, goal, decoder, alpha)
    try:
        slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
    except RuntimeError as error_:
        raise NotApplicable(
            f"SEER trains through the gradient, and this model has no second derivative: {error_}"
        ) from error_
    length = torch.stack([slope.norm() for slope in slopes]).norm()
    slopes = tuple(slope / length.clamp(min=1.0) for slope in slopes)
    with torch.no_grad():
        adam = advance(joint.adam, slopes, LocalTraining(optimiser="adam", lr=lr))
    return replace(
        joint,
        adam=adam,
        buffers=buffers,
        error=joint.error.lerp(error.detach(), max(0.01, 1 / (joint.step + 1))),
        step=joint.step + 1,
    ), float(total.detach())


def _schedule(options: Seer, step: int) -> tuple[float, float]:
    """α rises by equal factors over the first 60 % of the steps; then the learning rate falls to a
    tenth, evenly."""
    share = step / options.steps
    alpha = options.alpha_first * (options.alpha_last / options.alpha_first) ** min(1, share / 0.6)
    return alpha, options.lr * (1 - 0.9 * max(0.0, share - 0.6) / 0.4)


def _begin(
    options: Seer, target: Target, public: Dataset, live: Setting, rng: torch.Generator
) -> Joint:
    """The honest model, and a decoder that knows the mean picture of the public images only."""
    weights = parameters(target.model)
    buffers = {n: b.detach().clone() for n, b in target.model.named_buffers()}
    picked = torch.arange(target.records) % len(public)
    batch = Batch(public.inputs[picked], public.labels[picked])
    leaves = {name: value.requires_grad_() for name, value in weights.items()}
    (first,) = gradients(
        live, leaves, {n: b.clone() for n, b in buffers.items()}, batch,
        torch.eye(1, target.records), rehearsing(target, "SEER"),
    )  # fmt: skip
    count = sum(part.numel() for part in first)
    chosen = None
    if count > options.entries:
        chosen = torch.randperm(count, generator=rng)[: options.entries].sort().values
    row = read(first, chosen).detach()
    pictures = F.adaptive_avg_pool2d(public.inputs, options.side).flatten(1)
    d = torch.randn(options.width, len(row), generator=rng) * 0.1
    r = torch.randn(pictures.shape[1], options.width, generator=rng) / options.width**0.5
    values = [*(w.detach() for w in weights.values()), d, r, pictures.mean(0)]
    return Joint(
        model=tuple(weights),
        adam=start(values, LocalTraining(optimiser="adam")),
        buffers=buffers,
        chosen=chosen,
        scale=1 / row.norm().clamp(min=1e-12),
        error=torch.zeros(()),
    )


def _check(target: Target) -> Dataset:
    """What the joint training needs, or why it cannot be."""
    if target.public is None or not len(target.public):
        raise NotApplicable(
            "SEER trains its decoder on public images of the same kind: give target(round, public)"
        )
    if tuple(target.public.inputs.shape[1:]) != pictures(target.record).shape:
        raise InputError(
            f"the public images are {tuple(target.public.inputs.shape)}, the clients' records "
            f"{target.record.shape}: resize them"
        )
    if other := int((target.public.labels < 0).sum()):
        raise NotApplicable(
            f"SEER trains on labelled public images, and {other} of {len(target.public)} are of no "
            "class that the clients have"
        )
    training = rehearsing(target, "SEER")
    _check_step(training, target.records)
    if training.dropout != "off":
        raise NotApplicable("SEER reads one exact gradient; this training draws dropout masks")
    return target.public


def _check_step(training: LocalTraining, records: int) -> None:
    """Refuse an update that is not one gradient of one batch."""
    if training.optimiser != "sgd":
        raise NotApplicable(
            f"SEER decodes a gradient, and {training.optimiser!r} rescales it entry by entry"
        )
    steps = len(minibatches(records, training))
    if steps != 1 or training.batch_size != records:
        raise NotApplicable(
            f"SEER decodes the gradient of one batch, and this update is of {steps} local steps of "
            f"{training.batch_size} records: later steps start from weights it was not trained for"
        )


def _kept(joint: Joint, rng: torch.Generator) -> Kept:
    """The training so far, with its generator."""
    adam = {f"adam.{i}": tensor for i, tensor in enumerate(joint.adam.tensors())}
    buffers = {f"buffer.{name}": value for name, value in joint.buffers.items()}
    state = {"rng": rng.get_state(), "error": joint.error}
    return Kept(state | adam | buffers, {"step": joint.step})


def _continued(joint: Joint, kept: Kept, rng: torch.Generator) -> Joint:
    step, tensors = int(kept.facts["step"]), kept.tensors
    adam = joint.adam.with_tensors([tensors[f"adam.{i}"] for i in range(len(joint.adam.tensors()))])
    rng.set_state(tensors["rng"])
    return replace(
        joint,
        adam=replace(adam, steps=step),
        buffers={name: tensors[f"buffer.{name}"] for name in joint.buffers},
        error=tensors["error"],
        step=step,
    )
