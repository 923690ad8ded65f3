"""Which labels are in an update: read from the gradient of the last linear layer.

For cross-entropy over n records with features h_i and softmax p_i the last layer receives

    ∂L/∂b_c = mean_i (p_ic − [y_i = c]),     ∂L/∂W_c = mean_i (p_ic − [y_i = c]) h_i.

| rule      | source                                       | applies to                        |
|-----------|----------------------------------------------|-----------------------------------|
| `idlg`    | Zhao et al., iDLG, 2020                      | one record                        |
| `yin`     | Yin et al., GradInversion, CVPR 2021         | records ≤ classes, no repeats     |
| `fedleak` | Fan et al., FedLeak, 2025, §5                | any batch                         |
| `counts`  | after Ma et al., iLRG, 2023                  | any batch, any number of steps    |
| `separated` | ours, after SPEAR: exact separation        | while a layer tells records apart |

`counts` solves the first equation for the counts, n_c = n(p̄_c − ∂b_c). As p̄_c is not negative, each
is at least −n∂b_c, rounded up: where these add up to n, as for one record always, they are the
counts, and no network has to be run. Elsewhere each term is a Gaussian belief whose spread comes
from smooth random images that stand in for the unseen records:

- p̄, the mean softmax of the records. Labels hardly depend on features before training, so that
  ∂W ≈ cov(p, h) + ∂b·h̄ᵀ, which gives h̄; the stand-ins are moved there and their softmax is taken.
- ∂b, where the head has no bias. A bias *below* it has the gradient Σ_c ∂b_c·∂z_c/∂bias, and its
  slopes ∂z_c/∂bias hardly depend on the record's contrast, unlike the features. Least squares on
  it, and on ∂W·u for the u that makes h·u as close to 1 as it can: a bias made of features.

Counts are whole: the surest class is rounded first, and what that rounding reveals corrects the
others. On an untrained network this is exact. On a trained one the stand-ins say little, and it
shows: their softmax varies wildly, or the roundings surprise the belief. Then p̄ is taken as
uniform, and the counts are drawn towards equal ones as far as the error of that guess outweighs the
spread of honest counts. Over several local steps all means run along the way from the first to the
last local model.

The stand-ins are the same for every attack, and what the network makes of them is remembered for
the last update: attacks on the same one share it. The key is the content of all that it follows
from, so that it is never taken for another update, and an attack finds the same labels whether or
not another one ran before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from leakgauge.attacks._layers import gradient_sum, last_linear, shared, told, weighed
from leakgauge.attacks._separation import separable
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import minibatches, ready
from leakgauge.papers import FAN2025, Paper
from leakgauge.records import floats
from leakgauge.types import Knowledge, LocalTraining, Named, Observation

LabelRule: TypeAlias = Literal["idlg", "yin", "fedleak", "counts", "separated", "known"]

TOLD = 1e-3  # rounding of n∂b in float32 that a whole number may miss
STAND_INS = 256  # smooth random images that play the unseen records
STAND_IN_SEED = 1  # every attack takes the same ones
PROBES = 64  # of them, for the slopes of a bias
GAP = 1.0  # how far records may be from the stand-ins on average, in deviations of the stand-ins
TRUST = 0.05  # squared distance from whole counts that needs no explanation by the belief's spread
EVEN = 0.05  # variance of the stand-ins' softmax above which they say nothing about the records'
STRAY = 0.5  # how far a trained network's p̄_c strays from uniform, in units of 1/C
RIDGE = 0.1  # weight of ‖u‖² against the fit of h·u to 1, relative to the mean square of h
WAYPOINTS = 8  # local models at most that stand for those of a multi-step update
BIASED = (nn.Linear, _ConvNd, _BatchNorm, nn.GroupNorm, nn.LayerNorm)  # bias: one per channel


@dataclass(frozen=True)
class Below:
    """The last bias below the head: its gradient, and ∂z/∂bias of every stand-in."""

    gradient: Tensor  # (F,)
    slopes: Tensor  # (PROBES, C, F)


@dataclass(frozen=True)
class StandIns:
    """What the network makes of the stand-ins, at each waypoint of the local training."""

    weights: tuple[Tensor, ...]  # (C, F)
    biases: tuple[Tensor, ...]  # (C,)
    features: tuple[Tensor, ...]  # (STAND_INS, F)
    importance: Tensor  # of each waypoint in the update, sums to 1
    below: Below | None = None  # where there is no bias


@dataclass(frozen=True)
class Head:
    """The last layer's part of the update, as a gradient: None where the update does not hold it
    for this layer alone."""

    weight_gradient: Tensor | None  # (C, F)
    bias_gradient: Tensor | None  # (C,)
    records: int
    is_gradient: bool  # false where the optimiser rescaled it entry by entry
    even: bool  # every record counts as much as any other
    stand_ins: Callable[[], StandIns]  # runs the network, unless it is remembered


def infer(seen: Observation, rule: LabelRule, rng: torch.Generator) -> Tensor:
    """The labels behind the update, sorted, one for each record; "known" takes granted ones."""
    if rule == "known":
        if seen.labels is None:
            raise Withheld("labels = 'known', but the observation holds no labels")
        return seen.labels
    if rule == "separated":
        return separated(seen)
    counts = RULES[rule](_head(seen, *told(seen, "label inference", weights=False)))
    _skip_stand_ins(seen.record.shape, rng)
    return torch.arange(len(counts)).repeat_interleave(counts)


def separated(seen: Observation) -> Tensor:
    """The labels of the records that an update shows one by one (see _separation), sorted."""
    _, records = told(seen, "label inference")
    try:
        found = separable(seen, torch.Generator().manual_seed(STAND_IN_SEED))
    except NotApplicable as reason:
        raise NotApplicable(
            f"the rule 'separated' reads labels record by record, and here {reason}: use the rule "
            "'counts'"
        ) from reason
    return found.labels[found.once(records)].sort().values


def knowledge(rule: LabelRule) -> frozenset[Knowledge]:
    """What an attack that matches gradients under this label rule must be granted."""
    needed: frozenset[Knowledge] = frozenset({"training", "records", "weights"})
    return needed | {"labels"} if rule == "known" else needed


def idlg(head: Head) -> Tensor:
    """The label of a single record: the class that was pushed up.

    Its row of the gradient points against the (non-negative) features.
    """
    if head.records != 1:
        raise NotApplicable(
            f"the iDLG rule reads the label of one record, this update covers {head.records}: "
            "use the rule 'counts'"
        )
    strength = head.bias_gradient
    if strength is None:
        strength = _rows(head, "idlg").sum(1)
    return _once(strength.argsort()[:1], len(strength))


def yin(head: Head) -> Tensor:
    """Each class at most once: those that were pushed up most.

    They have the most negative entry in their row.
    """
    strength = _rows(head, "yin").min(1).values
    if head.records > len(strength):
        raise NotApplicable(
            f"Yin's rule gives every class at most once, but the update covers {head.records} "
            f"records of {len(strength)} classes: use the rule 'counts'"
        )
    return _once(strength.argsort()[: head.records], len(strength))


def fedleak(head: Head) -> Tensor:
    """Classes in order of their row sums.

    The smallest first; beyond one record per class, counts by the row sums below the maximum.

    The printed formula subtracts "max W" element by element; we read it as the largest entry of
    the weight gradient.
    """
    rows = _rows(head, "fedleak")
    strength = rows.sum(1)
    order = strength.argsort()
    if head.records <= len(strength):
        return _once(order[: head.records], len(strength))
    below = (rows - rows.max()).sum(1)
    counts = (head.records * below / below.sum()).floor().long()
    for i in range(head.records - int(counts.sum())):
        counts[order[i % len(order)]] += 1
    return counts


def counts(head: Head) -> Tensor:
    """How many records of each class, also with repeats.

    n_c = n(p̄_c − ∂b_c), rounded to whole counts that sum to n.
    """
    if not head.is_gradient:
        raise NotApplicable(
            "labels are counted from a sum of gradients, and an update by Adam is not one: use a "
            "rule by rank ('yin', 'fedleak'), or grant the labels"
        )
    told = _told(head)
    if told is not None:
        return told
    n, crowd = head.records, head.stand_ins()
    p = _softmax(crowd)
    pull, spread = _pull(head, crowd, p)
    classes = len(pull)
    equal = n / classes
    honest = equal * (1 - 1 / classes)  # variance of a count when labels are uniform
    mean, unsure = _mean_softmax(head, crowd, p, pull / n)
    raw, covariance = n * mean - pull, spread + n**2 * unsure
    # Where the stand-ins leave much open, the spread of honest counts narrows it.
    narrow = torch.linalg.solve(covariance + honest * torch.eye(classes).double(), covariance).T
    found, surprise = _whole(raw + narrow @ (equal - raw), covariance - narrow @ covariance, n)
    even = float(_covariance(p).trace()) <= EVEN
    if even and surprise / min(n, classes) <= 1 and int(found.sum()) == n:
        return found
    belief = honest / (honest + (n * STRAY / classes) ** 2)
    return _rounded(equal - belief * pull, n)


RULES: dict[str, Callable[[Head], Tensor]] = {
    "idlg": idlg,
    "yin": yin,
    "fedleak": fedleak,
    "counts": counts,
}

ZHAO2020 = Paper(
    "zhao2020",
    "Zhao, Bo and Mopuri, Konda Reddy and Bilen, Hakan",
    "{iDLG}: Improved Deep Leakage from Gradients",
    2020,
    "arXiv:2001.02610",
    "https://arxiv.org/abs/2001.02610",
    kind="misc",
)

YIN2021 = Paper(
    "yin2021",
    "Yin, Hongxu and Mallya, Arun and Vahdat, Arash and Alvarez, Jose M. and Kautz, Jan and "
    "Molchanov, Pavlo",
    "See Through Gradients: Image Batch Recovery via {GradInversion}",
    2021,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "https://doi.org/10.1109/CVPR46437.2021.01607",
    fields=(("pages", "16332--16341"),),
)

MA2023 = Paper(
    "ma2023",
    "Ma, Kailang and Sun, Yu and Cui, Jian and Li, Dawei and Guan, Zhenyu and Liu, Jianwei",
    "Instance-wise Batch Label Restoration via Gradients in Federated Learning",
    2023,
    "International Conference on Learning Representations",
    "https://openreview.net/forum?id=FIrQfNSOoTr",
)

PAPERS: dict[str, tuple[Paper, ...]] = {
    "idlg": (ZHAO2020,),
    "yin": (YIN2021,),
    "fedleak": (FAN2025,),
    "counts": (MA2023,),
}


def _rows(head: Head, rule: str) -> Tensor:
    """The rows of the last layer's weight gradient."""
    if head.weight_gradient is None:
        raise NotApplicable(
            f"the rule {rule!r} reads the weight gradient of the last layer, and here that weight "
            "is frozen or shared with other layers: use the rule 'counts'"
        )
    return head.weight_gradient


def _once(chosen: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=torch.long).index_fill_(0, chosen, 1)


def _told(head: Head) -> Tensor | None:
    """The counts, where the gradient of the bias leaves only one choice: each is at least −n∂b_c,
    and they sum to n."""
    if head.bias_gradient is None or not head.even:
        return None
    least = (-head.records * head.bias_gradient - TOLD).ceil().clamp_min(0).long()
    return least if int(least.sum()) == head.records else None


def _softmax(crowd: StandIns, shift: Tensor | float = 0.0) -> Tensor:
    """p of the stand-ins (STAND_INS, C), averaged along the local training, with their features
    moved by `shift`."""
    way = zip(crowd.importance, crowd.features, crowd.weights, crowd.biases, strict=True)
    return torch.stack([a * ((f + shift) @ w.T + b).softmax(1) for a, f, w, b in way]).sum(0)


def _mean_softmax(
    head: Head, crowd: StandIns, p: Tensor, bias_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the belief about p̄ of the records.

    h̄ᵀ = ∂bᵀ(∂W − cov(p, h)) / ‖∂b‖² would be exact if every class had the same mean feature. It is
    off by `error` covariances of the features, from labels that met features by chance and from
    the covariance being the stand-ins'.
    """
    n = head.records
    features = torch.einsum("w,wnf->nf", crowd.importance, torch.stack(crowd.features))
    centre, middle = features.mean(0), p.mean(0)
    own = _covariance(p)
    if head.weight_gradient is None:
        return middle, (GAP**2 + 1 / n) * own
    cross = (p - middle).T @ (features - centre) / len(p)
    size = max(float(bias_gradient @ bias_gradient), 1e-30)
    mean_feature = bias_gradient @ (head.weight_gradient - cross) / size
    prior = GAP**2 + 1 / n
    share = _shares(middle - bias_gradient)
    for _ in range(2):
        by_chance = bias_gradient.square() @ share - (bias_gradient @ share) ** 2
        error = float(by_chance / n + bias_gradient @ own @ bias_gradient) / size**2
        trust = prior / (prior + error)
        middle = _softmax(crowd, trust * (mean_feature - centre)).mean(0)
        share = _shares(middle - bias_gradient)
    return middle, prior * (1 - trust) * own


def _pull(head: Head, crowd: StandIns, p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the belief about n∂b = Σ_i (p_i − [y_i])."""
    n, (_, classes) = head.records, p.shape
    eye = torch.eye(classes, dtype=p.dtype)
    if head.bias_gradient is not None:
        return n * head.bias_gradient, 0 * eye
    middle, one = p.mean(0), torch.ones(classes, dtype=p.dtype)
    features = torch.cat(crowd.features)
    u = _constant_functional(features)
    # Both observations are Σ_i S_iᵀ(p_i − [y_i]) for slopes S that vary from record to record.
    seen = n * _rows(head, "counts") @ u
    varying = float((features @ u).var()) + 1e-6
    prior = n / classes * eye + n**2 * GAP**2 * _covariance(p)
    pull = seen
    for _ in range(3):  # the error depends on the labels
        share = _shares(middle - pull / n, floor=0.1 / n)
        mixed = torch.outer(share, middle)
        square = torch.outer(middle, middle) - mixed - mixed.T + share.diag()
        square = n * square + GAP**2 * torch.outer(pull, pull)
        first = torch.linalg.inv(varying * square + 1e-4 * eye)
        precision = torch.linalg.inv(prior)
        weighted = precision @ (n * middle - n / classes) + first @ seen
        precision = precision + first
        if crowd.below is not None:
            mean = crowd.below.slopes.mean(0)
            apart = crowd.below.slopes - mean
            error = torch.einsum("ncf,cd,ndg->fg", apart, square, apart) / len(apart)
            ridge = 1e-3 * error.diagonal().mean() + 1e-12
            gain = torch.linalg.solve(error + ridge * torch.eye(len(error)).double(), mean.T).T
            precision = precision + gain @ mean.T
            weighted = weighted + gain @ (n * crowd.below.gradient)
        covariance = torch.linalg.inv(precision)
        pull = covariance @ weighted
        # Its entries sum to zero.
        gain = covariance @ one / (one @ covariance @ one)
        pull, covariance = (
            pull - gain * pull.sum(),
            covariance - torch.outer(gain, covariance @ one),
        )
    return pull, covariance


def _covariance(rows: Tensor) -> Tensor:
    apart = rows - rows.mean(0)
    return apart.T @ apart / len(rows)


def _shares(raw: Tensor, floor: float = 0.0) -> Tensor:
    """Class shares: not negative, sum 1."""
    raw = raw.clamp_min(0) + max(floor, 1e-12)
    return raw / raw.sum()


def _whole(mean: Tensor, covariance: Tensor, total: int) -> tuple[Tensor, float]:
    """Whole counts by rounding the surest first and conditioning the others on it, and the
    surprise: squared roundings in units of what the belief allows."""
    found = torch.zeros(len(mean), dtype=torch.long)
    open_, surprise = torch.ones(len(mean), dtype=torch.bool), 0.0
    for _ in range(len(mean)):
        variances = covariance.diagonal().clamp_min(0).where(open_, torch.inf)
        i = int(variances.argmin())
        variance = float(variances[i])
        count = mean[i].round().clamp(0, total)
        off = float(count - mean[i])
        surprise += off**2 / (variance + TRUST)
        found[i], open_[i] = int(count), False
        if variance > 1e-9:  # else it is not in doubt, and tells nothing about the others
            gain = covariance[:, i] / variance
            mean, covariance = mean + gain * off, covariance - torch.outer(gain, covariance[i])
    return found, surprise


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


def _head(seen: Observation, training: LocalTraining, records: int) -> Head:
    layer = last_linear(seen.model, floats(seen.record).shape)
    batches = minibatches(records, training)
    places, pulls = _path(training, len(batches))
    unit = 1 / (training.lr * float(pulls.sum()))
    before = {n: p.detach() for n, p in seen.model.named_parameters() if n in seen.update}

    def gradient(name: str) -> Tensor:
        return gradient_sum(seen, name, torch.float32).double() * unit

    def stand_ins() -> StandIns:
        weighed(seen, "running the network on stand-ins")
        return _remembered(_digest(seen, training, records), passed)

    def passed() -> StandIns:
        some = torch.linspace(0, len(batches) - 1, min(len(batches), WAYPOINTS)).round().long()
        own = torch.Generator().manual_seed(STAND_IN_SEED)
        images = seen.record.entering(smooth_noise((STAND_INS, *seen.record.shape), own))
        model = ready(seen.model, training).float()
        floats = {n: p.float() for n, p in before.items()}
        importance = pulls[some] / pulls[some].sum()
        runs = []
        lower, slopes = None, torch.zeros(())
        for share, weight in zip(places[some].tolist(), importance.tolist(), strict=True):
            values = {n: p - share * seen.update[n] for n, p in floats.items()}
            runs.append(_features(model, values, images, layer.module))
            if layer.bias is None:
                lower, here = _slopes(model, values, images[:PROBES], layer.module)
                slopes = slopes + weight * here
        below = Below(gradient(lower), slopes) if lower else None
        features, weights, biases = zip(*runs, strict=True)
        return StandIns(weights, biases, features, importance, below)

    return Head(
        gradient(layer.weight) if layer.weight else None,
        gradient(layer.bias) if layer.bias else None,
        records,
        training.optimiser == "sgd",
        _even(batches, pulls, records),
        stand_ins,
    )


_LAST: dict[bytes, StandIns] = {}  # of the last update, by its digest


def _remembered(key: bytes, passed: Callable[[], StandIns]) -> StandIns:
    """What the network makes of the stand-ins, run only if the last update was another."""
    if key not in _LAST:
        found = passed()
        _LAST.clear()
        _LAST[key] = found
    return _LAST[key]


def _digest(seen: Observation, training: LocalTraining, records: int) -> bytes:
    """Of all that the stand-ins' features and slopes follow from. The model's code is not in it,
    but another code would hardly have led to the same update from the same weights."""
    known = hashlib.blake2b(repr((seen.setting, training, records)).encode())
    held = (*seen.model.named_parameters(), *seen.model.named_buffers(), *seen.update.items())
    for name, tensor in held:
        known.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        known.update(flat.view(torch.uint8).numpy().tobytes())
    return known.digest()


def _even(batches: list[Tensor], pulls: Tensor, records: int) -> bool:
    """Whether every record has the same share of the update: not if epochs are cut short or their
    last batch is smaller, nor where momentum lets earlier batches count for more."""
    share = torch.zeros(records, dtype=torch.float64)
    for chosen, pull in zip(batches, pulls.tolist(), strict=True):
        share[chosen] += pull / len(chosen)
    return bool((share.max() - share.min()) < 1e-9 * share.max())


def _features(
    model: nn.Module, values: Named, inputs: Tensor, head: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the head, and the weight and bias (zeros if it has none) that it runs with:
    `values` need not hold them, or may hold them under another layer's name."""
    caught: list[Tensor] = []
    held: dict[str, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        caught.append(args[0].detach())
        assert isinstance(module, nn.Linear)
        bias = output.new_zeros(output.shape[1]) if module.bias is None else module.bias
        held.update(weight=module.weight.detach().double(), bias=bias.detach().double())

    handle = model.get_submodule(head).register_forward_hook(note)
    with torch.no_grad():
        for part in torch.split(inputs, PROBES):
            torch.func.functional_call(model, values, (part,))
    handle.remove()
    return torch.cat(caught).double(), held["weight"], held["bias"]


def _slopes(
    model: nn.Module, values: Named, inputs: Tensor, head: str
) -> tuple[str | None, Tensor]:
    """The last bias below the head, by name, and ∂z/∂bias of every input (N, C, F); no name where
    there is none."""
    runs: list[tuple[str, Tensor]] = []  # each layer's output, channels second

    def watch(name: str, layer: nn.Module) -> RemovableHandle:
        channels = -1 if isinstance(layer, (nn.Linear, nn.LayerNorm)) else 1

        def pass_on(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            here = output.requires_grad_().movedim(channels, 1)
            runs.append((name, here))
            return here.movedim(1, channels).clone()  # what follows may overwrite it

        return layer.register_forward_hook(pass_on)

    told = values.keys() - shared(model)
    handles = [
        watch(f"{name}.bias", layer)
        for name, layer in model.named_modules()
        if isinstance(layer, BIASED) and name != head and f"{name}.bias" in told
    ]
    with torch.enable_grad():
        logits = torch.func.functional_call(model, values, (inputs,)).sum(0)
    for handle in handles:
        handle.remove()
    names = [name for name, _ in runs]
    for name, here in reversed(runs):
        if names.count(name) > 1:  # shared by several places: its gradient is their sum
            continue
        rows = [torch.autograd.grad(z, here, retain_graph=True, allow_unused=True)[0]
                for z in logits]  # fmt: skip
        if rows[0] is not None:
            return name, torch.stack([r.reshape(*r.shape[:2], -1).sum(2) for r in rows], 1).double()
    return None, torch.zeros(())


def _path(training: LocalTraining, steps: int) -> tuple[Tensor, Tensor]:
    """For an even gradient: how far along the whole move step t was taken, and how many times its
    gradient counts in the update (more than once with momentum, and more the earlier it came)."""
    kept = training.momentum ** torch.arange(steps, dtype=torch.float64)
    velocity = kept.cumsum(0)  # of step t, in gradients
    moved = velocity.cumsum(0)
    places = (moved - velocity) / moved[-1]
    return places, velocity.flip(0)


def _skip_stand_ins(shape: tuple[int, ...], rng: torch.Generator) -> None:
    """Moves the generator on by what stand-ins take. They were drawn from it once: what an attack
    draws after them, and with it every result that was published, stays as it is."""
    torch.randn((STAND_INS, *shape), generator=rng)
    for _ in range(2):  # level and contrast
        torch.rand(STAND_INS, 1, 1, 1, generator=rng)


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
