"""DP-SGD, its adaptive norm and decaying noise: clipped one by one, noise of the stated size."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from opacus import GradSampleModule
from test_defences import HERE, placed, same, seeded
from torch import Tensor, nn

from leakgauge import data, models
from leakgauge.audit import parse
from leakgauge.defences import (
    AdaptiveClip,
    Chain,
    ClipAndNoise,
    DecayingNoise,
    DpSgd,
    Soteria,
    TopK,
)
from leakgauge.defences._records import AT_ONCE, lengths, per_record
from leakgauge.errors import InputError, PlanError
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import train
from leakgauge.tensors import norm, parameters, scale, subtract
from leakgauge.types import Batch, Defence, LocalTraining, Named

EVAL = LocalTraining(lr=1.0, batch_size=4, batch_norm="eval")


def together(parts: Any) -> Named:
    parts = list(parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def one_by_one(model: nn.Module, batch: Batch) -> Named:
    """The gradients of the records, slow and obvious."""
    model.eval()
    found: list[list[Tensor]] = []
    for x, y in zip(batch.inputs, batch.labels, strict=True):
        value = F.cross_entropy(model(x[None]), y[None])
        found.append(list(torch.autograd.grad(value, list(model.parameters()))))
    names = [name for name, _ in model.named_parameters()]
    stacked = [torch.stack(column) for column in zip(*found, strict=True)]
    return dict(zip(names, stacked, strict=True))


def many(count: int) -> Batch:
    return Batch(torch.rand(count, 3, 8, 8, generator=seeded(7)), torch.arange(count) % 4)


# --- the gradients of single records -----------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, AT_ONCE, 2 * AT_ONCE + 3])
def test_each_record_has_the_gradient_that_it_has_alone(model, count):
    batch = many(count)
    training = replace(EVAL, batch_size=count)
    _, here = placed(model, batch, training)
    parts = list(per_record(here.local, list(parameters(model)), 0, "x"))
    assert [len(part["head.bias"]) for part in parts][:-1] == [AT_ONCE] * (count // (AT_ONCE + 1))
    torch.testing.assert_close(together(parts), one_by_one(model, batch), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_they_are_those_of_opacus():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )
    batch = many(6)
    _, here = placed(model, batch, replace(EVAL, batch_size=6))
    ours = together(per_record(here.local, list(parameters(model)), 0, "x"))
    wrapped = GradSampleModule(model, loss_reduction="mean")
    F.cross_entropy(wrapped(batch.inputs), batch.labels).backward()
    theirs = {name: p.grad_sample for name, p in model.named_parameters()}
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_record_has_no_part_in_the_gradient_of_another(model):
    batch = many(4)
    loud = Batch(batch.inputs.clone(), batch.labels)
    loud.inputs[3] *= 100
    quiet, moved = (
        together(per_record(placed(model, b, EVAL)[1].local, list(parameters(model)), 0, "x"))
        for b in (batch, loud)
    )
    for name, value in quiet.items():
        torch.testing.assert_close(moved[name][:3], value[:3])
    assert not torch.equal(moved["head.weight"][3], quiet["head.weight"][3])


# --- DP-SGD ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", ["off", "replayed"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_without_noise_and_clipping_it_is_sgd(model, batch, dropout, optimiser):
    """With several steps, each at its own weights; the masks of dropout are those of the batch."""
    training = LocalTraining(lr=0.1, batch_size=4, steps=3, batch_norm="eval", dropout=dropout,
                             optimiser=optimiser)  # fmt: skip
    plain = train(setting(model, batch), batch, training, seeded()).update
    bare = DpSgd(sigma=0.0, norm=1e9)
    sent = train(setting(model, batch), batch, training, seeded(), bare).update
    close = 1e-4 if optimiser == "sgd" else 1e-2  # Adam divides by what may be almost nothing
    assert norm(subtract(sent, plain)) < close * norm(plain)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet-9", "vit-small"])
def test_so_it_is_on_the_networks_of_this_package(name):
    model = models.make(name, shape=(3, 32, 32), classes=4, rng=seeded())
    batch = Batch(torch.rand(2, 3, 32, 32, generator=seeded()), torch.arange(2))
    training = replace(EVAL, batch_size=2)
    plain, sent = (
        train(setting(model, batch), batch, training, seeded(), defence).update
        for defence in (None, DpSgd(sigma=0.0, norm=1e9))
    )
    assert norm(subtract(sent, plain)) < 1e-4 * norm(plain)


def test_every_record_is_clipped_by_itself(model):
    batch = many(AT_ONCE + 4)
    batch.inputs[0] *= 50  # one that shouts
    alone = one_by_one(model, batch)
    sizes = lengths(alone)
    bound = float(sizes.median())
    assert 0 < int((sizes > bound).sum()) < len(batch)
    expected = {}
    for name, value in alone.items():
        cut = [g * min(1.0, bound / float(s)) for g, s in zip(value, sizes, strict=True)]
        expected[name] = sum(cut) / len(batch)
    training = replace(EVAL, batch_size=len(batch))
    gradient, here = placed(model, batch, training)
    sent = DpSgd(0.0, norm=bound).on_gradient(gradient, here, seeded())
    torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-6)
    # Clipping the mean instead would leave the direction of the loud one.
    assert norm(subtract(sent, scale(gradient, norm(sent) / norm(gradient)))) > 0.1 * norm(sent)


@pytest.mark.parametrize("defence", [DpSgd(0.0, 0.1), AdaptiveClip(0.0, 0.1)], ids=str)
def test_one_record_moves_what_is_sent_by_the_norm_at_most(model, defence):
    batch = many(4)
    other = Batch(batch.inputs.clone(), batch.labels.clone())
    other.inputs[2], other.labels[2] = 1000 * torch.rand(3, 8, 8, generator=seeded(9)), 0
    sent = []
    for records in (batch, other):
        gradient, here = placed(model, records, EVAL)
        sent.append(defence.on_gradient(gradient, here, seeded()))
    moved = norm(subtract(*sent))
    assert 0 < moved <= 2 * 0.1 / 4 * (1 + 1e-5)


@pytest.mark.parametrize("defence", [DpSgd, AdaptiveClip])
@pytest.mark.parametrize("count", [1, 8])
def test_the_noise_on_the_mean_is_sigma_times_the_norm_by_the_batch(defence, count):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    large = nn.Linear(300, 300)  # no record reaches it: what is sent of it is noise alone
    model.add_module("idle", nn.Identity())
    model[2].register_parameter("weight", large.weight)
    batch = many(count)
    gradient, here = placed(model, batch, replace(EVAL, batch_size=count))
    sent = defence(sigma=3.0, norm=0.2).on_gradient(gradient, here, seeded(4))
    noise = sent["idle.weight"]
    assert not gradient["idle.weight"].any()
    assert float(noise.std()) == pytest.approx(3.0 * 0.2 / count, rel=0.01)
    assert abs(float(noise.mean())) < 4 * 0.6 / count / noise.numel() ** 0.5


def test_the_noise_follows_the_norm_that_was_reached(model):
    batch = many(4)
    gradient, here = placed(model, batch, EVAL)
    sizes = []
    for reached in (1.0, 0.01):
        here.memory["norm"] = torch.tensor(reached, dtype=torch.float64)
        sent = AdaptiveClip(sigma=50.0, norm=1.0).on_gradient(gradient, here, seeded(4))
        sizes.append(float(sent["head.weight"].std()))
    assert sizes[0] == pytest.approx(50 / 4, rel=0.1)
    assert sizes[1] == pytest.approx(0.5 / 4, rel=0.1)


@pytest.mark.parametrize("defence", [DpSgd(), AdaptiveClip()], ids=["dp-sgd", "adaptive-clip"])
def test_batch_norm_by_the_batch_is_refused_with_the_remedy(model, batch, defence):
    words = 'mixes the records of a batch: set batch_norm = "eval" in .* group norm'
    training = LocalTraining(batch_size=4, batch_norm="train")
    with pytest.raises(InputError, match=words):
        train(setting(model, batch), batch, training, seeded(), defence)
    bare = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(),
                         nn.Linear(192, 4))  # fmt: skip
    with pytest.raises(InputError, match="'0', a batch norm in train mode"):
        train(setting(bare, batch), batch, EVAL, seeded(), defence)
    grouped = nn.Sequential(nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(192, 4))
    assert train(setting(grouped, batch), batch, training, seeded(), defence).update


class Branching(nn.Module):
    """Its forward looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1))
        return out * 2 if float(out.detach().sum()) > 0 else out


def test_a_model_that_cannot_be_mapped_over_records_is_an_error_in_words(batch):
    with pytest.raises(InputError, match=r"dp-sgd: the gradients of single records failed .*item"):
        train(setting(Branching(), batch), batch, EVAL, seeded(), DpSgd())


@pytest.mark.parametrize("first", [DpSgd(), AdaptiveClip()], ids=["dp-sgd", "adaptive-clip"])
def test_in_a_chain_it_comes_before_what_changes_the_gradient(first):
    Chain((TopK(), first, Soteria()))
    for wrong in ((Soteria(), first), (Chain((TopK(), Soteria())), Chain((first,)))):
        with pytest.raises(ValueError, match="name them before a defence that changes the grad"):
            Chain(wrong)


def test_a_plan_says_so_too():
    plan = {
        "federation": {"data": "digits", "model": "mlp"},
        "attack": [{"name": "dlg"}],
        "defence": [{"name": "chain", "defences": ["soteria", "dp-sgd"]}],
    }
    with pytest.raises(PlanError, match="defence 'chain': dp-sgd and adaptive-clip compute"):
        parse(plan, "plan", Path())


# --- adaptive clipping -------------------------------------------------------------------------


def test_the_norm_moves_by_the_rule_of_the_paper(model):
    batch = many(8)
    sizes = lengths(one_by_one(model, batch)).sort().values
    start = float((sizes[1] + sizes[2]) / 2)  # two of eight are shorter
    gradient, here = placed(model, batch, replace(EVAL, batch_size=8))
    defence = AdaptiveClip(0.0, start, quantile=0.75, rate=0.3, count_noise=0.0)
    sent = defence.on_gradient(gradient, here, seeded())
    assert float(here.memory["norm"]) == pytest.approx(start * math.exp(-0.3 * (2 / 8 - 0.75)))
    # This step was clipped by the norm before it moved.
    assert same(sent, DpSgd(0.0, start).on_gradient(gradient, here, seeded()))
    again = defence.on_gradient(gradient, here, seeded())
    moved = float(torch.tensor(start * math.exp(0.15), dtype=torch.float64))
    torch.testing.assert_close(again, DpSgd(0.0, moved).on_gradient(gradient, here, seeded()))


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_in_the_end_the_norm_is_the_quantile(model, quantile, start):
    batch = many(40)
    sizes = lengths(one_by_one(model, batch))
    gradient, here = placed(model, batch, replace(EVAL, batch_size=40))
    defence = AdaptiveClip(1.0, start, quantile=quantile, rate=0.5, count_noise=0.5)
    shares = []
    for step in range(160):
        defence.on_gradient(gradient, here, seeded(step))
        shares.append(float((sizes <= float(here.memory["norm"])).double().mean()))
    assert sum(shares[-20:]) / 20 == pytest.approx(quantile, abs=0.08)


def test_the_count_has_noise_of_the_stated_size(model):
    batch = many(4)
    gradient, here = placed(model, batch, EVAL)
    defence = AdaptiveClip(0.0, 1e3, quantile=1.0, rate=0.01, count_noise=3.0)  # all are shorter
    moves = []
    for seed in range(400):
        clear = replace(here, memory={})
        defence.on_gradient(gradient, clear, seeded(seed))
        moves.append(-math.log(float(clear.memory["norm"]) / 1e3) / 0.01 * 4)
    found = torch.tensor(moves)
    assert float(found.std()) == pytest.approx(3.0, rel=0.1)
    assert abs(float(found.mean())) < 4 * 3.0 / 20


def test_the_norm_is_the_clients_own_over_steps_and_rounds(model, easy):
    training = replace(EVAL, lr=0.1, steps=2)
    defence = AdaptiveClip(0.1, count_noise=0.5)
    options = {"clients": 2, "records": 8, "rounds": 2, "defence": defence}
    round_ = simulate(Scenario(lambda: model, easy, training, **options), seeded())
    first, second = (float(memory["norm"]) for memory in round_.memory)
    assert first != second
    assert 1.0 not in (first, second)


def test_the_norm_stays_within_reach(model):
    batch = many(4)
    gradient, here = placed(model, batch, EVAL)
    defence = AdaptiveClip(0.0, 1.0, rate=50.0, count_noise=20.0)
    norms = set()
    for seed in range(20):
        defence.on_gradient(gradient, here, seeded(seed))
        norms.add(float(here.memory["norm"]))
    assert {1e-3, 1e3} <= norms
    assert all(1e-3 <= value <= 1e3 for value in norms)


def test_gradient_and_count_together_are_one_mechanism():
    """As Opacus has it the other way round: from the whole z to the noise of the gradient."""
    for sigma, count in ((1.0, 5.0), (0.5, 1.0), (4.0, 0.5)):
        z = AdaptiveClip(sigma, count_noise=count).multiplier(0)
        assert (z**-2 - (2 * count) ** -2) ** -0.5 == pytest.approx(sigma)
        assert z < sigma
    assert AdaptiveClip(1.0, count_noise=0.0).multiplier(0) == 0.0


# --- noise that decays -------------------------------------------------------------------------


def test_the_noise_shrinks_by_the_round_down_to_the_floor():
    defence = DecayingNoise(sigma=2.0, decay=0.5, floor=0.3, norm=0.1)
    update = {"a": torch.randn(200, 500, generator=seeded(3))}
    clipped = scale(update, 0.1 / norm(update))
    sizes = []
    for round_ in range(6):
        sent = defence.on_update(update, replace(HERE, round=round_), seeded(4))
        sizes.append(float(subtract(sent, clipped)["a"].std()))
    expected = [0.1 * s for s in (2.0, 1.0, 0.5, 0.3, 0.3, 0.3)]
    assert sizes == pytest.approx(expected, rel=0.01)


def test_without_decay_it_is_clip_and_noise():
    noisy = ClipAndNoise(epsilon=3.0, norm=0.5)
    update = {"a": torch.randn(20, 5, generator=seeded(3))}
    steady = DecayingNoise(noisy.sigma(), decay=1.0, floor=0.0, norm=0.5)
    for round_ in (0, 9):
        here = replace(HERE, round=round_)
        sent = steady.on_update(update, here, seeded(1))
        assert same(sent, noisy.on_update(update, here, seeded(1)))


def test_a_federation_hands_it_the_round(model, easy):
    defence = DecayingNoise(1.0, decay=0.1, floor=0.0, norm=1.0)
    training = LocalTraining(lr=0.1, batch_size=4)
    lengths_ = [
        norm(simulate(Scenario(lambda: model, easy, training, rounds=r, defence=defence),
                      seeded()).updates[0])
        for r in range(2)
    ]  # fmt: skip
    assert lengths_[0] > 5 * lengths_[1]  # what was trained is no longer than 1


# --- a federation still learns -----------------------------------------------------------------


@pytest.mark.parametrize(
    "defence",
    [DpSgd(0.5), AdaptiveClip(0.5), DecayingNoise(0.02, decay=0.9, floor=0.005)],
    ids=["dp-sgd", "adaptive-clip", "decaying-noise"],
)
def test_the_loss_falls_over_the_rounds_on_digits(defence: Defence):
    digits = data.load("digits")
    small = replace(digits, inputs=digits.inputs[:400], labels=digits.labels[:400])
    training = LocalTraining(lr=0.5, batch_size=32)

    def linear() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(OrderedDict(flat=nn.Flatten(), head=nn.Linear(64, 10)))

    losses = []
    for rounds in (0, 10, 30):
        model = simulate(
            Scenario(linear, small, training, clients=3, rounds=rounds, defence=defence), seeded()
        ).model
        losses.append(float(F.cross_entropy(model(small.inputs), small.labels).detach()))
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.7 * losses[0]


def test_a_step_needs_its_records():
    with pytest.raises(InputError, match="the defence 'dp-sgd' needs the records"):
        DpSgd().on_gradient({"a": torch.zeros(3)}, HERE, seeded())
