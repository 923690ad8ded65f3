"""What an audit consists of: controls first, then the trials of the plan, the federations that are
trained for a trade-off, then the ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from leakgauge.attacks.begun import parts
from leakgauge.audit.document import NO_DEFENCE
from leakgauge.audit.ladder import factors, weakened
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import Times, Trial
from leakgauge.fl import Scenario
from leakgauge.threat import realism, sees_one
from leakgauge.types import Answered, Iterative, ThreatModel

CONTROL_SEEDS = 2  # a control asks whether an attack can work at all, not how well


@dataclass(frozen=True)
class Case:
    """One trial to run, by the keys of the plan.

    `kept` names the factors of the audited scenario that stand; None keeps all of them.
    """

    kind: Literal["control", "trial", "ladder"]
    stage: int
    defence: str
    attack: str
    seed: int
    kept: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        if self.kept is None:
            place = f"round{self.stage}.{self.defence}"
        else:
            place = "+".join(["twin", *self.kept]).replace(" ", "-")
        return f"{place}.{self.attack}.seed{self.seed}"

    def keeps(self, factor: str) -> bool:
        return self.kept is None or factor in self.kept

    @property
    def honest(self) -> int:
        """How many honest rounds come before the attacked one."""
        return self.stage if self.keeps("stage") else 0

    @property
    def federation(self) -> tuple[object, ...]:
        """The same for cases whose round is the same."""
        return self.stage, self.defence, self.seed, self.kept

    def trial(self, plan: Plan) -> partial[Trial]:
        """The trial of this case but for how it ended: its status, error, times and the rest."""
        return partial(
            Trial,
            self.id,
            self.kind,
            self.honest,
            self.defence if self.keeps("defence") else NO_DEFENCE,
            self.attack,
            self.seed,
            realism(self.threat(plan), plan.attacks[self.attack]),
        )

    def crashed(self, plan: Plan, times: Times, error: str, traceback: str | None = None) -> Trial:
        """The crash of an attack that nobody asked for is kept in words, but fails no audit."""
        if self.attack in plan.asked:
            return self.trial(plan)("failed", error, times, traceback)
        words = f"it is run without being asked for, and crashed ({error}): please report this"
        return self.trial(plan)("not applicable", words, times, traceback)

    def scenario(self, plan: Plan) -> Scenario:
        scenario = plan.scenario(self.stage, self.defence)
        return scenario if self.kept is None else weakened(scenario, self.kept)

    def threat(self, plan: Plan) -> ThreatModel:
        threat = plan.document.threat
        threat = replace(threat, rounds=min(threat.rounds, self.honest + 1))
        if self.keeps("aggregation"):
            return threat
        # One client takes part: whoever looks sees that client's update.
        actor = threat.actor if sees_one(threat.actor) else "server"
        return replace(threat, actor=actor, client=0)


@dataclass(frozen=True)
class Training:
    """One federation to train for a trade-off, by the keys of the plan."""

    defence: str
    seed: int

    @property
    def id(self) -> str:
        return f"{self.defence}.seed{self.seed}"


Work: TypeAlias = Case | Training
"""What a worker is given."""


def trainings(plan: Plan) -> list[Training]:
    """Every defence of the plan for every seed, if the plan asks for a trade-off."""
    if plan.document.tradeoff is None:
        return []
    return [Training(d, seed) for d in plan.defences for seed in plan.document.audit.seeds]


def trials(plan: Plan) -> list[Case]:
    """The trials of the plan: cheap attacks first; those that share a round stand together."""
    cheap_first = sorted(plan.attacks, key=lambda name: effort(plan, name))
    return [
        Case("trial", stage, defence, attack, seed)
        for stage in plan.document.federation.rounds
        for defence in plan.defences
        for seed in plan.document.audit.seeds
        for attack in cheap_first
        if attack not in plan.blind or isinstance(plan.defences[defence], Answered)
    ]


def controls(plan: Plan) -> list[Case]:
    """Every attack that was asked for on the known-weak twin; where the audit holds that very twin,
    its trials. The exact recursion needs no control: it works or says why not."""
    all_seeds = plan.document.audit.seeds
    for case in () if plan.captured else trials(plan):
        if not factors(case.scenario(plan), plan.document.threat.actor):
            place = (case.stage, case.defence)
            return [Case("trial", *place, a, s) for s in all_seeds for a in plan.asked]
    seeds = all_seeds[:CONTROL_SEEDS]
    stage, defence = plan.document.federation.rounds[0], next(iter(plan.defences))
    return [Case("control", stage, defence, a, s, ()) for s in seeds for a in plan.asked]


def ladder(plan: Plan, attack: str) -> list[tuple[str, list[Case]]]:
    """Rung by rung from the twin to the audited scenario that differs from it most: the factor
    that each rung puts back, and its cases."""
    actor = plan.document.threat.actor
    places = [(s, d) for s in plan.document.federation.rounds for d in plan.defences]
    stage, defence = max(places, key=lambda place: len(factors(plan.scenario(*place), actor)))
    found = factors(plan.scenario(stage, defence), actor)
    if not found:
        return []
    all_seeds = plan.document.audit.seeds
    seeds = all_seeds[:CONTROL_SEEDS]
    rungs = [("twin", [case for case in controls(plan) if case.attack == attack])]
    for count, factor in enumerate(found[:-1], start=1):
        kept = tuple(found[:count])
        rungs.append((factor, [Case("ladder", stage, defence, attack, s, kept) for s in seeds]))
    rungs.append((found[-1], [Case("trial", stage, defence, attack, s) for s in all_seeds]))
    return rungs


def effort(plan: Plan, name: str) -> int:
    """How long an attack searches, as its options say: iterations × restarts, of a hybrid those of
    all its searches."""
    return sum(
        part.iterations * part.restarts
        for part in parts(plan.attacks[name])
        if isinstance(part, Iterative)
    )
