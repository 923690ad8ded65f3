"""Secure aggregation as an audit meets it: drop-outs, weights, whole numbers, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from leakgauge import data, models
from leakgauge.attacks import ExactRecursion
from leakgauge.audit import Store, parse, run
from leakgauge.audit.ladder import describe, factors, weakened
from leakgauge.errors import InputError, LeakGaugeError, PlanError
from leakgauge.fl import Scenario, aggregate, simulate, tampered
from leakgauge.report import contents
from leakgauge.tensors import parameters, weighted_mean
from leakgauge.threat import covered, observe
from leakgauge.types import (
    Dataset,
    Kept,
    LocalTraining,
    Named,
    Preparation,
    SecureSum,
    ThreatModel,
)

AGGREGATE = ThreatModel("aggregate")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scenario(model: nn.Module, data: Dataset, **options: object) -> Scenario:
    training = LocalTraining(lr=0.1, batch_size=2)
    return Scenario(lambda: model, data, training, **({"clients": 6} | options))


def same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(v, right[n]) for n, v in left.items())


# --- whole numbers -----------------------------------------------------------------------------


def test_an_update_by_hand():
    update = {"b": torch.tensor([[-2.0]]), "a": torch.tensor([0.5, 1.0, 0.24])}
    ring = SecureSum(clip=1.0, bits=3)  # L = 3: levels of 1/3
    sent = aggregate.encode(update, 5, ring)
    assert sent.dtype == np.dtype("<u4")
    assert sent.tolist() == [
        10,
        15,
        5,
        2**32 - 15,
        5,
    ]  # by name; −2 is cut to −1; 0.5·3 rounds to 2
    back = aggregate.decode(sent, update, ring)
    assert list(back) == ["b", "a"]
    assert torch.equal(back["b"], torch.tensor([[-1.0]]))
    assert torch.equal(back["a"], torch.tensor([2 / 3, 1.0, 1 / 3]))


@pytest.mark.parametrize(("bits", "ring"), [(8, 32), (16, 32), (24, 64), (32, 64)])
def test_rounding_is_at_most_half_a_step(bits, ring):
    rng = seeded()
    updates = [{"w": torch.rand(500, generator=rng).double() * 4 - 2} for _ in range(3)]
    settings = SecureSum(clip=2.0, bits=bits, ring=ring)
    found = aggregate.mean(updates, (1 / 3,) * 3, (1, 1, 1), settings)
    gap = (found["w"] - weighted_mean(updates, (1 / 3,) * 3)["w"]).abs().max()
    step = 2.0 / (2 ** (bits - 1) - 1)
    assert 0 < gap <= step / 2 + 1e-12
    assert found["w"].dtype == torch.float64


def test_values_beyond_the_clip_are_cut():
    updates = [{"w": torch.tensor([9.0, -9.0])}, {"w": torch.tensor([1.0, 1.0])}]
    found = aggregate.mean(updates, (0.5, 0.5), (2, 2), SecureSum(clip=3.0, bits=2))
    # L = 1: ±9 is cut to ±3, and 1 is a third of a step.
    assert found["w"].tolist() == [1.5, -1.5]


def test_updates_count_by_their_weights():
    updates = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([-1.0])}]
    ring = SecureSum(clip=1.0)
    assert aggregate.mean(updates, (0.25, 0.75), (1, 3), ring)["w"].item() == -0.5
    assert aggregate.mean(updates, (0.5, 0.5), (1, 3), ring)["w"].item() == 0
    with pytest.raises(InputError, match="by records"):
        aggregate.mean(updates, (0.4, 0.6), (1, 3), ring)


def test_equal_weights_count_one_each_whatever_the_records():
    """By records the sum would reach 2 · 2**20 levels, and be refused."""
    updates = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([-0.5])}]
    ring = SecureSum(clip=1.0, bits=24)
    found = aggregate.mean(updates, (0.5, 0.5), (2**20, 2**20), ring)
    assert found["w"].item() == pytest.approx(0.25, abs=1e-6)


def test_a_sum_that_could_wrap_is_refused_and_the_largest_that_cannot_is_not():
    for ring, bits in [(32, 2), (32, 16), (64, 32)]:
        settings = SecureSum(clip=1.0, bits=bits, ring=ring)
        most = (2 ** (ring - 1) - 1) // (2 ** (bits - 1) - 1)
        aggregate.check_room(settings, most)
        with pytest.raises(InputError, match=r"does not fit into whole numbers mod 2\*\*"):
            aggregate.check_room(settings, most + 1)
    update = {"w": torch.tensor([1.0, -1.0])}
    ring = SecureSum(clip=1.0, bits=16)
    most = (2**31 - 1) // (2**15 - 1)
    sizes = (most - 1, 1)
    mean = aggregate.mean([update, update], aggregate.weights(sizes, "records"), sizes, ring)
    assert mean["w"].tolist() == [1.0, -1.0]  # at the very edge


@pytest.mark.parametrize(
    "wrong", [{"clip": 0.0}, {"clip": float("nan")}, {"bits": 1}, {"bits": 33}, {"ring": 16}]
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        aggregate.check_room(SecureSum(**{"clip": 1.0} | wrong), 1)


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match="NaN"):
        aggregate.encode({"w": torch.tensor([float("nan")])}, 1, SecureSum(clip=1.0))


# --- drop-outs ---------------------------------------------------------------------------------


def test_the_quorum_is_more_than_two_thirds():
    for clients in range(2, 200):
        assert 3 * aggregate.quorum(clients) > 2 * clients
        assert 3 * (aggregate.quorum(clients) - 1) <= 2 * clients
        assert aggregate.quorum(clients) <= clients


def test_clients_that_drop_are_not_in_the_round_and_others_are_unchanged(model, easy):
    whole = simulate(scenario(model, easy), seeded())
    for dropped in ((1, 4), 0.34):
        played = simulate(scenario(model, easy, secure=SecureSum(dropped, 4)), seeded())
        assert len(played.updates) == len(played.truths) == len(played.sizes) == 4
        assert sum(played.weights) == pytest.approx(1)
        stay = [
            k for k, truth in enumerate(whole.truths)
            if any(torch.equal(truth.inputs, other.inputs) for other in played.truths)
        ]  # fmt: skip
        assert len(stay) == 4  # with the records that they had without drop-outs
        if dropped == (1, 4):
            assert stay == [0, 2, 3, 5]
        for k, update in zip(stay, played.updates, strict=True):
            assert same(update, whole.updates[k])
        seen = observe(played, AGGREGATE)
        assert seen.records == 8
        assert len(covered(played, AGGREGATE)) == 8
        expected = weighted_mean([whole.updates[k] for k in stay], (0.25,) * 4)
        assert same(seen.update, expected)


def test_drop_outs_do_not_move_which_records_are_drawn_in_later_rounds(model, easy):
    whole = simulate(scenario(model, easy, rounds=2), seeded())
    played = simulate(scenario(model, easy, rounds=2, secure=SecureSum(0.34, 4)), seeded())
    drawn = [truth.inputs.tolist() for truth in whole.truths]
    assert len(played.truths) == 4
    assert all(truth.inputs.tolist() in drawn for truth in played.truths)


def test_who_drops_is_drawn_again_for_every_round_and_seed():
    some = SecureSum(0.3)
    found = {tuple(aggregate.staying(10, some, seeded(s))) for s in range(20)}
    assert len(found) > 10
    assert {len(one) for one in found} == {7}
    assert aggregate.staying(10, some, seeded(4)) == aggregate.staying(10, some, seeded(4))


@pytest.mark.parametrize(
    ("clients", "share", "gone"), [(10, 0.3, 3), (5, 0.3, 1), (100, 0.29, 29), (7, 0.0, 0)]
)
def test_a_share_of_the_clients_drops(clients, share, gone):
    assert aggregate.dropping(clients, SecureSum(share)) == gone


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"secure": SecureSum(0.5)}, r"3 of 6 clients drop out, but 5 must stay \(threshold\)"),
        ({"secure": SecureSum((0, 6))}, "different clients of the 6"),
        ({"secure": SecureSum((0, 0))}, "different clients of the 6"),
        ({"secure": SecureSum(1.0)}, "share from 0 to below 1"),
        ({"secure": SecureSum(threshold=3)}, "more than half of the 6"),
        ({"secure": SecureSum(), "clients": 1}, "secure aggregation of 1 client"),
        ({"secure": SecureSum(), "participants": 1}, "secure aggregation of 1 client"),
        ({"secure": SecureSum(clip=1.0, bits=32)}, "does not fit"),
        ({"secure": SecureSum(clip=1.0, bits=28), "records": "all"}, "add up to 64"),
        ({"secure": SecureSum(clip=1.0, bits=30), "weighting": "equal"}, "add up to 6 "),
    ],
)
def test_a_round_without_a_sum_is_refused(model, easy, options, why):
    with pytest.raises(InputError, match=why):
        simulate(scenario(model, easy, **options), seeded())


def test_the_global_model_moves_by_the_sum_that_the_server_learns(model, easy):
    ring = SecureSum((2,), clip=0.05, bits=6)
    played = simulate(scenario(model, easy, server_lr=2.0, secure=ring, rounds=2), seeded())
    seen = observe(played, AGGREGATE)
    before = parameters(played.model)
    assert same(played.after, {n: b - 2.0 * seen.update[n] for n, b in before.items()})
    client = observe(played, ThreatModel("client"))
    moved = {n: b - played.after[n] for n, b in before.items()}
    assert same(client.update, {n: value / 2.0 for n, value in moved.items()})  # it knows the 2
    grid = seen.update["head.weight"].double() * 31 / 0.05 * 5  # equal sizes: fifths of a level
    assert torch.allclose(grid, grid.round(), atol=1e-3)


def test_a_malicious_server_meets_the_same_ring(model, easy):
    ring = SecureSum((0,), clip=0.05, bits=4)
    played = simulate(scenario(model, easy, secure=ring), seeded())
    other = tampered(played, Preparation(Kept(), (played.model,)), seeded())
    assert other.secure == ring
    assert same(observe(other, AGGREGATE).update, observe(played, AGGREGATE).update)


def test_no_server_sees_one_update_behind_it(model, easy):
    played = simulate(scenario(model, easy, secure=SecureSum()), seeded())
    with pytest.raises(PlanError, match="nobody sees the update of one client"):
        observe(played, ThreatModel("server"))


# --- in a plan ---------------------------------------------------------------------------------


def planned(secure: dict[str, object], **threat: object) -> dict[str, object]:
    return {
        "federation": {
            "model": {"name": "mlp", "hidden": [16]}, "data": "digits", "clients": 4,
            "secure": secure,
        },
        "threat": {"actor": "aggregate"} | threat,
        "attack": [{"name": "analytic"}],
        "audit": {"seeds": [0], "exact": False},
    }  # fmt: skip


def test_a_plan_says_how_the_sum_is_made():
    plan = parse(planned({"dropped": [3], "clip": 0.5, "bits": 20, "ring": 64}), "p", Path.cwd())
    expected = SecureSum((3,), clip=0.5, bits=20, ring=64)
    assert plan.scenario(0, "none").secure == expected
    assert plan.scenario(0, "none").present == 3
    assert parse(planned({}), "p", Path.cwd()).scenario(0, "none").secure == SecureSum()


@pytest.mark.parametrize(
    ("secure", "threat", "why"),
    [
        ({}, {"actor": "server"}, "nobody sees the update of one client"),
        ({"dropped": 0.5}, {}, "2 of 4 clients drop out"),
        ({"dropped": [3]}, {"client": 3}, "threat.client is 3, but 3 clients"),
        ({"clip": 1.0, "bits": 32}, {}, "does not fit"),
        ({"clip": 1.0, "ring": 33}, {}, "33 is not a choice"),
        ({"bits": 40}, {}, "bits must be between 2 and 32"),
        ({"quantise": 8}, {}, "unknown key 'quantise'"),
    ],
)
def test_a_plan_that_cannot_give_a_sum_is_refused(secure, threat, why):
    with pytest.raises(LeakGaugeError, match=why):
        parse(planned(secure, **threat), "p", Path.cwd())


def test_the_weak_twin_has_no_aggregation(model, easy):
    hard = scenario(model, easy, secure=SecureSum((0,), clip=1.0))
    twin = weakened(hard, ())
    assert twin.secure is None
    assert twin.participants == 1
    assert factors(hard, "aggregate") == ["batch", "batch norm", "aggregation"]
    assert weakened(hard, ["aggregation"]).secure == hard.secure
    words = describe(hard, "aggregation", "none")
    assert words == "one client → 5 aggregated, rounded to 16 bits"
    assert describe(replace(hard, secure=None), "aggregation", "none").endswith("6 aggregated")


def test_an_audit_behind_secure_aggregation_runs_and_reports(tmp_path):
    plan = parse(planned({"dropped": [3], "clip": 0.5, "bits": 24}), "p", Path.cwd())
    result = run(plan, Store(tmp_path / "out"))
    done = [trial for trial in result.trials if trial.kind == "trial"]
    assert [trial.status for trial in done] == ["done"]
    assert len(done[0].score.scores["psnr"]) == 3  # the records of those who stayed
    assert "bonawitz2017" in [paper.key for paper in result.references]
    scope = dict(contents.scope(result))["Clients"]
    assert scope.endswith(
        "secure aggregation, clients 3 drop out, values cut at ±0.5 and rounded to 24 bits"
    )


def test_a_sum_still_leaks():
    """Four clients with one record each: all four are read from the sum, through the ring."""
    played = simulate(
        Scenario(
            lambda: models.make(
                "mlp", shape=(1, 8, 8), classes=10, rng=torch.default_generator, hidden=[256, 256]
            ),
            data.load("digits"),
            LocalTraining(lr=0.1),
            clients=5,
            secure=SecureSum((1,), clip=0.5, bits=24),
        ),
        seeded(),
    )
    seen = observe(played, AGGREGATE)
    guess = ExactRecursion().reconstruct(seen, seeded()).inputs
    truth = covered(played, AGGREGATE).inputs
    gaps = (guess[:, None] - truth[None]).abs().flatten(2).amax(-1)
    assert len(truth) == 4
    assert (gaps.min(0).values < 1e-3).all()
