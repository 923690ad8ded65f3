"""The loop of every optimisation attack: candidates are moved until their gradient matches.

The best iterate is chosen by the attack's own objective (distance plus priors), across restarts
too; the truth is nowhere in reach. Runs stop after `iterations`, `resources.seconds`, or when
nothing has improved for `patience` iterations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._engine import Engine, Mode, Replay, Trust
from leakgauge.attacks._labels import LabelRule, knowledge
from leakgauge.attacks._layers import told
from leakgauge.attacks._objectives import Distance
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._spaces import SPACES, Space, SpaceName, Start
from leakgauge.errors import InputError
from leakgauge.fl.local import State, advance
from leakgauge.fl.local import start as start_state
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import (
    Answer,
    Knowledge,
    LocalTraining,
    Observation,
    Reconstruction,
    Resources,
    Stopped,
)

Schedule: TypeAlias = Callable[[float], float]
"""A factor as a function of the share of the run that is done, in [0, 1)."""

Prior: TypeAlias = tuple[Callable[[Tensor], Tensor], Schedule]
"""A penalty on images and its weight over the run."""

ROUGH = 0.05  # mean difference of neighbouring values of small photographs
IMPROVED = 1e-4  # relative fall of the best objective that counts as progress for `patience`


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
class Phases:
    """A distance that changes over the run. `at(share of the run done)` returns the same object
    while nothing changes: another object begins a new phase, and with it a new record of the best
    iterate, for objectives of different phases cannot be compared."""

    at: Callable[[float], Distance]


@dataclass(frozen=True)
class Blend:
    """The gradient used is (1 − weight)·∇D(x) + weight·∇D(x')  (FedLeak, Eq. 14).

    x' = x + reach·∇D/‖∇D‖ for each image (`to="slope"`, Eq. 13, uphill as printed), or the point
    after one step of the optimiser (`to="step"`). It costs a second evaluation per iteration.
    """

    weight: float = 0.7
    reach: float = 0.1
    to: Literal["slope", "step"] = "slope"


@dataclass(frozen=True)
class Adam:
    """Adam on the candidates; `signed` feeds it the sign of the gradient, as IG does.

    `noise` adds lr·noise·N(0, 1) to every step (Langevin).
    """

    lr: float = 0.1
    schedule: Schedule = field(default_factory=constant)
    signed: bool = False
    weight_decay: float = 0.0
    noise: float = 0.0
    blend: Blend | None = None


@dataclass(frozen=True)
class Lbfgs:
    """L-BFGS with strong Wolfe line search. An iteration is one evaluation of the objective."""

    lr: float = 1.0
    memory: int = 100


Optimiser: TypeAlias = Adam | Lbfgs

OPTIMISERS: dict[str, type[Adam] | type[Lbfgs]] = {"adam": Adam, "lbfgs": Lbfgs}


@dataclass(frozen=True)
class Search:
    """How long candidates are moved, from what start, in which space and by which derivative: the
    options of every attack that matches gradients. `space=None` leaves it to the attack."""

    iterations: int = 500
    restarts: int = 1
    start: Start = "normal"
    space: SpaceName | None = "pixels"
    derivative: Mode = "auto"

    def shortened(self, iterations: int, restarts: int) -> Self:
        return replace(self, iterations=iterations, restarts=restarts)


@dataclass(frozen=True)
class LabelledSearch(Search):
    """A search for images alone: a label rule reads the labels first, or takes granted ones."""

    labels: LabelRule = "counts"

    @property
    def needs(self) -> frozenset[Knowledge]:
        return knowledge(self.labels)


class _OutOfTime(Exception):
    """Unwinds the optimiser when the time is spent."""


class _OutOfPatience(Exception):
    """Unwinds the optimiser when nothing improves any more."""


class _SearchEnds(Exception):
    """Unwinds L-BFGS in its line search: no iteration is left, or the distance changes."""


@dataclass(frozen=True)
class _Point:
    """The objective at some free variables: its distance alone, its images, its gradient."""

    objective: float
    distance: float
    inputs: Tensor
    labels: Tensor
    gradient: list[Tensor]


@dataclass
class _Problem:
    """One restart: the objective of its free variables, with the best point met so far."""

    engine: Replay
    distance: Distance | Phases
    labels: Tensor | None
    priors: tuple[Prior, ...]
    space: Space
    size: tuple[int, int]
    free: list[Tensor]  # the space's variables and, when labels are searched too, their logits
    total: int
    patience: int | None
    report: Callable[[float], None]
    keep: bool = False  # the free variables of the best point, too

    def __post_init__(self) -> None:
        self.best = math.inf
        self.best_distance = math.inf
        self.best_inputs, self.best_labels = (t.clone() for t in self._decode(self.free))
        self.best_free = [f.clone() for f in self.free] if self.keep else []
        self.history: list[float] = []
        self.distances: list[float] = []
        self.phase: Distance | None = None
        self.phases = 0
        self._mark = (math.inf, 0)  # objective and iteration of the last improvement that counts

    def distance_at(self, done: float) -> Distance:
        return self.distance.at(done) if isinstance(self.distance, Phases) else self.distance

    def _decode(self, free: list[Tensor]) -> tuple[Tensor, Tensor]:
        if self.labels is not None:
            return self.space.decode(free, self.size), self.labels
        return self.space.decode(free[:-1], self.size), free[-1].softmax(1)

    def derivative(self, free: list[Tensor], done: float) -> _Point:
        """The objective at these variables, by the distance of the present phase."""
        assert self.phase is not None
        leaves = [f.requires_grad_() for f in free]
        with torch.enable_grad():
            inputs, labels = self._decode(leaves)
            slope = self.engine.slope(inputs.detach(), labels.detach(), self.phase)
            penalty = inputs.new_zeros(())
            for prior, weight in self.priors:
                penalty = penalty + weight(done) * prior(inputs)
            outputs, seeds = [inputs, penalty], [slope.inputs, torch.ones_like(penalty)]
            if slope.labels is not None:
                outputs, seeds = [*outputs, labels], [*seeds, slope.labels]
            kept = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
            gradient = torch.autograd.grad([o for o, _ in kept], leaves, [s for _, s in kept])
        for leaf in leaves:
            leaf.requires_grad_(False)
        objective = slope.value + float(penalty.detach())
        if not math.isfinite(objective):
            raise InputError(
                f"the attack's objective became {objective} at iteration {len(self.history)}: "
                "lower its learning rate, or check the observed update"
            )
        return _Point(objective, slope.value, inputs.detach(), labels.detach(), list(gradient))

    def evaluate(self, done: float) -> _Point:
        """The objective at the present free variables, recorded."""
        distance = self.distance_at(done)
        if distance is not self.phase:
            self.phase, self.phases = distance, self.phases + 1
            self.best, self._mark = math.inf, (math.inf, len(self.history))
        here = self.derivative(self.free, done)
        self.history.append(here.objective)
        self.distances.append(here.distance)
        if here.objective < self.best:
            self.best, self.best_distance = here.objective, here.distance
            self.best_inputs, self.best_labels = here.inputs.clone(), here.labels.clone()
            self.best_free = [f.clone() for f in self.free] if self.keep else []
        self.report(here.objective)
        if self.patience is not None:
            self._wait(self.patience)
        return here

    def _wait(self, patience: int) -> None:
        least, since = self._mark
        if self.best < least - IMPROVED * abs(least) or math.isinf(least):
            self._mark = (self.best, len(self.history))
        elif patience <= len(self.history) - since < self.total - since:
            # Earlier phases run to their end: what follows them is the point.
            last = self.distance_at((self.total - 1) / self.total)
            if last is self.phase:
                raise _OutOfPatience


def match(
    seen: Observation,
    distance: Distance | Phases,
    search: Search,
    *,
    labels: Tensor | None,
    optimiser: Optimiser,
    rng: torch.Generator,
    space: Space | None = None,
    priors: tuple[Prior, ...] = (),
    box: Literal["clamp", "none"] = "clamp",
    dtype: torch.dtype = torch.float32,
    resources: Resources | None = None,
    begin: Tensor | None = None,
    patience: int | None = None,
    errors: Tensor | None = None,
    trust: Trust | None = None,
    replay: Replay | None = None,
    variables: list[Tensor] | None = None,
) -> Reconstruction:
    """Candidates whose gradient matches what was observed.

    `labels=None` searches the labels too, as softmax of free logits. `space` is one of your own, in
    place of that of the search; `begin` are images to start from, in place of its start. Without
    them the attacker's own earlier guess is taken (`seen.begin`), if it holds one. They are for the
    first restart: the others start as the search does, and no random number is another with them
    than without. `errors` are ∂L/∂logits of the candidates, see `Engine`. An attack of several
    searches on one update gives them all the same `trust`: the derivative is checked once. `replay`
    is what plays the training on candidates, where that is not one client's on one update. A list
    given as `variables` receives the free variables of the guess, for a stage in another space.
    """
    training, records = told(seen, "gradient matching")
    iterations, restarts = search.iterations, search.restarts
    if iterations < 1 or restarts < 1:
        raise InputError(
            f"gradient matching needs iterations and restarts of at least 1, got {iterations} "
            f"and {restarts}"
        )
    if patience is not None and patience < 1:
        raise InputError(f"patience must be at least 1 iteration, got {patience}")
    resources = resources or Resources()
    space = space or SPACES[search.space or "pixels"]()
    shape = (records, *pictures(seen.record).shape)
    chance = rng if begin is None else spawned(rng, "begin")  # a later stage draws no start
    if begin is None and seen.begin is not None:
        begin = in_order(seen.begin, labels)
    if begin is not None:
        _check_begin(begin, shape, space)
        begin = begin.clamp(0, 1)
    engine = replay or Engine(
        seen,
        training,
        records,
        device=resources.device,
        dtype=resources.dtype or dtype,
        mode=search.derivative,
        errors=errors,
        trust=trust,
    )
    compared = distance
    if seen.answer:
        compared = through_defence(distance, seen.answer, engine)
        priors = (*priors, *_smooth(distance, seen.answer, engine, priors, rng))
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
    ends: set[Stopped] = set()
    for restart in range(restarts):
        free = [f.to(engine.device, engine.dtype)
                for f in space.draw(shape, search.start, rng if restart else chance)]  # fmt: skip
        if begin is not None and not restart:
            free = space.encode(begin.to(engine.device, engine.dtype), free)
        if labels is None:
            logits = torch.randn(records, seen.task.count, generator=rng)
            free.append(logits.to(engine.device, engine.dtype))
        problem = _Problem(
            engine=engine,
            distance=compared,
            labels=labels.to(engine.device) if labels is not None else None,
            priors=priors,
            space=space,
            size=pictures(seen.record).shape[1:],
            free=free,
            total=iterations,
            patience=patience,
            report=report,
            keep=variables is not None,
        )
        found.append(problem)
        try:
            if isinstance(optimiser, Lbfgs):
                _run_lbfgs(problem, optimiser)
            else:
                _run_adam(problem, optimiser, box == "clamp" and space.boxed, rng)
        except _OutOfTime:
            ends.add("time")
            notes.append(
                f"stopped by the time budget of {resources.seconds:g} s after {done} of "
                f"{iterations * restarts} iterations"
            )
            break
        except _OutOfPatience:
            ends.add("patience")
            notes.append(
                f"restart {len(found)} of {restarts} stopped after {len(problem.history)} of "
                f"{iterations} iterations: no progress in {patience}"
            )
    # A restart that the budget cut short in an earlier phase is not comparable: it comes last.
    best = min(found, key=lambda p: (-p.phases, p.best))
    guessed = best.best_labels
    if variables is not None:
        variables[:] = [f.float().cpu() for f in best.best_free]
    return Reconstruction(
        inputs=best.best_inputs.clamp(0, 1).float().cpu(),
        labels=(guessed.argmax(1) if guessed.is_floating_point() else guessed).cpu(),
        residual=best.best_distance,
        history=tuple(best.history),
        distances=tuple(best.distances),
        iterations=done,
        objectives=tuple(p.best for p in found),
        stopped=first_of(ends),
        differed=engine.differed,
        adapted=seen.answer is not None,
        notes=(*engine.notes, *notes),
        facts={"derivative": engine.mode},
    )


def _left(update: Sequence[Tensor], answer: Answer, engine: Replay) -> list[Tensor]:
    """What a defence leaves of an update, both in units of a gradient."""
    if answer.through is None:
        return list(update)
    named = {n: u / engine.unit for n, u in zip(engine.names, update, strict=True)}
    passed = answer.through(named)
    return [passed[n] * engine.unit for n in engine.names]


def _smooth(
    distance: Distance | Phases,
    answer: Answer,
    engine: Replay,
    priors: tuple[Prior, ...],
    rng: torch.Generator,
) -> tuple[Prior, ...]:
    """What an attacker expects of pictures who knows how noisy an update is: the most probable
    picture, where the distance of the noise alone counts for half a unit of log-likelihood per
    entry, and neighbouring values differ as those of photographs do, by ROUGH in the mean. What the
    attack itself asks of the total variation counts."""
    if answer.again is None:
        return ()
    aim = _left([t.double() for t in engine.target], answer, engine)
    sent = answer.again(spawned(rng, "again"))
    again = [sent[n].to(engine.device, torch.float64) * engine.unit for n in engine.names]
    one = distance.at(0.0) if isinstance(distance, Phases) else distance
    noise = float(one([a.clone() for a in _left(again, answer, engine)], aim)[0])
    wanted = 2 * noise / (sum(a.numel() for a in again) * ROUGH)
    total = wanted * engine.values  # of a mean, in place of a sum, over all values
    own = sum(weight(0.0) for prior, weight in priors if prior is total_variation)
    return ((total_variation, constant(max(0.0, total - own))),)


def through_defence(
    distance: Distance | Phases, answer: Answer, engine: Replay
) -> Distance | Phases:
    """The distance as an attacker takes it who knows the defence: between what that leaves of a
    candidate's update and what it left of the true one."""
    if answer.through is None:
        return distance
    aim = _left([t.double() for t in engine.target], answer, engine)

    def adapted(one: Distance) -> Distance:
        def by(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            leaves = [g.detach().requires_grad_() for g in guess]
            with torch.enable_grad():
                passed = _left(leaves, answer, engine)
            value, v = one(
                [p.detach().clone() for p in passed],
                [a.to(p.dtype) for a, p in zip(aim, passed, strict=True)],
            )
            moving = [(p, d) for p, d in zip(passed, v, strict=True) if p.requires_grad]
            slopes = torch.autograd.grad(
                [p for p, _ in moving], leaves, [d for _, d in moving], materialize_grads=True
            )
            return value, [s.clone() for s in slopes]

        return by

    if not isinstance(distance, Phases):
        return adapted(distance)
    known: dict[int, tuple[Distance, Distance]] = {}  # another object begins a new phase
    phases = distance

    def at(done: float) -> Distance:
        one = phases.at(done)
        return known.setdefault(id(one), (one, adapted(one)))[1]

    return Phases(at)


def first_of(ends: Collection[Stopped]) -> Stopped:
    """Why searches ended that belong together: the reason that hindered them most."""
    order: tuple[Stopped, ...] = ("time", "patience")
    return next((end for end in order if end in ends), "done")


def joined(
    before: Reconstruction, stage: Reconstruction, **facts: int | float | str
) -> Reconstruction:
    """A stage as the end of the run so far."""
    return replace(
        stage,
        history=before.history + stage.history,
        distances=before.distances + stage.distances,
        iterations=before.iterations + stage.iterations,
        objectives=before.objectives,
        stopped=first_of({before.stopped, stage.stopped}),
        notes=before.notes + stage.notes,
        facts=stage.facts | facts,
    )


def shared(resources: Resources | None, total: int) -> Callable[[int], Resources]:
    """For attacks of several stages: what is left for a stage that begins after `done` of all
    iterations. Progress counts over all stages."""
    resources = resources or Resources()
    begun, seconds, progress = time.monotonic(), resources.seconds, resources.progress

    def left(done: int) -> Resources:
        return replace(
            resources,
            seconds=None if seconds is None else max(0.0, seconds - time.monotonic() + begun),
            progress=progress and (lambda i, _, objective: progress(done + i, total, objective)),
        )

    return left


def in_order(guess: Reconstruction, labels: Tensor | None) -> Tensor:
    """The guess's images in the order of these labels: each where its own label stands. Those whose
    label is wanted nowhere fill the rest; where labels are unknown all stay where they are."""
    images, known = guess.inputs, guess.labels
    if labels is None or known is None or not len(labels) == len(known) == len(images):
        return images
    waiting, own = list(range(len(images))), known.tolist()
    order: dict[int, int] = {}
    for place, label in enumerate(labels.tolist()):
        one = next((i for i in waiting if own[i] == label), None)
        if one is not None:
            order[place] = one
            waiting.remove(one)
    return images[[order[p] if p in order else waiting.pop(0) for p in range(len(images))]]


def _check_begin(begin: Tensor, shape: tuple[int, ...], space: Space) -> None:
    if not hasattr(space, "encode"):  # it may be another package's
        raise InputError(
            f"a search in the space {type(space).__name__} cannot begin from given images: give it "
            "a method encode(images, free), or use the space 'pixels'"
        )
    if begin.shape != shape:
        raise InputError(
            f"begin must hold images {shape}, one for each record of the update, got "
            f"{tuple(begin.shape)}"
        )
    if not begin.isfinite().all():
        bad = int((~begin.isfinite()).sum())
        raise InputError(
            f"begin must hold finite images, got {bad} NaN or infinite values of {begin.numel()}: "
            "begin from another guess"
        )


def _run_adam(problem: _Problem, optimiser: Adam, clamp: bool, rng: torch.Generator) -> None:
    # A step of local training is a step of Adam here too.
    state = start_state(problem.free, LocalTraining(optimiser="adam"))
    images = len(problem.free) - (problem.labels is None)  # what comes behind them are logits

    def moved(gradient: list[Tensor], lr: float) -> State:
        if optimiser.signed:
            gradient = [g.sign() for g in gradient]
        rate = LocalTraining(optimiser="adam", lr=lr, weight_decay=optimiser.weight_decay)
        return advance(state, gradient, rate)

    for i in range(problem.total):
        done = i / problem.total
        lr = optimiser.lr * optimiser.schedule(done)
        gradient = problem.evaluate(done).gradient
        if optimiser.blend:
            if optimiser.blend.to == "step":
                ahead = list(moved(gradient, lr).weights)
            else:
                ahead = _uphill(problem, gradient, optimiser.blend.reach)
            there = problem.derivative(ahead, done).gradient
            gradient = [torch.lerp(g, t, optimiser.blend.weight)
                        for g, t in zip(gradient, there, strict=True)]  # fmt: skip
        state = moved(gradient, lr)
        weights = list(state.weights)
        if optimiser.noise:
            kicks = [torch.randn(w.shape, generator=rng).to(w) for w in weights]
            weights = [w + lr * optimiser.noise * k for w, k in zip(weights, kicks, strict=True)]
        if clamp:
            weights[:images] = [w.clamp(0, 1) for w in weights[:images]]
        state = state.with_tensors((*weights, *state.tensors()[len(weights) :]))
        problem.free = weights


def _uphill(problem: _Problem, gradient: list[Tensor], reach: float) -> list[Tensor]:
    """x + reach·∇D/‖∇D‖, each image by its own norm; other variables, which all images share, by
    the norm of all."""
    if problem.space.boxed:
        norms = [g.flatten(1).norm(dim=1).view(-1, *[1] * (g.ndim - 1)) for g in gradient]
    else:
        norms = [torch.stack([g.norm() for g in gradient]).norm()] * len(gradient)
    return [f + reach * g / n.clamp_min(1e-30)
            for f, g, n in zip(problem.free, gradient, norms, strict=True)]  # fmt: skip


def _run_lbfgs(problem: _Problem, optimiser: Lbfgs) -> None:
    """L-BFGS from the start, and again from where it stands when its line search gives up or the
    distance changes."""

    def share() -> float:
        return len(problem.history) / problem.total

    while len(problem.history) < problem.total:
        before, phase = len(problem.history), problem.distance_at(share())

        def objective(phase: Distance = phase) -> float:
            if len(problem.history) == problem.total or problem.distance_at(share()) is not phase:
                raise _SearchEnds
            here = problem.evaluate(share())
            for leaf, g in zip(problem.free, here.gradient, strict=True):
                leaf.grad = g
            return here.objective

        search = lbfgs(problem.free, problem.total, optimiser.memory, optimiser.lr)
        with suppress(_SearchEnds):
            search.step(objective)  # type: ignore[no-untyped-call]
        stuck = len(problem.history) - before < 3  # no progress possible from here
        if stuck and problem.distance_at(share()) is phase:
            break


def lbfgs(free: list[Tensor], evaluations: int, memory: int, lr: float = 1.0) -> torch.optim.LBFGS:
    """L-BFGS with strong Wolfe line search, which ends by its evaluations alone."""
    return torch.optim.LBFGS(
        free,
        lr=lr,
        max_iter=evaluations,
        max_eval=evaluations,
        history_size=memory,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
