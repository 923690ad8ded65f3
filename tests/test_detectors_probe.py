"""Detectors that run the model: the probe, exact D-SNR, the warm-up."""

from __future__ import annotations

import copy
import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_detectors import fished, imprint, mlp, trap_rows
from torch import nn
from torch.nn.functional import cross_entropy

from leakgauge import data, models, observe
from leakgauge.attacks.active import RobbingTheFed, TrapWeights
from leakgauge.detectors import DSNR, Probe, WarmUp, fires, isolation, snapshots
from leakgauge.detectors._layers import prepared
from leakgauge.detectors.dsnr import norms
from leakgauge.detectors.probe import dominance, isolated, run, slot_norms
from leakgauge.detectors.warm_up import z_scores
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.types import Batch, History, LocalTraining, Received, ThreatModel

TRAINING = LocalTraining(lr=0.05, batch_size=32, steps=4, momentum=0.9)


def records(n: int = 64, side: int = 8, seed: int = 0, classes: int = 10) -> Batch:
    """Images that differ in brightness, as real ones do."""
    rng = torch.Generator().manual_seed(seed)
    light = torch.rand(n, 1, 1, 1, generator=rng)
    inputs = (0.2 + 0.6 * light + 0.1 * torch.randn(n, 3, side, side, generator=rng)).clamp(0, 1)
    return Batch(inputs, torch.randint(classes, (n,), generator=rng))


def inspected(detector, model, batch, fresh=None, training=TRAINING, **options):
    received = Received(model.state_dict(), fresh or model, model, training, batch, **options)
    return {d.test: d for d in detector.inspect(received, torch.Generator().manual_seed(0))}


# --- isolation ------------------------------------------------------------------------------------


def per_sample(model: nn.Module, batch: Batch, layer: nn.Linear) -> list[torch.Tensor]:
    """∂L/∂b of a layer, record by record: the slow and obvious way."""
    rows = []
    for x, y in zip(batch.inputs, batch.labels, strict=True):
        objective = cross_entropy(model(x[None]), y[None]) / len(batch)
        rows.append(torch.autograd.grad(objective, layer.bias)[0])
    return rows


@pytest.mark.parametrize("manipulate", [lambda m: m, imprint], ids=["honest", "imprint"])
def test_isolation_equals_record_by_record(manipulate):
    model, batch = manipulate(mlp()), records(24)
    delta = torch.stack(per_sample(model, batch, model.fc1)).double()
    order = (model.fc1.bias / model.fc1.weight.norm(dim=1)).argsort(stable=True)
    alone = set()
    units = [delta[:, j] for j in range(128)]
    units += [
        torch.where((a - b).abs() < 1e-4 * torch.maximum(a.abs(), b.abs()), 0.0, a - b)
        for a, b in ((delta[:, i], delta[:, j]) for i, j in pairwise(order))
    ]
    for one in units:
        size = one.abs()
        if size.sum() and size.max() > 0.99 * size.sum():
            alone.add(int(size.argmax()))
    passed = run(prepared(model, TRAINING), batch, TRAINING)
    (seen,) = [r for r in passed.runs if r.name == "fc1"]
    found = isolated(seen.gradient, model.fc1.weight.detach(), model.fc1.bias.detach())
    assert set(found.nonzero().flatten().tolist()) == alone
    assert (manipulate is imprint) == (len(alone) > 12)


def test_isolation_counts_what_division_recovers():
    """The leak meter against the attack itself: images read off the gradient of an imprint."""
    model, batch = imprint(mlp(hidden=(256, 64))), records(32)
    update = train(model, batch, LocalTraining(lr=1.0, batch_size=32), torch.Generator()).update
    order = model.fc1.bias.argsort(descending=True)
    weight, bias = (update[n].double()[order] for n in ("fc1.weight", "fc1.bias"))
    weight, bias = weight[:-1] - weight[1:], bias[:-1] - bias[1:]
    kept = bias.abs() > 1e-6 * bias.abs().max()
    images = weight[kept] / bias[kept, None]
    apart = torch.cdist(batch.inputs.flatten(1).double(), images).amin(1)
    recovered = int((apart < 0.1).sum())
    found = isolation(model, batch, TRAINING)
    assert (found.layer, found.unit, found.total) == ("fc1", "images", 32)
    assert abs(found.count - recovered) <= 3
    assert found.share == found.count / 32
    assert recovered > 16


def test_one_record_alone_is_isolated_and_no_hidden_layer_says_nothing():
    assert isolation(mlp(), records(1), TRAINING).share == 1.0
    bare = mlp(hidden=())
    assert isolation(bare, records(8), TRAINING).layer is None
    assert "isolation" not in inspected(Probe(), bare, records())


def test_tokens_are_counted_in_few_images():
    vit = models.make(
        "vit-small", shape=(3, 8, 8), classes=10, rng=torch.Generator().manual_seed(0),
        dim=32, depth=1, heads=2,
    )  # fmt: skip
    found = isolation(vit, records(16), TRAINING)
    assert (found.unit, found.total) == ("tokens", 4 * 5)
    assert not fires(inspected(Probe(), vit, records())["isolation"])


def test_frozen_layers_give_nothing_away():
    model = mlp()
    model.fc1.requires_grad_(False)
    passed = run(prepared(model, TRAINING), records(), TRAINING)
    assert [r.name for r in passed.runs] == ["fc2", "fc3"]


def test_isolation_at_chance_is_rejected_unless_the_own_network_shows_it_too():
    sent, fresh = imprint(mlp()), mlp(1)
    found = inspected(Probe(), sent, records(), fresh)["isolation"]
    assert fires(found)
    assert (found.means, found.tensor) == ("reject", "fc1.weight")
    assert inspected(Probe(), sent, records(), sent)["isolation"].means == "exposed"
    lenient = Probe(manipulated=found.score)
    assert inspected(lenient, sent, records(), fresh)["isolation"].means == "exposed"


def test_isolation_in_a_model_that_has_learnt_is_exposure():
    sent, batch = imprint(mlp()), records()
    with torch.no_grad():  # one class, always said
        sent.fc3.bias[7] += 50.0
    batch = Batch(batch.inputs, torch.full((64,), 7))
    batch.labels[:16] = 3  # leaves errors to see
    found = inspected(Probe(), sent, batch, mlp(1))["isolation"]
    assert (fires(found), found.means) == (True, "exposed")


def test_trap_weights_isolate(rng):
    model = mlp(hidden=(512, 64), side=16)
    with torch.no_grad():
        model.fc1.weight.copy_(trap_rows(512, 768, rng, 0.88))
        model.fc1.bias.zero_()
    batch = Batch(torch.rand(64, 3, 16, 16, generator=rng), torch.arange(64) % 10)
    assert fires(inspected(Probe(), model, batch, mlp(hidden=(512, 64), side=16))["isolation"])


# --- D-SNR ----------------------------------------------------------------------------------------

NETWORKS = {
    "mlp": ({}, None),
    "lenet-5": ({}, None),
    "vit-small": ({"dim": 32, "depth": 1, "heads": 2}, None),
    "resnet-10": ({"width": 0.125, "norm": "group"}, None),
    "mobilenet-v2": ({"width": 0.25}, "eval"),  # grouped and strided convolutions
}


@pytest.mark.parametrize("name", NETWORKS)
def test_slots_are_records_without_batch_norm(name):
    options, mode = NETWORKS[name]
    model = models.make(
        name, shape=(3, 16, 16), classes=10, rng=torch.Generator().manual_seed(0), **options
    ).double()
    training = LocalTraining(batch_norm=mode or "train")
    batch = records(5, side=16)
    batch = Batch(batch.inputs.double(), batch.labels)
    exact = norms(prepared(model, training), batch, training)
    passed = run(prepared(model, training), batch, training)
    assert {f"{r.name}.weight" for r in passed.runs} == set(exact)
    for seen in passed.runs:
        slots = slot_norms(seen) * len(batch)  # of a mean
        torch.testing.assert_close(slots, exact[f"{seen.name}.weight"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_slots_of_padded_convolutions(mode, padding):
    conv = nn.Conv2d(3, 4, 3, padding=padding, padding_mode=mode, dilation=1)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(256, 10)).double()
    batch = Batch(records(4).inputs.double(), records(4).labels)
    exact = norms(prepared(model, TRAINING), batch, TRAINING)
    passed = run(prepared(model, TRAINING), batch, TRAINING)
    torch.testing.assert_close(slot_norms(passed.runs[0]) * 4, exact["0.weight"])


def test_exact_norms_in_train_mode_see_the_whole_batch(model):
    """With batch norm, a record's gradient is that of its own loss in the batch's forward pass."""
    batch = records(6, classes=4)
    training = LocalTraining()
    found = norms(prepared(model, training), batch, training)
    model.drop.eval()
    logits = model(batch.inputs)
    for i in range(6):
        one = cross_entropy(logits[i], batch.labels[i])
        gradient = torch.autograd.grad(one, model.conv.weight, retain_graph=True)[0]
        assert float(found["conv.weight"][i]) == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_dominance_by_hand():
    assert dominance(torch.tensor([1.0, 6.0, 2.0])) == 2.0
    assert dominance(torch.tensor([0.0, 1.0])) == math.inf
    assert dominance(torch.zeros(3)) == 0.0


def test_a_fished_class_that_occurs_once_dominates():
    batch = records()
    labels = torch.where(batch.labels == 3, 4, batch.labels)
    labels[10] = 3
    batch = Batch(batch.inputs, labels)
    model = fished(mlp())
    found = inspected(Probe(), model, batch, mlp(1))
    assert found["d-snr"].means == "exposed"
    assert found["head-gain"].means == "reject"
    assert all(fires(found[t]) for t in ("d-snr", "head-gain", "loss"))
    assert fires(inspected(DSNR(), model, batch)["exact-d-snr"])


def test_few_records_give_no_ratio():
    few = records(8)
    assert set(inspected(Probe(), mlp(), few)) == {"isolation", "loss"}
    assert not inspected(DSNR(), mlp(), few)


def test_head_gain_is_of_the_error_that_the_head_passes_on():
    model = mlp(hidden=(16,))
    found = inspected(Probe(), model, records())["head-gain"]
    assert found.tensor == "fc2.weight"
    error = model(records().inputs).softmax(1) - nn.functional.one_hot(records().labels, 10)
    gains = (error @ model.fc2.weight).norm(dim=1) / error.norm(dim=1)
    assert found.score == pytest.approx(float((gains.max() / gains.median()).detach()), rel=1e-4)


def test_a_zero_initialised_head_passes_the_probe():
    model = mlp()
    nn.init.zeros_(model.fc3.weight)
    assert not any(fires(d) for d in inspected(Probe(), model, records()).values())


SMALL = {
    "mlp": {}, "lenet-zhu": {}, "lenet-5": {}, "cnn": {}, "convnet": {"width": 0.125},
    "resnet-9": {"width": 0.125}, "resnet-10": {"width": 0.125},
    "mobilenet-v2": {"width": 0.25}, "vit-small": {"dim": 48, "depth": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", range(2))
def test_honest_fresh_networks_pass_the_probe(name, seed):
    rng = torch.Generator().manual_seed(seed)
    model = models.make(name, shape=(3, 16, 16), classes=10, rng=rng, **SMALL[name])
    found = inspected(Probe(), model, records(64, side=16, seed=seed))
    assert {"loss", "d-snr", "head-gain"} <= set(found)
    assert not [d for d in found.values() if fires(d)]


# --- warm-up --------------------------------------------------------------------------------------


def test_z_scores_by_numpy():
    rng = np.random.default_rng(0)
    past, now = rng.normal(size=(12, 2, 3)), rng.normal(size=(4, 2, 3))
    names = ("a", "b")
    as_snapshots = [
        [{n: tuple(one[k]) for k, n in enumerate(names)} for one in values]
        for values in (now, past)
    ]
    found = z_scores(*as_snapshots)
    z = np.abs(now - past.mean(0)) / (past.std(0) + 1e-8)
    for k, name in enumerate(names):
        assert found[name] == pytest.approx(z[:, k].max())


def test_snapshots_are_of_the_steps_of_gradient_descent():
    model, batch = mlp(), records(40)
    taken = snapshots(model, batch, TRAINING)
    assert len(taken) == 6
    assert set(taken[0]) == {"fc1.weight", "fc1.bias", "fc3.weight", "fc3.bias"}
    for step in range(6):
        plain = LocalTraining(lr=0.05, batch_size=40, steps=step or 1)
        update = train(model, batch, plain, torch.Generator()).update["fc3.weight"]
        value = model.fc3.weight.detach() - (update if step else 0)
        want = (value.mean(), value.std(correction=0), value.abs().max())
        assert taken[step]["fc3.weight"] == pytest.approx([float(w) for w in want], rel=1e-4)


def test_three_batch_norms_and_the_first_convolution_are_watched():
    rng = torch.Generator().manual_seed(0)
    model = models.make("resnet-10", shape=(3, 16, 16), classes=10, rng=rng, width=0.125)
    taken = snapshots(model, records(8, side=16), TRAINING)
    outputs = [n for n in taken[0] if n.endswith("(output)")]
    assert len(outputs) == 3
    assert {"conv1.weight", "fc.weight", "fc.bias"} == set(taken[0]) - set(outputs)


def federation(rounds: int):
    """Honest rounds of one MLP: (model, records) of each."""
    model, found = mlp(), []
    for index in range(rounds):
        batch = records(128, seed=index)
        found.append((copy.deepcopy(model), batch))
        update = train(model, batch, TRAINING, torch.Generator().manual_seed(index)).update
        with torch.no_grad():
            for name, value in model.named_parameters():
                value -= update[name]
    return found


def test_the_printed_reading_is_blind_and_the_carried_record_is_not():
    """The finding: a baseline from this round's own steps comes from the manipulated model."""
    honest = federation(8)
    taken, printed, carried = (), [], []
    for index, (model, batch) in enumerate(honest):
        history = History(model.state_dict(), index, {}, snapshots=taken) if index else None
        printed.append(inspected(WarmUp(reading="printed"), model, batch)["warm-up"].score)
        found = inspected(WarmUp(), model, batch, history=history)
        assert bool(found) == (index >= 3)  # no score before three rounds
        carried += [d.score for d in found.values()]
        taken += (snapshots(model, batch, TRAINING),)
    model, batch = honest[-1]
    history = History(model.state_dict(), 7, {}, snapshots=taken[:-1])
    attacked = [fished(model), imprint(model)]
    blind = [inspected(WarmUp(reading="printed"), m, batch)["warm-up"].score for m in attacked]
    sees = [inspected(WarmUp(), m, batch, history=history)["warm-up"] for m in attacked]
    assert max(printed) > min(blind)  # no threshold separates
    assert max(printed) > 4000  # not even the paper's bound holds
    assert max(carried) <= 30
    assert all(fires(d) for d in sees)
    assert min(d.score for d in sees) > 10 * max(carried)


def test_the_first_model_is_compared_with_own_initialisations():
    seeds = iter(range(100, 200))

    def make():
        torch.rand(3)  # draws from the global generator, as any network does
        return mlp(next(seeds))

    batch = records(128)
    torch.manual_seed(1)
    chance = torch.get_rng_state()
    honest = inspected(WarmUp(), mlp(0), batch, make=make)["warm-up"]
    assert torch.equal(torch.get_rng_state(), chance)
    assert not fires(honest)
    for attack in (fished, imprint):
        assert fires(inspected(WarmUp(), attack(mlp(0)), batch, make=make)["warm-up"])
    assert not inspected(WarmUp(at_start=False), mlp(0), batch, make=make)
    assert not inspected(WarmUp(), mlp(0), batch)  # nothing to compare with


# --- real images ----------------------------------------------------------------------------------


@pytest.mark.skipif("LEAKGAUGE_DATA" not in os.environ, reason="needs CIFAR-10")
def test_on_cifar_honest_networks_pass_and_attacks_do_not():
    images = data.load("cifar10", split="test")
    batch = Batch(images.inputs[:64], images.labels[:64])
    training = LocalTraining(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    fresh = mlp(1, hidden=(256, 64), side=32)
    for seed in range(3):
        model = mlp(seed, hidden=(256, 64), side=32)
        found = inspected(Probe(), model, batch, fresh, training)
        assert not [d for d in found.values() if fires(d)]
        sent = imprint(model)
        with torch.no_grad():
            sent.fc1.bias.copy_(-torch.linspace(-1.5, 1.5, 256))
        found = inspected(Probe(), sent, batch, fresh, training)["isolation"]
        assert (fires(found), found.means) == (True, "reject")
        assert found.score > 0.4


@pytest.mark.skipif("LEAKGAUGE_DATA" not in os.environ, reason="needs CIFAR-10")
@pytest.mark.parametrize("attack", [RobbingTheFed(), TrapWeights()])
def test_isolation_predicts_what_the_attacks_recover(attack, rng):
    train_set, test_set = (data.load("cifar10", split=s) for s in ("train", "test"))
    training = LocalTraining(batch_size=64, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    scenario = Scenario(lambda: mlp(hidden=(512, 256), side=32), test_set, training)
    honest = simulate(scenario, rng)
    round_ = tampered(honest, attack.tamper(target(honest, train_set), rng), rng)
    guess = attack.reconstruct(observe(round_, ThreatModel(malicious=True)), rng)
    truth = round_.truths[0]
    apart = torch.cdist(truth.inputs.flatten(1), guess.inputs.flatten(1)).amin(1)
    recovered = int((apart < math.sqrt(3072) * 10 ** (-40 / 20)).sum())  # above 40 dB
    found = isolation(round_.model, truth, training)
    assert abs(found.count - recovered) <= 6
    assert recovered >= 20
