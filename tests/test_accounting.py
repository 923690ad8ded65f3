"""What is spent over all rounds: as Opacus counts it, or one sentence why nothing is promised."""

from __future__ import annotations

import importlib
import math
import re
from itertools import pairwise
from typing import Any, get_args

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from test_defences import Told

from leakgauge.accounting import LARGEST, Accountant, Spent, mechanism, shown, spent
from leakgauge.defences import (
    DEFENCES,
    AdaptiveClip,
    Censor,
    Chain,
    Clip,
    ClipAndNoise,
    DecayingNoise,
    DpSgd,
    Guardian,
    HideTop,
    LowRank,
    Outpost,
    PairedNoise,
    Prune,
    Quantise,
    Sign,
    Soteria,
    TopK,
)
from leakgauge.defences.clip_and_noise import gaussian_sigma
from leakgauge.errors import InputError, MissingExtra


def title(one: object) -> str:
    """The name of a case: the same in every process, so without the place of an object."""
    return re.sub(r" object at 0x[0-9a-f]+", "", str(one))[:60]


THEIRS: dict[str, Any] = {"rdp": RDPAccountant, "prv": PRVAccountant}
COUNTED = {"clip-and-noise", "decaying-noise", "dp-sgd", "adaptive-clip"}


def counted(*arguments: Any, **options: Any) -> Spent:
    found = spent(*arguments, **options)
    assert isinstance(found, Spent), found
    return found


@pytest.mark.filterwarnings("ignore")
def stepped(by: str, history: list[tuple[float, float]], delta: float = 1e-5) -> float:
    """Opacus' own way: one step after the other."""
    accountant = THEIRS[by]()
    for sigma, rate in history:
        accountant.step(noise_multiplier=sigma, sample_rate=rate)
    return float(accountant.get_epsilon(delta=delta))


# --- the numbers -------------------------------------------------------------------------------


def test_the_known_case_has_its_known_epsilon():
    """q = 0.01, σ = 1, 1000 steps, δ = 1e-5, whether they are in one round or in many."""
    for rounds, steps in ((1000, 1), (1, 1000), (100, 10)):
        options = {"rounds": rounds, "steps": steps, "rate": 0.01}
        assert counted(DpSgd(1.0), **options).epsilon == pytest.approx(2.10, abs=0.005)
        found = counted(DpSgd(1.0), accountant="prv", **options)
        assert found.epsilon == pytest.approx(1.84, abs=0.005)


@pytest.mark.parametrize("by", get_args(Accountant))
@pytest.mark.parametrize(
    ("defence", "rounds", "steps", "rate", "history"),
    [
        (DpSgd(0.8), 7, 3, 0.05, [(0.8, 0.05)] * 21),
        (DpSgd(2.0, delta=1e-3), 4, 1, 1.0, [(2.0, 1.0)] * 4),
        (ClipAndNoise(1.0), 5, 9, 1.0, [(gaussian_sigma(1.0, 1e-5), 1.0)] * 5),  # one per round
        (DecayingNoise(4.0, 0.5, 0.9), 6, 1, 0.2, [(s, 0.2) for s in (4, 2, 1, 0.9, 0.9, 0.9)]),
        (AdaptiveClip(1.0, count_noise=1.0), 6, 2, 0.1, [((1 + 0.25) ** -0.5, 0.1)] * 12),
    ],
    ids=["dp-sgd", "whole batches", "clip-and-noise", "decaying-noise", "adaptive-clip"],
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_what_opacus_counts(by, defence, rounds, steps, rate, history):
    found = counted(defence, rounds=rounds, steps=steps, rate=rate, accountant=by)
    assert found.epsilon == pytest.approx(stepped(by, history, defence.delta), rel=1e-9)
    assert (found.accountant, found.rounds, found.delta) == (by, rounds, defence.delta)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 5.0])
def test_one_round_of_exact_noise_spends_its_own_epsilon(epsilon):
    """Balle and Wang's condition is tight, and so is PRV; RDP is above it."""
    noisy = ClipAndNoise(epsilon)
    assert counted(noisy, rounds=1, accountant="prv").epsilon == pytest.approx(epsilon, abs=0.02)
    assert epsilon < counted(noisy, rounds=1).epsilon < 1.3 * epsilon
    # Many rounds of a Gaussian are one with less noise.
    many = counted(noisy, rounds=9, accountant="prv").epsilon
    assert gaussian_sigma(many, 1e-5) == pytest.approx(noisy.sigma() / 3, rel=0.01)


@pytest.mark.parametrize("by", get_args(Accountant))
@pytest.mark.parametrize(
    "defence", [ClipAndNoise(1.0), DecayingNoise(), DpSgd(), AdaptiveClip()], ids=str
)
def test_more_rounds_never_spend_less(by, defence):
    found = [counted(defence, rounds=r, accountant=by).epsilon for r in (1, 2, 5, 20)]
    assert all(few < many for few, many in pairwise(found))


def test_more_noise_and_rarer_draws_spend_less():
    by_noise = [counted(DpSgd(s), rounds=10, rate=0.1).epsilon for s in (0.5, 1.0, 2.0)]
    assert all(little > much for little, much in pairwise(by_noise))
    by_rate = [counted(DpSgd(), rounds=10, rate=q).epsilon for q in (0.01, 0.1, 0.5, 1.0)]
    assert all(rare < often for rare, often in pairwise(by_rate))
    by_count = [counted(AdaptiveClip(count_noise=c), rounds=10).epsilon for c in (0.5, 1.0, 9.0)]
    assert all(little > much for little, much in pairwise(by_count))
    assert by_count[-1] > counted(DpSgd(), rounds=10).epsilon


@pytest.mark.parametrize("rounds", [1, 10])
def test_twice_the_epsilon_never_means_more_noise_nor_less_spent(rounds):
    sweep = [ClipAndNoise(0.1 * 2**k) for k in range(12)]
    assert all(a.sigma() > b.sigma() for a, b in pairwise(sweep))
    found = [counted(one, rounds=rounds).epsilon for one in sweep]
    assert all(a < b for a, b in pairwise(found))


def test_decaying_noise_spends_more_than_steady_noise_and_less_than_its_last():
    steady, decaying = DecayingNoise(2.0, 1.0), DecayingNoise(2.0, 0.9)
    last = DecayingNoise(decaying.multiplier(9), 1.0)
    found = [counted(one, rounds=10).epsilon for one in (steady, decaying, last)]
    assert all(a < b for a, b in pairwise(found))


@pytest.mark.filterwarnings("ignore")
def test_of_very_many_kinds_of_noise_a_little_too_much_is_counted_and_never_too_little():
    defence = DecayingNoise(5.0, 0.999, 0.1)
    exact = stepped("rdp", [(defence.multiplier(r), 1.0) for r in range(350)])
    assert exact < counted(defence, rounds=350).epsilon < 1.01 * exact


# --- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", get_args(Accountant))
def test_the_sentence_has_all_that_is_needed_to_quote_it(by):
    found = counted(DpSgd(1.0, delta=1e-6), rounds=12, steps=3, rate=0.04, accountant=by)
    for part in ("12 rounds", "3 noisy steps", shown(found.epsilon), "1e-06", by.upper(), "0.04"):
        assert part in found.words
    assert "one record of a client" in found.words
    assert found.unit == "record"
    whole = counted(ClipAndNoise(1.0), rounds=1, steps=3)
    assert whole.words.startswith("Over 1 round, all updates of a client are protected")
    assert "step" not in whole.words
    assert whole.unit == "update"


def test_an_epsilon_that_promises_nothing_is_said_to():
    small = counted(ClipAndNoise(0.5), rounds=10)
    large = counted(ClipAndNoise(0.5), rounds=1000)
    assert small.epsilon < 10 < large.epsilon
    assert "next to nothing" in large.words
    assert "next to nothing" not in small.words


def test_numbers_are_rounded_up():
    assert [shown(e) for e in (0.001, 1.001, 99.999, 100.2, 3180.1)] == [
        "0.01", "1.01", "100.00", "101", "3,181",
    ]  # fmt: skip


# --- no promise --------------------------------------------------------------------------------

SENTENCES = [
    (None, "Without a defence no noise is added to updates"),
    (Clip(), "clip adds no noise of a known size to something bounded"),
    (Prune(), "prune adds no noise"),
    (Quantise(), "quantise adds no noise of a known size"),
    (Soteria(), "soteria adds no noise"),
    (Censor(), "censor adds no noise of a known size"),
    (Guardian(), "guardian adds noise to what nothing bounds: noise without clipping"),
    (PairedNoise(), "paired-noise adds noise to what nothing bounds"),
    (Outpost(), "outpost adds noise to what nothing bounds"),
    (ClipAndNoise(1000.0, calibration="papers"), "a noise scale, not differential privacy"),
    (DpSgd(0.0), "dp-sgd is set to add no noise"),
    (AdaptiveClip(count_noise=0.0), "adaptive-clip is set to add no noise"),
    (ClipAndNoise(1e9), r"too small: the epsilon is beyond 1,000,000"),
    (DecayingNoise(1.0, 1e-9, 0.0), "the noise of decaying-noise is too small"),
    (Told(), "Told adds no noise of a known size"),
]


@pytest.mark.parametrize(("defence", "words"), SENTENCES, ids=title)
def test_where_nothing_is_promised_one_sentence_says_why(defence, words):
    for by in get_args(Accountant):
        found = spent(defence, rounds=50, accountant=by)
        assert isinstance(found, str)
        assert words in found
        assert found.endswith(".")
        assert "\n" not in found


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_has_an_epsilon_or_a_sentence(name):
    found = spent(DEFENCES[name](), rounds=3)
    assert isinstance(found, Spent) == (name in COUNTED)


def test_the_noise_of_the_papers_counts_where_its_formula_holds():
    noisy = ClipAndNoise(0.5, calibration="papers")
    exact = stepped("rdp", [(noisy.sigma(), 1.0)] * 2)
    assert counted(noisy, rounds=2).epsilon == pytest.approx(exact)
    assert isinstance(spent(ClipAndNoise(1.0, calibration="papers"), rounds=2), str)


# --- chains ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain",
    [
        (Clip(), ClipAndNoise(1.0)),
        (ClipAndNoise(1.0), Prune(), Sign()),
        (TopK(), LowRank(), ClipAndNoise(1.0), Quantise(), HideTop()),
        (Soteria(), ClipAndNoise(1.0)),
        (ClipAndNoise(1.0), Soteria(), Guardian(), Censor()),  # these work on gradients, before it
        (ClipAndNoise(1.0), PairedNoise()),
        (Chain((Prune(), Chain((ClipAndNoise(1.0),)))), Sign()),
        (DpSgd(), ClipAndNoise(1.0)),
        (ClipAndNoise(1e4, calibration="papers"), ClipAndNoise(1.0)),
    ],
    ids=title,
)
def test_what_comes_after_the_noise_takes_nothing_of_it_away(chain):
    alone = counted(ClipAndNoise(1.0), rounds=4)
    assert spent(Chain(chain), rounds=4) == alone


@pytest.mark.parametrize("first", [DpSgd(), AdaptiveClip()], ids=["dp-sgd", "adaptive-clip"])
def test_so_it_is_for_records(first):
    alone = counted(first, rounds=4, steps=2, rate=0.1)
    for chain in ((first, Prune()), (TopK(), first, Outpost()), (PairedNoise(), first, Clip())):
        assert spent(Chain(chain), rounds=4, steps=2, rate=0.1) == alone


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ((DpSgd(), Soteria()), "soteria reads the records again after dp-sgd added its noise"),
        ((DpSgd(), Prune(), Guardian()), "guardian reads the records again after dp-sgd"),
        ((AdaptiveClip(), Censor()), "censor reads the records again after adaptive-clip"),
        ((PairedNoise(), ClipAndNoise()), "paired-noise tells another client of the update before"),
        ((Clip(), Prune()), "clip adds no noise"),
        ((Guardian(), Clip()), "guardian adds noise to what nothing bounds"),
        ((ClipAndNoise(), Told()), "What Told does with the records is not known"),
        ((Told(), ClipAndNoise()), "What Told does with the records is not known"),
        ((ClipAndNoise(1e3, calibration="papers"), Prune()), "a noise scale"),
    ],
    ids=title,
)
def test_what_undoes_the_promise_is_named(chain, words):
    found = spent(Chain(chain), rounds=4)
    assert isinstance(found, str)
    assert words in found


def test_a_promise_that_is_left_counts():
    """Soteria undoes that of dp-sgd; that of the update stands behind it."""
    chain = Chain((DpSgd(), Soteria(), DecayingNoise(3.0)))
    assert spent(chain, rounds=4) == counted(DecayingNoise(3.0), rounds=4)
    assert mechanism(chain) == DecayingNoise(3.0)


# --- from outside, and errors ------------------------------------------------------------------


class OwnNoise(Told):
    """A defence of somebody else that says what it adds."""

    unit = "update"
    delta = 1e-5

    def multiplier(self, round_: int) -> float:
        return 1.5


def test_a_defence_of_another_package_counts_if_it_says_what_it_adds():
    found = counted(OwnNoise(), rounds=3)
    assert found.epsilon == counted(DecayingNoise(1.5, 1.0), rounds=3).epsilon


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 1, "steps": 0}, "steps must be at least 1, got 0"),
        ({"rounds": 1, "rate": 0.0}, r"rate must lie in \(0, 1\], got 0.0"),
        ({"rounds": 1, "rate": 1.5}, "rate must lie in"),
        ({"rounds": 1, "rate": math.nan}, "rate must lie in"),
        ({"rounds": 1, "accountant": "gdp"}, "accountant: expected rdp or prv, got 'gdp'"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        spent(DpSgd(), **options)


def test_prv_refuses_what_it_cannot_count():
    noisy = ClipAndNoise(100.0)
    assert 500 < counted(noisy, rounds=50).epsilon < LARGEST
    with pytest.raises(InputError, match='accountant = "prv" cannot count an epsilon as large'):
        spent(noisy, rounds=50, accountant="prv")


def test_without_the_package_one_sentence_names_the_extra(monkeypatch):
    def absent(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="opacus")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"needs the package 'opacus'.*'leakgauge\[dp\]'"):
        spent(DpSgd(), rounds=1)
    assert isinstance(spent(Prune(), rounds=1), str)  # which needs none
    assert DpSgd().multiplier(0) == 1.0
