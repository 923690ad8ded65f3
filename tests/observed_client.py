"""A client that trained on photographs, and the truth of what its update shows, by torch.optim.

The truth is what the network itself computes of the records, at the weights that each step began
with.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakgauge import models
from leakgauge.attacks._known import Peeled
from leakgauge.attacks._peeling import Watch, peel
from leakgauge.attacks._separation import Separated, gradient_of, separable
from leakgauge.attacks._trace import Trace
from leakgauge.data.photos import photos
from leakgauge.fl.local import minibatches, train
from leakgauge.fl.model import setting
from leakgauge.records import Scale
from leakgauge.types import (
    Batch,
    LocalTraining,
    Named,
    Observation,
    Resources,
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


def resnet(
    name: str = "resnet-10", width: float = 0.5, size: int = 32, norm: str = "batch"
) -> nn.Module:
    shape = (3, size, size)
    return models.make(name, shape=shape, classes=10, rng=seeded(), width=width, norm=norm)


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
    """The model with weights of both signs and biases in its norms."""
    rng = seeded(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
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


@cache
def one_step() -> tuple[Client, Separated]:
    one = client(resnet(), 4)
    return one, separated(one)


@cache
def two_steps() -> tuple[Client, Separated]:
    one = client(resnet(), 6, batch_size=3, steps=2, **SETTINGS)
    return one, separated(one)


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
