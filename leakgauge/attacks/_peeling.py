"""Peeling a ReLU network from the top: layer after layer by least squares, then the image.

Once the activations above are known, the signal runs back through their masks, and what a layer
sees, t, solves linear equations for the whole batch:

    Σ_n t_n ⋆ Δ_n = G     its weight gradient; Δ_n are the known signals at its output
    affine(t_n) = a_n     wherever a known ReLU output a above it is active

Where the gradients alone determine a layer, one Cholesky factor solves them for all its channels,
elsewhere conjugate gradients do; all in double precision. Behind batch norms in train mode the
statistics of the batch are unknown too: they follow from each solution, and the next from them. A
ReLU output is non-negative, so that equations that leave it open announce themselves by negative
entries. From there on each image is found alone, by its own activations: `invert`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.attacks._matching import lbfgs
from leakgauge.attacks._separation import (
    Separated,
    biases,
    least_squares,
    most,
    rectified,
    smallest,
    supports,
    usual_energy,
    windows,
)
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.types import Named, Resources

NEGATIVE = 1e-3  # a peeled ReLU output may be negative by this share of its largest entry
RESIDUAL = 1e-4  # and its equations unsatisfied by this share
ROUGH = 0.03  # both for several steps, of which all but the first had other weights
SPARE = 1.02  # times as many equations as unknowns that solve a layer by its gradients alone
SPARE_FORWARD = 1.5  # where the activations above could give more equations
SPARE_JOINED = 1.45  # and where they do, behind batch norms in train mode, all together
JOINED_ROUNDS = 25  # times that statistics follow from such a solution
JOINED_STEPS = 40  # of conjugate gradients in each
JOINED_FALLS = 0.7  # times the residual of the round before, at most
RIDGE = 1e-12  # added to the normal equations, as a share of their diagonal
NORM_ROUNDS = 150  # times that a batch norm's statistics follow from what was solved with them
ANCHORED = 0.1  # share by which signals may fail to add up to a bias's gradient
NORM_SOLVED = 1e-7  # by how much they may still move at the end
SIZED = 0.1  # share by which signals whose size no bias told may be off
ROUNDING = 3e-5  # a residual below this is float32's
ROUNDS = 4  # times that rows which do not fit are left out; entries put right in one row
EXPLAINED = 0.2  # share of what a row lacks that may stay: batch norm spreads a wrong entry so far
TRIES = 8  # such times where one factor solves a layer for all channels
GROUND = 3e-4  # entries this near a channel's least, as a share of its range, are its zeros
SMALL = 1e-3  # entries above this share of the largest are not switched off
WEAK = 0.1  # combinations of signals weaker than this share of the strongest count less
SOLVED = 1e-9  # slope, as a share of the first, at which conjugate gradients stop
EXACT = 1e-11  # misfit of activations at which nothing is left to find
FOUND = 1e-8  # misfit below which an image is taken as found
PATIENCE = 75  # evaluations without a tenth of progress after which a search is given up


class Watch:
    """Progress and time of one reconstruction: it hears of every step with its misfit, and says
    whether there is time for another."""

    def __init__(self, resources: Resources, total: int):
        self._resources, self._total, self._done = resources, total, 0
        self._began = time.monotonic()
        self.notes: list[str] = []

    def __call__(self, misfit: float) -> None:
        self._done += 1
        if self._resources.progress:
            self._resources.progress(min(self._done, self._total), self._total, misfit)

    def open(self) -> bool:
        seconds = self._resources.seconds
        if seconds is None or time.monotonic() - self._began < seconds:
            return True
        self.notes = [f"stopped by the time budget of {seconds:g} s"]
        return False


Equation: TypeAlias = tuple[Callable[[Tensor], Tensor], Tensor]
"""An affine function of the unknown activations, and what it must give."""


Solution: TypeAlias = tuple[Tensor, float, dict[fx.Node, Tensor]]
"""Activations, the residual of their equations, and what the gradient of each layer lacks."""


@dataclass
class Peeled:
    """Activations known of every record, from the top down, and why it went no further."""

    trace: Trace
    gradient: Named
    start: Separated
    known: dict[fx.Node, Tensor]
    unsure: dict[fx.Node, Tensor]  # channels of ReLUs in which an entry may be zero or not
    stopped: str = ""

    @property
    def lowest(self) -> fx.Node:
        return list(self.known)[-1]

    @property
    def steps(self) -> Iterator[tuple[Tensor, Named]]:
        """The records of each local step, and the weights that it had."""
        return zip(self.start.steps, self.start.path.weights, strict=True)

    def observed(self, layer: fx.Node) -> Tensor:
        """The gradient of the weight of a layer that `_signals` found."""
        name = self.trace.told(layer, "weight", self.gradient)
        assert name is not None
        return self.gradient[name]

    def entering(self, above: fx.Node, node: fx.Node, value: Tensor) -> Tensor:
        """What enters a layer or an activation when `node` has this value."""
        entered: Tensor = self.trace.affine(
            above.all_input_nodes[0], {**self.known, node: value}, {}
        )
        return entered


@dataclass
class Rows:
    """A layer that sees the unknown node, and the signal at its output or, where a batch norm in
    train mode stands behind it, at that one's output: (N, outputs, …)."""

    layer: fx.Node
    norm: fx.Node | None
    signal: Tensor


def peel(trace: Trace, gradient: Named, start: Separated, watch: Watch, reach: str = "") -> Peeled:
    """Solve for one non-linear node after another, from the separated layer down to the image. What
    comes next is worth nothing without the node `reach`: that one is solved for if the time is up,
    too."""
    known, unsure = {start.source: start.maps}, {start.source: start.unsure}
    done = Peeled(trace, gradient, start, known, unsure)
    exact = len(start.steps) == 1
    for node in reversed(trace.nodes[: trace.nodes.index(start.source)]):
        if not trace.bent(node):
            continue
        reached = not reach or any(one.name == reach for one in known)
        if reached and not watch.open():
            done.stopped = f"{node.name}, as the time was up"
            break
        try:
            found = _solved(done, node)
        except NotApplicable as reason:
            done.stopped = f"{node.name}: {reason}"
            break
        if found is None:
            done.stopped = f"{node.name}: no layer with a known signal looks at it"
            break
        value, residual, negative = found
        watch(residual)
        if residual > (RESIDUAL if exact else ROUGH) or negative > (NEGATIVE if exact else ROUGH):
            done.stopped = (
                f"{node.name}, which its equations leave open (residual {residual:.1e}, negative "
                f"by {negative:.1e} of its largest entry)"
            )
            break
        if trace.kind[node] == "relu":
            value, done.unsure[node] = rectified(value)
        done.known[node] = value
        if trace.norms:
            done.known[node] = _anchored(done, node, value)
    return done


def _solved(done: Peeled, node: fx.Node) -> tuple[Tensor, float, float] | None:
    """The activations of `node`, the residual of their equations and by how much a ReLU's are
    negative; None if there are no equations.

    Rounding hides which of the smallest activations above are zero. One wrong mask spoils the
    signal of its channel, and so one row of a weight gradient: rows that are unsure or do not fit
    are left out, and what is then found tells which entries were wrong. They are put right.
    """
    trace = done.trace
    every = _signals(done, node)
    forward = [] if trace.norms else [_forward_equation(done, node, a) for a in _above(done, node)]
    if not every and not forward:
        return None
    spoilt = {}
    for rows in every:
        above = trace.activation_above(rows.layer)
        none = torch.zeros(rows.signal.shape[1], dtype=torch.bool)
        spoilt[rows.layer] = _few(done.unsure.get(above, none) if above else none)
    counted = _counted(done, node, every)
    joined = _joined(done, node, every)
    direct = counted is not None and counted > (SPARE_FORWARD if forward or joined else SPARE)
    if trace.norms and not direct and not joined:
        if counted is None or not every:
            return None
        also = ", also with what the activations above tell" if len(done.start.steps) == 1 else ""
        raise NotApplicable(
            f"its gradients give {counted:.2f} equations for each of its unknowns, too few{also}"
        )
    if counted is not None and counted < 1 and not forward and not joined:
        raise NotApplicable(
            f"its gradients give {counted:.2f} equations for each of its unknowns, and no known "
            "activation looks at it alone"
        )
    systems = [_System(done, node, rows) for rows in every] if direct else []
    value = done.start.maps.new_zeros(len(done.start.maps), *trace.shape[node])
    residual = math.inf
    left: dict[fx.Node, Tensor] = {}
    for _ in range(TRIES if direct else ROUNDS):
        good = {layer: ~rows for layer, rows in spoilt.items()}
        if direct:
            value, residual, left = _by_channel(done, node, systems, good)
        elif joined:
            value, residual, left = joined.solved(good)
        else:
            equations = forward + [
                _gradient_equation(done, node, r.layer, r.signal, good[r.layer]) for r in every
            ]
            value, residual = _solve(equations, value)
            left = {r.layer: _misfit(done, node, r.layer, r.signal, value) for r in every}
        if residual < ROUNDING:
            break
        before = sum(int(rows.sum()) for rows in spoilt.values())
        for layer, lack in left.items():
            spoilt[layer] = _few(spoilt[layer] | _stands_out(lack, good[layer]))
        if sum(int(rows.sum()) for rows in spoilt.values()) == before:
            break
    negative = float(-value.min() / value.max()) if trace.kind[node] == "relu" else 0.0
    if residual < ROUNDING and negative < NEGATIVE:
        for layer, lack in left.items():
            if spoilt[layer].any():
                entered = done.entering(layer, node, value)
                _correct(done, layer, lack.flatten(1), entered, spoilt[layer])
    return value, residual, negative


def _anchored(done: Peeled, node: fx.Node, value: Tensor) -> Tensor:
    """The value in the size, step by step, with which the signals below it add up to the gradient
    of the bias there. Batch norms pass signals on by the inverse of that size, skips by themselves.
    It stays as it is where no bias tells."""
    trace, below = done.trace, node.all_input_nodes[0]
    names = biases(trace, done.gradient, node)
    if not names:
        return value
    own, normed = [], []
    for step, weights in done.steps:
        sums = []
        for size in (1.0, 0.5):
            done.known[node] = value * size
            with trace.holding(weights):
                slope = _slopes(done, node, step, {below: below})[below]
            sums.append(slope.transpose(0, 1).flatten(1).sum(1))
        own.append(2 * sums[0] - sums[1])
        normed.append(sums[1] - sums[0])
    left = torch.stack(normed, 1)
    value = value.clone()
    for name in names:
        right = done.gradient[name] - torch.stack(own).sum(0)
        found, misfit = most(left, right)
        if misfit < ANCHORED and (found > 0.5).all() and (found < 2).all():
            for (step, _), amount in zip(done.steps, found.tolist(), strict=True):
                value[step] /= amount
            break
    return value


def _counted(done: Peeled, node: fx.Node, every: list[Rows]) -> float | None:
    """How many equations the weight gradients alone give for each unknown of a channel; None where
    channels cannot be solved one by one. A channel of the layer's input has its own equations:
    each row of a gradient is the sum of the windows in it, by the signals of that row."""
    trace = done.trace
    pixels = trace.shape[node][1:].numel()
    count = 0
    for rows in every:
        layer = trace.layer(rows.layer)
        if not trace.only_reshaped(node, rows.layer.all_input_nodes[0]):
            return None
        if isinstance(layer, nn.Linear):
            pixels = 1
            count += layer.out_features
        else:
            if layer.groups > 1:
                return None
            count += layer.out_channels * math.prod(layer.kernel_size)
    return count / (len(done.start.maps) * pixels)


def _by_channel(
    done: Peeled, node: fx.Node, systems: list[_System], good: dict[fx.Node, Tensor]
) -> Solution:
    """The activations of `node` by least squares, the same small matrix for all its channels; the
    residual, and what the gradients lack.

    Behind a batch norm in train mode a signal is γ/σ·(δ − mean δ − û·mean(δû)), step by step. σ and
    û are those of what the layer puts out, which is sought: they begin as constants, or as they
    were with other rows, and follow from each solution.
    """
    trace, records = done.trace, len(done.start.maps)
    shape, pixels = trace.shape[node], systems[0].pixels
    flat = (shape.numel() // pixels, pixels)
    for system in systems:
        system.good = good[system.rows.layer]
    value, null = torch.zeros(()), None
    for _ in range(NORM_ROUNDS):
        sums = [system.equations(flat[0]) for system in systems]
        normal, right = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
        normal.diagonal().add_(RIDGE * float(normal.diagonal().mean()))
        solved = torch.cholesky_solve(right, torch.linalg.cholesky(normal))  # (N·pixels, channels)
        if null is None:
            null = _open(normal, len(done.start.steps))
        value = solved.view(records, flat[1], flat[0]).transpose(1, 2)
        value = _grounded(value, null).reshape(records, *shape)
        if not trace.norms:
            break
        if all(system.rows.norm for system in systems):  # without one its size is told
            value = _sized(done, node, value)
        moved = max(system.follow(node, value) for system in systems)
        if moved < NORM_SOLVED:
            break
    if trace.norms:
        for system in systems:
            system.sized(value.reshape(records, *flat))
    lacks = {system.rows.layer: system.lack(value.reshape(records, *flat)) for system in systems}
    kept = [lacks[s.rows.layer][good[s.rows.layer]] for s in systems]
    size = sum(float(s.target[s.good].square().sum()) for s in systems) ** 0.5
    residual = sum(float(k.square().sum()) for k in kept) ** 0.5 / size
    return value, residual, lacks


class _System:
    """The equations that one layer's weight gradient gives of its input."""

    def __init__(self, done: Peeled, node: fx.Node, rows: Rows):
        self.done, self.rows = done, rows
        self.good = torch.ones(rows.signal.shape[1], dtype=torch.bool)  # rows that count
        trace = done.trace
        layer = trace.layer(rows.layer)
        self.observed = done.observed(rows.layer)
        self.pixels = 1
        self.sides: tuple[int, ...] = (1, 1)  # of the layer's input
        self.places: tuple[int, ...] = (1, 1)  # and of its output
        self.seen = torch.ones(1, 1, dtype=torch.long)
        if not isinstance(layer, nn.Linear):
            self.pixels = trace.shape[node][1:].numel()
            self.sides = tuple(trace.shape[rows.layer.all_input_nodes[0]][1:])
            self.places = tuple(trace.shape[rows.layer][1:])
            numbers = torch.arange(1, self.pixels + 1, dtype=torch.float64).view(1, 1, *self.sides)
            self.seen = windows(numbers, layer)[0].long()
        self.observed = self.observed.view(len(self.observed), -1, self.seen.shape[1])
        self.signal = rows.signal.flatten(2) if rows.signal.dim() > 2 else rows.signal[:, :, None]
        self.signal = self.signal.transpose(0, 1)  # (outputs, N, positions)
        self.target = self.observed
        self.at_layer = self.signal
        if rows.norm is not None:
            norm = trace.module.get_submodule(str(rows.norm.target))
            assert isinstance(norm, _BatchNorm)
            self.norm = norm
            self.normal = torch.zeros_like(self.signal)  # û
            sizes = layer.weight.detach().flatten(1).norm(dim=1)
            self.sigma = sizes[:, None].expand(-1, self.signal.shape[1]).clone()
            self.behind()

    def gamma(self) -> Tensor:
        """The weights of the batch norm, as they stand."""
        weight = self.norm.weight
        return torch.ones_like(self.sigma[:, 0]) if weight is None else weight.detach().clone()

    def behind(self) -> None:
        """The signals at the layer itself, from those behind its batch norm."""
        found = torch.zeros_like(self.signal)
        for step, weights in self.done.steps:
            with self.done.trace.holding(weights):
                gamma = self.gamma()
            signal, normal = self.signal[:, step], self.normal[:, step]
            signal = signal - signal.mean((1, 2), keepdim=True)
            signal = signal - normal * (signal * normal).mean((1, 2), keepdim=True)
            signal = signal - signal.mean((1, 2), keepdim=True)
            found[:, step] = signal * (gamma[:, None] / self.sigma[:, step])[:, :, None]
        self.at_layer = found

    def equations(self, channels: int) -> tuple[Tensor, Tensor]:
        """The normal matrix (N·pixels)², and the right side for every channel."""
        # Every row counts alike: its signals are brought to one size.
        weight = self.at_layer.flatten(1).norm(dim=1)
        keep = self.good & (weight > 1e-9 * weight.max())
        signal = self.at_layer[keep] / weight[keep, None, None]
        target = self.target[keep] / weight[keep, None, None]
        right = signal.new_zeros(signal.shape[1] * self.pixels, channels)
        for offset in range(self.seen.shape[1]):
            right += self._spread(signal, offset).T @ target[:, :, offset]
        return self.normal_matrix(signal), right

    def normal_matrix(self, signal: Tensor) -> Tensor:
        """(N·pixels)², the same for every channel of the input, of these signals."""
        records, flat = signal.shape[1], signal.flatten(1)
        # Every offset of the kernel sees the same products of signals, each at its own pixels.
        products = (flat.T @ flat).view(records, *self.places, records, *self.places)
        found = signal.new_zeros(records, *self.sides, records, *self.sides)
        for offset in range(self.seen.shape[1]):
            at, pixels = self._grids(offset)
            found[(slice(None), *pixels) * 2] += products[(slice(None), *at) * 2]
        return found.view(records * self.pixels, -1)

    def _grids(self, offset: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """The positions, down and across, whose windows have a kernel's offset inside the input,
        and the pixels that they see there."""
        pixel = self.seen[:, offset].view(self.places) - 1
        down, across = ((pixel >= 0).any(side).nonzero()[:, 0] for side in (1, 0))
        inside = pixel[down][:, across]
        if not inside.numel():
            return (slice(0), slice(0)), (slice(0), slice(0))
        rows, columns = inside[:, 0] // self.sides[1], inside[0] % self.sides[1]
        return (_evenly(down), _evenly(across)), (_evenly(rows), _evenly(columns))

    def _spread(self, signal: Tensor, offset: int) -> Tensor:
        """The signals, at the pixels that a kernel's offset sees: (outputs, N·pixels)."""
        outputs, records, _ = signal.shape
        inside = (self.seen[:, offset] > 0).nonzero()[:, 0]
        spread = signal.new_zeros(outputs, records, self.pixels)
        spread[:, :, self.seen[inside, offset] - 1] = signal[:, :, inside]
        return spread.view(outputs, -1)

    def follow(self, node: fx.Node, value: Tensor) -> float:
        """Take û and σ from what the layer puts out of this value; by how much û moved."""
        if self.rows.norm is None:
            return 0.0
        before = self.normal
        normal, sigma = torch.zeros_like(before), torch.zeros_like(self.sigma)
        for step, weights in self.done.steps:
            with self.done.trace.holding(weights):
                out = self.centred(node, value[step])
            deviation = (out.square().mean((1, 2)) + self.norm.eps).sqrt()
            normal[:, step] = out / deviation[:, None, None]
            sigma[:, step] = deviation[:, None].expand(-1, len(step))
        self.normal, self.sigma = normal, sigma
        self.behind()
        self._learn(value)
        return float((normal - before).norm() / normal.norm())

    def centred(self, node: fx.Node, value: Tensor) -> Tensor:
        """What the layer puts out of this value of the node, less its mean: (outputs, N, …)."""
        out: Tensor = self.done.trace.affine(self.rows.layer, {node: value}, {})
        out = out.transpose(0, 1)
        out = out.flatten(2) if out.dim() > 2 else out[:, :, None]
        return out - out.mean((1, 2), keepdim=True)

    def weight_gradient(self, node: fx.Node, value: Tensor, signal: Tensor) -> Tensor:
        """The gradient (outputs, channels, offsets) that signals (outputs, N, positions) give."""
        layer = self.done.trace.layer(self.rows.layer)
        seen = self.done.entering(self.rows.layer, node, value)
        given = signal.transpose(0, 1)
        flat = isinstance(layer, nn.Linear)
        given = given[:, :, 0] if flat else given.reshape(*given.shape[:2], *self.places)
        return _weight_gradient(layer, seen, given).reshape(len(signal), -1, self.seen.shape[1])

    def energy(self, slope: Tensor) -> Tensor:
        """The mean square over channels with which each pixel enters the layer's outputs, each of
        them by its slope, added up."""
        weight = self.done.trace.layer(self.rows.layer).weight.detach()
        weight = weight.reshape(len(weight), -1, self.seen.shape[1]) * slope[:, None, None]
        each = weight.square().sum(0).mean(0)  # by offset
        found = each.new_zeros(self.pixels + 1)
        for offset, amount in enumerate(each.tolist()):
            found += amount * torch.bincount(self.seen[:, offset], minlength=self.pixels + 1)
        return found[1:]

    def _learn(self, value: Tensor) -> None:
        """Tell the path what each step added to the gradients of the layer and its norm."""
        path, trace = self.done.start.path, self.done.trace
        if path.steps == 1:
            return
        assert self.rows.norm is not None
        flat = value.reshape(len(value), -1, self.pixels)
        parts, slopes = [], []
        for step, _ in self.done.steps:
            parts.append(self._gradient(self.at_layer[:, step], flat[step]))
            slopes.append((self.signal[:, step] * self.normal[:, step]).sum((1, 2)))
        weight = trace.told(self.rows.layer, "weight", self.done.gradient)
        gamma = trace.told(self.rows.norm, "weight", self.done.gradient)
        assert weight is not None
        path.learn(weight, torch.stack(parts).view(len(parts), *self.done.gradient[weight].shape))
        if gamma is not None:
            path.learn(gamma, torch.stack(slopes))

    def sized(self, value: Tensor) -> None:
        """Give the signals of each step the size with which they explain the gradient: where no
        bias told how large the activations above are, it is not known before."""
        steps = self.done.start.steps
        parts = [self._gradient(self.at_layer[:, s], value[s])[self.good].flatten() for s in steps]
        found = least_squares(torch.stack(parts, 1), self.observed[self.good].flatten()[:, None])
        for step, amount in zip(steps, found[:, 0].tolist(), strict=True):
            if abs(amount - 1) < SIZED:
                self.at_layer[:, step] *= amount

    def _gradient(self, signal: Tensor, value: Tensor) -> Tensor:
        """The layer's weight gradient (outputs, channels, offsets) of these records."""
        columns = value.transpose(1, 2).reshape(-1, value.shape[1])
        offsets = range(self.seen.shape[1])
        return torch.stack([self._spread(signal, o) @ columns for o in offsets], 2)

    def lack(self, value: Tensor) -> Tensor:
        """What the layer's gradient lacks when its input (N, channels, pixels) is this."""
        return self.observed - self._gradient(self.at_layer, value)


@dataclass
class _Told:
    """What the activation behind a layer's batch norm tells of that: `value`, what the norm put
    out less its bias, where it is `active`; both (outputs, N, positions). The equations are linear
    in the layer's input t and in the share s by which σ differs from what it was taken for."""

    system: _System
    value: Tensor
    active: Tensor

    def __post_init__(self) -> None:
        """û is told where the activation is active, elsewhere it begins with what makes its sum
        zero."""
        self._hold(torch.zeros_like(self.value))
        rest = self.system.normal.sum((1, 2)) / (1 - self.active).sum((1, 2)).clamp_min(1.0)
        self._hold(-rest[:, None, None].expand_as(self.value))

    def _hold(self, elsewhere: Tensor) -> None:
        gamma = self.system.gamma()[:, None, None]
        told = torch.where(gamma.abs() > 1e-6, self.value / gamma, 0.0)
        self.system.normal = torch.where(self.active > 0, told, elsewhere)
        self.system.behind()

    def follow(self, node: fx.Node, value: Tensor) -> float:
        moved = self.system.follow(node, value)
        self._hold(self.system.normal)
        return moved

    def prepare(self) -> None:
        """For one solution: γ/σ, and signals that are mixed as in `_gradient_equation`."""
        system = self.system
        self.slope = system.gamma() / system.sigma[:, 0]
        signal = system.at_layer[system.good]
        self.mix = _whitening(signal.flatten(1))
        self.signal = torch.einsum("kc,cnp->knp", self.mix, signal)
        self.mixed = torch.einsum("kc,cij->kij", self.mix, system.observed[system.good])
        self.sizes = [1 / float(v.norm().clamp_min(1e-30)) for v in (self.value, self.mixed)]

    def equations(self, node: fx.Node, t: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """γ/σ·(u − ū) − (1 + s)·e and Σ t ⋆ δ − (1 + s)·G, each by the size of what is known."""
        system, factor = self.system, (1 + share)[:, None, None]
        above = self.slope[:, None, None] * system.centred(node, t) - factor * self.value
        gradient = torch.einsum("kc,cij->kij", self.mix, (factor * system.observed)[system.good])
        own = system.weight_gradient(node, t, self.signal)
        return self.sizes[0] * self.active * above, self.sizes[1] * (own - gradient)

    def squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Their normal matrix, roughly: of a channel of t by the gradients, (N·pixels)², by the
        activations, (pixels), and of s."""
        system, (above, below) = self.system, (size**2 for size in self.sizes)
        gradients = below * system.normal_matrix(self.signal)
        activations = above * float(self.active.mean()) * system.energy(self.slope)
        share = above * self.value.square().sum((1, 2))
        observed = system.observed[system.good].square().sum((1, 2))
        share[system.good] += below * self.mix.square().sum(0) * observed
        return gradients, activations, share


class _Joined:
    """The equations of the gradients and of the activations above together, in one local step with
    batch norms in train mode. Behind a layer that puts out u = W·t a known activation tells

        γ/σ·(u − ū) = e     where it is active; e is what the norm put out there, less its bias,

    so that û = e/γ there. Elsewhere û follows from each solution, as σ does.
    """

    def __init__(
        self, done: Peeled, node: fx.Node, told: list[_Told], skips: list[Equation]
    ) -> None:
        self.done, self.node, self.told = done, node, told
        self.skips = [(one, 1 / float(one[1].norm().clamp_min(1e-30))) for one in skips]
        self.value = done.start.maps.new_zeros(len(done.start.maps), *done.trace.shape[node])
        self.pixels = told[0].system.pixels

    def solved(self, good: dict[fx.Node, Tensor]) -> Solution:
        """The activations of the node, the residual, and what the gradients lack."""
        systems = [one.system for one in self.told]
        for system in systems:
            system.good = good[system.rows.layer]
        null = [] if self.skips else _unseen(systems, len(self.value))
        residual = math.inf
        for _ in range(JOINED_ROUNDS):
            before = residual
            value, residual = self._round()
            value = _grounded(self._flat(value), null).reshape(value.shape)
            if not self.skips:  # its size is not told
                value = _sized(self.done, self.node, value)
            self.value = value
            moved = max(one.follow(self.node, value) for one in self.told)
            if moved < NORM_SOLVED or residual > JOINED_FALLS * before:
                break
        for system in systems:
            system.sized(self._flat(self.value))
        lacks = {system.rows.layer: system.lack(self._flat(self.value)) for system in systems}
        kept = sum(float(lacks[s.rows.layer][s.good].square().sum()) for s in systems)
        size = sum(float(s.observed[s.good].square().sum()) for s in systems)
        return self.value, max(residual, (kept / size) ** 0.5), lacks

    def _flat(self, value: Tensor) -> Tensor:
        return value.reshape(len(value), -1, self.pixels)

    def _round(self) -> tuple[Tensor, float]:
        """The activations with the present û, and with σ up to a factor per channel: by conjugate
        gradients, conditioned by the normal matrix of the gradients, which all channels share, and
        the diagonal of that of the activations."""
        shape, count = self.value.shape, self.value.numel()
        for one in self.told:
            one.prepare()
        sizes = [len(one.value) for one in self.told]
        squares = [one.squares() for one in self.told]
        normal = torch.stack([gradients for gradients, _, _ in squares]).sum(0)
        energy = torch.stack([activations for _, activations, _ in squares]).sum(0)
        for (_, target), size in self.skips:
            energy = energy + size**2 * float((target != 0).double().mean())
        normal.diagonal().add_(energy.repeat(len(self.value)))
        normal.diagonal().add_(RIDGE * float(normal.diagonal().mean()))
        factor = torch.linalg.cholesky(normal)
        own = torch.cat([share for _, _, share in squares])
        own = own.clamp_min(1e-12 * float(own.max()))

        def function(z: Tensor) -> Tensor:
            # Without skips all equations hold for any size of t: the mean of σ is left as it is.
            t, shares = z[:count].view(shape), z[count:]
            shares = shares if self.skips else shares - shares.mean()
            found = [
                part.flatten()
                for one, share in zip(self.told, torch.split(shares, sizes), strict=True)
                for part in one.equations(self.node, t, share)
            ]
            found += [size * (f(t) - target).flatten() for (f, target), size in self.skips]
            return torch.cat(found)

        def condition(z: Tensor) -> Tensor:
            t = self._flat(z[:count].view(shape)).transpose(1, 2)
            t = torch.cholesky_solve(t.reshape(len(factor), -1), factor)
            t = t.view(len(self.value), self.pixels, -1).transpose(1, 2)
            return torch.cat([t.reshape(-1), z[count:] / own])

        begin = torch.cat([self.value.flatten(), torch.zeros_like(own)])
        wanted = torch.zeros_like(function(begin))
        found, residual = _solve([(function, wanted)], begin, JOINED_STEPS, condition)
        return found[:count].view(shape), residual


def _joined(done: Peeled, node: fx.Node, every: list[Rows]) -> _Joined | None:
    """The equations of gradients and activations together, if there are enough of them."""
    trace, counted = done.trace, _counted(done, node, every)
    if not trace.norms or counted is None or len(done.start.steps) > 1:
        return None
    if not every or any(rows.norm is None for rows in every):
        return None
    told = [_told_of(done, rows) for rows in every]
    skips = [above for above in _above(done, node) if not _normed(done, above)]
    count = sum(float(active.sum()) for _, active in told)
    count += sum(float((done.known[above] > 0).sum()) for above in skips)
    count /= len(done.start.maps) * trace.shape[node].numel()
    if not count or counted + count < SPARE_JOINED:
        return None
    systems = [_System(done, node, rows) for rows in every]
    return _Joined(
        done,
        node,
        [_Told(system, *one) for system, one in zip(systems, told, strict=True)],
        [_forward_equation(done, node, above) for above in skips],
    )


def _told_of(done: Peeled, rows: Rows) -> tuple[Tensor, Tensor]:
    """What a known activation tells of the batch norm behind a layer, and where: that norm alone
    must be unknown of what enters it."""
    trace, norm = done.trace, rows.norm
    assert norm is not None
    none = torch.zeros_like(rows.signal)
    value, active = none, none
    above = trace.activation_above(rows.layer)
    if above in done.known and trace.kind[above] == "relu":
        entering = above.all_input_nodes[0]
        if _closed(trace, entering, done.known.keys() | {norm}):
            rest = trace.affine(entering, {**done.known, norm: none}, {})
            more = trace.affine(entering, {**done.known, norm: none + 1}, {})
            if torch.allclose(more - rest, none + 1):
                active = (done.known[above] > 0).to(none)
                bias = getattr(trace.module.get_submodule(str(norm.target)), "bias", None)
                offset = 0.0 if bias is None else bias.view(1, -1, *[1] * (none.dim() - 2))
                value = active * (done.known[above] - rest - offset)
    parts = [one.flatten(2) if one.dim() > 2 else one[:, :, None] for one in (value, active)]
    return parts[0].transpose(0, 1), parts[1].transpose(0, 1)


def _closed(trace: Trace, node: fx.Node, held: Set[fx.Node]) -> bool:
    """Whether a node follows from those that are held."""
    if node in held:
        return True
    return not trace.bent(node) and all(_closed(trace, n, held) for n in node.all_input_nodes)


def _normed(done: Peeled, above: fx.Node) -> bool:
    """Whether a batch norm in train mode stands between an activation and what is not known."""
    trace, left = done.trace, list(above.all_input_nodes)
    while left:
        node = left.pop()
        if node in trace.norms and not trace.sources[node] <= done.known.keys():
            return True
        if not trace.bent(node):
            left.extend(node.all_input_nodes)
    return False


def _unseen(systems: list[_System], records: int) -> list[Tensor]:
    """The pattern of pixels that no equation sees behind batch norms in train mode, the same in all
    records: at every offset of every layer it is a constant."""
    pixels = systems[0].pixels
    square = torch.zeros(pixels, pixels, dtype=torch.float64)
    for system in systems:
        for pixel in system.seen.T:
            views = nn.functional.one_hot(pixel, pixels + 1)[:, 1:].double()
            views = views - views.mean(0)
            square += views.T @ views
    values, vectors = torch.linalg.eigh(square)
    null = vectors[:, values < 1e-9 * float(values[-1])]
    if null.shape[1] > 1:
        raise NotApplicable("its equations leave more open than a constant per step")
    return [null[:, 0].repeat(records)] if null.shape[1] else []


def _evenly(numbers: Tensor) -> slice:
    """The slice of these numbers, which are evenly spaced."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    return slice(int(numbers[0]), int(numbers[-1]) + 1, step)


def _open(normal: Tensor, steps: int) -> list[Tensor]:
    """The combinations of pixels that no equation sees, each by its own pixels: behind a batch norm
    in train mode a constant at an offset that is seen once per window, one per step."""
    count = steps + 2
    if len(normal) <= count:
        return []
    values, vectors = smallest(normal.numpy(), count)
    none = values < 10 * RIDGE * float(normal.diagonal().mean())
    if not none.any():
        return []
    if none.all():
        raise NotApplicable("its equations leave more open than a constant per step")
    null = torch.from_numpy(vectors[:, none])
    return [null[:, 0]] if null.shape[1] == 1 else supports(null)


def _grounded(value: Tensor, null: list[Tensor]) -> Tensor:
    """The value (N, channels, pixels) with what is open in it such that each channel's smallest
    entries there are zero, as behind a ReLU."""
    if not null:
        return value
    flat = value.transpose(1, 2).reshape(-1, value.shape[1])
    for one in null:
        shape = one * one.sum().sign()
        there = shape > 1e-3 * shape.max()
        shape = shape / shape[there].mean()
        flat = flat - shape[:, None] * (shape @ flat / shape.square().sum())
        # Zeros are taken often, and rounding spreads them: their middle, not the least of them.
        seen = flat[there]
        low, high = seen.min(0).values, seen.max(0).values
        zeros = seen <= low + GROUND * (high - low)
        lowest = seen.where(zeros, torch.nan).nanmedian(0).values
        flat = flat - shape[:, None] * lowest
    return flat.view(len(value), -1, value.shape[1]).transpose(1, 2)


def _sized(done: Peeled, node: fx.Node, value: Tensor) -> Tensor:
    """The value with the size, step by step, of a ReLU behind batch norms: only the ε of those that
    see it depends on that."""
    energy = usual_energy(done.trace, node)
    if energy is None:
        return value
    value = value.clone()
    for step, _ in done.steps:
        value[step] *= (energy / float(value[step].square().mean())) ** 0.5
    return value


def _stands_out(lack: Tensor, good: Tensor) -> Tensor:
    """The rows that lack far more than others do, of those that were not left out. With few
    equations to spare the others take up most of what a wrong one lacks, so that it may stand out
    by little: then it is at least the worst."""
    size = lack.flatten(1).norm(dim=1).where(good, 0.0)
    usual, most = float(size[good].median()), float(size.max())
    found: Tensor = size > min(max(10 * usual, 0.1 * most), max(3 * usual, 0.5 * most))
    return found


def _few(rows: Tensor) -> Tensor:
    """These rows, or none if they are so many that leaving them out would leave too little."""
    return rows if rows.double().mean() < 0.25 else torch.zeros_like(rows)


def _correct(done: Peeled, layer: fx.Node, left: Tensor, seen: Tensor, spoilt: Tensor) -> None:
    """Switch the entries of the ReLU above a layer whose windows are what its rows lack."""
    trace, known = done.trace, done.known
    above = trace.activation_above(layer)
    if above is None or above not in known or trace.kind[above] != "relu":
        return
    views = windows(seen, trace.layer(layer))
    if _norm_behind(trace, layer) is not None:
        views = views.clone()
        for step, _ in done.steps:
            views[step] -= views[step].mean((0, 1))
    views = views.flatten(0, 1)  # (N·positions, inputs·k²)
    sizes = views.norm(dim=1).clamp_min(1e-30)
    value = known[above].clone()
    by_channel = value.flatten(2) if value.dim() > 2 else value[:, :, None]
    positions = by_channel.shape[2]
    small = by_channel < SMALL * value.max()  # a larger one is no zero
    rows = done.observed(layer).flatten(1)
    for row in spoilt.nonzero().flatten().tolist():
        lack = left[row]
        for _ in range(ROUNDS):
            if lack.norm() < max(EXPLAINED * left[row].norm(), 1e-4 * rows[row].norm()):
                break
            fits = views @ lack / sizes * small[:, row].flatten()
            best = int(fits.abs().argmax())
            lack = lack - fits[best] / sizes[best] * views[best]
            entry = (best // positions, row, best % positions)
            by_channel[entry] = 0.0 if by_channel[entry] > 0 else 1e-9 * value.max()
    known[above] = by_channel.view(value.shape)


def _above(done: Peeled, node: fx.Node) -> list[fx.Node]:
    """Known activations whose input is affine in `node` and else known, lowest first."""
    trace, known = done.trace, done.known
    reach = known.keys() | {node}
    return [
        above
        for above in trace.nodes
        if above in known
        and trace.kind[above] in ("relu", "smooth")
        and node in (sources := trace.sources[above.all_input_nodes[0]])
        and sources <= reach
    ]


def _signals(done: Peeled, node: fx.Node) -> list[Rows]:
    """∂L/∂(output) of the layers that see `node` and that the signal at the top reaches; of those
    whose weight gradient is known and theirs alone."""
    trace, start, known = done.trace, done.start, done.known
    reach = known.keys() | {node}
    layers = [
        layer
        for layer in trace.layers()
        if trace.told(layer, "weight", done.gradient)
        and node in (sources := trace.sources[layer.all_input_nodes[0]])
        and sources <= reach
    ]
    behind = {layer: _norm_behind(trace, layer) for layer in layers}
    places = {layer: norm or layer for layer, norm in behind.items()}
    found: dict[fx.Node, Tensor] = {}
    for step, weights in done.steps:
        with trace.holding(weights):
            for layer, slope in _slopes(done, node, step, places).items():
                shape = (len(start.maps), *slope.shape[1:])
                found.setdefault(layer, slope.new_zeros(shape))[step] = slope
    return [Rows(layer, behind[layer], slope) for layer, slope in found.items() if slope.any()]


def _norm_behind(trace: Trace, layer: fx.Node) -> fx.Node | None:
    """The batch norm in train mode that a layer's output enters, and nothing else."""
    users = list(layer.users)
    return users[0] if len(users) == 1 and users[0] in trace.norms else None


def _slopes(
    done: Peeled, node: fx.Node, step: Tensor, places: dict[fx.Node, fx.Node]
) -> dict[fx.Node, Tensor]:
    """∂L/∂(place) of these layers, for the records of one step."""
    trace, start = done.trace, done.start
    known = {one: value[step] for one, value in done.known.items()}
    values: dict[fx.Node, Any] = {}

    def value(one: fx.Node) -> Any:
        if one not in values:
            if trace.kind[one] in ("relu", "smooth") and one in known:
                entering = value(one.all_input_nodes[0])  # may be anything: it only passes slopes
                slope = trace.slope(one, known[one])
                values[one] = known[one] + slope * (entering - entering.detach())
            elif trace.bent(one) or (one in trace.norms and not trace.sources[one] <= known.keys()):
                # Its value plays no part: only slopes are wanted.
                shape = (len(step), *trace.shape[one])
                values[one] = start.maps.new_zeros(shape).requires_grad_()
            else:
                values[one] = trace.apply(one, {n: value(n) for n in one.all_input_nodes})
        return values[one]

    with torch.enable_grad():
        top = value(start.top)
    reached = {layer: place for layer, place in places.items() if place in values}
    if not reached:
        return {}
    slopes = torch.autograd.grad(
        top, [values[p] for p in reached.values()], start.signal[step], allow_unused=True
    )
    return {layer: slope for layer, slope in zip(reached, slopes, strict=True) if slope is not None}


def _weight_gradient(layer: nn.Conv2d | nn.Linear, seen: Tensor, signal: Tensor) -> Tensor:
    """What a layer's weight gradient is, for as many outputs as the signal has."""
    if isinstance(layer, nn.Linear):
        return signal.T @ seen
    shape = (signal.shape[1], *layer.weight.shape[1:])
    found: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        seen, shape, signal, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    return found


def _misfit(done: Peeled, node: fx.Node, at: fx.Node, signal: Tensor, value: Tensor) -> Tensor:
    """What a layer's weight gradient lacks when `node` has this value."""
    seen = done.entering(at, node, value)
    return done.observed(at) - _weight_gradient(done.trace.layer(at), seen, signal)


def _gradient_equation(
    done: Peeled, node: fx.Node, at: fx.Node, signal: Tensor, rows: Tensor
) -> Equation:
    layer, target = done.trace.layer(at), done.observed(at)
    if not isinstance(layer, nn.Conv2d) or layer.groups == 1:
        # Outputs are mixed so that every combination of signals counts alike: far fewer iterations.
        # Weak ones, which rounding drowns, count less.
        target, signal = target[rows], signal[:, rows]
        flat = signal.flatten(2).transpose(0, 1).flatten(1) if signal.dim() > 2 else signal.T
        mix = _whitening(flat)
        target = torch.einsum("kc,c...->k...", mix, target)
        signal = torch.einsum("kc,nc...->nk...", mix, signal)

    def weight_gradient(value: Tensor) -> Tensor:
        return _weight_gradient(layer, done.entering(at, node, value), signal)

    return weight_gradient, target


def _whitening(signal: Tensor) -> Tensor:
    """Combinations of a signal's rows that are orthogonal and of one size, but for weak ones."""
    values, vectors = torch.linalg.eigh(signal @ signal.T)
    kept = values > 1e-14 * values[-1]
    mix: Tensor = (vectors[:, kept] / (values[kept] + WEAK**2 * values[-1]).sqrt()).T
    return mix


def _forward_equation(done: Peeled, node: fx.Node, above: fx.Node) -> Equation:
    target, told = done.trace.entered(above, done.known[above])
    return lambda value: done.entering(above, node, value) * told, target * told


def _solve(
    equations: list[Equation],
    begin: Tensor,
    iterations: int = 2000,
    condition: Callable[[Tensor], Tensor] = lambda slope: slope,
) -> tuple[Tensor, float]:
    """Least squares by conjugate gradients, every equation on an equal footing. `condition` does
    about what the inverse of their normal matrix does."""
    zero = torch.zeros_like(begin, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        outputs = [function(zero) for function, _ in equations]
    offsets = [output.detach() for output in outputs]
    targets = [wanted - offset for (_, wanted), offset in zip(equations, offsets, strict=True)]
    weights = [1 / target.norm().clamp_min(1e-30) for target in targets]

    def forward(value: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [
                (function(value) - offset) * weight
                for (function, _), offset, weight in zip(equations, offsets, weights, strict=True)
            ]

    def adjoint(residual: list[Tensor]) -> Tensor:
        seeds = [r * w for r, w in zip(residual, weights, strict=True)]
        return torch.autograd.grad(outputs, zero, seeds, retain_graph=True)[0]

    value = begin
    left = [target * weight for target, weight in zip(targets, weights, strict=True)]
    size = sum(float(r.square().sum()) for r in left) ** 0.5
    slope = adjoint(left)
    first = float((slope * condition(slope)).sum())
    left = [r - m for r, m in zip(left, forward(begin), strict=True)]
    slope = adjoint(left)
    step = condition(slope)
    before = float((slope * step).sum())
    for _ in range(iterations):
        moved = forward(step)
        length = before / sum(float(m.square().sum()) for m in moved)
        value = value + length * step
        left = [r - length * m for r, m in zip(left, moved, strict=True)]
        slope = adjoint(left)
        better = condition(slope)
        after = float((slope * better).sum())
        if after < SOLVED**2 * first:
            break
        step, before = better + (after / before) * step, after
    residual = sum(float(r.square().sum()) for r in left) ** 0.5 / size
    return value, residual


class _Settled(Exception):
    """Unwinds L-BFGS when the image is found, or nothing moves any more."""


def invert(
    trace: Trace,
    node: fx.Node,
    value: Tensor,
    rng: torch.Generator,
    evaluations: int,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[Tensor, float]:
    """The image (1, …, normalised) with this value at a node, and by how much it misses it."""
    relu = trace.kind[node] == "relu"
    entering = node.all_input_nodes[0] if relu else node  # of an image, a pool: the value itself
    size = value.square().sum()
    image = 0.1 * torch.randn(1, *trace.shape[trace.input], generator=rng).double()
    image.requires_grad_()
    search = lbfgs([image], evaluations, memory=50)
    best, found, losses = math.inf, image.detach().clone(), []

    def objective() -> Tensor:
        nonlocal best, found
        search.zero_grad()
        entered = trace.forward(image, [entering])[entering]
        miss = entered - value
        if relu:
            # Convex in what enters the ReLU: active entries are met, inactive ones stay below 0.
            # On what leaves it, an entry that should be active but is not would have no slope.
            miss = torch.where(value > 0, miss, entered.relu())
        loss: Tensor = miss.square().sum() / size
        if not loss.requires_grad:
            raise NotApplicable(f"no derivative leads from {node.name!r} back to the image")
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if losses[-1] < best:
            best, found = losses[-1], image.detach().clone()
        stuck = len(losses) > 2 * PATIENCE and best > 0.9 * min(losses[:-PATIENCE])
        if best < EXACT or stuck or not go_on():
            raise _Settled
        return loss

    with suppress(_Settled):
        search.step(objective)  # type: ignore[no-untyped-call]
    return found, best
