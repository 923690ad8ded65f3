"""Pixel metrics, and the contract that every entry of METRICS keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio as torchmetrics_psnr

from leakgauge import metrics
from leakgauge.errors import InputError
from leakgauge.metrics import METRICS, PSNR_CAP, affine_psnr, mse, psnr, risk

METRIC_NAMES = sorted(name for name, metric in METRICS.items() if not metric.loads)


def pictures(n: int, seed: int = 0, shape: tuple[int, int, int] = (3, 16, 16)) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def noisy(images: Tensor, sigma: float, seed: int = 1) -> Tensor:
    return images + sigma * torch.randn(
        images.shape, generator=torch.Generator().manual_seed(seed), dtype=images.dtype
    )


# The contract


def test_the_public_names_are_sorted_and_exist() -> None:
    assert metrics.__all__ == sorted(metrics.__all__)
    assert all(hasattr(metrics, name) for name in metrics.__all__)
    assert list(METRICS) == sorted(METRICS)


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_each_sample_is_scored_alone(name: str) -> None:
    truth = pictures(4)
    guess = torch.cat([noisy(truth[i : i + 1], 0.1 * (i + 1)) for i in range(4)])
    scores = METRICS[name].score(guess, truth)
    alone = torch.cat([METRICS[name].score(guess[i : i + 1], truth[i : i + 1]) for i in range(4)])
    assert scores.shape == (4,)
    assert scores.dtype == torch.float64
    assert scores.unique().numel() == 4
    torch.testing.assert_close(scores, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_more_noise_is_a_worse_score(name: str) -> None:
    truth = pictures(1)
    scores = [
        METRICS[name].score(noisy(truth, s), truth).item() for s in (0.0, 0.05, 0.1, 0.2, 0.4)
    ]
    assert scores == sorted(scores, reverse=METRICS[name].better == "higher")
    assert len(set(scores)) == 5


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_inputs_are_untouched_and_no_graph_is_kept(name: str) -> None:
    truth = pictures(2).double()  # float64 needs no conversion, so a metric could write into it
    guess = noisy(truth, 0.1).requires_grad_()
    before = guess.detach().clone(), truth.clone()
    scores = METRICS[name].score(guess, truth)
    assert not scores.requires_grad
    assert torch.equal(guess, before[0])
    assert torch.equal(truth, before[1])


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_no_samples_no_scores(name: str) -> None:
    assert METRICS[name].score(pictures(0), pictures(0)).shape == (0,)


@pytest.mark.parametrize("name", METRIC_NAMES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_no_number_is_refused(name: str, broken: float, side: int) -> None:
    pair = [pictures(3), pictures(3, seed=1)]
    pair[side][1, 0, 2, 3] = broken
    with pytest.raises(InputError, match=f"{('guess', 'truth')[side]}.*in 1 of 3 images"):
        METRICS[name].score(*pair)


@pytest.mark.parametrize("name", METRIC_NAMES)
@pytest.mark.parametrize(
    ("guess", "truth", "message"),
    [
        (pictures(2), pictures(3), r"\(2, 3, 16, 16\) and \(3, 3, 16, 16\)"),
        (pictures(2), pictures(2, shape=(1, 16, 16)), "expected one shape"),
        (pictures(1)[0], pictures(1)[0], r"expected images \(N, C, H, W\)"),
        (torch.rand(2, 3, 0, 5), torch.rand(2, 3, 0, 5), r"\(2, 3, 0, 5\)"),
        (torch.ones(1, 3, 8, 8, dtype=torch.uint8),) * 2 + ("uint8",),
    ],
)
def test_a_wrong_tensor_is_refused(name: str, guess: Tensor, truth: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        METRICS[name].score(guess, truth)


# MSE and PSNR


def test_mse_and_psnr_of_a_known_error() -> None:
    truth = torch.full((2, 3, 4, 4), 0.5)
    guess = truth + torch.tensor([0.1, -0.5]).view(2, 1, 1, 1)
    assert mse(guess, truth).tolist() == pytest.approx([0.01, 0.25], rel=1e-6)
    assert psnr(guess, truth).tolist() == pytest.approx([20.0, 20 * np.log10(2)], rel=1e-6)


def test_mse_and_psnr_agree_with_scikit_image_and_torchmetrics() -> None:
    truth, guess = pictures(5).double(), noisy(pictures(5).double(), 0.2)
    pairs = [(t.numpy(), g.numpy()) for g, t in zip(guess, truth, strict=True)]
    errors = [mean_squared_error(*pair) for pair in pairs]
    decibels = [peak_signal_noise_ratio(*pair, data_range=1) for pair in pairs]
    assert mse(guess, truth).tolist() == pytest.approx(errors, rel=1e-12)
    assert psnr(guess, truth).tolist() == pytest.approx(decibels, rel=1e-12)
    third = torchmetrics_psnr(guess, truth, data_range=1.0, dim=(1, 2, 3), reduction="none")
    torch.testing.assert_close(psnr(guess, truth), third, rtol=1e-6, atol=0)  # a float32 constant


def test_identical_images_score_the_cap_and_only_they_do() -> None:
    truth = pictures(1).double()
    assert psnr(truth, truth).item() == affine_psnr(truth, truth).item() == PSNR_CAP
    for decibels in (100, 120, 140, 149):
        error = 10 ** (-decibels / 20)
        assert psnr(truth + error, truth).item() == pytest.approx(decibels, abs=1e-3)


def test_values_outside_the_box_are_not_clamped() -> None:
    truth = torch.ones(1, 1, 4, 4)
    assert psnr(truth + 10, truth).item() == pytest.approx(-20)


# Affine PSNR


def test_affine_psnr_is_the_least_squares_fit() -> None:
    truth, guess = pictures(4).double(), noisy(0.3 * pictures(4).double() + 2, 0.1)
    for g, t, decibels in zip(guess, truth, affine_psnr(guess, truth), strict=True):
        columns = np.stack([g.numpy().ravel(), np.ones(g.numel())], axis=1)
        fit = columns @ np.linalg.lstsq(columns, t.numpy().ravel(), rcond=None)[0]
        expected = -10 * np.log10(np.mean((fit - t.numpy().ravel()) ** 2))
        assert decibels.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("a", "b"), [(0.01, 0.7), (40.0, -3.0), (-1.0, 1.0)])
def test_affine_psnr_ignores_contrast_and_brightness(a: float, b: float) -> None:
    truth = pictures(2).double()
    assert affine_psnr(a * truth + b, truth).min() > 145
    guess = noisy(truth, 0.1)
    torch.testing.assert_close(affine_psnr(a * guess + b, truth), affine_psnr(guess, truth))


def test_affine_psnr_shifts_all_channels_jointly() -> None:
    truth = pictures(1).double()
    tinted = truth * torch.tensor([1.0, 0.5, 2.0]).view(1, 3, 1, 1)
    assert affine_psnr(tinted, truth).item() < 40


@given(
    guess=st.lists(st.floats(-2, 2, width=32), min_size=12, max_size=12),
    truth=st.lists(st.floats(0, 1, width=32), min_size=12, max_size=12),
)
@settings(max_examples=200, deadline=None, database=None)
def test_the_best_fit_is_never_worse_than_the_guess_or_the_mean(
    guess: list[float], truth: list[float]
) -> None:
    g, t = (torch.tensor(v, dtype=torch.float64).view(1, 3, 2, 2) for v in (guess, truth))
    fitted = affine_psnr(g, t).item()
    assert fitted >= psnr(g, t).item() - 1e-6
    assert fitted >= psnr(t.mean().expand_as(t), t).item() - 1e-6


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0, -7.7, 1e-300])
def test_a_constant_guess_scores_as_the_mean_of_the_truth(value: float) -> None:
    truth = pictures(1).double()
    constant = torch.full_like(truth, value)
    expected = psnr(truth.mean().expand_as(truth), truth)
    torch.testing.assert_close(affine_psnr(constant, truth), expected)


def test_a_vanishing_contrast_is_still_fitted() -> None:
    truth = pictures(1).double()
    assert affine_psnr(1e-200 * truth, truth).item() > 145


def test_two_constant_images_are_the_same_up_to_brightness() -> None:
    grey = torch.full((1, 1, 5, 5), 0.3)
    assert affine_psnr(grey * 2, grey).item() == PSNR_CAP


# Between sets


def test_pairwise_mse_is_mse_of_every_pair() -> None:
    guess, truth = pictures(3), pictures(5, seed=1)
    guess[1] = truth[4]
    matrix = metrics.pairwise_mse(guess, truth)
    expected = torch.stack([mse(g.expand_as(truth), truth) for g in guess])
    assert matrix[1, 4] == 0
    torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=0)


def test_sets_of_other_image_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(3, 16, 16\) and \(3, 8, 8\)"):
        metrics.pairwise_mse(pictures(2), pictures(3, shape=(3, 8, 8)))


# Risk


@pytest.mark.parametrize(
    ("decibels", "word"),
    [
        (PSNR_CAP, "very high"),
        (20.0, "very high"),
        (np.nextafter(20, 0), "high"),
        (15.0, "high"),
        (np.nextafter(15, 0), "medium"),
        (10.0, "medium"),
        (np.nextafter(10, 0), "low"),
        (-20.0, "low"),
    ],
)
def test_a_risk_level_begins_at_its_limit(decibels: float, word: str) -> None:
    assert risk(decibels) == word


def test_nan_has_no_risk_level() -> None:
    with pytest.raises(InputError, match="NaN"):
        risk(float("nan"))
