"""Separation under ordinary training, held against a replay by torch.optim.

Every case is exact: batch norm in train mode, repeated labels, weights instead of updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from observed_client import (
    EXACT,
    SCALE,
    Client,
    chain,
    client,
    compared,
    noisy,
    normal,
    one_step,
    resnet,
    right,
    rounded,
    seeded,
    separated,
)
from torch import nn

from leakgauge.attacks._linear import smallest
from leakgauge.attacks._rays import _polished, rectified
from leakgauge.attacks._separation import _check, separable
from leakgauge.attacks._span import common_maps, row_space, windows
from leakgauge.data.photos import photos
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.threat import observe
from leakgauge.types import (
    LocalTraining,
    ThreatModel,
)


def test_a_batch_under_train_mode_batch_norm_is_read_exactly() -> None:
    one, found = one_step()
    assert found.layer.target == "layer4.0.conv2"
    assert found.misfit < 1e-5
    right(one, found)


def test_the_signals_are_those_of_the_loss() -> None:
    """At the top, before the last ReLU, in their size: not only their direction."""
    one, found = one_step()
    trace = one.trace()
    top = trace.named(found.top.name)
    (rows,) = one.rows()
    inner = trace.forward(one.entering(rows), [top])[top].requires_grad_()
    (above,) = top.users
    with torch.enable_grad():
        logits = trace.affine(trace.output, {above: inner.relu()}, {})
        loss = nn.functional.cross_entropy(logits, one.batch.labels[rows])
    (signal,) = torch.autograd.grad(loss, inner)
    (pair,) = compared(found, found.maps, one.truth(found.source.name))
    assert float((found.signal - signal[pair]).norm() / signal.norm()) < EXACT


def test_a_client_that_sends_weights() -> None:
    """The difference of two float32 weights has fewer digits."""
    one = client(resnet(), 4, sends="weights")
    found = separated(one)
    pairs = compared(found, found.maps, one.truth(found.source.name))
    assert found.labels.tolist() == one.batch.labels[pairs[0]].tolist()


def test_repeated_labels() -> None:
    one = client(resnet(), 4, label=3)
    found = separated(one)
    assert found.labels.tolist() == [3] * 4
    right(one, found)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"records": 3, "batch_size": 3}, "no edge after 47"),
        ({"records": 5, "batch_size": 5}, "no edge after 79"),
        ({"records": 4, "batch_size": 2, "epochs": 1}, "no edge after 62|form steps of"),
        ({"records": 8, "batch_size": 4, "steps": 2}, "no edge after 126"),
    ],
    ids=["fewer", "more", "steps", "more-steps"],
)
def test_a_wrong_number_of_records_or_steps_is_refused(told: dict[str, Any], words: str) -> None:
    one, _ = one_step()
    with pytest.raises(NotApplicable, match=words):
        separable(one.told(**told), seeded())


@pytest.mark.parametrize(
    ("spoil", "apart"),
    [
        (lambda one: noisy(one, 1e-4), 1e-6),
        (lambda one: noisy(one, 1e-2), 1e-3),
        (lambda one: rounded(one, 12), 1e-5),
        (lambda one: rounded(one, 8), 1e-3),
    ],
    ids=["noise 1e-4", "noise 1e-2", "12 bits", "8 bits"],
)
def test_a_rough_update_still_tells_records_apart(
    spoil: Callable[[Client], Client], apart: float
) -> None:
    one, _ = one_step()
    found = separated(spoil(one))
    (truth,) = one.truth(found.source.name)
    maps, true = (nn.functional.normalize(v.flatten(1)) for v in (found.maps, truth))
    cosines = maps @ true.T
    pair = cosines.argmax(1)
    assert sorted(pair.tolist()) == list(range(len(truth)))
    assert float(1 - cosines.max(1).values.min()) < apart
    assert found.labels.tolist() == one.batch.labels[pair].tolist()
    assert found.rough > 1e-4  # and says that it is not exact


def test_noise_as_large_as_the_weakest_window_is_refused() -> None:
    one, _ = one_step()
    with pytest.raises(NotApplicable, match="no edge after 63"):
        separated(noisy(one, 0.3))


def test_an_aggregate_of_clients_is_not_taken_for_one_batch() -> None:
    """Each normalises its own batch: nothing is read rather than something wrong."""
    data = photos(size=32)
    scenario = Scenario(
        lambda: resnet(), data, LocalTraining(batch_size=2), clients=2, records=2, scale=SCALE
    )
    seen = observe(simulate(scenario, seeded()), ThreatModel(actor="aggregate"))
    assert seen.records == 4
    with pytest.raises(NotApplicable, match="no edge after 63"):
        separable(seen, seeded())


def test_adam_and_dropout_are_refused() -> None:
    one = client(chain(), 2, size=16, optimiser="adam")
    with pytest.raises(NotApplicable, match="'adam' is rescaled entry by entry"):
        separated(one)
    model = nn.Sequential(nn.Dropout(0.2), chain())
    one = client(model, 2, size=16, dropout="replayed")
    with pytest.raises(NotApplicable, match="dropout hides part of the network"):
        separated(one)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_norm_in_front_of_the_head_hides_labels(norm: Any, mode: str) -> None:
    """In eval mode a batch norm is a factor and a bias, and hides nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(192, 400), nn.ReLU(), nn.Linear(400, 120), nn.ReLU()]
        model = nn.Sequential(*layers, norm(120), nn.Linear(120, 10))
    one = client(model, 6, size=8, batch_norm=mode)
    if norm is nn.BatchNorm1d and mode == "eval":
        right(one, separated(one))
        return
    with pytest.raises(NotApplicable, match="another non-linearity or norm"):
        separated(one)


def test_records_beyond_the_rank_are_refused() -> None:
    one = client(chain(), 9, size=16)
    with pytest.raises(NotApplicable, match="9 records × 16 positions are 143 windows"):
        separated(one)


def test_a_linear_layer_before_a_batch_norm_hides_its_mean() -> None:
    basis, _ = row_space(normal(12, 3) @ normal(3, 60, seed=1), 4, 1, lost=1)
    assert basis.shape == (60, 3)
    with pytest.raises(NotApplicable, match="hides what its records have in common"):
        common_maps(basis, nn.Linear(60, 12), (60,), 4, centred=True)


def test_windows_that_meet_nowhere_do_not_tell_their_mean() -> None:
    layer = nn.Conv2d(8, 80, 2, stride=2)
    with pytest.raises(NotApplicable, match="do not overlap enough to tell it"):
        common_maps(normal(32, 5), layer, (8, 4, 4), 2, centred=True)


def test_the_mean_window_is_found_again() -> None:
    """Signals that sum to zero hide one direction; the maps come out whole."""
    layer = nn.Conv2d(8, 80, 3, padding=1)
    maps = normal(3, 8, 4, 4).relu()
    seen = windows(maps, layer).flatten(0, 1)
    signals = normal(80, len(seen), seed=1)
    gradient = (signals - signals.mean(1, keepdim=True)) @ seen
    basis, _ = row_space(gradient, 3, 16, lost=1)
    span, _ = common_maps(basis, layer, (8, 4, 4), 3, centred=True)
    inside = span @ (span.T @ maps.flatten(1).T)
    assert torch.allclose(inside, maps.flatten(1).T, atol=1e-8)
    with pytest.raises(NotApplicable, match="no edge after 48"):
        row_space(gradient, 3, 16)


@pytest.mark.parametrize("size", [20, 120])
def test_the_smallest_eigenvalues(size: int) -> None:
    """By a decomposition of a small matrix, by iteration of a large one."""
    truth = np.concatenate([np.zeros(3), np.linspace(0.5, 2.0, size - 3)])
    turn = torch.linalg.qr(normal(size, size)).Q.numpy()
    matrix = (turn * truth) @ turn.T
    values, vectors = smallest(matrix, 4)
    assert np.abs(values[:3]).max() < 1e-9
    assert 0.5 - 1e-9 < values[3] < 0.6
    inside = vectors[:, :3].T @ turn[:, :3]
    assert np.allclose(inside @ inside.T, np.eye(3), atol=1e-9)


def test_what_rounding_leaves_of_zeros_is_taken_away() -> None:
    maps = torch.tensor([[[5.0, 0.0, 1.0]], [[2.0, 2e-3, -1e-3]]], dtype=torch.float64)
    clean, unsure = rectified(maps)
    assert clean.tolist() == [[[5.0, 0.0, 1.0]], [[2.0, 0.0, 0.0]]]
    assert unsure.tolist() == [True]
    _, unsure = rectified(maps[:1])
    assert unsure.tolist() == [False]


def test_a_little_of_one_record_in_another_does_not_hide_its_zeros() -> None:
    """What is left of the second lifts all zeros of the first; only the second shows it."""
    true = torch.tensor([[[5.0, 0.0, 0.0, 1.0]], [[0.0, 3.0, 2.0, 0.0]]], dtype=torch.float64)
    mixed = true + 1e-5 * torch.stack([true[1], -true[0]])
    clean, _ = rectified(mixed)
    assert torch.equal(clean > 0, true > 0)


def test_one_appearance_of_each_where_steps_are_not_told_apart() -> None:
    _, found = one_step()
    twice = replace(
        found, maps=torch.cat([found.maps, 1.01 * found.maps]), steps=(torch.arange(8),)
    )
    chosen = twice.once(4)
    assert sorted((chosen % 4).tolist()) == [0, 1, 2, 3]


def test_a_map_with_a_negative_entry_is_no_map() -> None:
    """It may be small beside the whole span, and is not beside the map's own largest entry."""
    ray, other = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    ray[:100], ray[100] = 0.1, -0.002
    other[100:] = normal(200).abs()
    span = torch.linalg.qr(torch.stack([ray, other], 1)).Q
    start = span.T @ ray
    _, error = _polished(span, torch.ones(300, dtype=torch.bool), start, 1e-6)
    assert error == pytest.approx(0.02, rel=0.1)


def test_errors_below_zero_are_those_of_a_mixture() -> None:
    one, found = one_step()
    errors = torch.zeros(1, 10, dtype=torch.float64)
    errors[0, :3] = torch.tensor([-1.0, 0.6, 0.4])  # of a softmax
    label = torch.tensor([0])
    _check(one.trace(), None, found.maps, found.top, errors, label, 0.1)
    errors[0, 1:3] = torch.tensor([1.5, -0.5])  # the same sum
    with pytest.raises(NotApplicable, match="mixtures of records"):
        _check(one.trace(), None, found.maps, found.top, errors, label, 0.1)
