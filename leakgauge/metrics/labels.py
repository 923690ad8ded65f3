"""How many labels were found: the size of the multiset intersection over the number of records.

A score means something only beside what guessing gives. `chance` is the exact expectation for
labels drawn independently from a class prior: uniform, or the frequencies of a data set.
"""

from __future__ import annotations

from scipy.special import bdtrc
from torch import Tensor

from leakgauge.errors import InputError


def multiset_accuracy(guess: Tensor, truth: Tensor, classes: int) -> float:
    """|guess ∩ truth| / |truth| as multisets: order does not matter, repeats do."""
    if guess.dim() != 1 or truth.dim() != 1 or not len(truth):
        raise InputError(
            f"labels must be vectors (N,), got {tuple(guess.shape)} and {tuple(truth.shape)}"
        )
    found = guess.bincount(minlength=classes).minimum(truth.bincount(minlength=classes)).sum()
    return float(found) / len(truth)


def chance(truth: Tensor, prior: Tensor) -> float:
    """Expected accuracy of len(truth) labels drawn independently from `prior` (C,).

    E min(n_c, m_c) = Σ_{k=1..n_c} P(m_c ≥ k) with m_c binomial.
    """
    total = len(truth)
    expected = 0.0
    for label, count in enumerate(truth.bincount(minlength=len(prior)).tolist()):
        expected += sum(float(bdtrc(k, total, float(prior[label]))) for k in range(count))
    return expected / total
