"""Checkpoints: what fits is loaded, everything else is refused in words and changes nothing."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from leakgauge.errors import CheckpointError
from leakgauge.models import load, make, save


def network(seed: int = 0) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return make("convnet", shape=(1, 9, 9), classes=3, rng=rng, width=0.125)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def refused(path: Path, words: str) -> None:
    """The file is refused with these words, and the model stays as it was."""
    model = network()
    before = state(model)
    with pytest.raises(CheckpointError, match=words):
        load(model, path)
    assert same(state(model), before)


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def test_saved_weights_come_back(tmp_path: Path) -> None:
    model, other = network(0), network(1)
    model(torch.rand(4, 1, 9, 9))  # moves the running statistics
    save(model, tmp_path / "model.safetensors")
    load(other, str(tmp_path / "model.safetensors"))
    assert same(state(other), state(model))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_state_dict_of_any_format_and_precision_is_read(tmp_path: Path, suffix: str) -> None:
    source, model = network(0), network(1)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in state(source).items()}
    load(model, write(tmp_path / f"model{suffix}", wide))
    assert same(state(model), state(source))


def test_old_files_may_lack_the_batch_counter(tmp_path: Path) -> None:
    source, model = network(0), network(1)
    old = {k: v for k, v in state(source).items() if not k.endswith("num_batches_tracked")}
    load(model, write(tmp_path / "old.pt", old))
    assert same(state(model), state(source))


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    kept = state(model)
    save(model, tmp_path / "tied.safetensors")
    nn.init.zeros_(model[0].weight)
    load(model, tmp_path / "tied.safetensors")
    assert same(state(model), kept)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save(network(0), path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        save(network(1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"saved as \.safetensors"):
        save(network(), tmp_path / "model.pt")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(network(), tmp_path / "file" / "model.safetensors")


def test_missing_or_unknown_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "no file of weights")
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt", "no file of weights")
    (tmp_path / "model.bin").write_bytes(b"")
    refused(tmp_path / "model.bin", "ends in")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files(tmp_path: Path, suffix: str, kept: float) -> None:
    path = write(tmp_path / f"model{suffix}", state(network(1)))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    refused(path, "could not be read|could run code")


class Payload:
    """Unpickling it makes a folder: visible proof that code ran."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "code_ran"
    content = {**state(network(1)), "payload": Payload(mark)}
    zipped = write(tmp_path / "zipped.pt", content)
    raw = tmp_path / "raw.pth"
    raw.write_bytes(pickle.dumps(Payload(mark), protocol=2))
    disguised = tmp_path / "disguised.safetensors"
    disguised.write_bytes(raw.read_bytes())
    refused(zipped, "could run code: refused")
    refused(raw, "could run code: refused")
    refused(disguised, "damaged or not a .safetensors")
    assert not mark.exists()
    torch.load(zipped, weights_only=False)  # the payload is live: an unsafe reader runs it
    assert mark.exists()


def test_files_that_are_no_state_dict(tmp_path: Path) -> None:
    weights = state(network(1))
    refused(write(tmp_path / "a.pt", {"epoch": 3, "state_dict": weights}), "training checkpoint")
    refused(write(tmp_path / "b.pt", list(weights.values())), "holds a list")
    refused(write(tmp_path / "c.pt", {3: torch.zeros(1)}), "not a named tensor")
    refused(write(tmp_path / "d.pt", network(1)), "could run code")  # a pickled model


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_for_another_model(tmp_path: Path, suffix: str) -> None:
    weights = state(network(1))
    lacking = {k: v for k, v in weights.items() if k != "linear.bias"}
    refused(write(tmp_path / f"a{suffix}", lacking), "lacks linear.bias; unknown in it: nothing")
    extra = {**weights, "head.weight": torch.zeros(2)}
    refused(write(tmp_path / f"b{suffix}", extra), "lacks nothing; unknown in it: head.weight")
    prefixed = {f"module.{k}": v for k, v in weights.items()}
    refused(
        write(tmp_path / f"c{suffix}", prefixed), r"bn0.bias, bn0.running_mean, .* and \d+ more"
    )
    narrow = {**weights, "linear.bias": torch.zeros(4)}
    refused(write(tmp_path / f"d{suffix}", narrow), r"linear.bias has shape \(4,\), .* \(3,\)")
    turned = {**weights, "linear.weight": weights["linear.weight"].T.contiguous()}
    refused(write(tmp_path / f"f{suffix}", turned), r"linear.weight has shape \(32, 3\)")
    # A shape that would broadcast is wrong too.
    single = {**weights, "linear.bias": torch.zeros(1)}
    refused(write(tmp_path / f"e{suffix}", single), r"linear.bias has shape \(1,\)")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_values_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    weights = state(network(1))
    weights["linear.bias"] = torch.tensor([0.0, bad, 0.0], dtype=torch.float64)
    refused(write(tmp_path / "model.safetensors", weights), "linear.bias holds NaN or infinite")


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["integer", "bool", "complex", "sparse", "meta"],
)
def test_tensors_of_another_kind(tmp_path: Path, bad: Tensor) -> None:
    weights = {**state(network(1)), "linear.bias": bad}
    refused(write(tmp_path / "model.pt", weights), "linear.bias is a .* expected a plain")


def test_a_fraction_is_no_batch_counter(tmp_path: Path) -> None:
    weights = {**state(network(1)), "bn0.num_batches_tracked": torch.tensor(1.5)}
    refused(write(tmp_path / "model.pt", weights), "bn0.num_batches_tracked is a torch.float32")


def test_state_that_is_not_a_tensor(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    model = Odd(2, 2)
    before = model.weight.clone()
    path = write(
        tmp_path / "model.pt", {**nn.Linear(2, 2).state_dict(), "_extra_state": torch.ones(1)}
    )
    with pytest.raises(CheckpointError, match="_extra_state is not a tensor"):
        load(model, path)
    assert torch.equal(model.weight, before)
