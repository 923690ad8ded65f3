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
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from leakgauge.detectors._isolation import CROWD, Isolation, most_isolated, separated
from leakgauge.detectors._layers import chosen, fitted, judged, prepared, worst
from leakgauge.detectors._passes import Passed, run
from leakgauge.detectors._slots import dominance, slot_norms
from leakgauge.types import Batch, Detection, LocalTraining, Received


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
        says = (
            "in the gradient of {name} one record outweighs all others together {score:.3g} times"
        )
        return judged("d-snr", scores, self.d_snr, "exposed", says)

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


def _at_chance(said: Tensor, labels: Tensor) -> bool:
    """Whether so many right answers are no surprise (two standard deviations) of a guess."""
    right, n, p = int((said.argmax(1) == labels).sum()), len(labels), 1 / said.shape[1]
    return right <= n * p + 2 * math.sqrt(n * p * (1 - p))
