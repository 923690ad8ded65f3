"""Searches that know what pictures look like: a prior trained on public records (leakgauge/priors).

Before the round a prior is read from a folder, or a small one is trained on the public records; the
attack keeps it. Its latents, or its weights from there on, are what is searched. What the prior
shows without the update stands beside every guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from leakgauge import priors
from leakgauge.attacks._labels import LabelRule, knowledge
from leakgauge.attacks._spaces import Shape, Start, fitted
from leakgauge.errors import InputError, Withheld
from leakgauge.priors.autoencoder import AutoencoderPrior
from leakgauge.priors.gan import GAN, GANPrior
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.types import Kept, Knowledge, Observation, Preparation, Resources, Target

FIT_LR = 0.05  # of the fit of latents to given images


@dataclass(frozen=True)
class PriorSearch:
    """The options of attacks that search with a trained generator. `prior` is the folder of one, as
    `leakgauge prior train --kind gan` makes it; without it one is trained on the public records in
    so many `steps`."""

    iterations: int = 500
    restarts: int = 1
    labels: LabelRule = "counts"
    prior: str = ""
    steps: int = option(2000, count(100_000_000))
    manipulates: ClassVar[bool] = False
    unaimed: ClassVar[Literal[True]] = True

    @property
    def needs(self) -> frozenset[Knowledge]:
        public: frozenset[Knowledge] = frozenset() if self.prior else frozenset({"public"})
        return knowledge(self.labels) | public

    def shortened(self, iterations: int, restarts: int) -> Self:
        return replace(self, iterations=iterations, restarts=restarts)

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        pictures(target.record)
        small = GAN(steps=self.steps)
        kept = priors.of(self.prior, GAN.kind, small, target.public, rng, resources)
        fits(GANPrior.of(kept).shape, target)
        return Preparation(kept)


def public_of(target: Target, who: str) -> Any:
    """The public records, or in words why they are needed."""
    if target.public is None or not len(target.public):
        raise Withheld(f"{who} learns what pictures look like from public images, and holds none")
    return target.public


def fits(shape: tuple[int, int, int], target: Target) -> None:
    """Refuse a prior of pictures of another shape."""
    if shape != (wanted := pictures(target.record).shape):
        raise InputError(
            f"this prior makes pictures {shape} and the clients' records are {wanted}: train one "
            "on public records of that shape"
        )


def kept_of(seen: Observation, who: str) -> Kept:
    if seen.kept is None:
        raise Withheld(f"{who} needs what its prepare() kept: a trained prior")
    return seen.kept


def generator_of(seen: Observation, who: str) -> GANPrior:
    """The generator that the attack kept."""
    return GANPrior.of(kept_of(seen, who))


def told_of(kept: Kept) -> dict[str, Any]:
    """What a result says of the prior behind it."""
    known = ("kind", "data", "records", "score", "mean_psnr")
    return {f"prior_{key}": kept.facts[key] for key in known if key in kept.facts}


@dataclass(frozen=True)
class Latent:
    """The latents of a trained generator, one for each image. `start` has no meaning here."""

    prior: GANPrior
    boxed: ClassVar[bool] = False

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return [torch.randn(shape[0], self.prior.latent, generator=rng)]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return fitted(self, images, free, FIT_LR)

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        return self.prior.decode(free[0])


@dataclass(frozen=True)
class Weights:
    """The weights of a trained generator, for each image its own, at latents (N, latent) that stay.
    They begin as they were trained."""

    prior: GANPrior
    latents: Tensor
    boxed: ClassVar[bool] = False

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return [torch.stack([w] * shape[0]) for w in self.prior.weights.values()]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return free  # a stage that begins where its latents are

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        z = self.latents.to(free[0])
        each = [self.prior.decode(z[i : i + 1], self._of(free, i)) for i in range(len(z))]
        return torch.cat(each)

    def _of(self, free: Sequence[Tensor], image: int) -> dict[str, Tensor]:
        return dict(zip(self.prior.weights, (f[image] for f in free), strict=True))


@dataclass(frozen=True)
class Code:
    """The codes of a trained autoencoder. `start` has no meaning here."""

    prior: AutoencoderPrior
    boxed: ClassVar[bool] = False

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return [self.prior.drawn(shape[0], rng)]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return [self.prior.encode(images)]

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        return self.prior.decode(free[0]).clamp(0, 1)
