"""Trap weights — F. Boenisch, A. Dziedzic, R. Schuster, A. S. Shamsabadi, I. Shumailov,
N. Papernot: "When the Curious Abandon Honesty: Federated Learning Is Not Private", EuroS&P 2023,
https://arxiv.org/abs/2112.02918

Each row of a linear layer that reads the image has a random half of negative weights, and in the
other half the same magnitudes in another order, positive and scaled down:

    w = −|ν| on one half,   w = s·|ν| permuted on the other,   ν ~ N(0, σ²),   s < 1

so that ⟨w, x⟩ of an image in [0, 1] is mostly negative, and few records switch a unit on. A record
that is alone in doing so is x = (∂L/∂W_i) / (∂L/∂b_i).

Where local training normalises, x = (p − mean)/std, the layer gets w·std and the bias ⟨w, mean⟩: it
then acts on the pixels p. Where convolutions are in front, they are made to hand the image on.

Needs: the local training and the number of records as a cap. No public images.
Differs from the paper: the normalisation is folded in; candidates that mix others are left behind.
`magnitudes="independent"` and `amplitude="host"` make the trap harder to see: no magnitude occurs
twice, and the rows are as large as the host's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge.attacks._layers import gradient_sum
from leakgauge.attacks.active._imprint import Reader, channelwise, knowledge, read, reader
from leakgauge.attacks.analytic import unexplained
from leakgauge.errors import InputError, NotApplicable
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, Range, count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

PAPER = Paper(
    "boenisch2023",
    "Boenisch, Franziska and Dziedzic, Adam and Schuster, Roei and Shamsabadi, Ali Shahin and "
    "Shumailov, Ilia and Papernot, Nicolas",
    "When the Curious Abandon Honesty: Federated Learning Is Not Private",
    2023,
    "IEEE European Symposium on Security and Privacy",
    "https://arxiv.org/abs/2112.02918",
)


@dataclass(frozen=True)
class TrapWeights:
    """Rows that only one record switches on (Boenisch 2023)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    rows: int | None = option(None, count(100_000))  # None: every unit of the layer
    scale: float = option(0.95, Range(0, 1, open=True))
    sigma: float = option(0.5, POSITIVE)
    magnitudes: Literal["paired", "independent"] = "paired"
    amplitude: Literal["sigma", "host"] = "sigma"
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        if not 0 < self.scale < 1:
            raise InputError(f"scale must lie between 0 and 1, got {self.scale}: units must be off")
        model = copy.deepcopy(target.model)
        layer = reader(model, target)
        weight, bias = model.get_parameter(layer.weight), model.get_parameter(layer.bias)
        count = len(weight) if self.rows is None else self.rows
        if not 1 <= count <= len(weight):
            raise NotApplicable(f"rows is {count}, but {layer.weight!r} has {len(weight)} units")
        pixels = prod(target.record.shape)
        units = torch.randperm(len(weight), generator=rng)[:count]
        rows = self._rows(count, pixels, rng)
        shift = torch.zeros(count)
        if not layer.raw:
            mean, std = (
                part.repeat_interleave(pixels // len(part))
                for part in channelwise(pictures(target.record))
            )
            rows, shift = rows * std, rows @ mean
        if self.amplitude == "host":
            factor = weight.detach().square().mean().sqrt() / rows.square().mean().sqrt()
            rows, shift = rows * factor, shift * factor
        with torch.no_grad():
            weight[units] = 0.0
            weight[units, :pixels] = rows
            bias[units] = shift
        return Preparation(layer.kept(units), (model,))

    def _rows(self, count: int, pixels: int, rng: torch.Generator) -> Tensor:
        half = pixels // 2
        negative, positive = (
            self.sigma * torch.randn(count, half, generator=rng).abs() for _ in range(2)
        )
        if self.magnitudes == "paired":
            positive = negative.gather(1, torch.rand(count, half, generator=rng).argsort(1))
        places = torch.rand(count, pixels, generator=rng).argsort(1)[:, : 2 * half]
        return torch.zeros(count, pixels).scatter(
            1, places, torch.cat([-negative, self.scale * positive], 1)
        )

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        kept, _, records = knowledge(seen, "trap-weights")
        layer, units = Reader.of(kept)
        weight = gradient_sum(seen, layer.weight)[units, : prod(seen.record.shape)]
        bias = gradient_sum(seen, layer.bias)[units]
        images, quotients, candidates = read(weight, bias, seen.record, layer.raw, records)
        return Reconstruction(
            inputs=images,
            labels=None,
            residual=unexplained(weight, quotients),
            facts={"rows": len(units), "candidates": candidates},
        )
