"""The probe — what one round on this model would give away. Our own. D-SNR is Eq. 1 of
K. Garov, D. I. Dimitrov, N. Jovanović, M. Vechev: "Hiding in Plain Sight", ICLR 2024,
https://arxiv.org/abs/2306.03013.

One forward and one backward over as many local records as a round trains on (batch_size × steps,
at most `records`; every class that the client holds is among them), in the modes in which the
client trains. Every product of a trained weight with data is looked at, whatever layer makes it;
z_ij is unit j of record i there, δ_ij = ∂L/∂z_ij.

    isolation   Unit j isolates record i if |δ_ij| > .99·Σ_i|δ_ij|: then ∂L/∂W_j : ∂L/∂b_j is what
                the layer saw of record i, exactly. Again on δ_ij − δ_i,j+1 of units sorted by
                b_j/‖w_j‖, and on δ_ij − r·δ_ik of units j and k whose z rank the records alike
                and that differ in one record being on (z > 0), r fitted to the others: where
                imprints subtract. The score is the share of records isolated in the worst product
                but the head's (of 128 at most: more records do not make as many images a smaller
                leak); of tokens (or places), where a layer sees several of each record.
    bins        The share of records (of 128 at most) that are alone between the thresholds of units
                that rank all records alike (|Spearman| > .98): what an imprint is made of, whatever
                its rows look like and whatever error it receives.
    D-SNR       max over weights W of max_i ‖g_i‖ / (Σ_i‖g_i‖ − max_i‖g_i‖), g_i = δ_iᵀ·a_i the part
                of ∂L/∂W that passes through slot i. Without batch norm that is the record's own
                gradient.
    head gain   max / median over records of ‖Wᵀ(p−y)‖ / ‖p−y‖, those with a loss above .1: a head
                that passes on the errors of one class only. Not of a head that the client's own
                network starts from zeros.
    loss        L / ln(classes), reported.
    coverage    The weight matrices that no product showed, reported.

Needs: the received model and records; isolation and D-SNR are facts about this update, hence
*exposed*. Isolation of more than half of the records in a model that is no better than chance,
though a fresh network of the client's own does not show it, is *reject* (honest networks with a
wide linear layer were measured up to .27 while at chance); so are bins that a fresh network does
not have, and head gain.

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
from leakgauge.detectors._products import Run, Watch
from leakgauge.fl.local import logits
from leakgauge.types import Batch, Detection, LocalTraining, Received

ALONE = 0.99
"""The share of a unit's gradient from which it belongs to one record."""
CROWD = 128
"""Records at most of which a share is taken: as many images are as bad a leak in a larger batch."""
ALIKE = 0.98
"""The rank correlation from which two units measure the same."""


@dataclass(frozen=True)
class Probe:
    """Would one training step isolate single records?"""

    isolation: float = 0.2
    manipulated: float = 0.5  # isolation above it, in a model at chance, is no honest leak
    bins: float = 0.1
    d_snr: float = 1.0
    head_gain: float = 3.0
    loss: float = 3.0
    coverage: float = 0.0
    records: int = 256
    least: int = 16  # fewer records make ratios and bins meaningless

    def wanted(self, batch: Batch, training: LocalTraining) -> tuple[int, int]:
        """How many records a round trains on, and how many of them are looked at."""
        count = training.batch_size * training.steps
        if training.epochs is not None:
            count = len(batch)
        return count, min(count, len(batch), self.records)

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None or received.batch is None or not len(received.batch):
            return ()
        model = opened(received.model, received, rng)
        count = self.wanted(received.batch, received.training)[1]
        batch = chosen(received.batch, model, count, rng)
        passed = run(model, batch, received.training)
        found = self._isolation(passed, received, batch, rng)
        if len(batch) >= self.least:
            found += self._bins(passed, received, batch, rng)
            found += self._d_snr(passed) + self._head_gain(passed, received, batch)
        classes = passed.logits.shape[-1]
        score = float(cross_entropy(passed.logits, batch.labels)) / math.log(max(classes, 2))
        reason = f"the loss is {score:.3g} times that of guessing"
        found += (Detection("loss", score, self.loss, "report", reason),)
        return (*found, self._coverage(passed))

    def _coverage(self, passed: Passed) -> Detection:
        names = list(passed.uncovered)
        reason = "every weight matrix was seen to meet the data"
        if names:
            told = [f"{name!r} ({passed.uncovered[name]})" for name in names[:3]]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            reason = f"the probe could not look at {', '.join(told)}{more}"
        tensor = names[0] if names else None
        return Detection("coverage", float(len(names)), self.coverage, "report", reason, tensor)

    def _isolation(
        self, passed: Passed, received: Received, batch: Batch, rng: torch.Generator
    ) -> tuple[Detection, ...]:
        leak = most_isolated(passed)
        if leak.layer is None:
            return ()
        means: Literal["reject", "exposed"] = "exposed"
        if not leak.share <= self.manipulated and _at_chance(passed.logits, batch.labels):
            own = run(opened(received.fresh, received, rng), batch, received.training)
            if most_isolated(own).share <= self.manipulated:
                means = "reject"
        reason = (
            f"what layer {leak.layer!r} sees of {leak.count} of {leak.total} {leak.unit} can be "
            "read exactly off one step's update"
        )
        score = leak.share if leak.unit == "tokens" else leak.count / min(leak.total, CROWD)
        return (
            Detection("isolation", score, self.isolation, means, reason, leak.tensor, leak.unit),
        )

    def _bins(
        self, passed: Passed, received: Received, batch: Batch, rng: torch.Generator
    ) -> tuple[Detection, ...]:
        scores = separated(passed)
        if not scores:
            return ()
        name, score = worst(scores)
        if not score <= self.bins:
            own = run(opened(received.fresh, received, rng), batch, received.training)
            if not separated(own).get(name, 0.0) <= self.bins:
                score = 0.0  # it is in the nature of the client's own network
        reason = (
            f"the units of {name!r} measure one and the same thing, with thresholds that set a "
            f"share of {score:.2f} of your records (of 128 at most) apart one by one"
        )
        return (Detection("bins", score, self.bins, "reject", reason, name),)

    def _d_snr(self, passed: Passed) -> tuple[Detection, ...]:
        scores: dict[str, float] = {}
        for seen in passed.runs:
            if seen.gradient is not None and seen.kind in ("linear", "convolution"):
                score = dominance(slot_norms(seen))
                scores[seen.name] = worst({"": score, " ": scores.get(seen.name, 0.0)})[1]
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
        name = passed.head.name
        own = dict(received.fresh.named_parameters()).get(name)
        if own is not None and not own.any():
            return ()  # a head that starts from zeros is unbalanced for some rounds, honestly
        said = passed.logits
        error = said.softmax(1) - one_hot(batch.labels, said.shape[1])
        wrong = cross_entropy(said, batch.labels, reduction="none") > 0.1
        if int(wrong.sum()) < self.least // 2:
            return ()
        error = error[wrong]
        gains = (error @ passed.head.weight).norm(dim=1) / error.norm(dim=1)
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

    `layer` is None when no weight but the head's meets data: nothing to read this way.
    """

    share: float
    count: int
    total: int
    unit: Literal["images", "tokens"]
    layer: str | None
    tensor: str | None = None


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


@dataclass(frozen=True)
class Passed:
    logits: Tensor
    runs: list[Run] = field(default_factory=list)
    head: Run | None = None
    uncovered: dict[str, str] = field(default_factory=dict)


def run(model: nn.Module, batch: Batch, training: LocalTraining, backward: bool = True) -> Passed:
    """Run a `prepared` model, which is used up: its weights no longer ask for gradients."""
    watch = Watch(model)
    for value in model.parameters():
        if value.is_leaf:  # those of a scripted network are not
            value.requires_grad_(False)
    with torch.enable_grad():
        with watch:
            said = logits(model, {}, batch.inputs, training)
        objective = cross_entropy(said, batch.labels)
        if backward and watch.leaves:
            torch.autograd.grad(objective, watch.leaves, allow_unused=True)
    said = said.detach()
    return Passed(said, watch.runs, _head(watch.runs, said), watch.uncovered())


def _head(runs: list[Run], said: Tensor) -> Run | None:
    """The linear layer whose output is the model's."""
    for seen in reversed(runs):
        if (
            seen.kind == "linear"
            and seen.left.numel() == said.numel()
            and torch.equal(seen.left.flatten(), said.flatten())
        ):
            return seen
    return None


def head(model: nn.Module, batch: Batch, training: LocalTraining) -> str | None:
    """The name of the linear layer whose output is the model's, seen on two records."""
    model = prepared(model, training)
    few = fitted(Batch(batch.inputs[:2], batch.labels[:2]), model)
    found = run(model, few, training, backward=False).head
    return None if found is None else found.layer


# --- isolation ------------------------------------------------------------------------------------


def most_isolated(passed: Passed) -> Isolation:
    """The product in which most records are isolated."""
    records = len(passed.logits)
    best = Isolation(0.0, 0, records, "images", None)
    for seen in passed.runs:
        if seen is passed.head or seen.kind == "norm" or seen.gradient is None:
            continue
        total = seen.gradient.numel() // seen.gradient.shape[seen.units]
        unit: Literal["images", "tokens"] = "images" if total == records else "tokens"
        count = _count(seen, seen.gradient, total)
        share = count / total
        if share > best.share or best.layer is None or (share, unit) == (best.share, "images"):
            best = Isolation(share, count, total, unit, seen.layer, seen.name)
    return best


def _count(seen: Run, gradient: Tensor, total: int) -> int:
    """How many records, or tokens, this product isolates."""
    if total > RANKED:  # of so many tokens only one that a unit is on for alone can be told
        size = gradient.abs().movedim(seen.units, 0).flatten(1)
        sums = size.sum(1)
        alone = (size.amax(1) > ALONE * sums) & (sums > 1e-6 * sums.max())
        return len(torch.unique(size[alone].argmax(1))) if alone.any() else 0
    delta = seen.rows(gradient)
    found = subtracted(delta, seen.rows(seen.left))
    if seen.kind not in ("linear", "convolution"):
        return int((found | _alone(delta)).sum())
    return int((found | isolated(delta, seen.weights(), seen.bias)).sum())


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


def subtracted(delta: Tensor, values: Tensor) -> Tensor:
    """Which rows of δ the difference of two units shows alone, one of them rescaled to fit."""
    found = torch.zeros(len(delta), dtype=torch.bool)
    for part in torch.split(neighbours(values), 4096):
        left, right, rows = part.T
        one, two = delta[:, left].double(), delta[:, right].double()  # (rows, pairs)
        here = torch.arange(len(rows))
        mine = one[rows, here], two[rows, here]
        one[rows, here] = two[rows, here] = 0.0
        scale = (one * two).sum(0) / (two * two).sum(0).clamp_min(1e-300)
        others = (one - scale * two).abs().sum(0)
        apart = (mine[0] - scale * mine[1]).abs()
        shared = one.abs().sum(0) > 0  # with nothing to fit, it is the unit alone
        counts = shared & (apart > ALONE * (apart + others)) & (apart > 1e-4 * one.abs().amax(0))
        found[rows[counts]] = True
    return found


def separated(passed: Passed) -> dict[str, float]:
    """By weight, the share of records (or tokens) alone between two thresholds of like units; of
    128 at most."""
    shares: dict[str, float] = {}
    for seen in passed.runs:
        if seen is passed.head:
            continue
        total = seen.left.numel() // seen.left.shape[seen.units]
        few = max(1, RANKED * len(seen.left) // total)  # records, where each has many tokens
        values = seen.rows(seen.left[:few] if total > RANKED else seen.left)
        pairs = neighbours(values)
        share = len(torch.unique(pairs[:, 2])) / min(len(values), CROWD)
        shares[seen.name] = max(share, shares.get(seen.name, 0.0))
    return shares


RANKED = 1024
"""Rows (records, or tokens of them) at most by which units are compared."""
SLOTS = 64
"""Records at most whose gradients are set against each other."""
MOST = 16384
"""Pairs at most that are looked at, of 512 units: a model could be made to have millions."""


def neighbours(values: Tensor, block: int = 512) -> Tensor:
    """(pairs, 3): units j and k that rank all rows of `values` (rows, units) alike or in reverse,
    and the one row that only one of them is on for (in reverse: that both are on or off for)."""
    ranks = values.argsort(0).argsort(0).to(torch.float32)
    ranks = torch.nn.functional.normalize(ranks - ranks.mean(0), dim=0)
    on = (values > 0).to(torch.float32)
    sums = on.sum(0)
    found = []
    for start in range(0, values.shape[1], block):
        part = slice(start, start + block)
        alike = ranks[:, part].T @ ranks
        apart = sums[part, None] + sums - 2 * (on[:, part].T @ on)
        apart = torch.where(alike > 0, apart, len(values) - apart)
        hits = ((alike.abs() > ALIKE) & (apart == 1)).nonzero()
        hits[:, 0] += start
        found.append(hits[:: 1 + len(hits) // MOST])
    pairs = torch.cat(found)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    left, right = on[:, pairs[:, 0]], on[:, pairs[:, 1]]
    differs = left != right
    reverse = differs.sum(0) > 1
    rows = torch.where(reverse, ~differs, differs).to(torch.float32).argmax(0)
    return torch.cat([pairs, rows[:, None]], 1)


def _alone(delta: Tensor) -> Tensor:
    size = delta.abs()
    total = size.sum(0)
    counts = (size > ALONE * total) & (total > 1e-6 * total.max())
    return counts.any(1)


def _at_chance(said: Tensor, labels: Tensor) -> bool:
    """Whether so many right answers are no surprise (two standard deviations) of a guess."""
    right, n, p = int((said.argmax(1) == labels).sum()), len(labels), 1 / said.shape[1]
    return right <= n * p + 2 * math.sqrt(n * p * (1 - p))


# --- D-SNR ----------------------------------------------------------------------------------------


def dominance(norms: Tensor) -> float:
    """Eq. 1 for one weight: the largest norm over the sum of the others."""
    most, total = float(norms.max()), float(norms.sum())
    rest = total - most
    return most / rest if rest else math.inf if most else 0.0


def slot_norms(seen: Run) -> Tensor:
    """‖δ_iᵀ·a_i‖ by record i, of the first 64, in double precision."""
    assert seen.gradient is not None
    if seen.kind == "linear":
        a, delta = (
            t[:SLOTS].reshape(min(len(t), SLOTS), -1, t.shape[-1])
            for t in (seen.entered, seen.gradient)
        )
        # ‖Σ_t δ_t a_tᵀ‖² = Σ_ts (a_t·a_s)(δ_t·δ_s): the gradient itself is never formed.
        products = (a @ a.mT).double() * (delta @ delta.mT).double()
        return products.sum((1, 2)).clamp_min(0).sqrt()
    return torch.cat([part.double().flatten(1).norm(dim=1) for part in _conv_gradients(seen)])


def _conv_gradients(seen: Run, chunk: int = 8) -> Iterator[Tensor]:
    """∂L/∂W by record, (chunk, …) at a time: records side by side as groups of one convolution."""
    assert seen.gradient is not None
    stride, padding, dilation, groups = seen.options
    kernel = seen.weight.shape[2:]
    entered = pad(seen.entered[:SLOTS], _sides(padding, kernel, dilation))
    gradient = seen.gradient[:SLOTS]
    for a, delta in zip(torch.split(entered, chunk), torch.split(gradient, chunk), strict=True):
        n = len(a)
        shape = (n * seen.weight.shape[0], *seen.weight.shape[1:])
        _, weight, _ = torch.ops.aten.convolution_backward(
            delta.flatten(0, 1)[None],
            a.flatten(0, 1)[None],
            a.new_empty(shape),
            None,
            stride,
            [0] * len(stride),
            dilation,
            False,
            [0] * len(stride),
            n * groups,
            [False, True, False],
        )
        yield weight.view(n, *seen.weight.shape)


def _sides(padding: object, kernel: torch.Size, dilation: list[int]) -> list[int]:
    """What a convolution adds before and behind, the last dimension first, as `pad` takes it."""
    sides = []
    for k, (size, step) in enumerate(zip(kernel, dilation, strict=True)):
        if padding == "same":
            total = step * (size - 1)
            sides.append((total // 2, total - total // 2))
        elif isinstance(padding, list | tuple):
            sides.append((int(padding[k % len(padding)]),) * 2)
        else:
            sides.append((0 if padding == "valid" else int(str(padding)),) * 2)
    return [n for pair in reversed(sides) for n in pair]
