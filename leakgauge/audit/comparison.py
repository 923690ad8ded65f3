"""What a plan with a [tradeoff] means for the rest of it: its stages, its defences, its records."""

from __future__ import annotations

from dataclasses import replace

from leakgauge.audit.document import NO_DEFENCE, Comparison, Document
from leakgauge.audit.public import set_aside, without
from leakgauge.errors import PlanError
from leakgauge.tensors import seeded
from leakgauge.types import Dataset

FEWEST_SEEDS = 2


def filled(document: Document, *, staged: bool) -> Document:
    """The document with what its [tradeoff] implies: no defence is always measured beside the
    others, as what they are compared with. The first and the last trained round are attacked
    unless the plan says which (`staged`)."""
    asked = document.tradeoff
    if asked is None:
        return document
    federation, seeds = document.federation, document.audit.seeds
    if federation.captured is not None:
        raise PlanError(
            "tradeoff: captured rounds have been played, and nothing can be trained: describe the "
            "federation in a plan, and leave [tradeoff] out of this one"
        )
    if len(seeds) < FEWEST_SEEDS:
        raise PlanError(
            f"tradeoff: one seed shows no spread of the accuracy, and audit.seeds is {list(seeds)}:"
            f" give at least {FEWEST_SEEDS}, better 5"
        )
    if asked.every is not None and asked.every > asked.rounds:
        raise PlanError(
            f"tradeoff.every is {asked.every}, but only {asked.rounds} rounds are trained: give at "
            "most that, or leave it out"
        )
    last = asked.rounds - 1
    if not staged:
        federation = replace(federation, rounds=tuple(dict.fromkeys((0, last))))
    if max(federation.rounds) > last:
        raise PlanError(
            f"federation.rounds attacks stage {max(federation.rounds)}, but tradeoff.rounds trains "
            f"{asked.rounds} rounds, counted from 0: attack stages up to {last}, or train longer"
        )
    defences = document.defence
    if all(table.get("name") != NO_DEFENCE for table in defences):
        defences = ({"name": NO_DEFENCE}, *defences)
    return replace(document, federation=federation, defence=defences)


def held_out(records: Dataset, asked: Comparison) -> tuple[Dataset, Dataset]:
    """The records on which accuracy is measured, and those for the clients and the attacker."""
    wanted = asked.held_out
    number = wanted if isinstance(wanted, int) else max(1, round(wanted * len(records)))
    if number >= len(records):
        raise PlanError(
            f"tradeoff.held_out sets {number} records aside, but {records.name} has only "
            f"{len(records)}: leave some for the clients"
        )
    return set_aside(records, number, seeded("held out"))


def unknown(held_out: Dataset, public: Dataset) -> Dataset:
    """Those held-out records that the attacker does not hold among its public ones."""
    if not len(left := without(held_out, public)):
        raise PlanError(
            f"tradeoff.held_out: every held-out record of {held_out.name} equals a client's or a "
            "public one, bit for bit: accuracy on them would say nothing; use other data"
        )
    return left
