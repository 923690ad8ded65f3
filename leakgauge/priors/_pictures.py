"""What the kinds of priors share: the pictures that they are trained on and judged by."""

from __future__ import annotations

from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.types import Dataset, Kept


def checked(public: Dataset) -> tuple[int, int, int]:
    """The shape of the records, if they are pictures and enough of them."""
    if public.inputs.dim() != 4 or not public.inputs.is_floating_point():
        raise InputError(
            "a prior is trained on floating-point pictures (N, C, H, W), got "
            f"{tuple(public.inputs.shape)} of {public.inputs.dtype}"
        )
    if len(public) < 2:
        raise InputError(
            f"a prior needs at least 2 public images, one to be judged on, got {len(public)}"
        )
    channels, height, width = public.inputs.shape[1:]
    return channels, height, width


def checked_kind(kept: Kept, kind: str) -> tuple[int, int, int]:
    """The shape of the images of a prior, if it is of this kind."""
    if kept.facts.get("kind") != kind:
        raise InputError(
            f"expected a prior of kind {kind!r}, got {kept.facts.get('kind')!r}: train one with "
            f"`leakgauge prior train --kind {kind}`, or leave `prior` out"
        )
    channels, height, width = kept.facts["shape"]
    return channels, height, width


def decibels(guess: Tensor, truth: Tensor) -> float:
    """The mean PSNR of images."""
    errors = (guess - truth).square().flatten(1).mean(1).clamp_min(1e-12)
    return float((-10 * errors.log10()).mean())
