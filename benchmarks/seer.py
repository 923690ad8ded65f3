"""SEER at small scale, measured: is the picture it decodes that of the brightest image?

    python benchmarks/seer.py --folder FOLDER [--norm batch|group] [--steps 2500] [--batches 100]

Trains on CIFAR-10 training images (continuing what FOLDER holds), then attacks batches of eight
test images and prints how often the nearest image of the batch is the brightest one (chance: 1/8),
and the median PSNR at the decoder's resolution; beside both, what a server has without any update:
the mean of the brightest public images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from board_rows import CIFAR_MEAN, CIFAR_STD
from torch import Tensor, nn

from leakgauge import data, metrics, threat
from leakgauge.attacks.active.seer import Seer, brightest, picture
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.kept import Checkpoint, key_of
from leakgauge.records import Scale
from leakgauge.types import LocalTraining, Resources, ThreatModel

TRAINING = LocalTraining(lr=0.1, batch_size=8)
SCALE = Scale(CIFAR_MEAN, CIFAR_STD)


def host(norm: str = "batch", width: int = 8) -> nn.Module:
    """Three strided convolutions, each with a normalisation, and a linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(4, outputs),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 16, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--steps", type=int, default=Seer.steps)
    parser.add_argument("--lr", type=float, default=Seer.lr)
    parser.add_argument("--batches", type=int, default=100)
    args = parser.parse_args()
    attack = Seer(steps=args.steps, lr=args.lr)
    public, private = (data.load("cifar10", split=split) for split in ("train", "test"))

    def played(seed: int):  # the same host, another batch of test images
        torch.manual_seed(0)
        model = host(args.norm)
        scenario = Scenario(lambda: model, private, TRAINING, scale=SCALE)
        return simulate(scenario, torch.Generator().manual_seed(seed))

    begun = time.monotonic()

    def tell(done: int, total: int, objective: float) -> None:
        if done % 250 == 0:
            print(f"{done}/{total} {objective:.5f} {time.monotonic() - begun:.0f} s", flush=True)

    rng = torch.Generator().manual_seed(0)
    aim = target(played(0), public)
    place = Checkpoint(Path(args.folder, "seer.safetensors"), key_of(attack, aim, rng))
    sent = attack.prepare(aim, rng, Resources(progress=tell, checkpoint=place))
    blind = F.adaptive_avg_pool2d(bright(public.inputs), attack.side).mean(0)
    decoded, constant = Score(), Score()
    for seed in range(args.batches):
        round_ = tampered(played(seed), sent, rng)
        truth = round_.truths[0].inputs
        seen = threat.observe(round_, ThreatModel(malicious=True), kept=sent.kept)
        decoded.add(picture(seen), truth)
        constant.add(blind, truth)
    print(asdict(attack), args.norm)
    print(f"decoded picture:           {decoded}")
    print(f"mean of bright pictures:   {constant}")


def bright(images: Tensor) -> Tensor:
    """The brightest of every eight images: their mean is a good guess without any update."""
    groups = images.split(TRAINING.batch_size)
    return torch.stack([group[brightest(group)] for group in groups])


class Score:
    """How often the brightest image of a batch is the nearest to a picture, and how near it is."""

    def __init__(self) -> None:
        self.hits: list[bool] = []
        self.psnr: list[float] = []

    def add(self, guess: Tensor, batch: Tensor) -> None:
        small = F.adaptive_avg_pool2d(batch, guess.shape[-1])
        goal = brightest(batch)
        self.hits.append(int((small - guess).square().flatten(1).sum(1).argmin()) == goal)
        self.psnr.append(float(metrics.psnr(guess[None], small[goal : goal + 1])))

    def __str__(self) -> str:
        return (
            f"nearest is the brightest in {sum(self.hits)} of {len(self.hits)} batches "
            f"(chance {len(self.hits) / TRAINING.batch_size:g}), "
            f"median {statistics.median(self.psnr):.1f} dB"
        )


if __name__ == "__main__":
    main()
