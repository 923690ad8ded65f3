"""LPIPS: the distance of two images as a network sees them.

Zhang, Isola, Efros, Shechtman, Wang: The unreasonable effectiveness of deep features as a
perceptual metric, CVPR 2018, Eq. 1, https://arxiv.org/abs/1801.03924
Version 0.1 with the AlexNet trunk, in plain torch:

    d(x, y) = Σ_l mean_hw Σ_c w_lc (x̂_lchw − ŷ_lchw)²

x̂_l are the activations after the l-th of five ReLUs, each position scaled to unit length over its
channels, and w_l ≥ 0 the learned weight of each channel.

Facts:
- The trunk sees (2v − 1 − shift) / scale for pixels v in [0, 1], which is ImageNet's usual
  normalisation. Values outside [0, 1] are scored as they are.
- Grey images are repeated to three channels. Images below 32 pixels are resized (bilinear, aspect
  kept) until the shorter side is 32: much below that the trunk's second pool has nothing left.
  The metric was calibrated on 64 × 64 patches; on tiny images read it as a ranking.
- 0 is identical, larger is less alike. It runs in float32.
- The weights are a file of the user's, read by safetensors, which cannot execute code. Nothing is
  downloaded. The file is looked for at the argument `weights`, else at the environment variable
  LEAKGAUGE_WEIGHTS (each a file, or a folder that holds lpips_alex.safetensors), else in
  ~/.cache/leakgauge. It holds features.{0,3,6,8,10}.{weight,bias} and lin{0..4}.weight.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from leakgauge.errors import CheckpointError, InputError
from leakgauge.metrics._check import checked_pair
from leakgauge.papers import Paper
from leakgauge.types import Named, Scorer

PAPER = Paper(
    "zhang2018",
    "Zhang, Richard and Isola, Phillip and Efros, Alexei A. and Shechtman, Eli and Wang, Oliver",
    "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
    2018,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "https://doi.org/10.1109/CVPR.2018.00068",
    fields=(("pages", "586--595"),),
)

FILE = "lpips_alex.safetensors"

BUILD = """\
import lpips, safetensors.torch
net = lpips.LPIPS(net="alex").state_dict()
keep = {f"lin{k}.weight": net[f"lin{k}.model.1.weight"] for k in range(5)}
for k, i in enumerate((0, 3, 6, 8, 10), start=1):
    for part in ("weight", "bias"):
        keep[f"features.{i}.{part}"] = net[f"net.slice{k}.{i}.{part}"]
safetensors.torch.save_file(keep, "lpips_alex.safetensors")
"""
"""Makes the file, on a machine that has the PyPI packages lpips and torchvision."""

SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
SMALLEST = 32
CHANNELS = (1, 3)

# Index in AlexNet's feature stack, weight shape, stride, padding.
STAGES = (
    (0, (64, 3, 11, 11), 4, 2),
    (3, (192, 64, 5, 5), 1, 2),
    (6, (384, 192, 3, 3), 1, 1),
    (8, (256, 384, 3, 3), 1, 1),
    (10, (256, 256, 3, 3), 1, 1),
)
POOLED = (3, 6)  # the stages that a 3 × 3 max-pool of stride 2 precedes
AT_ONCE = 64  # images through the trunk together: bounds memory, changes no score


def load_lpips(weights: str | Path | None = None) -> Scorer:
    """Difference as people see it; needs a file of weights.

    They are read from disk once.
    """
    named = _read(_locate(weights))

    def lpips(guess: Tensor, truth: Tensor) -> Tensor:
        """LPIPS distance of each sample, 0 for identical images: (N,), float64."""
        guess, truth = map(_prepare, checked_pair(guess, truth))
        score = torch.zeros(len(truth), dtype=torch.float64)
        for start in range(0, len(truth), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            score[part] = _distance(named, guess[part], truth[part])
        return score

    return lpips


def _distance(named: Named, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 1 of two prepared batches (N, 3, H, W): (N,), float64."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for stage, maps in enumerate(zip(_features(named, x), _features(named, y), strict=True)):
        first, second = map(_unit, maps)
        seen = functional.conv2d((first - second).square(), named[f"lin{stage}.weight"])
        total += seen.flatten(1).mean(1)
    return total


def _features(named: Named, x: Tensor) -> list[Tensor]:
    """The activations after each of AlexNet's five ReLUs."""
    maps = []
    for index, _, stride, padding in STAGES:
        if index in POOLED:
            x = functional.max_pool2d(x, 3, 2)
        weight, bias = named[f"features.{index}.weight"], named[f"features.{index}.bias"]
        x = functional.conv2d(x, weight, bias, stride, padding).relu()
        maps.append(x)
    return maps


def _unit(maps: Tensor) -> Tensor:
    """Unit length over the channels of each position; a position where no unit fires stays 0."""
    return maps / (maps.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _prepare(images: Tensor) -> Tensor:
    """Images of [0, 1] as the trunk expects them: float32, three channels, at least 32 pixels."""
    if images.shape[1] not in CHANNELS:
        raise InputError(
            f"lpips: expected 1 or 3 channels, got {images.shape[1]}; "
            "score a choice of three channels, or use ssim"
        )
    x = images.float().expand(-1, 3, -1, -1)
    height, width = x.shape[-2:]
    if (shorter := min(height, width)) < SMALLEST:
        size = [round(side * SMALLEST / shorter) for side in (height, width)]
        x = functional.interpolate(x, size=size, mode="bilinear", align_corners=False)
    shift, scale = torch.tensor(SHIFT).view(3, 1, 1), torch.tensor(SCALE).view(3, 1, 1)
    return (2 * x - 1 - shift) / scale


def measures(shape: Sequence[int]) -> bool:
    """Whether pictures of this shape (C, H, W) can be measured here: their channels are known, and
    the file of weights is found."""
    return fits(shape) and _place(None).is_file()


def fits(shape: Sequence[int]) -> bool:
    """Whether LPIPS is made for pictures of this shape."""
    return len(shape) == 3 and shape[0] in CHANNELS


def _place(weights: str | Path | None) -> Path:
    """Where the file is looked for: argument, environment variable or cache, the first that is
    set."""
    named = weights or os.environ.get("LEAKGAUGE_WEIGHTS")
    path = Path(named).expanduser() if named else Path.home() / ".cache" / "leakgauge" / FILE
    return path / FILE if path.is_dir() else path


def _locate(weights: str | Path | None) -> Path:
    """The file of weights, which must be there."""
    path = _place(weights)
    if not path.is_file():
        raise CheckpointError(
            f"LPIPS needs its weights: expected the file {path}, found none. Place {FILE} there, "
            "or name its folder in the environment variable LEAKGAUGE_WEIGHTS. To build it, run "
            f"this once where `pip install lpips torchvision` works:\n\n{BUILD}"
        )
    return path


def _read(path: Path) -> Named:
    """The tensors of the file, if they are those of LPIPS v0.1 AlexNet."""
    remedy = f"build it anew (delete it and try again for the recipe): {path}"
    try:
        named = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the LPIPS weights are not a whole safetensors file ({error}); {remedy}"
        ) from error
    expected: dict[str, tuple[int, ...]] = {}
    for stage, (index, shape, _, _) in enumerate(STAGES):
        expected[f"features.{index}.weight"] = shape
        expected[f"features.{index}.bias"] = shape[:1]
        expected[f"lin{stage}.weight"] = (1, shape[0], 1, 1)
    for name, size in expected.items():
        got = tuple(named[name].shape) if name in named else "nothing"
        if got != size:
            raise CheckpointError(f"LPIPS weights: expected {name} {size}, got {got}; {remedy}")
        if not named[name].isfinite().all():
            raise CheckpointError(f"LPIPS weights: {name} holds NaN or infinity; {remedy}")
    return {name: named[name].float() for name in expected}
