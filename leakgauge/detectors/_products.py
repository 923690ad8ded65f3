"""Where weights meet data: every product of a trained weight with what depends on the records,
whatever the class of the layer that makes it.

PyTorch is asked for each function call of the forward pass. What comes from weights, buffers and
constants alone is *own*; anything else stems from the records. A call in which both meet is a
product (linear, matrix product, convolution, two-operand einsum), a batch norm, or something that
this file cannot take apart: its weights are then not covered, and the probe says so. Code that
PyTorch does not show call by call (scripted or compiled modules, fused attention) is not covered
either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass
class Run:
    """One product: what entered it, what left it, and the loss's gradient by the latter.

    `units` is the dimension of `left` that counts units or filters. `options` are the stride,
    padding, dilation and groups of a convolution. A shift is a product to which a weight per unit
    is added afterwards, and a batch norm one that is normalised: both are kept for what leaves
    them, because that is where units are on or off.
    """

    name: str
    kind: Literal["linear", "convolution", "other", "shift", "norm"]
    entered: Tensor
    left: Tensor
    weight: Tensor
    bias: Tensor | None
    units: int
    options: tuple[Any, ...] = ()
    gradient: Tensor | None = None

    @property
    def layer(self) -> str:
        return self.name.removesuffix("weight").removesuffix(".") or self.name

    def rows(self, value: Tensor) -> Tensor:
        """(records and tokens, units) of something shaped as `left`."""
        moved = value.movedim(self.units, -1)
        return moved.reshape(-1, moved.shape[-1])

    def weights(self) -> Tensor:
        """The weight as rows, one per unit; only of linear layers and convolutions."""
        return self.weight.detach().flatten(1)


class Watch(TorchFunctionMode):
    """Inside, every product is noted in `runs`; `leaves` are where the backward pass may end."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.runs: list[Run] = []
        self.leaves: list[Tensor] = []
        self.covered: set[str] = set()
        self.strange: dict[str, str] = {}  # weights, and the function that took them
        # Kept alive: an id is only worth something as long as its tensor is.
        self._own: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self.trained: dict[str, Tensor] = {}
        for name, value in model.named_parameters():
            if value.requires_grad:
                self.trained[name] = value
            self._own[id(value)] = (value, frozenset([name] if value.requires_grad else []))
        for buffer in model.buffers():
            self._own[id(buffer)] = (buffer, frozenset())

    def uncovered(self) -> dict[str, str]:
        """Trained weights of two dimensions or more that no noted product took, and why."""
        return {
            name: self.strange.get(name, "the forward pass does not show how it is used")
            for name, value in self.trained.items()
            if value.dim() > 1 and value.numel() and name not in self.covered
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        own = [self._own[id(t)] for t in tensors if id(t) in self._own]
        names = frozenset().union(*(n for _, n in own))
        if len(own) == len(tensors):
            for one in _tensors((out,)):
                self._own[id(one)] = (one, names | self._own.get(id(one), (one, names))[1])
            return out
        for one in _tensors((out, *args[:1])):  # constants that records were written into
            if id(one) in self._own and not isinstance(one, nn.Parameter) and _writes(func):
                del self._own[id(one)]
        return self._met(func, (args, kwargs), out, names) if names else out

    def _met(self, func: Callable[..., Any], call: Call, out: Any, names: frozenset[str]) -> Any:
        word = getattr(func, "__name__", str(func)).strip("_")
        found = None
        if isinstance(out, Tensor) and out.is_floating_point():
            found = _product(func, word, call, out, lambda t: id(t) in self._own)
        if found is None:
            if word in ADDED:
                self.covered |= names - self.strange.keys()
            else:
                self.covered -= names
                self.strange |= dict.fromkeys(names, f"it is used by {word}")
            return out
        kind, entered, weight, bias, units, options = found
        source = self._own.get(id(weight), (weight, frozenset()))[1] or names
        name = max(source, key=lambda n: self.trained[n].dim())
        if kind != "norm":
            self.covered |= source - self.strange.keys()
        if not out.requires_grad:  # nothing before it does: the backward pass ends here
            self.leaves.append(out.requires_grad_())
            out = out.clone()  # an activation in place may not change a leaf
        seen = Run(
            name, kind, entered.detach(), out.detach(), weight.detach(), bias, units, options
        )
        self.runs.append(seen)

        def keep(gradient: Tensor) -> None:
            seen.gradient = gradient.detach()

        if out.requires_grad:
            out.register_hook(keep)
        return out


ADDED = {"add", "radd", "iadd", "cat", "concat", "stack", "layer_norm", "group_norm", "sub"}
"""Functions that only add a weight, or scale each feature by one number of its own."""
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
PRODUCTS = {"matmul", "rmatmul", "mm", "bmm", "imatmul"}


def _product(
    func: Callable[..., Any], word: str, call: Call, out: Tensor, own: Callable[[Tensor], bool]
) -> tuple[Any, ...] | None:
    """(kind, what entered, weight, bias, dimension of the units, options), or None."""

    def given(place: int, name: str, default: Any = None) -> Any:
        args, kwargs = call
        return args[place] if len(args) > place else kwargs.get(name, default)

    if func is F.linear:
        data, weight, bias = given(0, "input"), given(1, "weight"), given(2, "bias")
        if own(weight) and not own(data):
            return "linear", data, weight, bias, -1, ()
    elif word in CONVOLUTIONS:
        data, weight, bias = given(0, "input"), given(1, "weight"), given(2, "bias")
        if own(weight) and not own(data) and data.dim() == weight.dim():
            flat = weight.dim() - 2
            options = (
                _each(given(3, "stride", 1), flat), given(4, "padding", 0),
                _each(given(5, "dilation", 1), flat), given(6, "groups", 1),
            )  # fmt: skip
            return "convolution", data, weight, bias, 1, options
    elif word.startswith("conv_transpose"):
        data, weight, bias = given(0, "input"), given(1, "weight"), given(2, "bias")
        if own(weight) and not own(data) and data.dim() == weight.dim():
            return "other", data, weight, bias, 1, ()
    elif word in PRODUCTS or word in ("addmm", "baddbmm"):
        first = 0 if word in PRODUCTS else 1
        left, right = given(first, "input" if not first else "mat1"), given(first + 1, "other")
        right = call[1].get("mat2") if right is None else right
        bias = given(0, "input") if first else None
        if word == "rmatmul":
            left, right = right, left
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return None
        if own(right) and not own(left):
            return "other", left, right, bias, -1, ()
        if own(left) and not own(right):
            return "other", right, left, bias, max(-2, -out.dim()), ()
    elif word == "einsum":
        return _einsum(call[0], own)
    elif word in ("add", "radd", "iadd", "add_", "sub"):
        one, two = given(0, "input"), given(1, "other")
        if isinstance(one, Tensor) and isinstance(two, Tensor) and own(one) != own(two):
            data, weight = (two, one) if own(one) else (one, two)
            if weight.numel() == weight.shape[-1:].numel() == out.shape[-1]:
                return "shift", data, weight, None, -1, ()
    elif word == "batch_norm":
        data, weight = given(0, "input"), given(3, "weight")
        if isinstance(weight, Tensor) and not own(data):
            return "norm", data, weight, given(4, "bias"), 1, ()
    return None


def _einsum(args: Sequence[Any], own: Callable[[Tensor], bool]) -> tuple[Any, ...] | None:
    """Two operands, one of them a weight, with one label that only the weight has."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    labels = inputs.split(",")
    if len(operands) != 2 or own(operands[0]) == own(operands[1]):
        return None
    mine = 0 if own(operands[0]) else 1
    units = [k for k in result if k in labels[mine] and k not in labels[1 - mine]]
    if len(units) != 1:
        return None
    return "other", operands[1 - mine], operands[mine], None, result.index(units[0]), ()


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count // len(value))


def _writes(func: Callable[..., Any]) -> bool:
    word = getattr(func, "__name__", "")
    return word == "__setitem__" or (word.endswith("_") and not word.endswith("__"))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
