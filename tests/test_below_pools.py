"""Below a max-pool records are told apart anew, held against a replay by torch.optim.

Every case is exact: what is known above a pool, the activations below it, the labels, and who was
in a step. The truth is what the network itself computes of the records, at the weights that each
step began with.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from observed_client import (
    EXACT,
    SETTINGS,
    Client,
    any_affine,
    client,
    compared,
    normal,
    right,
    seeded,
    separated,
)
from torch import Tensor, nn

from leakgauge.attacks import _span
from leakgauge.attacks._anew import anew
from leakgauge.attacks._known import Peeled
from leakgauge.attacks._linear import smallest, smallest_of
from leakgauge.attacks._separation import separate
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.exact_recursion import Read
from leakgauge.errors import NotApplicable
from leakgauge.types import Resources

POOL = 0
CHAIN = (24, POOL, 48, POOL, 96, 128, POOL, 128)
"""Outputs of convolutions, and pools, as a VGG has them, for 16 × 16 images."""


def vgg(spec: tuple[int, ...] = CHAIN, *, pool: nn.Module | None = None) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs, side = 3, 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, outputs in enumerate(spec):
            if outputs == POOL:
                layers[f"pool{number}"] = pool or nn.MaxPool2d(2)
                side //= 2
                continue
            layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
            layers[f"act{number}"] = nn.ReLU()
            inputs = outputs
        layers["flat"], layers["head"] = nn.Flatten(), nn.Linear(inputs * side**2, 10)
    return nn.Sequential(layers)


def headless(model: nn.Module) -> nn.Module:
    """Its head is frozen and tells nothing: labels are read from the layer below."""
    model.get_submodule("head").requires_grad_(False)
    return model


def read(one: Client) -> Read:
    return Read(one.seen, seeded(), Resources())


def exact(one: Client, found: Read) -> None:
    """Every node known, in the order of the records found first, with their labels."""
    right(one, found.done.start)
    assert torch.equal(found.done.start.labels, found.begun.labels)
    pairs = compared(found.begun, found.done.start.maps, one.truth(found.done.start.source.name))
    for node, value in found.done.known.items():
        for pair, other in zip(
            compared(found.begun, value, one.truth(node.name)), pairs, strict=True
        ):
            assert torch.equal(pair, other)


@cache
def one_step() -> tuple[Client, Read]:
    one = client(vgg(), 4, size=16)
    return one, read(one)


# ---------------------------------------------------------------- exact cases


def test_a_layer_below_a_pool_tells_the_records_apart_again() -> None:
    one, found = one_step()
    assert [node.name for node in found.done.known] == ["act7", "pool6", "act4", "pool3"]
    assert found.facts()["separated_again_at"] == ["conv5"]
    assert found.facts()["peeled_to"] == "pool3"
    exact(one, found)


def test_the_signals_below_a_pool_are_those_of_the_loss() -> None:
    one, found = one_step()
    start, trace = found.done.start, found.trace
    assert start.top.name == "norm5"
    (rows,) = one.rows()
    inner = trace.forward(one.entering(rows), [start.top])[start.top].requires_grad_()
    with torch.enable_grad():
        logits = trace.affine(trace.output, {start.top: inner}, {})
        loss = nn.functional.cross_entropy(logits, one.batch.labels[rows])
    (signal,) = torch.autograd.grad(loss, inner)
    (pair,) = compared(start, start.maps, one.truth("act4"))
    assert float((start.signal - signal[pair]).norm() / signal.norm()) < EXACT


def test_norms_of_any_weight() -> None:
    one = client(any_affine(vgg()), 4, size=16)
    found = read(one)
    assert found.done.lowest.name == "pool3"
    exact(one, found)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_layer_that_looks_at_a_pool_itself(mode: str) -> None:
    """Its maps are those of the pool, and the bias below the pool tells their size."""
    one = client(vgg((24, POOL, 48, POOL, 128, POOL, 128)), 4, size=16, batch_norm=mode)
    found = read(one)
    assert [str(layer.target) for layer in found.done.again] == ["conv4"]
    assert found.done.start.source.name == "pool3"
    exact(one, found)


def test_batch_norm_in_eval_mode() -> None:
    one = client(vgg(), 4, size=16, batch_norm="eval")
    found = read(one)
    assert [str(layer.target) for layer in found.done.again][:1] == ["conv5"]
    assert "pool3" in [node.name for node in found.done.known]
    exact(one, found)


@pytest.mark.parametrize("frozen", [False, True], ids=["head", "no-head"])
def test_two_steps_each_at_its_own_weights(frozen: bool) -> None:
    """A linear head does not tell its steps apart, convolutions do."""
    model = headless(vgg()) if frozen else vgg()
    one = client(model, 6, size=16, batch_size=3, steps=2, **SETTINGS)
    found = read(one)
    assert found.facts()["separated_at"] == ("conv7" if frozen else "head")
    again = ["conv5"] if frozen else ["conv7", "conv5"]
    assert [str(layer.target) for layer in found.done.again] == again
    assert [len(step) for step in found.begun.steps] == [3, 3]
    exact(one, found)
    _, later = one.weights()
    for name in ("conv5.weight", "norm5.weight", "norm5.bias"):
        assert float((found.weights[1][name] - later[name]).norm() / later[name].norm()) < 1e-5


def test_two_steps_in_eval_mode() -> None:
    """Separated below the pool, each appearance at its own weights; steps are not told apart."""
    one = client(vgg(), 4, size=16, batch_size=2, steps=2, batch_norm="eval", lr=1e-3)
    found = read(one)
    start = found.done.start
    assert start.source.name == "act4"
    true = torch.cat(one.truth("act4")).flatten(1)
    distance = torch.cdist(start.maps.flatten(1), true) / true.norm(dim=1)
    pair = distance.argmin(1)
    assert sorted(pair.tolist()) == [0, 1, 2, 3]
    assert float(distance.min(1).values.max()) < EXACT
    assert start.labels.tolist() == one.batch.labels[torch.cat(one.rows())][pair].tolist()


def test_labels_are_read_through_a_pool() -> None:
    one = client(headless(vgg(CHAIN[:-1])), 4, size=16)
    found = separated(one)
    assert found.layer.target == "conv5"
    right(one, found)


# ---------------------------------------------------------------- refusals


def test_labels_are_not_read_through_windows_that_overlap() -> None:
    model = headless(vgg(CHAIN[:-1], pool=nn.MaxPool2d(3, 2, 1)))
    with pytest.raises(NotApplicable, match="conv5: labels cannot be read through another non-lin"):
        separated(client(model, 4, size=16))


def test_a_layer_of_too_few_outputs_below_a_pool_is_refused() -> None:
    _, found = one_step()
    assert "act2: no layer with a known signal looks at it; no layer below" in found.done.stopped
    assert "(conv2: 4 records × 64 positions are 255 windows" in found.done.stopped
    wide = client(vgg(), 9, size=16)
    stopped = read(wide).done.stopped
    assert "(conv5: 9 records × 16 positions are 143 windows" in stopped


def known(one: Client, spoil: Any) -> Peeled:
    """What is known down to the last pool."""
    found = read(one).done
    value = found.known[found.trace.named("pool6")]
    above = {found.trace.named("pool6"): spoil(value)}
    gradient = found.gradient
    begun = separate(found.trace, gradient, len(value), seeded(), one.seen.training)
    return Peeled(found.trace, gradient, begun, above, {})


def test_records_are_paired_by_what_they_lead_to() -> None:
    one, found = one_step()
    turned = [2, 0, 3, 1]
    again = anew(known(one, lambda value: value[turned]), seeded())
    expected = found.done.start.maps[turned]
    assert float((again.maps - expected).norm() / expected.norm()) < 1e-6


def test_what_does_not_lead_to_the_known_is_refused() -> None:
    def mixed(value: Tensor) -> Tensor:
        return value + 0.05 * value.flip(0)

    one, _ = one_step()
    with pytest.raises(NotApplicable, match="conv5: the activations found at it do not lead to"):
        anew(known(one, mixed), seeded())


# ---------------------------------------------------------------- the parts


def test_a_pool_sends_each_signal_to_one_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    trace = Trace(model, (3, 7, 7))
    relu, pool = trace.named("_1"), trace.named("_2")
    value = normal(2, 4, 7, 7).relu().requires_grad_()
    with torch.enable_grad():
        out = trace.affine(pool, {relu: value}, {})
    sent = normal(*out.shape, seed=1)
    (signal,) = torch.autograd.grad(out, value, sent)
    gathered = trace.gathered(pool, signal)
    assert gathered is not None
    assert torch.allclose(gathered, sent)
    assert trace.gathered(relu, signal) is None


def test_what_follows_from_a_node() -> None:
    trace = Trace(vgg(), (3, 16, 16))
    assert trace.follows(trace.named("pool6"), trace.named("act4"))
    assert not trace.follows(trace.named("act4"), trace.named("pool6"))


def test_eigenvalues_without_a_matrix() -> None:
    basis = torch.linalg.qr(normal(300, 300)).Q
    values = torch.cat([torch.full((4,), 1e-13), torch.linspace(0.1, 1, 296)])
    matrix = ((basis * values) @ basis.T).numpy()
    found, vectors = smallest_of(lambda block: matrix @ block, 300, 5)
    assert np.abs(found[:4]).max() < 1e-10
    assert found[4] > 0.05
    space = basis[:, :4].numpy()
    assert np.linalg.norm(space @ (space.T @ vectors[:, :4]) - vectors[:, :4]) < 1e-9
    assert np.linalg.norm(smallest(matrix, 5)[0][:4]) < 1e-10


def test_the_overlap_of_large_maps_is_that_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(24, 96, 3, padding=1)
    maps = normal(4, 24, 4, 4).relu()
    seen = _span.windows(maps, layer).flatten(0, 1)
    signal = normal(96, len(seen), seed=1)
    basis, _ = _span.row_space((signal - signal.mean(1, keepdim=True)) @ seen, 4, 16, lost=1)
    monkeypatch.setattr(_span, "LARGE", 0)
    span, _ = _span.common_maps(basis, layer, (24, 4, 4), 4, centred=True)
    flat = maps.flatten(1).T
    assert float((flat - span @ (span.T @ flat)).norm() / flat.norm()) < 1e-9
