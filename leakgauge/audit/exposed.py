"""What the updates of a plan show exactly, before any attack: the exposure of its federation."""

from __future__ import annotations

import torch
from torch import nn

from leakgauge import threat
from leakgauge.attacks import Exposure, exposure
from leakgauge.audit import cases
from leakgauge.audit.plan import Plan
from leakgauge.fl.local import ready
from leakgauge.fl.simulate import initial_model, records_of, shards_of
from leakgauge.tensors import seeded
from leakgauge.types import Selective


def begun(plan: Plan) -> tuple[nn.Module, torch.Generator]:
    """The first model of the plan, and the generator that drew it: what it draws next is who holds
    which records. A model that a defence of the plan cannot work on is refused."""
    first = cases.trials(plan)[0]
    rng = seeded(first.seed, "federation")
    model = initial_model(first.scenario(plan), rng)
    for defence in plan.defences.values():
        if isinstance(defence, Selective):
            defence.check(ready(model, plan.document.federation.training))
    return model, rng


def exposures(
    plan: Plan, start: tuple[nn.Module, torch.Generator] | None = None
) -> tuple[Exposure, ...]:
    """One for each number of records that an update of the plan holds: where clients hold
    different numbers, the fewest and the most; of captured rounds, every number there is. None for
    who does not hold the weights: what is shown is read with them. `start` is what `begun` gave, if
    it was asked already: building a model may take long."""
    who, federation = plan.document.threat, plan.document.federation
    if "weights" not in threat.holds(who):
        return ()
    if plan.captured:
        setting = plan.captured[0].setting
        counts = {tuple(one.sizes[k] for k in threat.victims(one, who)) for one in plan.captured}
    else:
        scenario = cases.trials(plan)[0].scenario(plan)
        model, rng = start or begun(plan)
        setting = scenario.setting(model)
        sizes = sorted(records_of(scenario, len(shard)) for shard in shards_of(scenario, rng))
        seen = 1 if threat.sees_one(who.actor) else scenario.present
        counts = {tuple(sizes[:seen]), tuple(sizes[-seen:])}
    ordered = sorted(counts, key=sum)
    return tuple(exposure(setting, federation.training, count) for count in ordered)
