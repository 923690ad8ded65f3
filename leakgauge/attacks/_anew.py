"""Telling records apart anew, below a node that the peeling cannot pass: a max-pool, mostly.

Rank, overlap and sparsity need nothing from above: a convolution below tells the records' maps and
signals from its own gradient. What it does not tell is which of them are which records, and whether
they are records at all and no mixtures. The node known above tells both: run forward from the maps
found, step by step at its weights, it must come out as it is known.
docs/methods/separation.md has the algebra.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, fx

from leakgauge.attacks._known import Peeled
from leakgauge.attacks._separation import Separated, read, slack_of
from leakgauge.errors import NotApplicable


def anew(done: Peeled, rng: torch.Generator) -> Separated:
    """The records as the highest layer tells them that can, below all that is known; in the order
    and with the labels in which they are known. Refuses, with the reason of the first layer."""
    trace = done.trace
    above = trace.nodes.index(done.lowest)
    reasons = []
    for layer in reversed(trace.layers()):
        if trace.nodes.index(layer) > above:
            continue
        try:
            return _read(done, layer, rng)
        except NotApplicable as reason:
            reasons.append(f"{layer.target}: {reason}")
    raise NotApplicable(
        "no layer below tells the records apart by itself" + "".join(f" ({r})" for r in reasons[:1])
    )


def _read(done: Peeled, layer: fx.Node, rng: torch.Generator) -> Separated:
    trace, start = done.trace, done.start
    if not all(trace.follows(done.lowest, one) for one in trace.sources[layer.all_input_nodes[0]]):
        raise NotApplicable(f"{done.lowest.name} does not follow from its input alone")
    path = start.path.copied()
    found = read(trace, done.gradient, start.sizes, path.training, layer, rng, path)
    order = _order(done, found)
    places = order.argsort()  # of each found one among the known
    steps = tuple(places[step].sort().values for step in found.steps)
    if len(start.steps) > 1:
        known = [step.sort().values.tolist() for step in start.steps]
        if [step.tolist() for step in steps] != known:
            raise NotApplicable("what it finds together in a step was found apart above it")
        steps = start.steps
    return replace(
        found,
        signal=found.signal[order],
        maps=found.maps[order],
        labels=start.labels,
        steps=steps,
    )


def _order(done: Peeled, found: Separated) -> Tensor:
    """Which of the found is each known record: the one that leads to what is known of it."""
    trace, lowest = done.trace, done.lowest
    value = torch.zeros_like(done.known[lowest])
    for step, weights in zip(found.steps, found.path.weights, strict=True):
        with trace.holding(weights), torch.no_grad():
            value[step] = trace.affine(lowest, {found.source: found.maps[step]}, {})
    led, known = (F.normalize(one.flatten(1)) for one in (value, done.known[lowest]))
    order = torch.from_numpy(linear_sum_assignment(-(known @ led.T).numpy())[1])
    off = float((led[order] - known).norm(dim=1).max())
    if not off < slack_of(found.sizes, found.rough):
        raise NotApplicable(
            f"the activations found at it do not lead to those of {lowest.name} (off by {off:.1g}):"
            " they are mixtures of records"
        )
    return order
