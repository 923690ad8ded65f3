"""Which labels are in an update: read from the gradient of the last linear layer.

For cross-entropy over n records with features h_i and softmax p_i the last layer receives

    ∂L/∂b_c = mean_i (p_ic − [y_i = c]),     ∂L/∂W_c = mean_i (p_ic − [y_i = c]) h_i.

| rule      | source                                       | applies to                        |
|-----------|----------------------------------------------|-----------------------------------|
| `idlg`    | Zhao et al., iDLG, 2020                      | one record                        |
| `yin`     | Yin et al., GradInversion, CVPR 2021         | records ≤ classes, no repeats     |
| `fedleak` | Fan et al., FedLeak, 2025, §5                | any batch                         |
| `counts`  | after Ma et al., iLRG, 2023                  | any batch, any number of steps    |

`counts` solves the first equation for the counts, n_c = n(p̄_c − ∂b_c). It cannot see p̄, the mean
softmax of the records, and puts smooth random images in their place. On an untrained network that
is exact. On a trained one it is not, and shows: the counts come out fractional or negative. Then p̄
is taken as uniform, and the counts are drawn towards equal ones as far as the error of that guess
outweighs the spread of honest counts. Without a bias, ∂b is replaced by ∂W·u for the u that makes
h·u as close to 1 on the stand-ins as it can: a bias made of features. Over several local steps p̄
and h are averaged along the way from the first to the last local model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._layers import last_linear
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import decay, minibatches, ready
from leakgauge.types import Knowledge, LocalTraining, Observation

LabelRule: TypeAlias = Literal["idlg", "yin", "fedleak", "counts", "known"]

STAND_INS = 64  # smooth random images that play the unseen records
TRUST = 0.05  # mean squared distance from whole counts below which the stand-ins are believed
STRAY = 0.5  # how far a trained network's p̄_c strays from uniform, in units of 1/C
RIDGE = 0.1  # weight of ‖u‖² against the fit of h·u to 1, relative to the mean square of h
WAYPOINTS = 8  # local models at most that stand for those of a multi-step update


@dataclass(frozen=True)
class Head:
    """The last layer's part of the update, as a gradient, with its features on stand-ins."""

    weight_gradient: Tensor  # (C, F)
    bias_gradient: Tensor | None  # (C,)
    weights: tuple[Tensor, ...]  # (C, F), at each waypoint of the local training
    biases: tuple[Tensor, ...]  # (C,)
    features: tuple[Tensor, ...]  # (STAND_INS, F)
    importance: Tensor  # of each waypoint in the update, sums to 1
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
    bias_gradient = head.bias_gradient
    if bias_gradient is None:
        bias_gradient = head.weight_gradient @ _constant_functional(torch.cat(head.features))
    n, classes = head.records, len(bias_gradient)
    raw = n * (_mean_softmax(head) - bias_gradient)
    unwhole = (raw - raw.round().clamp_min(0)).square().sum() / min(n, classes)
    if unwhole > TRUST:
        spread = n / classes * (1 - 1 / classes)  # variance of a count when labels are uniform
        belief = spread / (spread + (n * STRAY / classes) ** 2)
        raw = belief * n * (1 / classes - bias_gradient) + (1 - belief) * n / classes
    return _rounded(raw, n)


RULES: dict[str, Callable[[Head], Tensor]] = {
    "idlg": idlg,
    "yin": yin,
    "fedleak": fedleak,
    "counts": counts,
}


def _once(chosen: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=torch.long).index_fill_(0, chosen, 1)


def _mean_softmax(head: Head) -> Tensor:
    """p̄ of the stand-ins, averaged along the local training."""
    means = [(f @ w.T + b).softmax(1).mean(0)
             for f, w, b in zip(head.features, head.weights, head.biases, strict=True)]  # fmt: skip
    return torch.einsum("w,wc->c", head.importance, torch.stack(means))


def _constant_functional(features: Tensor) -> Tensor:
    """u with features·u ≈ 1 for all rows, by ridge regression."""
    mean = features.mean(0)
    ridge = RIDGE * features.square().mean()
    gram = features.T @ features / len(features)
    u: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(mean), dtype=gram.dtype), mean)
    return u / (features @ u).mean()


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
    places, pulls = _path(training, steps)
    unit = 1 / (training.lr * float(pulls.sum()))
    some = torch.linspace(0, steps - 1, min(steps, WAYPOINTS)).round().long()
    images = smooth_noise((STAND_INS, *seen.shape), rng)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (training.mean, training.std))
    model = ready(seen.model, training).float()
    before = {n: p.detach() for n, p in model.named_parameters() if n in seen.update}
    caught: list[Tensor] = []
    model.get_submodule(layer.module).register_forward_hook(
        lambda module, args, output: caught.append(args[0].detach())
    )
    # What is left of the update without weight decay is a sum of gradients.
    shrunk = decay(training, steps) if training.optimiser == "sgd" else 0.0
    gradient = {
        name: (seen.update[name] - shrunk * before[name]).double() * unit
        for name in (layer.weight, layer.bias)
        if name
    }
    weights, biases = [], []
    for share in places[some].tolist():
        values = {n: p - share * seen.update[n] for n, p in before.items()}
        with torch.no_grad():
            torch.func.functional_call(model, values, ((images - mean) / std,))
        weights.append(values[layer.weight].double())
        zero = weights[-1].new_zeros(len(weights[-1]))
        biases.append(values[layer.bias].double() if layer.bias else zero)
    return Head(
        gradient[layer.weight],
        gradient[layer.bias] if layer.bias else None,
        tuple(weights),
        tuple(biases),
        tuple(f.double() for f in caught),
        pulls[some] / pulls[some].sum(),
        records,
        training.optimiser == "sgd",
    )


def _path(training: LocalTraining, steps: int) -> tuple[Tensor, Tensor]:
    """For an even gradient: how far along the whole move step t was taken, and how many times its
    gradient counts in the update (more than once with momentum, and more the earlier it came)."""
    kept = training.momentum ** torch.arange(steps, dtype=torch.float64)
    velocity = kept.cumsum(0)  # of step t, in gradients
    moved = velocity.cumsum(0)
    places = (moved - velocity) / moved[-1]
    return places, velocity.flip(0)


def smooth_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Random images in [0, 1] with the 1/f spectrum of photographs, each with its own contrast."""
    *_, height, width = shape
    rows = torch.fft.fftfreq(height)[:, None]
    columns = torch.fft.rfftfreq(width)[None, :]
    envelope = 1 / (rows.square() + columns.square()).sqrt().clamp_min(1 / max(height, width))
    spectrum = torch.fft.rfft2(torch.randn(shape, generator=rng)) * envelope
    images: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    level = 0.3 + 0.4 * torch.rand(shape[0], 1, 1, 1, generator=rng)
    contrast = 0.1 + 0.2 * torch.rand(shape[0], 1, 1, 1, generator=rng)
    return (level + contrast * images).clamp(0, 1)
