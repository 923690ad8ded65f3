"""iDLG — B. Zhao, K. R. Mopuri, H. Bilen: "iDLG: Improved Deep Leakage from Gradients", 2020,
https://arxiv.org/abs/2001.02610

    y: the class whose last-layer gradient points against its features                      (Eq. 5)
    min_x  ‖g'(x, y) − g‖²                                                                  (Eq. 6)

DLG with the label read off first, so that only the image is searched.

Needs: the local training and the number of records. Its own label rule is for one record; with
more, set `labels="counts"`.
Differs from the paper: as DLG here (float64, strong Wolfe, best iterate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakgauge.attacks._labels import ZHAO2020, LabelRule, infer
from leakgauge.attacks._matching import OPTIMISERS, LabelledSearch, match
from leakgauge.attacks._objectives import squared
from leakgauge.papers import Paper
from leakgauge.types import Observation, Reconstruction, Resources


@dataclass(frozen=True)
class IDLG(LabelledSearch):
    """Reads the label, then matches gradients (Zhao 2020)."""

    papers: ClassVar[tuple[Paper, ...]] = (ZHAO2020,)
    iterations: int = 300
    lr: float = 1.0
    labels: LabelRule = "idlg"
    optimiser: Literal["lbfgs", "adam"] = "lbfgs"

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return match(
            seen,
            squared,  # Eq. 6
            self,
            labels=infer(seen, self.labels, rng),  # Eq. 5
            optimiser=OPTIMISERS[self.optimiser](lr=self.lr),
            box="none",
            dtype=torch.float64,
            rng=rng,
            resources=resources,
        )
