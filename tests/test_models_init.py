"""Initialisations: the distribution each promises, and exactly the tensors it touches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from leakgauge.errors import PlanError
from leakgauge.models import INITS, make

SHAPE = (3, 16, 16)


def built(name: str, init: str, **options: object) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    model = make(name, shape=SHAPE, classes=10, init=init, rng=rng, **options)
    return dict(model.named_parameters())


def rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


CONV = "layer2.0.conv1.weight"  # 64 -> 128 channels, 3 × 3: the two fans differ
FANS = {"in": 64 * 9, "out": 128 * 9}


@pytest.mark.parametrize("fan", FANS)
def test_kaiming_normal_has_variance_two_over_its_fan(fan: str) -> None:
    weight = built("resnet-10", f"kaiming-normal-fan-{fan}")[CONV]
    assert rms(weight) == pytest.approx(math.sqrt(2 / FANS[fan]), rel=0.01)
    assert weight.mean().abs() < 0.02 * rms(weight)
    assert weight.abs().max() > 3.5 * rms(weight)  # normal, not uniform


@pytest.mark.parametrize("fan", FANS)
def test_kaiming_uniform_fills_its_interval(fan: str) -> None:
    weight = built("resnet-10", f"kaiming-uniform-fan-{fan}")[CONV]
    bound = math.sqrt(6 / FANS[fan])
    assert 0.999 * bound < weight.max() <= bound
    assert -bound <= weight.min() < -0.999 * bound
    assert rms(weight) == pytest.approx(bound / math.sqrt(3), rel=0.01)


@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_only_fan_in_touches_the_linear_layers(law: str) -> None:
    plain = built("mlp", "torch", hidden=[400])
    fan_in = built("mlp", f"kaiming-{law}-fan-in", hidden=[400])
    fan_out = built("mlp", f"kaiming-{law}-fan-out", hidden=[400])
    for name, value in plain.items():
        assert torch.equal(fan_out[name], value), name
    assert rms(fan_in["fc1.weight"]) == pytest.approx(math.sqrt(2 / math.prod(SHAPE)), rel=0.01)
    assert rms(fan_in["fc2.weight"]) == pytest.approx(math.sqrt(2 / 400), rel=0.05)
    assert rms(fan_in["fc1.bias"]) == 0


def test_fan_in_of_a_depthwise_convolution_is_its_kernel() -> None:
    depthwise = "features.17.conv.1.0.weight"  # 960 channels, each for itself, 3 × 3
    fan_in = built("mobilenet-v2", "kaiming-normal-fan-in")[depthwise]
    fan_out = built("mobilenet-v2", "kaiming-normal-fan-out")[depthwise]
    assert rms(fan_in) == pytest.approx(math.sqrt(2 / 9), rel=0.03)
    assert rms(fan_out) == pytest.approx(math.sqrt(2 / (960 * 9)), rel=0.03)


def test_orthogonal_rows_are_orthonormal() -> None:
    parameters = built("resnet-10", "orthogonal", width=0.25)
    for name in ("layer2.0.conv1.weight", "layer1.0.conv2.weight", "fc.weight"):
        rows = parameters[name].flatten(1)
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-4, rtol=0)
    assert rms(parameters["fc.bias"]) == 0


@pytest.mark.parametrize("name", ["lenet-zhu", "resnet-10", "vit-small"])
def test_wide_uniform_fills_every_parameter(name: str) -> None:
    narrow = {"resnet-10": {"width": 0.25}, "vit-small": {"depth": 1}}.get(name, {})
    plain = built(name, "torch", **narrow)
    for key, value in built(name, "wide-uniform", **narrow).items():
        assert value.abs().max() <= 0.5, key
        assert not torch.equal(value, plain[key]), key
        if value.numel() > 1000:
            assert value.max() > 0.49, key
            assert value.min() < -0.49, key
            assert rms(value) == pytest.approx(1 / math.sqrt(12), rel=0.1), key


@pytest.mark.parametrize("init", [name for name in INITS if name not in ("torch", "wide-uniform")])
def test_norms_become_plain_biases_zero_and_nothing_else_moves(init: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.GroupNorm(2, 4, affine=False),
        nn.Conv2d(4, 4, 3),
        nn.LayerNorm(4, bias=False),
        nn.PReLU(4),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
        model[1].running_mean.fill_(7.0)
    INITS[init](model, torch.Generator().manual_seed(0))
    for norm in (model[1], model[2], model[5]):
        assert torch.equal(norm.weight, torch.ones(4))
    for layer in (model[0], model[1], model[2], model[4]):
        assert torch.equal(layer.bias, torch.zeros(4))
    for conv in (model[0], model[4]):
        assert conv.weight.abs().max() < 7
    assert torch.equal(model[6].weight, torch.full((4,), 7.0))
    assert torch.equal(model[1].running_mean, torch.full((4,), 7.0))


def test_re_parametrised_weights_are_refused_in_words() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    with pytest.raises(PlanError, match="re-parametrised weight"):
        INITS["orthogonal"](model, torch.Generator())


def test_torch_is_pytorchs_own_default() -> None:
    parameters = built("mlp", "torch", hidden=[400])
    bound = 1 / math.sqrt(math.prod(SHAPE))
    for part in ("weight", "bias"):
        value = parameters[f"fc1.{part}"]
        assert value.abs().max() <= bound
        assert rms(value) == pytest.approx(bound / math.sqrt(3), rel=0.1)
