"""Freeze the kinks of a network: record which side each ReLU took, replay it in later passes.

A finite difference across a ReLU that flips measures the jump of a step function, not a derivative.
Inside `Gate.record()` every piecewise-linear operation runs as usual and its choices are kept;
inside `Gate.replay()` the same choices are made again, whatever the values, so that the network is
a smooth function of its weights there. Both the module and the functional forms are caught, in
place or not.

What is kept is a tensor that autograd keeps anyway (a pool keeps its indices): it costs no memory,
and code that overwrites it is refused by autograd itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Each makes on x the choices of `kept`, the operation's input or output in the first pass.


def _relu(x: Tensor, kept: Tensor) -> Tensor:
    # x where kept > 0, else 0, without the memory of a mask.
    y: Tensor = torch.ops.aten.threshold_backward(x, kept, 0)
    return y


def _leaky_relu(x: Tensor, kept: Tensor, negative_slope: float = 0.01) -> Tensor:
    y: Tensor = torch.ops.aten.leaky_relu_backward(x, kept, negative_slope, False)
    return y


def _hardtanh(x: Tensor, kept: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    inside = (kept > min_val) & (kept < max_val)
    return torch.where(inside, x, kept.clamp(min_val, max_val))


def _max_pool2d(x: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


KINKS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _relu),
    F.relu6: partial(_hardtanh, min_val=0.0, max_val=6.0),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky_relu),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool2d),
}


class Gate(TorchFunctionMode):
    """The choices of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        # What was kept, and whether x was overwritten.
        self._choices: list[tuple[Tensor, bool]] = []
        self._at: int | None = None  # position while replaying, None while recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        redo = KINKS.get(func)
        if redo is None:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if self._at is None:
            if redo is _max_pool2d:
                y, kept = F.max_pool2d(*args, **kwargs | {"return_indices": True})
            else:
                y = func(*args, **kwargs)
                kept = y if y is x or redo is _relu else x  # what autograd keeps for backward
            self._choices.append((kept.detach(), y is x))
            return y
        kept, in_place = self._choices[self._at]
        self._at += 1
        kept = kept.to(x.dtype) if kept.is_floating_point() else kept  # replayed in double, too
        options = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
        y = redo(x, kept, *args[1:], **options)
        return x.copy_(y) if in_place else y

    def record(self) -> Self:
        self._choices, self._at = [], None
        return self

    def replay(self) -> Self:
        self._at = 0
        return self
