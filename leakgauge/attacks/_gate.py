"""Freeze the kinks of a network: record which side each ReLU took, replay it in later passes.

A finite difference across a ReLU that flips measures the jump of a step function, not a derivative.
Inside `Gate.record()` every piecewise-linear operation runs as usual and its choices are kept;
inside `Gate.replay()` the same choices are made again, whatever the values, so that the network is
a smooth function of its weights there. Both the module and the functional forms are caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _relu(x: Tensor, tape: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    if tape is None:
        y = torch.relu(x)
        return y, y.detach()
    # x where the recorded output was positive, else 0: needs no mask beside the output itself.
    return torch.ops.aten.threshold_backward(x, tape, 0), tape


def _band(x: Tensor, tape: Tensor | None, low: float, high: float) -> tuple[Tensor, Tensor]:
    if tape is None:
        y = x.clamp(low, high)
        return y, y.detach()
    return torch.where((tape > low) & (tape < high), x, tape), tape


def _relu6(x: Tensor, tape: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _band(x, tape, 0.0, 6.0)


def _hardtanh(
    x: Tensor, tape: Tensor | None, min_val: float = -1.0, max_val: float = 1.0, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return _band(x, tape, min_val, max_val)


def _leaky_relu(
    x: Tensor, tape: Tensor | None, negative_slope: float = 0.01, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    if tape is None:
        tape = torch.where(x.detach() > 0, 1.0, negative_slope).to(x.dtype)
    return x * tape, tape


def _max_pool2d(
    x: Tensor, tape: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    if tape is None:
        kwargs.pop("return_indices", None)
        y, tape = F.max_pool2d(x, *args, return_indices=True, **kwargs)
        return y, tape
    return x.flatten(-2).gather(-1, tape.flatten(-2)).view_as(tape), tape


_Kink = Callable[..., tuple[Tensor, Tensor]]

KINKS: dict[Any, _Kink] = {
    **dict.fromkeys(
        (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _relu
    ),
    F.relu6: _relu6,
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky_relu),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool2d),
}


class Gate(TorchFunctionMode):
    """The choices of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[Tensor] = []
        self._at: int | None = None  # position while replaying, None while recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kink = KINKS.get(func)
        if kink is None:
            return func(*args, **(kwargs or {}))
        rest = {k: v for k, v in (kwargs or {}).items() if k not in ("input", "inplace")}
        x = args[0] if args else (kwargs or {})["input"]
        if self._at is None:
            y, tape = kink(x, None, *args[1:], **rest)
            self._tape.append(tape)
            return y
        y, _ = kink(x, self._tape[self._at], *args[1:], **rest)
        self._at += 1
        return y

    @contextmanager
    def record(self) -> Iterator[None]:
        self._tape, self._at = [], None
        with self:
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        self._at = 0
        with self:
            yield
