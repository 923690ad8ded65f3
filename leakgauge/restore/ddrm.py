"""DDRM — B. Kawar, M. Elad, S. Ermon, J. Song: "Denoising Diffusion Restoration Models", NeurIPS
2022, https://arxiv.org/abs/2201.11793; as the direct postprocessing of the curious-client attack.

A guess is taken for a measurement y = H x + noise of the picture x, with H = U Σ Vᵀ the bicubic
down-sampling by `factor`. In the coordinates x̄ = Vᵀx, ȳ = Σ⁺Uᵀy, with the noise levels σ_t of a
diffusion model, x_t = x + σ_t ε, and what it takes for the picture, x̂ = x_θ(x_t, t):

    x̄_T ~ N(ȳ, σ_T² − σ_y²/s²)            where s > 0, else N(0, σ_T²)                    (Eq. 7)
    x̄_t ~ N(x̂ + √(1−η²) σ_t (x̄_{t+1} − x̂)/σ_{t+1}, η²σ_t²)        where s = 0            (Eq. 8)
    x̄_t ~ N(x̂ + √(1−η²) σ_t (ȳ − x̂)/(σ_y/s), η²σ_t²)             where σ_t < σ_y/s
    x̄_t ~ N((1−η_b) x̂ + η_b ȳ, σ_t² − σ_y² η_b²/s²)               elsewhere

and the last σ is 0. Where nothing was measured the model invents: what it invents is its own idea.

H is what `torch.nn.functional.interpolate(mode="bicubic", antialias=True)` does, of each axis by
itself, so that two small singular value decompositions are all. Attacks in the space
`low-resolution` go the other way, up by the same factor: their guess says nothing below the scale
that H measures, and of it only what H measures is kept. `factor = 1` measures every pixel: noise
is taken off, and no scale is added. "auto" is 4 or 2 where guesses are no more than what is left of
them at that scale, and else 1.

`noise` is the deviation of the error of the measurement, in units of [0, 1]. Nobody knows that of a
guess; "auto" estimates it for each picture from the finest diagonal differences of the measurement,
median(|d|)/0.6745 (Donoho and Johnstone 1994), which counts an edge for noise and misses what is
wrong smoothly.

Differs from the paper: a model trained on small pictures; x̂ is clipped to [−1, 1]; where σ_y/s is
above σ_T nothing counts as measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.papers import Paper
from leakgauge.priors import Diffusion, diffusion
from leakgauge.priors.ddpm import EXTRAS
from leakgauge.ranges import SHARE, Range, count, option
from leakgauge.records import Record, pictures

PAPER = Paper(
    "kawar2022",
    "Kawar, Bahjat and Elad, Michael and Ermon, Stefano and Song, Jiaming",
    "Denoising Diffusion Restoration Models",
    2022,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/2201.11793",
    fields=(("volume", "35"), ("pages", "23593--23606")),
)
SMALL = 1e-6  # singular values below are none
SCALES = (4, 2)  # tried by "auto"
BLURRED = 0.05  # of the variance may be lost by a scale that counts as the guess's own


@dataclass(frozen=True)
class DDRM:
    """Takes noise and blur off by a diffusion prior (Kawar 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    extras: ClassVar[tuple[tuple[str, str], ...]] = EXTRAS
    prior: str = ""
    factor: int | Literal["auto"] = option("auto", count(64))
    noise: float | Literal["auto"] = option("auto", Range(0, 10))
    steps: int = option(20, count(100_000))
    eta: float = option(0.85, SHARE)
    eta_b: float = option(1.0, SHARE)

    def restore(
        self,
        guess: Tensor,
        record: Record,
        rng: torch.Generator,
        labels: Tensor | None = None,
    ) -> Tensor:
        shape = pictures(record).shape
        model = diffusion(self.prior, "ddrm")
        model.check_fits(shape)
        inside = model.entering(guess)
        factor = scale_of(inside) if self.factor == "auto" else self.factor
        down = Down.of(model.shape[1:], factor)
        y = down(inside)
        known = 0.0 if self.noise == "auto" else 2 * self.noise  # [−1, 1] is twice as wide
        sigma = estimated(y) if self.noise == "auto" else torch.full((len(y),), known)
        told = model.told(labels, len(guess))
        x = restored(model, down, y, sigma.to(y), self, rng, told)
        return model.leaving(x, shape).cpu().to(guess.dtype)


@dataclass(frozen=True)
class Down:
    """Bicubic down-sampling by its singular vectors, those of the columns and of the rows."""

    rows: tuple[Tensor, Tensor, Tensor]  # U, s, V with H = U diag(s) Vᵀ, V square
    columns: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, size: tuple[int, int], factor: int) -> Down:
        return cls(*(_svd(_matrix(side, factor)) for side in size))

    @property
    def values(self) -> Tensor:
        """The singular values in the coordinates of `measured` (H, W); 0 where nothing is."""
        return self.rows[1][:, None] * self.columns[1][None, :]

    def __call__(self, x: Tensor) -> Tensor:
        """H x."""
        (u, _, v), (p, _, r) = self.rows, self.columns
        inner = _both(v.T, x, r.T) * self.values
        return _both(u, inner[..., : u.shape[1], : p.shape[1]], p)

    def inside(self, x: Tensor) -> Tensor:
        """x̄ = Vᵀx."""
        return _both(self.rows[2].T, x, self.columns[2].T)

    def outside(self, inner: Tensor) -> Tensor:
        """x = V x̄."""
        return _both(self.rows[2], inner, self.columns[2])

    def measured(self, y: Tensor) -> Tensor:
        """ȳ = Σ⁺Uᵀy, 0 where nothing is measured."""
        small = _both(self.rows[0].T, y, self.columns[0].T)
        size = self.values.shape
        wide = F.pad(small, (0, size[1] - small.shape[-1], 0, size[0] - small.shape[-2]))
        return torch.where(self.values > SMALL, wide / self.values.clamp_min(SMALL), 0.0)


def _matrix(side: int, factor: int) -> Tensor:
    """What down-sampling does to one axis, (side // factor, side)."""
    if factor == 1:
        return torch.eye(side)
    every = torch.eye(side)[None, None]  # columns are pictures of one line each
    small = max(1, side // factor)
    out = F.interpolate(every, size=(small, side), mode="bicubic", antialias=True)
    return out[0, 0]


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=True)
    wide = F.pad(s, (0, matrix.shape[1] - len(s)))
    return u.float(), wide.float(), vt.T.contiguous().float()


def _both(left: Tensor, x: Tensor, right: Tensor) -> Tensor:
    """left · x · rightᵀ, picture by picture and channel by channel."""
    return left @ x @ right.T


def scale_of(images: Tensor) -> int:
    """The factor by which images, taken together, are smaller than they look."""
    wide = (images - images.mean((2, 3), keepdim=True)).square().sum()
    for factor in SCALES:
        size = [side // factor for side in images.shape[2:]]
        if min(size) < 2:
            continue
        small = F.interpolate(images, size=size, mode="bicubic", antialias=True)
        back = F.interpolate(small, size=images.shape[2:], mode="bicubic")
        if (images - back).square().sum() < BLURRED * wide:
            return factor
    return 1


def estimated(y: Tensor) -> Tensor:
    """The deviation of the noise in each measurement, (N,)."""
    if min(y.shape[-2:]) < 2:
        return torch.zeros(len(y))
    d = (y[..., :-1, :-1] - y[..., 1:, :-1] - y[..., :-1, 1:] + y[..., 1:, 1:]) / 2
    return d.abs().flatten(1).median(1).values / 0.6745


@torch.no_grad()
def restored(
    model: Diffusion, down: Down, y: Tensor, sigma: Tensor, options: DDRM, rng: torch.Generator,
    labels: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A picture that fits the measurement, in [−1, 1] but for overshoots."""
    eta, eta_b = options.eta, options.eta_b
    times = model.times(options.steps)
    levels = [float(((1 - model.alphas[t]) / model.alphas[t]).sqrt()) for t in times] + [0.0]
    ybar, s = down.measured(y), down.values
    # σ_y/s, infinite where nothing is measured.
    off = torch.where(s > SMALL, sigma.view(-1, 1, 1, 1) / s.clamp_min(SMALL), torch.inf)
    off = torch.where(off <= levels[0], off, torch.inf)
    blind = off.isinf()

    def noise() -> Tensor:
        return torch.randn((len(y), *model.shape), generator=rng).to(y)

    spread = torch.where(blind, levels[0], (levels[0] ** 2 - off.square()).clamp_min(0).sqrt())
    inner = torch.where(blind, 0.0, ybar) + spread * noise()  # Eq. 7
    for t, (now, then) in zip(times, pairwise(levels), strict=True):
        x = down.outside(inner) * model.alphas[t].sqrt()
        guess = down.inside(model.clean(x, t, labels)[0].clamp(-1, 1))
        keep = (1 - eta**2) ** 0.5 * then
        free = guess + keep * (inner - guess) / now
        near = guess + keep * (ybar - guess) / off.clamp_min(1e-12)
        fixed = (1 - eta_b) * guess + eta_b * ybar
        coarse = then < off
        mean = torch.where(blind, free, torch.where(coarse, near, fixed))  # Eq. 8
        left = (then**2 - (off * eta_b).square()).clamp_min(0).sqrt()
        inner = mean + torch.where(blind | coarse, eta * then, left) * noise()
    return down.outside(inner)
