"""D-SNR — K. Garov, D. I. Dimitrov, N. Jovanović, M. Vechev: "Hiding in Plain Sight: Disguising
Data Stealing Attacks in Federated Learning", ICLR 2024, https://arxiv.org/abs/2306.03013; Eq. 1 in
F. Wang, B. Li: "Hear No Evil", https://arxiv.org/abs/2506.20651

    D-SNR = max over weights W of   max_i ‖∂ℓ_i/∂W‖ / (Σ_i ‖∂ℓ_i/∂W‖ − max_i ‖∂ℓ_i/∂W‖)        (1)

over the weights of all linear layers and convolutions: is one record's gradient larger than all
others together? With batch norm in train mode a record's loss depends on the whole batch, and so
does its gradient: one backward pass per record. The probe has the fast form.

Needs: the received model and 16 records or more, in the mode in which the client trains: a fished
batch-norm network scores 1e5 in train mode and .5 in eval mode.
Differs from the paper: train mode; none of the layers is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakgauge.detectors._layers import chosen, judged, prepared
from leakgauge.detectors._slots import dominance
from leakgauge.fl.local import outputs
from leakgauge.types import Batch, Detection, LocalTraining, Received

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class DSNR:
    """Is one record's gradient larger than all others together?"""

    threshold: float = 1.0
    records: int = 64
    least: int = 16

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None or received.batch is None:
            return ()
        model = prepared(received.model, received.training)
        batch = chosen(received.batch, model, self.records, rng)
        if len(batch) < self.least:
            return ()
        scores = {n: dominance(v) for n, v in norms(model, batch, received.training).items()}
        says = (
            "one record's gradient of {name} outweighs those of all others together "
            "{score:.3g} times"
        )
        return judged("exact-d-snr", scores, self.threshold, "exposed", says)


def norms(model: nn.Module, batch: Batch, training: LocalTraining) -> dict[str, Tensor]:
    """‖∂ℓ_i/∂W‖ by record i, for the weights W of linear layers and convolutions of a `prepared`
    model."""
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    ids = {id(m.weight) for m in layers if m.weight.requires_grad}
    model.requires_grad_(False)
    weights = {n: p.requires_grad_() for n, p in model.named_parameters() if id(p) in ids}
    if not weights:
        return {}
    with torch.enable_grad():
        said = outputs(model, {}, batch.inputs, training)
        losses = cross_entropy(said, batch.labels, reduction="none")
    sizes: dict[str, list[Tensor]] = {name: [] for name in weights}
    for one in losses:
        gradients = torch.autograd.grad(
            one, list(weights.values()), retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(weights, gradients, strict=True):
            sizes[name].append(gradient.double().norm())
    return {name: torch.stack(found) for name, found in sizes.items()}
