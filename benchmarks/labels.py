"""How many labels an update gives away, beside what guessing gives.

    LEAKGAUGE_DATA=… python benchmarks/labels.py [--seeds 5] [--json]
    python benchmarks/labels.py --cost       CPU time of the rule `counts` on ResNet-18 instead

Batches of 1 … 64 drawn at random with repeats, 10 and 100 classes, untrained and trained network,
last layer with and without a bias. The 100 classes are each of CIFAR-10's ten cut into ten by
brightness (a learnable stand-in: CIFAR-100 is not needed). Trained means two epochs of Adam on the
training images; the batches come from test images, seeds 1000 up (the rule's constants were set on
others). Accuracy is the multiset intersection over the
batch, the median over the seeds, with the worst seed behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from leakgauge import data, models
from leakgauge.attacks import LABEL_RULES
from leakgauge.attacks._labels import infer
from leakgauge.errors import NotApplicable
from leakgauge.fl import setting
from leakgauge.fl.local import train
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import Batch, Dataset, LocalTraining, Observation

SHAPE = (3, 32, 32)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def hundred(set_: Dataset) -> Dataset:
    """Each class cut into ten of equal size by mean brightness."""
    labels = torch.empty_like(set_.labels)
    for label in range(10):
        members = (set_.labels == label).nonzero().flatten()
        order = set_.inputs[members].mean((1, 2, 3)).argsort().argsort()
        labels[members] = label * 10 + order * 10 // len(members)
    return Dataset(f"{set_.name}×10", set_.inputs, labels, tuple(map(str, range(100))))


def make(classes: int, bias: bool, seed: int) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    model = models.make("resnet-10", shape=SHAPE, classes=classes, rng=rng, width=0.25)
    if not bias:
        head = model.get_submodule("fc")
        head.bias = None  # type: ignore[assignment]
    return model


def fit(model: nn.Module, set_: Dataset, epochs: int) -> None:
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(set_)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(set_.inputs[chosen]), set_.labels[chosen]).backward()
            optimiser.step()
    model.eval()


def accuracy(model: nn.Module, set_: Dataset) -> float:
    with torch.no_grad():
        pairs = zip(set_.inputs.split(500), set_.labels.split(500), strict=True)
        hits = [model(x).argmax(1) == y for x, y in pairs]
    return float(torch.cat(hits).float().mean())


def scores(model: nn.Module, set_: Dataset, size: int, seed: int) -> dict[str, float | None]:
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(set_), (size,), generator=rng)
    truth = Batch(set_.inputs[chosen], set_.labels[chosen])
    training = LocalTraining(batch_size=size, batch_norm="eval")
    update = train(setting(model, truth, 10), truth, training, rng).update
    classes = len(set_.classes)
    seen = Observation(setting(model, SHAPE, classes), update, training, size)
    found: dict[str, float | None] = {}
    for rule in LABEL_RULES:
        try:
            guess: Tensor = infer(seen, rule, rng)  # type: ignore[arg-type]
            found[rule] = multiset_accuracy(guess, truth.labels, classes)
        except NotApplicable:
            found[rule] = None
    frequency = set_.labels.bincount(minlength=classes) / len(set_)
    found["random"] = chance(truth.labels, torch.full((classes,), 1 / classes))
    found["class prior"] = chance(truth.labels, frequency)
    return found


def cost(size: int) -> list[float]:
    """CPU seconds of `counts` on updates of ResNet-18 for images of this size: 16 records of ten
    classes, the same update again, and one record, whose label the bias tells."""
    rng = torch.Generator().manual_seed(0)
    shape = (3, size, size)
    model = models.make("resnet-18", shape=shape, classes=10, rng=rng)
    took = []
    for records in (16, 16, 1):
        training = LocalTraining(batch_size=records, batch_norm="eval")
        again = torch.Generator().manual_seed(records)
        truth = Batch(
            torch.rand(records, *shape, generator=again),
            torch.randint(0, 10, (records,), generator=again),
        )
        update = train(setting(model, truth, 10), truth, training, again).update
        seen = Observation(setting(model, shape, 10), update, training, records)
        began = time.process_time()
        infer(seen, "counts", again)
        took.append(time.process_time() - began)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--cost", action="store_true", help="CPU time instead of accuracy")
    options = parser.parse_args()
    if options.cost:
        for size in (32, 64):
            first, second, told = cost(size)
            print(
                f"{size}×{size}: first attack {first:.2f} CPU-s; second attack on the same update "
                f"{second / first:.3f} of it; one record {told / first:.3f} of it"
            )
        return
    torch.manual_seed(0)
    sets = {10: (data.load("cifar10", split="train"), data.load("cifar10", split="test"))}
    sets[100] = (hundred(sets[10][0]), hundred(sets[10][1]))
    rows = []
    cases = [(c, b, t) for c in (10, 100) for b in (True, False) for t in (False, True)]
    for classes, bias, trained in track(cases, "labels", disable=options.json):
        fitted = None
        if trained:
            fitted = make(classes, bias, 0)
            fit(fitted, sets[classes][0], options.epochs)
        test = sets[classes][1]
        for size in BATCHES:
            runs = [scores(fitted or make(classes, bias, seed), test, size, seed)
                    for seed in range(1000, 1000 + options.seeds)]  # fmt: skip
            row: dict[str, object] = {
                "classes": classes,
                "bias": bias,
                "test_accuracy": round(accuracy(fitted, test), 3) if fitted else None,
                "batch": size,
            }
            for name in runs[0]:
                values = [run[name] for run in runs if run[name] is not None]
                row[name] = [statistics.median(values), min(values)] if values else None
            rows.append(row)
    if options.json:
        print(json.dumps(rows))
        return
    table = Table(title=f"label accuracy: median (worst) of {options.seeds} seeds, resnet-10 ×0.25")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        cells = []
        for value in row.values():
            if isinstance(value, list):
                cells.append(f"{value[0]:.2f} ({value[1]:.2f})")
            else:
                cells.append("–" if value is None else str(value))
        table.add_row(*cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
