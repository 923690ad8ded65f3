"""SAPAG, AGIC, HFGradInv, GradInversion, BayesAttack: each objective against the formula it claims,
differentiated by autograd in float64, and what makes each method itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakgauge.attacks import AGIC, SAPAG, BayesAttack, GradInversion, HFGradInv
from leakgauge.attacks import InvertingGradients as IG
from leakgauge.attacks._engine import Engine
from leakgauge.attacks._objectives import Distance, cosine, ramp, relative_squared
from leakgauge.attacks._priors import batch_norm
from leakgauge.attacks._spaces import SPACES, SpaceName
from leakgauge.attacks.agic import at_once, by_layer
from leakgauge.attacks.bayes import surprise, where_sent
from leakgauge.attacks.gradinversion import ROUNDS, Stretch, together
from leakgauge.attacks.hfgradinv import layer_sets, tail
from leakgauge.attacks.sapag import kernels
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl import Scenario, simulate
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.threat import check, covered, observe
from leakgauge.types import (
    Batch,
    Dataset,
    LocalTraining,
    Observation,
    Reconstruction,
    Resources,
    ThreatModel,
)

SHAPES = ((4, 3, 2, 2), (4,), (5, 4), (5,), (2, 5))
LAYERS = (0, 2, 4)  # the weights, without what is a bias or a scale


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(seed: int) -> list[Tensor]:
    rng = seeded(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]


def one_minus_cos(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a * b).sum() / (a.norm() * b.norm())


def agrees(
    distance: Distance,
    formula: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    guess: list[Tensor],
    target: list[Tensor],
) -> None:
    """Value and slope are those of autograd on the formula, and the target is left alone."""
    leaves = [g.clone().requires_grad_() for g in guess]
    expected = formula(leaves, target)
    slopes = torch.autograd.grad(expected, leaves, materialize_grads=True)
    kept = [t.clone() for t in target]
    value, v = distance([g.clone() for g in guess], target)
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-12)
    for got, slope in zip(v, slopes, strict=True):
        torch.testing.assert_close(got, slope, rtol=1e-10, atol=1e-14)
    assert all(torch.equal(t, k) for t, k in zip(target, kept, strict=True))


def net(seed: int = 0) -> nn.Module:
    """A convolution, a batch norm that is no identity, and a linear head on 8 × 8 images."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(36, 10),
        )
        for norm in (model[1], model[4]):
            nn.init.normal_(norm.running_mean, 0, 0.1)
            nn.init.uniform_(norm.running_var, 0.2, 0.5)
    return model


def attacked(
    training: LocalTraining | None = None,
    *,
    grants: frozenset[Any] = frozenset({"training", "records"}),
    model: nn.Module | None = None,
    records: int | None = None,
    scale: Scale = AS_THEY_ARE,
) -> tuple[Observation, Batch]:
    rng = seeded(3)
    data = Dataset("noise", torch.rand(40, 1, 8, 8, generator=rng), torch.arange(40) % 10,
                   tuple("abcdefghij"))  # fmt: skip
    training = training or LocalTraining(batch_norm="eval", batch_size=2)
    made = model or net()
    scenario = Scenario(lambda: made, data, training, records=records, scale=scale)
    round_ = simulate(scenario, rng)
    threat = ThreatModel(grants=grants)
    return observe(round_, threat), covered(round_, threat)


def distance_at_truth(
    distance: Distance, seen: Observation, truth: Batch, training: LocalTraining | None = None
) -> float:
    assert seen.training is not None
    assert seen.records is not None
    seen = replace(seen, update={n: u.double() for n, u in seen.update.items()})
    engine = Engine(seen, training or seen.training, seen.records, dtype=torch.float64)
    return engine.slope(truth.inputs.double(), truth.labels, distance).value


DISTANCES: dict[str, Distance] = {
    "sapag": kernels(1.0, 0.1),
    "agic": by_layer(10.0),
    "gradinversion": relative_squared,
    "gaussian": surprise("gaussian", 0.1),
    "no noise": surprise("none", 0.1),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_the_truth_is_at_distance_zero(name: str) -> None:
    seen, truth = attacked()
    assert distance_at_truth(DISTANCES[name], seen, truth) < 1e-8
    elsewhere = Batch(1 - truth.inputs, truth.labels)
    assert distance_at_truth(DISTANCES[name], seen, elsewhere) > 1e-3


def test_a_ramp_goes_evenly_from_one_to_the_last() -> None:
    assert ramp(3, 0.5) == [1.0, 0.75, 0.5]
    assert ramp(4, 10.0) == [1.0, 4.0, 7.0, 10.0]
    assert ramp(1, 5.0) == [1.0]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("attack", [SAPAG, AGIC, HFGradInv, GradInversion, BayesAttack])
def test_the_space_searched_is_the_one_told(attack: Any, space: SpaceName) -> None:
    seen, _ = attacked(grants=frozenset({"training", "records", "labels"}))
    more = {"stages": 1} if attack is HFGradInv else {}  # more stages draw masks first
    guess = attack(iterations=1, labels="known", space=space, **more).reconstruct(seen, seeded(5))
    free = SPACES[space]().draw((2, 1, 8, 8), "normal", seeded(5))  # one iteration: the start
    assert torch.allclose(guess.inputs, SPACES[space]().decode(free, (8, 8)), atol=1e-6)


# ---------------------------------------------------------------- SAPAG


@pytest.mark.parametrize("last", [1.0, 0.1])
def test_sapag_is_a_gaussian_kernel_on_every_layer(last: float) -> None:
    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        weights = ramp(len(LAYERS), last)
        parts = []
        for weight, k in zip(weights, LAYERS, strict=True):
            g, t = guess[k], target[k]
            sigma = 3.0 * t.numel() * t.var(correction=0)
            parts.append(weight * (1 - torch.exp(-(g - t).square().sum() / sigma)))
        return torch.stack(parts).sum() / sum(weights)

    agrees(kernels(3.0, last), formula, gradients(0), gradients(1))


def test_sapag_leaves_out_layers_that_do_not_vary() -> None:
    guess, target = gradients(0), gradients(1)
    target[2].fill_(0.7)
    before, _ = kernels(1.0, 1.0)([g.clone() for g in guess], target)
    guess[2] += 100
    after, v = kernels(1.0, 1.0)(guess, target)
    assert after == before
    assert not v[2].any()


def test_sapag_is_bounded_however_far_one_layer_is_off() -> None:
    guess = [g * 1e6 for g in gradients(0)]
    value, v = kernels(1.0, 0.1)(guess, gradients(1))
    assert float(value) == pytest.approx(1)
    assert not any(d.any() for d in v)  # a flat kernel: why a width is an option


# ---------------------------------------------------------------- AGIC


@pytest.mark.parametrize("last", [1.0, 10.0])
def test_agic_is_the_weighted_mean_of_the_layers_cosine_distances(last: float) -> None:
    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        weights = ramp(len(LAYERS), last)
        parts = [w * one_minus_cos(guess[k], target[k])
                 for w, k in zip(weights, LAYERS, strict=True)]  # fmt: skip
        return torch.stack(parts).sum() / sum(weights)

    agrees(by_layer(last), formula, gradients(0), gradients(1))


def test_agic_counts_deeper_layers_more() -> None:
    def off_in(layer: int) -> float:
        guess = gradients(1)
        guess[layer].neg_()
        return float(by_layer(AGIC().last)(guess, gradients(1))[0])

    harm = [off_in(layer) for layer in LAYERS]
    assert harm == sorted(harm)
    assert harm[-1] == pytest.approx(AGIC().last * harm[0])


def test_agic_has_no_slope_where_a_layer_is_not_reached() -> None:
    guess, target = gradients(0), gradients(1)
    guess[0].zero_()
    target[2].zero_()
    value, v = by_layer(1.0)(guess, target)
    assert not v[0].any()
    assert not v[2].any()
    assert all(d.isfinite().all() for d in v)
    assert float(value) > 2 / len(LAYERS)


def test_agic_takes_an_update_of_many_batches_for_one_gradient_of_their_union() -> None:
    """For small steps the truth of a whole epoch is at distance zero, in a single step's replay."""
    training = LocalTraining(lr=1e-4, batch_size=2, epochs=2, batch_norm="eval", weight_decay=0.1)
    seen, truth = attacked(training, records=6)
    once, notes = at_once(seen)
    assert once.training is not None
    assert (once.training.steps, once.training.epochs, once.training.batch_size) == (1, None, 6)
    assert "6 local steps" in notes[0]
    assert distance_at_truth(by_layer(10.0), once, truth) < 1e-6
    wrong = Batch(truth.inputs.flip(0), truth.labels)
    assert distance_at_truth(by_layer(10.0), once, wrong) > 1e-4
    guess = AGIC(iterations=2).reconstruct(seen, seeded())
    assert guess.facts["derivative"] != "exact"  # nothing is unrolled
    assert guess.notes[:1] == notes
    assert at_once(attacked()[0])[1] == ()


def test_agic_refuses_an_update_that_is_no_multiple_of_a_gradient() -> None:
    seen, _ = attacked(LocalTraining(optimiser="adam", batch_norm="eval", batch_size=2))
    with pytest.raises(NotApplicable, match="'adam' is rescaled entry by entry"):
        AGIC(labels="yin").reconstruct(seen, seeded())


# ---------------------------------------------------------------- HFGradInv


@pytest.mark.parametrize("stages", [1, 2, 4, 9])
def test_hfgradinv_grows_from_the_late_layers_to_all(stages: int) -> None:
    sets = layer_sets(30, stages)
    assert len(sets) == stages
    assert sets == sorted(set(sets), reverse=True)
    assert sets[-1] == 0
    assert sets[0] == 30 - round(30 / stages)


def test_hfgradinv_matches_the_tail_it_is_given_where_the_mask_lets_it() -> None:
    masks = [torch.rand(s, generator=seeded(5)) < 0.6 for s in SHAPES[2:]]

    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        ours, theirs = (
            torch.cat([t[m] for t, m in zip(side[2:], masks, strict=True)])
            for side in (guess, target)
        )
        return one_minus_cos(ours, theirs)

    agrees(tail(2, masks), formula, gradients(0), gradients(1))


def test_hfgradinv_is_ig_with_one_stage_and_an_early_end_of_growth() -> None:
    seen, _ = attacked()
    one = HFGradInv(iterations=5, stages=1, growth=0).reconstruct(seen, seeded())
    assert torch.equal(one.inputs, IG(iterations=5).reconstruct(seen, seeded()).inputs)


def test_hfgradinv_judges_by_all_layers_in_the_end() -> None:
    seen, _ = attacked()
    guess = HFGradInv(iterations=12, stages=3, growth=0.5, tv=1.0).reconstruct(seen, seeded())
    assert guess.labels is not None
    engine = Engine(seen, LocalTraining(batch_norm="eval", batch_size=2), 2)
    assert guess.residual == pytest.approx(
        engine.slope(guess.inputs, guess.labels, cosine).value, rel=1e-4
    )
    assert list(guess.history[:6]) == list(guess.distances[:6])  # TV waits for the last stage
    assert all(h > d for h, d in zip(guess.history[6:], guess.distances[6:], strict=True))


# ---------------------------------------------------------------- GradInversion


def test_gradinversion_matches_the_relative_squared_distance() -> None:
    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        off = torch.stack([(g - t).square().sum() for g, t in zip(guess, target, strict=True)])
        return off.sum() / torch.stack([t.square().sum() for t in target]).sum()

    agrees(relative_squared, formula, gradients(0), gradients(1))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_batch_norm_prior_is_zero_at_the_truth_and_nowhere_else(mode: Any) -> None:
    training = LocalTraining(batch_norm=mode, batch_size=4)
    seen, truth = attacked(training, grants=frozenset({"statistics"}), scale=Scale((0.4,), (0.3,)))
    assert seen.statistics is not None
    assert list(seen.statistics) == ["1", "4"]
    penalty = batch_norm(seen.setting, training, seen.statistics)
    assert float(penalty(truth.inputs)) < 1e-10
    assert float(penalty(1 - truth.inputs)) > 1e-3
    x = (1 - truth.inputs).double().requires_grad_()
    assert torch.autograd.gradcheck(penalty, x, nondet_tol=1e-12)


def test_the_batch_norm_prior_is_relative_to_what_is_expected() -> None:
    training = LocalTraining(batch_norm="eval", batch_size=4)
    seen, truth = attacked(training, grants=frozenset({"statistics"}))
    assert seen.statistics is not None
    mean, variance = seen.statistics["1"]
    shifted = {"1": (mean + 0.5, variance * 2)}
    expected = (4 * 0.25) / (2 * variance).sum() + variance.square().sum() / (
        2 * variance
    ).square().sum()
    found = batch_norm(seen.setting, training, shifted)(truth.inputs)
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


def test_granted_statistics_are_a_need() -> None:
    attack = GradInversion(iterations=2, statistics="granted")
    assert attack.needs == {"training", "records", "statistics", "weights"}
    with pytest.raises(Withheld, match="needs 'statistics'"):
        check("gradinversion", attack, ThreatModel())
    with pytest.raises(Withheld, match="the observation holds none"):
        attack.reconstruct(attacked()[0], seeded())
    guess = attack.reconstruct(attacked(grants=attack.needs)[0], seeded())
    assert not any("batch-norm" in note for note in guess.notes)


def test_without_the_grant_the_prior_is_off_and_a_note_says_so() -> None:
    seen, _ = attacked()
    guess = GradInversion(iterations=2).reconstruct(seen, seeded())
    assert guess.notes[0] == "no batch-norm prior: statistics = 'none'"
    running = GradInversion(iterations=2, statistics="running").reconstruct(seen, seeded())
    assert not running.notes
    assert running.history[0] > guess.history[0]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    guess = GradInversion(iterations=2, statistics="running").reconstruct(
        attacked(model=plain)[0], seeded()
    )
    assert "no batch-norm layer" in guess.notes[0]


def test_seeds_advance_together_in_rounds_towards_their_mean() -> None:
    calls: list[Stretch] = []
    told: list[tuple[int, int, float]] = []

    def search(stretch: Stretch, resources: Resources) -> Reconstruction:
        """Seed k of round r finds 10r + k everywhere, and fits the better the larger k is."""
        calls.append(stretch)
        r, k = divmod(len(calls) - 1, 3)
        count = stretch.last - stretch.first
        for i in range(count):
            assert resources.progress is not None
            resources.progress(i + 1, count, 0.0)
        return Reconstruction(
            torch.full((1, 1, 2, 2), 10.0 * r + k),
            None,
            residual=3.0 - k,
            history=(float(len(calls)),) * count,
            iterations=count,
            stopped="patience" if k == 0 else "done",
            differed=0.5 if k == 0 else None,
            notes=("seen once",),
        )

    found = together(search, 3, 10, Resources(progress=lambda *call: told.append(call)))
    assert ROUNDS == 4
    assert [(c.first, c.last) for c in calls[::3]] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    for n, call in enumerate(calls):
        r, k = divmod(n, 3)
        if r == 0:
            assert call.begin is None
            assert call.centre is None
        else:
            assert call.begin is not None
            assert call.centre is not None
            assert call.begin.unique().tolist() == [10.0 * (r - 1) + k]
            assert call.centre.unique().tolist() == [10.0 * (r - 1) + 1]
    assert [call[:2] for call in told] == [(n + 1, 30) for n in range(30)]
    assert found.inputs.unique().tolist() == [32.0]  # the seed that fits best
    assert found.history == (3.0,) * 2 + (6.0,) * 3 + (9.0,) * 2 + (12.0,) * 3
    assert found.notes == ("seen once",)
    assert found.iterations == 30
    assert (found.stopped, found.differed) == ("patience", 0.5)
    assert found.facts["residuals"] == [3.0, 2.0, 1.0]


def test_the_consensus_draws_seeds_together() -> None:
    """What the objective holds beyond the distance is the penalty for straying from the mean."""
    seen, _ = attacked()
    attack = GradInversion(iterations=24, lr=0.02, seeds=2, group=1e3, noise=0.0, tv=0.0, l2=0.0)
    guess = attack.reconstruct(seen, seeded())
    assert len(guess.history) == 24
    strayed = [h - d for h, d in zip(guess.history, guess.distances, strict=True)]
    assert strayed[:6] == [0] * 6  # in the first round each for itself
    assert strayed[6] > 10  # half as far from the mean as two random images are from each other
    assert strayed[11] < 0.5 * strayed[6]


def test_a_group_stops_when_the_time_is_spent_with_what_it_has() -> None:
    seen, _ = attacked()
    calls: list[tuple[int, int, float]] = []
    guess = GradInversion(iterations=20, seeds=3).reconstruct(
        seen, seeded(), Resources(seconds=0.0, progress=lambda *call: calls.append(call))
    )
    assert [call[:2] for call in calls] == [(1, 60)]
    assert "stopped by the time budget" in guess.notes[-1]
    assert (guess.stopped, guess.iterations) == ("time", 1)
    assert guess.inputs.shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradInversion(seeds=0), "seeds must be at least 1"),
        (lambda: GradInversion(seeds=2, space="generator"), "need space = 'pixels'"),
        (lambda: GradInversion(seeds=2, restarts=2), "and restarts = 1, got 'pixels' and 2"),
        (lambda: SAPAG(width=0), "width and last must be positive"),
        (lambda: AGIC(last=0.5), "weights grow with depth"),
        (lambda: HFGradInv(stages=0), "stages must be at least 1"),
        (lambda: HFGradInv(growth=1), r"growth must lie in \[0, 1\)"),
        (lambda: HFGradInv(keep=0), r"keep in \(0, 1\]"),
        (lambda: BayesAttack(sigma=0), "sigma must be positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# ---------------------------------------------------------------- BayesAttack


def test_bayes_with_gaussian_noise_is_the_squared_distance_over_twice_the_variance() -> None:
    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        parts = [(g - t).square().sum() for g, t in zip(guess, target, strict=True)]
        return torch.stack(parts).sum() / (2 * 0.3**2)

    agrees(surprise("gaussian", 0.3), formula, gradients(0), gradients(1))


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_bayes_differs_from_the_log_likelihood_by_a_constant(noise: Any) -> None:
    """Against torch's own distributions: σ is the standard deviation of either kind of noise."""
    sigma, target = 0.3, gradients(2)
    kind: Any = torch.distributions.Normal
    if noise == "laplace":
        kind = torch.distributions.Laplace
    scale = sigma if noise == "gaussian" else sigma / math.sqrt(2)
    assert float(kind(0.0, scale).stddev) == pytest.approx(sigma)

    def constant(guess: list[Tensor]) -> float:
        pairs = zip(guess, target, strict=True)
        likelihood = sum(float(kind(g, scale).log_prob(t).sum()) for g, t in pairs)
        return float(surprise(noise, sigma)([g.clone() for g in guess], target)[0]) + likelihood

    assert constant(gradients(0)) == pytest.approx(constant(gradients(1)), rel=1e-9)


def test_bayes_with_laplace_noise_has_the_slope_of_an_absolute_value() -> None:
    def formula(guess: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        parts = [(g - t).abs().sum() for g, t in zip(guess, target, strict=True)]
        return torch.stack(parts).sum() * math.sqrt(2) / 0.3

    agrees(surprise("laplace", 0.3), formula, gradients(0), gradients(1))


def test_bayes_without_noise_is_ig() -> None:
    seen, _ = attacked()
    ours = BayesAttack(iterations=5).reconstruct(seen, seeded())
    theirs = IG(iterations=5, tv=1e-4).reconstruct(seen, seeded())
    assert torch.equal(ours.inputs, theirs.inputs)


@pytest.mark.parametrize("noise", ["gaussian", "laplace", "none"])
def test_pruned_elements_are_ignored(noise: Any) -> None:
    distance = where_sent(surprise(noise, 0.3))
    guess, target = gradients(0), gradients(1)
    sent = [torch.rand(t.shape, generator=seeded(k)) < 0.5 for k, t in enumerate(target)]
    pruned = [t * m for t, m in zip(target, sent, strict=True)]
    value, v = distance([g.clone() for g in guess], pruned)
    other, _ = distance([g + 9 * ~m for g, m in zip(guess, sent, strict=True)], pruned)
    assert float(value) == pytest.approx(float(other), rel=1e-12)
    for d, m in zip(v, sent, strict=True):
        assert not d[~m].any()
        assert d[m].any()


@pytest.mark.parametrize(("lr", "steps"), [(0.5, 1), (0.1, 3)])
def test_sigma_is_in_units_of_the_update(lr: float, steps: int) -> None:
    """The residual is what a client with this guess would be surprised by, update for update."""
    seen, _ = attacked(LocalTraining(lr=lr, steps=steps, batch_norm="eval", batch_size=2))
    guess = BayesAttack(iterations=2, noise="gaussian", sigma=0.02, tv=0.0).reconstruct(
        seen, seeded()
    )
    assert guess.labels is not None
    assert seen.training is not None
    engine = Engine(seen, seen.training, 2)
    sent = engine.gradient(guess.inputs, guess.labels)  # in units of lr·steps
    off = sum(
        float((lr * steps * g - u).square().sum())
        for g, u in zip(sent, seen.update.values(), strict=True)
    )
    assert guess.residual == pytest.approx(off / (2 * 0.02**2), rel=1e-3)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_prior_of_bayes_is_a_nat_for_each_unit_of_difference(noise: Any) -> None:
    """As likely as independent Laplace differences of scale 1 between neighbouring pixels."""
    seen, _ = attacked()
    guess = BayesAttack(iterations=1, noise=noise).reconstruct(seen, seeded())
    assert guess.inputs.shape == (2, 1, 8, 8)
    x = guess.inputs
    variation = float(x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean())
    assert guess.history[0] - guess.distances[0] == pytest.approx(2 * 64 * variation, rel=1e-3)
