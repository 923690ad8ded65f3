"""Guided diffusion — H. Chung, J. Kim, M. T. McCann, M. L. Klasky, J. C. Ye: "Diffusion Posterior
Sampling for General Noisy Inverse Problems", ICLR 2023, https://arxiv.org/abs/2209.14687

A diffusion model draws a picture out of noise, and at every level the observed update leads it:

    x_s = DDPM's own step from x_t − ζ_t · ∇_{x_t} D(g'(x̂_0(x_t)), g)         (Algorithm 1, line 7)

x̂_0 is what the network takes for the picture behind x_t; the derivative of the gradient distance D
at x̂_0 is that of every attack here (_engine.py), and goes back through the network to x_t. D is
1 − cos. Labels are inferred first; a prior that was trained by class is told them.

Needs: the local training, the number of records and the weights; public records where no `prior` is
named, on which one is trained before the round. What the prior shows on its own stands beside every
guess: samples of the same noise without the update.

Differs from the paper: the measurement is a gradient; a step is as long as `scale` times the fresh
noise of that level (L. Yang et al.: "Guidance with Spherical Gaussian Constraint for Conditional
Diffusion", ICML 2024), so that ζ need not be chosen for each model; 100 levels by default instead
of 1,000; of all x̂_0 on the way the one with the least distance is returned.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge import priors
from leakgauge.attacks._engine import Engine, Mode, Trust
from leakgauge.attacks._labels import LabelRule, infer, knowledge
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import Phases, through_defence
from leakgauge.attacks._objectives import Distance, cosine
from leakgauge.errors import Withheld
from leakgauge.papers import Paper
from leakgauge.priors.ddpm import DDPM, EXTRAS, HO, Diffusion
from leakgauge.ranges import FROM_0, count, option
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import (
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

CHUNG = Paper(
    "chung2023",
    "Chung, Hyungjin and Kim, Jeongsol and McCann, Michael T. and Klasky, Marc L. and "
    "Ye, Jong Chul",
    "Diffusion Posterior Sampling for General Noisy Inverse Problems",
    2023,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2209.14687",
)


@dataclass(frozen=True)
class GuidedDiffusion:
    """Draws from a prior, led by the gradient (Chung 2023)."""

    papers: ClassVar[tuple[Paper, ...]] = (CHUNG, HO)
    extras: ClassVar[tuple[tuple[str, str], ...]] = EXTRAS
    prior: str = ""
    iterations: int = 100  # levels of the sampler
    scale: float = option(0.2, FROM_0)
    labels: LabelRule = "counts"
    derivative: Mode = "auto"
    training: int = option(2000, count(100_000_000))  # steps of the prior, where none is named
    manipulates: ClassVar[bool] = False
    unaimed: ClassVar[Literal[True]] = True

    @property
    def needs(self) -> frozenset[Knowledge]:
        own: frozenset[Knowledge] = frozenset() if self.prior else frozenset({"public"})
        return knowledge(self.labels) | own

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        pictures(target.record)
        default = DDPM(steps=self.training)
        kept = priors.of(self.prior, "ddpm", default, target.public, rng, resources)
        return Preparation(kept)

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        training, records = told(seen, "guided diffusion")
        if seen.kept is None:
            raise Withheld("guided diffusion needs the prior that its prepare() kept")
        shape = pictures(seen.record).shape
        resources = resources or Resources()
        model = Diffusion(seen.kept, resources.device)
        model.check_fits(shape)
        labels = infer(seen, self.labels, rng)
        engine = Engine(
            seen, training, records, device=resources.device,
            dtype=resources.dtype or torch.float32, mode=self.derivative, trust=Trust(),
        )  # fmt: skip
        run = _Run(self, model, engine, shape, labels, seen, resources)
        alone = model.sample(records, spawned(rng, "prior"), labels, self.iterations)
        run.draw(rng)
        return run.ended(model.leaving(model.entering(alone), shape).cpu())


class _Run:
    """Draws from the prior on the way to one guess, and the best x̂_0 met so far."""

    def __init__(
        self, options: GuidedDiffusion, model: Diffusion, engine: Engine,
        shape: tuple[int, int, int], labels: Tensor, seen: Observation, resources: Resources,
    ):  # fmt: skip
        self.options, self.model, self.engine, self.shape = options, model, engine, shape
        self.labels = labels.to(engine.device)
        self.told = model.told(labels, len(labels))
        self.distance: Distance = cosine
        if seen.answer is not None:
            adapted = through_defence(cosine, seen.answer, engine)
            assert not isinstance(adapted, Phases)
            self.distance = adapted
        self.resources, self.adapted = resources, seen.answer is not None
        seconds = resources.seconds
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.best, self.image = math.inf, torch.zeros(len(labels), *shape)
        self.distances: list[float] = []
        self.late = False

    def draw(self, rng: torch.Generator) -> None:
        """One picture for each record, from the first level to the last."""
        model, scale = self.model, self.options.scale
        x = torch.randn((len(self.labels), *model.shape), generator=rng).to(model.device)
        times = model.times(self.options.iterations)
        for t, s in zip(times, [*times[1:], None], strict=True):
            with torch.enable_grad():
                x.requires_grad_()
                x0, _ = model.clean(x, t, self.told)
                shown = model.leaving(_inside(x0), self.shape)
                slope = self.engine.slope(
                    shown.detach().to(self.engine.device, self.engine.dtype), self.labels,
                    self.distance,
                )  # fmt: skip
                (lead,) = torch.autograd.grad(shown, x, slope.inputs.to(shown))
            x, x0 = x.detach(), x0.detach().clamp(-1, 1)
            self._met(slope.value, shown.detach())
            if self.late:
                break
            alpha = model.alphas[t]
            noise = (x - alpha.sqrt() * x0) / (1 - alpha).sqrt()
            x = model.step(x0, noise, t, s, 1.0, rng)
            if s is not None:
                size = lead.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)
                length = scale * model.fresh(t, s) * math.sqrt(math.prod(model.shape))
                x = x - length * lead / size  # line 7

    def _met(self, distance: float, image: Tensor) -> None:
        self.distances.append(distance)
        if distance < self.best:
            self.best, self.image = distance, image.clamp(0, 1)
        if self.resources.progress is not None:
            self.resources.progress(len(self.distances), self.options.iterations, distance)
        self.late = time.monotonic() > self.deadline

    def ended(self, alone: Tensor) -> Reconstruction:
        facts, own = self.model.facts, "foreign" in self.model.facts
        learned = "records that nobody here can check" if own else (
            f"{facts['records']:,} records of {facts['data']}"
        )  # fmt: skip
        notes = [*self.engine.notes, f"its diffusion prior was trained on {learned}"]
        if self.late:
            notes.append(
                f"stopped by the time budget of {self.resources.seconds:g} s after "
                f"{len(self.distances)} of {self.options.iterations} iterations"
            )
        return Reconstruction(
            inputs=self.image.float().cpu(),
            labels=self.labels.cpu(),
            residual=self.best,
            history=tuple(self.distances),
            distances=tuple(self.distances),
            iterations=len(self.distances),
            objectives=(self.best,),
            stopped="time" if self.late else "done",
            differed=self.engine.differed,
            adapted=self.adapted,
            notes=tuple(notes),
            facts={"derivative": self.engine.mode, "prior_score": facts.get("score")},
            prior=alone,
        )


def _inside(x0: Tensor) -> Tensor:
    """Clipped to [−1, 1], with a derivative outside too."""
    return x0 + (x0.clamp(-1, 1) - x0).detach()
