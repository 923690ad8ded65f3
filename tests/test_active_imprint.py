"""Robbing the Fed, trap weights and LOKI: images by division, and only those that the theory gives.

The counts on CIFAR-10 are means over three batches of 64; all values are in docs/methods.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Literal

import pytest
import torch
from nouns import setting
from test_active import SCALE, SHAPE, TRAINING, host, images, seeded
from torch import Tensor, nn

from leakgauge import data, models, threat
from leakgauge.attacks.active import Loki, RobbingTheFed, TrapWeights
from leakgauge.attacks.active._imprint import best, neighbours, reader
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.metrics import psnr
from leakgauge.records import AS_THEY_ARE, Scale, record_of
from leakgauge.types import (
    Batch,
    Dataset,
    LocalTraining,
    Preparation,
    PreparedAttack,
    Reconstruction,
    Round,
    Target,
    ThreatModel,
)

needs_cifar = pytest.mark.skipif("LEAKGAUGE_DATA" not in os.environ, reason="needs CIFAR-10")


def given(model: nn.Module, clients: int = 1, public: int = 400, scale: Scale = SCALE) -> Target:
    return Target(setting(model, SHAPE, 4, scale), TRAINING, 16, clients, images(public, 2))


def entering(inputs: Tensor) -> Tensor:
    return record_of(inputs, SCALE).entering(inputs)


def round_of(*batches: Tensor, training: LocalTraining = TRAINING) -> Round:
    """A round of clients with these images, before anything is sent."""
    truths = tuple(Batch(x, torch.arange(len(x)) % 4) for x in batches)
    shares = (1 / len(batches),) * len(batches)
    empty: tuple[dict[str, Tensor], ...] = ({},) * len(batches)
    sizes = tuple(len(x) for x in batches)
    blank = setting(nn.Identity(), SHAPE, 4, SCALE)
    return Round(blank, empty, shares, {}, training, sizes, truths=truths)


def attacked(
    attack: PreparedAttack, sent: Preparation, round_: Round, actor: threat.Actor = "server"
) -> Reconstruction:
    played = tampered(round_, sent, seeded())
    seen = threat.observe(played, ThreatModel(actor=actor, malicious=True), kept=sent.kept)
    return attack.reconstruct(seen, seeded())


def recovered(guess: Reconstruction, truth: Tensor, above: float = 50.0) -> int:
    """How many of the truths one of the guesses shows."""
    best_of = [max((float(psnr(g[None], t[None])) for g in guess.inputs), default=0) for t in truth]
    return sum(one > above for one in best_of)


def whole(x: Tensor) -> LocalTraining:
    return replace(TRAINING, batch_size=len(x))


# --- the parts ---------------------------------------------------------------------------------


def test_neighbours_undo_a_cumulative_sum():
    added = torch.rand(6, 3, generator=seeded())
    units = added.flip(0).cumsum(0).flip(0)  # each unit is on for its own bin and all above
    torch.testing.assert_close(neighbours(units), added)


def test_the_best_candidates_are_on_levels_or_occur_twice_and_are_shown_once():
    x = images(4, 0).inputs
    mixture, other = (x[0] + 2 * x[1]) / 3, (x[2] + x[3] + x[0]) / 3
    beyond = 2 * x[2] - x[3]
    candidates = torch.stack([beyond, mixture, x[0], x[0] + 5e-5, x[1], other, other + 1e-5])
    strength = torch.tensor([9.0, 8.0, 1.0, 2.0, 3.0, 5.0, 4.0])
    assert best(candidates, strength, 7).tolist() == [4, 3, 5, 1, 0, 2, 6]
    assert best(candidates, strength, 2).tolist() == [4, 3]


def test_convolutions_in_front_are_made_to_hand_the_image_on():
    model = host("cnn", {"channels": 5, "hidden": 8})
    layer = reader(model, given(model))
    assert layer.raw
    entered: list[Tensor] = []
    model.fc1.register_forward_hook(lambda _, args, __: entered.append(args[0]))
    x = images(3, 5).inputs
    model(entering(x))
    torch.testing.assert_close(entered[0][:, : x[0].numel()], x.flatten(1))
    assert not entered[0][:, x[0].numel() :].any()


class Strided(nn.Module):
    """Convolution and linear layers that cannot hand an image on."""

    def __init__(self, **convolution: object):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, **convolution)
        self.fc = nn.Sequential(nn.Flatten(), nn.LazyLinear(1000), nn.ReLU(), nn.Linear(1000, 4))
        self(torch.zeros(1, *SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Strided(stride=2, padding=1), "cannot be made to hand the image on"),
        (lambda: Strided(padding=1, bias=False), "cannot be made to hand the image on"),
        (lambda: Strided(padding=0), "cannot be made to hand the image on"),
        (lambda: host("resnet-10", {"width": 0.125}), "cannot be made to hand the image on"),
        (lambda: host("vit-small", {"dim": 48, "depth": 1}), "cannot be made to hand the image on"),
        (lambda: host("cnn", {"channels": 2}), "cannot be made to hand the image on"),
        (lambda: host("mlp", {"activation": "tanh"}), "only behind a ReLU"),
        (lambda: host("mlp", {"hidden": []}), "only behind a ReLU"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 16), nn.Flatten()), "this model has none"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 9, bias=False), nn.ReLU(),
                               nn.Linear(9, 4)), "has no bias"),
    ],
)  # fmt: skip
def test_hosts_that_cannot_be_read_are_refused_in_words(model, words):
    for attack in (RobbingTheFed(), TrapWeights()):
        with pytest.raises(NotApplicable, match=words):
            attack.prepare(given(model()), seeded())


def test_wrong_sizes_and_missing_public_images_are_answered():
    model = host("mlp", {"hidden": [8]})
    with pytest.raises(NotApplicable, match="9 bins need as many units"):
        RobbingTheFed(bins=9).prepare(given(model), seeded())
    with pytest.raises(NotApplicable, match="at least 16 of them, got 7"):
        RobbingTheFed().prepare(given(model, public=7), seeded())
    for attack in (RobbingTheFed(), RobbingTheFed(form="block"), Loki()):
        with pytest.raises(NotApplicable, match="this server has none"):
            attack.prepare(replace(given(model), public=None), seeded())
    other = replace(given(model), public=Dataset("x", torch.rand(9, 3, 8, 8), torch.zeros(9), ()))
    with pytest.raises(InputError, match=r"\(3, 8, 8\), those of the clients \(3, 16, 16\)"):
        RobbingTheFed().prepare(other, seeded())
    with pytest.raises(InputError, match="scale must lie between 0 and 1"):
        TrapWeights(scale=1.1).prepare(given(model), seeded())
    with pytest.raises(NotApplicable, match=r"rows is 9, but 'fc1\.weight' has 8"):
        TrapWeights(rows=9).prepare(given(model), seeded())


# --- Robbing the Fed ---------------------------------------------------------------------------


def by_brightness(places: Sequence[float]) -> Tensor:
    """Images whose brightness, as the network sees it, is at these quantiles of the public."""
    public = images(400, 2).inputs
    order = entering(public).flatten(1).mean(1).argsort()
    return public[order[[int(place * 400) for place in places]]]


FORMS = [
    (RobbingTheFed(), "mlp", {"hidden": [8, 16]}),
    (RobbingTheFed(), "mlp", {"hidden": [8]}),
    (RobbingTheFed(bins=8), "mlp", {"hidden": [40]}),
    (RobbingTheFed(form="block", bins=8), "lenet-zhu", {}),
    (RobbingTheFed(form="block", bins=8), "resnet-10", {"width": 0.125}),
]


@pytest.mark.parametrize(("attack", "name", "options"), FORMS)
def test_records_alone_in_their_bin_are_exact_and_a_pair_is_one_guess(attack, name, options):
    alone = by_brightness([0.06, 0.19, 0.31, 0.44, 0.56, 0.69, 0.94])  # all but the bin .75–.875
    pair = by_brightness([0.78, 0.84])
    sent = attack.prepare(given(host(name, options)), seeded())
    x = torch.cat([alone, pair])
    guess = attacked(attack, sent, round_of(x, training=whole(x)))
    assert recovered(guess, alone, 60) == len(alone)
    assert len(guess.inputs) == len(alone) + 1
    assert recovered(guess, pair) <= 1  # one of them, if the other's error happens to vanish


@pytest.mark.parametrize("change", [
    {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1, "steps": 3},
    {"lr": 1e-4, "epochs": 2, "batch_size": 2},
    {"lr": 1e-3, "sends": "weights"},
])  # fmt: skip
def test_updates_of_several_steps_are_read_too(change):
    x = by_brightness([0.06, 0.19, 0.31, 0.44, 0.56, 0.69, 0.81, 0.94])
    attack = RobbingTheFed()
    sent = attack.prepare(given(host("mlp", {"hidden": [8, 16]})), seeded())
    training = replace(whole(x), **change)
    assert recovered(attacked(attack, sent, round_of(x, training=training)), x, 30) >= 7


def test_adam_is_refused_in_words():
    x = images(4, 1).inputs
    training = replace(whole(x), optimiser="adam")
    for attack in (RobbingTheFed(), TrapWeights(), Loki(bins=8)):
        sent = attack.prepare(given(host("mlp", {"hidden": [8]})), seeded())
        with pytest.raises(NotApplicable, match="'adam' is rescaled"):
            attacked(attack, sent, round_of(x, training=training))


# --- trap weights ------------------------------------------------------------------------------


def test_rows_are_half_negative_and_the_rest_the_same_magnitudes_scaled():
    model = host("mlp", {"hidden": [6]})
    no_scale = given(model, scale=AS_THEY_ARE)
    rows = TrapWeights(scale=0.9).prepare(no_scale, seeded()).models[0].fc1.weight.detach()
    for row in rows:
        negative, positive = -row[row < 0], row[row > 0]
        assert len(negative) == len(positive) == len(row) // 2
        torch.testing.assert_close(0.9 * negative.sort().values, positive.sort().values)
    adaptive = TrapWeights(magnitudes="independent", amplitude="host")
    (sent,) = adaptive.prepare(no_scale, seeded()).models
    magnitudes = sent.fc1.weight.detach().abs()
    assert len(magnitudes.flatten().unique()) > 0.99 * magnitudes.numel()
    honest = model.fc1.weight.detach().square().mean()
    torch.testing.assert_close(sent.fc1.weight.detach().square().mean(), honest)


def test_normalisation_is_folded_in():
    """The trapped layer answers as the rows would on pixels in [0, 1]."""
    model = host("mlp", {"hidden": [6]})
    x = images(5, 1).inputs
    plain = given(model, scale=AS_THEY_ARE)
    on_pixels = TrapWeights().prepare(plain, seeded()).models[0].fc1
    folded = TrapWeights().prepare(given(model), seeded()).models[0].fc1
    torch.testing.assert_close(
        folded(entering(x).flatten(1)), on_pixels(x.flatten(1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {"hidden": [128]}), ("cnn", {"channels": 3, "hidden": 128})]
)
def test_trap_weights_catch_records_and_with_the_wrong_signs_they_do_not(name, options, decay):
    x = images(16, 1).inputs
    attack = TrapWeights(scale=0.9)
    sent = attack.prepare(given(host(name, options)), seeded())
    round_ = round_of(x, training=replace(whole(x), weight_decay=decay))
    caught = recovered(attacked(attack, sent, round_), x)
    layer = sent.models[0].fc1
    with torch.no_grad():
        layer.weight.neg_()
        layer.bias.neg_()
    assert caught >= 6
    assert recovered(attacked(attack, sent, round_), x) == 0


# --- LOKI --------------------------------------------------------------------------------------


def test_one_aggregate_shows_the_images_of_every_client_and_whose_they_are():
    clients = [by_brightness([0.06, 0.31, 0.56]), by_brightness([0.07, 0.32, 0.57]),
               by_brightness([0.44, 0.69, 0.94])]  # fmt: skip
    attack = Loki(bins=8)
    sent = attack.prepare(given(host("lenet-zhu", {}), clients=3), seeded())
    assert len(sent.models) == 3
    round_ = round_of(*clients, training=whole(clients[0]))
    guess = attacked(attack, sent, round_, "aggregate")
    assert recovered(guess, torch.cat(clients), 60) == 9
    for client, owned in enumerate(clients):
        own = [k for k, owner in enumerate(guess.facts["clients"]) if owner == client]
        assert recovered(replace(guess, inputs=guess.inputs[own]), owned, 60) == 3
    # The same imprint for all: records of two clients share bins, and the aggregate mixes them.
    mixed = attacked(attack, replace(sent, models=sent.models[:1]), round_, "aggregate")
    assert recovered(mixed, torch.cat(clients[:2]), 60) == 0
    assert set(mixed.facts["clients"]) == {0}


def test_clients_differ_in_the_kernels_only():
    sent = Loki(bins=8).prepare(given(host("lenet-zhu", {}), clients=2), seeded())
    first, second = (model.state_dict() for model in sent.models)
    differ = {key for key in first if not torch.equal(first[key], second[key])}
    assert differ == {"conv.weight", "conv.bias"}


# --- CIFAR-10 ----------------------------------------------------------------------------------

CIFAR = LocalTraining(batch_size=64)
CIFAR_SCALE = Scale(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
FEDAVG = replace(CIFAR, batch_size=8, epochs=1)
MLP = ("mlp", {"hidden": [512, 256]})
CNN = ("cnn", {})
RESNET = ("resnet-10", {"width": 0.25, "norm": "group"})


@cache
def cifar(whose: Literal["clients", "server"]) -> Dataset:
    """Half of the test images each: the training images take seconds to read."""
    whole = data.load("cifar10", split="test")
    half = slice(None, 5000) if whose == "clients" else slice(5000, None)
    return replace(whole, inputs=whole.inputs[half], labels=whole.labels[half])


def count(
    attack: PreparedAttack,
    network: tuple[str, dict[str, object]],
    training: LocalTraining = CIFAR,
    above: float = 50.0,
    clients: int = 1,
    seeds: int = 2,
) -> float:
    """Images recovered of 64 per client, the mean over batches."""
    name, options = network
    counts = []
    for seed in range(seeds):
        rng = seeded(seed)
        build = {"shape": (3, 32, 32), "classes": 10, "rng": seeded(seed)}
        scenario = Scenario(
            lambda: models.make(name, **build, **options),  # noqa: B023
            cifar("clients"), training, clients, records=64, scale=CIFAR_SCALE,
        )  # fmt: skip
        round_ = simulate(scenario, rng)
        sent = attack.prepare(target(round_, cifar("server")), rng)
        round_ = tampered(round_, sent, rng)
        seen = ThreatModel(actor="aggregate" if clients > 1 else "server", malicious=True)
        held = threat.observe(round_, seen, kept=sent.kept)
        guess = attack.reconstruct(held, rng).inputs.flatten(1)
        truth = threat.covered(round_, seen).inputs.flatten(1)
        error = torch.cdist(guess.double(), truth.double()).square().min(0).values / truth.shape[1]
        counts.append(int((error < 10 ** (-above / 10)).sum()))
    return mean(counts)


@needs_cifar
@pytest.mark.parametrize(
    ("attack", "network", "training", "above", "least"),
    [
        (RobbingTheFed(), MLP, CIFAR, 50, 50),
        (RobbingTheFed(form="block"), RESNET, CIFAR, 50, 50),
        (RobbingTheFed(), CNN, CIFAR, 50, 40),
        (RobbingTheFed(), MLP, FEDAVG, 30, 45),
        (TrapWeights(), MLP, CIFAR, 50, 25),
        (TrapWeights(), CNN, CIFAR, 50, 20),
        (TrapWeights(), MLP, FEDAVG, 30, 25),
        (TrapWeights(magnitudes="independent", amplitude="host"), MLP, CIFAR, 50, 15),
    ],
)
def test_images_recovered_of_64(attack, network, training, above, least):
    assert count(attack, network, training, above) >= least


@needs_cifar
def test_loki_recovers_images_of_four_clients_from_one_aggregate():
    assert count(Loki(), RESNET, clients=4, seeds=1) >= 200


@needs_cifar
def test_what_is_recovered_is_what_the_theory_expects():
    """B(1 − 1/k)^(B−1) records are alone in a bin; five standard deviations of a count of 64."""
    for bins in (128, 512):
        expected = 64 * (1 - 1 / bins) ** 63
        assert abs(count(RobbingTheFed(bins=bins), MLP) - expected) < 10
