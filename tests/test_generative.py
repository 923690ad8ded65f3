"""Attacks with a generative prior: GIAS, GGL, ROG, CI-Net, FedInverse, and what they share."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakgauge import data, metrics, models, priors
from leakgauge.attacks import GGL, GIAS, ROG, CINet, FedInverse
from leakgauge.attacks._generative import Latent, Weights
from leakgauge.attacks._spaces import FixedCodes, Generator, LowResolution
from leakgauge.attacks.ci_net import weights, wide
from leakgauge.attacks.fedinverse import alike, hsic
from leakgauge.attacks.ggl import estimated, far
from leakgauge.attacks.rog import degraded, restored
from leakgauge.defences import Clip, Prune
from leakgauge.errors import InputError, MissingExtra, NotApplicable, Withheld
from leakgauge.fl import setting
from leakgauge.fl.local import train
from leakgauge.priors._pictures import decibels
from leakgauge.priors.autoencoder import Autoencoder, AutoencoderPrior
from leakgauge.priors.gan import GAN, GANPrior, layout, uncovered
from leakgauge.threat import adapted
from leakgauge.types import (
    Batch,
    Dataset,
    Here,
    Kept,
    LocalTraining,
    Named,
    Observation,
    PreparedAttack,
    Resources,
    Target,
)

TRAINING = LocalTraining(lr=0.1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(begin: int = 0, end: int | None = None) -> Dataset:
    found = data.load("digits")
    rows = slice(begin, end)
    return Dataset("digits", found.inputs[rows], found.labels[rows], found.classes)


@cache
def generator(latent: int = 6) -> Kept:
    """A small generator that has seen digits for a moment."""
    return GAN(latent=latent, width=16, steps=40, batch=16).train(digits(600), seeded(1))


def network(name: str = "lenet-zhu", **options: Any) -> nn.Module:
    how = {"init": "wide-uniform"} if name == "lenet-zhu" else {}
    return models.make(name, shape=(1, 8, 8), classes=10, rng=seeded(1), **how | options)


def observed(batch: Batch, kept: Kept | None, model: nn.Module | None = None) -> Observation:
    here = setting(model or network(), (1, 8, 8), classes=10)
    how = replace(TRAINING, batch_size=len(batch))
    return Observation(here, train(here, batch, how, seeded()).update, how, len(batch), kept=kept)


def shown_by(kept: Kept, count: int = 1) -> Batch:
    """Private images that the generator can show."""
    return Batch(GANPrior.of(kept).sample(count, seeded(9)), torch.arange(3, 3 + count))


def psnr(guess: Tensor, truth: Tensor) -> float:
    return float(metrics.psnr(guess, truth).min())


# ---------------------------------------------------------------- latents and weights


@pytest.mark.parametrize(
    "attack", [GIAS(iterations=200, latent=1.0, restarts=3), GGL(iterations=120, near=0.0)]
)
def test_an_image_that_the_generator_can_show_is_found(attack: GIAS | GGL) -> None:
    kept = generator()
    batch = shown_by(kept)
    guess = attack.reconstruct(observed(batch, kept), seeded())
    assert guess.prior is not None
    assert psnr(guess.inputs, batch.inputs) > 35
    assert psnr(guess.inputs, batch.inputs) > psnr(guess.prior, batch.inputs) + 10
    assert guess.labels is not None
    assert guess.labels.tolist() == batch.labels.tolist()
    assert guess.facts["prior_data"] == "digits"


def test_the_latents_of_a_batch_are_searched_together() -> None:
    kept = generator()
    batch = shown_by(kept, 2)
    guess = GGL(iterations=250, near=0.0).reconstruct(observed(batch, kept), seeded())
    assert psnr(guess.inputs, batch.inputs) > 20


def test_the_weights_go_on_where_the_latents_ended_and_come_nearer() -> None:
    """A digit, which the generator cannot show."""
    kept = generator()
    batch = Batch(digits().inputs[:1], digits().labels[:1])
    seen = observed(batch, kept)
    attack = GIAS(iterations=160, latent=0.25, weights_lr=1e-2)
    guess = attack.reconstruct(seen, seeded())
    assert guess.facts["latent_iterations"] == 40
    assert guess.history[40] == pytest.approx(guess.facts["latent_objective"], rel=1e-4)
    assert min(guess.history[40:]) < 0.2 * min(guess.history[:40])
    alone = replace(attack, iterations=40, latent=1.0).reconstruct(seen, seeded())
    assert min(alone.history) == pytest.approx(guess.facts["latent_objective"])
    assert psnr(guess.inputs, batch.inputs) > psnr(alone.inputs, batch.inputs) + 3


def test_every_image_has_weights_of_its_own() -> None:
    prior = GANPrior.of(generator())
    z = torch.randn(2, prior.latent, generator=seeded())
    space = Weights(prior, z)
    free = space.draw((2, *prior.shape), "normal", seeded())
    assert torch.allclose(space.decode(free, (8, 8)), prior.decode(z), atol=1e-6)
    for one in free:
        one[1] += 0.1
    moved = space.decode(free, (8, 8))
    assert torch.allclose(moved[0], prior.decode(z)[0], atol=1e-6)
    assert not torch.allclose(moved[1], prior.decode(z)[1], atol=1e-2)


def test_latents_are_found_for_images_that_the_generator_can_show() -> None:
    prior = GANPrior.of(generator())
    images = prior.sample(2, seeded(4))
    space = Latent(prior)
    free = space.encode(images, space.draw((2, *prior.shape), "normal", seeded()))
    assert psnr(space.decode(free, (8, 8)), images) > 25


# ---------------------------------------------------------------- GGL: the estimated defence


def some_update(seed: int = 0) -> Named:
    rng = seeded(seed)
    return {n: torch.randn(s, generator=rng) for n, s in (("a", (6, 5)), ("b", (40,)), ("c", (9,)))}


def here() -> Here:
    return Here(setting(network(), (1, 8, 8), classes=10))


def test_what_was_pruned_is_seen() -> None:
    true = some_update()
    sent = Prune(share=0.6).on_update(true, here(), seeded())
    estimate = estimated(sent)
    for name, value in sent.items():
        assert torch.equal(estimate.sent[name], value != 0)
        assert estimate.least[name] == float(value[value != 0].abs().min())
    # The true update passes to what was sent; a candidate that is large elsewhere does not.
    passed = estimate.through({n: u.clone() for n, u in sent.items()})
    assert all(torch.allclose(passed[n], sent[n]) for n in sent)
    assert all(torch.allclose(estimate.through(true)[n], sent[n]) for n in sent)
    free = replace(estimate, bound=math.inf)
    larger = {n: torch.where(u == 0, torch.tensor(9.0), u) for n, u in sent.items()}
    assert not torch.allclose(free.through(larger)["b"], sent["b"])
    total = sum(u.numel() for u in true.values())
    zeros = sum(int((u == 0).sum()) for u in sent.values())
    assert estimate.facts()["estimated_pruned"] == pytest.approx(zeros / total)


@pytest.mark.parametrize("scope", ["whole", "layer"])
def test_the_bound_of_a_clipped_update_is_seen(scope: Any) -> None:
    defence = Clip(norm=0.7, scope=scope)
    true = some_update()
    estimate = estimated(defence.on_update(true, here(), seeded()))
    assert estimate.bound == pytest.approx(0.7, rel=1e-6)
    assert estimate.by_tensor == (scope == "layer")
    other = {n: 3 * u for n, u in some_update(1).items()}
    wanted = defence.on_update(other, here(), seeded())
    assert all(torch.allclose(estimate.through(other)[n], wanted[n], atol=1e-6) for n in wanted)
    short = {n: 1e-3 * u for n, u in other.items()}  # what is within the bound is left as it is
    assert all(torch.allclose(estimate.through(short)[n], short[n]) for n in short)


def test_the_estimate_serves_where_nobody_told_of_the_defence() -> None:
    kept = generator()
    batch = shown_by(kept)
    seen = observed(batch, kept)
    sent = Prune(share=0.9).on_update(seen.update, here(), seeded())
    seen = replace(seen, update=sent, announced={"share": 0.9})
    guess = GGL(iterations=120, near=0.0).reconstruct(seen, seeded())
    assert guess.facts["estimated_pruned"] > 0.85
    assert not guess.adapted
    assert psnr(guess.inputs, batch.inputs) > 30
    known = GGL(iterations=120, near=0.0).reconstruct(adapted(seen, Prune(share=0.9)), seeded())
    assert known.adapted
    assert psnr(known.inputs, batch.inputs) > 30


def test_latents_are_held_near_those_that_the_generator_was_trained_on() -> None:
    z = torch.randn(1, 2, 100, generator=seeded()).double()
    z = (z - z.mean(2, keepdim=True)) / z.std(2, correction=0, keepdim=True)
    assert float(far(z)) == pytest.approx(0, abs=1e-9)
    p, q = torch.distributions.Normal(3.0, 2.0), torch.distributions.Normal(0.0, 1.0)
    assert float(far(3 + 2 * z)) == pytest.approx(float(torch.distributions.kl_divergence(p, q)))
    kept = generator()
    seen = observed(Batch(digits().inputs[:1], digits().labels[:1]), kept)
    loose, held = (GGL(iterations=30, near=n).reconstruct(seen, seeded()) for n in (0.0, 10.0))
    gaps = [max(g.history[-1] - g.distances[-1], 0.0) for g in (loose, held)]
    assert gaps[0] == 0
    assert gaps[1] / 10 < 0.1


def test_ggl_draws_from_its_own_generator_alone() -> None:
    seen = observed(shown_by(generator()), generator())
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    left, right = (GGL(iterations=3).reconstruct(seen, seeded(4)) for _ in range(2))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert torch.equal(left.inputs, right.inputs)
    assert left.history == right.history


def test_ggl_says_in_one_sentence_which_extra_is_missing(monkeypatch: Any) -> None:
    load = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == "cma":
            raise ModuleNotFoundError("No module named 'cma'", name="cma")
        return load(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    seen = observed(shown_by(generator()), generator())
    with pytest.raises(MissingExtra, match=r"'ggl' needs the package 'cma'.*leakgauge\[generative"):
        GGL(iterations=2).reconstruct(seen, seeded())


# ---------------------------------------------------------------- ROG


def aimed(public: Dataset | None) -> Target:
    return Target(setting(network(), (1, 8, 8), classes=10), TRAINING, 1, public=public)


def test_the_restorer_improves_public_images_that_it_has_not_seen() -> None:
    attack = ROG(factor=2, steps=250, noise=0.02)
    kept = attack.prepare(aimed(digits(600)), seeded()).kept
    assert kept.facts["restored_psnr"] > kept.facts["raw_psnr"] + 2
    others = digits(0, 100).inputs
    worn = degraded(LowResolution(2), others, 0.0, seeded())
    own = {n.removeprefix("restorer."): w for n, w in kept.tensors.items()}
    assert decibels(restored(own, worn), others) > decibels(worn, others) + 2
    batch = Batch(digits().inputs[:1], digits().labels[:1])
    guess = replace(attack, iterations=80).reconstruct(observed(batch, kept), seeded())
    assert guess.prior is not None
    assert guess.raw is not None
    assert torch.equal(restored(own, guess.raw), guess.inputs)
    moved = (guess.raw - guess.inputs).square().mean().sqrt()
    assert guess.facts["moved"] == pytest.approx(float(moved))
    assert psnr(guess.inputs, batch.inputs) > psnr(guess.prior, batch.inputs) + 3


def test_the_codes_of_an_autoencoder_are_searched(tmp_path: Path) -> None:
    how = Autoencoder(channels=6, halvings=1, width=16, steps=150, batch=16)
    place = tmp_path / "coder"
    priors.save(how.train(digits(600), seeded()), place)
    attack = ROG(prior=str(place), steps=20, iterations=150, tv=0.0)
    assert "public" in attack.needs
    kept = attack.prepare(aimed(digits(600)), seeded()).kept
    coder = AutoencoderPrior.of(priors.load(str(place)))
    image = coder.decode(coder.encode(digits().inputs[:1])).clamp(0, 1)  # one that it can show
    batch = Batch(image, digits().labels[:1])
    guess = attack.reconstruct(observed(batch, kept), seeded())
    assert psnr(guess.inputs, batch.inputs) > 25


def test_a_restorer_begins_by_leaving_images_as_they_are() -> None:
    from leakgauge.attacks.rog import drawn

    images = torch.rand(2, 3, 7, 9, generator=seeded())  # odd sides
    assert torch.allclose(restored(drawn(3, seeded()), images), images)


# ---------------------------------------------------------------- CI-Net


def test_the_untrained_network_has_more_weights_than_the_batch_has_values() -> None:
    for shape in ((1, 1, 8, 8), (4, 3, 32, 32), (64, 3, 32, 32)):
        width = wide(shape)
        assert weights(Generator(width=width), shape) >= 4 * math.prod(shape)
        assert width == 32 or weights(Generator(width=width // 2), shape) < 4 * math.prod(shape)


def test_the_codes_stay_and_the_weights_move() -> None:
    space = FixedCodes(Generator(width=8), torch.randn(1, 128, generator=seeded()))
    free = space.draw((1, 1, 8, 8), "normal", seeded(3))
    assert len(free) == len(Generator(width=8).draw((1, 1, 8, 8), "normal", seeded(3))) - 1
    batch = Batch(digits().inputs[:1], digits().labels[:1])
    guess = CINet(iterations=150).reconstruct(observed(batch, None), seeded())
    assert guess.prior is not None
    assert psnr(guess.inputs, batch.inputs) > psnr(guess.prior, batch.inputs) + 8
    assert guess.facts["width"] == 32


# ---------------------------------------------------------------- FedInverse


def slow_hsic(a: Tensor, b: Tensor, sigma: float) -> float:
    """tr(K H L H) / (n − 1)², entry by entry."""
    n = len(a)

    def kernel(x: Tensor) -> Tensor:
        found = torch.zeros(n, n, dtype=x.dtype)
        for i in range(n):
            for j in range(n):
                found[i, j] = math.exp(
                    -float((x[i] - x[j]).square().sum()) / (2 * sigma**2 * x.shape[1])
                )
        return found

    h = torch.eye(n, dtype=a.dtype) - 1 / n
    return float(torch.trace(kernel(a) @ h @ kernel(b) @ h)) / (n - 1) ** 2


def test_the_criterion_is_that_of_the_formula_and_tells_dependence() -> None:
    a = torch.randn(120, 3, generator=seeded()).double()
    other = torch.randn(120, 3, generator=seeded(1)).double()
    twisted = (2 * a).sin() + 0.1 * other
    for b in (a, other, twisted):
        assert float(hsic(a, b, 0.5)) == pytest.approx(slow_hsic(a, b, 0.5), rel=1e-9)
    assert float(alike(a, a, 0.5)) == pytest.approx(1)
    assert float(alike(a, other, 1.0)) < 0.5 * float(alike(a, twisted, 1.0))


@cache
def learned() -> nn.Module:
    """A classifier of digits."""
    model = network("mlp", hidden=(32,))
    batch = Batch(digits(0, 600).inputs, digits(0, 600).labels)
    how = LocalTraining(lr=0.2, batch_size=50, epochs=12)
    moved = train(setting(model, (1, 8, 8), classes=10), batch, how, seeded()).update
    with torch.no_grad():
        for name, value in model.named_parameters():
            value -= moved[name]
    return model


def test_prototypes_are_what_the_model_is_sure_of_whatever_the_update() -> None:
    kept, model = generator(16), learned()
    attack = FedInverse(images="classes", iterations=80)
    assert attack.needs == {"weights", "public"}
    batch = Batch(digits().inputs[:1], digits().labels[:1])
    seen = observed(batch, kept, model)
    guess = attack.reconstruct(seen, seeded())
    assert guess.labels is not None
    assert guess.labels.tolist() == list(range(10))
    with torch.no_grad():
        sure = model(guess.inputs).softmax(1).diagonal()
        assert guess.prior is not None
        before = model(guess.prior).softmax(1).diagonal()
    assert torch.allclose(sure, torch.tensor(guess.facts["confidence"]).float(), atol=1e-4)
    assert float(sure.mean()) > float(before.mean()) + 0.3
    other = replace(seen, update={n: torch.zeros_like(u) for n, u in seen.update.items()})
    assert torch.equal(attack.reconstruct(other, seeded()).inputs, guess.inputs)
    assert "class" in guess.notes[0]


def test_the_criterion_makes_candidates_differ() -> None:
    """Its weight enters with the right sign: the candidates of both halves get less alike."""
    kept, model = generator(16), learned()
    seen = observed(Batch(digits().inputs[:1], digits().labels[:1]), kept, model)
    ends = []
    for weight in (0.0, 5.0):
        attack = FedInverse(hsic=weight, candidates=16, iterations=60, near=0.0)
        ends.append(attack.reconstruct(seen, seeded()))
    assert ends[0].history[0] < ends[1].history[0]  # it is added
    fall = [g.history[0] - min(g.history) for g in ends]
    assert fall[1] > fall[0]


# ---------------------------------------------------------------- what they are told of a prior


WITH_PRIOR: list[type[PreparedAttack]] = [FedInverse, GGL, GIAS]


@pytest.mark.parametrize("kind", WITH_PRIOR)
def test_a_trained_prior_needs_no_public_records(kind: Any, tmp_path: Path) -> None:
    place = tmp_path / "generator"
    priors.save(generator(), place)
    assert "public" in kind().needs
    attack = kind(prior=str(place))
    assert "public" not in attack.needs
    kept = attack.prepare(aimed(None), seeded()).kept
    assert torch.equal(kept.tensors["first"], generator().tensors["first"])
    with pytest.raises(Withheld, match="public records"):
        kind().prepare(aimed(None), seeded())


def test_a_prior_of_another_kind_or_shape_is_refused(tmp_path: Path) -> None:
    small = Autoencoder(steps=2, width=8, channels=2)
    priors.save(small.train(digits(1500), seeded()), tmp_path / "coder")
    priors.save(generator(), tmp_path / "generator")
    with pytest.raises(NotApplicable, match="expected gan"):
        GIAS(prior=str(tmp_path / "coder")).prepare(aimed(None), seeded())
    with pytest.raises(InputError, match="'autoencoder', got 'gan'"):
        ROG(prior=str(tmp_path / "generator")).prepare(aimed(digits()), seeded())
    larger = models.make("lenet-zhu", shape=(1, 16, 16), classes=10, rng=seeded())
    target = Target(setting(larger, (1, 16, 16), classes=10), TRAINING, 1)
    with pytest.raises(InputError, match=r"pictures \(1, 8, 8\).*\(1, 16, 16\)"):
        GIAS(prior=str(tmp_path / "generator")).prepare(target, seeded())


# ---------------------------------------------------------------- the priors themselves


def test_a_generator_learns_to_show_what_covers_its_images() -> None:
    public = digits(600)
    short, long = (
        GAN(latent=16, width=32, steps=n, batch=32).train(public, seeded()) for n in (1, 150)
    )
    assert long.facts["score"] > short.facts["score"] + 2
    assert long.facts["score"] > long.facts["mean_psnr"]


def test_what_is_not_covered_is_the_distance_to_the_nearest() -> None:
    real, shown = (torch.rand(n, 1, 8, 8, generator=seeded(n)) for n in (3, 5))
    each = [min(float((r - s).square().mean()) for s in shown) for r in real]
    assert float(uncovered(real, shown)) == pytest.approx(sum(each) / 3, rel=1e-5)


def test_an_image_depends_on_its_own_latent_alone() -> None:
    prior = GANPrior.of(generator())
    z = torch.randn(5, prior.latent, generator=seeded())
    assert torch.allclose(prior.decode(z)[2:3], prior.decode(z[2:3]), atol=1e-6)
    assert {n: tuple(w.shape) for n, w in prior.weights.items()} == layout(6, 16, (1, 8, 8))


def test_codes_lead_back_to_their_images_and_samples_are_spread_as_they_are() -> None:
    public = digits(600)
    how = Autoencoder(channels=8, halvings=1, width=24, steps=300, batch=32)
    kept = how.train(public, seeded())
    assert kept.facts["score"] > kept.facts["mean_psnr"] + 5
    prior = AutoencoderPrior.of(kept)
    codes = prior.encode(public.inputs).flatten(1)
    drawn = prior.drawn(4000, seeded()).flatten(1)
    assert float(codes.mean(0).abs().max()) < 0.15
    ours, theirs = (x.T.corrcoef().nan_to_num() for x in (drawn, codes))
    assert float((ours - theirs).abs().mean()) < 0.05
    assert float((torch.eye(len(ours)) - theirs).abs().mean()) > 0.05  # the identity would not do


def test_time_ends_a_training() -> None:
    kept = GAN(steps=10_000_000).train(digits(600), seeded(), Resources(seconds=0.0))
    assert kept.facts["steps"] < 3
