"""What is attacked: pictures, texts and tables, how a model sees them, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, Analytic
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import Scenario, simulate, target
from leakgauge.records import (
    Classes,
    Columns,
    Images,
    Record,
    Scale,
    Tokens,
    floats,
    pictures,
    record_of,
)
from leakgauge.threat import observe
from leakgauge.types import Dataset, LocalTraining, PreparedAttack, Round, ThreatModel


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the three kinds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.rand(2, 3, 4, 5), Images((3, 4, 5))),
        (torch.rand(2, 3, 4, 5).double(), Images((3, 4, 5))),
        (torch.rand(2, 7), Columns((7,))),
        (torch.ones(2, 7, dtype=torch.long), Tokens((7,))),
        (torch.empty(0, 1, 8, 8), Images((1, 8, 8))),
    ],
)
def test_the_kind_is_told_by_type_and_dimensions(inputs: Tensor, expected: Record) -> None:
    assert record_of(inputs) == expected


@pytest.mark.parametrize(
    "inputs",
    [
        torch.rand(5),
        torch.rand(2, 8, 8),
        torch.ones(2, 3, 8, 8, dtype=torch.uint8),
        torch.rand(1, 2, 3, 4, 5),
    ],
    ids=lambda inputs: str(tuple(inputs.shape)),
)
def test_what_is_no_kind_of_record_is_refused_in_words(inputs: Tensor) -> None:
    with pytest.raises(InputError, match=r"pictures \(N, C, H, W\).*got \(.*\) of torch\."):
        record_of(inputs)


SCALES = {
    "pictures, one scale": (torch.rand(4, 3, 5, 6), Scale((0.4,), (0.2,))),
    "pictures, by channel": (torch.rand(4, 3, 5, 6), Scale((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))),
    "a table, one scale": (torch.randn(4, 3), Scale((7.0,), (2.0,))),
    "a table, by column": (torch.randn(4, 3), Scale((1.0, 20.0, 300.0), (0.1, 2.0, 30.0))),
}


@pytest.mark.parametrize("name", SCALES)
def test_what_enters_the_model_is_normalised_and_leaves_as_it_was(name: str) -> None:
    inputs, scale = SCALES[name][0].double(), SCALES[name][1]
    record = record_of(inputs, scale)
    entering = record.entering(inputs)
    for k in range(3):  # by hand, channel by channel or column by column
        mean, std = (values[k % len(values)] for values in (scale.mean, scale.std))
        torch.testing.assert_close(entering[:, k], (inputs[:, k] - mean) / std)
    torch.testing.assert_close(record.leaving(entering), inputs)
    assert entering.dtype == torch.float64


def test_tokens_enter_as_they_are_whatever_the_scale() -> None:
    tokens = torch.arange(12).view(3, 4)
    record = record_of(tokens, Scale((0.5,), (0.1,)))
    assert record.entering(tokens) is tokens
    assert record.leaving(tokens) is tokens


@pytest.mark.parametrize(
    ("inputs", "scale", "words"),
    [
        (torch.rand(2, 3, 4, 4), Scale(mean=(0.1, 0.2)), "mean has 2 values.* 3 channels.* or 3"),
        (torch.rand(2, 1, 4, 4), Scale(std=(0.1, 0.2, 0.3)), "std has 3 values.* 1 channels"),
        (torch.rand(2, 5), Scale(mean=(0.1,) * 4), "mean has 4 values.* 5 columns.* or 5"),
    ],
)
def test_a_wrong_number_of_means_is_refused(inputs: Tensor, scale: Scale, words: str) -> None:
    with pytest.raises(InputError, match=words):
        record_of(inputs, scale)


@pytest.mark.parametrize("std", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="std must be positive and finite"):
        Scale(std=(0.5, std))


def test_the_task_has_the_loss_of_classes_and_of_probabilities() -> None:
    outputs, labels = torch.randn(5, 3, generator=seeded()), torch.tensor([0, 2, 1, 1, 0])
    by_hand = -outputs.log_softmax(1)[torch.arange(5), labels].mean()
    torch.testing.assert_close(Classes(3).loss(outputs, labels), by_hand)
    torch.testing.assert_close(Classes(3).loss(outputs, F.one_hot(labels).float()), by_hand)


def test_who_reads_pictures_or_computes_with_values_says_what_it_met() -> None:
    image, line, text = Images((1, 4, 4)), Columns((4,)), Tokens((4,))
    assert pictures(image) is image
    assert floats(image) is image
    assert floats(line) is line
    with pytest.raises(NotApplicable, match="reads pictures, and these records are columns"):
        pictures(line)
    with pytest.raises(NotApplicable, match="reads pictures, and these records are tokens"):
        pictures(text)
    with pytest.raises(NotApplicable, match="values of records, and these records are tokens"):
        floats(text)


# --- federations of texts and tables -----------------------------------------------------------

SCALE = Scale((50.0, 0.0, -3.0, 7.0), (10.0, 2.0, 1.0, 5.0))


class Reader(nn.Module):
    """A small text classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 5)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def lines(count: int = 24) -> Dataset:
    """Lines of a table, whose columns differ in size: far outside of [0, 1]."""
    values = torch.randn(count, 4, generator=seeded(1)) * torch.tensor(SCALE.std)
    return Dataset(
        "lines", values + torch.tensor(SCALE.mean), torch.arange(count) % 3, ("a", "b", "c")
    )


def texts(count: int = 24) -> Dataset:
    tokens = torch.randint(20, (count, 4), generator=seeded(1))
    return Dataset("texts", tokens, torch.arange(count) % 3, ("a", "b", "c"))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Sigmoid(), nn.Linear(16, 3))


KINDS: dict[str, Any] = {
    "columns": (perceptron, lines, {"scale": SCALE}),
    "tokens": (Reader, texts, {}),
}


def played(kind: str, **training: Any) -> Round:
    make, data, options = KINDS[kind]
    local = LocalTraining(lr=0.1, **training)
    return simulate(Scenario(make, data(), local, clients=2, rounds=1, **options), seeded())


@pytest.mark.parametrize("training", [{}, {"steps": 3, "weight_decay": 0.1}], ids=str)
def test_the_lines_of_a_table_are_read_from_an_update(training: dict[str, Any]) -> None:
    round_ = played("columns", **training)
    assert round_.record == Columns((4,), SCALE.mean, SCALE.std)
    guess = Analytic().reconstruct(observe(round_, ThreatModel()), seeded())
    truth = round_.truths[0].inputs
    assert (truth > 1).any()  # what a clamp to [0, 1] would lose
    assert (truth < 0).any()
    torch.testing.assert_close(guess.inputs, truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted((ATTACKS | ACTIVE_ATTACKS).keys() - {"analytic"}))
def test_an_attack_on_pictures_does_not_apply_to_other_records(name: str, kind: str) -> None:
    round_ = played(kind)
    attack: Any = (ATTACKS | ACTIVE_ATTACKS)[name]()
    words = "transformer" if name == "decepticons" else f"these records are {kind}"
    if isinstance(attack, PreparedAttack):
        aim = target(round_, KINDS[kind][1]())
        with pytest.raises(NotApplicable, match=words):
            attack.prepare(aim, seeded())
    else:
        seen = observe(round_, ThreatModel())
        with pytest.raises(NotApplicable, match=words):
            attack.reconstruct(seen, seeded())


def test_no_line_is_read_from_the_update_of_a_text() -> None:
    with pytest.raises(NotApplicable, match="these records are tokens"):
        Analytic().reconstruct(observe(played("tokens"), ThreatModel()), seeded())
