"""Re-identification: does a guess point to the one true image of a gallery?

    identified_i  ⇔  MSE(guess_i, gallery[t_i])  <  min over k ≠ t_i of MSE(guess_i, gallery[k])

It stands in for the human judges of FedLeak (Fan et al., USENIX Security 2025, §5), whose attack
success rate is the share of guesses that show the subject of the truth.

Facts:
- The gallery holds the truths among other images; a guess that knows nothing is right with
  probability 1 / len(gallery), so state the size beside the rate.
- A tie is no identification, and a lead within rounding is a tie. An image that stands twice in
  the gallery can therefore never be identified: remove duplicates first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.metrics._check import checked_sets
from leakgauge.metrics.pixels import pairwise_mse

ROUNDING = 1e-6, 1e-12  # relative, absolute: what float32 images can shift a distance by


def reidentified(guess: Tensor, truth_index: Tensor, gallery: Tensor) -> Tensor:
    """1 where the nearest gallery image to guess i is gallery[truth_index[i]], else 0: (N,)."""
    checked_sets(guess, gallery, "gallery")
    if len(gallery) < 2:
        raise InputError(
            f"gallery: expected at least 2 images, got {len(gallery)}; "
            "a gallery of one identifies every guess"
        )
    if truth_index.shape != guess.shape[:1] or truth_index.dtype != torch.int64:
        raise InputError(
            f"truth_index: expected {len(guess)} integers (int64), one per guess, got "
            f"{truth_index.dtype} of shape {tuple(truth_index.shape)}"
        )
    truth_index = truth_index.cpu()
    outside = (truth_index < 0) | (truth_index >= len(gallery))
    if outside.any():
        raise InputError(
            f"truth_index: expected 0 to {len(gallery) - 1}, the places of the gallery, got "
            f"{int(truth_index[outside][0])}; score an unmatched truth by a no-information guess"
        )
    matrix = pairwise_mse(guess, gallery)  # (N, gallery)
    own = matrix.gather(1, truth_index[:, None]).squeeze(1)
    nearest_other = matrix.scatter(1, truth_index[:, None], torch.inf).amin(1)
    relative, absolute = ROUNDING
    return (nearest_other - own > relative * nearest_other + absolute).double()
