"""Arithmetic on named parameters, and the one check of tensors that come from outside."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.types import Named


def seeded(*purpose: object) -> torch.Generator:
    """A generator of its own for each purpose, so that none disturbs another."""
    digest = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def spawned(rng: torch.Generator, purpose: str) -> torch.Generator:
    """A generator that follows from where `rng` is now, which stays there."""
    state = hashlib.sha256(rng.get_state().numpy().tobytes()).hexdigest()
    return seeded(state, purpose)


def parameters(model: nn.Module) -> Named:
    """Detached copies of the trainable parameters, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def subtract(left: Named, right: Named) -> Named:
    return {name: value - right[name] for name, value in left.items()}


def scale(named: Named, factor: float) -> Named:
    return {name: value * factor for name, value in named.items()}


def norm(named: Named) -> float:
    """Euclidean norm of the whole vector; summed per tensor in double precision, because a flat
    float32 sum over millions of elements is off in the fourth digit."""
    return math.sqrt(sum(float(v.double().square().sum()) for v in named.values()))


def weighted_mean(items: Sequence[Named], weights: Sequence[float]) -> Named:
    """Σ weight · item for weights that sum to one."""
    first, *rest = items
    mean = scale(first, weights[0])
    for item, weight in zip(rest, weights[1:], strict=True):
        for name, value in item.items():
            mean[name] = mean[name] + value * weight
    return mean


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, in their order, for a digest."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def check_like(update: Mapping[str, Tensor], like: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise InputError unless `update` has the keys and shapes of `like` and is finite."""
    expected = dict(like)
    for name, reference in expected.items():
        if name not in update:
            close = difflib.get_close_matches(name, list(update), 1)
            hint = f" (it has {close[0]!r}: is it from another model?)" if close else ""
            raise InputError(
                f"{what}: no entry for parameter {name!r}{hint}. Expected one tensor for each of "
                f"the model's {len(expected)} parameters, keyed by name."
            )
        got = update[name]
        if got.shape != reference.shape:
            raise InputError(
                f"{what}: {name!r} has shape {tuple(got.shape)}, the model's parameter has "
                f"{tuple(reference.shape)}. Was it made with another model or number of classes?"
            )
        if not torch.isfinite(got).all():
            bad = int((~torch.isfinite(got)).sum())
            raise InputError(
                f"{what}: {name!r} holds {bad} NaN or infinite values of {got.numel()}. "
                "Did local training diverge? Lower the learning rate."
            )
    extra = sorted(set(update) - set(expected))
    if extra:
        raise InputError(
            f"{what}: unexpected entry {extra[0]!r} ({len(extra)} in all) that the model does not "
            "have. Send parameters only, no buffers."
        )
