"""Search spaces: what is optimised, and how it becomes an image.

A space draws its free variables and decodes them to images (N, C, H, W). Given images, it moves the
variables to where their images are these, or near them. Any attack can use any space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Shape: TypeAlias = tuple[int, int, int, int]  # (N, C, H, W)
Start: TypeAlias = Literal["normal", "uniform", "grey"]
FIT_STEPS, FIT_LR = 300, 0.003  # of the generator's fit to given images
SpaceName: TypeAlias = Literal["pixels", "low-resolution", "generator"]


class Space(Protocol):
    """`boxed`: the free variables are images themselves, which belong in [0, 1]."""

    @property
    def boxed(self) -> bool: ...

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]: ...

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        """Variables that show these images, as nearly as they can, begun from drawn ones."""

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor: ...


def noise(shape: tuple[int, ...], start: Start, rng: torch.Generator) -> Tensor:
    """First candidates in [0, 1]: Gaussian around grey, uniform, or grey with a trace of noise."""
    if start == "uniform":
        return torch.rand(shape, generator=rng)
    spread = {"normal": 0.25, "grey": 0.01}[start]
    return (0.5 + spread * torch.randn(shape, generator=rng)).clamp(0, 1)


@dataclass(frozen=True)
class Pixels:
    """Every pixel is free."""

    boxed: ClassVar[bool] = True

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return [noise(shape, start, rng)]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return [images.clone()]

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        return free[0]


@dataclass(frozen=True)
class LowResolution:
    """Images kept at 1/`factor` of the resolution and up-sampled bicubically (curious client)."""

    factor: int = 4
    boxed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        n, c, h, w = shape
        small = (n, c, max(1, h // self.factor), max(1, w // self.factor))
        return [noise(small, start, rng)]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return [F.interpolate(images, size=free[0].shape[2:], mode="area")]

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        # Bicubic interpolation overshoots: keep what the model sees inside the box.
        return F.interpolate(free[0], size=size, mode="bicubic", align_corners=False).clamp(0, 1)


@dataclass(frozen=True)
class Generator:
    """A random convolutional decoder, trained on nothing: its weights are what is searched.

    Each image has a random code of `latent` numbers. A linear map makes it `width` feature maps of
    about 4×4; each block doubles the sides (nearest neighbour) and applies a 3×3 convolution, group
    normalisation and a leaky ReLU; a last convolution and a sigmoid give the image. Codes and
    weights are free. Smooth images come easily out of such a network and noise does not (Ulyanov et
    al., "Deep Image Prior", 2018), which is all the prior there is. `start` has no meaning here.
    """

    latent: int = 128
    width: int = 64
    boxed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.latent < 1 or self.width < 1:
            raise ValueError(
                f"latent and width must be at least 1, got {self.latent} and {self.width}"
            )

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        n, c, *size = shape
        doublings = max(0, math.ceil(math.log2(max(size) / 4)))

        def normal(*shape: int, fan: int) -> Tensor:
            return torch.randn(shape, generator=rng) / math.sqrt(fan)

        w = self.width
        small = [math.ceil(s / 2**doublings) for s in size]
        free = [normal(n, self.latent, fan=1), normal(self.latent, w, *small, fan=self.latent)]
        for _ in range(doublings):
            free += [normal(w, w, 3, 3, fan=9 * w), torch.ones(w), torch.zeros(w)]
        return [*free, normal(c, w, 3, 3, fan=9 * w), torch.zeros(c)]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return fitted(self, images, free)

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        code, first, *blocks, weight, bias = free
        x = torch.einsum("nl,lchw->nchw", code, first)
        for k in reversed(range(len(blocks) // 3)):
            kernel, scale, shift = blocks[:3]
            blocks = blocks[3:]
            x = F.interpolate(x, size=[math.ceil(s / 2**k) for s in size], mode="nearest")
            x = F.group_norm(F.conv2d(x, kernel, padding=1), _groups(len(scale)), scale, shift)
            x = F.leaky_relu(x, 0.2)
        return F.conv2d(x, weight, bias, padding=1).sigmoid()


@dataclass(frozen=True)
class Beside:
    """Images of another space beside others that are known and stay as they are. `order` says where
    each stands: indices into the searched ones followed by the known ones."""

    inner: Space
    known: Tensor
    order: Tensor

    @property
    def boxed(self) -> bool:
        return self.inner.boxed

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return self.inner.draw((shape[0] - len(self.known), *shape[1:]), start, rng)

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        back = self.order.argsort()[: len(images) - len(self.known)]
        return self.inner.encode(images[back.to(images.device)], free)

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        searched = self.inner.decode(free, size)
        every = torch.cat([searched, self.known.to(searched)])
        return every[self.order.to(every.device)]


@dataclass(frozen=True)
class FixedCodes:
    """The weights of a generator alone: its codes (N, latent) stay as they are given."""

    generator: Generator
    codes: Tensor
    boxed: ClassVar[bool] = False

    def draw(self, shape: Shape, start: Start, rng: torch.Generator) -> list[Tensor]:
        return self.generator.draw(shape, start, rng)[1:]

    def encode(self, images: Tensor, free: list[Tensor]) -> list[Tensor]:
        return fitted(self, images, free)

    def decode(self, free: list[Tensor], size: tuple[int, int]) -> Tensor:
        return self.generator.decode([self.codes.to(free[0]), *free], size)


def fitted(space: Space, images: Tensor, free: list[Tensor], lr: float = FIT_LR) -> list[Tensor]:
    """Variables of a space that show these images as nearly as FIT_STEPS steps of Adam bring them
    from drawn ones."""
    leaves = [f.clone().requires_grad_() for f in free]
    fit = torch.optim.Adam(leaves, lr=lr)
    for _ in range(FIT_STEPS):
        with torch.enable_grad():
            off = F.mse_loss(space.decode(leaves, (images.shape[2], images.shape[3])), images)
            for leaf, slope in zip(leaves, torch.autograd.grad(off, leaves), strict=True):
                leaf.grad = slope
        fit.step()
    return [leaf.detach() for leaf in leaves]


def _groups(channels: int) -> int:
    """Groups of eight channels, if they divide up so."""
    return channels // 8 if channels % 8 == 0 else 1


SPACES: dict[SpaceName, type[Space]] = {
    "pixels": Pixels,
    "low-resolution": LowResolution,
    "generator": Generator,
}
