"""How far a summary of scores can be trusted: the percentile bootstrap.

Efron: Bootstrap methods: another look at the jackknife, Annals of Statistics 1979,
https://doi.org/10.1214/aos/1176344552. Draw n scores with replacement, take the statistic, repeat;
the interval runs from the (1 − level)/2 to the (1 + level)/2 quantile of the statistics drawn.

Facts:
- The scores are taken as independent. Images of one batch, or of one model draw, are not: where
  you can, pass one score per trial.
- It knows only the scores it was given, so it stays inside their range, and with few of them
  (below about ten) it is too narrow. One score gives an interval of no width, not certainty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leakgauge.errors import InputError, PlanError


def median(scores: Tensor) -> Tensor:
    """The median over the last dimension: the mean of the middle two when their number is even."""
    n = scores.shape[-1]
    return scores.sort(-1).values[..., [(n - 1) // 2, n // 2]].mean(-1)


def interval(
    scores: Sequence[float] | Tensor,
    rng: torch.Generator,
    level: float = 0.95,
    draws: int = 2000,
    statistic: Callable[[Tensor], Tensor] = median,
) -> tuple[float, float]:
    """Confidence interval (low, high) of `statistic`, a reduction over the last dimension."""
    given = torch.as_tensor(scores, dtype=torch.float64, device=rng.device).detach()
    if given.dim() != 1 or len(given) == 0 or not given.isfinite().all():
        raise InputError(
            "scores: expected a flat sequence of at least one finite number, got "
            f"{given.isfinite().sum()} finite numbers in shape {tuple(given.shape)}"
        )
    if not 0 < level < 1:
        raise PlanError(f"level: expected a share between 0 and 1, got {level}; try 0.95")
    if draws < 1:
        raise PlanError(f"draws: expected at least 1, got {draws}; try 2000")
    place = torch.randint(len(given), (draws, len(given)), generator=rng, device=rng.device)
    drawn = statistic(given[place])  # (draws,)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=drawn.dtype, device=drawn.device)
    low, high = drawn.quantile(tails).tolist()
    return low, high
