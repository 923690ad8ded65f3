"""One federation trained for a trade-off: its accuracy on records that nobody else holds.

The rounds are those that the trials attack, played by the same code from the same seed
(`fl.played`), so that accuracy and leak are measured on one federation. The held-out records are
set aside before the clients and the attacker get theirs, and serve for nothing but this.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from itertools import islice

import torch
from torch import nn

from leakgauge.audit.cases import Training
from leakgauge.audit.plan import Plan
from leakgauge.audit.privacy import guarantee
from leakgauge.audit.results import Budget, Times, Trained
from leakgauge.errors import InputError
from leakgauge.fl import Scenario, played
from leakgauge.tensors import seeded
from leakgauge.types import Dataset

AT_ONCE = 500  # records that enter the model together


def trained(plan: Plan, training: Training, progress: Callable[[int, int], None]) -> Trained:
    """Train the federation to its end, and measure its accuracy on the way."""
    began, cpu = time.monotonic(), time.process_time()
    asked, held_out = plan.document.tradeoff, plan.held_out
    assert asked is not None  # there is no training without
    assert held_out is not None
    scenario = plan.scenario(0, training.defence)
    measured = {}
    rounds = played(scenario, seeded(training.seed, "federation"))
    for done, (_, model) in enumerate(islice(rounds, asked.rounds), start=1):
        if done == asked.rounds or (asked.every and done % asked.every == 0):
            measured[done] = accuracy(scenario, model, held_out)
        progress(done, asked.rounds)
    return Trained(
        id=training.id,
        defence=training.defence,
        seed=training.seed,
        status="done",
        error=None,
        times=Times(time.monotonic() - began, time.process_time() - cpu),
        rounds=tuple(measured),
        accuracy=tuple(measured.values()),
        records=len(held_out),
        chance=int(held_out.labels.bincount().max()) / len(held_out),
        spent=spent(plan, training.defence, asked.rounds),
    )


def accuracy(scenario: Scenario, model: nn.Module, records: Dataset) -> float:
    """The share of records whose class the model names rightly: batch norm by its running
    statistics, dropout off."""
    setting = scenario.setting(copy.deepcopy(model).eval())
    right = 0
    for start in range(0, len(records), AT_ONCE):
        labels = records.labels[start : start + AT_ONCE]
        where = f"the model, in eval mode on {len(labels)} held-out records"
        with torch.no_grad():
            try:
                entering = setting.record.entering(records.inputs[start : start + AT_ONCE])
                outputs = setting.model(entering)
            except Exception as error:  # it is the user's
                raise InputError(f"{where}, failed ({type(error).__name__}: {error}).") from error
            logits = setting.task.check(outputs, labels, where)
            known = logits.isfinite().all(1)  # a model that diverged names nothing
            right += int(((logits.argmax(1) == labels) & known).sum())
    return right / len(records)


def spent(plan: Plan, defence: str, rounds: int) -> Budget | None:
    """The privacy budget that the clients' defence uses up over so many rounds; None where it
    bounds nothing, or where the accountant is not installed."""
    found = guarantee(plan, defence, rounds).spent
    return None if isinstance(found, str) else Budget(found.epsilon, found.delta, found.words)
