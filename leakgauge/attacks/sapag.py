"""SAPAG — Y. Wang, J. Deng, D. Guo, C. Wang, X. Meng, H. Liu, C. Ding, S. Rajasekaran: "SAPAG: A
Self-Adaptive Privacy Attack From Gradients", 2020, https://arxiv.org/abs/2009.06228

    min_x  Σ_l q_l·(1 − exp(−‖g'_l(x) − g_l‖² / σ_l)) + α·TV(x)

A Gaussian kernel on every layer, as wide as the layer's gradient varies: a layer that is far off
does not drown the others. Early layers count more: q_l falls evenly from 1 to `last`.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Differs from the paper: σ_l = `width`·n_l·Var(g_l) for a tensor of n_l elements, so that the
exponent is a relative error; with Var(g_l) alone every kernel is flat from where a search starts.
A layer is a weight of two dimensions or more; one whose gradient does not vary is left out.
Adam on the sign of the gradient with a cosine schedule instead of AdamW, whose decay would pull
pixels to black; TV, which the paper lacks (`tv=0` is without); the best iterate is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import Adam, LabelledSearch, constant, match
from leakgauge.attacks._matching import cosine as cosine_schedule
from leakgauge.attacks._objectives import Distance, dot, matrices, ramp
from leakgauge.attacks._priors import total_variation
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "wang2020",
    "Wang, Yijue and Deng, Jieren and Guo, Dan and Wang, Chenghong and Meng, Xianrui and Liu, "
    "Hang and Ding, Caiwen and Rajasekaran, Sanguthevar",
    "{SAPAG}: A Self-Adaptive Privacy Attack From Gradients",
    2020,
    "arXiv:2009.06228",
    "https://arxiv.org/abs/2009.06228",
    kind="misc",
)


@dataclass(frozen=True)
class SAPAG(LabelledSearch):
    """Matches layers, those far off less (Wang 2020)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    width: float = option(4.0, POSITIVE)
    last: float = option(0.5, POSITIVE)
    tv: float = 1e-4

    def __post_init__(self) -> None:
        if self.width <= 0 or self.last <= 0:
            raise ValueError(f"width and last must be positive, got {self.width} and {self.last}")

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return match(
            seen,
            kernels(self.width, self.last),
            self,
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, cosine_schedule(), signed=True),
            rng=rng,
            resources=resources,
        )


def kernels(width: float, last: float) -> Distance:
    """D = Σ q_l(1 − e_l), e_l = exp(−‖g'_l − g_l‖²/σ_l);  v_l = 2q_l·e_l(g'_l − g_l)/σ_l.
    The q_l are scaled to sum to 1."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        torch._foreach_sub_(guess, list(target))
        layers = matrices(target)
        weights = ramp(len(layers), last)
        value = 0.0
        for k, off in enumerate(guess):
            sigma = width * target[k].numel() * float(target[k].var(correction=0))
            if k not in layers or sigma == 0:
                off.zero_()
                continue
            share = weights[layers.index(k)] / sum(weights)
            kernel = math.exp(-float(dot([off], [off])) / sigma)
            value += share * (1 - kernel)
            off.mul_(2 * share * kernel / sigma)
        return torch.tensor(value, dtype=torch.float64), guess

    return distance
