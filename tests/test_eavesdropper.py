"""The eavesdropper: it holds updates and pairs of its own, and nothing that has a weight in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learned_attack
import public_attack
import pytest
import torch
from learned_attack import Nearest
from torch import Tensor, nn

from leakgauge import audit, exchanges, models, report
from leakgauge.attacks import Analytic, ExactRecursion, parts
from leakgauge.attacks._layers import first_linear, last_linear
from leakgauge.audit import Store, advice, cases, parse, run
from leakgauge.audit.bench import Bench
from leakgauge.data import load
from leakgauge.defences import Clip, ClipAndNoise, Prune
from leakgauge.errors import InputError, NotApplicable, PlanError, Withheld
from leakgauge.fl import Scenario, simulate, target
from leakgauge.fl.local import together, train
from leakgauge.fl.model import refilled, stripped
from leakgauge.kept import key_of
from leakgauge.records import Images
from leakgauge.report import contents
from leakgauge.tensors import parameters
from leakgauge.threat import before, behind, check, observe, passed
from leakgauge.types import (
    Batch,
    Defence,
    Exchange,
    Here,
    Learned,
    LocalTraining,
    Named,
    PreparedAttack,
    Resources,
    Round,
    SecureSum,
    ThreatModel,
)

DIGITS = load("digits")
EAVESDROPPER = ThreatModel("eavesdropper")
TOLD = ThreatModel("eavesdropper", frozenset({"training", "records"}))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def played(
    training: LocalTraining | None = None,
    *,
    clients: int = 2,
    defence: Defence | None = None,
    model: str = "mlp",
    server_lr: float = 1.0,
    rounds: int = 0,
) -> Round:
    network = models.make(model, shape=(1, 8, 8), classes=10, rng=seeded(1))
    scenario = Scenario(
        lambda: network, DIGITS, training or LocalTraining(), clients=clients, defence=defence,
        server_lr=server_lr, rounds=rounds,
    )  # fmt: skip
    return simulate(scenario, seeded())


# --- a model without its weights ---------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, a computed tensor, a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.rand(64))
        self.constants = [torch.rand(64), {"deep": torch.rand(64)}]
        self.copied = self.one.weight.detach().clone()
        self.last = nn.Linear(64, 10)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.one(x.flatten(1)) + self.shift).relu() + self.constants[0])


def every() -> dict[str, Callable[[], nn.Module]]:
    made: dict[str, Callable[[], nn.Module]] = {
        name: lambda name=name: models.make(  # type: ignore[misc]
            name, shape=(3, 32, 32), classes=10, rng=seeded()
        )
        for name in models.MODELS
        if name != "text"
    }
    return made | {"tied": Tied}


@pytest.mark.parametrize("name", every())
def test_a_stripped_model_has_the_layers_and_no_value(name: str) -> None:
    model = every()[name]()
    was = copy.deepcopy(model.state_dict())
    bare = stripped(model)
    assert str(bare) == str(model)
    assert all(value.is_meta for value in bare.state_dict().values())
    held = [one for module in bare.modules() for one in vars(module).values()]
    assert all(one.is_meta for one in held if isinstance(one, Tensor))
    for mine, theirs in zip(bare.named_parameters(), model.named_parameters(), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1].shape == theirs[1].shape
        assert mine[1].requires_grad == theirs[1].requires_grad
    assert all(torch.equal(was[key], value) for key, value in model.state_dict().items())


def test_what_layers_share_they_share_without_values() -> None:
    for made in (stripped(Tied()), refilled(stripped(Tied()), seeded())):
        assert isinstance(made, Tied)
        assert made.one.weight is made.two.weight
    bare = stripped(Tied())
    assert bare.constants[0].is_meta
    assert bare.constants[1]["deep"].is_meta


@pytest.mark.parametrize("name", every())
def test_a_refilled_model_runs_and_says_what_the_architecture_says(name: str) -> None:
    model = every()[name]().eval()
    shape = (1, 8, 8) if name == "tied" else (3, 32, 32)
    made = refilled(stripped(model), seeded())
    assert torch.isfinite(made(torch.rand(2, *shape, generator=seeded()))).all()
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert {key: value.shape for key, value in made.state_dict().items()} == shapes
    assert not made.training
    again = refilled(stripped(model), seeded())
    pairs = zip(made.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("find", [first_linear, last_linear])
def test_a_layer_is_found_without_the_weights(find: Callable[..., object]) -> None:
    for model in (Tied(), models.make("mlp", shape=(1, 8, 8), classes=10, rng=seeded())):
        assert find(stripped(model), (1, 8, 8)) == find(model, (1, 8, 8))


# --- attacks without the weights ---------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_analytic_attack_reads_no_weights(momentum: float) -> None:
    round_ = played(LocalTraining(batch_size=2, momentum=momentum))
    attack = Analytic()
    check("analytic", attack, TOLD)
    blind = attack.reconstruct(observe(round_, TOLD), seeded())
    seeing = attack.reconstruct(observe(round_, ThreatModel()), seeded())
    assert torch.equal(blind.inputs, seeing.inputs)
    assert (blind.residual, blind.facts) == (seeing.residual, seeing.facts)


def test_weight_decay_hides_gradients_from_who_lacks_the_weights() -> None:
    round_ = played(LocalTraining(weight_decay=0.1))
    Analytic().reconstruct(observe(round_, ThreatModel()), seeded())
    with pytest.raises(NotApplicable, match="a share of the weights away, which this attacker"):
        Analytic().reconstruct(observe(round_, TOLD), seeded())


@pytest.mark.parametrize("rule", ["idlg", "yin", "fedleak", "counts", "separated"])
def test_a_label_rule_reads_weights_only_where_it_runs_the_network(rule: Any) -> None:
    round_ = played(LocalTraining(batch_size={"idlg": 1, "counts": 24}.get(rule, 4)))
    seeing = parts.infer(observe(round_, ThreatModel()), rule, seeded())
    seen = observe(round_, TOLD)
    if rule in ("counts", "separated"):
        with pytest.raises(Withheld, match="needs 'weights'"):
            parts.infer(seen, rule, seeded())
    else:
        assert torch.equal(parts.infer(seen, rule, seeded()), seeing)
    assert "weights" in parts.knowledge(rule)  # of an attack that matches gradients under it


def test_the_weights_can_be_granted() -> None:
    round_ = played()
    seen = observe(round_, ThreatModel("eavesdropper", frozenset({"weights"})))
    assert seen.weights is not None
    for name, value in seen.weights.items():
        assert torch.equal(value, round_.model.get_parameter(name))
        assert value is not round_.model.get_parameter(name)


def test_masked_updates_are_no_eavesdroppers() -> None:
    round_ = replace(played(), secure=SecureSum())
    with pytest.raises(PlanError, match=r'"eavesdropper", but behind secure aggregation nobody'):
        observe(round_, EAVESDROPPER)


# --- before the round --------------------------------------------------------------------------


def same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def some(count: int = 1) -> Batch:
    return Batch(DIGITS.inputs[-count:], DIGITS.labels[-count:])


def test_a_query_is_what_a_client_would_send() -> None:
    round_ = played(LocalTraining(batch_size=3, steps=2, lr=0.1, momentum=0.5))
    aim = before(round_, EAVESDROPPER, DIGITS)
    assert aim.query is not None
    assert (aim.training, aim.records, aim.clients, aim.defence) == (None, 3, 2, None)
    assert aim.weights is None
    sent = train(round_.setting, some(3), round_.training, seeded()).update
    model = copy.deepcopy(round_.model.state_dict())
    rng = seeded()
    drawn = rng.get_state()
    assert same(aim.query(some(3), rng), sent)
    assert not torch.equal(rng.get_state(), drawn)
    assert all(not value.requires_grad and value.device.type == "cpu" for value in sent.values())
    assert all(torch.equal(model[key], value) for key, value in round_.model.state_dict().items())


def test_a_query_of_no_class_is_refused_in_words() -> None:
    query = target(played(), DIGITS).query
    assert query is not None
    for label in (-1, 10):
        batch = Batch(DIGITS.inputs[:2], torch.tensor([3, label]))
        with pytest.raises(InputError, match="labels from 0 to 9, and 1 of these 2 are others"):
            query(batch, seeded())


def test_a_query_does_not_follow_what_an_attack_does_to_its_model() -> None:
    round_ = played()
    aim = target(round_, DIGITS)
    assert aim.query is not None
    first = aim.query(some(), seeded())
    with torch.no_grad():
        for value in (*aim.model.parameters(), *round_.model.parameters()):
            value.zero_()
    assert same(aim.query(some(), seeded()), first)


@pytest.mark.parametrize(
    ("actor", "grants"),
    [("aggregate", None), ("client", None), ("client", frozenset({"records"}))],
)
def test_behind_an_aggregate_a_query_is_of_all_records(actor: Any, grants: Any) -> None:
    round_ = played(LocalTraining(batch_size=2, lr=0.1), clients=3, server_lr=0.5)
    who = ThreatModel(actor, grants)
    aim = before(round_, who)
    assert aim.query is not None
    assert aim.records == 6
    whole = train(round_.setting, some(6), together(round_.training, 3), seeded()).update
    factor = 0.5 if grants else 1.0  # of the server's step, which only the training tells
    found = aim.query(some(6), seeded())
    assert same(found, {name: factor * value for name, value in whole.items()})
    mine = aim.query(behind(round_, who), seeded())
    for name, value in observe(round_, who).update.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-6)


@dataclass(frozen=True)
class Later:
    """A defence that does more in every round, and more still the second time it is asked."""

    def announced(self) -> dict[str, object]:
        return {}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        times = here.memory.setdefault("times", torch.zeros(()))
        times += 1
        return {name: value * (1 + here.round) * times for name, value in update.items()}


def test_a_query_passes_the_defence_of_the_round_afresh() -> None:
    defence = Later()
    round_ = played(defence=defence, rounds=2)
    assert round_.index == 2
    aim = before(round_, EAVESDROPPER)
    assert aim.query is not None
    assert (aim.defence, aim.round) == (repr(defence), 2)
    sent = train(round_.setting, some(), round_.training, seeded()).update
    for _ in range(2):
        found = aim.query(some(), seeded())
        assert same(found, {name: 3 * value for name, value in sent.items()})
    noisy = before(played(defence=ClipAndNoise(epsilon=10.0, norm=0.1)), EAVESDROPPER)
    assert noisy.query is not None
    rng = seeded()
    one, other = (noisy.query(some(), rng) for _ in range(2))
    assert not same(one, other)  # drawn anew each time
    assert same(noisy.query(some(), seeded()), one)  # and from nothing but the generator


@pytest.mark.parametrize(
    ("threat", "adaptive", "passes"),
    [
        (EAVESDROPPER, True, True),
        (EAVESDROPPER, False, True),  # the client applies it, whatever is known of it
        (ThreatModel(), True, True),
        (ThreatModel(), False, False),
        (ThreatModel(grants=frozenset({"records"})), True, False),
        (ThreatModel("aggregate"), True, False),
        (ThreatModel("client"), True, False),
    ],
)
def test_who_knows_the_defence_puts_it_into_its_queries(
    threat: ThreatModel, adaptive: bool, passes: bool
) -> None:
    round_ = played(defence=Prune(0.5))
    aim = before(round_, threat, adaptive=adaptive)
    assert (aim.defence is not None) == passes
    assert (passed(round_, threat, adaptive=adaptive) is not None) == passes
    assert aim.query is not None
    found = aim.query(some(aim.records), seeded())
    zeros = float(torch.cat([value.flatten() for value in found.values()]).eq(0).float().mean())
    plain = before(played(), threat).query
    assert plain is not None
    base = plain(some(aim.records), seeded())
    least = float(torch.cat([value.flatten() for value in base.values()]).eq(0).float().mean())
    assert (zeros > least) == passes


def test_of_a_captured_round_nobody_knows_the_defence() -> None:
    round_ = played(defence=Prune(0.5))
    known = {name: getattr(round_, name) for name in Exchange.__dataclass_fields__}
    assert before(Exchange(**known), EAVESDROPPER).defence is None


@pytest.mark.parametrize("grants", [frozenset(), frozenset({"training"}), frozenset({"weights"})])
def test_before_a_round_nobody_holds_more_than_after_it(grants: Any) -> None:
    round_ = played()
    for actor in ("server", "eavesdropper"):
        threat = ThreatModel(actor, grants)  # type: ignore[arg-type]
        aim, seen = before(round_, threat), observe(round_, threat)
        assert (aim.weights is None) == (seen.weights is None)
        assert aim.training == seen.training


# --- the key -----------------------------------------------------------------------------------


def test_the_key_follows_the_weights_that_the_attack_does_not_hold() -> None:
    def key(round_: Round, threat: ThreatModel = EAVESDROPPER) -> str:
        return key_of(Nearest(), before(round_, threat, DIGITS), None, round_)

    one = played()
    other = played()
    with torch.no_grad():
        other.model.get_parameter(next(iter(parameters(other.model)))).add_(1e-6)
    keys = {
        "as it is": key(one),
        "another weight": key(other),
        "a defence": key(played(defence=Clip(0.1))),
        "another defence": key(played(defence=Clip(0.2))),
        "another round of it": key(replace(played(defence=Clip(0.2)), index=3)),
        "another training, which it is not told": key(played(LocalTraining(batch_norm="eval"))),
        "another server": key(played(server_lr=0.5)),
        "a view with weights": key(one, ThreatModel("eavesdropper", frozenset({"weights"}))),
        "a server's view": key(one, ThreatModel()),
        "no weights, but the training": key(one, TOLD),
    }
    assert len(set(keys.values())) == len(keys)
    assert key(played()) == keys["as it is"]
    for grants in (frozenset({"weights"}), frozenset({"training"})):
        with pytest.raises(InputError, match="this target holds them not: give the round"):
            key_of(Nearest(), before(one, ThreatModel("eavesdropper", grants), DIGITS))
    key_of(Nearest(), before(one, ThreatModel(), DIGITS))


# --- an audit ----------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "clients": 2,
        "training": {"batch_norm": "eval"},
        "public": 40,
    },
    "threat": {"actor": "eavesdropper"},
    "attack": [{"name": "learned_attack:Nearest"}],
    "defence": [{"name": "none"}, {"name": "clip", "norm": 0.01}],
    "audit": {"seeds": [0, 1], "gallery": 20, "explain": False},
}


def plan(**changes: Any) -> audit.Plan:
    table = copy.deepcopy(PLAN)
    for key, value in changes.items():
        table[key] = value
    return parse(table, "plan", Path.cwd())


@pytest.fixture(autouse=True)
def forgotten() -> None:
    learned_attack.CALLED.clear()
    learned_attack.SEEN.clear()


def test_what_learns_says_so() -> None:
    assert isinstance(Nearest(), Learned)
    assert not isinstance(learned_attack, Learned)

    class Prepared:
        needs: frozenset[str] = frozenset()
        manipulates = False

        def prepare(self) -> None: ...
        def reconstruct(self) -> None: ...

    assert isinstance(Prepared(), PreparedAttack)
    assert not isinstance(Prepared(), Learned)


def test_an_audit_by_an_eavesdropper(tmp_path: Path) -> None:
    result = run(plan(), Store(tmp_path / "out"))
    assert {trial.status for trial in result.trials} == {"done"}, [t.error for t in result.trials]
    assert {trial.realism for trial in result.trials} == {"realistic"}
    assert {trial.attack for trial in result.trials} == {"Nearest"}  # no exact recursion
    assert result.exposure == ()
    assert result.threat is not None
    assert result.threat.holds == ("public", "records")
    assert {"weights", "training", "labels"} <= set(result.threat.withheld)
    assert result.plan.threat.grants == {"records"}
    assert all(target.weights is None for target in learned_attack.CALLED)
    assert all(seen.weights is None for seen in learned_attack.SEEN)
    assert all(seen.answer is None for seen in learned_attack.SEEN)
    for trial in result.trials:
        assert trial.found is not None
        learned = "learned from updates that had passed the same defence"
        assert trial.found.adapted == (learned if trial.defence == "clip" else None)
    # A model for each seed, each without and with the defence; the twin is one of those without.
    assert len(learned_attack.CALLED) == 4
    assert {target.defence for target in learned_attack.CALLED} == {None, repr(Clip(0.01))}
    left = [path.name for path in (tmp_path / "out" / "prepared").iterdir()]
    assert len(left) == 4
    assert all(name.endswith(".finished.safetensors") for name in left)


def test_the_twin_of_an_eavesdropper_is_an_eavesdroppers() -> None:
    checked = plan(defence=[{"name": "clip", "norm": 0.01}])
    control = cases.controls(checked)[0]
    assert control.kind == "control"
    assert control.threat(checked).actor == "eavesdropper"
    rungs = cases.ladder(checked, "Nearest")
    assert [factor for factor, _ in rungs] == ["twin", "defence"]  # other clients do not hinder it


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_server_that_learns_applies_the_defence_only_if_it_knows_it(
    tmp_path: Path, adaptive: bool
) -> None:
    checked = plan(threat={}, audit=PLAN["audit"] | {"adaptive": adaptive, "exact": False})
    bench = Bench(checked, tmp_path / "prepared")
    [case] = [c for c in cases.trials(checked) if c.defence == "clip" and c.seed == 0]
    trial = bench.trial(case, lambda *_: None).trial
    assert trial.found is not None, trial.error
    assert (trial.found.adapted is not None) == adaptive
    [aim] = learned_attack.CALLED
    assert (aim.defence is not None) == adaptive
    assert aim.weights is not None
    assert aim.training == LocalTraining(batch_norm="eval")
    [seen] = learned_attack.SEEN
    assert seen.answer is None  # the update is as it was sent


def test_who_does_not_learn_prepares_once_for_all_defences(tmp_path: Path) -> None:
    public_attack.CALLED.clear()
    checked = plan(attack=[{"name": "public_attack:MeanPublic"}])
    bench = Bench(checked, tmp_path / "prepared")
    for case in cases.trials(checked):
        if case.seed == 0:
            assert bench.trial(case, lambda *_: None).trial.status == "done"
    [aim] = public_attack.CALLED
    assert aim.query is None
    assert aim.defence is None


class Killed(BaseException):
    """As if the process had ended: nothing catches it."""


def test_a_folder_stays_while_a_preparation_is_not_finished(tmp_path: Path) -> None:
    checked = plan()
    bench = Bench(checked, tmp_path)
    case = cases.trials(checked)[0]
    round_ = bench.simulated(case)

    def stop(done: int, total: int, objective: float) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        bench.fitted(case, round_, Resources(progress=stop))
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (folder / "pairs").exists()
    (tmp_path / f".{folder.name}.safetensors.abc.tmp").write_bytes(b"half of it")
    steps: list[int] = []
    bench.fitted(case, round_, Resources(progress=lambda done, *_: steps.append(done)))
    assert steps[0] == 4  # from the checkpoint
    assert [path.name for path in tmp_path.iterdir()] == [f"{folder.name}.finished.safetensors"]


def test_an_attack_that_reads_weights_is_refused_before_it_runs() -> None:
    words = r"attack 'dlg' needs 'training' .*'weights' .*'eavesdropper' does not hold: add"
    with pytest.raises(Withheld, match=words):
        plan(attack=[{"name": "dlg"}])
    informed = {"actor": "eavesdropper", "grants": ["training", "records", "weights"]}
    checked = plan(attack=[{"name": "dlg"}], threat=informed)
    assert {type(attack) for attack in checked.attacks.values()} >= {ExactRecursion}
    assert audit.exposures(checked)


@pytest.mark.parametrize(
    ("threat", "federation", "words"),
    [
        ({"malicious": True}, {}, "an eavesdropper sends no model to others"),
        ({}, {"secure": {}}, "nobody sees the update of one client, which is masked"),
    ],
)
def test_what_an_eavesdropper_cannot_be(threat: Any, federation: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(threat={"actor": "eavesdropper"} | threat, federation=PLAN["federation"] | federation)


def test_the_report_says_who_listens(tmp_path: Path) -> None:
    result = run(plan(), Store(tmp_path / "out"))
    assert contents.attacker(result) == "An eavesdropper"
    assert contents.threat_sentence(result).startswith("An eavesdropper against client 0. ")
    lines = {line.item: line for line in contents.knowledge(result)}
    assert not lines["weights"].held
    assert lines["weights"].words == "the values of the global model's weights"
    assert lines["records"].held
    assert any("does not know the weights" in line for line in contents.limits(result, "hide"))
    leaks: Any = {"found": SimpleNamespace(leak=SimpleNamespace(state="leaks"))}
    said = advice.next_steps("leaks", leaks, (), ("", ""), result)
    assert "an eavesdropper that sees them can recognise records." in said[0]
    assert any(step.startswith("Encrypt updates on their way") for step in said)
    assert not any("secure aggregation" in step for step in said)
    said = advice.next_steps("below the limit", {}, (), ("", ""), result)
    assert 'actor = "server"' in said[1]
    assert not any("malicious" in step for step in said)


def test_without_the_weights_nobody_answers_a_defence(tmp_path: Path) -> None:
    """Some answers run the model; this attacker has layers alone."""
    defences = [{"name": "prune"}, {"name": "outpost"}, {"name": "clip", "norm": 0.1}]
    checked = plan(
        attack=[{"name": "analytic"}],
        threat={"actor": "eavesdropper", "grants": ["training", "records"]},
        defence=defences,
    )
    bench = Bench(checked, tmp_path)
    for case in cases.trials(checked):
        trial = bench.trial(case, lambda *_: None).trial
        assert trial.status == "done", trial.error
        assert trial.found is not None
        assert trial.found.adapted is None
        assert trial.realism == "informed"


def test_the_reports_of_an_eavesdropper_can_be_written(tmp_path: Path) -> None:
    result = run(plan(audit=PLAN["audit"] | {"explain": True}), Store(tmp_path / "out"))
    assert result.explanation is not None
    for path in report.write(tmp_path / "out", "hide"):
        text = path.read_text()
        assert "An eavesdropper" in text
        assert "Exposed before any attack" not in text


def test_a_captured_round_can_be_overheard(tmp_path: Path) -> None:
    """Whoever reads what travelled: the defence of its clients is not known, and not tested."""
    round_ = played(defence=Clip(0.1))
    exchanges.capture(
        tmp_path / "rounds",
        round_.model,
        list(round_.updates),
        made_by="mlp",
        record=Images((1, 8, 8)),
        classes=DIGITS.classes,
        training=round_.training,
        sizes=round_.sizes,
        announced=round_.announced,
        truths=round_.truths,
    )
    federation = {"data": {"captured": str(tmp_path / "rounds")}}
    seeds = {"seeds": [0], "gallery": 20, "control": False}
    checked = plan(federation=federation, defence=[{"name": "none"}], audit=seeds)
    result = run(checked, Store(tmp_path / "out"))
    [trial] = result.trials
    assert trial.found is not None, trial.error
    assert trial.found.adapted is None
    assert all(target.defence is None for target in learned_attack.CALLED)
    assert all(target.weights is None for target in learned_attack.CALLED)
    [row] = result.summary
    assert row.defence == "announced"
    assert contents.unknown(row)
