"""What the defences of a plan spend of privacy over all its planned rounds.

Sampling lowers what is spent only where the one who reads the updates cannot tell who was drawn:

- A record is drawn for a round with the chance records / held, by its client alone. That counts
  where it is used once in the round. One that is used in several steps of a round is in all of
  them, or in none: then nothing is taken off, and each of its steps is counted.
- Which clients take part is known to every server. Other clients do not know it.
"""

from __future__ import annotations

from dataclasses import replace

from leakgauge.accounting import Unit, mechanism, spent
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import Guarantee
from leakgauge.errors import MissingExtra
from leakgauge.fl.local import step_count
from leakgauge.fl.simulate import model_seed, records_of, shards_of
from leakgauge.tensors import seeded

CAPTURED = (
    "These rounds were captured: what their clients did to protect themselves is not known here, "
    "and nothing is promised."
)


def guarantees(plan: Plan) -> tuple[Guarantee, ...]:
    """One for each defence of the plan, in its order."""
    if plan.captured:
        return tuple(Guarantee(name, CAPTURED) for name in plan.defences)
    return tuple(_planned(plan, name) for name in plan.defences)


def _planned(plan: Plan, name: str) -> Guarantee:
    federation = plan.document.federation
    given = guarantee(plan, name, federation.planned_rounds or max(federation.rounds) + 1)
    told = given.spent
    if isinstance(told, str) or federation.planned_rounds is not None:
        return given
    words = (
        f"{told.words} The plan has no planned_rounds: it was counted up to the last attacked "
        "round, and every further round spends more."
    )
    return Guarantee(name, replace(told, words=words))


def guarantee(plan: Plan, name: str, rounds: int) -> Guarantee:
    """What a defence of the plan spends over so many rounds, or why nothing is promised."""
    found = mechanism(plan.defences[name])
    if isinstance(found, str):
        return Guarantee(name, found)
    steps, rate = _drawn(plan, name, found.unit)
    try:
        return Guarantee(name, spent(plan.defences[name], rounds=rounds, steps=steps, rate=rate))
    except MissingExtra as error:
        return Guarantee(name, f"{error}.")


def _drawn(plan: Plan, name: str, unit: Unit) -> tuple[int, float]:
    """In how many steps of a round a record can be, and the chance that counts."""
    federation, training = plan.document.federation, plan.document.federation.training
    scenario = plan.scenario(federation.rounds[0], name)
    if unit == "update":
        taking = (federation.participants or federation.clients) / federation.clients
        return 1, taking if plan.document.threat.actor == "client" else 1.0
    most = 1, 0.0
    for seed in plan.document.audit.seeds:
        rng = seeded(seed, "federation")
        model_seed(rng)  # as `simulate` draws: first the model, then who holds which records
        for shard in shards_of(scenario, rng):
            records = records_of(scenario, len(shard))
            batches = -(-records // training.batch_size)
            uses = -(-step_count(records, training) // batches)  # passes over them, begun ones too
            most = max(most, (uses, 1.0 if uses > 1 else records / len(shard)))
    return most
