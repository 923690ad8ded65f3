"""What the updates of a plan show exactly, before any attack: the exposure of its federation."""

from __future__ import annotations

from leakgauge import threat
from leakgauge.attacks import Exposure, exposure
from leakgauge.audit import cases
from leakgauge.audit.plan import Plan
from leakgauge.fl.simulate import initial_model, records_of
from leakgauge.tensors import seeded


def exposures(plan: Plan) -> tuple[Exposure, ...]:
    """One for each number of records that an update of the plan holds: where clients hold
    different numbers, the fewest and the most; of captured rounds, every number there is."""
    who, federation = plan.document.threat, plan.document.federation
    if plan.captured:
        setting = plan.captured[0].setting
        counts = {tuple(one.sizes[k] for k in threat.victims(one, who)) for one in plan.captured}
    else:
        first = cases.trials(plan)[0]
        scenario, rng = first.scenario(plan), seeded(first.seed, "federation")
        setting = scenario.setting(initial_model(scenario, rng))
        shards = scenario.partition.split(scenario.data, scenario.clients, rng)
        sizes = sorted(records_of(scenario, len(shard)) for shard in shards)
        together = federation.participants or federation.clients
        seen = 1 if who.actor == "server" else together
        counts = {tuple(sizes[:seen]), tuple(sizes[-seen:])}
    ordered = sorted(counts, key=sum)
    return tuple(exposure(setting, federation.training, count) for count in ordered)
