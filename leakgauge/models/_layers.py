"""The choices the networks share: activation, normalisation, width, and their checks in words.

An activation is never in place: the attacks differentiate twice, and hooks read what a layer saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from leakgauge.config import choose
from leakgauge.errors import InputError, PlanError

Activation: TypeAlias = Callable[[], nn.Module]
Norm: TypeAlias = Callable[[int], nn.Module]

STEMS = {"cifar": False, "imagenet": True}
"""Does the network shrink the image at once? Made for 32 × 32, made for 224 × 224."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.GELU,
    "leaky-relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def _group_norm(channels: int) -> nn.Module:
    """At most 32 groups, with two channels or more each: one per group erases a 1 × 1 map."""
    groups = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels >= 2 * g)
    return nn.GroupNorm(next(groups, 1), channels)


def _layer_norm(channels: int) -> nn.Module:
    """Over channels, height and width of each sample: a group norm with a single group."""
    return nn.GroupNorm(1, channels)


NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": _group_norm,
    "layer": _layer_norm,
}


def styled(norm: str, activation: str) -> tuple[Norm, Activation]:
    """The norm and the activation of these names."""
    return choose(NORMS, norm, "norm"), choose(ACTIVATIONS, activation, "activation")


def whole(option: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number not below `least`."""
    if type(value) is not int or value < least:
        raise PlanError(f"{option} must be a whole number of at least {least}, got {value!r}.")
    return value


def scaled(channels: int, width: Any) -> int:
    """`channels` × `width` as a multiple of 8: the nearest, but never over a tenth below."""
    if type(width) not in (int, float) or not 0 < width < math.inf:
        raise PlanError(f"width must be a positive number (1.0 is the paper's), got {width!r}.")
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


def stem_conv(inputs: int, outputs: int, large: bool) -> nn.Conv2d:
    """The first convolution of ResNet and DenseNet."""
    if large:
        return nn.Conv2d(inputs, outputs, 7, stride=2, padding=3, bias=False)
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


def check_sides(network: str, shape: tuple[int, int, int], least: int) -> None:
    """Refuses images that the network's strides and pools would shrink to nothing."""
    _, height, width = shape
    if min(height, width) < least:
        raise InputError(
            f"{network} needs images of at least {least} × {least} pixels, "
            f"got {height} × {width}: resize them or choose another model."
        )
