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
from leakgauge.fl.model import refilled
from leakgauge.types import LocalTraining, Observation, Target

REMEDY = 'Otherwise add "labels" to threat.grants and set labels = "known" on the attack'


@dataclass(frozen=True)
class Linear:
    """A linear layer by the names that its parameters have in an update: None where an update tells
    nothing of one, since there is none, or it is frozen, or (of a last layer) shared."""

    weight: str | None
    bias: str | None
    module: str


def shared(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that several layers hold: an update has the sum over them."""
    held = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return frozenset(name for name, p in model.named_parameters() if held[id(p)] > 1)


@dataclass(frozen=True)
class Run:
    """One run of a layer: what entered it, and what left it."""

    name: str
    module: nn.Module
    entered: Tensor
    left: Tensor


def watch(model: nn.Module, inputs: Tensor, *kinds: type[nn.Module]) -> tuple[list[Run], Tensor]:
    """Every run of a layer of these kinds, in order, and the model's output. The model keeps the
    hooks: hand in a copy."""
    names = {id(module): name for name, module in model.named_modules()}
    runs: list[Run] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], left: Tensor) -> None:
        runs.append(Run(names[id(module)], module, args[0], left))

    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note)
    with torch.no_grad():
        output = model(inputs)
    return runs, output


def _probed(model: nn.Module, shape: tuple[int, ...]) -> tuple[list[Run], Tensor, Tensor]:
    """Every run of a linear layer, the model's output, and the probe that entered the model. What
    feeds what does not depend on the weights: any serve where they have no values."""
    rng = torch.Generator().manual_seed(0)
    probe = torch.rand(2, *shape, generator=rng)
    bare = any(value.is_meta for value in model.parameters())
    model = (refilled(model, rng) if bare else copy.deepcopy(model)).eval()
    reference = next(model.parameters())
    probe = probe.to(reference.device, reference.dtype)
    return *watch(model, probe, nn.Linear), probe


def named(model: nn.Module, name: str) -> Linear:
    """A layer by its own name. A parameter that several layers share has one name in an update, a
    frozen one has none."""
    sent = {id(p): key for key, p in model.named_parameters() if p.requires_grad}
    module = model.get_submodule(name)
    return Linear(sent.get(id(module.weight)), sent.get(id(module.bias)), name)


def last_linear(model: nn.Module, shape: tuple[int, ...]) -> Linear:
    """The linear layer whose output is the model's output, with those of its parameters whose
    gradient is this layer's alone."""
    runs, output, _ = _probed(model, shape)
    names = [run.name for run in runs]
    for run in reversed(runs):
        if torch.equal(run.left, output):
            name, several = run.name, shared(model)
            layer = named(model, name)
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
    runs, _, probe = _probed(model, shape)
    for run in runs:
        layer = named(model, run.name)
        if torch.equal(run.entered, probe.flatten(1)) and layer.weight and layer.bias:
            return layer
    raise NotApplicable(
        "the analytic attack reads the input of a linear layer with bias that is fed the image "
        "itself; this model has none (its first layer is a convolution, lacks a bias or is frozen)"
    )


def told(seen: Observation, who: str, *, weights: bool = True) -> tuple[LocalTraining, int]:
    """The local training and the number of records, which `who` cannot do without, and usually not
    without the `weights` either."""
    if seen.training is None or seen.records is None:
        raise Withheld(f"{who} needs 'training' and 'records' in the observation")
    if weights:
        weighed(seen, who)
    return seen.training, seen.records


def weighed(seen: Observation, who: str) -> None:
    """Refuse to work on a model whose weights are withheld."""
    if seen.weights is None:
        raise Withheld(f"{who} needs 'weights': the observed model has layers and no values")


def rehearsing(target: Target, who: str) -> LocalTraining:
    """The local training that `who` plays before the round, on the weights of the model."""
    if target.training is None or target.weights is None:
        raise Withheld(f"{who} needs 'training' and 'weights' to prepare")
    return target.training


def refuse_rescaled(training: LocalTraining, who: str) -> None:
    """Refuse an update that is not a sum of gradients."""
    if training.optimiser != "sgd":
        raise NotApplicable(
            f"{who} divides sums of gradients, and an update by {training.optimiser!r} is rescaled "
            "entry by entry"
        )


def gradient_sum(seen: Observation, name: str, least: torch.dtype = torch.float64) -> Tensor:
    """The sum of the gradients behind the update of one parameter, up to a factor, computed in
    `least` or better: what weight decay of SGD took away is known, and momentum only weighs. An
    update by another optimiser is rescaled entry by entry: it is left as it is."""
    training, records = told(seen, "a sum of gradients", weights=False)
    steps = len(minibatches(records, training))
    shrunk = decay(training, steps) if training.optimiser == "sgd" else 0.0
    dtype = torch.promote_types(seen.update[name].dtype, least)
    if not shrunk:
        return seen.update[name].to(dtype, copy=True)
    if seen.weights is None:
        raise NotApplicable(
            "weight decay took a share of the weights away, which this attacker does not hold"
        )
    weight = seen.model.get_parameter(name).detach()
    return seen.update[name].to(dtype) - shrunk * weight.to(dtype)
