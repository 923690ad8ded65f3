"""Small networks: perceptron, two LeNets and two plain convolutional networks.

`mlp`        one linear layer a hidden width, then the head: `fc1`, `fc2`, … With no hidden width it
             is softmax regression.
`lenet-zhu`  Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019: three 5 × 5 convolutions of
             12 channels, stride 2, 2, 1, padding 2, sigmoid, one linear layer. Parameters are
             called as in its code: `body.{0,2,4}`, `fc.0`. The paper attacks it with the
             initialisation "wide-uniform".
`lenet-5`    LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document
             Recognition, 1998: 6 and 16 channels, 120 and 84 units, tanh, average pool.
             Differs from the paper: the pools have no weights, all maps are connected, the head is
             linear. `padding=2` turns MNIST's 28 × 28 into the paper's 32 × 32; `padding=0` is for
             images that already have it. "relu" with `pool="max"` is the later habit.
`cnn`        two 3 × 3 convolutions of 16 channels that keep the size of the image, a hidden linear
             layer of 256 units and the head: most of its weights are in the hidden layer. Of
             no paper: a small network of the kind that tutorials on federated learning use.
`convnet`    the convolutional network of Geiping, Bauermeister, Dröge, Moeller, Inverting
             Gradients, NeurIPS 2020: eight 3 × 3 convolutions of 1, 2, 2, 4, 4, 4, 4, 4 times 64
             channels, 3 × 3 max-pools after the sixth and the eighth, one linear layer.
             `norm="none"` leaves the normalisation out and gives the convolutions a bias.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import nn

from leakgauge.config import choose
from leakgauge.errors import PlanError
from leakgauge.models._layers import ACTIVATIONS, NORMS, check_sides, scaled, whole

POOLS: dict[str, Callable[[int], nn.Module]] = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


def mlp(
    shape: tuple[int, int, int],
    classes: int,
    *,
    hidden: Sequence[int] = (256,),
    activation: str = "relu",
) -> nn.Module:
    """Fully connected layers of any widths."""
    if not isinstance(hidden, list | tuple):
        raise PlanError(f"hidden must be a list of widths such as [256, 64], got {hidden!r}.")
    act = choose(ACTIVATIONS, activation, "activation")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    inputs = math.prod(shape)
    for number, width in enumerate(hidden, start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, whole("hidden", width))
        layers[f"act{number}"] = act()
        inputs = width
    layers[f"fc{len(hidden) + 1}"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


def lenet_zhu(
    shape: tuple[int, int, int], classes: int, *, activation: str = "sigmoid"
) -> nn.Module:
    """The small convolutional network of the DLG paper."""
    channels, height, width = shape
    act = choose(ACTIVATIONS, activation, "activation")
    body = nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2),
        act(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        act(),
        nn.Conv2d(12, 12, 5, stride=1, padding=2),
        act(),
    )
    features = 12 * math.ceil(height / 4) * math.ceil(width / 4)
    fc = nn.Sequential(nn.Linear(features, classes))
    return nn.Sequential(OrderedDict(body=body, flatten=nn.Flatten(), fc=fc))


def lenet_5(
    shape: tuple[int, int, int],
    classes: int,
    *,
    activation: str = "tanh",
    pool: str = "average",
    padding: int = 2,
) -> nn.Module:
    """LeNet-5 (LeCun 1998)."""
    channels, height, width = shape
    act = choose(ACTIVATIONS, activation, "activation")
    pool_of = choose(POOLS, pool, "pool")
    check_sides("lenet-5", shape, 16 - 2 * whole("padding", padding, least=0))

    def left(side: int) -> int:  # of a side after conv, pool, conv, pool
        return ((side + 2 * padding - 4) // 2 - 4) // 2

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 6, 5, padding=padding),
        act1=act(),
        pool1=pool_of(2),
        conv2=nn.Conv2d(6, 16, 5),
        act2=act(),
        pool2=pool_of(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * left(height) * left(width), 120),
        act3=act(),
        fc2=nn.Linear(120, 84),
        act4=act(),
        fc3=nn.Linear(84, classes),
    )
    return nn.Sequential(layers)


def cnn(
    shape: tuple[int, int, int],
    classes: int,
    *,
    channels: int = 16,
    hidden: int = 256,
    activation: str = "relu",
) -> nn.Module:
    """Two convolutions and two fully connected layers."""
    inputs, height, width = shape
    act = choose(ACTIVATIONS, activation, "activation")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(inputs, whole("channels", channels), 3, padding=1),
        act1=act(),
        conv2=nn.Conv2d(channels, channels, 3, padding=1),
        act2=act(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(channels * height * width, whole("hidden", hidden)),
        act3=act(),
        fc2=nn.Linear(hidden, classes),
    )
    return nn.Sequential(layers)


def convnet(
    shape: tuple[int, int, int],
    classes: int,
    *,
    width: float = 1.0,
    norm: str = "batch",
    activation: str = "relu",
) -> nn.Module:
    """The ConvNet of the Inverting Gradients paper."""
    check_sides("convnet", shape, 9)
    inputs, image_height, image_width = shape
    norm_of = choose({**NORMS, "none": None}, norm, "norm")
    act = choose(ACTIVATIONS, activation, "activation")
    base = scaled(64, width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, times in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
        outputs = times * base
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm_of is None)
        if norm_of is not None:
            layers[f"bn{number}"] = norm_of(outputs)
        layers[f"act{number}"] = act()
        if number in (5, 7):
            layers[f"pool{number}"] = nn.MaxPool2d(3)
        inputs = outputs
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(inputs * (image_height // 9) * (image_width // 9), classes)
    return nn.Sequential(layers)
