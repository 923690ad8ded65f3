"""The loop of every optimisation attack: candidates are moved until their gradient matches.

The best iterate is chosen by the attack's own objective (distance plus priors), across restarts
too; the truth is nowhere in reach. Runs stop after `iterations` or `resources.seconds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._engine import Engine, Mode
from leakgauge.attacks._objectives import Distance
from leakgauge.attacks._spaces import Pixels, Space, Start
from leakgauge.errors import InputError, Withheld
from leakgauge.fl.local import advance
from leakgauge.fl.local import start as start_state
from leakgauge.types import LocalTraining, Observation, Reconstruction, Resources

Schedule: TypeAlias = Callable[[float], float]
"""A factor as a function of the share of the run that is done, in [0, 1)."""

Prior: TypeAlias = tuple[Callable[[Tensor], Tensor], Schedule]
"""A penalty on images and its weight over the run."""


def constant(value: float = 1.0) -> Schedule:
    return lambda done: value


def steps(at: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8), factor: float = 0.1) -> Schedule:
    """Multiply by `factor` at each of these shares of the run."""
    return lambda done: factor ** sum(done >= share for share in at)


def cosine(begin: float = 0.0) -> Schedule:
    """1 until `begin`, then half a cosine down to 0."""
    return lambda done: 0.5 + 0.5 * math.cos(math.pi * max(0.0, done - begin) / (1 - begin))


def staged(values: tuple[float, ...]) -> Schedule:
    """Equal stages, each with its own value."""
    return lambda done: values[min(int(done * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Adam:
    """Adam on the candidates; `signed` feeds it the sign of the gradient, as IG does."""

    lr: float = 0.1
    schedule: Schedule = field(default_factory=constant)
    signed: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Lbfgs:
    """L-BFGS with strong Wolfe line search. An iteration is one evaluation of the objective."""

    lr: float = 1.0
    memory: int = 100


Optimiser: TypeAlias = Adam | Lbfgs

OPTIMISERS: dict[str, type[Adam] | type[Lbfgs]] = {"adam": Adam, "lbfgs": Lbfgs}


class _OutOfTime(Exception):
    """Unwinds the optimiser when the time is spent."""


class _OutOfIterations(Exception):
    """Unwinds L-BFGS, whose line search would take some more."""


@dataclass
class _Problem:
    """One restart: the objective of its free variables, with the best point met so far."""

    engine: Engine
    distance: Distance
    labels: Tensor | None
    priors: tuple[Prior, ...]
    space: Space
    size: tuple[int, int]
    free: list[Tensor]  # the space's variable and, when labels are searched too, their logits
    total: int
    report: Callable[[float], None]

    def __post_init__(self) -> None:
        self.best = math.inf
        self.best_distance = math.inf
        self.best_inputs, self.best_labels = (t.clone() for t in self._decode())
        self.history: list[float] = []

    def _decode(self) -> tuple[Tensor, Tensor]:
        inputs = self.space.decode(self.free[0], self.size)
        return inputs, self.labels if self.labels is not None else self.free[1].softmax(1)

    def evaluate(self, done: float) -> float:
        """Objective at the free variables; leaves its derivative in their `.grad`."""
        leaves = [f.requires_grad_() for f in self.free]
        with torch.enable_grad():
            inputs, labels = self._decode()
            slope = self.engine.slope(inputs.detach(), labels.detach(), self.distance)
            penalty = inputs.new_zeros(())
            for prior, weight in self.priors:
                penalty = penalty + weight(done) * prior(inputs)
            outputs, seeds = [inputs, penalty], [slope.inputs, torch.ones_like(penalty)]
            if slope.labels is not None:
                outputs, seeds = [*outputs, labels], [*seeds, slope.labels]
            kept = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
            gradient = torch.autograd.grad([o for o, _ in kept], leaves, [s for _, s in kept])
        for leaf, g in zip(self.free, gradient, strict=True):
            leaf.requires_grad_(False)
            leaf.grad = g
        objective = slope.value + float(penalty.detach())
        if not math.isfinite(objective):
            raise InputError(
                f"the attack's objective became {objective} at iteration {len(self.history)}: "
                "lower its learning rate, or check the observed update"
            )
        self.history.append(objective)
        if objective < self.best:
            self.best, self.best_distance = objective, slope.value
            self.best_inputs, self.best_labels = inputs.detach().clone(), labels.detach().clone()
        self.report(objective)
        return objective


def match(
    seen: Observation,
    distance: Distance,
    *,
    labels: Tensor | None,
    optimiser: Optimiser,
    iterations: int,
    rng: torch.Generator,
    start: Start = "normal",
    space: Space | None = None,
    priors: tuple[Prior, ...] = (),
    restarts: int = 1,
    box: Literal["clamp", "none"] = "clamp",
    derivative: Mode = "auto",
    dtype: torch.dtype = torch.float32,
    resources: Resources | None = None,
) -> Reconstruction:
    """Candidates whose gradient matches what was observed.

    `labels=None` searches the labels too, as softmax of free logits.
    """
    if seen.training is None or seen.records is None:
        raise Withheld("gradient matching needs 'training' and 'records' in the observation")
    if iterations < 1 or restarts < 1:
        raise InputError(
            f"gradient matching needs iterations and restarts of at least 1, got {iterations} "
            f"and {restarts}"
        )
    resources = resources or Resources()
    space = space or Pixels()
    engine = Engine(
        seen,
        seen.training,
        seen.records,
        device=resources.device,
        dtype=resources.dtype or dtype,
        mode=derivative,
    )
    deadline = math.inf if resources.seconds is None else time.monotonic() + resources.seconds
    done = 0

    def report(objective: float) -> None:
        nonlocal done
        done += 1
        if resources.progress:
            resources.progress(done, iterations * restarts, objective)
        if time.monotonic() > deadline:
            raise _OutOfTime

    found: list[_Problem] = []
    notes: list[str] = []
    for _ in range(restarts):
        free = [space.draw((seen.records, *seen.shape), start, rng)]
        if labels is None:
            free.append(torch.randn(seen.records, seen.classes, generator=rng))
        problem = _Problem(
            engine=engine,
            distance=distance,
            labels=labels.to(engine.device) if labels is not None else None,
            priors=priors,
            space=space,
            size=seen.shape[1:],
            free=[f.to(engine.device, engine.dtype) for f in free],
            total=iterations,
            report=report,
        )
        found.append(problem)
        try:
            _run(problem, optimiser, box)
        except _OutOfTime:
            notes.append(
                f"stopped by the time budget of {resources.seconds:g} s after {done} of "
                f"{iterations * restarts} iterations"
            )
            break
    best = min(found, key=lambda p: p.best)
    guessed = best.best_labels
    return Reconstruction(
        inputs=best.best_inputs.clamp(0, 1).float().cpu(),
        labels=(guessed.argmax(1) if guessed.is_floating_point() else guessed).cpu(),
        residual=best.best_distance,
        history=tuple(best.history),
        notes=(*engine.notes, *notes),
        facts={
            "derivative": engine.mode,
            "iterations": done,
            "objectives": [p.best for p in found],
        },
    )


def _run(problem: _Problem, optimiser: Optimiser, box: Literal["clamp", "none"]) -> None:
    if isinstance(optimiser, Lbfgs):
        _run_lbfgs(problem, optimiser)
        return
    # A step of local training is a step of Adam here too.
    state = start_state(problem.free, LocalTraining(optimiser="adam"))
    for i in range(problem.total):
        done = i / problem.total
        problem.evaluate(done)
        gradient = [f.grad.sign() if optimiser.signed else f.grad for f in problem.free
                    if f.grad is not None]  # fmt: skip
        rate = LocalTraining(
            optimiser="adam",
            lr=optimiser.lr * optimiser.schedule(done),
            weight_decay=optimiser.weight_decay,
        )
        state = advance(state, gradient, rate)
        if box == "clamp":
            clamped = (state.weights[0].clamp(0, 1), *state.weights[1:])
            state = state.with_tensors((*clamped, *state.tensors()[len(clamped) :]))
        problem.free = list(state.weights)


def _run_lbfgs(problem: _Problem, optimiser: Lbfgs) -> None:
    """L-BFGS from the start, and again from where it stands when its line search gives up."""

    def objective() -> float:
        if len(problem.history) == problem.total:
            raise _OutOfIterations
        return problem.evaluate(len(problem.history) / problem.total)

    while len(problem.history) < problem.total:
        search = torch.optim.LBFGS(
            problem.free,
            lr=optimiser.lr,
            max_iter=problem.total,
            max_eval=problem.total,
            history_size=optimiser.memory,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        before = len(problem.history)
        with suppress(_OutOfIterations):
            search.step(objective)  # type: ignore[no-untyped-call]
        if len(problem.history) - before < 3:  # no progress possible from here
            break
