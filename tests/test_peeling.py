"""Peeling through train-mode batch norm, held against a replay by torch.optim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from observed_client import (
    SETTINGS,
    any_affine,
    chain,
    client,
    compared,
    next_below,
    noisy,
    normal,
    one_step,
    peeled,
    resnet,
    seeded,
    separated,
    two_steps,
    within,
)
from torch import Tensor, fx, nn

from leakgauge.attacks._channels import MIXED, Mixed
from leakgauge.attacks._joined import joined_at
from leakgauge.attacks._known import Peeled, signals_of
from leakgauge.attacks._linear import most
from leakgauge.attacks._peeling import Watch, _counted, _fewest, _solved, _stands_out
from leakgauge.attacks._separation import gradient_of
from leakgauge.attacks._steps import biases
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.separate_and_decode import SeparateAndDecode
from leakgauge.data.photos import photos
from leakgauge.types import (
    Kept,
    Named,
    Resources,
    Target,
)


def test_a_fixed_point_is_reached_in_a_fraction_of_the_rounds() -> None:
    """x ← Ax + b with the slowest part shrinking by a twentieth per round."""
    axes = torch.linalg.qr(normal(40, 40)).Q
    shrinks = torch.linspace(-0.3, 0.95, 40, dtype=torch.float64)
    shift, target = normal(8, 5, seed=1), torch.zeros(8, 5, dtype=torch.float64)

    def follow(x: Tensor) -> Tensor:
        return (axes @ (shrinks * (axes.T @ x.flatten()))).view(8, 5) + shift

    for _ in range(2000):
        target = follow(target)

    def rounds(mixed: Mixed | None) -> int:
        x = torch.zeros((), dtype=torch.float64)
        for number in range(1000):
            found = follow(x.expand(8, 5))
            x = found if mixed is None else mixed(x, found)
            if float((x - target).norm() / target.norm()) < 1e-9:
                return number
        raise AssertionError("it did not converge")

    mixed = Mixed()
    assert rounds(mixed) < rounds(None) / 3
    assert len(mixed.found) <= MIXED


def test_a_mixture_that_made_it_worse_is_forgotten() -> None:
    mixed = Mixed()
    tried, near, far = normal(6), normal(6, seed=1), 9 * normal(6, seed=2)
    mixed(tried, near)
    assert torch.equal(mixed(tried, far), far)
    assert len(mixed.found) == 1


def test_the_layer_below_is_peeled_in_train_mode() -> None:
    one, found = one_step()
    done = peeled(one, found, 2)
    assert [node.name for node in done.known] == ["layer4_0_act1", "layer3_0_act2", "layer3_0_act1"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))
    assert "as the time was up" in done.stopped


def test_activations_above_carry_on_where_gradients_are_too_few() -> None:
    """One pixel in four is seen by the middles of the windows alone, and by the branch."""
    one = client(resnet(width=0.25), 2)
    found = separated(one)
    done = peeled(one, found, 3)
    assert done.lowest.name == "layer2_0_act2"
    compared(found, done.known[done.lowest], one.truth("layer2_0_act2"))


@pytest.mark.parametrize(("enough", "lowest"), [(4096, "layer3_0_act1"), (4097, "layer2_0_act2")])
def test_equations_are_not_joined_once_enough_is_known(enough: int, lowest: str) -> None:
    """The gradients alone tell 64 × 8 × 8 values of every record."""
    one = client(resnet(width=0.25), 2)
    done = peeled(one, separated(one), 3, enough)
    assert done.lowest.name == lowest


def test_a_node_with_too_few_equations_is_refused_before_it_is_solved() -> None:
    one = client(resnet(width=0.25), 6)
    found = separated(one)
    done = peeled(one, found, 3)
    assert done.lowest.name == "layer3_0_act1"
    assert "0.42 equations for each of its unknowns, too few, also with what" in done.stopped
    assert peeled(one, found, 3, 4096).stopped.endswith("of its unknowns, too few")


class Skip(nn.Module):
    """A block with a skip, at 8 × 8 positions, then 4 × 4, for 16 × 16 images."""

    def __init__(self, width: int = 32, inner: int = 32) -> None:
        super().__init__()
        sizes = [(3, width, 2), (width, inner, 1), (inner, width, 1), (width, 96, 2), (96, 128, 1)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, s, 1, bias=False) for i, o, s in sizes)
            self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in sizes)
            self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.norms[0](self.convs[0](x)))
        x = torch.relu(self.norms[1](self.convs[1](first)))
        x = torch.relu(self.norms[2](self.convs[2](x)) + first)
        for conv, norm in zip(self.convs[3:], self.norms[3:], strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def test_activations_above_are_met_through_skips_and_norms_of_any_weight() -> None:
    """Three records: 1.5 equations of the gradients for each unknown, which alone do not do."""
    one = client(any_affine(Skip()), 3, size=16)
    found = separated(one)
    done = peeled(one, found, 3)
    trace = done.trace
    first = trace.named("relu")
    assert done.lowest is first
    compared(found, done.known.pop(first), one.truth("relu"))
    every = signals_of(done, first)
    joined = joined_at(done, first, every, _counted(done, first, every))
    assert joined is not None
    assert len(joined.skips) == 1


class Branch(nn.Module):
    """A block with a branch, from 8 × 8 to 4 × 4 positions, for 16 × 16 images."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        sizes = [(3, 8, 3, 2), (8, width, 3, 2), (width, width, 3, 1), (8, width, 1, 2)]
        sizes += [(width, 128, 3, 1)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convs = nn.ModuleList(
                nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
            self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.convs[0](x)))
        inner = torch.relu(self.norms[1](self.convs[1](x)))
        x = torch.relu(self.norms[2](self.convs[2](inner)) + self.norms[3](self.convs[3](x)))
        x = torch.relu(self.norms[4](self.convs[4](x)))
        return self.head(x.mean((2, 3)))


def test_activations_above_carry_on_in_every_step() -> None:
    """Each at its own weights: those of layers and norms, above and at the node, have moved."""
    model = any_affine(Branch())
    nn.init.ones_(model.norms[4].weight)
    nn.init.zeros_(model.norms[4].bias)
    one = client(model, 6, size=16, batch_size=3, steps=2, lr=0.05, **SETTINGS)
    found = separated(one)
    done = peeled(one, found, 2)
    first = done.trace.named("relu")
    assert done.lowest is first, done.stopped
    compared(found, done.known[first], one.truth("relu"))
    later = one.weights()[1]
    for name in ("convs.1.weight", "convs.3.weight", "norms.1.weight", "norms.3.bias"):
        moved = (later[name] - one.weights()[0][name]).norm()
        learnt = done.start.path.weights[1][name]
        assert float((learnt - later[name]).norm() / moved) < 1e-3
    del done.known[first]
    every = signals_of(done, first)
    counted = _counted(done, first, every)
    assert counted is not None
    assert counted < 1.02
    joined = joined_at(done, first, every, counted)
    assert joined is not None
    for told in joined.told:  # as they begin
        for step in found.steps:
            assert float(told.system.normal[:, step].sum((1, 2)).abs().max()) < 1e-9
        told.prepare(joined.value)
        assert torch.allclose(told.parts.sum(0), told.system.observed, atol=1e-12)


def test_skips_are_met_in_every_step() -> None:
    """Of the node alone: all above it is true, and so are the weights that act there."""
    one = client(any_affine(Skip(64, 28)), 4, size=16, batch_size=2, steps=2, lr=0.05, **SETTINGS)
    found = separated(one)
    pairs = compared(found, found.maps, one.truth(found.source.name))
    done = peeled(one, found, 0)
    for name in ("relu_2", "relu_1"):
        node = done.trace.named(name)
        value = found.maps.new_zeros(4, *done.trace.shape[node])
        for step, pair, true in zip(found.steps, pairs, one.truth(name), strict=True):
            value[step] = true[pair]
        done.known[node] = value
    for learnt, true_weights in zip(done.start.path.weights, one.weights(), strict=True):
        learnt.update({n: w for n, w in true_weights.items() if not n.startswith("convs.1")})
    first = done.trace.named("relu")
    solved = _solved(done, first)
    assert solved is not None
    assert solved[3]
    compared(found, solved[0], one.truth("relu"))


def test_a_wrong_mask_in_train_mode_is_put_right_and_no_other() -> None:
    """A wrong entry's signal is spread by the batch norm: what it leaves is no second one."""
    one, found = one_step()
    trace = one.trace()
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    spoilt = found.maps.clone()
    spoilt.view(-1)[spoilt.where(spoilt > 0, torch.inf).argmin()] = 0.0
    known, sure = {source: spoilt}, {source: torch.zeros_like(found.unsure)}
    solved = _solved(Peeled(trace, gradient_of(one.seen), own, known, sure), below)
    assert solved is not None
    assert torch.equal(known[source] > 0, found.maps > 0)
    assert solved[1] < 1e-5  # the residual


def test_a_row_that_no_mask_explains_keeps_its_masks() -> None:
    """What spoils a row may be something else: here its own gradient."""
    one, found = one_step()
    trace, gradient = one.trace(), dict(gradient_of(one.seen))
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    name = "layer4.0.conv1.weight"
    gradient[name] = gradient[name].clone()
    gradient[name][7] += normal(*gradient[name][7].shape) * gradient[name].std()
    known, sure = {source: found.maps.clone()}, {source: torch.zeros_like(found.unsure)}
    solved = _solved(Peeled(trace, gradient, own, known, sure), below)
    assert solved is not None
    assert solved[1] < 1e-5
    assert torch.equal(known[source] > 0, found.maps > 0)


def test_a_row_left_out_of_a_linear_layer_spoils_nothing() -> None:
    """Below linear layers, whose signals sum to anything, batch norm in train mode is peeled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = [nn.Flatten(), nn.Linear(128 * 16, 96), nn.ReLU(), nn.Linear(96, 10)]
    one = client(nn.Sequential(*list(chain())[:12], *head), 4, size=16)
    found = separated(one)
    assert found.layer.target == "15"
    unsure = torch.zeros_like(found.unsure)
    unsure[0] = True
    done = peeled(one, replace(found, unsure=unsure), 2)
    assert [node.name for node in done.known] == ["_14", "_11", "_8"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))


def test_a_row_may_stand_out_by_little() -> None:
    """Rows that were left out before do not count, however far they are off."""
    lack = torch.ones(20, 4, dtype=torch.float64)
    lack[3], lack[7] = 134.0, 9.0
    good = torch.ones(20, dtype=torch.bool)
    assert _stands_out(lack, good).nonzero().flatten().tolist() == [3]
    good[3] = False
    assert _stands_out(lack, good).nonzero().flatten().tolist() == [7]
    lack[7] = 2.0
    assert not _stands_out(lack, good).any()


def test_the_layer_below_is_peeled_over_steps() -> None:
    one, found = two_steps()
    done = peeled(one, found)
    assert done.lowest.name == "layer3_0_act2"
    compared(found, done.known[done.lowest], one.truth("layer3_0_act2"))
    first, later = one.weights()
    for name in ("layer4.0.conv1.weight", "layer4.0.downsample.0.weight"):
        moved = (later[name] - first[name]).norm()
        learnt = done.start.path.weights[1][name]
        assert float((learnt - later[name]).norm() / moved) < 1e-3


def test_what_a_client_that_sends_weights_shows_below() -> None:
    """Rounding hides gradients of batch norms, which zeros tell, and wrong masks among the rest."""
    one = client(resnet(), 6, sends="weights")
    found = separated(one)
    done = peeled(one, found, 2)
    assert [node.name for node in done.known] == ["layer4_0_act1", "layer3_0_act2", "layer3_0_act1"]
    for node, value in done.known.items():
        compared(found, value, one.truth(node.name))


def test_wrong_masks_are_put_right_under_noise() -> None:
    """Which moves activations by about as much as the separated maps are rough. Without that, by
    eight times as much or more."""
    one = noisy(one_step()[0], 1e-4)
    found = separated(one)
    done = peeled(one, found)
    assert done.lowest.name == "layer3_0_act2"
    (true,) = one.truth("layer3_0_act2")
    value = done.known[done.lowest].flatten(1)
    distance = torch.cdist(value, true.flatten(1)) / true.flatten(1).norm(dim=1)
    assert float(distance.min(1).values.max()) < 2 * found.rough


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: any_affine(resnet()), 32),
        (lambda: chain(), 16),
        (lambda: any_affine(chain()), 16),
        (lambda: chain(affine=False), 16),
        (lambda: resnet("resnet-18", 0.25), 32),
        (lambda: any_affine(resnet("resnet-18", 0.25)), 32),
    ],
    ids=["affine", "chain", "affine-chain", "no-affine", "identity-skip", "affine-identity-skip"],
)
def test_networks_of_other_shapes(model: Any, size: int) -> None:
    one = client(model(), 4, size=size)
    found = separated(one)
    done = peeled(one, found)
    assert len(done.known) == 2, done.stopped
    free = not any(biases(done.trace, done.gradient, node) for node in done.known)
    for node, value in done.known.items():
        (true,) = one.truth(node.name)
        if free:  # nothing tells the size of the whole batch
            value = value * (true.norm() / value.norm())
        compared(found, value, [true])
    (pair,) = compared(found, found.maps * (1 if not free else float(
        one.truth(found.source.name)[0].norm() / found.maps.norm())),
        one.truth(found.source.name))  # fmt: skip
    assert found.labels.tolist() == one.batch.labels[pair].tolist()


def test_rows_that_stand_out_do_not_count() -> None:
    left, truth = normal(40, 2), torch.tensor([2.0, -1.0], dtype=torch.float64)
    values = left @ truth
    values[:2] += 50.0
    found, misfit = most(left, values)
    assert torch.allclose(found, truth, atol=1e-12)
    assert misfit < 1e-12
    _, misfit = most(left, normal(40, seed=1))
    assert misfit > 0.3


def test_the_biases_before_a_relu() -> None:
    """Those of the batch norms that are added up in it, not those below the convolutions."""
    one, _ = one_step()
    trace, gradient = one.trace(), gradient_of(one.seen)

    def found(name: str) -> list[str]:
        node: fx.Node = trace.named(name)
        return sorted(biases(trace, gradient, node))

    assert found("layer4_0_act1") == ["layer4.0.bn1.bias"]
    assert found("layer3_0_act2") == ["layer3.0.bn2.bias", "layer3.0.downsample.1.bias"]


def test_the_time_that_is_left_counts_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("leakgauge.attacks._peeling.time.monotonic", lambda: now)
    watch = Watch(Resources(seconds=10), 1)
    now = 1009.0
    assert watch.open()
    assert not watch.notes
    now = 1011.0
    assert not watch.open()
    assert watch.notes == ["stopped by the time budget of 10 s"]


def test_a_wrong_row_of_small_signals_is_noticed() -> None:
    """It hardly shows in the residual of all rows."""
    one, found = one_step()
    trace, gradient = one.trace(), dict(gradient_of(one.seen))
    own = within(trace, found)
    source, below = own.source, next_below(trace, own.source)
    name = "layer4.0.conv1.weight"
    whole = gradient[name]
    spoilt = normal(*whole[7].shape)
    spoilt *= 2e-5 * whole.norm() / spoilt.norm()  # below the residual of rounding
    gradient[name] = whole.clone()
    gradient[name][7] += spoilt

    def solved(gradient: Named) -> Tensor:
        known, sure = {source: found.maps.clone()}, {source: torch.zeros_like(found.unsure)}
        made = _solved(Peeled(trace, gradient, own, known, sure), below)
        assert made is not None
        return made[0]

    right = solved(gradient | {name: whole})
    assert float((solved(gradient) - right).norm() / right.norm()) < 1e-6


def test_pixels_that_a_stride_shows_once_are_counted_by_themselves() -> None:
    """One of nine offsets, and a branch of one, see a quarter of the 8 × 8 pixels: 72 equations for
    the 16 of each record. Five records have enough equations in all, and too few there."""
    one = client(any_affine(Branch()), 5, size=16)
    found = separated(one)
    done = peeled(one, found, 2, enough=1)
    first = done.trace.named("relu")
    assert done.stopped.startswith("relu: its gradients give 0.90 equations")
    every = signals_of(done, first)
    assert _counted(done, first, every) == pytest.approx((9 + 1) * 36 / (64 * 5))
    assert _fewest(done, first, every) == pytest.approx(2 * 36 / (16 * 5))


def test_decoders_read_from_the_first_node_with_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another update may not be read further; so the rehearsal ends there, with what is below
    unsolved."""
    read: list[str] = []
    peeled: list[str] = []

    def solved(done: Peeled, node: fx.Node) -> Any:
        peeled.append(node.name)
        return _solved(done, node)

    def fit(trace: Trace, nodes: list[str], *given: Any, **options: Any) -> Kept:
        read.extend(nodes)
        return Kept(facts={})

    monkeypatch.setattr("leakgauge.attacks._peeling._solved", solved)
    monkeypatch.setattr("leakgauge.attacks.separate_and_decode.fit", fit)
    monkeypatch.setattr("leakgauge.attacks.separate_and_decode.ENOUGH", 1)
    one = client(resnet(width=0.25), 2)
    aim = Target(one.seen.setting, one.seen.training, 2, public=photos(size=32))
    made = SeparateAndDecode().prepare(aim, seeded())
    assert read == ["layer3_0_act2", "layer4_0_act1"]  # of 64 × 8 × 8 values, then of fewer
    assert made.kept is not None
    assert made.kept.facts["reach"] == peeled[-1] == "layer3_0_act2"
