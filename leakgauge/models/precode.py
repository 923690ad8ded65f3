"""PRECODE: a variational bottleneck before the last layer (D. Scheliga, P. Mäder, M. Seeland,
"PRECODE – A Generic Model Extension to Prevent Deep Gradient Leakage", WACV 2022,
https://arxiv.org/abs/2108.04725, §3).

    (μ, t) = E·h,   s = softplus(t),   z = μ + s·e,   e ~ N(0, I),   h ← D·z
    L ← L + β · KL(N(μ, s²) ‖ N(0, I)),   in bits, the mean over records

h is what enters the last linear layer. e is the client's own, drawn anew in every local step; who
replays the training holds one draw fixed (fl/forward.py).

Differs from the paper: in no part that we know of; where the text is open, as in the authors' code.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.fl.forward import add_to_loss, drawn
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, count, option

PAPER = Paper(
    "scheliga2022",
    "Scheliga, Daniel and Mäder, Patrick and Seeland, Marco",
    "{PRECODE} -- A Generic Model Extension to Prevent Deep Gradient Leakage",
    2022,
    "IEEE/CVF Winter Conference on Applications of Computer Vision",
    "https://arxiv.org/abs/2108.04725",
    fields=(("pages", "1849--1858"),),
)


@dataclass(frozen=True)
class Precode:
    """The bottleneck's size and the weight β of its divergence."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    units: int = option(256, count(1_000_000))
    beta: float = option(1e-3, FROM_0)


class Bottleneck(nn.Module):
    """Encodes, draws and decodes."""

    def __init__(self, features: int, options: Precode) -> None:
        super().__init__()
        self.options = options
        self.encoder = nn.Linear(features, 2 * options.units)
        self.decoder = nn.Linear(options.units, features)

    def forward(self, h: Tensor) -> Tensor:
        mean, raw = self.encoder(h).chunk(2, dim=-1)
        std = F.softplus(raw)
        divergence = 0.5 * (mean.square() + std.square() - 1 - 2 * std.log()).sum(-1).mean()
        add_to_loss(self.options.beta * divergence / math.log(2))
        out: Tensor = self.decoder(mean + std * drawn(mean))
        return out


def inserted(model: nn.Module, options: Precode, shape: tuple[int, int, int]) -> nn.Module:
    """The model with a bottleneck before the last linear layer that its forward calls; in place but
    for a model that is such a layer itself."""
    called: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, *shape))
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mode in modes:
            layer.training = mode
    if not called:
        raise InputError("precode stands before a linear layer, and the model calls none")
    parent, _, own = called[-1].rpartition(".")
    last = model.get_submodule(called[-1])
    assert isinstance(last, nn.Linear)
    both = nn.Sequential(
        OrderedDict(precode=Bottleneck(last.in_features, options), head=last)
    )  # fmt: skip
    if not own:
        return both
    model.get_submodule(parent).register_module(own, both)
    return model
