"""What an audit will cost, from a calibration: short trials of each attack, timed whole.

A trial costs a fixed part (observation, self-check, label inference, scoring, pictures) and a part
for each iteration. Both are measured by two shortened trials of different length, from observation
to pictures, in a folder that is thrown away; the longer one is long enough to be timed well. Every
attack is measured on the audited federation and on the known-weak twin, where the controls run.
Rungs of the ladder lie between the two, in proportion to the records that a client's steps see.
An attack without iterations is run whole.

What an attack prepares that changes no model is shared by the trials with the same weights and
training, and counted apart, once for each of them. It is tried for a few seconds: its own signs of
progress tell how much of it that was. One that gives none, or does not stop, is timed whole. An
attack that changes the model prepares in every trial, as a part of it.

A federation that is trained for a trade-off costs the same in each of its rounds: each defence is
tried for a few of them.

The forecast is CPU time of all threads, because that does not depend on how busy the machine is. It
has an interval: a timing is worth ± MARGIN, and which attack climbs the ladder is known only after
the controls, unless one recovered pictures in the calibration already. How far it was off stands in
the result beside the actual time.
"""

from __future__ import annotations

import hashlib
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

import torch

from leakgauge import threat
from leakgauge.attacks.begun import parts
from leakgauge.audit import cases
from leakgauge.audit.advice import CAP
from leakgauge.audit.bench import FINISHED, Bench
from leakgauge.audit.cases import Case, Training
from leakgauge.audit.plan import Plan
from leakgauge.audit.training import accuracy
from leakgauge.errors import NotApplicable
from leakgauge.fl import played
from leakgauge.fl.local import step_count
from leakgauge.fl.simulate import initial_model, records_of
from leakgauge.tensors import raw, seeded
from leakgauge.types import Attack, Iterative, Learned, PreparedAttack, Resources, Unaimed

SHORT, LONG = 3, 13  # iterations of the first two timed trials
ENOUGH = 0.5  # CPU seconds by which two trials must differ for their difference to be trusted
LONGEST = 200  # iterations of a timed trial
TRIED_ROUNDS = 3  # of a federation that is to be trained
TRIED = 4.0  # seconds for which a preparation is tried
MARGIN = 0.25  # of a forecast, from the timing alone: docs/methods/audit.md has measured errors


@dataclass(frozen=True)
class Applicability:
    """Whether an attack of the plan applies, why not, and what one trial of it costs, without the
    preparation that it shares with other trials: `preparing` is what that costs once."""

    attack: str
    reason: str | None
    cpu_seconds: float
    preparing: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """CPU seconds, with the interval in which they should lie, and peak memory of an audit. In them
    are the `training_seconds` of all federations that are trained for a trade-off."""

    attacks: tuple[Applicability, ...]
    trials: int
    cpu_seconds: float
    low: float
    high: float
    megabytes: float
    trainings: int = 0
    training_seconds: float = 0.0


def forecast(
    plan: Plan,
    tell: Callable[[str], None] = lambda attack: None,
    trainings: Sequence[Training] = (),
    prepared: Path | None = None,
) -> Forecast:
    """Try every attack for a moment on the first round of the plan, and on the twin, and each
    defence of the `trainings` for a few rounds. Nothing is kept. `tell` hears the name of each
    attack or defence as its turn comes. What lies finished in the folder `prepared` costs no
    more."""
    torch.set_num_threads(plan.document.audit.threads)
    planned = cases.trials(plan)
    controls = cases.controls(plan) if plan.document.audit.control else []
    with tempfile.TemporaryDirectory(prefix="leakgauge-") as folder:
        trying = Trying(plan, Path(folder), tell)
        simulation = trying.simulation(planned[0])
        firsts = {case.attack: case for case in reversed(planned)}
        found = {name: trying.cost(firsts[name]) for name in plan.attacks}
        twins = {case.attack: case for case in controls if case.kind == "control"}
        on_twin = {name: trying.cost(case) for name, case in twins.items()}
        firsts_trained = {one.defence: one for one in reversed(trainings)}
        training = {name: trying.training(one) for name, one in firsts_trained.items()}

    def between(case: Case, of: Callable[[Applicability], float]) -> float:
        whole = of(found[case.attack])
        if case.kept is None or case.attack not in on_twin:
            return whole
        twin = of(on_twin[case.attack])
        least, most = _work(plan, twins[case.attack]), _work(plan, replace(case, kept=None))
        share = (_work(plan, case) - least) / (most - least) if most > least else 0.0
        return twin + share * (whole - twin)

    def cost(wanted: list[Case], met: list[Case]) -> float:
        """Of these cases, after others whose preparations they meet."""
        done = {None, *map(trying.preparation, met)}
        new: dict[object, float] = {}  # of hybrids, the one tried first had to prepare
        for case in wanted:
            key = trying.preparation(case)
            if key not in done and (key in new or not trying.finished(case, prepared)):
                new[key] = max(new.get(key, 0.0), between(case, lambda one: one.preparing))
        return (
            sum(between(case, lambda one: one.cpu_seconds) for case in wanted)
            + sum(new.values())
            + simulation.total(wanted)
        )

    certain = dict.fromkeys([*controls, *planned])
    trained = sum(training[one.defence] for one in trainings)
    known = cost(list(certain), []) + trained
    ladders = []
    if plan.document.audit.explain and controls:
        for name in trying.climbers(plan.asked):
            rungs = [case for _, rung in cases.ladder(plan, name) for case in rung]
            new = [case for case in dict.fromkeys(rungs) if case not in certain]
            if on_twin.get(name, found[name]).reason is None:
                ladders.append(cost(new, list(certain)))
    ladders = ladders or [0.0]
    return Forecast(
        attacks=tuple(found.values()),
        trials=len(certain),
        trainings=len(trainings),
        training_seconds=trained,
        cpu_seconds=known + statistics.mean(ladders),
        low=(1 - MARGIN) * (known + min(ladders)),
        high=(1 + MARGIN) * (known + max(ladders)),
        megabytes=_peak_megabytes(),
    )


@dataclass(frozen=True)
class _Simulation:
    """CPU seconds of a federation's start and of each of its rounds."""

    start: float
    each: float

    def total(self, wanted: list[Case]) -> float:
        """Of these cases in this order: a round that the next cases share is played once."""
        played = [next(cases) for _, cases in groupby(wanted, attrgetter("federation"))]
        return sum(self.start + case.honest * self.each for case in played)


class Trying:
    """Times trials of a plan whose attacks are shortened one after the other."""

    def __init__(self, plan: Plan, folder: Path, tell: Callable[[str], None]):
        self.plan, self.tell = plan, tell
        self.bench = Bench(plan, folder)
        self._reached: dict[str, float] = {}  # dB, the most that a timed trial of an attack had
        self._weights: dict[int, str] = {}  # a digest of the first model, by seed

    def climbers(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The attacks that may climb the ladder: the one that recovered pictures already, or all.
        The best on the twin climbs, and none is better than a picture itself."""
        best = max(asked, key=lambda name: self._reached.get(name, 0.0))
        return (best,) if self._reached.get(best, 0.0) > CAP else asked

    def simulation(self, first: Case) -> _Simulation:
        stages = self.plan.document.federation.rounds
        start = self._simulated(replace(first, stage=0))
        later = min(2, max(stages))
        each = (self._simulated(replace(first, stage=later)) - start) / later if later else 0.0
        round_ = self.bench.simulated(first)
        threat.observe(round_, first.threat(self.plan))  # a wrong threat model is no attack's fault
        return _Simulation(start, max(0.0, each))

    def _simulated(self, case: Case) -> float:
        began = time.process_time()
        self.bench.simulated(case)
        return time.process_time() - began

    def training(self, training: Training) -> float:
        """What it costs to train the federation to its end, from its first rounds: the very first
        one also builds the model and shares out the records."""
        self.tell(training.defence)
        asked, held_out = self.plan.document.tradeoff, self.plan.held_out
        assert asked is not None
        assert held_out is not None
        scenario = self.plan.scenario(0, training.defence)
        rounds = played(scenario, seeded(training.seed, "federation"))
        times = [time.process_time()]
        for _, model in islice(rounds, min(TRIED_ROUNDS, asked.rounds)):
            times.append(time.process_time())
            after = model
        each = (times[-1] - times[1]) / max(1, len(times) - 2)
        accuracy(scenario, after, held_out)
        looked = time.process_time() - times[-1]
        looks = asked.rounds // asked.every + 1 if asked.every else 1
        return times[1] - times[0] + (asked.rounds - 1) * each + looks * looked

    def cost(self, case: Case) -> Applicability:
        """What a trial of this case costs once its round is played, and whether it applies."""
        self.tell(case.attack)
        attack = self.plan.attacks[case.attack]
        try:
            preparing = self.preparing(case, attack)
            if not isinstance(attack, Iterative) or not attack.iterations:
                return Applicability(case.attack, None, self._timed(case, attack), preparing)
            self._timed(case, attack.shortened(1, 1))  # warms up
            more = attack.restarts - 1
            once = self._fitted(case, attack, 1)
            again = self._fitted(case, attack, 2) if more else once
            return Applicability(case.attack, None, once + more * (again - once), preparing)
        except Refused as reason:
            return Applicability(case.attack, str(reason), 0.0)

    def preparing(self, case: Case, attack: Attack) -> float:
        """What the preparation costs that this case shares with others; later trials of this
        forecast meet what was made of it so far."""
        if not shares(attack):
            return 0.0
        audit, marks = self.plan.document.audit, list[tuple[int, int, float]]()
        limit = math.inf if audit.seconds is None else audit.seconds
        round_ = self.bench.simulated(case)

        def progress(done: int, total: int, objective: float) -> None:
            marks.append((done, total, time.process_time()))

        tried = Resources(device=audit.device, seconds=min(TRIED, limit), progress=progress)
        began = time.process_time()
        try:
            self.bench.fitted(case, round_, tried)
        except NotApplicable as reason:
            raise Refused(str(reason)) from reason
        except Exception as error:  # the audit will keep it, trial by trial
            raise Refused(f"it crashes ({type(error).__name__}: {error})") from error
        spent = time.process_time() - began
        if not marks:
            return spent
        (first, _, start), (done, total, end) = marks[0], marks[-1]
        each = (end - start) / (done - first) if done > first else (end - began) / max(1, done)
        return min(spent + each * max(0, total - done), max(limit, spent))

    def finished(self, case: Case, prepared: Path | None) -> bool:
        """Whether the preparation of this case lies finished in a folder."""
        if prepared is None or not any(prepared.glob(f"*{FINISHED}")):
            return False
        there = Bench(self.plan, prepared, self.bench.measures)
        return there.fitted_before(case, self.bench.simulated(case)) is not None

    def preparation(self, case: Case) -> object:
        """The same for cases that share what their attack prepares; None if it prepares nothing, or
        changes the model."""
        attack = self.plan.attacks[case.attack]
        if not shares(attack):
            return None
        attack = parts(attack)[0]  # what a hybrid begins with is what is prepared
        if isinstance(attack, Unaimed):
            return repr(attack)
        if self.plan.captured and case.kept is None:
            return repr(attack), case.stage
        scenario = case.scenario(self.plan)
        if case.seed not in self._weights:
            model = initial_model(scenario, seeded(case.seed, "federation"))
            digest = hashlib.sha256()
            for value in model.state_dict().values():
                digest.update(raw(value))
            self._weights[case.seed] = digest.hexdigest()
        trained = (case.honest, repr(scenario.defence), case.seed) if case.honest else ()
        # Where clients train on all they hold, how many records that is follows from the seed.
        records = case.seed if scenario.records == "all" else scenario.records
        clients = scenario.present
        who = case.threat(self.plan)
        asked = scenario.training, records, clients, who.actor
        behind = 1 if threat.sees_one(who.actor) else clients
        adaptive = self.plan.document.audit.adaptive
        learned = isinstance(attack, Learned) and threat.defends(who, behind, adaptive=adaptive)
        defence = repr(scenario.defence) if learned else None
        return repr(attack), self._weights[case.seed], trained, asked, defence

    def _fitted(self, case: Case, attack: Iterative, restarts: int) -> float:
        """The cost of all its iterations: fixed part + iterations × cost of each."""
        wanted = attack.iterations

        def timed(count: int) -> float:
            return self._timed(case, attack.shortened(count, restarts))

        if wanted <= LONG:
            return timed(wanted)
        short, long, count = timed(SHORT), timed(LONG), LONG
        if long - short < ENOUGH:
            each = max((long - short) / (LONG - SHORT), ENOUGH / LONGEST)
            count = max(LONG, min(wanted, LONGEST, math.ceil(SHORT + ENOUGH / each)))
            long = timed(count) if count > LONG else long
        each = max(0.0, long - short) / (count - SHORT)
        cost = long + each * (wanted - count)
        limit = self.plan.document.audit.seconds
        return cost if limit is None else min(cost, short + limit)

    def _timed(self, case: Case, attack: Attack) -> float:
        """CPU seconds of one trial, whose round is played before."""
        self.bench.plan = replace(self.plan, attacks={**self.plan.attacks, case.attack: attack})
        self.bench.simulated(case)
        trial = self.bench.trial(case, lambda done, total, objective: None).trial
        if trial.status == "not applicable":
            raise Refused(trial.error)
        if trial.status == "failed":  # the audit will keep it, trial by trial
            raise Refused(f"it crashes ({trial.error})")
        if trial.score:
            reached = statistics.median(trial.score.scores["psnr"])
            self._reached[case.attack] = max(reached, self._reached.get(case.attack, 0.0))
        return trial.times.cpu_seconds


class Refused(Exception):
    """Why an attack cannot be timed."""


def shares(attack: Attack) -> bool:
    """Whether it prepares something that several trials can use."""
    return isinstance(attack, PreparedAttack) and not attack.manipulates


def _work(plan: Plan, case: Case) -> int:
    """Records that go through the network for one simulated update of this case."""
    scenario = case.scenario(plan)
    steps = step_count(
        records_of(scenario, len(scenario.data) // scenario.clients), scenario.training
    )
    alone = threat.sees_one(case.threat(plan).actor)
    clients = 1 if alone else scenario.present
    return steps * scenario.training.batch_size * clients


def _peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
