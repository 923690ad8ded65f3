"""How records are spread over clients: IID, label, quantity and feature skew, Dirichlet.

The settings are those of FedLeak (Fan et al., 2025, §5 and Tables 5–6). A partition gives every
client the indices of its records; no record goes to two clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.types import Dataset


class Partition(Protocol):
    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]: ...


@dataclass(frozen=True)
class Iid:
    """Equal shares of a shuffled set."""

    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
        _check(data, clients)
        return list(torch.randperm(len(data), generator=rng).tensor_split(clients))


@dataclass(frozen=True)
class LabelSkew:
    """Every client holds records of `classes` classes only.

    A class is shared out evenly among the clients that hold it.
    """

    classes: int = option(2, count(1_000_000))

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ValueError(f"classes must be at least 1, got {self.classes}")

    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
        _check(data, clients)
        total = len(data.classes)
        if self.classes > total:
            raise InputError(
                f"label skew of {self.classes} classes per client, but {data.name} has {total}"
            )
        order = torch.randperm(total, generator=rng).tolist()
        # Walking round the circle of classes uses each about equally often.
        held = [[order[(k * self.classes + j) % total] for j in range(self.classes)]
                for k in range(clients)]  # fmt: skip
        shares: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in range(total):
            holders = [k for k in range(clients) if label in held[k]]
            if holders:
                parts = _shuffled(data.labels == label, rng).tensor_split(len(holders))
                for k, part in zip(holders, parts, strict=True):
                    shares[k].append(part)
        return [torch.cat(share) for share in shares]


@dataclass(frozen=True)
class QuantitySkew:
    """Client sizes rise evenly from `smallest` to `largest` records."""

    smallest: int = option(50, count(100_000_000))
    largest: int = option(250, count(100_000_000))

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(f"need 1 ≤ smallest ≤ largest, got {self.smallest}, {self.largest}")

    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
        _check(data, clients)
        sizes = torch.linspace(self.smallest, self.largest, clients).round().long().tolist()
        if sum(sizes) > len(data):
            raise InputError(
                f"quantity skew asks for {sum(sizes)} records in all ({clients} clients of "
                f"{self.smallest} to {self.largest}), {data.name} has {len(data)}: lower `largest`"
            )
        order = torch.randperm(len(data), generator=rng)[: sum(sizes)]
        return list(torch.split(order, sizes))


@dataclass(frozen=True)
class FeatureSkew:
    """Some clients hold simple images, others detailed ones.

    Records are ranked by total variation and cut into `groups` percentile groups; client k draws
    from group k mod `groups` (group 0 holds the simplest images).
    """

    groups: int = option(5, count(1_000_000))

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"groups must be at least 1, got {self.groups}")

    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
        _check(data, clients)
        ranked = roughness(data.inputs).argsort(stable=True).tensor_split(self.groups)
        shares: list[Tensor] = [torch.empty(0, dtype=torch.long)] * clients
        for g, group in enumerate(ranked):
            members = range(g, clients, self.groups)
            if len(members):
                shuffled = group[torch.randperm(len(group), generator=rng)]
                parts = shuffled.tensor_split(len(members))
                for k, part in zip(members, parts, strict=True):
                    shares[k] = part
        return shares


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided in proportions from Dirichlet(alpha).

    A small alpha is a strong skew.
    """

    alpha: float = option(0.5, POSITIVE)

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}")

    def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
        _check(data, clients)
        shares: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in range(len(data.classes)):
            members = _shuffled(data.labels == label, rng)
            # Dirichlet = normalised gammas, as logarithms because those of a small alpha underflow:
            # Gamma(alpha) is Gamma(alpha + 1) · U^(1/alpha).
            shape = torch.full((clients,), self.alpha, dtype=torch.float64)
            gammas = torch._standard_gamma(shape + 1, generator=rng)
            uniform = torch.rand(clients, dtype=torch.float64, generator=rng)
            proportions = (gammas.log() + uniform.log() / shape).softmax(0)
            cuts = (proportions.cumsum(0)[:-1] * len(members)).round().long()
            for share, part in zip(shares, members.tensor_split(cuts.cpu()), strict=True):
                share.append(part)
        return [torch.cat(share) for share in shares]


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "label-skew": LabelSkew,
    "quantity-skew": QuantitySkew,
    "feature-skew": FeatureSkew,
    "dirichlet": Dirichlet,
}


def roughness(inputs: Tensor) -> Tensor:
    """Anisotropic total variation of each image, (N,)."""
    across = inputs.diff(dim=-1).abs().mean(dim=(1, 2, 3))
    down = inputs.diff(dim=-2).abs().mean(dim=(1, 2, 3))
    return across + down


def _shuffled(mask: Tensor, rng: torch.Generator) -> Tensor:
    members = mask.nonzero().flatten()
    return members[torch.randperm(len(members), generator=rng)]


def _check(data: Dataset, clients: int) -> None:
    if not 1 <= clients <= len(data):
        raise InputError(f"{clients} clients cannot share the {len(data)} records of {data.name}")
