"""Which labels are in an update: read from the gradient of the last linear layer.

For cross-entropy over n records with features h_i and softmax p_i the last layer receives

    ∂L/∂b_c = mean_i (p_ic − [y_i = c]),     ∂L/∂W_c = mean_i (p_ic − [y_i = c]) h_i.

| rule      | source                                       | applies to                        |
|-----------|----------------------------------------------|-----------------------------------|
| `idlg`    | Zhao et al., iDLG, 2020                      | one record                        |
| `yin`     | Yin et al., GradInversion, CVPR 2021         | records ≤ classes, no repeats     |
| `fedleak` | Fan et al., FedLeak, 2025, §5                | any batch                         |
| `counts`  | counts n_c = n(p̄_c − ∂b_c); after Ma et al., iLRG, 2023, refined here | any batch, any number of local steps |

`counts` needs the mean softmax p̄ of records it cannot see. It starts from smooth random images and
then replaces them by what the gradient itself says: the row ∂W_c/∂b_c is a weighted mean of the true
features h, so the model's own last layer gives p̄ there. Without a bias the same is done with the
feature scale left free. Over several local steps p̄ is averaged along the way from the first to the
last local model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._layers import last_linear
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import minibatches, ready
from leakgauge.types import Knowledge, LocalTraining, Observation

LabelRule: TypeAlias = Literal["idlg", "yin", "fedleak", "counts", "known"]

STAND_INS = 64  # smooth random images that play the unseen records
REFINEMENTS = 8
WAYPOINTS = 4  # models between the first and the last of a multi-step update


@dataclass(frozen=True)
class Head:
    """The last layer's part of the update, as a gradient, with its features on stand-ins."""

    weight_gradient: Tensor  # (C, F)
    bias_gradient: Tensor | None  # (C,)
    weights: tuple[Tensor, ...]  # (C, F), at each waypoint of the local training
    biases: tuple[Tensor, ...]  # (C,)
    features: tuple[Tensor, ...]  # (STAND_INS, F)
    records: int
    is_gradient: bool  # false where the optimiser rescaled it entry by entry


def infer(seen: Observation, rule: LabelRule, rng: torch.Generator) -> Tensor:
    """The labels behind the update, sorted, one for each record; "known" takes granted ones."""
    if rule == "known":
        if seen.labels is None:
            raise Withheld("labels = 'known', but the observation holds no labels")
        return seen.labels
    if seen.training is None or seen.records is None:
        raise Withheld("label inference needs 'training' and 'records' in the observation")
    counts = RULES[rule](_head(seen, seen.training, seen.records, rng))
    return torch.arange(len(counts)).repeat_interleave(counts)


def knowledge(rule: LabelRule) -> frozenset[Knowledge]:
    """What an attack that matches gradients under this label rule must be granted."""
    needed: frozenset[Knowledge] = frozenset({"training", "records"})
    return needed | {"labels"} if rule == "known" else needed


def idlg(head: Head) -> Tensor:
    """The one class whose gradient row points against the (non-negative) features."""
    if head.records != 1:
        raise NotApplicable(
            f"the iDLG rule reads the label of one record, this update covers {head.records}: "
            "use the rule 'counts'"
        )
    strength = head.bias_gradient
    if strength is None:
        strength = head.weight_gradient.sum(1)
    return _once(strength.argsort()[:1], len(strength))


def yin(head: Head) -> Tensor:
    """The classes with the most negative entry in their row."""
    strength = head.weight_gradient.min(1).values
    if head.records > len(strength):
        raise NotApplicable(
            f"Yin's rule gives every class at most once, but the update covers {head.records} "
            f"records of {len(strength)} classes: use the rule 'counts'"
        )
    return _once(strength.argsort()[: head.records], len(strength))


def fedleak(head: Head) -> Tensor:
    """Smallest row sums; beyond one record a class, counts by the row sums below the maximum.

    The printed formula subtracts "max W" element by element; we read it as the largest entry of
    the weight gradient.
    """
    strength = head.weight_gradient.sum(1)
    order = strength.argsort()
    if head.records <= len(strength):
        return _once(order[: head.records], len(strength))
    below = (head.weight_gradient - head.weight_gradient.max()).sum(1)
    counts = (head.records * below / below.sum()).floor().long()
    for i in range(head.records - int(counts.sum())):
        counts[order[i % len(order)]] += 1
    return counts


def counts(head: Head) -> Tensor:
    """n_c = n(p̄_c − ∂b_c), rounded to whole counts that sum to n."""
    if not head.is_gradient:
        raise NotApplicable(
            "labels are counted from a sum of gradients, and an update by Adam is not one: use a "
            "rule by rank ('yin', 'fedleak'), or grant the labels"
        )
    return _rounded(
        _raw_with_bias(head) if head.bias_gradient is not None else _raw_without_bias(head),
        head.records,
    )


RULES: dict[str, Callable[[Head], Tensor]] = {
    "idlg": idlg,
    "yin": yin,
    "fedleak": fedleak,
    "counts": counts,
}


def _once(chosen: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=torch.long).index_fill_(0, chosen, 1)


def _softmax(head: Head, features: list[Tensor], shares: Tensor) -> Tensor:
    """p̄: the softmax at each waypoint for its features, weighted by shares, then averaged."""
    at = [
        (f @ w.T + b).softmax(1).mul(shares[:, None]).sum(0)
        for f, w, b in zip(features, head.weights, head.biases, strict=True)
    ]
    return torch.stack(at).mean(0)


def _raw_with_bias(head: Head) -> Tensor:
    assert head.bias_gradient is not None
    n, gb = head.records, head.bias_gradient
    even = torch.full((len(head.features[0]),), 1 / len(head.features[0]), dtype=gb.dtype)
    raw = n * (_softmax(head, list(head.features), even) - gb)
    return raw


def _raw_without_bias(head: Head) -> Tensor:
    n, gw = head.records, head.weight_gradient
    even = torch.full((len(head.features[0]),), 1 / len(head.features[0]), dtype=gw.dtype)
    mean = torch.stack([f.mean(0) for f in head.features]).mean(0)
    raw = n * (_softmax(head, list(head.features), even) - gw @ mean / (mean @ mean))
    return raw


def _rounded(raw: Tensor, total: int) -> Tensor:
    """Whole non-negative counts that sum to `total`, by largest remainder."""
    raw = raw.clamp_min(0)
    if float(raw.sum()) <= 0:
        raw = torch.ones_like(raw)
    raw = raw * (total / raw.sum())
    whole = raw.floor().long()
    order = (raw - whole).argsort(descending=True)
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def _head(seen: Observation, training: LocalTraining, records: int, rng: torch.Generator) -> Head:
    layer = last_linear(seen.model, seen.shape)
    steps = len(minibatches(records, training))
    unit = 1 / (training.lr * _effective_steps(training, steps))
    weight = seen.update[layer.weight].double() * unit
    bias = seen.update[layer.bias].double() * unit if layer.bias else None
    images = smooth_noise((STAND_INS, *seen.shape), rng)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (training.mean, training.std))
    model = ready(seen.model, training).float()
    before = {n: p.detach() for n, p in model.named_parameters() if n in seen.update}
    shares = [0.0] if steps == 1 else [k / WAYPOINTS for k in range(WAYPOINTS + 1)]
    caught: list[Tensor] = []
    model.get_submodule(layer.module).register_forward_hook(
        lambda module, args, output: caught.append(args[0].detach())
    )
    weights, biases = [], []
    for share in shares:
        values = {n: p - share * seen.update[n] for n, p in before.items()}
        with torch.no_grad():
            torch.func.functional_call(model, values, ((images - mean) / std,))
        weights.append(values[layer.weight].double())
        zero = weights[-1].new_zeros(len(weights[-1]))
        biases.append(values[layer.bias].double() if layer.bias else zero)
    return Head(
        weight,
        bias,
        tuple(weights),
        tuple(biases),
        tuple(f.double() for f in caught),
        records,
        training.optimiser == "sgd",
    )


def _effective_steps(training: LocalTraining, steps: int) -> float:
    """How many plain steps the momentum of `steps` steps amounts to, for an even gradient."""
    return sum(sum(training.momentum**j for j in range(t + 1)) for t in range(steps))


def smooth_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Random images in [0, 1] with the 1/f spectrum of photographs, each with its own contrast."""
    *_, height, width = shape
    rows = torch.fft.fftfreq(height)[:, None]
    columns = torch.fft.rfftfreq(width)[None, :]
    envelope = 1 / (rows.square() + columns.square()).sqrt().clamp_min(1 / max(height, width))
    spectrum = torch.fft.rfft2(torch.randn(shape, generator=rng)) * envelope
    images = torch.fft.irfft2(spectrum, s=(height, width))
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    level = 0.3 + 0.4 * torch.rand(shape[0], 1, 1, 1, generator=rng)
    contrast = 0.1 + 0.2 * torch.rand(shape[0], 1, 1, 1, generator=rng)
    return (level + contrast * images).clamp(0, 1)
