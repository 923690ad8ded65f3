"""The contract of every attack that changes the model: seeded, pure, refused to the honest."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge import models, threat
from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.errors import LeakGaugeError, Withheld
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.records import Scale
from leakgauge.types import (
    Dataset,
    LocalTraining,
    Observation,
    Preparation,
    PreparedAttack,
    Reconstruction,
    Round,
    ThreatModel,
)

SHAPE = (3, 16, 16)
TRAINING = LocalTraining(lr=0.01, batch_size=4)
SCALE = Scale(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))

Case = tuple[str, dict[str, object], str, dict[str, object]]
CASES: dict[str, Case] = {  # attack, its options, host, its options
    "robbing-the-fed": ("robbing-the-fed", {"bins": 32}, "mlp", {"hidden": [48]}),
    "rtf, hidden": ("robbing-the-fed", {"noise": 0.1, "functional": "random"}, "cnn",
                    {"channels": 4, "hidden": 32}),
    "rtf, block": ("robbing-the-fed", {"form": "block", "bins": 32}, "lenet-zhu", {}),
    "trap-weights": ("trap-weights", {}, "mlp", {"hidden": [48]}),
    "trap, hidden": ("trap-weights", {"magnitudes": "independent", "amplitude": "host"}, "cnn",
                     {"channels": 4, "hidden": 32}),
    "fishing": ("fishing", {}, "mlp", {"hidden": [48]}),
    "fishing, soft": ("fishing", {"camouflage": 0.05, "bias": 10.0}, "lenet-zhu", {}),
    "fishing, feature": ("fishing", {"by": "feature"}, "mlp", {"hidden": [48]}),
    "fishing, pixels": ("fishing", {"iterations": 2}, "lenet-zhu", {}),
    "loki": ("loki", {"bins": 32}, "lenet-zhu", {}),
    "decepticons": ("decepticons", {}, "vit-small", {"dim": 64, "depth": 3, "heads": 4}),
    "seer": ("seer", {"steps": 2, "side": 4, "width": 8, "entries": 500}, "convnet",
             {"width": 0.125}),
}  # fmt: skip
INSERT = {"rtf, block", "loki"}  # a block in front of the host: other names and shapes
READY = {name: case for name, case in CASES.items() if case[0] in ACTIVE_ATTACKS}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, seed: int) -> Dataset:
    """Blobs of 8 bits, four classes."""
    rng = seeded(seed)
    coarse = F.interpolate(torch.rand(count, 3, 4, 4, generator=rng), SHAPE[1:], mode="bilinear")
    fine = coarse + 0.1 * torch.randn(count, *SHAPE, generator=rng)
    return Dataset("blobs", (255 * fine.clamp(0, 1)).round() / 255, torch.arange(count) % 4,
                   tuple("abcd"))  # fmt: skip


def host(name: str, options: dict[str, object]) -> nn.Module:
    return models.make(name, shape=SHAPE, classes=4, rng=seeded(), **options)


def attack_of(name: str) -> PreparedAttack:
    kind, options, *_ = CASES[name]
    return ACTIVE_ATTACKS[kind](**options)


def honest(name: str, clients: int = 1) -> Round:
    _, _, model, options = CASES[name]
    scenario = Scenario(lambda: host(model, options), images(64, 1), TRAINING, clients, scale=SCALE)
    return simulate(scenario, seeded())


def play(name: str, seed: int = 0) -> tuple[Round, Preparation, Observation, Reconstruction]:
    attack, rng, round_ = attack_of(name), seeded(seed), honest(name)
    sent = attack.prepare(target(round_, images(400, 2)), rng)
    round_ = tampered(round_, sent, rng)
    seen = threat.observe(round_, ThreatModel(malicious=True), kept=sent.kept)
    return round_, sent, seen, attack.reconstruct(seen, rng)


def values(models: tuple[nn.Module, ...]) -> list[Tensor]:
    return [value for model in models for value in model.state_dict().values()]


def test_every_active_attack_is_covered():
    assert {case[0] for case in READY.values()} == set(ACTIVE_ATTACKS)


@pytest.mark.parametrize("name", READY)
def test_same_seed_same_result_and_the_global_generator_is_left_alone(name):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    _, sent, _, guess = play(name)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    _, again, _, second = play(name)
    for one, other in zip(values(sent.models), values(again.models), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(guess.inputs, second.inputs)
    assert guess.residual == second.residual


@pytest.mark.parametrize("name", READY)
def test_nothing_it_is_given_is_changed(name):
    attack, rng, round_ = attack_of(name), seeded(), honest(name)
    given = target(round_, images(400, 2))
    state = copy.deepcopy(given.model.state_dict())
    public = given.public.inputs.clone()
    sent = attack.prepare(given, rng)
    for key, value in given.model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert torch.equal(given.public.inputs, public)
    received = sent.models[0].state_dict()
    assert any(
        not (key in state and torch.equal(value, state[key])) for key, value in received.items()
    )
    played = tampered(round_, sent, rng)
    seen = threat.observe(played, ThreatModel(malicious=True), kept=sent.kept)
    update = copy.deepcopy(seen.update)
    weights = copy.deepcopy(seen.model.state_dict())
    attack.reconstruct(seen, rng)
    assert all(torch.equal(value, update[key]) for key, value in seen.update.items())
    assert all(torch.equal(value, weights[key]) for key, value in seen.model.state_dict().items())


@pytest.mark.parametrize("name", READY)
def test_what_is_sent_has_the_hosts_structure_unless_it_inserts_a_block(name):
    _, sent, _, _ = play(name)
    _, _, model, options = CASES[name]

    def structure(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}

    expected = structure(host(model, options))
    for one in sent.models:
        assert (structure(one) == expected) == (name not in INSERT)
        assert all(value.isfinite().all() for value in one.state_dict().values())


@pytest.mark.parametrize("name", READY)
def test_guesses_are_images_and_no_more_than_records(name):
    _, _, seen, guess = play(name)
    assert guess.inputs.shape[1:] == SHAPE
    assert len(guess.inputs) <= seen.records
    assert guess.inputs.dtype == torch.float32
    assert ((guess.inputs >= 0) & (guess.inputs <= 1)).all()


@pytest.mark.parametrize("name", READY)
def test_it_is_refused_to_the_honest_and_to_clients(name):
    attack = attack_of(name)
    assert isinstance(attack, PreparedAttack)
    assert attack.manipulates
    threat.check(name, attack, ThreatModel(malicious=True))
    for honest_one in (
        ThreatModel(),
        ThreatModel(actor="aggregate"),
        ThreatModel(actor="client", malicious=True),
    ):
        with pytest.raises(Withheld, match="malicious = true"):
            threat.check(name, attack, honest_one)
    with pytest.raises(Withheld, match="'records'"):
        threat.check(name, attack, ThreatModel(grants=frozenset({"training"}), malicious=True))


@pytest.mark.parametrize("name", READY)
def test_what_is_withheld_is_missed_in_words(name):
    _, _, seen, _ = play(name)
    attack = attack_of(name)
    for gap in ({"kept": None}, {"training": None}, {"records": None}):
        with pytest.raises(LeakGaugeError):
            attack.reconstruct(replace(seen, **gap), seeded())
