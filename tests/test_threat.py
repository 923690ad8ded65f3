"""The wall: what is withheld is not there, and nothing handed over leads back to the truth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations, product
from typing import get_args

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge.attacks import Analytic
from leakgauge.attacks.active import RobbingTheFed
from leakgauge.errors import InputError, PlanError, Withheld
from leakgauge.files import some
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import train
from leakgauge.records import Images
from leakgauge.tensors import parameters
from leakgauge.threat import KNOWLEDGE, behind, check, covered, granted, holds, observe, realism
from leakgauge.types import (
    Actor,
    Batch,
    Dataset,
    Exchange,
    Knowledge,
    LocalTraining,
    Named,
    Observation,
    Realism,
    Round,
    ThreatModel,
)

ACTORS = get_args(Actor)
SEEN = [item for item in get_args(Knowledge) if item != "public"]  # public is not observed
SUBSETS = [
    frozenset(s) for s in chain.from_iterable(combinations(SEEN, n) for n in range(len(SEEN) + 1))
]
TRUTHS = {"labels", "statistics", "clients"}  # grants that are part of the truth


class Touched(Exception):
    """Someone looked."""


def refuse(*_: object) -> None:
    raise Touched


class Untouchable:
    """Raises at any access, also at those that Python looks up on the class."""

    __getattribute__ = __setattr__ = __len__ = __iter__ = __bool__ = __getitem__ = refuse
    __eq__ = __hash__ = __contains__ = __deepcopy__ = __reduce_ex__ = __repr__ = refuse


@pytest.mark.parametrize(
    "look",
    [len, iter, bool, list, hash, repr, lambda t: t.inputs, lambda t: t[0], lambda t: t == 1],
)
def test_the_untouchable_truth_refuses_every_look(look):
    with pytest.raises(Touched):
        look(Untouchable())


@pytest.fixture
def played(model: nn.Module) -> Round:
    """A round of two clients with 1 and 3 records; the server steps twice as far as the mean."""
    rng = torch.Generator().manual_seed(2)
    truths = tuple(
        Batch(torch.rand(n, 3, 8, 8, generator=rng), torch.randint(4, (n,), generator=rng))
        for n in (1, 3)
    )
    before = parameters(model)
    updates: tuple[Named, ...] = tuple(
        {name: torch.randn(value.shape, generator=rng) for name, value in before.items()}
        for _ in truths
    )
    after = {n: b - 2 * (0.25 * updates[0][n] + 0.75 * updates[1][n]) for n, b in before.items()}
    return Round(
        setting=setting(model, (3, 8, 8), 4),
        truths=truths,
        updates=updates,
        weights=(0.25, 0.75),
        after=after,
        training=LocalTraining(lr=0.5),
        sizes=(1, 3),
    )


# --- possession --------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["server", "aggregate", "eavesdropper"])
@pytest.mark.parametrize("grants", [s for s in SUBSETS if not s & TRUTHS], ids=sorted)
def test_the_truth_is_not_touched_by_what_a_server_sees(played, actor, grants):
    sealed = replace(played, truths=(Untouchable(), Untouchable()))
    seen = observe(sealed, ThreatModel(actor, grants))
    assert seen.update


@pytest.mark.parametrize("grants", [s for s in SUBSETS if not s & TRUTHS], ids=sorted)
def test_a_client_touches_its_own_records_only(played, grants):
    sealed = replace(played, truths=(Untouchable(), played.truths[1]))
    seen = observe(sealed, ThreatModel("client", grants, client=1))
    assert torch.equal(seen.own.inputs, played.truths[1].inputs)
    assert torch.equal(seen.own.labels, played.truths[1].labels)


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("grants", SUBSETS, ids=sorted)
def test_a_field_is_none_exactly_when_it_is_withheld(played, actor, grants):
    seen = observe(played, ThreatModel(actor, grants))
    assert (seen.training is None) == ("training" not in grants)
    assert (seen.records is None) == ("records" not in grants)
    assert (seen.labels is None) == ("labels" not in grants)
    assert (seen.own is None) == (actor != "client")
    assert (seen.own_update is None) == (actor != "client")
    assert (seen.share is None) == (actor != "client" or "records" not in grants)
    assert (seen.clients is None) == ("clients" not in grants)
    assert (seen.weights is None) == (actor == "eavesdropper" and "weights" not in grants)
    tensors = seen.model.state_dict().values()
    assert all(value.is_meta == (seen.weights is None) for value in tensors)


def test_what_is_granted_is_what_happened(played):
    grants = frozenset({"training", "records", "labels"})
    first, second = (truth.labels for truth in played.truths)
    for threat, records, labels in (
        (ThreatModel("server", grants, client=0), 1, first),
        (ThreatModel("server", grants, client=1), 3, second),
        (ThreatModel("eavesdropper", grants, client=1), 3, second),
        (ThreatModel("aggregate", grants), 4, torch.cat([first, second])),
        (ThreatModel("client", grants, client=1), 4, torch.cat([first, second])),
    ):
        seen = observe(played, threat)
        assert seen.records == records
        assert torch.equal(seen.labels, labels)
        clients = 1 if threat.actor in ("server", "eavesdropper") else 2
        batch_size = clients * played.training.batch_size
        assert seen.training == replace(played.training, batch_size=batch_size)
        assert (seen.record.shape, seen.task.count) == ((3, 8, 8), 4)
        whole, judged = behind(played, threat), covered(played, threat)
        assert torch.equal(whole.labels, labels)
        if threat.actor in ("server", "eavesdropper"):
            assert torch.equal(judged.inputs, played.truths[threat.client].inputs)
        elif threat.actor == "client":  # never on its own records
            assert torch.equal(judged.inputs, played.truths[0].inputs)
            assert torch.equal(judged.labels, first)
        else:
            assert torch.equal(judged.inputs, torch.cat([t.inputs for t in played.truths]))
        if threat.actor != "client":
            assert torch.equal(judged.labels, labels)


def test_each_actor_sees_its_own_view_of_the_update(played):
    one, two = played.updates
    for client, actor in product((0, 1), ("server", "eavesdropper")):
        seen = observe(played, ThreatModel(actor, client=client))
        assert all(torch.equal(seen.update[n], played.updates[client][n]) for n in one)
    mean = {n: 0.25 * one[n] + 0.75 * two[n] for n in one}
    seen = observe(played, ThreatModel("aggregate"))
    for name, value in mean.items():
        torch.testing.assert_close(seen.update[name], value)
    before = parameters(played.model)
    for client in (0, 1):
        seen = observe(played, ThreatModel("client", client=client))
        for name, value in mean.items():
            assert torch.equal(seen.update[name], before[name] - played.after[name])
            torch.testing.assert_close(seen.update[name], 2 * value, rtol=1e-4, atol=1e-5)


def test_a_client_that_knows_the_training_undoes_the_step_of_the_server(played):
    played = replace(played, server_lr=2.0)
    mean = {n: 0.25 * u + 0.75 * played.updates[1][n] for n, u in played.updates[0].items()}
    told = observe(played, ThreatModel("client"))
    raw = observe(played, ThreatModel("client", frozenset({"records"})))
    for name, value in mean.items():
        torch.testing.assert_close(told.update[name], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(raw.update[name], 2 * value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("client", [0, 1])
def test_a_client_knows_its_own_part_of_the_update(played, client):
    """What it sent, and its weight where the number of records tells it."""
    seen = observe(played, ThreatModel("client", client=client))
    assert seen.share == (0.25, 0.75)[client]
    own = played.updates[client]
    assert all(torch.equal(seen.own_update[n], own[n]) for n in own)
    equal = replace(played, weights=(0.5, 0.5))
    assert observe(equal, ThreatModel("client", client=client)).share is None


def test_a_client_that_does_not_know_the_number_of_records_is_not_told_it_by_the_batch(played):
    local = replace(played, training=LocalTraining(batch_size=1, lr=0.5))
    seen = observe(local, ThreatModel("client", frozenset({"training"})))
    assert seen.records is None
    assert seen.training == local.training


def test_a_client_alone_in_its_round_is_refused(played):
    lonely = replace(played, updates=played.updates[:1], truths=played.truths[:1])
    for look in (observe, covered):
        with pytest.raises(PlanError, match=r"the only client of the round.*at least 2 clients"):
            look(lonely, ThreatModel("client"))


def test_clients_are_weights_and_labels_of_each(played):
    grants = frozenset({"clients"})
    for actor in ("aggregate", "client"):
        found = observe(played, ThreatModel(actor, grants)).clients
        assert [weight for weight, _ in found] == [0.25, 0.75]
        for (_, labels), truth in zip(found, played.truths, strict=True):
            assert torch.equal(labels, truth.labels)
    ((weight, labels),) = observe(played, ThreatModel("server", grants, client=1)).clients
    assert weight == 1
    assert torch.equal(labels, played.truths[1].labels)


# --- several rounds ----------------------------------------------------------------------------


def federation(rng: torch.Generator, **options: object) -> Scenario:
    data = Dataset("d", torch.rand(24, 1, 4, 4, generator=rng), torch.arange(24) % 2, ("a", "b"))
    return Scenario(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)),
        data,
        LocalTraining(batch_size=4, lr=0.1),
        clients=3,
        **options,
    )


def test_several_rounds_are_those_just_before(rng: torch.Generator) -> None:
    state = rng.get_state()
    round_ = simulate(federation(rng, rounds=3), rng, keep=2)
    assert [one.index for one in round_.earlier] == [1, 2]
    seen = observe(round_, ThreatModel("client", client=1, rounds=2))
    (before,) = seen.earlier
    assert (before.round, seen.round) == (2, 3)
    for name, value in before.model.named_parameters():  # one update leads to the next model
        torch.testing.assert_close(
            value - before.update[name], seen.model.get_parameter(name), rtol=1e-4, atol=1e-6
        )
    assert torch.equal(before.own.inputs, round_.earlier[-1].truths[1].inputs)
    assert not before.earlier
    rng.set_state(state)
    alone = simulate(federation(rng, rounds=3), rng)  # keeping rounds changes none
    assert not alone.earlier
    assert all(torch.equal(value, round_.after[name]) for name, value in alone.after.items())
    assert not observe(alone, ThreatModel("client")).earlier


def test_rounds_that_were_not_kept_cannot_be_seen(rng: torch.Generator) -> None:
    round_ = simulate(federation(rng, rounds=1), rng)
    with pytest.raises(PlanError, match=r"threat.rounds is 2, but 0 rounds .* keep=1"):
        observe(round_, ThreatModel("client", rounds=2))
    with pytest.raises(PlanError, match=r"threat.rounds is 0: expected 1 or more"):
        observe(round_, ThreatModel("client", rounds=0))


# --- without truths ----------------------------------------------------------------------------


@pytest.fixture
def captured(played: Round) -> Exchange:
    """The same round as it travelled: nobody knows the truth behind it."""
    known = {f.name: getattr(played, f.name) for f in fields(Exchange)}
    exchange = Exchange(**known)
    assert not hasattr(exchange, "truths")
    return exchange


@pytest.mark.parametrize("actor", ["server", "aggregate", "eavesdropper"])
@pytest.mark.parametrize("grants", [s for s in SUBSETS if not s & TRUTHS], ids=sorted)
def test_what_travelled_is_observed_without_truths(played, captured, actor, grants):
    threat = ThreatModel(actor, grants, client=1)
    seen, known = observe(captured, threat), observe(played, threat)
    assert seen.update.keys() == known.update.keys()
    assert all(torch.equal(value, known.update[name]) for name, value in seen.update.items())
    assert (seen.training, seen.records) == (known.training, known.records)
    assert (seen.record, seen.task) == (known.record, known.task)
    assert seen.labels is seen.statistics is seen.own is None


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("grants", SUBSETS, ids=sorted)
def test_nothing_of_an_unknown_truth_can_be_granted(captured, actor, grants):
    missing = sorted((grants & TRUTHS) | ({"own"} if actor == "client" else set()))
    if not missing:
        observe(captured, ThreatModel(actor, grants))
        return
    with pytest.raises(Withheld) as refused:
        observe(captured, ThreatModel(actor, grants))
    assert str(refused.value) == (
        f"nobody knows the truth behind these updates, so {some(missing)} cannot be granted: "
        "leave it out of threat.grants, choose another threat.actor, or record the truths"
    )


# --- copies ------------------------------------------------------------------------------------


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel() and not t.is_meta}


def handed_over(seen: Observation) -> list[Tensor]:
    tensors = [*seen.update.values(), *seen.model.parameters(), *seen.model.buffers()]
    tensors += [seen.labels] if seen.labels is not None else []
    tensors += [t for pair in (seen.statistics or {}).values() for t in pair]
    tensors += [*(seen.own_update or {}).values(), *(labels for _, labels in seen.clients or ())]
    return tensors + ([seen.own.inputs, seen.own.labels] if seen.own else [])


def kept_back(round_: Round) -> list[Tensor]:
    tensors = [*round_.model.parameters(), *round_.model.buffers(), *round_.after.values()]
    tensors += [value for update in round_.updates for value in update.values()]
    return tensors + [t for truth in round_.truths for t in (truth.inputs, truth.labels)]


@pytest.mark.parametrize("actor", ACTORS)
def test_nothing_handed_over_leads_back(played, actor):
    leaf = torch.ones((), requires_grad=True)  # updates that carry a graph, a model with gradients
    graphs = tuple({n: u * leaf for n, u in update.items()} for update in played.updates)
    played = replace(played, updates=graphs, after={n: a * leaf for n, a in played.after.items()})
    for p in played.model.parameters():
        p.grad = torch.ones_like(p)
    seen = observe(played, ThreatModel(actor, frozenset(TRUTHS)))
    assert all(t.grad_fn is None for pair in seen.statistics.values() for t in pair)
    assert all(u.grad_fn is None and not u.requires_grad for u in seen.update.values())
    assert all(p.grad is None for p in seen.model.parameters())
    assert all(p.grad is not None for p in played.model.parameters())
    assert not storages(handed_over(seen)) & storages(kept_back(played))
    if actor == "eavesdropper":
        assert all(value.is_meta for value in seen.model.state_dict().values())
        return
    for (name, mine), theirs in zip(
        seen.model.state_dict().items(), played.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


# --- updates from outside ----------------------------------------------------------------------

FAULTS = {
    "NaN": (lambda u: u["head.bias"][0].fill_(math.nan), "'head.bias' holds 1 NaN or infinite"),
    "shape": (
        lambda u: u.update({"head.bias": torch.zeros(1)}),  # would broadcast
        r"'head.bias' has shape \(1,\), the model's parameter has \(4,\)",
    ),
    "missing": (lambda u: u.pop("head.bias"), "no entry for parameter 'head.bias'"),
    "extra": (lambda u: u.update({"tail": torch.zeros(1)}), "unexpected entry 'tail'"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("actor", "where"),
    [
        ("server", "the update of client 1: "),
        ("aggregate", "the update of client 1: "),
        ("eavesdropper", "the update of client 1: "),
        ("client", "the global model after the round: "),
    ],
)
def test_a_malformed_update_is_refused_in_words(played, actor, where, fault):
    spoil, words = FAULTS[fault]
    spoil(played.after if actor == "client" else played.updates[1])
    with pytest.raises(InputError, match=where + words):
        observe(played, ThreatModel(actor, client=1))


@pytest.mark.parametrize("client", [-1, 2])
def test_a_client_that_did_not_take_part_is_refused(played, client):
    with pytest.raises(PlanError, match=f"threat.client is {client}, but 2 clients took part"):
        observe(played, ThreatModel(client=client))


# --- needs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needy:
    needs: frozenset[Knowledge]


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("grants", SUBSETS, ids=sorted)
def test_an_attack_that_is_let_through_finds_all_it_needs(played, actor, grants):
    """`check` promises what `observe` keeps, for every attack, actor and set of grants."""
    threat = ThreatModel(actor, grants)
    seen = observe(played, threat)
    found = {item for item in SEEN if getattr(seen, item) is not None}
    assert holds(threat) == found
    for needs in SUBSETS:
        if needs <= found:
            check("needy", Needy(needs), threat)
        else:
            with pytest.raises(Withheld):
                check("needy", Needy(needs), threat)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (
            {"labels"},
            r"attack 'x' needs 'labels' \(the true labels\), which this 'server' does not hold: "
            r"add \['labels'\] to threat.grants if your attacker would know it, or leave",
        ),
        ({"own"}, 'does not hold: set threat.actor = "client", or leave the attack out'),
        (
            {"own", "labels", "records"},
            r'set threat.actor = "client" and add \[\'labels\'\] to threat.grants',
        ),
    ],
)
def test_a_refusal_says_the_remedy(needs, words):
    with pytest.raises(Withheld, match=words):
        check("x", Needy(frozenset(needs)), ThreatModel())


def test_who_lacks_the_weights_is_told_what_to_grant():
    words = (
        r"attack 'x' needs 'weights' \(the values of the global model's weights\), which this "
        r"'eavesdropper' does not hold: add \['weights'\] to threat.grants if your attacker would"
    )
    needy = Needy(frozenset({"weights"}))
    with pytest.raises(Withheld, match=words):
        check("x", needy, ThreatModel("eavesdropper"))
    check("x", needy, ThreatModel("eavesdropper", frozenset({"weights"})))
    for actor in ("server", "aggregate", "client"):
        check("x", needy, ThreatModel(actor, frozenset()))


@pytest.mark.parametrize("actor", ["client", "eavesdropper"])
def test_who_sends_no_model_changes_none(actor):
    with pytest.raises(Withheld, match="changes the model that clients receive"):
        check("x", RobbingTheFed(), ThreatModel(actor, malicious=True))


def test_all_knowledge_is_described():
    assert set(KNOWLEDGE) == set(get_args(Knowledge))


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("malicious", [False, True])
@pytest.mark.parametrize("public", [0, 3])
@pytest.mark.parametrize("grants", [frozenset(), frozenset({"public"})])
def test_every_actor_holds_public_records_if_there_are_any_and_no_grant_gives_them(
    actor, malicious, public, grants
):
    threat = ThreatModel(actor, grants, malicious=malicious)
    assert ("public" in holds(threat, public)) == (public > 0)
    assert realism(threat, Needy(frozenset({"public"}))) == "realistic"


@pytest.mark.parametrize("actor", ACTORS)
def test_an_attack_that_needs_public_records_is_refused_only_where_there_are_none(actor):
    needy = Needy(frozenset({"public"}))
    check("x", needy, ThreatModel(actor))
    words = r"attack 'x' needs 'public' .* give federation.public more than 0 records"
    with pytest.raises(Withheld, match=words):
        check("x", needy, ThreatModel(actor), public=False)


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("grants", SUBSETS, ids=sorted)
def test_truths_are_oracle_help(actor, grants):
    tag = realism(ThreatModel(actor, grants))
    assert tag in get_args(Realism)
    assert (tag == "oracle") == bool(grants & TRUTHS)


def test_what_is_granted_where_nothing_is_said() -> None:
    """An eavesdropper learns less than the others, who are granted what they always were."""
    for actor in ("server", "aggregate", "client"):
        assert granted(ThreatModel(actor)) == {"training", "records"}
    assert granted(ThreatModel("eavesdropper")) == {"records"}
    assert granted(ThreatModel("eavesdropper", frozenset())) == frozenset()


def test_realism_says_what_was_given() -> None:
    protocol = frozenset({"training", "records"})
    assert realism(ThreatModel("server", protocol)) == "realistic"
    assert realism(ThreatModel("client", frozenset({"training"}))) == "realistic"
    assert realism(ThreatModel("client", protocol)) == "informed"
    assert realism(ThreatModel("server", protocol | {"weights"})) == "realistic"  # it has them
    assert realism(ThreatModel("eavesdropper")) == "realistic"
    assert realism(ThreatModel("eavesdropper", frozenset({"records"}), malicious=True)) == (
        "realistic"
    )
    for more in ("weights", "training"):
        assert realism(ThreatModel("eavesdropper", frozenset({"records", more}))) == "informed"
    assert realism(ThreatModel("server", protocol | {"labels"})) == "oracle"
    assert realism(ThreatModel("server", protocol | {"statistics"})) == "oracle"
    assert realism(ThreatModel("client", protocol | {"clients"})) == "oracle"


@pytest.mark.parametrize("actor", ["server", "aggregate"])
def test_who_changes_the_model_is_active_and_who_only_looks_is_not(actor) -> None:
    malicious = ThreatModel(actor, malicious=True)
    assert realism(malicious) == "active"
    assert realism(malicious, RobbingTheFed()) == "active"
    assert realism(malicious, Analytic()) == "realistic"
    assert realism(replace(malicious, grants=frozenset({"labels"})), RobbingTheFed()) == "oracle"
    assert realism(ThreatModel(actor)) == "realistic"


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_statistics_are_those_of_what_enters_the_batch_norm(played, actor, mode):
    """The first batch norm follows a convolution of the normalised images, whatever its mode."""
    record = Images((3, 8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3))
    scaled = replace(played.setting, record=record)
    threat = ThreatModel(actor, frozenset({"statistics"}), client=1)
    before = {name: value.clone() for name, value in played.model.state_dict().items()}
    training = LocalTraining(batch_norm=mode)
    seen = observe(replace(played, setting=scaled, training=training), threat)
    assert list(seen.statistics) == ["norm"]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (record.mean, record.std))
    entered = played.model.conv((behind(played, threat).inputs - mean) / std).detach()
    average, variance = seen.statistics["norm"]
    torch.testing.assert_close(average, entered.mean((0, 2, 3)))
    torch.testing.assert_close(variance, entered.var((0, 2, 3), correction=0))
    held = (played.model,) if actor == "eavesdropper" else (played.model, seen.model)
    for model in held:  # looking at the batch moved no running statistics
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_aggregate_looks_like_one_client_with_all_batches(rng: torch.Generator) -> None:
    data = Dataset("d", torch.rand(24, 1, 4, 4, generator=rng), torch.arange(24) % 2, ("a", "b"))
    scenario = Scenario(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)),
        data,
        LocalTraining(batch_size=4, lr=0.1),
        clients=3,
    )
    round_ = simulate(scenario, rng)
    seen = observe(round_, ThreatModel("aggregate"))
    assert seen.training is not None
    assert (seen.training.batch_size, seen.records) == (12, 12)
    together = covered(round_, ThreatModel("aggregate"))
    replayed = train(round_.setting, together, seen.training, rng)
    for name, value in seen.update.items():
        torch.testing.assert_close(replayed.update[name], value)
