"""Smooth to sharp: its stages, the choice of the finish, and what each of them is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nouns import setting
from torch import nn

from leakgauge import metrics, models
from leakgauge.attacks import smooth_to_sharp
from leakgauge.attacks._matching import Adam, Lbfgs, Search
from leakgauge.attacks._objectives import relative_squared, squared
from leakgauge.attacks.smooth_to_sharp import (
    STRAY,
    SmoothToSharp,
    distance,
    errors_of,
    held,
    lengths,
    recovered,
    staged,
    stray,
)
from leakgauge.config import build
from leakgauge.data.digits import digits
from leakgauge.data.photos import photos
from leakgauge.errors import InputError, NotApplicable, PlanError
from leakgauge.fl.local import train
from leakgauge.records import Scale
from leakgauge.types import Batch, LocalTraining, Observation, Reconstruction, Resources


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observed(seed: int = 1) -> tuple[Observation, Batch]:
    """A digit on the sigmoid LeNet of the DLG paper: an easy case, with one solution."""
    model = models.make(
        "lenet-zhu", shape=(1, 8, 8), classes=10, init="wide-uniform", rng=seeded(seed)
    )
    data = digits()
    truth = Batch(data.inputs[seed : seed + 1], data.labels[seed : seed + 1])
    training = LocalTraining()
    update = train(setting(model, truth), truth, training, seeded()).update
    return Observation(setting(model, (1, 8, 8), 10), update, training=training, records=1), truth


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("iterations", [1, 2, 3, 7, 60, 601])
def test_stages_share_all_iterations(iterations: int) -> None:
    counts = lengths(iterations)
    assert sum(counts) == iterations
    assert all(count >= 0 for count in counts)
    assert lengths(60) == [30, 20, 10]


def test_relative_squared_is_squared_in_units_of_the_target() -> None:
    guess, target = ([torch.randn(3, 2, generator=seeded(s)).double()] for s in (1, 2))
    value, v = relative_squared([guess[0].clone()], target)
    plain, slope = squared([guess[0].clone()], target)
    norm = target[0].square().sum()
    assert torch.allclose(value, plain / norm)
    assert torch.allclose(v[0], slope[0] / norm)
    assert float(relative_squared([torch.zeros(3, 2).double()], target)[0]) == pytest.approx(1)


def test_distance_is_cosine_plus_relative_l1() -> None:
    target = [torch.tensor([3.0, 4.0]).double()]
    value, _ = distance([torch.tensor([4.0, 3.0]).double()], target)
    assert float(value) == pytest.approx(1 - 24 / 25 + 2 / 7)


# ---------------------------------------------------------------- the two parts of a run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[dict[str, Any]]]:
    """Puts a recorder in place of the loop: the search "ends" at the distance given."""

    def install(residual: float) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []

        def recorder(
            seen: Observation, distance: Any, search: Search, **options: Any
        ) -> Reconstruction:
            kept.append({"distance": distance, "search": search, **options})
            n = search.iterations
            images = torch.full((1, 1, 8, 8), 0.1 * len(kept))
            return Reconstruction(
                images, options["labels"], residual / len(kept), (2.0,) * n, (1.0,) * n,
                iterations=n, objectives=(1.0 * len(kept),), differed=0.5,
                stopped="patience" if len(kept) == 1 else "done",
                notes=(f"note {len(kept)}",),
            )  # fmt: skip

        monkeypatch.setattr(smooth_to_sharp, "match", recorder)
        return kept

    return install


def run(attack: SmoothToSharp, **resources: Any) -> Reconstruction:
    return attack.reconstruct(observed()[0], seeded(), Resources(**resources))


def test_stages_go_from_long_smooth_steps_to_short_sharp_ones(calls: Any) -> None:
    kept = calls(1.0)
    guess = run(SmoothToSharp(iterations=60, lr=0.4, tv=0.5, restarts=3))
    assert [one["search"].iterations for one in kept] == [30, 20, 10]
    assert [one["search"].restarts for one in kept] == [3, 1, 1]
    assert all(one["distance"] is distance and one["optimiser"].signed for one in kept)
    assert [one["optimiser"].lr for one in kept] == pytest.approx([0.4, 0.032, 0.004])
    weights = [prior[0][1](0.5) for prior in (one["priors"] for one in kept)]
    assert weights == pytest.approx([0.5, 0.05, 0.005])
    assert kept[0]["begin"] is None  # and then each begins where the last one ended
    assert [float(one["begin"].mean()) for one in kept[1:]] == pytest.approx([0.1, 0.2])
    assert guess.facts["finish"] == "first order"


def test_near_the_solution_the_last_stage_is_second_order(calls: Any) -> None:
    kept = calls(0.199)  # the recorder's second stage ends at half of it
    guess = run(SmoothToSharp(iterations=60, basin=0.1))
    finish = kept[2]
    assert isinstance(finish["optimiser"], Lbfgs)
    assert finish["distance"] is relative_squared
    assert finish["dtype"] == torch.float64
    assert finish["priors"] == ()
    assert float(finish["begin"].mean()) == pytest.approx(0.2)
    assert float(guess.inputs.mean()) == pytest.approx(0.3)
    assert guess.facts["finish"] == "second order"


def test_far_from_it_the_last_stage_is_first_order(calls: Any) -> None:
    kept = calls(0.201)
    run(SmoothToSharp(iterations=60, basin=0.1))
    assert isinstance(kept[2]["optimiser"], Adam)


def test_a_run_tells_of_all_stages(calls: Any) -> None:
    calls(0.6)
    guess = run(SmoothToSharp(iterations=60))
    assert len(guess.history) == len(guess.distances) == guess.iterations == 60
    assert (guess.objectives, guess.stopped, guess.differed) == ((1.0,), "patience", 0.5)
    assert guess.notes == ("note 1", "note 2", "note 3")
    assert guess.facts["search_iterations"] == 50
    assert guess.facts["search_distance"] == pytest.approx(0.3)
    assert guess.residual == pytest.approx(0.2)


def test_without_time_the_first_stage_is_the_result(calls: Any) -> None:
    kept = calls(0.01)
    guess = run(SmoothToSharp(iterations=20), seconds=0.0)
    assert len(kept) == 1
    assert guess.notes == ("note 1",)


# ---------------------------------------------------------------- on real updates


def test_the_finish_is_what_makes_it_exact() -> None:
    seen, truth = observed()
    attack = SmoothToSharp(iterations=200, basin=1.0, errors="read")
    sharp = attack.reconstruct(seen, seeded())
    plain = dataclasses.replace(attack, basin=0.0).reconstruct(seen, seeded())
    scores = [float(metrics.psnr(g.inputs, truth.inputs)) for g in (plain, sharp)]
    assert sharp.facts["search_distance"] == plain.facts["search_distance"]
    assert scores[1] > max(75, scores[0] + 5)
    assert sharp.residual < 1e-9 < plain.residual


def test_progress_counts_over_all_stages() -> None:
    seen, _ = observed()
    told: list[tuple[int, int]] = []
    SmoothToSharp(iterations=20).reconstruct(
        seen, seeded(), Resources(progress=lambda done, total, _: told.append((done, total)))
    )
    assert told == [(k, 20) for k in range(1, 21)]


def test_it_takes_models_without_a_linear_head_when_labels_are_known() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))
    truth = Batch(digits().inputs[:1], digits().labels[:1])
    training = LocalTraining()
    update = train(setting(model, truth), truth, training, seeded()).update
    seen = Observation(
        setting(model, (1, 8, 8), 10), update, training=training, records=1, labels=truth.labels
    )
    guess = SmoothToSharp(iterations=6, labels="known").reconstruct(seen, seeded())
    assert torch.equal(guess.labels, truth.labels)  # type: ignore[arg-type]


# ---------------------------------------------------------------- errors read from the last bias


def saturated(records: int, **training: Any) -> tuple[Observation, Batch]:
    """Photographs on a network with large logits: fan-in weights."""
    data = photos(size=16)
    model = models.make(
        "resnet-10",
        shape=(3, 16, 16),
        classes=5,
        init="kaiming-normal-fan-in",
        rng=seeded(1),
        width=0.25,
    )
    nn.init.normal_(model.fc.bias, generator=seeded(2))  # type: ignore[union-attr,arg-type]
    truth = Batch(data.inputs[4 : 4 + records], torch.tensor([1, 3, 3])[:records])
    local = LocalTraining(
        **{"batch_size": records, "batch_norm": "eval", "weight_decay": 0.1} | training
    )
    update = train(setting(model, truth), truth, local, seeded()).update
    seen = Observation(setting(model, (3, 16, 16), 5), update, training=local, records=records)
    return seen, truth


def softmax_minus_label(seen: Observation, truth: Batch) -> torch.Tensor:
    with torch.no_grad():
        p = seen.model.eval()(truth.inputs).softmax(1)
    return (p - nn.functional.one_hot(truth.labels, 5)) / len(truth.labels)


def test_the_error_of_one_record_is_read_exactly() -> None:
    seen, truth = saturated(1)
    torch.testing.assert_close(
        errors_of(seen, truth.labels), softmax_minus_label(seen, truth), atol=1e-5, rtol=0
    )


def test_the_errors_of_a_batch_have_the_right_sum_and_differ_by_the_labels_alone() -> None:
    seen, truth = saturated(3)
    errors, exact = errors_of(seen, truth.labels), softmax_minus_label(seen, truth)
    torch.testing.assert_close(errors.sum(0), exact.sum(0), atol=1e-5, rtol=0)
    assert not torch.allclose(errors, exact, atol=1e-2)  # the softmaxes are not equal
    torch.testing.assert_close(errors[1], errors[2])
    between = torch.tensor([-1.0, 1.0]) / 3
    torch.testing.assert_close((errors[0] - errors[1])[[1, 3]], between)


@pytest.mark.parametrize(
    ("training", "changed", "why"),
    [
        ({"steps": 2}, {}, "not one step of SGD"),
        ({"optimiser": "adam"}, {}, "not one step of SGD"),
        ({}, {"noise": 0.3}, "does not add up to zero"),
        ({}, {"scale": 0.0}, "does not add up to zero"),
    ],
)
def test_what_cannot_be_read_is_left_to_the_candidates(
    training: dict[str, Any], changed: dict[str, float], why: str
) -> None:
    seen, truth = saturated(1, **{"weight_decay": 0.0} | training)
    rng = seeded(3)
    update = {
        name: changed.get("scale", 1.0) * value
        + changed.get("noise", 0.0) * seen.training.lr * torch.randn(value.shape, generator=rng)  # type: ignore[union-attr]
        for name, value in seen.update.items()
    }
    seen = dataclasses.replace(seen, update=update, labels=truth.labels)
    attack = SmoothToSharp(iterations=3, labels="known", derivative="exact")
    guess, without = (
        dataclasses.replace(attack, errors=rule).reconstruct(seen, seeded())
        for rule in ("read", "own")
    )
    assert why in guess.facts["errors"]
    assert without.facts["errors"] == "the candidates' own"
    assert torch.equal(guess.inputs, without.inputs)
    assert held(seen, "auto", truth.labels) == (None, guess.facts["errors"])


def test_a_head_without_bias_tells_no_errors() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    truth = Batch(digits().inputs[:1], digits().labels[:1])
    training = LocalTraining()
    update = train(setting(model, truth), truth, training, seeded()).update
    seen = Observation(
        setting(model, (1, 8, 8), 10), update, training=training, records=1, labels=truth.labels
    )
    guess = SmoothToSharp(iterations=3, labels="known").reconstruct(seen, seeded())
    assert "no bias" in guess.facts["errors"]


def test_a_clipped_update_still_tells_them() -> None:
    seen, truth = saturated(1, weight_decay=0.0)
    half = dataclasses.replace(seen, update={n: v / 2 for n, v in seen.update.items()})
    torch.testing.assert_close(
        errors_of(half, truth.labels), errors_of(seen, truth.labels) / 2, atol=1e-6, rtol=0
    )


def test_errors_are_held_until_the_last_stage(calls: Any) -> None:
    kept = calls(1.0)
    guess = run(SmoothToSharp(iterations=60, errors="read"))
    assert [one["errors"] is not None for one in kept] == [True, True, False]
    assert guess.facts["errors"] == "read"


def test_with_large_logits_the_errors_that_were_read_find_the_image() -> None:
    seen, truth = saturated(1)
    found, lost = (
        metrics.psnr(
            SmoothToSharp(iterations=60, errors=rule).reconstruct(seen, seeded()).inputs,
            truth.inputs,
        )
        for rule in ("auto", "own")
    )
    assert found > lost + 2


def small(records: int, **training: Any) -> tuple[Observation, Batch]:
    """The same photographs on the same network with a head of small weights: small logits."""
    seen, truth = saturated(records, **training)
    with torch.no_grad():
        seen.model.fc.weight.mul_(0.02)  # type: ignore[union-attr,operator]
    assert seen.training is not None
    update = train(seen.setting, truth, seen.training, seeded()).update
    return dataclasses.replace(seen, update=update), truth


@pytest.mark.parametrize(
    ("case", "records", "rule", "words"),
    [
        (saturated, 1, "read", "read: errors of random images miss the one read by"),
        (small, 1, "own", "the candidates' own: errors of random images miss the one read by"),
        (small, 3, "read", "read: several records"),
    ],
)
def test_the_size_of_the_logits_chooses_between_read_and_own(
    case: Callable[[int], tuple[Observation, Batch]], records: int, rule: Any, words: str
) -> None:
    """The bias of the head is large in all: the softmax is far from even, and known."""
    seen, _ = case(records)
    attack = SmoothToSharp(iterations=3, derivative="exact")
    guess = attack.reconstruct(seen, seeded())
    chosen = dataclasses.replace(attack, errors=rule).reconstruct(seen, seeded())
    assert guess.facts["errors"].startswith(words)
    assert torch.equal(guess.inputs, chosen.inputs)


class Bright(nn.Module):
    """Ten times how much the mean of an image exceeds 0.9: nothing, for most images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * (x.mean((1, 2, 3)) - 0.9).relu()[:, None]


def test_how_far_random_images_miss_the_errors() -> None:
    """Their softmax is even and does not vary; that of a white record is not even."""
    model = nn.Sequential(Bright(), nn.Linear(1, 4))
    z = torch.tensor([2.0, -1.0, 0.5, 0.0])
    with torch.no_grad():
        model[1].weight.copy_(z[:, None])  # type: ignore[operator]
        model[1].bias.zero_()  # type: ignore[union-attr,operator]
    truth = Batch(torch.ones(1, 3, 8, 8), torch.tensor([2]))
    training = LocalTraining(lr=0.1)
    ours = setting(model, truth, 4)
    update = train(ours, truth, training, seeded()).update
    seen = Observation(ours, update, training=training, records=1)
    p = z.softmax(0)
    expected = (p - 0.25).abs().sum() / (p - torch.tensor([0.0, 0.0, 1.0, 0.0])).abs().sum()
    off = stray(seen, errors_of(seen, truth.labels)[0], truth.labels[0])
    assert off == pytest.approx(float(expected), rel=1e-4)


def test_random_images_run_in_the_modes_of_the_training() -> None:
    """A running variance that makes logits large in eval mode has no part in train mode."""
    convolution, norm, head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 5)
    model = nn.Sequential(convolution, norm, nn.Flatten(), head)
    truth = Batch(photos(size=8).inputs[:1], torch.tensor([4]))
    nn.init.normal_(convolution.weight, generator=seeded(1))
    nn.init.normal_(head.weight, std=0.003, generator=seeded(2))
    nn.init.zeros_(head.bias)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(convolution(truth.inputs).mean((0, 2, 3)).detach())
    norm.running_var.fill_(1e-4)
    found: list[float] = []
    for mode in ("train", "eval"):
        training = LocalTraining(batch_norm=mode)  # type: ignore[arg-type]
        ours = setting(model, truth, 5)
        update = train(ours, truth, training, seeded()).update
        seen = Observation(ours, update, training=training, records=1)
        found.append(stray(seen, errors_of(seen, truth.labels)[0], truth.labels[0]))
    assert found[0] < STRAY < found[1]
    assert norm.running_var.unique().tolist() == pytest.approx([1e-4])  # the model is as it was


def test_a_rule_for_errors_that_is_none_of_the_three_is_refused() -> None:
    for value in (True, False, "reed"):
        with pytest.raises(ValueError, match=f'"auto", "read" or "own", got {value!r}'):
            SmoothToSharp(errors=value)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"attack\.errors.*(known: auto, own, read|'read')"):
            build(SmoothToSharp, {"errors": value}, "attack")


# ---------------------------------------------------------------- images to begin from


def test_the_first_stage_can_begin_from_given_images(calls: Any) -> None:
    kept = calls(1.0)
    seen, _ = observed()
    begin, labels = torch.rand(1, 1, 8, 8, generator=seeded()), torch.tensor([3])
    attack = SmoothToSharp(iterations=60, restarts=3)
    told: list[int] = []
    resources = Resources(progress=lambda done, total, _: told.append(total))
    staged(attack, seen, seeded(), resources, begin=begin, labels=labels)
    assert torch.equal(kept[0]["begin"], begin)
    assert [one["search"].restarts for one in kept] == [1, 1, 1]  # all would begin alike
    assert all(torch.equal(one["labels"], labels) for one in kept)
    assert [float(one["begin"].mean()) for one in kept[1:]] == pytest.approx([0.1, 0.2])


def test_from_near_the_truth_it_ends_at_the_truth() -> None:
    seen, truth = saturated(3)
    attack = SmoothToSharp(iterations=12)
    near = (truth.inputs + 0.02 * torch.randn(truth.inputs.shape, generator=seeded())).clamp(0, 1)
    guess = staged(attack, seen, seeded(), begin=near, labels=truth.labels)
    lost = attack.reconstruct(seen, seeded())
    assert torch.equal(guess.labels, truth.labels)  # type: ignore[arg-type]
    assert (
        metrics.psnr(guess.inputs, truth.inputs).min()
        > 5 + metrics.psnr(lost.inputs, truth.inputs).max()
    )


@pytest.mark.parametrize(
    ("options", "labels", "why"),
    [
        ({}, None, "got 1 images, no labels, activations = 0"),
        ({}, torch.tensor([1, 2]), "got 1 images, 2 labels"),
        ({"activations": 0.5}, torch.tensor([1]), "activations = 0.5"),
    ],
)
def test_images_to_begin_from_need_labels_and_no_activations(
    options: dict[str, Any], labels: torch.Tensor | None, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        staged(
            SmoothToSharp(iterations=6, **options),
            observed()[0],
            seeded(),
            begin=torch.zeros(1, 1, 8, 8),
            labels=labels,
        )


# ---------------------------------------------------------------- activations read exactly


def test_recovered_activations_are_met_by_the_truth_and_by_nothing_else() -> None:
    data = photos(size=16)
    model = models.make(
        "resnet-10",
        shape=(3, 16, 16),
        classes=5,
        init="kaiming-normal-fan-out",
        rng=seeded(),
        width=0.5,
    )
    truth = Batch(data.inputs[:2], torch.tensor([3, 1]))
    training = LocalTraining(batch_size=2, batch_norm="eval")
    scaled = setting(model, truth, 5, Scale((0.5,) * 3, (0.25,) * 3))
    update = train(scaled, truth, training, seeded()).update
    seen = Observation(scaled, update, training=training, records=2)
    penalty, labels, words = recovered(seen, seeded())
    order = torch.stack([(truth.labels == label).nonzero()[0, 0] for label in labels])
    assert sorted(labels.tolist()) == [1, 3]
    assert float(penalty(truth.inputs[order])) < 1e-6
    assert float(penalty(truth.inputs[order.flip(0)])) > 0.01
    assert float(penalty(data.inputs[2:4])) > 0.01
    assert "activations" in words


def test_where_nothing_can_be_read_the_notes_say_so_and_the_search_is_the_same() -> None:
    seen, _ = observed()
    seen = dataclasses.replace(seen, training=LocalTraining(steps=2))
    with_them, without = (
        SmoothToSharp(iterations=6, activations=weight).reconstruct(seen, seeded())
        for weight in (1.0, 0.0)
    )
    assert torch.equal(with_them.inputs, without.inputs)
    assert [note for note in with_them.notes if "no activations to meet" in note]
    assert not without.notes


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_activations_that_batch_norm_ties_together_are_not_met(mode: Any) -> None:
    """In eval mode, and in either without a norm, a record's activations are its own."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24)
    layers = [nn.Conv2d(1, 24, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(864, 10)]
    truth = Batch(digits().inputs[:2], digits().labels[:2])
    training = LocalTraining(batch_size=2, batch_norm=mode)
    for model in (nn.Sequential(*layers), nn.Sequential(*[m for m in layers if m is not norm])):
        ours = setting(model, truth, 10)
        update = train(ours, truth, training, seeded()).update
        seen = Observation(ours, update, training=training, records=2)
        if mode == "train" and norm in model.children():
            with pytest.raises(NotApplicable, match="of known size"):
                recovered(seen, seeded())
        else:
            penalty, labels, _ = recovered(seen, seeded())
            order = [truth.labels.tolist().index(label) for label in labels.tolist()]
            assert float(penalty(truth.inputs[order])) < 1e-6
            assert float(penalty(truth.inputs[order[::-1]])) > 0.01


def test_the_activations_weigh_in_the_search() -> None:
    seen, truth = observed()
    plain, helped = (
        SmoothToSharp(iterations=40, activations=weight).reconstruct(seen, seeded())
        for weight in (0.0, 1.0)
    )
    assert "meets the activations" in helped.notes[0]
    assert metrics.psnr(helped.inputs, truth.inputs) > metrics.psnr(plain.inputs, truth.inputs)


def test_a_generator_moves_slowly_and_its_images_go_on_as_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, float, float]] = []
    real = smooth_to_sharp.match

    def noted(*args: Any, **given: Any) -> Reconstruction:
        weight = given["priors"][-1][1](0.0)
        calls.append((args[2].space, given["optimiser"].lr, weight))
        return real(*args, **given)

    monkeypatch.setattr(smooth_to_sharp, "match", noted)
    seen, _ = observed()
    SmoothToSharp(iterations=6, space="generator", basin=0.0).reconstruct(seen, seeded())
    names, rates, weights = zip(*calls, strict=True)
    assert names == ("generator", "pixels", "pixels")
    assert rates == pytest.approx((0.01, 0.016, 0.002))
    assert weights == pytest.approx((0.05, 0.02, 0.002))
