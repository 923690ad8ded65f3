"""The fit of whatever is learned before an update is seen: one loop for all attacks and priors.

A lesson says with what weights a fit begins, what a step is to lower and how good weights are on
what is held out. The loop takes Adam steps whose rate rises, then falls like half a cosine; looks
now and then at what is held out, and ends after `steps`, when looks gain nothing any more, or when
the time is up. What was best on what is held out is what it returns. Every look is a checkpoint: a
fit that was killed goes on from there to the same weights, bit by bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakgauge.types import Kept, Named, Resources

GAIN = 0.01  # decibels on what is held out that count as progress
PATIENCE = 12  # looks without progress after which a fit ends
WARM = 50  # steps in which the learning rate rises


@dataclass(frozen=True)
class Lesson:
    """`begin()` gives the first weights, `error(weights, rng)` what one step lowers, on a batch
    that it draws, and `score(weights)` decibels on what is held out."""

    begin: Callable[[], Named]
    error: Callable[[Mapping[str, Tensor], torch.Generator], Tensor]
    score: Callable[[Mapping[str, Tensor]], float]


@dataclass(frozen=True)
class Pace:
    """How long a fit may take, how fast it moves, and after how many steps it looks each time."""

    steps: int
    lr: float
    every: int = 50


@dataclass(frozen=True)
class Fitted:
    """The best weights and their score, after so many steps and CPU-seconds in all, those before a
    kill included."""

    weights: Named
    score: float
    steps: int
    cpu_seconds: float


@dataclass(frozen=True)
class Clock:
    """When a fit was begun, its preparations included, and when it must end."""

    began: float  # CPU-seconds of the process
    deadline: float  # by time.monotonic

    @classmethod
    def of(cls, resources: Resources) -> Clock:
        limit = math.inf if resources.seconds is None else time.monotonic() + resources.seconds
        return cls(time.process_time(), limit)

    @property
    def spent(self) -> float:
        return time.process_time() - self.began

    @property
    def up(self) -> bool:
        return time.monotonic() >= self.deadline


def fit(
    lesson: Lesson, pace: Pace, rng: torch.Generator, resources: Resources, clock: Clock
) -> Fitted:
    """Weights that the lesson asks for."""
    checkpoint = resources.checkpoint
    before = checkpoint.load() if checkpoint is not None else None
    now = _Run.begun(lesson.begin()) if before is None else _Run.continued(before, rng)
    spent = now.cpu_seconds
    while now.step < pace.steps and now.since < PATIENCE and not clock.up:
        share = now.step / pace.steps
        falling = 0.5 + 0.5 * math.cos(math.pi * share)
        error = now.advance(lesson, pace.lr * falling * min(1, (now.step + 1) / WARM), rng)
        if resources.progress is not None:
            resources.progress(now.step, pace.steps, error)
        if now.step % pace.every == 0 or now.step == pace.steps:
            now.look(lesson)
            now.cpu_seconds = spent + clock.spent
            if checkpoint is not None:
                checkpoint.save(now.kept(rng))
    if now.looks == 0:  # the time was up before the first look
        now.look(lesson)
    return Fitted(now.best, now.score, now.step, spent + clock.spent)


@dataclass
class _Run:
    """A fit on its way: weights and Adam's two means of them, changed in place."""

    weights: Named
    first: Named
    second: Named
    best: Named
    step: int = 0
    score: float = -math.inf
    since: int = 0  # looks without progress
    looks: int = 0
    cpu_seconds: float = 0.0

    @classmethod
    def begun(cls, weights: Named) -> _Run:
        own, best = ({n: w.detach().clone() for n, w in weights.items()} for _ in range(2))
        first, second = ({n: torch.zeros_like(w) for n, w in own.items()} for _ in range(2))
        return cls(own, first, second, best)

    @classmethod
    def continued(cls, kept: Kept, rng: torch.Generator) -> _Run:
        def part(name: str) -> Named:
            begin = f"{name}."
            return {
                key.removeprefix(begin): tensor.clone()
                for key, tensor in kept.tensors.items()
                if key.startswith(begin)
            }

        rng.set_state(kept.tensors["rng"])
        numbers: dict[str, Any] = dict(kept.facts)
        return cls(part("weights"), part("first"), part("second"), part("best"), **numbers)

    def kept(self, rng: torch.Generator) -> Kept:
        parts = {
            "weights": self.weights, "first": self.first, "second": self.second, "best": self.best,
        }  # fmt: skip
        tensors = {f"{p}.{n}": tensor for p, named in parts.items() for n, tensor in named.items()}
        facts = {
            "step": self.step, "score": self.score, "since": self.since, "looks": self.looks,
            "cpu_seconds": self.cpu_seconds,
        }  # fmt: skip
        return Kept(tensors | {"rng": rng.get_state()}, facts)

    def advance(self, lesson: Lesson, lr: float, rng: torch.Generator) -> float:
        """One step of Adam (β = 0.9, 0.999; ε = 1e-8), and the error before it."""
        for weight in self.weights.values():
            weight.requires_grad_()
        with torch.enable_grad():
            error = lesson.error(self.weights, rng)
            slopes = torch.autograd.grad(error, list(self.weights.values()))
        self.step += 1
        with torch.no_grad():
            for (name, weight), slope in zip(self.weights.items(), slopes, strict=True):
                weight.requires_grad_(False)
                mean = self.first[name].lerp_(slope, 0.1)
                square = self.second[name].mul_(0.999).addcmul_(slope, slope, value=0.001)
                root = square.sqrt().div_((1 - 0.999**self.step) ** 0.5).add_(1e-8)
                weight.addcdiv_(mean, root, value=-lr / (1 - 0.9**self.step))
        return float(error.detach())

    def look(self, lesson: Lesson) -> None:
        with torch.no_grad():
            found = lesson.score(self.weights)
        self.since = 0 if found > self.score + GAIN else self.since + 1
        if found > self.score:
            self.best = {name: weight.clone() for name, weight in self.weights.items()}
        self.score, self.looks = max(found, self.score), self.looks + 1
