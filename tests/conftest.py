"""What the tests share: a thread, a seed, a seeded generator, a small model, an easy data set."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch import nn

from leakgauge.types import Batch, Dataset

settings.register_profile("steady", deadline=None)  # a busy machine is not a failing test
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors: threads that wait for each other on a busy machine cost ten times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """Layers that a test makes without a seed begin with the same weights each time."""
    torch.manual_seed(0)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def model() -> nn.Module:
    """Four logits for (3, 8, 8), with the layers whose mode matters: batch norm and dropout.

    Its running statistics are not those of any batch, so that the modes differ.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(3, 6, 3, padding=1),
                norm=nn.BatchNorm2d(6),
                act=nn.ReLU(),
                pool=nn.AvgPool2d(2),
                flat=nn.Flatten(),
                drop=nn.Dropout(0.5),
                head=nn.Linear(96, 4),
            )
        )
        nn.init.uniform_(net.norm.weight, 0.5, 1.5)
        nn.init.normal_(net.norm.running_mean)
        nn.init.uniform_(net.norm.running_var, 0.5, 2.0)
    return net


@pytest.fixture
def easy() -> Dataset:
    """64 records of four classes that a small network separates in a few steps."""
    rng = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 4
    templates = torch.rand(4, 3, 8, 8, generator=rng)
    noise = 0.1 * torch.randn(64, 3, 8, 8, generator=rng)
    return Dataset("easy", (templates[labels] + noise).clamp(0, 1), labels, tuple("abcd"))


@pytest.fixture
def batch(easy: Dataset) -> Batch:
    """Twelve records."""
    return Batch(easy.inputs[:12], easy.labels[:12])
