"""A malicious server in the federation, behind the wall and in an audit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from leakgauge import attacks, models, threat
from leakgauge.attacks.active import Seer
from leakgauge.audit import Store, parse, run
from leakgauge.audit.forecast import _shortened
from leakgauge.data.digits import digits
from leakgauge.errors import InputError, PlanError, Withheld
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.types import (
    Knowledge,
    LocalTraining,
    Observation,
    Reconstruction,
    Resources,
    Round,
    Tampered,
    Target,
    ThreatModel,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> nn.Module:
    return models.make("mlp", shape=(1, 8, 8), classes=10, hidden=[64], rng=seeded(seed))


def played(clients: int = 2, seed: int = 0) -> Round:
    training = LocalTraining(batch_size=4)
    return simulate(Scenario(lambda: network(seed), digits(), training, clients), seeded(seed))


@dataclass(frozen=True)
class Swap:
    """Sends another network and keeps a word."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset()

    def tamper(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Tampered:
        return Tampered((network(7),), {"word": "kept"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        assert seen.secret is not None
        return Reconstruction(torch.zeros(seen.records or 1, *seen.shape), None, 0.0)


# ---------------------------------------------------------------- federation


def test_an_honest_model_sent_back_is_the_same_round() -> None:
    honest = played()
    again = tampered(honest, Tampered((honest.model,)), seeded(1))
    for one, other in zip(honest.updates, again.updates, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(honest.after[name], again.after[name]) for name in honest.after)


def test_clients_train_on_what_was_sent_to_each() -> None:
    honest = played()
    sent = (network(5), network(6))
    round_ = tampered(honest, Tampered(sent, {"k": 1}), seeded())
    for k, model in enumerate(sent):
        alone = tampered(honest, Tampered((model,)), seeded())
        assert all(torch.equal(alone.updates[k][n], u) for n, u in round_.updates[k].items())
    assert round_.secret == {"k": 1}
    assert round_.truths is honest.truths


def test_a_wrong_number_of_models_is_said() -> None:
    with pytest.raises(InputError, match="3 models for 2 clients"):
        tampered(played(), Tampered((network(),) * 3), seeded())


def test_the_target_holds_nothing_of_a_client() -> None:
    round_ = played()
    held = target(round_)
    assert held.public is None
    assert (held.records, held.clients, held.classes) == (4, 2, 10)
    assert held.model is not round_.model
    for name, value in vars(held).items():
        assert not isinstance(value, torch.Tensor), name


# ---------------------------------------------------------------- the wall


@pytest.mark.parametrize("actor", ["server", "aggregate"])
def test_only_a_malicious_observer_holds_the_secret(actor: Any) -> None:
    round_ = tampered(played(), Tampered((network(3),), {"word": "kept"}), seeded())
    assert threat.observe(round_, ThreatModel(actor)).secret is None
    seen = threat.observe(round_, ThreatModel(actor, malicious=True))
    assert seen.secret == {"word": "kept"}


@pytest.mark.parametrize(
    "who", [ThreatModel(), ThreatModel("aggregate"), ThreatModel("client", malicious=True)]
)
def test_who_may_not_change_the_model_is_refused(who: ThreatModel) -> None:
    with pytest.raises(Withheld, match="malicious = true"):
        threat.check("swap", Swap(), who)


def test_a_malicious_server_may_still_only_look() -> None:
    threat.check("swap", Swap(), ThreatModel(malicious=True))
    threat.check("analytic", attacks.Analytic(), ThreatModel(malicious=True))


# ---------------------------------------------------------------- audit

PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [256]},
        "data": "digits",
        "training": {"batch_size": 8},
    },
    "threat": {"malicious": True},
    "attack": [{"name": "robbing-the-fed"}, {"name": "analytic"}],
    "audit": {"seeds": [0, 1], "control": False, "explain": False, "exact": False},
}


def audited(plan: dict[str, Any], out: Path) -> dict[str, Any]:
    result = run(parse(plan, "malicious", Path.cwd()), Store(out))
    return {trial["attack"]: trial for trial in result["trials"] if trial["seed"] == 0} | {
        "threat": result["threat"]
    }


def test_an_audit_runs_an_attack_that_changes_the_model(tmp_path: Path) -> None:
    found = audited(PLAN, tmp_path)
    assert found["threat"]["malicious"] is True
    assert found["threat"]["realism"] == "active"
    assert "public" in found["threat"]["holds"]
    assert found["threat"]["knowledge"]["public"]
    tags = {name: found[name]["realism"] for name in ("robbing-the-fed", "analytic")}
    assert tags == {"robbing-the-fed": "active", "analytic": "realistic"}
    trial = found["robbing-the-fed"]
    assert trial["status"] == "done", trial["error"]
    assert sum(score > 40 for score in trial["scores"]["psnr"]) >= 5
    assert trial["facts"]["guard"] == "REJECT"
    assert any("says REJECT (duplicate-rows" in note for note in trial["notes"])
    assert "guard" not in found["analytic"]["facts"]
    honest = audited(PLAN | {"attack": [{"name": "analytic"}]}, tmp_path / "honest")
    assert found["analytic"]["scores"] == honest["analytic"]["scores"]


def test_the_same_seed_gives_the_same_trial(tmp_path: Path) -> None:
    first, second = (audited(PLAN, tmp_path / name)["robbing-the-fed"] for name in "ab")
    assert first["scores"] == second["scores"]


def test_the_forecast_shortens_a_training_and_leaves_its_folder_alone() -> None:
    short: Any = _shortened(Seer(steps=2500, folder="kept"), 3)
    assert (short.steps, short.folder) == (3, None)


def test_an_honest_server_may_not(tmp_path: Path) -> None:
    with pytest.raises(Withheld, match="robbing-the-fed"):
        parse(PLAN | {"threat": {}}, "honest", Path.cwd())


def test_public_records_are_no_client_s() -> None:
    plan = parse(PLAN, "malicious", Path.cwd())
    whole = digits()
    assert len(plan.public) == len(whole) // 4
    assert len(plan.public) + len(plan.data) == len(whole)
    rows = torch.cat([plan.public.inputs, plan.data.inputs]).flatten(1)
    assert torch.equal(rows.sum(0), whole.inputs.flatten(1).sum(0))
    assert torch.equal(plan.public.inputs, parse(PLAN, "again", Path.cwd()).public.inputs)


@pytest.mark.parametrize(
    ("public", "words"), [(-1, "public must be 0 or more"), (5000, "leave some for the clients")]
)
def test_wrong_numbers_of_public_records(public: int, words: str) -> None:
    federation = PLAN["federation"] | {"public": public}
    with pytest.raises(PlanError, match=words):
        parse(PLAN | {"federation": federation}, "wrong", Path.cwd())


def test_an_honest_plan_sets_nothing_aside() -> None:
    plan = parse(PLAN | {"threat": {}, "attack": [{"name": "analytic"}]}, "honest", Path.cwd())
    assert len(plan.public) == 0
    assert torch.equal(plan.data.inputs, digits().inputs)
    assert replace(plan.data).name == "digits"
