"""LPIPS against the same network in numpy loops, its file handling, and its weights if present."""

from __future__ import annotations

import os
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from scipy.ndimage import gaussian_filter
from skimage import data
from torch import Tensor

from leakgauge.errors import CheckpointError, InputError
from leakgauge.metrics import load_lpips
from leakgauge.metrics.lpips import BUILD, FILE

Array = NDArray[np.float64]

needs_weights = pytest.mark.skipif(
    "LEAKGAUGE_WEIGHTS" not in os.environ,
    reason=f"LEAKGAUGE_WEIGHTS does not name a folder with {FILE}",
)

TRUNK = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}


@pytest.fixture(scope="module")
def made_up() -> dict[str, Tensor]:
    """Weights of the right shapes, drawn at random."""
    rng = torch.Generator().manual_seed(0)
    named = {}
    for stage, (index, (out, into, k)) in enumerate(TRUNK.items()):
        fan = into * k * k
        named[f"features.{index}.weight"] = torch.randn(out, into, k, k, generator=rng) / fan**0.5
        named[f"features.{index}.bias"] = 0.1 * torch.randn(out, generator=rng)
        named[f"lin{stage}.weight"] = torch.rand(1, out, 1, 1, generator=rng)
    return named


@pytest.fixture(scope="module")
def folder(made_up: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("weights")
    save_file(made_up, place / FILE)
    return place


def images(n: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(n, channels, height, width, generator=rng)


# The same distance, slowly and without torch


def convolve(x: Array, weight: Array, bias: Array, stride: int, padding: int) -> Array:
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    k = weight.shape[-1]
    height, width = ((side - k) // stride + 1 for side in x.shape[1:])
    out = np.empty((len(weight), height, width))
    for i in range(height):
        for j in range(width):
            window = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
            out[:, i, j] = np.tensordot(weight, window, 3) + bias
    return out


def pool(x: Array) -> Array:
    height, width = ((side - 3) // 2 + 1 for side in x.shape[1:])
    rows = [
        [x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(width)]
        for i in range(height)
    ]
    return np.array(rows).transpose(2, 0, 1)


def activations(image: Array, named: dict[str, Array]) -> list[Array]:
    # ImageNet's mean and standard deviation, which LPIPS writes for inputs of [−1, 1].
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    x = (image - mean[:, None, None]) / std[:, None, None]
    seen = []
    for index, (_, _, k) in TRUNK.items():
        if index in (3, 6):
            x = pool(x)
        stride, padding = (4, 2) if index == 0 else (1, k // 2)
        weight, bias = named[f"features.{index}.weight"], named[f"features.{index}.bias"]
        x = np.maximum(convolve(x, weight, bias, stride, padding), 0)
        seen.append(x)
    return seen


def slowly(guess: Tensor, truth: Tensor, named: dict[str, Tensor]) -> float:
    arrays = {name: tensor.double().numpy() for name, tensor in named.items()}
    pair = [activations(image.double().numpy(), arrays) for image in (guess, truth)]
    total = 0.0
    for stage, (x, y) in enumerate(zip(*pair, strict=True)):
        weight = arrays[f"lin{stage}.weight"].ravel()
        here = []
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                a, b = (v[:, i, j] / max(np.linalg.norm(v[:, i, j]), 1e-12) for v in (x, y))
                here.append(float(weight @ (a - b) ** 2))
        total += float(np.mean(here))
    return total


@pytest.mark.parametrize("size", [(32, 32), (35, 51), (64, 64)])
def test_equals_the_network_in_loops(
    size: tuple[int, int], folder: Path, made_up: dict[str, Tensor]
) -> None:
    guess, truth = images(2, 3, *size), images(2, 3, *size, seed=1)
    expected = [slowly(g, t, made_up) for g, t in zip(guess, truth, strict=True)]
    assert load_lpips(folder)(guess, truth).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_position_where_no_unit_fires_adds_nothing(
    made_up: dict[str, Tensor], tmp_path: Path
) -> None:
    silent = made_up | {"features.10.bias": torch.full((256,), -100.0)}
    save_file(silent, tmp_path / FILE)
    guess, truth = images(1, 3, 32, 32), images(1, 3, 32, 32, seed=1)
    expected = slowly(guess[0], truth[0], silent)
    assert load_lpips(tmp_path)(guess, truth).item() == pytest.approx(expected, rel=1e-4)


def test_identical_is_zero_and_order_does_not_matter(folder: Path) -> None:
    lpips = load_lpips(folder)
    guess, truth = images(2, 3, 32, 32), images(2, 3, 32, 32, seed=1)
    assert lpips(truth, truth).tolist() == [0.0, 0.0]
    assert lpips(guess, truth).min() > 0
    torch.testing.assert_close(lpips(guess, truth), lpips(truth, guess), rtol=1e-6, atol=0)


def test_grey_is_three_equal_channels(folder: Path) -> None:
    lpips = load_lpips(folder)
    guess, truth = images(2, 1, 32, 32), images(2, 1, 32, 32, seed=1)
    colour = lpips(guess.repeat(1, 3, 1, 1), truth.repeat(1, 3, 1, 1))
    torch.testing.assert_close(lpips(guess, truth), colour, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("size", "resized"), [((8, 8), (32, 32)), ((16, 8), (64, 32)), ((31, 32), (32, 33))]
)
def test_small_images_are_resized_up(
    size: tuple[int, int], resized: tuple[int, int], folder: Path
) -> None:
    lpips = load_lpips(folder)
    guess, truth = images(2, 3, *size), images(2, 3, *size, seed=1)
    large = [
        torch.nn.functional.interpolate(x, resized, mode="bilinear", align_corners=False)
        for x in (guess, truth)
    ]
    torch.testing.assert_close(lpips(guess, truth), lpips(*large), rtol=1e-6, atol=0)


def test_a_score_does_not_depend_on_its_batch(folder: Path) -> None:
    lpips = load_lpips(folder)
    guess, truth = images(70, 3, 32, 32), images(70, 3, 32, 32, seed=1)  # more than go at once
    together = lpips(guess, truth)
    assert together.shape == (70,)
    assert together.dtype == torch.float64
    for i in (0, 63, 64, 69):
        alone = lpips(guess[i : i + 1], truth[i : i + 1]).item()
        assert together[i].item() == pytest.approx(alone, rel=1e-5)
    assert lpips(guess[:0], truth[:0]).shape == (0,)


def test_bad_images_are_refused(folder: Path) -> None:
    lpips = load_lpips(folder)
    with pytest.raises(InputError, match="1 or 3 channels, got 2"):
        lpips(images(1, 2, 32, 32), images(1, 2, 32, 32))
    with pytest.raises(InputError, match="expected one shape"):
        lpips(images(1, 3, 32, 32), images(2, 3, 32, 32))
    with pytest.raises(InputError, match="NaN"):
        lpips(images(1, 3, 32, 32) * torch.nan, images(1, 3, 32, 32))


# The file


def test_the_argument_goes_before_the_variable_and_the_variable_before_the_cache(
    folder: Path,
    made_up: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess, truth = images(1, 3, 32, 32), images(1, 3, 32, 32, seed=1)
    places = {"variable": tmp_path / "variable", "cache": tmp_path / ".cache" / "leakgauge"}
    for factor, place in enumerate(places.values(), start=2):
        place.mkdir(parents=True)
        lins = {k: v * factor for k, v in made_up.items() if k.startswith("lin")}
        save_file(made_up | lins, place / FILE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LEAKGAUGE_WEIGHTS", str(places["variable"]))
    first = load_lpips(folder)(guess, truth).item()
    assert load_lpips(folder / FILE)(guess, truth).item() == first
    assert load_lpips()(guess, truth).item() == pytest.approx(2 * first, rel=1e-5)
    monkeypatch.setenv("LEAKGAUGE_WEIGHTS", str(places["variable"] / FILE))
    assert load_lpips()(guess, truth).item() == pytest.approx(2 * first, rel=1e-5)
    monkeypatch.delenv("LEAKGAUGE_WEIGHTS")
    assert load_lpips()(guess, truth).item() == pytest.approx(3 * first, rel=1e-5)


def test_a_missing_file_says_what_to_place_where_and_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LEAKGAUGE_WEIGHTS", raising=False)
    with pytest.raises(CheckpointError) as caught:
        load_lpips()
    assert str(tmp_path / ".cache" / "leakgauge" / FILE) in str(caught.value)
    assert "LEAKGAUGE_WEIGHTS" in str(caught.value)
    assert BUILD in str(caught.value)
    with pytest.raises(CheckpointError, match="elsewhere"):
        load_lpips(tmp_path / "elsewhere")


def test_the_recipe_builds_the_file(
    made_up: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"lin{k}.weight": f"lin{k}.model.1.weight" for k in range(5)}
    for k, i in enumerate(TRUNK, start=1):
        for part in ("weight", "bias"):
            names[f"features.{i}.{part}"] = f"net.slice{k}.{i}.{part}"
    state = {names[name]: tensor for name, tensor in made_up.items()}
    package = types.ModuleType("lpips")
    package.__dict__["LPIPS"] = lambda net: types.SimpleNamespace(state_dict=lambda: state)
    monkeypatch.setitem(sys.modules, "lpips", package)
    monkeypatch.chdir(tmp_path)
    exec(BUILD, {})
    built = load_file(tmp_path / FILE)
    assert built.keys() == made_up.keys()
    assert all(torch.equal(built[name], made_up[name]) for name in made_up)


class Marker:
    """Unpickling this creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_file_that_is_not_whole_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / FILE).read_bytes()
    executed = tmp_path / "executed"
    for content in (b"", whole[:4], whole[:1000], whole[:-1], pickle.dumps(Marker(executed))):
        path = tmp_path / FILE
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            load_lpips(path)
    assert not executed.exists()


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("lin3.weight", None, r"expected lin3.weight \(1, 256, 1, 1\), got nothing"),
        ("lin1.weight", torch.ones(1, 128, 1, 1), r"got \(1, 128, 1, 1\)"),
        ("features.0.weight", torch.ones(64, 3, 3, 3), r"got \(64, 3, 3, 3\)"),
        ("features.10.bias", torch.full((256,), torch.nan), "features.10.bias holds NaN"),
    ],
)
def test_weights_of_another_network_are_refused(
    name: str,
    replacement: Tensor | None,
    message: str,
    made_up: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    named = {key: tensor for key, tensor in made_up.items() if key != name}
    if replacement is not None:
        named[name] = replacement
    save_file(named, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message):
        load_lpips(tmp_path)


# The published weights


def photograph(size: int) -> Tensor:
    picture = torch.from_numpy(data.astronaut()[:256, 128:384] / 255.0).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(
        picture.float(), (size, size), mode="bilinear", antialias=True
    )


@needs_weights
def test_the_published_weights_equal_the_network_in_loops() -> None:
    place = Path(os.environ["LEAKGAUGE_WEIGHTS"])
    named = load_file(place / FILE if place.is_dir() else place)
    truth = photograph(64)
    guess = truth.roll(3, dims=-1)
    expected = slowly(guess[0], truth[0], named)
    assert load_lpips()(guess, truth).item() == pytest.approx(expected, rel=1e-4)


@needs_weights
@pytest.mark.parametrize("size", [16, 32, 64])
def test_more_noise_is_farther(size: int) -> None:
    truth = photograph(size)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    lpips = load_lpips()
    far = [lpips((truth + s * noise).clamp(0, 1), truth).item() for s in (0, 0.05, 0.1, 0.2, 0.4)]
    assert far[0] == 0
    assert far == sorted(far)
    assert len(set(far)) == 5


@needs_weights
def test_sees_what_psnr_does_not() -> None:
    """The paper's first figure: blur is small for PSNR and large for the eye."""
    truth = photograph(64)
    blurred = torch.from_numpy(gaussian_filter(truth.numpy(), (0, 0, 2, 2)))
    brighter = truth + (blurred - truth).square().mean().sqrt()  # the same MSE
    lpips = load_lpips()
    assert lpips(brighter, truth).item() < lpips(blurred, truth).item() / 2
