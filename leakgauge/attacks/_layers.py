"""Find the layers an attack reads from, by watching a model run: names never matter."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakgauge.errors import NotApplicable


@dataclass(frozen=True)
class Linear:
    """A linear layer by the names of its parameters."""

    weight: str
    bias: str | None
    module: str


def _watch(
    model: nn.Module, shape: tuple[int, int, int]
) -> tuple[list[tuple[str, nn.Linear, Tensor, Tensor]], Tensor, Tensor]:
    """Every run of a linear layer (name, module, input, output), the probe, the model's output."""
    model = copy.deepcopy(model).eval()
    names = {id(module): name for name, module in model.named_modules()}
    runs: list[tuple[str, nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        runs.append((names[id(module)], module, args[0], output))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    probe = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    reference = next(model.parameters())
    probe = probe.to(reference.device, reference.dtype)
    with torch.no_grad():
        output = model(probe)
    return runs, probe, output


def _named(name: str, module: nn.Linear) -> Linear:
    prefix = f"{name}." if name else ""
    return Linear(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None, name)


def last_linear(model: nn.Module, shape: tuple[int, int, int]) -> Linear:
    """The linear layer whose output is the model's output."""
    runs, _, output = _watch(model, shape)
    for name, module, _, result in reversed(runs):
        if _trained(module) and torch.equal(result, output):
            return _named(name, module)
    raise NotApplicable(
        "labels are read from the gradient of a linear last layer, but no nn.Linear that is "
        "trained produces this model's output. End the model in nn.Linear (softmax belongs to the "
        'loss), or add "labels" to threat.grants and set labels = "known" on the attack'
    )


def first_linear(model: nn.Module, shape: tuple[int, int, int]) -> Linear:
    """A linear layer with bias that is fed the image itself, pixel by pixel."""
    runs, probe, _ = _watch(model, shape)
    for name, module, entered, _ in runs:
        fed = torch.equal(entered, probe.flatten(1))
        if fed and module.bias is not None and _trained(module):
            return _named(name, module)
    raise NotApplicable(
        "the analytic attack reads the input of a linear layer with bias that is fed the image "
        "itself; this model has none (its first layer is a convolution, lacks a bias or is frozen)"
    )


def _trained(module: nn.Linear) -> bool:
    """Whether an update holds this layer at all: frozen parameters are not sent."""
    return all(p.requires_grad for p in module.parameters())
