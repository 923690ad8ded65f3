"""Image folders and npz archives."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from leakgauge.data import load
from leakgauge.errors import DataError


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(path, **options)
    return path


def flat(colour, height=8, width=8):
    return np.full((height, width, 3), colour)


@pytest.fixture
def pictures(tmp_path):
    save(tmp_path / "dog" / "b.png", flat((0, 255, 0)))
    save(tmp_path / "dog" / "a.BMP", flat((0, 0, 255)))
    save(tmp_path / "cat" / "x.tif", flat((255, 0, 0)))
    return tmp_path


def test_classes_and_files_are_sorted(pictures):
    (pictures / "dog" / "notes.txt").write_text("no image")
    (pictures / "readme.md").write_text("no class")
    save(pictures / ".thumbnails" / "x.png", flat(9))
    data = load("folder", path=pictures, size=4)
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 1]
    assert data.inputs.shape == (3, 3, 4, 4)
    assert data.inputs.mean((2, 3)).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff"])
def test_every_format(tmp_path, suffix):
    save(tmp_path / "a" / f"x.{suffix}", flat((200, 100, 50)))
    mean = load("folder", path=tmp_path, size=8).inputs.mean((0, 2, 3)) * 255
    assert torch.allclose(mean, torch.tensor([200.0, 100, 50]), atol=6)  # jpeg and webp lose a bit


def test_the_centre_is_kept_and_its_direction(tmp_path):
    wide = flat(255, 8, 24)
    wide[:, 8:16] = 0  # the central square: black, but one white corner
    wide[0:4, 8:12] = 255
    save(tmp_path / "a" / "wide.png", wide)
    save(tmp_path / "a" / "tall.png", wide.transpose(1, 0, 2))
    data = load("folder", path=tmp_path, size=8)
    expected = torch.zeros(8, 8)
    expected[:4, :4] = 1
    for image in data.inputs:
        assert torch.equal(image[0], expected)


def test_shrinking_is_antialiased(tmp_path):
    stripes = np.zeros((64, 64, 3))
    stripes[:, ::2] = 255
    save(tmp_path / "a" / "x.png", stripes)
    small = load("folder", path=tmp_path, size=8).inputs
    assert float((small[..., 1:-1] - 0.5).abs().max()) < 0.02  # every second pixel alone is 0 or 1


def test_the_camera_orientation_is_obeyed(tmp_path):
    image = flat(0)
    image[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    save(tmp_path / "a" / "x.png", image, exif=exif)
    data = load("folder", path=tmp_path, size=8).inputs[0, 0]
    assert data[:4].max() == 0
    assert data[4:].min() == 1


def test_one_channel_is_grey(pictures):
    data = load("folder", path=pictures, size=4, channels=1)
    assert data.inputs.shape == (3, 1, 4, 4)
    red, blue, green = data.inputs.mean((1, 2, 3)).tolist()
    assert [red, blue, green] == pytest.approx([0.299, 0.114, 0.587], abs=0.003)


def test_grey_and_transparent_files_become_colour(tmp_path):
    save(tmp_path / "a" / "grey.png", np.full((8, 8), 128))
    save(tmp_path / "a" / "rgba.png", np.full((8, 8, 4), (10, 20, 30, 0)))
    data = load("folder", path=tmp_path, size=8)
    assert (data.inputs[:, :, 0, 0] * 255).round().tolist() == [[128] * 3, [10, 20, 30]]


def test_a_damaged_image_is_named(pictures):
    file = pictures / "dog" / "b.png"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3))
    raw = save(file, noise).read_bytes()
    for damaged in (raw[: len(raw) // 2], raw[:20], b"", b"text" * 99):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read as an image") as raised:
            load("folder", path=pictures)
        assert str(file) in str(raised.value)


def test_a_format_in_disguise_is_not_decoded(pictures):
    """Pillow goes by content, not by the name, and PostScript would start an interpreter."""
    Image.new("RGB", (8, 8)).save(pictures / "dog" / "b.png", format="GIF")
    with pytest.raises(DataError, match="cannot be read as an image"):
        load("folder", path=pictures)


@pytest.mark.parametrize("share", [1.5, 3])  # Pillow warns above its limit, refuses above twice
def test_a_decompression_bomb_is_an_error(pictures, monkeypatch, share):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(64 / share))
    with pytest.raises(DataError, match="decompression bomb"):
        load("folder", path=pictures)


def test_sixteen_bits_are_refused_and_not_clipped(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "a" / "x.png")
    with pytest.raises(DataError, match="8 bits per channel, got mode I"):
        load("folder", path=tmp_path)


def test_folders_that_are_no_classes(tmp_path):
    with pytest.raises(DataError, match=r"a folder of class folders at .*gone, found none"):
        load("folder", path=tmp_path / "gone")
    save(tmp_path / "a.png", flat(1))
    with pytest.raises(DataError, match=r"\(1 images lie in it directly\); move"):
        load("folder", path=tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="remove or fill"):
        load("folder", path=tmp_path)
    save(tmp_path / "train" / "cat" / "a.png", flat(1))
    with pytest.raises(DataError, match=r"did you mean path=.*train"):
        load("folder", path=tmp_path)


RGB = np.arange(2 * 5 * 7 * 3, dtype=np.uint8).reshape(2, 5, 7, 3)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (RGB, RGB.transpose(0, 3, 1, 2)),
        (RGB.transpose(0, 3, 1, 2), RGB.transpose(0, 3, 1, 2)),
        (RGB[..., 0], RGB[:, None, :, :, 0]),
        (RGB[..., :1], RGB[:, None, :, :, 0]),
        (RGB / 255, RGB.transpose(0, 3, 1, 2)),
    ],
    ids=["NHWC", "NCHW", "NHW", "NHW1", "floats"],
)
def test_npz_layouts(tmp_path, images, expected):
    np.savez(tmp_path / "x.npz", images=images, labels=[0, 2])
    data = load("npz", path=tmp_path / "x.npz")
    assert (data.name, data.classes) == ("npz x.npz", ("0", "1", "2"))
    assert data.labels.tolist() == [0, 2]
    assert np.array_equal((data.inputs * 255).round().numpy(), expected)


def test_npz_class_names(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", images=RGB, labels=[0, 1], classes=["cat", "dog"])
    assert load("npz", path=str(tmp_path / "x.npz")).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": RGB}, "array 'labels', got images"),
        ({"labels": [0]}, "array 'images', got labels"),
        ({}, "'images', got nothing"),
        ({"images": RGB[0, 0], "labels": [0]}, r"1 or 3 channels, got shape \(7, 3\)"),
        ({"images": np.zeros((2, 5, 7, 4)), "labels": [0, 1]}, r"got shape \(2, 5, 7, 4\)"),
        ({"images": np.zeros((2, 3, 9, 3)), "labels": [0, 1]}, r"may be \(N, C, H, W\) or"),
        ({"images": RGB * 1.0, "labels": [0, 1]}, "divide by 255"),
        ({"images": RGB.astype(int), "labels": [0, 1]}, "uint8"),
        ({"images": RGB, "labels": [0.0, 1.0]}, "whole numbers"),
        ({"images": RGB, "labels": [0, 1], "classes": ["one"]}, r"classes \(1\), got 1"),
        ({"images": RGB, "labels": [0, 1], "classes": [3, 4]}, "list of names, got int"),
        ({"images": RGB, "labels": [0, 1], "classes": "ab"}, r"of shape \(\)"),
        ({"images": RGB, "labels": np.array([{}, {}])}, "without objects"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, arrays, words):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=words):
        load("npz", path=tmp_path / "x.npz")


class Mark:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return io.open, (str(self.path), "w")


def test_npz_runs_nothing(tmp_path):
    mark = tmp_path / "mark"
    np.savez(tmp_path / "x.npz", images=np.array([Mark(mark)], dtype=object), labels=[0])
    (tmp_path / "y.npz").write_bytes(pickle.dumps(Mark(mark)))
    for name in ("x", "y"):
        with pytest.raises(DataError, match="NumPy archive"):
            load("npz", path=tmp_path / f"{name}.npz")
    assert not mark.exists()


def test_npz_files_that_are_none(tmp_path):
    file = tmp_path / "x.npz"
    with pytest.raises(DataError, match="found none"):
        load("npz", path=file)
    np.savez(file, images=RGB, labels=[0, 1])
    raw = file.read_bytes()
    np.save(tmp_path / "single.npy", RGB)
    damaged = bytearray(raw)
    damaged[raw.index(RGB.tobytes()) + 5] ^= 255
    for content in (
        raw[: len(raw) // 2],
        b"",
        b"text",
        (tmp_path / "single.npy").read_bytes(),
        bytes(damaged),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match="NumPy archive"):
            load("npz", path=file)
    with pytest.raises(DataError, match="no plain file"):
        load("npz", path=tmp_path)
