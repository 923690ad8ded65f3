"""The detectors on honest rounds: their largest scores, and their cost beside a local epoch.

    python benchmarks/guard_cost.py [ROUNDS]      prints the tables of docs/methods/detectors.md

CIFAR-10, FedAvg of 4 clients, Dirichlet(0.5), 256 records per client and round in batches of 32,
SGD with momentum .9; every client inspects every round's model with its own memory, the first one
with the warm-up tests as well. Costs are CPU seconds, the median of five runs (of one for the
warm-ups and the exact D-SNR), as a share of one epoch over 2000 records in batches of 32. One
thread. Needs LEAKGAUGE_DATA.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from leakgauge import data, models
from leakgauge.detectors import (
    DSNR,
    Continuity,
    FirstConv,
    HeadInvariant,
    Probe,
    Structure,
    WarmUp,
    Weights,
    snapshots,
)
from leakgauge.fl import aggregate, setting
from leakgauge.fl.local import train
from leakgauge.fl.partition import Dirichlet
from leakgauge.records import Scale, record_of
from leakgauge.tensors import parameters
from leakgauge.types import Batch, Detector, History, LocalTraining, Received

CLIENTS, RECORDS = 4, 256
TRAINING = LocalTraining(
    lr=0.02, batch_size=32, epochs=1, momentum=0.9, order="shuffled"
)  # fmt: skip
SCALE = Scale(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
HOSTS: dict[str, tuple[str, dict[str, object]]] = {
    "mlp": ("mlp", {"hidden": [512, 256]}),
    "lenet-5": ("lenet-5", {"activation": "relu", "pool": "max"}),
    "cnn": ("cnn", {}),
    "resnet-10": ("resnet-10", {"width": 0.25}),
    "vit": ("vit-small", {"dim": 64, "depth": 3, "heads": 4}),
}
CHEAP: dict[str, Detector] = {
    "structure": Structure(),
    "continuity": Continuity(),
    "head invariant": HeadInvariant(),
    "weights": Weights(),
    "first conv": FirstConv(),
    "probe": Probe(),
}
WARM_UPS: dict[str, Detector] = {
    "warm-up, carried": WarmUp(),
    "warm-up, printed": WarmUp(reading="printed"),
}
DEAR = WARM_UPS | {"exact D-SNR": DSNR()}


def made(host: str, seed: int) -> nn.Module:
    name, options = HOSTS[host]
    rng = torch.Generator().manual_seed(seed)
    return models.make(name, shape=(3, 32, 32), classes=10, rng=rng, **options)


def federation(
    model: nn.Module, rounds: int, rng: torch.Generator
) -> Iterator[tuple[list[Batch], list[dict[str, float]]]]:
    """Honest rounds, one by one: the clients' records as they enter the model, and the
    sizes of their updates. The model is that of the round when it is yielded, and steps on
    afterwards."""
    images = data.load("cifar10", split="train")
    shards = Dirichlet(alpha=0.5).split(images, CLIENTS, rng)
    for _ in range(rounds):
        batches = []
        for shard in shards:
            picked = shard[torch.randperm(len(shard), generator=rng)[:RECORDS]]
            batches.append(Batch(images.inputs[picked], images.labels[picked]))
        trained = [
            train(setting(model, batch, 10, SCALE), batch, TRAINING, rng) for batch in batches
        ]
        yield [entering(batch) for batch in batches], [sizes(one.update) for one in trained]
        shares = aggregate.weights([len(b) for b in batches], "records")
        after, buffers = aggregate.merge(parameters(model), trained, shares, 1.0)
        model.load_state_dict(after | buffers, strict=False)


def entering(batch: Batch) -> Batch:
    return Batch(record_of(batch.inputs, SCALE).entering(batch.inputs), batch.labels)


def sizes(named: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.norm()) for name, value in named.items()}


def benign(host: str, rounds: int) -> dict[str, list[float]]:
    """All scores by test, over all clients and rounds."""
    model, rng = made(host, 0), torch.Generator().manual_seed(0)
    fresh = made(host, 1)
    memories: list[History | None] = [None] * CLIENTS
    scores: dict[str, list[float]] = {}
    for batches, updates in federation(model, rounds, rng):
        state = {n: v.clone() for n, v in model.state_dict().items()}
        for k, batch in enumerate(batches):
            received = Received(state, fresh, model, TRAINING, batch, memories[k], again(host))
            for name, test in (CHEAP | WARM_UPS if k == 0 else CHEAP).items():
                for found in test.inspect(received, torch.Generator().manual_seed(k)):
                    key = name if name.startswith("warm-up") else found.test
                    scores.setdefault(key, []).append(found.score)
            taken = () if k else (snapshots(model, batch, TRAINING),)
            memories[k] = remembered(memories[k], state, updates[k], taken)
    return scores


def remembered(
    memory: History | None, state: dict[str, torch.Tensor], own: dict[str, float], taken: tuple
) -> History:
    if memory is None:
        return History(state, 1, own, state, own, snapshots=taken)
    since = {n: memory.since[n] + u for n, u in own.items()}
    return replace(
        memory, state=state, rounds=memory.rounds + 1, own=own, since=since, age=memory.age + 1,
        snapshots=memory.snapshots + taken,
    )  # fmt: skip


def again(host: str) -> Callable[[], nn.Module]:
    return lambda: made(host, int(torch.randint(2**31, ())))


def cost(host: str) -> dict[str, float]:
    """CPU seconds of an epoch over 2000 records, and of each detector as a share of it."""
    model, fresh = made(host, 0), made(host, 1)
    images = data.load("cifar10", split="train")
    rng = torch.Generator().manual_seed(0)
    batch = Batch(images.inputs[:2000], images.labels[:2000])
    began = time.process_time()
    update = train(setting(model, batch, 10, SCALE), batch, TRAINING, rng).update
    epoch = time.process_time() - began
    batch = entering(batch)
    state = model.state_dict()
    own = sizes(update)
    taken = (snapshots(model, batch, TRAINING),) * 3
    history = History(state, 3, own, state, {n: 3 * u for n, u in own.items()}, 3, snapshots=taken)
    received = Received(state, fresh, model, TRAINING, batch, history, again(host))
    shares = {"epoch": epoch}
    for name, test in (CHEAP | DEAR).items():
        runs = []
        for _ in range(1 if name in DEAR else 5):
            began = time.process_time()
            test.inspect(received, rng)
            runs.append(time.process_time() - began)
        shares[name] = statistics.median(runs) / epoch
    return shares


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    print(f"cost as a share of an epoch (2000 records)\n{'host':12}", end="")
    for number, host in enumerate(HOSTS):
        found = cost(host)
        if not number:
            print(*(f"{name:>17}" for name in found), sep="")
        print(f"{host:12}", *(f"{v:17.2f}" if n == "epoch" else f"{v:17.2%}"
                              for n, v in found.items()), sep="", flush=True)  # fmt: skip
    print(f"\nlargest score on honest rounds: {rounds} rounds × {CLIENTS} clients")
    for host in HOSTS:
        scores = benign(host, rounds)
        print(f"{host:12}", *(f"{name} {max(v):.3g} (n={len(v)})" for name, v in scores.items()),
              sep="\n    ", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
