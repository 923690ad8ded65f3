"""Robbing the Fed — L. Fowl, J. Geiping, W. Czaja, M. Goldblum, T. Goldstein: "Robbing the Fed:
Directly Obtaining Private Data in Federated Learning with Modified Models", ICLR 2022,
https://arxiv.org/abs/2110.13057

Every unit of a linear layer measures the same functional h(x) = ⟨v, x⟩, such as the brightness, and
is on above its own threshold t_i, a quantile of h over public images; behind its ReLU all units
receive the same error. Neighbours then differ by the records with t_i < h(x) ≤ t_(i+1), and a
record alone in its bin is

    x = (∂L/∂W_i − ∂L/∂W_(i+1)) / (∂L/∂b_i − ∂L/∂b_(i+1))

Of B records, B·(1 − 1/k)^(B−1) are alone in one of k bins on average.

`form="parameters"` changes only weights: the first linear layer, where it reads the image or
convolutions in front of it can be made to hand the image on, and the next one. `form="block"`, the
paper's own, puts Linear, ReLU, Linear in front of any network: a check of names and shapes sees it.

Needs: the local training, the number of records as a cap, and public images of the same kind.
Differs from the paper: thresholds are measured quantiles, not those of a fitted normal
distribution; changed units are in random order, and `noise` disguises their rows. Several local
steps are read like one: the sum of their gradients.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from torch import nn

from leakgauge.attacks._layers import gradient_sum
from leakgauge.attacks.active._imprint import (
    Functional,
    Reader,
    bins_of,
    block,
    knowledge,
    neighbours,
    read,
    reader,
    repeated,
)
from leakgauge.attacks.analytic import unexplained
from leakgauge.errors import InputError, NotApplicable
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, count, option
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
    "fowl2022",
    "Fowl, Liam and Geiping, Jonas and Czaja, Wojciech and Goldblum, Micah and Goldstein, Tom",
    "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models",
    2022,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2110.13057",
)


@dataclass(frozen=True)
class RobbingTheFed:
    """An extra layer sorts images into bins (Fowl 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    form: Literal["parameters", "block"] = "parameters"
    bins: int | None = option(None, count(100_000, 2))  # None: every unit; 512 in a block
    functional: Functional = "mean"
    noise: float = option(0.0, FROM_0)  # on the rows, relative to their own size
    gain: float = option(1.0, POSITIVE)  # behind it: raise it where clients send rounded weights
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        if self.bins is not None and self.bins < 2:
            raise InputError(f"bins must be at least 2, got {self.bins}")
        model = copy.deepcopy(target.model)
        if self.form == "block":
            count = 512 if self.bins is None else self.bins
            rows, biases = bins_of(target, count, self.functional, False, self.noise, rng)
            imprint = block(pictures(target.record).shape, rows, biases, self.gain, rng)
            model = nn.Sequential(OrderedDict(imprint=imprint, host=model))
            layer = Reader("imprint.fc1.weight", "imprint.fc1.bias", "imprint.fc2.weight", False)
            return Preparation(layer.kept(torch.arange(count)), (model,))
        layer = reader(model, target)
        if not layer.alone:
            raise NotApplicable(
                f"the bins are rows of {layer.weight!r}, which other layers share: their gradients "
                "would fall into the bins"
            )
        weight, bias, following = (
            model.get_parameter(name) for name in (layer.weight, layer.bias, layer.following)
        )
        count = len(weight) if self.bins is None else self.bins
        if count > len(weight):
            raise NotApplicable(
                f"{count} bins need as many units, but {layer.weight!r} has {len(weight)}: lower "
                'bins, or use form = "block"'
            )
        units = torch.randperm(len(weight), generator=rng)[:count]  # of the bins, lowest first
        rows, biases = bins_of(target, count, self.functional, layer.raw, self.noise, rng)
        with torch.no_grad():
            weight[units] = 0.0
            weight[units, : rows.shape[1]] = rows
            bias[units] = biases
            following[:, units] = repeated(len(following), count, self.gain, rng)
        return Preparation(layer.kept(units), (model,))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        kept, _, records = knowledge(seen, "robbing-the-fed")
        layer, units = Reader.of(kept)
        weight = gradient_sum(seen, layer.weight)[units, : prod(seen.record.shape)]
        strength = neighbours(gradient_sum(seen, layer.bias)[units])
        images, quotients, candidates = read(
            neighbours(weight), strength, seen.record, layer.raw, records
        )
        return Reconstruction(
            inputs=images,
            labels=None,
            residual=unexplained(weight, quotients),
            facts={"bins": len(units), "candidates": candidates},
        )
