"""IG — J. Geiping, H. Bauermeister, H. Dröge, M. Moeller: "Inverting Gradients — How easy is it to
break privacy in federated learning?", NeurIPS 2020, https://arxiv.org/abs/2003.14053

    min_x  1 − ⟨g'(x), g⟩ / (‖g'(x)‖‖g‖) + α·TV(x),   x in [0, 1]                          (Eq. 4)

by Adam on the sign of the gradient, learning rate 0.1 divided by 10 after 3/8, 5/8 and 7/8 of the
iterations. The direction of the gradient carries the image; its length only says how well it is
learnt already.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Differs from the paper: the best iterate by the objective is returned, not the last; 500 iterations
instead of 24 000 by default; images are optimised in [0, 1], before normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import Adam, LabelledSearch, constant, match, steps
from leakgauge.attacks._objectives import cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.papers import Paper
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "geiping2020",
    "Geiping, Jonas and Bauermeister, Hartmut and Dröge, Hannah and Moeller, Michael",
    "Inverting Gradients -- How Easy Is It to Break Privacy in Federated Learning?",
    2020,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/2003.14053",
    fields=(("volume", "33"), ("pages", "16937--16947")),
)


@dataclass(frozen=True)
class InvertingGradients(LabelledSearch):
    """Matches the direction of the gradient (Geiping 2020)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    tv: float = 1e-4

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return match(
            seen,
            cosine,  # Eq. 4
            self,
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, steps(), signed=True),
            rng=rng,
            resources=resources,
        )
