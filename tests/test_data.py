"""Loading by name, options, and the one check that every data set passes."""

import gzip

import numpy as np
import pytest
import torch

from leakgauge.data import DATASETS, data_root, digits, load
from leakgauge.data._dataset import make_dataset
from leakgauge.data._remotes import REMOTES
from leakgauge.errors import DataError, PlanError
from leakgauge.types import Dataset

IMAGES = torch.linspace(0, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
LABELS = torch.tensor([1, 0])


def test_bytes_become_fractions_of_255():
    images = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    data = make_dataset("x", images, np.array([0]), ("a",))
    assert data.inputs.dtype == torch.float32
    assert torch.equal(data.inputs.flatten(), torch.arange(256) / 255)


@pytest.mark.parametrize("dtype", [">f8", "<f4", "f2", "g"])
def test_floats_of_any_width_and_byte_order(dtype):
    images = np.array([0, 0.25, 0.5, 1]).astype(dtype).reshape(1, 1, 2, 2)
    data = make_dataset("x", images, np.array([0], dtype=">i2"))
    assert data.inputs.flatten().tolist() == [0, 0.25, 0.5, 1]
    assert data.inputs.dtype == torch.float32
    assert data.labels.dtype == torch.int64


def test_arrays_are_not_shared_with_the_caller():
    images = np.zeros((1, 1, 2, 2), np.float32)
    data = make_dataset("x", images, np.array([0]))
    images += 1
    assert float(data.inputs.max()) == 0


def test_memory_is_contiguous():
    data = make_dataset("x", np.zeros((2, 4, 4, 3), np.uint8).transpose(0, 3, 1, 2), LABELS)
    assert data.inputs.is_contiguous()


def test_classes_are_numbered_when_unnamed():
    assert make_dataset("x", IMAGES, LABELS).classes == ("0", "1")
    assert make_dataset("x", IMAGES, LABELS, ("a", "b", "unseen")).classes == ("a", "b", "unseen")


@pytest.mark.parametrize(
    ("images", "labels", "classes", "words"),
    [
        (IMAGES * 255, LABELS, None, "from 0 to 255; scale"),
        (IMAGES - 0.1, LABELS, None, r"from -0\.1 to"),
        (IMAGES * 1.01, LABELS, None, r"from 0 to 1\.01"),
        (IMAGES.clone().index_fill_(0, torch.tensor([1]), torch.nan), LABELS, None, "finite"),
        (IMAGES.clone().index_fill_(0, torch.tensor([1]), torch.inf), LABELS, None, "finite"),
        (IMAGES[0], LABELS, None, r"\(N, C, H, W\), got shape \(3, 4, 4\)"),
        (IMAGES[:0], LABELS[:0], None, "at least one image"),
        (IMAGES.to(torch.int32), LABELS, None, "uint8 .* got torch.int32"),
        (IMAGES, LABELS[:1], None, "2 images and 1 labels"),
        (IMAGES, LABELS[:, None], None, r"\(N,\)"),
        (IMAGES, LABELS.float(), None, "whole numbers"),
        (IMAGES, LABELS.bool(), None, "whole numbers"),
        (IMAGES, LABELS - 1, None, "count from 0, got -1"),
        (IMAGES, LABELS, ("a",), r"number of classes \(1\), got 1"),
        (IMAGES, LABELS, ("a", "a"), "'a' twice"),
        (np.array([["x"]]), LABELS, None, "arrays of numbers"),
    ],
)
def test_what_a_data_set_may_not_be(images, labels, classes, words):
    with pytest.raises(DataError, match=words):
        make_dataset("x", images, labels, classes)


def test_every_public_set_can_be_fetched_and_loaded():
    assert set(REMOTES) <= set(DATASETS)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data, theirs = load("digits"), load_digits()
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert np.array_equal(data.inputs[:, 0].numpy() * 16, theirs.images)
    assert np.array_equal(data.labels.numpy(), theirs.target)
    assert [data.classes[k] for k in data.labels[:3]] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"1,2,3\n4,5,6\n"), gzip.compress(b"1," * 99)[:-9], None],
    ids=["no gzip", "too few numbers", "cut short", "no file"],
)
def test_damaged_digits_are_an_error_in_words(tmp_path, monkeypatch, content):
    file = tmp_path / "digits.csv.gz"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(digits, "FILE", str(file))
    with pytest.raises(DataError, match=r"digits\.csv\.gz, got .* reinstall"):
        load("digits")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cifar", {}, "did you mean 'cifar10'"),
        ("zzz", {}, "known: cifar10, cifar100, digits"),
        ("photos", {"sise": 16}, "'sise'; did you mean 'size'"),
        ("digits", {"size": 16}, "'size'; it takes none"),
        ("photos", {"size": 0}, "size must be a whole number, 1 or more, got 0"),
        ("photos", {"size": "32"}, "size must be"),
        ("photos", {"per_photo": True}, "per_photo must be"),
        ("mnist", {"split": "val"}, "'train' or 'test', got 'val'"),
        ("cifar10", {"split": None}, "'train' or 'test'"),
        ("cifar100", {"root": 3}, "root must be a path, got 3"),
        ("npz", {}, "option 'path' is missing"),
        ("npz", {"path": 3}, "path must be a path, got 3"),
        ("folder", {"path": "", "size": 8}, "path must be a path, got ''"),
        ("folder", {"path": ".", "channels": 4}, "channels must be 1"),
    ],
)
def test_wrong_names_and_options_are_refused_in_words(name, options, words):
    with pytest.raises(PlanError, match=words):
        load(name, **options)


def test_where_sets_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKGAUGE_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path / "option") == tmp_path / "option"
    assert data_root() == tmp_path / "variable"
    monkeypatch.delenv("LEAKGAUGE_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "leakgauge" / "data"


@pytest.mark.parametrize("name", sorted(REMOTES))
def test_a_missing_set_says_where_it_looked_and_what_to_do(name, monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKGAUGE_DATA", str(tmp_path))
    with pytest.raises(DataError) as raised:
        load(name)
    message = str(raised.value)
    remote = REMOTES[name]
    assert str(tmp_path / remote.folder) in message
    assert f"leakgauge data fetch {name}" in message
    for file in remote.files:
        assert remote.home + file.name in message
        assert file.sha256 in message


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "own_data_module.py").write_text(
        "import torch\n"
        "from leakgauge.types import Dataset\n"
        "def pair(n=2): return torch.rand(n, 1, 4, 4), torch.arange(n)\n"
        "def full(): return Dataset('mine', *pair(), ('cat', 'dog'))\n"
        "def bright(): return torch.full((1, 1, 2, 2), 7.0), torch.tensor([0])\n"
        "def lists(): return [[0.0]], [0]\n"
        "def anything(**options): return pair(**options)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "own_data_module"


def test_own_code_returns_a_pair_or_a_data_set(own_code):
    data = load(f"{own_code}:pair", n=5)
    assert (data.name, len(data), data.classes) == (f"{own_code}:pair", 5, tuple("01234"))
    assert len(load(f"{own_code}:anything", n=3)) == 3
    full = load(f"{own_code}:full")
    assert isinstance(full, Dataset)
    assert (full.name, full.classes) == ("mine", ("cat", "dog"))


@pytest.mark.parametrize(
    ("spec", "options", "error", "words"),
    [
        ("no_such_module:make", {}, PlanError, "no_such_module:make' could not be imported"),
        ("own_data_module:pairs", {}, PlanError, "got nothing; did you mean 'pair'"),
        ("own_data_module:number", {}, PlanError, "got a int"),
        ("own_data_module:pair", {"m": 3}, PlanError, "unknown option 'm'"),
        ("own_data_module:bright", {}, DataError, "from 7 to 7"),
        ("own_data_module:lists", {}, DataError, "got tuple"),
    ],
)
def test_own_code_that_does_not_fit(own_code, spec, options, error, words):
    with pytest.raises(error, match=words):
        load(spec, **options)
