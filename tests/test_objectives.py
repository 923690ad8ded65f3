"""Distances between gradients: values and slopes against autograd, and who may overwrite what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from leakgauge.attacks._objectives import (
    Distance,
    by_autograd,
    cosine,
    dot,
    relative_l1,
    squared,
    weighted,
)

SHAPES = ((4, 3, 2, 2), (5,), (2, 7), ())


def gradients(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def plain_squared(guess: Tensor, target: Tensor) -> Tensor:
    return (guess - target).pow(2).sum()


def plain_cosine(guess: Tensor, target: Tensor) -> Tensor:
    return 1 - (guess * target).sum() / (guess.pow(2).sum().sqrt() * target.pow(2).sum().sqrt())


def plain_l1(guess: Tensor, target: Tensor) -> Tensor:
    return (guess - target).abs().sum()


def l1(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    parts = [(g - t).abs().sum() for g, t in zip(guess, target, strict=True)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize(
    ("distance", "plain"),
    [
        (squared, plain_squared),
        (cosine, plain_cosine),
        (by_autograd(l1), plain_l1),
        (relative_l1, lambda g, t: plain_l1(g, t) / t.abs().sum()),
        (
            weighted((2.0, cosine), (0.5, squared), (3.0, cosine)),
            lambda g, t: 5 * plain_cosine(g, t) + 0.5 * plain_squared(g, t),
        ),
    ],
    ids=["squared", "cosine", "by_autograd(l1)", "relative_l1", "weighted"],
)
def test_value_and_slope_are_those_of_autograd_on_the_formula(distance: Distance, plain) -> None:  # type: ignore[no-untyped-def]
    guess, target = gradients(0), gradients(1)
    leaf = flat(guess).requires_grad_()
    expected = plain(leaf, flat(target))
    (slope,) = torch.autograd.grad(expected, leaf)
    value, v = distance(copies(guess), target)
    assert value.dtype == torch.float64
    assert value.ndim == 0
    assert [d.shape for d in v] == [g.shape for g in guess]
    assert torch.allclose(value, expected.detach(), rtol=1e-13)
    assert torch.allclose(flat(v), slope, rtol=1e-12)


@pytest.mark.parametrize("distance", [squared, cosine, relative_l1])
def test_closed_forms_put_the_slope_where_the_guess_was_and_spare_the_target(
    distance: Distance,
) -> None:
    guess, target = gradients(0), gradients(1)
    places = [g.data_ptr() for g in guess]
    _, v = distance(guess, target)
    assert [d.data_ptr() for d in v] == places
    assert torch.equal(flat(target), flat(gradients(1)))


def test_by_autograd_leaves_guess_and_target_alone() -> None:
    guess, target = gradients(0), gradients(1)
    _, v = by_autograd(l1)(guess, target)
    for d in v:
        d.mul_(7)
    assert torch.equal(flat(guess), flat(gradients(0)))
    assert torch.equal(flat(target), flat(gradients(1)))


def test_by_autograd_hands_out_slopes_that_may_be_overwritten_one_by_one() -> None:
    """Autograd gives the two halves of a sum one and the same tensor, expanded from one number."""
    first, second = torch.zeros(3), torch.zeros(3)
    _, v = by_autograd(lambda g, t: (g[0] + g[1]).sum())([first, second], [first, second])
    v[0].mul_(5)
    assert v[0].tolist() == [5, 5, 5]
    assert v[1].tolist() == [1, 1, 1]


def test_by_autograd_gives_a_zero_slope_to_what_the_distance_ignores() -> None:
    guess, target = gradients(0), gradients(1)
    _, v = by_autograd(lambda g, t: (g[1] - t[1]).square().sum())(guess, target)
    assert torch.equal(v[1], 2 * (guess[1] - target[1]))
    assert not any(d.any() for d in (v[0], v[2], v[3]))


def test_by_autograd_works_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        value, v = by_autograd(l1)(gradients(0), gradients(1))
    assert not value.requires_grad
    assert torch.equal(flat(v), (flat(gradients(0)) - flat(gradients(1))).sign())


def test_perfect_match_has_distance_and_slope_zero() -> None:
    for distance in (squared, cosine):
        value, v = distance(gradients(0), gradients(0))
        assert abs(float(value)) < 1e-15
        assert flat(v).abs().max() < 1e-15


def test_cosine_ignores_the_length_and_sees_the_direction() -> None:
    target = gradients(1)
    longer = [3 * t for t in target]
    assert float(cosine(copies(longer), target)[0]) == pytest.approx(0, abs=1e-15)
    assert float(cosine([-t for t in target], target)[0]) == pytest.approx(2)
    assert float(squared(copies(longer), target)[0]) == pytest.approx(
        4 * float(dot(target, target))
    )


def test_cosine_of_a_vanished_gradient_is_finite() -> None:
    target = gradients(1)
    value, v = cosine([torch.zeros_like(t) for t in target], target)
    assert float(value) == 1
    assert torch.isfinite(flat(v)).all()


def test_sums_over_tensors_keep_digits_that_float32_would_lose() -> None:
    parts = [torch.tensor([1e4]), *(torch.ones(1) for _ in range(3))]
    assert float(dot(parts, parts)) == 1e8 + 3
    assert float(flat(parts).square().sum()) != 1e8 + 3  # what one float32 sum makes of it
    value, _ = squared(copies(parts), [torch.zeros(1) for _ in parts])
    assert float(value) == 1e8 + 3


def test_float32_slopes_stay_float32() -> None:
    for distance in (squared, cosine, by_autograd(l1)):
        value, v = distance(gradients(0, torch.float32), gradients(1, torch.float32))
        assert value.dtype == torch.float64
        assert {d.dtype for d in v} == {torch.float32}
