"""Several local steps under train-mode batch norm: who was in which, and at which weights."""

from __future__ import annotations

import math

import pytest
import torch
from observed_client import (
    EXACT,
    SETTINGS,
    client,
    normal,
    resnet,
    right,
    separated,
    two_steps,
)
from torch import Tensor, nn

from leakgauge.attacks._linear import supports
from leakgauge.attacks._path import Path
from leakgauge.attacks._separation import _learn_head
from leakgauge.attacks._steps import _Passed, passing, silent, together
from leakgauge.errors import NotApplicable
from leakgauge.types import (
    LocalTraining,
)


def test_every_appearance_is_read_at_the_weights_of_its_own_step() -> None:
    one, found = two_steps()
    right(one, found)
    sizes = [len(step) for step in found.steps]
    assert sizes == [3, 3]


def test_the_weights_of_a_later_step_are_learnt() -> None:
    one, found = two_steps()
    first, later = one.weights()
    for name in ("layer4.0.conv2.weight", "layer4.0.bn2.weight"):
        moved = (later[name] - first[name]).norm()
        assert torch.equal(found.path.weights[0][name], first[name])
        assert float((found.path.weights[1][name] - later[name]).norm() / moved) < 1e-3


def test_a_record_of_two_epochs_appears_twice() -> None:
    one = client(resnet(), 4, batch_size=4, epochs=2, lr=0.05, **SETTINGS)
    found = separated(one)
    assert len(found.maps) == 8
    right(one, found)
    first, second = one.truth(found.source.name)
    assert float((first - second).norm() / first.norm()) > 100 * EXACT  # they differ
    chosen = found.once(4)
    assert sorted(chosen.tolist()) == sorted(found.steps[0].tolist())
    assert sorted(found.labels[chosen].tolist()) == sorted(one.batch.labels.tolist())


def test_steps_of_different_sizes() -> None:
    one = client(resnet(), 5, batch_size=3, epochs=1)
    found = separated(one)
    assert [len(step) for step in found.steps] == [3, 2]
    right(one, found)


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_in_eval_mode(steps: int) -> None:
    """No batch norm ties the records of a step together: all come in one group."""
    one = client(resnet(), 2 * steps, batch_size=2, steps=steps, batch_norm="eval", **SETTINGS)
    found = separated(one)
    assert len(found.steps) == 1
    true = torch.cat(one.truth(found.source.name)).flatten(1)
    found_, true_ = (nn.functional.normalize(maps) for maps in (found.maps.flatten(1), true))
    cosines = found_ @ true_.T
    assert float((1 - cosines.max(1).values).max()) < 1e-8
    pair = cosines.argmax(1)
    assert sorted(pair.tolist()) == list(range(2 * steps))
    assert (
        found.labels.tolist()
        == torch.cat(one.rows())[pair].apply_(lambda row: int(one.batch.labels[row])).tolist()
    )


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.3}, SETTINGS])
def test_a_path_that_knows_every_part_is_that_of_torch(settings: dict[str, float]) -> None:
    training = LocalTraining(lr=0.1, **settings)  # type: ignore[arg-type]
    slopes = normal(4, 5)

    def walked(gradients: Tensor) -> list[Tensor]:
        weight = nn.Parameter(normal(5, seed=1))
        optimiser = torch.optim.SGD([weight], lr=training.lr, **settings)
        found = [weight.detach().clone()]
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimiser.step()
            found.append(weight.detach().clone())
        return found

    true = walked(slopes)
    parts = []
    for step in range(4):
        without = slopes.clone()
        without[step] = 0
        parts.append((walked(without)[-1] - true[-1]) / training.lr)
    known = torch.stack(parts)
    path = Path({"w": true[0]}, {"w": known.sum(0)}, training, 4)
    path.learn("w", known)
    for step in range(4):
        assert torch.allclose(path.weights[step]["w"], true[step], atol=1e-12)


def test_a_path_that_knows_nothing_gives_every_step_the_same_gradient() -> None:
    training = LocalTraining(lr=0.1, **SETTINGS)
    weight = nn.Parameter(normal(5, seed=1))
    optimiser = torch.optim.SGD([weight], lr=training.lr, **SETTINGS)  # type: ignore[arg-type]
    true = [weight.detach().clone()]
    for _ in range(3):
        weight.grad = normal(5)
        optimiser.step()
        true.append(weight.detach().clone())
    still = nn.Parameter(true[0].clone())
    optimiser = torch.optim.SGD([still], lr=training.lr, **SETTINGS)  # type: ignore[arg-type]
    for _ in range(3):
        still.grad = torch.zeros(5, dtype=torch.float64)
        optimiser.step()
    path = Path({"w": true[0]}, {"w": (still.detach() - true[-1]) / training.lr}, training, 3)
    for step in range(3):
        assert torch.allclose(path.weights[step]["w"], true[step], atol=1e-12)


def sums_to_zero(sizes: list[int]) -> Tensor:
    """Signals (N, 20, 6) of steps with so many records, in this order."""
    signals = normal(sum(sizes), 20, 6)
    for step in torch.split(torch.arange(len(signals)), sizes):
        signals[step] -= signals[step].mean((0, 2), keepdim=True)
    return signals


def test_records_of_one_step_are_told_by_their_sums() -> None:
    sizes = [3, 2]
    mixed = torch.tensor([4, 0, 3, 2, 1])
    amounts = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25], dtype=torch.float64)
    signals = (sums_to_zero(sizes) / amounts[:, None, None])[mixed]
    found, steps = together(signals, sizes)
    assert sorted(sorted(mixed[step].tolist()) for step in steps) == [[0, 1, 2], [3, 4]]
    for step in steps:
        ratio = found[step] / amounts[mixed[step]]
        assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-9)
        assert (found[step] > 0).all()


def test_one_step_gives_one_factor() -> None:
    amounts = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found, (step,) = together(sums_to_zero([3]) / amounts[:, None, None], [3])
    assert step.tolist() == [0, 1, 2]
    assert torch.allclose(found / found[0], amounts / amounts[0], rtol=1e-9)
    assert (found > 0).all()


def test_sums_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NotApplicable, match="do not add up to zero in 1 steps"):
        together(normal(4, 20, 6), [4])
    with pytest.raises(NotApplicable, match="do not add up to zero in 3 steps"):
        together(sums_to_zero([3, 2]), [2, 2, 1])
    with pytest.raises(NotApplicable, match=r"form steps of \[2, 3\], not \[1, 4\]"):
        together(sums_to_zero([3, 2]), [4, 1])
    signals = sums_to_zero([4])
    signals[2] *= -1
    with pytest.raises(NotApplicable, match="only with negative shares"):
        together(signals, [4])


def test_vectors_of_disjoint_supports_are_told_apart() -> None:
    truth = torch.zeros(7, 2, dtype=torch.float64)
    truth[[0, 3, 4], 0] = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    truth[[1, 6], 1] = torch.tensor([0.5, 2.0], dtype=torch.float64)
    truth /= truth.norm(dim=0)
    turned = truth @ torch.linalg.qr(normal(2, 2)).Q
    found = torch.stack(supports(turned), 1)
    assert torch.allclose(found, truth, atol=1e-12)  # each by the sign of its first entry


def test_the_line_of_most_zeros() -> None:
    u = normal(3, 60)
    shift, slope = normal(3, 1, seed=1), normal(3, 1, seed=2)
    y = normal(3, 60, seed=3)
    y[:, ::2] = 0.0
    found_shift, found_slope, far = silent(y - shift - slope * u, u, 4)
    assert torch.allclose(found_shift, shift, atol=1e-9)
    assert torch.allclose(found_slope, slope, atol=1e-9)
    assert float(far.max()) < 1e-9
    *_, far = silent(normal(3, 60, seed=4), u, 4)
    assert float(far.min()) > 0.05


def test_a_line_of_one_record_alone_is_not_that_of_zeros() -> None:
    """Under a mean over positions the active entries of a record all have one value."""
    u = normal(1, 32)
    y = torch.zeros(1, 32, dtype=torch.float64)
    y[0, :13], y[0, 20:29] = 1.0, -2.0  # 13 of the first 16, 9 of the others
    shift, slope, _ = silent(y - 0.3 - 0.7 * u, u, 2)
    assert float(shift) == pytest.approx(0.3)
    assert float(slope) == pytest.approx(0.7)


def few_zeros() -> tuple[Tensor, Tensor, Tensor]:
    """û, signals of four records, five in sixty of them zero, and what was sent to each record, of
    which only its factor is wrong."""
    u, sent = normal(3, 60), 1 + normal(3, 60, seed=3).abs()
    y = sent.clone()
    y[:, 3:60:12] = 0.0
    return u, y, sent * torch.tensor([0.8, 1.3, 0.9, 1.1]).double().repeat_interleave(15)


def test_the_line_of_few_zeros_is_told_by_what_was_sent() -> None:
    u, y, sent = few_zeros()
    x = y - 0.3 - 0.7 * u
    assert (silent(x, u, 4)[0] - 0.3).abs().min() > 0.1  # by its zeros alone it is not
    shift, slope, far = passing(x, u, sent, 4)
    assert torch.allclose(shift, torch.full_like(shift, 0.3), atol=1e-9)
    assert torch.allclose(slope, torch.full_like(slope, 0.7), atol=1e-9)
    assert float(far.max()) < 1e-9
    y[:, 3:60:12] = sent[:, 3:60:12]
    assert float(passing(sent - 0.3 - 0.7 * u, u, sent, 4)[2].min()) == math.inf  # no zeros


def test_only_lines_that_fit_nothing_are_found_anew() -> None:
    u, y, sent = few_zeros()
    shift, slope = torch.full((3, 1), 0.3).double(), torch.full((3, 1), 0.7).double()
    shift[1] += 1.0
    x = y - 0.3 - 0.7 * u
    x[2] = normal(60, seed=9)  # no line would fit
    one = _Passed(x, u, shift.clone(), slope.clone(), torch.ones(3).double())
    one.mend(sent, 4)
    assert torch.allclose(one.shift[:2], torch.full((2, 1), 0.3).double(), atol=1e-9)
    assert float(one.shift[0]) == float(shift[0])
    assert float(one.shift[2]) == float(shift[2])
    assert float(one.far[1]) < 1e-9
    assert one.far[[0, 2]].tolist() == [1.0, 1.0]


def test_lines_against_what_was_sent_are_not_found() -> None:
    """Where a record's entries are all active and another's all zero, two lines fit: the one by
    which records got what was sent counts."""
    u = normal(1, 20)
    y = torch.zeros(1, 20, dtype=torch.float64)
    y[0, :10] = 2.0
    sent = torch.ones(1, 20, dtype=torch.float64)
    shift, slope, _ = passing(y - 0.3 - 0.7 * u, u, sent, 2)
    assert float(shift) == pytest.approx(0.3)
    assert float(slope) == pytest.approx(0.7)


def test_the_head_of_later_steps_follows_from_the_errors() -> None:
    """Where all records have the same features, what each step added is exact."""
    one = client(resnet(), 6, batch_size=3, steps=2, **SETTINGS)
    trace = one.trace()
    errors = normal(6, 10).softmax(1)
    errors[torch.arange(6), torch.arange(6)] -= 1
    features = normal(1, 256, seed=1).abs().expand(6, -1)
    steps = (torch.arange(3), torch.arange(3, 6))
    gradient = {"fc.weight": errors.T @ features, "fc.bias": errors.sum(0)}
    path = Path(trace.parameters(), gradient, one.seen.training, 2)
    wanted = Path(trace.parameters(), gradient, one.seen.training, 2)
    wanted.learn("fc.weight", torch.stack([errors[s].T @ features[s] for s in steps]))
    wanted.learn("fc.bias", torch.stack([errors[s].sum(0) for s in steps]))
    _learn_head(trace, errors, steps, path)
    for name in gradient:
        assert torch.allclose(path.weights[1][name], wanted.weights[1][name], atol=1e-9)
