"""What every metric asks of its tensors, written once."""

from __future__ import annotations

import torch
from torch import Tensor

from leakgauge.errors import InputError


def checked(images: Tensor, name: str) -> Tensor:
    """`images` as float64 on the CPU, if they are finite floating images (N, C, H, W).

    Float64 because an exact reconstruction lies beyond 100 dB, where float32 sums are noise.
    """
    if images.dim() != 4 or 0 in images.shape[1:]:
        raise InputError(
            f"{name}: expected images (N, C, H, W), got shape {tuple(images.shape)}; "
            "add the batch dimension with images[None]"
        )
    if not images.is_floating_point():
        raise InputError(
            f"{name}: expected floating values in [0, 1], got {images.dtype}; "
            "convert with images.float() / 255"
        )
    images = images.detach().to("cpu", torch.float64)
    broken = int((~images.isfinite()).flatten(1).any(1).sum())
    if broken:
        raise InputError(
            f"{name}: expected finite values, got NaN or infinity in {broken} of "
            f"{len(images)} images; a diverged guess has no score, so drop or repair it first"
        )
    return images


def checked_pair(guess: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Guess and truth, checked, sample by sample of one shape."""
    if guess.shape != truth.shape:
        raise InputError(
            f"guess and truth: expected one shape, got {tuple(guess.shape)} and "
            f"{tuple(truth.shape)}; pair them first with metrics.assign"
        )
    return checked(guess, "guess"), checked(truth, "truth")


def checked_sets(guess: Tensor, truth: Tensor, name: str = "truth") -> tuple[Tensor, Tensor]:
    """Two sets of images, checked: their numbers may differ, their image shape may not."""
    if guess.shape[1:] != truth.shape[1:]:
        raise InputError(
            f"guess and {name}: expected images of one shape (C, H, W), got "
            f"{tuple(guess.shape[1:])} and {tuple(truth.shape[1:])}; resize the guesses"
        )
    return checked(guess, "guess"), checked(truth, name)
