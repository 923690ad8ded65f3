"""Running a plan: what is scored, what is kept, what stops an audit and what does not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio
from torch import nn

from leakgauge import metrics, threat
from leakgauge.audit import Store, Watch, images, parse, run, schema
from leakgauge.audit.bench import _thinned
from leakgauge.audit.cases import trials as cases
from leakgauge.audit.document import Limit
from leakgauge.audit.results import Found, LabelScore, Result, Score, Spread, Times, Trial
from leakgauge.audit.summary import spread, summarise
from leakgauge.audit.verdict import measurements
from leakgauge.config import plain
from leakgauge.errors import InputError, NotApplicable, PlanError
from leakgauge.fl import simulate
from leakgauge.tensors import seeded
from leakgauge.types import Batch, Reconstruction


def tiny(folder: Path | None = None, **changes: Any):
    """A plan on digits with a small perceptron; `changes` replaces keys of its tables."""
    table: dict[str, Any] = {
        "federation": {
            "data": "digits",
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"batch_size": 4},
        },
        "attack": [{"name": "analytic"}],
        "audit": {
            "seeds": [0],
            "gallery": 20,
            "control": False,
            "explain": False,
            "exact": False,
        },
    }
    for key, value in changes.items():
        table[key] = table[key] | value if isinstance(value, dict) and key in table else value
    return parse(table, "tiny", folder or Path.cwd())


def guessing(guess: Callable[..., Reconstruction]):
    """An attack that is a function of what is seen."""

    class Guess:
        needs = frozenset()

        def reconstruct(self, seen, rng, resources=None):
            return guess(seen, rng, resources)

    return Guess()


def with_attacks(plan, **attacks):
    return dataclasses.replace(plan, attacks=attacks, asked=tuple(attacks))


def truth_of(plan, seed: int = 0, stage: int = 0) -> Batch:
    """What the audit keeps from the attacks: the records of the attacked round."""
    round_ = simulate(plan.scenario(stage, "none"), seeded(seed, "federation"))
    return threat.covered(round_, plan.document.threat)


def constant(value: float):
    """Grey images, as many as there are records."""
    return guessing(
        lambda seen, *_: Reconstruction(
            torch.full((seen.records, *seen.record.shape), value), None, 0.0
        )
    )


def crash(seen, rng, resources):
    raise RuntimeError("the line search exploded")


def refuse(seen, rng, resources):
    raise NotApplicable("this model has no wings")


def only(result: Result) -> Trial:
    (trial,) = result.trials
    return trial


def without_times(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "times"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def comparable(path: Path) -> bytes:
    return json.dumps(without_times(json.loads(path.read_text(encoding="utf-8")))).encode()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# The same plan, the same bytes.

NOISY = {
    "federation": {"rounds": [0, 1], "clients": 2, "training": {"batch_size": 2, "lr": 0.1}},
    "attack": [
        {"name": "dlg", "iterations": 3, "optimiser": "adam"},
        {"name": "inverting-gradients", "iterations": 3},
    ],
    "defence": [{"name": "none"}, {"name": "clip-and-noise"}],
    "audit": {"seeds": [3, 4], "gallery": 20},
}


def test_the_same_plan_gives_the_same_bytes_apart_from_times(tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)  # the global generator has no say
        run(tiny(**NOISY), Store(tmp_path / name))
    one, two = (comparable(tmp_path / name / "result.json") for name in ("one", "two"))
    assert one == two
    pictures = [files(tmp_path / name / "images") for name in ("one", "two")]
    assert pictures[0] == pictures[1]
    trials = json.loads(one)["trials"]
    assert len(trials) == 16 + 8  # blind ones too, where there is a defence
    for key in ("seed", "round", "defence"):  # each of them matters, so the same is no accident
        groups = {}
        for trial in trials:
            if trial["attack"] == "inverting-gradients":
                groups.setdefault(trial[key], []).append(trial["score"]["scores"]["psnr"])
        first, second = groups.values()
        assert first != second


def test_a_trial_does_not_depend_on_the_others(tmp_path):
    together = run(tiny(**NOISY), Store(tmp_path / "together"))
    alone = run(tiny(**NOISY | {"attack": NOISY["attack"][1:]}), Store(tmp_path / "alone"))
    names = {"inverting-gradients", "inverting-gradients-blind"}
    expected = [t for t in together.trials if t.attack in names]
    assert without_times(alone.trials) == without_times(expected)


def test_what_run_returns_is_what_it_writes(tmp_path):
    result = run(tiny(), Store(tmp_path / "out"))
    assert schema.load(tmp_path / "out" / "result.json") == result
    trial = only(result)
    kept = json.loads((tmp_path / "out" / "trials" / f"{trial.id}.json").read_text())
    assert kept == plain(trial) | {"fingerprint": tiny().fingerprint}


# Going on where it stopped.


class Stop(Exception):
    pass


def test_a_killed_audit_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    plan = tiny(
        attack=[{"name": "inverting-gradients", "iterations": 2}], audit={"seeds": [0, 1, 2]}
    )
    run(plan, Store(tmp_path / "whole"))

    def killed(case):
        if case.seed == 1:
            raise Stop

    with pytest.raises(Stop):
        run(plan, Store(tmp_path / "out"), watch=Watch(begin=killed))
    assert not (tmp_path / "out" / "result.json").exists()
    (first,) = (tmp_path / "out" / "trials").iterdir()
    before = first.read_bytes()

    begun, ended = [], []
    watch = Watch(
        begin=lambda case: begun.append(case.seed),
        end=lambda case, trial: ended.append(case.seed),
    )
    run(plan, Store(tmp_path / "out"), resume=True, watch=watch)
    assert begun == ended == [1, 2]
    assert first.read_bytes() == before
    assert comparable(tmp_path / "out" / "result.json") == comparable(
        tmp_path / "whole" / "result.json"
    )
    assert files(tmp_path / "out" / "images") == files(tmp_path / "whole" / "images")


def test_overwrite_runs_everything_again(tmp_path):
    begun = []
    watch = Watch(begin=lambda case: begun.append(case.id))
    for overwrite in (False, True):
        run(tiny(), Store(tmp_path), overwrite=overwrite, watch=watch)
    assert begun == ["round0.none.analytic.seed0"] * 2


def test_a_failed_trial_is_tried_again(tmp_path):
    plan = tiny()
    broken = with_attacks(plan, analytic=guessing(crash))
    assert only(run(broken, Store(tmp_path))).status == "failed"
    assert only(run(plan, Store(tmp_path), resume=True)).status == "done"


def test_a_trial_of_another_plan_is_said_and_run_again(tmp_path):
    right, other = (
        tiny(federation={"model": {"name": "mlp", "hidden": [width]}}) for width in (8, 9)
    )
    before = only(run(right, Store(tmp_path / "right")))
    run(other, Store(tmp_path / "other"))
    trial = Path("trials") / f"{before.id}.json"
    shutil.copy(tmp_path / "other" / trial, tmp_path / "right" / trial)
    said, begun = [], []
    watch = Watch(say=said.append, begin=lambda case: begun.append(case.id))
    again = run(right, Store(tmp_path / "right"), resume=True, watch=watch)
    assert begun == [before.id]
    assert "it is of another plan" in said[0]
    assert without_times(only(again)) == without_times(before)


def test_a_folder_holds_one_audit_at_a_time(tmp_path):
    store = Store(tmp_path / "out")

    def second(case):
        with pytest.raises(PlanError, match=f"in use by another audit .process {os.getpid()} on"):
            run(tiny(), Store(tmp_path / "out"), overwrite=True)

    assert only(run(tiny(), store, watch=Watch(begin=second))).status == "done"
    assert not (tmp_path / "out" / ".lock").exists()
    run(tiny(), store, resume=True)


# Scores.


def test_the_truth_in_any_order_scores_the_cap(tmp_path):
    plan = tiny(audit={"seeds": [0, 1]})
    truths = iter([truth_of(plan, seed) for seed in (0, 1)])

    def oracle(seen, rng, resources):
        truth = next(truths)
        return Reconstruction(truth.inputs[[2, 0, 3, 1]], truth.labels[[2, 0, 3, 1]], 0.0)

    result = run(with_attacks(plan, oracle=guessing(oracle)), Store(tmp_path))
    for trial in result.trials:
        assert trial.score.scores["psnr"] == (metrics.PSNR_CAP,) * 4
        assert trial.score.scores["mse"] == (0,) * 4
        assert trial.score.scores["ssim"] == pytest.approx([1] * 4)
        assert trial.score.scores["identified"] == (1,) * 4
        assert trial.score.labels.accuracy == 1
        assert trial.score.identified == 1 / 24
        pictures = trial.found.images
        for true, guessed in zip(pictures.truths, pictures.guesses, strict=True):
            assert (tmp_path / true).read_bytes() == (tmp_path / guessed).read_bytes()
    (row,) = result.summary
    assert row.measured.scores["identified"].mean == 1
    assert row.measured.success_rate == 1
    assert (row.measured.risk, row.measured.worst_risk) == ("very high", "very high")


def test_labels_stand_beside_what_guessing_would_give(tmp_path):
    plan = tiny()
    truth = truth_of(plan)
    halves = torch.cat([truth.labels[:2], (truth.labels[2:] + 1) % 10])
    guess = guessing(lambda *_: Reconstruction(truth.inputs, halves, 0.0))
    trial = only(run(with_attacks(plan, halves=guess), Store(tmp_path)))
    labels = trial.score.labels
    assert list(trial.found.labels) == sorted(halves.tolist())
    assert list(labels.truth) == sorted(truth.labels.tolist())
    shared = Counter(halves.tolist()) & Counter(truth.labels.tolist())
    assert labels.accuracy == shared.total() / 4
    # Every way to guess four labels, with its probability.
    even = [0.1] * 10
    frequency = (plan.data.labels.bincount() / len(plan.data)).tolist()
    wanted = Counter(truth.labels.tolist())
    for name, prior in (("random", even), ("class_prior", frequency)):
        expected = sum(
            math.prod(prior[k] for k in four) * (Counter(four) & wanted).total() / 4
            for four in itertools.product(range(10), repeat=4)
        )
        assert getattr(labels, name) == pytest.approx(expected, rel=1e-5)


def test_a_truth_without_a_guess_is_scored_as_the_mean_image(tmp_path):
    plan = tiny()
    truth = truth_of(plan)
    half = guessing(lambda *_: Reconstruction(truth.inputs[[3, 1]], truth.labels[:2], 0.0))
    trial = only(run(with_attacks(plan, half=half), Store(tmp_path)))
    assert trial.score.records == 4
    assert trial.found.guesses == 2
    assert trial.score.scores["identified"] == (0, 1, 0, 1)
    for name in ("psnr", "ssim", "mse", "affine-psnr"):
        got, mean = trial.score.scores[name], trial.score.mean_image[name]
        assert [got[0], got[2]] == [mean[0], mean[2]]
    assert trial.score.scores["psnr"][1] == trial.score.scores["psnr"][3] == metrics.PSNR_CAP
    assert trial.score.labels.accuracy == 0.5
    # Nor does the mean image count as recognised where it happens to be nearest.
    silent = guessing(lambda *_: Reconstruction(torch.empty(0, 1, 8, 8), None, 0.0))
    trial = only(run(with_attacks(plan, silent=silent), Store(tmp_path / "silent")))
    assert trial.score.scores["psnr"] == trial.score.mean_image["psnr"]
    assert trial.score.scores["identified"] == (0,) * 4
    assert trial.score.labels is None


@pytest.mark.parametrize("assignment", ["optimal", "best-match"])
def test_one_guess_serves_one_truth_unless_the_plan_says_otherwise(tmp_path, assignment):
    pixels = np.random.default_rng(0).random((24, 4, 4), dtype=np.float32)
    pixels[::2] = pixels[0]
    np.savez(tmp_path / "twins.npz", images=pixels, labels=np.arange(24) % 2)
    plan = tiny(
        tmp_path,
        federation={"data": {"npz": "twins.npz"}, "training": {"batch_size": 8}},
        audit={"assignment": assignment},
    )
    twin = torch.from_numpy(pixels[:1])
    copies = int((truth_of(plan).inputs == twin).flatten(1).all(1).sum())
    assert copies >= 2
    one = guessing(lambda *_: Reconstruction(twin[None], None, 0.0))
    trial = only(run(with_attacks(plan, one=one), Store(tmp_path / "out")))
    found = trial.score.scores["psnr"].count(metrics.PSNR_CAP)
    assert found == (1 if assignment == "optimal" else copies)


def test_baselines_are_those_of_all_other_images(tmp_path):
    plan = tiny(audit={"gallery": 5000})
    truth = truth_of(plan).inputs
    trial = only(run(plan, Store(tmp_path)))
    others = np.unique(plan.data.inputs.numpy().reshape(-1, 64), axis=0)
    secret = {image.tobytes() for image in truth.numpy().reshape(-1, 64)}
    others = np.stack([image for image in others if image.tobytes() not in secret])
    assert trial.score.identified == 1 / (len(others) + 4)
    mean = others.mean(0).reshape(1, 8, 8)
    expected = [peak_signal_noise_ratio(t, mean, data_range=1) for t in truth.double().numpy()]
    assert trial.score.mean_image["psnr"] == pytest.approx(expected, rel=1e-5)
    for i, score in enumerate(trial.score.random_image["mse"]):
        all_scores = ((others - truth[i].numpy().reshape(64)) ** 2).mean(1)
        assert np.isclose(all_scores, score).any()
        assert score > 0


def test_scores_are_of_the_guess_not_of_the_baseline(tmp_path):
    plan = tiny()
    truth = truth_of(plan).inputs.double().numpy()
    trial = only(run(with_attacks(plan, grey=constant(0.25)), Store(tmp_path)))
    grey = np.full((1, 8, 8), 0.25)
    expected = [peak_signal_noise_ratio(t, grey, data_range=1) for t in truth]
    assert trial.score.scores["psnr"] == pytest.approx(expected)


def test_too_few_images_for_a_baseline_is_said(tmp_path):
    images_ = np.random.default_rng(0).random((4, 8, 8))
    np.savez(tmp_path / "few.npz", images=images_, labels=np.array([0, 1, 0, 1]))
    plan = tiny(tmp_path, federation={"data": {"npz": "few.npz"}, "training": {"batch_size": 4}})
    with pytest.raises(NotApplicable, match="no image beside the 4 attacked ones"):
        run(plan, Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_guess_in_another_precision_is_scored(tmp_path):
    plan = tiny()
    truth = truth_of(plan)
    double = guessing(lambda *_: Reconstruction(truth.inputs.double(), None, 0.0))
    trial = only(run(with_attacks(plan, double=double), Store(tmp_path)))
    assert trial.score.scores["psnr"] == (metrics.PSNR_CAP,) * 4


# What an attack is given.


def test_an_attack_sees_what_the_threat_model_grants(tmp_path):
    caught = []

    def spy(seen, rng, resources):
        caught.append((seen, resources))
        return Reconstruction(
            torch.rand(seen.records or 1, *seen.record.shape, generator=rng), None, 0.0
        )

    for grants, realism in ((["records"], "realistic"), (["records", "labels"], "oracle")):
        plan = with_attacks(tiny(audit={"seconds": 9.0}), spy=guessing(spy))
        held = threat.ThreatModel(grants=frozenset(grants))
        plan = dataclasses.replace(plan, document=dataclasses.replace(plan.document, threat=held))
        trial = only(run(plan, Store(tmp_path / realism)))
        seen, resources = caught.pop()
        assert trial.realism == realism
        assert seen.training is None
        assert seen.records == 4
        assert (seen.labels is not None) == ("labels" in grants)
        assert (resources.device, resources.seconds) == ("cpu", 9.0)


def test_the_aggregate_is_judged_by_the_records_of_all_clients(tmp_path):
    changes = {
        "federation": {"clients": 3, "training": {"batch_size": 2}},
        "threat": {"actor": "aggregate"},
    }
    plan = tiny(**changes)
    trial = only(run(with_attacks(plan, grey=constant(0.5)), Store(tmp_path)))
    assert trial.score.records == 6
    assert len(trial.score.scores["psnr"]) == 6


def test_the_watcher_is_told_of_training_and_of_iterations(tmp_path):
    told = []
    watch = Watch(progress=lambda case, *step: told.append(step))
    plan = tiny(
        federation={"rounds": [2]}, attack=[{"name": "inverting-gradients", "iterations": 3}]
    )
    trial = only(run(plan, Store(tmp_path), watch=watch))
    assert told[:2] == [(1, 2, 0.0), (2, 2, 0.0)]
    assert [(done, total) for done, total, _ in told[2:]] == [(1, 3), (2, 3), (3, 3)]
    assert [objective for _, _, objective in told[2:]] == list(trial.found.history)


def test_the_threads_are_those_of_the_plan(tmp_path):
    seen = []

    def count(*_):
        seen.append(torch.get_num_threads())
        return Reconstruction(torch.zeros(1, 1, 8, 8), None, 0.0)

    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            plan = with_attacks(tiny(audit={"threads": threads}), count=guessing(count))
            run(plan, Store(tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1]


# What goes wrong.


def test_a_crash_is_kept_and_the_audit_goes_on(tmp_path):
    plan = tiny(audit={"seeds": [0, 1]})
    result = run(with_attacks(plan, bad=guessing(crash), good=constant(0.5)), Store(tmp_path))
    statuses = [(trial.attack, trial.status) for trial in result.trials]
    assert statuses == [("bad", "failed"), ("good", "done")] * 2
    bad = result.trials[0]
    assert bad.error == "RuntimeError: the line search exploded"
    assert "in crash" in bad.traceback
    assert (bad.found, bad.score) == (None, None)
    assert bad.times.wall_seconds > 0
    rows = {row.attack: row for row in result.summary}
    assert (rows["bad"].failed, rows["bad"].trials) == (2, 2)
    assert rows["bad"].reason == bad.error
    assert rows["bad"].measured is None
    assert (rows["good"].failed, rows["good"].reason) == (0, None)
    assert {p.name for p in (tmp_path / "trials").iterdir()} == {
        f"round0.none.{attack}.seed{seed}.json" for attack in ("bad", "good") for seed in (0, 1)
    }


def test_the_crash_of_an_attack_that_nobody_asked_for_fails_no_audit(tmp_path):
    plan = with_attacks(tiny(), extra=guessing(crash), good=constant(0.5))
    assert run(plan, Store(tmp_path / "asked")).verdict.exit_code == 3
    result = run(dataclasses.replace(plan, asked=("good",)), Store(tmp_path / "unasked"))
    extra, good = result.trials
    assert (extra.status, good.status) == ("not applicable", "done")
    assert "crashed (RuntimeError: the line search exploded)" in extra.error
    assert "in crash" in extra.traceback
    assert result.verdict.outcome != "failed"
    assert result.verdict.exit_code != 3
    assert all(row.failed == 0 for row in result.summary)


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (Reconstruction(torch.full((4, 1, 8, 8), torch.nan), None, 0.0), "NaN"),
        (Reconstruction(torch.zeros(4, 3, 8, 8), None, 0.0), "one shape"),
        (Reconstruction(torch.zeros(4, 1, 8, 8), torch.tensor([-1]), 0.0), "RuntimeError"),
    ],
)
def test_a_guess_that_cannot_be_scored_is_the_attacks_failure(tmp_path, guess, words):
    attacks = {"bad": guessing(lambda *_: guess), "good": constant(0.5)}
    bad, good = run(with_attacks(tiny(), **attacks), Store(tmp_path)).trials
    assert bad.status == "failed"
    assert words in bad.error
    assert good.status == "done"


def test_an_attack_that_diverges_does_not_stop_the_others(tmp_path):
    def diverge(*_):
        raise InputError("the objective became nan")

    attacks = {"bad": guessing(diverge), "good": constant(0.5)}
    bad, good = run(with_attacks(tiny(), **attacks), Store(tmp_path)).trials
    assert (bad.status, bad.error) == ("failed", "InputError: the objective became nan")
    assert good.status == "done"


def test_what_an_attack_did_not_know_is_null(tmp_path):
    def unsure(seen, *_):
        inputs = torch.zeros(4, 1, 8, 8)
        return Reconstruction(inputs, None, np.nan, (1.0, np.inf), facts={"step": np.nan, "n": 3})

    trial = only(run(with_attacks(tiny(), unsure=guessing(unsure)), Store(tmp_path)))
    assert trial.found.residual is None
    assert trial.found.history == (1.0, None)
    assert 0 <= trial.found.sparsity < 1
    assert trial.found.zero_tensors == 0
    assert trial.found.facts == {"step": None, "n": 3}
    assert trial.status == "done"


def test_a_method_that_does_not_apply_is_recorded_with_its_reason(tmp_path):
    plan = with_attacks(tiny(), flying=guessing(refuse), good=constant(0.5), also=guessing(refuse))
    result = run(plan, Store(tmp_path))
    statuses = {trial.attack: (trial.status, trial.error) for trial in result.trials}
    no = ("not applicable", "this model has no wings")
    assert statuses == {"flying": no, "good": ("done", None), "also": no}
    row = result.summary[0]
    assert (row.attack, row.not_applicable, row.failed) == ("flying", 1, 0)
    assert len(list((tmp_path / "trials").iterdir())) == 3
    begun = []
    watch = Watch(begin=lambda case: begun.append(case.id))
    assert without_times(run(plan, Store(tmp_path), resume=True, watch=watch)) == without_times(
        result
    )
    assert begun == []


def test_an_audit_in_which_nothing_applies_is_an_error_and_leaves_nothing(tmp_path):
    plan = with_attacks(tiny(audit={"seeds": [0, 1]}), flying=guessing(refuse))
    with pytest.raises(NotApplicable) as error:
        run(plan, Store(tmp_path / "out"))
    assert str(error.value).count("flying: this model has no wings") == 1
    assert not (tmp_path / "out").exists()


def test_it_does_not_cost_the_audit_that_was_there(tmp_path):
    plan = tiny()
    run(plan, Store(tmp_path))
    before = files(tmp_path)
    with pytest.raises(NotApplicable):
        run(with_attacks(plan, flying=guessing(refuse)), Store(tmp_path), overwrite=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        ({"training": {"batch_size": 5000}}, "batch_size"),
        ({"rounds": [3], "training": {"lr": 1e30}}, "Lower the learning rate"),
        ({"clients": 1797, "training": {"batch_size": 2}}, "fewer clients"),
    ],
)
def test_a_federation_that_cannot_run_stops_the_audit_and_leaves_nothing(
    tmp_path, federation, words
):
    with pytest.raises(InputError, match=words):
        run(tiny(federation=federation), Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


class Mangle:
    """A defence that sends something else than an update."""

    def __init__(self, change):
        self.change = change

    def announced(self):
        return {}

    def on_update(self, update, here, rng):
        return self.change(update)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: {n: v for n, v in u.items() if n != "fc2.bias"}, "no entry for .*fc2.bias"),
        (lambda u: u | {"fc1.weight": u["fc1.weight"].T}, "fc1.weight.* has shape"),
        (lambda u: u | {"fc3.weight": torch.ones(1)}, "unexpected entry 'fc3.weight'"),
        (lambda u: u | {"fc2.bias": u["fc2.bias"] * torch.nan}, "NaN or infinite"),
    ],
)
def test_an_update_that_is_not_the_models_stops_the_audit_and_leaves_nothing(
    tmp_path, change, words
):
    plan = dataclasses.replace(tiny(), defences={"mangle": Mangle(change)})
    with pytest.raises(InputError, match=words):
        run(plan, Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# Summaries.


def trial(seed: int, psnr: list[float], labels: float | None = None, **more: Any) -> Trial:
    count = len(psnr)
    base = {"psnr": tuple(score - 5 for score in psnr)}
    done = more.get("status", "done") == "done"
    score = Score(
        records=count,
        scores={"psnr": tuple(psnr), "identified": (1.0, *[0.0] * (count - 1))},
        mean_image=base,
        random_image=base,
        identified=0.1,
        labels=None if labels is None else LabelScore((), labels, 0.1, 0.2),
    )
    given = {
        "id": f"{seed}", "kind": "trial", "round": 0, "defence": "none", "attack": "a",
        "seed": seed, "realism": "realistic", "status": "done", "error": None,
        "times": Times(1.0, 1.0), "found": Found(count, None, 0.0) if done else None,
        "score": score if done else None,
    }  # fmt: skip
    return Trial(**(given | more))


def test_a_summary_pools_all_images_of_all_seeds():
    trials = [
        trial(0, [10.0, 30.0, 11.0], labels=0.5),
        trial(1, [19.0], labels=1.0),
        trial(2, [20.0, 12.0]),
        trial(3, [99.0], status="failed", error="boom"),
        trial(4, [99.0], attack="b"),
        trial(5, [99.0], round=7),
    ]
    limit = Limit(found=0.2)
    rows = summarise(trials, limit, measurements({"psnr": metrics.METRICS["psnr"]}, limit))
    assert [(r.round, r.attack) for r in rows] == [(0, "a"), (0, "b"), (7, "a")]
    row, pooled = rows[0], [10.0, 30.0, 11.0, 19.0, 20.0, 12.0]
    spread_ = row.measured.scores["psnr"]
    assert spread_.median == statistics.median(pooled) == 15.5
    assert spread_.mean == pytest.approx(np.mean(pooled))
    assert spread_.quartiles == pytest.approx(np.percentile(pooled, [25, 75]))
    assert (spread_.least, spread_.most, spread_.count) == (10, 30, 6)
    assert spread_.interval[0] < 15.5 < spread_.interval[1]
    assert row.measured.mean_image["psnr"] == 10.5
    assert row.measured.identified == pytest.approx(0.1)
    assert (row.trials, row.failed, row.reason) == (4, 1, "boom")
    assert row.measured.records == 6
    assert row.measured.success_rate == 2 / 6  # 20 dB counts
    leaks = row.measured.leaks
    assert leaks["pictures"].share == 3 / 6  # 15 dB or more, and well above the mean image
    assert leaks["found"].share == 3 / 6
    assert leaks["found"].beyond == pytest.approx(0.4 / 0.9)  # chance is a tenth
    assert leaks["labels"].records == 4  # one trial named none
    assert [leak.limit for leak in leaks.values()] == [0.1, 0.2, 0.5]
    assert (row.measured.risk, row.measured.worst_risk) == ("high", "very high")
    assert dataclasses.asdict(row.measured.labels) == pytest.approx(
        {"accuracy": 0.625, "random": 0.1, "class_prior": 0.2}
    )


def test_one_score_is_its_own_spread():
    got = spread([7.0])
    assert got == Spread(
        mean=7.0,
        median=7.0,
        quartiles=(7.0, 7.0),
        interval=(7.0, 7.0),
        least=7.0,
        most=7.0,
        count=1,
    )


def test_a_result_says_what_was_audited(tmp_path):
    plan = tiny(audit={"metrics": ["ssim"]})
    result = run(plan, Store(tmp_path))
    assert result.name == "tiny"
    assert result.fingerprint == plan.fingerprint
    assert result.federation.parameters == 64 * 8 + 8 + 8 * 10 + 10
    assert result.federation.shape == (1, 8, 8)
    assert result.federation.records == 1797
    assert result.plan.federation.training.batch_size == 4
    assert result.versions["torch"] == torch.__version__
    assert result.times.cpu_seconds == sum(t.times.cpu_seconds for t in result.trials)
    (row,) = result.summary
    assert set(row.measured.scores) == {"psnr", "ssim", "identified"}
    assert row.measured.risk == metrics.risk(row.measured.scores["psnr"].median)


def test_the_exact_recursion_is_run_unasked_and_cited_and_has_no_control(tmp_path):
    plan = tiny(
        federation={
            "model": {"name": "mlp", "hidden": [64]},
            "training": {"batch_size": 2, "batch_norm": "eval"},
        },
        audit={"control": True, "exact": True},
    )
    result = run(plan, Store(tmp_path))
    ran = [(trial.kind, trial.attack) for trial in result.trials]
    assert ran == [("control", "analytic"), ("trial", "exact-recursion"), ("trial", "analytic")]
    assert [entry.attack for entry in result.control] == ["analytic"]
    assert min(result.trials[1].score.scores["psnr"]) > 80
    assert {"zhu2021", "dimitrov2024"} <= {paper.key for paper in result.references}


def test_cases_of_one_round_stand_together():
    plan = tiny(**NOISY)
    keys = [(c.stage, c.defence, c.seed) for c in cases(plan)]
    assert keys == sorted(keys, key=list(dict.fromkeys(keys)).index)
    assert len(set(keys)) == 8
    assert len({c.id for c in cases(plan)}) == len(keys) == 16 + 8


def test_the_round_that_two_attacks_share_is_played_once(tmp_path, monkeypatch):
    played = []

    class Counting(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            played.append(1)

    plan = tiny()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    monkeypatch.setattr(type(plan), "_make_model", lambda self: Counting(*model))
    run(with_attacks(plan, one=constant(0.1), two=constant(0.2)), Store(tmp_path))
    assert len(played) == 3  # once to look at it, once for the fingerprint, once for the round


def test_a_thinned_history_keeps_the_last_value():
    assert _thinned(()) == ()
    assert _thinned(tuple(range(200))) == tuple(range(200))
    thin = _thinned(tuple(range(1001)))
    assert len(thin) <= 200
    assert thin[-1] == 1000
    assert len(set(np.diff(thin))) == 1


# Pictures.


def test_pictures_show_what_was_scored(tmp_path):
    plan = tiny()
    truth = truth_of(plan).inputs
    trial = only(run(with_attacks(plan, grey=constant(0.25)), Store(tmp_path)))
    for i, name in enumerate(trial.found.images.truths):
        pixels = np.asarray(Image.open(tmp_path / name))
        assert np.array_equal(pixels, np.round(truth[i, 0].numpy() * 255))
    for name in trial.found.images.guesses:
        assert np.unique(np.asarray(Image.open(tmp_path / name))).tolist() == [64]
    assert Image.open(tmp_path / trial.found.images.sheet).width > 4 * images.TILE


def test_a_picture_is_grey_or_rgb_in_eight_bits():
    colour = torch.tensor([[[0.0]], [[1.0]], [[0.5]]])
    assert images.picture(colour).getpixel((0, 0)) == (0, 255, 128)
    assert images.picture(torch.tensor([[[1.7, -0.3]]])).tobytes() == b"\xff\x00"
    assert images.picture(torch.tensor([[[1.0]], [[0.0]]])).mode == "L"


def test_the_sheet_has_truths_above_guesses():
    white, black = (Image.new("L", (2, 2), level) for level in (255, 0))
    page = images.sheet({"guess": [black] * 9, "truth": [white] * 9}, None)
    assert page.getpixel((10, 10)) == (255, 255, 255)
    assert page.getpixel((10, 10 + images.TILE)) == (0, 0, 0)
    one_row = images.sheet({"guess": [black] * 8, "truth": [white] * 8}, None)
    assert page.width == one_row.width
    assert page.height > 1.9 * one_row.height


def test_a_large_batch_shows_its_first_images_only():
    many = torch.zeros(images.LIMIT + 3, 1, 2, 2)
    paths, drawn = images.drawn("one", images.Panel(many, many))
    assert len(paths.truths) == len(paths.guesses) == images.LIMIT
    assert paths.sheet == "images/one/sheet.png"
    assert set(drawn) == {paths.sheet, *paths.truths, *paths.guesses}
