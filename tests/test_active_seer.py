"""SEER: the pieces of its objective, what the decoder is given, and its resumption.

Long training is measured by benchmarks/seer.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from torch import Tensor, nn

from leakgauge.attacks.active import seer
from leakgauge.attacks.active.seer import Seer
from leakgauge.errors import CheckpointError, InputError, NotApplicable, PlanError, Withheld
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.fl.local import ready
from leakgauge.kept import Checkpoint, key_of
from leakgauge.records import Scale, record_of
from leakgauge.threat import observe
from leakgauge.types import (
    Dataset,
    LocalTraining,
    Named,
    Observation,
    Preparation,
    Resources,
    Round,
    Target,
    ThreatModel,
)

TRAINING = LocalTraining(lr=0.05, batch_size=4, weight_decay=0.01)
SCALE = Scale(mean=(0.5,), std=(0.25,))
TINY = Seer(steps=6, side=2, width=5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def round_(model: nn.Module, easy: Dataset) -> Round:
    return simulate(Scenario(lambda: model, easy, TRAINING, scale=SCALE), seeded())


def entering(inputs: Tensor) -> Tensor:
    return record_of(inputs, SCALE).entering(inputs)


def observed(round_: Round, sent: Preparation) -> Observation:
    return observe(tampered(round_, sent, seeded()), ThreatModel(malicious=True), kept=sent.kept)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gradients_of_single_records_inside_their_batch(model, batch, mode):
    training = replace(TRAINING, batch_norm=mode)
    shares = torch.randn(2, len(batch), generator=seeded())
    values = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    run = setting(ready(model, training), batch, 4, SCALE)
    found = seer.gradients(run, values, buffers, batch, shares, training)

    twin = ready(model, training)
    logits = torch.func.functional_call(twin, values, (entering(batch.inputs),))
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    single = [torch.autograd.grad(one, list(values.values()), retain_graph=True) for one in losses]
    for row, share in zip(found, shares, strict=True):
        for i, got in enumerate(row):
            wanted = sum(s * g[i] for s, g in zip(share, single, strict=True))
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def decoder_of(entries: int, width: int, pixels: int, seed: int = 0) -> Named:
    rng = seeded(seed)
    return {
        "d.weight": torch.randn(width, entries, generator=rng),
        "r.weight": torch.randn(pixels, width, generator=rng),
        "r.bias": torch.randn(pixels, generator=rng),
    }


def test_the_disaggregator_of_a_sum_is_the_sum():
    decoder = decoder_of(20, 7, 12)
    parts = torch.randn(5, 20, generator=seeded())
    torch.testing.assert_close(
        seer.disaggregate(parts.sum(0), decoder), seer.disaggregate(parts, decoder).sum(0)
    )
    assert not seer.disaggregate(torch.zeros(20), decoder).any()


def test_the_objective_is_zero_for_a_perfect_decoder_and_exact_for_a_poor_one():
    """Gradients along three axes; the decoder reads the first as the picture."""
    rows, picture = torch.eye(3, 6), torch.tensor([0.2, 0.4])
    perfect = {
        "d.weight": torch.eye(1, 6),
        "r.weight": torch.tensor([[0.1], [0.1]]),
        "r.bias": torch.tensor([0.1, 0.3]),
    }
    total, error = seer.objective(rows, picture, perfect, 3.0)
    assert float(total) == pytest.approx(0, abs=1e-12) == float(error)
    # It also reads twice the sum of the others: 0.2 in each pixel of one of two rows.
    leaking = perfect | {"d.weight": torch.tensor([[1.0, 2.0, 0, 0, 0, 0]])}
    total, error = seer.objective(rows, picture, leaking, 3.0)
    assert float(error) == pytest.approx(0, abs=1e-12)
    assert float(total) == pytest.approx(3 / 4 * (0.2**2 / 2))
    # It is off by 0.5 in both pixels.
    off = perfect | {"r.bias": perfect["r.bias"] + 0.5}
    total, error = seer.objective(rows, picture, off, 3.0)
    assert (float(error), float(total)) == pytest.approx((0.25, 0.25 / 4))


def test_the_image_with_the_property_stands_alone():
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    wanted = torch.tensor([[0, 0, 2, 0, 0], [1, 1, 0, 1, 1], [1, -1, 0, 1, 1]]) / 2
    assert torch.equal(seer.shares_of(2, signs), wanted)
    images = torch.rand(5, 3, 4, 4, generator=seeded())
    images[3] += 1
    assert seer.brightest(images) == 3


def test_the_signs_have_the_sum_of_the_paper_as_their_mean():
    """E‖D(Σ s_i g_i)‖² = Σ ‖D g_i‖², over all 2³ signs."""
    decoder = decoder_of(10, 4, 6)
    parts = torch.randn(3, 10, generator=seeded(1))

    def left(row: Tensor) -> Tensor:
        return (seer.disaggregate(row, decoder) @ decoder["r.weight"].T).square().sum()

    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    mean = torch.stack([left(sign @ parts) for sign in signs]).mean()
    torch.testing.assert_close(mean, sum(left(part) for part in parts))


def test_training_moves_the_model_the_disaggregator_and_the_reconstructor(round_, easy):
    given = target(round_, easy)
    before = Seer(steps=1, side=2, width=5).prepare(given, seeded(), Resources(seconds=0))
    after = Seer(steps=1, side=2, width=5).prepare(given, seeded())
    for name in seer.DECODER:
        assert not torch.equal(before.kept.tensors[name], after.kept.tensors[name])
    honest = dict(given.model.named_parameters())
    unmoved = [n for n, p in after.models[0].named_parameters() if torch.equal(p, honest[n])]
    # A batch norm takes away what the bias before it adds.
    assert set(unmoved) <= {"conv.bias"}
    for name, value in before.models[0].state_dict().items():
        assert torch.equal(value, given.model.state_dict()[name])


@pytest.mark.parametrize("entries", [30, 16384])
def test_the_decoder_is_given_the_sum_of_the_gradients(round_, easy, entries):
    """From what the client sends, with its learning rate, mean and weight decay."""
    total = sum(p.numel() for p in round_.model.parameters())
    attack = replace(TINY, entries=entries)
    sent = attack.prepare(target(round_, easy), seeded())
    kept = sent.kept.tensors
    assert kept["d.weight"].shape[1] == min(entries, total)
    played = tampered(round_, sent, seeded())
    got = seer.picture(observe(played, ThreatModel(malicious=True), kept=sent.kept))
    model, truth = sent.models[0], played.truths[0]
    net = ready(model, TRAINING)
    losses = F.cross_entropy(net(entering(truth.inputs)), truth.labels, reduction="none")
    gradient = torch.autograd.grad(losses.sum(), list(net.parameters()))
    row = seer.read(gradient, kept.get("chosen")) * kept["scale"]
    wanted = seer.decode(seer.disaggregate(row, kept), kept)
    torch.testing.assert_close(got, wanted.view(3, 2, 2).clamp(0, 1), atol=1e-4, rtol=1e-4)


def test_one_picture_is_returned_enlarged(round_, easy):
    sent = TINY.prepare(target(round_, easy), seeded())
    seen = observed(round_, sent)
    guess = TINY.reconstruct(seen, seeded())
    assert guess.inputs.shape == (1, 3, 8, 8)
    assert guess.inputs.min() >= 0
    assert guess.inputs.max() <= 1
    kept = sent.kept.tensors
    nothing = kept | {"d.weight": 0 * kept["d.weight"]}
    flat = replace(seen, kept=replace(sent.kept, tensors=nothing))
    constant = TINY.reconstruct(flat, seeded()).inputs
    assert not torch.equal(constant, guess.inputs)  # the update is read
    torch.testing.assert_close(constant[0, :, 0, 0], kept["r.bias"].view(3, 4)[:, 0])


def test_a_short_training_lowers_the_objective(round_, easy):
    told: list[float] = []
    attack = Seer(steps=80, side=2, width=8, lr=3e-3, alpha_first=1, alpha_last=1)
    attack.prepare(
        target(round_, easy), seeded(), Resources(progress=lambda _, __, value: told.append(value))
    )
    assert len(told) == 80
    assert sum(told[-20:]) < 0.5 * sum(told[:20])


class Interrupted(Exception):
    pass


def checkpointed(path: Path, given: Target, rng: torch.Generator, **options: Any) -> Resources:
    return Resources(checkpoint=Checkpoint(path, key_of(TINY, given, rng)), **options)


def test_a_resumed_training_is_the_uninterrupted_one(round_, easy, tmp_path, monkeypatch):
    monkeypatch.setattr(seer, "EVERY", 2)
    given, file = target(round_, easy), tmp_path / "seer.safetensors"
    rng = seeded(3)
    whole = TINY.prepare(given, rng)

    def stop(at: int) -> Callable[[int, int, float], None]:
        def progress(done: int, _: int, __: float) -> None:
            if done == at:
                raise Interrupted

        return progress

    with pytest.raises(Interrupted):  # kept after 2 and 4
        TINY.prepare(given, seeded(3), checkpointed(file, given, seeded(3), progress=stop(5)))
    again = seeded(3)
    steps: list[int] = []
    resumed = TINY.prepare(
        given, again, checkpointed(file, given, again, progress=lambda step, *_: steps.append(step))
    )
    assert steps == [5, 6]
    third = TINY.prepare(  # finished: nothing is trained
        given, seeded(3), checkpointed(file, given, seeded(3), progress=stop(6))
    )
    for one in (resumed, third):
        for name, value in whole.models[0].state_dict().items():
            assert torch.equal(value, one.models[0].state_dict()[name])
        assert set(one.kept.tensors) == set(whole.kept.tensors)
        for name, value in whole.kept.tensors.items():
            assert torch.equal(value, one.kept.tensors[name])
        assert whole.kept.facts == one.kept.facts
    assert torch.equal(rng.get_state(), again.get_state())


@pytest.mark.parametrize("change", ["lr", "seed", "public", "model", "training"])
def test_another_training_is_not_continued(round_, easy, tmp_path, change):
    given, file = target(round_, easy), tmp_path / "seer.safetensors"
    TINY.prepare(given, seeded(), checkpointed(file, given, seeded()))
    attack = replace(TINY, lr=2e-3) if change == "lr" else TINY
    given = target(round_, easy)
    if change == "public":
        given = replace(given, public=replace(easy, inputs=easy.inputs.flip(3)))
    if change == "model":
        with torch.no_grad():
            next(given.model.parameters()).add_(1e-3)
    if change == "training":
        given = replace(given, training=replace(TRAINING, lr=0.01))
    rng = seeded(1 if change == "seed" else 0)
    place = Checkpoint(file, key_of(attack, given, rng))
    with pytest.raises(CheckpointError, match=r"seer\.safetensors.*name another file"):
        attack.prepare(given, rng, Resources(checkpoint=place))


def test_the_time_budget_ends_the_training_and_is_told(round_, easy):
    sent = TINY.prepare(target(round_, easy), seeded(), Resources(seconds=0))
    seen = observed(round_, sent)
    assert any("after 0 of 6 steps" in note for note in TINY.reconstruct(seen, seeded()).notes)


def test_nothing_is_changed_and_the_seed_decides(round_, easy):
    given = target(round_, easy)
    before = copy.deepcopy(given.model.state_dict())
    first, second, other = (TINY.prepare(given, seeded(s)) for s in (0, 0, 1))
    for name, value in given.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(first.kept.tensors["d.weight"], second.kept.tensors["d.weight"])
    assert not torch.equal(first.kept.tensors["d.weight"], other.kept.tensors["d.weight"])


def test_what_it_cannot_read_is_refused(round_, easy):
    given = target(round_, easy)
    with pytest.raises(NotApplicable, match="public images"):
        TINY.prepare(target(round_), seeded())
    small = replace(easy, inputs=easy.inputs[..., :4])
    with pytest.raises(InputError, match="resize"):
        TINY.prepare(target(round_, small), seeded())
    for training, words in (
        (replace(TRAINING, steps=2), "2 local steps"),
        (replace(TRAINING, batch_size=2), "local steps of 2 records"),
        (replace(TRAINING, optimiser="adam"), "'adam'"),
        (replace(TRAINING, dropout="replayed"), "dropout"),
    ):
        with pytest.raises(NotApplicable, match=words):
            TINY.prepare(replace(given, training=training), seeded())
    sent = TINY.prepare(given, seeded())
    seen = observed(round_, sent)
    other = replace(seen, records=8, training=replace(TRAINING, batch_size=8))
    with pytest.raises(NotApplicable, match="batches of 4 and this update is of 8"):
        TINY.reconstruct(other, seeded())
    for missing in ("training", "records", "kept"):
        with pytest.raises(Withheld):
            TINY.reconstruct(replace(seen, **{missing: None}), seeded())
    with pytest.raises(PlanError, match="side must be at least 1, got 0"):
        Seer(side=0)


class Fused(nn.Module):
    """Attention of a single token by PyTorch's fused kernel, which has one derivative only."""

    def forward(self, x: Tensor) -> Tensor:
        token = x.view(len(x), 1, 1, -1)
        return F.scaled_dot_product_attention(token, token, token).flatten(1)


def test_a_model_that_cannot_be_differentiated_twice_is_refused(easy):
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Fused(), nn.Linear(8, 4))
    played = simulate(Scenario(lambda: net, easy, TRAINING, scale=SCALE), seeded())
    with pytest.raises(NotApplicable, match="no second derivative"):
        TINY.prepare(target(played, easy), seeded())
