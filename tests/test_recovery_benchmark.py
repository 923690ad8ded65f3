"""The script behind the recovery tables of docs/methods still runs, and counts what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recovery
import torch

from leakgauge.attacks.active import Loki
from leakgauge.types import Dataset, Reconstruction


def noise(count: int, seed: int) -> Dataset:
    """Random images of 8 bits, each of its own brightness; mostly dark, so that traps spring."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 32, 32, generator=rng) ** 6
    images *= torch.rand(count, 1, 1, 1, generator=rng)
    labels = torch.arange(count) % 10
    return Dataset("noise", (255 * images).round() / 255, labels, tuple("abcdefghij"))


@pytest.fixture
def small(monkeypatch):
    """Noise, and of every table the first row, with few records."""
    private, public = noise(200, 1), noise(400, 2)
    monkeypatch.setattr(recovery, "pictures", lambda: (private, public))
    for name, (row, *_) in recovery.TABLES.items():
        row = replace(row, training=replace(row.training, batch_size=4), records=4)
        if name == "loki":
            row = replace(row, attack=Loki(bins=32), clients=2)
        monkeypatch.setitem(recovery.TABLES, name, [row])
    return private, public


def test_every_table_is_printed(small, capsys):
    assert recovery.main(["--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("| MLP", "| ResNet"))]
    assert len(rows) == len(recovery.TABLES) == 4
    assert [line for line in lines if line in recovery.TABLES] == list(recovery.TABLES)
    assert f"| {recovery.MLP} | class | 1 (all) | 150 (all) | 1.00000 (all) |" in rows


def test_images_are_counted_above_each_threshold(small, monkeypatch):
    """Errors of 0, 0.01 (40 dB) and 0.1 (20 dB), and a truth that no guess shows."""
    private, public = small
    (row,) = recovery.TABLES["robbing-the-fed"]
    played = recovery.played

    def fake(*args):
        round_, _ = played(*args)
        shift = torch.tensor([0.0, 0.01, 0.1]).view(3, 1, 1, 1)
        return round_, Reconstruction(round_.truths[0].inputs[:3] + shift, None, 0.0)

    monkeypatch.setattr(recovery, "played", fake)
    assert recovery.recovered(row, 0, private, public) == ("1", "2")


def test_missing_data_is_said_and_exits_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LEAKGAUGE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # nor in the cache of the user
    assert recovery.main(["loki"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "cifar10: expected" in error
    assert "LEAKGAUGE_DATA" in error
