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

Rank and sparsity are those of SPEAR (Dimitrov et al., NeurIPS 2024, https://arxiv.org/abs/2403.03945);
the overlap is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor, fx, nn

from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.types import Named

RANK = 3e-6  # singular values below this share of the largest are rounding
GAP = 1e-3  # a solution's eigenvalue, as a share of the first that is none (of order 0.1)
ZERO = 1e-4  # entries of a map below this share of its largest are its zeros
MISFIT = 1e-2  # share by which what was found may fail to explain what it should
PROGRAMS = 12  # linear programs per record, at most
SLACK = 1e-6  # by how much rounding may make a zero negative
ROWS = 1500  # constraints in a linear program to begin with


@dataclass
class Separated:
    """What the gradient of one layer told about each record."""

    layer: fx.Node
    top: fx.Node  # the node up to which signals are known: before the ReLU above, or the logits
    signal: Tensor  # ∂L/∂top, (N, …)
    source: fx.Node  # the ReLU whose output the layer sees
    maps: Tensor  # that output, (N, …)
    unsure: Tensor  # its channels in which an entry may be zero or not
    labels: Tensor
    misfit: float  # share of the layer's gradient that the records found do not explain


def separate(trace: Trace, gradient: Named, records: int, rng: torch.Generator) -> Separated:
    """Every record's activations, signal and label, from the highest layer that tells them."""
    refusals = []
    for layer in reversed(trace.layers()):
        try:
            return _read(trace, gradient, records, layer, rng)
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
    trace: Trace, gradient: Named, records: int, node: fx.Node, rng: torch.Generator
) -> Separated:
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
    basis = row_space(matrix, records, positions)
    span = common_maps(basis, layer, tuple(shape), records)
    rays = sparse_rays(span, records, rng)
    if len(rays) < records:
        raise NotApplicable(f"only {len(rays)} of {records} records could be told apart")
    maps = rays.view(records, *shape)
    unsure = torch.zeros(shape[0], dtype=torch.bool)
    if trace.rectified(source):
        maps, unsure = rectified(maps)
    seen = windows(maps, layer).flatten(0, 1)  # (N·positions, inputs·k²)
    signals = least_squares(seen.T, matrix.T)  # (N·positions, outputs)
    misfit = float((signals.T @ seen - matrix).norm() / matrix.norm())
    # Contiguous: for a single record, PyTorch's batch norm misreads a gradient of other strides.
    signals = signals.view(records, positions, -1).transpose(1, 2).contiguous().view(records, *out)
    scale = _scale(trace, node, top)
    at_top = signals / scale
    found = _amounts(trace, gradient, node, top, at_top, signals)
    shaped = (-1, *[1] * (at_top.dim() - 1))
    at_top = at_top * found.view(shaped)
    maps = maps / found.view(-1, *[1] * (maps.dim() - 1))
    errors = _errors(trace, top, at_top)
    labels = errors.argmin(1)
    _check(trace, source, maps, top, errors, labels)
    return Separated(node, top, at_top, source, maps, unsure, labels, misfit)


def least_squares(left: Tensor, right: Tensor) -> Tensor:
    """The smallest x with left·x nearest to right. By singular values: the last bits of
    torch.linalg.lstsq depend on where in memory its work space happens to lie."""
    u, values, v = torch.linalg.svd(left, full_matrices=False)
    kept = values > torch.finfo(values.dtype).eps * max(left.shape) * values[0]
    found: Tensor = v[kept].T @ ((u.T @ right)[kept] / values[kept, None])
    return found


def rectified(maps: Tensor) -> tuple[Tensor, Tensor]:
    """A ReLU's output without what rounding left of its zeros, which is negative as often as
    positive; and the channels in which an entry may be either."""
    flat = maps.flatten(1)
    floor = (-3 * flat.min(1).values).maximum(1e-6 * flat.max(1).values)
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
    trace: Trace, gradient: Named, layer: fx.Node, top: fx.Node, at_top: Tensor, at_layer: Tensor
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
    if misfit > MISFIT:
        raise NotApplicable(
            f"the records found do not explain its bias gradient (misfit {misfit:.2g})"
        )
    if len(found) > 1 and not (found > 0).all():
        raise NotApplicable("the records found explain its bias gradient only by negative shares")
    return found


def _errors(trace: Trace, top: fx.Node, signal: Tensor) -> Tensor:
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
        active = one.abs() > 1e-3 * one.abs().max()
        error = least_squares(rows[:, active].T, one[active, None])[:, 0]
        if float((error @ rows[:, active] - one[active]).norm() / one.norm()) > MISFIT:
            raise NotApplicable("a signal found at it is not one that its head can send")
        errors.append(error)
    return torch.stack(errors)


def _check(
    trace: Trace, source: fx.Node, maps: Tensor, top: fx.Node, errors: Tensor, labels: Tensor
) -> None:
    """Refuse mixtures of records: any basis of their span explains the gradient, but only the
    records themselves also send the errors that their own activations cause."""
    wrong = errors / -errors.gather(1, labels[:, None])  # −1 at the label, else p/(1 − p_y)
    if trace.sources[top] == frozenset({source}):
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
    if not off < MISFIT:
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


def row_space(gradient: Tensor, records: int, positions: int) -> Tensor:
    """V (inputs·k² × rank): the span of the windows. Refuses when the rank cannot tell it."""
    outputs, inputs = gradient.shape
    rank = records * positions
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
            f"rounding: {found}): noise, pruning, several steps or another number of records"
        )
    spanned: Tensor = right[:rank].T
    return spanned


def common_maps(
    basis: Tensor, layer: nn.Conv2d | nn.Linear, shape: tuple[int, ...], records: int
) -> Tensor:
    """S (pixels × records): the span of the records' maps."""
    if isinstance(layer, nn.Linear):
        return basis
    channels, height, width = shape
    pixel = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
    seen = windows(pixel, layer)[0].long()  # (positions, k²): pixel number, 0 over the padding
    positions, area = seen.shape
    rank = basis.shape[1]
    parts = basis.reshape(channels, area, rank)
    gram = torch.einsum("car,cbs->abrs", parts, parts)
    normal = torch.zeros(positions, rank, positions, rank, dtype=basis.dtype)
    for number in range(height * width + 1):
        viewers = (seen == number).nonzero().tolist()
        for p, a in viewers:
            normal[p, :, p, :] += gram[a, a]
            for q, b in viewers if number else ():
                normal[p, :, q, :] -= gram[a, b] / len(viewers)
    size = positions * rank
    values, vectors = scipy.linalg.eigh(
        normal.reshape(size, size).numpy(), subset_by_index=[0, records]
    )
    if max(values[records - 1], 1e-9) > GAP * values[records]:
        raise NotApplicable(
            f"the overlap of its windows does not single out {records} maps (eigenvalues "
            f"{values[records - 1]:.1e} and then {values[records]:.1e}): it has none, or noise "
            "hides it"
        )
    solutions = torch.from_numpy(vectors[:, :records].T.copy()).view(records, positions, rank)
    seen_windows = solutions @ basis.T  # (records, positions, channels·k²)
    # Every view of a pixel agrees; one that no window looks at stays unknown, at zero.
    maps = torch.zeros(records, channels, height * width, dtype=basis.dtype)
    by_pixel = seen_windows.reshape(records, positions, channels, area)
    for p in range(positions):
        inside = seen[p] > 0
        maps[:, :, seen[p][inside] - 1] = by_pixel[:, p, :, inside]
    orthonormal: Tensor = torch.linalg.qr(maps.flatten(1).T).Q
    return orthonormal


def sparse_rays(span: Tensor, records: int, rng: torch.Generator) -> Tensor:
    """The sparse non-negative vectors of a space (pixels × records), one per row."""
    if records == 1:
        return (span * span.sum().sign()).T
    found: list[Tensor] = []
    for _ in range(PROGRAMS * records):
        left = span
        if found:  # look where what was found does not explain the space
            taken = torch.linalg.qr(torch.stack(found).T).Q
            left = span - span @ taken @ taken.T
        pick = int(torch.multinomial(left.square().sum(1), 1, generator=rng))
        start = _program(span, pick, rng)
        if start is None:
            continue
        ray, error = _polished(span, start)
        known = any(float(torch.dot(ray, other)) > 1 - 1e-4 for other in found)
        if error < 1e-2 and not known:
            found.append(ray)
        if len(found) == records:
            break
    if not found:
        raise NotApplicable("no sparse non-negative map in the space of the records' maps")
    return torch.stack([span @ ray for ray in found])


def _program(span: Tensor, pick: int, rng: torch.Generator) -> Tensor | None:
    """min 1ᵀSq, Sq ≥ 0, (Sq)_pick = 1, by adding the constraints that are violated."""
    matrix = span.numpy()
    # Where every record is zero only rounding is left, and its sign would contradict the rest.
    size = np.linalg.norm(matrix, axis=1)
    telling = np.flatnonzero(size > 1e-3 * size.max())
    chosen = telling[torch.randperm(len(telling), generator=rng)[:ROWS].numpy()]
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
        violated = telling[values[telling] < -10 * SLACK * max(1.0, values.max())]
        if not len(violated):
            break
        worst = violated[np.argsort(values[violated])[:ROWS]]
        chosen = np.union1d(chosen, worst)
    return torch.from_numpy(solved.x)


def _polished(span: Tensor, start: Tensor) -> tuple[Tensor, float]:
    """The vector of the space that is smallest on the zeros of a rough one; unit length."""
    ray = start / start.norm()
    error = 1.0
    for _ in range(3):
        values = span @ ray
        zeros = values < ZERO * values.max()
        if int(zeros.sum()) < 2 * span.shape[1]:
            return ray, 1.0
        _, singular, right = torch.linalg.svd(span[zeros], full_matrices=False)
        error = float(singular[-1] / singular[-2])
        ray = right[-1] * (span @ right[-1]).sum().sign()
    values = span @ ray
    return ray, max(error, float(-values.min() / values.max()))
