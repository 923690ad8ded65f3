"""Residual networks, with parameters called as in torchvision: a checkpoint of its variant loads.

He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016.
`resnet-10`, `-18`, `-34`  basic blocks [1,1,1,1], [2,2,2,2], [3,4,6,3] of 64, 128, 256, 512
    channels. `stem="cifar"` is a 3 × 3 convolution of stride 1 without a pool; `stem="imagenet"` is
    7 × 7 of stride 2 and a 3 × 3 max-pool of stride 2: torchvision's network, when norm, activation
    and width are the defaults. A norm is called `bn1`, … whatever it is. ResNet-10 with the CIFAR
    stem, one grey channel and ten classes has the 4,902,090 parameters that FedLeak states.
`resnet-9`  the network of Page's DAWNBench entry, How to Train Your ResNet, 2018: `prep` 64,
    `layer1` 128 with a residual, `layer2` 256, `layer3` 512 with a residual, global max-pool,
    `linear`: eight 3 × 3 convolutions and a head; every `layer` halves the sides by a max-pool.
    Differs from the entry: the head has a bias and its output is not scaled by 1/8.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from leakgauge.config import choose
from leakgauge.models._layers import STEMS, Activation, Norm, check_sides, scaled, stem_conv, styled


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a skip; the skip is a 1 × 1 convolution where sizes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, act: Activation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.act1 = act()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )
        self.act2 = act()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act1(self.bn1(self.conv1(x)))
        out: Tensor = self.act2(self.bn2(self.conv2(inner)) + self.downsample(x))
        return out


def resnet(
    blocks: tuple[int, int, int, int],
    shape: tuple[int, int, int],
    classes: int,
    *,
    stem: str = "cifar",
    width: float = 1.0,
    norm: str = "batch",
    activation: str = "relu",
) -> nn.Module:
    """ResNet of basic blocks."""
    check_sides("A ResNet", shape, 8)
    large = choose(STEMS, stem, "stem")
    norm_of, act = styled(norm, activation)
    channels = scaled(64, width)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=stem_conv(shape[0], channels, large), bn1=norm_of(channels), act1=act()
    )
    if large:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    inputs = channels
    for stage, count in enumerate(blocks):
        outputs = channels * 2**stage
        strides = [1 if stage == 0 else 2] + [1] * (count - 1)
        stack = []
        for stride in strides:
            stack.append(BasicBlock(inputs, outputs, stride, norm_of, act))
            inputs = outputs
        layers[f"layer{stage + 1}"] = nn.Sequential(*stack)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


class Residual(nn.Module):
    """x + two convolutions of x, each with its norm and activation."""

    def __init__(self, channels: int, norm: Norm, act: Activation) -> None:
        super().__init__()
        self.first = _unit(channels, channels, norm, act)
        self.second = _unit(channels, channels, norm, act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x))
        return out


def _unit(inputs: int, outputs: int, norm: Norm, act: Activation) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=norm(outputs), act=act()))


def resnet_9(
    shape: tuple[int, int, int],
    classes: int,
    *,
    width: float = 1.0,
    norm: str = "batch",
    activation: str = "relu",
) -> nn.Module:
    """ResNet with 9 layers."""
    check_sides("resnet-9", shape, 8)
    norm_of, act = styled(norm, activation)
    channels = scaled(64, width)
    layers: OrderedDict[str, nn.Module] = OrderedDict(prep=_unit(shape[0], channels, norm_of, act))
    for number in (1, 2, 3):
        layer = _unit(channels, 2 * channels, norm_of, act)
        layer.add_module("pool", nn.MaxPool2d(2))
        channels = 2 * channels
        if number != 2:
            layer.add_module("residual", Residual(channels, norm_of, act))
        layers[f"layer{number}"] = layer
    # What is left of the image: a plain max-pool over all of it, which every tool can trace.
    layers["maxpool"] = nn.MaxPool2d((shape[1] // 8, shape[2] // 8))
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(channels, classes)
    return nn.Sequential(layers)
