"""What batch norm sees of a batch: written once, for the wall that hands it over and the attacker
who compares candidates with it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.fl.local import _dropout
from leakgauge.types import LocalTraining, Setting, Statistics


def batch_statistics(setting: Setting, inputs: Tensor, training: LocalTraining) -> Statistics:
    """Mean and variance by channel of what enters each batch-norm layer of a `ready` model, keyed
    by the layer's name. Differentiable by the inputs. In train mode the model's running statistics
    move, as always: hand in a copy. Of a layer that runs twice the last run counts."""
    found: Statistics = {}
    hooks = []
    for name, module in setting.model.named_modules():
        if isinstance(module, _BatchNorm):

            def note(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                channels = args[0].transpose(0, 1).flatten(1)
                found[name] = channels.mean(1), channels.var(1, correction=0)

            hooks.append(module.register_forward_pre_hook(note))
    try:
        with _dropout(training, 0, inputs.device):  # the masks of the first local step
            setting.model(setting.record.entering(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def running_statistics(model: nn.Module) -> Statistics:
    """The running mean and variance that the model itself carries, of the layers that keep them."""
    return {
        name: (module.running_mean.detach(), module.running_var.detach())
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and module.running_var is not None
    }
