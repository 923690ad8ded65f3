"""Peeling a ReLU network from the top: layer after layer by least squares, then the image.

Once the activations above are known, the signal runs back through their masks, and what a layer
sees, t, solves linear equations for the whole batch:

    Σ_n t_n ⋆ Δ_n = G     its weight gradient; Δ_n are the known signals at its output
    affine(t_n) = a_n     wherever a known ReLU output a above it is active

Conjugate gradients in double precision solve them. A ReLU output is non-negative, so that equations
that leave it open announce themselves by negative entries. From there on each image is found alone,
by its own activations: `invert`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn.grad import conv2d_weight

from leakgauge.attacks._matching import lbfgs
from leakgauge.attacks._separation import Separated, rectified, windows
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.types import Named, Resources

NEGATIVE = 1e-3  # a peeled ReLU output may be negative by this share of its largest entry
RESIDUAL = 1e-4  # and its equations unsatisfied by this share
ROUNDING = 3e-5  # a residual below this is float32's
ROUNDS = 4  # times that masks are corrected and a layer solved again
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


def peel(trace: Trace, gradient: Named, start: Separated, watch: Watch) -> Peeled:
    """Solve for one non-linear node after another, from the separated layer down to the image."""
    known, unsure = {start.source: start.maps}, {start.source: start.unsure}
    done = Peeled(trace, gradient, start, known, unsure)
    for node in reversed(trace.nodes[: trace.nodes.index(start.source)]):
        if not trace.bent(node):
            continue
        if not watch.open():
            done.stopped = f"{node.name}, as the time was up"
            break
        found = _solved(done, node)
        if found is None:
            done.stopped = f"{node.name}: no layer with a known signal looks at it"
            break
        value, residual, negative = found
        watch(residual)
        if residual > RESIDUAL or negative > NEGATIVE:
            done.stopped = (
                f"{node.name}, which its equations leave open (residual {residual:.1e}, negative "
                f"by {negative:.1e} of its largest entry)"
            )
            break
        if trace.kind[node] == "relu":
            value, done.unsure[node] = rectified(value)
        done.known[node] = value
    return done


def _solved(done: Peeled, node: fx.Node) -> tuple[Tensor, float, float] | None:
    """The activations of `node`, the residual of their equations and by how much a ReLU's are
    negative; None if there are no equations.

    Rounding hides which of the smallest activations above are zero. One wrong mask spoils the
    signal of its channel, and so one row of a weight gradient: rows that are unsure or do not fit
    are left out, and what is then found tells which entries were wrong. They are put right.
    """
    trace = done.trace
    forward = [_forward_equation(done, node, above) for above in _above(done, node)]
    signals = _signals(done, node)
    if not signals and not forward:
        return None
    spoilt = {}
    for layer, signal in signals.items():
        above = trace.activation_above(layer)
        none = torch.zeros(signal.shape[1], dtype=torch.bool)
        spoilt[layer] = _few(done.unsure.get(above, none) if above else none)
    value, residual = torch.zeros(()), math.inf
    for _ in range(ROUNDS):
        equations = forward + [
            _gradient_equation(done, node, layer, signal, ~spoilt[layer])
            for layer, signal in signals.items()
        ]
        value, residual = _solve(equations, (len(done.start.maps), *trace.shape[node]))
        if residual < ROUNDING:
            break
        before = sum(int(rows.sum()) for rows in spoilt.values())
        for layer, signal in signals.items():
            size = _misfit(done, node, layer, signal, value).flatten(1).norm(dim=1)
            bad = size > max(10 * float(size.median()), 0.1 * float(size.max()))
            spoilt[layer] = _few(spoilt[layer] | bad)
        if sum(int(rows.sum()) for rows in spoilt.values()) == before:
            break
    negative = float(-value.min() / value.max()) if trace.kind[node] == "relu" else 0.0
    if residual < ROUNDING and negative < NEGATIVE:
        for layer, signal in signals.items():
            if spoilt[layer].any():
                left = _misfit(done, node, layer, signal, value).flatten(1)
                _correct(done, layer, left, done.entering(layer, node, value), spoilt[layer])
    return value, residual, negative


def _few(rows: Tensor) -> Tensor:
    """These rows, or none if they are so many that leaving them out would leave too little."""
    return rows if rows.double().mean() < 0.25 else torch.zeros_like(rows)


def _correct(done: Peeled, layer: fx.Node, left: Tensor, seen: Tensor, spoilt: Tensor) -> None:
    """Switch the entries of the ReLU above a layer whose windows are what its rows lack."""
    trace, known = done.trace, done.known
    above = trace.activation_above(layer)
    if above is None or above not in known or trace.kind[above] != "relu":
        return
    views = windows(seen, trace.layer(layer)).flatten(0, 1)  # (N·positions, inputs·k²)
    sizes = views.norm(dim=1).clamp_min(1e-30)
    value = known[above].clone()
    by_channel = value.flatten(2) if value.dim() > 2 else value[:, :, None]
    positions = by_channel.shape[2]
    rows = done.observed(layer).flatten(1)
    for row in spoilt.nonzero().flatten().tolist():
        lack = left[row]
        for _ in range(ROUNDS):
            if lack.norm() < max(0.05 * left[row].norm(), 1e-4 * rows[row].norm()):
                break
            fits = views @ lack / sizes
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


def _signals(done: Peeled, node: fx.Node) -> dict[fx.Node, Tensor]:
    """∂L/∂(output) of the layers that see `node` and that the signal at the top reaches; of those
    whose weight gradient is known and theirs alone."""
    trace, start, known = done.trace, done.start, done.known
    reach = known.keys() | {node}
    values: dict[fx.Node, Any] = {}

    def value(one: fx.Node) -> Any:
        if one not in values:
            if trace.kind[one] in ("relu", "smooth") and one in known:
                entering = value(one.all_input_nodes[0])  # may be anything: it only passes slopes
                slope = trace.slope(one, known[one])
                values[one] = known[one] + slope * (entering - entering.detach())
            elif trace.bent(one):  # its value plays no part: only slopes are wanted
                shape = (len(start.maps), *trace.shape[one])
                values[one] = start.maps.new_zeros(shape).requires_grad_()
            else:
                values[one] = trace.apply(one, {n: value(n) for n in one.all_input_nodes})
        return values[one]

    with torch.enable_grad():
        top = value(start.top)
    layers = [
        layer
        for layer in trace.layers()
        if layer in values
        and trace.told(layer, "weight", done.gradient)
        and node in (sources := trace.sources[layer.all_input_nodes[0]])
        and sources <= reach
    ]
    if not layers:
        return {}
    slopes = torch.autograd.grad(
        top, [values[layer] for layer in layers], start.signal, allow_unused=True
    )
    return {
        layer: slope
        for layer, slope in zip(layers, slopes, strict=True)
        if slope is not None and slope.any()
    }


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
        values, vectors = torch.linalg.eigh(flat @ flat.T)
        kept = values > 1e-14 * values[-1]
        mix = (vectors[:, kept] / (values[kept] + WEAK**2 * values[-1]).sqrt()).T
        target = torch.einsum("kc,c...->k...", mix, target)
        signal = torch.einsum("kc,nc...->nk...", mix, signal)

    def weight_gradient(value: Tensor) -> Tensor:
        return _weight_gradient(layer, done.entering(at, node, value), signal)

    return weight_gradient, target


def _forward_equation(done: Peeled, node: fx.Node, above: fx.Node) -> Equation:
    target, told = done.trace.entered(above, done.known[above])
    return lambda value: done.entering(above, node, value) * told, target * told


def _solve(
    equations: list[Equation], shape: tuple[int, ...], iterations: int = 2000
) -> tuple[Tensor, float]:
    """Least squares by conjugate gradients, every equation on an equal footing."""
    zero = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
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

    value = torch.zeros_like(zero).detach()
    left = [target * weight for target, weight in zip(targets, weights, strict=True)]
    size = sum(float(r.square().sum()) for r in left) ** 0.5
    slope = adjoint(left)
    step, before = slope, float(slope.square().sum())
    first = before
    for _ in range(iterations):
        moved = forward(step)
        length = before / sum(float(m.square().sum()) for m in moved)
        value = value + length * step
        left = [r - length * m for r, m in zip(left, moved, strict=True)]
        slope = adjoint(left)
        after = float(slope.square().sum())
        if after < SOLVED**2 * first:
            break
        step, before = slope + (after / before) * step, after
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
