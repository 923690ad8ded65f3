"""Restorers: a guess in, a better guess out, with what they make of noise beside it."""

from __future__ import annotations

import pytest
import torch

from leakgauge import data, metrics
from leakgauge.audit import Store, parse, run
from leakgauge.audit.schema import load
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.records import Images, Tokens
from leakgauge.report import html
from leakgauge.restore import RESTORERS, TotalVariation
from leakgauge.restore.total_variation import _divergence, _slope


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


def test_an_audit_restores_and_says_what_noise_would_have_given(tmp_path):
    strong = {"name": "total-variation", "weight": 0.3}
    table = plan(GUESS, GUESS | {"restore": "total-variation"}, GUESS | {"restore": strong})
    checked = parse(table, "restored", tmp_path)
    restored = "inverting-gradients+total-variation"
    assert list(checked.attacks) == ["inverting-gradients", restored, f"{restored}-2"]
    run(checked, Store(tmp_path / "out"))
    result = load(tmp_path / "out" / "result.json")
    raw, better, best = result.trials
    assert raw.score is not None
    assert raw.score.prior_only is None
    for trial, weight in ((better, 0.05), (best, 0.3)):
        assert trial.found is not None
        assert trial.score is not None
        assert trial.score.prior_only is not None
        # Of noise it makes the same, whoever attacked: nothing of the update is in it.
        alone = trial.score.prior_only["psnr"][0]
        said = [c for c in trial.score.caveats if c.startswith("restored:")]
        assert said == [
            "restored: the restorer can add detail that no record had; given noise instead of the "
            f"attack's guess it scores {alone:.1f} dB"
        ]
        assert trial.score.scores["psnr"] != raw.score.scores["psnr"], weight
    assert better.found.residual == raw.found.residual  # type: ignore[union-attr]  # same attack
    page = html.render(result, tmp_path / "out", "hide")
    assert "given noise instead of the" in page


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
