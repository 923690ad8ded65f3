"""Decepticons, measured: patches and tokens found, how exactly, and how many come together.

    python benchmarks/decepticons.py images
    python benchmarks/decepticons.py steps
    python benchmarks/decepticons.py texts

Prints Markdown tables. Images: CIFAR-10 test images, quantiles from training images, in the folder
named by LEAKGAUGE_DATA. Texts: synthetic, by Zipf's law. Three seeds a row, all shown; a seed
draws the weights, the records and the secret.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from board_rows import CIFAR_MEAN, CIFAR_STD
from torch import Tensor, nn

from leakgauge import data, models, threat
from leakgauge.attacks.active.decepticons import Decepticons, recover
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.models.text import TextTransformer
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.types import Dataset, LocalTraining, Observation, ThreatModel

SEEDS = (0, 1, 2)
SMALL = {"dim": 64, "depth": 3, "heads": 4}
TRAINING = LocalTraining(lr=0.01)
SCALE = Scale(CIFAR_MEAN, CIFAR_STD)


@cache
def cifar(split: str) -> Dataset:
    return data.load("cifar10", split=split)


def zipf(count: int, length: int, vocabulary: int, seed: int) -> Dataset:
    """Token k with frequency 1 / (k + 3); the class is the sum of the tokens modulo four."""
    rng = torch.Generator().manual_seed(seed)
    rows = (1 / (torch.arange(vocabulary) + 3.0)).expand(count, -1)
    tokens = torch.multinomial(rows, length, replacement=True, generator=rng)
    return Dataset("zipf", tokens, tokens.sum(1) % 4, tuple("abcd"))


def attacked(
    model: nn.Module, private: Dataset, public: Dataset, training: LocalTraining, records: int,
    attack: Decepticons, seed: int, scale: Scale = AS_THEY_ARE,
) -> tuple[Tensor, Observation]:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    scenario = Scenario(lambda: model, private, training, records=records, scale=scale)
    round_ = simulate(scenario, rng)
    sent = attack.prepare(target(round_, public), rng)
    round_ = tampered(round_, sent, rng)
    seen = threat.observe(round_, ThreatModel(malicious=True), kept=sent.kept)
    return round_.truths[0].inputs, seen


def together(group: Tensor, owner: Tensor) -> int:
    """How many parts stand with the largest share of their true record."""
    return sum(int(owner[group == k].bincount().max()) for k in set(group.tolist()) if k >= 0)


def images(
    training: LocalTraining, records: int, activation: str, seed: int,
    attack: Decepticons | None = None, **host: Any,
) -> tuple[int, int, float, int]:  # fmt: skip
    """Patches found, above 30 dB, their median PSNR, and how many of them come together."""
    attack = attack or Decepticons()
    rng = torch.Generator().manual_seed(seed)
    model = models.make(
        "vit-small", shape=(3, 32, 32), classes=10, rng=rng, activation=activation, **host
    )
    truth, seen = attacked(
        model, cifar("test"), cifar("train"), training, records, attack, seed, SCALE
    )
    found = recover(seen, attack.tolerance)
    assert found.patches is not None
    guess = attack.reconstruct(seen, rng)
    cut = F.unfold(truth, 4, stride=4).transpose(1, 2).unflatten(2, (3, 4, 4))
    mse = (cut[:, found.positions] - found.patches).double().square().flatten(2).mean(2)
    best, owner = mse.min(0)
    psnr = -10 * best.log10()
    group = torch.tensor(guess.facts["records"])
    median = float(psnr.median()) if len(psnr) else float("nan")
    return len(found), int((psnr > 30).sum()), median, together(group, owner)


def row(name: str, runs: list[tuple[Any, ...]], total: str) -> None:
    found, good, median, grouped = (list(column) for column in zip(*runs, strict=True))
    dB = ", ".join(f"{value:.0f}" for value in median)
    print(
        f"| {name} | {total} | {listed(found)} | {listed(good)} | {dB} | {listed(grouped)} |",
        flush=True,
    )


def listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


HEAD = "| {} | of | found | > 30 dB | median dB | together |\n|---|---|---|---|---|---|"


def table_images() -> None:
    print(HEAD.format("host, batch"))
    for activation in ("relu", "gelu"):
        for batch in (1, 4, 8, 16, 64):
            training = replace(TRAINING, batch_size=batch)
            runs = [images(training, batch, activation, seed, **SMALL) for seed in SEEDS]
            row(f"width 64, 3 blocks, {activation}, {batch}", runs, str(64 * batch))
    for batch in (4, 16):
        training = replace(TRAINING, batch_size=batch)
        runs = [images(training, batch, "gelu", seed) for seed in SEEDS]
        row(f"vit-small as it is, gelu, {batch}", runs, str(64 * batch))


def table_steps() -> None:
    print(HEAD.format("four records, local steps"))
    for activation, voice in (("relu", 1.0), ("relu", 0.01), ("gelu", 1.0)):
        for steps, batch in ((2, 2), (5, 4)):
            for lr in (0.01, 0.001):
                training = replace(TRAINING, batch_size=batch, steps=steps, lr=lr)
                attack = Decepticons(voice=voice)
                runs = [images(training, 4, activation, seed, attack, **SMALL) for seed in SEEDS]
                name = f"{activation}, voice {voice:g}, {steps} steps of {batch}, lr {lr:g}"
                row(name, runs, "256")


def table_texts() -> None:
    print("| batch × length, vocabulary | distinct | found | wrong | in place |")
    print("|---|---|---|---|---|")
    for batch, length, vocabulary in ((1, 16, 1000), (4, 16, 1000), (8, 16, 1000), (8, 32, 5000)):
        runs = []
        for seed in SEEDS:
            private, public = (zipf(500, length, vocabulary, 10 * seed + k) for k in (1, 2))
            torch.manual_seed(seed)
            model = TextTransformer(vocabulary, length, 4)
            training = replace(TRAINING, batch_size=batch)
            truth, seen = attacked(model, private, public, training, batch, Decepticons(), seed)
            guess = Decepticons().reconstruct(seen, torch.Generator())
            there = {(j, int(token)) for text in truth for j, token in enumerate(text)}
            got = set(zip(guess.facts["positions"], guess.facts["tokens"], strict=True))
            hits = (guess.inputs[:, None] == truth[None]).sum(2)  # (guessed, true)
            runs.append((len(there), len(got & there), len(got - there), int(hits.amax(1).sum())))
        columns = [listed(list(column)) for column in zip(*runs, strict=True)]
        print(f"| {batch} × {length}, {vocabulary} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = {"images": table_images, "steps": table_steps, "texts": table_texts}
    parser.add_argument("table", choices=tables)
    tables[parser.parse_args().table]()
