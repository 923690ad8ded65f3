"""Label inference: exact where theory says so, never worse than guessing elsewhere."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge import data, models
from leakgauge.attacks import _labels
from leakgauge.attacks._labels import LabelRule, infer, smooth_noise
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import train
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import Batch, LocalTraining, Observation

PHOTOS = data.load("photos", size=16)
SHAPE = (3, 16, 16)


def drawn(size: int, classes: int, seed: int) -> Batch:
    """Real images with labels drawn at random, repeats included."""
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(PHOTOS), (size,), generator=rng)
    return Batch(PHOTOS.inputs[chosen], torch.randint(0, classes, (size,), generator=rng))


def observed(model: nn.Module, truth: Batch, classes: int, training: LocalTraining) -> Observation:
    rng = torch.Generator().manual_seed(0)
    update = train(model, truth, training, rng).update
    _, *shape = truth.inputs.shape
    return Observation(model, update, (shape[0], shape[1], shape[2]), classes, training, len(truth))


def accuracy(
    model: nn.Module, truth: Batch, classes: int, rule: LabelRule, training: LocalTraining
) -> float:
    seen = observed(model, truth, classes, training)
    guess = infer(seen, rule, torch.Generator().manual_seed(1))
    assert len(guess) == len(truth)
    return multiset_accuracy(guess, truth.labels, classes)


def untrained(name: str, classes: int, seed: int, **options: object) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return models.make(name, shape=SHAPE, classes=classes, rng=rng, **options)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("lenet-zhu", {}), ("resnet-10", {"width": 0.125})],
    ids=["mlp", "lenet", "resnet"],
)
def test_counts_are_exact_on_untrained_networks(
    name: str, options: dict[str, object], size: int, classes: int
) -> None:
    model = untrained(name, classes, seed=size, **options)
    training = LocalTraining(batch_size=size, batch_norm="eval")
    assert accuracy(model, drawn(size, classes, size), classes, "counts", training) == 1.0


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_counts_without_bias_beat_guessing_by_far(size: int, classes: int) -> None:
    scores, guessing = [], []
    for seed in range(4):
        model = untrained("resnet-10", classes, seed, width=0.125)
        model.get_submodule("fc").bias = None  # type: ignore[assignment]
        truth = drawn(size, classes, seed)
        training = LocalTraining(batch_size=size, batch_norm="train" if size > 1 else "eval")
        scores.append(accuracy(model, truth, classes, "counts", training))
        guessing.append(chance(truth.labels, torch.full((classes,), 1 / classes)))
    assert statistics.median(scores) >= 0.9 > max(guessing) or size == 1
    assert min(scores) >= 0.85


@pytest.mark.parametrize(
    ("lr", "momentum", "decay"), [(0.05, 0.0, 0.0), (0.01, 0.9, 0.0), (0.01, 0.9, 0.5)]
)
def test_counts_follow_several_local_steps(lr: float, momentum: float, decay: float) -> None:
    model = untrained("lenet-zhu", 10, 0)
    training = LocalTraining(lr=lr, batch_size=16, steps=6, momentum=momentum, weight_decay=decay)
    assert accuracy(model, drawn(16, 10, 3), 10, "counts", training) == 1.0


def test_counts_are_never_below_guessing_on_a_trained_network() -> None:
    digits = data.load("digits")
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    model = models.make("mlp", shape=(1, 8, 8), classes=10, rng=rng, hidden=(64,))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(model(digits.inputs[:900]), digits.labels[:900]).backward()
        optimiser.step()
    hits = model(digits.inputs[900:]).argmax(1) == digits.labels[900:]
    assert hits.float().mean() > 0.8  # it is trained indeed
    for size in (1, 4, 16, 64):
        scores, guessing = [], []
        for _ in range(8):
            chosen = torch.randint(900, len(digits), (size,), generator=rng)
            truth = Batch(digits.inputs[chosen], digits.labels[chosen])
            scores.append(accuracy(model, truth, 10, "counts", LocalTraining(batch_size=size)))
            guessing.append(chance(truth.labels, torch.full((10,), 0.1)))
        assert statistics.mean(scores) >= statistics.mean(guessing), size


@pytest.mark.parametrize("bias", [True, False])
def test_idlg_reads_the_label_of_one_record(bias: bool) -> None:
    for label in range(10):
        model = untrained("lenet-zhu", 10, label)
        if not bias:
            layer = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
            layer.bias = None  # type: ignore[assignment]
        truth = Batch(PHOTOS.inputs[label : label + 1], torch.tensor([label]))
        assert accuracy(model, truth, 10, "idlg", LocalTraining()) == 1.0


@pytest.mark.parametrize("rule", ["yin", "fedleak"])
def test_rules_by_rank_find_different_labels(rule: LabelRule) -> None:
    model = untrained("lenet-zhu", 10, 0)
    truth = Batch(PHOTOS.inputs[:4], torch.tensor([7, 0, 3, 9]))
    assert accuracy(model, truth, 10, rule, LocalTraining(batch_size=4)) == 1.0


def test_fedleak_counts_by_the_printed_formula() -> None:
    gradient = torch.tensor([[-3.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    head = _labels.Head(gradient, None, (), (), (), torch.ones(0), records=5, is_gradient=True)
    # max = 1; rows below it: (−4−2) = −6 and (0−1) = −1: shares 6/7 and 1/7 of 5, floored 4 and 0;
    # the missing one goes to the smallest row sum.
    assert _labels.fedleak(head).tolist() == [5, 0]


def test_refusals_say_what_to_do() -> None:
    model = untrained("lenet-zhu", 10, 0)
    truth = drawn(12, 10, 0)
    seen = observed(model, truth, 10, LocalTraining(batch_size=12))
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(NotApplicable, match="'counts'"):
        infer(seen, "idlg", rng)
    with pytest.raises(NotApplicable, match="at most once"):
        infer(seen, "yin", rng)
    with pytest.raises(Withheld, match="no labels"):
        infer(seen, "known", rng)
    adam = observed(model, truth, 10, LocalTraining(batch_size=12, optimiser="adam"))
    with pytest.raises(NotApplicable, match="Adam"):
        infer(adam, "counts", rng)
    assert len(infer(adam, "fedleak", rng)) == 12


def test_smooth_noise_is_smooth_and_in_range() -> None:
    images = smooth_noise((8, *SHAPE), torch.Generator().manual_seed(0))

    def roughness(x: Tensor) -> float:
        return float(x.diff(dim=-1).abs().mean() / x.std())

    assert images.min() >= 0
    assert images.max() <= 1
    assert roughness(images) < 0.7 * roughness(torch.rand(8, *SHAPE))
