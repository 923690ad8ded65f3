"""What a preparation keeps: on disk and back, never another's, and an audit goes on from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nouns import setting
from torch import nn

from leakgauge.attacks.active import Seer, seer
from leakgauge.audit import Store, Watch, parse, run
from leakgauge.errors import CheckpointError
from leakgauge.files import write_tensors
from leakgauge.kept import Checkpoint, key_of
from leakgauge.types import Dataset, Kept, LocalTraining, Target


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KEPT = Kept(
    {
        "a.weight": torch.randn(3, 4, generator=seeded()),
        "empty": torch.zeros(0),
        "n": torch.tensor(7),
    },
    {"step": 3, "error": 0.1, "names": ["a", "ä"], "table": {"deep": [1, [2.5, None, True]]}},
)


def test_what_is_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "below" / "kept.safetensors", "key")
    assert place.load() is None
    place.save(KEPT)
    found = place.load()
    assert found is not None
    assert found.facts == KEPT.facts
    assert found.tensors.keys() == KEPT.tensors.keys()
    for name, value in KEPT.tensors.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name], value)
    place.save(replace(KEPT, facts={"step": 4}))  # the later one stays
    later = place.load()
    assert later is not None
    assert later.facts == {"step": 4}
    assert [path.name for path in place.path.parent.iterdir()] == ["kept.safetensors"]


def test_what_was_kept_for_another_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    Checkpoint(path, "one").save(KEPT)
    with pytest.raises(CheckpointError, match=r"kept\.safetensors was kept with other options"):
        Checkpoint(path, "other").load()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def noise(path: Path) -> None:
    path.write_bytes(b"\x07" * 200)


def weights(path: Path) -> None:
    write_tensors(path, {"a.weight": torch.zeros(2)})


def prose(path: Path) -> None:
    write_tensors(path, {"facts": torch.tensor(list(b"no JSON"), dtype=torch.uint8)})


def another(path: Path) -> None:
    write_tensors(path, {"facts": torch.tensor(list(b"[1]"), dtype=torch.uint8)})


@pytest.mark.parametrize("spoil", [cut, noise, weights, prose, another])
def test_a_damaged_file_is_refused_in_words(tmp_path: Path, spoil: Any) -> None:
    place = Checkpoint(tmp_path / "kept.safetensors", "key")
    place.save(KEPT)
    spoil(place.path)
    with pytest.raises(CheckpointError, match=r"kept\.safetensors"):
        place.load()


# --- the key -----------------------------------------------------------------------------------


def public(seed: int = 1) -> Dataset:
    images = torch.rand(6, 1, 4, 4, generator=seeded(seed))
    return Dataset("public", images, torch.arange(6) % 2, ("a", "b"))


def network(seed: int = 0, *, norm: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(16, 2), *([nn.BatchNorm1d(2)] if norm else [])]
        return nn.Sequential(*layers)


def aim(**changes: Any) -> Target:
    given = Target(setting(network(), (1, 4, 4), 2), LocalTraining(batch_size=2), 2, 1, public())
    return replace(given, **changes)


def moved_buffer() -> Target:
    given = aim()
    with torch.no_grad():
        given.model.get_buffer("2.running_mean").add_(1e-3)
    return given


def told(
    attack: Seer | None = None, target: Target | None = None, rng: torch.Generator | None = None
) -> str:
    return key_of(attack or Seer(steps=3), target or aim(), rng or seeded())


def drawn() -> torch.Generator:
    rng = seeded()
    torch.rand(1, generator=rng)
    return rng


CHANGES: dict[str, dict[str, Any]] = {
    "an option": {"attack": Seer(steps=3, width=193)},
    "a weight": {"target": aim(setting=setting(network(1), (1, 4, 4), 2))},
    "a buffer": {"target": moved_buffer()},
    "the architecture": {"target": aim(setting=setting(network(norm=False), (1, 4, 4), 2))},
    "the classes": {"target": aim(setting=setting(network(), (1, 4, 4), 3))},
    "the training": {"target": aim(training=LocalTraining(batch_size=2, lr=0.02))},
    "the records": {"target": aim(records=3)},
    "the clients": {"target": aim(clients=2)},
    "public records": {"target": aim(public=public(2))},
    "public labels": {"target": aim(public=replace(public(), labels=1 - public().labels))},
    "no public records": {"target": aim(public=None)},
    "the seed": {"rng": seeded(1)},
    "what was drawn": {"rng": drawn()},
}


def test_the_key_is_that_of_the_same_preparation() -> None:
    assert told() == told(attack=Seer(steps=3), target=aim(), rng=seeded())


def test_the_key_of_every_other_preparation_differs() -> None:
    keys = {name: told(**change) for name, change in CHANGES.items()}
    assert len({told(), *keys.values()}) == 1 + len(CHANGES), keys


# --- an audit ----------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "training": {"batch_size": 4},
        "public": 40,
    },
    "threat": {"malicious": True},
    "attack": [{"name": "seer", "steps": 6, "side": 2, "width": 4}],
    "audit": {"seeds": [0], "control": False, "explain": False, "exact": False, "gallery": 20},
}


class Killed(BaseException):
    """As if the process had ended: nothing catches it."""


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_audit_that_was_stopped_goes_on_from_what_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, overwrite: bool
) -> None:
    monkeypatch.setattr(seer, "EVERY", 2)
    plan = parse(PLAN, "seer", Path.cwd())
    whole = run(plan, Store(tmp_path / "whole"))
    out = tmp_path / "out"
    if overwrite:  # an older audit lies in the folder
        run(parse(PLAN | {"audit": PLAN["audit"] | {"seeds": [7]}}, "old", Path.cwd()), Store(out))

    def stop(case: Any, done: int, total: int, objective: float) -> None:
        if done == 5:  # kept after 2 and 4
            raise how

    try:
        first = run(plan, Store(out), overwrite=overwrite, watch=Watch(progress=stop))
    except Killed:
        assert how is Killed
    else:
        assert how is KeyboardInterrupt
        assert not first.trials
    assert len(list((out / "prepared").iterdir())) == 1

    steps: list[int] = []
    watch = Watch(progress=lambda case, done, total, objective: steps.append(done))
    resumed = run(plan, Store(out), resume=True, watch=watch)
    assert steps == [5, 6]
    [one], [other] = resumed.trials, whole.trials
    assert one.status == "done", one.error
    assert one.score == other.score
    assert one.found is not None
    assert other.found is not None
    assert one.found.residual == other.found.residual
