"""How many records an update shows exactly, before any attack: counting on the model's shapes.

The first steps of the [exact recursion](exact_recursion.py) take records apart by the rank of one
layer's gradient. Whether they can follows from the model, the batch and the steps: no update, no
record and no weight is needed. A layer tells records apart when

- its input comes from a ReLU, only reshaped or max-pooled in between; all signals to the logits
  pass through its output; its weight is trained and in no other layer;
- its windows overlap, so that they hold each other in place (a convolution);
- the update has no more views of records (each record counts each time a step uses it) than the
  layer's limit: by the rank (`_limits.rank_limit`), by the overlap and by the zeros of its input.

SGD with any momentum, weight decay and number of steps; batch norm in either mode.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from leakgauge.attacks._limits import ZEROS, overlap_limit, rank_limit
from leakgauge.attacks._separation import _top
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.fl.local import minibatches
from leakgauge.records import pictures
from leakgauge.tensors import parameters
from leakgauge.types import LocalTraining, Named, Setting


@dataclass(frozen=True)
class LayerExposure:
    """What one layer tells: at most `limit` views of records, or nothing, for a reason."""

    name: str
    positions: int  # windows that it looks at, of one record
    outputs: int
    limit: int
    reason: str

    def __post_init__(self) -> None:
        if bool(self.limit) == bool(self.reason) or self.limit < 0:
            raise ValueError(
                f"{self.name}: expected a limit of at least 1 or a reason, got {self.limit} and "
                f"{self.reason!r}"
            )


@dataclass(frozen=True)
class Exposure:
    """How many records each layer shows exactly, from the top down, and whether those of one update
    are among them. `views` counts each record each time one of the `steps` uses it; `limit` is
    that of the best layer, called `layer`. `reason` says why no layer tells anything."""

    records: int
    views: int
    steps: int
    exposed: bool
    limit: int
    layer: str | None
    layers: tuple[LayerExposure, ...]
    reason: str

    def __post_init__(self) -> None:
        if self.exposed != (self.views <= self.limit):
            raise ValueError(
                f"exposed: expected {self.views <= self.limit} for {self.views} views and a limit "
                f"of {self.limit}, got {self.exposed}"
            )
        if self.limit != max((one.limit for one in self.layers), default=0):
            raise ValueError(f"limit: expected that of the best layer, got {self.limit}")
        if (self.layer is None) != bool(self.reason):
            raise ValueError(f"reason: expected one where no layer tells, got {self.reason!r}")


def exposure(setting: Setting, training: LocalTraining, records: int | Sequence[int]) -> Exposure:
    """What an update of this training on so many records shows exactly; `records` of each client
    where the attacker sees the sum of several."""
    each = [records] if isinstance(records, int) else list(records)
    batches = [batch for count in each for batch in minibatches(count, training)]
    views, steps = sum(map(len, batches)), len(batches)
    layers: tuple[LayerExposure, ...] = ()
    try:
        layers = _layers(setting, training, steps)
        best = max(layers, key=lambda one: one.limit, default=None)
        if best is None:
            raise NotApplicable("the model has no convolution and no linear layer")
        if not best.limit:
            raise NotApplicable(
                f"no layer of the model tells records apart (the last, {best.name}: {best.reason})"
            )
    except NotApplicable as reason:
        words = " ".join(str(reason).split())
        return Exposure(sum(each), views, steps, False, 0, None, layers, words)
    exposed = views <= best.limit
    return Exposure(sum(each), views, steps, exposed, best.limit, best.name, layers, "")


def _layers(setting: Setting, training: LocalTraining, steps: int) -> tuple[LayerExposure, ...]:
    model, record = setting.model, pictures(setting.record)
    if training.optimiser != "sgd":
        raise NotApplicable(f"{training.optimiser!r} rescales the update entry by entry")
    if training.dropout != "off" and any(isinstance(m, _DropoutNd) for m in model.modules()):
        raise NotApplicable("dropout hides part of the network")
    trace = Trace(model, record.shape, train=training.batch_norm == "train")
    reached = _reached(model, record.shape)
    return tuple(_layer(trace, node, reached, steps) for node in reversed(trace.layers()))


def _reached(model: nn.Module, shape: tuple[int, ...]) -> Named:
    """The trained parameters that a signal from the logits reaches, each with a mark."""
    model = copy.deepcopy(model).eval()
    values = {name: p.detach().requires_grad_() for name, p in parameters(model).items()}
    like = next(model.parameters())
    try:
        with torch.enable_grad():
            blank = torch.zeros(1, *shape, device=like.device, dtype=like.dtype)
            logits: Tensor = torch.func.functional_call(model, values, (blank,))
            found = torch.autograd.grad(logits.sum(), list(values.values()), allow_unused=True)
    except Exception as error:  # whatever the user's code does with a blank record
        raise NotApplicable(
            f"no signal runs back through the model ({type(error).__name__}: {error})"
        ) from error
    pairs = zip(values, found, strict=True)
    return {name: torch.ones(()) for name, slope in pairs if slope is not None}


def _layer(trace: Trace, node: fx.Node, reached: Named, steps: int) -> LayerExposure:
    layer, out = trace.layer(node), trace.shape[node]
    positions = (out[:-1] if isinstance(layer, nn.Linear) else out[1:]).numel()
    outputs = layer.weight.shape[0]
    try:
        limit = _limit(trace, node, reached, positions, steps)
    except NotApplicable as refused:
        return LayerExposure(str(node.target), positions, outputs, 0, str(refused))
    return LayerExposure(str(node.target), positions, outputs, limit, "")


def _limit(trace: Trace, node: fx.Node, reached: Named, positions: int, steps: int) -> int:
    """The most views of records that a layer tells apart; refuses, with the reason, if none."""
    layer = trace.layer(node)
    _top(trace, node, 1)
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        raise NotApplicable("it is a grouped convolution")
    if trace.told(node, "weight", reached) is None:
        raise NotApplicable(
            "its weight is frozen, shared with other layers or reached by no signal"
        )
    (source,) = trace.sources[node.all_input_nodes[0]]
    centred = trace.centred(node)
    outputs, inputs = layer.weight.flatten(1).shape
    limit = rank_limit(outputs, inputs, positions, steps, centred)
    if not limit and centred and positions == 1:
        raise NotApplicable("the batch norm behind it hides what its records have in common")
    if not limit:
        raise NotApplicable(
            f"one record alone has {positions:,} windows, too many for a gradient of "
            f"{outputs:,} × {inputs:,}"
        )
    if positions > 1 and isinstance(layer, nn.Conv2d):
        _, height, width = trace.shape[source]
        limit = min(limit, overlap_limit(layer, height, width, steps, centred))
    elif positions > 1:
        limit = 0
    if not limit:
        raise NotApplicable("its windows overlap too little to hold each other in place")
    limit = min(limit, max(1, trace.shape[source].numel() // ZEROS))
    return limit if trace.rectified(source) else 1  # a smooth activation shows one record alone
