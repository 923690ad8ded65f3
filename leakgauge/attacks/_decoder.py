"""Decoders from the activations of a node to the image, fitted on public images (our own).

The observed model, run in the modes of the training, turns public images into activations; a small
convolutional network learns the way back. Batch norm in train mode makes activations depend on who
else is in the batch, so public images run in batches as large as the client's. Activations that are
known up to one common scale are divided by their root mean square, in the fit and in use.

    maps (C, H, W): a 3 × 3 convolution; then, for each doubling of the sides, a 3 × 3 convolution
    and a pixel shuffle; then a 3 × 3 convolution to the colours.
    vectors (F,): a linear layer makes small maps of them first.

Decoders of several nodes are fitted at once, on the same images: how far an update can be read is
only known afterwards. The fit ends after `steps`, or when images held out of it gain nothing any
more; what it keeps is what was best on them. Public images are no client's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fitting import Clock, Lesson, Pace
from leakgauge.fitting import fit as learn
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.records import Images
from leakgauge.types import Dataset, Kept, Named, Resources

HELD = 500  # images held out, and at most a tenth of all
SIDE = 8  # about the side of the maps that a vector becomes
NARROW = 32  # channels at full size, at least


@dataclass(frozen=True)
class Fit:
    """How a decoder is fitted. It uses up to `images` public images; where there are fewer, random
    crops, flips and changes of light make up the number. `memory` bounds the bytes that their
    activations take: fewer images are used if it is short."""

    steps: int = option(1500, count(10_000_000))
    batch: int = option(16, count(100_000))
    lr: float = option(2e-3, POSITIVE)
    width: int = option(96, count(100_000))
    images: int = option(9000, count(10_000_000))
    memory: int = option(2**30, count(2**50))


def fit(
    trace: Trace,
    nodes: Sequence[str],
    record: Images,
    public: Dataset,
    records: int,
    rng: torch.Generator,
    *,
    free_scale: bool,
    options: Fit | None = None,
    resources: Resources | None = None,
) -> Kept:
    """A decoder for the values of each of these nodes, which are known up to one common scale, or
    exactly.

    `records` is how many records the client puts in one batch. Kept are the decoders' weights and
    `facts`: what each reads (`nodes`), what they were fitted on and how well they do on public
    images that they have not seen (`psnr`, in decibels, and that of their mean image: `mean_psnr`).
    """
    options, resources = options or Fit(), resources or Resources()
    clock = Clock.of(resources)
    _check(public, record, records)
    shapes = {
        f"{node}:{name}": shape
        for node in nodes
        for name, shape in layout(_shape(trace, node), record.shape, options.width).items()
    }
    pairs = _Pairs.of(trace, nodes, record, public, records, rng, free_scale, options)
    lesson = Lesson(
        begin=partial(_begun, shapes, pairs, rng),
        error=partial(_error, pairs, options.batch),
        score=pairs.score,
    )
    done = learn(lesson, Pace(options.steps, options.lr), rng, resources, clock)
    facts: dict[str, Any] = {
        "nodes": {
            node: {
                "known": list(_shape(trace, node)),
                "scale": pairs.scales[node],
                "psnr": pairs.psnr(done.weights, node),
            }
            for node in nodes
        },
        "shape": list(record.shape),
        "public": public.name,
        "public_images": len(public),
        "used": len(pairs.images) - pairs.made,
        "variants": pairs.made,
        "mean_psnr": pairs.mean_psnr(),
        "steps": done.steps,
        "cpu_seconds": done.cpu_seconds,
    }
    return Kept(done.weights, facts)


def decode(kept: Kept, node: str, activations: Tensor) -> Tensor:
    """Images in [0, 1] of the activations (N, …) of a node that were read of one round."""
    facts = kept.facts["nodes"][node]
    known = tuple(facts["known"])
    if tuple(activations.shape[1:]) != known:
        raise InputError(
            f"this decoder reads activations of shape {known} at {node!r}, got "
            f"{tuple(activations.shape[1:])}: fit one for that node"
        )
    scale = facts["scale"] or root_mean_square(activations)
    _, *size = kept.facts["shape"]
    weights = _of_node(kept.tensors, node)
    with torch.no_grad():
        parts = [
            pictures(weights, activations[i : i + 64].float() / scale, (size[0], size[1]))
            for i in range(0, len(activations), 64)
        ]
    return torch.cat(parts).clamp(0, 1)


def layout(
    known: tuple[int, ...], shape: tuple[int, int, int], width: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder's weights, by name and in their order."""
    channels, *size = shape
    shapes: dict[str, tuple[int, ...]] = {}
    if len(known) == 1:
        doublings = max(0, math.ceil(math.log2(max(size) / SIDE)))
        maps = (width, *(math.ceil(side / 2**doublings) for side in size))
        shapes["spread"] = (*maps, known[0])
    elif len(known) == 3:
        maps = (known[0], known[1], known[2])
        ratio = max(side / small for side, small in zip(size, maps[1:], strict=True))
        doublings = max(0, round(math.log2(ratio)))
    else:
        raise NotApplicable(
            "a decoder reads maps (channels, height, width) or vectors, and this node holds values "
            f"of shape {known}"
        )
    widths = [width] + [max(NARROW, width >> k + 1) for k in range(doublings)]
    shapes["first.weight"], shapes["first.bias"] = (width, maps[0], 3, 3), (width,)
    for k, (inputs, outputs) in enumerate(pairwise(widths)):
        shapes[f"double{k}.weight"] = (4 * outputs, inputs, 3, 3)
        shapes[f"double{k}.bias"] = (4 * outputs,)
    shapes["last.weight"], shapes["last.bias"] = (channels, widths[-1], 3, 3), (channels,)
    return shapes


def pictures(weights: Mapping[str, Tensor], x: Tensor, size: tuple[int, int]) -> Tensor:
    """What a decoder makes of activations of scale one, not yet clamped."""

    def conv(name: str, x: Tensor) -> Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    if "spread" in weights:
        x = torch.einsum("nf,chwf->nchw", x, weights["spread"])
    x = conv("first", x.contiguous(memory_format=torch.channels_last)).relu()
    for k in range(sum(name.startswith("double") for name in weights) // 2):
        x = F.pixel_shuffle(conv(f"double{k}", x), 2).relu()
    if tuple(x.shape[2:]) != size:  # sides that are no power of two times the map's
        x = F.interpolate(x, size, mode="bilinear", align_corners=False)
    return conv("last", x)


def _of_node(weights: Mapping[str, Tensor], node: str) -> Named:
    """Those of one decoder, by their own names."""
    begin = f"{node}:"
    return {n.removeprefix(begin): w for n, w in weights.items() if n.startswith(begin)}


def root_mean_square(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt().clamp_min(1e-30)


@dataclass(frozen=True)
class _Pairs:
    """Public images and their activations, in half precision. The first `held` are held out."""

    images: Tensor  # (N, C, H, W) in [0, 1]
    activations: Named  # of every node, (N, …)
    held: int
    made: int  # how many are random variants of others
    scales: Mapping[str, float | None]  # of exactly known activations: what they are divided by

    @classmethod
    def of(
        cls, trace: Trace, nodes: Sequence[str], record: Images, public: Dataset, records: int,
        rng: torch.Generator, free_scale: bool, options: Fit,
    ) -> _Pairs:  # fmt: skip
        each = 4 * math.prod(record.shape)
        each += sum(2 * math.prod(_shape(trace, node)) for node in nodes)
        total = max(2 * records, min(options.images, options.memory // each))
        order = torch.randperm(len(public), generator=rng)[:total]
        held = max(1, min(HELD, len(order) // 10))
        images = public.inputs[order].float()
        if (made := total - len(order)) > 0:
            picked = held + torch.randint(len(order) - held, (made,), generator=rng)
            images = torch.cat([images, varied(images[picked], rng)])
        light = trace.single()
        places = {node: light.named(node) for node in nodes}
        activations = {n: torch.empty(total, *_shape(trace, n), dtype=torch.half) for n in nodes}
        squares: dict[str, list[Tensor]] = {node: [] for node in nodes}
        with torch.no_grad():
            for begin in range(0, total, records):
                # The last batch is filled up: batch norm sees as many records as at the client.
                rows = torch.arange(begin, begin + records) % total
                every = light.forward(record.entering(images[rows]), list(places.values()))
                for node, at in places.items():
                    size = root_mean_square(every[at])
                    found = every[at] / size if free_scale else every[at]
                    activations[node][begin : begin + records] = found[: total - begin].half()
                    squares[node].append(size.square())
        for node, value in activations.items():
            if not all(one.isfinite().all() for one in value):
                raise NotApplicable(
                    f"the activations of {node!r} are not finite on public images, or too large "
                    "for half precision: no decoder can be fitted to them"
                )
        scales = {
            node: None if free_scale else float(torch.stack(values).mean().sqrt())
            for node, values in squares.items()
        }
        return cls(images, activations, held, max(0, made), scales)

    def read(self, node: str, rows: Tensor | slice) -> Tensor:
        return self.activations[node][rows].float() / (self.scales[node] or 1.0)

    @property
    def size(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]

    def score(self, weights: Mapping[str, Tensor]) -> float:
        """The mean over the images held out, and over all decoders."""
        each = [self.psnr(weights, node) for node in self.activations]
        return sum(each) / len(each)

    def psnr(self, weights: Mapping[str, Tensor], node: str) -> float:
        """The mean over the images held out, of one decoder."""
        own = _of_node(weights, node)
        rows = [slice(i, min(i + 64, self.held)) for i in range(0, self.held, 64)]
        with torch.no_grad():
            shown = torch.cat([pictures(own, self.read(node, part), self.size) for part in rows])
        return _decibels(shown.clamp(0, 1), self.images[: self.held])

    def mean_psnr(self) -> float:
        mean = self.images[self.held :].mean(0)
        return _decibels(mean.expand(self.held, *mean.shape), self.images[: self.held])


def varied(images: Tensor, rng: torch.Generator) -> Tensor:
    """Each image flipped or not, enlarged and cropped at random, in another light."""
    n, side = len(images), images.shape[-2:]
    zoom = 1 - 0.4 * torch.rand(n, generator=rng)  # the part of the sides that is shown
    mirror = 1 - 2.0 * torch.randint(2, (n,), generator=rng)
    shift = (2 * torch.rand(n, 2, generator=rng) - 1) * (1 - zoom)[:, None]
    grid = torch.zeros(n, 2, 3)
    grid[:, 0, 0], grid[:, 1, 1], grid[:, :, 2] = zoom * mirror, zoom, shift
    places = F.affine_grid(grid, [n, 1, *side], align_corners=False)
    shown = F.grid_sample(images, places, padding_mode="reflection", align_corners=False)
    contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=rng)
    light = 0.3 * (torch.rand(n, images.shape[1], 1, 1, generator=rng) - 0.5)
    middle = shown.mean((1, 2, 3), keepdim=True)
    return (middle + contrast * (shown - middle) + light).clamp(0, 1)


def _decibels(guess: Tensor, truth: Tensor) -> float:
    errors = (guess - truth).square().flatten(1).mean(1).clamp_min(1e-12)
    return float((-10 * errors.log10()).mean())


def _shape(trace: Trace, node: str) -> tuple[int, ...]:
    return tuple(trace.shape[trace.named(node)])


def _begun(shapes: Mapping[str, tuple[int, ...]], pairs: _Pairs, rng: torch.Generator) -> Named:
    """Random weights that give about the mean colour."""
    weights: Named = {}
    for name, shape in shapes.items():
        fan = shape[-1] if name.endswith("spread") else math.prod(shape[1:])
        weights[name] = torch.randn(shape, generator=rng) * math.sqrt(2 / fan)
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape)
    for node in pairs.activations:
        weights[f"{node}:last.weight"] *= 0.1
        weights[f"{node}:last.bias"] = pairs.images.mean((0, 2, 3))
    return weights


def _error(
    pairs: _Pairs, batch: int, weights: Mapping[str, Tensor], rng: torch.Generator
) -> Tensor:
    """The squared error per pixel on a batch, of all decoders together."""
    rows = torch.randint(pairs.held, len(pairs.images), (batch,), generator=rng)
    errors = [
        (pictures(_of_node(weights, node), pairs.read(node, rows), pairs.size) - pairs.images[rows])
        for node in pairs.activations
    ]
    return torch.stack([error.square().mean() for error in errors]).sum()


def _check(public: Dataset, record: Images, records: int) -> None:
    if tuple(public.inputs.shape[1:]) != record.shape:
        raise InputError(
            f"the public images are {tuple(public.inputs.shape[1:])} and the clients' records "
            f"{record.shape}: resize them"
        )
    if len(public) < 2:
        raise InputError(
            f"a decoder needs at least 2 public images, one to be judged on, got {len(public)}"
        )
    if records < 1:
        raise InputError(f"a decoder needs to know the client's batch, got {records} records")
