"""Does a decoder that was fitted for one draw of weights save the fit for another?

    python benchmarks/decoder_adapt.py [--runs 3]

ResNet-10 with random weights, train batch norm, batches of 16, decoders from layer3_0_act1. One
decoder is fitted for a first draw. For every other draw decoders are fitted from scratch, from that
one, and from that one with a new first layer (the one that reads the activations), with as many
steps each. Prints a Markdown table: PSNR on public images that no fit used, and CPU-seconds of the
steps. The activations of the public images are needed by all alike, and are not counted. Images are
of the training split, weights of seeds on which settings may be chosen (board.py).
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from board import images, rng_of, tuned
from exact import SCALE, network

from leakgauge.attacks._decoder import Fit, _begun, _error, _Pairs, layout
from leakgauge.attacks._trace import Trace
from leakgauge.fitting import Clock, Lesson, Pace, fit
from leakgauge.records import Images
from leakgauge.types import Named, Resources

NODE = "layer3_0_act1"
BATCH = 16
DONOR, LONG, SHORT = 500, 500, 250  # steps


def pairs_of(seed: int, count: int) -> tuple[_Pairs, dict[str, tuple[int, ...]]]:
    """Public images and their activations in a network of this seed."""
    record = Images((3, 32, 32), SCALE.mean, SCALE.std)
    trace = Trace(network("resnet-10", seed), record.shape, train=True)
    known = tuple(trace.shape[trace.named(NODE)])
    public = images("cifar10", "train", 32)
    options = Fit(images=count)
    rng = rng_of("pairs")
    pairs = _Pairs.of(trace, [NODE], record, public, BATCH, rng, True, options)
    shapes = layout(known, record.shape, options.width)
    return pairs, {f"{NODE}:{name}": shape for name, shape in shapes.items()}


def fitted(
    pairs: _Pairs, shapes: dict[str, tuple[int, ...]], steps: int, begin: Named | None = None
) -> tuple[Named, float, float]:
    """A decoder after so many steps, its PSNR on the images held out, and CPU-seconds."""
    rng, resources = rng_of("fit"), Resources()
    lesson = Lesson(
        begin=lambda: _begun(shapes, pairs, rng) | (begin or {}),
        error=partial(_error, pairs, Fit.batch),
        score=pairs.score,
    )
    pace = Pace(steps, Fit.lr, every=steps)
    done = fit(lesson, pace, rng, resources, Clock.of(resources))
    return done.weights, done.score, done.cpu_seconds


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--images", type=int, default=4000)
    given = parser.parse_args()
    pairs, shapes = pairs_of(tuned(BATCH, 0)[1], given.images)
    donor, psnr, seconds = fitted(pairs, shapes, DONOR)
    print(f"the decoder to adapt: {psnr:.1f} dB after {DONOR} steps, {seconds:.0f} CPU-s\n")
    upper = {name: value for name, value in donor.items() if ":first" not in name}
    begins: dict[str, Named | None] = {
        "from scratch": None,
        "from another draw's decoder": donor,
        "from another draw's, first layer new": upper,
    }
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for run in range(1, given.runs + 1):
        pairs, shapes = pairs_of(tuned(BATCH, run)[1], given.images)
        for title, begin in begins.items():
            for steps in (SHORT, LONG):
                _, psnr, seconds = fitted(pairs, shapes, steps, begin)
                found.setdefault((title, steps), []).append((psnr, seconds))
    print("| fit | steps | draws | PSNR held out, median (range) | CPU-s |\n|---|---|---|---|---|")
    for (title, steps), rows in found.items():
        psnrs, spent = zip(*rows, strict=True)
        print(
            f"| {title} | {steps} | {len(rows)} | {statistics.median(psnrs):.1f} "
            f"({min(psnrs):.1f}–{max(psnrs):.1f}) | {statistics.median(spent):.0f} |"
        )


if __name__ == "__main__":
    main()
