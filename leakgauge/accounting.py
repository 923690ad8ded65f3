"""What a defence spends of privacy over all rounds of a federation: the epsilon to quote.

An epsilon is the promise of a *mechanism*: something is bounded (one record's part of a step, or
one client's update), and Gaussian noise of σ times that bound is added. Each use spends some of it,
so that the promise is only known together with the number of rounds. Opacus counts it:

    "rdp"   Rényi differential privacy (I. Mironov, "Rényi Differential Privacy", CSF 2017,
            https://arxiv.org/abs/1702.07476): an upper bound for every σ
    "prv"   privacy random variables (S. Gopi, Y. T. Lee, L. Wutschitz, "Numerical Composition of
            Differential Privacy", NeurIPS 2021, https://arxiv.org/abs/2106.02848): tighter, to an
            error of 0.01; only for an epsilon of some hundreds at most

Whatever has no such mechanism gets a sentence that says why, and no number.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

from leakgauge.config import optional
from leakgauge.defences import (
    DEFENCES,
    Chain,
    Clip,
    ClipAndNoise,
    DecayingNoise,
    Guardian,
    HideTop,
    LowRank,
    Outpost,
    PairedNoise,
    Prune,
    Quantise,
    Sign,
    TopK,
)
from leakgauge.errors import InputError
from leakgauge.types import Defence, UpdateDefence

Accountant: TypeAlias = Literal["rdp", "prv"]
Unit: TypeAlias = Literal["record", "update"]

LARGE = 10.0  # beyond it, hardly anything is promised
LARGEST = 1e6  # beyond it, it is not said at all
LARGEST_PRV = 500.0  # beyond it, the PRV accountant runs out of digits or of memory
MOST = 100  # different σ that are counted one by one
AFTERWARDS = (Clip, ClipAndNoise, DecayingNoise, HideTop, LowRank, Outpost, PairedNoise, Prune,
              Quantise, Sign, TopK)  # fmt: skip
"""Those that read nothing but what they are given: after noise they take no privacy away."""
UNBOUNDED = (Guardian, Outpost, PairedNoise)
"""Those that add noise to what nothing bounds."""


@dataclass(frozen=True)
class Spent:
    """What all rounds spend together. `unit` is whose privacy it is: that of one record, or that of
    one client with all its updates. `words` is a sentence to quote."""

    epsilon: float
    delta: float
    accountant: Accountant
    rounds: int
    unit: Unit
    words: str


@runtime_checkable
class Mechanism(Protocol):
    """A defence that bounds what one record, or one client's update, can change, and adds Gaussian
    noise: `multiplier(round)` is its standard deviation, for a bound of 1."""

    @property
    def unit(self) -> Unit: ...

    @property
    def delta(self) -> float: ...

    def multiplier(self, round_: int) -> float: ...


def mechanism(defence: Defence | None) -> Mechanism | str:
    """What in a defence can be counted, or one sentence why nothing can."""
    if defence is None:
        return "Without a defence no noise is added to updates, and nothing is promised."
    if isinstance(defence, Chain):
        return _of_chain(defence)
    name = _name(defence)
    if (
        isinstance(defence, ClipAndNoise)
        and defence.calibration == "papers"
        and defence.epsilon >= 1
    ):
        return (
            f'{name} with calibration = "papers" has a noise scale, not differential privacy: the '
            f"formula behind it holds for an epsilon below 1, and it is set to "
            f'{defence.epsilon:g}; set calibration = "exact" to have one counted.'
        )
    if not isinstance(defence, Mechanism):
        if isinstance(defence, UNBOUNDED):
            return (
                f"{name} adds noise to what nothing bounds: noise without clipping is not "
                "differential privacy, and there is no epsilon."
            )
        return (
            f"{name} adds no noise of a known size to something bounded: there is no differential "
            "privacy, and no epsilon."
        )
    if not defence.multiplier(0) > 0:
        return f"{name} is set to add no noise: there is no epsilon."
    return defence


def _of_chain(chain: Chain) -> Mechanism | str:
    """The mechanism of a chain that the other parts leave valid. Of several, one that protects
    whole updates comes first, for it protects their records too."""
    parts = chain.parts
    for part in parts:
        if type(part) not in DEFENCES.values():
            return f"What {_name(part)} does with the records is not known: there is no epsilon."
    found = [(i, mechanism(part)) for i, part in enumerate(parts)]
    counted = [(i, one) for i, one in found if not isinstance(one, str)]
    reasons = [one for _, one in found if isinstance(one, str)]
    kept = []
    for i, one in counted:
        if (why := _void(parts, i, one)) is None:
            kept.append(one)
        else:
            reasons.insert(0, why)
    if not kept:
        return reasons[0]
    return next((one for one in reversed(kept) if one.unit == "update"), kept[-1])


def _void(parts: tuple[Defence, ...], place: int, found: Mechanism) -> str | None:
    """Why the mechanism at this place of a chain promises nothing, if something undoes it. The
    gradients of steps are changed before any update is, wherever a part stands in the chain."""
    name = _name(parts[place])
    for part in parts[:place] if found.unit == "update" else ():
        if isinstance(part, PairedNoise):
            return (
                f"{_name(part)} tells another client of the update before {name} adds its noise: "
                "there is no epsilon."
            )
    for other, part in enumerate(parts):
        later = other > place and isinstance(part, UpdateDefence)
        if found.unit == "record":
            later = other != place
        if later and not isinstance(part, AFTERWARDS):
            return (
                f"{_name(part)} reads the records again after {name} added its noise: there is no "
                "epsilon."
            )
    return None


def _name(defence: Defence | Mechanism) -> str:
    """As a plan calls it."""
    names: dict[type, str] = {made: name for name, made in DEFENCES.items()}
    return names.get(type(defence), type(defence).__name__)


def spent(
    defence: Defence | None,
    *,
    rounds: int,
    steps: int = 1,
    rate: float = 1.0,
    accountant: Accountant = "rdp",
) -> Spent | str:
    """What a defence spends over so many rounds, or one sentence why nothing is promised.

    Where single records are protected, a record is drawn for each of the `steps` of a round with
    the probability `rate`, by itself; where whole updates are, a client takes part in a round with
    that probability, which nobody may know who reads the update, and `steps` does not matter."""
    _check(rounds, steps, rate, accountant)
    found = mechanism(defence)
    if isinstance(found, str):
        return found
    uses = steps if found.unit == "record" else 1
    history = [(sigma, rate, uses * times) for sigma, times in _noise(found, rounds).items()]
    epsilon = _epsilon(history, found.delta, accountant)
    if not epsilon <= LARGEST:
        return (
            f"Over {_counted(rounds, 'round')} the noise of {_name(found)} is too small: the "
            f"epsilon is beyond {LARGEST:,.0f}, and nothing is promised."
        )
    words = _words(epsilon, found, rounds, uses, rate, accountant)
    return Spent(epsilon, found.delta, accountant, rounds, found.unit, words)


def _noise(found: Mechanism, rounds: int) -> Counter[float]:
    """How many rounds have which σ. Of more than MOST, neighbours count as the least of them: what
    is counted is then a little above what is spent, never below."""
    noise = [found.multiplier(index) for index in range(rounds)]
    distinct = sorted(set(noise))
    size = -(-len(distinct) // MOST)
    least = {sigma: distinct[i - i % size] for i, sigma in enumerate(distinct)}
    return Counter(least[sigma] for sigma in noise)


def _check(rounds: int, steps: int, rate: float, accountant: str) -> None:
    for key, value in (("rounds", rounds), ("steps", steps)):
        if value < 1:
            raise InputError(f"{key} must be at least 1, got {value}")
    if not 0 < rate <= 1:
        raise InputError(f"rate must lie in (0, 1], got {rate}")
    if accountant not in get_args(Accountant):
        raise InputError(f"accountant: expected rdp or prv, got {accountant!r}")


def _epsilon(
    history: list[tuple[float, float, int]], delta: float, accountant: Accountant
) -> float:
    """Epsilon of (σ, rate, uses) one after the other, as Opacus counts it."""
    opacus = optional("opacus.accountants", "dp", "counting what differential privacy spends")
    classes = {"rdp": opacus.RDPAccountant, "prv": opacus.PRVAccountant}

    def counted(by: Accountant) -> float:
        made = classes[by]()
        made.history = history
        return float(made.get_epsilon(delta=delta))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflows that it handles, and of orders it would like
        try:
            bound = counted("rdp")
        except (OverflowError, ZeroDivisionError):  # of a σ whose square is zero
            return math.inf
        if accountant == "rdp" or bound > LARGEST:
            return bound
        if bound > LARGEST_PRV:
            raise InputError(
                f'accountant = "prv" cannot count an epsilon as large as this one, about '
                f'{bound:.0f}: use accountant = "rdp", or add more noise'
            )
        return counted("prv")


def _words(
    epsilon: float, found: Mechanism, rounds: int, steps: int, rate: float, accountant: Accountant
) -> str:
    whom = "one record of a client is" if found.unit == "record" else "all updates of a client are"
    each = f" of {_counted(steps, 'noisy step')} each" if steps > 1 else ""
    turn = f"{'step' if steps > 1 else 'round'} draws each"
    by = f"{turn} {'record' if found.unit == 'record' else 'client'} by itself"
    drawn = f", if every {by} with a chance of {rate:.3g}" if rate < 1 else ""
    large = " So large an epsilon promises next to nothing." if epsilon > LARGE else ""
    return (
        f"Over {_counted(rounds, 'round')}{each}, {whom} protected by differential privacy of "
        f"epsilon = {shown(epsilon)} at delta = {found.delta:g}, counted by the "
        f"{accountant.upper()} accountant{drawn}.{large}"
    )


def shown(epsilon: float) -> str:
    """Rounded up: a promise may not look better than it is."""
    return f"{math.ceil(epsilon):,}" if epsilon > 100 else f"{math.ceil(epsilon * 100) / 100:.2f}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
