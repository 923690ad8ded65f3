"""The search from a decoder's images to those that explain the activations of a round."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakgauge as lg
from leakgauge.attacks import _finish
from leakgauge.attacks._finish import finish, levelled, stored, stretched
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable
from leakgauge.records import Images

SHAPE = (3, 16, 16)
NODE = "layer1_0_act2"
RECORD = Images(SHAPE, (0.45,), (0.25,))


def network(seed: int, width: float = 0.25, norm: str = "batch") -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return lg.models.make("resnet-10", shape=SHAPE, classes=10, rng=rng, width=width, norm=norm)


def images(count: int, seed: int = 1) -> Tensor:
    """Smooth random pictures between black and white, as they enter the model."""
    rng = torch.Generator().manual_seed(seed)
    coarse = 2.4 * torch.rand(count, 3, 6, 6, generator=rng) - 1.2
    return nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear")


def blurred(truth: Tensor, seed: int = 2) -> Tensor:
    """What a decoder might give: less than the truth, orthogonal to what it lacks."""
    rng = torch.Generator().manual_seed(seed)
    soft = nn.functional.avg_pool2d(truth, 3, 1, 1, count_include_pad=False)
    soft = soft + 0.2 * torch.randn(truth.shape, generator=rng)
    return soft * (soft * truth).sum() / soft.square().sum()


def values(trace: Trace, batch: Tensor, node: str = NODE) -> Tensor:
    at = trace.named(node)
    with torch.no_grad():
        found: Tensor = trace.forward(batch.double(), [at])[at]
    return found


def off(guess: Tensor, truth: Tensor) -> float:
    return float((guess - truth).norm() / truth.norm())


def affinely_off(guess: Tensor, truth: Tensor) -> float:
    """What is left when the contrast of all is set right."""
    return off(guess * (guess * truth).sum() / guess.square().sum(), truth)


def test_finds_a_batch_in_train_mode_up_to_a_scale_of_its_activations() -> None:
    trace, truth = Trace(network(0), SHAPE, train=True), images(4)
    begin = blurred(truth)
    one = [torch.arange(4)]
    heard: list[float] = []

    def listen(misfit: float) -> bool:
        heard.append(misfit)
        return True

    found, misfits = finish(
        [trace],
        one,
        NODE,
        0.01 * values(trace, truth),
        begin,
        RECORD,
        free_scale=True,
        go_on=listen,
    )
    assert off(begin, truth) > 0.2
    assert affinely_off(found, truth) < 1e-3
    assert misfits.max() < 1e-6
    assert off(found, truth) < 0.02  # contrast is that of the start
    assert heard[-1] < 1e-5 * heard[0]
    assert len(heard) <= 600
    twice, _ = finish(
        [trace], one, NODE, values(trace, truth), 0.7 * begin, RECORD, free_scale=True
    )
    share = float((twice * truth).sum() / truth.square().sum())
    assert share == pytest.approx(0.7, abs=0.05)


def test_finds_a_batch_in_eval_mode_with_its_contrast() -> None:
    trace, truth = Trace(network(0), SHAPE), images(3)
    wrong = 0.8 * blurred(truth)  # its contrast is not taken: the activations tell it
    value = values(trace, truth)
    found, misfits = finish(
        [trace], [torch.arange(3)], NODE, value, wrong, RECORD, free_scale=False
    )
    assert off(found, truth) < 1e-3
    assert misfits.max() < 1e-6


def test_pixels_of_8_bits_tell_the_contrast() -> None:
    trace = Trace(network(0), SHAPE, train=True)
    pixels = (RECORD.leaving(images(4)).clamp(0, 1) * 255).round() / 255
    truth = RECORD.entering(pixels)
    begin = 0.9 * blurred(truth)
    one = [torch.arange(4)]
    found, _ = finish([trace], one, NODE, values(trace, truth), begin, RECORD, free_scale=True)
    assert off(found, truth) < 2e-6  # as they were stored


def test_pixels_stay_between_black_and_white() -> None:
    """A start of too much contrast is told by them."""
    trace, truth = Trace(network(0), SHAPE, train=True), images(4)
    begin, one = 2 * blurred(truth), [torch.arange(4)]
    found, _ = finish([trace], one, NODE, values(trace, truth), begin, RECORD, free_scale=True)
    share = float((found * truth).sum() / truth.square().sum())
    assert 1.2 < share < 1.8  # 1.5: the darkest pixel of these is 0.15
    shown = RECORD.leaving(found)
    assert ((shown < 0) | (shown > 1)).double().mean() < 0.002


def test_pixels_are_set_to_their_levels_only_without_a_doubt() -> None:
    pixels = (RECORD.leaving(images(4)).clamp(0, 1) * 255).round() / 255
    truth = RECORD.entering(pixels)
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(truth.shape, generator=rng) / 255 / 0.25  # a level, as it enters
    assert off(levelled(truth + 0.05 * noise, RECORD), truth) < 1e-6
    doubtful = truth + 0.15 * noise
    assert torch.equal(levelled(doubtful, RECORD), doubtful)
    assert torch.equal(levelled(images(4), RECORD), images(4))


def test_activations_that_single_no_image_out_give_a_smooth_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known to a few per cent, they are met about as well by rough images."""
    trace, truth = Trace(network(0), SHAPE, train=True), images(4)
    value = values(trace, truth)
    rng = torch.Generator().manual_seed(4)
    value = value + 0.3 * (value > 0) * torch.randn(value.shape, generator=rng).double()
    begin, one = blurred(truth), [torch.arange(4)]
    found, misfits = finish([trace], one, NODE, value, begin, RECORD, free_scale=True)
    assert misfits.min() > 1e-5
    monkeypatch.setattr(_finish, "EXACT", 1.0)
    rough, _ = finish([trace], one, NODE, value, begin, RECORD, free_scale=True)
    assert total_variation(found) < total_variation(rough)


def test_a_search_that_was_cut_short_near_the_images_goes_on() -> None:
    trace, truth = Trace(network(0), SHAPE, train=True), images(4)
    value, begin, one = values(trace, truth), blurred(truth), [torch.arange(4)]
    heard: list[float] = []

    def listen(misfit: float) -> bool:
        heard.append(misfit)
        return True

    found, misfits = finish(
        [trace], one, NODE, value, begin, RECORD,
        free_scale=True, evaluations=60, go_on=listen,
    )  # fmt: skip
    assert heard[59] < _finish.EXACT
    assert misfits.max() < 0.1 * heard[59]
    assert 70 < len(heard) < 190
    assert affinely_off(found, truth) < 1e-3


@pytest.mark.parametrize("singled_out", [True, False])
def test_a_search_that_stuck_ends_from_the_smooth_images(
    singled_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where those nearly explain the values; and if what follows does, else they are shown."""
    trace, truth = Trace(network(0), SHAPE, train=True), images(4)
    value, one = values(trace, truth), [torch.arange(4)]
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(6))
    stuck, smooth = truth + 0.1 * noise, truth + 2e-3 * noise
    sharp = truth if singled_out else truth + 1.5e-3 * noise
    begun: list[tuple[Tensor, float]] = []

    def searched(
        misses: Any, start: Tensor, evaluations: int, go_on: Any, smoothed: float = 0.0
    ) -> tuple[Tensor, int]:
        begun.append((start, smoothed))
        return (smooth if smoothed else stuck if len(begun) == 1 else sharp), 1

    monkeypatch.setattr(_finish, "_searched", searched)
    begin = blurred(truth)
    found, _ = finish([trace], one, NODE, value, begin, RECORD, free_scale=True)
    assert [weight for _, weight in begun] == [0.0, *_finish.SMOOTH, 0.0]
    assert begun[1][0] is not stuck
    assert begun[-1][0] is smooth
    assert affinely_off(found, truth) == pytest.approx(affinely_off(
        truth if singled_out else smooth, truth), abs=1e-5)  # fmt: skip


def test_contrast_is_read_from_pixels_of_8_bits_alone() -> None:
    pixels = (RECORD.leaving(images(4)).clamp(0, 1) * 255).round() / 255
    truth = RECORD.entering(pixels)
    for share in (0.7, 0.98, 1.0, 1.3):
        assert stored(truth / share, RECORD) == pytest.approx(share, rel=1e-5)
    assert stored(images(4), RECORD) == 1.0  # these were never stored
    assert stored(truth + 0.02 * torch.randn(truth.shape), RECORD) == 1.0
    assert stored(torch.zeros_like(truth), RECORD) == 1.0


def test_group_norms_leave_the_contrast_of_each_record_open() -> None:
    trace = Trace(network(0, norm="group"), SHAPE)
    pixels = (RECORD.leaving(images(3)).clamp(0, 1) * 255).round() / 255
    truth = RECORD.entering(pixels)
    each = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1, 1)  # how large activations are is not known
    begin = blurred(truth) * torch.tensor([0.9, 1.1, 0.8]).view(3, 1, 1, 1)
    found, misfits = finish(
        [trace], [torch.arange(3)], NODE, each * values(trace, truth), begin, RECORD,
        free_scale=True,
    )  # fmt: skip
    assert misfits.max() < 1e-6
    assert off(found, truth) < 2e-6  # as they were stored


def test_contrast_that_nothing_tells_fills_the_range_of_pixels() -> None:
    """Of each image; with pixels of 8 bits, exactly."""
    dull = 0.3 * images(2)
    found = stretched(dull, RECORD)
    for one, was in zip(found, dull, strict=True):
        assert affinely_off(one, was) < 1e-5
        shown = RECORD.leaving(one)
        reach = max(-float(shown.min()), float(shown.max()) - 1)
        assert reach == pytest.approx(0.0, abs=1e-5)
    pixels = (RECORD.leaving(images(2)).clamp(0, 1) * 255).round() / 255
    truth = RECORD.entering(pixels)
    each = torch.tensor([0.7, 0.9]).view(2, 1, 1, 1)
    assert off(stretched(each * truth, RECORD), truth) < 2e-6


def test_every_step_has_its_own_weights_and_its_own_batch() -> None:
    traces = [Trace(network(seed), SHAPE, train=True) for seed in (0, 1)]
    truth = images(6)
    truth[[1, 3, 5]] *= 0.4  # another batch, with other statistics
    groups = [torch.tensor([0, 2, 4]), torch.tensor([5, 1, 3])]
    value = torch.zeros(6, *traces[0].shape[traces[0].named(NODE)], dtype=torch.float64)
    for trace, group in zip(traces, groups, strict=True):
        value[group] = values(trace, truth[group])
    begin = truth.clone()
    for group in groups:
        begin[group] = blurred(truth[group])
    found, misfits = finish(traces, groups, NODE, value, begin, RECORD, free_scale=True)
    assert misfits.max() < 1e-5
    for group in groups:
        assert affinely_off(found[group], truth[group]) < 5e-3
        assert off(found[group], truth[group]) < 0.03


@pytest.mark.parametrize("free", [False, True])
def test_a_spoilt_record_is_told_by_its_misfit_and_spoils_no_other(free: bool) -> None:
    trace, truth, node = Trace(network(0, 0.5), SHAPE), images(3), "layer2_0_act2"
    value = values(trace, truth, node)
    value[1] = value[1].flip(-1).roll(3, 0)  # no image gives these
    found, misfits = finish(
        [trace], [torch.arange(3)], node, value, blurred(truth), RECORD, free_scale=free
    )
    assert misfits[1] > 1e-2
    assert misfits[[0, 2]].max() < 1e-6
    assert affinely_off(found[[0, 2]], truth[[0, 2]]) < 5e-3


def test_inactive_entries_tell_too() -> None:
    # Eight numbers, of which each ReLU shows the positive ones: what is inactive is not positive.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(8))
    trace = Trace(model, (2, 2, 2))
    node = next(n.name for n in trace.nodes if trace.kind[n] == "relu")
    truth = torch.tensor([1.0, -1, 2, -2, 3, -3, 4, -4]).view(1, 2, 2, 2)
    value = values(trace, truth, node)
    begin = torch.full_like(truth, 0.5)
    begin[0, 1] = -0.5  # some of the inactive stand above zero, some below
    found, misfits = finish(
        [trace], [torch.arange(1)], node, value, begin, RECORD, free_scale=False
    )
    active = truth > 0
    assert torch.allclose(found[active], truth[active], atol=1e-3)
    assert (found[~active] < 1e-3).all()
    assert misfits.max() < 1e-6
    assert torch.allclose(found[~active & (begin < 0)], torch.tensor(-0.5))  # they explain it


def test_time_ends_it() -> None:
    trace, truth = Trace(network(0), SHAPE, train=True), images(3)
    calls: list[float] = []

    def five(misfit: float) -> bool:
        calls.append(misfit)
        return len(calls) < 5

    value, begin = values(trace, truth), blurred(truth)
    found, misfits = finish(
        [trace], [torch.arange(3)], NODE, value, begin, RECORD, free_scale=True, go_on=five
    )
    assert len(calls) == 5
    assert found.isfinite().all()
    assert misfits.isfinite().all()


def test_refusals_say_what_to_do() -> None:
    trace, truth = Trace(network(0), SHAPE, train=True), images(3)
    value = values(trace, truth)
    with pytest.raises(InputError, match=r"every record in one group.*\[0, 1, 1\]"):
        finish([trace], [torch.tensor([0, 1, 1])], NODE, value, truth, RECORD, free_scale=True)
    with pytest.raises(InputError, match="3 values, 2 starts"):
        finish([trace], [torch.arange(3)], NODE, value, truth[:2], RECORD, free_scale=True)

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.head = nn.ReLU(), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.act((x > 1).to(x.dtype)).flatten(1))
            return out

    cut = Trace(Cut(), (3, 2, 2))
    node = next(n.name for n in cut.nodes if cut.kind[n] == "relu")
    small = torch.rand(2, 3, 2, 2) * 4
    value = values(cut, small, node)
    with pytest.raises(NotApplicable, match="no derivative leads from 'act' back to the image"):
        finish([cut], [torch.arange(2)], node, value, small, RECORD, free_scale=False)
