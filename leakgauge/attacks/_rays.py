"""The records' maps in the space that they span: non-negative, and full of zeros.

Behind a ReLU maps are non-negative and full of zeros, mixtures of them are not. Linear programs
`min 1ᵀSq, Sq ≥ 0, (Sq)_i = 1` find them in the space S (pixels × records), and the smallest
singular vector of S on the zeros found makes them exact.

Where noise or rounding has made the space rough, zeros are what lies within it: the tolerances
follow from how rough the space is.

That zeros tell records apart is SPEAR's (Dimitrov et al., NeurIPS 2024,
https://arxiv.org/abs/2403.03945); it looks at zeros of the signals, by sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from leakgauge.errors import NotApplicable

ROUNDING = 1e-6  # share by which float32 alone makes a space rough
SAME = 1e-4  # 1 − cos of two maps below which they are one
FITS = 1e-2  # share by which a map may fail to be zero at its zeros
ZERO = 1e-4  # entries of a map below this share of its largest are its zeros
NOISY = 3e-4  # roughness from which on it is noise that hides the small activations
PROGRAMS = 12  # linear programs per record, at most
POLISHES = 5  # times that a map is solved for on its zeros
ROWS = 1500  # constraints in a linear program to begin with


def sparse_rays(
    span: Tensor, records: int, rng: torch.Generator, rough: float = ROUNDING
) -> Tensor:
    """The sparse non-negative vectors of a space (pixels × records), one per row. `rough` is by
    what share noise may have moved the vectors of the space."""
    if records == 1:
        return (span * span.sum().sign()).T
    found: list[Tensor] = []
    telling = _telling(span)
    for _ in range(PROGRAMS * records):
        left = span
        if found:  # look where what was found does not explain the space
            taken = torch.linalg.qr(torch.stack(found).T).Q
            left = span - span @ taken @ taken.T
        pick = int(torch.multinomial(left.square().sum(1), 1, generator=rng))
        start = _program(span, telling, pick, rng, rough)
        if start is None:
            continue
        ray, error = _polished(span, telling, start, rough)
        known = any(float(torch.dot(ray, other)) > 1 - max(SAME, rough**2) for other in found)
        if error < max(FITS, 3 * rough) and not known:
            found.append(ray)
        if len(found) == records:
            break
    if not found:
        raise NotApplicable("no sparse non-negative map in the space of the records' maps")
    return torch.stack([span @ ray for ray in found])


def _telling(span: Tensor) -> Tensor:
    """The entries (a mask) that are not zero in every record: at the others only rounding is left,
    whose size and sign tell nothing."""
    size = span.norm(dim=1)
    here: Tensor = size > 1e-3 * size.max()
    return here


def _program(
    span: Tensor, telling: Tensor, pick: int, rng: torch.Generator, rough: float
) -> Tensor | None:
    """min 1ᵀSq, Sq ≥ 0, (Sq)_pick = 1, by adding the constraints that are violated."""
    matrix = span.numpy()
    rows = telling.nonzero()[:, 0].numpy()
    chosen = rows[torch.randperm(len(rows), generator=rng)[:ROWS].numpy()]
    for _ in range(6):
        solved = linprog(
            matrix.sum(0),
            A_ub=-matrix[chosen],
            b_ub=np.full(len(chosen), rough),
            A_eq=matrix[pick : pick + 1],
            b_eq=np.ones(1),
            bounds=(None, None),
            method="highs",
        )
        if solved.status != 0:
            return None
        values = matrix @ solved.x
        violated = rows[values[rows] < -max(3 * rough, 10 * ROUNDING * values.max())]
        if not len(violated):
            break
        worst = violated[np.argsort(values[violated])[:ROWS]]
        chosen = np.union1d(chosen, worst)
    return torch.from_numpy(solved.x)


def _polished(span: Tensor, telling: Tensor, start: Tensor, rough: float) -> tuple[Tensor, float]:
    """The vector of the space that is smallest on the zeros of a rough one; unit length. What is
    left at a true zero is rounding or noise: an entry that stands out from the others was a small
    activation and is no longer taken for a zero."""
    ray = start / start.norm()
    error = 1.0
    values = span @ ray
    limit = max(ZERO * float(values.max()), 4 * rough * float(values.square().mean().sqrt()))
    for _ in range(POLISHES):
        values = span @ ray
        zeros = values < limit
        if int(zeros.sum()) < 2 * span.shape[1]:
            return ray, 1.0
        _, singular, right = torch.linalg.svd(span[zeros], full_matrices=False)
        error = float(singular[-1] / singular[-2])
        ray = right[-1] * (span @ right[-1]).sum().sign()
        values = span @ ray
        rounding = float(values[zeros & telling].abs().median()) if (zeros & telling).any() else 0.0
        largest = float(values.max())
        limit = min(ZERO * largest, max(20 * rounding, 1e-12 * largest))
        limit = max(limit, 5 * rounding)
    values = span @ ray
    return ray, max(error, float(-values.min() / values.max()))


def rectified(maps: Tensor, rough: float = ROUNDING) -> tuple[Tensor, Tensor]:
    """A ReLU's output without what rounding left of its zeros, which is negative as often as
    positive; and the channels in which an entry may be either. All records are judged by the worst:
    where a little of one is left in others, which is not negative, it is taken from some of them
    and added to the rest, whose zeros are then all above zero. Where noise made the maps `rough`,
    small activations cannot all be told from it: zeros are what is within its usual size."""
    flat = maps.flatten(1)
    if rough > NOISY:
        below = flat.where(flat < 0, torch.nan).square().nanmean(1).sqrt().nan_to_num()
        floor = 3 * below.view(-1, *[1] * (maps.dim() - 1))
        return maps.where(maps > floor, 0.0), torch.zeros(maps.shape[1], dtype=torch.bool)
    most = flat.max(1).values
    share = (-flat.min(1).values / most.clamp_min(1e-6 * float(most.max()))).nan_to_num().max()
    floor = (3 * share).clamp_min(1e-6) * most
    floor = floor.view(-1, *[1] * (maps.dim() - 1))
    unsure = (maps > floor / 3) & (maps < 3 * floor)
    return maps.where(maps > floor, 0.0), unsure.transpose(0, 1).flatten(1).any(1)
