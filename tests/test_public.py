"""Public records: what any attacker may hold, and what is prepared of them once for many trials."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import public_attack
import pytest
import torch
from typer.testing import CliRunner

from leakgauge import data, exchanges, kept
from leakgauge.attacks.active import Seer
from leakgauge.audit import Plan, Store, Watch, cases, parse, run
from leakgauge.audit.bench import Bench
from leakgauge.audit.public import told
from leakgauge.audit.results import Public, Result
from leakgauge.audit.schema import load
from leakgauge.cli import app
from leakgauge.errors import InputError, NotApplicable, PlanError, Withheld
from leakgauge.records import Images
from leakgauge.report import html, markdown
from leakgauge.types import Kept, LocalTraining, Resources

HERE = Path(__file__).parent
MEAN = "public_attack:MeanPublic"
PLAN: dict[str, Any] = {
    "federation": {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "training": {"batch_size": 2},
        "public": 12,
    },
    "attack": [{"name": MEAN}],
    "audit": {"seeds": [0], "control": False, "explain": False, "exact": False, "gallery": 20},
}


@pytest.fixture(autouse=True)
def called() -> Iterator[list[Any]]:
    public_attack.CALLED.clear()
    public_attack.WHILE.clear()
    yield public_attack.CALLED
    public_attack.WHILE.clear()


def planned(**tables: Any) -> Plan:
    """PLAN with these keys in its tables; None removes one."""
    table = copy.deepcopy(PLAN)
    for name, keys in tables.items():
        if isinstance(keys, list):
            table[name] = keys
            continue
        table[name] = {k: v for k, v in (table.get(name, {}) | keys).items() if v is not None}
    return parse(table, "public", HERE)


def written(path: Path, images: np.ndarray[Any, Any], labels: list[int], **more: Any) -> Path:
    np.savez(path, images=images, labels=np.asarray(labels), **more)
    return path


# --- which records -----------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["server", "aggregate", "client"])
def test_a_passive_attacker_holds_the_records_that_a_plan_sets_aside(
    actor: str, tmp_path: Path, called: list[Any]
) -> None:
    plan = planned(
        federation={"clients": 2}, threat={"actor": actor, "grants": ["training", "records"]}
    )
    assert (len(plan.public), plan.public_source) == (12, "set aside")
    assert len(plan.data) == len(data.load("digits")) - 12
    result = run(plan, Store(tmp_path))
    [trial] = result.trials
    assert trial.status == "done", trial.error
    assert trial.realism == ("informed" if actor == "client" else "realistic")  # by its grants
    assert torch.equal(called[0].public.inputs, plan.public.inputs)
    assert result.threat is not None
    assert result.threat.public == Public("digits", 12, "set aside")
    assert "public" in result.threat.holds
    assert "12 records of digits" in result.threat.knowledge["public"]


def test_another_data_set_may_be_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((7, 1, 8, 8), dtype=np.float32)
    labels = [0, 1, 2, 0, 1, 2, 0]
    written(tmp_path / "mine.npz", images, labels, classes=["3", "cat", "0"])
    plan = planned(federation={"public": {"npz": str(tmp_path / "mine.npz")}})
    assert (len(plan.public), plan.public_source) == (7, "named")
    assert torch.equal(plan.public.inputs, torch.from_numpy(images))
    # Labels are those of the clients' classes, by name; a class that they do not have is -1.
    assert plan.public.labels.tolist() == [3, -1, 0, 3, -1, 0, 3]
    assert plan.public.classes == plan.data.classes
    assert len(plan.data) == len(data.load("digits"))  # nothing is taken from the clients


@pytest.mark.parametrize(
    ("public", "words"),
    [
        ("digits", "1797 of the 1,797 records of digits are also the clients', bit for bit"),
        ({"name": "photos", "size": 8}, "photos are 3 × 8 × 8, those of the clients 1 × 8 × 8"),
        ({"name": "photos", "siz": 8}, "did you mean 'size'"),
        ({"captured": "x"}, "federation.public: key 'name' or 'folder' or 'npz' is missing"),
        ("digit", "did you mean 'digits'"),
        (2.5, "federation.public: expected a whole number, got 2.5"),
        (True, "federation.public: expected a whole number, got True"),
        (-1, "public must be 0 or more"),
        (1797, "leave some for the clients"),
    ],
)
def test_wrong_public_records_are_refused_in_words(public: Any, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(federation={"public": public})
    assert words in str(refusal.value)


def test_one_record_of_a_client_s_is_enough_to_refuse(tmp_path: Path) -> None:
    images = np.zeros((3, 1, 8, 8), dtype=np.float32)
    images[1] = data.load("digits").inputs[1234].numpy()
    written(tmp_path / "mine.npz", images, [0, 0, 0])
    with pytest.raises(PlanError, match=r"1 of the 3 records of .* public records must be no"):
        planned(federation={"public": {"npz": str(tmp_path / "mine.npz")}})
    images[1] = np.nextafter(images[1], 1)  # every pixel a little brighter: another record
    written(tmp_path / "mine.npz", images, [0, 0, 0])
    planned(federation={"public": {"npz": str(tmp_path / "mine.npz")}})


def test_a_record_that_the_set_holds_twice_is_not_on_both_sides(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    once = rng.random((20, 1, 8, 8), dtype=np.float32)
    path = written(tmp_path / "twice.npz", np.concatenate([once, once]), [0, 1] * 20)
    plan = planned(federation={"data": {"npz": str(path)}, "public": 12})
    rows = {bytes(kept.raw(one)) for one in plan.public.inputs}
    assert 0 < len(plan.public) < 12
    assert len(plan.data) == 28
    assert not rows & {bytes(kept.raw(one)) for one in plan.data.inputs}


def test_without_a_word_the_photographs_serve_an_attack_that_needs_public_records(
    tmp_path: Path,
) -> None:
    plan = planned(federation={"public": None})
    assert plan.public_source == "embedded"
    assert len(plan.public) > 100
    assert plan.public.inputs.shape[1:] == (1, 8, 8)
    colour = data.load("photos", size=8, per_photo=1000).inputs
    grey = 0.299 * colour[:, 0] + 0.587 * colour[:, 1] + 0.114 * colour[:, 2]
    assert torch.allclose(plan.public.inputs[:, 0], grey)
    assert len(plan.data) == len(data.load("digits"))
    without = planned(federation={"public": None}, attack=[{"name": "analytic"}])
    assert len(without.public) == 0
    result = run(plan, Store(tmp_path))
    assert result.threat is not None
    assert result.threat.public == Public("photos", len(plan.public), "embedded")
    words = result.threat.knowledge["public"]
    assert "none of them is a client's" in words
    assert "weaker than what public records of the clients' own kind" in words


def test_photographs_fit_records_that_are_no_squares(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((30, 3, 6, 10), dtype=np.float32)
    path = written(tmp_path / "wide.npz", images, [0, 1] * 15)
    plan = planned(federation={"public": None, "data": {"npz": str(path)}})
    square = data.load("photos", size=10, per_photo=1000).inputs
    assert torch.equal(plan.public.inputs, square[:, :, 2:8])
    with pytest.raises(PlanError, match=r"have 1 or 3 channels.*declare federation.public"):
        planned(federation={"public": None, "data": "public_attack:two_channels"})


def test_clients_that_hold_the_photographs_share_them() -> None:
    whole = data.load("photos", size=8)
    federation = {"public": None, "data": {"name": "photos", "size": 8}}
    plan = planned(federation=federation)
    assert plan.public_source == "set aside"
    assert len(plan.public) == len(whole) // 4
    assert "crops of the same photographs" in told(Public("photos", 3, "set aside"))


def test_a_plan_may_say_that_there_are_none() -> None:
    with pytest.raises(Withheld, match=r"needs 'public' .* give federation.public more than 0"):
        planned(federation={"public": 0})
    with pytest.raises(PlanError, match="public records are declared, not granted"):
        planned(threat={"grants": ["training", "public"]})
    with pytest.raises(PlanError, match=r"before the round: give it prepare\(\)"):
        planned(attack=[{"name": "public_attack:Unprepared"}])


def test_seer_does_not_train_on_records_of_no_class(called: list[Any], tmp_path: Path) -> None:
    run(planned(federation={"public": None}), Store(tmp_path))
    with pytest.raises(NotApplicable, match="of no class that the clients have"):
        Seer(steps=1).prepare(called[0], torch.Generator())


# --- prepared once -----------------------------------------------------------------------------


def facts(result: Result) -> list[float]:
    found = [trial.found for trial in result.trials]
    assert all(one is not None for one in found), [trial.error for trial in result.trials]
    return [one.facts["mean"] for one in found if one]  # type: ignore[misc]


def fixed(tmp_path: Path) -> dict[str, str]:
    """A plan's weights, the same for every seed."""
    path = tmp_path / "weights.pt"
    torch.save(planned()._make_model().state_dict(), path)
    return {"checkpoint": str(path)}


def test_trials_with_the_same_weights_share_what_was_prepared(
    tmp_path: Path, called: list[Any]
) -> None:
    audit = {"seeds": [0, 1, 2]}
    defences = [{"name": "none"}, {"name": "clip", "norm": 1.0}]
    plan = planned(federation=fixed(tmp_path), audit=audit, defence=defences)
    result = run(plan, Store(tmp_path / "out"))
    assert len(result.trials) == 6
    assert len(called) == 1
    assert len(set(facts(result))) == 1
    assert [path.suffixes for path in (tmp_path / "out" / "prepared").iterdir()] == [
        [".finished", ".safetensors"]
    ]
    run(planned(audit=audit), Store(tmp_path / "other"))  # each seed draws its own weights
    assert len(called) == 1 + 3


def test_what_is_prepared_is_the_same_whoever_prepares_it(tmp_path: Path) -> None:
    weights = fixed(tmp_path)
    found = [
        facts(
            run(planned(federation=weights, audit={"seeds": [seed]}), Store(tmp_path / str(seed)))
        )
        for seed in (0, 7)
    ]
    assert found[0] == found[1]
    public_attack.CALLED.clear()
    plan = planned(federation=weights, audit={"seeds": [0, 7]})
    jobs = run(plan, Store(tmp_path / "jobs"), jobs=2)
    assert facts(jobs) == found[0] * 2
    assert not public_attack.CALLED  # other processes did it


def test_an_audit_that_was_stopped_goes_on_from_what_was_prepared(
    tmp_path: Path, called: list[Any]
) -> None:
    plan = planned(federation=fixed(tmp_path), audit={"seeds": [0, 1]})
    whole = facts(run(plan, Store(tmp_path / "whole")))

    def stop(case: Any, done: int, total: int, objective: float) -> None:
        assert total == 12
        if done == 5:
            raise KeyboardInterrupt

    assert not run(plan, Store(tmp_path / "out"), watch=Watch(progress=stop)).trials
    kept_ = list((tmp_path / "out" / "prepared").iterdir())
    assert [path.suffixes for path in kept_] == [[".safetensors"]]  # begun, and not finished
    steps: list[int] = []
    watch = Watch(progress=lambda case, done, total, objective: steps.append(done))
    resumed = run(plan, Store(tmp_path / "out"), resume=True, watch=watch)
    assert steps == list(range(6, 13))
    assert facts(resumed) == whole

    (tmp_path / "out" / "trials" / f"{resumed.trials[1].id}.json").unlink()
    before = len(called)
    assert facts(run(plan, Store(tmp_path / "out"), resume=True)) == whole
    assert len(called) == before  # it was finished


def test_two_trials_at_a_time_prepare_once(
    tmp_path: Path, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one asks for the lock while the first one is at work, and waits for it."""
    plan = planned()
    [case] = cases.trials(plan)
    asked, lock = threading.Semaphore(0), kept.fcntl.flock

    def flock(file: Any, how: int) -> None:
        asked.release()
        lock(file, how)

    monkeypatch.setattr(kept.fcntl, "flock", flock)
    found: list[Kept] = []

    def fit() -> None:
        bench = Bench(plan, tmp_path)
        found.append(bench.fitted(case, bench.simulated(case), Resources()))

    second = threading.Thread(target=fit)

    def begin_second() -> None:
        public_attack.WHILE.clear()
        asked.acquire()  # that was the first one's
        second.start()
        asked.acquire()

    public_attack.WHILE.append(begin_second)
    fit()
    second.join()
    assert len(called) == 1
    assert len(found) == 2
    assert torch.equal(found[0].tensors["mean"], found[1].tensors["mean"])


def test_what_cannot_lie_on_disk_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be tensors and plain facts"):
        kept.Checkpoint(tmp_path / "x.safetensors", "key").save(Kept({}, {"network": object()}))


def test_the_seconds_of_the_preparation_stand_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.process_time", lambda: now[0])

    def spend() -> None:
        now[0] += 1.0

    public_attack.WHILE.append(spend)
    plan = planned(federation=fixed(tmp_path), audit={"seeds": [0, 1]})
    result = run(plan, Store(tmp_path / "out"))
    assert [(t.times.cpu_seconds, t.times.preparing) for t in result.trials] == [(12, 12), (0, 0)]
    assert load(tmp_path / "out" / "result.json") == result
    page = markdown.render(result, tmp_path / "out")
    assert "of it preparing attacks" in page


# --- captured rounds ---------------------------------------------------------------------------


def captured(folder: Path, *, truths: bool) -> Path:
    plan = planned(federation={"clients": 2})  # scores need records that are not attacked
    bench = Bench(plan, folder)
    round_ = bench.simulated(cases.trials(plan)[0])
    exchanges.capture(
        folder / "captured",
        round_.model,
        list(round_.updates),
        made_by={"name": "mlp", "hidden": [8]},
        record=Images((1, 8, 8)),
        classes=plan.data.classes,
        training=LocalTraining(batch_size=2),
        sizes=round_.sizes,
        truths=round_.truths if truths else None,  # type: ignore[attr-defined]
    )
    return folder


@pytest.mark.parametrize("truths", [True, False])
@pytest.mark.parametrize("public", [None, "named"])
def test_what_is_prepared_for_a_captured_round(
    tmp_path: Path, truths: bool, public: str | None, called: list[Any]
) -> None:
    folder = captured(tmp_path, truths=truths)
    images = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    written(folder / "mine.npz", images, [0] * 5)
    federation: dict[str, Any] = {"data": {"captured": str(folder / "captured")}}
    federation |= {"public": {"npz": str(folder / "mine.npz")}} if public else {}
    plan = parse(PLAN | {"federation": federation}, "captured", HERE)
    result = run(plan, Store(tmp_path / "out"))
    [trial] = result.trials
    assert trial.status == ("done" if truths else "unscored"), trial.error
    assert trial.found is not None
    assert trial.found.facts["public"] == (5 if public else len(plan.public))
    first = plan.captured[0].model.state_dict()
    for name, value in called[-1].model.state_dict().items():
        assert torch.equal(value, first[name])
    assert result.threat is not None
    assert result.threat.public is not None
    assert result.threat.public.checked is truths
    words = result.threat.knowledge["public"]
    assert ("none of them is a client's" in words) is truths
    assert ("cannot be checked" in words) is not truths


def test_nothing_is_set_aside_of_captured_records(tmp_path: Path) -> None:
    folder = captured(tmp_path, truths=True)
    federation: dict[str, Any] = {"data": {"captured": str(folder / "captured")}, "public": 2}
    with pytest.raises(PlanError, match=r"public = 2: captured records .* name a data set"):
        parse(PLAN | {"federation": federation}, "captured", HERE)
    held = parse(PLAN | {"federation": federation | {"public": None}}, "c", HERE).data.inputs
    written(folder / "mine.npz", held.numpy(), [0] * len(held))
    federation["public"] = {"npz": str(folder / "mine.npz")}
    with pytest.raises(PlanError, match=r"4 of the 4 records of .* are also the clients'"):
        parse(PLAN | {"federation": federation}, "captured", HERE)


# --- what a reader sees ------------------------------------------------------------------------


def test_reports_name_the_public_records(tmp_path: Path) -> None:
    plan = planned(federation={"public": None})
    result = run(plan, Store(tmp_path))
    expected = f"{len(plan.public)} crops of the photographs that come with the package"
    for page in (markdown.render(result), html.render(result, tmp_path)):
        text = page.replace("&#39;", "'")
        assert expected in text
        assert "With public records of the clients' own kind they can recover more" in text


CHECKED = """
[federation]
model = "mlp"
data = "digits"
public = 12

[[attack]]
name = "public_attack:MeanPublic"

[audit]
seeds = [0]
control = false
explain = false
"""


def test_a_check_names_the_public_records_and_the_cost_of_preparing(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(CHECKED)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "plan.toml")])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "public records: 12 records of digits that were set aside" in said
    assert "to prepare" in said
