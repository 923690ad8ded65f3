"""Which guess is scored against which truth.

An attack returns its guesses in no particular order, and not always as many as there are truths.
Both functions return one index into the guesses for every truth: (truths,), int64.

- `optimal`: each guess serves at most one truth; the pairing of least total MSE (the linear
  assignment problem). The default: no guess is counted twice.
- `best_match`: each truth takes its nearest guess by MSE, so one good guess may serve several
  truths. Some published evaluations do so; it can only lower the MSE, so report both.

An index of −1 marks a truth that no guess is left for (fewer guesses than truths under `optimal`,
no guess at all under either). The caller scores it with a no-information guess (`baselines`): to
drop it would reward an attack for staying silent. Surplus guesses are left unused.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakgauge.metrics.pixels import pairwise_mse


def optimal(guess: Tensor, truth: Tensor) -> Tensor:
    """The guess of each truth under the one-to-one pairing of least total MSE, −1 for none."""
    index = torch.full((len(truth),), -1)
    guesses, truths = map(torch.from_numpy, linear_sum_assignment(pairwise_mse(guess, truth)))
    index[truths] = guesses
    return index


def best_match(guess: Tensor, truth: Tensor) -> Tensor:
    """The nearest guess of each truth by MSE, the first of equals, −1 if there is no guess."""
    cost = pairwise_mse(guess, truth)  # (guesses, truths)
    return cost.argmin(0) if len(guess) else torch.full((len(truth),), -1)
