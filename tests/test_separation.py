"""Separation and peeling under ordinary training, held against a replay by torch.optim.

Every case is exact: batch norm in train mode, several steps with momentum and weight decay, several
passes, weights instead of updates. The truth is what the network itself computes of the records, at
the weights that each step began with.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from leakgauge import models
from leakgauge.attacks._joined import joined_at
from leakgauge.attacks._known import Peeled, signals_of
from leakgauge.attacks._linear import most, smallest, supports
from leakgauge.attacks._path import Path
from leakgauge.attacks._peeling import Watch, _counted, _solved, _stands_out, peel
from leakgauge.attacks._rays import _polished, rectified
from leakgauge.attacks._separation import Separated, _check, _learn_head, gradient_of, separable
from leakgauge.attacks._span import common_maps, row_space, windows
from leakgauge.attacks._steps import _Passed, biases, passing, silent, together
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.separate_and_decode import SeparateAndDecode
from leakgauge.data.photos import photos
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import minibatches, train
from leakgauge.fl.model import setting
from leakgauge.records import Scale
from leakgauge.threat import observe
from leakgauge.types import (
    Batch,
    Kept,
    LocalTraining,
    Named,
    Observation,
    Resources,
    Target,
    ThreatModel,
)

SCALE = Scale((0.5,) * 3, (0.25,) * 3)
SETTINGS = {"momentum": 0.9, "weight_decay": 5e-4}
EXACT = 1e-4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Client:
    """One that trained on photographs, and what a server sees of it."""

    seen: Observation
    batch: Batch

    def told(self, **changed: Any) -> Observation:
        """What it sees, if it is told something else of the training."""
        records = changed.pop("records", self.seen.records)
        assert self.seen.training is not None
        return replace(self.seen, records=records, training=replace(self.seen.training, **changed))

    def trace(self) -> Trace:
        assert self.seen.training is not None
        train = self.seen.training.batch_norm == "train"
        return Trace(self.seen.model, self.seen.record.shape, train=train)

    def weights(self) -> list[Named]:
        """Those that each step began with, by torch.optim in the client's own precision: in another
        a ReLU may be on where the client's was off, and the next step begins elsewhere."""
        training = self.seen.training
        assert training is not None
        model = copy.deepcopy(self.seen.model).eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(training.batch_norm == "train")
        optimiser = torch.optim.SGD(
            model.parameters(),
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        found = []
        for rows in self.rows():
            found.append({n: p.detach().double() for n, p in model.named_parameters()})
            optimiser.zero_grad()
            logits = model(self.seen.record.entering(self.batch.inputs[rows]))
            nn.functional.cross_entropy(logits, self.batch.labels[rows]).backward()
            optimiser.step()
        return found

    def rows(self) -> list[Tensor]:
        """The records of each step."""
        assert self.seen.training is not None
        return minibatches(len(self.batch), self.seen.training)

    def entering(self, rows: Tensor) -> Tensor:
        return self.seen.record.entering(self.batch.inputs[rows].double())

    def truth(self, node: str) -> list[Tensor]:
        """The values of a node in every step."""
        found = []
        for rows, weights in zip(self.rows(), self.weights(), strict=True):
            trace = self.trace().moved(weights)
            at = trace.named(node)
            found.append(trace.forward(self.entering(rows), [at])[at])
        return found


def client(
    model: nn.Module, records: int, *, size: int = 32, label: int | None = None, **training: Any
) -> Client:
    data = photos(size=size)
    rows = torch.randperm(len(data), generator=seeded(5))[:records]
    batch = Batch(data.inputs[rows], data.labels[rows])
    if label is not None:
        batch = Batch(batch.inputs, torch.full_like(batch.labels, label))
    local = LocalTraining(**({"batch_size": records} | training))
    whole = setting(model, data.inputs, len(data.classes), SCALE)
    update = train(whole, batch, local, seeded()).update
    return Client(Observation(whole, update, local, records), batch)


def resnet(name: str = "resnet-10", width: float = 0.5, size: int = 32) -> nn.Module:
    return models.make(name, shape=(3, size, size), classes=10, rng=seeded(), width=width)


def chain(affine: bool = True) -> nn.Module:
    """Four convolutions, as a VGG has them, for 16 × 16 images: the last at 4 × 4 positions."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, (outputs, stride) in enumerate([(24, 1), (48, 2), (96, 2), (128, 1)]):
            layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs, affine=affine)
            layers[f"act{number}"] = nn.ReLU()
            inputs = outputs
        layers["pool"], layers["flat"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        layers["head"] = nn.Linear(inputs, 10)
    return nn.Sequential(layers)


def any_affine(model: nn.Module) -> nn.Module:
    """The model with weights of both signs and biases in its batch norms."""
    rng = seeded(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            size = len(module.weight)
            sign = 1 - 2.0 * (torch.rand(size, generator=rng) < 0.3)
            module.weight.data = sign * (0.5 + torch.rand(size, generator=rng))
            module.bias.data = 0.3 * torch.randn(size, generator=rng)
    return model


def separated(one: Client) -> Separated:
    return separable(one.seen, seeded())


def compared(found: Separated, value: Tensor, truth: list[Tensor]) -> list[Tensor]:
    """Which record of its step each found one is; each is found once, exactly, in its size."""
    assert len(found.steps) == len(truth)
    pairs = []
    for step, true in zip(found.steps, truth, strict=True):
        sizes = true.flatten(1).norm(dim=1)
        distance = torch.cdist(value[step].flatten(1), true.flatten(1)) / sizes
        pairs.append(distance.argmin(1))
        assert pairs[-1].sort().values.tolist() == list(range(len(true)))
        assert float(distance.min(1).values.max()) < EXACT
    return pairs


def right(one: Client, found: Separated) -> None:
    """Maps of every appearance and their labels, step by step in the order taken."""
    pairs = compared(found, found.maps, one.truth(found.source.name))
    for step, pair, rows in zip(found.steps, pairs, one.rows(), strict=True):
        assert found.labels[step].tolist() == one.batch.labels[rows][pair].tolist()
    assert torch.cat(found.steps).sort().values.tolist() == list(range(len(found.maps)))


class Once(Watch):
    """Time for as many nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__(Resources(), nodes)
        self.left = nodes

    def open(self) -> bool:
        self.left -= 1
        return self.left >= 0


def within(trace: Trace, found: Separated) -> Separated:
    """What was found, at the nodes of this trace: `separable` traced a network of its own, whose
    nodes are the same ones by name."""
    return replace(
        found, layer=trace.named(found.layer.name), top=trace.named(found.top.name),
        source=trace.named(found.source.name),
    )  # fmt: skip


def next_below(trace: Trace, source: fx.Node) -> fx.Node:
    """The activation that is peeled after this one."""
    above = trace.nodes[: trace.nodes.index(source)]
    return next(node for node in reversed(above) if trace.bent(node))


def peeled(one: Client, found: Separated, nodes: int = 1, enough: float = math.inf) -> Peeled:
    trace = one.trace()
    own = within(trace, found)
    return peel(trace, gradient_of(one.seen), own, Once(nodes), enough=enough)


# ---------------------------------------------------------------- exact cases


@cache
def one_step() -> tuple[Client, Separated]:
    one = client(resnet(), 4)
    return one, separated(one)


@cache
def two_steps() -> tuple[Client, Separated]:
    one = client(resnet(), 6, batch_size=3, steps=2, **SETTINGS)
    return one, separated(one)


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


def test_every_appearance_is_read_at_the_weights_of_its_own_step() -> None:
    one, found = two_steps()
    right(one, found)
    sizes = [len(step) for step in found.steps]
    assert sizes == [3, 3]


def test_the_weights_of_a_later_step_are_learnt() -> None:
    one, found = two_steps()
    first, later = one.weights()
    for name in ("layer4.0.conv2.weight", "layer4.0.bn2.weight"):
        moved = (later[name] - first[name]).norm()
        assert torch.equal(found.path.weights[0][name], first[name])
        assert float((found.path.weights[1][name] - later[name]).norm() / moved) < 1e-3


def test_the_layer_below_is_peeled_in_train_mode() -> None:
    one, found = one_step()
    done = peeled(one, found, 2)
    assert [node.name for node in done.known] == ["layer4_0_act1", "layer3_0_act2", "layer3_0_act1"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))
    assert "as the time was up" in done.stopped


def test_activations_above_carry_on_where_gradients_are_too_few() -> None:
    """One pixel in four is seen by the middles of the windows alone, and by the branch."""
    one = client(resnet(width=0.25), 2)
    found = separated(one)
    done = peeled(one, found, 3)
    assert done.lowest.name == "layer2_0_act2"
    compared(found, done.known[done.lowest], one.truth("layer2_0_act2"))


@pytest.mark.parametrize(("enough", "lowest"), [(4096, "layer3_0_act1"), (4097, "layer2_0_act2")])
def test_equations_are_not_joined_once_enough_is_known(enough: int, lowest: str) -> None:
    """The gradients alone tell 64 × 8 × 8 values of every record."""
    one = client(resnet(width=0.25), 2)
    done = peeled(one, separated(one), 3, enough)
    assert done.lowest.name == lowest


def test_a_node_with_too_few_equations_is_refused_before_it_is_solved() -> None:
    one = client(resnet(width=0.25), 6)
    found = separated(one)
    done = peeled(one, found, 3)
    assert done.lowest.name == "layer3_0_act1"
    assert "0.42 equations for each of its unknowns, too few, also with what" in done.stopped
    assert peeled(one, found, 3, 4096).stopped.endswith("of its unknowns, too few")


class Skip(nn.Module):
    """A block with a skip, at 8 × 8 positions, then 4 × 4, for 16 × 16 images."""

    def __init__(self, width: int = 32, inner: int = 32) -> None:
        super().__init__()
        sizes = [(3, width, 2), (width, inner, 1), (inner, width, 1), (width, 96, 2), (96, 128, 1)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, s, 1, bias=False) for i, o, s in sizes)
            self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in sizes)
            self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.norms[0](self.convs[0](x)))
        x = torch.relu(self.norms[1](self.convs[1](first)))
        x = torch.relu(self.norms[2](self.convs[2](x)) + first)
        for conv, norm in zip(self.convs[3:], self.norms[3:], strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def test_activations_above_are_met_through_skips_and_norms_of_any_weight() -> None:
    """Three records: 1.5 equations of the gradients for each unknown, which alone do not do."""
    one = client(any_affine(Skip()), 3, size=16)
    found = separated(one)
    done = peeled(one, found, 3)
    trace = done.trace
    first = trace.named("relu")
    assert done.lowest is first
    compared(found, done.known.pop(first), one.truth("relu"))
    every = signals_of(done, first)
    joined = joined_at(done, first, every, _counted(done, first, every))
    assert joined is not None
    assert len(joined.skips) == 1


class Branch(nn.Module):
    """A block with a branch, from 8 × 8 to 4 × 4 positions, for 16 × 16 images."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        sizes = [(3, 8, 3, 2), (8, width, 3, 2), (width, width, 3, 1), (8, width, 1, 2)]
        sizes += [(width, 128, 3, 1)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convs = nn.ModuleList(
                nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
            self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.convs[0](x)))
        inner = torch.relu(self.norms[1](self.convs[1](x)))
        x = torch.relu(self.norms[2](self.convs[2](inner)) + self.norms[3](self.convs[3](x)))
        x = torch.relu(self.norms[4](self.convs[4](x)))
        return self.head(x.mean((2, 3)))


def test_activations_above_carry_on_in_every_step() -> None:
    """Each at its own weights: those of layers and norms, above and at the node, have moved."""
    model = any_affine(Branch())
    nn.init.ones_(model.norms[4].weight)
    nn.init.zeros_(model.norms[4].bias)
    one = client(model, 6, size=16, batch_size=3, steps=2, lr=0.05, **SETTINGS)
    found = separated(one)
    done = peeled(one, found, 2)
    first = done.trace.named("relu")
    assert done.lowest is first, done.stopped
    compared(found, done.known[first], one.truth("relu"))
    later = one.weights()[1]
    for name in ("convs.1.weight", "convs.3.weight", "norms.1.weight", "norms.3.bias"):
        moved = (later[name] - one.weights()[0][name]).norm()
        learnt = done.start.path.weights[1][name]
        assert float((learnt - later[name]).norm() / moved) < 1e-3
    del done.known[first]
    every = signals_of(done, first)
    counted = _counted(done, first, every)
    assert counted is not None
    assert counted < 1.02
    joined = joined_at(done, first, every, counted)
    assert joined is not None
    for told in joined.told:  # as they begin
        for step in found.steps:
            assert float(told.system.normal[:, step].sum((1, 2)).abs().max()) < 1e-9
        told.prepare(joined.value)
        assert torch.allclose(told.parts.sum(0), told.system.observed, atol=1e-12)


def test_skips_are_met_in_every_step() -> None:
    """Of the node alone: all above it is true, and so are the weights that act there."""
    one = client(any_affine(Skip(64, 28)), 4, size=16, batch_size=2, steps=2, lr=0.05, **SETTINGS)
    found = separated(one)
    pairs = compared(found, found.maps, one.truth(found.source.name))
    done = peeled(one, found, 0)
    for name in ("relu_2", "relu_1"):
        node = done.trace.named(name)
        value = found.maps.new_zeros(4, *done.trace.shape[node])
        for step, pair, true in zip(found.steps, pairs, one.truth(name), strict=True):
            value[step] = true[pair]
        done.known[node] = value
    for learnt, true_weights in zip(done.start.path.weights, one.weights(), strict=True):
        learnt.update({n: w for n, w in true_weights.items() if not n.startswith("convs.1")})
    first = done.trace.named("relu")
    solved = _solved(done, first)
    assert solved is not None
    assert solved[3]
    compared(found, solved[0], one.truth("relu"))


def test_a_wrong_mask_in_train_mode_is_put_right_and_no_other() -> None:
    """A wrong entry's signal is spread by the batch norm: what it leaves is no second one."""
    one, found = one_step()
    trace = one.trace()
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    spoilt = found.maps.clone()
    spoilt.view(-1)[spoilt.where(spoilt > 0, torch.inf).argmin()] = 0.0
    known, sure = {source: spoilt}, {source: torch.zeros_like(found.unsure)}
    solved = _solved(Peeled(trace, gradient_of(one.seen), own, known, sure), below)
    assert solved is not None
    assert torch.equal(known[source] > 0, found.maps > 0)
    assert solved[1] < 1e-5  # the residual


def test_a_row_that_no_mask_explains_keeps_its_masks() -> None:
    """What spoils a row may be something else: here its own gradient."""
    one, found = one_step()
    trace, gradient = one.trace(), dict(gradient_of(one.seen))
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    name = "layer4.0.conv1.weight"
    gradient[name] = gradient[name].clone()
    gradient[name][7] += normal(*gradient[name][7].shape) * gradient[name].std()
    known, sure = {source: found.maps.clone()}, {source: torch.zeros_like(found.unsure)}
    solved = _solved(Peeled(trace, gradient, own, known, sure), below)
    assert solved is not None
    assert solved[1] < 1e-5
    assert torch.equal(known[source] > 0, found.maps > 0)


def test_a_row_left_out_of_a_linear_layer_spoils_nothing() -> None:
    """Below linear layers, whose signals sum to anything, batch norm in train mode is peeled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = [nn.Flatten(), nn.Linear(128 * 16, 96), nn.ReLU(), nn.Linear(96, 10)]
    one = client(nn.Sequential(*list(chain())[:12], *head), 4, size=16)
    found = separated(one)
    assert found.layer.target == "15"
    unsure = torch.zeros_like(found.unsure)
    unsure[0] = True
    done = peeled(one, replace(found, unsure=unsure), 2)
    assert [node.name for node in done.known] == ["_14", "_11", "_8"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))


def test_a_row_may_stand_out_by_little() -> None:
    """Rows that were left out before do not count, however far they are off."""
    lack = torch.ones(20, 4, dtype=torch.float64)
    lack[3], lack[7] = 134.0, 9.0
    good = torch.ones(20, dtype=torch.bool)
    assert _stands_out(lack, good).nonzero().flatten().tolist() == [3]
    good[3] = False
    assert _stands_out(lack, good).nonzero().flatten().tolist() == [7]
    lack[7] = 2.0
    assert not _stands_out(lack, good).any()


def test_the_layer_below_is_peeled_over_steps() -> None:
    one, found = two_steps()
    done = peeled(one, found)
    assert done.lowest.name == "layer3_0_act2"
    compared(found, done.known[done.lowest], one.truth("layer3_0_act2"))
    first, later = one.weights()
    for name in ("layer4.0.conv1.weight", "layer4.0.downsample.0.weight"):
        moved = (later[name] - first[name]).norm()
        learnt = done.start.path.weights[1][name]
        assert float((learnt - later[name]).norm() / moved) < 1e-3


def test_a_record_of_two_epochs_appears_twice() -> None:
    one = client(resnet(), 4, batch_size=4, epochs=2, lr=0.05, **SETTINGS)
    found = separated(one)
    assert len(found.maps) == 8
    right(one, found)
    first, second = one.truth(found.source.name)
    assert float((first - second).norm() / first.norm()) > 100 * EXACT  # they differ
    chosen = found.once(4)
    assert sorted(chosen.tolist()) == sorted(found.steps[0].tolist())
    assert sorted(found.labels[chosen].tolist()) == sorted(one.batch.labels.tolist())


def test_steps_of_different_sizes() -> None:
    one = client(resnet(), 5, batch_size=3, epochs=1)
    found = separated(one)
    assert [len(step) for step in found.steps] == [3, 2]
    right(one, found)


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


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_in_eval_mode(steps: int) -> None:
    """No batch norm ties the records of a step together: all come in one group."""
    one = client(resnet(), 2 * steps, batch_size=2, steps=steps, batch_norm="eval", **SETTINGS)
    found = separated(one)
    assert len(found.steps) == 1
    true = torch.cat(one.truth(found.source.name)).flatten(1)
    found_, true_ = (nn.functional.normalize(maps) for maps in (found.maps.flatten(1), true))
    cosines = found_ @ true_.T
    assert float((1 - cosines.max(1).values).max()) < 1e-8
    pair = cosines.argmax(1)
    assert sorted(pair.tolist()) == list(range(2 * steps))
    assert (
        found.labels.tolist()
        == torch.cat(one.rows())[pair].apply_(lambda row: int(one.batch.labels[row])).tolist()
    )


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: any_affine(resnet()), 32),
        (lambda: chain(), 16),
        (lambda: any_affine(chain()), 16),
        (lambda: chain(affine=False), 16),
        (lambda: resnet("resnet-18", 0.25), 32),
        (lambda: any_affine(resnet("resnet-18", 0.25)), 32),
    ],
    ids=["affine", "chain", "affine-chain", "no-affine", "identity-skip", "affine-identity-skip"],
)
def test_networks_of_other_shapes(model: Any, size: int) -> None:
    one = client(model(), 4, size=size)
    found = separated(one)
    done = peeled(one, found)
    assert len(done.known) == 2, done.stopped
    free = not any(biases(done.trace, done.gradient, node) for node in done.known)
    for node, value in done.known.items():
        (true,) = one.truth(node.name)
        if free:  # nothing tells the size of the whole batch
            value = value * (true.norm() / value.norm())
        compared(found, value, [true])
    (pair,) = compared(found, found.maps * (1 if not free else float(
        one.truth(found.source.name)[0].norm() / found.maps.norm())),
        one.truth(found.source.name))  # fmt: skip
    assert found.labels.tolist() == one.batch.labels[pair].tolist()


# ---------------------------------------------------------------- refusals


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


def noisy(one: Client, share: float) -> Client:
    """With noise of this share of the update's root mean square in every entry."""
    update, rng = one.seen.update, seeded(9)
    whole = torch.cat([value.flatten() for value in update.values()])
    size = share * float(whole.square().mean().sqrt())
    moved = {n: v + size * torch.randn(v.shape, generator=rng) for n, v in update.items()}
    return replace(one, seen=replace(one.seen, update=moved))


def rounded(one: Client, bits: int) -> Client:
    """Every tensor at so many levels between its extremes."""

    def nearest(value: Tensor) -> Tensor:
        step = (value.max() - value.min()).clamp_min(1e-30) / (2**bits - 1)
        return ((value - value.min()) / step).round() * step + value.min()

    moved = {name: nearest(value) for name, value in one.seen.update.items()}
    return replace(one, seen=replace(one.seen, update=moved))


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


# ---------------------------------------------------------------- the parts


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


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.3}, SETTINGS])
def test_a_path_that_knows_every_part_is_that_of_torch(settings: dict[str, float]) -> None:
    training = LocalTraining(lr=0.1, **settings)  # type: ignore[arg-type]
    slopes = normal(4, 5)

    def walked(gradients: Tensor) -> list[Tensor]:
        weight = nn.Parameter(normal(5, seed=1))
        optimiser = torch.optim.SGD([weight], lr=training.lr, **settings)
        found = [weight.detach().clone()]
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimiser.step()
            found.append(weight.detach().clone())
        return found

    true = walked(slopes)
    parts = []
    for step in range(4):
        without = slopes.clone()
        without[step] = 0
        parts.append((walked(without)[-1] - true[-1]) / training.lr)
    known = torch.stack(parts)
    path = Path({"w": true[0]}, {"w": known.sum(0)}, training, 4)
    path.learn("w", known)
    for step in range(4):
        assert torch.allclose(path.weights[step]["w"], true[step], atol=1e-12)


def test_a_path_that_knows_nothing_gives_every_step_the_same_gradient() -> None:
    training = LocalTraining(lr=0.1, **SETTINGS)
    weight = nn.Parameter(normal(5, seed=1))
    optimiser = torch.optim.SGD([weight], lr=training.lr, **SETTINGS)  # type: ignore[arg-type]
    true = [weight.detach().clone()]
    for _ in range(3):
        weight.grad = normal(5)
        optimiser.step()
        true.append(weight.detach().clone())
    still = nn.Parameter(true[0].clone())
    optimiser = torch.optim.SGD([still], lr=training.lr, **SETTINGS)  # type: ignore[arg-type]
    for _ in range(3):
        still.grad = torch.zeros(5, dtype=torch.float64)
        optimiser.step()
    path = Path({"w": true[0]}, {"w": (still.detach() - true[-1]) / training.lr}, training, 3)
    for step in range(3):
        assert torch.allclose(path.weights[step]["w"], true[step], atol=1e-12)


def sums_to_zero(sizes: list[int]) -> Tensor:
    """Signals (N, 20, 6) of steps with so many records, in this order."""
    signals = normal(sum(sizes), 20, 6)
    for step in torch.split(torch.arange(len(signals)), sizes):
        signals[step] -= signals[step].mean((0, 2), keepdim=True)
    return signals


def test_records_of_one_step_are_told_by_their_sums() -> None:
    sizes = [3, 2]
    mixed = torch.tensor([4, 0, 3, 2, 1])
    amounts = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25], dtype=torch.float64)
    signals = (sums_to_zero(sizes) / amounts[:, None, None])[mixed]
    found, steps = together(signals, sizes)
    assert sorted(sorted(mixed[step].tolist()) for step in steps) == [[0, 1, 2], [3, 4]]
    for step in steps:
        ratio = found[step] / amounts[mixed[step]]
        assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-9)
        assert (found[step] > 0).all()


def test_one_step_gives_one_factor() -> None:
    amounts = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found, (step,) = together(sums_to_zero([3]) / amounts[:, None, None], [3])
    assert step.tolist() == [0, 1, 2]
    assert torch.allclose(found / found[0], amounts / amounts[0], rtol=1e-9)
    assert (found > 0).all()


def test_sums_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NotApplicable, match="do not add up to zero in 1 steps"):
        together(normal(4, 20, 6), [4])
    with pytest.raises(NotApplicable, match="do not add up to zero in 3 steps"):
        together(sums_to_zero([3, 2]), [2, 2, 1])
    with pytest.raises(NotApplicable, match=r"form steps of \[2, 3\], not \[1, 4\]"):
        together(sums_to_zero([3, 2]), [4, 1])
    signals = sums_to_zero([4])
    signals[2] *= -1
    with pytest.raises(NotApplicable, match="only with negative shares"):
        together(signals, [4])


def test_vectors_of_disjoint_supports_are_told_apart() -> None:
    truth = torch.zeros(7, 2, dtype=torch.float64)
    truth[[0, 3, 4], 0] = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    truth[[1, 6], 1] = torch.tensor([0.5, 2.0], dtype=torch.float64)
    truth /= truth.norm(dim=0)
    turned = truth @ torch.linalg.qr(normal(2, 2)).Q
    found = torch.stack(supports(turned), 1)
    assert torch.allclose(found, truth, atol=1e-12)  # each by the sign of its first entry


def test_the_line_of_most_zeros() -> None:
    u = normal(3, 60)
    shift, slope = normal(3, 1, seed=1), normal(3, 1, seed=2)
    y = normal(3, 60, seed=3)
    y[:, ::2] = 0.0
    found_shift, found_slope, far = silent(y - shift - slope * u, u, 4)
    assert torch.allclose(found_shift, shift, atol=1e-9)
    assert torch.allclose(found_slope, slope, atol=1e-9)
    assert float(far.max()) < 1e-9
    *_, far = silent(normal(3, 60, seed=4), u, 4)
    assert float(far.min()) > 0.05


def test_a_line_of_one_record_alone_is_not_that_of_zeros() -> None:
    """Under a mean over positions the active entries of a record all have one value."""
    u = normal(1, 32)
    y = torch.zeros(1, 32, dtype=torch.float64)
    y[0, :13], y[0, 20:29] = 1.0, -2.0  # 13 of the first 16, 9 of the others
    shift, slope, _ = silent(y - 0.3 - 0.7 * u, u, 2)
    assert float(shift) == pytest.approx(0.3)
    assert float(slope) == pytest.approx(0.7)


def few_zeros() -> tuple[Tensor, Tensor, Tensor]:
    """û, signals of four records, five in sixty of them zero, and what was sent to each record, of
    which only its factor is wrong."""
    u, sent = normal(3, 60), 1 + normal(3, 60, seed=3).abs()
    y = sent.clone()
    y[:, 3:60:12] = 0.0
    return u, y, sent * torch.tensor([0.8, 1.3, 0.9, 1.1]).double().repeat_interleave(15)


def test_the_line_of_few_zeros_is_told_by_what_was_sent() -> None:
    u, y, sent = few_zeros()
    x = y - 0.3 - 0.7 * u
    assert (silent(x, u, 4)[0] - 0.3).abs().min() > 0.1  # by its zeros alone it is not
    shift, slope, far = passing(x, u, sent, 4)
    assert torch.allclose(shift, torch.full_like(shift, 0.3), atol=1e-9)
    assert torch.allclose(slope, torch.full_like(slope, 0.7), atol=1e-9)
    assert float(far.max()) < 1e-9
    y[:, 3:60:12] = sent[:, 3:60:12]
    assert float(passing(sent - 0.3 - 0.7 * u, u, sent, 4)[2].min()) == math.inf  # no zeros


def test_only_lines_that_fit_nothing_are_found_anew() -> None:
    u, y, sent = few_zeros()
    shift, slope = torch.full((3, 1), 0.3).double(), torch.full((3, 1), 0.7).double()
    shift[1] += 1.0
    x = y - 0.3 - 0.7 * u
    x[2] = normal(60, seed=9)  # no line would fit
    one = _Passed(x, u, shift.clone(), slope.clone(), torch.ones(3).double())
    one.mend(sent, 4)
    assert torch.allclose(one.shift[:2], torch.full((2, 1), 0.3).double(), atol=1e-9)
    assert float(one.shift[0]) == float(shift[0])
    assert float(one.shift[2]) == float(shift[2])
    assert float(one.far[1]) < 1e-9
    assert one.far[[0, 2]].tolist() == [1.0, 1.0]


def test_lines_against_what_was_sent_are_not_found() -> None:
    """Where a record's entries are all active and another's all zero, two lines fit: the one by
    which records got what was sent counts."""
    u = normal(1, 20)
    y = torch.zeros(1, 20, dtype=torch.float64)
    y[0, :10] = 2.0
    sent = torch.ones(1, 20, dtype=torch.float64)
    shift, slope, _ = passing(y - 0.3 - 0.7 * u, u, sent, 2)
    assert float(shift) == pytest.approx(0.3)
    assert float(slope) == pytest.approx(0.7)


def test_the_head_of_later_steps_follows_from_the_errors() -> None:
    """Where all records have the same features, what each step added is exact."""
    one = client(resnet(), 6, batch_size=3, steps=2, **SETTINGS)
    trace = one.trace()
    errors = normal(6, 10).softmax(1)
    errors[torch.arange(6), torch.arange(6)] -= 1
    features = normal(1, 256, seed=1).abs().expand(6, -1)
    steps = (torch.arange(3), torch.arange(3, 6))
    gradient = {"fc.weight": errors.T @ features, "fc.bias": errors.sum(0)}
    path = Path(trace.parameters(), gradient, one.seen.training, 2)
    wanted = Path(trace.parameters(), gradient, one.seen.training, 2)
    wanted.learn("fc.weight", torch.stack([errors[s].T @ features[s] for s in steps]))
    wanted.learn("fc.bias", torch.stack([errors[s].sum(0) for s in steps]))
    _learn_head(trace, errors, steps, path)
    for name in gradient:
        assert torch.allclose(path.weights[1][name], wanted.weights[1][name], atol=1e-9)


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


def test_rows_that_stand_out_do_not_count() -> None:
    left, truth = normal(40, 2), torch.tensor([2.0, -1.0], dtype=torch.float64)
    values = left @ truth
    values[:2] += 50.0
    found, misfit = most(left, values)
    assert torch.allclose(found, truth, atol=1e-12)
    assert misfit < 1e-12
    _, misfit = most(left, normal(40, seed=1))
    assert misfit > 0.3


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


def test_the_biases_before_a_relu() -> None:
    """Those of the batch norms that are added up in it, not those below the convolutions."""
    one, _ = one_step()
    trace, gradient = one.trace(), gradient_of(one.seen)

    def found(name: str) -> list[str]:
        node: fx.Node = trace.named(name)
        return sorted(biases(trace, gradient, node))

    assert found("layer4_0_act1") == ["layer4.0.bn1.bias"]
    assert found("layer3_0_act2") == ["layer3.0.bn2.bias", "layer3.0.downsample.1.bias"]


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


def test_the_time_that_is_left_counts_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("leakgauge.attacks._peeling.time.monotonic", lambda: now)
    watch = Watch(Resources(seconds=10), 1)
    now = 1009.0
    assert watch.open()
    assert not watch.notes
    now = 1011.0
    assert not watch.open()
    assert watch.notes == ["stopped by the time budget of 10 s"]


def test_a_wrong_row_of_small_signals_is_noticed() -> None:
    """It hardly shows in the residual of all rows."""
    one, found = one_step()
    trace, gradient = one.trace(), dict(gradient_of(one.seen))
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    name = "layer4.0.conv1.weight"
    whole = gradient[name]
    spoilt = normal(*whole[7].shape)
    spoilt *= 2e-5 * whole.norm() / spoilt.norm()  # below the residual of rounding
    gradient[name] = whole.clone()
    gradient[name][7] += spoilt

    def solved(gradient: Named) -> Tensor:
        known, sure = {source: found.maps.clone()}, {source: torch.zeros_like(found.unsure)}
        made = _solved(Peeled(trace, gradient, own, known, sure), below)
        assert made is not None
        return made[0]

    right = solved(gradient | {name: whole})
    assert float((solved(gradient) - right).norm() / right.norm()) < 1e-6


def test_decoders_read_from_the_first_node_with_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal goes further down, which another update may not."""
    read: list[str] = []

    def fit(trace: Trace, nodes: list[str], *given: Any, **options: Any) -> Kept:
        read.extend(nodes)
        return Kept(facts={})

    monkeypatch.setattr("leakgauge.attacks.separate_and_decode.fit", fit)
    monkeypatch.setattr("leakgauge.attacks.separate_and_decode.ENOUGH", 1)
    one = client(resnet(width=0.25), 2)
    aim = Target(one.seen.setting, one.seen.training, 2, public=photos(size=32))
    made = SeparateAndDecode().prepare(aim, seeded())
    assert read == ["layer3_0_act2", "layer4_0_act1"]  # of 64 × 8 × 8 values, then of fewer
    assert made.kept is not None
    assert made.kept.facts["reach"] == "layer3_0_act2"
