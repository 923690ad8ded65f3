"""Head invariant — what honest SGD on cross-entropy cannot change. Our own.

For a linear head the gradient rows of one record are (p_c − y_c)·h, and Σ_c (p_c − y_c) = 0: the
sum of the head's rows, and of its biases, stays what it was at the start, through momentum,
clipping and plain averaging, up to rounding.

    score = max over weight and bias of ‖1ᵀW − 1ᵀW'‖ / max(‖W‖, ‖W'‖),   W' the last accepted head

Needs: one accepted round, records (to see which layer is the head), and clients that *all* run SGD
without weight decay on cross-entropy, without noise on their updates, and a server that averages.
Adam and weight decay break the invariant honestly: with them there is no detection. The policy
leaves this test off unless the operator says so. In half precision rounding drowns
it: no detection.
A server that knows it re-centres the columns and passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.detectors._layers import judged, wide
from leakgauge.detectors._passes import head
from leakgauge.types import Detection, Received


@dataclass(frozen=True)
class HeadInvariant:
    """Has the last layer kept what honest SGD keeps?"""

    threshold: float = 1e-3

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        history, model, training = received.history, received.model, received.training
        if history is None or model is None or received.batch is None or not len(received.batch):
            return ()
        if training.optimiser != "sgd" or training.weight_decay:
            return ()
        layer = head(model, received.batch, training)
        if layer is None:
            return ()
        named = dict(model.named_parameters())
        scores = {}
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if name not in named or named[name].dtype in (torch.float16, torch.bfloat16):
                continue
            before = history.state.get(name)
            if before is not None and before.shape == named[name].shape:
                scores[name] = _drift(wide(named[name]), wide(before))
        says = (
            "the sum over classes of {name} changed by {score:.3g} of its size since the last "
            "accepted model; SGD on cross-entropy leaves it as it was"
        )
        return judged("head-invariant", scores, self.threshold, "reject", says)


def _drift(value: Tensor, before: Tensor) -> float:
    size = max(float(value.norm()), float(before.norm()))
    moved = float((value.double().sum(0) - before.double().sum(0)).norm())
    return moved / size if size else moved
