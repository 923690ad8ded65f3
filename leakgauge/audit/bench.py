"""One trial: simulate, observe, attack, score. The only place where truth and guess meet.

A trial is one attack on one client of one simulated round, for one seed (weights, records and
attack randomness all follow from it). It ends as *done*, *not applicable* (the method cannot work
on this model, with its reason) or *failed* (it crashed; the error is kept). An attack that the plan
did not ask for never ends as failed. Errors in what the user gave (plan, data, model, update) are
raised.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge import diagnostics, metrics, threat
from leakgauge.audit import checks, images
from leakgauge.audit.cases import Case
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import Found, LabelScore, Score, Sensitivity, Times, Trial
from leakgauge.audit.store import Store
from leakgauge.audit.verdict import measurements
from leakgauge.config import plain
from leakgauge.errors import NotApplicable
from leakgauge.fl import simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.guard import Guard
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import (
    ActiveAttack,
    Attack,
    Batch,
    Observation,
    Reconstruction,
    Resources,
    Round,
    Scorer,
)

HISTORY_POINTS = 200
Progress: TypeAlias = Callable[[int, int, float], None]
"""Called with steps done, steps in all and the objective."""

NOISE = 0.01  # pixel noise of the sensitivity, as a share of the range


def rng_of(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose of a seed, so that none disturbs another."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class Bench:
    """Runs cases of a plan one at a time and writes each trial."""

    def __init__(self, plan: Plan, store: Store):
        self.plan, self.store = plan, store
        measurements(plan.metrics, plan.document.audit.limit)  # a metric's name may be refused
        # What a metric reads is read here, so that its absence is said at once.
        self._measures = {name: metrics.loaded(one) for name, one in plan.metrics.items()}
        self._key: tuple[object, ...] | None = None
        self._round: Round | None = None

    def run(self, case: Case, progress: Progress) -> Trial:
        """One trial, from simulation to scores. It is on disk when this returns, unless it does
        not apply: that is known again in a moment."""
        began, cpu = time.monotonic(), time.process_time()

        def took() -> Times:
            return Times(time.monotonic() - began, time.process_time() - cpu)

        round_ = self.simulated(case, progress)  # what is wrong here is the user's federation
        attack, seen = self.plan.attacks[case.attack], None
        if not isinstance(attack, ActiveAttack):
            seen = threat.observe(round_, case.threat(self.plan))  # nor is this its mistake
        try:
            found, score = self._attack(case, attack, round_, seen, progress)
            trial = case.trial(self.plan)("done", None, took(), found=found, score=score)
        except NotApplicable as reason:
            trial = case.trial(self.plan)("not applicable", str(reason), took())
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            trial = case.crashed(self.plan, took(), words, traceback.format_exc(limit=-4))
        if trial.status != "not applicable":
            self.store.keep(trial)
        return trial

    def _attack(
        self,
        case: Case,
        attack: Attack,
        round_: Round,
        seen: Observation | None,
        progress: Progress,
    ) -> tuple[Found, Score]:
        audit, who = self.plan.document.audit, case.threat(self.plan)
        resources = Resources(device=audit.device, seconds=audit.seconds, progress=progress)
        attack_rng = rng_of(case.seed, f"attack/{case.attack}")
        if seen is None:
            round_ = self.played(case, attack, round_, attack_rng, resources)
            seen = threat.observe(round_, who)
        guess = attack.reconstruct(seen, attack_rng, resources)
        truth = threat.covered(round_, who)
        found = found_by(guess, seen)
        score, paired = scored(self.plan, guess, truth, self._measures, rng_of(case.seed, "score"))
        if isinstance(attack, ActiveAttack) and case.kind == "trial":
            found = self._guarded(case, round_, found)
        self.store.begin()
        folder = self.store.images / case.id
        pictures = images.save(folder, truth.inputs, paired, score.scores["psnr"])
        return replace(found, images=pictures), replace(score, caveats=checks.caveats(found, score))

    def played(
        self,
        case: Case,
        attack: Attack,
        round_: Round,
        rng: torch.Generator,
        resources: Resources | None = None,
    ) -> Round:
        """The round as it is under this attack: one that changes the model has the clients train
        on what it sent."""
        if not isinstance(attack, ActiveAttack):
            return round_
        victims = threat.victims(round_, case.threat(self.plan))
        sent = attack.tamper(target(round_, self.plan.public, victims), rng, resources)
        return tampered(round_, sent, rng_of(case.seed, "tampered"), victims[0])

    def _guarded(self, case: Case, round_: Round, found: Found) -> Found:
        """With what the guard of the attacked client, without a memory, says of the model sent to
        it (of the first client behind an aggregate)."""
        guard = Guard(case.scenario(self.plan).make_model, round_.training)
        truth = round_.truths[threat.victims(round_, case.threat(self.plan))[0]]
        verdict = guard.check(dict(round_.model.state_dict()), truth, first=True)
        fired = ", ".join(one.test for one in verdict.fired)
        words = f"a client's guard, without a memory, says {verdict.decision}"
        notes = (*found.notes, f"{words} ({fired})" if fired else words)
        return replace(found, guard=verdict.decision, notes=notes)

    def simulated(self, case: Case, progress: Progress | None = None) -> Round:
        """The round of a case, kept while the next cases share it."""
        key = (case.stage, case.defence, case.seed, case.kept)
        if self._round is None or key != self._key:
            shown = (lambda done, total: progress(done, total, 0.0)) if progress else None
            rng = rng_of(case.seed, "federation")
            self._round = simulate(case.scenario(self.plan), rng, shown)
            self._key = key
        return self._round

    def sensitivity(self, case: Case) -> Sensitivity:
        """How far a little pixel noise moves the update: 1 − cos(u(x + noise), u(x))."""
        round_ = self.simulated(case)
        truth, rng = round_.truths[0], rng_of(case.seed, "noise")
        noisy = truth.inputs + NOISE * torch.randn(truth.inputs.shape, generator=rng)
        training = replace(round_.training, order="fixed")
        clean, moved = (
            train(round_.model, Batch(x, truth.labels), training, rng).update
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


def scored(
    plan: Plan,
    guess: Reconstruction,
    truth: Batch,
    measures: Mapping[str, Scorer],
    rng: torch.Generator,
) -> tuple[Score, Tensor]:
    """Everything measured on one guess, each number beside its no-information baseline; and the
    guesses in the order of the truths."""
    audit = plan.document.audit
    others = _others(plan.data.inputs, truth.inputs, audit.gallery, rng)
    mean = metrics.baselines.mean_image(others).expand_as(truth.inputs)
    pair = metrics.assign.optimal if audit.assignment == "optimal" else metrics.assign.best_match
    index = pair(guess.inputs, truth.inputs)
    found = index >= 0
    paired = mean.clone()  # a truth without a guess is scored as if nothing were known
    paired[found] = guess.inputs[index[found]].to(paired)
    chosen = metrics.baselines.random_images(others, len(truth), rng)
    gallery = torch.cat([truth.inputs, others])
    identified = metrics.reidentified(paired, torch.arange(len(truth)), gallery)

    def measured(inputs: Tensor) -> dict[str, tuple[float, ...]]:
        return {name: tuple(m(inputs, truth.inputs).tolist()) for name, m in measures.items()}

    score = Score(
        records=len(truth),
        scores=measured(paired) | {"identified": tuple((identified * found).tolist())},
        mean_image=measured(mean),
        random_image=measured(chosen),
        identified=1 / len(gallery),
        labels=_labels(guess.labels, truth.labels, plan),
    )
    return score, paired


def _others(inputs: Tensor, truths: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Up to `count` images of the set that are none of the truths."""
    private = {truth.numpy().tobytes() for truth in truths}
    kept: list[Tensor] = []
    seen = set(private)
    for i in torch.randperm(len(inputs), generator=rng).tolist():
        key = inputs[i].numpy().tobytes()
        if key not in seen:  # an image that stands twice could never be identified
            seen.add(key)
            kept.append(inputs[i])
        if len(kept) == count:
            break
    if not kept:
        raise NotApplicable(
            f"the data set holds no image beside the {len(truths)} attacked ones: scores need some "
            "for their baselines; use more data or fewer records"
        )
    return torch.stack(kept)


def _labels(guess: Tensor | None, truth: Tensor, plan: Plan) -> LabelScore | None:
    if guess is None:
        return None
    classes = len(plan.data.classes)
    frequency = plan.data.labels.bincount(minlength=classes) / len(plan.data)
    return LabelScore(
        truth=tuple(sorted(truth.tolist())),
        accuracy=multiset_accuracy(guess, truth, classes),
        random=chance(truth, torch.full((classes,), 1 / classes)),
        class_prior=chance(truth, frequency),
    )


def _thinned(history: tuple[float, ...]) -> tuple[float, ...]:
    """At most HISTORY_POINTS values, evenly spaced, the last one included."""
    step = -(-len(history) // HISTORY_POINTS) or 1
    return history[::-1][::step][::-1]
