"""Guesses that know nothing of the update: what every score must beat to mean a leak.

`reference` are images of the same kind that the attacker could hold (public, or of others); it
must not contain the truths, or the baseline itself leaks them.

- `mean_image`: of all fixed guesses the one of least expected MSE. Strong in PSNR, shows nothing.
- `random_images`: looks real, shows someone else. Strong in LPIPS, weak in PSNR.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.metrics._check import checked


def mean_image(reference: Tensor) -> Tensor:
    """The mean of the reference images: (C, H, W). `.expand_as(truth)` makes it a guess."""
    return _some(reference).mean(0).to(reference)


def random_images(reference: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """`n` reference images drawn with replacement: (n, C, H, W)."""
    place = torch.randint(len(_some(reference)), (n,), generator=rng, device=rng.device)
    return reference[place.to(reference.device)]


def _some(reference: Tensor) -> Tensor:
    """The reference, checked and not empty."""
    if len(reference) == 0:
        raise InputError(
            "reference: expected at least one image, got none; "
            "pass public images, or hold some of the data set back"
        )
    return checked(reference, "reference")
