"""Detectors that read the weights alone: structure, continuity, head invariant, static tests."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import models
from leakgauge.detectors import (
    DETECTORS,
    Continuity,
    FirstConv,
    HeadInvariant,
    Replay,
    Structure,
    Weights,
    fires,
    snapshots,
)
from leakgauge.detectors._layers import digest
from leakgauge.detectors.first_conv import ratio
from leakgauge.detectors.weights import duplicate_share
from leakgauge.fl import aggregate
from leakgauge.fl.local import train
from leakgauge.tensors import parameters
from leakgauge.types import Batch, Detection, History, LocalTraining, Received

TRAINING = LocalTraining(lr=0.05, batch_size=4, steps=3)


def mlp(seed: int = 0, hidden: tuple[int, ...] = (128, 64), side: int = 8) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return models.make("mlp", shape=(3, side, side), classes=10, rng=rng, hidden=hidden)


def received(model, fresh=None, **options) -> Received:
    options.setdefault("training", TRAINING)
    return Received(model.state_dict(), fresh or model, model, **options)


def inspected(detector, *args, **options) -> dict[str, Detection]:
    found = detector.inspect(received(*args, **options), torch.Generator().manual_seed(0))
    return {one.test: one for one in found}


def imprint(model: nn.Module) -> nn.Module:
    """Robbing the Fed: one functional, thresholds, and one column repeated after it."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.fc1.weight.fill_(1 / model.fc1.in_features)
        model.fc1.bias.copy_(-torch.linspace(0.2, 0.8, model.fc1.out_features))
        model.fc2.weight.copy_(model.fc2.weight[:, :1].expand_as(model.fc2.weight))
    return model


def fished(model: nn.Module, c: int = 3) -> nn.Module:
    """Fishing for class c: no other row, large biases elsewhere."""
    model = copy.deepcopy(model)
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        others = torch.arange(head.out_features) != c
        head.weight[others] = 0.0
        head.bias[others] = 1000.0
    return model


# --- the contract ---------------------------------------------------------------------------------


def hard_case() -> Received:
    """A manipulated model with data and history, and modes, gradients, buffers to leave alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(3, 8, 3),
                bn=nn.BatchNorm2d(8),
                act=nn.ReLU(inplace=True),
                flat=nn.Flatten(),
                fc1=nn.Linear(288, 32),
                act1=nn.ReLU(inplace=True),
                drop=nn.Dropout(0.5),
                fc2=nn.Linear(32, 10),
            )
        )
        batch = Batch(torch.rand(40, 3, 8, 8), torch.arange(40) % 10)
        before = {n: v.clone() for n, v in net.state_dict().items()}
    net.train()
    net.bn.eval()
    training = LocalTraining(lr=0.05, batch_size=8, dropout="replayed")
    own = {n: 0.1 for n, _ in net.named_parameters()}
    taken = snapshots(net, batch, training)
    sent = fished(net)
    digests = (digest(sent.state_dict()), digest(before))
    history = History(before, 3, own, snapshots=(taken,) * 3, digests=digests)
    for p in (*net.parameters(), *sent.parameters()):
        p.grad = torch.ones_like(p)
    return Received(
        sent.state_dict(), net, sent, training, batch, history, lambda: copy.deepcopy(net)
    )


@pytest.mark.parametrize("name", DETECTORS)
def test_nothing_is_changed_and_the_same_seed_gives_the_same(name):
    case = hard_case()
    held = [copy.deepcopy(m.state_dict()) for m in (case.model, case.fresh)]
    modes = [[x.training for x in m.modules()] for m in (case.model, case.fresh)]
    hooks = sum(len(m._forward_hooks) for m in case.model.modules())
    torch.manual_seed(5)
    chance = torch.get_rng_state()
    first, second = (
        DETECTORS[name]().inspect(case, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert first == second
    assert first
    assert torch.equal(torch.get_rng_state(), chance)
    for model, state, mode in zip((case.model, case.fresh), held, modes, strict=True):
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
        assert [x.training for x in model.modules()] == mode
        assert all(p.requires_grad for p in model.parameters())
        assert all((p.grad == 1).all() for p in model.parameters())
    assert sum(len(m._forward_hooks) for m in case.model.modules()) == hooks


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detection_says_what_and_why(name):
    for found in DETECTORS[name]().inspect(hard_case(), torch.Generator().manual_seed(0)):
        assert len(found.reason) > 20
        assert found.means in ("reject", "exposed", "report")
        if found.tensor is not None:
            assert any(found.tensor.startswith(n) for n in ("conv", "bn", "fc1", "fc2"))


@pytest.mark.parametrize("name", DETECTORS)
def test_thresholds_are_frozen_options(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        DETECTORS[name]().threshold = 1.0


@pytest.mark.parametrize("name", DETECTORS)
def test_without_a_model_only_the_structure_is_tested(name, rng):
    case = dataclasses.replace(hard_case(), model=None)
    found = DETECTORS[name]().inspect(case, rng)
    assert bool(found) == (name == "structure")


@pytest.mark.parametrize("name", DETECTORS)
def test_a_test_that_cannot_be_made_gives_no_detection(name, rng):
    model = mlp()
    found = DETECTORS[name]().inspect(received(model), rng)
    assert {d.test for d in found} <= {
        "structure", "duplicate-rows", "zero-rows", "near-zero-entries", "bias-dominance",
        "stable-rank", "magnitude-pairs",
    }  # fmt: skip


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_work(name, dtype, rng):
    case = hard_case()
    model, fresh = copy.deepcopy(case.model).to(dtype), copy.deepcopy(case.fresh).to(dtype)
    assert case.history is not None
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in case.history.state.items()}
    case = dataclasses.replace(
        case,
        state=model.state_dict(),
        model=model,
        fresh=fresh,
        history=dataclasses.replace(case.history, state=state),
        make=lambda: copy.deepcopy(fresh),
    )
    found = DETECTORS[name]().inspect(case, rng)
    half = dtype != torch.float64
    assert bool(found) == (not (name == "head-invariant" and half))


@pytest.mark.parametrize("name", DETECTORS)
def test_nan_weights_never_crash_and_never_pass_unseen(name, rng):
    case = hard_case()
    assert case.model is not None
    with torch.no_grad():
        case.model.fc1.weight[3, 5] = math.nan
    found = DETECTORS[name]().inspect(case, rng)
    if name in ("structure", "continuity", "probe"):
        assert any(fires(d) for d in found)


def test_a_score_that_is_no_number_fires():
    assert fires(Detection("x", math.nan, 1.0, "reject", ""))
    assert fires(Detection("x", 1.1, 1.0, "reject", ""))
    assert not fires(Detection("x", 1.0, 1.0, "reject", ""))


# --- structure ------------------------------------------------------------------------------------


class Trap(Tensor):
    """Looks like a tensor; any use of it is an accident."""

    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise AssertionError("code of the server ran")


class Strange(dict):
    def __iter__(self):
        raise AssertionError("code of the server ran")


class Key:
    def __hash__(self):
        return hash("fc1.weight")

    def __eq__(self, other):
        raise AssertionError("code of the server ran")


def spoilt(change) -> dict:
    state = dict(mlp(hidden=(16,)).state_dict())
    change(state)
    return state


def _storage_gone(state):
    value = state["fc1.weight"].clone()
    value.untyped_storage().resize_(0)
    state["fc1.weight"] = value


def _with(name, make):
    def change(state):
        state[name] = make(state[name])

    return change


BROKEN = {
    "missing": (lambda s: s.pop("fc1.weight"), "fc1.weight"),
    "extra": (lambda s: s.update({"imprint.weight": torch.ones(2)}), "imprint.weight"),
    "shape": (_with("fc1.weight", lambda v: v.T), "fc1.weight"),
    "dtype": (_with("fc2.bias", lambda v: v.to(torch.complex64)), "fc2.bias"),
    "whole numbers": (_with("fc2.bias", lambda v: v.long()), "fc2.bias"),
    "overflow": (_with("fc2.bias", lambda v: v.double() + 1e300), "fc2.bias"),
    "nan": (_with("fc1.bias", lambda v: v.clone().fill_(math.nan)), "fc1.bias"),
    "infinite": (_with("fc1.bias", lambda v: v.index_fill(0, torch.tensor(0), -math.inf)),
                 "fc1.bias"),
    "sparse": (_with("fc1.weight", Tensor.to_sparse), "fc1.weight"),
    "meta": (_with("fc1.weight", lambda v: v.to("meta")), "fc1.weight"),
    "quantised": (_with("fc1.weight", lambda v: torch.quantize_per_tensor(v, 1, 0, torch.qint8)),
                  "fc1.weight"),
    "lazy": (_with("fc1.weight", lambda v: nn.UninitializedParameter()), "fc1.weight"),
    "subclass": (_with("fc1.weight", lambda v: v.as_subclass(Trap)), "fc1.weight"),
    "list": (_with("fc1.weight", Tensor.tolist), "fc1.weight"),
    "none": (_with("fc1.weight", lambda v: None), "fc1.weight"),
    "no memory": (_storage_gone, "fc1.weight"),
    "tied": (lambda s: s.update({"fc2.bias": s["fc1.bias"][:10]}), "bias"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_state_is_rejected_by_name(fault, rng):
    change, key = BROKEN[fault]
    fresh = mlp(hidden=(16,))
    (found,) = Structure().inspect(Received(spoilt(change), fresh, None, TRAINING), rng)
    assert fires(found)
    assert found.means == "reject"
    assert key in str(found.tensor)
    assert repr(found.tensor) in found.reason


@pytest.mark.parametrize(
    "state", [None, 3, [1], Strange(), {Key(): 1}, {3: torch.ones(1)}, "fc1", nn.Linear(1, 1)]
)
def test_what_is_no_state_at_all_is_rejected(state, rng):
    (found,) = Structure().inspect(Received(state, mlp(), None, TRAINING), rng)
    assert fires(found)


@pytest.mark.parametrize("name", ["mlp", "resnet-10", "vit-small", "lenet-5"])
def test_an_honest_state_has_no_fault(name, rng):
    one, two = (
        models.make(name, shape=(3, 16, 16), classes=10, rng=torch.Generator().manual_seed(s))
        for s in (0, 1)
    )
    (found,) = Structure().inspect(Received(one.state_dict(), two, None, TRAINING), rng)
    assert (found.score, fires(found)) == (0.0, False)


def test_large_values_are_finite_though_their_sum_is_not(rng):
    model = mlp(hidden=(16,))
    with torch.no_grad():
        model.fc1.weight.fill_(3e38)
    (found,) = Structure().inspect(received(model), rng)
    assert not fires(found)


def test_slices_of_one_buffer_are_not_tied(rng):
    model = mlp(hidden=(16,))
    flat = torch.cat([v.flatten() for v in model.state_dict().values()])
    state, at = {}, 0
    for name, value in model.state_dict().items():
        state[name] = flat[at : at + value.numel()].view(value.shape)
        at += value.numel()
    (found,) = Structure().inspect(Received(state, mlp(1, hidden=(16,)), None, TRAINING), rng)
    assert not fires(found)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = self.one


def test_tied_weights_of_the_network_must_agree(rng):
    fresh = Tied()
    apart = {n: v.clone() for n, v in fresh.state_dict().items()}
    (found,) = Structure().inspect(Received(apart, fresh, None, TRAINING), rng)
    assert not fires(found)
    apart["two.weight"][0, 0] += 1
    (found,) = Structure().inspect(Received(apart, fresh, None, TRAINING), rng)
    assert (fires(found), found.tensor) == (True, "two.weight")


# --- continuity -----------------------------------------------------------------------------------


def one_weight(value: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def moved(to: float, **memory) -> float:
    memory = {"rounds": 1, "own": {"weight": 0.1}} | memory
    history = History({"weight": torch.tensor([[1.0]])}, **memory)
    return inspected(Continuity(), one_weight(to), history=history)["continuity"].score


def test_continuity_by_hand():
    assert moved(1.3) == pytest.approx(3.0, rel=1e-4)  # own update .1
    assert moved(1.3, missed=3) == pytest.approx(1.0, rel=1e-4)
    assert moved(1.3, own={}) == pytest.approx(0.3 / (1e-4 + 1e-8), rel=1e-4)  # the floor
    assert moved(1.0) == 0.0


def drifted(to: float, **memory) -> dict[str, Detection]:
    anchor, since = {"weight": torch.tensor([[0.5]])}, {"weight": 0.4}
    memory = {"rounds": 9, "own": {"weight": 0.1}, "anchor": anchor, "since": since} | memory
    history = History({"weight": torch.tensor([[1.0]])}, **memory)
    return inspected(Continuity(), one_weight(to), history=history)


def test_drift_by_hand():
    """From .5 to 1.3 where the own updates since then sum up to .4."""
    assert drifted(1.3, age=5)["drift"].score == pytest.approx(2.0, rel=1e-4)
    assert drifted(1.3, age=5, missed=5)["drift"].score == pytest.approx(1.0, rel=1e-4)
    assert not fires(drifted(1.69, age=5)["drift"])
    assert fires(drifted(1.71, age=5)["drift"])
    assert "drift" not in drifted(1.3, age=1)  # the second round after the anchor
    assert "drift" in drifted(1.3, age=2)
    assert "drift" in drifted(1.3, age=0, missed=3)
    assert "over the last 6 rounds" in drifted(1.3, age=5)["drift"].reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_half_precision_is_no_step(dtype):
    """A network that did not move, sent in half precision."""
    model = mlp(hidden=(16,))
    history = History(copy.deepcopy(model.state_dict()), 1, {})
    half = {n: v.to(dtype) for n, v in model.state_dict().items()}
    model.load_state_dict(half)
    case = Received(half, model, model, TRAINING, history=history)
    (found,) = Continuity().inspect(case, torch.Generator())
    assert 0 < found.score < 1
    (found,) = Continuity().inspect(
        dataclasses.replace(case, state=model.state_dict()), torch.Generator()
    )
    assert found.score > 1


def test_continuity_names_the_tensor_that_jumped():
    model = mlp(hidden=(16,))
    sent = copy.deepcopy(model)
    with torch.no_grad():
        sent.fc2.bias += 1.0
    history = History(model.state_dict(), 1, {n: 0.05 for n, _ in model.named_parameters()})
    found = inspected(Continuity(), sent, history=history)["continuity"]
    assert found.tensor == "fc2.bias"
    assert found.score == pytest.approx(math.sqrt(10) / 0.05, rel=1e-3)
    assert fires(found)


def test_running_statistics_are_compared_where_the_own_ones_are_known(model):
    own = {n: 0.1 for n, _ in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    model.norm.running_mean += 100
    history = History(state, 1, own)
    assert inspected(Continuity(), model, history=history)["continuity"].score == 0.0
    history = History(state, 1, own | {"norm.running_mean": 0.1})
    found = inspected(Continuity(), model, history=history)["continuity"]
    assert (fires(found), found.tensor) == (True, "norm.running_mean")


@pytest.mark.parametrize("value", [0.0, -1e-3])
def test_a_running_variance_must_be_above_zero(model, rng, value):
    fresh = copy.deepcopy(model)
    model.norm.running_var[1] = value
    case = received(model, fresh)
    (found,) = Structure().inspect(case, rng)
    assert (fires(found), found.tensor) == (True, "norm.running_var")
    known = copy.deepcopy(model.state_dict())
    known["norm.running_var"][1] = 1e-38  # of a channel that is dead
    (found,) = Structure().inspect(dataclasses.replace(case, history=History(known, 1, {})), rng)
    assert fires(found) == (value < 0)


def test_other_kinds_of_number_are_taken_if_they_say_the_same(model, rng):
    state = {
        n: v.half() if v.is_floating_point() else v.double() + 7 for n, v in
        model.state_dict().items()
    }  # fmt: skip
    (found,) = Structure().inspect(Received(state, model, None, TRAINING), rng)
    assert not fires(found)
    assert "were converted (from float16)" in found.reason
    state["norm.num_batches_tracked"] += 0.5
    (found,) = Structure().inspect(Received(state, model, None, TRAINING), rng)
    assert (fires(found), found.tensor) == (True, "norm.num_batches_tracked")


def replayed(*digests: str) -> Detection:
    model = one_weight(1.0)
    marks = [digest(one_weight(v).state_dict()) for v in digests]
    history = History(model.state_dict(), 3, {}, digests=tuple(marks))
    return inspected(Replay(), model, history=history)["replay"]


def test_a_model_that_comes_back_is_told_from_one_that_is_sent_again():
    assert not fires(replayed(0.0, 2.0))
    again, old = replayed(0.0, 1.0), replayed(1.0, 0.0)
    assert (fires(again), again.means) == (True, "report")
    assert (fires(old), old.means, old.score) == (True, "reject", 2.0)


def test_a_parameter_that_was_not_there_before_fires():
    history = History({"bias": torch.zeros(1)}, 1, {})
    found = inspected(Continuity(), one_weight(1.0), history=history)["continuity"]
    assert (fires(found), found.tensor) == (True, "weight")


# --- head invariant -------------------------------------------------------------------------------


def rounds(model: nn.Module, training: LocalTraining, count: int = 6) -> nn.Module:
    """Honest FedAvg of three clients."""
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        batches = [
            Batch(torch.rand(12, 3, 8, 8, generator=rng), torch.randint(10, (12,), generator=rng))
            for _ in range(3)
        ]
        updates = [train(setting(model, batch), batch, training, rng).update for batch in batches]
        after = aggregate.step(parameters(model), updates, (0.5, 0.3, 0.2), 1.0)
        model.load_state_dict(after, strict=False)
    return model


def drift(training: LocalTraining, tested: LocalTraining) -> dict[str, Detection]:
    model = mlp()
    history = History(model.state_dict(), 1, {})
    batch = Batch(torch.rand(4, 3, 8, 8), torch.arange(4))
    sent = rounds(model, training)
    return inspected(HeadInvariant(), sent, history=history, training=tested, batch=batch)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_honest_sgd_keeps_the_head_invariant(momentum):
    training = dataclasses.replace(TRAINING, momentum=momentum)
    found = drift(training, training)["head-invariant"]
    assert found.score < 1e-5
    assert found.tensor in ("fc3.weight", "fc3.bias")


@pytest.mark.parametrize("change", [{"optimiser": "adam", "lr": 0.003}, {"weight_decay": 0.05}])
def test_adam_and_weight_decay_break_it_and_are_not_tested(change):
    training = dataclasses.replace(TRAINING, **change)
    assert drift(training, TRAINING)["head-invariant"].score > 1e-3
    assert not drift(training, training)


def test_fishing_breaks_it():
    model = mlp()
    batch = Batch(torch.rand(4, 3, 8, 8), torch.arange(4))
    history = History(copy.deepcopy(model.state_dict()), 1, {})
    found = inspected(HeadInvariant(), fished(model), history=history, batch=batch)
    assert fires(found["head-invariant"])


def test_a_zero_initialised_head_keeps_it():
    model = mlp()
    nn.init.zeros_(model.fc3.weight)
    nn.init.zeros_(model.fc3.bias)
    batch = Batch(torch.rand(4, 3, 8, 8), torch.arange(4))
    history = History(copy.deepcopy(model.state_dict()), 1, {})
    for sent in (model, rounds(model, TRAINING)):
        found = inspected(HeadInvariant(), sent, history=history, batch=batch)
        assert found["head-invariant"].score < 1e-5


# --- static tests ---------------------------------------------------------------------------------


def test_an_imprint_is_all_duplicates():
    found = inspected(Weights(), imprint(mlp()), mlp(1))
    assert found["duplicate-rows"].score == 1.0
    assert found["duplicate-rows"].tensor == "fc1.weight"
    assert found["bias-dominance"].score == pytest.approx(0.8 * math.sqrt(192), rel=1e-4)
    assert fires(found["stable-rank"])


def test_noise_on_the_imprint_leaves_the_next_layer():
    model = imprint(mlp())
    with torch.no_grad():
        model.fc1.weight += 0.05 * torch.randn(model.fc1.weight.shape)
    found = inspected(Weights(), model, mlp(1))["duplicate-rows"]
    assert (found.score, found.tensor) == (1.0, "fc2.weight")


def test_fishing_leaves_zero_rows():
    found = inspected(Weights(), fished(mlp()), mlp(1))
    assert found["zero-rows"].score == pytest.approx(0.9)
    assert found["near-zero-entries"].score == pytest.approx(0.9)
    assert found["bias-dominance"].score == math.inf
    assert {d.tensor for d in found.values() if fires(d)} == {"fc3.weight"}


def trap_rows(units: int, inputs: int, rng: torch.Generator, scale: float = 0.95) -> Tensor:
    rows = torch.empty(units, inputs)
    for row in rows:
        order = torch.randperm(inputs, generator=rng)
        size = torch.randn(inputs // 2, generator=rng).abs() * 0.5
        row[order[: inputs // 2]] = -size
        row[order[inputs // 2 :]] = scale * size[torch.randperm(inputs // 2, generator=rng)]
    return rows


def test_exact_trap_weights_pair_and_honest_rows_do_not(rng):
    model = mlp()
    with torch.no_grad():
        model.fc1.weight.copy_(trap_rows(128, 192, rng))
    found = inspected(Weights(), model, mlp(1))
    assert found["magnitude-pairs"].score == 1.0
    assert found["magnitude-pairs"].means == "reject"
    assert inspected(Weights(), mlp(), mlp(1))["magnitude-pairs"].score == 0.0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("shape", [(60, 16), (200, 50), (300, 600), (700, 100)])
def test_duplicate_share_equals_all_pairs(share, shape, rng):
    rows = torch.randn(shape, generator=rng)
    copies = int(share * len(rows))
    signs = torch.randint(2, (copies, 1), generator=rng) * 2 - 1
    noise = 0.05 * torch.randn(copies, shape[1], generator=rng)
    rows[:copies] = (rows[:1] + noise) * signs * torch.rand(copies, 1, generator=rng)
    unit = rows / rows.norm(dim=1, keepdim=True)
    near = (unit @ unit.T).abs().fill_diagonal_(0) > 0.98
    found = duplicate_share(rows, rng, 0.98, 10_000)
    assert found == pytest.approx(float(near.any(1).double().mean()))
    assert duplicate_share(rows, rng, 0.98, 256) == pytest.approx(found, abs=0.1)


def test_one_third_of_a_joint_attention_matrix_is_tested_apart():
    model = models.make(
        "vit-small", shape=(3, 16, 16), classes=10, rng=torch.Generator().manual_seed(0),
        dim=32, depth=1, heads=2,
    )  # fmt: skip
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:32] = 0.0  # queries
    found = inspected(Weights(), model, fresh)["zero-rows"]
    assert (found.score, found.tensor) == (1.0, "blocks.0.attn.qkv.weight[0:32]")


def test_marks_of_the_own_fresh_network_are_exempt():
    model, fresh = mlp(), mlp(1)
    for one in (model, fresh):
        nn.init.zeros_(one.fc3.weight)
    assert not any(fires(d) for d in inspected(Weights(), model, fresh).values())
    assert fires(inspected(Weights(), model, mlp(1))["zero-rows"])


def thinned(model: nn.Module, *names: str) -> nn.Module:
    """90 % of the weights in these layers, by size, set to zero."""
    model = copy.deepcopy(model)
    for name, value in model.named_parameters():
        if name in names:
            cut = value.detach().abs().flatten().kthvalue(int(0.9 * value.numel())).values
            value.data[value.detach().abs() <= cut] = 0.0
    return model


def test_marks_of_the_last_accepted_model_are_exempt():
    model = thinned(mlp(), "fc1.weight")
    assert fires(inspected(Weights(), model, mlp(1))["near-zero-entries"])
    history = History(model.state_dict(), 1, {})
    found = inspected(Weights(), model, mlp(1), history=history)
    assert not any(fires(d) for d in found.values())


def test_zeros_all_over_the_network_are_pruning_and_in_one_layer_are_not():
    one = inspected(Weights(), thinned(mlp(), "fc1.weight"), mlp(1))["near-zero-entries"]
    assert (fires(one), one.means) == (True, "reject")
    every = inspected(Weights(), thinned(mlp(), "fc1.weight", "fc2.weight", "fc3.weight"), mlp(1))
    assert {d.means for d in every.values() if fires(d)} == {"report"}


@pytest.mark.parametrize("name", ["cnn", "resnet-10", "lenet-5"])
def test_pruned_convolutions_are_not_rejected(name):
    rng = torch.Generator().manual_seed(0)
    model = models.make(name, shape=(3, 32, 32), classes=10, rng=rng, **SMALL[name])
    names = [n for n, p in model.named_parameters() if p.dim() > 1]
    thin = thinned(model, *names)
    for detector in (Weights(), FirstConv()):
        found = inspected(detector, thin, model)
        assert not [d for d in found.values() if fires(d) and d.means != "report"]


# --- first convolution ----------------------------------------------------------------------------


def test_first_conv_ratio_by_hand():
    rows = torch.tensor([[1.0, -2.0, 1.0], [0.0, 0.0, 0.0], [3.0, 1.0, -1.0]])
    assert ratio(rows) == pytest.approx(1.5)
    assert ratio(torch.eye(3)) == math.inf


def test_an_identity_convolution_fires_and_a_small_one_is_not_tested():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    fresh = copy.deepcopy(net)
    assert not fires(inspected(FirstConv(), net, fresh)["first-conv"])
    with torch.no_grad():
        net[0].weight.mul_(1e-3)[0, 0, 1, 1] = 1.0
    found = inspected(FirstConv(), net, fresh)["first-conv"]
    assert (fires(found), found.tensor) == (True, "0.weight")
    assert not inspected(FirstConv(), net, net)  # the own fresh network has it too
    assert not inspected(FirstConv(), nn.Conv2d(1, 8, 3), nn.Conv2d(1, 8, 3))
    assert not inspected(FirstConv(), mlp(), mlp())


# --- honest networks ------------------------------------------------------------------------------

SMALL = {
    "mlp": {}, "lenet-zhu": {}, "lenet-5": {}, "cnn": {}, "convnet": {"width": 0.125},
    "resnet-9": {"width": 0.125}, "resnet-10": {"width": 0.125}, "resnet-18": {"width": 0.125},
    "densenet-121": {}, "mobilenet-v2": {"width": 0.25},
    "vit-small": {"dim": 96, "depth": 2},
}  # fmt: skip


def test_every_network_that_is_small_enough_is_covered():
    assert set(models.MODELS) - set(SMALL) == {"resnet-34", "vit-base"}  # as resnet-18, vit-small


@pytest.mark.parametrize("name", SMALL)
def test_honest_fresh_networks_do_not_fire(name):
    seeds = 1 if name == "densenet-121" else 4
    for seed in range(seeds):
        model, fresh = (
            models.make(name, shape=(3, 32, 32), classes=10,
                        rng=torch.Generator().manual_seed(s), **SMALL[name])
            for s in (seed, 100)
        )  # fmt: skip
        for detector in (Structure(), Weights(), FirstConv()):
            found = inspected(detector, model, fresh)
            assert found or isinstance(detector, FirstConv)
            assert not [d for d in found.values() if fires(d)]
