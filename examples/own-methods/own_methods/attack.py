"""Relative gradient matching: an example, from no paper.

    min_x  Σ|g'(x) − g| / Σ|g| + α·TV(x),   x in [0, 1]

Needs: the local training and the number of records.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks.parts import (
    Adam,
    LabelledSearch,
    by_autograd,
    constant,
    cosine_decay,
    infer,
    match,
    total_variation,
)
from leakgauge.types import Observation, Reconstruction, Resources


@dataclass(frozen=True)
class RelativeL1(LabelledSearch):
    """Matches every entry of the gradient alike."""

    lr: float = 0.05
    tv: float = 1e-3

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return match(
            seen,
            by_autograd(relative),
            self,
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, cosine_decay(), signed=True),
            rng=rng,
            resources=resources,
        )


def relative(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Σ|g' − g| / Σ|g| over all tensors."""
    off = torch.stack([(g - t).abs().sum() for g, t in zip(guess, target, strict=True)]).sum()
    return off / torch.stack([t.abs().sum() for t in target]).sum()
