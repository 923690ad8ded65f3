"""LOKI — J. C. Zhao, A. Sharma, A. R. Elkordy, Y. H. Ezzeldin, S. Avestimehr, S. Bagchi: "LOKI:
Large-scale Data Reconstruction Attack against Federated Learning through Model Manipulation",
IEEE S&P 2024, https://arxiv.org/abs/2303.12233

Secure aggregation shows the server only the mean of all updates. Here every client gets its own
convolution in front of an imprint (Robbing the Fed): that of client k hands its image on in the
k-th group of channels and zeros in all others. The gradient of the imprint's weights, Σ δ_n·x_n, is
then zero outside client k's own columns, and the mean of all updates holds clients side by side:

    columns of client k in ∂L/∂W_i  =  share_k · Σ_(n of client k) δ_n·x_n

One more channel per client is 1 for its own client and 0 for others: its columns hold Σ δ_n of
client k alone, by which a record alone in its bin of its client is, as in Robbing the Fed,

    x = (∂L/∂W_i − ∂L/∂W_(i+1))_(image of k) / (∂L/∂W_i − ∂L/∂W_(i+1))_(one of k)

Needs: the local training, the number of records as a cap, and public images of the same kind. What
each client receives differs only in the convolution's values. The names and shapes are not the
host's: a check of structure sees it.
Differs from the paper: the channel of ones is ours (the bias, which the paper divides by, adds up
over clients); no scaling of the kernels for FedAvg, for which `gain` is here; one layer reads all
clients, so its size grows with their number.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from leakgauge.attacks._layers import gradient_sum
from leakgauge.attacks.active._imprint import (
    Functional,
    as_images,
    best,
    bins_of,
    block,
    knowledge,
    neighbours,
    ratios,
)
from leakgauge.attacks.analytic import unexplained
from leakgauge.errors import NotApplicable
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Kept,
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

IMPRINT = "imprint.fc1.weight"


PAPER = Paper(
    "zhao2024",
    "Zhao, Joshua C. and Sharma, Atul and Elkordy, Ahmed Roushdy and Ezzeldin, Yahya H. and "
    "Avestimehr, Salman and Bagchi, Saurabh",
    "{LOKI}: Large-scale Data Reconstruction Attack against Federated Learning through Model "
    "Manipulation",
    2024,
    "IEEE Symposium on Security and Privacy",
    "https://arxiv.org/abs/2303.12233",
)


@dataclass(frozen=True)
class Loki:
    """Separate bins per client survive averaging (Zhao 2024)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    bins: int = option(512, count(100_000, 2))
    functional: Functional = "mean"
    gain: float = option(1.0, POSITIVE)  # of the layer behind the imprint
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        pixels, area = prod(pictures(target.record).shape), prod(pictures(target.record).shape[1:])
        rows, biases = bins_of(target, self.bins, self.functional, raw=False, noise=0.0, rng=rng)
        one = torch.zeros(self.bins, area)  # no row reads the channel of ones
        rows = torch.cat([rows, one], 1).repeat(1, target.clients)
        imprint = block(pictures(target.record).shape, rows, biases, self.gain, rng)
        models = tuple(
            nn.Sequential(
                OrderedDict(
                    conv=_kernels(target, client),
                    imprint=copy.deepcopy(imprint),
                    host=copy.deepcopy(target.model),
                )
            )
            for client in range(target.clients)
        )
        return Preparation(Kept(facts={"columns": pixels + area}), models)

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        kept, _, records = knowledge(seen, "loki")
        pixels = prod(seen.record.shape)
        weight = gradient_sum(seen, IMPRINT)
        slices = torch.split(weight, kept.facts["columns"], dim=1)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for client, own in enumerate(slices):
            if not own.any():
                continue  # this update is of other clients
            added = neighbours(own)
            image, ones = added[:, :pixels], added[:, pixels:].mean(1)
            quotients, rows = ratios(image, ones)
            found.append((quotients, ones[rows].abs(), torch.full((len(rows),), client)))
        if not found:
            raise NotApplicable("no unit of the layer that reads the images passed on a gradient")
        quotients, strengths, owner = (torch.cat(parts) for parts in zip(*found, strict=True))
        images = as_images(quotients, seen.record, raw=False)
        chosen = best(images, strengths, records)
        explained = [
            unexplained(own[:, :pixels], quotients[chosen][owner[chosen] == client])
            for client, own in enumerate(slices)
            if (owner[chosen] == client).any()
        ]
        return Reconstruction(
            inputs=images[chosen].clamp(0, 1).float(),
            labels=None,
            residual=max(explained),
            facts={"candidates": len(images), "clients": owner[chosen].tolist()},
        )


def _kernels(target: Target, client: int) -> nn.Conv2d:
    """The convolution of one client: its image and a channel of ones, in its own channels."""
    channels = pictures(target.record).shape[0]
    groups = target.clients * (channels + 1)
    convolution = nn.Conv2d(channels, groups, 3, padding=1, device="meta").to_empty(device="cpu")
    assert convolution.bias is not None
    start = client * (channels + 1)
    with torch.no_grad():
        convolution.weight.zero_()
        convolution.bias.zero_()
        for channel in range(channels):
            convolution.weight[start + channel, channel, 1, 1] = 1.0
        convolution.bias[start + channels] = 1.0
    return convolution
