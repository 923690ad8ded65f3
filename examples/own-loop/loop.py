"""A home-grown federation in plain PyTorch whose rounds are captured, to be audited afterwards.

python loop.py captured            # what travelled, and the clients' records: a test federation
python loop.py captured --private  # what travelled only
leakgauge audit captured
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import leakgauge as lg
from leakgauge.records import Images

CLIENTS, RECORDS, ROUNDS, LR = 2, 4, 2, 0.1


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def local_training(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict:
    """What a client does: one step of SGD. It sends its new weights."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimiser.step()
    return model.state_dict()


def main(folder: str, private: bool) -> None:
    torch.manual_seed(0)
    digits = lg.data.load("digits")
    model = make_model()
    for _ in range(ROUNDS):
        drawn = torch.randperm(len(digits))[: CLIENTS * RECORDS].split(RECORDS)
        batches = [lg.Batch(digits.inputs[i], digits.labels[i]) for i in drawn]
        sent = [local_training(model, batch.inputs, batch.labels) for batch in batches]
        lg.capture(
            folder,
            model,
            sent,
            made_by="loop:make_model",
            record=Images((1, 8, 8)),
            classes=digits.classes,
            training=lg.LocalTraining(lr=LR, batch_size=RECORDS, sends="weights"),
            sizes=[len(batch) for batch in batches],
            truths=None if private else batches,
        )
        mean = {name: sum(one[name] for one in sent) / CLIENTS for name in sent[0]}
        model.load_state_dict(mean)


if __name__ == "__main__":
    main(sys.argv[1], private="--private" in sys.argv[2:])
