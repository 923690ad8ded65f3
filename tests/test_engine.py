"""The derivative engine against brute force: double backward, differences, full graphs."""

from __future__ import annotations

import copy
import gc
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from torch import Tensor, nn

from leakgauge import models
from leakgauge.attacks import _engine
from leakgauge.attacks._engine import TOLERANCE, Engine, Slope, Trust, relative_error
from leakgauge.attacks._objectives import Distance, by_autograd, cosine, squared
from leakgauge.errors import InputError
from leakgauge.fl.local import train
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.types import Batch, LocalTraining, Observation

CLASSES = 7
FEDSGD = LocalTraining()


@dataclass(frozen=True)
class Case:
    """A client's update as an attacker holds it, the truth behind it, and candidates elsewhere."""

    seen: Observation
    training: LocalTraining
    truth: Batch
    inputs: Tensor
    labels: Tensor  # of the candidates: wrong on purpose

    def engine(self, mode: Any = "exact", dtype: torch.dtype = torch.float64) -> Engine:
        return Engine(self.seen, self.training, len(self.truth), dtype=dtype, mode=mode)

    def slope(
        self, distance: Distance, mode: Any = "exact", dtype: torch.dtype = torch.float64
    ) -> Slope:
        return self.engine(mode, dtype).slope(self.inputs.to(dtype), self.labels, distance)

    def soft(self) -> Tensor:
        rng = torch.Generator().manual_seed(5)
        return torch.randn(len(self.truth), CLASSES, generator=rng).double().softmax(1)


def case(
    model: str | nn.Module,
    training: LocalTraining = FEDSGD,
    *,
    records: int | None = None,
    shape: tuple[int, int, int] = (3, 16, 16),
    double: bool = False,
    seed: int = 0,
    scale: Scale = AS_THEY_ARE,
    **options: Any,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    if isinstance(model, str):
        model = models.make(model, shape=shape, classes=CLASSES, rng=rng, **options)
    dtype = torch.float64 if double else torch.float32
    model = model.to(dtype)
    n = records or training.batch_size
    inputs, other = (torch.rand(n, *shape, generator=rng).to(dtype) for _ in range(2))
    labels, wrong = (torch.randint(CLASSES, (n,), generator=rng) for _ in range(2))
    world = setting(model, shape, CLASSES, scale)
    update = train(world, Batch(inputs, labels), training, rng).update
    seen = Observation(world, update)
    return Case(seen, training, Batch(inputs, labels), other, wrong)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with the weights of one fixed seed; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def smooth(*extra: nn.Module) -> nn.Module:
    """A small network without kinks, so that differences of it mean something."""
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2),
            *extra,
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(4 * 3 * 3, 9),
            nn.Tanh(),
            nn.Linear(9, CLASSES),
        )
    )


SMALL = (3, 8, 8)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def plain_squared(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    return (flat(guess) - flat(target)).pow(2).sum()


def plain_cosine(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    return 1 - F.cosine_similarity(flat(guess), flat(target), dim=0, eps=1e-30)


def plain_l1(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    return (flat(guess) - flat(target)).abs().sum()


DISTANCES: dict[str, tuple[Distance, Callable[..., Tensor]]] = {
    "squared": (squared, plain_squared),
    "cosine": (cosine, plain_cosine),
    "l1": (by_autograd(plain_l1), plain_l1),
}


def naive(
    world: Case, inputs: Tensor, labels: Tensor, plain: Callable[..., Tensor], steps: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """D and its derivative by one graph through all local steps, in double precision, without a
    line of the package: torch.optim's formulas, written out."""
    how = world.training
    model = copy.deepcopy(world.seen.model).double().train(how.batch_norm == "train")
    names = list(world.seen.update)
    record = world.seen.record
    mean, std = (inputs.new_tensor(v).view(1, -1, 1, 1) for v in (record.mean, record.std))
    free = [inputs.detach().clone().requires_grad_()]
    if labels.is_floating_point():
        free.append(labels.detach().clone().requires_grad_())
    before = [model.get_parameter(name) for name in names]
    weights, first, second = before, [0.0] * len(before), [0.0] * len(before)
    for t in range(1, steps + 1):
        called = torch.func.functional_call(
            model, dict(zip(names, weights, strict=True)), ((free[0] - mean) / std,)
        )
        loss = F.cross_entropy(called, free[1] if len(free) > 1 else labels)
        gradient = torch.autograd.grad(loss, weights, create_graph=True)
        gradient = [g + how.weight_decay * w for g, w in zip(gradient, weights, strict=True)]
        if how.optimiser == "adam":
            first = [0.9 * m + 0.1 * g for m, g in zip(first, gradient, strict=True)]
            second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, gradient, strict=True)]
            weights = [
                w - how.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                for w, m, v in zip(weights, first, second, strict=True)
            ]
        else:
            first = [how.momentum * m + g for m, g in zip(first, gradient, strict=True)]
            weights = [w - how.lr * m for w, m in zip(weights, first, strict=True)]
    unit = how.lr * steps
    guess = [(b - w) / unit for b, w in zip(before, weights, strict=True)]
    target = [world.seen.update[name].double() / unit for name in names]
    value = plain(guess, target)
    return value.detach(), list(torch.autograd.grad(value, free))


def numerical(function: Callable[[Tensor], float], at: Tensor, seed: int) -> tuple[Tensor, float]:
    """A random direction of length one, and the central difference of the function along it."""
    direction = torch.randn(at.shape, generator=torch.Generator().manual_seed(seed)).to(at.dtype)
    direction /= direction.norm()
    h = 1e-5
    return direction, (function(at + h * direction) - function(at - h * direction)) / (2 * h)


# ---------------------------------------------------------------- exact, one step


EXACT: dict[str, tuple[str | nn.Module, LocalTraining, dict[str, Any]]] = {
    "sigmoid": ("lenet-zhu", LocalTraining(batch_size=2), {}),
    "max-pool": ("lenet-5", LocalTraining(), {"pool": "max", "activation": "relu"}),
    "eval BN": ("resnet-10", LocalTraining(batch_norm="eval"), {"width": 0.0625}),
    "train BN": ("resnet-10", LocalTraining(batch_size=2), {"width": 0.0625}),
    "attention": ("vit-small", LocalTraining(), {"dim": 12, "depth": 2}),
    "decay, normalised": (
        "lenet-zhu",
        LocalTraining(lr=0.3, weight_decay=0.1, momentum=0.9),
        {"scale": Scale((0.4, 0.5, 0.3), (0.2,))},
    ),
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", EXACT)
def test_exact_is_double_backward_through_the_distance(name: str, distance: str) -> None:
    model, training, options = EXACT[name]
    world = case(model, training, double=True, **options)
    ours, plain = DISTANCES[distance]
    value, (by_inputs,) = naive(world, world.inputs, world.labels, plain)
    got = world.slope(ours)
    assert got.value == pytest.approx(float(value), rel=1e-11)
    assert relative_error(got.inputs, by_inputs) < 1e-10
    assert got.labels is None
    assert float(by_inputs.norm()) > 0


@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_exact_is_the_numerical_derivative(distance: str) -> None:
    ours, plain = DISTANCES[distance]
    training = LocalTraining(batch_size=2, weight_decay=0.05)
    world = case(smooth(), training, shape=SMALL, double=True, scale=Scale((0.5,), (0.25,)))
    engine = world.engine()

    def value(inputs: Tensor) -> float:
        return float(plain(engine.gradient(inputs, world.labels), engine.target))

    got = engine.slope(world.inputs, world.labels, ours)
    assert got.value == pytest.approx(value(world.inputs), rel=1e-12)
    for seed in range(3):
        direction, expected = numerical(value, world.inputs, seed)
        assert float((got.inputs * direction).sum()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
def test_label_probabilities_have_a_derivative_in_every_mode(mode: str) -> None:
    world = case(smooth(), LocalTraining(batch_size=2), shape=SMALL, double=True)
    engine, soft = world.engine(mode), world.soft()
    value, (by_inputs, by_labels) = naive(world, world.inputs, soft, plain_squared)
    got = engine.slope(world.inputs, soft, squared)
    assert got.value == pytest.approx(float(value), rel=1e-11)
    assert got.labels is not None
    assert relative_error(got.inputs, by_inputs) < 1e-5
    assert relative_error(got.labels, by_labels) < 1e-5
    direction, expected = numerical(
        lambda y: float(plain_squared(engine.gradient(world.inputs, y), engine.target)), soft, 0
    )
    assert float((got.labels * direction).sum()) == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------- fast


FAST: dict[str, tuple[str, LocalTraining, dict[str, Any]]] = {
    "resnet-18": ("resnet-18", LocalTraining(batch_norm="eval"), {"width": 0.25}),
    "resnet-18, two": (
        "resnet-18",
        LocalTraining(batch_size=2, batch_norm="eval"),
        {"width": 0.25},
    ),
    "resnet-18, train BN": ("resnet-18", LocalTraining(), {"width": 0.25}),
    "resnet-18, train BN, two": ("resnet-18", LocalTraining(batch_size=2), {"width": 0.25}),
    "lenet-zhu": ("lenet-zhu", LocalTraining(), {}),
    "lenet-zhu, two": ("lenet-zhu", LocalTraining(batch_size=2), {}),
    "lenet-5": ("lenet-5", LocalTraining(), {"pool": "max", "activation": "relu"}),
    "lenet-5, two": ("lenet-5", LocalTraining(batch_size=2), {"pool": "max", "activation": "relu"}),
    "vit-small": ("vit-small", LocalTraining(), {"dim": 48, "depth": 3}),
    "vit-small, two": ("vit-small", LocalTraining(batch_size=2), {"dim": 48, "depth": 3}),
    "mobilenet-v2": ("mobilenet-v2", LocalTraining(batch_norm="eval"), {"width": 0.25}),
    "mobilenet-v2, two": (
        "mobilenet-v2",
        LocalTraining(batch_size=2, batch_norm="eval"),
        {"width": 0.25},
    ),
    "mobilenet-v2, train BN, two": ("mobilenet-v2", LocalTraining(batch_size=2), {"width": 0.25}),
}


@pytest.mark.parametrize(
    ("name", "distance"),
    [
        *zip(
            FAST, cycle((cosine, squared)), strict=False
        ),  # every network, and every setting of it
        ("lenet-zhu", squared),
        ("resnet-18, two", cosine),
        ("mobilenet-v2, train BN, two", squared),
    ],
)
def test_auto_agrees_with_exact_double_precision(name: str, distance: Distance) -> None:
    model, training, options = FAST[name]
    world = case(model, training, **options)
    expected = world.slope(distance)
    engine = world.engine("auto", torch.float32)
    got = engine.slope(world.inputs, world.labels, distance)
    assert relative_error(got.inputs, expected.inputs) <= 5e-3
    assert got.value == pytest.approx(expected.value, rel=1e-3)
    assert bool(engine.notes) == (engine.mode == "exact")
    if "train BN" not in name:  # with it the loss is so curved that exact may be all that is left
        assert engine.mode != "exact"


@pytest.mark.parametrize("distance", [cosine, squared])
@pytest.mark.parametrize("name", ["resnet-18", "lenet-zhu, two", "lenet-5", "vit-small"])
def test_central_is_more_accurate_than_one_sided(name: str, distance: Distance) -> None:
    model, training, options = FAST[name]
    world = case(model, training, **options)
    expected = world.slope(distance).inputs
    for dtype, far, near in ((torch.float32, 2e-2, 5e-3), (torch.float64, 1e-5, 1e-7)):
        fast, central = (
            relative_error(world.slope(distance, mode, dtype).inputs, expected)
            for mode in ("fast", "central")
        )
        assert central < fast
        assert fast < far
        assert central < near


def test_without_the_gate_the_difference_would_be_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    model, training, options = FAST["resnet-18"]
    world = case(model, training, **options)
    expected = world.slope(cosine).inputs
    gated = relative_error(world.slope(cosine, "fast", torch.float32).inputs, expected)
    monkeypatch.setattr("leakgauge.attacks._gate.KINKS", {})
    free = relative_error(world.slope(cosine, "fast", torch.float32).inputs, expected)
    assert gated < 5e-3
    assert free > 0.1


class Shared(nn.Module):
    """At batch one autograd gives `shift` and, as a view of the same memory, `corner` a gradient;
    `level` gets one number expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.corner = nn.Parameter(torch.randn(1, 1, 3))
        self.shift = nn.Parameter(torch.randn(1, 5, 3))
        self.level = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.corner.expand(len(x), -1, -1), x.flatten(1).view(len(x), 4, 3)], 1)
        return torch.sigmoid(self.head((tokens + self.shift).sin().sum(1) + self.level.sum()))


def test_gradients_that_share_memory_are_not_mixed_up() -> None:
    world = case(built(Shared), shape=(3, 2, 2), double=True)
    for distance in (squared, cosine):
        expected = world.slope(distance)
        got = world.slope(distance, "fast")
        assert got.value == pytest.approx(expected.value, rel=1e-12)
        assert relative_error(got.inputs, expected.inputs) < 1e-6
    first, *_ = gradient = world.engine().gradient(world.inputs, world.labels)
    before = [g.clone() for g in gradient]
    first.add_(1)
    assert all(torch.equal(g, b) for g, b in zip(gradient[1:], before[1:], strict=True))


# ---------------------------------------------------------------- auto checks itself


class Sawtooth(nn.Module):
    """Slopes ±1 that change so often that no stride finds its way; exact derivatives exist. Inputs
    above `calm` are let through."""

    def __init__(self, calm: float = float("inf")) -> None:
        super().__init__()
        self.calm = calm

    def forward(self, x: Tensor) -> Tensor:
        period = 1e-4
        saw = (x.remainder(2 * period) - period).abs()
        return torch.where(x > self.calm, x, 100 * saw + 0.1 * x)


def sawing(calm: float = float("inf")) -> nn.Module:
    def make() -> nn.Module:
        first = nn.Linear(12, 20)
        nn.init.uniform_(first.weight, 0.0, 1.0)
        nn.init.zeros_(first.bias)
        return nn.Sequential(
            nn.Flatten(), first, Sawtooth(calm), nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )

    return built(make)


def test_auto_falls_back_to_exact_and_says_so() -> None:
    world = case(sawing(), shape=(3, 2, 2))
    engine = world.engine("auto", torch.float32)
    got = engine.slope(world.inputs, world.labels, cosine)
    exact = world.slope(cosine, "exact", torch.float32)
    fast = world.slope(cosine, "fast", torch.float32)
    assert relative_error(fast.inputs, exact.inputs) > TOLERANCE
    assert torch.equal(got.inputs, exact.inputs)
    assert engine.mode == "exact"
    (note,) = engine.notes
    assert "exact one is used" in note
    assert f"off by {engine.differed:.1e}" in note
    assert "iteration 0" in note


class Detached(nn.Module):
    """What autograd calls its gradient is not one: mixed derivatives differ by their order."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.detach())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_derivative_is_noticed_whatever_its_precision(
    steps: int, dtype: torch.dtype
) -> None:
    """No stride and no precision mends it: float64's difference is as wrong."""
    world = case(smooth(Detached()), LocalTraining(0.5, 2, steps), shape=SMALL)
    engine = world.engine("auto", dtype)
    got = engine.slope(world.inputs.to(dtype), world.labels, cosine)
    exact, fast = (world.slope(cosine, mode, dtype).inputs for mode in ("exact", "fast"))
    assert relative_error(fast, exact) > 10 * TOLERANCE
    assert relative_error(got.inputs, exact) < 1e-5
    assert engine.mode == "exact"
    assert "exact one is used" in engine.notes[0]


def test_auto_checks_itself_again_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "RECHECK", 3)
    world = case(sawing(calm=1.0), shape=(3, 2, 2))
    engine = world.engine("auto", torch.float32)
    calm, rough = torch.ones(1, 3, 2, 2), 0.05 * torch.ones(1, 3, 2, 2)
    modes = []
    for x in (calm, rough, rough, rough, rough):
        engine.slope(x, world.labels, cosine)
        modes.append(engine.mode)
    assert modes == ["fast"] * 3 + ["exact"] * 2
    assert "iteration 3" in engine.notes[0]


def test_auto_takes_a_rung_of_its_ladder_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first rung that is far too long is left for the next one, silently."""
    ladder = {torch.float64: (("fast", 10.0), ("fast", 1e-8), ("central", 1e-6))}
    monkeypatch.setattr(_engine, "LADDER", ladder)
    world = case(smooth(), shape=SMALL, double=True)
    engine = world.engine("auto")
    got = engine.slope(world.inputs, world.labels, squared)
    assert relative_error(got.inputs, world.slope(squared).inputs) <= TOLERANCE
    assert (engine.mode, engine.notes, engine.differed) == ("fast", [], None)


class Coarse(nn.Module):
    """Loses all digits beyond 1e-6·offset, which float32 cannot spare and float64 can. Inputs above
    `calm` are let through."""

    def __init__(self, calm: float) -> None:
        super().__init__()
        self.calm = calm

    def forward(self, x: Tensor) -> Tensor:
        offset = 1e6
        return torch.where(x > self.calm, x, (x + offset) - offset)


def coarse(calm: float = float("inf")) -> nn.Module:
    def make() -> nn.Module:
        first = nn.Linear(12, 20)
        nn.init.uniform_(first.weight, 0.0, 0.5)
        nn.init.zeros_(first.bias)
        return nn.Sequential(
            nn.Flatten(), first, Coarse(calm), nn.Tanh(), nn.Linear(20, 8), nn.Tanh(),
            nn.Linear(8, CLASSES),
        )  # fmt: skip

    return built(make)


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_auto_goes_on_in_double_precision_where_single_is_too_coarse(soft: bool) -> None:
    world = case(coarse(), shape=(3, 2, 2))
    labels = world.soft() if soft else world.labels
    true = world.engine().slope(world.inputs.double(), labels, cosine)
    given = labels.float() if soft else labels
    single = world.engine("exact", torch.float32)
    rough = single.slope(world.inputs, given, cosine)
    assert relative_error(rough.inputs, true.inputs) > TOLERANCE  # no mode of float32 would do
    assert (single.mode, single.notes) == ("exact", [])  # chosen by name, left as it is
    engine = world.engine("auto", torch.float32)
    for _ in range(2):
        got = engine.slope(world.inputs, given, cosine)
        assert relative_error(got.inputs, true.inputs) <= TOLERANCE
        assert got.inputs.dtype == torch.float32
        assert got.value == pytest.approx(true.value, rel=1e-6)
        assert (got.labels is not None) == soft
        if got.labels is not None and true.labels is not None:
            assert relative_error(got.labels, true.labels) <= TOLERANCE
            assert got.labels.dtype == torch.float32
    assert engine.mode.endswith(", float64")
    assert "float64 is used from there on" in engine.notes[0]
    assert f"derivative was off by {engine.differed:.1e}" in engine.notes[0]


@pytest.mark.parametrize("first", ["fast", "exact"])
def test_precision_is_raised_during_the_run_too(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_engine, "RECHECK", 3)
    if first == "exact":  # no rung agrees, but float32 is fine: it is still watched
        monkeypatch.setitem(_engine.LADDER, torch.float32, (("fast", 10.0),))
    world = case(coarse(calm=1.0), shape=(3, 2, 2))
    engine = world.engine("auto", torch.float32)
    calm, rough = torch.ones(1, 3, 2, 2), 0.05 * torch.ones(1, 3, 2, 2)
    modes = []
    for x in (calm, rough, rough, rough, rough):
        engine.slope(x, world.labels, cosine)
        modes.append(engine.mode)
    assert modes[:3] == [first] * 3
    assert all(mode.endswith(", float64") for mode in modes[3:])
    assert "iteration 3" in engine.notes[-1] or "iteration 3" in engine.notes[-2]


def test_what_the_check_made_in_double_precision_is_let_go() -> None:
    def engines(world: Case) -> int:
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o) is Engine]
        return sum(engine._seen is world.seen for engine in alive)

    fine, rough = (case(m, shape=(3, 2, 2)) for m in (coarse(calm=-1e9), coarse()))
    kept = []
    for world in (fine, rough):
        kept.append(world.engine("auto", torch.float32))
        kept[-1].slope(world.inputs, world.labels, cosine)
    assert engines(fine) == 1
    assert engines(rough) == 2  # it took over


# ---------------------------------------------------------------- what a check costs


class Counted(nn.Module):
    """Counts the records that pass, by precision."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.passed: dict[torch.dtype, list[int]] = {torch.float32: [], torch.float64: []}

    def __deepcopy__(self, memo: Any) -> Counted:
        twin = Counted(copy.deepcopy(self.inner, memo))
        twin.passed = self.passed  # all copies count together
        return twin

    def forward(self, x: Tensor) -> Tensor:
        self.passed[x.dtype].append(len(x))
        return self.inner(x)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("make", "records"), [(smooth, 1), (lambda: smooth(nn.BatchNorm2d(4)), 2)])
def test_float64_sees_a_sample_only(
    make: Callable[[], nn.Module], records: int, steps: int
) -> None:
    """One record, or two where batch norm in train mode ties them together, in three passes: a try
    whether the model runs in float64, ∇ at w and at w + εv. The whole batch stays in float32.
    """
    counted = Counted(make())
    world = case(counted, LocalTraining(batch_size=8, steps=steps), shape=SMALL)
    engine = world.engine("auto", torch.float32)
    for passed in counted.passed.values():
        passed.clear()
    for _ in range(3):
        engine.slope(world.inputs, world.labels, cosine)
    assert engine.notes == []
    assert counted.passed[torch.float64] == [records] * 3


def test_a_check_costs_one_exact_derivative_beside_the_sample() -> None:
    counted = Counted(smooth())
    world = case(counted, LocalTraining(batch_size=8), shape=SMALL)
    engine = world.engine("auto", torch.float32)
    passes = []
    for _ in range(2):
        counted.passed[torch.float32].clear()
        engine.slope(world.inputs, world.labels, cosine)
        passes.append(sorted(counted.passed[torch.float32]))
    assert passes[1] == [8, 8]  # what the derivative itself takes
    assert passes[0] == [1, 8, 8, 8]


def test_another_record_is_sampled_at_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 is too coarse for the second record alone."""
    monkeypatch.setattr(_engine, "RECHECK", 3)
    world = case(coarse(calm=1.0), LocalTraining(batch_size=2), shape=(3, 2, 2))
    engine = world.engine("auto", torch.float32)
    x = torch.stack([torch.ones(3, 2, 2), 0.05 * torch.ones(3, 2, 2)])
    modes = []
    for _ in range(4):
        engine.slope(x, world.labels, cosine)
        modes.append(engine.mode.endswith("float64"))
    assert modes == [False] * 3 + [True]


# ---------------------------------------------------------------- searches that share their trust


def checks_of(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The precision of every engine that checks itself from here on."""
    made: list[torch.dtype] = []
    real = Engine._check

    def counted(self: Engine, *args: Any) -> Slope:
        made.append(self.dtype)
        return real(self, *args)

    monkeypatch.setattr(Engine, "_check", counted)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_search_does_not_check_again(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    made, trust = checks_of(monkeypatch), Trust()
    world = case("lenet-zhu", LocalTraining(batch_size=2))
    for t in (torch.float32, dtype):
        engine = Engine(world.seen, world.training, 2, dtype=t, trust=trust)
        for _ in range(2):
            got = engine.slope(world.inputs.to(t), world.labels, cosine)
        assert relative_error(got.inputs, world.slope(cosine).inputs) < TOLERANCE
    assert made == [torch.float32]
    Engine(world.seen, world.training, 2).slope(world.inputs, world.labels, cosine)
    assert made == [torch.float32] * 2  # another attack makes up its own mind


def test_a_search_in_a_precision_that_was_not_checked_checks_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sample is of one step: it says nothing of float64's difference over several."""
    made, trust = checks_of(monkeypatch), Trust()
    world = case("lenet-zhu", LocalTraining(0.1, 2, 3))
    for dtype in (torch.float32, torch.float64, torch.float64):
        engine = Engine(world.seen, world.training, 2, dtype=dtype, trust=trust)
        for _ in range(2):
            engine.slope(world.inputs.to(dtype), world.labels, cosine)
    assert made == [torch.float32, torch.float64]


def test_checks_go_on_where_the_search_before_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "RECHECK", 3)
    trust, modes = Trust(), []
    world = case(sawing(calm=1.0), shape=(3, 2, 2))
    calm, rough = torch.ones(1, 3, 2, 2), 0.05 * torch.ones(1, 3, 2, 2)
    for xs in ((calm, rough), (rough, rough), (rough,)):
        engine = Engine(world.seen, world.training, 1, trust=trust)
        for x in xs:
            engine.slope(x, world.labels, cosine)
            modes.append((engine.mode, len(engine.notes)))
    # The check of derivative 3 falls into the second search; the third begins where it ended.
    assert modes == [("fast", 0)] * 3 + [("exact", 1), ("exact", 0)]


def test_a_later_search_begins_in_float64_where_float32_was_too_coarse() -> None:
    trust = Trust()
    world = case(coarse(), shape=(3, 2, 2))
    engines = []
    for _ in range(2):
        engines.append(Engine(world.seen, world.training, 1, trust=trust))
        got = engines[-1].slope(world.inputs, world.labels, cosine)
        assert relative_error(got.inputs, world.slope(cosine).inputs) <= TOLERANCE
        assert engines[-1].mode.endswith(", float64")
    assert [len(engine.notes) for engine in engines] == [1, 0]


# ---------------------------------------------------------------- the replay of a client


def with_norm() -> nn.Module:
    return smooth(nn.BatchNorm2d(4))


def with_dropout() -> nn.Module:
    return smooth(nn.Dropout(0.3))


# What the client does; and, where the attacker believed otherwise, what it would have to get wrong.
REPLAYS: dict[str, tuple[Callable[[], nn.Module], LocalTraining, int, dict[str, Any]]] = {
    "one step": (smooth, LocalTraining(lr=0.3, batch_size=3), 3, {"scale": Scale((0.1,))}),
    "one step, decay": (smooth, LocalTraining(0.3, 3, weight_decay=0.2), 3, {"weight_decay": 0.0}),
    "momentum": (
        smooth,
        LocalTraining(lr=0.3, batch_size=3, steps=4, momentum=0.9),
        3,
        {"momentum": 0.0},
    ),
    "decay": (smooth, LocalTraining(0.3, 3, 4, weight_decay=0.2), 3, {"weight_decay": 0.0}),
    "adam, one step": (smooth, LocalTraining(0.1, 3, optimiser="adam"), 3, {"optimiser": "sgd"}),
    "adam, decay": (
        smooth,
        LocalTraining(0.1, 3, 4, optimiser="adam", weight_decay=0.1),
        3,
        {"weight_decay": 0.0},
    ),
    "train BN": (with_norm, LocalTraining(0.3, 3, 3), 3, {"batch_norm": "eval"}),
    "train BN, one step": (with_norm, LocalTraining(0.3, 3), 3, {"batch_norm": "eval"}),
    "minibatches": (smooth, LocalTraining(0.3, 2, epochs=2), 5, {"batch_size": 5, "epochs": 6}),
    "dropout": (
        with_dropout,
        LocalTraining(0.3, 2, epochs=2, dropout="replayed", dropout_seed=11),
        4,
        {"dropout_seed": 12},
    ),
    "dropout, one step": (
        with_dropout,
        LocalTraining(0.3, 2, dropout="replayed", dropout_seed=11),
        2,
        {"dropout": "off"},
    ),
}


def mistaken(world: Case, scale: Scale = AS_THEY_ARE, **training: Any) -> Case:
    believed = setting(world.seen.model, SMALL, CLASSES, scale)
    seen = replace(world.seen, setting=believed)
    return replace(world, seen=seen, training=replace(world.training, **training))


@pytest.mark.parametrize("name", REPLAYS)
def test_replaying_the_true_records_reproduces_the_update(name: str) -> None:
    make, training, records, mistake = REPLAYS[name]
    world = case(make(), training, records=records, shape=SMALL, double=True)
    engine = world.engine("auto")
    state = torch.random.get_rng_state()
    guess = engine.gradient(world.truth.inputs, world.truth.labels)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert relative_error(flat(guess), flat(engine.target)) < 1e-12
    got = engine.slope(world.truth.inputs, world.truth.labels, squared)
    assert got.value < 1e-22
    assert got.inputs.abs().max() < 1e-9
    wrong = mistaken(world, **mistake).engine("auto")
    other = wrong.gradient(world.truth.inputs, world.truth.labels)
    assert relative_error(flat(other), flat(wrong.target)) > 1e-3


def test_target_is_the_update_in_units_of_a_gradient() -> None:
    training = LocalTraining(lr=0.3, batch_size=2, epochs=2)
    world = case(smooth(), training, records=5, shape=SMALL, double=True)
    update = world.seen.update
    expected = [u / (0.3 * 6) for u in update.values()]  # two epochs of three steps
    target = world.engine().target
    assert all(torch.allclose(a, b, rtol=1e-14) for a, b in zip(target, expected, strict=True))
    # One step of plain SGD: the gradient itself, not its negative.
    one = case(smooth(), LocalTraining(lr=0.3), shape=SMALL, double=True)
    loss = F.cross_entropy(one.seen.model(one.truth.inputs), one.truth.labels)
    gradient = torch.autograd.grad(loss, list(one.seen.model.parameters()))
    assert relative_error(flat(one.engine().target), flat(gradient)) < 1e-13


# ---------------------------------------------------------------- several steps


SCALED = {"train BN, normalised": Scale((0.4,), (0.3,))}
UNROLLED: dict[str, tuple[Callable[[], nn.Module], LocalTraining]] = {
    "plain": (smooth, LocalTraining(lr=0.5, batch_size=2, steps=3)),
    "momentum and decay": (
        smooth,
        LocalTraining(lr=0.5, batch_size=2, steps=3, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (smooth, LocalTraining(lr=0.05, batch_size=2, steps=3, optimiser="adam")),
    "adam and decay": (
        smooth,
        LocalTraining(lr=0.05, batch_size=2, steps=3, optimiser="adam", weight_decay=0.1),
    ),
    "adam, one step": (smooth, LocalTraining(lr=0.05, batch_size=2, optimiser="adam")),
    "train BN, normalised": (
        with_norm,
        LocalTraining(lr=0.5, batch_size=2, steps=3),
    ),
}


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
@pytest.mark.parametrize("name", UNROLLED)
def test_unrolled_slope_is_autograd_through_the_full_graph(name: str, soft: bool) -> None:
    make, training = UNROLLED[name]
    scale = SCALED.get(name, AS_THEY_ARE)
    world = case(make(), training, shape=SMALL, double=True, scale=scale)
    labels = world.soft() if soft else world.labels
    for ours, plain in DISTANCES.values():
        value, expected = naive(world, world.inputs, labels, plain, training.steps)
        for mode, off in (("exact", 1e-8), ("fast", 2e-5), ("central", 1e-6)):
            got = world.engine(mode).slope(world.inputs, labels, ours)
            assert got.value == pytest.approx(float(value), rel=1e-10)
            assert relative_error(got.inputs, expected[0]) < off
            if soft:
                assert got.labels is not None
                assert relative_error(got.labels, expected[1]) < off
            else:
                assert got.labels is None


@pytest.mark.parametrize("name", ["momentum and decay", "adam"])
def test_unrolled_slope_is_the_numerical_derivative(name: str) -> None:
    make, training = UNROLLED[name]
    world = case(make(), training, shape=SMALL, double=True)
    engine = world.engine()

    def value(inputs: Tensor) -> float:
        return float(plain_squared(engine.gradient(inputs, world.labels), engine.target))

    got = engine.slope(world.inputs, world.labels, squared)
    for seed in range(3):
        direction, expected = numerical(value, world.inputs, seed)
        assert float((got.inputs * direction).sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
def test_unrolled_minibatches_and_dropout_have_the_numerical_derivative(mode: str) -> None:
    """Every record is in some steps only, and the masks differ from step to step."""
    training = LocalTraining(0.5, 2, epochs=2, momentum=0.5, dropout="replayed", dropout_seed=4)
    world = case(with_dropout(), training, records=5, shape=SMALL, double=True)
    engine = world.engine(mode)

    def value(inputs: Tensor) -> float:
        return float(plain_squared(engine.gradient(inputs, world.labels), engine.target))

    got = engine.slope(world.inputs, world.labels, squared)
    for seed in range(3):
        direction, expected = numerical(value, world.inputs, seed)
        assert float((got.inputs * direction).sum()) == pytest.approx(expected, rel=1e-5)


SEVERAL: dict[str, tuple[str, LocalTraining, dict[str, Any]]] = {
    "resnet-10": ("resnet-10", LocalTraining(0.05, 2, 3, batch_norm="eval"), {"width": 0.25}),
    "resnet-10, train BN": ("resnet-10", LocalTraining(0.05, 3, 3), {"width": 0.25}),
    "lenet-5": (
        "lenet-5",
        LocalTraining(0.1, 1, 3, momentum=0.9, weight_decay=0.01),
        {"pool": "max", "activation": "relu"},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_auto_has_a_fast_derivative_of_several_steps(name: str) -> None:
    model, training, options = SEVERAL[name]
    world = case(model, training, **options)
    expected = world.slope(cosine)
    engine = world.engine("auto", torch.float32)
    for _ in range(2):
        got = engine.slope(world.inputs, world.labels, cosine)
        assert relative_error(got.inputs, expected.inputs) <= 5e-3
        assert got.value == pytest.approx(expected.value, rel=1e-3)
    assert (engine.mode, engine.notes) == ("fast", [])


def test_a_fast_derivative_of_several_steps_runs_the_network_twice_a_step() -> None:
    counted = Counted(smooth())
    world = case(counted, LocalTraining(batch_size=2, steps=4), shape=SMALL)
    passes = {}
    for mode in ("exact", "fast", "central"):
        engine = world.engine(mode)
        counted.passed[torch.float64].clear()
        engine.slope(world.inputs.double(), world.labels, cosine)
        passes[mode] = len(counted.passed[torch.float64])
    assert passes == {"exact": 8, "fast": 8, "central": 12}


def test_every_step_has_gates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, training, options = SEVERAL["resnet-10"]
    world = case(model, replace(training, lr=0.5), **options)
    expected = world.slope(cosine).inputs
    gated = relative_error(world.slope(cosine, "fast", torch.float32).inputs, expected)
    real = Engine._at

    def first_gates(self: Engine, weights: Any, free: Any, labels: Tensor, step: int = 0) -> Any:
        self._gates[step]._choices = self._gates[0]._choices
        return real(self, weights, free, labels, step)

    monkeypatch.setattr(Engine, "_at", first_gates)
    shared = relative_error(world.slope(cosine, "fast", torch.float32).inputs, expected)
    assert gated < 5e-3
    assert shared > 0.1


def _benchmark() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "engine.py"
    spec = importlib.util.spec_from_file_location("engine_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unrolled_memory_grows_by_a_state_a_step_not_by_a_graph() -> None:
    peak_bytes = _benchmark().peak_bytes

    def peaks(steps: int) -> tuple[int, int]:
        training = LocalTraining(lr=0.1, batch_size=16, steps=steps)
        world = case("lenet-zhu", training, double=True)
        engine = world.engine()
        ours = peak_bytes(lambda: engine.slope(world.inputs, world.labels, squared))
        graph = peak_bytes(lambda: naive(world, world.inputs, world.labels, plain_squared, steps))
        return ours, graph

    (few, few_naive), (many, many_naive) = peaks(2), peaks(10)
    weights = models.make("lenet-zhu", shape=(3, 16, 16), classes=CLASSES, rng=torch.Generator())
    state = 2 * 8 * sum(p.numel() for p in weights.parameters())  # weights, and the update so far
    assert many - few < 1.05 * 8 * state
    assert many - few < 0.3 * (many_naive - few_naive)
    assert many < 0.5 * many_naive


# ---------------------------------------------------------------- what is refused, and left alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("mode", ["auto", "exact", "fast"])
def test_other_precisions_are_refused_in_words(mode: str, dtype: torch.dtype) -> None:
    world = case(smooth(), shape=SMALL)
    with pytest.raises(InputError, match=f"float32 or float64, not in {dtype}"):
        world.engine(mode, dtype)


@pytest.mark.parametrize("steps", [1, 3])
def test_frozen_parameters_are_neither_expected_nor_moved(steps: int) -> None:
    model = smooth()
    model[0].requires_grad_(False)  # the convolution: a frozen backbone
    training = LocalTraining(lr=0.5, batch_size=2, steps=steps, weight_decay=0.1)
    world = case(model, training, shape=SMALL, double=True)
    assert "0.weight" not in world.seen.update
    engine = world.engine("auto")
    replayed = engine.gradient(world.truth.inputs, world.truth.labels)
    assert relative_error(flat(replayed), flat(engine.target)) < 1e-12
    _, (expected,) = naive(world, world.inputs, world.labels, plain_cosine, steps)
    got = engine.slope(world.inputs, world.labels, cosine)
    assert relative_error(got.inputs, expected) < 1e-5


@pytest.mark.parametrize("steps", [1, 3])
def test_the_observation_is_left_as_it_was(steps: int) -> None:
    training = LocalTraining(lr=0.5, batch_size=2, steps=steps)  # batch norm in train mode
    world = case(with_norm(), training, shape=SMALL)
    world.seen.model.eval()
    before = copy.deepcopy((world.seen.model.state_dict(), world.seen.update))
    inputs = world.inputs.clone()
    engine = world.engine("auto", torch.float32)
    first = engine.slope(world.inputs, world.labels, squared)
    again = engine.slope(world.inputs, world.labels, squared)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(world.inputs, inputs)
    assert not world.inputs.requires_grad
    assert not world.seen.model.training
    assert all(p.requires_grad and p.grad is None for p in world.seen.model.parameters())
    for old, new in zip(before, (world.seen.model.state_dict(), world.seen.update), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_relative_error() -> None:
    three, four = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert relative_error(three, four) == pytest.approx(5 / 4)
    assert relative_error(four, four) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_a_parameter_that_the_loss_does_not_use_changes_nothing() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))
            self.idle = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, training = Idle(), LocalTraining(batch_size=2)
    truth = Batch(torch.rand(2, 3, 4, 4, generator=rng), torch.tensor([0, 3]))
    update = train(setting(model, truth), truth, training, rng).update
    seen = Observation(setting(model, (3, 4, 4), 4), update)
    x = torch.rand(2, 3, 4, 4, generator=rng, dtype=torch.float64)
    slopes = [
        Engine(seen, training, 2, dtype=torch.float64, mode=mode).slope(x, truth.labels, cosine)
        for mode in ("exact", "fast", "central")
    ]
    for slope in slopes[1:]:
        assert relative_error(slope.inputs, slopes[0].inputs) < 1e-5


# ---------------------------------------------------------------- errors given


def test_errors_given_stand_in_for_softmax_and_labels() -> None:
    one = case("resnet-10", LocalTraining(batch_size=2, batch_norm="eval"), width=0.25)
    model = copy.deepcopy(one.seen.model).double().eval()
    with torch.no_grad():
        p = model(one.inputs.double()).softmax(1)
    errors = (p - torch.nn.functional.one_hot(one.labels, CLASSES)) / 2
    plain = one.engine().gradient(one.inputs.double(), one.labels)
    given = Engine(one.seen, one.training, 2, dtype=torch.float64, errors=errors)
    for a, b in zip(given.gradient(one.inputs.double(), one.labels.flip(0)), plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["fast", "central", "auto"])
def test_with_errors_given_every_mode_agrees_with_the_exact_one(mode: Any) -> None:
    one = case("resnet-10", LocalTraining(batch_size=2, batch_norm="eval"), width=0.25)
    errors = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float64):
        exact, other = (
            Engine(one.seen, one.training, 2, dtype=dtype, mode=m, errors=errors)
            .slope(one.inputs.to(dtype), one.labels, cosine)
            .inputs
            for m in ("exact", mode)
        )
        assert relative_error(other, exact) < TOLERANCE


def test_errors_are_for_one_step() -> None:
    several = case("mlp", LocalTraining(batch_size=2, steps=3), records=2)
    with pytest.raises(InputError, match=r"errors are those of one step.*takes 3"):
        Engine(several.seen, several.training, 2, errors=torch.zeros(2, CLASSES))
