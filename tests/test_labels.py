"""Label inference: exact where theory says so, never worse than guessing elsewhere."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from torch import Tensor, nn

from leakgauge import data, fl, models
from leakgauge.attacks import _labels
from leakgauge.attacks._labels import LabelRule, infer, smooth_noise
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import train
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.records import Scale
from leakgauge.types import Batch, LocalTraining, Observation, Setting

PHOTOS = data.load("photos", size=16)
SHAPE = (3, 16, 16)


def drawn(size: int, classes: int, seed: int) -> Batch:
    """Real images with labels drawn at random, repeats included."""
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(PHOTOS), (size,), generator=rng)
    return Batch(PHOTOS.inputs[chosen], torch.randint(0, classes, (size,), generator=rng))


def observed(model: nn.Module, truth: Batch, classes: int, training: LocalTraining) -> Observation:
    rng = torch.Generator().manual_seed(0)
    update = train(setting(model, truth), truth, training, rng).update
    _, *shape = truth.inputs.shape
    return Observation(
        setting(model, (shape[0], shape[1], shape[2]), classes), update, training, len(truth)
    )


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


def without_bias(model: nn.Module) -> nn.Module:
    [m for m in model.modules() if isinstance(m, nn.Linear)][-1].bias = None  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("resnet-10", {"width": 0.25}), ("vit-small", {"dim": 48, "depth": 2})],
    ids=["mlp", "resnet", "vit"],
)
def test_counts_are_exact_without_a_bias_in_the_head(
    name: str, options: dict[str, object], size: int, classes: int
) -> None:
    model = without_bias(untrained(name, classes, seed=size, **options))
    training = LocalTraining(batch_size=size, batch_norm="eval")
    assert accuracy(model, drawn(size, classes, size), classes, "counts", training) == 1.0


def test_a_bias_below_the_head_is_what_makes_them_exact() -> None:
    model = without_bias(untrained("mlp", 10, 64))
    seen = observed(model, drawn(64, 10, 64), 10, LocalTraining(batch_size=64))
    assert seen.training is not None
    head = _labels._head(seen, seen.training, 64)
    truth = drawn(64, 10, 64).labels.bincount(minlength=10)
    assert torch.equal(_labels.counts(head), truth)
    blind = replace(head.stand_ins(), below=None)
    assert not torch.equal(_labels.counts(replace(head, stand_ins=lambda: blind)), truth)


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("init", ["kaiming-normal-fan-in", "kaiming-uniform-fan-in"])
def test_counts_are_exact_where_the_softmax_depends_on_the_image(init: str, size: int) -> None:
    for classes in (10, 100):
        model = untrained("resnet-10", classes, size, width=0.25, init=init)
        truth = drawn(size, classes, size)
        spread = model.eval()(PHOTOS.inputs[:16]).softmax(1).std(0).mean()
        assert spread > 0.1 / classes
        training = LocalTraining(batch_size=size, batch_norm="eval")
        assert accuracy(model, truth, classes, "counts", training) == 1.0


def test_the_surest_count_is_rounded_first_and_corrects_the_others() -> None:
    truth = torch.tensor([7.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    common = torch.tensor([1.3, -0.9, -0.4, 0.0], dtype=torch.float64)  # one unknown, sum zero
    belief = truth + common  # which rounds to (8, 1, 4, 0)
    covariance = torch.outer(common, common) + 1e-6 * torch.eye(4).double()
    found, surprise = _labels._whole(belief, covariance, 13)
    assert found.tolist() == truth.long().tolist()
    assert surprise < 4
    assert belief.round().tolist() != truth.tolist()
    # The same belief held with certainty is contradicted by its fractions.
    _, surprise = _labels._whole(belief, 1e-6 * torch.eye(4).double(), 13)
    assert surprise == pytest.approx((0.3**2 + 0.1**2 + 0.4**2) / _labels.TRUST, rel=1e-3)
    # Counts are not negative.
    found, surprise = _labels._whole(truth - 3, 1e-6 * torch.eye(4).double(), 13)
    assert found.tolist() == [4, 0, 1, 0]
    assert surprise == pytest.approx((1 + 9) / _labels.TRUST, rel=1e-3)


class Twice(nn.Module):
    """Three layers with a bias below the head: one run twice, one idle, and one for us."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.shared = nn.Linear(5, 5)
        self.idle = nn.Linear(5, 5)
        self.fc = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.first(x)).mean((2, 3))
        h = self.shared(torch.tanh(self.shared(h)))
        self.idle(h)
        return self.fc(h)


def test_slopes_are_the_derivatives_by_the_last_bias_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.rand(3, *SHAPE)
    name, slopes = _labels._slopes(model, dict(model.named_parameters()), x, "fc")
    assert name == "first.bias"
    for i in range(3):
        for c in range(4):
            (expected,) = torch.autograd.grad(model(x[i : i + 1])[0, c], model.first.bias)
            assert torch.allclose(slopes[i, c], expected.double(), rtol=1e-4, atol=1e-8)
    assert _labels._slopes(model.fc, {}, torch.rand(3, 5), "")[0] is None  # no bias below it


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


def never() -> _labels.StandIns:
    raise AssertionError("the network was run")


def test_fedleak_counts_by_the_printed_formula() -> None:
    gradient = torch.tensor([[-3.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    head = _labels.Head(gradient, None, 5, is_gradient=True, even=True, stand_ins=never)
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


@pytest.mark.parametrize(
    "training",
    [LocalTraining(batch_size=12), LocalTraining(batch_size=6, steps=2, momentum=0.9)],
    ids=["one step", "two steps"],
)
def test_separated_labels_hold_repeats_under_train_mode_batch_norm(
    training: LocalTraining,
) -> None:
    model = untrained("resnet-10", 10, 3, width=0.5)
    labels = torch.tensor([7, 7, 7, 2, 2, 9, 9, 9, 9, 9, 0, 1])
    truth = replace(drawn(12, 10, 3), labels=labels)
    seen = observed(model, truth, 10, training)
    guess = infer(seen, "separated", torch.Generator().manual_seed(1))
    assert guess.tolist() == sorted(labels.tolist())


def test_separated_labels_are_refused_with_the_reason() -> None:
    model = untrained("resnet-10", 10, 3, width=0.125)
    seen = observed(model, drawn(32, 10, 0), 10, LocalTraining(batch_size=32))
    with pytest.raises(NotApplicable, match=r"can span at most .* use the rule 'counts'"):
        infer(seen, "separated", torch.Generator().manual_seed(0))


def test_smooth_noise_is_smooth_and_in_range() -> None:
    images = smooth_noise((8, *SHAPE), torch.Generator().manual_seed(0))

    def roughness(x: Tensor) -> float:
        return float(x.diff(dim=-1).abs().mean() / x.std())

    assert images.min() >= 0
    assert images.max() <= 1
    assert roughness(images) < 0.7 * roughness(torch.rand(8, *SHAPE))


# ---------------------------------------------------------------- how often the network is run


class Counted(nn.Module):
    """Counts the images that pass through all its copies."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.passed: list[int] = []

    def __deepcopy__(self, memo: Any) -> Counted:
        twin = Counted(copy.deepcopy(self.inner, memo))
        twin.passed = self.passed
        return twin

    def forward(self, x: Tensor) -> Tensor:
        self.passed.append(len(x))
        return self.inner(x)


def passing(seen: Observation, rule: LabelRule, seed: int = 1) -> tuple[list[int], int]:
    """The labels found, and how many stand-ins went through the network for them."""
    model = seen.model
    assert isinstance(model, Counted)
    model.passed.clear()
    found = infer(seen, rule, torch.Generator().manual_seed(seed))
    return found.tolist(), sum(n for n in model.passed if n > 2)  # two find the last layer


def doubtful(seed: int = 0, lr: float = 0.01) -> Observation:
    """Sixteen records of ten classes: the bias alone does not tell."""
    model = Counted(untrained("lenet-zhu", 10, 0))
    return observed(model, drawn(16, 10, seed), 10, LocalTraining(lr=lr, batch_size=16))


def scaled(setting: Setting, scale: Scale) -> Setting:
    return fl.setting(setting.model, setting.record.shape, setting.task.count, scale)


def test_attacks_on_one_update_share_what_the_stand_ins_say() -> None:
    first = doubtful()
    labels, ran = passing(first, "counts")
    assert ran == _labels.STAND_INS
    # Another attack holds its own copy of the observation, and draws from its own generator.
    again = replace(first, update={n: u.clone() for n, u in first.update.items()},
                    setting=copy.deepcopy(first.setting))  # fmt: skip
    assert passing(again, "counts", seed=2) == (labels, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda seen: doubtful(seed=1),
        lambda seen: doubtful(lr=0.02),
        lambda seen: replace(seen, records=32, training=replace(seen.training, batch_size=32)),
        lambda seen: replace(seen, setting=scaled(seen.setting, Scale((0.5,)))),
        lambda seen: replace(seen, update={n: u.clone() for n, u in seen.update.items()}
                             | {"inner.body.0.bias": torch.zeros(12)}),
    ],
    ids=["records", "lr", "number", "normalisation", "one tensor"],
)  # fmt: skip
def test_another_update_is_never_answered_from_memory(
    change: Callable[[Observation], Observation],
) -> None:
    seen = doubtful()
    assert change(seen).update.keys() == seen.update.keys()
    passing(seen, "counts")
    other, ran = passing(change(seen), "counts")
    assert ran == _labels.STAND_INS
    _labels._LAST.clear()
    assert passing(change(seen), "counts")[0] == other


def test_a_changed_weight_is_not_answered_from_memory() -> None:
    seen = doubtful()
    passing(seen, "counts")
    with torch.no_grad():
        next(seen.model.parameters()).view(-1)[0] += 0.01
    assert passing(seen, "counts")[1] == _labels.STAND_INS


def test_what_ran_before_changes_neither_labels_nor_what_is_drawn_after_them() -> None:
    states = []
    for before in ((), (doubtful(3),), (doubtful(),)):
        for seen in before:
            infer(seen, "counts", torch.Generator().manual_seed(9))
        rng = torch.Generator().manual_seed(1)
        labels = infer(doubtful(), "counts", rng)
        states.append((labels.tolist(), rng.get_state().tolist()))
    assert states[0] == states[1] == states[2]
    # As if the stand-ins had been drawn from it, as they once were.
    rng = torch.Generator().manual_seed(1)
    smooth_noise((_labels.STAND_INS, *SHAPE), rng)
    assert rng.get_state().tolist() == states[0][1]


@pytest.mark.parametrize("rule", ["idlg", "yin", "fedleak"])
def test_rules_by_rank_need_no_network(rule: LabelRule) -> None:
    model = Counted(without_bias(untrained("lenet-zhu", 10, 0)))
    seen = observed(model, drawn(1, 10, 0), 10, LocalTraining())
    assert passing(seen, rule)[1] == 0


@pytest.mark.parametrize(
    ("size", "training"),
    [
        (1, LocalTraining()),
        (7, LocalTraining(batch_size=7)),
        (8, LocalTraining(lr=0.05, batch_size=8, steps=4, momentum=0.9, weight_decay=0.1)),
        (8, LocalTraining(lr=0.05, batch_size=2, epochs=2, order="shuffled")),
    ],
    ids=["one", "seven", "momentum", "epochs"],
)
def test_no_network_is_run_where_the_bias_tells(size: int, training: LocalTraining) -> None:
    """More classes than records, so that Σ_i p_ic stays below one for every class."""
    truth = drawn(size, 100, size)
    seen = observed(Counted(untrained("lenet-zhu", 100, size)), truth, 100, training)
    assert passing(seen, "counts") == (truth.labels.sort().values.tolist(), 0)


def test_what_the_bias_tells_is_true_of_networks_that_are_sure_of_themselves_too() -> None:
    told = 0
    for seed in range(20):
        inner = untrained("mlp", 10, seed, init="wide-uniform")
        assert inner(PHOTOS.inputs[:32]).softmax(1).max(1).values.mean() > 0.5
        truth = drawn(4, 10, seed)
        seen = observed(Counted(inner), truth, 10, LocalTraining(batch_size=4))
        labels, ran = passing(seen, "counts")
        if ran == 0:
            told += 1
            assert labels == truth.labels.sort().values.tolist()
        one = Batch(truth.inputs[:1], truth.labels[:1])  # one record is always told
        seen = observed(Counted(inner), one, 10, LocalTraining())
        assert passing(seen, "counts") == (one.labels.tolist(), 0)
    assert 0 < told < 20


def test_the_bias_tells_nothing_where_records_count_unevenly() -> None:
    """Five records in batches of two: the last one counts twice as much."""
    model = Counted(untrained("lenet-zhu", 10, 0))
    truth = Batch(PHOTOS.inputs[:5], torch.tensor([1, 2, 3, 4, 4]))
    seen = observed(model, truth, 10, LocalTraining(batch_size=2, epochs=1))
    assert passing(seen, "counts")[1] == 3 * _labels.STAND_INS
    gradient = torch.tensor([-0.35, -0.35, 0.7], dtype=torch.float64)
    head = _labels.Head(
        gradient[:, None], gradient, 2, is_gradient=True, even=True, stand_ins=never
    )
    assert _labels.counts(head).tolist() == [1, 1, 0]
    with pytest.raises(AssertionError, match="was run"):
        _labels.counts(replace(head, even=False))
    with pytest.raises(AssertionError, match="was run"):  # one record is left open
        _labels.counts(replace(head, records=3, bias_gradient=gradient / 3 * 2))
