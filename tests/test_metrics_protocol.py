"""What surrounds a score: pairing, re-identification, baselines, confidence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import TypeAlias

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from leakgauge.errors import InputError, PlanError
from leakgauge.metrics import mse, reidentified
from leakgauge.metrics.assign import best_match, optimal
from leakgauge.metrics.baselines import mean_image, random_images
from leakgauge.metrics.bootstrap import interval, median

Pairing: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, 4, 4, generator=seeded(seed))


def levels(*values: float) -> Tensor:
    """Constant grey images."""
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)


# Pairing


def test_a_shuffle_is_undone() -> None:
    truth = pictures(6)
    order = torch.randperm(6, generator=seeded())
    noise = 0.01 * torch.randn(truth.shape, generator=seeded(1))
    index = optimal(truth[order] + noise, truth)
    assert index.dtype == torch.int64
    assert torch.equal(order[index], torch.arange(6))
    assert torch.equal(best_match(truth[order] + noise, truth), index)


@pytest.mark.parametrize("guesses", [2, 4, 6])
@pytest.mark.parametrize("seed", range(3))
def test_optimal_has_the_least_total_of_all_pairings(guesses: int, seed: int) -> None:
    guess, truth = pictures(guesses, seed), pictures(4, seed + 10)
    cost = np.array([[mse(g[None], t[None]).item() for t in truth] for g in guess])
    if guesses >= 4:
        totals = [
            sum(cost[g, t] for t, g in enumerate(chosen))
            for chosen in permutations(range(guesses), 4)
        ]
    else:
        totals = [
            sum(cost[g, t] for g, t in enumerate(chosen))
            for chosen in permutations(range(4), guesses)
        ]
    index = optimal(guess, truth).tolist()
    used = [g for g in index if g >= 0]
    assert len(used) == len(set(used)) == min(guesses, 4)
    assert index.count(-1) == max(4 - guesses, 0)
    assert sum(cost[g, t] for t, g in enumerate(index) if g >= 0) == pytest.approx(min(totals))


def test_optimal_uses_a_guess_once_and_best_match_may_reuse_it() -> None:
    truth, guess = levels(0.4, 0.6), levels(0.5, 0.0)
    assert optimal(guess, truth).tolist() == [1, 0]
    assert best_match(guess, truth).tolist() == [0, 0]


def test_best_match_is_the_nearest_guess() -> None:
    guess, truth = levels(0.0, 0.3, 0.9), levels(0.2, 1.0, 0.05, 0.5)
    assert best_match(guess, truth).tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("pairing", [optimal, best_match])
def test_without_a_guess_no_truth_is_matched(pairing: Pairing) -> None:
    assert pairing(pictures(0), pictures(3)).tolist() == [-1, -1, -1]
    assert pairing(pictures(3), pictures(0)).tolist() == []


@pytest.mark.parametrize("pairing", [optimal, best_match])
def test_pairing_refuses_what_it_cannot_compare(pairing: Pairing) -> None:
    with pytest.raises(InputError, match=r"\(1, 4, 4\) and \(1, 2, 2\)"):
        pairing(pictures(2), torch.rand(2, 1, 2, 2))
    with pytest.raises(InputError, match=r"guess.*in 2 of 2 images"):
        pairing(pictures(2) * torch.nan, pictures(2))


# Re-identification


def test_a_near_guess_identifies_and_a_far_one_does_not() -> None:
    gallery = pictures(10)
    own = torch.tensor([3, 7, 1])
    guess = gallery[own] + 0.05 * torch.randn(3, 1, 4, 4, generator=seeded(1))
    guess[2] = gallery[2]
    assert reidentified(guess, own, gallery).tolist() == [1, 1, 0]


def test_identified_is_the_strict_argmin() -> None:
    gallery = pictures(20)
    guess, own = pictures(50, seed=1), torch.randint(20, (50,), generator=seeded(2))
    nearest = torch.stack([mse(g.expand_as(gallery), gallery).argmin() for g in guess])
    assert torch.equal(reidentified(guess, own, gallery).bool(), nearest == own)
    assert reidentified(guess, nearest, gallery).all()


def test_a_tie_is_no_identification() -> None:
    gallery = pictures(4)
    twice = torch.cat([gallery, gallery[:1]])
    own = torch.arange(4)
    assert reidentified(gallery, own, gallery).tolist() == [1, 1, 1, 1]
    assert reidentified(gallery, own, twice).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_lead_within_rounding_is_a_tie(seed: int) -> None:
    gallery = pictures(2, seed)
    middle = gallery.mean(0, keepdim=True).expand(2, -1, -1, -1)
    assert reidentified(middle, torch.tensor([0, 1]), gallery).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("index", "gallery", "message"),
    [
        (torch.tensor([0, 4]), pictures(4), "0 to 3.*got 4"),
        (torch.tensor([-1, 0]), pictures(4), "got -1"),
        (torch.tensor([0]), pictures(4), "2 integers"),
        (torch.tensor([0.0, 1.0]), pictures(4), "float32"),
        (torch.tensor([0, 0]), pictures(1), "at least 2 images, got 1"),
        (torch.tensor([0, 1]), torch.rand(4, 1, 2, 2), "guess and gallery"),
        (torch.tensor([0, 1]), pictures(4) * torch.nan, "gallery.*NaN"),
    ],
)
def test_reidentification_refuses_a_wrong_question(
    index: Tensor, gallery: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        reidentified(pictures(2), index, gallery)


# Baselines


def test_the_mean_image_has_the_least_mse_of_all_fixed_guesses() -> None:
    reference = pictures(8)
    mean = mean_image(reference)
    assert mean.shape == (1, 4, 4)
    assert mean.dtype == reference.dtype
    torch.testing.assert_close(mean, sum(reference) / 8)
    for other in (mean + 0.01, mean - 0.01, reference[0]):
        worse = mse(other.expand_as(reference), reference).mean()
        assert mse(mean.expand_as(reference), reference).mean() < worse


def test_random_images_are_reference_images_by_the_seed() -> None:
    reference = pictures(5)
    drawn = random_images(reference, 200, seeded(3))
    assert drawn.shape == (200, 1, 4, 4)
    which = (drawn[:, None] == reference).flatten(2).all(2)
    assert which.sum(1).eq(1).all()
    assert which.sum(0).min() > 200 / 5 / 2  # all of them are drawn, about equally often
    assert torch.equal(drawn, random_images(reference, 200, seeded(3)))
    assert not torch.equal(drawn, random_images(reference, 200, seeded(4)))


def test_baselines_refuse_a_bad_reference() -> None:
    for reference, message in ((pictures(0), "none"), (pictures(2) * torch.nan, "reference.*NaN")):
        with pytest.raises(InputError, match=message):
            mean_image(reference)
        with pytest.raises(InputError, match=message):
            random_images(reference, 1, seeded())


# Confidence


def test_median_is_that_of_numpy() -> None:
    for n in (1, 2, 5, 8):
        scores = torch.rand(3, n, generator=seeded(n), dtype=torch.float64)
        np.testing.assert_allclose(median(scores), np.median(scores.numpy(), axis=-1), rtol=1e-15)


def test_one_score_or_equal_scores_have_no_width() -> None:
    assert interval([12.5], seeded()) == (12.5, 12.5)
    assert interval([3.0] * 7, seeded()) == (3.0, 3.0)


def test_two_scores_are_a_coin() -> None:
    """The mean of two draws from {0, 1} is 0, ½, 1 with probability ¼, ½, ¼."""

    def mean(scores: Tensor) -> Tensor:
        return scores.mean(-1)

    def largest(scores: Tensor) -> Tensor:  # 0, 1 with probability ¼, ¾
        return scores.amax(-1)

    assert interval([0.0, 1.0], seeded(), level=0.40, statistic=largest) == (1.0, 1.0)
    assert interval([0.0, 1.0], seeded(), level=0.60, statistic=largest) == (0.0, 1.0)
    assert interval([0.0, 1.0], seeded(), level=0.95, statistic=mean) == (0.0, 1.0)
    assert interval([0.0, 1.0], seeded(), level=0.40, statistic=mean) == (0.5, 0.5)
    assert interval([0.0, 1.0], seeded(), level=0.60, statistic=mean) == (0.0, 1.0)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_agrees_with_scipy(level: float) -> None:
    scores = 20 + 5 * torch.randn(41, generator=seeded(), dtype=torch.float64)
    other = stats.bootstrap(
        (scores.numpy(),),
        np.median,
        confidence_level=level,
        method="percentile",
        n_resamples=20000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    low, high = interval(scores, seeded(), level=level, draws=20000)
    assert low == pytest.approx(other.low, abs=0.15)
    assert high == pytest.approx(other.high, abs=0.15)
    assert low < median(scores).item() < high


def test_covers_the_true_median_as_often_as_it_says() -> None:
    rng = seeded(5)
    hits = 0
    for _ in range(300):
        low, high = interval(torch.randn(40, generator=rng), rng, level=0.8, draws=300)
        hits += low <= 0 <= high
    assert 0.72 < hits / 300 < 0.88  # four standard errors about 0.8


def test_the_same_seed_gives_the_same_interval() -> None:
    scores = torch.rand(30, generator=seeded()).tolist()
    few = [interval(scores, seeded(seed), draws=20) for seed in (1, 1, 2, 3, 4)]
    assert few[0] == few[1]
    assert len(set(few)) == 4


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")], [float("inf")], torch.rand(2, 2)])
def test_scores_that_are_none_are_refused(scores: list[float] | Tensor) -> None:
    with pytest.raises(InputError, match="scores"):
        interval(scores, seeded())


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, float("nan")])
def test_a_level_that_is_no_share_is_refused(level: float) -> None:
    with pytest.raises(PlanError, match="level"):
        interval([1.0, 2.0], seeded(), level=level)


def test_no_draws_are_refused() -> None:
    with pytest.raises(PlanError, match="draws"):
        interval([1.0, 2.0], seeded(), draws=0)
