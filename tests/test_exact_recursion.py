"""Exact separation and recursion: linear algebra with known answers, and refusals in words."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakgauge import metrics, models
from leakgauge.attacks import ExactRecursion, _separation
from leakgauge.attacks._known import Peeled
from leakgauge.attacks._linear import least_squares, solve
from leakgauge.attacks._peeling import Watch, _solved, peel
from leakgauge.attacks._rays import sparse_rays
from leakgauge.attacks._separation import gradient_of, separable, separate
from leakgauge.attacks._span import common_maps, row_space, windows
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.exact_recursion import Read
from leakgauge.data import load
from leakgauge.data.photos import photos
from leakgauge.defences import ClipAndNoise, Prune
from leakgauge.errors import InputError, NotApplicable, Withheld
from leakgauge.fl import Scenario, simulate
from leakgauge.records import Scale
from leakgauge.threat import covered, observe
from leakgauge.types import Batch, LocalTraining, Observation, Resources, ThreatModel

SIZE = 16


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def federated(
    name: str,
    records: int = 1,
    *,
    seed: int = 0,
    defence: Any = None,
    training: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Observation, Batch]:
    """What a server sees of one client that trains on photographs, and the truth."""
    data = photos(size=SIZE)
    model = models.make(
        name, shape=(3, SIZE, SIZE), classes=len(data.classes), rng=seeded(seed), **options
    )
    local = LocalTraining(batch_size=records, batch_norm="eval")
    scenario = Scenario(
        lambda: model,
        data,
        replace(local, **(training or {})),
        records=records,
        defence=defence,
        scale=Scale((0.5,) * 3, (0.25,) * 3),
    )
    round_ = simulate(scenario, seeded(seed))
    return observe(round_, ThreatModel()), covered(round_, ThreatModel())


def scores(guess: Tensor, truth: Tensor) -> list[float]:
    return metrics.psnr(guess[metrics.assign.optimal(guess, truth)], truth).tolist()


def sparse_maps(records: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(records, *shape, generator=seeded(seed), dtype=torch.float64).relu()


def mixture(layer: nn.Conv2d | nn.Linear, maps: Tensor, seed: int = 1) -> Tensor:
    """A weight gradient L·A of these maps under random signals."""
    seen = windows(maps, layer).flatten(0, 1)
    outputs = layer.weight.shape[0]
    signals = torch.randn(outputs, len(seen), generator=seeded(seed), dtype=torch.float64)
    return signals @ seen


# ---------------------------------------------------------------- separation


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(60, 12), (60,)),
        (nn.Conv2d(8, 80, 3, padding=1), (8, 4, 4)),
        (nn.Conv2d(24, 80, 3), (24, 6, 6)),
    ],
)
def test_maps_are_read_from_a_mixture(layer: nn.Conv2d | nn.Linear, shape: tuple[int, ...]) -> None:
    maps = sparse_maps(4, *shape)
    positions = windows(maps, layer).shape[1]
    basis, _ = row_space(mixture(layer, maps), 4, positions)
    found = sparse_rays(common_maps(basis, layer, shape, 4)[0], 4, seeded())
    cosines = nn.functional.normalize(found, dim=1) @ nn.functional.normalize(maps.flatten(1)).T
    assert (1 - cosines.max(0).values < 1e-9).all()
    assert (cosines > 0.99).sum() == 4  # each found once


def test_dense_maps_are_not_told_apart() -> None:
    layer = nn.Linear(60, 12)
    maps = sparse_maps(4, 60) + 1.0  # positive everywhere: no zeros
    basis, _ = row_space(mixture(layer, maps), 4, 1)
    with pytest.raises(NotApplicable, match="no sparse non-negative map"):
        sparse_rays(common_maps(basis, layer, (60,), 4)[0], 4, seeded())


def test_windows_that_hardly_overlap_single_nothing_out() -> None:
    layer = nn.Conv2d(24, 80, 3, stride=2, padding=1)
    basis, _ = row_space(mixture(layer, sparse_maps(4, 24, 8, 8)), 4, 16)
    with pytest.raises(NotApplicable, match="does not single out 4 maps"):
        common_maps(basis, layer, (24, 8, 8), 4)


def test_the_rank_counts_the_records() -> None:
    layer = nn.Conv2d(8, 80, 3, padding=1)
    gradient = mixture(layer, sparse_maps(3, 8, 4, 4))
    assert row_space(gradient, 3, 16)[0].shape == (72, 48)
    with pytest.raises(NotApplicable, match="no edge after 32"):
        row_space(gradient, 2, 16)
    with pytest.raises(NotApplicable, match="5 records × 16 positions are 80 windows"):
        row_space(gradient, 5, 16)


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("hidden", [(64,), (96, 48)])
@pytest.mark.parametrize("records", [1, 5])
def test_a_perceptron_gives_up_every_image(records: int, hidden: tuple[int, ...]) -> None:
    seen, truth = federated("mlp", records, hidden=hidden)
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 80
    assert guess.labels is not None
    assert sorted(guess.labels.tolist()) == sorted(truth.labels.tolist())
    assert guess.residual < 1e-4


def test_records_beyond_the_classes_are_read_below_the_head() -> None:
    seen, truth = federated("mlp", 14, hidden=(96, 48))
    assert seen.task.count < 14
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 60
    assert guess.facts["separated_at"] == "fc2"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_residual_network_gives_up_its_image(seed: int) -> None:
    seen, truth = federated("resnet-10", seed=seed, width=0.25, init="kaiming-normal-fan-out")
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 60
    assert guess.residual < 1e-2
    assert guess.facts["separated_at"] == "layer4.0.conv2"


def test_a_layer_with_one_window_per_record_is_read() -> None:
    """Pictures of 8 × 8 leave a single position at the end of a residual network."""
    digits = load("digits")
    model = models.make("resnet-10", shape=(1, 8, 8), classes=10, width=0.25, rng=seeded())
    training = LocalTraining(batch_size=2, batch_norm="eval", lr=0.05)
    round_ = simulate(Scenario(lambda: model, digits, training), seeded())
    guess = ExactRecursion().reconstruct(observe(round_, ThreatModel()), seeded())
    assert guess.labels is not None
    assert sorted(guess.labels.tolist()) == sorted(round_.truths[0].labels.tolist())
    assert guess.facts["separation_misfit"] < 1e-5


def test_a_sigmoid_network_gives_up_a_single_image() -> None:
    seen, truth = federated("mlp", hidden=(64, 32), activation="sigmoid")
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 50


def test_activations_of_a_batch_are_exact() -> None:
    seen, truth = federated("resnet-10", 3, width=0.5, init="kaiming-normal-fan-out")
    found = separable(seen, seeded())
    trace = Trace(seen.model, seen.record.shape)
    source = next(node for node in trace.nodes if node.name == found.source.name)
    true = trace.forward((truth.inputs.double() - 0.5) / 0.25, [source])[source]
    distance = torch.cdist(found.maps.flatten(1), true.flatten(1)) / true.flatten(1).norm(dim=1)
    pairing = distance.argmin(1)
    assert sorted(pairing.tolist()) == [0, 1, 2]
    assert distance.min(1).values.max() < 1e-4
    assert found.labels.tolist() == truth.labels[pairing].tolist()


@pytest.mark.parametrize(
    "training", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"lr": 3.0}], ids=str
)
def test_one_step_is_undone_whatever_its_settings(training: dict[str, Any]) -> None:
    seen, truth = federated("mlp", 3, hidden=(64,), training=training)
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 60


def test_the_residual_of_steps_that_are_not_told_apart() -> None:
    """Without batch norm in train mode: as many steps are replayed as were taken."""
    steps = {"batch_size": 2, "steps": 2, "lr": 0.001}
    seen, truth = federated("mlp", 4, training=steps, hidden=(256,))
    read = Read(seen, seeded(), Resources())
    true = read.trace.forward(seen.record.entering(truth.inputs.double()), [read.begun.source])
    rows = [nn.functional.normalize(v) for v in (read.begun.maps, true[read.begun.source])]
    order = (rows[0] @ rows[1].T).argmax(1).tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert read.residual(truth.inputs[order], truth.labels[order]) < 0.02


def test_a_wrong_mask_is_found_and_put_right() -> None:
    seen, _ = federated("resnet-10", width=0.25, init="kaiming-normal-fan-out")
    trace, gradient = Trace(seen.model, seen.record.shape), gradient_of(seen)
    found = separate(trace, gradient, 1, seeded())
    below = next(n for n in reversed(trace.nodes[: trace.nodes.index(found.source)])
                 if trace.bent(n))  # fmt: skip
    none = {found.source: torch.zeros_like(found.unsure)}
    right = _solved(Peeled(trace, gradient, found, {found.source: found.maps}, none), below)
    spoilt = found.maps.clone()
    active = spoilt.where(spoilt > 0, torch.inf)
    smallest = active.flatten().argmin()
    spoilt.view(-1)[smallest] = 0.0
    known = {found.source: spoilt}
    mended = _solved(Peeled(trace, gradient, found, known, none), below)
    assert right is not None
    assert mended is not None
    assert known[found.source].view(-1)[smallest] > 0
    assert torch.allclose(mended[0], right[0], atol=1e-4 * float(right[0].max()))


def test_conjugate_gradients_go_on_from_what_is_there() -> None:
    matrix, wanted, begin = (
        torch.randn(*shape, generator=seeded(n)).double()
        for n, shape in enumerate([(30, 12), (12,), (12,)])
    )
    found, residual = solve([(lambda value: matrix @ value + 1, matrix @ wanted + 1)], begin, 40)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert residual < 1e-6


def test_peeling_stops_at_a_pool_and_says_so() -> None:
    seen, _ = federated("lenet-5", activation="relu", pool="max")
    trace, gradient = Trace(seen.model, seen.record.shape), gradient_of(seen)
    done = peel(trace, gradient, separate(trace, gradient, 1, seeded()), Watch(Resources(), 1))
    assert "act2" in done.stopped
    assert done.lowest.name == "pool2"


def test_peeling_stops_where_equations_are_too_few_and_says_so() -> None:
    """One record of 16 × 16 pixels, 16 outputs of 3 × 3, and a sum above whose other part is not
    known: nothing is solved for."""
    seen, _ = federated("resnet-10", width=0.25, init="kaiming-normal-fan-out")
    read = Read(seen, seeded(), Resources())
    assert read.done.lowest.name == "layer1_0_act2"
    assert "0.56 equations for each of its unknowns" in read.done.stopped


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("seed", range(4))
def test_mixtures_are_not_taken_for_records(seed: int) -> None:
    """A narrow layer has few zeros to tell four records by: right or refused, never wrong."""
    seen, truth = federated("mlp", 4, seed=seed, hidden=(24,))
    labels = truth.labels.tolist()
    with contextlib.suppress(NotApplicable):
        labels = separable(seen, seeded()).labels.tolist()
    assert sorted(labels) == sorted(truth.labels.tolist())


def test_a_mixture_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(span: Tensor, records: int, rng: torch.Generator, rough: float) -> Tensor:
        found = sparse_rays(span, records, rng, rough)
        return found + 0.2 * found.roll(1, 0)

    seen, _ = federated("mlp", 3, hidden=(64,))
    monkeypatch.setattr(_separation, "sparse_rays", mixed)
    with pytest.raises(NotApplicable, match="mixtures of records"):
        separable(seen, seeded())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"training": {"optimiser": "adam"}}, "'adam' is rescaled"),
        ({"records": 2, "activation": "gelu"}, "not from a ReLU"),
        ({"records": 2, "activation": "sigmoid"}, "not from a ReLU"),
        ({"records": 40}, "windows"),
        ({"records": 2, "defence": ClipAndNoise(epsilon=10, norm=0.1)}, "no edge"),
        ({"records": 2, "defence": Prune(share=0.9)}, "no edge"),
    ],
)
def test_it_says_why_it_cannot(options: dict[str, Any], words: str) -> None:
    options = {"width": 0.25} | options
    seen, _ = federated("resnet-10", options.pop("records", 2), **options)
    with pytest.raises(NotApplicable, match=words):
        ExactRecursion().reconstruct(seen, seeded())
    with pytest.raises(NotApplicable, match=words):
        separable(seen, seeded())


def test_modes_of_layers_that_a_model_lacks_do_not_matter() -> None:
    modes = {"batch_norm": "train", "dropout": "replayed"}
    seen, truth = federated("mlp", 2, hidden=(64,), training=modes)
    guess = ExactRecursion().reconstruct(seen, seeded())
    assert min(scores(guess.inputs, truth.inputs)) > 60


def test_dropout_is_refused() -> None:
    seen, _ = federated("mlp", hidden=(64,), training={"dropout": "replayed"})
    model = nn.Sequential(nn.Dropout(), seen.model)
    with pytest.raises(NotApplicable, match="dropout hides"):
        gradient_of(replace(seen, setting=replace(seen.setting, model=model)))


class Forks(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIZE * SIZE, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    seen, _ = federated("mlp")
    model = Forks()
    update = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    forked = replace(seen, setting=replace(seen.setting, model=model), update=update)
    with pytest.raises(NotApplicable, match=r"torch\.fx cannot trace"):
        ExactRecursion().reconstruct(forked, seeded())


@pytest.mark.parametrize("field", ["training", "records"])
def test_withheld_knowledge(field: str) -> None:
    seen, _ = federated("mlp")
    with pytest.raises(Withheld, match="'training' and 'records'"):
        ExactRecursion().reconstruct(replace(seen, **{field: None}), seeded())


def test_no_evaluations_no_attack() -> None:
    with pytest.raises(InputError, match="at least 1, got 0 and 2"):
        ExactRecursion(evaluations=0)


# ---------------------------------------------------------------- the same every time


def elsewhere(value: Tensor, offset: int) -> Tensor:
    """The same values, so many entries behind the start of a memory block."""
    block = torch.empty(value.numel() + offset, dtype=value.dtype)
    moved = block[offset:].view(value.shape)
    return moved.copy_(value)


def test_least_squares_do_not_depend_on_where_memory_lies() -> None:
    left = torch.randn(123, 77, generator=seeded(), dtype=torch.float64)
    right = torch.randn(123, 9, generator=seeded(1), dtype=torch.float64)
    found = least_squares(left, right)
    reference = torch.linalg.lstsq(left, right, driver="gelsd").solution
    assert torch.allclose(found, reference, atol=1e-12)
    for offset in range(8):
        assert torch.equal(least_squares(elsewhere(left, offset), elsewhere(right, offset)), found)


def test_least_squares_without_full_rank_take_the_smallest() -> None:
    left = torch.randn(30, 8, generator=seeded(), dtype=torch.float64)
    left[:, 5], left[:, 6] = left[:, 1], 0.0
    right = torch.randn(30, 2, generator=seeded(1), dtype=torch.float64)
    reference = torch.linalg.lstsq(left, right, driver="gelsd").solution
    assert torch.allclose(least_squares(left, right), reference, atol=1e-12)
    assert not least_squares(torch.zeros(5, 3), torch.ones(5, 1)).any()


def test_the_same_update_gives_the_same_bytes_wherever_it_lies() -> None:
    seen, _ = federated("mlp", 5, hidden=(96, 48))
    first = ExactRecursion().reconstruct(seen, seeded())
    for offset in range(1, 9):
        update = {name: elsewhere(value, offset) for name, value in seen.update.items()}
        kept = [torch.empty(97 * offset + k, dtype=torch.uint8) for k in range(40)]
        again = ExactRecursion().reconstruct(replace(seen, update=update), seeded())
        assert torch.equal(again.inputs, first.inputs)
        assert (again.residual, again.facts) == (first.residual, first.facts)
        del kept


# ---------------------------------------------------------------- resources


def test_progress_is_reported_to_the_end() -> None:
    seen, _ = federated("mlp", 2, hidden=(64, 32))
    heard: list[tuple[int, int]] = []
    resources = Resources(progress=lambda done, total, _: heard.append((done, total)))
    ExactRecursion().reconstruct(seen, seeded(), resources)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1][0] <= heard[-1][1]


def test_time_runs_out() -> None:
    seen, truth = federated("resnet-10", width=0.25)
    guess = ExactRecursion().reconstruct(seen, seeded(), Resources(seconds=0.0))
    assert any("time budget of 0 s" in note for note in guess.notes)
    assert guess.stopped == "time"
    assert guess.inputs.shape == truth.inputs.shape


def test_noise_does_not_stop_the_peeling_at_once() -> None:
    """Rows of small signals, which noise drowns, count less than those that it does not."""
    seen, _ = federated("resnet-10", 1, width=0.5)
    rng = seeded(9)
    whole = torch.cat([value.flatten() for value in seen.update.values()])
    size = 1e-5 * float(whole.square().mean().sqrt())
    moved = {n: v + size * torch.randn(v.shape, generator=rng) for n, v in seen.update.items()}
    done = Read(replace(seen, update=moved), seeded(), Resources()).done
    assert "layer2_0_act2" in [node.name for node in done.known]
