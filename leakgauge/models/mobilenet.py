"""MobileNetV2: residual blocks, narrow at the joints and wide inside, where they are depthwise.

Sandler, Howard, Zhu, Zhmoginov, Chen, MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR
2018, Table 2. `stem="imagenet"` is torchvision's network with its names. `stem="cifar"` gives
stride 1 to the first convolution and to the stage of 24 channels, so that a 32 × 32 image ends as
4 × 4 and not as 1 × 1. The head has a dropout before its linear layer.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from leakgauge.config import choose
from leakgauge.errors import PlanError
from leakgauge.models._layers import STEMS, Activation, Norm, check_sides, scaled, styled

# expansion, channels, blocks, stride of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Expand 1 × 1, depthwise 3 × 3, project 1 × 1 without activation; skip where sizes agree."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, expansion: int, norm: Norm, act: Activation
    ) -> None:
        super().__init__()
        inner = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_unit(inputs, inner, 1, 1, 1, norm, act))
        layers.append(_unit(inner, inner, 3, stride, inner, norm, act))
        layers += [nn.Conv2d(inner, outputs, 1, bias=False), norm(outputs)]
        self.conv = nn.Sequential(*layers)
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.skip else out


def _unit(
    inputs: int, outputs: int, side: int, stride: int, groups: int, norm: Norm, act: Activation
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(conv, norm(outputs), act())


def mobilenet_v2(
    shape: tuple[int, int, int],
    classes: int,
    *,
    stem: str = "cifar",
    width: float = 1.0,
    norm: str = "batch",
    activation: str = "relu6",
    dropout: float = 0.2,
) -> nn.Module:
    """MobileNetV2, small and deep."""
    check_sides("mobilenet-v2", shape, 8)
    large = choose(STEMS, stem, "stem")
    norm_of, act = styled(norm, activation)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise PlanError(f"dropout must be a number from 0 to below 1, got {dropout!r}.")
    inputs = scaled(32, width)
    stack: list[nn.Module] = [_unit(shape[0], inputs, 3, 2 if large else 1, 1, norm_of, act)]
    for expansion, channels, blocks, stride in STAGES:
        outputs = scaled(channels, width)
        first = 1 if channels == 24 and not large else stride
        for number in range(blocks):
            step = first if number == 0 else 1
            stack.append(InvertedResidual(inputs, outputs, step, expansion, norm_of, act))
            inputs = outputs
    last = scaled(1280, max(1.0, width))  # the paper never narrows the last convolution
    stack.append(_unit(inputs, last, 1, 1, 1, norm_of, act))
    network: OrderedDict[str, nn.Module] = OrderedDict(
        features=nn.Sequential(*stack),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes)),
    )
    return nn.Sequential(network)
