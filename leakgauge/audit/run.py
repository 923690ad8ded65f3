"""Run a plan: simulate, observe, attack, score. The only place where truth and guess meet.

A trial is one attack on one client of one simulated round, for one seed (weights, records and
attack randomness all follow from it). Trials are written one by one as they end.

What a trial can end as: *done*, *not applicable* (the method cannot work on this model, with its
reason), or *failed* (it crashed; the error is kept, the command exits with code 3, and a resumed
audit tries it again). Errors in what the user gave (plan, data, model, update) stop the audit at
once.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakgauge import metrics, threat
from leakgauge.audit import images
from leakgauge.audit.plan import Plan, plain
from leakgauge.audit.result import assemble
from leakgauge.audit.store import Store, write_json
from leakgauge.errors import LeakGaugeError, NotApplicable
from leakgauge.fl import simulate
from leakgauge.fl.simulate import initial_model
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import Batch, Metric, Reconstruction, Resources, Round

HISTORY_POINTS = 200


@dataclass(frozen=True)
class Case:
    """One trial to run, by the keys of the plan."""

    stage: int
    defence: str
    attack: str
    seed: int

    @property
    def id(self) -> str:
        return f"round{self.stage}.{self.defence}.{self.attack}.seed{self.seed}"


@dataclass(frozen=True)
class Watch:
    """What a caller may want to see while an audit runs. All optional."""

    begin: Callable[[Case, int, int], None] = lambda case, index, total: None
    train: Callable[[int, int], None] = lambda done, total: None
    attack: Callable[[int, int, float], None] = lambda done, total, objective: None
    end: Callable[[Case, dict[str, Any]], None] = lambda case, trial: None


def cases(plan: Plan) -> list[Case]:
    """All trials of a plan; those that share a simulated round stand together."""
    document = plan.document
    return [
        Case(stage, defence, attack, seed)
        for stage in document.federation.rounds
        for defence in plan.defences
        for seed in document.audit.seeds
        for attack in plan.attacks
    ]


def run(
    plan: Plan,
    store: Store,
    *,
    resume: bool = False,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run every trial that is not done yet and write result.json.

    When no attack applies there is no audit: an error, and nothing is written.
    """
    watch = watch or Watch()
    torch.set_num_threads(plan.document.audit.threads)
    measures = _measures(plan)
    todo = cases(plan)
    # Build the model once before anything is written: a wrong one is the user's to know now.
    scenario = plan.scenario(todo[0].stage, todo[0].defence)
    model = initial_model(scenario, _rng(todo[0].seed, "federation"))
    store.open(plain(plan.document), plan.fingerprint, resume=resume, overwrite=overwrite)
    trials = []
    waiting: list[dict[str, Any]] = []  # not applicable: written as soon as something else is
    rounds = _Rounds(plan, watch)
    for index, case in enumerate(todo):
        trial = store.done(case.id)
        if trial is None or trial["status"] == "failed":
            watch.begin(case, index, len(todo))
            trial = _trial(plan, case, rounds, measures, store, watch)
            waiting.append(trial)
            if trial["status"] != "not applicable":
                _keep(store, waiting)
        watch.end(case, trial)
        trials.append(trial)
    if all(trial["status"] == "not applicable" for trial in trials):
        reasons = dict.fromkeys(f"{trial['attack']}: {trial['error']}" for trial in trials)
        raise NotApplicable("no attack of the plan applies. " + "; ".join(reasons))
    _keep(store, waiting)
    result = assemble(plan, model, trials)
    write_json(store.result, result)
    return result


def _keep(store: Store, waiting: list[dict[str, Any]]) -> None:
    for trial in waiting:
        store.keep(trial["id"], trial)
    waiting.clear()


class _Rounds:
    """The simulated round of a case, kept while the next cases share it."""

    def __init__(self, plan: Plan, watch: Watch):
        self._plan, self._watch = plan, watch
        self._key: tuple[int, str, int] | None = None
        self._round: Round | None = None

    def __call__(self, case: Case) -> Round:
        key = (case.stage, case.defence, case.seed)
        if self._round is None or key != self._key:
            scenario = self._plan.scenario(case.stage, case.defence)
            self._round = simulate(scenario, _rng(case.seed, "federation"), self._watch.train)
            self._key = key
        return self._round


def _rng(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose of a seed, so that none disturbs another."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _trial(
    plan: Plan,
    case: Case,
    rounds: _Rounds,
    measures: dict[str, Metric],
    store: Store,
    watch: Watch,
) -> dict[str, Any]:
    document = plan.document
    trial: dict[str, Any] = {
        "id": case.id,
        "round": case.stage,
        "defence": case.defence,
        "attack": case.attack,
        "seed": case.seed,
        "realism": threat.realism(document.threat),
        "status": "done",
        "error": None,
    }
    began, cpu = time.monotonic(), time.process_time()
    seen = None
    try:
        round_ = rounds(case)
        seen = threat.observe(round_, document.threat)
        resources = Resources(
            device=document.audit.device, seconds=document.audit.seconds, progress=watch.attack
        )
        attack_rng = _rng(case.seed, f"attack/{case.attack}")
        guess = plan.attacks[case.attack].reconstruct(seen, attack_rng, resources)
        truth = threat.covered(round_, document.threat)
        scored, paired = score(plan, guess, truth, measures, _rng(case.seed, "score"))
    except NotApplicable as reason:
        trial |= {"status": "not applicable", "error": str(reason)}
    except Exception as error:
        if isinstance(error, LeakGaugeError) and seen is None:
            raise  # the user's federation is wrong, not the attack
        trial |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(limit=-4),
        }
    else:
        store.begin()
        psnr = scored["scores"].get("psnr")
        trial |= scored
        trial["images"] = images.save(store.images / case.id, truth.inputs, paired, psnr)
    trial["times"] = {
        "wall_seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
    }
    return trial


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
        "notes": list(guess.notes),
        "facts": plain(guess.facts),
    }, paired


def _measures(plan: Plan) -> dict[str, Metric]:
    """The metrics of the plan; LPIPS is loaded here, so that its absence is said at once."""
    wanted = plan.document.audit.metrics
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
