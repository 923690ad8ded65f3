"""Label scores against counting, and chance against every guess there is."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.errors import InputError
from leakgauge.metrics.labels import chance, multiset_accuracy

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("guess", "truth", "score"),
    [
        ([0, 0, 1], [0, 1, 1], 2 / 3),
        ([1, 0], [0, 1], 1.0),  # order does not matter
        ([0, 0, 0, 0], [0, 1, 2, 0], 0.5),  # repeats do
        ([2, 2], [0, 1], 0.0),
        ([0], [0, 1], 0.5),  # too few guesses
        ([], [0, 1], 0.0),
    ],
)
def test_by_hand(guess, truth, score):
    guess = torch.tensor(guess, dtype=torch.long)
    assert multiset_accuracy(guess, torch.tensor(truth), 3) == pytest.approx(score, abs=1e-12)


@given(LABELS, LABELS)
def test_equals_counting(guess, truth):
    common = sum((Counter(guess) & Counter(truth)).values())
    score = multiset_accuracy(torch.tensor(guess), torch.tensor(truth), 5)
    assert score == pytest.approx(common / len(truth), abs=1e-12)


@pytest.mark.parametrize("truth", [[0], [0, 1], [0, 0, 2], [1, 1, 1, 1], [0, 1, 2, 2]], ids=str)
@pytest.mark.parametrize(
    "prior", [[1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]], ids=str
)
def test_chance_is_the_mean_over_all_guesses(truth, prior):
    expected = 0.0
    for guess in product(range(3), repeat=len(truth)):
        probability = torch.tensor([prior[c] for c in guess], dtype=torch.float64).prod()
        score = multiset_accuracy(torch.tensor(guess), torch.tensor(truth), 3)
        expected += float(probability) * score
    prior_ = torch.tensor(prior, dtype=torch.float64)
    assert chance(torch.tensor(truth), prior_) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("classes", [10, 100])
def test_chance_is_what_random_guesses_score(classes, rng):
    prior = torch.rand(classes, generator=rng, dtype=torch.float64)
    prior /= prior.sum()
    truth = torch.multinomial(prior, 32, replacement=True, generator=rng)
    guesses = torch.multinomial(prior, 32 * 2000, replacement=True, generator=rng).view(2000, 32)
    scores = torch.tensor([multiset_accuracy(g, truth, classes) for g in guesses])
    error = float(scores.std()) / 2000**0.5
    assert abs(float(scores.mean()) - chance(truth, prior)) < 4 * error


def test_what_is_no_list_of_labels_is_refused():
    truth = torch.tensor([0, 1])
    for guess, against in ((truth[None], truth), (truth, truth[None]), (truth, truth[:0])):
        with pytest.raises(InputError, match=r"labels must be vectors \(N,\)"):
            multiset_accuracy(guess, against, 2)
