"""MNIST and Fashion-MNIST from idx files."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from leakgauge.data import load
from leakgauge.errors import DataError

DATA = Path(os.environ.get("LEAKGAUGE_DATA", "")) / "MNIST" / "raw"
needs_mnist = pytest.mark.skipif(
    "LEAKGAUGE_DATA" not in os.environ or not any(DATA.glob("t10k-images*")),
    reason="LEAKGAUGE_DATA does not hold MNIST/raw",
)
PIXELS = np.arange(3 * 28 * 28, dtype=np.int64).astype(np.uint8).reshape(3, 28, 28)


def images(count=3, rows=28, columns=28, magic=2051, data=None):
    data = PIXELS.tobytes() if data is None else data
    return struct.pack(">4I", magic, count, rows, columns) + data


def labels(count=3, magic=2049, data=bytes([7, 0, 9])):
    return struct.pack(">2I", magic, count) + data


def write(folder, split="train", image_file=None, label_file=None, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (
        ("images-idx3", image_file or images()),
        ("labels-idx1", label_file or labels()),
    ):
        name = folder / f"{split}-{kind}-ubyte"
        if packed:
            name.with_name(name.name + ".gz").write_bytes(gzip.compress(content))
        else:
            name.write_bytes(content)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder", "seven"),
    [("mnist", "MNIST/raw", "7"), ("fashion-mnist", "FashionMNIST/raw", "Sneaker")],
)
def test_pixels_labels_and_names(tmp_path, packed, name, folder, seven):
    write(tmp_path / folder, packed=packed)
    write(tmp_path / folder, "t10k", label_file=labels(data=bytes([1, 2, 3])), packed=packed)
    data = load(name, root=tmp_path)
    assert data.name == f"{name} train"
    assert np.array_equal((data.inputs[:, 0] * 255).round().numpy(), PIXELS)
    assert data.labels.tolist() == [7, 0, 9]
    assert data.classes[7] == seven
    assert load(name, root=tmp_path, split="test").labels.tolist() == [1, 2, 3]


def test_one_set_is_not_taken_for_the_other(tmp_path, monkeypatch):
    """Loose files count only where the user points at them."""
    write(tmp_path)
    assert len(load("fashion-mnist", root=tmp_path)) == 3
    monkeypatch.setenv("LEAKGAUGE_DATA", str(tmp_path))
    with pytest.raises(DataError, match="FashionMNIST"):
        load("fashion-mnist")


@pytest.mark.parametrize(
    ("image_file", "label_file", "words"),
    [
        (labels(), None, "ends within its header|magic number 2051, got 2049"),
        (images(magic=2049), None, "magic number 2051, got 2049"),
        (None, labels(magic=2051), "magic number 2049, got 2051"),
        (images()[:10], None, "within its header"),
        (images()[:-1], None, "expected 2352 bytes of data, got only 2351"),
        (images() + b"x", None, "got more"),
        (images(rows=27), None, r"got 3 of \(27, 28\)"),
        (images(count=2**32 - 1), None, "got 4294967295 of"),
        (images(count=2, data=PIXELS[:2].tobytes()), None, "2 images and 3 labels"),
        (None, labels(data=bytes([1, 2, 10])), r"number of classes \(10\), got 10"),
        (images(count=0, data=b""), labels(count=0, data=b""), "at least one image"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_files_are_refused_in_words(tmp_path, image_file, label_file, words, packed):
    write(tmp_path, image_file=image_file, label_file=label_file, packed=packed)
    with pytest.raises(DataError, match=words):
        load("mnist", root=tmp_path)


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b"no gzip" + b, lambda b: b""])
def test_damaged_gzip(tmp_path, damage):
    write(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"cannot be read|within its header") as raised:
        load("mnist", root=tmp_path)
    assert str(file) in str(raised.value)


def test_damage_inside_the_compressed_bytes(tmp_path):
    write(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    raw = bytearray(file.read_bytes())
    raw[-8] ^= 1  # the check sum that gzip keeps
    file.write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        load("mnist", root=tmp_path)


def test_labels_may_not_be_missing(tmp_path):
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte or .*found neither"):
        load("mnist", root=tmp_path)


@needs_mnist
def test_the_real_test_set():
    data = load("mnist", split="test", root=DATA.parent.parent)
    assert data.inputs.shape == (10000, 1, 28, 28)
    assert sorted(data.labels.unique().tolist()) == list(range(10))
    assert data.labels[:4].tolist() == [7, 2, 1, 0]  # as every book prints them
    ink = torch.stack([data.inputs[data.labels == k].mean() for k in range(10)])
    assert int(ink.argmin()) == 1  # the digit with the least ink
