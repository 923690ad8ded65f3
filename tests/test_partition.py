"""Partitions: no record twice, and each skew is the skew it says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.fl import PARTITIONS
from leakgauge.fl.partition import Dirichlet, FeatureSkew, Iid, LabelSkew, QuantitySkew, roughness
from leakgauge.types import Dataset

SAMPLES = [
    Iid(),
    LabelSkew(2),
    QuantitySkew(5, 40),
    FeatureSkew(3),
    Dirichlet(0.5),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dataset(records: int = 200, classes: int = 5) -> Dataset:
    """Random images of random contrast, so that they differ in total variation."""
    rng = seeded(9)
    inputs = torch.rand(records, 1, 4, 4, generator=rng)
    inputs *= torch.rand(records, 1, 1, 1, generator=rng)
    labels = torch.randint(classes, (records,), generator=rng)
    return Dataset("random", inputs, labels, tuple(f"class {k}" for k in range(classes)))


def test_every_partition_is_sampled_here():
    assert {type(s) for s in SAMPLES} == set(PARTITIONS.values())
    for sample in SAMPLES:  # knobs, not state
        with pytest.raises(FrozenInstanceError):
            sample.alpha = 1.0


@pytest.mark.parametrize("partition", SAMPLES, ids=str)
def test_no_record_goes_to_two_clients_and_the_seed_decides(partition):
    data = dataset()
    shares = partition.split(data, 6, seeded(3))
    assert len(shares) == 6
    every = torch.cat(shares)
    assert len(every.unique()) == len(every) > 0
    assert 0 <= int(every.min()) <= int(every.max()) < len(data)
    again = partition.split(data, 6, seeded(3))
    assert all(torch.equal(a, b) for a, b in zip(shares, again, strict=True))
    other = partition.split(data, 6, seeded(4))
    assert any(not torch.equal(a, b) for a, b in zip(shares, other, strict=True))


@pytest.mark.parametrize("partition", SAMPLES, ids=str)
def test_impossible_numbers_of_clients_are_refused(partition):
    data = dataset(20)
    for clients in (0, -1, 21):
        with pytest.raises(InputError, match=f"{clients} clients cannot share the 20 records of"):
            partition.split(data, clients, seeded())


@pytest.mark.parametrize(
    "partition", [Iid(), Dirichlet(0.3), LabelSkew(2), FeatureSkew(3)], ids=str
)
def test_all_records_are_shared_out(partition):
    shares = partition.split(dataset(), 6, seeded())
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(200))


def test_iid_shares_are_equal_and_shuffled():
    data = dataset()
    shares = Iid().split(data, 6, seeded())
    assert sorted(len(s) for s in shares) == [33, 33, 33, 33, 34, 34]
    assert all((s.diff() < 0).any() for s in shares)
    overall = data.labels.bincount(minlength=5) / 200
    few = torch.stack([data.labels[s].bincount(minlength=5) / len(s) for s in shares])
    assert (few - overall).abs().max() < 0.25


@pytest.mark.parametrize("classes", [1, 2, 3, 5])
def test_label_skew_gives_a_client_only_so_many_classes(classes):
    data = dataset()
    shares = LabelSkew(classes).split(data, 10, seeded())
    held = [set(data.labels[s].tolist()) for s in shares]
    assert all(len(h) == classes for h in held)
    for label in range(5):  # its holders share a class evenly, and together hold all of it
        counts = [int((data.labels[s] == label).sum()) for s in shares]
        counts = [c for c in counts if c]
        assert sum(counts) == int((data.labels == label).sum())
        assert max(counts) - min(counts) <= 1
        assert len(counts) == 10 * classes / 5


def test_few_clients_with_label_skew_leave_classes_out():
    data = dataset()
    shares = LabelSkew(2).split(data, 2, seeded())
    assert len(set(data.labels[torch.cat(shares)].tolist())) == 4


def test_quantity_skew_rises_evenly():
    assert [len(s) for s in QuantitySkew(5, 35).split(dataset(), 4, seeded())] == [5, 15, 25, 35]
    assert [len(s) for s in QuantitySkew(5, 9).split(dataset(), 4, seeded())] == [5, 6, 8, 9]
    assert [len(s) for s in QuantitySkew(50, 50).split(dataset(), 4, seeded())] == [50] * 4
    assert [len(s) for s in QuantitySkew(5, 35).split(dataset(), 1, seeded())] == [5]


def by_loops(image: Tensor) -> float:
    """Mean absolute difference of neighbours, along the rows plus along the columns."""
    pixels = image.double().numpy()
    _, height, width = pixels.shape
    across = [
        abs(c[i, j + 1] - c[i, j]) for c in pixels for i in range(height) for j in range(width - 1)
    ]
    down = [
        abs(c[i + 1, j] - c[i, j]) for c in pixels for i in range(height - 1) for j in range(width)
    ]
    return float(np.mean(across) + np.mean(down))


def test_roughness_is_the_total_variation():
    stripes = torch.tensor([[[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]]])
    assert roughness(stripes).tolist() == [1.0]  # each step along a row, none down a column
    images = torch.rand(5, 2, 3, 4, generator=seeded())
    expected = torch.tensor([by_loops(image) for image in images])
    torch.testing.assert_close(roughness(images), expected)


def test_the_smallest_skews_are_none():
    data = dataset(20)
    assert [len(s) for s in Iid().split(data, 20, seeded())] == [1] * 20
    assert [len(s) for s in FeatureSkew(1).split(data, 4, seeded())] == [5] * 4
    assert [len(s) for s in QuantitySkew(1, 1).split(data, 20, seeded())] == [1] * 20
    assert [len(s) for s in LabelSkew(5).split(data, 1, seeded())] == [20]


@pytest.mark.parametrize("clients", [3, 7])
def test_feature_skew_ranks_clients_by_total_variation(clients):
    data = dataset()
    shares = FeatureSkew(3).split(data, clients, seeded())
    values = roughness(data.inputs)
    groups = [torch.cat([values[shares[k]] for k in range(g, clients, 3)]) for g in range(3)]
    assert [len(g) for g in groups] == [67, 67, 66]
    assert groups[0].max() <= groups[1].min()
    assert groups[1].max() <= groups[2].min()
    sizes = [len(shares[k]) for k in range(0, clients, 3)]
    assert max(sizes) - min(sizes) <= 1


def proportions(alpha: float, clients: int, seeds: int, data: Dataset) -> Tensor:
    """Shares of the classes that the clients got, (draws, clients)."""
    totals = data.labels.bincount()
    drawn = []
    for seed in range(seeds):
        shares = Dirichlet(alpha).split(data, clients, seeded(seed))
        counts = torch.stack([data.labels[s].bincount(minlength=len(totals)) for s in shares], 1)
        drawn.append(counts / totals[:, None])
    return torch.cat(drawn).double()


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 10.0])
def test_dirichlet_has_the_moments_of_its_distribution(alpha):
    drawn = proportions(alpha, 4, seeds=400, data=dataset(1000, 4))  # 1600 draws
    for values, expected in (
        (drawn, 1 / 4),
        (drawn.square().sum(1), (alpha + 1) / (4 * alpha + 1)),
    ):
        error = values.std(0) / len(values) ** 0.5
        assert ((values.mean(0) - expected).abs() < 4 * error + 1e-4).all()


def test_rounding_favours_no_client():
    pairs = Dataset(
        "pairs", torch.rand(40, 1, 2, 2), torch.arange(40) // 2, tuple("abcdefghijklmnopqrst")
    )
    drawn = proportions(1.0, 2, seeds=40, data=pairs)  # 800 draws of two records
    assert abs(float(drawn[:, 0].mean()) - 0.5) < 4 * float(drawn[:, 0].std()) / 800**0.5


def test_dirichlet_skew_grows_as_alpha_falls():
    largest = [
        float(proportions(alpha, 4, 10, dataset(1000, 4)).max(1).values.mean())
        for alpha in (100.0, 5.0, 0.5, 0.05)
    ]
    assert largest == sorted(largest)
    assert largest[0] < 0.32  # a quarter each
    assert largest[-1] > 0.85  # nearly all to one


def test_a_skew_that_the_data_cannot_give_is_refused():
    with pytest.raises(InputError, match="label skew of 6 classes per client, but random has 5"):
        LabelSkew(6).split(dataset(), 3, seeded())
    with pytest.raises(InputError, match=r"asks for 210 records in all .* random has 200: lower"):
        QuantitySkew(60, 80).split(dataset(), 3, seeded())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LabelSkew(0), "classes must be at least 1, got 0"),
        (lambda: QuantitySkew(0, 5), "1 ≤ smallest ≤ largest, got 0, 5"),
        (lambda: QuantitySkew(6, 5), "1 ≤ smallest ≤ largest, got 6, 5"),
        (lambda: FeatureSkew(0), "groups must be at least 1, got 0"),
        (lambda: Dirichlet(0.0), "alpha must be positive and finite, got 0"),
        (lambda: Dirichlet(float("nan")), "alpha must be positive and finite, got nan"),
        (lambda: Dirichlet(float("inf")), "alpha must be positive and finite, got inf"),
    ],
)
def test_bad_values_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
