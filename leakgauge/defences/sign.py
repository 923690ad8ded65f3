"""Signs alone: one bit for each entry (J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar,
"signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018,
https://proceedings.mlr.press/v80/bernstein18a.html).

    u ← mean|u| · sign(u)    for each tensor, with sign(0) = 0

Differs from the paper: there the server takes the majority of the clients' signs and steps by the
learning rate alone; here each client sends its signs times their mean magnitude (the scale of
Karimireddy et al., ICML 2019), and the server takes the mean as it always does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.papers import Paper
from leakgauge.types import Answer, Here, Named, Observation

PAPER = Paper(
    "bernstein2018",
    "Bernstein, Jeremy and Wang, Yu-Xiang and Azizzadenesheli, Kamyar and Anandkumar, Animashree",
    "{signSGD}: Compressed Optimisation for Non-Convex Problems",
    2018,
    "35th International Conference on Machine Learning",
    "https://proceedings.mlr.press/v80/bernstein18a.html",
    fields=(
        ("series", "Proceedings of Machine Learning Research"),
        ("volume", "80"),
        ("pages", "560--569"),
    ),
)
SOFT = 0.3  # of the mean magnitude: below it, what an attacker takes for a sign is graded


@dataclass(frozen=True)
class Sign:
    """Sends the sign of every entry, one size for each tensor."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)

    def announced(self) -> dict[str, object]:
        return {"levels": "signs", "scale": "mean magnitude of the tensor"}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return {name: value.sign() * value.abs().mean() for name, value in update.items()}

    def answered(self, seen: Observation) -> Answer:
        """Send a candidate's update through signs that are soft enough to have a slope."""

        def soft(u: Tensor) -> Tensor:
            size = u.abs().mean().clamp_min(1e-30)
            return size * u / (u.square() + (SOFT * size).square()).sqrt()

        return Answer(
            "compares the signs, softened so that they have a slope, of its candidates' updates",
            seen.update,
            through=lambda one: {name: soft(u) for name, u in one.items()},
        )
