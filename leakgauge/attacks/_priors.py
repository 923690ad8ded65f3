"""What an attacker expects of an image before seeing any gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from leakgauge.fl.local import ready
from leakgauge.fl.statistics import batch_statistics
from leakgauge.types import LocalTraining, Setting, Statistics


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, across plus down."""
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()


def batch_norm(
    setting: Setting, training: LocalTraining, expected: Statistics
) -> Callable[[Tensor], Tensor]:
    """How far the images' statistics at the batch-norm layers are from those expected there, the
    mean over the layers of ‖Δμ‖²/Σσ² + ‖Δσ²‖²/‖σ²‖²: relative, so that no layer outshouts others.
    """
    live = replace(setting, model=ready(setting.model, training).requires_grad_(False))

    def penalty(x: Tensor) -> Tensor:
        live.model.to(x)
        found = batch_statistics(live, x, training)
        parts = []
        for name, pair in expected.items():
            mean, variance = (value.to(x) for value in pair)
            off = (found[name][0] - mean).square().sum() / variance.sum().clamp_min(1e-12)
            wide = (found[name][1] - variance).square().sum()
            parts.append(off + wide / variance.square().sum().clamp_min(1e-12))
        return torch.stack(parts).mean()

    return penalty
