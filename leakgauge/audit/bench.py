"""One trial: simulate, observe, attack, score. (One federation that is trained: training.py.)

A trial is one attack on one client of one simulated round, for one seed (weights, records and
attack randomness all follow from it). It ends as *done*, *unscored* (nobody knows the truth), *not
applicable* (the method cannot work on this model, with its reason) or *failed* (it crashed; the
error is kept). An attack that the plan did not ask for never ends as failed. Errors in what the
user gave (plan, data, model, update) are raised.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge import diagnostics, metrics, threat
from leakgauge.attacks._own import apart
from leakgauge.attacks.begun import Begun, parts
from leakgauge.audit import captured, checks, images
from leakgauge.audit.cases import Case, Work
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import Found, Score, Sensitivity, Status, Times, Trained, Trial
from leakgauge.audit.score import scored
from leakgauge.audit.training import trained
from leakgauge.audit.verdict import measurements
from leakgauge.config import plain
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import simulate, tampered
from leakgauge.fl.local import train
from leakgauge.guard import Guard
from leakgauge.kept import Checkpoint, alone, key_of
from leakgauge.tensors import seeded
from leakgauge.types import (
    Answer,
    Batch,
    Exchange,
    Kept,
    Learned,
    Observation,
    PreparedAttack,
    Reconstruction,
    Resources,
    Round,
    Scorer,
    Target,
    Unaimed,
)

FINISHED = ".finished.safetensors"  # ends the name of what is prepared to the end
HISTORY_POINTS = 200
Progress: TypeAlias = Callable[[int, int, float], None]
"""Called with steps done, steps in all and the objective."""

LEARNED = "learned from updates that had passed the same defence"
NOISE = 0.01  # pixel noise of the sensitivity, as a share of the range


@dataclass(frozen=True)
class Done:
    """A trial that has ended, and its pictures as PNG, by their paths below the audit's folder."""

    trial: Trial
    pictures: Mapping[str, bytes] = field(default_factory=dict)


class Bench:
    """Runs cases of a plan one at a time. It writes nothing but what a long preparation of an
    attack keeps, in the folder `prepared`."""

    def __init__(self, plan: Plan, prepared: Path, measures: Mapping[str, Scorer] | None = None):
        self.plan, self.prepared = plan, prepared
        measurements(plan.metrics, plan.document.audit.limit)  # a metric's name may be refused
        # What a metric reads is read here, so that its absence is said at once.
        self.measures = measures or {n: metrics.loaded(one) for n, one in plan.metrics.items()}
        self._attacks = plan.attacks  # also where a forecast shortens them: they prepare the same
        self._preparing = 0.0  # CPU seconds of the running trial
        self._fit = 0.0  # of what it found prepared, or prepared itself
        self._shared: str | None = None  # the key of that
        self._key: tuple[object, ...] | None = None
        self._round: Round | None = None

    def run(self, work: Work, progress: Progress) -> Done | Trained:
        """One trial, or one federation that is trained for a trade-off."""
        if isinstance(work, Case):
            return self.trial(work, progress)
        return trained(self.plan, work, lambda done, total: progress(done, total, 0.0))

    def trial(self, case: Case, progress: Progress) -> Done:
        """One trial, from simulation to scores."""
        began, cpu = time.monotonic(), time.process_time()
        self._preparing, self._fit, self._shared = 0.0, 0.0, None

        def took() -> Times:
            wall, spent = time.monotonic() - began, time.process_time() - cpu
            return Times(wall, spent, self._preparing, self._fit)

        round_ = self.simulated(case, progress)  # what is wrong here is the user's federation
        seen = None
        if not isinstance(self.plan.attacks[case.attack], PreparedAttack):
            seen = threat.observe(round_, case.threat(self.plan))  # nor is this its mistake
        try:
            found, score, pictures = self._attack(case, round_, seen, progress)
            status: Status = "unscored" if score is None else "done"
            trial = case.trial(self.plan)(status, None, took(), found=found, score=score)
            return Done(trial, pictures)
        except NotApplicable as reason:
            return Done(case.trial(self.plan)("not applicable", str(reason), took()))
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            return Done(case.crashed(self.plan, took(), words, traceback.format_exc(limit=-4)))

    def _attack(
        self, case: Case, round_: Exchange, seen: Observation | None, progress: Progress
    ) -> tuple[Found, Score | None, dict[str, bytes]]:
        attack = self.plan.attacks[case.attack]
        audit, who = self.plan.document.audit, case.threat(self.plan)
        resources = Resources(device=audit.device, seconds=audit.seconds, progress=progress)
        rngs = self._chances(case)
        if seen is None:
            assert isinstance(attack, PreparedAttack)
            before = time.process_time()
            round_, kept = self._played(case, attack, round_, rngs[0], resources)
            self._preparing = time.process_time() - before
            seen = threat.observe(round_, who, kept=kept)
        held = self._adapted(case, round_, seen)
        if isinstance(attack, Begun):
            guess = attack.reconstruct(held, rngs[-1], resources, rngs[:-1])
        else:
            guess = attack.reconstruct(held, rngs[-1], resources)
        guess = apart(guess, seen)  # a client is judged on what it found of others
        guess, raw, prior = self._restored(case, held, guess)
        adapted = _words(held.answer, guess)
        if isinstance(attack, Learned) and self._passed(case, round_):
            adapted = LEARNED
        found = replace(found_by(guess, seen), adapted=adapted, prepared=self._shared)
        if not isinstance(round_, Round):
            paths, files = images.drawn(case.id, images.Panel(guess.inputs, None, raw, prior))
            return replace(found, images=paths), None, files
        truth = threat.covered(round_, who)
        rng = seeded(case.seed, "score")
        score, panel = scored(self.plan, guess, truth, self.measures, rng, raw, prior)
        if threat.manipulates(attack) and case.kind == "trial":
            found = self._guarded(case, round_, found)
        paths, files = images.drawn(case.id, panel, score)
        caveats = checks.caveats(found, score)
        if said := captured.repeated(self.plan.captured, truth):
            caveats = (*caveats, said)
        score = replace(score, caveats=caveats)
        return replace(found, images=paths), score, files

    def _chances(self, case: Case) -> list[torch.Generator]:
        """What an attack draws from, of a hybrid one for each attack in it: the same numbers as
        when that is run alone, blind or not, restored or not."""
        attack = self.plan.attacks[case.attack]
        key = self.plan.blind.get(case.attack, case.attack)
        names = attack.chain if isinstance(attack, Begun) else (key.partition("+")[0],)
        return [seeded(case.seed, f"attack/{name}") for name in names]

    def _adapted(self, case: Case, round_: Exchange, seen: Observation) -> Observation:
        """What an attacker holds who knows the defence of the round, unless the plan's does not. A
        defence answers for one client's update: of a sum of several nobody says what it left. Who
        learned from updates reads what was sent."""
        alone = len(threat.victims(round_, case.threat(self.plan))) == 1
        knows = self.plan.document.audit.adaptive and case.attack not in self.plan.blind
        learned = isinstance(self.plan.attacks[case.attack], Learned)
        if not knows or not isinstance(round_, Round) or not alone or learned:
            return seen
        return threat.adapted(seen, round_.defence)

    def _passed(self, case: Case, round_: Exchange) -> bool:
        """Whether the updates that an attack learned from had passed the defence of the round."""
        adaptive = self.plan.document.audit.adaptive
        who = case.threat(self.plan)
        return threat.passed(round_, who, adaptive=adaptive) is not None

    def _restored(
        self, case: Case, seen: Observation, guess: Reconstruction
    ) -> tuple[Reconstruction, Tensor | None, Tensor | None]:
        """The guess as the restorer of its attack makes it, the raw one if that or the attack
        itself restored it, and what is shown without the update: the attack's own prior, or what
        the restorer makes of that prior or else of noise."""
        restorer = self.plan.restorers.get(case.attack)
        if restorer is None:
            return guess, guess.raw, guess.prior
        rng = seeded(case.seed, "restore")
        better = restorer.restore(guess.inputs, seen.record, rng, guess.labels)
        noise = torch.rand(guess.inputs.shape, generator=rng)
        unread = noise if guess.prior is None else guess.prior
        alone = restorer.restore(unread, seen.record, rng, guess.labels)
        raw = guess.inputs if guess.raw is None else guess.raw
        return replace(guess, inputs=better), raw, alone

    def _played(
        self,
        case: Case,
        attack: PreparedAttack,
        round_: Exchange,
        rng: torch.Generator,
        resources: Resources,
    ) -> tuple[Exchange, Kept | None]:
        """The round as it is under this attack, and what the attack kept of its preparation: one
        that changes the model has the clients train on what it sent."""
        if not attack.manipulates:
            return round_, self.fitted(case, round_, resources)
        aim = self._aim(case, attack, round_)
        key = key_of(attack, aim, rng, round_)
        made = attack.prepare(aim, rng, self._kept(key, resources))
        shutil.rmtree(self.prepared / key, ignore_errors=True)
        if made.models:
            if not isinstance(round_, Round):
                raise NotApplicable("it changes the model before a round, and this one is over")
            round_ = tampered(round_, made, seeded(case.seed, "tampered"))
        return round_, made.kept

    def _aim(self, case: Case, attack: PreparedAttack, round_: Exchange) -> Target:
        """What it prepares with. Who does not learn from updates is given none, and prepares the
        same under every defence; who needs no model is given none, and prepares once."""
        public = self.plan.public if len(self.plan.public) else None
        if isinstance(attack, Unaimed):
            nothing = replace(round_.setting, model=nn.Identity())
            return Target(nothing, training=None, records=1, public=public)
        adaptive = self.plan.document.audit.adaptive
        aim = threat.before(round_, case.threat(self.plan), public, adaptive=adaptive)
        return aim if isinstance(attack, Learned) else replace(aim, query=None, defence=None)

    def _kept(self, key: str, resources: Resources) -> Resources:
        """The same, with places for what a preparation keeps on its way."""
        place = Checkpoint(self.prepared / f"{key}.safetensors", key)
        return replace(resources, checkpoint=place, folder=self.prepared / key)

    def fitted(self, case: Case, round_: Exchange, resources: Resources) -> Kept:
        """What an attack that changes no model prepares for this round. It is drawn from a seed of
        its own, so that every trial with the same model, training and public records meets what
        the first one of them has finished; one that comes while that is at work waits for it."""
        attack, aim, finished = self._sought(case, round_)
        key = finished.key
        self._shared = key[:16]
        with alone(self.prepared / f"{key}.lock"):
            if (found := finished.finished()) is not None:
                kept, self._fit = found
                return kept
            rng = seeded("prepare", type(attack).__qualname__)
            began = time.process_time()
            made = attack.prepare(aim, rng, self._kept(key, resources))
            spent = time.process_time() - began
            if made.models:
                raise InputError(
                    f"attack {case.attack!r} says that it changes no model, but its prepare() gave "
                    "one to send: set manipulates = True"
                )
            told = made.kept.facts.get("cpu_seconds")  # with what it took before it was stopped
            finished.save(made.kept, told if isinstance(told, int | float) else spent)
            (self.prepared / f"{key}.safetensors").unlink(missing_ok=True)
            for half in self.prepared.glob(f".{key}.*.tmp"):  # of a write that was killed
                half.unlink(missing_ok=True)
            shutil.rmtree(self.prepared / key, ignore_errors=True)
            found = finished.finished()  # as all later trials meet it
            assert found is not None
            kept, self._fit = found
            return kept

    def fitted_before(self, case: Case, round_: Exchange) -> float | None:
        """The CPU seconds that a finished preparation of this case took; None if there is none."""
        found = self._sought(case, round_)[2].finished()
        return None if found is None else found[1]

    def _sought(self, case: Case, round_: Exchange) -> tuple[PreparedAttack, Target, Checkpoint]:
        """The attack, what it prepares with, and where that lies when it is finished. A hybrid
        meets what the attack prepared that it begins with."""
        attack = parts(self._attacks[case.attack])[0]
        assert isinstance(attack, PreparedAttack)
        aim = self._aim(case, attack, round_)
        key = key_of(attack, aim, behind=None if isinstance(attack, Unaimed) else round_)
        return attack, aim, Checkpoint(self.prepared / f"{key}{FINISHED}", key)

    def _guarded(self, case: Case, round_: Round, found: Found) -> Found:
        """With what the guard of the attacked client, without a memory, says of the model sent to
        it (of the first client behind an aggregate)."""
        scenario, who = case.scenario(self.plan), case.threat(self.plan)
        guard = Guard(scenario.make_model, round_.training, scale=scenario.scale)
        truth = round_.truths[threat.victims(round_, who)[0]]
        sent = threat.sent_to(round_, who).state_dict()
        verdict = guard.check(dict(sent), truth, first=True)
        fired = ", ".join(one.test for one in verdict.fired)
        words = f"a client's guard, without a memory, says {verdict.decision}"
        notes = (*found.notes, f"{words} ({fired})" if fired else words)
        return replace(found, guard=verdict.decision, notes=notes)

    def simulated(self, case: Case, progress: Progress | None = None) -> Exchange:
        """The round of a case, kept while the next cases share it; or the one that was captured."""
        if self.plan.captured and case.kept is None:
            return self.plan.captured[case.stage]
        if self._round is None or case.federation != self._key:
            shown = (lambda done, total: progress(done, total, 0.0)) if progress else None
            rng = seeded(case.seed, "federation")
            earlier = self.plan.document.threat.rounds - 1
            self._round = simulate(case.scenario(self.plan), rng, shown, earlier)
            self._key = case.federation
        return self._round

    def sensitivity(self, case: Case) -> Sensitivity:
        """How far a little pixel noise moves the update: 1 − cos(u(x + noise), u(x))."""
        round_ = self.simulated(case)
        assert isinstance(round_, Round)  # those that were captured are not explained
        truth, rng = round_.truths[0], seeded(case.seed, "noise")
        noisy = truth.inputs + NOISE * torch.randn(truth.inputs.shape, generator=rng)
        training = replace(round_.training, order="fixed")
        clean, moved = (
            train(round_.setting, Batch(x, truth.labels), training, rng).update
            for x in (truth.inputs, noisy.clamp(0, 1))
        )
        a, b = (torch.cat([v.flatten().double() for v in u.values()]) for u in (clean, moved))
        distance = 1 - float(F.cosine_similarity(a, b, dim=0))
        words = "hard" if distance > 0.05 else "moderate" if distance > 0.005 else "easy"
        return Sensitivity(
            noise=NOISE,
            cosine_distance=distance,
            words=f"{NOISE:.0%} pixel noise turns the update by {distance:.2g} in cosine "
            f"distance: gradient matching is {words} here",
        )


def found_by(guess: Reconstruction, seen: Observation) -> Found:
    """What an attack returned, as a result keeps it: finite numbers, short histories."""
    zeros = [not value.any() for value in seen.update.values()]
    return Found(
        guesses=len(guess.inputs),
        labels=None if guess.labels is None else tuple(sorted(guess.labels.tolist())),
        residual=plain(guess.residual),
        history=tuple(plain(_thinned(guess.history))),
        distances=tuple(plain(_thinned(guess.distances))),
        iterations=guess.iterations,
        objectives=tuple(plain(guess.objectives)),
        stopped=guess.stopped,
        differed=guess.differed,
        notes=guess.notes,
        facts=plain(guess.facts),
        zero_tensors=sum(zeros) / len(zeros),
        sparsity=diagnostics.sparsity(seen.update),
    )


def _words(answer: Answer | None, guess: Reconstruction) -> str | None:
    """What an attack made of knowing the defence: it compared what that leaves of its candidates,
    or it read an update that was restored as far as possible."""
    if answer is None or not answer.whole:
        return None
    return answer.words if answer.restored or guess.adapted else None


def _thinned(history: tuple[float, ...]) -> tuple[float, ...]:
    """At most HISTORY_POINTS values, evenly spaced, the last one included."""
    step = -(-len(history) // HISTORY_POINTS) or 1
    return history[::-1][::step][::-1]
