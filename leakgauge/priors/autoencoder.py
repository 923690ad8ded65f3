"""A small convolutional autoencoder: fewer numbers than pixels, from which an image can be made.

    min  Σ ‖dec(enc(x)) − x‖²

The encoder halves the sides `halvings` times by strided convolutions and ends in `channels` maps:
the code. The decoder goes the way back by pixel shuffles. With two halvings and twelve channels a
code of a colour image has a quarter of its numbers.

Codes of the training images are brought to mean zero and deviation one, entry by entry. A sample
that saw no update decodes a code from the normal distribution that has the mean and the covariance
of those codes (of codes with more than COVARIED entries, their deviations alone).

`score` is the mean PSNR of images held out with what is made of their codes; `mean_psnr` that of
the mean image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.errors import CheckpointError
from leakgauge.fitting import Clock, Lesson, Pace, fit
from leakgauge.papers import Paper
from leakgauge.priors._pictures import checked, checked_kind, decibels
from leakgauge.priors.folder import DIGESTS, digests
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.types import Dataset, Kept, Named, Resources

HELD = 200  # images held out, and at most a tenth of all
COVARIED = 2048  # entries of a code up to which their covariance is kept
MEASURED = 4000  # training images whose codes are measured, at most
RIDGE = 1e-4  # on the covariance's diagonal, of its mean


@dataclass(frozen=True)
class Autoencoder:
    """A code of fewer numbers than pixels, and the way back."""

    papers: ClassVar[tuple[Paper, ...]] = ()
    kind: ClassVar[str] = "autoencoder"
    channels: int = option(12, count(10_000))  # of the code
    halvings: int = option(2, count(10))
    width: int = option(48, count(10_000))
    steps: int = option(1500, count(100_000_000))
    batch: int = option(32, count(100_000))
    lr: float = option(2e-3, POSITIVE)

    def train(
        self, public: Dataset, rng: torch.Generator, resources: Resources | None = None
    ) -> Kept:
        """The prior of these records. Killed and begun again with the same `rng` and checkpoint, it
        ends at the same weights."""
        resources = resources or Resources()
        clock = Clock.of(resources)
        shape = checked(public)
        order = torch.randperm(len(public), generator=rng)
        held = max(1, min(HELD, len(public) // 10))
        images, aside = public.inputs[order[held:]].float(), public.inputs[order[:held]].float()
        shapes = layout(self, shape)

        def error(weights: Mapping[str, Tensor], rng: torch.Generator) -> Tensor:
            x = images[torch.randint(len(images), (self.batch,), generator=rng)]
            return (decoded(weights, encoded(weights, x), shape[1:]) - x).square().mean()

        def score(weights: Mapping[str, Tensor]) -> float:
            shown = decoded(weights, encoded(weights, aside), shape[1:])
            return decibels(shown.clamp(0, 1), aside)

        lesson = Lesson(lambda: _drawn(shapes, images, rng), error, score)
        pace = Pace(self.steps, self.lr, every=max(1, min(100, self.steps // 10)))
        done = fit(lesson, pace, rng, resources, clock)
        facts: dict[str, Any] = {
            "kind": self.kind,
            "shape": list(shape),
            "options": asdict(self),
            "data": public.name,
            "records": len(public),
            "parameters": sum(w.numel() for w in done.weights.values()),
            "steps": done.steps,
            "score": done.score,
            "mean_psnr": decibels(images.mean(0).expand_as(aside), aside),
        }
        tensors = done.weights | _spread(done.weights, images[:MEASURED])
        facts["cpu_seconds"] = done.cpu_seconds
        return Kept(tensors | {DIGESTS: digests(public.inputs)}, facts)

    @staticmethod
    def opened(kept: Kept) -> AutoencoderPrior:
        return AutoencoderPrior.of(kept)


@dataclass(frozen=True)
class AutoencoderPrior:
    """A trained autoencoder. `code` is the shape of one code, of mean zero and deviation one."""

    shape: tuple[int, int, int]
    code: tuple[int, int, int]
    weights: Named
    root: Tensor | None  # of the codes' correlations; None: the identity

    @classmethod
    def of(cls, kept: Kept) -> AutoencoderPrior:
        shape = checked_kind(kept, Autoencoder.kind)
        how = Autoencoder(**kept.facts["options"])
        wanted: dict[str, tuple[int, ...]] = dict(layout(how, shape))
        code = code_shape(how, shape)
        wanted |= {"code.mean": code, "code.std": code}
        for name, expected in wanted.items():
            if name not in kept.tensors or tuple(kept.tensors[name].shape) != expected:
                raise CheckpointError(
                    f"the weights of this prior are not those of an {how.kind} with "
                    f"{asdict(how)}: train it anew"
                )
        weights = {name: kept.tensors[name].float() for name in wanted}
        return cls(shape, code, weights, kept.tensors.get("code.root"))

    def encode(self, images: Tensor) -> Tensor:
        """Codes (N, …) of images."""
        weights = {name: w.to(images) for name, w in self.weights.items()}
        return (encoded(weights, images) - weights["code.mean"]) / weights["code.std"]

    def decode(self, codes: Tensor) -> Tensor:
        """Images of codes, which may leave [0, 1] a little: there the slope is not lost."""
        weights = {name: w.to(codes) for name, w in self.weights.items()}
        return decoded(weights, codes * weights["code.std"] + weights["code.mean"], self.shape[1:])

    def sample(self, count: int, rng: torch.Generator, labels: Tensor | None = None) -> Tensor:
        """Images that saw no update. Labels change nothing: it was trained without them."""
        with torch.no_grad():
            parts = torch.split(self.drawn(count, rng), 100)
            return torch.cat([self.decode(part).clamp(0, 1) for part in parts])

    def drawn(self, count: int, rng: torch.Generator) -> Tensor:
        """Codes as those of the training images are spread."""
        codes = torch.randn(count, math.prod(self.code), generator=rng)
        if self.root is not None:
            codes = codes @ self.root.T
        return codes.view(count, *self.code)


def code_shape(how: Autoencoder, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    height, width = (math.ceil(side / 2**how.halvings) for side in shape[1:])
    return how.channels, height, width


def layout(how: Autoencoder, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights, by name and in their order."""
    channels, width = shape[0], how.width
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, outputs: int, inputs: int, side: int = 3) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs, side, side), (outputs,)

    for k in range(how.halvings):
        layer(f"halve{k}", width, width if k else channels, 4)
    layer("code", how.channels, width)
    layer("first", width, how.channels)
    for k in range(how.halvings):
        layer(f"double{k}", 4 * width, width)
    layer("last", channels, width)
    return shapes


def encoded(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Codes as they come, not yet of deviation one."""
    for k in range(_levels(weights)):
        odd = [side % 2 for side in x.shape[2:]]
        x = F.pad(x, (0, odd[1], 0, odd[0]))  # sides are even: a window of 4 halves them
        x = F.conv2d(x, weights[f"halve{k}.weight"], weights[f"halve{k}.bias"], 2, padding=1).relu()
    return F.conv2d(x, weights["code.weight"], weights["code.bias"], padding=1)


def decoded(weights: Mapping[str, Tensor], code: Tensor, size: tuple[int, ...]) -> Tensor:
    """Images of such codes, not yet clamped."""

    def conv(name: str, x: Tensor) -> Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    x = conv("first", code).relu()
    for k in range(_levels(weights)):
        x = F.pixel_shuffle(conv(f"double{k}", x), 2).relu()
    return conv("last", x)[..., : size[0], : size[1]]  # sides that were padded


def _levels(weights: Mapping[str, Tensor]) -> int:
    return sum(name.startswith("halve") for name in weights) // 2


def _drawn(shapes: Mapping[str, tuple[int, ...]], images: Tensor, rng: torch.Generator) -> Named:
    """Random weights that give about the mean colour."""
    weights: Named = {}
    for name, shape in shapes.items():
        spread = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.0
        weights[name] = torch.randn(shape, generator=rng) * spread
    weights["last.weight"] *= 0.1
    weights["last.bias"] = images.mean((0, 2, 3))
    return weights


def _spread(weights: Mapping[str, Tensor], images: Tensor) -> Named:
    """Mean and deviation of the codes of images, and a root of their correlations."""
    with torch.no_grad():
        codes = torch.cat([encoded(weights, part) for part in torch.split(images, 200)])
    mean, std = codes.mean(0), codes.std(0, correction=0).clamp_min(1e-6)
    found = {"code.mean": mean, "code.std": std}
    rows = ((codes - mean) / std).flatten(1).double()
    entries = rows.shape[1]
    if entries <= COVARIED:
        correlation = rows.T @ rows / len(rows) + RIDGE * torch.eye(entries).double()
        found["code.root"] = torch.linalg.cholesky(correlation).float()
    return found
