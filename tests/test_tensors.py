"""Arithmetic by name, by hand; and the check of what comes from outside, in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leakgauge.errors import InputError
from leakgauge.tensors import check_like, norm, parameters, scale, subtract, weighted_mean

ONE = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([[3.0]])}
TWO = {"b": torch.tensor([[5.0]]), "w": torch.tensor([0.5, 4.0])}  # another order, same names


def listed(named: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in named.items()}


def test_arithmetic_goes_by_name():
    assert listed(subtract(ONE, TWO)) == {"w": [0.5, -6.0], "b": [-2.0]}
    assert listed(scale(ONE, -2.0)) == {"w": [-2.0, 4.0], "b": [-6.0]}
    assert listed(weighted_mean([ONE, TWO], [0.25, 0.75])) == {"w": [0.625, 2.5], "b": [4.5]}
    assert listed(weighted_mean([ONE], [1.0])) == listed(ONE)


def test_the_inputs_stay_as_they_were():
    before = listed(ONE), listed(TWO)
    for result in (subtract(ONE, TWO), scale(ONE, 1.0), weighted_mean([ONE, TWO], [1.0, 0.0])):
        for value in result.values():
            value.add_(1)
    assert (listed(ONE), listed(TWO)) == before


def test_parameters_are_detached_copies_of_what_is_trained(model):
    model.conv.requires_grad_(False)
    named = parameters(model)
    assert set(named) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert torch.equal(named["head.bias"], model.head.bias)
    assert not any(value.requires_grad for value in named.values())
    named["head.bias"].zero_()
    assert model.head.bias.any()


def test_norm_is_that_of_the_whole_vector_in_double_precision():
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, -4.0]])}) == 5.0
    rng = torch.Generator().manual_seed(0)
    wide = {
        "a": torch.randn(300_000, generator=rng),
        "b": 1e-3 * torch.randn(300_000, generator=rng),
    }
    flat = np.concatenate([value.numpy().astype(np.float64) for value in wide.values()])
    assert math.isclose(norm(wide), np.linalg.norm(flat), rel_tol=1e-12)


def test_a_fitting_update_passes(model):
    check_like(parameters(model), model.named_parameters(), "the update")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u.pop("head.bias"),
         "the update: no entry for parameter 'head.bias'.* each of the model's 6 parameters"),
        (lambda u: u.update({"heads.bias": u.pop("head.bias")}),
         r"no entry for parameter 'head.bias' \(it has 'heads.bias': is it from another model\?\)"),
        (lambda u: u.update({"head.bias": torch.zeros(5)}),
         r"'head.bias' has shape \(5,\), the model's parameter has \(4,\)\. Was it made with"),
        (lambda u: u["head.bias"][:2].fill_(math.nan),
         r"'head.bias' holds 2 NaN or infinite values of 4\. Did local training diverge"),
        (lambda u: u["conv.bias"][0].fill_(-math.inf), "'conv.bias' holds 1 NaN or infinite"),
        (lambda u: u.update({"norm.running_mean": torch.zeros(6)}),
         r"unexpected entry 'norm.running_mean' \(1 in all\) .* no buffers"),
    ],
)  # fmt: skip
def test_an_update_that_does_not_fit_is_refused_in_words(model, change, words):
    update = parameters(model)
    change(update)
    with pytest.raises(InputError, match=words):
        check_like(update, model.named_parameters(), "the update")
