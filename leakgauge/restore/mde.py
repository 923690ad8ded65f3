"""MDE — "Federated Learning Nodes Can Reconstruct Peers' Image Data" (authors not named, under
review, 2025), Section 3.3: the masked diffusion enhancer, semantic postprocessing of its attack.

    X̃_T = argmin ‖μ_θ(X_T, T) − X̂‖²                                                       (Eq. 4)

X̂ is the guess, μ_θ the picture that a frozen sampler makes of the noise X_T, and the network's
predictions of the noise count as constants in the derivative. With DDIM as the sampler the picture
is then X_T/√ᾱ_T plus a constant: the derivative is the difference itself, and a step costs one run
of the sampler and no backward pass. Steps are those of Adam, and after each X_T is brought back to
the length √n that normal noise of n numbers has. What comes out is a picture that the sampler can
make and that looks like the guess: not one that is right pixel by pixel.

Differs from the paper: a small DDPM in place of a masked diffusion transformer, with classes only
if the prior has them; DDIM with `steps` steps; the length of X_T is kept, without which pictures
leave what the prior would draw; the paper picks the iteration by eye, here it is a fixed number of
`iterations`, and of these the one that comes closest to the guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.papers import Paper
from leakgauge.priors import Diffusion, diffusion
from leakgauge.priors.ddpm import EXTRAS
from leakgauge.ranges import count, option
from leakgauge.records import Record, pictures

PAPER = Paper(
    "curiousclient2025",
    "{Anonymous authors}",
    "Federated Learning Nodes Can Reconstruct Peers' Image Data",
    2025,
    "Under double-blind review",
    "https://anonymous.4open.science/r/curiousclient-5B6F",
)
BETAS = (0.9, 0.999)  # of Adam


@dataclass(frozen=True)
class MDE:
    """Makes what a diffusion prior has that is like the guess."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    extras: ClassVar[tuple[tuple[str, str], ...]] = EXTRAS
    prior: str = ""
    iterations: int = option(30, count(1_000_000))
    steps: int = option(10, count(100_000))
    lr: float = 0.05

    def restore(
        self,
        guess: Tensor,
        record: Record,
        rng: torch.Generator,
        labels: Tensor | None = None,
    ) -> Tensor:
        shape = pictures(record).shape
        model = diffusion(self.prior, "mde")
        model.check_fits(shape)
        aim, told = model.entering(guess), model.told(labels, len(guess))
        x, _ = enhanced(model, aim, self, rng, told)
        return model.leaving(x, shape).cpu().to(guess.dtype)


@torch.no_grad()
def enhanced(
    model: Diffusion, aim: Tensor, options: MDE, rng: torch.Generator, labels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pictures in [−1, 1] close to `aim`, each the closest of its run; and their mean squared
    distance to it after each iteration, (iterations + 1, N)."""
    start = _normal(torch.randn(aim.shape, generator=rng).to(aim))
    mean, square = torch.zeros_like(start), torch.zeros_like(start)
    x = sampled(model, start, options.steps, labels)
    best, history = x, [(x - aim).square().flatten(1).mean(1)]
    for i in range(1, options.iterations + 1):
        slope = x - aim  # Eq. 4 with constant predictions, up to a factor that Adam ignores
        mean.lerp_(slope, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** i)).sqrt() + 1e-8
        start = _normal(start - options.lr * mean / (1 - BETAS[0] ** i) / root)
        x = sampled(model, start, options.steps, labels)
        off = (x - aim).square().flatten(1).mean(1)
        better = off < torch.stack(history).min(0).values
        best = torch.where(better.view(-1, 1, 1, 1), x, best)
        history.append(off)
    return best, torch.stack(history)


def _normal(noise: Tensor) -> Tensor:
    """The noise of each picture, as long as normal noise is."""
    length = noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    scaled: Tensor = noise * (math.sqrt(noise[0].numel()) / length)
    return scaled


def sampled(model: Diffusion, x: Tensor, steps: int, labels: Tensor | None) -> Tensor:
    """What DDIM makes of this noise, without any chance."""
    times = model.times(steps)
    for t, s in zip(times, [*times[1:], None], strict=True):
        x = model.step(*model.clean(x, t, labels), t, s)
    return x.clamp(-1, 1)
