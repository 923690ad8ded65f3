"""The embedded photographs."""

import socket
from importlib import import_module, resources

import numpy as np
import pytest
import torch
from PIL import Image

from leakgauge.data import load
from leakgauge.errors import DataError, PlanError

photos = import_module("leakgauge.data.photos")


def original(file):
    """A photograph as (1, 3, H, W) in [0, 1]."""
    image = Image.open(resources.files("skimage") / "data" / file).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255


def of_class(data, name):
    return data.inputs[data.labels == data.classes.index(name)]


def shrink(image, size):
    """Antialiased by another library than the one under test."""
    small = torch.nn.functional.interpolate(
        image, (size, size), mode="bicubic", antialias=True, align_corners=False
    )
    return small.clamp(0, 1)[0]


@pytest.fixture(scope="module", params=[16, 32])
def default(request):
    return load("photos", size=request.param)


@pytest.fixture
def only(monkeypatch):
    """Only this photograph: the others need not be decoded."""
    return lambda name: monkeypatch.setattr(photos, "FILES", {name: photos.FILES[name]})


def test_ten_balanced_classes_in_colour(default):
    data = default
    assert data.inputs.shape[:2] == (240, 3)
    assert torch.bincount(data.labels).tolist() == [24] * 10
    assert {"ihc", "retina"} <= set(data.classes)
    assert torch.equal(data.labels, torch.arange(240) % 10)


def test_records_differ_and_show_something(default):
    data = default
    assert len(data.inputs.unique(dim=0)) == len(data)
    weights = torch.tensor([0.299, 0.587, 0.114])  # brightness, ITU-R BT.601
    brightness = torch.einsum("nchw,c->nhw", data.inputs, weights)
    assert float(brightness.flatten(1).std(1, correction=0).min()) > 0.079


def test_the_same_records_every_time_and_more_of_them_only_add(default):
    few = load("photos", size=default.inputs.shape[-1], per_photo=3)
    assert len(few) == 30
    assert torch.equal(few.inputs, default.inputs[:30])
    assert torch.equal(few.labels, default.labels[:30])


def test_crops_are_where_the_docstring_says(monkeypatch, only):
    """Level k of a square photograph: k × k crops of side 2s/(k+1), the first the whole of it."""
    only("retina")
    monkeypatch.setattr(photos, "CONTRAST", 0)
    monkeypatch.setattr(photos, "_first_crops", photos._first_crops.__wrapped__)
    crops = of_class(load("photos", size=24, per_photo=1000), "retina")
    whole = original("retina.jpg")
    assert len(crops) == 1 + 4 + 9 + 16 + 25
    s = whole.shape[-1]
    third = s // 3
    places = {
        0: (0, 0, s, s),  # level 1
        2: (0, third, 2 * third, s),  # level 2, upper right
        3: (third, 0, s, 2 * third),  # level 2, lower left
        54: (2 * third, 2 * third, s, s),  # level 5, the last corner
    }
    for k, (top, left, bottom, right) in places.items():
        expected = shrink(whole[..., top:bottom, left:right], 24)
        assert float((crops[k] - expected).abs().max()) < 0.08
        assert float((crops[k] - expected).abs().mean()) < 0.01


def test_wide_photographs_are_covered_from_edge_to_edge(only):
    only("coffee")
    whole = original("coffee.png")
    height = whole.shape[-2]
    crops = of_class(load("photos", size=32, per_photo=2), "coffee")
    for crop, part in zip(crops, (whole[..., :height], whole[..., -height:]), strict=True):
        assert float((crop - shrink(part, 32)).abs().mean()) < 0.01


def test_grey_photographs_have_three_equal_channels(only):
    only("camera")
    grey = of_class(load("photos", size=16, per_photo=2), "camera")
    assert torch.equal(grey[:, 0], grey[:, 1])
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_no_crop_is_enlarged(only):
    only("page")
    large = load("photos", size=180, per_photo=1000)
    assert len(of_class(large, "page")) == 3  # 191 pixels high: level 1 only
    with pytest.raises(PlanError, match="no photograph has 192 pixels"):
        load("photos", size=192)


def test_a_large_size_leaves_small_photographs_out_but_not_their_class():
    data = load("photos", size=224, per_photo=2)
    assert data.classes == tuple(photos.FILES)
    counts = torch.bincount(data.labels, minlength=10)
    assert int(counts[data.classes.index("page")]) == 0
    assert sorted(counts.tolist()) == [0] + [2] * 9


def test_only_leaves_the_other_photographs_out_but_labels_as_they_are(default):
    size = default.inputs.shape[-1]
    data = load("photos", size=size, only=["retina", "ihc"])
    assert data.classes == default.classes
    for name in default.classes:
        expected = of_class(default, name) if name in ("retina", "ihc") else default.inputs[:0]
        assert torch.equal(of_class(data, name), expected)


@pytest.mark.parametrize(
    ("only", "message"),
    [(["ich"], "did you mean 'ihc'"), ("ihc", "list of photographs"), ([3], "unknown photograph")],
)
def test_what_cannot_be_wanted_is_refused(only, message):
    with pytest.raises(PlanError, match=message):
        load("photos", only=only)


def test_a_size_too_large_for_the_wanted_ones_names_them():
    with pytest.raises(PlanError, match="no photograph has 224 pixels per side among page"):
        load("photos", size=224, only=["page"])


def test_the_network_is_never_touched(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr("skimage.data._fetchers._fetch", refuse)
    monkeypatch.setattr(photos, "_first_crops", photos._first_crops.__wrapped__)
    assert len(load("photos", size=16, per_photo=1)) == 10


def test_what_is_done_to_a_loaded_set_stays_in_it():
    first = load("photos", size=16, per_photo=1)
    kept = first.inputs.clone()
    first.inputs.zero_()
    assert torch.equal(load("photos", size=16, per_photo=1).inputs, kept)


def test_a_missing_file_is_an_error_in_words(monkeypatch):
    monkeypatch.setitem(photos.FILES, "astronaut", "gone.png")
    with pytest.raises(DataError, match=r"gone\.png .* reinstall"):
        load("photos")
