"""What is known of every record while a network is peeled, and the signals that follow from it.

Once the activations above are known, the signal at the top runs back through their masks, at the
weights of each local step, to the layers that look at the next unknown node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn.grad import conv2d_weight

from leakgauge.attacks._linear import Equation
from leakgauge.attacks._separation import Separated
from leakgauge.attacks._trace import Trace
from leakgauge.types import Named

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
    again: list[fx.Node] = field(default_factory=list)  # layers that told the records apart anew
    enough: float = math.inf  # values of a record at a known node that make dear equations needless
    brief: bool = False  # behind norms, end once that is known

    @property
    def lowest(self) -> fx.Node:
        return list(self.known)[-1]

    @property
    def suffices(self) -> bool:
        """Whether a known node has enough values of every record."""
        return any(self.trace.shape[node].numel() >= self.enough for node in self.known)

    @property
    def steps(self) -> Iterator[tuple[Tensor, Named]]:
        """The records of each local step, and the weights that it had."""
        return zip(self.start.steps, self.start.path.weights, strict=True)

    @property
    def sized(self) -> list[Tensor]:
        """The records whose activations have one size in common, which a norm leaves open."""
        if self.trace.alone:
            return list(torch.cat(self.start.steps)[:, None])
        return list(self.start.steps)

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
    """A layer that sees the unknown node, and the signal at its output or, where a norm stands
    behind it, at that one's output: (N, outputs, …)."""

    layer: fx.Node
    norm: fx.Node | None
    signal: Tensor


def telling(done: Peeled, node: fx.Node) -> list[fx.Node]:
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


def signals_of(done: Peeled, node: fx.Node) -> list[Rows]:
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
    behind = {layer: trace.norm_behind(layer) for layer in layers}
    places = {layer: norm or layer for layer, norm in behind.items()}
    found: dict[fx.Node, Tensor] = {}
    for step, weights in done.steps:
        with trace.holding(weights):
            for layer, slope in slopes_at(done, node, step, places).items():
                shape = (len(start.maps), *slope.shape[1:])
                found.setdefault(layer, slope.new_zeros(shape))[step] = slope
    return [Rows(layer, behind[layer], slope) for layer, slope in found.items() if slope.any()]


def slopes_at(
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
                # If it is not known it plays no part: only slopes are wanted.
                none = start.maps.new_zeros(len(step), *trace.shape[one])
                values[one] = known.get(one, none).detach().requires_grad_()
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


def weight_gradient(layer: nn.Conv2d | nn.Linear, seen: Tensor, signal: Tensor) -> Tensor:
    """What a layer's weight gradient is, for as many outputs as the signal has."""
    if isinstance(layer, nn.Linear):
        return signal.T @ seen
    shape = (signal.shape[1], *layer.weight.shape[1:])
    found: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        seen, shape, signal, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    return found


def forward_equation(done: Peeled, node: fx.Node, above: fx.Node) -> Equation:
    target, told = done.trace.entered(above, done.known[above])
    return lambda value: done.entering(above, node, value) * told, target * told


def told_of(done: Peeled, rows: Rows) -> tuple[Tensor, Tensor]:
    """What a known activation tells of the norm behind a layer: what that put out, less its bias,
    and where (outputs, N, positions). The norm alone must be unknown of what enters it."""
    trace, norm = done.trace, rows.norm
    assert norm is not None
    value, active = torch.zeros_like(rows.signal), torch.zeros_like(rows.signal)
    above = trace.activation_above(rows.layer)
    if above in done.known and trace.kind[above] == "relu":
        entering = above.all_input_nodes[0]
        if _closed(trace, entering, done.known.keys() | {norm}):
            for step, weights in done.steps:
                with trace.holding(weights):
                    rest = _besides(done, entering, norm, step, value[step])
                if rest is not None:
                    active[step] = (done.known[above][step] > 0).to(value)
                    value[step] = active[step] * (done.known[above][step] - rest)
    parts = [one.flatten(2) if one.dim() > 2 else one[:, :, None] for one in (value, active)]
    return parts[0].transpose(0, 1), parts[1].transpose(0, 1)


def _besides(
    done: Peeled, entering: fx.Node, norm: fx.Node, step: Tensor, none: Tensor
) -> Tensor | None:
    """What enters an activation in a step besides what a norm puts out: its bias counts as such.
    None where the two do not simply add up."""
    trace, known = done.trace, {one: value[step] for one, value in done.known.items()}
    rest, more = (trace.affine(entering, {**known, norm: none + add}, {}) for add in (0.0, 1.0))
    if not torch.allclose(more - rest, none + 1):
        return None
    bias = getattr(trace.module.get_submodule(str(norm.target)), "bias", None)
    found: Tensor = rest if bias is None else rest + bias.view(1, -1, *[1] * (none.dim() - 2))
    return found


def _closed(trace: Trace, node: fx.Node, held: Set[fx.Node]) -> bool:
    """Whether a node follows from those that are held."""
    if node in held:
        return True
    return not trace.bent(node) and all(_closed(trace, n, held) for n in node.all_input_nodes)
