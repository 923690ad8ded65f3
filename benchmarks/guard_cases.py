"""What the guard is evaluated on: data, networks, federations, and the attacks that are sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakgauge import data as datasets
from leakgauge import models
from leakgauge.detectors import WarmUp
from leakgauge.fl.partition import Dirichlet, Iid, LabelSkew, Partition
from leakgauge.guard import Policy
from leakgauge.types import Dataset


@dataclass(frozen=True)
class Data:
    """Images of the clients, and public ones that are no client's."""

    private: Dataset
    public: Dataset

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.private.inputs.shape[1:]
        return channels, height, width


def load_data(quick: bool) -> Data:
    """CIFAR-10 where LEAKGAUGE_DATA is set; else the built-in photographs, every third public."""
    if os.environ.get("LEAKGAUGE_DATA") and not quick:
        test = datasets.load("cifar10", split="test")
        return Data(datasets.load("cifar10", split="train"), part(test, torch.arange(6000)))
    whole = datasets.load("photos", size=16 if quick else 32, per_photo=200)
    third = torch.arange(len(whole)) % 3 == 0
    return Data(part(whole, (~third).nonzero()[:, 0]), part(whole, third.nonzero()[:, 0]))


def part(whole: Dataset, index: Tensor) -> Dataset:
    return Dataset(whole.name, whole.inputs[index], whole.labels[index], whole.classes)


def strided(shape: tuple[int, int, int], classes: int, channels: int = 8) -> nn.Module:
    """Three strided convolutions with batch norm: small enough to train SEER on."""
    layers: list[nn.Module] = []
    inputs = shape[0]
    for outputs in (channels, 2 * channels, 4 * channels):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _named(name: str, shape: tuple[int, int, int], classes: int, **options: Any) -> nn.Module:
    """A network of `models`, with weights that depend on torch's global generator."""
    rng = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return models.make(name, shape=shape, classes=classes, rng=rng, **options)


HOSTS: dict[str, Callable[..., nn.Module]] = {
    "mlp": partial(_named, "mlp", hidden=[512, 256]),
    "cnn": partial(_named, "cnn"),
    "resnet-bn": partial(_named, "resnet-10", width=0.25),
    "resnet-gn": partial(_named, "resnet-10", width=0.25, norm="group"),
    "vit": partial(_named, "vit-small", dim=64, depth=3, heads=4),
    "strided": strided,
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9},
    "adam": {"lr": 1e-3, "optimiser": "adam", "weight_decay": 1e-4},
}
PARTITIONS: dict[str, Partition] = {
    "iid": Iid(),
    "dirichlet": Dirichlet(0.5),
    "label-skew": LabelSkew(2),
}
Start = Literal["fresh", "pretrained", "zero-head"]


@dataclass(frozen=True)
class Variant:
    """An attack with its options, and the networks it is sent to."""

    attack: str
    hosts: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        chosen = ", ".join(f"{key} {value}" for key, value in self.options.items())
        return f"{self.attack} ({chosen})" if chosen else self.attack


ADAPTIVE = {"magnitudes": "independent", "amplitude": "host"}
DENSE, ALL = ("mlp", "cnn"), ("mlp", "cnn", "resnet-bn", "resnet-gn", "vit")
VARIANTS: tuple[Variant, ...] = (
    Variant("robbing-the-fed", DENSE),
    Variant("robbing-the-fed", DENSE, {"noise": 0.1, "functional": "random"}),
    Variant("robbing-the-fed", ALL, {"form": "block"}),
    Variant("trap-weights", DENSE),
    Variant("trap-weights", DENSE, ADAPTIVE),
    Variant("fishing", ALL),
    Variant("fishing", ALL, {"bias": 10.0, "row": 0.5}),
    Variant("fishing", ALL, {"camouflage": 0.2}),
    Variant("fishing", ALL, {"by": "feature"}),
    Variant("decepticons", ("vit",)),
    Variant("loki", ALL),
    Variant("seer", ("strided",)),
)
RECOVERIES: tuple[Variant, ...] = (
    Variant("robbing-the-fed", ("mlp",)),
    Variant("robbing-the-fed", ("cnn",)),
    Variant("trap-weights", ("mlp",)),
    Variant("trap-weights", ("cnn",)),
    Variant("trap-weights", ("mlp",), ADAPTIVE),
)


@dataclass(frozen=True)
class Federation:
    """One honest federation, and whether the attacks are sent to its clients too."""

    host: str
    optimiser: str = "momentum"
    partition: str = "dirichlet"
    start: Start = "fresh"
    epsilon: float | None = None  # of clip-and-noise on every update
    attacks: bool = False
    rounds: int = 5
    steps: int = 8
    batch: int = 32
    every: bool = False  # every policy of POLICIES, beside the one that is evaluated

    @property
    def id(self) -> str:
        noise = f"dp-{self.epsilon:g}" if self.epsilon else "plain"
        parts = (self.host, self.optimiser, self.partition, self.start, noise)
        return "/".join((*parts, f"{self.rounds}x{self.steps}x{self.batch}"))


POLICIES = {
    "warm-up": Policy(warm_up=WarmUp()),
    "head invariant": Policy(averaging="plain"),
}
"""What a client can add to the default."""


def federations(quick: bool) -> list[Federation]:
    if quick:
        return [
            Federation("mlp", attacks=True, rounds=2, steps=2),
            Federation("cnn", "adam", "iid", attacks=True, rounds=2, steps=2),
        ]
    hosts = [host for host in HOSTS if host != "strided"]
    pairs = [(o, p) for o in OPTIMISERS for p in PARTITIONS]
    pairs.sort(key=lambda pair: pair not in FIRST)
    plain = [
        Federation(host, optimiser, partition, attacks=(optimiser, partition) in ATTACKED)
        for optimiser, partition in pairs
        for host in hosts
    ]
    special = [Federation(host, start="pretrained", partition="iid", rounds=3) for host in hosts]
    special += [
        Federation(
            host, optimiser, partition, "zero-head", attacks=optimiser == "momentum", rounds=5
        )
        for optimiser, partition in (("momentum", "dirichlet"), ("adam", "label-skew"))
        for host in hosts
    ]
    noised = [
        Federation(host, epsilon=epsilon, rounds=3) for host in hosts for epsilon in (1e3, 1e5)
    ]
    # One step of eight records per round: the only training that SEER can read.
    joint = Federation("strided", "sgd", "iid", attacks=True, steps=1, batch=8, every=True)
    ahead = len(FIRST) * len(hosts)
    return [*plain[:ahead], *special, *plain[ahead:], *noised, joint]


ATTACKED = {("momentum", "dirichlet"), ("adam", "iid")}
FIRST = (("momentum", "dirichlet"), ("adam", "label-skew"))
"""What a part of the evaluation starts with: the usual, and the hardest."""
