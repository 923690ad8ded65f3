"""DenseNet-121: every layer of a block reads the outputs of all layers before it.

Huang, Liu, van der Maaten, Weinberger, Densely Connected Convolutional Networks, CVPR 2017.
Blocks of 6, 12, 24, 16 layers, each adding `growth` channels through a bottleneck of 4 × `growth`;
between blocks a 1 × 1 convolution halves the channels and an average pool the sides.
`stem="imagenet"` (7 × 7 of stride 2, max-pool) is torchvision's network with its names;
`stem="cifar"` is 3 × 3 of stride 1 without a pool. The norms keep their names whatever `norm` is.
The file in torchvision's model zoo has older names (`norm.1` for `norm1`): load it with torchvision
and save the `state_dict()`.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from leakgauge.config import choose
from leakgauge.models._layers import STEMS, Activation, Norm, check_sides, stem_conv, styled, whole


class DenseLayer(nn.Module):
    """Adds `growth` channels behind those of its input."""

    def __init__(self, inputs: int, growth: int, norm: Norm, act: Activation) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.act1 = act()
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = norm(4 * growth)
        self.act2 = act()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(self.act1(self.norm1(x)))
        return torch.cat([x, self.conv2(self.act2(self.norm2(inner)))], dim=1)


def densenet_121(
    shape: tuple[int, int, int],
    classes: int,
    *,
    stem: str = "cifar",
    growth: int = 32,
    norm: str = "batch",
    activation: str = "relu",
) -> nn.Module:
    """DenseNet with 121 layers."""
    large = choose(STEMS, stem, "stem")
    check_sides(f"densenet-121 with the {stem} stem", shape, 32 if large else 8)
    norm_of, act = styled(norm, activation)
    channels = 2 * whole("growth", growth)
    features: OrderedDict[str, nn.Module] = OrderedDict(
        conv0=stem_conv(shape[0], channels, large), norm0=norm_of(channels), act0=act()
    )
    if large:
        features["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
    for block, count in enumerate((6, 12, 24, 16), start=1):
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number in range(1, count + 1):
            layers[f"denselayer{number}"] = DenseLayer(channels, growth, norm_of, act)
            channels += growth
        features[f"denseblock{block}"] = nn.Sequential(layers)
        if block < 4:
            features[f"transition{block}"] = nn.Sequential(
                OrderedDict(
                    norm=norm_of(channels),
                    act=act(),
                    conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                    pool=nn.AvgPool2d(2),
                )
            )
            channels //= 2
    features["norm5"] = norm_of(channels)
    network: OrderedDict[str, nn.Module] = OrderedDict(
        features=nn.Sequential(features),
        act=act(),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(channels, classes),
    )
    return nn.Sequential(network)
