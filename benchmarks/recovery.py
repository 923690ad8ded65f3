"""What malicious servers read from one round: images recovered, a table an attack.

    python benchmarks/recovery.py [robbing-the-fed | trap-weights | fishing | loki] [--seeds 5]

Prints Markdown tables; a cell lists the seeds in order. Clients hold CIFAR-10 test images, the
server the first 10 000 training images, from the folder named by LEAKGAUGE_DATA. A seed draws the
weights, the records and the secret. An image counts as recovered above x dB if one of the guesses,
which are no more than the records, has a higher PSNR. FedAvg: one epoch in batches of 8 unless
said. Learning rate 0.01 unless said.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from board_rows import CIFAR_MEAN, CIFAR_STD
from torch import nn

from leakgauge import data, metrics, models, threat
from leakgauge.attacks.active import Fishing, Loki, RobbingTheFed, TrapWeights
from leakgauge.errors import DataError
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.records import Scale
from leakgauge.types import (
    Dataset,
    LocalTraining,
    PreparedAttack,
    Reconstruction,
    Round,
    ThreatModel,
)

PUBLIC = 10_000
ONE_STEP = LocalTraining(lr=0.01, batch_size=64)
SCALE = Scale(CIFAR_MEAN, CIFAR_STD)
FEDAVG = replace(ONE_STEP, batch_size=8, epochs=1)
MLP, CNN, RESNET = "MLP 3072-512-256-10", "`cnn`", "ResNet-10 (width 0.25, group norm)"
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    CNN: ("cnn", {}),
    RESNET: ("resnet-10", {"width": 0.25, "norm": "group"}),
} | {f"MLP 3072-{k}-256-10": ("mlp", {"hidden": [k, 256]}) for k in (128, 256, 512, 1024)}


@dataclass(frozen=True)
class Row:
    """An attack on a network, and the words for it."""

    host: str
    words: str
    attack: PreparedAttack
    training: LocalTraining = ONE_STEP
    records: int = 64  # of a client
    clients: int = 1


ADAPTIVE = TrapWeights(magnitudes="independent", amplitude="host")
FAINT, RANDOM = TrapWeights(amplitude="host"), RobbingTheFed(functional="random")
SENT = replace(FEDAVG, lr=0.001, sends="weights")
TABLES: dict[str, list[Row]] = {
    "robbing-the-fed": [
        *(Row(f"MLP 3072-{k}-256-10", f"{k} bins (theory {64 * (1 - 1 / k) ** 63:.1f})",
              RobbingTheFed()) for k in (128, 256, 512, 1024)),
        Row(MLP, "random functional", RANDOM),
        Row(MLP, "noise 0.1", RobbingTheFed(noise=0.1)),
        Row(MLP, "random functional, noise 0.01", replace(RANDOM, noise=0.01)),
        Row(MLP, "random functional, noise 0.1", replace(RANDOM, noise=0.1)),
        Row(RESNET, "block, 512 bins", RobbingTheFed(form="block")),
        Row(CNN, "behind identity convolutions, 256 bins", RobbingTheFed()),
        Row(MLP, "FedAvg", RobbingTheFed(), FEDAVG),
        Row(MLP, "FedAvg, 5 epochs, lr 0.001", RobbingTheFed(), replace(FEDAVG, epochs=5, lr=1e-3)),
        Row(MLP, "FedAvg, 5 epochs", RobbingTheFed(), replace(FEDAVG, epochs=5)),
        Row(MLP, "FedAvg, lr 0.001, float32 weights sent", RobbingTheFed(), SENT),
        Row(MLP, "the same, `gain = 30`", RobbingTheFed(gain=30), SENT),
        Row(RESNET, "block, FedAvg", RobbingTheFed(form="block"), FEDAVG),
        Row(CNN, "FedAvg", RobbingTheFed(), FEDAVG),
    ],
    "trap-weights": [
        *(Row(MLP, f"scale {scale:.2f}", TrapWeights(scale=scale))
          for scale in (0.9, 0.95, 0.97, 0.99)),
        Row(MLP, "adaptive", ADAPTIVE),
        Row(MLP, "FedAvg", TrapWeights(), FEDAVG),
        Row(MLP, "FedAvg, 5 epochs", TrapWeights(), replace(FEDAVG, epochs=5)),
        Row(CNN, "scale 0.95", TrapWeights()),
        Row(CNN, "adaptive", ADAPTIVE),
        Row(CNN, "FedAvg", TrapWeights(), FEDAVG),
        Row(CNN, 'FedAvg, `amplitude = "host"`', FAINT, FEDAVG),
        Row(CNN, 'FedAvg, `amplitude = "host"`, lr 0.001', FAINT, replace(FEDAVG, lr=0.001)),
    ],
    "fishing": [
        Row(MLP, "class", Fishing()),
        Row(MLP, "class, FedAvg", Fishing(), FEDAVG),
        Row(MLP, "camouflage 0.05, bias 10", Fishing(camouflage=0.05, bias=10.0)),
        Row(MLP, "camouflage 0.2, bias 10", Fishing(camouflage=0.2, bias=10.0)),
        Row(MLP, "feature", Fishing(by="feature")),
        Row(CNN, "class", Fishing()),
        Row(CNN, "class, FedAvg", Fishing(), FEDAVG),
        Row(CNN, "camouflage 0.2, bias 10, FedAvg", Fishing(camouflage=0.2, bias=10.0), FEDAVG),
        Row(CNN, "feature", Fishing(by="feature")),
    ],
    "loki": [
        Row(RESNET, "16 images per client", Loki(), replace(ONE_STEP, batch_size=16), 16, 4),
        Row(RESNET, "64 images per client", Loki(), clients=4),
        Row(RESNET, "64 images per client, FedAvg", Loki(), FEDAVG, clients=4),
    ],
}  # fmt: skip


def pictures() -> tuple[Dataset, Dataset]:
    """What clients hold, and what the server has of its own."""
    known = data.load("cifar10", split="train")
    public = replace(known, inputs=known.inputs[:PUBLIC], labels=known.labels[:PUBLIC])
    return data.load("cifar10", split="test"), public


def played(row: Row, seed: int, private: Dataset, public: Dataset) -> tuple[Round, Reconstruction]:
    """A round in which the server sent its own model, and what it read from the update."""
    kind, options = HOSTS[row.host]
    rng, weights = (torch.Generator().manual_seed(seed) for _ in range(2))
    model = models.make(kind, shape=(3, 32, 32), classes=10, rng=weights, **options)
    scenario = Scenario(
        lambda: model, private, row.training, row.clients, records=row.records, scale=SCALE
    )
    round_ = simulate(scenario, rng)
    sent = row.attack.prepare(target(round_, public), rng)
    round_ = tampered(round_, sent, rng)
    view = ThreatModel(actor="server" if row.clients == 1 else "aggregate", malicious=True)
    seen = threat.observe(round_, view, kept=sent.kept)
    return round_, row.attack.reconstruct(seen, rng)


def recovered(row: Row, seed: int, private: Dataset, public: Dataset) -> tuple[str, ...]:
    """How many images came back above 50 dB and above 30 dB."""
    round_, guess = played(row, seed, private, public)
    truth = torch.cat([client.inputs for client in round_.truths])
    error = metrics.pairwise_mse(guess.inputs, truth).amin(0)
    return tuple(str(int((error < 10 ** (-dB / 10)).sum())) for dB in (50, 30))


def fished(row: Row, seed: int, private: Dataset, public: Dataset) -> tuple[str, ...]:
    """Records caught by the attack's own count; PSNR and cosine of features to the nearest record.

    The class is the seed, modulo 10: that of one record of the batch, of all for by="feature".
    """
    assert isinstance(row.attack, Fishing)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(seed))
    label = seed % 10
    own = private.labels[order] == label
    alone = 1 if row.attack.by == "class" else row.records
    chosen = torch.cat([order[own][:alone], order[~own][: row.records - alone]])
    batch = replace(private, inputs=private.inputs[chosen], labels=private.labels[chosen])
    row = replace(row, attack=replace(row.attack, label=label))
    round_, guess = played(row, seed, batch, public)
    if "features" not in guess.facts:
        return "0", "–", "–"
    truth = batch.inputs[:alone]
    host = round_.sent[0]
    assert isinstance(host, nn.Sequential)
    with torch.no_grad():  # only the last layer was changed: the features are the honest ones
        features = host[:-1](round_.record.entering(truth))
    cosine = float(F.cosine_similarity(features, guess.facts["features"][None]).max())
    pixels = [float(metrics.psnr(one[None].expand_as(truth), truth).max()) for one in guess.inputs]
    dB = f"{max(pixels):.0f}" if pixels else "–"
    return f"{guess.facts['fished']:.2g}", dB, f"{cosine:.5f}"


def table(name: str, seeds: int, private: Dataset, public: Dataset) -> None:
    measure = fished if name == "fishing" else recovered
    heads = ["caught", "PSNR, dB", "cosine"] if name == "fishing" else ["> 50 dB", "> 30 dB"]
    print(f"\n{name}\n\n| host | setting | {' | '.join(heads)} |\n{'|---' * (len(heads) + 2)}|")
    for row in TABLES[name]:
        runs = [measure(row, seed, private, public) for seed in range(seeds)]
        cells = [listed(column) for column in zip(*runs, strict=True)]
        print(f"| {row.host} | {row.words} | {' | '.join(cells)} |", flush=True)


def listed(values: tuple[str, ...]) -> str:
    return ", ".join(values) if len(set(values)) > 1 else f"{values[0]} (all)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attack", nargs="?", choices=TABLES, help="default: all of them")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(arguments)
    try:
        private, public = pictures()
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    for name in [args.attack] if args.attack else TABLES:
        table(name, args.seeds, private, public)
    return 0


if __name__ == "__main__":
    sys.exit(main())
