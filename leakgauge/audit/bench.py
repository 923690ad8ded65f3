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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge import diagnostics, metrics, threat
from leakgauge.audit import checks, images
from leakgauge.audit.cases import Case
from leakgauge.audit.plan import Plan
from leakgauge.audit.store import Store
from leakgauge.config import plain
from leakgauge.errors import NotApplicable
from leakgauge.fl import simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.guard import Guard
from leakgauge.kept import Checkpoint, key_of
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import (
    Attack,
    Batch,
    Kept,
    Metric,
    PreparedAttack,
    Reconstruction,
    Resources,
    Round,
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
        self._measures = _measures(plan)
        self._key: tuple[object, ...] | None = None
        self._round: Round | None = None

    def run(self, case: Case, progress: Progress) -> dict[str, Any]:
        """One trial, from simulation to scores. It is on disk when this returns, unless it does
        not apply: that is known again in a moment."""
        trial = case.header(self.plan) | {"status": "done", "error": None}
        began, cpu = time.monotonic(), time.process_time()
        round_ = self.simulated(case, progress)  # what is wrong here is the user's federation
        threat.observe(round_, case.threat(self.plan))  # nor is this the attack's mistake
        try:
            trial |= self._attack(case, round_, progress)
        except NotApplicable as reason:
            trial |= {"status": "not applicable", "error": str(reason)}
        except Exception as error:
            trial |= crashed(self.plan, case, f"{type(error).__name__}: {error}")
            trial["traceback"] = traceback.format_exc(limit=-4)
        trial["times"] = {
            "wall_seconds": time.monotonic() - began,
            "cpu_seconds": time.process_time() - cpu,
        }
        if trial["status"] != "not applicable":
            self.store.keep(case.id, trial)
        return trial

    def _attack(self, case: Case, round_: Round, progress: Progress) -> dict[str, Any]:
        audit = self.plan.document.audit
        resources = Resources(device=audit.device, seconds=audit.seconds, progress=progress)
        attack_rng = rng_of(case.seed, f"attack/{case.attack}")
        attack = self.plan.attacks[case.attack]
        round_, kept = self.played(case, attack, round_, attack_rng, resources)
        seen = threat.observe(round_, case.threat(self.plan), kept=kept)
        guess = attack.reconstruct(seen, attack_rng, resources)
        truth = threat.covered(round_, case.threat(self.plan))
        scored, paired = score(self.plan, guess, truth, self._measures, rng_of(case.seed, "score"))
        zeros = [not value.any() for value in seen.update.values()]
        scored["facts"] |= {
            "zero_tensors": sum(zeros) / len(zeros),
            "sparsity": diagnostics.sparsity(seen.update),
        }
        if threat.manipulates(attack) and case.kind == "trial":
            scored |= self._guarded(case, round_, scored)
        scored["caveats"] = checks.caveats(scored)
        self.store.begin()
        scored["images"] = images.save(
            self.store.images / case.id, truth.inputs, paired, scored["scores"]["psnr"]
        )
        return scored

    def played(
        self,
        case: Case,
        attack: Attack,
        round_: Round,
        rng: torch.Generator,
        resources: Resources | None = None,
    ) -> tuple[Round, Kept | None]:
        """The round as it is under this attack, and what the attack kept of its preparation: one
        that changes the model has the clients train on what it sent."""
        if not isinstance(attack, PreparedAttack):
            return round_, None
        victims = threat.victims(round_, case.threat(self.plan))
        aim = target(round_, self.plan.public, victims)
        key = key_of(attack, aim, rng)
        place = Checkpoint(self.store.prepared / f"{key}.safetensors", key)
        made = attack.prepare(aim, rng, replace(resources or Resources(), checkpoint=place))
        if made.models:
            round_ = tampered(round_, made, rng_of(case.seed, "tampered"))
        return round_, made.kept

    def _guarded(self, case: Case, round_: Round, scored: dict[str, Any]) -> dict[str, Any]:
        """What the guard of the attacked client, without a memory, says of the model sent to it
        (of the first client behind an aggregate)."""
        scenario, who = case.scenario(self.plan), case.threat(self.plan)
        guard = Guard(scenario.make_model, round_.training, scale=scenario.scale)
        truth = round_.truths[threat.victims(round_, who)[0]]
        sent = threat.sent_to(round_, who).state_dict()
        verdict = guard.check(dict(sent), truth, first=True)
        fired = ", ".join(one.test for one in verdict.fired)
        words = f"a client's guard, without a memory, says {verdict.decision}"
        return {
            "facts": scored["facts"] | {"guard": verdict.decision},
            "notes": [*scored["notes"], f"{words} ({fired})" if fired else words],
        }

    def simulated(self, case: Case, progress: Progress | None = None) -> Round:
        """The round of a case, kept while the next cases share it."""
        key = (case.stage, case.defence, case.seed, case.kept)
        if self._round is None or key != self._key:
            shown = (lambda done, total: progress(done, total, 0.0)) if progress else None
            rng = rng_of(case.seed, "federation")
            self._round = simulate(case.scenario(self.plan), rng, shown)
            self._key = key
        return self._round

    def sensitivity(self, case: Case) -> dict[str, Any]:
        """How far a little pixel noise moves the update: 1 − cos(u(x + noise), u(x))."""
        round_ = self.simulated(case)
        truth, rng = round_.truths[0], rng_of(case.seed, "noise")
        noisy = truth.inputs + NOISE * torch.randn(truth.inputs.shape, generator=rng)
        training = replace(round_.training, order="fixed")
        clean, moved = (
            train(round_.setting, Batch(x, truth.labels), training, rng).update
            for x in (truth.inputs, noisy.clamp(0, 1))
        )
        a, b = (torch.cat([v.flatten().double() for v in u.values()]) for u in (clean, moved))
        distance = 1 - float(F.cosine_similarity(a, b, dim=0))
        words = "hard" if distance > 0.05 else "moderate" if distance > 0.005 else "easy"
        return {
            "noise": NOISE,
            "cosine_distance": distance,
            "words": f"{NOISE:.0%} pixel noise turns the update by {distance:.2g} in cosine "
            f"distance: gradient matching is {words} here",
        }


def crashed(plan: Plan, case: Case, error: str) -> dict[str, Any]:
    """How a trial ends that crashed. The crash of an attack that nobody asked for is kept in words,
    but fails no audit."""
    if case.attack in plan.asked:
        return {"status": "failed", "error": error}
    return {
        "status": "not applicable",
        "error": f"it is run without being asked for, and crashed ({error}): please report this",
    }


def score(
    plan: Plan,
    guess: Reconstruction,
    truth: Batch,
    measures: dict[str, Metric],
    rng: torch.Generator,
) -> tuple[dict[str, Any], Tensor]:
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
    return {
        "records": len(truth),
        "guesses": len(guess.inputs),
        "scores": {n: m(paired, truth.inputs).tolist() for n, m in measures.items()}
        | {"identified": (identified * found).tolist()},
        "baselines": {
            "mean image": {n: m(mean, truth.inputs).tolist() for n, m in measures.items()},
            "random image": {n: m(chosen, truth.inputs).tolist() for n, m in measures.items()},
            "identified": 1 / len(gallery),
        },
        "labels": _labels(guess.labels, truth.labels, plan),
        "residual": plain(guess.residual),
        "history": plain(_thinned(guess.history)),
        "distances": plain(_thinned(guess.distances)),
        "notes": list(guess.notes),
        "facts": plain(guess.facts),
    }, paired


def _measures(plan: Plan) -> dict[str, Metric]:
    """The metrics of the plan, PSNR always; LPIPS is loaded here, so that its absence is said at
    once."""
    wanted = dict.fromkeys(("psnr", *plan.document.audit.metrics))
    return {
        name: metrics.load_lpips() if name == "lpips" else metrics.METRICS[name] for name in wanted
    }


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


def _labels(guess: Tensor | None, truth: Tensor, plan: Plan) -> dict[str, Any] | None:
    if guess is None:
        return None
    classes = len(plan.data.classes)
    frequency = plan.data.labels.bincount(minlength=classes) / len(plan.data)
    return {
        "guess": sorted(guess.tolist()),
        "truth": sorted(truth.tolist()),
        "accuracy": multiset_accuracy(guess, truth, classes),
        "random": chance(truth, torch.full((classes,), 1 / classes)),
        "class prior": chance(truth, frequency),
    }


def _thinned(history: tuple[float, ...]) -> list[float]:
    """At most HISTORY_POINTS values, evenly spaced, the last one included."""
    step = -(-len(history) // HISTORY_POINTS) or 1
    return list(history[::-1][::step][::-1])
