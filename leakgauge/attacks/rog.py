"""ROG — K. Yue, R. Jin, C.-W. Wong, D. Baron, H. Dai: "Gradient Obfuscation Gives a False Sense of
Security in Federated Learning", USENIX Security 2023, https://arxiv.org/abs/2206.04055

    search:   u* = argmin_u  1 − cos(g'(dec(u)), g) + α·TV(dec(u))
    restore:  x  = f_θ(dec(u*)),   min_θ Σ ‖f_θ(dec(enc(x) + noise)) − x‖²  over public images x

u has far fewer numbers than the image: pixels of 1/`factor` of the sides, which dec enlarges
bicubically, or the code of an autoencoder (`prior`). What a defence took from the update is then
still enough for u, and what is lost by going through u is what the restorer f has learned to put
back. f is fitted before any update is seen, to public images that went the same way.

Needs: the local training, the number of records, and public images. Labels are inferred unless
`labels="known"`. Facts: `restored_psnr` and `raw_psnr`, of public images held out with what the
restorer made of them and without it; `moved`, how far the restorer moved this guess, as the root of
the mean square. Beside the guess stands what the restorer makes of the noise that the search began
with. A restorer invents: what is in its images and not in the raw ones is no finding of the attack.
Differs from the paper: one small convolutional restorer fitted to squared errors in minutes, where
the paper has a large one and a GAN, which are sharper; cosine distance; 500 iterations; one kind of
search for all defences: what an attacker knows of one comes from that defence (Observation.answer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge import priors
from leakgauge.attacks._engine import Mode
from leakgauge.attacks._generative import Code, PriorSearch, fits, kept_of, public_of
from leakgauge.attacks._labels import infer, knowledge
from leakgauge.attacks._matching import Adam, Search, constant, match, steps
from leakgauge.attacks._objectives import cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._spaces import LowResolution, Space
from leakgauge.fitting import Clock, Lesson, Pace, fit
from leakgauge.papers import Paper
from leakgauge.priors._pictures import decibels
from leakgauge.priors.autoencoder import AutoencoderPrior
from leakgauge.ranges import FROM_0, count, option
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import (
    Kept,
    Knowledge,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

PAPER = Paper(
    "yue2023",
    "Yue, Kai and Jin, Richeng and Wong, Chau-Wai and Baron, Dror and Dai, Huaiyu",
    "Gradient Obfuscation Gives a False Sense of Security in Federated Learning",
    2023,
    "32nd USENIX Security Symposium",
    "https://www.usenix.org/conference/usenixsecurity23/presentation/yue",
    fields=(("pages", "6381--6398"),),
)
HELD = 200  # public images held out, and at most a tenth of all
WIDTH = 48  # channels of the restorer
LAYERS = 4
RATE = 2e-3  # of its fit
RESTORER = "restorer."


@dataclass(frozen=True)
class ROG(PriorSearch):
    """Searches few numbers, then restores (Yue 2023).

    `prior` is the folder of an autoencoder, whose codes are then searched; without it, pixels at
    1/`factor` of the sides. `steps` are those of the restorer's fit."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    factor: int = option(4, count(1000))
    lr: float = 0.1
    tv: float = 1e-4
    noise: float = option(0.1, FROM_0)  # deviation, at most, of the errors of a search
    steps: int = option(1000, count(100_000_000))
    batch: int = option(32, count(100_000))
    derivative: Mode = "auto"

    @property
    def needs(self) -> frozenset[Knowledge]:
        return knowledge(self.labels) | {"public"}

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        pictures(target.record)
        public, resources = public_of(target, "rog"), resources or Resources()
        known = priors.load(self.prior) if self.prior else Kept()
        if self.prior:
            fits(AutoencoderPrior.of(known).shape, target)
        clock = Clock.of(resources)
        order = torch.randperm(len(public), generator=rng)
        held = max(1, min(HELD, len(public) // 10))
        images, aside = public.inputs[order[held:]].float(), public.inputs[order[:held]].float()
        space = self.space(known)
        chance = torch.Generator().manual_seed(0)
        worn = degraded(space, aside, self.noise / 2, chance)
        lesson = Lesson(
            begin=partial(drawn, images.shape[1], rng),
            error=partial(_error, space, images, self.batch, self.noise),
            score=lambda weights: decibels(restored(weights, worn), aside),
        )
        pace = Pace(self.steps, RATE, every=max(1, min(100, self.steps // 10)))
        done = fit(lesson, pace, rng, resources, clock)
        facts: dict[str, Any] = {
            "prior": dict(known.facts),
            "restored_psnr": done.score,
            "raw_psnr": decibels(worn, aside),
            "public": public.name,
            "public_images": len(public),
            "steps": done.steps,
            "cpu_seconds": done.cpu_seconds,
        }
        weights = {f"{RESTORER}{name}": w for name, w in done.weights.items()}
        return Preparation(Kept(known.tensors | weights, facts))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        kept = kept_of(seen, "rog")
        restorer = {
            name.removeprefix(RESTORER): w
            for name, w in kept.tensors.items() if name.startswith(RESTORER)
        }  # fmt: skip
        space = self.space(Kept(kept.tensors, kept.facts["prior"]))
        alone = spawned(rng, "prior")
        raw = match(
            seen,
            cosine,
            Search(self.iterations, self.restarts, derivative=self.derivative),
            labels=infer(seen, self.labels, rng),
            priors=((total_variation, constant(self.tv)),),
            optimiser=Adam(self.lr, steps(), signed=space.boxed),
            space=space,
            rng=rng,
            resources=resources,
        )
        n, channels, height, width = raw.inputs.shape
        noise = space.draw((n, channels, height, width), "normal", alone)
        told = ("restored_psnr", "raw_psnr", "public", "public_images")
        with torch.no_grad():
            better = restored(restorer, raw.inputs)
            shown = restored(restorer, space.decode(noise, (height, width)).float())
        facts = {key: kept.facts[key] for key in told} | {
            "moved": float((better - raw.inputs).square().mean().sqrt())
        }
        return replace(raw, inputs=better, facts=raw.facts | facts, prior=shown, raw=raw.inputs)

    def space(self, prior: Kept) -> Space:
        """What is searched: pixels of a small image, or the codes of the autoencoder."""
        return Code(AutoencoderPrior.of(prior)) if self.prior else LowResolution(self.factor)


def degraded(space: Space, images: Tensor, noise: float, rng: torch.Generator) -> Tensor:
    """Images after their way through the space, where noise of this deviation is added."""
    shape = (len(images), images.shape[1], images.shape[2], images.shape[3])
    with torch.no_grad():
        found = space.encode(images, space.draw(shape, "grey", rng))
        found = [f + noise * torch.randn(f.shape, generator=rng) for f in found]
        return space.decode(found, (shape[2], shape[3]))


def _error(
    space: Space, images: Tensor, batch: int, noise: float,
    weights: Mapping[str, Tensor], rng: torch.Generator,
) -> Tensor:  # fmt: skip
    """The squared error per pixel on a batch, under as much noise as chance has it."""
    x = images[torch.randint(len(images), (batch,), generator=rng)]
    worn = degraded(space, x, noise * float(torch.rand((), generator=rng)), rng)
    return (_moved(weights, worn) - x).square().mean()


def restored(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """What the restorer makes of images."""
    with torch.no_grad():
        return torch.cat([_moved(weights, part) for part in torch.split(images, 100)]).clamp(0, 1)


def _moved(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """The images plus what the network says they lack: convolutions at half the side."""
    height, width = images.shape[2:]
    odd = (0, width % 2, 0, height % 2)
    x = F.pixel_unshuffle(F.pad(images, odd, mode="replicate"), 2)
    for k in range(LAYERS):
        x = F.conv2d(x, weights[f"{k}.weight"], weights[f"{k}.bias"], padding=1)
        x = x.relu() if k < LAYERS - 1 else x
    return images + F.pixel_shuffle(x, 2)[..., :height, :width]


def drawn(channels: int, rng: torch.Generator) -> Named:
    """First weights of a restorer, which leaves images as they are."""
    weights: Named = {}
    for k in range(LAYERS):
        inputs = 4 * channels if k == 0 else WIDTH
        outputs = 4 * channels if k == LAYERS - 1 else WIDTH
        spread = math.sqrt(2 / (9 * inputs)) * (k < LAYERS - 1)
        weights[f"{k}.weight"] = spread * torch.randn(outputs, inputs, 3, 3, generator=rng)
        weights[f"{k}.bias"] = torch.zeros(outputs)
    return weights
