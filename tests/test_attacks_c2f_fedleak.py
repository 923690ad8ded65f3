"""Coarse-to-fine and FedLeak: their formulas against autograd and slow loops, and who is told what.

Eq. 14 of FedLeak, the blend, is tested on a quadratic in test_matching.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import models
from leakgauge.attacks import CoarseToFine, FedLeak, coarse_to_fine, fedleak
from leakgauge.attacks._matching import Adam, Blend, Phases
from leakgauge.attacks._objectives import Distance, cosine
from leakgauge.data.digits import digits
from leakgauge.errors import InputError
from leakgauge.fl import Scenario, simulate
from leakgauge.records import Scale
from leakgauge.threat import observe
from leakgauge.types import LocalTraining, Observation, Reconstruction, Resources, ThreatModel

SHAPES = ((4, 3, 2, 2), (5,), (2, 8), ())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(seed: int) -> list[Tensor]:
    rng = seeded(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in SHAPES]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def angle(a: Tensor, b: Tensor) -> Tensor:
    return 1 - a @ b / (a.norm() * b.norm())


def agrees(
    distance: Distance, plain: Callable[[list[Tensor], list[Tensor]], Tensor], target: list[Tensor]
) -> None:
    """Value and slope are those of the plain formula under float64 autograd."""
    leaves = [g.requires_grad_() for g in gradients(1)]
    expected = plain(leaves, target)
    slope = torch.autograd.grad(expected, leaves)
    kept = [t.clone() for t in target]
    value, v = distance([g.detach().clone() for g in leaves], target)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(v), flat(slope), rtol=1e-10, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(target, kept, strict=True))


def sparse() -> list[Tensor]:
    target = gradients(2)
    target[0][1:3] = 0
    target[1][0] = 0
    return target


def observed(model: nn.Module | None = None, **training: Any) -> Observation:
    made = model or models.make("mlp", shape=(1, 8, 8), classes=10, hidden=(12,), rng=seeded())
    scenario = Scenario(lambda: made, digits(), LocalTraining(**training), clients=2)
    return observe(simulate(scenario, seeded()), ThreatModel())


class Calls(list[dict[str, Any]]):
    """What an attack hands to `match`, which runs all the same."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        real = module.match

        def spy(seen: Observation, distance: Any, search: Any, **options: Any) -> Reconstruction:
            guess: Reconstruction = real(seen, distance, search, **options)
            self.append(options | {"distance": distance, "search": search, "guess": guess})
            return guess

        monkeypatch.setattr(module, "match", spy)


# ---------------------------------------------------------------- coarse-to-fine


def test_tv_weight_at_32_is_the_papers() -> None:
    assert coarse_to_fine.tv_weight(32) == pytest.approx(2.2e-4, abs=0.5e-5)
    assert round(coarse_to_fine.tv_weight(32), 4) == 0.0002
    assert coarse_to_fine.tv_weight(1) == 0.0005
    assert coarse_to_fine.tv_weight(1000) == 0  # never a reward for noise


def test_tv_is_the_sum_over_pixels_of_normalised_images_and_the_mean_over_records() -> None:
    x = torch.rand(2, 3, 4, 5, generator=seeded(), dtype=torch.float64)
    std = (0.5, 0.25, 1.0)
    total = 0.0
    for image in x:
        for channel, s in zip(image, std, strict=True):
            for i in range(4):
                for j in range(5):
                    across = float(channel[i, j + 1] - channel[i, j]) / s if j < 4 else 0.0
                    down = float(channel[i + 1, j] - channel[i, j]) / s if i < 3 else 0.0
                    total += (across**2 + down**2) ** 2
    assert float(coarse_to_fine.total_variation(std)(x)) == pytest.approx(total / 2)
    assert float(coarse_to_fine.total_variation(std)(torch.full_like(x, 0.3))) == 0


def test_the_coarse_distance_is_eq_1() -> None:
    def plain(guess: list[Tensor], target: list[Tensor]) -> Tensor:
        g, t = flat(guess), flat(target)
        on = t != 0
        return angle(g, t) + 0.3 * angle(g[on], t[on])

    agrees(coarse_to_fine.support(0.3), plain, sparse())


def test_the_fine_distance_is_eq_2() -> None:
    def plain(guess: list[Tensor], target: list[Tensor]) -> Tensor:
        g, t = flat(guess), flat(target)
        return angle(g, t) + ((g - t).abs() / (1 + t.abs())).mean()

    agrees(coarse_to_fine.reweighted, plain, sparse())


def test_stages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The support term in the last 40 % of the coarse stage only; the fine stage goes on from the
    coarse images, moves no further than its learning rate at first, and has its own distance."""
    calls = Calls(coarse_to_fine, monkeypatch)
    guess = CoarseToFine(iterations=50, coarse=0.6).reconstruct(observed(), seeded(3))
    first, second = calls
    assert (first["search"].iterations, second["search"].iterations) == (30, 20)
    assert isinstance(first["distance"], Phases)
    before, after = (first["distance"].at(done) for done in (0.599, 0.6))
    assert before is cosine
    assert after is not cosine
    assert after is first["distance"].at(0.99)
    target = sparse()
    values = [d(gradients(1), target)[0] for d in (after, coarse_to_fine.support(0.05))]
    assert torch.equal(*values)
    assert second["distance"] is coarse_to_fine.reweighted
    assert torch.equal(second["begin"], first["guess"].inputs)
    assert first["optimiser"].signed
    assert not second["optimiser"].signed
    assert second["optimiser"].lr == 0.01
    decay = second["optimiser"].schedule
    assert [decay(done) for done in (0, 0.33)] == [1, 1]
    assert decay(2 / 3) == pytest.approx(0.5)
    ((_, weight),) = second["priors"]
    assert weight(0.5) == coarse_to_fine.tv_weight(8)
    assert guess.history == first["guess"].history + second["guess"].history
    assert torch.equal(guess.inputs, second["guess"].inputs)
    assert guess.iterations == 50
    assert guess.objectives == first["guess"].objectives


def test_the_coarse_stage_can_be_run_alone() -> None:
    """So that a benchmark can say what the fine stage adds."""
    seen = observed()
    both = CoarseToFine(iterations=40).reconstruct(seen, seeded(3))
    alone = CoarseToFine(iterations=20, coarse=1.0).reconstruct(seen, seeded(3))
    assert both.history[:20] == alone.history
    assert both.facts["coarse_iterations"] == 20
    assert both.facts["coarse_objective"] == alone.objectives[0]
    assert both.facts["coarse_distance"] == alone.residual
    assert not torch.equal(both.inputs, alone.inputs)


def test_progress_counts_through_both_stages_and_all_restarts() -> None:
    calls: list[tuple[int, int]] = []
    resources = Resources(progress=lambda done, total, _: calls.append((done, total)))
    CoarseToFine(iterations=10, restarts=2).reconstruct(observed(), seeded(), resources)
    assert calls == [(i, 15) for i in range(1, 16)]


def test_stages_without_iterations_are_refused() -> None:
    with pytest.raises(InputError, match="iterations and restarts of at least 1, got 0"):
        CoarseToFine(iterations=0).reconstruct(observed(), seeded())
    assert len(CoarseToFine(iterations=1).reconstruct(observed(), seeded()).history) == 1


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"coarse must be a share in \(0, 1\], got 0"):
        CoarseToFine(coarse=0.0)


# ---------------------------------------------------------------- fedleak


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    "values",
    [
        torch.randn(7, 11, generator=seeded()),
        torch.randn(100, generator=seeded()).relu(),  # half of them are equal, and zero
        torch.ones(4, 5),
        torch.tensor(3.0),
    ],
)
def test_the_mask_keeps_exactly_its_share_of_the_largest(values: Tensor, share: float) -> None:
    mask = fedleak.largest(values, share)
    assert mask.shape == values.shape
    assert int(mask.sum()) == max(1, round(share * values.numel()))
    if not mask.all():
        assert float(values[mask].abs().min()) >= float(values[~mask].abs().max())


def test_the_mask_goes_by_magnitude() -> None:
    assert fedleak.largest(torch.tensor([1.0, -3.0, 2.0, 0.5]), 0.5).tolist() == [
        False,
        True,
        True,
        False,
    ]


def chosen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The top half of each tensor by sorting."""
    masks = []
    for tensor in tensors:
        order = tensor.detach().abs().flatten().argsort(descending=True)
        mask = torch.zeros(tensor.numel(), dtype=torch.bool)
        mask[order[: max(1, round(tensor.numel() / 2))]] = True
        masks.append(mask.view_as(tensor))
    return masks


@pytest.mark.parametrize("mask_by", ["guess", "observed"])
def test_the_printed_distance_is_eq_15(mask_by: fedleak.MaskBy) -> None:
    def plain(guess: list[Tensor], target: list[Tensor]) -> Tensor:
        mask = flat(chosen(guess if mask_by == "guess" else target))
        g, t = flat(guess)[mask], flat(target)[mask]
        return (g - t).abs().sum() + angle(g, t)

    agrees(fedleak.whole(0.5, mask_by), plain, gradients(2))


def test_the_released_distance_goes_tensor_by_tensor() -> None:
    def plain(guess: list[Tensor], target: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for g, t, mask in zip(guess, target, chosen(guess), strict=True):
            total = total + angle(g[mask], t[mask]) + (g - t)[mask].abs().sum() / g.numel()
        return total

    agrees(fedleak.by_tensor(0.5), plain, gradients(2))


def test_a_tensor_without_a_gradient_has_no_direction() -> None:
    guess, target = gradients(1), gradients(2)
    target[1].zero_()
    value, v = fedleak.by_tensor(1.0)(guess, target)
    assert math.isfinite(float(value))
    expected = guess[1].sign() / guess[1].numel()  # the slope of the mean L1 alone
    torch.testing.assert_close(v[1], expected)


def test_activations_are_summed_over_the_layers_between() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Dropout(0.9), nn.Linear(3, 2)
    )
    training = LocalTraining(dropout="replayed")
    x = torch.rand(3, 1, 2, 2, generator=seeded()).requires_grad_()
    scaled = setting(model, x, scale=Scale((0.5,), (0.25,)))
    penalty = fedleak.activations(scaled, training, Resources())
    z = (x - 0.5).flatten(1) / 0.25
    h = nn.functional.linear(z, model[1].weight, model[1].bias)
    # flattened input, linear, ReLU, and the dropout that is off
    expected = (z.abs().sum() + h.abs().sum() + 2 * h.relu().sum()) / 3
    for _ in range(2):
        torch.testing.assert_close(penalty(x), expected)
    torch.testing.assert_close(torch.autograd.grad(penalty(x), x), torch.autograd.grad(expected, x))
    assert not any(m._forward_hooks for m in model.modules())


def test_the_median_filter_removes_a_speck_and_keeps_an_edge() -> None:
    edge = torch.zeros(2, 3, 9, 9)
    edge[..., 5:] = 1
    speck = edge.clone()
    speck[1, 2, 4, 2] = 1
    assert torch.equal(fedleak.filtered(speck, 5), edge)
    assert torch.equal(fedleak.filtered(speck, 1), speck)


def test_variants_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(fedleak, monkeypatch)
    seen = observed()
    for variant in ("printed", "released", "short"):
        FedLeak(iterations=1, variant=variant).reconstruct(seen, seeded())  # type: ignore[arg-type]
    printed, released, short = (call["optimiser"] for call in calls)
    assert all(isinstance(o, Adam) for o in (printed, released, short))
    assert (printed.lr, printed.signed, printed.schedule(0.9)) == (1e-4, False, 1.0)
    assert printed.blend == Blend(0.7, 0.1, "slope")
    assert (released.lr, released.signed) == (1e-2, True)
    assert released.schedule(0.5) == pytest.approx(0.5)
    assert released.blend == Blend(0.3, 0.1, "step")
    assert short.blend is None
    assert [type(call["space"]).__name__ for call in calls] == ["Pixels", "Generator", "Generator"]
    assert [[weight(0) for _, weight in call["priors"]] for call in calls] == [
        [1e-5, 1e-4],
        [1e-5],
        [1e-5],
    ]
    guess, target = gradients(1), gradients(2)
    for call, make in zip(
        calls, (fedleak.whole, fedleak.by_tensor, fedleak.by_tensor), strict=True
    ):
        values = [d([g.clone() for g in guess], target)[0] for d in (call["distance"], make(0.5))]
        assert torch.equal(*values)


def test_an_option_stands_in_for_the_variants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(fedleak, monkeypatch)
    seen = observed()
    options: dict[str, Any] = {"space": "pixels", "lr": 0.2, "blend": 0.4, "activation": 0.1}
    guess = FedLeak(iterations=2, median=3, **options).reconstruct(seen, seeded())
    (call,) = calls
    assert call["optimiser"].lr == 0.2
    assert call["optimiser"].blend == Blend(0.4, 0.1, "step")
    assert [weight(0) for _, weight in call["priors"]] == [1e-5, 0.1]
    assert torch.equal(guess.inputs, fedleak.filtered(call["guess"].inputs, 3))
    assert not torch.equal(guess.inputs, call["guess"].inputs)
    plain = FedLeak(iterations=1, variant="released", blend=0.0, median=1)
    plain.reconstruct(seen, seeded())
    assert calls[1]["optimiser"].blend is None
    assert torch.equal(calls[1]["guess"].inputs, plain.reconstruct(seen, seeded()).inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, r"share must lie in \(0, 1\], got 0"),
        ({"blend": 1.5}, r"blend must lie in \[0, 1\], got 1.5"),
        ({"median": 4}, "median must be odd and at least 1, got 4"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedLeak(**options)
