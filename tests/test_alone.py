"""Separation and peeling behind group norms, held against autograd and a replay by torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from observed_client import (
    EXACT,
    SETTINGS,
    Client,
    any_affine,
    client,
    compared,
    next_below,
    normal,
    peeled,
    resnet,
    right,
    seeded,
    separated,
    within,
)
from torch import Tensor, nn

from leakgauge.attacks import _peeling
from leakgauge.attacks._alone import OwnNorm, means
from leakgauge.attacks._channels import System
from leakgauge.attacks._known import Peeled
from leakgauge.attacks._path import Path
from leakgauge.attacks._peeling import _hold, _solved
from leakgauge.attacks._separation import Separated, gradient_of
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.exact_recursion import ExactRecursion
from leakgauge.attacks.exposure import LayerExposure, exposure
from leakgauge.errors import NotApplicable
from leakgauge.metrics import psnr
from leakgauge.metrics.assign import optimal
from leakgauge.types import LocalTraining


@cache
def one_step() -> tuple[Client, Separated]:
    one = client(any_affine(resnet(norm="group")), 4)
    return one, separated(one)


def test_the_means_that_a_norm_takes_away() -> None:
    x = normal(6, 3, 5)
    assert torch.equal(means(x, 0), x.mean((1, 2), keepdim=True))
    parts = [x[:3].mean((0, 2), keepdim=True), x[3:].mean((0, 2), keepdim=True)]
    found = means(x, 2)
    assert found.shape == (6, 3, 1)
    assert torch.allclose(found, torch.cat([part.expand(3, 3, 1) for part in parts]))


@pytest.mark.parametrize(("groups", "on"), [(1, 0.0), (4, 0.0), (4, 0.5)])
def test_signals_behind_a_norm_follow_from_those_before_it(groups: int, on: float) -> None:
    """As autograd has them: the two unknowns of each group are those that leave zeros, also where
    few entries are off."""
    norm = nn.GroupNorm(groups, 16).double()
    norm.weight.data, norm.bias.data = 1.5 * normal(16, seed=1), 0.2 * normal(16, seed=2)
    norm.bias.data += on * norm.weight.data.abs()
    conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), conv, norm, nn.ReLU())
    trace = Trace(model, (3, 6, 6))
    (node,) = (n for n in trace.layers() if n.target == "2")
    at = trace.norm_behind(node)
    (source,) = trace.sources[node.all_input_nodes[0]]
    maps = normal(3, 8, 6, 6, seed=3).relu()
    before = trace.affine(node, {source: maps}, {}).detach().requires_grad_()
    behind = norm(before)
    sent = normal(*behind.shape, seed=4) * (behind > 0)
    (signals,) = torch.autograd.grad(behind, before, sent)
    assert at is not None
    path = Path(trace.parameters(), {}, LocalTraining(batch_size=3), 1)
    found = OwnNorm(trace, {}, node, at, source, path).passed(maps, signals).signals
    assert float((found - sent).norm() / sent.norm()) < 1e-8


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_a_batch_behind_group_norms_is_read_exactly(norm: str) -> None:
    one = one_step()[0] if norm == "group" else client(any_affine(resnet(norm=norm)), 4)
    right(one, separated(one))


def test_the_layers_below_are_peeled() -> None:
    one, found = one_step()
    done = peeled(one, found, 2)
    assert [node.name for node in done.known] == ["layer4_0_act1", "layer3_0_act2", "layer3_0_act1"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))


def test_sizes_come_from_channels_with_sure_masks() -> None:
    one, found = one_step()
    done = peeled(one, found)
    node = done.lowest
    value = done.known[node]
    small = (value > 0) & (value < 1e-3 * value.max())  # these are taken for zero
    spoilt, unsure = value.masked_fill(small, 0.0), small.any(3).any(2).any(0)
    assert 40 < unsure.sum() < 100
    factors = torch.tensor([0.98, 0.99, 1.01, 1.02]).double()[:, None, None, None]

    def off(unsure: Tensor) -> float:
        done.unsure[node] = unsure
        _hold(done, node, spoilt * factors)
        return float((done.known[node] - spoilt).norm() / spoilt.norm())

    told, not_told = off(unsure), off(torch.zeros_like(unsure))
    assert told < 1e-4 < 1e-3 < not_told


def test_rows_stay_left_out_where_too_many_more_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = one_step()
    trace, gradient = one.trace(), dict(gradient_of(one.seen))
    own = within(trace, found)
    below, name = next_below(trace, own.source), "layer4.0.conv1.weight"
    gradient[name] = gradient[name].clone()
    gradient[name][7] += normal(*gradient[name][7].shape) * gradient[name].std()
    unsure = torch.arange(len(found.unsure)) < 0.4 * len(found.unsure)
    known = {own.source: found.maps.clone()}
    monkeypatch.setattr(_peeling, "_stands_out", lambda lack, good: torch.ones_like(good))
    monkeypatch.setattr(_peeling, "_share", lambda lack, whole: torch.ones(len(lack)))
    solved = _solved(Peeled(trace, gradient, own, known, {own.source: unsure}), below)
    assert solved is not None
    assert solved[1] < 1e-5
    none = torch.zeros_like(unsure)
    solved = _solved(Peeled(trace, gradient, own, known, {own.source: none}), below)
    assert solved is not None
    assert solved[1] > 1e-3


def test_a_wrong_mask_that_spoils_a_group_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry that is taken for zero: all rows of its group lack a little, its own row most. What
    is solved again begins from the statistics found before, which saves rounds."""
    one, found = one_step()
    maps = found.maps.clone()
    size = torch.where(maps > 1e-4 * maps.max(), maps, torch.inf)
    place = torch.unravel_index(size.argmin(), maps.shape)
    maps[place] = 0.0
    follow, rounds = System.follow, [0]

    def counted(self: System, *given: Any) -> float:
        rounds[-1] += 1
        return follow(self, *given)

    monkeypatch.setattr(System, "follow", counted)
    done = peeled(one, replace(found, maps=maps))
    assert float(done.known[done.trace.named("layer4_0_act1")][place]) > 0
    compared(found, done.known[done.trace.named("layer3_0_act2")], one.truth("layer3_0_act2"))
    rounds.append(0)
    monkeypatch.setattr(System, "begin", lambda self, other: None)
    peeled(one, replace(found, maps=maps))
    assert rounds[0] < rounds[1]


class Chain(nn.Module):
    """Four convolutions for 16 × 16 images, each with a group norm; `last` before the last ReLU."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.last = last or nn.Identity()
        widths = [3, 24, 48, 96, 128]
        sizes = zip(widths, widths[1:], (1, 2, 2, 1), strict=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, s, 1, bias=False) for i, o, s in sizes)
            self.head = nn.Linear(128, 10)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for outputs in widths[1:])

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in list(zip(self.convs, self.norms, strict=True))[:3]:
            x = norm(conv(x)).relu()
        x = self.last(self.norms[3](self.convs[3](x))).relu()
        return self.head(x.mean((2, 3)))


def test_a_norm_of_fixed_statistics_between_a_group_norm_and_its_relu() -> None:
    last = nn.BatchNorm2d(128)
    last.weight.data, last.running_var = 3 * normal(128).float(), 0.5 + normal(128).float().abs()
    one = client(Chain(last), 3, size=16, batch_norm="eval")
    found = separated(one)
    right(one, found)
    done = peeled(one, found)
    compared(found, done.known[done.trace.named("relu_1")], one.truth("relu_1"))


def in_two_steps(lr: float) -> Client:
    model = any_affine(Chain())
    return client(model, 4, size=16, batch_size=2, steps=2, lr=lr, **SETTINGS)


@pytest.mark.parametrize("lr", [1e-2, 1e-5])
def test_records_are_told_into_steps_and_peeled_at_their_weights(lr: float) -> None:
    one = in_two_steps(lr)
    found = separated(one)
    right(one, found)
    done = peeled(one, found, 2)
    assert [node.name for node in done.known] == ["relu_2", "relu_1"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))


def test_weights_of_a_later_step_are_known_at_the_layer_and_its_norm() -> None:
    one = in_two_steps(1e-2)
    first, later = one.weights()
    found = separated(one).path.weights[1]
    for name in ("convs.3.weight", "norms.3.weight", "norms.3.bias"):
        moved = later[name] - first[name]
        assert float((found[name] - later[name]).norm() / moved.norm()) < 1e-3


def test_steps_that_leave_the_weights_where_they_are_are_taken_for_one() -> None:
    one = in_two_steps(1e-7)
    found = separated(one)
    assert [len(step) for step in found.steps] == [4]
    true = torch.cat(one.truth(found.source.name)).flatten(1)
    distance = torch.cdist(found.maps.flatten(1), true) / true.norm(dim=1)
    assert distance.argmin(1).sort().values.tolist() == [0, 1, 2, 3]
    assert float(distance.min(1).values.max()) < EXACT


def test_images_of_two_steps_are_found_at_the_weights_of_each() -> None:
    one = in_two_steps(1e-2)
    guess = ExactRecursion().reconstruct(one.seen, seeded())
    found = guess.inputs[optimal(guess.inputs, one.batch.inputs)]
    assert float(psnr(found, one.batch.inputs).min()) > 80
    assert guess.residual < 1e-4


def vectors(norm: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 400), nn.ReLU()]
        layers += [nn.Linear(400, 120, bias=False), norm, nn.ReLU(), nn.Linear(120, 10)]
        return nn.Sequential(*layers)


@pytest.mark.parametrize("norm", [nn.LayerNorm(120), nn.GroupNorm(4, 120)])
def test_vectors_behind_a_layer_norm(norm: nn.Module) -> None:
    one = client(vectors(norm), 6, size=8)
    right(one, separated(one))


def counted(norm: nn.Module) -> LayerExposure:
    one = client(vectors(norm), 6, size=8)
    assert one.seen.training is not None
    layers = exposure(one.seen.setting, one.seen.training, 6).layers
    return next(layer for layer in layers if layer.name == "3")


def test_the_exposure_counts_as_without_a_norm() -> None:
    assert counted(nn.LayerNorm(120)) == counted(nn.Identity())
    assert counted(nn.LayerNorm(120)).limit == 100


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 24), nn.BatchNorm2d(24)])
def test_a_norm_of_a_sum_is_refused_and_not_counted_as_exposed(norm: nn.Module) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 24, 3, 1, 1)
            self.skip, self.norm, self.head = nn.Conv2d(24, 24, 1), norm, nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            x = self.norm(self.second(x) + self.skip(x)).relu()
            return self.head(x.mean((2, 3)))

    one = client(Summed(), 1, size=8, batch_norm="train")
    with pytest.raises(NotApplicable, match="second: the norm behind it sees a sum"):
        separated(one)
    assert one.seen.training is not None
    told = exposure(one.seen.setting, one.seen.training, 1)
    assert (told.exposed, told.limit) == (False, 0)
    assert "the norm behind it sees a sum" in {layer.reason for layer in told.layers}


class Around(nn.Module):
    """What the layer that tells the records apart sees goes around it too."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        widths = [3, 24, 64, 128, 128]
        sizes = zip(widths, widths[1:], (2, 2, 1, 1), strict=False)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, s, 1, bias=False) for i, o, s in sizes)
        self.norms = nn.ModuleList(norm(outputs) for outputs in widths[1:])
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in list(zip(self.convs, self.norms, strict=True))[:3]:
            x = norm(conv(x)).relu()
        x = (self.norms[3](self.convs[3](x)) + x).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("norm", [lambda c: nn.GroupNorm(8, c), nn.BatchNorm2d])
def test_a_skip_around_the_layer_tells_sizes_in_the_end(norm: Callable[[int], nn.Module]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        one = client(any_affine(Around(norm)), 3, size=16, batch_norm="train")
    done = peeled(one, separated(one))
    assert len(done.known) == 2, done.stopped
    for node, value in done.known.items():
        compared(done.start, value, one.truth(node.name))


class Bent(Chain):
    """With a sigmoid among its ReLUs."""

    def forward(self, x: Tensor) -> Tensor:
        bends = (torch.relu, torch.sigmoid, torch.relu, torch.relu)
        for conv, norm, bend in zip(self.convs, self.norms, bends, strict=True):
            x = bend(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def test_a_smooth_activation_below_ends_the_peeling_in_words() -> None:
    one = client(any_affine(Bent()), 2, size=16)
    found = separated(one)
    right(one, found)
    done = peeled(one, found, 3)
    assert [node.name for node in done.known] == ["relu_1", "sigmoid"]
    assert done.stopped.startswith("relu: ")


def test_a_bias_before_a_norm_ends_the_peeling_in_words() -> None:
    """It tells records apart all the same, and their sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for inputs, outputs, stride in ((3, 24, 1), (24, 48, 2), (48, 96, 2), (96, 128, 1)):
            conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
            parts += [conv, nn.GroupNorm(8, outputs), nn.ReLU()]
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    one = client(nn.Sequential(*parts, *pool), 4, size=16)
    found = separated(one)
    right(one, found)
    assert "whose bias makes it depend on the size of its input" in peeled(one, found, 2).stopped
