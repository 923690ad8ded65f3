"""HFGradInv — Z. Ye, W. Luo, Q. Zhou, Y. Tang: "High-Fidelity Gradient Inversion in Distributed
Learning", AAAI 2024, https://doi.org/10.1609/aaai.v38i18.29975

    min_x  1 − cos(m ⊙ g'_S(x), m ⊙ g_S) + α·TV(x),   x in [0, 1]

over a set of layers S that grows during the run, from the last layers to all of them, and a random
mask m that keeps 90 % of their elements. What the late layers say is about the whole image and easy
to match; the early layers add the detail. TV begins when S is complete.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Differs from the paper and its released code: S grows in equal steps to *all* tensors, where theirs
stops short of the first block; a mask is drawn once per stage, not once per iteration, so that each
has one objective, and the last stage has none; the image's gradient is reduced to its sign, not to
five levels; no batch-norm prior from the fifth thousand iterations on (GradInversion has one), no
label search by an evolutionary algorithm; 500 iterations instead of 15 000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import Adam, LabelledSearch, Phases, match, steps
from leakgauge.attacks._objectives import Distance, cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.papers import Paper
from leakgauge.ranges import SHARE, count, option
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "ye2024",
    "Ye, Zipeng and Luo, Wenjian and Zhou, Qi and Tang, Yubo",
    "High-Fidelity Gradient Inversion in Distributed Learning",
    2024,
    "38th AAAI Conference on Artificial Intelligence",
    "https://doi.org/10.1609/aaai.v38i18.29975",
    fields=(("pages", "19983--19991"),),
)


@dataclass(frozen=True)
class HFGradInv(LabelledSearch):
    """Matches late layers first, then all of them (Ye 2024)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 0.1
    stages: int = option(4, count(1_000))
    growth: float = option(0.25, SHARE)
    keep: float = option(0.9, SHARE)
    tv: float = 1e-4

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        if not 0 <= self.growth < 1 or not 0 < self.keep <= 1:
            raise ValueError(
                f"growth must lie in [0, 1) and keep in (0, 1], got {self.growth} and {self.keep}"
            )

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        labels = infer(seen, self.labels, rng)
        shapes = [p.shape for n, p in seen.model.named_parameters() if n in seen.update]
        distances: list[Distance] = []
        for first in layer_sets(len(shapes), self.stages)[:-1]:
            masks = [torch.rand(s, generator=rng) < self.keep for s in shapes[first:]]
            distances.append(tail(first, masks))
        distances.append(cosine)

        def stage(done: float) -> int:
            if done >= self.growth:
                return len(distances) - 1
            return int(done / self.growth * (len(distances) - 1))

        return match(
            seen,
            Phases(lambda done: distances[stage(done)]),
            self,
            labels=labels,
            priors=((total_variation, lambda done: self.tv if done >= self.growth else 0.0),),
            optimiser=Adam(self.lr, steps(), signed=True),
            rng=rng,
            resources=resources,
        )


def layer_sets(count: int, stages: int) -> list[int]:
    """The first tensor of each stage's set, which goes on to the last: ever earlier, at last 0."""
    return [count - max(1, round(count * k / stages)) for k in range(1, stages)] + [0]


def tail(first: int, masks: Sequence[Tensor]) -> Distance:
    """The cosine distance of the tensors from `first` on, where their mask is true."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept = [m.to(g.device) for m, g in zip(masks, guess[first:], strict=True)]
        ours = [g.mul_(m) for g, m in zip(guess[first:], kept, strict=True)]
        value, _ = cosine(ours, [t * m for t, m in zip(target[first:], kept, strict=True)])
        for g in guess[:first]:
            g.zero_()
        return value, guess

    return distance
