"""Find the layers an attack reads from, by watching a model run: names never matter. Read what
their gradients added to an update."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import decay, minibatches
from leakgauge.types import Observation

REMEDY = 'Otherwise add "labels" to threat.grants and set labels = "known" on the attack'


@dataclass(frozen=True)
class Linear:
    """A linear layer by the names that its parameters have in an update: None where an update tells
    nothing of one, since there is none, or it is frozen, or (of a last layer) shared."""

    weight: str | None
    bias: str | None
    module: str


def names_sent(model: nn.Module) -> dict[int, str]:
    """The name in an update of every trained parameter, by the parameter's id: one that several
    layers share has one name, a frozen one has none."""
    return {id(p): name for name, p in model.named_parameters() if p.requires_grad}


def shared(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that several layers hold: an update has the sum over them."""
    held = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return frozenset(name for name, p in model.named_parameters() if held[id(p)] > 1)


def _watch(
    model: nn.Module, shape: tuple[int, ...]
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


def _named(model: nn.Module, name: str) -> Linear:
    sent, module = names_sent(model), model.get_submodule(name)
    return Linear(sent.get(id(module.weight)), sent.get(id(module.bias)), name)


def last_linear(model: nn.Module, shape: tuple[int, ...]) -> Linear:
    """The linear layer whose output is the model's output, with those of its parameters whose
    gradient is this layer's alone."""
    runs, _, output = _watch(model, shape)
    names = [name for name, _, _, _ in runs]
    for name, _, _, result in reversed(runs):
        if torch.equal(result, output):
            layer, several = _named(model, name), shared(model)
            weight, bias = (None if key in several else key for key in (layer.weight, layer.bias))
            if names.count(name) == 1 and (weight or bias):
                return Linear(weight, bias, name)
            raise NotApplicable(
                f"labels are read from the gradient of the last layer, but {name!r} is frozen or "
                f"shared with other layers. {REMEDY}"
            )
    raise NotApplicable(
        "labels are read from the gradient of a linear last layer, but no nn.Linear produces this "
        f"model's output. End the model in nn.Linear (softmax belongs to the loss). {REMEDY}"
    )


def first_linear(model: nn.Module, shape: tuple[int, ...]) -> Linear:
    """A linear layer with bias that is fed the image itself, pixel by pixel."""
    runs, probe, _ = _watch(model, shape)
    for name, _, entered, _ in runs:
        layer = _named(model, name)
        if torch.equal(entered, probe.flatten(1)) and layer.weight and layer.bias:
            return layer
    raise NotApplicable(
        "the analytic attack reads the input of a linear layer with bias that is fed the image "
        "itself; this model has none (its first layer is a convolution, lacks a bias or is frozen)"
    )


def gradient_sum(seen: Observation, name: str, least: torch.dtype = torch.float64) -> Tensor:
    """The sum of the gradients behind the update of one parameter, up to a factor, computed in
    `least` or better: what weight decay of SGD took away is known, and momentum only weighs. An
    update by another optimiser is rescaled entry by entry: it is left as it is."""
    if seen.training is None or seen.records is None:
        raise Withheld("sums of gradients need 'training' and 'records' in the observation")
    steps = len(minibatches(seen.records, seen.training))
    shrunk = decay(seen.training, steps) if seen.training.optimiser == "sgd" else 0.0
    dtype = torch.promote_types(seen.update[name].dtype, least)
    weight = seen.model.get_parameter(name).detach()
    return seen.update[name].to(dtype) - shrunk * weight.to(dtype)
