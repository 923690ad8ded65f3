"""PRECODE: the bottleneck, what it adds to the loss, and whose draws they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from test_defences import same, seeded
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from leakgauge import data, models
from leakgauge.attacks import Analytic, InvertingGradients
from leakgauge.audit import Store, parse, run
from leakgauge.defences import DpSgd
from leakgauge.errors import InputError, PlanError
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.forward import add_to_loss, additions, drawn, sampling
from leakgauge.fl.local import loss, ready, train
from leakgauge.models.precode import Bottleneck, Precode, inserted
from leakgauge.tensors import norm, parameters, spawned, subtract
from leakgauge.threat import observe
from leakgauge.types import Batch, LocalTraining, Named, ThreatModel

SHAPE = (1, 8, 8)


def made(name: str = "mlp", precode: Any = True, **options: Any) -> nn.Module:
    return models.make(name, shape=SHAPE, classes=10, rng=seeded(), precode=precode, **options)


def some(count: int = 3) -> Batch:
    digits = data.load("digits")
    return Batch(digits.inputs[:count], digits.labels[:count])


def bottleneck(model: nn.Module) -> Bottleneck:
    [found] = [layer for layer in model.modules() if isinstance(layer, Bottleneck)]
    return found


# --- the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet-10", "vit-small"])
def test_it_stands_before_the_last_layer_of_any_network(name):
    plain, model = made(name, False), made(name)
    layer = bottleneck(model)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    assert (layer.encoder.in_features, layer.encoder.out_features) == (last.in_features, 512)
    assert (layer.decoder.in_features, layer.decoder.out_features) == (256, last.in_features)
    assert last.out_features == 10
    called: list[nn.Module] = []
    for one in (layer, last):
        one.register_forward_hook(lambda module, *_: called.append(module))
    assert model(torch.rand(2, *SHAPE)).shape == (2, 10)
    assert called == [layer, last]
    more = sum(p.numel() for p in layer.parameters())
    assert sum(p.numel() for p in model.parameters()) == more + sum(
        p.numel() for p in plain.parameters()
    )
    assert model.training
    assert all(m.training for m in model.modules())


def test_its_size_is_chosen():
    assert bottleneck(made(precode={"units": 7, "beta": 0.5})).options == Precode(7, 0.5)
    assert not any(isinstance(m, Bottleneck) for m in made(precode=False).modules())
    assert isinstance(inserted(nn.Linear(8, 2), Precode(), SHAPE), nn.Sequential)
    bare = nn.Sequential(nn.Flatten(), nn.Identity())
    with pytest.raises(InputError, match="precode stands before a linear layer, and the model"):
        inserted(bare, Precode(), SHAPE)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"units": 0}, "model.precode.units must be between 1 and 1,000,000, got 0"),
        ({"beta": -1}, "model.precode.beta must be between 0"),
        ({"unit": 3}, "model.precode: unknown key 'unit'; did you mean 'units'"),
        ("yes", "model.precode: expected a table, got 'yes'"),
    ],
)
def test_wrong_options_are_refused(wrong, words):
    with pytest.raises(PlanError, match=words):
        made(precode=wrong)


def encoded(layer: Bottleneck, h: Tensor) -> tuple[Tensor, Tensor]:
    statistics = layer.encoder(h)
    return statistics[:, :5], F.softplus(statistics[:, 5:])


def test_it_draws_around_the_mean_and_decodes():
    layer = Bottleneck(6, Precode(units=5))
    h = torch.randn(4000, 6, generator=seeded())
    mean, std = encoded(layer, h)
    with sampling(3):
        e = drawn(mean)
        torch.testing.assert_close(layer(h), layer.decoder(mean + std * e))
    assert float(e.std()) == pytest.approx(1.0, abs=0.02)
    assert abs(float(e.mean())) < 0.03


def test_it_adds_its_divergence_from_a_standard_normal_in_bits():
    layer = Bottleneck(6, Precode(units=5, beta=0.3))
    h = torch.randn(9, 6, generator=seeded())
    mean, std = encoded(layer, h)
    with additions() as found:
        layer(h)
    [added] = found
    expected = kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).sum(1).mean()
    torch.testing.assert_close(added, 0.3 * expected / math.log(2))
    layer(h)  # nobody asks: nothing is added to what was asked before
    assert len(found) == 1


# --- the loss ----------------------------------------------------------------------------------


def test_the_client_and_who_replays_it_have_the_same_loss():
    model, batch, training = made(precode={"beta": 0.1}), some(), LocalTraining(batch_size=3)
    live = setting(ready(model, training), batch)
    values = parameters(model)
    whole = loss(live, values, batch.inputs, batch.labels, training)
    with additions() as more:
        said = live.model(batch.inputs)
    assert float(more[0].detach()) > 1e-3
    torch.testing.assert_close(whole, F.cross_entropy(said, batch.labels) + more[0])
    none = setting(ready(made(precode={"beta": 0.0}), training), batch)
    bare = loss(none, values, batch.inputs, batch.labels, training)
    torch.testing.assert_close(bare, F.cross_entropy(said, batch.labels))


def by_hand(model: nn.Module, batch: Batch, seed: int) -> Named:
    weights = list(model.parameters())
    with sampling(seed), additions() as more:
        value = F.cross_entropy(model(batch.inputs), batch.labels)
    found = torch.autograd.grad(value + more[0], weights)
    return {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}


class Spy(nn.Module):
    """Notes what is drawn in every pass, and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(float(drawn(x)[0, 0, 0, 0]))
        out: Tensor = self.head(x.flatten(1))
        return out


SEEN: list[float] = []


# --- whose draws -------------------------------------------------------------------------------


def test_draws_follow_the_seed_alone():
    like = torch.zeros(3, 4)
    with sampling(1):
        first = drawn(like)
        torch.manual_seed(9)
        assert torch.equal(first, drawn(like))
        with sampling(2):
            assert not torch.equal(first, drawn(like))
        assert torch.equal(first, drawn(like))
        assert torch.equal(first, drawn(like.double()).float())  # in every precision
    assert torch.equal(drawn(like), drawn(like))
    assert not torch.equal(first, drawn(like))


def test_a_client_draws_anew_in_every_step_and_round_and_the_same_for_one_seed():
    digits = data.load("digits")
    training = LocalTraining(lr=0.1, batch_size=2, steps=2)
    options = {"clients": 2, "records": 4, "rounds": 1}
    drawn_: list[list[float]] = []
    for seed in (0, 0, 1):
        SEEN.clear()
        simulate(Scenario(Spy, digits, training, **options), seeded(seed))
        drawn_.append(SEEN[1:])  # the first is a trial on blank records, before the first round
    first, again, other = drawn_
    assert len(set(first)) == len(first) == 8
    assert first == again
    assert not set(first) & set(other)


def test_the_update_is_of_the_clients_own_draw_and_can_be_replayed_with_it():
    model, batch, training = made(), some(), LocalTraining(lr=1.0, batch_size=3)
    update = train(setting(model, batch), batch, training, seeded(5)).update
    assert same(update, train(setting(model, batch), batch, training, seeded(5)).update)
    other = train(setting(model, batch), batch, training, seeded(6)).update
    apart = norm(subtract(update, other)) / norm(update)
    assert apart > 0.05
    # An attacker who has the records, and no more, replays another draw.
    assert norm(subtract(update, by_hand(model, batch, 0))) > 0.05 * norm(update)


def test_the_whole_loss_is_descended():
    """The update is the gradient of the loss with its divergence, at the client's draw."""
    model, batch = made(precode={"beta": 0.5}), some()
    training = LocalTraining(lr=1.0, batch_size=3)
    secret = int(torch.randint(2**62, (), generator=spawned(seeded(5), "drawn/0/0")))
    update = train(setting(model, batch), batch, training, seeded(5)).update
    torch.testing.assert_close(update, by_hand(model, batch, secret), rtol=1e-4, atol=1e-6)


def test_dp_sgd_clips_the_whole_loss_of_each_record():
    """With all draws at one, records have what they have alone."""
    model, batch = made(precode={"beta": 0.5}), some(1)
    training = LocalTraining(lr=1.0)
    plain, sent = (
        train(setting(model, batch), batch, training, seeded(5), defence).update
        for defence in (None, DpSgd(0.0, 1e9))
    )
    torch.testing.assert_close(sent, plain, rtol=1e-4, atol=1e-6)


# --- attacks and audits ------------------------------------------------------------------------


def test_matching_holds_its_draw_fixed():
    """The objective is the same function in every pass: the fast derivative agrees with the exact
    one, and the search comes down."""
    digits = data.load("digits")
    training = LocalTraining(lr=0.1)
    round_ = simulate(Scenario(lambda: made("cnn"), digits, training), seeded())
    seen = observe(round_, ThreatModel())
    attack = InvertingGradients(iterations=40, tv=0.0)
    first, again = (attack.reconstruct(seen, seeded(1)) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    assert first.differed is None
    assert first.history[-1] < first.history[0]


def test_what_its_page_warns_of_the_first_layer_of_a_perceptron_is_read_as_before():
    """∂L/∂W and ∂L/∂b of the first layer have the record as their ratio, whatever was drawn."""
    digits = data.load("digits")
    scenario = Scenario(made, digits, LocalTraining(lr=1.0))
    round_ = simulate(scenario, seeded())
    guess = Analytic().reconstruct(observe(round_, ThreatModel()), seeded())
    assert float((guess.inputs[0] - round_.truths[0].inputs[0]).abs().max()) < 1e-3


def test_a_federation_still_learns():
    digits = data.load("digits")
    small = replace(digits, inputs=digits.inputs[:300], labels=digits.labels[:300])
    training = LocalTraining(lr=0.2, batch_size=32)
    losses = []
    for rounds in (0, 40):
        model = simulate(
            Scenario(made, small, training, clients=2, rounds=rounds), seeded()
        ).model  # fmt: skip
        losses.append(float(F.cross_entropy(model(small.inputs), small.labels).detach()))
    assert losses[1] < 0.6 * losses[0]


def test_a_plan_names_it_and_its_result_cites_it(tmp_path):
    table = {
        "federation": {"data": "digits", "model": {"name": "mlp", "precode": {"units": 16}}},
        "attack": [{"name": "analytic"}],
        "audit": {"seeds": [0], "explain": False, "exact": False, "control": False},
    }
    plan = parse(table, "plan", Path())
    result = run(plan, Store(tmp_path / "out"))
    assert "scheliga2022" in [paper.key for paper in result.references]
    assert result.federation.parameters > sum(p.numel() for p in made(precode=False).parameters())


def test_what_a_layer_adds_without_a_loss_is_dropped():
    add_to_loss(torch.tensor(1.0))
    with additions() as found:
        assert found == []
