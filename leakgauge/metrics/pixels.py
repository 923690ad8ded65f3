"""Pixel distances: MSE, PSNR and PSNR after the best change of contrast and brightness.

Per sample, over all channels and pixels, for images of data range 1:

    MSE  = mean((guess − truth)²)
    PSNR = −10 log10(max(MSE, 1e-15))                                   in decibels
    affine PSNR = PSNR of a·guess + b, with a, b = argmin ‖a·guess + b − truth‖²

Facts:
- Values outside [0, 1] are scored as they are. Clamping belongs to the attack; clamping here
  would flatter a guess that left the box.
- Identical images score 150 dB, never infinity, so scores stay averageable and fit in JSON.
  Rounding an image to float32 alone leaves about 158 dB: beyond the cap there is little to tell.
- The affine fit reads the truth: it is evaluation only. It answers whether the *content* leaked
  where the update does not carry contrast (batch norm in train mode). One a and one b per sample,
  for all channels jointly; a may be negative, for a photographic negative shows its subject.
- The affine PSNR of any guess, even a constant one, is at least that of the truth's own mean
  grey. Compare it only with the affine PSNR of a no-information guess, never with plain PSNR.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakgauge.metrics._check import checked_pair, checked_sets

PSNR_CAP = 150.0
"""The PSNR of identical images, in decibels."""


def mse(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error per image: lower is closer.

    (N,), float64.
    """
    guess, truth = checked_pair(guess, truth)
    return (guess - truth).square().flatten(1).mean(1)


def psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio per image, in dB: higher is closer.

    At most `PSNR_CAP`: (N,), float64.
    """
    return _decibels(mse(guess, truth))


def affine_psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """PSNR per image after its best change of brightness and contrast.

    At most `PSNR_CAP`: (N,), float64.
    """
    guess, truth = checked_pair(guess, truth)
    content, target = _content(guess), _centred(truth)
    scale = (content * target).sum(1, keepdim=True) / _energy(content)
    # The residual itself, not var(truth) − cov²/var(guess): that difference cancels when exact.
    return _decibels((scale * content - target).square().mean(1))


def pairwise_mse(guess: Tensor, truth: Tensor) -> Tensor:
    """MSE of every guess to every truth: (guesses, truths), float64."""
    guess, truth = checked_sets(guess, truth)
    # Not by inner products: they cancel near zero, and equal images would no longer tie.
    distance = torch.cdist(
        guess.flatten(1), truth.flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return distance.square() / truth.shape[1:].numel()


def _decibels(error: Tensor) -> Tensor:
    return -10 * error.clamp_min(10 ** (-PSNR_CAP / 10)).log10()


def _centred(images: Tensor) -> Tensor:
    """Each image flat, without its mean: (N, C·H·W)."""
    flat = images.flatten(1)
    return flat - flat.mean(1, keepdim=True)


def _content(images: Tensor) -> Tensor:
    """Each image flat, without its mean and with largest deviation 1: (N, C·H·W).

    A constant image becomes zeros, or where its mean was rounded, ones: both fit nothing.
    """
    centred = _centred(images)
    return centred / centred.abs().amax(1, keepdim=True).clamp_min(torch.finfo(centred.dtype).tiny)


def _energy(content: Tensor) -> Tensor:
    """Sum of squares of each row: (N, 1). At least 1, unless the row is zero: then 1 is as good."""
    return content.square().sum(1, keepdim=True).clamp_min(1)
