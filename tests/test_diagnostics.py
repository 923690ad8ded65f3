"""The diagnostics against problems whose answer is known on paper."""

from __future__ import annotations

import pytest
import torch
from nouns import setting
from torch import nn

from leakgauge import diagnostics, models
from leakgauge.errors import InputError
from leakgauge.fl.local import train
from leakgauge.records import Scale
from leakgauge.types import Batch, LocalTraining


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def test_sparsity_counts_elements_not_tensors():
    update = {"a": torch.tensor([0.0, 1.0, 0.0, -0.0]), "b": torch.tensor([[1e-30, 2.0]])}
    assert diagnostics.sparsity(update) == 3 / 6


def test_sparsity_of_nothing_is_an_error():
    with pytest.raises(InputError, match="empty"):
        diagnostics.sparsity({})


def test_dead_units_make_an_update_sparse(rng):
    """Three of four ReLU units are off for every input: their rows and their outgoing weights."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.fill_(0.1)
        model[1].bias.copy_(torch.tensor([1.0, -9.0, -9.0, -9.0]))
    truth = Batch(torch.rand(2, 1, 2, 2, generator=rng), torch.tensor([0, 1]))
    update = train(setting(model, truth), truth, LocalTraining(batch_size=2), rng).update
    dead = 3 * 4 + 3 + 2 * 3  # weights and biases of the units, columns of the head
    assert diagnostics.sparsity(update) == dead / (16 + 4 + 8 + 2)


def test_step_bound_of_a_quadratic(rng):
    """D = c/2 ‖x' − x‖² has μ = c and L = c² everywhere: steps below 2/c come closer."""
    truth = torch.rand(2, 3, 4, 4, generator=rng)
    points = [torch.rand(2, 3, 4, 4, generator=rng) for _ in range(3)]
    bounds = diagnostics.step_bounds(points, [5.0 * (p - truth) for p in points], truth)
    assert bounds == pytest.approx([2 / 5] * 3)


def test_the_step_bound_is_where_descent_stops_coming_closer(rng):
    """On an uneven bowl the bound depends on the point, and is sharp there."""
    curvature = torch.tensor([0.5, 1.0, 8.0])
    truth, point = torch.rand(3, generator=rng), torch.rand(3, generator=rng)
    slope = curvature * (point - truth)
    (bound,) = diagnostics.step_bounds([point], [slope], truth)
    before = (point - truth).norm()
    assert (point - 0.99 * bound * slope - truth).norm() < before
    assert (point - 1.01 * bound * slope - truth).norm() > before


def test_a_slope_that_leads_away_has_a_negative_bound():
    truth, point = torch.zeros(2), torch.ones(2)
    assert diagnostics.step_bounds([point], [-point], truth) == [-2.0]
    assert diagnostics.step_bounds([point], [torch.zeros(2)], truth) == [torch.inf]


def test_step_bounds_want_one_shape():
    with pytest.raises(InputError, match=r"\(3,\)"):
        diagnostics.step_bounds([torch.zeros(2)], [torch.zeros(2)], torch.zeros(3))


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_gradient_is_what_one_step_sends(rng, batch_norm):
    model = models.make("resnet-10", shape=(3, 16, 16), classes=10, width=0.125, rng=rng)
    truth = Batch(torch.rand(2, 3, 16, 16, generator=rng), torch.tensor([3, 4]))
    training = LocalTraining(lr=0.5, batch_size=2, batch_norm=batch_norm)
    scaled = setting(model, truth, scale=Scale((0.4,), (0.2,)))
    update = train(scaled, truth, training, rng).update
    found = diagnostics.gradient(scaled, truth, training)
    assert found.keys() == update.keys()
    for name, value in found.items():
        torch.testing.assert_close(0.5 * value, update[name])


def linear(rng):
    """Logits W·x of one pixel image: p is uniform at W = 0, so g = (p − y)xᵀ is linear in x."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    truth = Batch(torch.rand(1, 3, 2, 2, generator=rng), torch.tensor([0]))
    return setting(model, truth, 2), truth


def test_noise_moves_a_linear_gradient_in_proportion(rng):
    """‖(p − y)(s·sign)ᵀ‖ = ‖(−½, ½)‖·s·√12 for any signs."""
    model, truth = linear(rng)
    strengths = [1 / 255, 4 / 255, 16 / 255]
    found = diagnostics.noise_distances(model, truth, LocalTraining(), strengths, rng, draws=2)
    assert found == pytest.approx([0.5**0.5 * s * 12**0.5 for s in strengths], rel=1e-4)
    assert diagnostics.noise_distances(model, truth, LocalTraining(), [0.0], rng) == [0.0]


def test_noise_needs_a_draw(rng):
    model, truth = linear(rng)
    with pytest.raises(InputError, match="draw"):
        diagnostics.noise_distances(model, truth, LocalTraining(), [0.1], rng, draws=0)


def test_magnitude_and_sensitivity_of_a_linear_gradient(rng):
    """g_kf = (p_k − y_k)x_f with p held at ½: |g| = x_f/2, and only ∂g_kf/∂x_f = ±½ is not zero."""
    model, truth = linear(rng)
    size, sensitivity = diagnostics.magnitude_and_sensitivity(
        model, truth, LocalTraining(), "1.weight", chunk=5
    )
    torch.testing.assert_close(size, truth.inputs.flatten().repeat(2) / 2)
    torch.testing.assert_close(sensitivity, torch.full((24,), 0.5))


def test_sensitivity_is_the_jacobian_row_by_row(rng):
    """Against the definition by central differences, on a network with ReLU and batch norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    truth = Batch(torch.rand(1, 1, 4, 4, generator=rng, dtype=torch.float64), torch.tensor([1]))
    training = LocalTraining(batch_norm="eval")
    world = setting(model, truth, 3)
    size, sensitivity = diagnostics.magnitude_and_sensitivity(world, truth, training, "4.weight")

    def g(inputs):
        return diagnostics.gradient(world, Batch(inputs, truth.labels), training)["4.weight"]

    total = torch.zeros(36, dtype=torch.float64)
    for j in range(16):
        step = torch.zeros(16, dtype=torch.float64)
        step[j] = 1e-5
        step = step.view(1, 1, 4, 4)
        total += ((g(truth.inputs + step) - g(truth.inputs - step)) / 2e-5).flatten().abs()
    torch.testing.assert_close(size, g(truth.inputs).flatten().abs())
    torch.testing.assert_close(sensitivity, total, rtol=1e-5, atol=1e-8)


def test_an_unknown_parameter_is_named_with_the_known_ones(rng):
    model, truth = linear(rng)
    with pytest.raises(InputError, match=r"1\.weight"):
        diagnostics.magnitude_and_sensitivity(model, truth, LocalTraining(), "fc", chunk=5)


def test_pearson():
    assert diagnostics.pearson([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert diagnostics.pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert diagnostics.pearson([1, 2, 3, 4], [1, -1, -1, 1]) == pytest.approx(0)
    with pytest.raises(InputError, match="constant"):
        diagnostics.pearson([1, 1], [1, 2])
    with pytest.raises(InputError, match="length"):
        diagnostics.pearson([1, 2, 3], [1, 2])


def clients(count: int, each: int) -> list[Batch]:
    rng = torch.Generator().manual_seed(3)
    return [
        Batch(
            torch.rand(each, 1, 8, 8, generator=rng, dtype=torch.float64),
            torch.randint(10, (each,), generator=rng),
        )
        for _ in range(count)
    ]


def diverging(truths: list[Batch], steps: int, lr: float = 1e-3) -> diagnostics.Divergence:
    rng = torch.Generator().manual_seed(0)
    model = models.make("mlp", shape=(1, 8, 8), classes=10, rng=rng, activation="tanh").double()
    local = LocalTraining(lr=lr, steps=steps, batch_size=len(truths[0]))
    return diagnostics.divergence(setting(model, truths[0]), truths, local)


def test_one_step_of_a_super_client_is_that_of_all_clients():
    uneven = [clients(1, 2)[0], clients(2, 5)[1]]
    for truths in (clients(4, 3), uneven):
        one = diverging(truths, 1)
        assert one.relative < 1e-14
        assert one.predicted == 0


def test_one_client_is_its_own_super_client():
    assert diverging(clients(1, 4), 5).absolute == 0


def test_the_divergence_grows_as_lemma_1_says():
    """As n(n − 1)/2 of two steps, and with the square of the learning rate."""
    truths = clients(4, 3)
    two = diverging(truths, 2)
    assert two.relative > 1e-8
    assert two.predicted == pytest.approx(1e-6 * 2 * 3 / 12)
    for steps in (3, 5):
        more = diverging(truths, steps)
        assert more.absolute / two.absolute == pytest.approx(steps * (steps - 1) / 2, rel=0.02)
        assert more.predicted / two.predicted == pytest.approx(steps * (steps - 1) / 2)
    twice = diverging(truths, 2, lr=2e-3)
    assert twice.absolute / two.absolute == pytest.approx(4, rel=0.02)


def test_a_divergence_needs_a_fixed_order():
    truths = clients(2, 2)
    model = models.make("mlp", shape=(1, 8, 8), classes=10, rng=torch.Generator())
    with pytest.raises(InputError, match="fixed order"):
        diagnostics.divergence(
            setting(model, truths[0]), truths, LocalTraining(order="shuffled", batch_size=2)
        )
