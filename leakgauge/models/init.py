"""Initialisations by name. The same attack can differ by 5 dB between two that are both Kaiming.

A name with "kaiming" says the fan: weights have variance 2/fan (gain √2, for ReLU), where

    fan-in  = inputs a unit sums:  in_channels / groups · kernel area, or in_features
    fan-out = out_channels · kernel area (groups are not divided out, as in PyTorch)

| name                    | convolutions            | linear layers           | norms         |
|-------------------------|-------------------------|-------------------------|---------------|
| torch                   | as built                | as built                | as built      |
| kaiming-normal-fan-in   | N(0, 2/fan-in), bias 0  | N(0, 2/fan-in), bias 0  | 1, bias 0     |
| kaiming-uniform-fan-in  | U[±√(6/fan-in)], bias 0 | U[±√(6/fan-in)], bias 0 | 1, bias 0     |
| kaiming-normal-fan-out  | N(0, 2/fan-out), bias 0 | as built                | 1, bias 0     |
| kaiming-uniform-fan-out | U[±√(6/fan-out)], bias 0| as built                | 1, bias 0     |
| orthogonal              | orthonormal, bias 0     | orthonormal, bias 0     | 1, bias 0     |
| wide-uniform            | U[−½, ½] weight and bias| U[−½, ½] weight and bias| U[−½, ½] both |

"torch" is PyTorch's default: weights *and* biases U[±1/√fan-in] for convolutions and linear layers,
norms 1 and 0. "kaiming-normal-fan-out" is what torchvision does to a ResNet: its head keeps the
default. "orthogonal" (Saxe et al., 2014) has gain 1 and takes a convolution as a matrix out × rest.
"wide-uniform" is DLG's and the only one that touches other parameters too, such as a class token or
positions. None touches running statistics. Convolutions are Conv1d to Conv3d; norms are batch,
group and layer norms.

C2F (the coarse-to-fine attack) compares Normal, Uniform, Orthogonal and Transfer. The first two are
Kaiming's, and it does not say which fan; Transfer is not an initialisation but ImageNet weights:
`checkpoint.load`. FedLeak's "default random" is "torch".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from leakgauge.errors import PlanError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (*CONVOLUTIONS, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)


def _torch(model: nn.Module, rng: torch.Generator) -> None:
    """PyTorch's own: the layers were built with it."""


def _layerwise(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], draw: Callable[[Tensor], Tensor]
) -> None:
    """Draws the weights of layers of these kinds, zeroes their biases, makes norms plain."""
    for layer in model.modules():
        if isinstance(layer, kinds):
            weight = layer.weight
            if not isinstance(weight, nn.Parameter):
                raise PlanError(
                    f"A {type(layer).__name__} has a re-parametrised weight (weight or spectral "
                    'norm), which cannot be drawn anew: use the initialisation "torch".'
                )
            draw(weight)
        elif isinstance(layer, NORMS):
            if layer.weight is not None:
                nn.init.ones_(layer.weight)
        else:
            continue
        bias = layer.bias
        if isinstance(bias, Tensor):
            nn.init.zeros_(bias)


def _kaiming(
    model: nn.Module, draw: Callable[..., Tensor], mode: str, rng: torch.Generator
) -> None:
    kinds = LAYERS if mode == "fan_in" else CONVOLUTIONS
    _layerwise(model, kinds, lambda w: draw(w, mode=mode, nonlinearity="relu", generator=rng))


def _kaiming_normal_fan_in(model: nn.Module, rng: torch.Generator) -> None:
    """Normal, scaled to the inputs of each layer."""
    _kaiming(model, nn.init.kaiming_normal_, "fan_in", rng)


def _kaiming_normal_fan_out(model: nn.Module, rng: torch.Generator) -> None:
    """Normal, scaled to the outputs of each convolution."""
    _kaiming(model, nn.init.kaiming_normal_, "fan_out", rng)


def _kaiming_uniform_fan_in(model: nn.Module, rng: torch.Generator) -> None:
    """Uniform, scaled to the inputs of each layer."""
    _kaiming(model, nn.init.kaiming_uniform_, "fan_in", rng)


def _kaiming_uniform_fan_out(model: nn.Module, rng: torch.Generator) -> None:
    """Uniform, scaled to the outputs of each convolution."""
    _kaiming(model, nn.init.kaiming_uniform_, "fan_out", rng)


def _orthogonal(model: nn.Module, rng: torch.Generator) -> None:
    """Orthogonal rows in every layer."""
    _layerwise(model, LAYERS, lambda w: nn.init.orthogonal_(w, generator=rng))


def _wide_uniform(model: nn.Module, rng: torch.Generator) -> None:
    """Uniform in [−0.5, 0.5] everywhere."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=rng)


INITS: dict[str, Callable[[nn.Module, torch.Generator], None]] = {
    "torch": _torch,
    "kaiming-normal-fan-in": _kaiming_normal_fan_in,
    "kaiming-normal-fan-out": _kaiming_normal_fan_out,
    "kaiming-uniform-fan-in": _kaiming_uniform_fan_in,
    "kaiming-uniform-fan-out": _kaiming_uniform_fan_out,
    "orthogonal": _orthogonal,
    "wide-uniform": _wide_uniform,
}
