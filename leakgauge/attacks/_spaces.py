"""Search spaces: what is optimised, and how it becomes an image.

A space draws its free variable and decodes it to images (N, C, H, W). Any attack can use any space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Start: TypeAlias = Literal["normal", "uniform", "grey"]


class Space(Protocol):
    def draw(
        self, shape: tuple[int, int, int, int], start: Start, rng: torch.Generator
    ) -> Tensor: ...

    def decode(self, free: Tensor, size: tuple[int, int]) -> Tensor: ...


def noise(shape: tuple[int, ...], start: Start, rng: torch.Generator) -> Tensor:
    """First candidates in [0, 1]: Gaussian around grey, uniform, or grey with a trace of noise."""
    if start == "uniform":
        return torch.rand(shape, generator=rng)
    spread = {"normal": 0.25, "grey": 0.01}[start]
    return (0.5 + spread * torch.randn(shape, generator=rng)).clamp(0, 1)


@dataclass(frozen=True)
class Pixels:
    """Every pixel is free."""

    def draw(self, shape: tuple[int, int, int, int], start: Start, rng: torch.Generator) -> Tensor:
        return noise(shape, start, rng)

    def decode(self, free: Tensor, size: tuple[int, int]) -> Tensor:
        return free


@dataclass(frozen=True)
class LowResolution:
    """Images kept at 1/`factor` of the resolution and up-sampled bicubically (curious client)."""

    factor: int = 4

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")

    def draw(self, shape: tuple[int, int, int, int], start: Start, rng: torch.Generator) -> Tensor:
        n, c, h, w = shape
        small = (n, c, max(1, h // self.factor), max(1, w // self.factor))
        return noise(small, start, rng)

    def decode(self, free: Tensor, size: tuple[int, int]) -> Tensor:
        # Bicubic interpolation overshoots: keep what the model sees inside the box.
        return F.interpolate(free, size=size, mode="bicubic", align_corners=False).clamp(0, 1)


SPACES: dict[str, type[Space]] = {"pixels": Pixels, "low-resolution": LowResolution}
