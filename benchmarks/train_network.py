"""Trains a network for the rows on trained models, and keeps it at several stages.

    python benchmarks/train_network.py --model resnet-10 --out DIR [--epochs 12,5] [--batch 128]

CIFAR-10 training images from the folder named by LEAKGAUGE_DATA, batch norm in train mode, SGD with
momentum, one cycle of the rate, whose height goes with the batch. The first epochs see images of
half the side, which cost a quarter. The last 1,000 training images are held out. DIR gets
`25.safetensors`, `50.safetensors` and `75.safetensors`, kept when the accuracy on them was first
seen to have reached that share (`--every` so many steps), and `best.safetensors`, the end of the
training; the accuracies on all test images are printed and written to `accuracy.json`. Weights are
not part of the repository.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from board import images
from board_rows import CIFAR_MEAN, CIFAR_STD
from torch import Tensor, nn

from leakgauge import models

STAGES = (25, 50, 75)
RATE = 0.1 / 128  # the highest, for each record of a batch
HELD = 1000


def normalised(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    return ((x - mean) / std).to(memory_format=torch.channels_last)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of these records that a model in eval mode names rightly."""
    was = model.training
    model.eval()
    with torch.no_grad():
        guess = torch.cat([model(normalised(x)).argmax(1) for x in inputs.split(250)])
    model.train(was)
    return float((guess == labels).double().mean())


def shifted(x: Tensor, rng: torch.Generator) -> Tensor:
    """A batch, every eight images moved by up to an eighth of their side and mirrored by chance."""
    side, by = x.shape[-1], x.shape[-1] // 8
    parts = []
    for part in F.pad(x, (by,) * 4).split(8):
        down, right = torch.randint(2 * by + 1, (2,), generator=rng).tolist()
        part = part[:, :, down : down + side, right : right + side]
        parts.append(part.flip(3) if int(torch.randint(2, (), generator=rng)) else part)
    return torch.cat(parts).to(memory_format=torch.channels_last)


def train(given: argparse.Namespace) -> None:
    out, batch = given.out, given.batch
    epochs = map(float, given.epochs.split(","))
    data, test = images("cifar10", "train", 32), images("cifar10", "test", 32)
    held = data.inputs[-HELD:], data.labels[-HELD:]
    rng = torch.Generator().manual_seed(given.seed)
    options = {} if given.width == 1 else {"width": given.width}
    model = models.make(given.model, shape=(3, 32, 32), classes=10, rng=rng, **options).train()
    model = model.to(memory_format=torch.channels_last)
    small, large = (int(e * (len(data) - HELD) / batch) for e in epochs)
    search = torch.optim.SGD(
        model.parameters(), RATE * batch, 0.9, weight_decay=5e-4, nesterov=True
    )
    rate = torch.optim.lr_scheduler.OneCycleLR(search, RATE * batch, total_steps=small + large)
    out.mkdir(parents=True, exist_ok=True)
    waiting = list(STAGES)
    reached: dict[str, float] = {}
    for step in range(small + large):
        chosen = torch.randint(len(data) - HELD, (batch,), generator=rng)
        x = normalised(data.inputs[chosen])
        if step < small:
            x = F.avg_pool2d(x, 2)
        search.zero_grad()
        loss = F.cross_entropy(model(shifted(x, rng)), data.labels[chosen])
        loss.backward()
        search.step()
        rate.step()
        if (step + 1) % given.every == 0 or step == small + large - 1:
            share = accuracy(model, *held)
            print(f"{step + 1} of {small + large}: {loss.detach():.3f}, {share:.1%}", flush=True)
            while waiting and share >= waiting[0] / 100:
                reached[str(waiting[0])] = accuracy(model, test.inputs, test.labels)
                models.save(model, out / f"{waiting.pop(0)}.safetensors")
    reached["best"] = accuracy(model, test.inputs, test.labels)
    models.save(model, out / "best.safetensors")
    (out / "accuracy.json").write_text(json.dumps(reached, indent=1) + "\n")
    print("test accuracy " + ", ".join(f"{name}: {share:.1%}" for name, share in reached.items()))


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet-10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", default="12,5", help="at half the side, and at the full side")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=50, help="steps between looks at accuracy")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--width", type=float, default=1.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
