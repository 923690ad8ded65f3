"""SSIM against scikit-image, against torchmetrics, and against its formula in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage import data
from skimage.metrics import structural_similarity
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from leakgauge.metrics import ssim


def pair(n: int, *shape: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(sum(shape))
    truth = torch.rand(n, *shape, generator=rng, dtype=torch.float64)
    return truth + 0.2 * torch.randn(truth.shape, generator=rng, dtype=torch.float64), truth


def by_scikit_image(guess: Tensor, truth: Tensor) -> float:
    return float(
        structural_similarity(
            guess.numpy(),
            truth.numpy(),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1,
            channel_axis=0,
        )
    )


def by_loops(guess: NDArray[np.float64], truth: NDArray[np.float64], size: int) -> float:
    """The formula, window by window and pixel by pixel."""
    half = size // 2
    weight = {
        (i, j): math.exp(-((i - half) ** 2 + (j - half) ** 2) / (2 * 1.5**2))
        for i in range(size)
        for j in range(size)
    }
    total = sum(weight.values())
    scores = []
    for x, y in zip(guess, truth, strict=True):
        for top in range(x.shape[0] - size + 1):
            for left in range(x.shape[1] - size + 1):
                values = [
                    (w / total, x[top + i, left + j], y[top + i, left + j])
                    for (i, j), w in weight.items()
                ]
                mx = sum(w * a for w, a, _ in values)
                my = sum(w * b for w, _, b in values)
                vx = sum(w * (a - mx) ** 2 for w, a, _ in values)
                vy = sum(w * (b - my) ** 2 for w, _, b in values)
                cov = sum(w * (a - mx) * (b - my) for w, a, b in values)
                scores.append(
                    (2 * mx * my + 1e-4)
                    * (2 * cov + 9e-4)
                    / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
                )
    return float(np.mean(scores))


@pytest.mark.parametrize("shape", [(1, 11, 11), (1, 28, 28), (3, 16, 16), (3, 32, 32), (2, 12, 40)])
def test_equals_scikit_image(shape: tuple[int, ...]) -> None:
    guess, truth = pair(3, *shape)
    expected = [by_scikit_image(g, t) for g, t in zip(guess, truth, strict=True)]
    assert ssim(guess, truth).tolist() == pytest.approx(expected, abs=1e-12)


def test_equals_scikit_image_on_a_photograph() -> None:
    truth = torch.from_numpy(data.astronaut() / 255.0).permute(2, 0, 1)[None, :, :128, :128]
    guess = (truth * 0.8 + 0.1).flip(1)
    assert ssim(guess, truth).item() == pytest.approx(by_scikit_image(guess[0], truth[0]), abs=1e-9)


def test_equals_torchmetrics_away_from_the_border() -> None:
    guess, truth = pair(1, 3, 32, 32)
    _, every = structural_similarity_index_measure(
        guess, truth, data_range=1.0, return_full_image=True
    )
    inside = every[..., 5:-5, 5:-5].mean().item()
    assert ssim(guess, truth).item() == pytest.approx(inside, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((1, 8, 8), 7),
        ((3, 10, 10), 9),
        ((1, 5, 20), 5),
        ((1, 20, 4), 3),
        ((2, 2, 2), 1),
        ((1, 12, 12), 11),
    ],
)
def test_small_images_get_the_largest_odd_window_that_fits(
    shape: tuple[int, ...], window: int
) -> None:
    guess, truth = pair(1, *shape)
    expected = by_loops(guess[0].numpy(), truth[0].numpy(), window)
    assert ssim(guess, truth).item() == pytest.approx(expected, abs=1e-12)


def test_identical_images_score_exactly_one() -> None:
    _, truth = pair(2, 3, 16, 16)
    assert ssim(truth, truth).tolist() == [1.0, 1.0]


def test_a_negative_scores_below_zero() -> None:
    _, truth = pair(1, 1, 16, 16)
    assert ssim(1 - truth, truth).item() < -0.5


def test_is_symmetric() -> None:
    guess, truth = pair(2, 3, 16, 16)
    torch.testing.assert_close(ssim(guess, truth), ssim(truth, guess), rtol=0, atol=1e-14)
