"""The evaluation protocol: the order of factors, the hardest value, what is said and refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from leakgauge import report
from leakgauge.audit import Store, Watch, parse, protocol
from leakgauge.audit import run as run_audit
from leakgauge.audit.factors import FACTORS
from leakgauge.audit.protocol import Bench, Protocol, load
from leakgauge.errors import InputError, PlanError
from leakgauge.report import figures
from leakgauge.report import protocol as words
from leakgauge.types import Reconstruction

ALL = {
    "partition": ["iid", {"name": "dirichlet", "alpha": 0.5}],
    "init": ["torch", "orthogonal"],
    "model": [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [16]}],
    "rounds": [0, 1],
    "batch_size": [1, 4],
    "steps": [1, 2],
    "grants": [["training", "records"], ["training", "records", "labels"]],
    "defence": ["none", "sign"],
}


def plan_of(varied: dict[str, Any] | None, **changes: Any):
    """A plan on digits with a small perceptron; `changes` replaces keys of its tables."""
    table: dict[str, Any] = {
        "federation": {
            "data": "digits",
            "model": {"name": "mlp", "hidden": [8]},
            "clients": 2,
        },
        "attack": [{"name": "analytic"}],
        "audit": {"seeds": [0, 1], "gallery": 20, "exact": False},
    }
    if varied is not None:
        table["protocol"] = varied
    for key, value in changes.items():
        table[key] = table[key] | value if isinstance(value, dict) and key in table else value
    return parse(table, "tiny", Path(__file__).parent)


def played(folder: Path, varied: dict[str, Any], *, calls: list[str] | None = None, **changes: Any):
    def watch(said: str) -> Watch:
        if calls is not None:
            calls.append(said)
        return Watch()

    store = Store(folder, "protocol.json")
    return protocol.run(Bench(plan_of(varied, **changes)), store, watch=watch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All eight factors, and the folder they are in."""
    folder = tmp_path_factory.mktemp("protocol") / "out"
    calls: list[str] = []
    return played(folder, ALL, calls=calls), folder, calls


def median(value: protocol.Value) -> float:
    assert value.row is not None
    assert value.row.measured is not None
    return value.row.measured.scores["psnr"].median


def kept(found: Protocol, at: int = 0) -> dict[str, str]:
    steps = found.passes[at].steps
    return {step.factor: value.words for step in steps for value in step.values if value.kept}


# One factor at a time, the hardest value kept.


def test_the_factors_come_in_the_order_of_the_protocol(whole):
    found, _, calls = whole
    (one,) = found.passes  # no batch norm in a perceptron
    names = [factor.name for factor in FACTORS[:-1]]
    assert [step.factor for step in one.steps] == names
    begun = [said.split(", ", 1)[1].partition(":")[0] for said in calls[1:]]
    assert begun == [name.lower() for name in names]  # one new value each; the other is known
    assert calls[0] == "seed configuration"
    assert found.skipped == [FACTORS[-1].name]
    assert one.finished
    assert found.exit_code == 0


def test_the_value_that_leaks_least_is_kept_and_what_stands_wins_a_tie(whole):
    found, _, _ = whole
    for step in found.passes[0].steps:
        (chosen,) = [value for value in step.values if value.kept]
        (stands,) = [value for value in step.values if value.stands]
        shown = {value.words: min(median(value), 50.0) for value in step.values}
        assert shown[chosen.words] == min(shown.values())
        if shown[stands.words] == shown[chosen.words]:
            assert chosen is stands
    assert kept(found)["Batch size"] == "4"
    assert kept(found)["Heterogeneity"] == "iid"  # one record of a client is read whatever it is


def test_above_fifty_decibels_what_stands_stays(whole):
    found, _, _ = whole
    value = found.passes[0].steps[0].values[0]

    def at(psnr: float, stands: bool) -> protocol.Value:
        scores = value.row.measured.scores
        scores = scores | {"psnr": replace(scores["psnr"], median=psnr)}
        row = replace(value.row, measured=replace(value.row.measured, scores=scores))
        return replace(value, row=row, stands=stands)

    assert protocol._hardest([at(60.0, False), at(120.0, True)]) == 1
    assert protocol._hardest([at(40.0, False), at(120.0, True)]) == 0


def test_each_factor_goes_on_from_what_was_kept(whole):
    found, folder, _ = whole
    final = found.passes[0].steps[-1].values
    plans = {part.folder: part.plan for part in found.parts}
    training = plans[final[0].folder].federation.training
    assert (training.batch_size, training.steps) == (4, 2)
    assert plans[final[0].folder].federation.records == 8  # new records in each step
    assert [plans[value.folder].defence[0]["name"] for value in final] == ["none", "sign"]
    for step in found.passes[0].steps:
        others = {
            json.dumps({k: v for k, v in _tables(plans[value.folder]).items() if k != step.factor})
            for value in step.values
        }
        assert len(others) == 1  # one factor at a time
    assert {path.name for path in (folder / "audits").iterdir()} == set(plans)


def _tables(plan):
    return {
        factor.name: repr(factor.of(plan)) for factor in FACTORS if factor.name != "Local steps"
    }


def test_the_numbers_are_those_of_an_audit_of_the_same_tables(whole, tmp_path):
    found, _, _ = whole
    four = found.passes[0].steps[4].values[1]
    assert four.words == "4"
    alone = plan_of(
        None,
        federation={"training": {"batch_size": 4}},
        audit={"seeds": [0, 1], "control": False, "explain": False},
    )
    result = run_audit(alone, Store(tmp_path / "alone"))
    assert four.row == result.summary[0]


def test_the_seed_alone_has_a_control(whole):
    found, _, _ = whole
    assert [bool(part.controls) for part in found.parts] == [True] + [False] * 8
    assert [one.attack for one in found.control] == ["analytic"]
    assert found.control[0].passed
    assert "analytic (over 50 dB) worked" in words.control(found)
    without = replace(found, control=())
    assert "no evidence of safety" in words.control(without)
    assert without.exit_code == 4
    weak = replace(found.control[0], passed=False)
    assert "no evidence of safety" in words.control(replace(found, control=(weak,)))


def test_the_value_that_stands_is_compared_though_it_is_not_listed(tmp_path):
    found = played(tmp_path / "out", {"batch_size": [4, 2]})
    (step,) = found.passes[0].steps
    assert [(value.words, value.stands) for value in step.values] == [
        ("1", True), ("4", False), ("2", False),
    ]  # fmt: skip


def test_a_value_that_cannot_be_measured_is_said_and_not_kept(tmp_path):
    found = played(tmp_path / "out", {"model": ["lenet-zhu"], "batch_size": [2]})
    first, second = found.passes[0].steps[0].values
    assert first.kept
    assert not second.kept
    assert second.row is None
    assert "no attack of the plan applies" in second.reason
    assert "no attack of the plan applies" in words.text(found, "")


def test_a_crash_is_not_the_hardest_value(tmp_path):
    attack = {"name": "test_protocol:Breaks"}
    found = played(tmp_path / "out", {"batch_size": [1, 2]}, attack=[attack, {"name": "analytic"}])
    one, two = found.passes[0].steps[0].values
    assert (one.failed, two.failed) == (0, 2)
    assert median(two) < median(one)
    assert one.kept
    assert found.exit_code == 3
    assert "2 trials crashed" in words.text(found, "")


@dataclass(frozen=True)
class Breaks:
    """An attack that crashes on two records."""

    needs: ClassVar[frozenset[str]] = frozenset({"records"})

    def reconstruct(self, seen, rng, resources=None):
        if seen.records == 2:
            raise RuntimeError("the line search exploded")
        return Reconstruction(torch.zeros(1, *seen.record.shape), None, 0.0)


# Batch norm apart.


def normed(shape, classes):
    """A network with batch norm whose first layer is fed the image itself."""
    channels, height, width = shape
    size = channels * height * width
    layers = nn.Flatten(), nn.Linear(size, 6), nn.BatchNorm1d(6), nn.Linear(6, classes)
    return nn.Sequential(*layers)


NORMED = {"federation": {"model": "test_protocol:normed", "training": {"batch_size": 2}}}


def test_train_and_eval_are_gone_through_apart(tmp_path):
    found = played(tmp_path / "out", {"batch_size": [2, 4]}, **NORMED)
    assert found.modes == ("train", "eval")
    modes = [part.plan.federation.training.batch_norm for part in found.parts]
    assert modes == ["train", "train", "eval", "eval"]
    for one in found.passes:
        plans = {part.folder: part.plan for part in found.parts}
        for value in one.steps[0].values:
            assert plans[value.folder].federation.training.batch_norm == one.batch_norm
    told = words.text(found, "")
    for mode in ("train", "eval"):
        assert f"## Batch norm in {mode} mode" in told
    page = words.page(found, "")
    assert page.count("<h2>Table: ") == 2
    alone = played(tmp_path / "alone", {"batch_size": [2, 4], "batch_norm": ["eval"]}, **NORMED)
    assert alone.modes == ("eval",)
    assert "batch norm, which was in eval mode alone" in words.not_varied(alone)


def test_a_model_without_batch_norm_is_not_run_in_both_modes(tmp_path):
    calls: list[str] = []
    varied = {"model": [{"name": "mlp", "hidden": [8]}]}
    found = played(tmp_path / "out", varied, calls=calls, **NORMED)
    assert len(found.passes) == 2
    assert len(found.parts) == len(calls) == 3
    train, eval_ = (one.steps[0].values[1] for one in found.passes)
    assert train.folder == eval_.folder
    assert train.row == eval_.row


# Going on, and reading back.


class Stop(Exception):
    pass


def comparable(path: Path) -> Any:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key != "times"}
        return [without(item) for item in value] if isinstance(value, list) else value

    return without(json.loads(path.read_text("utf-8")))


def test_a_killed_protocol_goes_on_and_ends_as_if_it_had_not_been(whole, tmp_path):
    _, folder, calls = whole
    begun: list[str] = []

    def killed(said: str) -> Watch:
        begun.append(said)
        if len(begun) == 4:
            raise Stop
        return Watch()

    bench, store = Bench(plan_of(ALL)), Store(tmp_path / "out", "protocol.json")
    with pytest.raises(Stop):
        protocol.run(bench, store, watch=killed)
    assert not store.result.exists()
    trials: list[str] = []

    def watched(said: str) -> Watch:
        return Watch(begin=lambda case: trials.append(said))

    protocol.run(bench, store, resume=True, watch=watched)
    assert comparable(store.result) == comparable(folder / "protocol.json")
    assert set(trials) == set(calls[3:])  # what had ended was not run again
    with pytest.raises(PlanError, match="holds an audit already"):
        protocol.run(bench, store)


def test_overwriting_leaves_nothing_of_what_was_there(tmp_path):
    played(tmp_path / "out", {"batch_size": [1, 2]})
    before = {path.name for path in (tmp_path / "out" / "audits").iterdir()}
    store = Store(tmp_path / "out", "protocol.json")
    other = protocol.run(Bench(plan_of({"batch_size": [1, 4]})), store, overwrite=True)
    after = {path.name for path in (tmp_path / "out" / "audits").iterdir()}
    assert after == {part.folder for part in other.parts}
    assert before - after


def test_the_budget_ends_it_and_it_says_what_is_left(tmp_path):
    bench, store = Bench(plan_of(ALL)), Store(tmp_path / "out", "protocol.json")
    found = protocol.run(bench, store, budget=1e-9)
    assert found.unfinished
    assert found.exit_code == 4
    assert not (tmp_path / "out" / "audits").exists()  # nothing was begun
    assert load(store.result) == found
    assert "not run" in words.text(found, "")
    assert "--resume continues" in words.page(found, "")
    assert protocol.run(bench, store, resume=True).exit_code == 0


def test_an_interrupt_keeps_what_was_done(tmp_path):
    def watch(said: str) -> Watch:
        if "initialisation" in said:
            raise KeyboardInterrupt
        return Watch()

    bench, store = Bench(plan_of(ALL)), Store(tmp_path / "out", "protocol.json")
    found = protocol.run(bench, store, watch=watch)
    assert found.interrupted
    assert [step.factor for step in found.passes[0].steps] == ["Heterogeneity", "Initialisation"]
    assert not any(value.kept for value in found.passes[0].steps[1].values)


def test_an_audit_that_was_cut_short_counts_as_not_run(tmp_path):
    """Half of its trials would say something else than all of them."""

    def interrupted(case) -> None:
        if case.seed == 1:
            raise KeyboardInterrupt

    def watch(said: str) -> Watch:
        return Watch() if said == "seed configuration" else Watch(begin=interrupted)

    bench, store = Bench(plan_of({"batch_size": [1, 4]})), Store(tmp_path / "out", "protocol.json")
    found = protocol.run(bench, store, watch=watch)
    assert found.interrupted
    assert [value.reason for value in found.passes[0].steps[0].values] == [None, "not run"]
    again = protocol.run(bench, store, resume=True)
    assert again.exit_code == 0
    assert kept(again) == {"Batch size": "4"}


def test_what_is_read_back_is_what_was_found(whole):
    found, folder, _ = whole
    assert load(folder / "protocol.json") == found


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t["passes"][0]["steps"][4]["values"][0].update(kept=True),
        lambda t: t["passes"][0]["steps"].pop(),
        lambda t: t["parts"][0]["trials"][-1]["score"]["scores"].update(psnr=[3.0]),
        lambda t: t["control"][0].update(passed=False),
        lambda t: t["parts"].pop(),
    ],
)
def test_an_edited_file_is_refused(whole, tmp_path, edit):
    _, folder, _ = whole
    table = json.loads((folder / "protocol.json").read_text("utf-8"))
    edit(table)
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(table), "utf-8")
    with pytest.raises(InputError, match="does not follow from the trials"):
        load(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("parts"), "key 'parts' is missing"),
        (lambda t: t.update(schema=2), "its schema is 2"),
        (lambda t: t.update(modes=["off"]), "not a choice"),
        (lambda t: t["plan"].update(protocol=None), r"no \[protocol\]"),
    ],
)
def test_a_damaged_file_is_refused_in_words(whole, tmp_path, edit, message):
    _, folder, _ = whole
    table = json.loads((folder / "protocol.json").read_text("utf-8"))
    edit(table)
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(table), "utf-8")
    with pytest.raises(InputError, match=message):
        load(path)
    path.write_text("{", "utf-8")
    with pytest.raises(InputError, match="finish the protocol"):
        load(path)


# What is refused before anything is run.


@pytest.mark.parametrize(
    ("varied", "message"),
    [
        (None, r"has no \[protocol\]"),
        ({}, "lists no values to try"),
        ({"batch_norm": []}, "lists no values"),
        ({"batch_size": [2], "batch_norm": []}, "lists no mode"),
        ({"batch_sizes": [1]}, "did you mean 'batch_size'"),
        ({"batch_size": [2, 2]}, "lists a value twice"),
        ({"batch_size": [0]}, "batch_size must be between 1"),
        ({"init": [{"checkpint": "x"}]}, "expected a name or { checkpoint"),
        ({"init": ["torch", "xavier"]}, r"protocol\.init\[1\]: unknown initialisation 'xavier'"),
        ({"init": [{"checkpoint": "no.safetensors"}]}, r"protocol\.init\[0\]: .*no\.safetensors"),
        ({"defence": ["none", "prun"]}, r"protocol\.defence\[1\]: .*did you mean 'prune'"),
        ({"model": ["resnet-9000"]}, r"protocol\.model\[0\]: unknown model"),
        ({"partition": ["dirichlet "]}, r"protocol\.partition\[0\]: unknown partition"),
        ({"grants": [["label"]]}, "did you mean 'labels'"),
        ({"clients": [1, 2]}, 'actor = "aggregate"'),
    ],
)
def test_wrong_tables_are_refused_in_words(varied, message):
    with pytest.raises(PlanError, match=message):
        Bench(plan_of(varied))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"federation": {"rounds": [0, 2]}}, "lists 2 under 'rounds'"),
        ({"defence": [{"name": "none"}, {"name": "sign"}]}, "lists 2 under 'defence'"),
        ({"federation": {"records": 4, "training": {"batch_size": 4}}}, "leave records out"),
        ({"federation": {"training": {"epochs": 2}}}, "write steps instead"),
    ],
)
def test_a_plan_that_is_more_than_one_configuration_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        Bench(plan_of({"batch_size": [2]}, **changes))


def test_an_audit_does_not_run_a_plan_with_a_protocol(tmp_path):
    with pytest.raises(PlanError, match="run `leakgauge protocol`"):
        run_audit(plan_of({"batch_size": [2]}), Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_forecast_counts_the_audits_at_most(whole):
    found, _, _ = whole
    told = Bench(plan_of(ALL)).outlook()
    assert told.audits == len(found.parts) == 9
    assert told.trials == 2
    assert 0 < told.low < told.high


# The report.


def test_the_report_holds_every_number_and_loads_nothing(whole, tmp_path):
    found, folder, _ = whole
    shutil.copytree(folder, tmp_path / "out")
    pages = report.protocol.write(tmp_path / "out")
    assert [path.name for path in pages] == ["protocol.html", "protocol.md"]
    page, text = (path.read_text("utf-8") for path in pages)
    for step in found.passes[0].steps:
        for value in step.values:
            assert value.words in page
    assert text.count("**kept**") == 8
    assert "9.9" in text
    assert page.count('class="point kept"') == 8
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "script-src &#39;none&#39;" in page


def test_texts_are_escaped(whole):
    found, _, _ = whole
    bad = replace(found, name="<b>|x|</b>")
    assert "<b>|x|" not in words.page(bad, "")
    assert "<b>" not in words.text(bad, "")


def test_the_headline_says_from_where_to_where_the_leak_fell(whole):
    found, _, _ = whole
    (line,) = words.headlines(found)
    seed, last = line.split("; with the hardest value of 8 factors, ")
    assert "over 50 dB, risk very high, and 100\N{NO-BREAK SPACE}% of the records" in seed
    final = next(value for value in found.passes[0].steps[-1].values if value.kept)
    assert f"a median of {median(final):.1f} dB" in last
    assert "no more than a mean picture" in last


def test_what_was_not_varied_is_said(tmp_path):
    found = played(tmp_path / "out", {"batch_size": [1, 2]})
    told = words.not_varied(found)
    for name in ("heterogeneity", "defence", "the data set"):
        assert name in told
    assert "batch size" not in told


def test_a_point_stands_where_its_numbers_say():
    axis = figures.psnr_axis([20.0])
    one, other = figures.Point(10.0, (8.0, 12.0), 9.0), figures.Point(20.0, (20.0, 20.0), 9.0, True)
    marks = figures.columns([one, None, other], 15.0, axis, joined=True)
    low, high = [mark for mark in marks if mark.shape == "dot"]
    assert low.y > high.y  # more decibels stand higher
    assert (low.kind, high.kind) == ("point", "point kept")
    assert low.x == pytest.approx(figures.MARGIN + (1 - figures.MARGIN) / 6)
    (curve,) = [mark for mark in marks if mark.kind == "curve"]
    assert (curve.x, curve.y, curve.x2, curve.y2) == (low.x, low.y, high.x, high.y)
    interval = next(mark for mark in marks if mark.kind == "interval")
    assert interval.y > low.y > interval.y2
    (limit,) = [mark for mark in marks if mark.kind == "limit"]
    assert low.y > limit.y > high.y


def test_what_attackers_knew_of_a_defence_is_kept(tmp_path):
    found = played(tmp_path, {"defence": ["none", {"name": "prune", "share": 0.5}]})
    rows = {v.words: v.row.measured.adapted for s in found.passes[0].steps for v in s.values}
    assert rows["no defence"] is None
    knows = [t.found.adapted for p in found.parts for t in p.trials
             if t.defence == "prune" and not t.attack.endswith("-blind")]  # fmt: skip
    assert knows
    assert all("matches only what was sent" in words for words in knows)
