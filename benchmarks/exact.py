"""Exact separation and recursion, measured: what it reads, on which networks, and what stops it.

    python benchmarks/exact.py train  --net FILE    a trained network, and its test accuracy
    python benchmarks/exact.py nets   --net FILE    one record, on several networks, the trained too
    python benchmarks/exact.py batches              batches on ResNet-18 and ResNet-10, activations
    python benchmarks/exact.py images --deep 5      images of batches of 4 and 8, ResNet-18, and
                                                    of 4, ResNet-10 with group norms
    python benchmarks/exact.py stops                defences and precision, one record

Batch norm is in eval mode; separation.py has train mode and several steps.

Prints Markdown tables. Images are the judged pairs of the board (board.py): CIFAR-10 test images,
32 × 32, from the folder named by LEAKGAUGE_DATA; a new draw of weights a run, Kaiming-normal
fan-out unless said. Training uses training images only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from board import images, judged
from board_rows import CIFAR_MEAN, CIFAR_STD
from torch import Tensor, nn

from leakgauge import metrics, models, threat
from leakgauge.attacks import ExactRecursion
from leakgauge.attacks._separation import separable
from leakgauge.attacks._trace import Trace
from leakgauge.defences import Clip, Prune
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.records import Scale
from leakgauge.types import Dataset, Defence, Here, LocalTraining, Named, Observation, ThreatModel

TRAINING = LocalTraining(lr=0.01, batch_norm="eval")
SCALE = Scale(CIFAR_MEAN, CIFAR_STD)
SHARES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3)  # of noise


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the update, with `share` of its root mean square."""

    share: float

    def announced(self) -> dict[str, object]:
        return {"share": self.share}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        sizes = [value.square().sum() for value in update.values()]
        count = sum(value.numel() for value in update.values())
        spread = self.share * float(torch.stack(sizes).sum() / count) ** 0.5
        return {
            name: value + spread * torch.randn(value.shape, generator=rng)
            for name, value in update.items()
        }


@dataclass(frozen=True)
class Quantise:
    """Every tensor rounded to 2^bits levels between its extremes."""

    bits: int

    def announced(self) -> dict[str, object]:
        return {"bits": self.bits}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        found = {}
        for name, value in update.items():
            low, high = value.min(), value.max()
            step = ((high - low) / (2**self.bits - 1)).clamp_min(1e-30)
            found[name] = ((value - low) / step).round() * step + low
        return found


def network(
    name: str, seed: int, init: str = "kaiming-normal-fan-out", **options: Any
) -> nn.Module:
    if name in OWN:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return OWN[name]()
    rng = torch.Generator().manual_seed(seed)
    return models.make(name, shape=(3, 32, 32), classes=10, init=init, rng=rng, **options)


def vgg() -> nn.Module:
    """VGG-like: eight convolutions with batch norm, strides instead of pools, two linear layers."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (256, 2),
                            (256, 1)):  # fmt: skip
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        inputs = outputs
    head = [nn.Flatten(), nn.Linear(inputs * 16, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *head)


def vgg_pool() -> nn.Module:
    """VGG-11 with batch norm and max-pools, and one linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if not outputs:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, 10))


OWN = {"vgg": vgg, "vgg-pool": vgg_pool}  # with PyTorch's own initialisation


def played(
    make: Callable[[], nn.Module],
    batch: int,
    run: int,
    defence: Defence | None = None,
    **training: Any,
) -> tuple[Observation, Tensor, Tensor]:
    chosen, _ = judged(batch, run)
    source = images("cifar10", "test", 32)
    private = Dataset(source.name, source.inputs[chosen], source.labels[chosen], source.classes)
    local = replace(TRAINING, batch_size=batch, **training)
    scenario = Scenario(make, private, local, records=batch, defence=defence, scale=SCALE)
    round_ = simulate(scenario, torch.Generator().manual_seed(run))
    truth = threat.covered(round_, ThreatModel())
    return threat.observe(round_, ThreatModel()), truth.inputs, truth.labels


@dataclass(frozen=True)
class Found:
    """One run: PSNR of every image, labels right, activations' worst relative error, and how many
    images the attack itself says it found."""

    psnr: list[float]
    labels: float
    activations: float
    seconds: float
    words: str
    met: int = 0


def attacked(
    seen: Observation, inputs: Tensor, labels: Tensor, *, images_too: bool = True
) -> Found:
    began = time.process_time()
    rng = torch.Generator().manual_seed(0)
    try:
        told = separable(seen, rng)
        trace = Trace(seen.model, seen.record.shape)
        source = next(node for node in trace.nodes if node.name == told.source.name)
        true = trace.forward(seen.record.entering(inputs.double()), [source])[source].flatten(1)
        distance = torch.cdist(told.maps.flatten(1), true) / true.norm(dim=1)
        pairing = distance.argmin(0)
        right = float((told.labels[pairing] == labels).double().mean())
        worst = float(distance.min(0).values.max())
        if not images_too:
            return Found([], right, worst, time.process_time() - began, str(told.layer.target))
        began = time.process_time()
        guess = ExactRecursion().reconstruct(seen, rng)
    except NotApplicable as reason:
        return Found([], 0.0, float("nan"), time.process_time() - began, str(reason))
    seconds = time.process_time() - began
    index = metrics.assign.optimal(guess.inputs, inputs)
    psnr = metrics.psnr(guess.inputs[index], inputs).tolist()
    met = guess.facts["images_met"]
    return Found(psnr, right, worst, seconds, guess.facts["peeled_to"], met)


def each(
    runs: int, make: Callable[[int], nn.Module], batch: int = 1, **options: Any
) -> list[Found]:
    """The attack on so many runs, each with the network of its own seed."""
    images_too = options.pop("images_too", True)
    return [
        attacked(*played(partial(make, run), batch, run, **options), images_too=images_too)
        for run in range(runs)
    ]


def line(title: str, found: list[Found]) -> str:
    scores = sorted(p for f in found for p in f.psnr)
    seconds = statistics.median(f.seconds for f in found)
    if not scores and all(f.activations != f.activations for f in found):
        words = found[0].words.split(". ", 1)[-1]
        return f"| {title} | – | – | – | refused: {words[:160]} | {seconds:.0f} |"
    some = [f for f in found if f.activations == f.activations]
    shown = "not tried"
    if scores:
        shown = f"{statistics.median(scores):.0f} ({scores[0]:.0f}–{scores[-1]:.0f}); "
        shown += f"{sum(s >= 40 for s in scores)} of {len(scores)} ≥ 40 dB, "
        shown += f"{sum(f.met for f in found)} said to be found"
    if len(some) < len(found):
        shown += f"; refused {len(found) - len(some)} of {len(found)}"
    worst = max(f.activations for f in some)
    labels = statistics.mean(f.labels for f in some)
    deepest = max((f.words for f in some), key=[f.words for f in some].count)
    return f"| {title} | {worst:.0e} | {labels:.0%} | {shown} | {deepest} | {seconds:.0f} |"


HEAD = (
    "| {} | activations, worst error | labels right | PSNR, median (range) | peeled to | CPU-s |\n"
    "|---|---|---|---|---|---|"
)


def train(path: Path, epochs: float) -> None:
    """ResNet-10 of a quarter width, batch norm in train mode, one cycle of the rate; images are
    mirrored and shifted by up to four pixels, a batch at a time."""
    data, test = images("cifar10", "train", 32), images("cifar10", "test", 32)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    model = network("resnet-10", 0, width=0.25).train()
    total = int(epochs * len(data) / 128)
    search = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(search, 0.2, total_steps=total)
    rng = torch.Generator().manual_seed(0)
    for step in range(total):
        chosen = torch.randint(len(data), (128,), generator=rng)
        x = (data.inputs[chosen] - mean) / std
        down, right, mirrored = torch.randint(9, (3,), generator=rng).tolist()
        x = F.pad(x, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]
        x = x.flip(3) if mirrored % 2 else x
        search.zero_grad()
        loss = F.cross_entropy(model(x), data.labels[chosen])
        loss.backward()
        search.step()
        rate.step()
        if step % 100 == 0:
            print(f"{step} of {total}: {loss.detach():.3f}", flush=True)
    models.save(model, path)
    print(f"test accuracy {accuracy(model.eval(), test):.1%}")


def accuracy(model: nn.Module, test: Dataset) -> float:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    with torch.no_grad():
        guess = [model((x - mean) / std).argmax(1) for x in test.inputs.split(500)]
    return float((torch.cat(guess) == test.labels).double().mean())


def nets(path: Path, runs: int) -> None:
    print(HEAD.format("network, one record"))
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "LeNet-5, ReLU, average pool": lambda s: network(
            "lenet-5", s, activation="relu", padding=0
        ),
        "LeNet-5, ReLU, max pool": lambda s: network(
            "lenet-5", s, activation="relu", pool="max", padding=0
        ),
        "LeNet (Zhu), sigmoid, torch's initialisation": lambda s: network("lenet-zhu", s, "torch"),
        "VGG-like, torch's initialisation": lambda s: network("vgg", s),
        "ConvNet (max pools), half width": lambda s: network("convnet", s, width=0.5),
        "ResNet-10, quarter width, untrained": lambda s: network("resnet-10", s, width=0.25),
    }
    for title, make in kinds.items():
        print(line(title, each(runs, make)), flush=True)
    trained = network("resnet-10", 0, width=0.25)
    models.load(trained, path)
    share = accuracy(trained.eval(), images("cifar10", "test", 32))
    title = f"ResNet-10, quarter width, trained to {share:.1%}"
    for batch in (1, 4):
        found = each(runs, lambda seed: trained, batch)
        print(line(f"{title}, batch {batch}", found), flush=True)


def batches(runs: int) -> None:
    print(HEAD.format("network, batch"))
    for name in ("resnet-18", "resnet-10"):
        for batch in (4, 8, 16):
            found = each(runs, partial(network, name), batch, images_too=False)
            print(line(f"{name}, {batch}, activations only ({runs} batches)", found), flush=True)


def recovered(deep: int) -> None:
    print(HEAD.format("network, batch"))
    for name, batch, options in (
        ("resnet-18", 4, {}), ("resnet-18", 8, {}), ("resnet-10", 4, {"norm": "group"}),
    ):  # fmt: skip
        found = each(deep, partial(network, name, **options), batch)
        title = ", ".join([name, *options.values(), str(batch)])
        print(line(f"{title} ({deep} batches)", found), flush=True)


def stops(runs: int) -> None:
    print(HEAD.format("ResNet-10, half width, one record"))
    cases: dict[str, dict[str, Any]] = {"as it is": {}}
    cases |= {f"clipped to norm {n:g}": {"defence": Clip(norm=n)} for n in (1e-4,)}
    cases |= {f"noise {s:g}": {"defence": Noise(s)} for s in SHARES}
    cases |= {f"pruned {s:.0%}": {"defence": Prune(share=s)} for s in (0.01, 0.1, 0.3, 0.5)}
    cases |= {f"{b} bits": {"defence": Quantise(b)} for b in (16, 12, 8, 6, 4)}
    cases |= {"sends weights (float32)": {"sends": "weights"}}
    cases |= {"Adam": {"optimiser": "adam"}}
    half = partial(network, "resnet-10", width=0.5)
    for title, options in cases.items():
        print(line(title, each(runs, half, **options)), flush=True)
    for activation in ("sigmoid", "gelu"):
        print(line(activation, each(runs, partial(half, activation=activation))), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "nets", "batches", "images", "stops"])
    parser.add_argument("--net", type=Path, default=Path("exact-net.safetensors"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--deep", type=int, default=1, help="batches whose images are recovered")
    parser.add_argument("--epochs", type=float, default=20)
    given = parser.parse_args()
    if given.what == "train":
        train(given.net, given.epochs)
    elif given.what == "nets":
        nets(given.net, given.runs)
    elif given.what == "batches":
        batches(given.runs)
    elif given.what == "images":
        recovered(given.deep)
    else:
        stops(given.runs)


if __name__ == "__main__":
    main()
