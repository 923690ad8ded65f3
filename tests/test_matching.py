"""The matching loop: schedules, optimisers, the choice of the best iterate, budgets and spaces.

Most tests put a scripted engine in place of the real one: what the loop does with values and
slopes is then known to the digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import models
from leakgauge.attacks import CoarseToFine, GradInversion, SmoothToSharp, _matching
from leakgauge.attacks._engine import Engine, Slope
from leakgauge.attacks._matching import (
    OPTIMISERS,
    Adam,
    Blend,
    Lbfgs,
    Optimiser,
    Phases,
    Search,
    constant,
    cosine,
    match,
    staged,
    steps,
)
from leakgauge.attacks._objectives import Distance, squared
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._spaces import SPACES, Generator, LowResolution, Pixels, Start, noise
from leakgauge.errors import InputError, Withheld
from leakgauge.fl.local import train
from leakgauge.types import Attack, Batch, LocalTraining, Observation, Resources

SHAPE = (2, 4, 6)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Scripted:
    """An engine that gives the answers of a function, and remembers what it was asked."""

    def __init__(self, answer: Callable[[int, Tensor, Tensor], Slope]):
        self.answer = answer
        self.inputs: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.distances: list[Distance] = []
        self.mode = "scripted"
        self.notes = ["a note of the engine"]
        self.differed = 0.125

    def __call__(self, *_: Any, device: str, dtype: torch.dtype, **__: Any) -> Scripted:
        self.device, self.dtype = torch.device(device), dtype
        return self

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        self.distances.append(distance)
        self.inputs.append(inputs.clone())
        self.labels.append(labels.clone())
        return self.answer(len(self.inputs) - 1, inputs, labels)


def values(script: Sequence[float]) -> Callable[[int, Tensor, Tensor], Slope]:
    """These objectives one after another, whatever the candidates; a slope that moves them."""
    return lambda call, inputs, labels: Slope(script[call], torch.ones_like(inputs), None)


def towards(goal: Tensor) -> Callable[[int, Tensor, Tensor], Slope]:
    """½‖x − goal‖²."""
    return lambda call, inputs, labels: Slope(
        float((inputs - goal).square().sum() / 2), inputs - goal, None
    )


def valley(call: int, inputs: Tensor, labels: Tensor) -> Slope:
    """Rosenbrock's function of the pixels in pairs: 0 where all are 1."""
    x = inputs.double().view(-1, 2).requires_grad_()
    a, b = x.unbind(1)
    value = ((1 - a) ** 2 + 100 * (b - a**2) ** 2).sum()
    (slope,) = torch.autograd.grad(value, x)
    return Slope(float(value.detach()), slope.view_as(inputs).to(inputs.dtype), None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def install(answer: Callable[[int, Tensor, Tensor], Slope]) -> Scripted:
        engine = Scripted(answer)
        monkeypatch.setattr(_matching, "Engine", engine)
        return engine

    return install


def seen(records: int = 1, **changes: Any) -> Observation:
    fields = {"training": LocalTraining(), "records": records} | changes
    return Observation(setting(nn.Identity(), SHAPE, 5), {}, **fields)


def run(optimiser: Optimiser, iterations: int, **options: Any) -> Any:
    defaults = {"labels": torch.tensor([3]), "rng": seeded()}
    knobs = {key: options.pop(key) for key in ("restarts", "start") if key in options}
    return match(
        options.pop("seen", seen()),
        options.pop("distance", squared),
        Search(iterations, **knobs),
        optimiser=optimiser,
        **defaults | options,
    )


# ---------------------------------------------------------------- schedules


def test_constant() -> None:
    assert [constant(0.3)(done) for done in (0.0, 0.5, 0.99)] == [0.3] * 3
    assert constant()(0.7) == 1


def test_steps_divide_by_ten_at_three_five_and_seven_eighths() -> None:
    got = [steps()(k / 8) for k in range(8)]
    assert got == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])
    assert steps((0.5,), 0.2)(0.499) == 1
    assert steps((0.5,), 0.2)(0.5) == 0.2


def test_cosine_falls_from_one_to_zero() -> None:
    assert [cosine()(k / 4) for k in range(5)] == pytest.approx(
        [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]
    )
    late = cosine(begin=0.5)
    assert [late(done) for done in (0.0, 0.5, 0.75, 1.0)] == pytest.approx([1, 1, 0.5, 0])


def test_staged_gives_each_value_an_equal_share() -> None:
    schedule = staged((5.0, 2.0, 1.0))
    assert [schedule(k / 6) for k in range(6)] == [5, 5, 2, 2, 1, 1]
    assert schedule(1.0) == 1


# ---------------------------------------------------------------- optimisers


def test_adam_takes_the_steps_of_torch(script: Callable[..., Scripted]) -> None:
    goal = torch.rand(1, *SHAPE, generator=seeded(1)) * 3 - 1
    engine = script(towards(goal))
    run(Adam(lr=0.2, weight_decay=0.1), 12, box="none")
    x = engine.inputs[0].clone().requires_grad_()
    theirs = torch.optim.Adam([x], lr=0.2, weight_decay=0.1)
    for ours in engine.inputs:
        assert torch.allclose(ours, x.detach(), atol=1e-6)
        x.grad = x.detach() - goal
        theirs.step()


def test_the_learning_rate_follows_the_schedule(script: Callable[..., Scripted]) -> None:
    """On a slope of constant sign a step of Adam is as long as its learning rate."""
    engine = script(values([1.0] * 8))
    run(Adam(lr=0.01, schedule=steps()), 8, box="none")
    moved = [float((a - b).mean()) for a, b in zip(engine.inputs, engine.inputs[1:], strict=False)]
    expected = [0.01 * steps()(k / 8) for k in range(7)]
    assert moved == pytest.approx(expected, rel=1e-2, abs=1e-7)


def test_signed_adam_sees_signs_only(script: Callable[..., Scripted]) -> None:
    goal = torch.full((1, *SHAPE), 9.0)
    weights = torch.logspace(-3, 3, goal[0].numel()).view_as(goal)

    def uneven(call: int, inputs: Tensor, labels: Tensor) -> Slope:
        # The first slope is uneven in size, the later ones smaller by far: Adam would remember.
        return Slope(1.0, (inputs - goal) * weights * 0.01**call, None)

    for signed in (True, False):
        engine = script(uneven)
        run(Adam(lr=0.1, signed=signed), 4, box="none")
        moves = engine.inputs[3] - engine.inputs[2]
        assert bool(torch.allclose(moves, torch.full_like(moves, 0.1), rtol=1e-4)) is signed


def test_lbfgs_solves_a_small_sigmoid_problem_to_high_accuracy() -> None:
    shape = (1, 6, 6)
    model = models.make("mlp", shape=shape, classes=4, hidden=(30,), activation="sigmoid",
                        init="wide-uniform", rng=seeded()).double()  # fmt: skip
    truth = Batch(torch.rand(1, *shape, generator=seeded(7)).double(), torch.tensor([2]))
    training = LocalTraining()
    update = train(setting(model, truth), truth, training, seeded()).update
    observation = Observation(setting(model, shape, 4), update, training=training, records=1)
    guess = match(
        observation,
        squared,
        Search(150),
        labels=truth.labels,
        optimiser=Lbfgs(),
        box="none",
        dtype=torch.float64,
        rng=seeded(),
    )
    assert guess.residual < 1e-18
    assert (guess.inputs - truth.inputs.float()).abs().max() < 1e-6
    assert len(guess.history) <= 150


def test_lbfgs_starts_again_when_it_gives_up(script: Callable[..., Scripted]) -> None:
    """A slope of zero ends its search; a fresh one from there uses the iterations left."""

    def lying(call: int, inputs: Tensor, labels: Tensor) -> Slope:
        slope = valley(call, inputs, labels)
        return Slope(slope.value, slope.inputs * (call != 10), None)

    engine = script(lying)
    guess = run(Lbfgs(), 200, box="none", dtype=torch.float64)
    assert len(engine.inputs) > 20
    assert torch.allclose(guess.inputs, torch.ones(1, *SHAPE), atol=1e-4)


def test_lbfgs_stops_where_nothing_moves(script: Callable[..., Scripted]) -> None:
    engine = script(lambda call, inputs, labels: Slope(1.0, torch.zeros_like(inputs), None))
    assert run(Lbfgs(), 200).residual == 1
    assert len(engine.inputs) < 5


def test_optimisers_are_named() -> None:
    assert isinstance(OPTIMISERS["adam"](lr=0.3), Adam)
    assert OPTIMISERS["adam"](lr=0.3).lr == 0.3
    assert OPTIMISERS["lbfgs"](lr=0.3) == Lbfgs(lr=0.3)


# ---------------------------------------------------------------- the best iterate


def test_best_iterate_is_the_one_of_lowest_objective(script: Callable[..., Scripted]) -> None:
    engine = script(values([5.0, 3.0, 1.0, 2.0, 4.0]))
    guess = run(Adam(lr=0.05), 5)
    assert guess.residual == 1
    assert torch.equal(guess.inputs, engine.inputs[2])
    assert guess.history == (5, 3, 1, 2, 4)


def test_objective_is_distance_plus_weighted_priors(script: Callable[..., Scripted]) -> None:
    """The prior decides between iterates, the residual stays the distance."""
    engine = script(values([1.0, 2.0, 3.0]))
    penalties = iter([2.0, 0.25, 0.0])
    weights: list[float] = []

    def prior(x: Tensor) -> Tensor:
        return next(penalties) + 0 * x.sum()

    def weight(done: float) -> float:
        weights.append(done)
        return 2.0

    guess = run(Adam(lr=0.05), 3, priors=((prior, weight),))
    assert guess.history == (1 + 4, 2 + 0.5, 3 + 0)
    assert guess.distances == (1, 2, 3)
    assert guess.residual == 2
    assert torch.equal(guess.inputs, engine.inputs[1])
    assert weights == pytest.approx([0, 1 / 3, 2 / 3])


def test_the_slope_of_a_prior_is_added(script: Callable[..., Scripted]) -> None:
    goal = torch.full((1, *SHAPE), 0.5)
    script(towards(goal))
    # ½(x − 0.5)² + 1.5·½(x − 0.1)²: the minimum lies at (0.5 + 1.5·0.1)/2.5.
    pull = ((lambda x: 0.5 * (x - 0.1).square().sum(), constant(1.5)),)
    guess = run(Lbfgs(), 30, priors=pull, box="none", start="uniform")
    assert torch.allclose(guess.inputs, torch.full_like(goal, 0.65 / 2.5), atol=1e-5)


def test_the_restart_of_lowest_objective_wins(script: Callable[..., Scripted]) -> None:
    engine = script(values([3.0, 2.0, 5.0, 1.0, 4.0, 4.5]))
    guess = run(Adam(lr=0.05), 2, restarts=3)
    assert guess.residual == 1
    assert guess.history == guess.distances == (5, 1)
    assert torch.equal(guess.inputs, engine.inputs[3])
    assert guess.objectives == (2, 1, 4)
    assert guess.iterations == 6
    assert guess.stopped == "done"
    starts = [engine.inputs[k] for k in (0, 2, 4)]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])


def test_what_the_engine_says_is_passed_on(script: Callable[..., Scripted]) -> None:
    script(values([1.0]))
    guess = run(Adam(), 1)
    assert guess.notes == ("a note of the engine",)
    assert guess.facts == {"derivative": "scripted"}
    assert guess.differed == 0.125


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_objective_that_is_no_number_is_an_error_in_words(
    script: Callable[..., Scripted], value: float
) -> None:
    script(values([1.0, 0.5, value]))
    with pytest.raises(InputError, match=rf"became {value} at iteration 2: lower its learning"):
        run(Adam(), 5)


def test_an_infinite_prior_is_an_error_in_words(script: Callable[..., Scripted]) -> None:
    script(values([1.0]))
    with pytest.raises(InputError, match="objective became nan"):
        run(Adam(), 1, priors=((lambda x: (0 * x.sum()).log() * 0, constant()),))


# ---------------------------------------------------------------- phases


def other(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A second distance, so that there is one to change to."""
    return squared(guess, target)


def halves(done: float) -> Distance:
    return squared if done < 0.5 else other


def test_the_best_iterate_is_one_of_the_last_phase(script: Callable[..., Scripted]) -> None:
    engine = script(values([5.0, 1.0, 9.0, 7.0, 8.0, 7.5]))
    guess = run(Adam(lr=0.05), 6, distance=Phases(lambda done: squared if done < 1 / 3 else other))
    assert engine.distances == [squared] * 2 + [other] * 4
    assert guess.residual == 7
    assert torch.equal(guess.inputs, engine.inputs[3])
    assert guess.history == (5, 1, 9, 7, 8, 7.5)


def test_a_restart_cut_short_in_an_earlier_phase_does_not_win(
    script: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = script(values([5.0, 4.0, 9.0, 8.0, 0.5]))
    clock = SimpleNamespace(monotonic=lambda: float(len(engine.inputs)))
    monkeypatch.setattr(_matching, "time", clock)
    guess = run(
        Adam(lr=0.05), 4, restarts=2, distance=Phases(halves), resources=Resources(seconds=4.5)
    )
    assert guess.residual == 8
    assert guess.objectives == (8, 0.5)


def test_lbfgs_searches_anew_when_the_distance_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of another function would mislead it: each phase is solved as if it stood alone."""
    goals = {squared: torch.full((1, *SHAPE), 0.9), other: torch.full((1, *SHAPE), 0.2)}
    stretch = torch.logspace(0, 2, goals[other][0].numel(), dtype=torch.float64)

    class Switching(Scripted):
        def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
            super().slope(inputs, labels, distance)
            away = (inputs - goals[distance]) * stretch.view_as(inputs)  # type: ignore[index]
            return Slope(float((away * away / stretch.view_as(inputs)).sum() / 2), away, None)

    engine = Switching(values([0.0] * 200))
    monkeypatch.setattr(_matching, "Engine", engine)
    guess = run(Lbfgs(), 160, distance=Phases(halves), box="none", dtype=torch.float64)
    assert engine.distances.count(other) > 20
    first = max(k for k, d in enumerate(engine.distances) if d is squared)
    assert torch.allclose(engine.inputs[first], goals[squared].double(), atol=1e-4)
    assert torch.allclose(guess.inputs, goals[other], atol=1e-4)


# ---------------------------------------------------------------- patience


@pytest.mark.parametrize("optimiser", [Adam(lr=0.01), Lbfgs()], ids=["adam", "lbfgs"])
def test_patience_ends_a_restart_that_does_not_improve(
    script: Callable[..., Scripted], optimiser: Optimiser
) -> None:
    falls = [10.0, 9.0, 8.0]
    waits = [8.0 - 1e-4 * k for k in range(50)]  # 1e-4 relative is 8e-4 here: eight of these steps
    engine = script(values([*falls, *waits]))
    guess = run(optimiser, 40, patience=5, box="none")
    assert len(engine.inputs) == len(guess.history) == 3 + 5
    assert guess.residual == pytest.approx(8 - 4e-4)
    assert guess.notes[-1] == ("restart 1 of 1 stopped after 8 of 40 iterations: no progress in 5")
    assert guess.stopped == "patience"


def test_patience_bears_slow_progress_and_lets_other_restarts_run(
    script: Callable[..., Scripted],
) -> None:
    slow = [8.0 * (1 - 3e-5) ** k for k in range(20)]
    engine = script(values([*slow, *[9.0] * 20]))
    guess = run(Adam(lr=0.01), 20, patience=5, restarts=2)
    assert len(engine.inputs) == 20 + 6
    assert guess.notes[1:] == ("restart 2 of 2 stopped after 6 of 20 iterations: no progress in 5",)
    assert guess.residual == slow[-1]


def test_patience_waits_for_the_last_phase(script: Callable[..., Scripted]) -> None:
    engine = script(values([1.0] * 40))
    run(Adam(lr=0.01), 40, patience=3, distance=Phases(halves))
    assert engine.distances == [squared] * 20 + [other] * 4


def test_no_patience_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="patience must be at least 1 iteration, got 0"):
        run(Adam(), 5, patience=0)


# ---------------------------------------------------------------- given images to begin from


def test_the_search_begins_from_given_images(script: Callable[..., Scripted]) -> None:
    begin = torch.rand(1, *SHAPE, generator=seeded(3))
    engine = script(values([1.0, 2.0]))
    kept = begin.clone()
    guess = run(Adam(lr=0.1), 2, begin=begin)
    assert torch.equal(engine.inputs[0], kept)
    assert torch.equal(guess.inputs, kept)
    assert torch.equal(begin, kept)


def test_a_later_stage_draws_no_start(script: Callable[..., Scripted]) -> None:
    script(values([1.0, 2.0]))
    rng, before = seeded(), seeded().get_state()
    run(Adam(lr=0.1), 2, begin=torch.zeros(1, *SHAPE), rng=rng)
    assert torch.equal(rng.get_state(), before)


class Shown:
    """A space of another package that knows no way back from images."""

    boxed = True
    draw, decode = Pixels.draw, Pixels.decode


def test_images_to_begin_from_need_their_shape_and_a_way_into_the_space() -> None:
    with pytest.raises(InputError, match=r"must hold images \(1, 2, 4, 6\), .*, got \(2, 4, 6\)"):
        run(Adam(), 1, begin=torch.zeros(SHAPE))
    with pytest.raises(InputError, match=r"Shown cannot begin .* give it a method encode"):
        run(Adam(), 1, begin=torch.zeros(1, *SHAPE), space=Shown())


# ---------------------------------------------------------------- blended gradients and noise


def test_blend_mixes_in_the_slope_a_little_uphill(script: Callable[..., Scripted]) -> None:
    """On ½‖(x − goal)·s‖² the gradient is linear: what the blend makes of it is known."""
    goal = torch.full((2, *SHAPE), 0.5)
    bend = torch.linspace(1, 3, goal[0].numel()).view(1, *SHAPE)
    engine = script(lambda call, x, y: Slope(1.0, bend * (x - goal), None))
    fed: list[Tensor] = []
    original = _matching.advance

    def spy(state: Any, gradient: Any, rate: Any) -> Any:
        fed.append(gradient[0])
        return original(state, gradient, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_matching, "advance", spy)
        guess = run(
            Adam(lr=0.1, blend=Blend(weight=0.6, reach=0.3)), 1,
            seen=seen(2), labels=torch.tensor([0, 1]),
        )  # fmt: skip
    x = engine.inputs[0]
    slope = bend * (x - goal)
    uphill = 0.3 * torch.stack([s / s.norm() for s in slope])  # each image by its own norm
    assert torch.allclose(engine.inputs[1], x + uphill, atol=1e-6)
    assert torch.allclose(fed[0], slope + 0.6 * bend * uphill, atol=1e-6)
    assert len(guess.history) == 1  # the look ahead is no iterate


def test_blend_may_look_at_the_point_of_the_next_step(script: Callable[..., Scripted]) -> None:
    engine = script(values([1.0] * 4))
    guess = run(Adam(lr=0.01, signed=True, blend=Blend(to="step")), 2, box="none")
    start, ahead, second, _ = engine.inputs
    assert torch.allclose(ahead, start - 0.01, atol=1e-6)
    assert torch.allclose(second, start - 0.01, atol=1e-6)
    assert len(guess.history) == 2


def test_noise_is_as_strong_as_the_learning_rate_says(script: Callable[..., Scripted]) -> None:
    flat = lambda call, x, y: Slope(1.0, torch.zeros_like(x), None)  # noqa: E731
    engine = script(flat)
    run(Adam(lr=0.1, schedule=steps((0.5,)), noise=0.2), 3, box="none", seen=seen(40),
        labels=torch.zeros(40, dtype=torch.long))  # fmt: skip
    kicks = [float((b - a).std()) for a, b in zip(engine.inputs, engine.inputs[1:], strict=False)]
    assert kicks == pytest.approx([0.02, 0.02], rel=0.1)
    again = script(flat)
    run(Adam(lr=0.1, schedule=steps((0.5,)), noise=0.2), 3, box="none", seen=seen(40),
        labels=torch.zeros(40, dtype=torch.long))  # fmt: skip
    assert torch.equal(engine.inputs[2], again.inputs[2])


# ---------------------------------------------------------------- labels


def test_labels_are_searched_as_softmax_of_free_logits(script: Callable[..., Scripted]) -> None:
    goal = torch.tensor([[0.1, 0.2, 0.1, 0.5, 0.1], [0.3, 0.1, 0.4, 0.1, 0.1]])

    def answer(call: int, inputs: Tensor, labels: Tensor) -> Slope:
        return Slope(
            float((labels - goal).square().sum()), torch.zeros_like(inputs), 2 * (labels - goal)
        )

    engine = script(answer)
    guess = run(Lbfgs(), 60, labels=None, box="none", seen=seen(2))
    assert torch.allclose(engine.labels[-1], goal, atol=1e-3)
    assert all(torch.allclose(y.sum(1), torch.ones(2)) for y in engine.labels)
    assert guess.labels.tolist() == [3, 2]


def test_given_labels_are_kept(script: Callable[..., Scripted]) -> None:
    engine = script(values([1.0, 1.0]))
    guess = run(Adam(), 2)
    assert guess.labels.tolist() == [3]
    assert all(y.tolist() == [3] for y in engine.labels)


# ---------------------------------------------------------------- the box


def test_clamp_keeps_every_candidate_in_the_box(script: Callable[..., Scripted]) -> None:
    goal = torch.full((1, *SHAPE), 4.0)
    goal[0, 0] = -4.0
    engine = script(towards(goal))
    guess = run(Adam(lr=0.3), 10)
    assert all(float(x.min()) >= 0 and float(x.max()) <= 1 for x in engine.inputs)
    assert torch.equal(guess.inputs, goal.clamp(0, 1))


def test_clamp_leaves_the_logits_free(script: Callable[..., Scripted]) -> None:
    goal = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])

    def answer(call: int, inputs: Tensor, labels: Tensor) -> Slope:
        return Slope(
            float((labels - goal).square().sum()), torch.zeros_like(inputs), 2 * (labels - goal)
        )

    engine = script(answer)
    run(Adam(lr=0.5), 60, labels=None)
    assert float(engine.labels[-1][0, 3]) > 0.95  # logits in [0, 1] would end at 0.4


def test_without_a_box_candidates_may_leave_it_and_the_guess_may_not(
    script: Callable[..., Scripted],
) -> None:
    engine = script(towards(torch.full((1, *SHAPE), 4.0)))
    guess = run(Adam(lr=0.3), 10, box="none")
    assert float(engine.inputs[-1].min()) > 1
    assert float(guess.inputs.max()) == 1


# ---------------------------------------------------------------- budgets and reports


def test_the_time_budget_stops_early_with_a_note_and_a_valid_guess(
    script: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    for optimiser in (Adam(lr=0.1), Lbfgs()):
        goal = torch.full((2, *SHAPE), 0.3)
        engine = script(towards(goal))
        monkeypatch.setattr(  # every evaluation takes a second
            _matching,
            "time",
            SimpleNamespace(monotonic=lambda engine=engine: float(len(engine.inputs))),
        )
        guess = run(
            optimiser, 10, restarts=2, seen=seen(2), labels=torch.tensor([1, 2]),
            resources=Resources(seconds=2.5),
        )  # fmt: skip
        assert len(engine.inputs) == 3
        assert guess.notes[-1] == "stopped by the time budget of 2.5 s after 3 of 20 iterations"
        assert (guess.iterations, guess.stopped) == (3, "time")
        assert guess.inputs.shape == (2, *SHAPE)
        best = min(range(3), key=lambda k: guess.history[k])
        assert torch.equal(guess.inputs, engine.inputs[best])


def test_even_a_spent_budget_gives_one_iteration(script: Callable[..., Scripted]) -> None:
    engine = script(values([1.0] * 3))
    guess = run(Adam(), 3, resources=Resources(seconds=0.0))
    assert len(engine.inputs) == 1
    assert guess.residual == 1


def test_an_ample_budget_leaves_no_note(script: Callable[..., Scripted]) -> None:
    script(values([1.0] * 3))
    guess = run(Adam(), 3, resources=Resources(seconds=600.0))
    assert guess.notes == ("a note of the engine",)


@pytest.mark.parametrize("optimiser", [Adam(lr=0.1), Lbfgs()], ids=["adam", "lbfgs"])
def test_progress_counts_every_iteration_up_to_the_total(
    script: Callable[..., Scripted], optimiser: Optimiser
) -> None:
    engine = script(valley)  # where line searches take several evaluations each
    calls: list[tuple[int, int, float]] = []
    guess = run(
        optimiser,
        7,
        restarts=2,
        box="none",
        resources=Resources(progress=lambda *call: calls.append(call)),
    )
    assert [call[0] for call in calls] == list(range(1, 15))
    assert {call[1] for call in calls} == {14}
    assert len(engine.inputs) == 14
    objectives = tuple(call[2] for call in calls)
    assert guess.history in (objectives[:7], objectives[7:])


def test_the_attack_sets_the_precision_and_resources_may_change_it(
    script: Callable[..., Scripted],
) -> None:
    single, double = torch.float32, torch.float64
    for own, granted, expected in (
        (single, None, single),
        (double, None, double),
        (single, double, double),
        (double, single, single),
    ):
        engine = script(values([1.0]))
        guess = run(Adam(), 1, dtype=own, resources=Resources(dtype=granted))
        assert engine.inputs[0].dtype == expected
        assert guess.inputs.dtype == single


def test_same_seed_same_run_other_seed_other_run(script: Callable[..., Scripted]) -> None:
    goal = torch.rand(1, *SHAPE, generator=seeded(1))
    script(towards(goal))
    one, same, other = (run(Adam(), 4, rng=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.inputs, same.inputs)
    assert one.history == same.history
    assert one.history != other.history


@pytest.mark.parametrize("withheld", ["training", "records"])
def test_withheld_knowledge_is_refused(withheld: str) -> None:
    with pytest.raises(Withheld, match="'training' and 'records'"):
        run(Adam(), 1, seen=seen(**{withheld: None}))


@pytest.mark.parametrize("options", [{"iterations": 0}, {"iterations": 1, "restarts": 0}])
def test_no_iteration_or_restart_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="iterations and restarts of at least 1"):
        run(Adam(), **options)


# ---------------------------------------------------------------- spaces and priors


@pytest.mark.parametrize("start", ["normal", "uniform", "grey"])
def test_first_candidates_lie_in_the_box_as_named(start: Start) -> None:
    x = noise((50, 3, 8, 8), start, seeded())
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert float(x.mean()) == pytest.approx(0.5, abs=0.01)
    # Clamping takes a little off the Gaussian's 0.25.
    expected = {"normal": 0.24, "uniform": 1 / math.sqrt(12), "grey": 0.01}[start]
    assert float(x.std()) == pytest.approx(expected, rel=0.03)
    assert torch.equal(x, noise((50, 3, 8, 8), start, seeded()))


def test_pixels_are_what_they_are() -> None:
    (x,) = Pixels().draw((2, 3, 8, 8), "uniform", seeded())
    assert torch.equal(x, noise((2, 3, 8, 8), "uniform", seeded()))
    assert Pixels().decode([x], (8, 8)) is x


@pytest.mark.parametrize(
    ("factor", "size", "small"),
    [(4, (16, 8), (4, 2)), (2, (7, 9), (3, 4)), (8, (4, 4), (1, 1)), (1, (5, 6), (5, 6))],
)
def test_low_resolution_shapes(factor: int, size: tuple[int, int], small: tuple[int, int]) -> None:
    space = LowResolution(factor)
    (free,) = space.draw((2, 3, *size), "uniform", seeded())
    assert free.shape == (2, 3, *small)
    assert space.decode([free], size).shape == (2, 3, *size)


def test_low_resolution_of_a_constant_is_constant_and_overshoot_is_clamped() -> None:
    space = LowResolution(4)
    assert torch.allclose(space.decode([torch.full((1, 1, 2, 2), 0.3)], (8, 8)), torch.tensor(0.3))
    edge = torch.zeros(1, 1, 4, 4)
    edge[..., 2:] = 1.0
    decoded = space.decode([edge], (16, 16))
    free = nn.functional.interpolate(edge, (16, 16), mode="bicubic", align_corners=False)
    assert float(free.max()) > 1
    assert float(free.min()) < 0
    assert torch.equal(decoded, free.clamp(0, 1))


def test_low_resolution_has_a_derivative() -> None:
    space = LowResolution(2)
    free = (0.3 + 0.4 * torch.rand(1, 2, 3, 3, generator=seeded())).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: space.decode([x], (6, 6)), (free,))


def test_low_resolution_is_searched_at_low_resolution(script: Callable[..., Scripted]) -> None:
    """A goal that an up-sampled image can reach is reached, through the slope of the decoding."""
    space = LowResolution(2)
    small = 0.3 + 0.4 * torch.rand(1, 2, 2, 3, generator=seeded(4))
    goal = space.decode([small], SHAPE[1:])
    engine = script(towards(goal))
    guess = run(Lbfgs(), 40, space=space, box="none")
    assert all(x.shape == (1, *SHAPE) for x in engine.inputs)
    assert torch.allclose(guess.inputs, goal, atol=1e-5)


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="factor must be at least 1, got 0"):
        LowResolution(0)


@pytest.mark.parametrize("shape", [(3, 3, 32, 32), (2, 1, 28, 28), (1, 2, 4, 6), (2, 3, 5, 17)])
def test_generator_makes_images_of_any_shape(shape: tuple[int, int, int, int]) -> None:
    space = Generator(latent=6, width=12)
    free = space.draw(shape, "normal", seeded())
    images = space.decode(free, shape[2:])
    assert images.shape == shape
    assert bool(((images > 0) & (images < 1)).all())
    assert all(float((a - b).abs().max()) > 0.05 for a, b in pairwise(images))
    again = space.draw(shape, "normal", seeded())
    assert all(torch.equal(a, b) for a, b in zip(free, again, strict=True))


def test_generator_keeps_the_images_apart() -> None:
    """An image depends on its own code and the weights, not on its neighbours."""
    space = Generator(latent=6, width=8)
    free = space.draw((3, 1, 8, 8), "normal", seeded())
    alone = space.decode([free[0][1:2], *free[1:]], (8, 8))
    assert torch.allclose(space.decode(free, (8, 8))[1:2], alone, atol=1e-6)


def test_generator_reaches_an_image_by_its_weights(script: Callable[..., Scripted]) -> None:
    goal = 0.2 + 0.6 * torch.rand(2, *SHAPE, generator=seeded(4))
    engine = script(towards(goal))
    options = {"seen": seen(2), "labels": torch.tensor([1, 2]), "space": Generator(8, 16)}
    guess = run(Adam(lr=0.02), 300, **options)
    assert float((guess.inputs - goal).abs().max()) < 0.02
    assert float((engine.inputs[0] - goal).abs().max()) > 0.2


def test_a_generator_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 128 and 0"):
        Generator(width=0)


def test_only_images_are_clamped(script: Callable[..., Scripted]) -> None:
    """The weights of a generator lie on both sides of 0: a clamp would change its first image."""
    engine = script(values([1.0] * 3))
    run(Adam(lr=1e-4), 3, space=Generator(8, 8))
    assert float((engine.inputs[2] - engine.inputs[0]).abs().max()) < 0.01
    assert {name for name, space in SPACES.items() if space.boxed} == {"pixels", "low-resolution"}


def test_total_variation_is_the_mean_step_across_plus_the_mean_step_down() -> None:
    x = torch.tensor([[[[0.0, 1.0, 0.5], [0.25, 0.25, 0.25]]]], requires_grad=True)
    across, down = (1.0 + 0.5 + 0 + 0) / 4, (0.25 + 0.75 + 0.25) / 3
    value = total_variation(x)
    assert float(value.detach()) == pytest.approx(across + down)
    (slope,) = torch.autograd.grad(value, x)
    assert float(slope[0, 0, 0, 1]) == pytest.approx(2 / 4 + 1 / 3)  # the peak stands out both ways
    assert float(total_variation(torch.full((2, 3, 4, 4), 0.7))) == 0


def test_the_scripted_engine_is_called_like_the_real_one() -> None:
    """Guards the tests above: `match` must go on asking an engine for nothing but this."""
    assert Scripted.slope.__code__.co_varnames[:4] == Engine.slope.__code__.co_varnames[:4]


@pytest.mark.parametrize(
    ("attack", "searches", "last"),
    [
        (SmoothToSharp(iterations=12, basin=0.0), 3, torch.float32),
        (SmoothToSharp(iterations=12, basin=1e9), 3, torch.float64),  # L-BFGS for a finish
        (CoarseToFine(iterations=8), 2, torch.float32),
        (GradInversion(iterations=8, seeds=2), 8, torch.float32),
    ],
    ids=["smooth-to-sharp", "smooth-to-sharp, second order", "coarse-to-fine", "gradinversion"],
)
def test_an_attack_checks_its_derivative_once_however_many_searches_it_makes(
    monkeypatch: pytest.MonkeyPatch, attack: Attack, searches: int, last: torch.dtype
) -> None:
    made, checks = [], []
    build, check = Engine.__init__, Engine._check

    def built(self: Engine, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if options.get("mode") == "auto":
            made.append(self.dtype)

    def checked(self: Engine, *args: Any) -> Slope:
        checks.append(self.dtype)
        return check(self, *args)

    monkeypatch.setattr(Engine, "__init__", built)
    monkeypatch.setattr(Engine, "_check", checked)
    model = models.make("lenet-zhu", shape=(3, 8, 8), classes=4, rng=seeded())
    truth = Batch(torch.rand(2, 3, 8, 8, generator=seeded(1)), torch.tensor([0, 3]))
    training = LocalTraining(batch_size=2)
    update = train(setting(model, truth), truth, training, seeded()).update
    observation = Observation(setting(model, (3, 8, 8), 4), update, training, 2)
    for _ in range(2):
        made.clear(), checks.clear()
        attack.reconstruct(observation, seeded())
        assert (len(made), made[-1]) == (searches, last)
        assert checks == [torch.float32]
