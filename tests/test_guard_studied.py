"""A server that has read our source, against the guard: what is caught, and what still passes.

Every model here is one that an earlier guard accepted. The images are smooth, as photographs are,
so that a server can hide what is no image in the fine stripes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from guard_studied import STUDIED, Host
from nouns import setting
from torch.nn.functional import interpolate

from leakgauge import metrics
from leakgauge.detectors import WarmUp
from leakgauge.fl.local import train
from leakgauge.guard import Guard, Policy
from leakgauge.records import Scale, record_of
from leakgauge.tensors import norm
from leakgauge.types import Batch, Dataset, LocalTraining

SHAPE, CLASSES, UNITS = (3, 16, 16), 10, 512
TRAINING = LocalTraining(lr=0.05, batch_size=64)
SCALE = Scale((0.5,) * 3, (0.2,) * 3)


def smooth(count: int, seed: int) -> Dataset:
    rng = torch.Generator().manual_seed(seed)
    light = torch.rand(count, 1, 1, 1, generator=rng) * 0.6 + 0.2
    coarse = light + 0.15 * torch.randn(count, 3, 4, 4, generator=rng)
    fine = 0.01 * torch.randn(count, *SHAPE, generator=rng)
    inputs = (interpolate(coarse, SHAPE[1:], mode="bicubic") + fine).clamp(0, 1)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    return Dataset("smooth", inputs, labels, tuple("abcdefghij"))


def played(name: str, policy: Policy | None = None, noise: float = 0.0):
    """The guard's verdict at the first round, and how many of 64 images the server reads."""
    case = STUDIED[name]
    training = case.training(TRAINING)

    def make() -> Host:
        return Host(case.kind, SHAPE, CLASSES, UNITS)

    rng = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = make()
    private = smooth(64, 3)
    batch = Batch(private.inputs, private.labels)
    guard = Guard(make, training, scale=SCALE, policy=policy, secret=b"ours")
    record = record_of(batch.inputs, SCALE)
    honest = guard.check(model.state_dict(), batch, first=True)
    assert honest.decision == "ACCEPT", str(honest)
    read = case.tamper(model, record.entering(smooth(1000, 4).inputs), training, rng)
    verdict = guard.check(model.state_dict(), batch, first=True)
    update = train(setting(model, batch, scale=SCALE), batch, training, rng).update
    spread = noise * norm(update) / math.sqrt(sum(v.numel() for v in update.values()))
    update = {n: v + spread * torch.randn(v.shape, generator=rng) for n, v in update.items()}
    guess = record.leaving(read(update).float()).clamp(0, 1)
    pairs = metrics.assign.optimal(guess, batch.inputs)
    psnr = metrics.psnr(guess[pairs[pairs >= 0]], batch.inputs[pairs >= 0])
    return verdict, int((psnr > 50).sum())


CAUGHT = [name for name in STUDIED if name != "brightest tenth only"]


@pytest.mark.parametrize("name", CAUGHT)
def test_what_an_earlier_guard_accepted_is_refused(name):
    verdict, read = played(name)
    assert read >= (10 if name == "scattered" else 25)
    assert not verdict.train
    assert {d.tensor for d in verdict.fired if d.means == "reject"} <= {
        "first.weight", "first.bias", None
    }  # fmt: skip
    by = {d.test for d in verdict.fired}
    assert ("isolation" if "buffers" in name else "bins") in by
    assert "coverage" not in verdict.untested


def test_a_checkerboard_is_refused_with_the_warm_up_too():
    verdict, _ = played("checkerboard", Policy(warm_up=WarmUp()))
    assert "bins" in {d.test for d in verdict.fired}


@pytest.mark.parametrize("name", ["row-scaled, padded", "leaky ReLU as host", "x @ W as host"])
def test_the_self_audit_counts_what_rescaled_units_give_away(name):
    verdict, read = played(name)
    said = next(d.score for d in verdict.detections if d.test == "isolation") * 64
    assert abs(said - read) <= 6


def test_the_self_audit_can_say_more_than_a_server_reads():
    """It knows which records are where; a server that scattered its thresholds does not."""
    verdict, read = played("scattered")
    said = next(d.score for d in verdict.detections if d.test == "isolation") * 64
    assert said > read + 6


def test_a_known_limit_is_a_server_that_asks_for_little():
    """Fewer records than a tenth, each round anew: nothing fires; the exposure says how many."""
    verdict, read = played("brightest tenth only")
    assert verdict.decision == "ACCEPT"
    assert 1 <= read <= 6
    assert verdict.exposure.startswith(("about 1 of", "about 2 of", "about 3 of", "about 4 of",
                                        "about 5 of", "about 6 of"))  # fmt: skip


def test_noise_of_a_tenth_of_the_update_takes_the_exact_images_away():
    _, read = played("row-scaled, padded")
    _, left = played("row-scaled, padded", noise=0.1)
    assert read >= 25
    assert left <= 3


def test_where_the_layer_is_hidden_from_the_probe_the_verdict_says_so():
    """x · W, then a sum: no product that the probe knows."""

    class Hidden(Host):
        def forward(self, x):
            first = self.first.weight.T  # (units, inputs)
            z = (x.flatten(1)[:, None, :] * first).sum(-1) + self.first.bias
            return self.head(self.act(self.second(self.act(z))))

    def make() -> Host:
        return Hidden("product", SHAPE, CLASSES, 64)

    private = smooth(64, 3)
    batch = Batch(private.inputs, private.labels)
    case = replace(STUDIED["x @ W as host"], share=0.9)
    model = make()
    public = record_of(batch.inputs, SCALE).entering(smooth(500, 4).inputs)
    case.tamper(model, public, TRAINING, torch.Generator().manual_seed(1))
    verdict = Guard(make, TRAINING, scale=SCALE).check(model.state_dict(), batch, first=True)
    assert "first.weight" in verdict.untested["coverage"]
    strict = Policy(require=("batch", "memory", "coverage"))
    verdict = Guard(make, TRAINING, scale=SCALE, policy=strict).check(
        model.state_dict(), batch, first=True
    )
    assert not verdict.train
