"""FedLeak — M. Fan, F. Wang, C. Chen, J. Zhou: "Boosting Gradient Leakage Attacks: Data
Reconstruction in Realistic FL Settings", USENIX Security 2025,
https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting

Only the large elements Λ of the gradient are matched (Eq. 7), the top `share` of |g'| in each
tensor, and the search avoids steep places: the gradient used is

    (1 − λ')·∇D(x) + λ'·∇D(x + φ),   φ = k·∇D(x)/‖∇D(x)‖                                    (Eq. 14)
    D(x) = ‖g'[Λ] − g[Λ]‖₁ + 1 − cos(g'[Λ], g[Λ]) + α·TV(x) + β·Σ_l ‖F⁽ˡ⁾(x)‖₁              (Eq. 15)

The text and the authors' code (https://doi.org/10.5281/zenodo.15532455) are two attacks:

|                       | `variant="printed"`         | `variant="released"`                     |
|-----------------------|-----------------------------|------------------------------------------|
| space, optimiser      | pixels, Adam, 1e-4          | generator, signed Adam, 1e-2, cosine     |
| distance              | whole vector, L1 summed     | tensor by tensor and summed, L1 averaged |
| look-ahead point, λ'  | x + φ, 0.7                  | after one step, 0.3                      |
| α, β                  | 1e-5, 1e-4                  | 1e-5, none                               |
| at the end            | —                           | median filter 5 × 5                      |

The default, `variant="short"`, is the released attack without the parts that did not pay here in a
few hundred iterations: the look-ahead, which doubles their cost, and the filter, which blurs small
images. A variant sets the options that are left None.

Needs: the local training and the number of records. Labels are inferred unless `labels="known"`.
Differs from the paper: 500 iterations instead of 10 000; the best iterate by the objective, not the
last; Λ is taken anew at the look-ahead point; k, which the paper leaves open, is 0.1 for each
image. From the released code: no weight decay; the sign is taken of the blend, not before it; its
own generator; labels are inferred, where it is handed the true ones; no choice by the true images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import (
    Adam,
    Blend,
    LabelledSearch,
    Prior,
    Schedule,
    constant,
    cosine,
    match,
)
from leakgauge.attacks._objectives import Distance, dot
from leakgauge.attacks._objectives import cosine as cosine_distance
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._spaces import SPACES, SpaceName, Start
from leakgauge.errors import Withheld
from leakgauge.fl.local import ready
from leakgauge.papers import FAN2025, Paper
from leakgauge.ranges import FROM_0, SHARE, count, option
from leakgauge.types import LocalTraining, Observation, Reconstruction, Resources, Setting

MaskBy: TypeAlias = Literal["guess", "observed"]


@dataclass(frozen=True)
class Variant:
    """What the text and the code do differently."""

    space: SpaceName
    lr: float
    schedule: Schedule
    signed: bool
    by_tensor: bool
    ahead: Literal["slope", "step"]
    blend: float
    activation: float
    median: int


PRINTED = Variant("pixels", 1e-4, constant(), False, False, "slope", 0.7, 1e-4, 1)
RELEASED = Variant("generator", 1e-2, cosine(), True, True, "step", 0.3, 0.0, 5)
VARIANTS = {
    "printed": PRINTED,
    "released": RELEASED,
    "short": replace(RELEASED, blend=0.0, median=1),
}


@dataclass(frozen=True)
class FedLeak(LabelledSearch):
    """Matches only the large gradient entries (Fan 2025)."""

    papers: ClassVar[tuple[Paper, ...]] = (FAN2025,)
    variant: Literal["short", "printed", "released"] = "short"
    share: float = option(0.5, SHARE)  # R
    mask_by: MaskBy = "guess"
    tv: float = 1e-5  # α
    reach: float = option(0.1, FROM_0)  # k
    space: SpaceName | None = None
    lr: float | None = None
    blend: float | None = option(None, SHARE)  # λ'; 0: no look-ahead
    activation: float | None = option(None, FROM_0)  # β
    median: int | None = option(None, count(999))  # side of the filter; 1: none
    start: Start = "uniform"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}")
        if self.blend is not None and not 0 <= self.blend <= 1:
            raise ValueError(f"blend must lie in [0, 1], got {self.blend}")
        if self.median is not None and (self.median < 1 or self.median % 2 == 0):
            raise ValueError(f"median must be odd and at least 1, got {self.median}")

    def settled(self) -> Variant:
        """The variant with the options that were set in place of its own."""
        options = {name: getattr(self, name)
                   for name in ("space", "lr", "blend", "activation", "median")}  # fmt: skip
        chosen = {name: value for name, value in options.items() if value is not None}
        return replace(VARIANTS[self.variant], **chosen)

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        if seen.training is None:
            raise Withheld("fedleak needs 'training' in the observation")
        how = self.settled()
        resources = resources or Resources()
        priors: list[Prior] = [(total_variation, constant(self.tv))]
        if how.activation:
            penalty = activations(seen.setting, seen.training, resources)
            priors.append((penalty, constant(how.activation)))
        guess = match(
            seen,
            (by_tensor if how.by_tensor else whole)(self.share, self.mask_by),
            self,
            labels=infer(seen, self.labels, rng),
            priors=tuple(priors),
            optimiser=Adam(
                how.lr,
                how.schedule,
                signed=how.signed,
                blend=Blend(how.blend, self.reach, how.ahead) if how.blend else None,  # Eq. 14
            ),
            space=SPACES[how.space](),
            rng=rng,
            resources=resources,
        )
        return replace(guess, inputs=filtered(guess.inputs, how.median))


def largest(values: Tensor, share: float) -> Tensor:
    """A mask of exactly this share of the elements, at least one: the largest in magnitude. Of
    equal ones, the first."""
    flat = values.detach().abs().flatten()
    keep = max(1, round(share * len(flat)))
    # numpy finds the threshold ten times faster than torch does on the CPU
    place = len(flat) - keep
    least = float(np.partition(flat.cpu().numpy(), place)[place])
    mask = flat > least
    ties = (flat == least).nonzero()[: keep - int(mask.sum()), 0]
    mask[ties] = True
    return mask.view_as(values)


def _masked(
    guess: list[Tensor], target: Sequence[Tensor], share: float, mask_by: MaskBy
) -> tuple[list[Tensor], list[Tensor]]:
    """g'[Λ] and g[Λ], with zeros in place of what is left out: a distance between them has no slope
    there."""
    masks = [largest(g, share) for g in (guess if mask_by == "guess" else target)]
    ours = [g * m for g, m in zip(guess, masks, strict=True)]
    return ours, [t * m for t, m in zip(target, masks, strict=True)]


def whole(share: float, mask_by: MaskBy = "guess") -> Distance:
    """The first three terms of Eq. 15, over all tensors together."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        ours, theirs = _masked(guess, target, share, mask_by)
        gaps = torch._foreach_sub(ours, theirs)
        value, v = cosine_distance(ours, theirs)
        torch._foreach_add_(v, [gap.sign() for gap in gaps])
        return value + torch.stack([gap.abs().sum() for gap in gaps]).double().sum(), v

    return distance


def by_tensor(share: float, mask_by: MaskBy = "guess") -> Distance:
    """Σ over tensors of (mean |g'[Λ] − g[Λ]| + 1 − cos(g'[Λ], g[Λ]))."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        value, slopes = 0.0, []
        for g, t in zip(*_masked(guess, target, share, mask_by), strict=True):
            gap = g - t
            v = gap.sign() / g.numel()
            angle, lengths = 1.0, float(g.norm()) * float(t.norm())
            if lengths > 0:  # zeros have no direction
                cos = float(dot([g], [t])) / lengths
                v.add_(g, alpha=cos / float(g.norm()) ** 2).sub_(t, alpha=1 / lengths)
                angle = 1 - cos
            value += angle + float(gap.abs().mean())
            slopes.append(v)
        return torch.tensor(value, dtype=torch.float64, device=guess[0].device), slopes

    return distance


def activations(
    setting: Setting, training: LocalTraining, resources: Resources
) -> Callable[[Tensor], Tensor]:
    """Σ_l ‖F⁽ˡ⁾(x)‖₁ of one record, over the outputs of all modules without children but the last:
    the logits are not intermediate."""
    copied = ready(setting.model, replace(training, dropout="off")).requires_grad_(False)
    copied = copied.to(resources.device, resources.dtype or torch.float32)
    sums: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sums.append(output.clone().abs().sum())  # the next module may overwrite it

    for module in copied.modules():
        if not any(module.children()):
            module.register_forward_hook(note)

    def penalty(x: Tensor) -> Tensor:
        sums.clear()
        copied(setting.record.entering(x))
        return sum(sums[:-1], start=x.new_zeros(())) / len(x)

    return penalty


def filtered(images: Tensor, side: int) -> Tensor:
    """The median of each pixel's neighbourhood of this side, channel by channel."""
    if side == 1:
        return images
    reach = side // 2
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # (N, C, H, W, side, side)
    return windows.flatten(-2).median(-1).values
