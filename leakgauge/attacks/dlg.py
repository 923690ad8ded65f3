"""DLG — L. Zhu, Z. Liu, S. Han: "Deep Leakage from Gradients", NeurIPS 2019,
https://arxiv.org/abs/1906.08935

    min_{x, y}  ‖g'(x, y) − g‖²                                                             (Eq. 4)

over images and labels together, the labels as softmax of free logits. L-BFGS with learning rate 1.

Needs: the local training and the number of records. It infers no labels beforehand.
Differs from the paper: float64 (in float32 L-BFGS stalls on the sigmoid LeNet), strong Wolfe line
search, an iteration is one evaluation of the objective, and the best iterate is returned. Use
`optimiser="adam"` for deep networks, where L-BFGS rarely moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakgauge.attacks._matching import OPTIMISERS, Search, match
from leakgauge.attacks._objectives import squared
from leakgauge.papers import Paper
from leakgauge.types import Knowledge, Observation, Reconstruction, Resources

PAPER = Paper(
    "zhu2019",
    "Zhu, Ligeng and Liu, Zhijian and Han, Song",
    "Deep Leakage from Gradients",
    2019,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/1906.08935",
    fields=(("volume", "32"),),
)


@dataclass(frozen=True)
class DLG(Search):
    """Matches gradients, guessing labels too (Zhu 2019)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 300
    lr: float = 1.0
    optimiser: Literal["lbfgs", "adam"] = "lbfgs"
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return match(
            seen,
            squared,  # Eq. 4
            self,
            labels=None,
            optimiser=OPTIMISERS[self.optimiser](lr=self.lr),
            box="none",
            dtype=torch.float64,
            rng=rng,
            resources=resources,
        )
