"""Known-weak twins of a scenario: the positive control, and the ladder that explains a result.

The weakest twin has one record, one plain SGD step, batch norm in eval mode, an untrained model, no
aggregation with others and no defence. If an attack cannot break that, its failure elsewhere says
nothing. From there the ladder puts the user's own factors back one by one, in a fixed order, until
it is the audited scenario again: the rung where the score falls most is the factor that hinders the
attack most. Whether it protects from others too, a ladder of one attack cannot say.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from leakgauge.fl import Scenario
from leakgauge.threat import sees_one
from leakgauge.types import Actor

FACTORS = ("batch", "steps", "batch norm", "aggregation", "stage", "defence")


def weakened(scenario: Scenario, kept: Collection[str]) -> Scenario:
    """The scenario with every factor that is not in `kept` at its weakest."""
    training = scenario.training
    records = scenario.records
    if "batch" not in kept:
        training, records = replace(training, batch_size=1), 1
    if "steps" not in kept:
        training = replace(
            training, steps=1, epochs=None, optimiser="sgd", momentum=0.0, weight_decay=0.0
        )
        records = None  # one step sees one batch
    if "batch norm" not in kept:
        training = replace(training, batch_norm="eval", dropout="off")
    return replace(
        scenario,
        training=training,
        records=records,
        participants=scenario.participants if "aggregation" in kept else 1,
        secure=scenario.secure if "aggregation" in kept else None,
        rounds=scenario.rounds if "stage" in kept else 0,
        defence=scenario.defence if "defence" in kept else None,
    )


def factors(scenario: Scenario, actor: Actor) -> list[str]:
    """The factors in which the scenario differs from its weakest twin, in the ladder's order."""

    def differs_by(factor: str) -> bool:
        return weakened(scenario, {*FACTORS} - {factor}).training != scenario.training

    differs = {
        "batch": (scenario.training.batch_size, scenario.records or 1) != (1, 1),
        "steps": differs_by("steps"),
        "batch norm": differs_by("batch norm"),
        # Who sees each update by itself is not hindered by the other clients.
        "aggregation": not sees_one(actor) and scenario.present > 1,
        "stage": scenario.rounds > 0,
        "defence": scenario.defence is not None,
    }
    return [factor for factor in FACTORS if differs[factor]]


def describe(scenario: Scenario, factor: str, defence: str) -> str:
    """What putting this factor back means, in words; `defence` is its name in the plan."""
    training = scenario.training
    steps = f"{training.epochs} epochs" if training.epochs else f"{training.steps} local steps"
    secure = scenario.secure
    rounded = f", rounded to {secure.bits} bits" if secure and secure.clip is not None else ""
    return {
        "twin": "batch 1, one step, eval batch norm, untrained, no defence",
        "batch": f"batch 1 → {training.batch_size}",
        "steps": f"one plain step → {steps} of {training.optimiser}",
        "batch norm": f"eval → {training.batch_norm} batch norm, dropout {training.dropout}",
        "aggregation": f"one client → {scenario.present} aggregated{rounded}",
        "stage": f"untrained → after {scenario.rounds} rounds",
        "defence": f"no defence → {defence}",
    }[factor]
