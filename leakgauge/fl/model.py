"""What a user's function made, as a model that an audit can copy, train and differentiate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.records import AS_THEY_ARE, Classes, Scale, record_of
from leakgauge.types import Batch, Setting


def plain(made: object, what: str) -> nn.Module:
    """A copy of the model, for a function may return the same object every time; of a compiled
    or parallel one, a copy of the module behind it. `what` names the model in errors."""
    if not isinstance(made, nn.Module):
        raise InputError(f"{what} gave a {type(made).__name__}, expected an nn.Module.")
    _refuse_scripted(made, what)
    try:
        model = _unwrapped(copy.deepcopy(made))
    except Exception as error:  # whatever a copy meets in the user's code
        raise InputError(
            f"{what} gave a model that copy.deepcopy cannot copy ({type(error).__name__}: "
            f"{error}). Every round trains a copy: keep no computed tensors in the model's "
            "attributes (torch.nn.utils.parametrizations.weight_norm instead of weight_norm)."
        ) from error
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        wrong = isinstance(value, nn.Parameter) and value.dtype != torch.float32
        if wrong or value.device.type != "cpu":
            raise InputError(
                f"{what} gave a model whose {name!r} is {value.dtype} on {value.device}. Expected "
                "torch.float32 on the CPU: end your function with model.float().cpu()."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{what} gave a model with no trainable parameter: there is no update. Set "
            "requires_grad = True on what your clients train."
        )
    return model


def _refuse_scripted(model: nn.Module, what: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            at = f", at {name!r}" if name else ""
            raise InputError(
                f"{what} gave a scripted model (torch.jit{at}), whose "
                "layers and modes cannot be told. Expected the plain nn.Module that it was made "
                "from: leave torch.jit.script or torch.jit.trace out for the audit."
            )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module behind torch.compile or DataParallel, here and in its parts, which are changed."""
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = getattr(model, "module" if parallel else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    for name, child in model.named_children():
        if (bare := _unwrapped(child)) is not child:
            model.register_module(name, bare)
    return model


def setting(
    model: nn.Module,
    records: Batch | Tensor | tuple[int, ...],
    classes: int,
    scale: Scale = AS_THEY_ARE,
) -> Setting:
    """The model with records of this kind: those of a batch, or floats of a shape."""
    inputs = records.inputs if isinstance(records, Batch) else records
    if isinstance(inputs, tuple):
        inputs = torch.empty(0, *inputs)
    return Setting(model, record_of(inputs, scale), Classes(classes))


def stripped(model: nn.Module) -> nn.Module:
    """The architecture alone: a copy on the device "meta", with shapes and no values. Layers that
    share a tensor share it still."""

    def empty(value: Tensor) -> Tensor:
        return torch.empty_like(value, device="meta", requires_grad=False)

    return _replaced(model, empty)


def refilled(model: nn.Module, rng: torch.Generator) -> nn.Module:
    """A copy that runs, with values drawn anew: all that the architecture tells."""

    def drawn(value: Tensor) -> Tensor:
        made = torch.zeros(value.shape, dtype=value.dtype)
        if not value.is_floating_point():
            return made
        if value.dim() < 2:  # a scale or a variance is positive
            return made.uniform_(0.5, 1.5, generator=rng)
        return made.normal_(std=value[0].numel() ** -0.5, generator=rng)

    return _replaced(model, drawn)


def _replaced(model: nn.Module, by: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model with every tensor that its modules hold made anew, once each."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in _tensors(vars(module)):
            if id(value) not in memo:
                new = by(value)
                if isinstance(value, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=value.requires_grad)
                memo[id(value)] = new
    return copy.deepcopy(model, memo)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
