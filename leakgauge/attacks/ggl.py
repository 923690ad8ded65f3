"""GGL — Z. Li, J. Zhang, L. Liu, J. Liu: "Auditing Privacy Defenses in Federated Learning via
Generative Gradient Leakage", CVPR 2022, https://arxiv.org/abs/2203.15696

    min_z  D(T(g'(G(z))), g) + λ·R(z)                                                       (Eq. 3)
    D = ‖T(g') − g‖² / ‖g‖²
    R = ½(μ² + σ² − 1 − ln σ²),  μ and σ the mean and the deviation of z's entries: its distance
        (Kullback–Leibler) from what the generator G was trained on, N(0, 1)

by CMA-ES (package `cma`), which asks for values of the objective and for no derivative: it gets
over the many local minima that a defence leaves. T is the defence, estimated from what was sent:

- clipping: an update no longer than the bound that was met. Where several tensors have the same
  length, and none is longer, each was clipped by itself; else the bound is on the whole.
- pruning: an entry that was not sent counts only as far as it is larger than the smallest that was.
- noise: left as it is. The generator makes no noisy pictures.

An attacker who knows the defence uses what that says of itself instead (`Observation.answer`).

Needs: the local training, the number of records, and a trained generator (`prior`) or public images
to train a small one on; the extra `generative`. Labels are inferred unless `labels="known"`. The
latents of a batch are searched together, as one point. Beside the guess stands a sample of the
generator that saw no update.
Differs from the paper: a small generator trained in minutes, which knows no classes, instead of
BigGAN; the distance is relative, so that λ means the same for every model; pruned entries are held
to be small where the paper prunes candidates by the same share; the best point met, not the last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from leakgauge.attacks._engine import Engine
from leakgauge.attacks._generative import PriorSearch, generator_of, told_of
from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import first_of
from leakgauge.attacks._objectives import relative_squared
from leakgauge.config import optional
from leakgauge.papers import Paper
from leakgauge.priors.gan import GANPrior
from leakgauge.ranges import FROM_0, POSITIVE, count, option
from leakgauge.tensors import spawned
from leakgauge.types import Named, Observation, Reconstruction, Resources, Stopped

PAPER = Paper(
    "li2022",
    "Li, Zhuohang and Zhang, Jiaxin and Liu, Luyang and Liu, Jian",
    "Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage",
    2022,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "https://arxiv.org/abs/2203.15696",
    fields=(("pages", "10132--10142"),),
)
ALIKE = 1e-5  # relative difference of the lengths of tensors that were clipped to the same bound
DIAGONAL = 400  # unknowns above which CMA-ES keeps their variances and no covariances


@dataclass(frozen=True)
class GGL(PriorSearch):
    """Searches latents without derivatives (Li 2022).

    An iteration is one generation of CMA-ES: `population` candidates."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 150
    population: int = option(16, count(1_000_000, 2))
    spread: float = option(0.5, POSITIVE)  # deviation of the first generation
    near: float = option(0.1, FROM_0)  # λ

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        cma = optional("cma", "generative", "the attack 'ggl'")
        training, records = told(seen, "ggl")
        prior, resources = generator_of(seen, "ggl"), resources or Resources()
        assert seen.kept is not None
        alone = spawned(rng, "prior")
        labels = infer(seen, self.labels, rng)
        engine = Engine(
            seen, training, records, device=resources.device,
            dtype=resources.dtype or torch.float32, mode="exact",
        )  # fmt: skip
        estimate = estimated(seen.update)
        through: Callable[[Named], Named] = estimate.through
        if seen.answer is not None:
            through = seen.answer.through or dict
        problem = _Problem(engine, prior, labels.to(engine.device), through, seen.update, self.near)
        deadline = math.inf if resources.seconds is None else time.monotonic() + resources.seconds
        ends: set[Stopped] = set()
        notes: list[str] = []
        runs: list[_Best] = []
        done = 0
        for _ in range(self.restarts):
            best = _Best()
            runs.append(best)
            for values in _generations(cma, records * prior.latent, self, rng, problem):
                best.note(*values)
                done += 1
                if resources.progress:
                    total = self.iterations * self.restarts
                    resources.progress(done, total, best.history[-1])
                if time.monotonic() > deadline:
                    ends.add("time")
                    break
            if "time" in ends:
                notes.append(
                    f"stopped by the time budget of {resources.seconds:g} s after {done} of "
                    f"{self.iterations * self.restarts} iterations"
                )
                break
            if len(best.history) < self.iterations:
                ends.add("patience")
                notes.append(
                    f"restart {len(runs)} of {self.restarts} stopped after {len(best.history)} of "
                    f"{self.iterations} generations: CMA-ES found no more progress"
                )
        chosen = min(runs, key=lambda run: run.objective)
        images = problem.images(chosen.z[None])[0]
        return Reconstruction(
            inputs=images.clamp(0, 1).float().cpu(),
            labels=labels,
            residual=chosen.distance,
            history=tuple(chosen.history),
            distances=tuple(chosen.distances),
            iterations=done,
            objectives=tuple(run.objective for run in runs),
            stopped=first_of(ends),
            adapted=seen.answer is not None,
            notes=tuple(notes),
            facts=estimate.facts() | told_of(seen.kept),
            prior=prior.sample(len(images), alone),
        )


@dataclass(frozen=True)
class Estimate:
    """A defence as what was sent shows it: the length that no update passed, of the whole or of
    each tensor, and by tensor which entries were sent and the smallest of them."""

    bound: float
    by_tensor: bool
    sent: dict[str, Tensor]
    least: dict[str, float]

    def through(self, update: Named) -> Named:
        """What this defence leaves of an update; where it was not sent, what is too large. Lengths
        are those of what is sent."""
        parts = {n: float(u[self.sent[n].to(u.device)].double().norm()) for n, u in update.items()}
        whole = math.sqrt(sum(length**2 for length in parts.values()))
        lengths = parts if self.by_tensor else dict.fromkeys(update, whole)
        found: Named = {}
        for name, value in update.items():
            cut = value * min(1.0, self.bound / max(lengths[name], 1e-300))
            small = self.least[name]
            found[name] = torch.where(
                self.sent[name].to(value.device), cut, cut - cut.clamp(-small, small)
            )
        return found

    def facts(self) -> dict[str, Any]:
        total = sum(mask.numel() for mask in self.sent.values())
        kept = sum(int(mask.sum()) for mask in self.sent.values())
        return {
            "estimated_bound": self.bound,
            "estimated_clipping": "each tensor" if self.by_tensor else "the whole update",
            "estimated_pruned": 1 - kept / max(1, total),
        }


def estimated(update: Named) -> Estimate:
    """The defence that an update shows."""
    lengths = [float(u.double().norm()) for u in update.values()]
    longest = max(lengths, default=0.0)
    met = sum(length >= longest * (1 - ALIKE) for length in lengths)
    by_tensor = met > 1 and longest > 0
    whole = math.sqrt(sum(length**2 for length in lengths))
    sent = {name: value != 0 for name, value in update.items()}
    least = {
        name: float(value[sent[name]].abs().min()) if sent[name].any() else 0.0
        for name, value in update.items()
    }
    return Estimate(longest if by_tensor else whole, by_tensor, sent, least)


@dataclass(frozen=True)
class _Problem:
    """The objective of latents (records × latent), as one point."""

    engine: Engine
    prior: GANPrior
    labels: Tensor
    through: Callable[[Named], Named]
    update: Named
    near: float

    def images(self, points: Tensor) -> Tensor:
        """Pictures (P, records, …) of points (P, records × latent)."""
        z = points.to(self.engine.device, self.engine.dtype).view(-1, self.prior.latent)
        with torch.no_grad():
            shown = self.prior.decode(z)
        return shown.view(len(points), -1, *shown.shape[1:])

    def values(self, points: Tensor) -> tuple[list[float], list[float]]:
        """The objectives and their distances."""
        engine = self.engine
        aim = self._named([self.update[n].to(engine.target[0]) for n in engine.names])
        distances = []
        for images in self.images(points):
            gradient = engine.gradient(images, self.labels)
            ours = self._named([g / engine.unit for g in gradient])
            distances.append(float(relative_squared(ours, aim)[0]))
        penalty = self.near * far(points.view(len(points), -1, self.prior.latent))
        return [d + p for d, p in zip(distances, penalty.tolist(), strict=True)], distances

    def _named(self, update: list[Tensor]) -> list[Tensor]:
        passed = self.through(dict(zip(self.engine.names, update, strict=True)))
        return [passed[name].clone() for name in self.engine.names]


def far(z: Tensor) -> Tensor:
    """R of each point (P, records, latent): the mean over its records."""
    mean, variance = z.mean(2), z.var(2, correction=0).clamp_min(1e-10)
    return (0.5 * (mean.square() + variance - 1 - variance.log())).mean(1)


class _Best:
    """The best point of a run, and the best of each generation."""

    def __init__(self) -> None:
        self.objective = self.distance = math.inf
        self.z = torch.zeros(0)
        self.history: list[float] = []
        self.distances: list[float] = []

    def note(self, points: Tensor, objectives: list[float], distances: list[float]) -> None:
        at = int(np.argmin(objectives))
        self.history.append(objectives[at])
        self.distances.append(distances[at])
        if objectives[at] < self.objective:
            self.objective, self.distance = objectives[at], distances[at]
            self.z = points[at].clone()


def _generations(cma: Any, unknowns: int, how: GGL, rng: torch.Generator, problem: _Problem) -> Any:
    """Points, objectives and distances, generation by generation. `rng` is all that is drawn from:
    numpy's own generator stays where it is."""
    start = torch.randn(unknowns, generator=rng).double().numpy()

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=rng, dtype=torch.float64).numpy()

    options = {
        "popsize": how.population, "seed": np.nan, "randn": normal, "verbose": -9,
        "CMA_diagonal": unknowns > DIAGONAL,
    }  # fmt: skip
    search = cma.CMAEvolutionStrategy(start, how.spread, options)
    for _ in range(how.iterations):
        asked = search.ask()
        points = torch.from_numpy(np.stack(asked))
        objectives, distances = problem.values(points)
        yield points, objectives, distances
        search.tell(asked, objectives)
        if search.stop():
            return
