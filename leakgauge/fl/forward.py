"""What a forward pass gives to a layer that draws, and takes from one that adds to the loss.

A client draws from a seed of its own, another one in every local step. Everybody else draws from a
fixed one: who replays the training has the same draw in every pass, and not that of the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_SEED: ContextVar[int] = ContextVar("seed", default=0)
_ADDED: ContextVar[list[Tensor] | None] = ContextVar("added", default=None)


@contextmanager
def sampling(seed: int) -> Iterator[None]:
    """Inside, layers draw from this seed."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


@contextmanager
def additions() -> Iterator[list[Tensor]]:
    """What layers add to the loss of the forward pass inside."""
    found: list[Tensor] = []
    token = _ADDED.set(found)
    try:
        yield found
    finally:
        _ADDED.reset(token)


def drawn(like: Tensor) -> Tensor:
    """Standard normal numbers, the same in every precision and on every device."""
    rng = torch.Generator().manual_seed(_SEED.get())
    return torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like)


def add_to_loss(value: Tensor) -> None:
    """Where nobody asks for it, nothing happens."""
    found = _ADDED.get()
    if found is not None:
        found.append(value)
