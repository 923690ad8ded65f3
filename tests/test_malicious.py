"""A malicious server in the federation, behind the wall and in an audit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from leakgauge import attacks, models, threat
from leakgauge.attacks.active import Seer
from leakgauge.audit import Store, parse, run
from leakgauge.data.digits import digits
from leakgauge.errors import InputError, PlanError, Withheld
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.fl.partition import QuantitySkew
from leakgauge.guard import Guard
from leakgauge.tensors import parameters, weighted_mean
from leakgauge.types import (
    Defence,
    Here,
    Kept,
    Knowledge,
    LocalTraining,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Round,
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


WORD = Kept(facts={"word": "kept"})


def sending(*models: nn.Module) -> Preparation:
    return Preparation(Kept(), models)


@dataclass(frozen=True)
class Swap:
    """Sends another network and keeps a word."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset()
    manipulates: ClassVar[bool] = True

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        return Preparation(WORD, (network(7),))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        assert seen.kept is not None
        return Reconstruction(torch.zeros(seen.records or 1, *seen.record.shape), None, 0.0)


# ---------------------------------------------------------------- federation


def test_an_honest_model_sent_back_is_the_same_round() -> None:
    honest = played()
    again = tampered(honest, sending(honest.model), seeded(1))
    for one, other in zip(honest.updates, again.updates, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(honest.after[name], again.after[name]) for name in honest.after)


def test_clients_train_on_what_was_sent_to_each() -> None:
    honest = played()
    sent = (network(5), network(6))
    round_ = tampered(honest, sending(*sent), seeded())
    for k, model in enumerate(sent):
        alone = tampered(honest, sending(model), seeded())
        assert all(torch.equal(alone.updates[k][n], u) for n, u in round_.updates[k].items())
    assert round_.sent == sent
    assert round_.truths is honest.truths


def test_a_wrong_number_of_models_is_said() -> None:
    with pytest.raises(InputError, match="3 models for 2 clients"):
        tampered(played(), sending(*(network(),) * 3), seeded())


def uneven(defence: Defence | None = None) -> Round:
    """Three clients with shares of different sizes, a server that halves every step."""
    scenario = Scenario(
        network,
        digits(),
        LocalTraining(batch_size=2, epochs=1),
        clients=3,
        records="all",
        server_lr=0.5,
        partition=QuantitySkew(smallest=2, largest=8),
        defence=defence,
    )
    round_ = simulate(scenario, seeded())
    assert len(set(round_.sizes)) == 3
    return round_


def test_a_tampered_round_meets_the_server_that_the_honest_one_met() -> None:
    honest = uneven()
    round_ = tampered(honest, sending(network(5)), seeded())
    sent = parameters(network(5))
    mean = weighted_mean(round_.updates, honest.weights)
    for name, value in sent.items():
        torch.testing.assert_close(round_.after[name], value - 0.5 * mean[name])


@dataclass(frozen=True)
class Halve:
    """A defence that can be told from none."""

    def announced(self) -> dict[str, object]:
        return {}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return {name: value / 2 for name, value in update.items()}


def test_a_tampered_round_meets_the_defence_that_the_honest_one_met() -> None:
    honest = uneven(), uneven(Halve())
    changed = [tampered(one, sending(network(5)), seeded()) for one in honest]
    for name, (bare, kept) in {"honest": honest, "tampered": changed}.items():
        for one, other in zip(bare.updates, kept.updates, strict=True):
            assert all(torch.equal(one[n] / 2, other[n]) for n in one), name


def test_the_observed_model_is_the_one_that_the_victim_got() -> None:
    sent = sending(network(5), network(6))
    round_ = tampered(played(), sent, seeded())
    for victim, model in enumerate(sent.models):
        for actor in ("server", "client"):
            seen = threat.observe(round_, ThreatModel(actor, client=victim))
            found = parameters(seen.model)
            assert all(torch.equal(found[n], p) for n, p in parameters(model).items())


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1, 2)])
def test_the_target_knows_the_records_of_its_victims(victims: tuple[int, ...]) -> None:
    round_ = uneven()
    held = target(round_, victims=victims)
    assert held.records == sum(round_.sizes[k] for k in victims)
    assert held.training.batch_size == 2 * len(victims)


def test_the_target_holds_nothing_of_a_client() -> None:
    round_ = played()
    held = target(round_)
    assert held.public is None
    assert (held.records, held.clients, held.task.count) == (4, 2, 10)
    assert held.model is not round_.model
    for name, value in vars(held).items():
        assert not isinstance(value, torch.Tensor), name


# ---------------------------------------------------------------- the wall


@pytest.mark.parametrize("actor", ["server", "aggregate"])
def test_only_the_attacker_that_prepared_holds_what_it_kept(actor: Any) -> None:
    round_ = tampered(played(), Preparation(WORD, (network(3),)), seeded())
    assert threat.observe(round_, ThreatModel(actor, malicious=True)).kept is None
    seen = threat.observe(round_, ThreatModel(actor, malicious=True), kept=WORD)
    assert seen.kept == WORD


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


def test_each_trial_observes_its_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = []
    observe = threat.observe

    def noted(exchange, who, kept=None):
        observed.append(kept)
        return observe(exchange, who, kept=kept)

    monkeypatch.setattr(threat, "observe", noted)
    result = run(parse(PLAN, "malicious", Path.cwd()), Store(tmp_path))
    assert [trial.status for trial in result.trials] == ["done"] * 4
    assert sorted(kept is None for kept in observed) == [False, False, True, True]


def audited(plan: dict[str, Any], out: Path) -> dict[str, Any]:
    result = run(parse(plan, "malicious", Path.cwd()), Store(out))
    return {trial.attack: trial for trial in result.trials if trial.seed == 0} | {
        "threat": result.threat
    }


def test_an_audit_runs_an_attack_that_changes_the_model(tmp_path: Path) -> None:
    found = audited(PLAN, tmp_path)
    assert found["threat"].malicious is True
    assert found["threat"].realism == "active"
    assert "public" in found["threat"].holds
    assert found["threat"].knowledge["public"]
    tags = {name: found[name].realism for name in ("robbing-the-fed", "analytic")}
    assert tags == {"robbing-the-fed": "active", "analytic": "realistic"}
    trial = found["robbing-the-fed"]
    assert trial.status == "done", trial.error
    assert sum(score > 40 for score in trial.score.scores["psnr"]) >= 5
    assert trial.found.guard == "REJECT"
    assert any("says REJECT (duplicate-rows" in note for note in trial.found.notes)
    assert found["analytic"].found.guard is None
    honest = audited(PLAN | {"attack": [{"name": "analytic"}]}, tmp_path / "honest")
    assert found["analytic"].score.scores == honest["analytic"].score.scores


@dataclass(frozen=True)
class Witness(Swap):
    """Keeps what the malicious server is given, and what it sees afterwards."""

    told: list[Any] = field(default_factory=list)

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        self.told.append(target)
        return Preparation(WORD, tuple(network(5 + k) for k in range(target.clients)))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        self.told.append(seen)
        return super().reconstruct(seen, rng, resources)


UNEVEN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [64]},
        "data": "digits",
        "training": {"batch_size": 2, "epochs": 1},
        "clients": 3,
        "records": "all",
        "partition": {"name": "quantity-skew", "smallest": 2, "largest": 8},
        "public": 0,
    },
    "attack": [{"name": "loki"}],
    "audit": {"seeds": [0], "control": False, "explain": False, "exact": False, "gallery": 20},
}


def witnessed(
    out: Path,
    threat_: dict[str, Any],
    defence: Defence | None = None,
) -> tuple[Target, Observation, dict[str, Any]]:
    plan = parse(UNEVEN | {"threat": {"malicious": True} | threat_}, "uneven", Path.cwd())
    attack = Witness()
    plan = replace(plan, attacks={"loki": attack}, defences={"none": defence})
    result = run(plan, Store(out))
    [trial] = result.trials
    assert trial.status == "done", trial.error
    given, seen = attack.told
    return given, seen, trial


@pytest.mark.parametrize("actor", ["server", "aggregate"])
def test_the_defence_of_the_plan_protects_against_a_malicious_server(
    tmp_path: Path, actor: str
) -> None:
    _, bare, _ = witnessed(tmp_path / "bare", {"actor": actor, "client": 2})
    _, kept, _ = witnessed(tmp_path / "kept", {"actor": actor, "client": 2}, Halve())
    for name, value in bare.update.items():
        torch.testing.assert_close(kept.update[name], value / 2)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_malicious_server_meets_its_own_victim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    shown: list[tuple[dict[str, torch.Tensor], int]] = []
    check = Guard.check

    def watched(self: Guard, state: Any, batch: Any, **more: Any) -> Any:
        shown.append((state, len(batch)))
        return check(self, state, batch, **more)

    monkeypatch.setattr(Guard, "check", watched)
    given, seen, trial = witnessed(tmp_path, {"client": victim})
    assert given.records == seen.records == trial.score.records
    sizes = {
        k: witnessed(tmp_path / str(k), {"client": k})[0].records for k in range(3) if k != victim
    }
    assert given.records not in sizes.values()
    state, records = shown[0]
    assert records == given.records
    for name, value in parameters(network(5 + victim)).items():
        assert torch.equal(seen.model.get_parameter(name), value)
        assert torch.equal(state[name], value)


def test_loki_through_an_aggregate_reads_the_clients_of_an_uneven_federation(
    tmp_path: Path,
) -> None:
    given, seen, trial = witnessed(tmp_path, {"actor": "aggregate"})
    assert given.records == seen.records == trial.score.records == 15
    assert given.training == seen.training


def test_the_same_seed_gives_the_same_trial(tmp_path: Path) -> None:
    first, second = (audited(PLAN, tmp_path / name)["robbing-the-fed"] for name in "ab")
    assert first.score.scores == second.score.scores


def test_the_forecast_shortens_a_training() -> None:
    assert Seer(steps=2500, side=4).shortened(3, 1) == Seer(steps=3, side=4)


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
