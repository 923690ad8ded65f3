"""Restorers: a guess in, a better guess out, with what they make of noise beside it."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from leakgauge import data, metrics, priors, tensors, threat
from leakgauge.audit import Store, parse, run
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import Case
from leakgauge.audit.schema import load
from leakgauge.audit.score import scored
from leakgauge.errors import CheckpointError, MissingExtra, NotApplicable, PlanError
from leakgauge.files import write_json, write_tensors
from leakgauge.records import Images, Tokens
from leakgauge.report import html
from leakgauge.restore import DDRM, MDE, RESTORERS, TotalVariation
from leakgauge.restore.ddrm import Down, estimated, restored, scale_of
from leakgauge.restore.mde import enhanced, sampled
from leakgauge.restore.total_variation import _divergence, _slope
from leakgauge.types import Batch, Dataset, Reconstruction


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(strength: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    clean = data.load("photos", size=32).inputs[:12]
    return clean, (clean + strength * torch.randn(clean.shape, generator=seeded())).clamp(0, 1)


@pytest.fixture(scope="session")
def prior(tmp_path_factory) -> Path:
    """A small diffusion model of photographs, other ones than those that are restored."""
    every = data.load("photos", size=32, per_photo=40)
    crops = F.interpolate(every.inputs[12:], 16, mode="area")
    public = Dataset("photos", crops, every.labels[12:], every.classes)
    options = {"steps": 150, "batch": 16, "widths": (16, 16), "lr": 3e-3}
    folder = tmp_path_factory.mktemp("prior")
    priors.save(priors.DDPM(**options).train(public, seeded(5)), folder)
    return folder


@pytest.fixture
def made(prior):
    """A restorer of this name: one that works with a prior has a small one."""

    def make(name: str, **options):
        known = RESTORERS[name].__dataclass_fields__
        return RESTORERS[name](**options | ({"prior": str(prior)} if "prior" in known else {}))

    return make


RECORD = Images((3, 16, 16))


def pair(strength: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    clean = F.interpolate(data.load("photos", size=32).inputs[:12], 16, mode="area")
    return clean, (clean + strength * torch.randn(clean.shape, generator=seeded())).clamp(0, 1)


@pytest.mark.parametrize("name", RESTORERS)
def test_a_restored_guess_is_pictures_that_follow_from_the_seed(name, made):
    _, guess = pair()
    before = torch.random.get_rng_state()
    kept = guess.clone()
    first, again = (made(name).restore(guess, RECORD, seeded(1)) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(guess, kept)
    assert torch.equal(first, again)
    assert first.shape == guess.shape
    assert first.dtype == guess.dtype
    assert (first >= 0).all()
    assert (first <= 1).all()
    json.dumps(dataclasses.asdict(RESTORERS[name]()))
    with pytest.raises(NotApplicable, match="it reads pictures, and these records are tokens"):
        made(name).restore(torch.zeros(2, 4), Tokens((4,)), seeded())


@pytest.mark.parametrize("name", ["ddrm", "mde"])
def test_a_prior_that_is_not_named_or_not_installed_is_said(name, made, monkeypatch):
    _, guess = pair()
    with pytest.raises(NotApplicable, match=f"{name} needs a diffusion prior: name one"):
        RESTORERS[name]().restore(guess, RECORD, seeded())
    priors._diffusion.cache_clear()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"needs the package 'diffusers'.*\[diffusion\]"):
        made(name).restore(guess, RECORD, seeded())


@pytest.mark.parametrize(("name", "least"), [("ddrm", 1.5), ("total-variation", 0.5)])
def test_small_pictures_get_better(name, least, made):
    clean, guess = pair(0.2)
    better = made(name).restore(guess, RECORD, seeded())
    gain = metrics.psnr(better, clean) - metrics.psnr(guess, clean)
    assert float(gain.median()) > least


# ---------------------------------------------------------------- DDRM


@pytest.mark.parametrize(("size", "factor"), [((16, 16), 4), ((16, 12), 2), ((9, 14), 3)])
def test_the_operator_is_bicubic_down_sampling(size, factor):
    x = torch.randn(2, 3, *size, generator=seeded())
    small = [side // factor for side in size]
    wanted = F.interpolate(x, size=small, mode="bicubic", antialias=True)
    down = Down.of(size, factor)
    torch.testing.assert_close(down(x), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(down.outside(down.inside(x)), x, rtol=1e-4, atol=1e-5)
    # What was measured is all of x that the operator sees.
    back = down.outside(down.measured(wanted))
    torch.testing.assert_close(down(back), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_without_noise_the_measurement_is_reproduced(factor, prior):
    """Whatever the model invents, down-sampled it is what was measured."""
    clean, _ = pair()
    model = priors.diffusion(str(prior), "a test")
    down = Down.of((16, 16), factor)
    y = down(clean * 2 - 1)
    options = DDRM(factor=factor, noise=0.0, steps=10)
    x = restored(model, down, y, torch.zeros(len(y)), options, seeded(1))
    torch.testing.assert_close(down(x), y, rtol=1e-4, atol=1e-4)
    other = restored(model, down, y, torch.zeros(len(y)), options, seeded(2))
    same = torch.allclose(x, other, atol=1e-3)
    assert same == (factor == 1)  # below the scale of the measurement each draw is another


def test_with_much_noise_it_lets_go_of_the_measurement(prior):
    clean, _ = pair()
    model, down = priors.diffusion(str(prior), "a test"), Down.of((16, 16), 1)
    y = clean * 2 - 1
    far = [
        float((restored(model, down, y, torch.full((12,), s), DDRM(steps=10), seeded()) - y)
              .square().mean())
        for s in (0.0, 0.2, 1.0)
    ]  # fmt: skip
    assert far[0] < 1e-6 < far[1] < far[2]


def test_the_noise_is_estimated_where_the_picture_is_flat():
    for strength in (0.05, 0.2):
        flat = torch.full((3, 3, 32, 32), 0.2)
        noisy = flat + strength * torch.randn(flat.shape, generator=seeded())
        torch.testing.assert_close(estimated(noisy), torch.full((3,), strength), rtol=0.1, atol=0)
    assert float(estimated(flat).max()) < 1e-6


def test_the_scale_of_a_guess_is_found():
    clean, guess = noisy(0.2)
    for factor in (2, 4):
        small = F.interpolate(clean, 32 // factor, mode="area")
        large = F.interpolate(small, 32, mode="bicubic").clamp(0, 1)
        assert scale_of(large * 2 - 1) == factor
    assert scale_of(guess * 2 - 1) == 1


# ---------------------------------------------------------------- MDE


def test_mde_lowers_its_own_objective(prior):
    clean, _ = pair()
    model = priors.diffusion(str(prior), "a test")
    aim = clean[:4] * 2 - 1
    x, history = enhanced(model, aim, MDE(iterations=25, steps=5, lr=0.1), seeded(1))
    assert history.shape == (26, 4)
    torch.testing.assert_close((x - aim).square().flatten(1).mean(1), history.min(0).values)
    assert (history.min(0).values < 0.7 * history[0]).all()


def test_mde_without_iterations_would_be_a_sample(prior):
    """The sampler is DDIM, deterministic: what comes out is of its manifold from the start."""
    model = priors.diffusion(str(prior), "a test")
    noise = torch.randn(2, 3, 16, 16, generator=seeded(4))
    noise *= (16**2 * 3) ** 0.5 / noise.flatten(1).norm(dim=1).view(2, 1, 1, 1)
    shown = sampled(model, noise, 5, None)
    assert torch.equal(shown, sampled(model, noise, 5, None))
    aim = torch.zeros_like(noise)
    x, _ = enhanced(model, aim, MDE(iterations=1, steps=5, lr=1e-12), seeded(4))
    torch.testing.assert_close(x, shown, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- total variation


def test_it_makes_noisy_pictures_better():
    clean, guess = noisy()
    better = TotalVariation().restore(guess, Images((3, 32, 32)), seeded())
    gain = metrics.psnr(better, clean) - metrics.psnr(guess, clean)
    assert better.shape == guess.shape
    assert (better >= 0).all()
    assert (better <= 1).all()
    assert float(gain.median()) > 2


def test_total_variation_solves_its_equation():
    """x minimises ½‖x − g‖² + weight · TV(x): no step in any direction makes that smaller."""
    _, guess = noisy(0.2)
    guess = guess[:2, :1, :12, :12].double()
    weight = 0.1
    x = TotalVariation(weight, iterations=4000).restore(guess, Images((1, 12, 12)), seeded())

    def energy(image: torch.Tensor) -> float:
        slope = (_slope(image, -2).square() + _slope(image, -1).square()).sqrt()
        return float(0.5 * (image - guess).square().sum() + weight * slope.sum())

    least = energy(x)
    assert least < energy(guess) - 1
    for seed in range(20):
        step = torch.randn(x.shape, generator=seeded(seed), dtype=torch.float64)
        for size in (1e-2, -1e-2, 1e-3):
            assert energy(x + size * step) > least - 1e-4


def test_divergence_is_minus_the_adjoint_of_the_slopes():
    u, down, across = torch.randn(3, 2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
    left = (_slope(u, -2) * down + _slope(u, -1) * across).sum()
    torch.testing.assert_close(left, -(u * _divergence(down, across)).sum())


def test_no_weight_changes_nothing_and_texts_are_refused():
    _, guess = noisy()
    record = Images((3, 32, 32))
    assert torch.equal(TotalVariation(weight=0.0).restore(guess, record, seeded()), guess)
    with pytest.raises(NotApplicable, match="it reads pictures, and these records are tokens"):
        TotalVariation().restore(torch.zeros(2, 4), Tokens((4,)), seeded())


def plan(*attacks: dict[str, object]) -> dict[str, object]:
    return {
        "federation": {"model": "lenet-zhu", "data": {"name": "digits"}},
        "attack": list(attacks),
        "audit": {"seeds": [0], "control": False, "explain": False, "exact": False},
    }


GUESS = {"name": "inverting-gradients", "iterations": 3}


def test_an_audit_keeps_the_raw_guess_and_what_is_shown_without_the_update(tmp_path):
    strong = {"name": "total-variation", "weight": 0.3}
    table = plan(GUESS, GUESS | {"restore": "total-variation"}, GUESS | {"restore": strong})
    checked = parse(table, "restored", tmp_path)
    restored = "inverting-gradients+total-variation"
    assert list(checked.attacks) == ["inverting-gradients", restored, f"{restored}-2"]
    out = tmp_path / "out"
    run(checked, Store(out))
    result = load(out / "result.json")
    raw, better, best = result.trials
    assert raw.score is not None
    assert raw.score.raw is raw.score.prior_only is None
    assert raw.found is not None
    assert raw.found.images is not None
    assert raw.found.images.raws == raw.found.images.priors == ()
    for trial in (better, best):
        assert trial.found is not None
        assert trial.score is not None
        assert trial.found.residual == raw.found.residual  # the same attack
        # What was restored is what the attack alone scores, in every number.
        assert trial.score.raw == raw.score.scores
        assert trial.score.prior_only is not None
        assert set(trial.score.prior_only) == set(raw.score.scores)
        assert trial.score.scores["psnr"] != raw.score.scores["psnr"]
        (said,) = (c for c in trial.score.caveats if c.startswith("the restorer can add"))
        assert "detail that no record had" in said
        images = trial.found.images
        assert images is not None
        assert pixels(out, images.raws) == pixels(out, raw.found.images.guesses)
        assert pixels(out, images.truths) == pixels(out, raw.found.images.truths)
        shown = (images.truths, images.raws, images.guesses, images.priors)
        assert len({pixels(out, names) for names in shown}) == 4


def pixels(out: Path, names: tuple[str, ...]) -> bytes:
    assert names
    return b"".join(Image.open(out / name).tobytes() for name in names)


def test_what_is_shown_without_the_update_is_restored_from_noise_or_the_attack_s_prior(tmp_path):
    """Of noise the restorer makes the same, whoever attacked: nothing of the update is in it."""
    checked = parse(plan(GUESS, GUESS | {"restore": "total-variation"}), "prior", tmp_path)
    restored = checked.restorers["inverting-gradients+total-variation"]
    bench = Bench(checked, tmp_path)
    plainly, better = (Case("trial", 0, "none", name, 0) for name in checked.attacks)
    seen = threat.observe(bench.simulated(better), better.threat(checked))
    mine, own = torch.rand(2, 1, 1, 8, 8, generator=seeded(1))
    guess = Reconstruction(mine, None, 0.0)
    assert bench._restored(plainly, seen, guess) == (guess, None, None)
    assert bench._restored(plainly, seen, replace(guess, prior=own))[1:] == (None, own)
    after, raw, alone = bench._restored(better, seen, guess)
    assert raw is mine
    assert torch.equal(after.inputs, restored.restore(mine, seen.record, seeded()))
    noise = torch.rand(mine.shape, generator=tensors.seeded(0, "restore"))
    assert torch.equal(alone, restored.restore(noise, seen.record, seeded()))
    other = replace(guess, inputs=1 - mine)
    assert torch.equal(bench._restored(better, seen, other)[2], alone)
    with_prior = bench._restored(better, seen, replace(guess, prior=own))
    assert torch.equal(with_prior[2], restored.restore(own, seen.record, seeded()))


def test_a_prior_of_the_attack_s_own_is_paired_and_scored_as_its_guesses_are(tmp_path):
    """Pairing is by truths, not by places: the guesses are the truths in reverse, the prior two of
    three truths."""
    checked = parse(plan(GUESS), "own", tmp_path)
    truth = Batch(checked.data.inputs[:3], checked.data.labels[:3])
    own = torch.stack([truth.inputs[2], truth.inputs[0]])
    guess = Reconstruction(truth.inputs.flip(0), None, 0.0)
    measures = {name: metrics.loaded(one) for name, one in checked.metrics.items()}
    score, panel = scored(checked, guess, truth, measures, seeded(), None, own)
    assert score.raw is panel.raw is None
    assert torch.equal(panel.guess, truth.inputs)
    assert score.scores["identified"] == (1.0,) * 3
    assert score.prior_only is not None
    assert panel.prior is not None
    assert score.prior_only["identified"] == (1.0, 0.0, 1.0)
    assert torch.equal(panel.prior[0], truth.inputs[0])
    assert torch.equal(panel.prior[2], truth.inputs[2])
    assert score.prior_only["psnr"][1] == score.mean_image["psnr"][1]  # nothing is left for it


@pytest.mark.parametrize(
    ("restore", "message"),
    [
        ("total-varation", "unknown restorer 'total-varation'; did you mean 'total-variation'"),
        ({"name": "total-variation", "wait": 1}, "unknown key 'wait'"),
        ({"name": "total-variation", "weight": -1.0}, "weight must be"),
        (3, "restore: expected text, got 3 or"),
        ("ddrm", "restorer 'ddrm': name the prior that it works with"),
        ({"name": "ddrm", "factor": 0}, "factor must be between 1 and 64"),
    ],
)
def test_a_wrong_restorer_is_refused(tmp_path, restore, message):
    with pytest.raises(PlanError, match=message):
        parse(plan(GUESS | {"restore": restore}), "wrong", tmp_path)


def test_a_plan_names_a_prior_by_its_path_and_a_report_says_what_it_learned_from(tmp_path):
    every = data.load("digits")
    public = Dataset("other digits", every.inputs.flip(3), every.labels, every.classes)
    priors.save(
        priors.DDPM(steps=3, batch=4, widths=(8,), noises=20).train(public, seeded(1)),
        tmp_path / "mine",
    )
    ddrm = {"name": "ddrm", "prior": "mine", "steps": 3}
    table = plan(GUESS | {"restore": ddrm}, GUESS | {"restore": ddrm | {"name": "mde"}})
    table["attack"][1]["restore"] |= {"iterations": 2}
    checked = parse(table, "diffusion", tmp_path)
    assert checked.document.attack[0]["restore"]["prior"] == "mine"  # as it was written
    assert checked.restorers["inverting-gradients+ddrm"].prior == str(tmp_path / "mine")
    before = checked.fingerprint
    run(checked, Store(tmp_path / "out"))
    result = load(tmp_path / "out" / "result.json")
    assert [trial.status for trial in result.trials] == ["done", "done"]
    assert result.trials[0].score.prior_only is not None
    assert "prior" in result.threat.holds
    words = "a ddpm trained on 1,797 records of other digits; none of them is a client's"
    assert words in result.threat.knowledge["prior"]
    page = html.render(result, tmp_path / "out", "hide")
    assert "records of other digits" in page
    assert str(tmp_path / "mine") not in page
    kept = priors.load(str(tmp_path / "mine"))
    kept.tensors["unet.conv_in.bias"] += 1
    priors.save(kept, tmp_path / "mine")
    assert parse(table, "diffusion", tmp_path).fingerprint != before
    with pytest.raises(CheckpointError, match=r"no folder .*mine/../other"):
        parse(plan(GUESS | {"restore": ddrm | {"prior": "mine/../other"}}), "x", tmp_path)


def test_a_prior_that_was_trained_on_a_client_is_refused(tmp_path):
    made = priors.DDPM(steps=1, batch=4, widths=(8,), noises=20)
    priors.save(made.train(data.load("digits"), seeded(1)), tmp_path / "mine")
    table = plan(GUESS | {"restore": {"name": "ddrm", "prior": "mine"}})
    with pytest.raises(PlanError, match=r"prior = 'mine': .* trained on 1797 of the clients' reco"):
        parse(table, "wrong", tmp_path)


@pytest.mark.parametrize("attack", [{"restore": {"name": "mde", "prior": "x"}}, {}])
def test_a_plan_without_the_extra_is_refused_and_others_are_not(tmp_path, monkeypatch, attack):
    (tmp_path / "x").mkdir()
    facts = {"kind": "ddpm", "shape": [1, 8, 8], "options": {}, "data": "x", "records": 1}
    write_json(tmp_path / "x" / "prior.json", facts)
    write_tensors(tmp_path / "x" / "prior.safetensors", {"a": torch.zeros(1)})
    monkeypatch.setitem(sys.modules, "diffusers", None)
    own = GUESS | attack if attack else {"name": "guided-diffusion"}
    with pytest.raises(
        MissingExtra, match=r"needs the package 'diffusers'.*leakgauge\[diffusion\]"
    ):
        parse(plan(own), "without", tmp_path)
    parse(plan(GUESS | {"restore": "total-variation"}), "others", tmp_path)
