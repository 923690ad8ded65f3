"""CIFAR from pickles, and pickles that want more than to be read."""

import contextlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakgauge.data import load
from leakgauge.data._unpickle import read_pickle
from leakgauge.errors import DataError

DATA = Path(os.environ.get("LEAKGAUGE_DATA", "")) / "cifar-10-batches-py"
needs_cifar = pytest.mark.skipif(
    "LEAKGAUGE_DATA" not in os.environ or not (DATA / "test_batch").is_file(),
    reason="LEAKGAUGE_DATA does not hold cifar-10-batches-py",
)
ROWS = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)


def write(folder, name, content, protocol=4):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder / name


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    names = [b"c%d" % k for k in range(10)]
    write(folder, "batches.meta", {b"label_names": names, b"num_vis": 3072})
    for k in range(1, 6):
        write(folder, f"data_batch_{k}", {b"data": ROWS + np.uint8(k), b"labels": [k, 9]})
    write(folder, "test_batch", {"data": ROWS, "labels": [3, 4]}, protocol=2)
    return folder


def test_a_row_is_red_then_green_then_blue(cifar10):
    data = load("cifar10", root=cifar10.parent, split="test")
    assert data.name == "cifar10 test"
    assert data.labels.tolist() == [3, 4]
    assert data.classes[3] == "c3"
    for n, channel, y, x in [(0, 0, 0, 1), (0, 1, 0, 0), (1, 2, 31, 5), (1, 0, 7, 0)]:
        value = ROWS[n, 1024 * channel + 32 * y + x] / 255
        assert float(data.inputs[n, channel, y, x]) == pytest.approx(value)


def test_training_batches_in_order_and_the_name_says_which_part(cifar10):
    data = load("cifar10", root=cifar10.parent)
    assert data.name == "cifar10 train"
    assert data.labels.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    (cifar10 / "data_batch_2").unlink()
    part = load("cifar10", root=cifar10.parent)
    assert part.name == "cifar10 train (4 of 5 batches)"
    assert part.labels.tolist() == [1, 9, 3, 9, 4, 9, 5, 9]
    assert torch.equal(part.inputs[2:4], data.inputs[4:6])
    for file in cifar10.glob("data_batch_*"):
        file.unlink()
    with pytest.raises(DataError, match="expected data_batch_"):
        load("cifar10", root=cifar10.parent)


def test_root_may_be_the_folder_itself(cifar10, monkeypatch):
    assert len(load("cifar10", root=cifar10)) == 10
    monkeypatch.setenv("LEAKGAUGE_DATA", str(cifar10.parent))
    assert len(load("cifar10", split="test")) == 2


def test_cifar100_takes_the_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    fine, coarse = [b"f%d" % k for k in range(100)], [b"g%d" % k for k in range(20)]
    write(folder, "meta", {b"fine_label_names": fine, b"coarse_label_names": coarse})
    for split, label in (("train", 99), ("test", 42)):
        content = {b"data": ROWS[:1], b"fine_labels": [label], b"coarse_labels": [7]}
        write(folder, split, content)
    train, test = (load("cifar100", root=tmp_path, split=s) for s in ("train", "test"))
    assert (train.labels.tolist(), test.labels.tolist()) == ([99], [42])
    assert train.classes[99] == "f99"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("test_batch", {"data": ROWS[:, :100], "labels": [0, 1]}, r"3072 bytes, got .*\(2, 100\)"),
        ("test_batch", {"data": ROWS.astype("f4"), "labels": [0, 1]}, "got float32"),
        ("test_batch", {"data": ROWS, "labels": [0]}, "2 whole numbers in 'labels', got 1"),
        ("test_batch", {"data": ROWS, "labels": [0, "x"]}, "whole numbers"),
        ("test_batch", {"data": ROWS, "labels": [0, 10]}, r"classes \(10\), got 10"),
        ("test_batch", {"data": ROWS, "labels": [0, 2**70]}, "arrays of numbers"),
        ("test_batch", {"data": [1, 2], "labels": [0, 1]}, "ndarray under 'data', got list"),
        ("test_batch", {"labels": [0, 1]}, r"got NoneType \(keys: labels\)"),
        ("test_batch", [1], "it holds a list"),
        ("batches.meta", {}, "list under 'label_names'"),
    ],
)
def test_wrong_content_is_refused_in_words(cifar10, file, content, words):
    write(cifar10, file, content)
    with pytest.raises(DataError, match=words) as raised:
        load("cifar10", root=cifar10.parent, split="test")
    assert "cifar10" in str(raised.value) or str(cifar10 / file) in str(raised.value)


def test_class_names_are_required(cifar10):
    (cifar10 / "batches.meta").unlink()
    with pytest.raises(DataError, match=r"class names in .*batches\.meta"):
        load("cifar10", root=cifar10)


def renamed(raw, core):
    """The same pickle as the other of NumPy 1 and 2 would write it."""
    current = b"numpy._core" if b"numpy._core" in raw else b"numpy.core"
    if raw[2:3] != b"\x95":  # before protocol 4 names are lines of text
        return raw.replace(current, core)
    for module in (b".multiarray", b".numeric"):  # now they carry their length, as the frame does
        old, new = current + module, core + module
        raw = raw.replace(b"\x8c%c" % len(old) + old, b"\x8c%c" % len(new) + new)
    return raw[:3] + struct.pack("<Q", len(raw) - 11) + raw[11:]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=">i4").reshape(3, 4)),
        np.linspace(-1, 1, 5),
    ],
    ids=["bytes", "fortran-big-endian", "floats"],
)
def test_arrays_come_back_as_they_were(tmp_path, protocol, core, array):
    raw = pickle.dumps({"x": array, "n": [1, "é", b"\xff"]}, protocol=protocol)
    (tmp_path / "p").write_bytes(renamed(raw, core))
    found = read_pickle(tmp_path / "p")
    assert found["x"].dtype == array.dtype
    assert np.array_equal(found["x"], array)
    if protocol >= 3:
        assert found["n"] == [1, "é", b"\xff"]


def test_a_file_as_python_2_wrote_it(tmp_path):
    """The opcodes of the public files: text and pixels are Python 2 strings, no frames."""
    data = ROWS[:1].tobytes()
    raw = (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x06aU\x04dataq\x04"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<i", len(data)) + data + b"tbu."
    )
    assert np.array_equal(pickle.loads(raw, encoding="bytes")[b"data"], ROWS[:1])
    (tmp_path / "p").write_bytes(raw)
    found = read_pickle(tmp_path / "p")
    assert found["labels"] == [6]
    assert np.array_equal(found["data"], ROWS[:1])


class Call:
    """Pickles to a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.mkdir, eval, exec, os.system, np.load, getattr])
def test_a_malicious_pickle_is_named_and_not_run(cifar10, tmp_path, protocol, function):
    mark = tmp_path / "mark"
    text = {
        eval: f"__import__('os').mkdir({str(mark)!r})",
        exec: f"import os; os.mkdir({str(mark)!r})",
        os.system: f"mkdir {mark}",
    }.get(function, str(mark))
    args = (text, "x") if function is getattr else (text,)
    file = write(cifar10, "test_batch", {"data": ROWS, "labels": [Call(function, *args)]}, protocol)
    with pytest.raises(DataError, match=rf"asks for \w+\.{function.__name__}, .*not run") as raised:
        load("cifar10", root=cifar10.parent, split="test")
    assert str(file) in str(raised.value)
    assert not mark.exists()


def test_the_malicious_pickle_above_does_work_where_it_is_trusted(tmp_path):
    pickle.loads(pickle.dumps(Call(os.mkdir, str(tmp_path / "mark"))))
    assert (tmp_path / "mark").is_dir()


@pytest.mark.parametrize(
    "raw",
    [
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"cnumpy.core.multiarray\n_reconstruct.__globals__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",  # a dotted name
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cbase64\nencode\n.",
    ],
)
def test_other_ways_to_name_a_function(tmp_path, raw):
    (tmp_path / "p").write_bytes(raw)
    with pytest.raises(DataError, match="asks for "):
        read_pickle(tmp_path / "p")


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, []], dtype=object),
        np.zeros(2, dtype=[("a", "u1"), ("b", "i4")]),
        np.array(["text"]),
        np.dtype("u1"),
        Call(__import__("_codecs").encode, "x", "rot13"),
    ],
    ids=["objects", "fields", "text", "bare dtype", "other codec"],
)
def test_only_arrays_of_numbers(tmp_path, value):
    file = write(tmp_path, "p", {"data": value})
    with pytest.raises(DataError, match="truncated or another kind"):
        read_pickle(file)


def test_every_truncation_is_an_error_in_words(tmp_path):
    raw = pickle.dumps({b"data": ROWS[:, :20], b"labels": [1, 2]}, protocol=4)
    for length in range(len(raw)):
        (tmp_path / "p").write_bytes(raw[:length])
        with pytest.raises(DataError):
            read_pickle(tmp_path / "p")


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_damage_is_an_error_in_words_or_data(tmp_path_factory, place, byte):
    raw = bytearray(pickle.dumps({b"data": ROWS[:, :20], b"labels": [1, 2]}, protocol=2))
    raw[place % len(raw)] = byte
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(raw)
    with contextlib.suppress(DataError):
        assert isinstance(read_pickle(file), dict)


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2000000000\n", b"p-1\n"])
def test_a_few_bytes_cannot_ask_for_all_the_memory(tmp_path, put):
    (tmp_path / "p").write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(DataError, match=r"index .* in a file of"):
        read_pickle(tmp_path / "p")


@needs_cifar
def test_the_real_test_batch_equals_a_plain_unpickling():
    data = load("cifar10", split="test", root=DATA.parent)
    with (DATA / "test_batch").open("rb") as stream:
        theirs = pickle.load(stream, encoding="bytes")
    assert torch.bincount(data.labels).tolist() == [1000] * 10
    assert data.labels.tolist() == theirs[b"labels"]
    rows = (data.inputs.flatten(1) * 255).round().to(torch.uint8).numpy()
    assert np.array_equal(rows, theirs[b"data"])
    assert (data.classes[0], data.classes[9]) == ("airplane", "truck")
