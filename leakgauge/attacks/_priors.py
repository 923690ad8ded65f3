"""What an attacker expects of an image before seeing any gradient."""

from __future__ import annotations

from torch import Tensor


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, across plus down."""
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
