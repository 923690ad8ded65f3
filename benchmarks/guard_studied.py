"""A server that has read the guard's source: models made to leak and to pass its tests.

Each is an imprint in the sense of Robbing the Fed (units that measure one thing, each with its own
threshold), or units that are each on for few records, in a layer and a dress that tests of an
earlier guard did not look at. They are here so that the guard can be held against them; numbers are
in docs/guard-evaluation.md. Nothing here sends anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from leakgauge.fl.local import ready
from leakgauge.types import LocalTraining, Named

Kind = Literal["relu", "leaky", "convolution", "product", "norm"]
Functional = Literal["mean", "checkerboard"]


class Product(nn.Module):
    """x @ W + b with parameters of its own: no layer that PyTorch knows by name."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(inputs, units).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(units).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x.flatten(1) @ self.weight + self.bias
        return out


class Host(nn.Module):
    """A first layer of one kind, and two linear layers behind it."""

    def __init__(self, kind: Kind, shape: tuple[int, int, int], classes: int, units: int = 512):
        super().__init__()
        inputs = math.prod(shape)
        self.flat: nn.Module = nn.Flatten()
        self.first: nn.Module = nn.Linear(inputs, units)
        if kind in ("convolution", "norm"):
            self.flat, self.first = nn.Identity(), nn.Conv2d(shape[0], units, shape[1:])
        elif kind == "product":
            self.first = Product(inputs, units)
        self.norm = nn.BatchNorm1d(units) if kind == "norm" else nn.Identity()
        self.act = nn.LeakyReLU(0.01) if kind == "leaky" else nn.ReLU()
        self.second = nn.Linear(units, 256)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.first(self.flat(x)).flatten(1))
        out: Tensor = self.head(self.act(self.second(self.act(z))))
        return out

    def rows(self) -> Tensor:
        """The first layer's weight, one row per unit: a view, also of the gradient's layout."""
        return as_rows(self.first, self.first.get_parameter("weight").data)


def as_rows(layer: nn.Module, value: Tensor) -> Tensor:
    return value.T if isinstance(layer, Product) else value.flatten(1)


@dataclass(frozen=True)
class Studied:
    """What the server sends, and how it hides.

    `share` of the units carry the imprint; the others stay, as padding. `padding` adds to each row
    a pattern of fine stripes that images hardly have, so many times as large as what is measured.
    `scatter` adds to each row a random part of what images do have. `upper` leaves the thresholds
    to the brightest share of the images, one record apart.
    """

    kind: Kind = "relu"
    functional: Functional = "mean"
    share: float = 0.45
    padding: float = 0.0
    scatter: float = 0.0
    upper: float = 1.0

    def training(self, training: LocalTraining) -> LocalTraining:
        """Running statistics take part only where clients train with them."""
        return replace(training, batch_norm="eval") if self.kind == "norm" else training

    def tamper(
        self, model: Host, seen: Tensor, training: LocalTraining, rng: torch.Generator
    ) -> Callable[[Named], Tensor]:
        """Change the model, given public images as they enter it, and return how its update is
        read: to images as the layer sees them."""
        if self.kind == "norm":
            return _buffers(model, ready(model, training), seen)
        layer, rows = model.first, model.rows()
        inputs = rows.shape[1]
        count = int(self.share * len(rows))
        units = torch.randperm(len(rows), generator=rng)[:count]
        v = _functional(self.functional, seen.shape[1:])
        h = seen.flatten(1) @ v
        v, h = v / h.std(), h / h.std()
        places = 1 - self.upper + self.upper * (torch.arange(count) + 0.5) / count
        cuts = h.quantile(places)
        scale = torch.empty(count).uniform_(0.5, 2.0, generator=rng)
        pattern = torch.randn(count, inputs, generator=rng)
        stripes = _fine(pattern, seen.shape[1:])
        stripes *= self.padding * v.norm() / stripes.norm(dim=1, keepdim=True)
        mixed = pattern @ seen[:512].flatten(1).T @ seen[:512].flatten(1)
        mixed *= self.scatter / (mixed @ seen[:512].flatten(1).T).std(1, keepdim=True)
        bias, following = layer.get_parameter("bias").data, model.second.weight.data
        # Less loud than the layer was, so that no bias stands out.
        loud = 0.3 * float((seen[:256].flatten(1) @ rows.T).std())
        rows[units] = loud * scale[:, None] * (v + stripes + mixed)
        bias[units] = -loud * scale * cuts
        column = torch.randn(len(following), generator=rng) * float(following.std())
        following[:, units] = column[:, None] / scale

        def read(update: Named) -> Tensor:
            weight = as_rows(layer, update["first.weight"])[units].double() * scale[:, None]
            strength = update["first.bias"][units].double() * scale
            weight, strength = weight[:-1] - weight[1:], strength[:-1] - strength[1:]
            return _divided(weight, strength).view(-1, *seen.shape[1:])

        return read


def _buffers(model: Host, copied: nn.Module, seen: Tensor) -> Callable[[Named], Tensor]:
    """Every unit is on for one image of sixty-four, by running statistics alone."""
    assert isinstance(copied, Host)
    with torch.no_grad():
        z = copied.first(copied.flat(seen)).flatten(1)
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert model.norm.running_mean is not None
    assert model.norm.running_var is not None
    model.norm.running_mean.copy_(z.quantile(1 - 1 / 64, dim=0))
    model.norm.running_var.copy_(z.var(0))

    def read(update: Named) -> Tensor:
        weight, strength = update["first.weight"].flatten(1).double(), update["first.bias"].double()
        return _divided(weight, strength).view(-1, *seen.shape[1:])

    return read


def _divided(weight: Tensor, strength: Tensor) -> Tensor:
    kept = strength.abs() > 1e-7 * strength.abs().max()
    return weight[kept] / strength[kept, None]


def _functional(name: Functional, shape: torch.Size) -> Tensor:
    """What all units measure, as a row of length one: brightness, or fine contrast."""
    row = torch.ones(shape)
    if name == "checkerboard":
        lines, columns = torch.meshgrid(*(torch.arange(n) for n in shape[1:]), indexing="ij")
        row = row * (1.0 - 2.0 * ((lines + columns) % 2))
    return row.flatten() / math.sqrt(row.numel())


def _fine(pattern: Tensor, shape: torch.Size) -> Tensor:
    """The finest stripes of random rows: a cosine transform with all but its last quarter cut."""
    channels, lines, columns = shape
    bases = []
    for n in (lines, columns):
        place = torch.arange(n) + 0.5
        basis = torch.cos(math.pi / n * torch.arange(n)[:, None] * place)  # (frequency, place)
        bases.append(basis[3 * n // 4 :] * math.sqrt(2 / n))
    rows, columns_ = (b.T @ b for b in bases)  # projections
    return (rows @ pattern.view(-1, channels, lines, columns) @ columns_).flatten(1)


STUDIED: dict[str, Studied] = {
    "row-scaled, padded": Studied(padding=1.0),
    "checkerboard": Studied(functional="checkerboard"),
    "convolution as host": Studied("convolution", padding=1.0),
    "x @ W as host": Studied("product", padding=1.0),
    "leaky ReLU as host": Studied("leaky", padding=1.0),
    "batch-norm buffers alone": Studied("norm"),
    "scattered": Studied(padding=1.0, scatter=0.3),
    "brightest tenth only": Studied(share=0.03, padding=1.0, upper=0.1),
}
"""The last one still passes: it reads fewer records than the probe tolerates."""
