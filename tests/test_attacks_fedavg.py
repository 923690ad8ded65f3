"""The FedAvg attack: what the prior and the assignment promise, and whose steps are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import models
from leakgauge.attacks import FedAvgEpochs, InvertingGradients, fedavg
from leakgauge.attacks._engine import Engine
from leakgauge.data.digits import digits
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import minibatches, train
from leakgauge.threat import observe
from leakgauge.types import (
    Batch,
    LocalTraining,
    Observation,
    Reconstruction,
    ThreatModel,
)

SHAPE = (1, 8, 8)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    return models.make(
        "mlp", shape=SHAPE, classes=10, hidden=(12,), activation="sigmoid", rng=seeded()
    )


def observed(records: int, **options: Any) -> Observation:
    model = network()
    scenario = Scenario(
        lambda: model, digits(), LocalTraining(**options), clients=2, records=records
    )
    return observe(simulate(scenario, seeded()), ThreatModel())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=seeded(seed))


# ---------------------------------------------------------------- the prior


def test_the_prior_ignores_the_order_within_an_epoch_and_nothing_else() -> None:
    prior = fedavg.agreement(3, 2, seeded())
    images = drawn(4, 2, 6, 6)
    orders = ([0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 3, 2])
    permuted = torch.cat([images[order] for order in orders])
    assert float(prior(permuted)) == pytest.approx(0, abs=1e-12)
    swapped = permuted.clone()
    swapped[[0, 4]] = swapped[[4, 0]]  # between two epochs
    assert float(prior(swapped)) > 1e-4
    other = permuted.clone()
    other[5] = drawn(2, 6, 6, seed=1)
    assert float(prior(other)) > 1e-4


@pytest.mark.parametrize("aggregate", ["mean", "amax"])
def test_both_aggregates_count(aggregate: str) -> None:
    """Two epochs of equal mean but unequal maximum are told apart, and the other way round."""
    bright, dark, grey = (torch.full((1, 6, 6), v) for v in (1.0, 0.0, 0.5))
    second = {"mean": [grey, grey], "amax": [bright, bright]}[aggregate]
    prior = fedavg.agreement(2, 1, seeded())
    sets = torch.stack([bright, dark, *second])
    same = torch.stack([bright, dark, dark, bright])
    assert float(prior(sets)) > 1e-3
    assert float(prior(same)) == pytest.approx(0, abs=1e-12)


def test_the_prior_is_the_mean_over_all_pairs_of_epochs() -> None:
    epochs, records = 3, 4
    x = drawn(epochs * records, 2, 5, 5)
    kernels = torch.randn(96, 2, 3, 3, generator=seeded(7)) / 18**0.5
    sets = nn.functional.conv2d(x, kernels, padding=1).view(epochs, records, 96, 5, 5)
    told = [torch.stack([s.mean(0), s.max(0).values]) for s in sets]
    pairs = [(a - b).square().mean() for a in told for b in told]
    expected = torch.stack(pairs).mean()
    torch.testing.assert_close(fedavg.agreement(epochs, 2, seeded(7))(x), expected)


# ---------------------------------------------------------------- the assignment


def test_the_assignment_undoes_a_permutation() -> None:
    images = drawn(5, 1, 4, 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    labels = torch.zeros(5, dtype=torch.long)
    noisy = (images[order] + 0.01 * drawn(5, 1, 4, 4, seed=1)).clamp(0, 1)
    sets = torch.stack([images, images[order], noisy])
    ordered = fedavg.aligned(sets, labels)
    assert torch.equal(ordered[0], images)
    assert torch.equal(ordered[1], images)
    assert torch.equal(ordered[2], noisy[order.argsort()])


def test_a_record_takes_the_place_of_one_with_its_label_only() -> None:
    first = torch.tensor([0.0, 1.0, 0.2, 0.8]).view(4, 1, 1, 1)
    second = torch.tensor([1.0, 0.0, 0.8, 0.2]).view(4, 1, 1, 1)  # nearest ones crosswise
    labels = torch.tensor([0, 1, 2, 2])
    ordered = fedavg.aligned(torch.stack([first, second]), labels)
    assert ordered[1].flatten().tolist() == pytest.approx([1.0, 0.0, 0.2, 0.8])


# ---------------------------------------------------------------- the replay


class Spied:
    """The observation that `match` was given, and its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        real = fedavg.match

        def spy(seen: Observation, *given: Any, **options: Any) -> Reconstruction:
            self.seen, self.options = seen, options
            self.guess = real(seen, *given, **options)
            return self.guess

        monkeypatch.setattr(fedavg, "match", spy)


def test_every_step_of_a_shuffling_client_has_its_own_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Laid out as the client really took them, its records explain the update to the last digit."""
    spied = Spied(monkeypatch)
    training = LocalTraining(
        lr=0.3, batch_size=2, epochs=3, order="shuffled", momentum=0.5, weight_decay=0.1
    )
    model, data = network().double(), digits()
    batch = Batch(data.inputs[:6].double(), data.labels[:6])
    update = train(setting(model, batch), batch, training, seeded(5)).update
    seen = Observation(setting(model, SHAPE, 10), update, training, 6, labels=batch.labels)
    guess = FedAvgEpochs(iterations=1, labels="known").reconstruct(seen, seeded())
    assert guess.inputs.shape == (6, *SHAPE)
    assert guess.facts["epochs"] == 3
    assert spied.seen.training is not None
    assert spied.seen.records == 18
    engine = Engine(spied.seen, spied.seen.training, spied.seen.records, dtype=torch.float64)
    taken = torch.cat(minibatches(6, training, seeded(5)))
    assert taken.tolist() != list(range(6)) * 3
    replayed = engine.gradient(batch.inputs[taken], batch.labels[taken])
    for ours, theirs in zip(replayed, engine.target, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_guess_is_the_mean_of_the_aligned_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Spied(monkeypatch)
    seen = observed(4, batch_size=2, epochs=2, order="shuffled")
    guess = FedAvgEpochs(iterations=3).reconstruct(seen, seeded())
    assert guess.labels is not None
    sets = spied.guess.inputs.view(2, 4, *SHAPE)
    assert torch.equal(guess.inputs, fedavg.aligned(sets, guess.labels).mean(0))
    assert torch.equal(spied.options["labels"], guess.labels.repeat(2))
    assert len(spied.options["priors"]) == 2
    assert guess.residual == spied.guess.residual


@pytest.mark.parametrize("order", ["fixed", "shuffled"])
def test_with_one_epoch_it_is_plain_matching(order: Any) -> None:
    seen = observed(3, batch_size=3, lr=0.1, order=order)
    ours = FedAvgEpochs(iterations=6).reconstruct(seen, seeded(4))
    plain = InvertingGradients(iterations=6).reconstruct(seen, seeded(4))
    assert ours.history == plain.history
    assert torch.equal(ours.inputs, plain.inputs)


@pytest.mark.parametrize(
    ("epochs", "order", "sets"),
    [
        ("auto", "fixed", 1),
        ("auto", "shuffled", 3),
        ("separate", "fixed", 3),
        ("shared", "shuffled", 1),
    ],
)
def test_epochs_are_searched_apart_where_the_client_shuffles(
    epochs: Any, order: Any, sets: int
) -> None:
    seen = observed(2, batch_size=2, epochs=3, order=order)
    guess = FedAvgEpochs(iterations=1, epochs=epochs).reconstruct(seen, seeded())
    assert guess.facts["epochs"] == sets
    assert guess.inputs.shape == (2, *SHAPE)


def test_known_labels_keep_their_place() -> None:
    seen = observed(4, batch_size=2, epochs=2, order="shuffled")
    labels = torch.tensor([3, 1, 4, 1])
    granted = Observation(**(vars(seen) | {"labels": labels}))
    guess = FedAvgEpochs(iterations=1, labels="known").reconstruct(granted, seeded())
    assert guess.labels is not None
    assert guess.labels.tolist() == [3, 1, 4, 1]


def test_epochs_are_counted_by_steps_too() -> None:
    assert fedavg.whole_epochs(6, LocalTraining(batch_size=2, steps=9)) == 3
    assert fedavg.whole_epochs(6, LocalTraining(batch_size=6, epochs=5)) == 5


@pytest.mark.parametrize(
    "training", [LocalTraining(batch_size=4, epochs=2), LocalTraining(batch_size=2, steps=4)]
)
def test_unequal_batches_and_parts_of_epochs_are_refused(training: LocalTraining) -> None:
    with pytest.raises(NotApplicable, match=r"whole epochs.*set epochs = 'shared'"):
        fedavg.whole_epochs(6, training)


def test_labels_are_dealt_out_to_the_batches() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    assert fedavg.dealt(labels, 2).view(3, 2).tolist() == [[0, 1], [0, 1], [0, 1]]
    assert torch.equal(fedavg.dealt(labels, 6), labels)
    odd = torch.tensor([0, 1, 2, 2, 5])
    assert fedavg.dealt(odd, 2).sort().values.tolist() == odd.tolist()
