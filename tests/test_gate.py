"""The gate: a recorded pass is the plain one, a replay keeps its choices whatever the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.attacks._gate import KINKS, Gate

Kink = Callable[[Tensor], Tensor]

# Every form of a piecewise-linear operation that the gate promises to catch.
HOMOGENEOUS: dict[str, Kink] = {
    "F.relu": F.relu,
    "F.relu, named input": lambda x: F.relu(input=x),
    "torch.relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "nn.ReLU": nn.ReLU(),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "F.leaky_relu, default slope": F.leaky_relu,
    "nn.LeakyReLU": nn.LeakyReLU(0.2),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.max_pool2d, overlapping and padded": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "F.max_pool2d, by position": lambda x: F.max_pool2d(x, (3, 2), (1, 2), (1, 0)),
    "F.max_pool2d, all options": lambda x: F.max_pool2d(
        x, kernel_size=2, stride=3, padding=1, dilation=2, ceil_mode=True, return_indices=False
    ),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2, stride=1),
    "nn.MaxPool2d": nn.MaxPool2d(3, stride=2, padding=1),
}
BANDS: dict[str, tuple[Kink, float, float]] = {
    "F.relu6": (F.relu6, 0, 6),
    "nn.ReLU6": (nn.ReLU6(), 0, 6),
    "F.hardtanh": (F.hardtanh, -1, 1),
    "F.hardtanh, own bounds": (lambda x: F.hardtanh(x, -2.0, 3.0), -2, 3),
    "F.hardtanh, named bounds": (lambda x: F.hardtanh(x, min_val=-2.0, max_val=3.0), -2, 3),
    "nn.Hardtanh": (nn.Hardtanh(-0.5, 4.0), -0.5, 4),
}
IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "F.relu": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu_": torch.relu_,
    "Tensor.relu_": lambda x: x.relu_(),
    "nn.ReLU": nn.ReLU(inplace=True),
    "F.relu6": lambda x: F.relu6(x, inplace=True),
    "nn.ReLU6": nn.ReLU6(inplace=True),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3, inplace=True),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.3),
    "nn.LeakyReLU": nn.LeakyReLU(0.2, inplace=True),
    "F.hardtanh": lambda x: F.hardtanh(x, -2.0, 3.0, inplace=True),
    "F.hardtanh_": lambda x: F.hardtanh_(x, -2.0, 3.0),
    "nn.Hardtanh": nn.Hardtanh(-0.5, 4.0, inplace=True),
}
PLAIN: dict[str, Kink] = HOMOGENEOUS | {name: kink for name, (kink, _, _) in BANDS.items()}


def values(seed: int = 0) -> Tensor:
    """(2, 3, 7, 6) in double precision, wide enough for every bound, with the bounds themselves."""
    x = 4 * torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(seed)).double()
    x.view(-1)[:8] = torch.tensor([0.0, -0.0, 6.0, -1.0, 1.0, -2.0, 3.0, -0.5])
    return x.requires_grad_()


def recorded(kink: Kink, x: Tensor) -> tuple[Gate, Tensor]:
    gate = Gate()
    with gate.record():
        y = kink(x)
    return gate, y


def by_input(y: Tensor, x: Tensor) -> Tensor:
    """Derivative of a sum in which every output counts differently."""
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0]


@pytest.mark.parametrize("name", PLAIN)
def test_recorded_and_replayed_passes_equal_the_plain_one(name: str) -> None:
    kink, x = PLAIN[name], values()
    plain = kink(x)
    gate, first = recorded(kink, x)
    with gate.replay():
        again = kink(x)
    assert torch.equal(first, plain)
    assert torch.equal(again, plain)
    assert torch.equal(by_input(first, x), by_input(plain, x))
    assert torch.equal(by_input(again, x), by_input(plain, x))


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_replay_makes_the_recorded_choices_on_other_values(name: str) -> None:
    kink, x, other = HOMOGENEOUS[name], values(0), values(1)
    gate, first = recorded(kink, x)

    def frozen(values: Tensor) -> Tensor:
        with gate.replay():
            return kink(values)

    elsewhere = frozen(other)
    # On −x a free kink would choose the other way; a frozen one is linear.
    assert torch.equal(frozen(-x), -first)
    assert not torch.equal(kink(-x), -first)
    assert torch.allclose(frozen(3 * other), 3 * elsewhere, rtol=1e-14)
    # Linear in its input, with the recorded Jacobian: ⟨weights, J·other⟩ = ⟨Jᵀ·weights, other⟩.
    weights = torch.arange(1.0, first.numel() + 1, dtype=first.dtype).view_as(first)
    assert torch.allclose((elsewhere * weights).sum(), (by_input(first, x) * other).sum())


@pytest.mark.parametrize("name", BANDS)
def test_replayed_band_stays_on_its_bound_and_lets_the_inside_move(name: str) -> None:
    kink, low, high = BANDS[name]
    x, other = values(0), 10 * values(1)
    gate, _ = recorded(kink, x)
    with gate.replay():
        replayed = kink(other)
    expected = torch.where(x <= low, low, torch.where(x >= high, high, other))
    assert torch.equal(replayed, expected)
    assert replayed.max() > high  # the recorded inside is not clamped again


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_overwrite_their_input_as_usual(name: str) -> None:
    operation = IN_PLACE[name]

    def shortcut(x: Tensor) -> Tensor:
        inner = 1 * x
        operation(inner)  # nobody takes the result: it is in `inner`, which the shortcut reads
        return 2 * inner + x

    x = values()
    plain = shortcut(x)
    gate, first = recorded(shortcut, x)
    with gate.replay():
        again = shortcut(x)
    with gate.replay():
        turned = shortcut(-x)
    for got in (first, again):
        assert torch.equal(got, plain)
        assert torch.equal(by_input(got, x), by_input(plain, x))
    inner, derivative = (plain - x) / 2, by_input(plain - x, x)
    weights = torch.arange(1.0, x.numel() + 1, dtype=x.dtype).view_as(x)
    moving = derivative != 0  # what was on a bound stays there; the rest is linear through zero
    expected = torch.where(moving, -(derivative / weights) * x - x, 2 * inner - x)
    assert torch.allclose(turned, expected)


def test_later_overwriting_of_the_output_does_not_change_the_choices() -> None:
    def shifted(x: Tensor) -> Tensor:
        y = F.relu6(x)
        y += 3  # allowed by autograd: hardtanh keeps its input
        return y

    x = values()
    gate, first = recorded(shifted, x)
    with gate.replay():
        again = shifted(x)
    assert torch.equal(first, F.relu6(x) + 3)
    assert torch.equal(again, first)


def test_a_gated_network_is_linear_in_the_weights_of_a_layer_and_an_ungated_one_is_not() -> None:
    rng = torch.Generator().manual_seed(0)
    x, head = torch.randn(4, 6, generator=rng).double(), torch.randn(5, generator=rng).double()
    w, step = (torch.randn(6, 5, generator=rng).double() for _ in range(2))
    gate = Gate()

    def network(weights: Tensor) -> Tensor:
        return torch.relu(x @ weights) @ head

    def frozen(weights: Tensor) -> Tensor:
        with gate.replay():
            return network(weights)

    with gate.record():
        here = network(w)
    mask = (x @ w > 0).double()
    assert torch.allclose(frozen(w + step) - here, (mask * (x @ step)) @ head)
    assert torch.allclose(frozen(w + 2 * step) - here, 2 * (frozen(w + step) - here))
    assert not torch.allclose(network(w + 2 * step) - here, 2 * (network(w + step) - here))


def test_choices_are_replayed_in_the_order_of_the_pass() -> None:
    def network(x: Tensor) -> Tensor:
        return F.leaky_relu(F.max_pool2d(torch.relu(x) - 1, 2), 0.1) + F.hardtanh(x.mean())

    x = values()
    gate, first = recorded(network, x)
    for _ in range(2):  # a replay can be repeated
        with gate.replay():
            assert torch.equal(network(x), first)


def test_a_new_recording_forgets_the_old_one() -> None:
    x = values()
    gate, _ = recorded(torch.relu, -x)
    with gate.record():
        torch.relu(x)
    with gate.replay():
        turned = torch.relu(-x)
    assert torch.equal(turned, -torch.relu(x))


def test_code_outside_the_gate_is_untouched_even_after_an_error() -> None:
    x = values()
    gate, _ = recorded(torch.relu, x)
    assert torch.equal(torch.relu(-x), (-x).clamp_min(0))
    with pytest.raises(ZeroDivisionError), gate.replay():
        raise ZeroDivisionError
    assert torch.equal(torch.relu(-x), (-x).clamp_min(0))


def test_operations_without_a_kink_pass_through() -> None:
    x = values()
    gate, _ = recorded(torch.relu, x)
    with gate.replay():
        got = torch.sigmoid(x), F.gelu(-x), F.max_pool2d(x, 2, return_indices=True)[1]
    expected = torch.sigmoid(x), F.gelu(-x), F.max_pool2d(x, 2, return_indices=True)[1]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_every_kink_is_caught_in_these_tests() -> None:
    caught: set[object] = set()

    class Spy(Gate):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            caught.add(func)
            return func(*args, **(kwargs or {}))

    for operation in (*PLAIN.values(), *IN_PLACE.values()):
        with Spy().record():
            operation(values() * 1)
    assert caught >= KINKS.keys()
