"""What attackers do who know a defence: each answer tells more than what was sent alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakgauge import metrics, threat
from leakgauge.attacks import IDLG, Analytic, InvertingGradients
from leakgauge.attacks._priors import total_variation
from leakgauge.defences import DEFENCES, Chain, Clip, ClipAndNoise, Prune, Quantise, TopK
from leakgauge.defences._answers import Layer, beyond, completed, layers, shrunk
from leakgauge.fl import Scenario, simulate
from leakgauge.tensors import norm
from leakgauge.types import Answer, Dataset, Here, LocalTraining, Named, Observation, ThreatModel


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 4))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Conv2d(6, 6, 3, 2, 1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip


def played(
    defence: Any, make: Any = mlp, records: int = 1, seed: int = 0, **training: Any
) -> tuple[Observation, Tensor, Named]:
    """What a server sees of a client with this defence, its records, and the undefended update."""
    coarse = torch.rand(records, 1, 2, 2, generator=rng(seed + 1))
    inputs = nn.functional.interpolate(coarse, (8, 8), mode="bilinear")
    labels = torch.arange(records) % 4
    data = Dataset("x", inputs, labels, tuple("abcd"))

    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make()

    local = LocalTraining(lr=0.1, batch_size=records, **training)
    scenario = Scenario(made, data, local, records=records, defence=defence)
    seen = threat.observe(simulate(scenario, rng(seed)), ThreatModel())
    plain = threat.observe(simulate(replace(scenario, defence=None), rng(seed)), ThreatModel())
    return seen, inputs, plain.update


def error(found: Named, true: Named) -> float:
    return norm({n: found[n] - true[n] for n in true}) / norm(true)


SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"norm": 0.01},
    "clip-and-noise": {"epsilon": 1e4, "norm": 0.1, "calibration": "papers"},
    "prune": {"share": 0.7},
    "top-k": {"keep": 0.3},
    "quantise": {"bits": 3},
    "soteria": {"share": 0.5},
    "outpost": {"prune": 0.5},
    "guardian": {"beta": 0.1},
    "censor": {"trials": 3},
    "hide-top": {"share": 0.3},
    "paired-noise": {"scale": 0.5},
}


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_says_what_an_attacker_does_who_knows_it(name: str) -> None:
    defence = DEFENCES[name](**SETTINGS.get(name, {}))
    seen, _, true = played(defence, convolution, batch_norm="eval")
    before = {n: u.clone() for n, u in seen.update.items()}
    held = threat.adapted(seen, defence)
    answer = held.answer
    assert answer is not None
    assert answer.whole
    assert 20 < len(answer.words) < 200
    assert not answer.words.endswith(".")
    assert all(torch.equal(seen.update[n], u) for n, u in before.items())  # what was seen stays
    assert held.update.keys() == true.keys()
    assert all(held.update[n].shape == u.shape for n, u in true.items())
    if answer.through:
        passed = answer.through(true)
        assert all(passed[n].shape == u.shape for n, u in true.items())
    assert IDLG(iterations=2).reconstruct(held, rng()).adapted
    assert not IDLG(iterations=2).reconstruct(seen, rng()).adapted


@pytest.mark.parametrize("name", ["clip", "prune", "top-k", "soteria", "low-rank", "quantise"])
def test_the_true_records_explain_what_was_sent(name: str) -> None:
    """At the truth, what the defence leaves of a candidate is what was sent; without the answer the
    truth looks wrong."""
    options = SETTINGS.get(name, {}) | ({"rounding": "nearest"} if name == "quantise" else {})
    defence = DEFENCES[name](**options)
    seen, _, true = played(defence, convolution, batch_norm="eval")
    answer = threat.adapted(seen, defence).answer
    assert answer is not None
    assert answer.through is not None
    met = error(answer.through(true), answer.through(answer.update))
    assert met < 1e-5
    assert error(seen.update, true) > 1e-2
    other = {n: u.flip(0) for n, u in true.items()}  # another update is not explained
    assert error(answer.through(other), answer.through(answer.update)) > 0.05


def test_an_attacker_who_is_not_told_of_the_defence_does_not_adapt() -> None:
    defence = Prune(share=0.5)
    seen, _, _ = played(defence)
    assert threat.adapted(replace(seen, announced=None), defence).answer is None
    assert threat.adapted(seen, None) is seen


@dataclass(frozen=True)
class Silent:
    """A defence that says nothing of its attackers."""

    def announced(self) -> dict[str, object]:
        return {}

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        return update


def test_a_chain_is_whole_if_all_its_parts_are() -> None:
    both = Chain((Clip(norm=0.01), Prune(share=0.7)))
    seen, _, true = played(both, convolution, batch_norm="eval")
    answer = threat.adapted(seen, both).answer
    assert answer is not None
    assert answer.through is not None
    assert answer.whole
    assert answer.restored
    assert "; " in answer.words
    assert error(answer.through(true), answer.through(answer.update)) < 1e-5
    part = Chain((Clip(norm=0.01), Silent()))
    seen, _, _ = played(part)
    answer = threat.adapted(seen, part).answer
    assert answer is not None
    assert not answer.whole
    assert threat.adapted(seen, Silent()).answer is None


# Parts.


def test_noise_is_taken_away_from_matrices_of_low_rank() -> None:
    true = torch.randn(40, 2, generator=rng(1)) @ torch.randn(2, 60, generator=rng(2))
    noise = 0.5 * torch.randn(true.shape, generator=rng(3))
    found = shrunk({"w": true + noise, "b": torch.tensor([9.0, 9.0])}, {"w": 0.5, "b": 0.0})
    assert (found["w"] - true).norm() < 0.45 * noise.norm()
    assert int(torch.linalg.matrix_rank(found["w"])) == 2
    assert found["b"].tolist() == [9.0, 9.0]
    alone = shrunk({"w": noise, "b": torch.ones(2)}, {"w": 0.5, "b": 0.0})
    assert not alone["w"].any()  # noise alone leaves nothing of a layer
    assert torch.equal(shrunk({"w": noise}, {"w": 0.5})["w"], noise)  # but of all it stays
    vector = shrunk({"b": torch.full((100,), 2.0)}, {"b": 1.0})["b"]
    assert vector[0].item() == pytest.approx(2 * (1 - 1 / 4))


def test_pruned_layers_are_completed_exactly_where_their_rank_tells() -> None:
    left, right = torch.rand(40, 2, generator=rng(1)), torch.rand(2, 60, generator=rng(2)) - 0.3
    true = {
        "w": (left @ right).double(),
        "b": left.sum(1).double(),
    }  # as if right had a column (1, 1)
    sent = Prune(share=0.5).on_update(true, None, rng())  # type: ignore[arg-type]
    small = {name: float(u[u != 0].abs().min()) for name, u in sent.items()}
    layer = Layer("w", "b", 2)
    found = completed(sent, small, [layer])
    told = (sent["w"] == 0) & (found["w"] != 0)
    assert told.sum() > 0.4 * (sent["w"] == 0).sum()  # of some columns nothing was sent
    assert (found["w"] - true["w"])[told].norm() < 1e-4 * true["w"].norm()
    bias = (sent["b"] == 0) & (found["b"] != 0)
    assert bias.sum() > 5
    assert (found["b"] - true["b"])[bias].norm() < 1e-4 * true["b"].norm()
    assert torch.equal(found["w"][sent["w"] != 0], sent["w"][sent["w"] != 0])
    # Of too low a rank, or with entries that were larger than pruned ones are: left as it was.
    low = completed(sent, small, [Layer("w", "b", 1)])
    large = completed(sent, {name: s / 10 for name, s in small.items()}, [layer])
    for kept in (low, large):
        assert torch.equal(kept["w"], sent["w"])
    few = Prune(share=0.97).on_update(true, None, rng())  # type: ignore[arg-type]
    assert torch.equal(completed(few, small, [layer])["w"], few["w"])


def test_ranks_count_the_windows_of_all_records() -> None:
    seen, _, true = played(Clip(), records=3)
    assert layers(seen) == [Layer("1.weight", "1.bias", 3), Layer("3.weight", "3.bias", 3)]
    assert all(int(torch.linalg.matrix_rank(true[one.weight])) <= 3 for one in layers(seen))
    assert layers(replace(seen, records=None)) == []
    wide, _, _ = played(Clip(), convolution, batch_norm="eval")
    # Convolutions here see more windows than they have rows.
    assert layers(wide) == [Layer("5.weight", "5.bias", 1)]


def test_beyond_is_zero_inside() -> None:
    value, centre = torch.tensor([0.0, 1.0, 3.0, -2.0]), torch.ones(4)
    assert beyond(value, centre, 1.0).tolist() == [0.0, 0.0, 1.0, -2.0]


# Attacks.


def psnr(attack: Any, seen: Observation, inputs: Tensor) -> float:
    guess = attack.reconstruct(seen, rng(5))
    index = metrics.assign.optimal(guess.inputs, inputs)
    return float(metrics.psnr(guess.inputs[index], inputs).median())


def test_a_pruned_linear_layer_is_read_exactly_by_who_knows_its_rank() -> None:
    """The analytic attack reads one record from a layer of which it was sent three tenths, but for
    the darkest pixels, of which nothing was sent at all."""
    defence = Prune(share=0.7)
    seen, inputs, _ = played(defence)
    off = [(Analytic().reconstruct(one, rng()).inputs - inputs).abs().flatten()
           for one in (threat.adapted(seen, defence), seen)]  # fmt: skip
    assert (off[0] < 1e-5).double().mean() > 0.9
    assert (off[1] < 1e-5).double().mean() < 0.8


@pytest.mark.parametrize(
    ("defence", "gain"),
    [
        (Clip(norm=0.01), 10.0),
        (Prune(share=0.8), 10.0),
        (TopK(keep=0.2), 10.0),
        (ClipAndNoise(epsilon=3e4, norm=1.0, calibration="papers"), 0.5),
        (Quantise(bits=3, rounding="nearest"), 1.0),
        (Quantise(bits=3), 0.5),
        (DEFENCES["soteria"](share=0.8), 10.0),  # type: ignore[call-arg]
        (DEFENCES["low-rank"](rank=1), 1.0),  # type: ignore[call-arg]
        (DEFENCES["hide-top"](share=0.1), 1.0),  # type: ignore[call-arg]
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_knows_the_defence_sees_more(defence: Any, gain: float) -> None:
    """Medians over three draws, at the same number of iterations."""
    gains = []
    for seed in range(3):
        seen, inputs, _ = played(defence, convolution, seed=seed, batch_norm="eval")
        attack = IDLG(iterations=150)
        known = psnr(attack, threat.adapted(seen, defence), inputs)
        gains.append(known - psnr(attack, seen, inputs))
    assert sorted(gains)[1] > gain


def test_matching_through_a_defence_has_the_right_slope() -> None:
    """The derivative of the adapted objective agrees with the one that autograd takes through
    everything: `auto` notices if not, and says so."""
    defence = Clip(norm=0.01)
    seen, _, _ = played(defence, convolution, batch_norm="eval")
    held = threat.adapted(seen, defence)
    for derivative in ("auto", "exact"):
        guess = InvertingGradients(iterations=20, derivative=derivative).reconstruct(held, rng(1))
        last = guess.objectives[0]
        assert math.isfinite(last)
        if derivative == "auto":
            first = last
    assert first == pytest.approx(last, rel=0.05)


def test_noise_makes_an_attacker_expect_smooth_pictures() -> None:
    """With noise that hides all, the guess is nearly flat."""
    rough = []
    for epsilon in (1e6, 1e3, 1e1):
        defence = ClipAndNoise(epsilon=epsilon, norm=1.0, calibration="papers")
        seen, _, _ = played(defence, convolution, batch_norm="eval")
        guess = IDLG(iterations=100).reconstruct(threat.adapted(seen, defence), rng(2))
        rough.append(float(total_variation(guess.inputs)))
    assert max(rough[1:]) < 0.2 * rough[0]


@pytest.mark.parametrize("attack", [InvertingGradients(iterations=3), IDLG(iterations=3)])
@pytest.mark.parametrize("defence", [
    ClipAndNoise(epsilon=0.01, norm=1.0), DEFENCES["dp-sgd"](sigma=100.0),  # type: ignore[call-arg]
    DEFENCES["hide-top"](share=1.0), Quantise(bits=1),  # type: ignore[call-arg]
], ids=["noise", "dp-sgd", "nothing is sent", "one bit"])  # fmt: skip
def test_where_nothing_is_left_an_attack_still_ends(defence: Any, attack: Any) -> None:
    seen, inputs, _ = played(defence, convolution, batch_norm="eval")
    guess = attack.reconstruct(threat.adapted(seen, defence), rng())
    assert guess.inputs.shape == inputs.shape
    assert torch.isfinite(guess.inputs).all()


def test_what_an_attack_asks_of_smoothness_itself_counts() -> None:
    """An attack that asks for more smoothness than the noise does is asked for no more."""
    defence = ClipAndNoise(epsilon=1e6, norm=1.0, calibration="papers")
    seen, _, _ = played(defence, convolution, batch_norm="eval")
    held = threat.adapted(seen, defence)
    assert held.answer is not None
    without = replace(held, answer=replace(held.answer, again=None))
    guesses = [InvertingGradients(iterations=20, tv=10.0).reconstruct(one, rng(2)).inputs
               for one in (held, without)]  # fmt: skip
    assert torch.equal(*guesses)
    guesses = [InvertingGradients(iterations=20, tv=0.0).reconstruct(one, rng(2)).inputs
               for one in (held, without)]  # fmt: skip
    assert not torch.equal(*guesses)


def test_an_answer_says_nothing_of_the_memory_or_the_chance_of_a_defence() -> None:
    """Two clients with the same defence and update but other chance give answers that differ only
    by what was sent."""
    fields = set(Answer.__dataclass_fields__)
    assert fields == {"words", "update", "restored", "whole", "through", "again"}
    defence = TopK(keep=0.3)
    seen, _, _ = played(defence)
    here = threat.adapted(seen, defence).answer
    there = threat.adapted(replace(seen), defence).answer
    assert here is not None
    assert there is not None
    assert all(torch.equal(here.update[n], there.update[n]) for n in here.update)
