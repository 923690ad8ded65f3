"""GIAS — J. Jeon, J. Kim, K. Lee, S. Oh, J. Ok: "Gradient Inversion with Generative Image Prior",
NeurIPS 2021, https://arxiv.org/abs/2110.14962

    first:  z*     = argmin_z  1 − cos(g'(G_w(z)), g) + α·TV(G_w(z))
    then:   w_1…_N = argmin_w  1 − cos(g'(G_{w_i}(z*_i)), g) + α·TV,   from the trained w

G is a generator trained on public images. Its latents are few, so that the first search finds a
picture that is roughly right; but hardly any picture is among what G can show. The second search
lets the weights go too, for each image its own, and leaves what G knows as a start.

Needs: the local training, the number of records, and a trained generator (`prior`) or public images
to train a small one on. Labels are inferred unless `labels="known"`. Facts: where the search of the
latents ended, and on what the generator was trained. Beside the guess stands a sample of the
generator that saw no update.
Differs from the paper: a small generator trained in minutes instead of StyleGAN2 or DCGAN; 600
iterations in all instead of several thousand; no penalty on the length of z; the variants that use
batch-norm statistics, or learn the generator from updates alone (GIML), are not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from leakgauge.attacks._engine import Mode, Trust
from leakgauge.attacks._generative import Latent, PriorSearch, Weights, generator_of, told_of
from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import Adam, Search, constant, joined, match, shared
from leakgauge.attacks._matching import cosine as cosine_decay
from leakgauge.attacks._objectives import cosine
from leakgauge.attacks._priors import total_variation
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, SHARE, option
from leakgauge.tensors import spawned
from leakgauge.types import Observation, Reconstruction, Resources

PAPER = Paper(
    "jeon2021",
    "Jeon, Jinwoo and Kim, Jaechang and Lee, Kangwook and Oh, Sewoong and Ok, Jungseul",
    "Gradient Inversion with Generative Image Prior",
    2021,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/2110.14962",
    fields=(("volume", "34"), ("pages", "29898--29908")),
)


@dataclass(frozen=True)
class GIAS(PriorSearch):
    """Searches latents, then a generator's weights (Jeon 2021).

    `restarts` are those of the latents: the best one's weights are searched."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 600
    latent: float = option(0.3, SHARE)  # share of the iterations
    lr: float = 0.1  # of the latents
    weights_lr: float = option(1e-3, POSITIVE)
    tv: float = 1e-6
    derivative: Mode = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.latent <= 1:
            raise ValueError(f"latent must be a share in (0, 1], got {self.latent}")

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        prior = generator_of(seen, "gias")
        assert seen.kept is not None
        alone = spawned(rng, "prior")
        labels = infer(seen, self.labels, rng)
        early = min(max(1, round(self.latent * self.iterations)), self.iterations)
        late = self.iterations - early
        share = shared(resources, early * self.restarts + late)
        smooth, trust = ((total_variation, constant(self.tv)),), Trust()
        latents: list[torch.Tensor] = []
        first = match(
            seen,
            cosine,
            Search(early, self.restarts, derivative=self.derivative),
            labels=labels,
            priors=smooth,
            optimiser=Adam(self.lr, cosine_decay()),
            space=Latent(prior),
            trust=trust,
            rng=rng,
            resources=share(0),
            variables=latents,
        )
        rest, found = share(first.iterations), first
        if late and rest.seconds != 0:
            second = match(
                seen,
                cosine,
                Search(late, derivative=self.derivative),
                labels=labels,
                priors=smooth,
                optimiser=Adam(self.weights_lr, cosine_decay()),
                space=Weights(prior, latents[0]),
                trust=trust,
                rng=rng,
                resources=rest,
            )
            found = joined(first, second)
        facts = {
            "latent_iterations": len(first.history),
            "latent_objective": min(first.objectives),
            "latent_distance": first.residual,
        }
        return replace(
            found,
            facts=found.facts | facts | told_of(seen.kept),
            prior=prior.sample(len(found.inputs), alone),
        )
