"""One forward and one backward of a received model, and what met in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakgauge.detectors._layers import fitted, prepared
from leakgauge.detectors._products import Run, Watch
from leakgauge.fl.local import outputs
from leakgauge.types import Batch, LocalTraining


@dataclass(frozen=True)
class Passed:
    logits: Tensor
    runs: list[Run] = field(default_factory=list)
    head: Run | None = None
    uncovered: dict[str, str] = field(default_factory=dict)


def run(model: nn.Module, batch: Batch, training: LocalTraining, backward: bool = True) -> Passed:
    """Run a `prepared` model, which is used up: its weights no longer ask for gradients."""
    watch = Watch(model)
    for value in model.parameters():
        if value.is_leaf:  # those of a scripted network are not
            value.requires_grad_(False)
    with torch.enable_grad():
        with watch:
            said = outputs(model, {}, batch.inputs, training)
        objective = cross_entropy(said, batch.labels)
        if backward and watch.leaves:
            torch.autograd.grad(objective, watch.leaves, allow_unused=True)
    said = said.detach()
    return Passed(said, watch.runs, _head(watch.runs, said), watch.uncovered())


def _head(runs: list[Run], said: Tensor) -> Run | None:
    """The linear layer whose output is the model's."""
    for seen in reversed(runs):
        if (
            seen.kind == "linear"
            and seen.left.numel() == said.numel()
            and torch.equal(seen.left.flatten(), said.flatten())
        ):
            return seen
    return None


def head(model: nn.Module, batch: Batch, training: LocalTraining) -> str | None:
    """The name of the linear layer whose output is the model's, seen on two records."""
    model = prepared(model, training)
    few = fitted(Batch(batch.inputs[:2], batch.labels[:2]), model)
    found = run(model, few, training, backward=False).head
    return None if found is None else found.layer
