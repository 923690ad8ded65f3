"""Reading single records out of the gradient of one layer: rank, window overlap, sparsity.

The weight gradient of a layer, as a matrix (outputs × inputs·k²), is G = L·A: the rows of A are the
windows the layer saw (P positions of B records; one per record in a linear layer), the columns of L
the error signals at its output. While P·B is below the number of outputs,

1. the right singular vectors V of G span the windows: A = R·Vᵀ;
2. windows of one record that look at the same pixel agree, and are zero over the padding. These
   equations in R (P × rank) have exactly B independent solutions: the span of the records' maps;
3. behind a ReLU the maps are non-negative and full of zeros, mixtures of them are not: linear
   programs `min 1ᵀSq, Sq ≥ 0, (Sq)_i = 1` find them, and the smallest singular vector of S on the
   zeros found makes them exact.

*Several steps.* SGD is linear in the gradients, so an update of several steps is again L·A, with
the windows of all steps: a record appears once per pass, at the weights of that step.

*Batch norm in train mode* behind the layer makes the signals of a step sum to zero, so that V lacks
one direction per step, its mean window. A record's windows are then R·Vᵀ + m, with m free and the
same at all its positions. With T the projection "windows agree, padding is zero" and J the stacked
identities that repeat m, T − TJ(JᵀTJ)⁻¹JᵀT in place of T leaves m out; and as an R that is the same
at all positions could hide in m, Σ_p R_p = 0. The sums that are zero also tell which records were
together in a step, and all scales but one per step. docs/methods/separation.md has the algebra.

Rank and sparsity are those of SPEAR (Dimitrov et al., NeurIPS 2024, https://arxiv.org/abs/2403.03945);
the overlap is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from leakgauge.attacks._layers import gradient_sum, told
from leakgauge.attacks._path import Path
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.fl.local import minibatches
from leakgauge.records import pictures
from leakgauge.types import LocalTraining, Named, Observation

WHO = "the exact separation"

RANK = 3e-6  # singular values below this share of the largest are rounding
GAP = 1e-3  # a solution's eigenvalue, as a share of the first that is none (of order 0.1)
ZERO = 1e-4  # entries of a map below this share of its largest are its zeros
MISFIT = 1e-2  # share by which what was found may fail to explain what it should
APPROXIMATE = 0.2  # the same for several steps, of which all but the first had other weights
PROGRAMS = 12  # linear programs per record, at most
SLACK = 1e-6  # by how much rounding may make a zero negative
ASSIGNED = 20  # times that entries of a signal are told active or not, at most
POLISHES = 5  # times that a map is solved for on its zeros
ROWS = 1500  # constraints in a linear program to begin with


@dataclass
class Separated:
    """What the gradient of one layer told about each record; of several passes, about each of its
    appearances."""

    layer: fx.Node
    top: fx.Node  # the node up to which signals are known: before the ReLU above, or the logits
    signal: Tensor  # ∂L/∂top, (N, …)
    source: fx.Node  # the ReLU whose output the layer sees
    maps: Tensor  # that output, (N, …)
    unsure: Tensor  # its channels in which an entry may be zero or not
    labels: Tensor
    misfit: float  # share of the layer's gradient that the records found do not explain
    steps: tuple[Tensor, ...]  # which of them were normalised together, in one local step
    path: Path  # the weights of those steps, where the update tells them

    def once(self, records: int) -> Tensor:
        """One appearance of each record: those of the first pass, or where steps are not told apart
        those that differ most."""
        if len(self.steps) > 1 or len(self.maps) <= records:
            return torch.cat(self.steps)[:records]
        rows = torch.nn.functional.normalize(self.maps.flatten(1))
        chosen = [0]
        while len(chosen) < records:
            chosen.append(int((rows @ rows[chosen].T).max(1).values.argmin()))
        return torch.tensor(chosen)


def traced(seen: Observation) -> Trace:
    """The graph of the observed model, in the modes of the training."""
    training, _ = told(seen, WHO)
    return Trace(seen.model, seen.record.shape, train=training.batch_norm == "train")


def separable(seen: Observation, rng: torch.Generator) -> Separated:
    """A client's check before sending: what a server could read of each record in this update,
    without any search. Raises NotApplicable, with the reason, when the records cannot be told apart
    in this way."""
    gradient = gradient_of(seen)
    training, records = told(seen, WHO)
    return separate(traced(seen), gradient, records, rng, training)


def gradient_of(seen: Observation) -> Named:
    """The sum of the gradients of all local steps behind an update, in double precision."""
    training, _ = told(seen, WHO)
    pictures(seen.record)
    _refuse(seen.model, training)
    return {name: gradient_sum(seen, name).cpu() / training.lr for name in seen.update}


def _refuse(model: nn.Module, training: LocalTraining) -> None:
    refusals = {
        f"an update by {training.optimiser!r} is rescaled entry by entry": (
            training.optimiser != "sgd"
        ),
        "dropout hides part of the network": training.dropout != "off" and _has(model, _DropoutNd),
    }
    for reason, holds in refusals.items():
        if holds:
            raise NotApplicable(f"{WHO} needs plain steps of SGD, but {reason}")


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def separate(
    trace: Trace,
    gradient: Named,
    records: int,
    rng: torch.Generator,
    training: LocalTraining | None = None,
) -> Separated:
    """Every record's activations, signal and label, from the highest layer that tells them. Without
    a training, of one step on all records."""
    training = training or LocalTraining(batch_size=records)
    refusals = []
    for layer in reversed(trace.layers()):
        try:
            return _read(trace, gradient, records, training, layer, rng)
        except NotApplicable as reason:
            refusals.append(f"{layer.target}: {reason}")
    shown = "; ".join(refusals[:3]) + ("; …" if len(refusals) > 3 else "")
    raise NotApplicable(f"no layer of this model tells its records apart. {shown}")


def _top(trace: Trace, layer: fx.Node, records: int) -> fx.Node:
    """The last node before the activation above a layer, or the logits: where all signals pass."""
    sources = trace.sources[layer.all_input_nodes[0]]
    source = next(iter(sources))
    if len(sources) > 1 or not trace.only_reshaped(source, layer.all_input_nodes[0]):
        raise NotApplicable("its input mixes what activations put out")
    if trace.kind[source] == "input":
        raise NotApplicable("its input is the image, which has no zeros to tell records by")
    if records > 1 and not trace.rectified(source):
        raise NotApplicable(
            f"its input comes from {source.target}, not from a ReLU: no zeros to tell records by"
        )
    above = trace.activation_above(layer)
    if above is None and layer is not trace.output:
        raise NotApplicable("its output is mixed before the next activation")
    top = layer if above is None else above.all_input_nodes[0]
    if not trace.all_paths_meet(top):
        raise NotApplicable("other layers pass signals around it")
    return top


def _read(
    trace: Trace,
    gradient: Named,
    records: int,
    training: LocalTraining,
    node: fx.Node,
    rng: torch.Generator,
) -> Separated:
    sizes = [len(batch) for batch in minibatches(records, training)]
    records = sum(sizes)  # as often as each appears
    top = _top(trace, node, records)
    layer = trace.layer(node)
    (source,) = trace.sources[node.all_input_nodes[0]]
    shape, out = trace.shape[source], trace.shape[node]
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        raise NotApplicable("it is a grouped convolution")
    name = trace.told(node, "weight", gradient)
    if name is None:
        raise NotApplicable(
            "its weight is frozen, shared with other layers or reached by no signal"
        )
    matrix = gradient[name].flatten(1)
    positions = out[1:].numel()
    centred = trace.centred(node)
    basis = row_space(matrix, records, positions, lost=len(sizes) if centred else 0)
    span = common_maps(basis, layer, tuple(shape), records, centred=centred)
    rays = sparse_rays(span, records, rng)
    if len(rays) < records:
        raise NotApplicable(f"only {len(rays)} of {records} records could be told apart")
    maps = (rays / rays.norm(dim=1, keepdim=True)).view(records, *shape)
    unsure = torch.zeros(shape[0], dtype=torch.bool)
    if trace.rectified(source):
        maps, unsure = rectified(maps)
    seen = windows(maps, layer).flatten(0, 1)  # (N·positions, inputs·k²)
    signals = least_squares(seen.T, matrix.T)  # (N·positions, outputs)
    misfit = float((signals.T @ seen - matrix).norm() / matrix.norm())
    # Contiguous: for a single record, PyTorch's batch norm misreads a gradient of other strides.
    signals = signals.view(records, positions, -1).transpose(1, 2).contiguous().view(records, *out)
    slack = MISFIT if len(sizes) == 1 else APPROXIMATE
    path = Path(trace.parameters(), gradient, training, len(sizes) if centred else 1)
    if centred:
        amounts, steps = together(signals, sizes)
        maps, signals = _times(maps, 1 / amounts), _times(signals, amounts)
        if len(steps) > 1:
            steps = _in_order(trace, gradient, node, source, maps, signals, steps, path)
        amounts = _anchored(trace, gradient, node, source, maps, signals, steps, path)
        maps, signals = _times(maps, 1 / amounts), _times(signals, amounts)
        at_top = _behind_norm(trace, gradient, node, source, maps, signals, steps, path)
    else:
        steps = (torch.arange(records),)
        at_top = signals / _scale(trace, node, top)
        amounts = _amounts(trace, gradient, node, top, at_top, signals, slack)
        maps, at_top = _times(maps, 1 / amounts), _times(at_top, amounts)
    errors = torch.zeros(records, trace.shape[trace.output].numel(), dtype=at_top.dtype)
    for step, weights in zip(steps, path.weights, strict=True):
        with trace.holding(weights):
            errors[step] = _errors(trace, top, at_top[step], slack)
    labels = errors.argmin(1)
    exact = len(sizes) == 1
    _check(trace, source if exact else None, maps, top, errors, labels, slack)
    return Separated(node, top, at_top, source, maps, unsure, labels, misfit, steps, path)


def _times(values: Tensor, amounts: Tensor) -> Tensor:
    """Every record's values by its own amount."""
    return values * amounts.view(-1, *[1] * (values.dim() - 1))


def together(signals: Tensor, sizes: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """How much of each record's signal there is, up to a factor per step, and which records were in
    one step: the signals of a step sum to zero in every channel.

    The amounts of the steps are the null space of the sums. They have disjoint supports, so that in
    any orthonormal basis of that space the rows of two records are parallel or orthogonal.
    """
    sums = signals.flatten(2).sum(2).T  # (channels, N)
    _, values, right = torch.linalg.svd(sums, full_matrices=True)
    count = len(sizes)
    null = right[-count:].T  # (N, steps)
    long = values.new_zeros(len(right)).index_copy_(0, torch.arange(len(values)), values)
    edge = float(long[-count] / long[-count - 1]) if len(long) > count else 0.0
    if edge > 0.1:
        raise NotApplicable(
            f"the signals found at it do not add up to zero in {count} steps (ratio {edge:.1g})"
        )
    if count == 1:
        amounts = null[:, 0] * null[:, 0].sum().sign()
        groups = [torch.arange(len(null))]
    else:
        parts = supports(null)
        groups = [(part != 0).nonzero()[:, 0] for part in parts]
        amounts = torch.stack(parts).sum(0)
    if sorted(map(len, groups)) != sorted(sizes):
        raise NotApplicable(
            f"the records found at it form steps of {sorted(map(len, groups))}, not {sorted(sizes)}"
        )
    if not (amounts > 1e-6 * amounts.max()).all():
        raise NotApplicable("the records found add up to zero only with negative shares")
    return amounts, tuple(groups)


def supports(null: Tensor) -> list[Tensor]:
    """The vectors with disjoint supports and one sign each that span a space, from any orthonormal
    basis of it (entries × vectors): the rows of two entries are parallel or orthogonal."""
    length = null.norm(dim=1)
    rows = null / length[:, None].clamp_min(1e-30)
    left = length > 1e-9 * length.max()
    found = []
    while left.any():
        first = rows[int(left.nonzero()[0])]
        cosines = rows @ first
        group = left & (cosines.abs() > 0.7)
        found.append(length * cosines.sign() * group)
        left &= ~group
    return found


def _in_order(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    source: fx.Node,
    maps: Tensor,
    signals: Tensor,
    steps: tuple[Tensor, ...],
    path: Path,
) -> tuple[Tensor, ...]:
    """The steps in the order in which they were taken. `path` learns the parts of the layer and of
    the batch norm behind it.

    A step's gradient at the layer is known, and so are the weights that the next one began with.
    Only with the right ones does its batch norm leave zeros where the ReLU above is off.
    """
    weight = trace.told(layer, "weight", gradient)
    gamma = trace.told(_norm_behind(trace, layer), "weight", gradient)
    assert weight is not None
    parts = torch.zeros(len(steps), *gradient[weight].shape, dtype=signals.dtype)
    slopes = torch.zeros(len(steps), signals.shape[1], dtype=signals.dtype)
    left, order = list(steps), []
    for number in range(len(steps)):
        with trace.holding(path.weights[number]):
            tried = [_past_norm(trace, layer, source, maps[s], signals[s]) for s in left]
        best = min(range(len(left)), key=lambda i: float(tried[i].far.median()))
        step = left.pop(best)
        order.append(step)
        seen = windows(maps[step], trace.layer(layer)).flatten(0, 1)
        sent = signals[step].flatten(2).transpose(1, 2).flatten(0, 1)
        parts[number] = (sent.T @ seen).view(gradient[weight].shape)
        slopes[number] = tried[best].slope[:, 0] * tried[best].x.shape[1]
        path.learn(weight, parts)
        if gamma is not None:
            path.learn(gamma, slopes)
    return tuple(order)


def _anchored(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    source: fx.Node,
    maps: Tensor,
    signals: Tensor,
    steps: tuple[Tensor, ...],
    path: Path,
) -> Tensor:
    """A factor per record, the same in a step, by which signals add up to the gradient of the bias
    below the ReLU that the layer looks at. Where no bias tells it, maps become as large as such a
    ReLU's usually are: only the ε of batch norms depends on it."""
    names = biases(trace, gradient, source)
    entered = layer.all_input_nodes[0]
    while entered is not source and len(entered.users) == 1:
        entered = entered.all_input_nodes[0]
    ones = torch.ones(len(maps), dtype=maps.dtype)
    energy = usual_energy(trace, source)
    if energy is not None:
        for step in steps:
            ones[step] = float((maps[step].square().mean() / energy).sqrt())
    if entered is not source or len(source.users) > 1 or not names:
        return ones
    sums = []
    for number, step in enumerate(steps):
        leaf = maps[step].detach().requires_grad_()
        with trace.holding(path.weights[number]), torch.enable_grad():
            left = trace.affine(layer, {source: leaf}, {})
            (slope,) = torch.autograd.grad(left, leaf, signals[step])
        sums.append((slope * (leaf > 0)).detach().transpose(0, 1).flatten(1).sum(1))
    every = torch.stack(sums, 1)
    for name in names:
        found, misfit = most(every, gradient[name])
        if misfit < APPROXIMATE and (found > 0).all():
            for step, amount in zip(steps, found.tolist(), strict=True):
                ones[step] = amount
            break
    return ones


def biases(trace: Trace, gradient: Named, relu: fx.Node) -> list[str]:
    """The biases that are added, channel by channel, to what enters a ReLU."""
    found, left = [], list(relu.all_input_nodes)
    while left:
        node = left.pop()
        name = trace.told(node, "bias", gradient)
        if name is not None:
            found.append(name)
        elif trace.channelwise(node):
            left.extend(node.all_input_nodes)
    return found


def usual_energy(trace: Trace, relu: fx.Node) -> float | None:
    """The mean square of what leaves a ReLU, if what enters it is normal: a sum of batch norms in
    train mode, each with the mean and variance that its bias and weight give it, and of skips. None
    where something else enters."""
    if trace.kind[relu] != "relu":
        return None
    left = list(relu.all_input_nodes)
    mean, variance = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1e-12)
    while left:
        node = left.pop()
        if node in trace.norms:
            norm = trace.module.get_submodule(str(node.target))
            assert isinstance(norm, _BatchNorm)
            mean = mean + (0.0 if norm.bias is None else norm.bias.double())
            variance = variance + (1.0 if norm.weight is None else norm.weight.double().square())
        elif trace.kind[node] == "relu":  # a skip: it adds as much as half a normal has
            mean, variance = mean + 0.4, variance + 0.34
        elif trace.channelwise(node):
            left.extend(node.all_input_nodes)
        else:
            return None
    ratio = mean / variance.sqrt()
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    active = torch.special.ndtr(ratio)
    return float(((mean**2 + variance) * active + mean * variance.sqrt() * density).mean())


def _norm_behind(trace: Trace, layer: fx.Node) -> fx.Node:
    """The batch norm that a layer's output enters first."""
    node = layer
    while node not in trace.norms:
        (node,) = node.users
    if node.all_input_nodes[0] is not layer:
        raise NotApplicable("the batch norm behind it sees a sum")
    return node


@dataclass
class _Passed:
    """One step's signals at a layer, by which those behind its batch norm are x + a + b·û."""

    x: Tensor  # (channels, N·positions)
    normal: Tensor  # û
    shift: Tensor  # a, (channels, 1)
    slope: Tensor
    far: Tensor  # how far from zero a quarter of the signals is, as a share of all (channels,)


def _past_norm(
    trace: Trace,
    layer: fx.Node,
    source: fx.Node,
    maps: Tensor,
    signals: Tensor,
) -> _Passed:
    """A batch norm in train mode passes back δ_u = γ/σ·(δ_y − mean δ_y − û·mean(δ_y û)); û follows
    from the maps. The means are what makes δ_y zero at the entries that the ReLU above has switched
    off."""
    norm = trace.module.get_submodule(str(_norm_behind(trace, layer).target))
    assert isinstance(norm, _BatchNorm)
    gamma: Tensor = signals.new_ones(signals.shape[1]) if norm.weight is None else norm.weight
    gamma = gamma.where(gamma.abs() > 1e-12, torch.inf)[:, None]  # switched off: carries no signal
    u = trace.affine(layer, {source: maps}, {}).transpose(0, 1).flatten(1)  # channels first
    u = u - u.mean(1, keepdim=True)
    sigma = (u.square().mean(1, keepdim=True) + norm.eps).sqrt()
    x = signals.transpose(0, 1).flatten(1) * sigma / gamma
    shift, slope, far = silent(x, u / sigma, len(maps))
    far = far / x.square().mean(1).sqrt().clamp_min(1e-30)
    return _Passed(x, u / sigma, shift, slope, far)


def _behind_norm(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    source: fx.Node,
    maps: Tensor,
    signals: Tensor,
    steps: tuple[Tensor, ...],
    path: Path,
) -> Tensor:
    """The signals behind the batch norm that a layer's output enters, at the weights of each step,
    of which `path` learns the norm's.

    Over all steps n·a adds up to the gradient of the norm's bias and n·b to that of its weight,
    where they are told: with them the step with the fewest zeros in a channel needs none.
    """
    node = _norm_behind(trace, layer)
    bias, gamma = (trace.told(node, key, gradient) for key in ("bias", "weight"))
    passed: list[_Passed] = []
    slopes = signals.new_zeros(len(steps), signals.shape[1])
    for number, step in enumerate(steps):
        with trace.holding(path.weights[number]):
            passed.append(_past_norm(trace, layer, source, maps[step], signals[step]))
        slopes[number] = passed[-1].slope[:, 0] * passed[-1].x.shape[1]
        if gamma is not None:
            path.learn(gamma, slopes)
    if bias is not None and gamma is not None:
        worst = torch.stack([one.far for one in passed]).argmax(0)
        for key, name in (("shift", bias), ("slope", gamma)):
            sums = torch.stack([getattr(one, key)[:, 0] * one.x.shape[1] for one in passed])
            lacking = gradient[name] - sums.sum(0)
            for number, one in enumerate(passed):
                getattr(one, key)[:, 0] += lacking * (worst == number) / one.x.shape[1]
        for number, one in enumerate(passed):
            slopes[number] = one.slope[:, 0] * one.x.shape[1]
        path.learn(gamma, slopes)
    found = torch.zeros_like(signals)
    for step, one in zip(steps, passed, strict=True):
        y = one.x + one.shift + one.slope * one.normal
        found[step] = y.view(signals.shape[1], len(step), *signals.shape[2:]).transpose(0, 1)
    return found


def silent(x: Tensor, u: Tensor, records: int, tries: int = 150) -> tuple[Tensor, Tensor, Tensor]:
    """a and b of each row, so that as many entries of x + a + b·u as can be are zero: the line
    through two entries that has the nearest quarter of the others nearest, then through those; and
    how near that quarter is.

    A mean over positions sends the same signal to all entries of a record that are active, so that
    these lie on a line too: one that only a single record has does not count.
    """
    rng = torch.Generator().manual_seed(0)
    positions = x.shape[1] // records
    rank, own = max(3, x.shape[1] // 4), min(positions, max(2, positions // 8))
    best = torch.full((len(x), 1), torch.inf, dtype=x.dtype)
    shift, slope = torch.zeros_like(best), torch.zeros_like(best)
    for _ in range(tries):
        i, j = torch.randperm(x.shape[1], generator=rng)[:2].tolist()
        apart = u[:, i] - u[:, j]
        b = -((x[:, i] - x[:, j]) / apart.where(apart.abs() > 1e-9, torch.inf))[:, None]
        a = -x[:, i : i + 1] - b * u[:, i : i + 1]
        far = (x + a + b * u).abs()
        off = far.kthvalue(rank, 1, keepdim=True).values
        if records > 1:
            each = far.view(len(x), records, positions).kthvalue(own, 2).values
            off = torch.maximum(off, each.kthvalue(2, 1, keepdim=True).values)
        better = off < best
        best, shift, slope = (n.where(better, o) for n, o in ((off, best), (a, shift), (b, slope)))
    near = ((x + shift + slope * u).abs() <= 3 * best).to(x)
    count = near.sum(1, keepdim=True)
    mean_u, mean_x = (
        (near * u).sum(1, keepdim=True) / count,
        (near * x).sum(1, keepdim=True) / count,
    )
    du, dx = near * (u - mean_u), near * (x - mean_x)
    slope = -(du * dx).sum(1, keepdim=True) / du.square().sum(1, keepdim=True).clamp_min(1e-30)
    return -mean_x - slope * mean_u, slope, best[:, 0]


def least_squares(left: Tensor, right: Tensor) -> Tensor:
    """The smallest x with left·x nearest to right. By singular values: the last bits of
    torch.linalg.lstsq depend on where in memory its work space happens to lie."""
    u, values, v = torch.linalg.svd(left, full_matrices=False)
    kept = values > torch.finfo(values.dtype).eps * max(left.shape) * values[0]
    found: Tensor = v[kept].T @ ((u.T @ right)[kept] / values[kept, None])
    return found


def most(left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Least squares without the rows that stand out, which a wrong mask spoils; and the misfit."""
    keep = torch.ones(len(right), dtype=torch.bool)
    for _ in range(3):
        found = least_squares(left[keep], right[keep, None])[:, 0]
        off = (left @ found - right).abs()
        keep = off <= 10 * off.median()
    misfit = float(off[keep].norm() / right.norm().clamp_min(1e-300))
    return found, misfit


def rectified(maps: Tensor) -> tuple[Tensor, Tensor]:
    """A ReLU's output without what rounding left of its zeros, which is negative as often as
    positive; and the channels in which an entry may be either. All records are judged by the worst:
    where a little of one is left in others, which is not negative, it is taken from some of them
    and added to the rest, whose zeros are then all above zero."""
    flat = maps.flatten(1)
    most = flat.max(1).values
    share = (-flat.min(1).values / most.clamp_min(1e-6 * float(most.max()))).nan_to_num().max()
    floor = (3 * share).clamp_min(1e-6) * most
    floor = floor.view(-1, *[1] * (maps.dim() - 1))
    unsure = (maps > floor / 3) & (maps < 3 * floor)
    return maps.where(maps > floor, 0.0), unsure.transpose(0, 1).flatten(1).any(1)


def _scale(trace: Trace, layer: fx.Node, top: fx.Node) -> Tensor:
    """∂top/∂(layer's output): a factor a channel (batch norm), 1 without one."""
    leaf = torch.zeros(1, *trace.shape[layer], dtype=torch.float64, requires_grad=True)
    values = {layer: leaf}
    memo: dict[fx.Node, Any] = {}
    for node in trace.sources[top]:
        values[node] = torch.zeros(1, *trace.shape[node], dtype=torch.float64)
    result = trace.affine(top, values, memo)
    if result is leaf:
        return torch.ones_like(leaf).detach()
    (slope,) = torch.autograd.grad(result.sum(), leaf)
    slope[slope.abs() < 1e-12] = torch.inf  # a channel that is switched off carries no signal
    return slope


def _amounts(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    top: fx.Node,
    at_top: Tensor,
    at_layer: Tensor,
    slack: float,
) -> Tensor:
    """How much of each record's signal there is: bias gradients are sums of signals."""
    equations, values = [], []
    node = layer
    while True:
        name = trace.told(node, "bias", gradient)
        if name is not None:
            signal = at_layer if node is layer else at_top
            equations.append(signal.flatten(2).sum(2).T if signal.dim() > 2 else signal.T)
            values.append(gradient[name])
        if node is top:
            break
        (node,) = node.users
    if not equations:
        raise NotApplicable(
            "neither it nor its batch norm has a trained bias that would tell the scale"
        )
    left, right = torch.cat(equations), torch.cat(values)
    found = least_squares(left, right[:, None])[:, 0]
    misfit = float((left @ found - right).norm() / right.norm())
    if misfit > slack:
        raise NotApplicable(
            f"the records found do not explain its bias gradient (misfit {misfit:.2g})"
        )
    if len(found) > 1 and not (found > 0).all():
        raise NotApplicable("the records found explain its bias gradient only by negative shares")
    return found


def _errors(trace: Trace, top: fx.Node, signal: Tensor, slack: float) -> Tensor:
    """The errors p − e_y at the logits that the signals carry, (N, classes), up to a factor."""
    if top is trace.output:
        return signal
    (above,) = top.users
    # From the last ReLU on all is affine: a signal is a sum of the classes' slopes, by the error.
    if trace.sources[trace.output] != frozenset({above}):
        raise NotApplicable("labels cannot be read through another non-linearity above it")
    leaf = torch.zeros(1, *trace.shape[above], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        logits = trace.affine(trace.output, {above: leaf}, {})[0]
    slopes = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in logits]
    rows = torch.stack(slopes).flatten(1)
    errors = []
    for one in signal.flatten(1):
        # What the ReLU lets through is what the head sends, the rest is zero: each entry belongs to
        # what it is nearer to.
        active = one.abs() > 1e-3 * one.abs().max()
        for _ in range(ASSIGNED):
            error = least_squares(rows[:, active].T, one[active, None])[:, 0]
            sent = error @ rows
            before, active = active, (one - sent).abs() < one.abs()
            if (active == before).all() or int(active.sum()) < len(rows):
                break
        left = torch.where(active, one - sent, one)
        if not float(left.norm() / one.norm()) < slack:
            raise NotApplicable(
                "a signal found at it is not one that its head can send (off by "
                f"{float(left.norm() / one.norm()):.1g})"
            )
        errors.append(error)
    return torch.stack(errors)


def _check(
    trace: Trace,
    source: fx.Node | None,
    maps: Tensor,
    top: fx.Node,
    errors: Tensor,
    labels: Tensor,
    slack: float,
) -> None:
    """Refuse mixtures of records: any basis of their span explains the gradient, but only the
    records themselves also send the errors that their own activations cause. Without a source
    (their weights are not known), only errors of a softmax."""
    wrong = errors / -errors.gather(1, labels[:, None])  # −1 at the label, else p/(1 − p_y)
    if source is not None and trace.sources[top] == frozenset({source}):
        values = {source: maps}
        if top is not trace.output:
            (above,) = top.users
            entering = {above.all_input_nodes[0]: trace.affine(top, values, {})}
            values = {above: trace.apply(above, entering)}
        chances = trace.affine(trace.output, values, {}).softmax(1)
        chances[torch.arange(len(chances)), labels] -= 1
        expected = chances / -chances.gather(1, labels[:, None])
        off = float((wrong - expected).norm(dim=1).max())
    else:
        others = wrong.scatter(1, labels[:, None], 0.0)
        off = max(float(-others.min()), float((others.sum(1) - 1).abs().max()))
    if not off < slack:
        raise NotApplicable(
            f"the activations found at it do not cause the errors found at it (off by {off:.1g}): "
            "they are mixtures of records"
        )


def windows(maps: Tensor, layer: nn.Conv2d | nn.Linear) -> Tensor:
    """What a layer looks at: (N, positions, inputs·k²)."""
    if isinstance(layer, nn.Linear):
        return maps.flatten(1)[:, None]
    assert not isinstance(layer.padding, str)  # the trace takes such a layer for no layer
    return F.unfold(maps, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(
        1, 2
    )


def row_space(gradient: Tensor, records: int, positions: int, lost: int = 0) -> Tensor:
    """V (inputs·k² × rank): the span of the windows, but for `lost` directions, one mean per step.
    Refuses when the rank cannot tell it."""
    outputs, inputs = gradient.shape
    rank = records * positions - lost
    if rank >= min(outputs, inputs):
        raise NotApplicable(
            f"{records} records × {positions} positions are {rank} windows, and a gradient of "
            f"{outputs} × {inputs} can span at most {min(outputs, inputs) - 1} of them and show it"
        )
    _, values, right = torch.linalg.svd(gradient, full_matrices=False)
    if not values[0] > 0:
        raise NotApplicable("the layer's gradient is zero: no signal reached it")
    found = int((values > RANK * values[0]).sum())
    ratio = float(values[rank] / values[rank - 1])
    if ratio > 0.3:
        raise NotApplicable(
            f"the gradient's singular values show no edge after {rank} (ratio {ratio:.2g}; above "
            f"rounding: {found}): noise, pruning or another number of records"
        )
    spanned: Tensor = right[:rank].T
    return spanned


def common_maps(
    basis: Tensor,
    layer: nn.Conv2d | nn.Linear,
    shape: tuple[int, ...],
    records: int,
    *,
    centred: bool = False,
) -> Tensor:
    """S (pixels × records): the span of the records' maps. `centred`: the basis lacks the mean
    window, and every record may have any."""
    if isinstance(layer, nn.Linear):
        if centred:
            raise NotApplicable("the batch norm behind it hides what its records have in common")
        return basis
    channels, height, width = shape
    pixel = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    seen = windows(pixel, layer)[0].long()  # (positions, k²): pixel number, 0 over the padding
    positions, area = seen.shape
    rank = basis.shape[1]
    parts = basis.reshape(channels, area, rank)
    project = _agreement(seen)
    mean = torch.zeros(0)
    free = torch.eye(positions, dtype=basis.dtype)
    if centred:
        stack = torch.eye(area, dtype=basis.dtype).repeat(positions, 1)  # J
        inner = stack.T @ project @ stack
        if positions < 2 or float(torch.linalg.eigvalsh(inner)[0]) < 1e-6:
            raise NotApplicable(
                "the batch norm behind it hides the mean of its windows, and they do not overlap "
                "enough to tell it"
            )
        mean = project @ stack @ torch.linalg.inv(inner)
        project = project - mean @ stack.T @ project
        free = torch.from_numpy(scipy.linalg.helmert(positions))  # Σ_p R_p = 0
    agree = project.view(positions, area, positions, area)
    agree = torch.einsum("ip,paqb,jq->ijab", free, agree, free).flatten(2).flatten(0, 1)
    gram = torch.einsum("car,cbs->abrs", parts, parts).flatten(2).flatten(0, 1)
    kept = len(free)
    normal = (agree @ gram).view(kept, kept, rank, rank).transpose(1, 2).reshape(kept * rank, -1)
    values, vectors = smallest(normal.numpy(), records + 1)
    # A single window per record has no other to agree with: everything in its span is a map.
    if len(values) > records and max(values[records - 1], 1e-9) > GAP * values[records]:
        raise NotApplicable(
            f"the overlap of its windows does not single out {records} maps (eigenvalues "
            f"{values[records - 1]:.1e} and then {values[records]:.1e}): it has none, or noise "
            "hides it"
        )
    solutions = torch.from_numpy(vectors[:, :records].T.copy()).view(records, kept, rank)
    solutions = torch.einsum("ip,nir->npr", free, solutions)
    by_pixel = torch.einsum("npr,car->npca", solutions, parts)
    if centred:
        by_channel = by_pixel.transpose(1, 2).reshape(records, channels, -1)
        by_pixel = by_pixel - (by_channel @ mean)[:, None]
    # Every view of a pixel agrees; one that no window looks at stays unknown, at zero.
    maps = torch.zeros(records, channels, height * width, dtype=basis.dtype)
    for p in range(positions):
        inside = seen[p] > 0
        maps[:, :, seen[p][inside] - 1] = by_pixel[:, p, :, inside]
    orthonormal: Tensor = torch.linalg.qr(maps.flatten(1).T).Q
    return orthonormal


def _agreement(seen: Tensor) -> Tensor:
    """T: what views (positions·k²) miss when the views of one pixel are to agree, and those of the
    padding to be zero."""
    pixels = seen.flatten()
    same = ((pixels[:, None] == pixels[None]) & (pixels > 0)).double()
    return torch.eye(len(pixels), dtype=torch.float64) - same / same.sum(1).clamp_min(1)


def smallest(matrix: Any, count: int) -> tuple[Any, Any]:
    """The smallest eigenvalues of a positive semi-definite matrix, of which a few are zero, and
    their vectors: subspace iteration on its inverse, which a little shift makes exist. One more
    value than are zero is an upper bound."""
    size = len(matrix)
    if size <= 4 * count + 50:
        return scipy.linalg.eigh(matrix, subset_by_index=[0, min(count, size) - 1])  # type: ignore[no-any-return]
    shift = max(1e-9 * float(np.trace(matrix)) / size, 1e-30)
    factor = scipy.linalg.cho_factor(matrix + shift * np.eye(size), check_finite=False)
    block = np.random.default_rng(0).standard_normal((size, count + 8))
    for _ in range(6):
        block = np.linalg.qr(scipy.linalg.cho_solve(factor, block, check_finite=False))[0]
    values, vectors = scipy.linalg.eigh(block.T @ (matrix @ block))
    return values[:count], (block @ vectors)[:, :count]


def sparse_rays(span: Tensor, records: int, rng: torch.Generator) -> Tensor:
    """The sparse non-negative vectors of a space (pixels × records), one per row."""
    if records == 1:
        return (span * span.sum().sign()).T
    found: list[Tensor] = []
    telling = _telling(span)
    for _ in range(PROGRAMS * records):
        left = span
        if found:  # look where what was found does not explain the space
            taken = torch.linalg.qr(torch.stack(found).T).Q
            left = span - span @ taken @ taken.T
        pick = int(torch.multinomial(left.square().sum(1), 1, generator=rng))
        start = _program(span, telling, pick, rng)
        if start is None:
            continue
        ray, error = _polished(span, telling, start)
        known = any(float(torch.dot(ray, other)) > 1 - 1e-4 for other in found)
        if error < 1e-2 and not known:
            found.append(ray)
        if len(found) == records:
            break
    if not found:
        raise NotApplicable("no sparse non-negative map in the space of the records' maps")
    return torch.stack([span @ ray for ray in found])


def _telling(span: Tensor) -> Tensor:
    """The entries (a mask) that are not zero in every record: at the others only rounding is left,
    whose size and sign tell nothing."""
    size = span.norm(dim=1)
    here: Tensor = size > 1e-3 * size.max()
    return here


def _program(span: Tensor, telling: Tensor, pick: int, rng: torch.Generator) -> Tensor | None:
    """min 1ᵀSq, Sq ≥ 0, (Sq)_pick = 1, by adding the constraints that are violated."""
    matrix = span.numpy()
    rows = telling.nonzero()[:, 0].numpy()
    chosen = rows[torch.randperm(len(rows), generator=rng)[:ROWS].numpy()]
    for _ in range(6):
        solved = linprog(
            matrix.sum(0),
            A_ub=-matrix[chosen],
            b_ub=np.full(len(chosen), SLACK),
            A_eq=matrix[pick : pick + 1],
            b_eq=np.ones(1),
            bounds=(None, None),
            method="highs",
        )
        if solved.status != 0:
            return None
        values = matrix @ solved.x
        violated = rows[values[rows] < -10 * SLACK * max(1.0, values.max())]
        if not len(violated):
            break
        worst = violated[np.argsort(values[violated])[:ROWS]]
        chosen = np.union1d(chosen, worst)
    return torch.from_numpy(solved.x)


def _polished(span: Tensor, telling: Tensor, start: Tensor) -> tuple[Tensor, float]:
    """The vector of the space that is smallest on the zeros of a rough one; unit length. What is
    left at a true zero is rounding: an entry that stands out from the others was a small activation
    and is no longer taken for a zero."""
    ray = start / start.norm()
    error = 1.0
    limit = ZERO * float((span @ ray).max())
    for _ in range(POLISHES):
        values = span @ ray
        zeros = values < limit
        if int(zeros.sum()) < 2 * span.shape[1]:
            return ray, 1.0
        _, singular, right = torch.linalg.svd(span[zeros], full_matrices=False)
        error = float(singular[-1] / singular[-2])
        ray = right[-1] * (span @ right[-1]).sum().sign()
        values = span @ ray
        rounding = float(values[zeros & telling].abs().median()) if (zeros & telling).any() else 0.0
        limit = min(ZERO * float(values.max()), max(20 * rounding, 1e-12 * float(values.max())))
    values = span @ ray
    return ray, max(error, float(-values.min() / values.max()))
