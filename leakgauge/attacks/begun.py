"""Hybrids: a search that begins where another attack ended.

A learned inverter, an exact method or a restorer says in a moment what an image looks like; a
search by matching gradients then moves it until its own update is the observed one. `begun(first,
search)` is the attack of both:

    x₀ = first(update), restored if told to;   min_x D(g'(x), g) + priors, by the search, from x₀

Any attack can be first, also one that is prepared or that itself begins from another's guess. The
search can be any that matches gradients. Its first restart begins from the guess, in its space:
pixels as they are, low-resolution ones down-sampled, a generator's weights fitted to the images
first. Its other restarts begin as it does alone. Images stand where their labels are: the guess is
brought into the order of the labels that the search has, as far as the first attack read labels.

Needs: what both need; public records or a changed model only if the first attack needs them.
Facts: `begun_from`, the first attack; `begun_residual`, by its own measure; `begun_distance`, the
gradient distance with which the search began; in `times` what the first attack cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from leakgauge.attacks._matching import Search, first_of
from leakgauge.errors import InputError, NotApplicable
from leakgauge.tensors import spawned
from leakgauge.types import (
    Attack,
    Iterative,
    Knowledge,
    Learned,
    Observation,
    Preparation,
    PreparedAttack,
    Reconstruction,
    Resources,
    Restorer,
    Target,
)


@dataclass(frozen=True)
class Begun:
    """A search from another attack's guess: make it with `begun`.

    `names` are those of the first attack, as its rows are called, and of the search."""

    first: Attack
    search: Iterative
    restore: Restorer | None = None
    names: tuple[str, str] = ("", "")

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.first.needs | self.search.needs

    @property
    def iterations(self) -> int:
        return self.search.iterations

    @property
    def restarts(self) -> int:
        return self.search.restarts

    def shortened(self, iterations: int, restarts: int) -> Self:
        """With a shorter search: where it begins stays the same."""
        shorter = self.search.shortened(iterations, restarts)
        assert isinstance(shorter, Iterative)
        return replace(self, search=shorter)

    @property
    def chain(self) -> tuple[str, ...]:
        """The names of all attacks in their order, without what restores between them."""
        first, search = self.names
        before = self.first.chain if isinstance(self.first, Begun) else (first.partition("+")[0],)
        return (*before, search)

    def reconstruct(
        self,
        seen: Observation,
        rng: torch.Generator,
        resources: Resources | None = None,
        before: Sequence[torch.Generator] = (),
    ) -> Reconstruction:
        """`before` are generators for those that come before the search, in the order of `chain`.
        Without them each begins with `rng` as it is now: as it would alone."""
        resources, began, cpu = resources or Resources(), time.monotonic(), time.process_time()
        *earlier, own = before or (_copied(rng),)
        first = seen
        if isinstance(self.first, Learned) and seen.sent is not None:  # it reads what was sent
            first = replace(seen, update=seen.sent, sent=None, answer=None)
        restoring = spawned(own, "restore")
        try:
            if isinstance(self.first, Begun):
                start = self.first.reconstruct(first, own, resources, earlier)
            else:
                start = self.first.reconstruct(first, own, resources)
            if self.restore is not None:
                better = self.restore.restore(start.inputs, seen.record, restoring, start.labels)
                start = replace(start, inputs=better)
        except NotApplicable as reason:
            raise self._without_start(reason) from reason
        if seen.records is not None and len(start.inputs) != seen.records:
            raise InputError(
                f"a search begins from one image for each record, of which this update has "
                f"{seen.records}; {self._first} guessed {len(start.inputs)}: begin from another "
                "attack, or search without begin"
            )
        cost, spent = time.process_time() - cpu, time.monotonic() - began
        if resources.seconds is not None:
            resources = replace(resources, seconds=max(0.0, resources.seconds - spent))
        found = self.search.reconstruct(replace(seen, begin=start), rng, resources)
        return self._joined(start, found, cost)

    def _joined(self, start: Reconstruction, found: Reconstruction, cost: float) -> Reconstruction:
        words = f"its search begins from the guess of {self._first}"
        facts = {
            "begun_from": self._first,
            "begun_residual": start.residual,
            "begun_distance": found.distances[0] if found.distances else None,
            "times": {"begun_cpu_seconds": cost},
        }
        return replace(
            found,
            stopped=first_of({start.stopped, found.stopped}),
            differed=start.differed if found.differed is None else found.differed,
            adapted=start.adapted or found.adapted,
            notes=(words, *(f"{self._first}: {note}" for note in start.notes), *found.notes),
            facts=found.facts | facts,
        )

    @property
    def _first(self) -> str:
        return self.names[0] or type(self.first).__name__

    def _without_start(self, reason: NotApplicable) -> NotApplicable:
        return NotApplicable(f"it begins from {self._first}, which does not apply: {reason}")


@dataclass(frozen=True)
class BegunPrepared(Begun):
    """A search from the guess of an attack that is prepared before the round."""

    @property
    def manipulates(self) -> bool:
        return _prepared(self.first).manipulates

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        try:
            return _prepared(self.first).prepare(target, rng, resources)
        except NotApplicable as reason:
            raise self._without_start(reason) from reason


def begun(
    first: Attack,
    search: Attack,
    restore: Restorer | None = None,
    names: tuple[str, str] = ("", ""),
) -> Begun:
    """The attack that runs `first`, restores its guess if told to, and begins the search there. It
    is a prepared attack exactly when the first one is."""
    if not searches(search) or not isinstance(search, Iterative):
        raise InputError(
            f"{type(search).__name__} does not search by matching gradients, so it begins from no "
            "guess: expected an attack that is a leakgauge.attacks.parts.Search, and not prepared"
        )
    kind = BegunPrepared if isinstance(first, PreparedAttack) else Begun
    return kind(first, search, restore, names)


def searches(attack: object) -> bool:
    """Whether it searches by matching gradients, and can begin from another's guess."""
    return isinstance(attack, Search) and not isinstance(attack, PreparedAttack)


def parts(attack: Attack) -> tuple[Attack, ...]:
    """The attacks of a hybrid in their order; of any other, itself."""
    return (*parts(attack.first), attack.search) if isinstance(attack, Begun) else (attack,)


def _prepared(attack: Attack) -> PreparedAttack:
    assert isinstance(attack, PreparedAttack)
    return attack


def _copied(rng: torch.Generator) -> torch.Generator:
    copy = torch.Generator(rng.device)
    copy.set_state(rng.get_state())
    return copy
