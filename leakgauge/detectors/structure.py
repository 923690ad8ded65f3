"""Structure — is what arrived a set of weights for the agreed network, and nothing else?

The same keys and shapes as the client's own network, all numbers finite, every entry a plain dense
tensor in this machine's memory, no running variance of zero or less (but where the last accepted
model had it). Other kinds of number are taken if the client's own can hold what they say: half
precision, or a counter that was averaged and is whole still. Inserted layers (Robbing the Fed, LOKI
in their published form) end here. The check decides by exact types before it touches a value, so
that code hidden in an object that only looks like a tensor never runs.

Needs: the received state and the client's own network. Never raises, whatever arrived.
The score is the number of faults; the threshold is zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from leakgauge.types import Detection, Received


@dataclass(frozen=True)
class Structure:
    """Are these weights for the agreed network, nothing else?"""

    threshold: float = 0.0

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        own = received.fresh.state_dict()
        faults = _faults(received.state, own) or _variances(received)
        if faults:
            name, reason = faults[0]
            if len(faults) > 1:
                reason += f"; {len(faults) - 1} more entries are wrong"
        else:
            name, reason = None, f"all {len(own)} entries fit the agreed network"
            other = [n for n in own if received.state[n].dtype != own[n].dtype]
            if other:
                kind = str(received.state[other[0]].dtype).removeprefix("torch.")
                reason += f"; {len(other)} were converted (from {kind})"
        return (
            Detection("structure", float(len(faults)), self.threshold, "reject", reason, name),
        )  # fmt: skip


def _faults(state: object, own: Mapping[str, Any]) -> list[tuple[str | None, str]]:
    """(key, what is wrong with it), in the order of the client's own network."""
    if type(state) not in (dict, OrderedDict):
        return [(None, f"expected a dict of tensors, got an object of type {_kind(state)}")]
    assert isinstance(state, dict)
    strange = [key for key in state if type(key) is not str]
    if strange:  # it is not even looked up: its comparison may be code
        return [(None, f"a key is an object of type {_kind(strange[0])}, expected names")]
    faults: list[tuple[str | None, str]] = []
    for name, expected in own.items():
        if name not in state:
            faults.append((name, f"{name!r} is missing from the received model"))
            continue
        try:
            fault = _fault(state[name], expected)
        except Exception as error:  # fail closed: whatever cannot be read is not a weight
            fault = f"cannot be read ({_kind(error)})"
        if fault:
            faults.append((name, f"{name!r} {fault}"))
    faults += [
        (name, f"{name!r} is not part of the agreed network") for name in state if name not in own
    ]
    return faults or _ties(state, own)


def _fault(value: object, expected: object) -> str | None:
    if type(expected) not in (Tensor, nn.Parameter):
        return f"is of type {_kind(expected)} in the agreed network, which cannot be checked"
    if type(value) not in (Tensor, nn.Parameter):
        return f"is an object of type {_kind(value)}, expected a plain tensor"
    assert isinstance(value, Tensor)
    assert isinstance(expected, Tensor)
    if value.is_quantized:
        return f"is quantised ({value.dtype}), expected {expected.dtype}"
    if value.layout != torch.strided or value.is_nested:
        return f"is stored as {'nested' if value.is_nested else value.layout}, expected dense"
    if value.device.type != "cpu":
        return f"is on device {value.device}, expected weights in this machine's memory"
    if value.shape != expected.shape:
        return f"has shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    if not value.numel():
        return None
    if value.untyped_storage().nbytes() < sum(_span(value)) - value.untyped_storage().data_ptr():
        return "has no memory behind all of its values"
    if value.dtype != expected.dtype:
        if value.is_complex() or value.dtype == torch.bool or not _holds(expected.dtype, value):
            return f"has type {value.dtype}, expected {expected.dtype}"
        value = value.to(expected.dtype)
    # A sum of finite values may overflow, but one with NaN or infinity is never finite.
    if not torch.isfinite(value.sum()):
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            return f"holds {bad} NaN or infinite values of {value.numel()}"
    return None


def _holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Whether numbers of this type can say what `value` does, but for rounding."""
    if dtype.is_complex or dtype == torch.bool:
        return False
    if dtype.is_floating_point:
        return value.is_floating_point()
    reach = torch.iinfo(dtype)
    whole = value if not value.is_floating_point() else value.double()
    inside = ((whole >= reach.min) & (whole < reach.max)).all()
    return bool(inside and (not value.is_floating_point() or (whole == whole.round()).all()))


def _variances(received: Received) -> list[tuple[str | None, str]]:
    """Running variances that are not above zero. Those of a channel that is dead decay to zero: one
    that was next to zero in the last accepted model may be."""
    faults: list[tuple[str | None, str]] = []
    known = {} if received.history is None else received.history.state
    for name, module in received.fresh.named_modules():
        key = f"{name}.running_var" if name else "running_var"
        if not isinstance(module, _NormBase) or key not in received.state:
            continue
        value = received.state[key]
        bad = value <= 0
        if key in known and known[key].shape == value.shape:
            bad &= ~((value == 0) & (known[key] < 1e-30))
        if bad.any():
            faults.append((key, f"{key!r} holds {int(bad.sum())} variances of zero or less, of "
                                f"{value.numel()}"))  # fmt: skip
    return faults


def _ties(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[tuple[str | None, str]]:
    """Entries that share memory where the network's do not, or differ where the network's are one
    (the last would silently win)."""
    faults: list[tuple[str | None, str]] = []
    filled = [name for name in own if own[name].numel()]
    spans = sorted((*_span(state[name]), name) for name in filled)
    for (start, size, left), (next_start, _, right) in pairwise(spans):
        if next_start < start + size and own[left].data_ptr() != own[right].data_ptr():
            faults.append((right, f"{right!r} shares memory with {left!r}: they cannot be trained "
                                  "apart, but the agreed network has two tensors"))  # fmt: skip
    first: dict[tuple[int, torch.Size], str] = {}
    for name in filled:
        twin = first.setdefault((own[name].data_ptr(), own[name].shape), name)
        if twin != name and not torch.equal(state[twin], state[name]):
            faults.append((name, f"{name!r} differs from {twin!r}: they are one tensor in the "
                                 "agreed network"))  # fmt: skip
    return faults


def _span(value: Tensor) -> tuple[int, int]:
    """Where the values start in memory, and over how many bytes they reach."""
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
    return value.data_ptr(), reach * value.element_size()


def _kind(value: object) -> str:
    return type(value).__name__
