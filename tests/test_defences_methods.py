"""Each defence does to a gradient or an update what its page says, and leaks less the stronger it
is set."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from test_defences import HERE, applied, placed, same, seeded
from torch import Tensor, nn

from leakgauge.attacks import Analytic
from leakgauge.audit import parse, references
from leakgauge.config import build
from leakgauge.defences import (
    DEFENCES,
    AdaptiveClip,
    Censor,
    Chain,
    Clip,
    ClipAndNoise,
    DecayingNoise,
    DpSgd,
    Guardian,
    HideTop,
    LowRank,
    Outpost,
    PairedNoise,
    Prune,
    Quantise,
    Sign,
    Soteria,
    TopK,
)
from leakgauge.defences.censor import orthogonal
from leakgauge.defences.guardian import sensitivity
from leakgauge.defences.outpost import risk
from leakgauge.errors import InputError, NotApplicable, PlanError
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import train
from leakgauge.tensors import norm, parameters, scale, subtract, weighted_mean
from leakgauge.threat import observe
from leakgauge.types import (
    Among,
    Batch,
    Dataset,
    Defence,
    Here,
    LocalTraining,
    Memory,
    Named,
    ThreatModel,
)


@pytest.fixture
def update() -> Named:
    """A matrix, a vector and a stack of filters, of different scale."""
    return {
        "a": 3 * torch.randn(40, 25, generator=seeded(1)),
        "b": torch.randn(2000, generator=seeded(2)),
        "c": 0.1 * torch.randn(8, 3, 5, 5, generator=seeded(3)),
    }


def perceptron(inputs: int = 12, hidden: int = 10, classes: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes)
        )


def records(count: int = 6, inputs: int = 12, classes: int = 4) -> Batch:
    return Batch(
        torch.rand(count, 1, 1, inputs, generator=seeded(5)), torch.arange(count) % classes
    )


# --- a stronger setting never leaks more -------------------------------------------------------

LADDERS: dict[str, list[Defence]] = {
    "prune": [Prune(s) for s in (0.1, 0.5, 0.9)],
    "top-k": [TopK(k) for k in (0.9, 0.5, 0.1)],
    "quantise": [Quantise(b, "nearest") for b in (8, 4, 2)],
    "quantise, stochastic": [Quantise(b) for b in (8, 4, 1)],
    "low-rank": [LowRank(r) for r in (3, 2, 1)],
    "soteria": [Soteria(s) for s in (0.2, 0.5, 0.9)],
    "outpost, noise": [Outpost(prune=0.0, noise=n) for n in (0.1, 1.0, 10.0)],
    "outpost, pruning": [Outpost(prune=p, noise=0.0) for p in (0.2, 0.5, 0.9)],
    "guardian": [Guardian(b) for b in (0.1, 10.0, 1000.0)],
    "hide-top": [HideTop(s) for s in (0.2, 0.5, 0.9)],
    "paired-noise": [PairedNoise(s) for s in (0.1, 1.0, 10.0)],
    "clip-and-noise": [ClipAndNoise(e, norm=100.0) for e in (1e8, 1e6, 1e4)],
    "decaying-noise": [DecayingNoise(s, floor=0.0) for s in (1e-3, 0.1, 10.0)],
    "dp-sgd, noise": [DpSgd(s, norm=100.0) for s in (0.0, 1e-3, 0.1)],
    "dp-sgd, clipping": [DpSgd(0.0, norm=n) for n in (100.0, 0.1, 0.01)],
    "adaptive-clip": [AdaptiveClip(s, norm=100.0) for s in (0.0, 1e-3, 0.1)],
    "chain": [Chain((HideTop(s), PairedNoise(s))) for s in (0.2, 0.5, 0.9)],
}
FIXED = {"clip", "sign", "censor"} & DEFENCES.keys()  # no strength; the scale of Clip is undone


def regression() -> tuple[nn.Sequential, Batch, Tensor]:
    """Softmax regression, three records, and the errors (softmax − label) / 3 of each, (3, 5)."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    batch = records(3, classes=5)
    errors = (model(batch.inputs).softmax(1) - F.one_hot(batch.labels, 5)).detach() / 3
    return model, batch, errors


def leaked(defence: Defence, seed: int) -> float:
    """How far an attacker who knows every error ends from the records: ∂L/∂W = errorsᵀ·X."""
    model, batch, errors = regression()
    values, here = placed(model, batch, LocalTraining(batch_size=3))
    sent = applied(defence, values, here, seeded(seed))
    found = torch.linalg.lstsq(errors.T, sent["1.weight"]).solution
    return float((found - batch.inputs.flatten(1)).norm())


def test_without_a_defence_the_attacker_who_knows_the_errors_has_the_records():
    assert leaked(Clip(1e9), 0) < 1e-4


def test_every_defence_climbs_its_ladder():
    named = {name.partition(",")[0] for name in LADDERS} - {"chain"}
    assert named | FIXED == set(DEFENCES)


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_a_stronger_setting_never_leaks_more(ladder):
    errors = [sum(leaked(one, seed) for seed in range(8)) / 8 for one in ladder]
    assert all(weak <= strong + 1e-4 for weak, strong in pairwise(errors))
    assert errors[0] < errors[-1]
    assert errors[-1] > 0.1


@pytest.mark.parametrize("defence", [Sign(), Censor(trials=3)], ids=str)
def test_so_do_those_without_a_strength(defence):
    assert all(leaked(defence, seed) > 0.5 for seed in range(4))


def read(defence: Defence | None) -> float:
    """How far the analytic attack ends from a single record."""
    data = Dataset("one", *(records(8).inputs, records(8).labels), tuple("abcd"))
    scenario = Scenario(perceptron, data, LocalTraining(lr=1.0), defence=defence)
    round_ = simulate(scenario, seeded())
    guess = Analytic().reconstruct(observe(round_, ThreatModel()), seeded())
    return float((guess.inputs[0] - round_.truths[0].inputs[0]).norm())


@pytest.mark.parametrize(
    "ladder",
    [
        [None, TopK(0.9), TopK(0.5), TopK(0.1)],
        [None, HideTop(0.1), HideTop(0.5), HideTop(0.9)],
        [None, Quantise(8, "nearest"), Quantise(4, "nearest"), Quantise(2, "nearest")],
        [None, PairedNoise(0.01), PairedNoise(0.1), PairedNoise(1.0)],
    ],
    ids=["top-k", "hide-top", "quantise", "paired-noise"],
)
def test_the_analytic_attack_reads_less_of_the_first_layer(ladder):
    """Exact without a defence: one record, the ratio of weight and bias gradients."""
    errors = [read(defence) for defence in ladder]
    assert errors[0] < 1e-4
    assert all(weak <= strong + 1e-4 for weak, strong in pairwise(errors))
    assert errors[-1] > 0.1


# --- a federation still learns -----------------------------------------------------------------

LEARNS: dict[str, tuple[Defence, float]] = {
    "clip": (Clip(), 0.5),
    "clip-and-noise": (ClipAndNoise(), 0.5),
    "decaying-noise": (DecayingNoise(0.05, floor=0.01), 0.5),
    "dp-sgd": (DpSgd(0.5), 0.5),
    "adaptive-clip": (AdaptiveClip(0.5), 0.5),
    "prune": (Prune(), 0.5),
    "top-k": (TopK(), 0.5),
    "sign": (Sign(), 0.5),
    "quantise": (Quantise(), 0.5),
    "low-rank": (LowRank(), 0.5),
    "soteria": (Soteria(), 0.5),
    "outpost": (Outpost(), 0.5),
    "guardian": (Guardian(), 0.5),
    "censor": (Censor(trials=50), 4.0),  # its steps are at right angles to the way down
    "hide-top": (HideTop(), 0.5),
    "paired-noise": (PairedNoise(), 0.5),
    "chain": (Chain((Soteria(0.5), TopK(0.5), Quantise())), 0.5),
}


def test_every_defence_is_asked_to_learn():
    assert LEARNS.keys() >= DEFENCES.keys()


@pytest.mark.parametrize("name", LEARNS)
def test_the_loss_falls_over_the_rounds(name):
    defence, lr = LEARNS[name]
    templates = torch.rand(4, 1, 6, 8, generator=seeded(1))
    labels = torch.arange(64) % 4
    noise = 0.1 * torch.randn(64, 1, 6, 8, generator=seeded(2))
    data = Dataset("easy", (templates[labels] + noise).clamp(0, 1), labels, tuple("abcd"))
    training = LocalTraining(lr=lr, batch_size=16)

    def after(rounds: int) -> float:
        scenario = Scenario(lambda: perceptron(48), data, training, clients=3, records=16,
                            rounds=rounds, defence=defence)  # fmt: skip
        model = simulate(scenario, seeded()).model
        return float(F.cross_entropy(model(data.inputs), labels).detach())

    assert after(20) < after(0) - 0.003
    if name not in {"censor", "hide-top"}:  # they cost most of the way
        assert after(20) < 0.6 * after(0)


# --- top-k -------------------------------------------------------------------------------------


def test_top_k_sends_the_largest_and_remembers_the_rest(update):
    memory: Memory = {}
    sent = TopK(0.1).on_update(update, replace(HERE, memory=memory), seeded())
    for name, value in sent.items():
        gone = value == 0
        assert int((~gone).sum()) == round(0.1 * value.numel())
        assert torch.equal(value[~gone], update[name][~gone])
        assert update[name][gone].abs().max() <= value[~gone].abs().min()
        torch.testing.assert_close(value + memory[f"owed/{name}"], update[name])


def test_top_k_sends_what_it_held_back(update):
    """Zeros are trained after the first round: what was owed goes out, and then nothing is left."""
    here, zeros = replace(HERE, memory={}), scale(update, 0.0)
    total = TopK(0.25).on_update(update, here, seeded())
    for _ in range(3):
        more = TopK(0.25).on_update(zeros, here, seeded())
        assert norm(more) > 0
        total = {name: total[name] + more[name] for name in total}
    for name, value in total.items():
        torch.testing.assert_close(value, update[name])
        assert not here.memory[f"owed/{name}"].any()


@pytest.mark.parametrize(
    "defence", [TopK(0.1), LowRank(1), Chain((LowRank(2), TopK(0.1)))], ids=str
)
def test_what_is_owed_survives_the_rounds_of_each_client(defence, model, easy):
    training = LocalTraining(lr=0.1, batch_size=4)
    scenario = Scenario(lambda: model, easy, training, clients=3, rounds=2, defence=defence)
    round_ = simulate(scenario, seeded())
    assert len(round_.memory) == 3
    assert all(norm(memory) > 0 for memory in round_.memory)
    assert not same(round_.memory[0], round_.memory[1])
    # What it sends depends on it.
    own, forgotten = (
        train(round_.setting, round_.truths[0], training, seeded(), defence, memory=dict(memory))
        for memory in (round_.memory[0], {})
    )
    assert not same(own.update, forgotten.update)


@pytest.mark.parametrize("defence", [TopK(0.1), LowRank(1)], ids=str)
def test_a_model_of_another_shape_is_no_crash(defence, update):
    here = replace(HERE, memory={})
    defence.on_update(update, here, seeded())
    other = {"a": torch.randn(3, 7, generator=seeded()), "d": torch.randn(5, generator=seeded())}
    first = defence.on_update(other, here, seeded(1))
    assert same(first, defence.on_update(other, replace(HERE, memory={}), seeded(1)))


# --- sign --------------------------------------------------------------------------------------


def test_sign_has_one_magnitude_for_each_tensor(update):
    update["b"][:3] = 0.0
    sent = Sign().on_update(update, HERE, seeded())
    for name, value in sent.items():
        assert torch.equal(value.sign(), update[name].sign())
        [magnitude] = value[value != 0].abs().unique().tolist()
        assert magnitude == pytest.approx(float(update[name].abs().mean()), rel=1e-6)
    assert not sent["b"][:3].any()


# --- quantise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_quantise_has_so_many_levels_over_the_range(bits, rounding, update):
    sent = Quantise(bits, rounding).on_update(update, HERE, seeded())
    for name, value in sent.items():
        low, high = float(update[name].min()), float(update[name].max())
        size = (high - low) / (2**bits - 1)
        assert len(value.unique()) <= 2**bits
        assert (float(value.min()), float(value.max())) == (low, high)
        place = (value.double() - low) / size
        assert float((place - place.round()).abs().max()) < 1e-4
        most = size / 2 if rounding == "nearest" else size
        assert float((value - update[name]).abs().max()) <= most * (1 + 1e-5)
    if bits < 8:
        assert len(sent["b"].unique()) == 2**bits


def test_stochastic_rounding_is_right_on_average_and_the_nearest_is_not():
    update = {"a": torch.cat([torch.tensor([0.0, 1.0]), torch.full((100_000,), 0.3)])}
    sent = Quantise(1).on_update(update, HERE, seeded())["a"][2:]
    assert sorted(sent.unique().tolist()) == [0.0, 1.0]
    assert float(sent.mean()) == pytest.approx(0.3, abs=0.01)
    assert not Quantise(1, "nearest").on_update(update, HERE, seeded())["a"][2:].any()


def test_with_all_bits_hardly_anything_changes_and_constants_stay(update):
    sent = Quantise(32).on_update(update | {"d": torch.full((5,), 0.7)}, HERE, seeded())
    for name, value in update.items():
        torch.testing.assert_close(sent[name], value)
    assert torch.equal(sent["d"], torch.full((5,), 0.7))


# --- low rank ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_sends_matrices_of_that_rank_and_vectors_whole(rank, update):
    here = replace(HERE, memory={})
    sent = LowRank(rank).on_update(update, here, seeded())
    for name in ("a", "c"):
        matrix = sent[name].flatten(1)
        assert int(torch.linalg.matrix_rank(matrix, rtol=1e-4)) == rank
        # A projection: what is held back is at right angles to what is sent.
        assert abs(float((here.memory[f"owed/{name}"] * sent[name]).sum())) < 1e-3 * norm(update)
        assert norm(sent) < norm(update)
    assert torch.equal(sent["b"], update["b"])
    assert sent["b"] is not update["b"]


def test_from_round_to_round_it_finds_the_best_low_rank():
    """The same matrix again and again, without error feedback, is the power method: in the end the
    truncated singular value decomposition."""
    matrix = torch.randn(30, 20, generator=seeded())
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values * 0.7 ** torch.arange(20)
    matrix = left @ torch.diag(values) @ right
    here = replace(HERE, memory={})
    distances = []
    for _ in range(15):
        sent = LowRank(2).on_update({"a": matrix}, here, seeded())["a"]
        del here.memory["owed/a"]
        distances.append(float((sent - matrix).norm()))
    best = float(values[2:].norm())
    assert distances[0] > 1.01 * best
    assert distances[-1] == pytest.approx(best, rel=1e-3)


def test_low_rank_remembers_what_it_did_not_send(update):
    here, zeros = replace(HERE, memory={}), scale(update, 0.0)
    total = LowRank(2).on_update(update, here, seeded())
    for _ in range(5):
        owed = {n: here.memory[f"owed/{n}"] for n in update}
        torch.testing.assert_close({n: total[n] + owed[n] for n in total}, update)
        more = LowRank(2).on_update(zeros, here, seeded())
        assert norm(more) > 0
        total = {name: total[name] + more[name] for name in total}


def test_one_record_has_rank_one_and_is_sent_whole():
    """What its page warns of."""
    assert leaked(LowRank(3), 0) < 1e-3
    one = {"a": torch.outer(torch.randn(5, generator=seeded()), torch.rand(7, generator=seeded()))}
    sent = LowRank(1).on_update(one, replace(HERE, memory={}), seeded())
    torch.testing.assert_close(sent["a"], one["a"])


# --- soteria -----------------------------------------------------------------------------------


def scored(model: nn.Sequential, batch: Batch) -> Tensor:
    """The scores of what enters the last layer, slow and obvious: a Jacobian for each record."""
    scores = torch.zeros(model[-1].in_features)
    body = model[:-1]
    for x in batch.inputs:
        jacobian = torch.autograd.functional.jacobian(lambda v: body(v[None])[0], x)
        slopes = jacobian.flatten(1).norm(dim=1)
        scores += slopes / (body(x[None])[0].detach().abs() + 0.1)
    return scores


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_soteria_zeroes_the_columns_of_lowest_score(share):
    model, batch = perceptron(), records()
    values, here = placed(model, batch, LocalTraining(batch_size=6))
    sent = applied(Soteria(share), values, here, seeded())
    hidden = round(share * 10)
    lowest = scored(model, batch).argsort()[:hidden]
    kept = [k for k in range(10) if k not in lowest.tolist()]
    assert not sent["3.weight"][:, lowest].any()
    assert values["3.weight"].any(0).all()
    assert torch.equal(sent["3.weight"][:, kept], values["3.weight"][:, kept])
    assert all(torch.equal(sent[n], values[n]) for n in values if n != "3.weight")


def test_soteria_normalises_as_the_model_sees_the_records():
    """A representation that is the input itself: its slope is 1, so the score is its size alone."""
    batch = Batch(torch.linspace(0, 1, 12).view(1, 1, 1, 12), torch.tensor([1]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    values, here = placed(model, batch, LocalTraining())
    sent = applied(Soteria(0.25), values, here, seeded())
    assert (sent["1.weight"] == 0).all(0).tolist() == [True] + [False] * 8 + [True] * 3


def test_soteria_defends_the_layer_that_it_is_told():
    model, batch = perceptron(), records()
    values, here = placed(model, batch, LocalTraining(batch_size=6))
    sent = applied(Soteria(0.5, layer="1"), values, here, seeded())
    assert int((sent["1.weight"] == 0).all(0).sum()) == 6
    assert torch.equal(sent["3.weight"], values["3.weight"])
    with pytest.raises(InputError, match="'2' is no linear layer that the model trains; known: 1"):
        applied(Soteria(layer="2"), values, here, seeded())


def test_soteria_follows_the_weights_and_records_of_the_step():
    """With two steps, the second is defended by the scores at its own weights."""
    model, batch = perceptron(), records()
    training = LocalTraining(lr=2.0, batch_size=3, steps=2)
    part = [Batch(batch.inputs[k : k + 3], batch.labels[k : k + 3]) for k in (0, 3)]
    first = train(setting(model, part[0]), part[0], replace(training, steps=1), seeded(),
                  Soteria(0.5)).update  # fmt: skip
    moved = perceptron()
    moved.load_state_dict(subtract(parameters(model), first))
    second = train(setting(moved, part[1]), part[1], replace(training, steps=1), seeded(),
                   Soteria(0.5)).update  # fmt: skip
    both = train(setting(model, batch), batch, training, seeded(), Soteria(0.5)).update
    for name, value in both.items():
        torch.testing.assert_close(value, first[name] + second[name])


def test_soteria_needs_a_linear_layer_and_values(model, batch):
    bare = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())
    values, here = placed(bare, batch, LocalTraining(batch_size=2))
    with pytest.raises(InputError, match="defends a linear layer, and the model trains none"):
        applied(Soteria(), values, here, seeded())
    with pytest.raises(InputError, match="'soteria' needs the records and the weights"):
        Soteria().on_gradient(values, HERE, seeded())
    texts = torch.zeros(2, 5, dtype=torch.long)
    world = setting(nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(20, 4)), texts)
    with pytest.raises(NotApplicable, match="these records are tokens"):
        train(world, Batch(texts, torch.tensor([0, 1])), LocalTraining(batch_size=2), seeded(),
              Soteria())  # fmt: skip


# --- outpost -----------------------------------------------------------------------------------


def test_outpost_prunes_and_adds_noise_where_it_says():
    model, batch = perceptron(48, 40), records(6, 48)
    values, here = placed(model, batch, LocalTraining(batch_size=6))
    sent = applied(Outpost(prune=0.8, noise=0.0), values, here, seeded())
    for name, value in values.items():
        kept = sent[name] != 0
        assert int(kept.sum()) == value.numel() - min(round(0.8 * value.numel()), value.numel() - 1)
        assert torch.equal(sent[name][kept], value[kept])
        assert value[~kept].abs().max() <= value[kept].abs().min()
    noisy = applied(Outpost(prune=0.0, noise=0.8, top=0.4), values, here, seeded())
    noise = {name: noisy[name] - values[name] for name in values}
    flat = torch.cat([v.flatten() for v in values.values()]).abs()
    changed = torch.cat([v.flatten() for v in noise.values()]) != 0
    assert abs(int(changed.sum()) - round(0.4 * len(flat))) <= 2  # a draw may be lost in rounding
    assert flat[~changed].quantile(0.99) <= flat[changed].min() * 1.0001
    weights = noise["1.weight"][noise["1.weight"] != 0]
    spread = 0.8 * float(model[1].weight.detach().var())
    assert float(weights.std()) == pytest.approx(spread, rel=0.15)


def test_outpost_measures_the_risk_by_the_spread_of_the_weights():
    weights = torch.randn(1000, generator=seeded())
    assert risk(0.5 * weights) == pytest.approx(0.25 * float(weights.var()), rel=1e-5)
    assert risk(3 * weights) == 1.0
    assert risk(torch.ones(7)) == risk(torch.tensor([5.0])) == 0.0


def test_outpost_returns_what_it_computed():
    """One public implementation returns the gradient that it was given."""
    values, here = placed(perceptron(), records(), LocalTraining(batch_size=6))
    sent = applied(Outpost(), values, here, seeded())
    assert norm(subtract(sent, values)) > 0.05 * norm(values)
    batch = records()
    training = LocalTraining(batch_size=6)
    plain = train(setting(perceptron(), batch), batch, training, seeded()).update
    assert not same(plain, train(here.setting, batch, training, seeded(), Outpost()).update)


@pytest.mark.parametrize("step", [0, 8, 40])
def test_outpost_defends_later_steps_less_often(step):
    values, here = placed(perceptron(), records(), LocalTraining(batch_size=6))
    there = replace(here, step=step)
    rng = seeded(7)
    count = sum(not same(applied(Outpost(), values, there, rng), values) for _ in range(300))
    expected = 1 / (1 + 0.125 * step)
    assert count / 300 == pytest.approx(expected, abs=4 * math.sqrt(expected / 300) * (step > 0))


# --- guardian ----------------------------------------------------------------------------------


def jacobian_norms(model: nn.Sequential, batch: Batch) -> Named:
    """‖∂g_i/∂x‖ of every entry of the gradient, one derivative after the other."""
    inputs = batch.inputs.clone().requires_grad_()
    loss = F.cross_entropy(model(inputs), batch.labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    norms = {}
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        slopes = [torch.autograd.grad(g, inputs, retain_graph=True)[0] for g in gradient.flatten()]
        norms[name] = torch.stack([s.norm() for s in slopes]).view_as(gradient)
    return norms


def test_guardian_estimates_how_an_entry_moves_with_the_records():
    model, batch = perceptron(), records(2)
    values, here = placed(model, batch, LocalTraining(batch_size=2))
    found = sensitivity(here, here.local, list(values), 400, seeded())
    for name, exact in jacobian_norms(model, batch).items():
        torch.testing.assert_close(found[name], exact, rtol=0.25, atol=1e-5)


@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_guardian_adds_noise_of_the_stated_size_and_place(beta):
    model, batch = perceptron(), records(2)
    values, here = placed(model, batch, LocalTraining(batch_size=2))
    guardian, rng = Guardian(beta, probes=10), seeded()
    noises = [subtract(applied(guardian, values, here, rng), values) for _ in range(60)]
    squares = {n: sum(noise[n].square() for noise in noises) / 60 for n in values}
    total = sum(float(square.sum()) for square in squares.values())
    assert total == pytest.approx(beta * norm(values) ** 2, rel=0.1)
    exact = jacobian_norms(model, batch)
    whole = sum(float(s.sum()) for s in exact.values())
    for name, square in squares.items():  # σ² is in proportion to s
        share = float(square.sum()) / total
        assert share == pytest.approx(float(exact[name].sum()) / whole, rel=0.3)


def test_its_noise_costs_the_attacker_more_than_any_that_is_as_large():
    """The information Σ s²/σ² under σ² ∝ s is less than under σ² ∝ s^p for another p."""
    s = torch.cat([v.flatten() for v in jacobian_norms(perceptron(), records(2)).values()])

    def information(power: float) -> float:
        square = s**power
        return float((s**2 / (square / square.sum())).sum())

    assert all(information(1.0) < information(p) for p in (0.0, 0.5, 0.9, 1.1, 1.5, 2.0))


def test_guardian_protects_everywhere_where_it_cannot_tell():
    """A model that rounds its records: no difference shows, and all entries get noise."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.flatten(1) > 0.5).float())

    batch = Batch(torch.ones(2, 1, 1, 12), torch.tensor([0, 1]))
    values, here = placed(Rounded(12, 4), batch, LocalTraining(batch_size=2))
    sent = applied(Guardian(), values, here, seeded())
    assert all((sent[name] != values[name]).all() for name in values)


# --- censor ------------------------------------------------------------------------------------


def test_censor_is_at_right_angles_and_as_long():
    values, here = placed(perceptron(), records(), LocalTraining(batch_size=6))
    values = {name: 7.0 * value for name, value in values.items()}  # no norm is 1
    sent = applied(Censor(trials=4), values, here, seeded())
    for name, value in values.items():
        cosine = float((value * sent[name]).sum() / value.norm() ** 2)
        assert abs(cosine) < 1e-6
        assert float(sent[name].norm()) == pytest.approx(float(value.norm()), rel=1e-5)


def test_censor_takes_the_draw_of_lowest_loss_after_a_step():
    model, batch = perceptron(), records()
    training = LocalTraining(lr=3.0, batch_size=6)
    values, here = placed(model, batch, training)
    rng = seeded(3)
    draws = [{name: orthogonal(g, rng) for name, g in values.items()} for _ in range(8)]

    def loss_after(step: Named) -> float:
        moved = {n: p - 3.0 * step[n] for n, p in parameters(model).items()}
        return float(
            F.cross_entropy(torch.func.functional_call(model, moved, (batch.inputs,)), batch.labels)
        )

    losses = [loss_after(draw) for draw in draws]
    best = losses.index(min(losses))
    assert best > 0  # not simply the first
    assert same(applied(Censor(trials=8), values, here, seeded(3)), draws[best])
    assert losses != sorted(losses)
    found = [min(losses[:n]) for n in (1, 4, 8)]
    assert found == sorted(found, reverse=True)


def test_censor_never_sends_the_gradient():
    """Not where no draw lowers the loss, not where the loss is no number, not of a single entry."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))  # convex: no right angle leads down
    values, here = placed(model, records(), LocalTraining(lr=1e30, batch_size=6))
    broken = replace(here, local=replace(here.local, training=LocalTraining(lr=math.inf)))
    for place in (here, broken):
        sent = applied(Censor(trials=2), values, place, seeded())
        for name, value in values.items():
            assert abs(float((value * sent[name]).sum())) < 1e-5 * float(value.norm()) ** 2
            assert sent[name].any()
    assert orthogonal(torch.tensor([3.0]), seeded()).tolist() == [0.0]
    assert orthogonal(torch.zeros(4), seeded()).tolist() == [0.0] * 4


# --- hide top ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 1.0])
def test_hide_top_sends_the_smallest_alone(share, update):
    sent = HideTop(share).on_update(update, HERE, seeded())
    for name, value in sent.items():
        hidden = value == 0
        assert int(hidden.sum()) == math.ceil(round(share * value.numel(), 6))
        assert torch.equal(value[~hidden], update[name][~hidden])
        if share < 1:
            assert update[name][hidden].abs().min() >= value[~hidden].abs().max()
    single = HideTop(0.01).on_update({"a": torch.tensor([2.0])}, HERE, seeded())
    assert single["a"].tolist() == [0.0]  # a tensor hides one entry at least


def test_hiding_half_leaves_a_unit_of_small_error_whole():
    """What its page warns of: the rows of a layer are as large as the errors of its units."""
    assert read(HideTop(0.5)) < 1e-4
    assert read(HideTop(0.9)) > 0.1


def test_pruning_and_hiding_the_rest_are_the_whole_update(update):
    kept = Prune(0.8).on_update(update, HERE, seeded())
    hidden = HideTop(0.2).on_update(update, HERE, seeded())
    assert same({name: kept[name] + hidden[name] for name in update}, update)


# --- paired noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["equal", "records"])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_paired_noise_leaves_the_mean_of_the_round_alone(model, easy, clients, weighting):
    sizes = [4 + 4 * k for k in range(clients)]

    class Unequal:
        def split(self, data: Dataset, clients: int, rng: torch.Generator) -> list[Tensor]:
            return list(torch.split(torch.arange(sum(sizes)), sizes))

    training = LocalTraining(lr=0.1, batch_size=4, epochs=1)
    scenario = Scenario(lambda: model, easy, training, clients=clients, records="all",
                        weighting=weighting, partition=Unequal())  # fmt: skip
    plain = simulate(scenario, seeded())
    noisy = simulate(replace(scenario, defence=PairedNoise(2.0)), seeded())
    assert noisy.weights == plain.weights
    left, right = (weighted_mean(one.updates, one.weights) for one in (plain, noisy))
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=1e-4, atol=1e-6)
    for one, other in zip(plain.updates, noisy.updates, strict=True):  # each client is protected
        assert norm(subtract(one, other)) > 0.3 * norm(one)


def test_paired_noise_is_in_proportion_to_the_entries():
    update = {"a": torch.cat([torch.full((50_000,), 0.1), torch.full((50_000,), -5.0)])}
    letters: Memory = {}
    here = replace(HERE, among=Among(0, 2, 0.25, letters))
    sent = PairedNoise(0.5).on_update(update, here, seeded())
    noise = sent["a"] - update["a"]
    assert float(noise[:50_000].std()) == pytest.approx(0.05, rel=0.02)
    assert float(noise[50_000:].std()) == pytest.approx(2.5, rel=0.02)
    there = replace(HERE, among=Among(1, 2, 0.75, letters))
    other = PairedNoise(0.5).on_update(scale(update, 0.0), there, seeded(1))
    torch.testing.assert_close(0.25 * noise + 0.75 * other["a"], torch.zeros(100_000))


def test_a_client_alone_is_not_left_without_noise(update):
    assert not same(PairedNoise().on_update(update, HERE, seeded()), update)


# --- chain -------------------------------------------------------------------------------------


class Adding:
    """Adds a random number, which it remembers, and tells the next client of it."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def announced(self) -> dict[str, object]:
        return {}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        self.drawn.append(float(torch.rand((), generator=rng)))
        here.memory["count"] = here.memory.get("count", torch.tensor(0)) + 1
        here.memory.pop("gone", None)
        here.among.letters["last"] = here.memory["count"]
        return {name: value + self.drawn[-1] for name, value in update.items()}


def test_a_chain_applies_its_defences_in_order(update):
    one = Chain((Clip(0.5), Prune(0.9))).on_update(update, HERE, seeded())
    assert same(one, Prune(0.9).on_update(Clip(0.5).on_update(update, HERE, seeded()), HERE,
                                          seeded()))  # fmt: skip
    other = Chain((Prune(0.9), Clip(0.5))).on_update(update, HERE, seeded())
    assert norm(other) == pytest.approx(0.5, rel=1e-5)
    assert norm(one) < 0.45


def test_each_part_of_a_chain_has_its_own_state_and_randomness(update):
    memory: Memory = {"0/gone": torch.tensor(1), "1/count": torch.tensor(10)}
    letters: Memory = {}
    here = replace(HERE, memory=memory, among=Among(letters=letters))
    parts = (Adding(), Adding())
    rng = seeded()
    for _ in range(3):
        Chain(parts).on_update(update, here, rng)
    assert {key: int(value) for key, value in memory.items()} == {"0/count": 3, "1/count": 13}
    assert {key: int(value) for key, value in letters.items()} == {"0/last": 3, "1/last": 13}
    drawn = parts[0].drawn + parts[1].drawn
    assert len(set(drawn)) == 6
    # What the second draws does not depend on how much the first one does.
    again, rng = Adding(), seeded()
    for _ in range(3):
        Chain((ClipAndNoise(), again)).on_update(update, replace(HERE, memory={}), rng)
    assert again.drawn == parts[1].drawn


def test_two_of_a_kind_in_a_chain_remember_apart(update):
    here = replace(HERE, memory={})
    Chain((TopK(0.5), TopK(0.1))).on_update(update, here, seeded())
    assert {key.partition("/")[0] for key in here.memory} == {"0", "1"}
    whole = {n: u - here.memory[f"0/owed/{n}"] for n, u in update.items()}
    for value in whole.values():
        assert int((value != 0).sum()) == round(0.5 * value.numel())


def test_a_chain_of_nothing_is_refused():
    with pytest.raises(ValueError, match="defences must name at least one defence"):
        Chain(())


def planned(*defences: dict[str, Any]) -> Any:
    table = {
        "federation": {"data": "digits", "model": "mlp"},
        "attack": [{"name": "analytic"}],
        "defence": list(defences),
    }
    return parse(table, "plan", Path.cwd())


def test_a_plan_chains_defences_and_calls_them_by_their_parts():
    plan = planned(
        {"name": "none"},
        {"name": "chain", "defences": ["soteria", {"name": "clip-and-noise", "epsilon": 50}]},
        {"name": "chain", "defences": [{"name": "prune", "share": 0.5}, "prune"]},
        {"name": "chain", "defences": ["clip", {"name": "chain", "defences": ["sign"]}]},
    )
    assert dict(plan.defences) == {
        "none": None,
        "soteria+clip-and-noise": Chain((Soteria(), ClipAndNoise(epsilon=50.0))),
        "prune+prune-2": Chain((Prune(0.5), Prune())),
        "clip+sign": Chain((Clip(), Chain((Sign(),)))),
    }
    papers = [paper.key for paper in references.known(plan.document)]
    assert {"sun2021", "balle2018", "lin2018", "bernstein2018"} <= set(papers)
    chain = plan.defences["soteria+clip-and-noise"]
    assert [paper.key for paper in references.of([chain])][:2] == ["sun2021", "balle2018"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "defence 'chain': defences must name at least one defence"),
        ({"defences": []}, "defences must name at least one defence"),
        ({"defences": "clip"}, r"defence 'chain'\.defences: expected a list, got 'clip'"),
        ({"defences": ["clop"]}, "unknown defence 'clop'; did you mean 'clip'"),
        ({"defences": ["none"]}, "unknown defence 'none'"),
        (
            {"defences": [{"name": "clip", "norm": -1.0}]},
            "norm must be positive and finite, got -1",
        ),
        ({"defences": [{"nam": "clip"}]}, "key 'name' is missing"),
        ({"defence": ["clip"]}, "unknown key 'defence'; did you mean 'defences'"),
    ],
)
def test_what_is_no_chain_is_refused(options, words):
    with pytest.raises(PlanError, match=words):
        planned({"name": "chain"} | options)


def test_every_defence_can_be_built_with_its_name_alone():
    assert all(build(kind, {}, name) == kind() for name, kind in DEFENCES.items())
