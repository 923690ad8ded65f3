"""What the detectors share: a copy to run, records to run it on, and the worst of many scores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from leakgauge.fl.local import ready
from leakgauge.types import Batch, Detection, LocalTraining

Means: TypeAlias = Literal["reject", "exposed", "report"]


def worst(scores: Mapping[str, float]) -> tuple[str, float]:
    """The tensor with the largest score. NaN is larger than any number: it must fire."""
    name = max(scores, key=lambda n: (math.isnan(scores[n]), scores[n]))
    return name, scores[name]


def judged(
    test: str, scores: Mapping[str, float], threshold: float, means: Means, says: str
) -> tuple[Detection, ...]:
    """The detection of the worst tensor, or none without scores. `says` is its reason, in which
    {name} and {score} are filled in."""
    if not scores:
        return ()
    name, score = worst(scores)
    reason = says.format(name=repr(name), score=score)
    return (Detection(test, score, threshold, means, reason, name),)


def wide(value: Tensor) -> Tensor:
    """At least float32, detached: half precision would round the score itself."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value if value.dtype == torch.float64 else value.float()


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        plain = value.detach().cpu().contiguous()
        total.update(f"{name} {plain.dtype} {tuple(plain.shape)}\0".encode())
        total.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def prepared(model: nn.Module, training: LocalTraining) -> nn.Module:
    """A copy in the modes of the training; half precision is widened, for CPUs lack its kernels."""
    double = any(p.dtype == torch.float64 for p in model.parameters())
    return ready(model, training).to(torch.float64 if double else torch.float32)


def drawn(labels: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` records (fewer, if there are not so many) by `rng`, one of each class first."""
    order = torch.randperm(len(labels), generator=rng)
    _, first = np.unique(labels[order].numpy(), return_index=True)  # of each class
    ahead = torch.from_numpy(np.sort(first))
    others = torch.ones(len(order), dtype=torch.bool)
    others[ahead] = False
    return torch.cat([order[ahead], order[others]])[:count]


def chosen(batch: Batch, model: nn.Module, limit: int, rng: torch.Generator) -> Batch:
    """At most `limit` records, drawn by `rng`, in the precision of a `prepared` model."""
    picked = drawn(batch.labels.cpu(), limit, rng).to(batch.inputs.device)
    return fitted(Batch(batch.inputs[picked], batch.labels[picked]), model)


def fitted(batch: Batch, model: nn.Module) -> Batch:
    """The records in the precision of a `prepared` model; whole numbers (tokens) stay."""
    inputs = batch.inputs.detach()
    if inputs.is_floating_point():
        inputs = inputs.to(next((p.dtype for p in model.parameters()), torch.float32))
    return Batch(inputs, batch.labels)


def matrices(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every parameter of two dimensions or more as rows (one per unit or filter), with its bias.

    Queries, keys and values that share one tensor (three times as many rows as columns) come apart:
    an attack may change one of them only.
    """
    for name, value in named.items():
        if value.dim() < 2 or not value.numel():
            continue
        rows = wide(value).flatten(1)
        bias = named.get(name[: -len("weight")] + "bias") if name.endswith("weight") else None
        bias = wide(bias) if bias is not None and bias.shape == value.shape[:1] else None
        if len(rows) == 3 * rows.shape[1]:
            for k in range(3):
                part = slice(k * rows.shape[1], (k + 1) * rows.shape[1])
                label = f"{name}[{part.start}:{part.stop}]"
                yield label, rows[part], None if bias is None else bias[part]
        else:
            yield name, rows, bias
