"""Restorers: a guess in, a better guess out, with what they make of noise beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from leakgauge import data, metrics, tensors, threat
from leakgauge.audit import Store, parse, run
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import Case
from leakgauge.audit.schema import load
from leakgauge.audit.score import scored
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.records import Images, Tokens
from leakgauge.restore import RESTORERS, TotalVariation
from leakgauge.restore.total_variation import _divergence, _slope
from leakgauge.types import Batch, Reconstruction


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(strength: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    clean = data.load("photos", size=32).inputs[:12]
    return clean, (clean + strength * torch.randn(clean.shape, generator=seeded())).clamp(0, 1)


@pytest.mark.parametrize("name", RESTORERS)
def test_it_makes_noisy_pictures_better(name):
    clean, guess = noisy()
    better = RESTORERS[name]().restore(guess, Images((3, 32, 32)), seeded())
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
    ],
)
def test_a_wrong_restorer_is_refused(tmp_path, restore, message):
    with pytest.raises(PlanError, match=message):
        parse(plan(GUESS | {"restore": restore}), "wrong", tmp_path)
