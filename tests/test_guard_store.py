"""The guard's memory on disk: whole or not at all, of one federation, and never silently empty."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from leakgauge import files
from leakgauge.errors import CheckpointError
from leakgauge.guard import Guard, Policy, store
from leakgauge.types import History, LocalTraining

TRAINING = LocalTraining(lr=0.1, batch_size=4)
LAX = Policy(require=())


def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def other() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().state_dict()


@pytest.fixture
def history(state) -> History:
    return History(
        state=state,
        rounds=1,
        own={"1.weight": 0.1, "1.bias": 1e-300},
        anchor={n: v + 1 for n, v in state.items()},
        since={"1.weight": 1 / 3},
        age=7,
        digests=("ab", "cd"),
        secret=bytes(range(32)),
        snapshots=(({"1.weight": (0.1, -0.0, 1e300)}, {"1.weight": (0.5, 1.0, 2.0)}),),
    )


def test_what_was_added_is_read_back_exactly(tmp_path, history, state):
    mark = store.fingerprint(state)
    assert store.read(tmp_path / "new", mark) is None
    store.add(tmp_path / "new", mark, history, 0)
    found = store.read(tmp_path / "new", mark)
    assert replace(found, state={}, anchor={}) == replace(history, state={}, anchor={})
    for read, written in ((found.state, state), (found.anchor, history.anchor)):
        assert read.keys() == written.keys()
        for name, value in written.items():
            assert read[name].dtype == value.dtype
            assert torch.equal(read[name], value)


def test_only_the_owner_can_read_the_store(tmp_path, history, state, monkeypatch):
    """Whatever the rights of new files are, and of a folder that was there before."""
    (tmp_path / "s").mkdir(mode=0o755)
    old = os.umask(0)
    try:
        store.add(tmp_path / "s", "x", history, 0)
        store.log(tmp_path / "s", {"restart": "why"})
    finally:
        os.umask(old)
    rights = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "s").iterdir()}
    files_ = (".lock", "history.safetensors", "overrides.jsonl")
    assert rights == dict.fromkeys(files_, 0o600)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


def test_the_secret_is_that_of_the_store(tmp_path, state):
    first = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    first.remember(first.check(state), state)
    secret = store.read(tmp_path, store.fingerprint(state)).secret
    assert len(secret) == 32
    again = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    assert again._secret != secret
    again.check(state)
    assert again._secret == secret


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_type_of_number_survives(tmp_path, history, dtype):
    state = {"w": torch.rand(3, 2).to(dtype), "scalar": torch.tensor(2.5).to(dtype)}
    store.add(tmp_path, "x", replace(history, state=state), 0)
    assert all(torch.equal(store.read(tmp_path, "x").state[n], v) for n, v in state.items())


def test_a_guard_that_starts_again_remembers(tmp_path, state):
    first = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    first.remember(first.check(state), state)
    second = Guard(make, TRAINING, policy=LAX, store=str(tmp_path))
    verdict = second.check(state)
    assert verdict.rounds == 1
    second.remember(verdict, state)
    assert Guard(make, TRAINING, policy=LAX, store=tmp_path).check(state).rounds == 2


def test_the_store_of_another_network_is_refused(tmp_path, state):
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    guard.remember(guard.check(state), state)
    stranger = Guard(other, TRAINING, policy=LAX, store=tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another network"):
        stranger.check(other().state_dict())


@given(st.data())
@examples(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_an_error(tmp_path_factory, state, history, data):
    """One changed byte, or a file cut short anywhere."""
    folder = tmp_path_factory.mktemp("store")
    mark = store.fingerprint(make().state_dict())
    store.add(folder, mark, history, 0)
    path = folder / "history.safetensors"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="store"):
        store.read(folder, mark)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="store"):
        Guard(make, TRAINING, policy=LAX, store=folder).check(state)
    assert path.read_bytes() == before


def test_a_pickle_in_its_place_runs_nothing(tmp_path, state):
    class Harmful:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (tmp_path / "history.safetensors").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError):
        Guard(make, TRAINING, policy=LAX, store=tmp_path).check(state)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_someone_elses_is_refused(tmp_path, state):
    safetensors.torch.save_file(state, tmp_path / "history.safetensors")
    with pytest.raises(CheckpointError, match="not written by this guard"):
        store.read(tmp_path, store.fingerprint(state))


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_round(tmp_path, state, monkeypatch, moment):
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    moved = {name: v + 0.01 if v.is_floating_point() else v for name, v in state.items()}
    guard.remember(guard.check(state), moved)
    verdict = guard.check(moved)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, moment, crash)
        with pytest.raises(KeyboardInterrupt):
            guard.remember(verdict, moved)
    again = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    found = store.read(tmp_path, store.fingerprint(state))
    assert found.rounds == 1
    assert torch.equal(found.state["1.weight"], state["1.weight"])
    again.remember(again.check(moved), moved)
    assert store.read(tmp_path, store.fingerprint(state)).rounds == 2


def test_a_rejected_model_leaves_the_store_as_it_was(tmp_path, state):
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    guard.remember(guard.check(state), state)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    far = {name: value + 9 for name, value in state.items()}
    assert guard.check(far).decision == "REJECT"
    assert guard.check({}).decision == "REJECT"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_checking_alone_writes_nothing(tmp_path, state):
    Guard(make, TRAINING, policy=LAX, store=tmp_path / "s").check(state)
    assert not (tmp_path / "s").exists()


def test_two_guards_cannot_add_to_the_same_round(tmp_path, state):
    one, two = (Guard(make, TRAINING, policy=LAX, store=tmp_path) for _ in range(2))
    first, second = one.check(state), two.check(state)
    one.remember(first, state)
    with pytest.raises(CheckpointError, match="another process accepted a round"):
        two.remember(second, state)
    two.remember(two.check(state), state)
    assert one.check(state).rounds == 2


def test_a_store_that_another_process_holds_is_an_error_in_words(tmp_path, state, monkeypatch):
    """The lock belongs to an open file, so that the same process can stand for another."""
    monkeypatch.setattr(store, "PATIENCE", 0.1)
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    verdict = guard.check(state)
    with store._locked(tmp_path), pytest.raises(CheckpointError, match="another process holds"):
        guard.remember(verdict, state)
    guard.remember(verdict, state)
    assert guard.check(state).rounds == 1


def test_a_file_where_the_folder_should_be_is_an_error(tmp_path, state):
    (tmp_path / "store").write_text("")
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path / "store")
    with pytest.raises(CheckpointError, match="is a file"):
        guard.check(state)


def test_a_long_memory_is_cut_at_its_old_end(tmp_path, history, monkeypatch):
    monkeypatch.setattr(store, "KEPT", 3)
    store.add(tmp_path, "x", replace(history, digests=tuple("abcde")), 0)
    assert store.read(tmp_path, "x").digests == tuple("cde")
