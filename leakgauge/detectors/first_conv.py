"""First-convolution ratio — a filter that lets the image through. From K. Garov, D. I. Dimitrov,
N. Jovanović, M. Vechev: "Hiding in Plain Sight: Disguising Data Stealing Attacks in Federated
Learning", ICLR 2024, https://arxiv.org/abs/2306.03013, as told in F. Wang, B. Li: "Hear No Evil",
https://arxiv.org/abs/2506.20651, §3.2

    score = max over filters of  max|w| / (Σ|w| − max|w|)

of the first convolution: infinite for an identity filter. The other filters of a hand-made layer
may be zero: they are left out here and counted by the static weight tests.

Needs: the received model with a convolution of a fan-in of 27 or more (3 × 3 on colour images);
smaller filters are dominated by one entry by chance. Exempt when the client's own fresh network or
the last accepted one shows it; reported only where zeros are all over the network (pruning).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leakgauge.detectors._layers import matrices
from leakgauge.detectors.weights import exempt, pruned
from leakgauge.types import Detection, Received


@dataclass(frozen=True)
class FirstConv:
    """Does a filter of the first convolution copy the image?"""

    threshold: float = 1.0
    fan_in: int = 27

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None:
            return ()
        name = _first(received.model)
        for other, rows, _ in matrices(dict(received.model.named_parameters())):
            if other == name and rows.shape[1] >= self.fan_in:
                score = ratio(rows)
                if not score <= self.threshold and exempt(received, name, self.threshold, ratio):
                    return ()
                reason = (
                    f"in a filter of {name!r} one entry is {score:.3g} times as large as all "
                    "others together: it hands the image on unchanged"
                )
                thin = pruned(dict(received.model.named_parameters()))
                means: Literal["reject", "report"] = "report" if thin else "reject"
                return (Detection("first-conv", score, self.threshold, means, reason, name),)
        return ()


def ratio(rows: Tensor, bias: Tensor | None = None) -> float:
    size = rows.double().abs()
    rows, largest = size.sum(1), size.amax(1)
    ratios = largest / (rows - largest)
    return float(torch.where(rows == 0, 0.0, ratios).max())


def _first(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return f"{name}.weight" if name else "weight"
    return None
