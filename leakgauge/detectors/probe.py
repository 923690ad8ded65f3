"""The probe — what one step on this model would give away. Our own. D-SNR is Eq. 1 of
K. Garov, D. I. Dimitrov, N. Jovanović, M. Vechev: "Hiding in Plain Sight", ICLR 2024,
https://arxiv.org/abs/2306.03013.

One forward and one backward over local records, in the modes in which the client trains, with a
hook on every linear layer and convolution; δ_ij = ∂L/∂z_ij for record i and unit j.

    isolation   Unit j isolates record i if |δ_ij| > .99·Σ_i|δ_ij|: then ∂L/∂W_j : ∂L/∂b_j is what
                the layer saw of record i, exactly. Again on δ_ij − δ_i,j+1 of units sorted by
                b_j/‖w_j‖, where imprints subtract. The score is the share of records isolated in
                the worst linear layer but the head; of tokens, where a layer sees several of one.
    D-SNR       max over weights W of max_i ‖g_i‖ / (Σ_i‖g_i‖ − max_i‖g_i‖), g_i = δ_iᵀ·a_i the part
                of ∂L/∂W that passes through slot i. Without batch norm that is the record's own
                gradient.
    head gain   max / median over records of ‖Wᵀ(p−y)‖ / ‖p−y‖, those with a loss above .1: a head
                that passes on the errors of one class only. Not of a head that the client's own
                network starts from zeros.
    loss        L / ln(classes), reported.

Needs: the received model and records; isolation and D-SNR are facts about this update, hence
*exposed*. Isolation of more than half of the records in a model that is no better than chance,
though a fresh network of the client's own does not show it, is *reject* (honest networks with a
wide linear layer were measured up to .27 while at chance); so is head gain.

Differs from the paper: D-SNR is taken over slots, in train mode, over all linear layers and
convolutions. No gradient by weight is computed, so the probe costs less than a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad

from leakgauge.detectors._layers import chosen, fitted, prepared, worst
from leakgauge.fl.local import loss
from leakgauge.types import Batch, Detection, LocalTraining, Received

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ALONE = 0.99
"""The share of a unit's gradient from which it belongs to one record."""


@dataclass(frozen=True)
class Probe:
    """Would one training step isolate single records?"""

    isolation: float = 0.2
    manipulated: float = 0.5  # isolation above it, in a model at chance, is no honest leak
    d_snr: float = 1.0
    head_gain: float = 3.0
    loss: float = 3.0
    records: int = 64
    least: int = 16  # fewer records make the two ratios meaningless
    images: int = 4  # whose tokens are looked at, where a layer sees tokens

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None or received.batch is None or not len(received.batch):
            return ()
        model = opened(received.model, received, rng)
        batch = chosen(received.batch, model, self.records, rng)
        passed = run(model, batch, received.training)
        found = self._isolation(passed, received, batch, rng)
        if len(batch) >= self.least:
            found += self._d_snr(passed) + self._head_gain(passed, received, batch)
        classes = passed.logits.shape[-1]
        score = float(cross_entropy(passed.logits, batch.labels)) / math.log(max(classes, 2))
        reason = f"the loss is {score:.3g} times that of guessing"
        return (*found, Detection("loss", score, self.loss, "report", reason))

    def _isolation(
        self, passed: Passed, received: Received, batch: Batch, rng: torch.Generator
    ) -> tuple[Detection, ...]:
        leak = most_isolated(passed, self.images)
        if leak.layer is None:
            return ()
        means: Literal["reject", "exposed"] = "exposed"
        if not leak.share <= self.manipulated and _at_chance(passed.logits, batch.labels):
            own = run(opened(received.fresh, received, rng), batch, received.training)
            if most_isolated(own, self.images).share <= self.manipulated:
                means = "reject"
        reason = (
            f"what layer {leak.layer!r} sees of {leak.count} of {leak.total} {leak.unit} can be "
            "read exactly off one step's update"
        )
        tensor = f"{leak.layer}.weight"
        return (Detection("isolation", leak.share, self.isolation, means, reason, tensor),)

    def _d_snr(self, passed: Passed) -> tuple[Detection, ...]:
        scores: dict[str, float] = {}
        for seen in passed.runs:
            if seen.gradient is not None:
                score = dominance(slot_norms(seen))
                name = f"{seen.name}.weight" if seen.name else "weight"
                scores[name] = worst({"": score, " ": scores.get(name, 0.0)})[1]
        if not scores:
            return ()
        name, score = worst(scores)
        reason = (
            f"in the gradient of {name!r} one record outweighs all others together "
            f"{score:.3g} times"
        )
        return (Detection("d-snr", score, self.d_snr, "exposed", reason, name),)

    def _head_gain(self, passed: Passed, received: Received, batch: Batch) -> tuple[Detection, ...]:
        if passed.head is None:
            return ()
        name = f"{passed.head.name}.weight" if passed.head.name else "weight"
        own = dict(received.fresh.named_parameters()).get(name)
        if own is not None and not own.any():
            return ()  # a head that starts from zeros is unbalanced for some rounds, honestly
        layer = passed.head.module
        assert isinstance(layer, nn.Linear)
        logits = passed.logits
        error = logits.softmax(1) - one_hot(batch.labels, logits.shape[1])
        wrong = cross_entropy(logits, batch.labels, reduction="none") > 0.1
        if int(wrong.sum()) < self.least // 2:
            return ()
        error = error[wrong]
        gains = (error @ layer.weight.detach()).norm(dim=1) / error.norm(dim=1)
        usual, most = float(gains.median()), float(gains.max())
        score = most / usual if usual else math.inf if most else 0.0
        reason = (
            f"the head {name!r} passes on the error of one record {score:.3g} times as strongly "
            "as usual, as if made to let one class through"
        )
        return (Detection("head-gain", score, self.head_gain, "reject", reason, name),)


@dataclass(frozen=True)
class Isolation:
    """How many records (or tokens) one step's update shows exactly, in the worst hidden layer.

    `layer` is None when the network has no linear layer before its head: nothing to read this way.
    """

    share: float
    count: int
    total: int
    unit: Literal["images", "tokens"]
    layer: str | None


def opened(model: nn.Module, received: Received, rng: torch.Generator) -> nn.Module:
    """A `prepared` copy in which linear layers that the client's own network starts from zeros, and
    that are still zero, are drawn at random: they pass nothing back in the first step of local
    training, but do in all others."""
    copied = prepared(model, received.training)
    own = dict(received.fresh.named_modules())
    for name, layer in copied.named_modules():
        pair = layer, own.get(name)
        if all(isinstance(one, nn.Linear) and not one.weight.any() for one in pair):
            assert isinstance(layer, nn.Linear)
            layer.weight.data.normal_(0.0, layer.in_features**-0.5, generator=rng)
    return copied


def isolation(model: nn.Module, batch: Batch, training: LocalTraining) -> Isolation:
    """The leak meter of one's own model, whoever made it: isolation over the whole batch."""
    model = prepared(model, training)
    return most_isolated(run(model, fitted(batch, model), training))


# --- one forward, one backward --------------------------------------------------------------------


@dataclass
class Run:
    """One run of a layer: what entered it, what left it, and the loss's gradient by the latter."""

    name: str
    module: nn.Module
    entered: Tensor
    left: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Passed:
    logits: Tensor
    runs: list[Run] = field(default_factory=list)
    head: Run | None = None


def run(model: nn.Module, batch: Batch, training: LocalTraining, backward: bool = True) -> Passed:
    """Run a `prepared` model, which is used up: it keeps the hooks."""
    trained = {
        id(module)
        for module in model.modules()
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and module.weight.requires_grad
    }  # what is frozen is not sent
    model.requires_grad_(False)
    runs: list[Run] = []
    leaves: list[Tensor] = []
    outputs: list[Tensor] = []

    def note(name: str, module: nn.Module, entered: Tensor, left: Tensor) -> Tensor:
        if not left.requires_grad:  # nothing before it does: the backward pass ends here
            leaves.append(left.requires_grad_())
            left = left.clone()  # an activation in place may not change a leaf
        seen = Run(name, module, entered.detach(), left.detach())
        runs.append(seen)

        def keep(gradient: Tensor) -> None:
            seen.gradient = gradient.detach()

        left.register_hook(keep)  # type: ignore[no-untyped-call]
        return left

    with torch.enable_grad():
        for name, module in list(model.named_modules()):
            if id(module) in trained:
                module.register_forward_hook(
                    lambda module, args, left, name=name: note(name, module, args[0], left)
                )
        model.register_forward_hook(lambda module, args, left: outputs.append(left.detach()))
        objective = loss(model, {}, batch.inputs, batch.labels, training)
        if backward and leaves:
            torch.autograd.grad(objective, leaves, allow_unused=True)
    logits = outputs[-1]
    return Passed(logits, runs, _head(runs, logits))


def _head(runs: list[Run], logits: Tensor) -> Run | None:
    """The linear layer whose output is the model's."""
    for seen in reversed(runs):
        if (
            isinstance(seen.module, nn.Linear)
            and seen.left.numel() == logits.numel()
            and torch.equal(seen.left.flatten(), logits.flatten())
        ):
            return seen
    return None


def head(model: nn.Module, batch: Batch, training: LocalTraining) -> str | None:
    """The name of the linear layer whose output is the model's, seen on two records."""
    model = prepared(model, training)
    few = fitted(Batch(batch.inputs[:2], batch.labels[:2]), model)
    found = run(model, few, training, backward=False).head
    return None if found is None else found.name


# --- isolation ------------------------------------------------------------------------------------


def most_isolated(passed: Passed, images: int = 4) -> Isolation:
    """The layer in which most records are isolated."""
    records = len(passed.logits)
    best = Isolation(0.0, 0, records, "images", None)
    for seen in passed.runs:
        layer, delta = seen.module, seen.gradient
        if not isinstance(layer, nn.Linear) or seen is passed.head or delta is None:
            continue
        tokens = delta[0].numel() > delta.shape[-1]  # δ: (records, …, units)
        rows = (delta[:images] if tokens else delta).reshape(-1, delta.shape[-1])
        count = int(isolated(rows, layer.weight.detach(), layer.bias).sum())
        share = count / len(rows)
        if share > best.share or best.layer is None:
            best = Isolation(share, count, len(rows), "tokens" if tokens else "images", seen.name)
    return best


def isolated(delta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Which rows of δ (records, units) a unit, or the difference of two neighbours, shows alone."""
    found = _alone(delta)
    if bias is not None and delta.shape[1] > 1:
        order = (bias / weight.norm(dim=1).clamp_min(1e-30)).argsort(stable=True)
        left, right = delta[:, order[:-1]], delta[:, order[1:]]
        apart = left - right
        # What two units share cancels but for rounding.
        apart[apart.abs() < 1e-4 * torch.maximum(left.abs(), right.abs())] = 0.0
        found |= _alone(apart)
    return found


def _alone(delta: Tensor) -> Tensor:
    size = delta.abs()
    total = size.sum(0)
    counts = (size > ALONE * total) & (total > 1e-6 * total.max())
    return counts.any(1)


def _at_chance(logits: Tensor, labels: Tensor) -> bool:
    """Whether so many right answers are no surprise (two standard deviations) of a guess."""
    right, n, p = int((logits.argmax(1) == labels).sum()), len(labels), 1 / logits.shape[1]
    return right <= n * p + 2 * math.sqrt(n * p * (1 - p))


# --- D-SNR ----------------------------------------------------------------------------------------


def dominance(norms: Tensor) -> float:
    """Eq. 1 for one weight: the largest norm over the sum of the others."""
    most, total = float(norms.max()), float(norms.sum())
    rest = total - most
    return most / rest if rest else math.inf if most else 0.0


def slot_norms(seen: Run) -> Tensor:
    """‖δ_iᵀ·a_i‖ by record i, in double precision."""
    assert seen.gradient is not None
    if isinstance(seen.module, nn.Linear):
        a, delta = (t.reshape(len(t), -1, t.shape[-1]) for t in (seen.entered, seen.gradient))
        # ‖Σ_t δ_t a_tᵀ‖² = Σ_ts (a_t·a_s)(δ_t·δ_s): the gradient itself is never formed.
        products = (a @ a.mT).double() * (delta @ delta.mT).double()
        return products.sum((1, 2)).clamp_min(0).sqrt()
    return torch.cat([part.double().flatten(1).norm(dim=1) for part in _conv_gradients(seen)])


def _conv_gradients(seen: Run, chunk: int = 8) -> Iterator[Tensor]:
    """∂L/∂W by record, (chunk, …) at a time: records side by side as groups of one convolution."""
    conv, gradient = seen.module, seen.gradient
    assert isinstance(conv, CONVOLUTIONS)
    assert gradient is not None
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    entered = pad(seen.entered, conv._reversed_padding_repeated_twice, mode=mode)
    for a, delta in zip(torch.split(entered, chunk), torch.split(gradient, chunk), strict=True):
        n = len(a)
        shape = (n * conv.weight.shape[0], *conv.weight.shape[1:])
        _, weight, _ = torch.ops.aten.convolution_backward(
            delta.flatten(0, 1)[None],
            a.flatten(0, 1)[None],
            a.new_empty(shape),
            None,
            conv.stride,
            [0] * len(conv.stride),
            conv.dilation,
            False,
            [0] * len(conv.stride),
            n * conv.groups,
            [False, True, False],
        )
        yield weight.view(n, *conv.weight.shape)
