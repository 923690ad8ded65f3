"""Detectors that run the model: the probe, exact D-SNR, the warm-up."""

from __future__ import annotations

import copy
import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from nouns import setting
from test_detectors import fished, imprint, mlp, trap_rows
from torch import nn
from torch.nn.functional import cross_entropy

from leakgauge import data, models, observe
from leakgauge.attacks.active import RobbingTheFed, TrapWeights
from leakgauge.detectors import DSNR, Probe, WarmUp, fires, isolation, snapshots
from leakgauge.detectors._isolation import isolated, neighbours
from leakgauge.detectors._layers import chosen, prepared
from leakgauge.detectors._passes import run
from leakgauge.detectors._slots import dominance, slot_norms
from leakgauge.detectors.dsnr import norms
from leakgauge.detectors.warm_up import z_scores
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.records import Scale, record_of
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
    (seen,) = [r for r in passed.runs if r.name == "fc1.weight"]
    found = isolated(seen.gradient, model.fc1.weight.detach(), model.fc1.bias.detach())
    assert set(found.nonzero().flatten().tolist()) == alone
    assert (manipulate is imprint) == (len(alone) > 12)


def test_isolation_counts_what_division_recovers():
    """The leak meter against the attack itself: images read off the gradient of an imprint."""
    model, batch = imprint(mlp(hidden=(256, 64))), records(32)
    update = train(
        setting(model, batch), batch, LocalTraining(lr=1.0, batch_size=32), torch.Generator()
    ).update
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


def test_tokens_are_counted_one_by_one():
    vit = models.make(
        "vit-small", shape=(3, 8, 8), classes=10, rng=torch.Generator().manual_seed(0),
        dim=32, depth=1, heads=2,
    )  # fmt: skip
    found = isolation(vit, records(16), TRAINING)
    assert (found.unit, found.total) == ("tokens", 16 * 4)
    assert not fires(inspected(Probe(), vit, records())["isolation"])


def test_frozen_layers_give_nothing_away():
    model = mlp()
    model.fc1.requires_grad_(False)
    passed = run(prepared(model, TRAINING), records(), TRAINING)
    assert [r.name for r in passed.runs] == ["fc2.weight", "fc3.weight"]
    assert not passed.uncovered


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


@pytest.mark.parametrize(("share", "alone"), [(0.95, False), (0.985, False), (0.995, True)])
def test_a_record_is_alone_from_ninety_nine_hundredths_on(share, alone):
    """What is left of the others stands in the ratio of the gradients: 1 % of it at most."""
    delta = torch.zeros(4, 3)
    delta[0, 1], delta[2, 1] = share, share - 1
    delta[:, 0] = 1.0
    found = isolated(delta, torch.ones(3, 2), None)
    assert found.tolist() == [alone, False, False, False]


@pytest.mark.parametrize(("gain", "fired"), [(2.0, False), (3.0, False), (4.0, True), (10.0, True)])
def test_a_head_that_passes_one_class_on_more_than_three_times_as_strongly_is_rejected(gain, fired):
    """The rows of one class `gain` times as long: its errors are what the score is made of."""
    model = mlp(hidden=(16,))
    with torch.no_grad():
        model.fc2.bias.zero_()
        model.fc2.weight.zero_()
        model.fc2.weight[:, :10] = 1e-3 * torch.eye(10)
        model.fc2.weight[3, 3] = 1e-3 * gain
        model.fc1.bias.fill_(-100.0)  # all classes are equally likely
    batch = records()
    error = torch.full((64, 10), 0.1) - nn.functional.one_hot(batch.labels, 10)
    gains = (error @ model.fc2.weight.detach()).norm(dim=1) / error.norm(dim=1)
    expected = float(gains.max() / gains.median())
    found = inspected(Probe(), model, batch, mlp(hidden=(16,)))["head-gain"]
    assert found.score == pytest.approx(expected, rel=1e-4)
    assert (3 < expected < 30) == fired
    assert (fires(found), found.means) == (fired, "reject")


# --- coverage -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Products that no layer of PyTorch makes, one after the other."""

    def __init__(self):
        super().__init__()
        self.right = nn.Parameter(torch.randn(192, 24) / 14)
        self.left = nn.Parameter(torch.randn(20, 24) / 5)
        self.ein = nn.Parameter(torch.randn(20, 18) / 5)
        self.added = nn.Parameter(torch.randn(1, 18))
        self.add = nn.Parameter(torch.randn(18, 16) / 4)
        self.bias = nn.Parameter(torch.randn(16))
        self.masked = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("mask", torch.ones(16, 16))
        self.scale = nn.Parameter(torch.randn(16, 16) / 4)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(x.flatten(1) @ self.right)
        x = torch.relu((self.left @ x.T).T)
        x = torch.relu(torch.einsum("nd,du->nu", x, self.ein) + self.added)
        x = torch.relu(torch.addmm(self.bias, x, self.add))
        x = torch.relu(nn.functional.linear(x, self.masked * self.mask))
        x = (x[:, None, :] * self.scale).sum(-1)
        return self.head(x)


def test_every_product_of_a_weight_with_data_is_seen_and_the_rest_is_named():
    model = Odd()
    passed = run(prepared(model, TRAINING), records(12), TRAINING)
    seen = {r.name: r for r in passed.runs}
    assert {"right", "left", "ein", "add", "masked", "head.weight"} <= set(seen)
    for name in ("right", "left", "ein", "add", "masked"):
        assert len(seen[name].rows(seen[name].left)) == 12
        assert seen[name].gradient is not None
    assert passed.uncovered == {"scale": "it is used by mul"}
    found = inspected(Probe(), model, records())["coverage"]
    assert (fires(found), found.means, found.tensor) == (True, "report", "scale")


def test_gradients_of_odd_products_are_those_of_their_outputs():
    """The weight's gradient is put together again from what the probe saw."""
    model, batch = Odd().double(), records(12)
    batch = Batch(batch.inputs.double(), batch.labels)
    passed = run(prepared(model, TRAINING), batch, TRAINING)
    cross_entropy(model(batch.inputs), batch.labels).backward()
    seen = {r.name: r for r in passed.runs}
    for name in ("right", "ein", "add"):
        made = seen[name].entered.T @ seen[name].rows(seen[name].gradient)
        torch.testing.assert_close(made, model.get_parameter(name).grad)
    made = seen["left"].rows(seen["left"].gradient).T @ seen["left"].entered.T
    torch.testing.assert_close(made, model.left.grad)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 2, batch_first=True)
        self.head = nn.Linear(192, 10)

    def forward(self, x):
        tokens = x.flatten(2).mT.reshape(len(x), -1, 24)
        return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


def test_what_pytorch_does_in_one_piece_is_named_as_not_covered():
    passed = run(prepared(Attending(), TRAINING), records(12), TRAINING)
    assert passed.uncovered == dict.fromkeys(
        ("attend.in_proj_weight", "attend.out_proj.weight"),
        "it is used by multi_head_attention_forward",
    )


def test_the_probe_takes_a_rounds_records_and_every_class():
    batch = records(300, classes=3)
    batch.labels[7] = 9  # one record of a rare class
    training = LocalTraining(batch_size=8, steps=3)
    probe = Probe()
    assert probe.wanted(batch, training) == (24, 24)
    assert probe.wanted(batch, LocalTraining(batch_size=100, steps=3)) == (300, 256)
    assert probe.wanted(batch, LocalTraining(batch_size=8, epochs=2)) == (300, 256)
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        found = chosen(batch, mlp(), 24, rng)
        assert len(found) == 24
        assert 9 in found.labels


# --- bins -----------------------------------------------------------------------------------------


def test_neighbours_by_hand():
    """Units 0, 1, 2 measure one thing with thresholds of 1.5, 2.5 and 4.5; unit 3 its reverse, with
    3.5; unit 4 something else."""
    h = torch.arange(1.0, 7.0)
    other = torch.tensor([3.0, -1.0, 4.0, -1.0, 5.0, -9.0])
    values = torch.stack([h - 1.5, h - 2.5, h - 4.5, 3.5 - h, other], 1)
    found = {tuple(row) for row in neighbours(values).tolist()}
    # 0 and 1 differ in h = 2 (row 1); 1 and 3 agree only in row 2 (off, off … both are on for 3);
    # 2 and 3 agree only in row 3 (both off).
    assert found == {(0, 1, 1), (1, 3, 2), (2, 3, 3)}


def test_bins_are_seen_whatever_the_rows_look_like(rng):
    """Rows of any length, with parts that the data do not have, and errors that differ."""
    model, batch = mlp(hidden=(128, 64)), records()
    batch.inputs[:, :, 4:] = 0.5  # the lower half says nothing
    v = torch.zeros(3, 8, 8)
    v[:, :4] = 1 / 96
    rows = v.flatten() + torch.randn(128, 192, generator=rng) * (v.flatten() == 0)
    rows[:, v.flatten() == 0] -= rows[:, v.flatten() == 0].mean(1, keepdim=True)
    scale = torch.rand(128, 1, generator=rng) + 0.5
    with torch.no_grad():
        model.fc1.weight.copy_(scale * rows)
        model.fc1.bias.copy_(-scale[:, 0] * torch.linspace(0.2, 0.8, 128))
    found = inspected(Probe(), model, batch, mlp(1), LocalTraining(batch_size=64))
    assert (fires(found["bins"]), found["bins"].means) == (True, "reject")
    assert found["bins"].tensor == "fc1.weight"
    own = inspected(Probe(), model, batch, model, LocalTraining(batch_size=64))
    assert not fires(own["bins"])  # the client's own network is like that
    assert not fires(inspected(Probe(), mlp(), batch, mlp(1))["bins"])


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
    products = [r for r in passed.runs if r.kind in ("linear", "convolution")]
    assert {r.name for r in products} == set(exact)
    for seen in products:
        slots = slot_norms(seen) * len(batch)  # of a mean
        torch.testing.assert_close(slots, exact[seen.name], rtol=1e-6, atol=1e-12)


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
    assert set(inspected(Probe(), mlp(), few)) == {"isolation", "loss", "coverage"}
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
        update = train(setting(model, batch), batch, plain, torch.Generator()).update["fc3.weight"]
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
        update = train(
            setting(model, batch), batch, TRAINING, torch.Generator().manual_seed(index)
        ).update
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


SCALE = Scale(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))

# --- real images ----------------------------------------------------------------------------------


@pytest.mark.skipif("LEAKGAUGE_DATA" not in os.environ, reason="needs CIFAR-10")
def test_on_cifar_honest_networks_pass_and_attacks_do_not():
    images = data.load("cifar10", split="test")
    entering = record_of(images.inputs, SCALE).entering(images.inputs[:64])
    batch = Batch(entering, images.labels[:64])
    training = LocalTraining(batch_size=64)
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
    training = LocalTraining(batch_size=64)
    scenario = Scenario(lambda: mlp(hidden=(512, 256), side=32), test_set, training, scale=SCALE)
    honest = simulate(scenario, rng)
    sent = attack.prepare(target(honest, train_set), rng)
    round_ = tampered(honest, sent, rng)
    seen = observe(round_, ThreatModel(malicious=True), kept=sent.kept)
    guess = attack.reconstruct(seen, rng)
    truth = round_.truths[0]
    apart = torch.cdist(truth.inputs.flatten(1), guess.inputs.flatten(1)).amin(1)
    recovered = int((apart < math.sqrt(3072) * 10 ** (-40 / 20)).sum())  # above 40 dB
    entering = Batch(seen.record.entering(truth.inputs), truth.labels)
    found = isolation(seen.model, entering, training)
    assert abs(found.count - recovered) <= 6
    assert recovered >= 20
