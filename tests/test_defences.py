"""Defences change the update as they say, and the hooks are called where they stand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from nouns import setting
from scipy.integrate import quad
from scipy.stats import kstest
from torch import Tensor, nn

from leakgauge.config import build
from leakgauge.defences import (
    DEFENCES,
    AdaptiveClip,
    Censor,
    Chain,
    Clip,
    ClipAndNoise,
    DecayingNoise,
    DpSgd,
    Guardian,
    HideTop,
    LowRank,
    Outpost,
    PairedNoise,
    Prune,
    Quantise,
    Sign,
    Soteria,
    TopK,
)
from leakgauge.defences.clip_and_noise import gaussian_sigma
from leakgauge.errors import PlanError
from leakgauge.fl import Scenario, simulate, tampered
from leakgauge.fl.local import minibatches, ready, train
from leakgauge.tensors import norm, parameters, scale, spawned, subtract
from leakgauge.threat import observe
from leakgauge.types import (
    Batch,
    BatchDefence,
    Dataset,
    Defence,
    GradientDefence,
    Here,
    Kept,
    Local,
    LocalTraining,
    Named,
    Preparation,
    ThreatModel,
    UpdateDefence,
)

HERE = Here(setting(nn.Identity(), (3, 8, 8)))

SAMPLES: list[Defence] = [
    Clip(norm=0.5),
    Clip(norm=0.5, scope="layer"),
    ClipAndNoise(epsilon=10.0),
    ClipAndNoise(epsilon=10.0, calibration="papers"),
    DecayingNoise(),
    DpSgd(),
    AdaptiveClip(),
    Prune(share=0.5),
    Prune(share=0.5, scope="whole"),
    TopK(keep=0.1),
    Sign(),
    Quantise(bits=4),
    Quantise(bits=4, rounding="nearest"),
    LowRank(rank=1),
    Soteria(share=0.5),
    Outpost(),
    Guardian(),
    Censor(trials=3),
    HideTop(),
    PairedNoise(),
    Chain((Clip(norm=0.5), Prune(share=0.5))),
    Chain((TopK(keep=0.5), Guardian(), Quantise(bits=4), PairedNoise())),
    Chain((AdaptiveClip(), Soteria(share=0.5), DecayingNoise())),
]


def local_training(defence: Any, **options: Any) -> LocalTraining:
    """Batches of four; batch norm by the running statistics where records are clipped one by
    one."""
    parts = defence.parts if isinstance(defence, Chain) else (defence,)
    alone = any(isinstance(part, DpSgd | AdaptiveClip) for part in parts)
    return LocalTraining(**{"batch_size": 4, "batch_norm": "eval" if alone else "train"} | options)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def update(rng: torch.Generator) -> Named:
    """Two layers of different scale; as a whole and one by one longer than 1."""
    return {
        "a": 3 * torch.randn(7, 5, generator=rng),
        "b": torch.randn(11, generator=rng),
    }


def placed(model: nn.Module, batch: Batch, training: LocalTraining) -> tuple[Named, Here]:
    """The gradient of the first local step on these records, and what a defence is told there."""
    part = Batch(batch.inputs[: training.batch_size], batch.labels[: training.batch_size])
    world = setting(ready(model, training), part)
    values = parameters(model) | {n: b.clone() for n, b in model.named_buffers()}
    here = Here(world, local=Local(world, training, part, values))
    once = replace(training, steps=1, lr=1.0)
    return train(setting(model, part), part, once, seeded()).update, here


def applied(defence: Any, values: Named, here: Here, rng: torch.Generator) -> Named:
    """What the defence makes of tensors, at the hooks that it has."""
    here = replace(here, memory={})
    if isinstance(defence, GradientDefence):
        values = defence.on_gradient(values, here, rng)
    if isinstance(defence, UpdateDefence):
        values = defence.on_update(values, replace(here, local=None), rng)
    return values


TOUCHES: dict[type[Any], Callable[[Named], set[str]]] = {
    LowRank: lambda values: {name for name, value in values.items() if value.dim() > 1},
    Soteria: lambda values: {"head.weight"},
}
"""Those that leave some tensors as they are."""


def touched(defence: Defence, values: Named) -> set[str]:
    """The tensors that it says it changes."""
    if isinstance(defence, Clip) and defence.scope == "layer":
        return {name for name, value in values.items() if value.norm() > defence.norm}
    return TOUCHES.get(type(defence), set)(values)


def same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(v, right[n]) for n, v in left.items())


# --- every defence -----------------------------------------------------------------------------


def test_every_defence_is_sampled_here():
    assert {type(s) for s in SAMPLES} >= set(DEFENCES.values())


@pytest.mark.parametrize("name", DEFENCES)
def test_a_plan_builds_it_from_its_defaults(name):
    defence = build(DEFENCES[name], {}, f"defence.{name}")
    assert isinstance(defence, BatchDefence | GradientDefence | UpdateDefence)
    with pytest.raises(FrozenInstanceError):
        setattr(defence, fields(defence)[0].name if fields(defence) else "papers", 1.0)


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_what_is_sent_changes_and_what_it_was_given_does_not(defence, model, batch):
    values, here = placed(model, batch, local_training(defence))
    before, inside = copy.deepcopy(values), copy.deepcopy(here.local)
    state = copy.deepcopy(here.setting.model.state_dict())
    sent = applied(defence, values, here, seeded(1))
    assert same(values, before)
    assert same(here.local.values, inside.values)
    assert torch.equal(here.local.batch.inputs, inside.batch.inputs)
    assert same(dict(here.setting.model.state_dict()), dict(state))
    assert not [hook for m in here.setting.model.modules() for hook in m._forward_pre_hooks]
    changed = {name for name in values if not torch.equal(sent[name], values[name])}
    assert changed == touched(defence, values)
    assert list(sent) == list(values)
    for name, value in sent.items():
        assert (value.shape, value.dtype) == (values[name].shape, values[name].dtype)
        assert value.data_ptr() != values[name].data_ptr()
        assert torch.isfinite(value).all()
        assert not value.requires_grad


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_same_seed_same_bytes(defence, model, batch):
    values, here = placed(model, batch, local_training(defence))
    first = applied(defence, values, here, seeded(1))
    torch.manual_seed(99)  # nothing comes from the global generator
    assert same(first, applied(defence, values, here, seeded(1)))


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_double_precision_stays_double(defence, model, batch):
    values, here = placed(model, batch, local_training(defence))
    sent = applied(defence, {n: v.double() for n, v in values.items()}, here, seeded())
    assert all(value.dtype == torch.float64 for value in sent.values())


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_zeros_and_single_entries_stay_numbers(defence, model, batch):
    values, here = placed(model, batch, local_training(defence))
    zeros = applied(defence, scale(values, 0.0), here, seeded())
    assert all(torch.isfinite(value).all() for value in zeros.values())


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_the_client_sends_the_defended_update(defence, model, batch):
    training = local_training(defence, lr=0.5, steps=1)
    plain = train(setting(model, batch), batch, training, seeded(1)).update
    sent = train(setting(model, batch), batch, training, seeded(1), defence).update
    own = spawned(seeded(1), "defence/0/0")  # its randomness moves nothing else
    gradient, here = placed(model, batch, training)
    if isinstance(defence, BatchDefence):
        defence.on_batch(batch, here, own)
    if isinstance(defence, GradientDefence):
        gradient = defence.on_gradient(gradient, here, own)
    by_hand = scale(gradient, 0.5)  # a power of two is exact
    if isinstance(defence, UpdateDefence):
        by_hand = defence.on_update(by_hand, replace(here, memory={}), own)
    assert same(sent, by_hand)
    assert not same(sent, plain)


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("clip", {"norm": 0}, "norm must be positive and finite, got 0"),
        ("clip", {"norm": -1.0}, "norm must be positive and finite"),
        ("clip", {"norm": math.nan}, "norm: expected a finite number, got nan"),
        ("clip", {"norm": math.inf}, "norm: expected a finite number, got inf"),
        ("clip", {"scope": "hole"}, "scope: 'hole' is not a choice; did you mean 'whole'"),
        ("clip-and-noise", {"epsilon": 0}, "epsilon must be positive and finite, got 0"),
        ("clip-and-noise", {"epsilon": math.nan}, "epsilon: expected a finite number, got nan"),
        ("clip-and-noise", {"epsilon": math.inf}, "epsilon: expected a finite number, got inf"),
        ("clip-and-noise", {"norm": math.nan}, "norm: expected a finite number, got nan"),
        ("clip-and-noise", {"delta": 0}, "delta must lie between 0 and 1, got 0"),
        ("clip-and-noise", {"delta": 1}, "delta must lie between 0 and 1, got 1"),
        ("clip-and-noise", {"delta": math.nan}, "delta: expected a finite number, got nan"),
        ("decaying-noise", {"sigma": 0}, "sigma must be positive and finite, got 0"),
        ("decaying-noise", {"norm": 0}, "norm must be positive and finite, got 0"),
        ("decaying-noise", {"decay": 0}, r"decay must lie in \(0, 1\], got 0"),
        ("decaying-noise", {"decay": 1.1}, "decay must lie in"),
        ("decaying-noise", {"floor": 2}, "floor must lie between 0 and sigma = 1.0, got 2"),
        ("decaying-noise", {"delta": 1}, "delta must lie between 0 and 1, got 1"),
        ("dp-sgd", {"sigma": -1}, "sigma must be at least 0 and finite, got -1"),
        ("dp-sgd", {"norm": 0}, "norm must be positive and finite, got 0"),
        ("dp-sgd", {"delta": 0}, "delta must lie between 0 and 1, got 0"),
        ("dp-sgd", {"epsilon": 1}, "unknown key 'epsilon'"),
        ("adaptive-clip", {"sigma": -1}, "sigma must be at least 0 and finite, got -1"),
        ("adaptive-clip", {"count_noise": -1}, "count_noise must be at least 0 and finite"),
        ("adaptive-clip", {"norm": 0}, "norm must be positive and finite, got 0"),
        ("adaptive-clip", {"rate": 0}, "rate must be positive and finite, got 0"),
        ("adaptive-clip", {"quantile": 1.5}, r"quantile must lie in \[0, 1\], got 1.5"),
        ("adaptive-clip", {"delta": 0}, "delta must lie between 0 and 1, got 0"),
        ("prune", {"share": 1}, r"share must lie in \[0, 1\), got 1"),
        ("prune", {"share": -0.1}, "share must lie in"),
        ("prune", {"share": math.nan}, "share: expected a finite number, got nan"),
        ("top-k", {"keep": 0}, r"keep must lie in \(0, 1\], got 0"),
        ("top-k", {"keep": 1.5}, "keep must lie in"),
        ("top-k", {"share": 0.5}, "unknown key 'share'"),
        ("sign", {"bits": 1}, "unknown key 'bits'; it takes none"),
        ("quantise", {"bits": 0}, "bits must lie between 1 and 32, got 0"),
        ("quantise", {"bits": 33}, "bits must lie between 1 and 32, got 33"),
        ("quantise", {"bits": 1.5}, "bits: expected a whole number, got 1.5"),
        ("quantise", {"rounding": "random"}, "rounding: 'random' is not a choice"),
        ("low-rank", {"rank": 0}, "rank must be at least 1, got 0"),
        ("soteria", {"share": 0}, r"share must lie in \(0, 1\], got 0"),
        ("soteria", {"layer": 3}, "layer: expected text, got 3"),
        ("outpost", {"prune": 1}, r"prune must lie in \[0, 1\), got 1"),
        ("outpost", {"noise": -1}, "noise must be at least 0, got -1"),
        ("outpost", {"decay": -1}, "decay must be at least 0, got -1"),
        ("outpost", {"top": 0}, r"top must lie in \(0, 1\], got 0"),
        ("guardian", {"beta": 0}, "beta must be positive and finite, got 0"),
        ("guardian", {"probes": 0}, "probes must be at least 1, got 0"),
        ("censor", {"trials": 0}, "trials must be at least 1, got 0"),
        ("hide-top", {"share": 0}, r"share must lie in \(0, 1\], got 0"),
        ("paired-noise", {"scale": 0}, "scale must be positive and finite, got 0"),
    ],
)
def test_bad_values_are_refused(name, table, words):
    with pytest.raises(PlanError, match=words):
        build(DEFENCES[name], table, name)


# --- clipping ----------------------------------------------------------------------------------


def test_a_long_update_is_cut_to_the_norm_and_keeps_its_direction(update, rng):
    sent = Clip(norm=0.25).on_update(update, HERE, rng)
    assert norm(sent) == pytest.approx(0.25, rel=1e-6)
    factor = 0.25 / norm(update)
    for name, value in update.items():
        torch.testing.assert_close(sent[name], value * factor)


def test_a_layer_is_cut_to_the_norm_by_itself(update, rng):
    short = {**update, "c": torch.tensor([0.1])}
    sent = Clip(norm=0.25, scope="layer").on_update(short, HERE, rng)
    for name in update:
        assert norm({name: sent[name]}) == pytest.approx(0.25, rel=1e-6)
        torch.testing.assert_close(
            sent[name] / sent[name].norm(), update[name] / update[name].norm()
        )
    assert torch.equal(sent["c"], short["c"])


@pytest.mark.parametrize("scope", ["whole", "layer"])
def test_a_short_update_is_untouched(update, rng, scope):
    assert same(Clip(norm=1.01 * norm(update), scope=scope).on_update(update, HERE, rng), update)
    zeros = scale(update, 0.0)
    assert same(Clip(norm=1.0, scope=scope).on_update(zeros, HERE, rng), zeros)


# --- noise -------------------------------------------------------------------------------------


def spent(sigma: float, epsilon: float) -> float:
    """δ of the Gaussian mechanism of sensitivity 1, from the definition: the mass by which one
    output's density exceeds e^ε times the other's, ∫ (φ(u) − e^ε φ(u + 1/σ))₊ du, which is
    ∫ φ(u) (1 − e^{−(u − s)/σ}) du from s = εσ − 1/(2σ)."""
    start = epsilon * sigma - 1 / (2 * sigma)

    def excess(u: float) -> float:
        return -math.exp(-u * u / 2) / math.sqrt(2 * math.pi) * math.expm1(-(u - start) / sigma)

    bends = sorted(
        {start, start + sigma, start + 20 * sigma, max(start, 0.0), max(start, 0.0) + 40}
    )
    pieces = [quad(excess, a, b, epsabs=0, epsrel=1e-11, limit=200)[0]
              for a, b in pairwise(bends)]  # fmt: skip
    return sum(pieces)


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5])
def test_exact_noise_meets_the_condition_with_equality(epsilon, delta):
    sigma = ClipAndNoise(epsilon, delta).sigma()
    assert spent(sigma, epsilon) == pytest.approx(delta, rel=1e-6)
    assert spent(0.99 * sigma, epsilon) > delta * 1.01  # with less it is not private


@pytest.mark.parametrize("calibration", ["exact", "papers"])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_a_larger_epsilon_never_adds_more_noise(calibration, delta):
    sweep = [10 ** (k / 8) for k in range(-16, 121)]  # 0.01 to 1e15
    sigmas = [ClipAndNoise(e, delta, calibration=calibration).sigma() for e in sweep]
    assert all(math.isfinite(s) and s > 0 for s in sigmas)
    assert all(a > b for a, b in pairwise(sigmas))


def test_exact_noise_has_its_known_limits():
    """ε → 0: total variation, 2Φ(1/(2σ)) − 1 = δ. ε → ∞: σ → 1/√(2ε)."""
    sigma = gaussian_sigma(1e-12, 0.1)
    assert math.erf(1 / (2 * sigma) / math.sqrt(2)) == pytest.approx(0.1, rel=1e-9)
    assert gaussian_sigma(1e14, 1e-5) == pytest.approx(1 / math.sqrt(2e14), rel=1e-5)


def test_the_noise_of_the_papers_is_their_formula():
    for epsilon, delta in ((100.0, 1e-5), (0.5, 1e-3)):
        sigma = ClipAndNoise(epsilon, delta, calibration="papers").sigma()
        assert sigma**2 == pytest.approx(2 * -math.log(delta) / epsilon**2, rel=1e-12)
    assert ClipAndNoise(calibration="papers").sigma() != ClipAndNoise(calibration="exact").sigma()


@pytest.mark.parametrize("bound", [1.0, 0.2])
@pytest.mark.parametrize("calibration", ["exact", "papers"])
def test_the_noise_is_gaussian_of_the_stated_size_around_the_clipped_update(calibration, bound):
    defence = ClipAndNoise(epsilon=5.0, norm=bound, calibration=calibration)
    update = {"a": torch.randn(200, 500, generator=seeded(3)), "b": torch.ones(100_000)}
    sent = defence.on_update(update, HERE, seeded(4))
    noise = subtract(sent, scale(update, bound / norm(update)))
    spread = defence.sigma() * bound
    for value in noise.values():
        assert value.numel() == 100_000
        assert float(value.std()) == pytest.approx(spread, rel=0.01)
        assert abs(float(value.mean())) < 4 * spread / value.numel() ** 0.5
        assert kstest(value.flatten().numpy() / spread, "norm").pvalue > 1e-3
    overlap = float((noise["a"].flatten() * noise["b"]).mean()) / spread**2
    assert abs(overlap) < 0.02  # each tensor has noise of its own
    again = defence.on_update(update, HERE, seeded(5))
    assert not torch.equal(sent["a"], again["a"])


def test_a_short_update_is_not_stretched_before_the_noise():
    update = {"a": torch.full((100_000,), 1e-5)}
    sent = ClipAndNoise(epsilon=1e10, norm=1.0).on_update(update, HERE, seeded())
    assert float(sent["a"].mean()) == pytest.approx(1e-5, rel=0.01)


def test_with_a_huge_epsilon_only_the_clipping_is_left(update):
    clipped = Clip(norm=1.0).on_update(update, HERE, seeded())
    distances = [
        norm(subtract(ClipAndNoise(epsilon).on_update(update, HERE, seeded(1)), clipped))
        for epsilon in (1.0, 1e2, 1e5, 1e14)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-5


# --- pruning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_exactly_the_share_is_removed_and_the_largest_stay(share):
    update = {
        "a": torch.randn(40, 25, generator=seeded()),
        "b": 9 * torch.randn(2000, generator=seeded(1)),
    }
    sent = Prune(share).on_update(update, HERE, seeded())
    for name, value in sent.items():
        check_pruned(update[name].flatten(), value.flatten(), share)
    whole = Prune(share, scope="whole").on_update(update, HERE, seeded())
    flat = [torch.cat([u[n].flatten() for n in update]) for u in (update, whole)]
    check_pruned(*flat, share)
    if 0 < share < 0.9:
        assert int((whole["a"] == 0).sum()) > 1000 * share  # the small layer pays for the large one


def check_pruned(before: Tensor, after: Tensor, share: float) -> None:
    gone = after == 0
    assert int(gone.sum()) == round(share * len(before))
    assert torch.equal(after[~gone], before[~gone])
    if gone.any():
        assert before[gone].abs().max() <= before[~gone].abs().min()


def test_a_small_tensor_keeps_its_largest_entry():
    update = {"a": torch.tensor([1.0, -3.0, 2.0]), "b": torch.tensor([0.1])}
    sent = Prune(0.99).on_update(update, HERE, seeded())
    assert {n: v.tolist() for n, v in sent.items()} == {
        "a": [0.0, -3.0, 0.0],
        "b": [pytest.approx(0.1)],
    }


@pytest.mark.parametrize("scope", ["layer", "whole"])
def test_ties_do_not_change_the_share(scope):
    update = {"a": torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])}
    assert int((Prune(0.3, scope).on_update(update, HERE, seeded())["a"] == 0).sum()) == 3


# --- the hooks ---------------------------------------------------------------------------------


class Silent:
    """Tells nothing of itself."""

    def announced(self) -> dict[str, object]:
        return {}


class Doubled(Silent):
    """A gradient defence: what every local step sees is twice the gradient."""

    def __init__(self) -> None:
        self.seen: list[Named] = []

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        self.seen.append(gradient)
        return scale(gradient, 2.0)


class Mirrored(Silent):
    """A batch defence: left and right change places, and so do the classes."""

    def __init__(self) -> None:
        self.calls = 0

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch:
        self.calls += 1
        return Batch(batch.inputs.flip(-1), 3 - batch.labels)


class Everything(Doubled, Mirrored):
    """All three hooks, and the order in which they are called."""

    def __init__(self) -> None:
        Doubled.__init__(self)
        Mirrored.__init__(self)
        self.order: list[str] = []

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch:
        self.order.append("batch")
        return super().on_batch(batch, here, rng)

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        self.order.append("gradient")
        return super().on_gradient(gradient, here, rng)

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        self.order.append("update")
        return scale(update, -1.0)


def test_a_gradient_defence_changes_every_local_step(model, batch, rng):
    training = LocalTraining(lr=0.1, batch_size=4, steps=3)
    defence = Doubled()
    defended = train(setting(model, batch), batch, training, rng, defence).update
    assert len(defence.seen) == 3
    assert all(set(g) == {n for n, _ in model.named_parameters()} for g in defence.seen)
    # Powers of two are exact: twice the gradient is twice the learning rate, in every step.
    faster = train(
        setting(model, batch), batch, LocalTraining(lr=0.2, batch_size=4, steps=3), rng
    ).update
    assert same(defended, faster)
    assert not same(defended, train(setting(model, batch), batch, training, rng).update)


def test_a_batch_defence_changes_the_records(model, batch, rng):
    training = LocalTraining(lr=0.1, batch_size=4, steps=3)
    defence = Mirrored()
    kept = copy.deepcopy(batch)
    defended = train(setting(model, batch), batch, training, rng, defence).update
    assert defence.calls == 1
    changed = Batch(batch.inputs.flip(-1), 3 - batch.labels)
    assert same(defended, train(setting(model, changed), changed, training, rng).update)
    assert not same(defended, train(setting(model, batch), batch, training, rng).update)
    assert torch.equal(batch.inputs, kept.inputs)
    assert torch.equal(batch.labels, kept.labels)


def test_the_hooks_are_called_in_the_order_of_the_training(model, batch, rng):
    training = LocalTraining(lr=0.1, batch_size=4, steps=2)
    defence = Everything()
    defended = train(setting(model, batch), batch, training, rng, defence).update
    assert defence.order == ["batch", "gradient", "gradient", "update"]
    mirrored = Batch(batch.inputs.flip(-1), 3 - batch.labels)
    faster = LocalTraining(lr=0.2, batch_size=4, steps=2)
    by_hand = train(setting(model, mirrored), mirrored, faster, rng).update
    assert same(defended, scale(by_hand, -1.0))


def test_in_a_round_every_client_defends_itself_and_the_truth_stays_what_it_was(model, easy):
    options = {"training": LocalTraining(lr=0.1, batch_size=4), "clients": 3}
    plain = simulate(Scenario(lambda: model, easy, **options), seeded())
    defence = Everything()
    defended = simulate(Scenario(lambda: model, easy, defence=defence, **options), seeded())
    assert defence.order == ["batch", "gradient", "update"] * 3
    for one, other in zip(plain.truths, defended.truths, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)
    for one, truth in zip(defended.updates, defended.truths, strict=True):
        assert same(
            one,
            train(setting(model, truth), truth, options["training"], seeded(), Everything()).update,
        )


class Told(Silent):
    """Notes what it is told in every step and at the end, and leaves a letter."""

    def __init__(self) -> None:
        self.steps: list[Here] = []
        self.ends: list[Here] = []
        self.found: list[list[str]] = []

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        self.steps.append(here)
        return gradient

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        self.ends.append(here)
        self.found.append(sorted(here.among.letters))
        here.among.letters[f"from {here.among.client}"] = torch.tensor(here.round)
        return update


def test_a_defence_is_told_its_place_among_the_clients_of_the_round(model, easy):
    told = Told()
    training = LocalTraining(lr=0.1, batch_size=4, epochs=1)
    options = {"clients": 4, "participants": 3, "records": 4, "rounds": 1}
    simulate(Scenario(lambda: model, easy, training, defence=told, **options), seeded())
    places = [(here.among.client, here.among.clients, here.round) for here in told.ends]
    assert places == [(k, 3, r) for r in range(2) for k in range(3)]
    assert all(here.among.weight == pytest.approx(1 / 3) for here in told.ends)
    # Each client reads those of lower number, of this round alone.
    assert told.found == [[], ["from 0"], ["from 0", "from 1"]] * 2
    assert all(here.local is None for here in told.ends)


def test_a_defence_is_told_what_a_local_step_is_computed_from(model, batch):
    """With these values, in these modes, these records have the gradient that it was given."""
    told = Told()
    training = LocalTraining(lr=0.5, batch_size=4, steps=3, batch_norm="train")
    before = copy.deepcopy(model.state_dict())
    update = train(setting(model, batch), batch, training, seeded(), told).update
    sums = scale(update, 0.0)
    for step, here in enumerate(told.steps):
        local = here.local
        assert local is not None
        assert (here.step, local.training) == (step, training)
        assert torch.equal(local.batch.inputs, batch.inputs[4 * step : 4 * step + 4])
        assert torch.equal(local.batch.labels, batch.labels[4 * step : 4 * step + 4])
        for name, value in parameters(model).items():
            torch.testing.assert_close(local.values[name], value - sums[name])
        moved = copy.deepcopy(model)
        moved.load_state_dict(local.values)
        once = train(setting(moved, local.batch), local.batch, replace(training, steps=1), seeded())
        sums = {name: sums[name] + once.update[name] for name in sums}
    torch.testing.assert_close(sums, update)
    assert same(dict(model.state_dict()), dict(before))


# --- randomness of their own -------------------------------------------------------------------


class Noticing(Silent):
    """Changes nothing, and notes the records of every client."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.gradients: list[Named] = []

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch:
        self.batches.append(batch)
        return batch

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        self.gradients.append(gradient)
        return gradient


class Restless(Noticing):
    """Draws random numbers at every hook, and uses none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch:
        self.drawn.append(float(torch.rand((), generator=rng)))
        return super().on_batch(batch, here, rng)

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        self.drawn.append(float(torch.rand((), generator=rng)))
        return super().on_gradient(gradient, here, rng)


def federation(model: nn.Module, easy: Dataset, defence: Defence | None, **more: Any) -> Scenario:
    """Three clients whose records are drawn and shuffled anew in each round."""
    training = local_training(defence, lr=0.1, epochs=1, order="shuffled")
    options: dict[str, Any] = {"clients": 3, "records": 8, "rounds": 2} | more
    return Scenario(lambda: model, easy, training, defence=defence, **options)


def test_what_a_defence_draws_moves_no_record(model, easy):
    still, restless = Noticing(), Restless()
    rounds = [simulate(federation(model, easy, one), seeded()) for one in (still, restless)]
    assert len(still.batches) == len(restless.batches) == 9
    for one, other in zip(still.batches, restless.batches, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)
    # Local steps saw them in the same order, so that their gradients are the same bytes.
    for one, other in zip(still.gradients, restless.gradients, strict=True):
        assert same(one, other)
    for one, other in zip(rounds[0].updates, rounds[1].updates, strict=True):
        assert same(one, other)
    plain = simulate(federation(model, easy, None), seeded())
    assert same(plain.after, rounds[1].after)


class Watching(Silent):
    """Changes nothing, and notes the records of every local step."""

    def __init__(self) -> None:
        self.steps: list[Batch] = []

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        assert here.local is not None
        self.steps.append(here.local.batch)
        return gradient


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_every_defence_sees_the_same_records_in_the_same_order(defence, model, easy):
    plain, watched = Watching(), Watching()
    rounds = [
        simulate(federation(model, easy, one, rounds=1), seeded())
        for one in (plain, Chain((defence, watched)))
    ]
    assert len(plain.steps) == len(watched.steps) == 12  # 2 rounds × 3 clients × 2 steps
    for one, other in zip(plain.steps, watched.steps, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)
    for one, other in zip(*(round_.truths for round_ in rounds), strict=True):
        assert torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_a_federation_under_a_defence_is_the_same_for_one_seed(defence, model, easy):
    one, other = (simulate(federation(model, easy, defence, rounds=1), seeded()) for _ in "ab")
    assert all(same(a, b) for a, b in zip(one.updates, other.updates, strict=True))
    assert all(same(a, b) for a, b in zip(one.memory, other.memory, strict=True))


def test_a_defence_draws_anew_for_each_client_and_round_and_the_same_for_one_seed(model, easy):
    first, again, other = Restless(), Restless(), Restless()
    for defence, seed in ((first, 0), (again, 0), (other, 1)):
        simulate(federation(model, easy, defence), seeded(seed))
    assert len(set(first.drawn)) == len(first.drawn) == 27  # 3 rounds × 3 clients × 3 hooks
    assert first.drawn == again.drawn
    assert not set(first.drawn) & set(other.drawn)


# --- memory ------------------------------------------------------------------------------------


class Feedback(Silent):
    """Sends the larger half of each tensor, and adds what was not sent to the next update."""

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        whole = {n: u + here.memory.get(n, torch.zeros_like(u)) for n, u in update.items()}
        sent = Prune(0.5).on_update(whole, here, rng)
        here.memory.update(subtract(whole, sent))
        return sent


class Counting(Silent):
    """Counts steps and rounds in the memory, and notes where it was called."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        here.memory["steps"] = here.memory.get("steps", torch.tensor(0)) + 1
        self.places.append((here.round, here.step, int(here.memory["steps"])))
        return gradient


def test_memory_lasts_over_steps_and_rounds_and_is_apart_for_each_client(model, easy):
    counting = Counting()
    round_ = simulate(federation(model, easy, counting, clients=2), seeded())
    # Two steps for each of two clients, in three rounds; each client counts its own.
    expected = [(r, s, 2 * r + s + 1) for r in range(3) for _ in range(2) for s in range(2)]
    assert counting.places == expected
    assert [int(memory["steps"]) for memory in round_.memory] == [4, 4]  # before this round


def test_memory_belongs_to_the_client_and_not_to_its_place_in_the_round(model, easy):
    counting = Counting()
    options = {"clients": 4, "participants": 1, "rounds": 11, "records": 4}
    round_ = simulate(federation(model, easy, counting, **options), seeded())
    counts = [count for _, _, count in counting.places]
    assert len(counts) == 12
    # Client by client: whoever took part n times in all counted 1 … n.
    assert all(counts.count(k + 1) <= counts.count(k) for k in range(1, max(counts)))
    assert 1 < counts.count(1) <= 4
    before = counts[-1] - 1
    [memory] = round_.memory
    assert int(memory.get("steps", torch.tensor(0))) == before


def test_error_feedback_sends_later_what_it_held_back(model, easy):
    """What was sent plus what is held back is what was trained, over all rounds."""
    plain = federation(model, easy, None, clients=1, rounds=0)
    round_ = simulate(replace(plain, defence=Feedback()), seeded())
    bare = simulate(plain, seeded())
    assert round_.memory == ({},)
    memory: dict[str, Tensor] = {}
    total = scale(bare.updates[0], 0.0)
    sent = scale(bare.updates[0], 0.0)
    for index in range(3):
        truth, rng = bare.truths[0], seeded(index)
        own = train(round_.setting, truth, bare.training, rng).update
        left = train(round_.setting, truth, bare.training, seeded(index), Feedback(),
                     round_=index, memory=memory).update  # fmt: skip
        total = {n: total[n] + own[n] for n in total}
        sent = {n: sent[n] + left[n] for n in sent}
    for name, value in total.items():
        torch.testing.assert_close(sent[name] + memory[name], value)
    assert norm(memory) > 0


def test_a_tampered_round_starts_from_the_memory_before_it(model, easy):
    honest = simulate(federation(model, easy, Feedback()), seeded())
    assert all(norm(memory) > 0 for memory in honest.memory)
    before = copy.deepcopy(honest.memory)
    sent = Preparation(Kept(), (honest.model,))  # what it should: the same round once more
    again = [tampered(honest, sent, seeded(1)) for _ in range(2)]
    for one, other in zip(honest.memory, before, strict=True):
        assert same(one, other)
    assert all(same(a, b) for a, b in zip(again[0].updates, again[1].updates, strict=True))
    forgetful = tampered(replace(honest, memory=()), sent, seeded(1))
    for k, memory in enumerate(before):
        # Both sent half of (update + memory): without the memory it is another half.
        assert not same(again[0].updates[k], forgetful.updates[k])
        truth, kept = honest.truths[k], copy.deepcopy(memory)
        rng = seeded(1)
        for _ in range(k):
            minibatches(len(truth), honest.training, rng)
        own = train(honest.setting, truth, honest.training, rng, Feedback(), memory=kept).update
        assert same(own, again[0].updates[k])


# --- what they announce ------------------------------------------------------------------------


@pytest.mark.parametrize("defence", SAMPLES, ids=str)
def test_what_a_defence_announces_is_known_with_the_training_alone(defence, model, easy):
    told = defence.announced()
    assert told
    round_ = simulate(federation(model, easy, defence, rounds=0), seeded())
    for actor in ("server", "aggregate", "client"):
        for grants in (frozenset(), frozenset({"records"}), frozenset({"training"})):
            seen = observe(round_, ThreatModel(actor, grants))
            assert seen.announced == (told if "training" in grants else None)


def test_without_a_defence_nothing_is_announced(model, easy):
    round_ = simulate(federation(model, easy, None, rounds=0), seeded())
    assert observe(round_, ThreatModel()).announced is None


def test_what_is_announced_is_what_the_attacker_would_need() -> None:
    assert Clip(0.5, scope="layer").announced() == {"norm": 0.5, "scope": "layer"}
    assert Prune(0.7).announced() == {"share": 0.7, "scope": "layer"}
    noisy = ClipAndNoise(epsilon=10.0, norm=2.0)
    assert noisy.announced() == {"norm": 2.0, "sigma": noisy.sigma()}


def test_what_the_others_announce() -> None:
    assert TopK(0.2).announced() == {"keep": 0.2, "feedback": True}
    assert LowRank(3).announced() == {"rank": 3, "feedback": True}
    assert Quantise(3).announced() == {"bits": 3, "rounding": "stochastic"}
    assert HideTop(0.3).announced() == {"hidden": 0.3}
    assert Guardian(2.0).announced() == {"beta": 2.0, "probes": 4}
    assert Soteria(0.3).announced() == {"columns": 0.3, "layer": "the last linear layer"}
    assert Soteria(layer="fc1").announced()["layer"] == "fc1"


def test_a_chain_announces_what_its_parts_do() -> None:
    told = {"defences": ({"norm": 1.0, "scope": "whole"}, {"share": 0.7, "scope": "layer"})}
    assert Chain((Clip(), Prune(0.7))).announced() == told
