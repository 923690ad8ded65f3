"""CI-Net — C. Zhang, X. Zhang, E. Sotthiwat, Y. Xu, P. Liu, L. Zhen, Y. Liu: "Generative Gradient
Inversion via Over-Parameterized Networks in Federated Learning", ICCV 2023,
https://openaccess.thecvf.com/content/ICCV2023/html/Zhang_Generative_Gradient_Inversion_via_Over-Parameterized_Networks_in_Federated_Learning_ICCV_2023_paper.html

    min_θ  1 − cos(g'(G_θ(z)), g) + α·TV(G_θ(z)),   z drawn once

G is a convolutional decoder that was trained on nothing, with more weights than the batch has
values: its width is doubled from WIDTH until it has MORE times as many. Its weights are searched,
its codes z stay. Such a network shows pictures long before it can show noise, which is all the
prior there is; no public record is needed.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Beside the guess stands what the network shows with its first weights.
Differs from the paper: the decoder is that of `space = "generator"` (one convolution per block,
group in place of batch normalisation, no spectral normalisation); 500 iterations; the values of all
channels count as unknowns; labels are inferred; the best iterate by the objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import Adam, LabelledSearch, constant, match, steps
from leakgauge.attacks._objectives import cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._spaces import SPACES, FixedCodes, Generator, Shape, SpaceName
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "zhang2023cinet",
    "Zhang, Chi and Xiaoman, Zhang and Sotthiwat, Ekanut and Xu, Yanyu and Liu, Ping and Zhen, "
    "Liangli and Liu, Yong",
    "Generative Gradient Inversion via Over-Parameterized Networks in Federated Learning",
    2023,
    "IEEE/CVF International Conference on Computer Vision",
    "https://doi.org/10.1109/ICCV51070.2023.00475",
    fields=(("pages", "5126--5135"),),
)
WIDTH = 32  # the first width that is tried
MORE = 4  # weights per value of the batch, at least


@dataclass(frozen=True)
class CINet(LabelledSearch):
    """Searches an untrained network (Zhang 2023).

    `space` puts another space in the place of its network."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    lr: float = 1e-2
    tv: float = 1e-4
    width: int | None = option(None, count(100_000))  # None: by the number of values
    space: SpaceName | None = None

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        _, records = told(seen, "ci-net")
        labels = infer(seen, self.labels, rng)
        shape: Shape = (records, *pictures(seen.record).shape)
        network = Generator(width=self.width or wide(shape))
        codes = torch.randn(records, network.latent, generator=spawned(rng, "codes"))
        own = FixedCodes(network, codes)
        space = own if self.space is None else SPACES[self.space]()
        begun = space.draw(shape, self.start, spawned(rng, "prior"))
        guess = match(
            seen,
            cosine,
            self,
            labels=labels,
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, steps(), signed=True),
            space=space,
            rng=rng,
            resources=resources,
        )
        facts = {"width": network.width, "weights": weights(network, shape)} if space is own else {}
        shown = space.decode(begun, (shape[2], shape[3])).clamp(0, 1)
        return replace(guess, facts=guess.facts | facts, prior=shown)


def weights(network: Generator, shape: Shape) -> int:
    """How many weights the network has for such images."""
    drawn: list[Tensor] = FixedCodes(network, torch.zeros(1, network.latent)).draw(
        shape, "normal", torch.Generator()
    )
    return sum(one.numel() for one in drawn)


def wide(shape: Shape) -> int:
    """The width with which the network has MORE weights per value of the batch."""
    width, values = WIDTH, shape[0] * shape[1] * shape[2] * shape[3]
    while weights(Generator(width=width), shape) < MORE * values:
        width *= 2
    return width
