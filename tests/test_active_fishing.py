"""Fishing: the gradient of one record alone, by a class that occurs once or a high feature."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from test_active import SCALE, SHAPE, TRAINING, host, images, seeded
from torch import Tensor, nn

from leakgauge import data, models, threat
from leakgauge.attacks.active import Fishing
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import tampered
from leakgauge.fl.local import loss
from leakgauge.metrics import psnr
from leakgauge.records import Scale, record_of
from leakgauge.types import (
    Batch,
    Dataset,
    LocalTraining,
    Observation,
    Reconstruction,
    Round,
    Target,
    ThreatModel,
)

MLP = host("mlp", {"hidden": [48, 32]})
CNN = host("cnn", {"channels": 4, "hidden": 32})


def caught(
    attack: Fishing,
    model: nn.Module,
    batch: Batch,
    training: LocalTraining = TRAINING,
    public: Dataset | None = None,
    scale: Scale = SCALE,
) -> tuple[Observation, Reconstruction]:
    host_ = setting(model, batch, 4 if batch.inputs.shape[-1] == 16 else 10, scale)
    training = replace(training, batch_size=min(len(batch), training.batch_size))
    sent = attack.prepare(Target(host_, training, len(batch), 1, public), seeded())
    round_ = Round(host_, ({},), (1.0,), {}, training, (len(batch),), truths=(batch,))
    played = tampered(round_, sent, seeded())
    seen = threat.observe(played, ThreatModel(malicious=True), kept=sent.kept)
    return seen, attack.reconstruct(seen, seeded())


def batch_with(label: int, times: int, size: int = 12) -> Batch:
    """Images of which the first `times` are of this class, and no other."""
    others = [k for k in range(4) if k != label]
    labels = torch.tensor([others[k % 3] for k in range(size)])
    labels[:times] = label
    return Batch(images(size, 1).inputs, labels)


def features(model: nn.Module, inputs: Tensor, scale: Scale = SCALE) -> Tensor:
    """What enters the last layer."""
    entered: list[Tensor] = []
    *_, last = model.modules()
    handle = last.register_forward_hook(lambda _, args, __: entered.append(args[0]))
    with torch.no_grad():
        model(record_of(inputs, scale).entering(inputs))
    handle.remove()
    return entered[0]


WHOLE = replace(TRAINING, batch_size=12)


@pytest.mark.parametrize("attack", [Fishing(label=2), Fishing(label=2, row=0.5)])
def test_a_class_that_occurs_once_gives_its_image_away(attack):
    batch = batch_with(2, 1)
    _, guess = caught(attack, MLP, batch, WHOLE)
    assert len(guess.inputs) == 1
    assert guess.labels.tolist() == [2]
    assert psnr(guess.inputs, batch.inputs[:1]) > 100
    assert guess.facts["fished"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("model", [MLP, CNN])
def test_the_update_is_that_of_the_fished_record_alone(model):
    batch = batch_with(1, 1)
    seen, guess = caught(Fishing(label=1), model, batch, WHOLE)
    names, weights = zip(*seen.model.named_parameters(), strict=True)
    alone = loss(seen.setting, dict(zip(names, weights, strict=True)), batch.inputs[:1],
                 batch.labels[:1], WHOLE)  # fmt: skip
    expected = torch.autograd.grad(alone, weights)
    for name, gradient in zip(names[:-2], expected, strict=False):
        torch.testing.assert_close(12 * seen.update[name] / WHOLE.lr, gradient)
    torch.testing.assert_close(guess.facts["features"], features(model, batch.inputs[:1])[0])


def test_a_class_that_occurs_more_often_is_counted_and_averaged():
    batch = batch_with(1, 3)
    _, guess = caught(Fishing(label=1), CNN, batch, WHOLE)
    assert guess.facts["fished"] == pytest.approx(3, abs=1e-4)
    mean = features(CNN, batch.inputs[:3]).mean(0)
    torch.testing.assert_close(guess.facts["features"], mean)


def test_an_absent_class_gives_nothing_and_says_so():
    _, guess = caught(Fishing(label=1), MLP, batch_with(1, 0), WHOLE)
    assert len(guess.inputs) == 0
    assert guess.facts == {"fished": 0.0}
    assert "no record was caught" in guess.notes[0]


def test_softmax_regression_is_read_from_the_fished_row():
    batch = batch_with(3, 1)
    _, guess = caught(Fishing(label=3), host("mlp", {"hidden": []}), batch, WHOLE)
    assert psnr(guess.inputs, batch.inputs[:1]) > 100


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_local_steps_leave_the_image_readable(decay):
    batch = batch_with(2, 1)
    training = replace(TRAINING, batch_size=4, epochs=2, lr=1e-3, weight_decay=decay)
    _, guess = caught(Fishing(label=2), MLP, batch, training)
    assert psnr(guess.inputs, batch.inputs[:1]) > 40
    assert guess.facts["fished"] == pytest.approx(1, abs=0.01)


def test_noise_in_the_camouflage_lets_the_others_through():
    batch = batch_with(2, 1)
    scores = [
        float(psnr(caught(Fishing(label=2, camouflage=noise, bias=20.0), MLP, batch, WHOLE)[1]
                   .inputs, batch.inputs[:1]))
        for noise in (0.0, 0.01, 1.0)
    ]  # fmt: skip
    assert scores[0] > 60
    assert scores[0] > scores[1] > scores[2]
    (sent,) = (
        Fishing(label=2, camouflage=0.1)
        .prepare(Target(setting(MLP, SHAPE, 4, SCALE), TRAINING, 12), seeded())
        .models
    )
    assert sent.fc3.weight.abs().sum(1).min() > 0  # no row of zeros is left


def test_where_no_layer_reads_the_image_the_features_are_known_and_pixels_take_iterations():
    batch = batch_with(1, 1)
    _, guess = caught(Fishing(label=1), CNN, batch, WHOLE)
    assert len(guess.inputs) == 0
    assert "set iterations" in guess.notes[0]
    _, guess = caught(Fishing(label=1, iterations=60), CNN, batch, WHOLE)
    assert guess.inputs.shape == (1, *SHAPE)
    assert guess.labels.tolist() == [1]
    assert guess.distances[-1] < 0.6 * guess.distances[0]
    assert guess.residual < 0.5


def test_the_record_with_the_highest_feature_is_fished():
    """Public images and the batch are of one class; the batch straddles the threshold."""
    public = images(400, 2)
    public = replace(public, labels=torch.zeros(400, dtype=torch.long))
    values = features(MLP, public.inputs)
    unit = int(values.std(0).argmax())
    order = values[:, unit].argsort()
    chosen = torch.cat([order[-2:-1], order[40:51]])  # one far above, the others far below
    batch = Batch(public.inputs[chosen], torch.zeros(12, dtype=torch.long))
    _, guess = caught(Fishing(by="feature"), MLP, batch, WHOLE, public)
    assert guess.facts["fished"] == pytest.approx(1, abs=0.01)
    assert psnr(guess.inputs, batch.inputs[:1]) > 60
    below = Batch(public.inputs[order[40:52]], batch.labels)
    assert len(caught(Fishing(by="feature"), MLP, below, WHOLE, public)[1].inputs) == 0


def test_wrong_options_and_hosts_are_answered():
    given = Target(setting(MLP, SHAPE, 4, SCALE), TRAINING, 12)
    with pytest.raises(InputError, match="label is 4; expected a class from 0 to 3"):
        Fishing(label=4).prepare(given, seeded())
    with pytest.raises(NotApplicable, match="this server has none"):
        Fishing(by="feature").prepare(given, seeded())
    with pytest.raises(NotApplicable, match="at least 24 public images of class 0, got 10"):
        Fishing(by="feature").prepare(replace(given, public=images(40, 2)), seeded())
    blank = host("mlp", {})
    nn.init.zeros_(blank.fc2.weight)
    with pytest.raises(NotApplicable, match=r"row = 0\.5"):
        Fishing().prepare(replace(given, setting=setting(blank, SHAPE, 4)), seeded())
    unbiased = nn.Sequential(nn.Flatten(), nn.Linear(768, 4, bias=False))
    with pytest.raises(NotApplicable, match="the bias of the last layer, and in '1'"):
        Fishing().prepare(replace(given, setting=setting(unbiased, SHAPE, 4)), seeded())


# --- CIFAR-10 ----------------------------------------------------------------------------------


@pytest.mark.skipif("LEAKGAUGE_DATA" not in os.environ, reason="needs CIFAR-10")
@pytest.mark.parametrize(("name", "options"), [("mlp", {"hidden": [512, 256]}), ("cnn", {})])
def test_one_image_of_64(name, options):
    cifar = data.load("cifar10", split="train")
    training = LocalTraining(batch_size=64)
    scale = Scale(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    model = models.make(name, shape=(3, 32, 32), classes=10, rng=seeded(), **options)
    for label in range(3):
        order = torch.randperm(len(cifar), generator=seeded(label))
        of_class = cifar.labels[order] == label
        chosen = torch.cat([order[of_class][:1], order[~of_class][:63]])
        batch = Batch(cifar.inputs[chosen], cifar.labels[chosen])
        _, guess = caught(Fishing(label=label), model, batch, training, scale=scale)
        if name == "mlp":
            assert psnr(guess.inputs, batch.inputs[:1]) > 100
        truth = features(model, batch.inputs[:1], scale)[0]
        assert F.cosine_similarity(guess.facts["features"], truth, dim=0) > 0.999
