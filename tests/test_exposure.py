"""The exposure meter: counting on shapes, held against the algebra and the attack themselves."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakgauge import models
from leakgauge.attacks import Exposure, LayerExposure, exposure, separable
from leakgauge.attacks._limits import ZEROS, held, overlap_limit, rank_limit
from leakgauge.attacks._rays import sparse_rays
from leakgauge.attacks._span import common_maps, row_space, windows
from leakgauge.attacks._trace import Trace
from leakgauge.audit import Plan, exposures, parse
from leakgauge.audit.bench import Bench
from leakgauge.audit.cases import trials
from leakgauge.data.digits import digits
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import decay, train
from leakgauge.fl.model import setting
from leakgauge.threat import observe
from leakgauge.types import Batch, LocalTraining, ThreatModel

EVAL = LocalTraining(batch_size=4, batch_norm="eval")
AGGREGATE = ThreatModel(actor="aggregate")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def measured(
    model: nn.Module,
    training: LocalTraining = EVAL,
    records: Any = 4,
    shape: tuple[int, ...] = (1, 8, 8),
) -> Exposure:
    return exposure(setting(model, shape, 10), training, records)


def layer(found: Exposure, name: str) -> LayerExposure:
    return next(one for one in found.layers if one.name == name)


def small(outputs: int = 72, *behind: nn.Module) -> nn.Sequential:
    """Two convolutions, the second of 4 × 4 positions, and a head, on 8 × 8 digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, outputs, 3, padding=1),
        *(behind or [nn.BatchNorm2d(outputs)]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(outputs, 10),
    )


# Counting


@pytest.mark.parametrize(
    ("shape", "limit"),
    [
        ((512, 4608, 16, 1, False), 31),  # 16 · 32 = 512 is not below 512
        ((512, 4608, 16, 1, True), 32),  # 16 · 32 − 1 = 511 is
        ((512, 4608, 16, 16, True), 32),  # 16 · 33 − 16 = 512 is not
        ((512, 4608, 16, 17, True), 33),
        ((512, 4608, 16, 17, False), 31),  # only zero sums hide a direction
        ((512, 100, 16, 1, False), 6),  # the smaller side counts
        ((10, 84, 1, 1, False), 9),
        ((10, 84, 1, 1, True), 0),  # nothing tells what one position hides
        ((64, 576, 64, 1, False), 0),
        ((64, 576, 64, 1, True), 1),
    ],
)
def test_the_rank_counts(shape: tuple[int, int, int, int, bool], limit: int) -> None:
    outputs, inputs, positions, steps, centred = shape
    assert rank_limit(*shape) == limit
    for views in range(1, 40):  # the rule itself, said otherwise
        rank = positions * views - (steps if centred else 0)
        tells = rank < min(outputs, inputs) and not (centred and positions == 1)
        assert tells == (views <= limit)


def random_gradient(conv: nn.Conv2d, maps: Tensor) -> Tensor:
    seen = windows(maps, conv).flatten(0, 1)
    signals = torch.randn(conv.out_channels, len(seen), generator=seeded(1), dtype=torch.float64)
    return signals @ seen


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        ({"kernel_size": 3, "padding": 1}, 4),
        ({"kernel_size": 3}, 4),
        ({"kernel_size": 2}, 3),
        ({"kernel_size": 3, "stride": 2, "padding": 1}, 7),  # padding on both sides
        ({"kernel_size": 3, "stride": 2}, 7),
        ({"kernel_size": 5, "stride": 2, "padding": 2}, 8),
        ({"kernel_size": 3, "stride": 2, "padding": 1}, 8),  # padding on one side: the map may move
        ({"kernel_size": 2, "stride": 2, "padding": 1}, 6),
        ({"kernel_size": 3, "dilation": 2, "padding": 2}, 4),  # neighbours share no pixel
        ({"kernel_size": 3, "dilation": 2, "stride": 2}, 9),
    ],
    ids=str,
)
def test_windows_that_hold_each_other_are_those_that_single_out_the_maps(
    conv: dict[str, int], size: int
) -> None:
    layer = nn.Conv2d(24, 90, **conv)
    maps = torch.randn(2, 24, size, size, generator=seeded(), dtype=torch.float64).relu()
    found = overlap_limit(layer, size, size)
    values = [getattr(layer, k)[0] for k in ("kernel_size", "stride", "padding", "dilation")]
    assert (found > 0) == held(size, *values)
    positions = windows(maps, layer).shape[1]
    basis, _ = row_space(random_gradient(layer, maps), 2, positions)
    if found >= 2:
        assert common_maps(basis, layer, (24, size, size), 2)[0].shape[1] == 2
    else:
        with pytest.raises(NotApplicable, match="does not single out 2 maps"):
            common_maps(basis, layer, (24, size, size), 2)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (2, 2), (1, 2)])
def test_windows_without_overlap_hold_nothing(kernel: int, stride: int) -> None:
    assert not held(6, kernel, stride, 0, 1)
    assert overlap_limit(nn.Conv2d(24, 90, kernel, stride), 6, 6) == 0


@pytest.mark.parametrize(("channels", "enough"), [(16, True), (15, False)])
def test_overlap_gives_as_many_equations_as_it_must(channels: int, enough: bool) -> None:
    layer = nn.Conv2d(channels, 90, 2)
    maps = torch.randn(4, channels, 4, 4, generator=seeded(), dtype=torch.float64).relu()
    basis, _ = row_space(random_gradient(layer, maps), 4, 9)
    assert (overlap_limit(layer, 4, 4) >= 4) == enough
    if enough:
        common_maps(basis, layer, (channels, 4, 4), 4)
    else:
        with pytest.raises(NotApplicable, match="does not single out 4 maps"):
            common_maps(basis, layer, (channels, 4, 4), 4)


@pytest.mark.parametrize(
    ("channels", "kernel", "padding", "size"),
    [(5, 3, 1, 3), (4, 3, 1, 3), (9, 2, 0, 3), (16, 2, 0, 4)],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_overlap_also_tells_what_zero_sums_hide(
    channels: int, kernel: int, padding: int, size: int, steps: int
) -> None:
    """Unknown are windows, the same mean added to all; as many solutions as views, by brute force.
    The number of views at which that ends is the limit."""
    layer = nn.Conv2d(channels, 1, kernel, padding=padding)
    limit = overlap_limit(layer, size, size, steps, centred=True)
    pixel = torch.arange(1.0, size * size + 1, dtype=torch.float64).view(1, 1, size, size)
    seen = windows(pixel, layer)[0].long()
    positions, area = seen.shape
    agree = torch.eye(positions * area, dtype=torch.float64)
    for number in range(1, size * size + 1):
        alike = (seen.flatten() == number).double()
        if alike.any():
            agree -= torch.outer(alike, alike) / alike.sum()
    centre = torch.eye(positions, dtype=torch.float64) - 1 / positions
    free = torch.linalg.svd(centre).U[:, : positions - 1]  # windows that sum to zero
    same = torch.eye(area, dtype=torch.float64).repeat(positions, 1)
    hidden = agree @ same
    agree = agree - hidden @ torch.linalg.pinv(hidden, rtol=1e-9) @ agree

    def solutions(views: int) -> int:
        maps = torch.randn(views, channels, size, size, generator=seeded(), dtype=torch.float64)
        parts = [windows(part, layer).flatten(0, 1) for part in maps.tensor_split(steps)]
        rows = torch.cat([part - part.mean(0) for part in parts])
        rank = positions * views - steps
        basis = torch.linalg.svd(rows, full_matrices=False).Vh[:rank].T
        basis = basis.reshape(channels, area, rank)
        system = torch.einsum("qpa,car,pf->cqfr", agree.view(-1, positions, area), basis, free)
        system = system.reshape(-1, free.shape[1] * rank)
        return system.shape[1] - int(torch.linalg.matrix_rank(system, rtol=1e-10))

    most = min(limit, (channels * area - 1 + steps) // positions)  # and by the rank
    assert solutions(most) == most
    if most == limit:
        assert solutions(limit + 1) > limit + 1


@pytest.mark.parametrize(("records", "found"), [(7, 7), (21, 0)])
def test_too_many_records_for_the_zeros_of_a_map_are_not_found(records: int, found: int) -> None:
    """At a ninth of its 64 entries all of them, at a third none."""
    assert (records <= 64 // ZEROS) == (found > 0)
    maps = torch.randn(records, 64, generator=seeded(), dtype=torch.float64).relu()
    span = torch.linalg.qr(maps.T).Q
    if found:
        assert len(sparse_rays(span, records, seeded())) == found
    else:
        with pytest.raises(NotApplicable, match="no sparse non-negative map"):
            sparse_rays(span, records, seeded())


class Joined(nn.Module):
    """A convolution whose output enters batch norms alone, once joined to another and once added;
    with `past`, another layer sees it too."""

    def __init__(self, past: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv, self.other = nn.Conv2d(16, 80, 3, padding=1), nn.Conv2d(16, 80, 1)
        self.norm, self.wide = nn.BatchNorm2d(80), nn.BatchNorm2d(160)
        self.past = past
        self.head = nn.Linear(240, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        mine, other = self.conv(x), self.other(x)
        wide = self.wide(torch.cat([mine, other], 1)).relu()
        last = (mine + other if self.past else self.norm(mine + other)).relu()
        return self.head(torch.cat([wide, last], 1).mean((2, 3)))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("make", "name", "centred"),
    [
        (lambda: small(80), "2", True),
        (lambda: small(80, nn.Identity()), "2", False),
        (Joined, "conv", True),
        (lambda: Joined(past=True), "conv", False),
    ],
    ids=["norm", "no norm", "joined and added", "past the norm"],
)
def test_the_gradient_has_the_rank_that_is_counted(
    make: Any, name: str, centred: bool, mode: Any
) -> None:
    """Two steps with momentum and weight decay, in double precision."""
    model = make().double()
    training = LocalTraining(
        lr=0.05, batch_size=2, steps=2, momentum=0.9, weight_decay=0.01, batch_norm=mode
    )
    batch = Batch(torch.rand(4, 1, 8, 8, generator=seeded()).double(), torch.arange(4))
    update = train(setting(model, (1, 8, 8), 10), batch, training, seeded()).update
    weight = dict(model.named_parameters())[f"{name}.weight"].detach()
    gradient = update[f"{name}.weight"] - decay(training, 2) * weight
    values = torch.linalg.svdvals(gradient.flatten(1))
    rank = int((values > 1e-11 * values[0]).sum())
    assert rank == 16 * 4 - (2 if centred and mode == "train" else 0)
    trace = Trace(model, (1, 8, 8), train=mode == "train")
    node = next(node for node in trace.layers() if node.target == name)
    assert trace.centred(node) == (centred and mode == "train")


# Networks


@pytest.mark.parametrize(("name", "last"), [("resnet-10", "layer4.0"), ("resnet-18", "layer4.1")])
@pytest.mark.parametrize(
    ("training", "records", "views", "steps", "limit"),
    [
        ({"batch_size": 31, "batch_norm": "eval"}, 31, 31, 1, 31),
        ({"batch_size": 32, "batch_norm": "eval"}, 32, 32, 1, 31),
        ({"batch_size": 32}, 32, 32, 1, 32),
        ({"batch_size": 33}, 33, 33, 1, 32),
        ({"batch_size": 8, "steps": 4, "momentum": 0.9}, 32, 32, 4, 32),
        ({"batch_size": 4, "epochs": 2, "batch_norm": "eval"}, 16, 32, 8, 31),
        ({"batch_size": 2, "epochs": 2}, 17, 34, 18, 33),
    ],
)
def test_residual_networks(
    name: str, last: str, training: dict[str, Any], records: int, views: int, steps: int, limit: int
) -> None:
    model = models.make(name, shape=(3, 32, 32), classes=10, rng=seeded())
    found = measured(model, LocalTraining(**training), records, (3, 32, 32))
    assert (found.records, found.views, found.steps) == (records, views, steps)
    assert (found.layer, found.limit) == (f"{last}.conv2", limit)
    assert found.exposed == (views <= limit)
    best = layer(found, f"{last}.conv2")
    assert (best.positions, best.outputs, best.limit) == (16, 512, limit)
    assert "mixes" in layer(found, "fc").reason
    assert "pass signals around it" in layer(found, f"{last}.conv1").reason
    assert [one.name for one in found.layers][:1] == ["fc"]  # from the top


def test_lenet_and_perceptron() -> None:
    lenet = models.make(
        "lenet-5", shape=(3, 32, 32), classes=10, rng=seeded(), activation="relu", pool="max"
    )
    found = measured(lenet, shape=(3, 32, 32))
    limits = {one.name: one.limit for one in found.layers}
    # By the rank 9 and 119; by the zeros of its 120 inputs, 30 of the 83 that the rank allows.
    assert limits == {"fc3": 9, "fc2": 30, "fc1": 119, "conv2": 0, "conv1": 0}
    assert "144 windows" in layer(found, "conv2").reason
    assert "the image" in layer(found, "conv1").reason
    mlp = models.make("mlp", shape=(1, 8, 8), classes=10, rng=seeded(), hidden=[96, 20])
    assert {one.name: one.limit for one in measured(mlp).layers} == {"fc3": 5, "fc2": 19, "fc1": 0}


def test_a_smooth_activation_shows_one_record_alone() -> None:
    lenet = models.make("lenet-zhu", shape=(1, 8, 8), classes=10, rng=seeded())
    alone = measured(lenet, replace(EVAL, batch_size=1), 1)
    assert (alone.layer, alone.limit, alone.exposed) == ("fc.0", 1, True)
    assert not measured(lenet).exposed


def test_behind_an_aggregate_all_records_count() -> None:
    """And each step of each client hides a direction of its own."""
    model = small(80)
    training = replace(EVAL, batch_size=2, batch_norm="train")
    found = measured(model, training, [2, 2])
    assert (found.records, found.views, found.steps) == (4, 4, 2)
    assert found.limit == (80 - 1 + 2) // 16
    assert measured(model, training, [2] * 3).exposed is False


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.twice, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1).relu()
        return self.head(self.twice(self.twice(x).relu()).relu())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 9), nn.Linear(9, 40), nn.Linear(320, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x[:, 0]).relu())
        return self.head(x.relu().flatten(1).detach())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def frozen() -> nn.Module:
    model = small()
    model[2].weight.requires_grad_(False)
    return model


def grouped() -> nn.Module:
    model = small()
    model[2] = nn.Conv2d(48, 72, 3, padding=1, groups=2)
    return model


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (Tied, "twice", "shared with other layers"),
        (frozen, "2", "frozen"),
        (grouped, "2", "grouped"),
        (Tokens, "second", "reached by no signal"),
        (lambda: small(16), "2", "one record alone has 16 windows"),
        (lambda: small(72, nn.GroupNorm(72, 72)), "2", "mixed before the next activation"),
        (lambda: small(72, nn.LayerNorm([72, 4, 4])), "2", "mixed before the next activation"),
    ],
)
def test_layers_that_tell_nothing_say_why(make: Any, name: str, words: str) -> None:
    found = layer(measured(make()), name)
    assert found.limit == 0
    assert words in found.reason


def test_a_linear_layer_at_several_positions_has_no_overlap() -> None:
    class Alike(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            x = self.second(self.first(x[:, 0]).relu())
            return self.head(x.relu().flatten(1))

    found = layer(measured(Alike()), "second")
    assert (found.positions, found.outputs, found.limit) == (8, 40, 0)
    wide = Alike()
    wide.first, wide.second = nn.Linear(8, 60), nn.Linear(60, 40)
    assert "overlap too little" in layer(measured(wide), "second").reason


def test_a_batch_norm_behind_a_linear_layer_hides_what_records_share() -> None:
    def make() -> nn.Module:
        norm = nn.BatchNorm1d(30)
        parts = (nn.Flatten(), nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 30), norm, nn.ReLU())
        return nn.Sequential(*parts, nn.Linear(30, 10))

    found = measured(make(), replace(EVAL, batch_norm="train"))
    assert "hides what its records have in common" in layer(found, "3").reason
    assert layer(measured(make()), "3").limit == 20


@pytest.mark.parametrize(
    ("model", "training", "words"),
    [
        (small(), replace(EVAL, optimiser="adam"), "rescales"),
        (small(72, nn.Dropout(0.5)), replace(EVAL, dropout="replayed"), "dropout"),
        (Branching(), EVAL, "torch.fx cannot trace"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), EVAL, "no layer of the model"),
        (Tokens(), EVAL, "no signal runs back"),
    ],
)
def test_models_and_trainings_that_tell_nothing_say_why(
    model: nn.Module, training: LocalTraining, words: str
) -> None:
    if words == "no signal runs back":
        model = nn.Sequential(model, Stopped())
    found = measured(model, training)
    assert (found.exposed, found.limit, found.layer) == (False, 0, None)
    assert words in found.reason
    assert "\n" not in found.reason


class Stopped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_dropout_that_is_off_hides_nothing() -> None:
    assert measured(small(72, nn.Dropout(0.5)), EVAL).limit == 4


def test_tokens_are_no_pictures() -> None:
    embedding = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(32, 10))
    found = exposure(setting(embedding, torch.zeros(2, 4).long(), 10), EVAL, 4)
    assert "it reads pictures" in found.reason


def test_the_model_is_left_alone() -> None:
    model = small()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured(model, replace(EVAL, batch_norm="train"))
    assert model.training
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# The real thing


def perceptron() -> nn.Module:
    return models.make("mlp", shape=(1, 8, 8), classes=10, rng=seeded(), hidden=[512])


@pytest.mark.parametrize(
    ("make", "limit", "mode"),
    [
        (small, 4, "eval"),
        (lambda: small(80), 5, "train"),
        (
            lambda: models.make("mlp", shape=(1, 8, 8), classes=10, rng=seeded(), hidden=[512]),
            9,
            "eval",
        ),
    ],
    ids=["convolution", "train mode", "head"],
)
@pytest.mark.parametrize("above", [0, 1])
def test_the_attack_reads_as_many_records_as_the_meter_says(
    make: Any, limit: int, mode: Any, above: int
) -> None:
    model, records = make(), limit + above
    training = LocalTraining(batch_size=records, batch_norm=mode)
    round_ = simulate(Scenario(lambda: model, digits(), training), seeded(3))
    seen = observe(round_, ThreatModel())
    found = exposure(seen.setting, training, records)
    assert (found.limit, found.exposed) == (limit, not above)
    if above:
        with pytest.raises(NotApplicable, match="no layer of this model tells its records apart"):
            separable(seen, seeded())
    else:
        read = separable(seen, seeded())
        assert str(read.layer.target) == found.layer
        assert sorted(read.labels.tolist()) == sorted(round_.truths[0].labels.tolist())


# A plan


def planned(
    data: str = '"digits"', training: str = "batch_size = 2", actor: str = "server", more: str = ""
) -> Plan:
    text = f"""
        [federation]
        data = {data}
        model = {{ name = "mlp", hidden = [64] }}
        {more}
        training = {{ {training} }}
        [threat]
        actor = "{actor}"
        [[attack]]
        name = "analytic"
    """
    return parse(tomllib.loads(text), "plan", Path.cwd())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(2, 2, 1)]),
        ({"training": "batch_size = 2, epochs = 3", "more": "records = 5"}, [(5, 15, 9)]),
        ({"actor": "aggregate", "more": "clients = 3"}, [(6, 6, 3)]),
        ({"actor": "client", "more": "clients = 3\nparticipants = 2"}, [(4, 4, 2)]),
        ({"more": "clients = 2"}, [(2, 2, 1)]),
    ],
)
def test_a_plan_is_measured_as_its_attacker_sees_it(
    options: dict[str, str], expected: list[tuple[int, int, int]]
) -> None:
    found = exposures(planned(**options))
    assert [(one.records, one.views, one.steps) for one in found] == expected
    assert {one.limit for one in found} == {9}


def test_clients_of_different_sizes_are_measured_at_both_ends() -> None:
    plan = planned(
        more='clients = 3\nrecords = "all"\npartition = { name = "dirichlet", alpha = 0.5 }',
        training="batch_size = 2, epochs = 1",
    )
    round_ = Bench(plan, Path.cwd()).simulated(trials(plan)[0])
    found = exposures(plan)
    assert [one.records for one in found] == [min(round_.sizes), max(round_.sizes)]
    together = exposures(replace(plan, document=replace(plan.document, threat=AGGREGATE)))
    assert [one.records for one in together] == [sum(round_.sizes)]
