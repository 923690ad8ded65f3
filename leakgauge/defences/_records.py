"""What each record adds to the gradient of a local step: what DP-SGD clips."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.errors import InputError
from leakgauge.fl.forward import additions
from leakgauge.fl.local import outputs
from leakgauge.types import Local, Named

AT_ONCE = 16  # records whose gradients are held in memory together


def per_record(local: Local, names: list[str], step: int, defence: str) -> Iterator[Named]:
    """The gradients of the step's records, tensors (records, …), a few records at a time. Each is
    that of the record alone: no other record of the batch is in it."""
    refuse_mixing(local.setting.model, defence)
    weights = {name: local.values[name] for name in names}
    others = {name: value for name, value in local.values.items() if name not in weights}

    def objective(weights: Named, entering: Tensor, label: Tensor) -> Tensor:
        values = weights | others
        with additions() as more:
            out = outputs(local.setting.model, values, entering[None], local.training, step)
        return sum(more, start=local.setting.task.loss(out, label[None]))

    # One draw for all records of a batch: the masks of dropout are then those of the batch.
    mapped = torch.func.vmap(torch.func.grad(objective), (None, 0, 0), randomness="different")
    entering = local.setting.record.entering(local.batch.inputs).detach()
    size = len(entering) if local.training.dropout == "replayed" else AT_ONCE
    parts = zip(torch.split(entering, size), torch.split(local.batch.labels, size), strict=True)
    for inputs, labels in parts:
        try:
            found: Named = mapped(weights, inputs, labels)
        except (RuntimeError, ValueError) as error:  # the model is the user's
            raise InputError(
                f"{defence}: the gradients of single records failed ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}). Expected a forward that works on one record, "
                "without .item() and without a branch that depends on values."
            ) from error
        yield {name: value.detach() for name, value in found.items()}


def lengths(gradients: Named) -> Tensor:
    """The Euclidean norm of each record's gradient over all tensors, (records,)."""
    squares = [value.flatten(1).double().square().sum(1) for value in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def clipped_sum(gradients: Named, norm: float) -> Named:
    """Σ_n g_n · min(1, norm / ‖g_n‖)"""
    factors = (norm / lengths(gradients).clamp(min=1e-30)).clamp(max=1.0)
    return {
        name: torch.tensordot(factors.to(value), value, dims=1) for name, value in gradients.items()
    }


def refuse_mixing(model: nn.Module, defence: str) -> None:
    """Batch norm by the batch mixes its records: none of them has a gradient of its own."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise InputError(
                f"{defence} clips the gradient of each record, and {name!r}, a batch norm in train "
                'mode, mixes the records of a batch: set batch_norm = "eval" in '
                "[federation.training], or use a model with group norm"
            )
