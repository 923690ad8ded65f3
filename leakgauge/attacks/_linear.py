"""Linear algebra of the exact attacks: least squares, small null spaces, conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

WEAK = 0.1  # combinations of signals weaker than this share of the strongest count less
FILTER = 0.03  # eigenvalues above this are no zeros
FILTERS = 40  # times that a block of vectors is filtered, at most
DEGREE = 12  # of the polynomial
FILTERED = 1e-11  # how far from an eigenvector one may be at the end
SOLVED = 1e-9  # slope, as a share of the first, at which conjugate gradients stop


Equation: TypeAlias = tuple[Callable[[Tensor], Tensor], Tensor]
"""An affine function of the unknown activations, and what it must give."""


def least_squares(left: Tensor, right: Tensor) -> Tensor:
    """The smallest x with left·x nearest to right. By singular values: the last bits of
    torch.linalg.lstsq depend on where in memory its work space happens to lie."""
    u, values, v = torch.linalg.svd(left, full_matrices=False)
    kept = values > torch.finfo(values.dtype).eps * max(left.shape) * values[0]
    found: Tensor = v[kept].T @ ((u.T @ right)[kept] / values[kept, None])
    return found


def most(left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Least squares without the rows that stand out, which a wrong mask spoils; and the misfit."""
    keep = torch.ones(len(right), dtype=torch.bool)
    for _ in range(3):
        found = least_squares(left[keep], right[keep, None])[:, 0]
        off = (left @ found - right).abs()
        keep = off <= 10 * off.median()
    misfit = float(off[keep].norm() / right.norm().clamp_min(1e-300))
    return found, misfit


def smallest(matrix: Any, count: int) -> tuple[Any, Any]:
    """The smallest eigenvalues of a positive semi-definite matrix, of which a few are zero, and
    their vectors: subspace iteration on its inverse, which a little shift makes exist. One more
    value than are zero is an upper bound."""
    size = len(matrix)
    if size <= 4 * count + 50:
        return scipy.linalg.eigh(matrix, subset_by_index=[0, min(count, size) - 1])  # type: ignore[no-any-return]
    shift = max(1e-9 * float(np.trace(matrix)) / size, 1e-30)
    factor = scipy.linalg.cho_factor(matrix + shift * np.eye(size), check_finite=False)
    block = np.random.default_rng(0).standard_normal((size, count + 8))
    for _ in range(6):
        block = np.linalg.qr(scipy.linalg.cho_solve(factor, block, check_finite=False))[0]
    values, vectors = scipy.linalg.eigh(block.T @ (matrix @ block))
    return values[:count], (block @ vectors)[:, :count]


def smallest_of(apply: Callable[[Any], Any], size: int, count: int) -> tuple[Any, Any]:
    """`smallest` of a matrix that is only known by what it does to a block of vectors, and whose
    values lie between 0 and 1: the polynomial that is small from FILTER to 1 and large at 0,
    again and again."""
    block = np.random.default_rng(0).standard_normal((size, count + 4))
    values, vectors = np.zeros(0), block
    for _ in range(FILTERS):
        block = np.linalg.qr(block)[0]
        done = apply(block)
        values, turn = scipy.linalg.eigh(block.T @ done)
        vectors, off = block @ turn, done @ turn - block @ turn * values
        if np.linalg.norm(off[:, : count - 1], axis=0).max() < FILTERED:
            break
        before, block = vectors, _stretched(apply, vectors)
        for _ in range(DEGREE - 1):
            before, block = block, 2 * _stretched(apply, block) - before
    return values[:count], vectors[:, :count]


def _stretched(apply: Callable[[Any], Any], block: Any) -> Any:
    """By the matrix, with its values from FILTER to 1 moved to −1 to 1."""
    return (2 * apply(block) - (1 + FILTER) * block) / (1 - FILTER)


def supports(null: Tensor) -> list[Tensor]:
    """The vectors with disjoint supports and one sign each that span a space, from any orthonormal
    basis of it (entries × vectors): the rows of two entries are parallel or orthogonal."""
    length = null.norm(dim=1)
    rows = null / length[:, None].clamp_min(1e-30)
    left = length > 1e-9 * length.max()
    found = []
    while left.any():
        first = rows[int(left.nonzero()[0])]
        cosines = rows @ first
        group = left & (cosines.abs() > 0.7)
        found.append(length * cosines.sign() * group)
        left &= ~group
    return found


def whitening(signal: Tensor) -> Tensor:
    """Combinations of a signal's rows that are orthogonal and of one size, but for weak ones."""
    values, vectors = torch.linalg.eigh(signal @ signal.T)
    kept = values > 1e-14 * values[-1]
    mix: Tensor = (vectors[:, kept] / (values[kept] + WEAK**2 * values[-1]).sqrt()).T
    return mix


def solve(
    equations: list[Equation],
    begin: Tensor,
    iterations: int = 2000,
    condition: Callable[[Tensor], Tensor] = lambda slope: slope,
) -> tuple[Tensor, float]:
    """Least squares by conjugate gradients, every equation on an equal footing. `condition` does
    about what the inverse of their normal matrix does."""
    zero = torch.zeros_like(begin, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        outputs = [function(zero) for function, _ in equations]
    offsets = [output.detach() for output in outputs]
    targets = [wanted - offset for (_, wanted), offset in zip(equations, offsets, strict=True)]
    weights = [1 / target.norm().clamp_min(1e-30) for target in targets]

    def forward(value: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [
                (function(value) - offset) * weight
                for (function, _), offset, weight in zip(equations, offsets, weights, strict=True)
            ]

    def adjoint(residual: list[Tensor]) -> Tensor:
        seeds = [r * w for r, w in zip(residual, weights, strict=True)]
        return torch.autograd.grad(outputs, zero, seeds, retain_graph=True)[0]

    value = begin
    left = [target * weight for target, weight in zip(targets, weights, strict=True)]
    size = sum(float(r.square().sum()) for r in left) ** 0.5
    slope = adjoint(left)
    first = float((slope * condition(slope)).sum())
    left = [r - m for r, m in zip(left, forward(begin), strict=True)]
    slope = adjoint(left)
    step = condition(slope)
    before = float((slope * step).sum())
    for _ in range(iterations):
        moved = forward(step)
        length = before / sum(float(m.square().sum()) for m in moved)
        value = value + length * step
        left = [r - length * m for r, m in zip(left, moved, strict=True)]
        slope = adjoint(left)
        better = condition(slope)
        after = float((slope * better).sum())
        if after < SOLVED**2 * first:
            break
        step, before = better + (after / before) * step, after
    residual = sum(float(r.square().sum()) for r in left) ** 0.5 / size
    return value, residual
