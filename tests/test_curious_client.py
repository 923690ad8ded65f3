"""The curious client: what it does with what it knows, and what it is judged on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attacks import SHAPE, digits, network, paired, seeded
from torch import nn

from leakgauge.attacks import CuriousClient
from leakgauge.attacks._engine import Engine
from leakgauge.attacks._objectives import relative_squared, squared
from leakgauge.attacks._own import apart, beside, left, others, same_records
from leakgauge.attacks._replays import Clients, Rounds
from leakgauge.attacks._spaces import Beside, LowResolution, Pixels
from leakgauge.audit import Store, parse, run
from leakgauge.errors import InputError, PlanError, Withheld
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import train
from leakgauge.tensors import norm, subtract, weighted_mean
from leakgauge.threat import check, covered, observe, realism
from leakgauge.types import (
    Batch,
    LocalTraining,
    Observation,
    Reconstruction,
    Round,
    SecureSum,
    ThreatModel,
)

CLIENT = ThreatModel("client", client=1)
ORACLE = frozenset({"training", "records", "clients"})


def federation(
    training: LocalTraining | None = None,
    model: nn.Module | None = None,
    *,
    keep: int = 0,
    **options: Any,
) -> Round:
    made = model or network("lenet-zhu", seed=1, init="wide-uniform")
    scenario = Scenario(
        lambda: made,
        digits(),
        training or LocalTraining(batch_size=2, lr=0.1),
        **({"clients": 3} | options),
    )
    return simulate(scenario, seeded(4), keep=keep)


def assert_near(found: Any, expected: Any, off: float) -> None:
    assert norm(subtract(found, expected)) < off * norm(expected)


# --- its own part ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_without_its_own_part_the_mean_of_the_others_is_left(steps: int, server_lr: float) -> None:
    """Exactly, also after several steps: float32 weights are all that rounds."""
    round_ = federation(LocalTraining(batch_size=2, steps=steps, lr=0.1), server_lr=server_lr)
    rest = others(observe(round_, CLIENT))
    assert_near(
        rest.update, weighted_mean([round_.updates[0], round_.updates[2]], (0.5, 0.5)), 1e-4
    )
    assert (rest.records, rest.training.batch_size) == (4, 4)
    assert rest.own is rest.own_update is rest.share is None


def test_the_own_part_is_weighted_by_its_records() -> None:
    round_ = federation()
    truths = (round_.truths[0], Batch(digits().inputs[:6], digits().labels[:6]), round_.truths[2])
    sizes, weights = (2, 6, 2), (0.2, 0.6, 0.2)
    local = [
        train(round_.setting, t, LocalTraining(batch_size=len(t), lr=0.1), seeded()).update
        for t in truths
    ]
    mean = weighted_mean(local, weights)
    after = {n: p.detach() - mean[n] for n, p in round_.model.named_parameters()}
    uneven = replace(
        round_, truths=truths, updates=tuple(local), sizes=sizes, weights=weights, after=after
    )
    rest = others(observe(uneven, CLIENT))
    assert rest.records == 4
    assert_near(rest.update, weighted_mean([local[0], local[2]], (0.5, 0.5)), 1e-4)


def test_the_own_part_of_a_rounded_sum_is_what_was_rounded() -> None:
    secure = SecureSum(clip=0.05, bits=8)  # coarse: another rounding would be seen
    round_ = federation(secure=secure)
    rest = others(observe(round_, CLIENT))
    plain = others(replace(observe(round_, CLIENT), own_update=round_.updates[1]))
    whole = observe(federation(clients=3, secure=secure), ThreatModel("aggregate"))
    assert whole.records == 6
    level = 0.05 / 127
    value = rest.update["fc.0.bias"] / level * 2  # half of a sum of two whole numbers
    assert float((value - value.round()).abs().max()) < 0.05
    value = plain.update["fc.0.bias"] / level * 2
    assert float((value - value.round()).abs().max()) > 0.1


def test_labels_and_clients_of_the_others_are_left() -> None:
    round_ = federation()
    seen = observe(round_, replace(CLIENT, grants=ORACLE | {"labels"}))
    rest = others(seen)
    expected = torch.cat([round_.truths[0].labels, round_.truths[2].labels])
    assert sorted(rest.labels.tolist()) == sorted(expected.tolist())
    assert [weight for weight, _ in rest.clients] == pytest.approx([0.5, 0.5])
    found = sorted(sorted(labels.tolist()) for _, labels in rest.clients)
    assert found == sorted(sorted(round_.truths[k].labels.tolist()) for k in (0, 2))


def test_without_its_weight_nothing_is_subtracted() -> None:
    seen = replace(observe(federation(), CLIENT), share=None)
    with pytest.raises(Withheld, match="its weight in the mean"):
        others(seen)
    guess = CuriousClient(iterations=3, exact=False).reconstruct(seen, seeded())
    assert guess.facts["own"] == "candidates"
    assert guess.inputs.shape == (4, *SHAPE)


def test_left_labels_are_as_many_as_the_others() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2])
    assert left(labels, torch.tensor([0, 2])).tolist() == [0, 1, 2]
    assert left(labels, torch.tensor([7, 2])).tolist() == [0, 0, 1]  # 7 is not there


# --- judged on others --------------------------------------------------------------------------


def test_guesses_of_the_own_records_are_left_out_before_scores() -> None:
    round_ = federation()
    seen, truth = observe(round_, CLIENT), covered(round_, CLIENT)
    noise = 0.05 * torch.rand(6, *SHAPE, generator=seeded())
    images = torch.cat([t.inputs for t in round_.truths]) + noise
    labels = torch.cat([t.labels for t in round_.truths])
    found = apart(Reconstruction(images, labels, 0.0, prior=images), seen)
    assert torch.equal(found.inputs, torch.cat([images[:2], images[4:]]))
    assert sorted(found.labels.tolist()) == sorted(truth.labels.tolist())
    assert found.prior.shape == found.inputs.shape
    assert found.notes == ("left out: 2 guesses of the attacking client's own records",)
    few = Reconstruction(images[:4], labels[:4], 0.0)  # it left them out itself
    assert apart(few, seen) is few
    five = apart(Reconstruction(images[:5], None, 0.0), seen)
    assert len(five.inputs) == 4
    server = observe(round_, ThreatModel("aggregate"))
    whole = Reconstruction(images, labels, 0.0)
    assert apart(whole, server) is whole


def test_a_label_tells_own_guesses_apart() -> None:
    """Of two guesses alike, that with the own label goes."""
    round_ = federation()
    seen = observe(round_, CLIENT)
    own = round_.truths[1]
    images = own.inputs[:1].repeat(6, 1, 1, 1)
    labels = torch.full((6,), 99)
    labels[3:5] = own.labels
    found = apart(Reconstruction(images, labels, 0.0), seen)
    assert found.labels.tolist() == [99] * 4


# --- searches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["subtract", "candidates", "ignore"])
def test_the_digits_of_another_client_are_found(own: Any) -> None:
    round_ = federation(LocalTraining(lr=0.1, batch_size=1), clients=2)
    seen, truth = observe(round_, CLIENT), covered(round_, CLIENT)
    attack = CuriousClient(iterations=250, space="pixels", exact=False, own=own)
    guess = apart(attack.reconstruct(seen, seeded()), seen)
    assert guess.facts["own"] == own
    assert guess.inputs.shape == truth.inputs.shape
    assert float(paired(guess.inputs, truth.inputs).min()) > (15 if own == "ignore" else 20)
    assert guess.labels.tolist() == truth.labels.tolist()


def test_a_server_behind_an_aggregate_runs_the_same_attack() -> None:
    round_ = federation(LocalTraining(lr=0.1, batch_size=1), clients=2)
    threat = ThreatModel("aggregate")
    guess = CuriousClient(iterations=250, space="pixels", exact=False).reconstruct(
        observe(round_, threat), seeded()
    )
    assert guess.facts["own"] == "ignore"
    assert float(paired(guess.inputs, covered(round_, threat).inputs).min()) > 15


def test_known_records_stay_as_they_are_in_every_batch() -> None:
    """Two batches of three clients with two records each: every one holds one of each."""
    training = LocalTraining(batch_size=1, steps=2, lr=0.1)
    round_ = federation(training, records=2)
    seen = observe(round_, CLIENT)
    assert (seen.training.batch_size, seen.records) == (3, 6)
    order = beside(seen, explicit=False)
    assert order.tolist() == [0, 1, 4, 2, 3, 5]
    space = Beside(Pixels(), seen.own.inputs, order)
    free = space.draw((6, *SHAPE), "normal", seeded())
    images = space.decode(free, SHAPE[1:])
    assert torch.equal(images[[2, 5]], seen.own.inputs)
    assert torch.equal(images[[0, 1, 3, 4]], free[0])
    assert torch.equal(space.encode(images, free)[0], free[0])
    assert Beside(LowResolution(), seen.own.inputs, order).boxed


@pytest.mark.parametrize("options", [{"own": "subtract"}, {"own": "candidates"}, {"lrs": (1, 2)}])
def test_who_has_no_records_takes_what_it_is_told(options: Any) -> None:
    """A server, as in the control of a client's audit."""
    seen = observe(federation(), ThreatModel("aggregate"))
    attack = CuriousClient(iterations=3, exact=False)
    guess = replace(attack, **options).reconstruct(seen, seeded())
    assert torch.equal(guess.inputs, attack.reconstruct(seen, seeded()).inputs)
    assert guess.facts["own"] == "ignore"


# --- what is not known -------------------------------------------------------------------------


def test_what_is_tried_need_not_be_granted() -> None:
    assert CuriousClient().needs == {"training", "records", "weights"}
    assert CuriousClient(lrs=(0.1,)).needs == {"training", "records", "weights", "own"}
    assert CuriousClient(counts=(4,)).needs == {"training", "weights", "own"}
    assert "clients" in CuriousClient(explicit=True).needs
    with pytest.raises(Withheld, match=r'set threat.actor = "client"'):
        check("x", CuriousClient(clients=(2,)), ThreatModel("aggregate"))
    with pytest.raises(InputError, match="give one of them"):
        CuriousClient(counts=(4,), clients=(2,))


def test_its_own_images_tell_the_learning_rate() -> None:
    round_ = federation(LocalTraining(lr=0.1, batch_size=1), clients=2)
    seen = observe(round_, CLIENT)
    attack = CuriousClient(
        iterations=2, tries=120, space="pixels", exact=False, lrs=(0.025, 0.05, 0.1, 0.2, 0.4)
    )
    guess = attack.reconstruct(seen, seeded())
    assert guess.facts["chosen"]["lr"] == 0.1
    errors = [one["own_mse"] for one in guess.facts["tried"]]
    assert min(errors) == errors[2]
    assert guess.iterations == 5 * 120 + 2
    assert "came out best with learning rate 0.1 and 2 records" in guess.notes[0]


def test_its_own_images_tell_the_number_of_clients() -> None:
    round_ = federation(LocalTraining(lr=0.1, batch_size=1), clients=2)
    seen = observe(round_, replace(CLIENT, grants=frozenset({"training"})))
    assert seen.records is None
    attack = CuriousClient(iterations=2, tries=120, space="pixels", exact=False, clients=(2, 3, 4))
    guess = attack.reconstruct(seen, seeded())
    assert guess.facts["chosen"]["records"] == 2
    assert guess.inputs.shape == (1, *SHAPE)
    with pytest.raises(InputError, match="expected more than 1, got"):
        replace(attack, clients=(), counts=(1, 2)).reconstruct(seen, seeded())


# --- every client by itself --------------------------------------------------------------------


def parts(seen: Observation, **options: Any) -> dict[str, Any]:
    return {"device": "cpu", "dtype": torch.float64, "mode": "exact"} | options


@pytest.mark.parametrize("steps", [1, 3])
def test_clients_played_by_themselves_give_the_update_of_the_round(steps: int) -> None:
    round_ = federation(LocalTraining(batch_size=2, steps=steps, lr=1.0))
    seen = observe(round_, ThreatModel("aggregate", ORACLE))
    every = torch.cat([t.inputs for t in round_.truths]).double()
    labels = torch.cat([t.labels for t in round_.truths])
    groups = [(w, len(y)) for w, y in seen.clients]
    played = Clients(seen, seen.training, groups, **parts(seen))
    alone = Engine(seen, seen.training, 6, **parts(seen))
    off = [one.slope(every, labels, relative_squared).value for one in (played, alone)]
    assert off[0] < 1e-9
    assert (off[1] < 1e-9) == (steps == 1)  # a super-client is another for several steps


def test_the_derivative_of_clients_is_that_of_their_sum() -> None:
    round_ = federation(LocalTraining(batch_size=2, steps=2, lr=0.5))
    seen = observe(round_, ThreatModel("aggregate", ORACLE))
    played = Clients(seen, seen.training, [(w, len(y)) for w, y in seen.clients], **parts(seen))
    labels = torch.cat([t.labels for t in round_.truths])
    x = torch.rand(6, *SHAPE, generator=seeded(), dtype=torch.float64)
    way = torch.randn(x.shape, generator=seeded(1), dtype=torch.float64)
    slope = played.slope(x, labels, squared).inputs
    ahead, back = (played.slope(x + e * way, labels, squared).value for e in (1e-5, -1e-5))
    assert float((slope * way).sum()) == pytest.approx((ahead - back) / 2e-5, rel=1e-4)


def test_the_upper_bound_is_tagged_as_such_and_beats_the_super_client() -> None:
    attack = CuriousClient(iterations=80, space="pixels", exact=False, explicit=True, own="ignore")
    threat = replace(CLIENT, grants=ORACLE)
    check("x", attack, threat)
    assert realism(threat, attack) == "oracle"
    with pytest.raises(Withheld, match="needs 'clients'"):
        check("x", attack, CLIENT)
    tanh = network("lenet-zhu", seed=1, activation="tanh")
    round_ = federation(LocalTraining(batch_size=1, steps=3, lr=0.2), tanh, clients=2)
    seen = observe(round_, threat)
    bound, plain = (
        one.reconstruct(seen, seeded()) for one in (attack, replace(attack, explicit=False))
    )
    assert bound.residual < plain.residual / 10
    with pytest.raises(Withheld, match="explicit"):
        attack.reconstruct(observe(round_, CLIENT), seeded())
    beside_own = replace(attack, own="candidates", iterations=3).reconstruct(seen, seeded())
    assert beside_own.inputs.shape == (1, *SHAPE)


# --- several rounds ----------------------------------------------------------------------------


def test_rounds_of_the_same_records_are_matched_together() -> None:
    few = replace(digits(), inputs=digits().inputs[:6], labels=digits().labels[:6])
    scenario = Scenario(
        lambda: network("lenet-zhu", seed=1, init="wide-uniform"),
        few,
        LocalTraining(batch_size=2, lr=0.1),
        clients=3,
        rounds=2,
    )
    round_ = simulate(scenario, seeded(4), keep=2)
    threat = replace(CLIENT, rounds=3)
    seen = observe(round_, threat)
    assert all(same_records(seen.own, one.own) for one in seen.earlier)
    guess = CuriousClient(iterations=3, exact=False).reconstruct(seen, seeded())
    assert guess.facts["rounds"] == 3
    last = CuriousClient(iterations=3, exact=False, rounds="last").reconstruct(seen, seeded())
    assert last.facts["rounds"] == 1
    engines = [
        Engine(one, one.training, 4, **parts(one)) for one in map(others, (seen, *seen.earlier))
    ]
    x = torch.cat([round_.truths[0].inputs, round_.truths[2].inputs]).double()
    labels = torch.cat([round_.truths[0].labels, round_.truths[2].labels])
    joint = Rounds(engines)
    assert joint.slope(x, labels, relative_squared).value < 1e-6
    other = joint.slope(x.flip(-1), labels, relative_squared)
    apiece = [e.slope(x.flip(-1), labels, relative_squared) for e in engines]
    assert other.value == pytest.approx(sum(one.value for one in apiece))
    torch.testing.assert_close(other.inputs, sum(one.inputs for one in apiece))


def test_rounds_of_other_records_are_left_aside_in_words() -> None:
    round_ = federation(rounds=1, keep=1)
    attack = CuriousClient(iterations=3, exact=False)
    guess = attack.reconstruct(observe(round_, replace(CLIENT, rounds=2)), seeded())
    assert guess.facts["rounds"] == 1
    assert "own records were others there" in guess.notes[0]
    seen = observe(round_, ThreatModel("aggregate", rounds=2))
    guess = attack.reconstruct(seen, seeded())
    assert 'set rounds = "all"' in guess.notes[0]
    assert replace(attack, rounds="all").reconstruct(seen, seeded()).facts["rounds"] == 2


# --- in an audit -------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [16]},
        "data": "digits",
        "clients": 3,
        "rounds": [1],
        "training": {"batch_size": 2, "lr": 0.1},
    },
    "threat": {"actor": "client", "client": 1, "rounds": 2},
    "attack": [
        {"name": "curious-client", "iterations": 3, "exact": False, "own": "subtract"},
        {"name": "curious-client", "iterations": 3, "exact": False, "tries": 2, "clients": [2, 3]},
        {"name": "inverting-gradients", "iterations": 3},
    ],
    "audit": {"seeds": [0], "explain": False, "exact": False, "gallery": 20},
}


def test_an_audit_judges_every_attack_of_a_client_on_the_others(tmp_path: Path) -> None:
    plan = parse(PLAN, "client", tmp_path)
    result = run(plan, Store(tmp_path))
    trials = {t.attack: t for t in result.trials if t.kind == "trial"}
    assert {t.status for t in result.trials} == {"done"}  # the controls, too: they have no earlier
    assert trials["curious-client-2"].found.facts["chosen"]["records"] in (4, 6)
    for name in ("curious-client", "inverting-gradients"):
        trial = trials[name]
        assert (trial.score.records, trial.found.guesses) == (4, 4), name
        assert trial.realism == "informed"
    assert "own records were others there" in " ".join(trials["curious-client"].found.notes)
    assert "left out: 2 guesses" in " ".join(trials["inverting-gradients"].found.notes)


@pytest.mark.parametrize(
    ("federation_", "threat", "words"),
    [
        ({"clients": 1}, {"client": 0, "rounds": 1}, "the only client of the round"),
        ({}, {"rounds": 3}, r"threat.rounds = 3: 2 honest rounds or more .*rounds = \[1\]"),
        ({"participants": 2}, {}, "every client is in each of them"),
        ({}, {"rounds": 0}, "threat.rounds must be at least 1, got 0"),
    ],
)
def test_a_plan_is_refused_in_words(
    federation_: dict[str, Any], threat: dict[str, Any], words: str, tmp_path: Path
) -> None:
    table = PLAN | {"federation": PLAN["federation"] | federation_}
    with pytest.raises(PlanError, match=words):
        parse(table | {"threat": PLAN["threat"] | threat}, "client", tmp_path)


@pytest.mark.parametrize(("side", "factor"), [(8, 1), (16, 2), (28, 4), (64, 4)])
def test_small_pictures_keep_pixels_to_search(side: int, factor: int) -> None:
    """A quarter of the side of a small picture would hide what its update shows."""
    images = torch.rand(12, 1, side, side, generator=seeded(2))
    data = replace(digits(), inputs=images, labels=torch.arange(12) % 10)
    model = nn.Sequential(nn.Flatten(), nn.Linear(side * side, 10))
    training = LocalTraining(batch_size=2, lr=0.1)
    seen = observe(simulate(Scenario(lambda: model, data, training, clients=2), seeded(4)), CLIENT)
    found, same = (
        CuriousClient(iterations=3, exact=False, factor=one).reconstruct(seen, seeded()).inputs
        for one in (None, factor)
    )
    assert torch.equal(found, same)
