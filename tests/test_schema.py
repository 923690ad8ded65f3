"""result.json is read back whole, migrated from older versions, or refused naming the key."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from sample_result import failed, rederive, sample, save, unscored

from leakgauge import config
from leakgauge.audit import schema
from leakgauge.audit.results import (
    Attacker,
    Found,
    Measurement,
    Pictures,
    Result,
    Score,
    Times,
    Trial,
)
from leakgauge.config import plain
from leakgauge.errors import InputError
from leakgauge.papers import Paper
from leakgauge.records import Scale

FREE = {"plan", "facts"}  # the user's own content: any JSON
NAMES = {"versions", "knowledge", "scores", "mean_image", "random_image"}  # keys are data there
DERIVED = ("verdict", "summary", "control", "explanation")
REAL = Path(__file__).parent / "results" / "schema-3.json"  # written by the version that made it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit")
    sample(path, attacks=("analytic",), defences=("none",), seeds=1, records=2)
    return path


@pytest.fixture
def result(folder) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.fixture
def real() -> dict[str, Any]:
    return json.loads(REAL.read_text(encoding="utf-8"))


def test_how_schema_3_normalised_is_kept_where_it_stands_now(real):
    assert schema.check(real).plan.federation.record == Scale((0.5,), (0.25,))


def schema_1(result: dict[str, Any]) -> dict[str, Any]:
    """An audit of schema 3 as the first version wrote it."""
    old = copy.deepcopy(result)
    new = ("threat", "verdict", "control", "explanation", "sensitivity", "not_run", "references")
    for key in new:
        del old[key]
    del old["federation"]["model"]
    old["schema"] = 1
    old["times"] = {"cpu_seconds": old["times"]["cpu_seconds"]}
    old["trials"] = [trial for trial in old["trials"] if trial["kind"] == "trial"]
    for trial in old["trials"]:
        trial.pop("caveats", None)
        del trial["kind"]
    return old


def schema_2(result: dict[str, Any]) -> dict[str, Any]:
    """An audit of schema 3 as the second version wrote it: pictures alone were judged."""
    old = copy.deepcopy(result)
    old["schema"] = 2
    old["leakgauge"] = "0.1.0"
    old["plan"]["audit"]["limit"] = {"psnr": 15.0, "share": 0.1}
    old["verdict"] = {"outcome": "below the limit", "exit_code": 0, "headline": "fine"}
    old["control"] = [{"attack": "analytic", "trial": e["trials"][0]} for e in old["control"]]
    for rung in old["explanation"]["rungs"]:
        rung["trials"] = 1
    return old


def paths(value: Any, path: tuple[Any, ...] = ()):
    """The path of every key of a table, outside free content."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            if key not in FREE:
                yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from paths(item, (*path, i))


def words(path: tuple[Any, ...]) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def optional(path: tuple[Any, ...]) -> bool:
    """Whether a file may leave the key out: what it then says is what its type says."""
    within = {
        "found": Found,
        "score": Score,
        "images": Pictures,
        "times": Times if len(path) > 2 else None,
    }
    table = within.get(path[-2] if len(path) > 1 else "")
    if path[0] == "plan":
        return True  # older plans left what had a default
    known = table or {1: Result, 3: Trial}.get(len(path))
    if path[:1] in (("metrics",), ("references",)):
        known = {"metrics": Measurement, "references": Paper}[path[0]]
    if path[:1] == ("threat",):
        known = Attacker if len(path) == 2 else None
    named = {f.name: f for f in fields(known)} if known else {}
    one = named.get(path[-1])
    return one is not None and (one.default is not MISSING or one.default_factory is not MISSING)


def test_a_result_is_loaded_as_it_was_written(folder, result):
    assert plain(schema.load(folder / "result.json")) == result


def test_a_missing_key_is_named_wherever_it_is_missing(result):
    checked = 0
    for path in list(paths(result)):
        *above, key = path
        if (above and (above[-1] in NAMES or path[0] in DERIVED)) or optional(path):
            continue
        damaged = copy.deepcopy(result)
        del at(damaged, above)[key]
        with pytest.raises(InputError) as caught:
            schema.check(damaged)
        assert f"{words(('result', *above))}: key '{key}' is missing" in str(caught.value)
        checked += 1
    assert checked > 90


def test_a_score_that_is_missing_is_named(result):
    for key in ("psnr", "ssim", "identified"):
        damaged = copy.deepcopy(result)
        del damaged["trials"][0]["score"]["scores"][key]
        with pytest.raises(InputError, match=rf"trials\[0\].score.scores: key '{key}' is missing"):
            schema.check(damaged)


def test_a_wrong_type_is_named_wherever_it_stands(result):
    for path in list(paths(result)):
        *above, key = path
        if above and path[0] in DERIVED:
            continue
        damaged = copy.deepcopy(result)
        at(damaged, above)[key] = [[]] if isinstance(at(result, path), dict) else {"wrong": True}
        with pytest.raises(InputError) as caught:
            schema.check(damaged)
        assert words(("result", *path)) in str(caught.value)


@pytest.mark.parametrize(
    "key", ["plan", "name", "summary", "trials", "times", "versions", "verdict", "metrics"]
)
def test_null_is_not_a_value(result, key):
    with pytest.raises(InputError, match=f"^result.{key}: expected .* got None"):
        schema.check(result | {key: None})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("trials", 0, "status"), "fine", "trials[0].status: 'fine' is not a choice; did you"),
        (("trials", 0, "kind"), "extra", "trials[0].kind: 'extra' is not a choice"),
        (("trials", 0, "score", "records"), True, "score.records: expected a whole number, got T"),
        (("trials", 0, "score", "records"), 2.0, "score.records: expected a whole number, got 2.0"),
        (("trials", 0, "score", "records"), 3, "trials[0].score: scores.psnr: expected 3 numbers"),
        (
            ("trials", 0, "score", "records"),
            0,
            "trials[0].score: records: expected at least 1, got 0",
        ),
        (("trials", 0, "score", "identified"), 1.5, "identified: expected a share between 0 and 1"),
        (
            ("trials", 0, "score", "labels", "random"),
            -1,
            "labels: random: expected a share between",
        ),
        (
            ("trials", 0, "score", "scores", "identified"),
            [0.0, 2.0],
            "identified: expected a share",
        ),
        (("trials", 0, "score", "scores", "psnr", 1), "9", "scores.psnr[1]: expected a number"),
        (("trials", 0, "score", "scores", "psnr", 0), 10**400, "psnr[0]: expected a finite number"),
        (("trials", 0, "score", "scores", "psnr", 0), 1e301, "psnr[0]: expected a finite number"),
        (("trials", 0, "found", "facts", "x"), [1, 1e301], "facts.x[1]: expected a finite number"),
        (("trials", 0, "found", "images", "guesses"), [], "truths: expected one beside each guess"),
        (("trials", 0, "score", "mean_image"), {}, "score.mean_image: key 'psnr' is missing"),
        (("trials", 0, "score", "raw"), {"psnr": [9.0]}, "raw.psnr: expected 2 numbers, one per"),
        (("trials", 0, "score", "raw"), {"psnr": [9.0, 9.0]}, "raw: key 'identified' is missing"),
        (("trials", 0, "score", "prior_only"), {}, "score.prior_only: key 'psnr' is missing"),
        (("trials", 0, "found", "images", "raws"), ["a.png"], "raws: expected one beside each"),
        (("trials", 0, "found", "images", "priors"), ["../a.png"] * 2, "expected a path below"),
        (("trials", 0, "score", "scores"), {"psnr": [9.0, 9.0]}, "key 'identified' is missing"),
        (("trials", 0, "score"), None, "trials[0]: score: expected a table where status is 'done'"),
        (("trials", 0, "found"), None, "trials[0]: found: expected a table where status is 'done'"),
        (("trials", 0, "status"), "failed", "trials[0]: found: expected nothing where status is"),
        (("trials", 0, "status"), "unscored", "trials[0]: score: expected nothing where status is"),
        (("metrics", 0, "limit"), 9.0, "metrics: expected psnr with the limit 15 of the plan"),
        (("metrics",), [], "metrics: expected psnr with the limit 15 of the plan"),
        (("verdict", "outcome"), "safe", "verdict.outcome: 'safe' is not a choice"),
        (("threat", "actor"), "nobody", "threat.actor: 'nobody' is not a choice"),
        (("federation", "shape"), [3, "x"], "federation.shape[1]: expected a whole number"),
        (("plan", "federation", "clients"), 0, "plan.federation: clients must be at least 1"),
        (("name",), "\ud800", "result.name: expected text"),
        (("plan", "deep"), {"er": ["\ud800"]}, "plan.deep.er[0]: expected text"),
        (("plan", "deep"), {"\ud800": 1}, "plan.deep: expected text"),
    ],
)
def test_what_a_report_relies_on_is_checked(result, path, value, expected):
    *above, key = path
    at(result, above)[key] = value
    with pytest.raises(InputError) as caught:
        schema.check(result)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/x.png", "images/../../x.png", "C:\\x.png", "a\0b.png"]
)
@pytest.mark.parametrize("key", ["sheet", "truths", "guesses"])
def test_a_picture_outside_the_folder_is_refused(result, key, name):
    pictures = result["trials"][0]["found"]["images"]
    if key == "sheet":
        pictures[key] = name
    else:
        pictures[key][0] = name
    with pytest.raises(InputError, match=r"trials\[0\].found.images: expected a path below the"):
        schema.check(result)


def test_trials_that_did_not_finish_need_no_scores(folder, tmp_path):
    whole = schema.load(folder / "result.json")
    more = (*whole.trials, failed(whole.trials[0], "ValueError: x", "…"), unscored(whole.trials[0]))
    edited = rederive(replace(whole, trials=more))
    assert schema.load(save(tmp_path, edited)) == edited


def test_unknown_keys_are_ignored(folder, result):
    result["later"] = result["trials"][0]["later"] = result["plan"]["later"] = {"x": 1}
    assert schema.check(result) == schema.load(folder / "result.json")


# What follows from the trials.


@pytest.mark.parametrize("version", [None, "0.0.9"])
@pytest.mark.parametrize(
    ("key", "value"), [("outcome", "below the limit"), ("outcome", "failed"), ("exit_code", 0)]
)
def test_an_edited_verdict_is_refused(result, key, value, version):
    result["verdict"][key] = value
    if version:
        result["leakgauge"] = version
    with pytest.raises(InputError, match=f"verdict.{key} does not follow from the trials"):
        schema.check(result)


def test_whatever_follows_from_the_trials_is_refused_when_edited(result):
    result["versions"]["torch"] = schema._torch()
    checked = 0
    for path in list(paths({key: result[key] for key in DERIVED})):
        *above, key = path
        if path[0] == "explanation" and key in ("factor", "label", "attack"):
            continue  # names of rungs, which no trial tells
        if schema.WORDS & set(path):
            continue  # sentences are said anew, see below
        damaged = copy.deepcopy(result)
        if isinstance(at(result, path), str):
            at(damaged, above)[key] = "edited"
        else:
            del at(damaged, above)[key]
        with pytest.raises(InputError):
            schema.check(damaged)
        checked += 1
    assert checked > 110


def test_an_edited_score_is_noticed_by_its_verdict(result):
    for trial in result["trials"]:
        if trial["kind"] == "trial":
            score = trial["score"]
            score["scores"] |= {"psnr": [5.0] * 2, "identified": [0.0] * 2}
            score["labels"]["accuracy"] = 0.0
    with pytest.raises(InputError, match="it says 'leaks', they say 'inconclusive'"):
        schema.check(result)


@pytest.mark.parametrize("version", [None, "0.0.9"])
def test_other_words_are_said_anew(result, version):
    """An edited headline reaches no report; that of another version is put as we put it."""
    true = copy.deepcopy(result)
    if version:
        result["leakgauge"] = true["leakgauge"] = version
    result["versions"]["torch"] = true["versions"]["torch"] = schema._torch()
    result["verdict"]["headline"] = "all is well"
    result["verdict"]["next"] = []
    result["explanation"]["sentence"] = "everything protects"
    result["control"][0]["reason"] = "other words"
    assert plain(schema.check(result)) == true


# Older versions.


def test_a_real_file_of_schema_3_keeps_its_verdict_and_its_numbers(real):
    opened = schema.load(REAL)
    assert opened.schema == schema.SCHEMA == 6
    verdict, old = opened.verdict, real["verdict"]
    for key in ("outcome", "exit_code", "headline", "risk", "records"):
        assert getattr(verdict, key) == old[key]
    assert list(verdict.sentences) == old["sentences"]
    # Its attackers did not know the defence, which is said of it now.
    assert [step for step in verdict.next if step in old["next"]] == [
        old["next"][0],
        old["next"][2],
    ]
    assert "no attack that was run knows it" in verdict.next[1]
    assert plain(verdict.worst) == old["worst"]
    assert plain(verdict.limit) == old["limit"] | {"scores": {}}
    for kind, one in verdict.kinds.items():
        told = old["kinds"][kind]
        assert plain(one.leak).items() <= told.items()
        assert (one.round, one.defence, one.attack) == (0, told["defence"], told["attack"])
        assert one.gallery == told.get("gallery")
    for row, told in zip(opened.summary, real["summary"], strict=True):
        assert (row.attack, row.trials, row.not_applicable) == (
            told["attack"], told["trials"], told["not_applicable"],
        )  # fmt: skip
        assert plain(row.measured.scores if row.measured else None) == told.get("scores")
        if row.measured:
            assert row.measured.mean_image == told["baselines"]["mean image"]
            assert row.measured.identified == told["baselines"]["identified"]
            assert (row.measured.risk, row.measured.worst_risk) == tuple(told["risk"].values())
    assert plain(opened.control) == real["control"]
    assert plain(opened.explanation)["rungs"] == real["explanation"]["rungs"]
    assert "the attack does not know it" in opened.explanation.sentence
    assert [metric.name for metric in opened.metrics] == ["psnr", "ssim"]
    assert opened.plan.audit.gallery == 20
    for trial, told in zip(opened.trials, real["trials"], strict=True):
        if told["status"] == "done":
            facts = told["facts"]
            assert plain(trial.score.scores) == told["scores"]
            assert plain(trial.found.history) == told["history"]
            assert trial.found.iterations == facts.get("iterations", 0)
            assert plain(trial.found.objectives) == facts.get("objectives", [])
            assert trial.found.sparsity == facts["sparsity"]
            assert not {"iterations", "sparsity", "zero_tensors"} & set(trial.found.facts)
            assert list(trial.found.labels or ()) == (told["labels"] or {}).get("guess", [])


def test_keys_that_came_while_it_was_schema_3_may_be_absent(real):
    real["times"]["forecast"] = {"cpu_seconds": 9.0, "megabytes": 5.0, "error": None}
    del real["threat"]["malicious"]
    found = schema.check(real)
    assert found.threat.malicious is False
    assert (found.times.forecast.low, found.times.forecast.high) == (None, None)


def test_what_schema_3_said_in_words_is_read_from_them(real):
    trial = next(t for t in real["trials"] if t["kind"] == "trial" and t["status"] == "done")
    trial["notes"] = ["stopped by the time budget of 3 s after 5 of 9 iterations"]
    opened = schema.check(real)
    (found,) = (one.found for one in opened.trials if one.id == trial["id"])
    assert found.stopped == "time"
    assert any(f"Give {trial['attack']} more" in step for step in opened.verdict.next)


@pytest.mark.parametrize(("key", "value"), [("outcome", "below the limit"), ("exit_code", 0)])
def test_an_edited_file_of_schema_3_is_refused(real, key, value):
    real["verdict"][key] = value
    with pytest.raises(InputError, match=f"verdict.{key} does not follow from the trials"):
        schema.check(real)


def test_a_damaged_file_of_schema_3_is_opened_or_refused_and_nothing_else(real):
    for path in list(paths(real)):
        *above, key = path
        if path[0] in DERIVED or path[:2] == ("trials", 1) or len(path) == 1:
            for value in (None, 3, "x", [], {"x": 3}):
                damaged = copy.deepcopy(real)
                at(damaged, above)[key] = value
                with suppress(InputError):
                    schema.check(damaged)


def test_schema_5_is_judged_against_the_prior_alone(result):
    """It kept no raw guess, and no word whether the prior alone is recognised."""
    result["schema"] = 5
    assert schema.check(result).verdict.outcome == "leaks"
    for trial in result["trials"]:
        if trial["score"] and trial["kind"] == "trial":
            for key in ("raw", "prior_only"):
                trial["score"].pop(key)
            trial["score"]["prior_only"] = {key: [99.0] * 2 for key in ("psnr", "ssim")}
            trial["score"]["scores"]["identified"] = [0.0] * 2
            trial["score"]["labels"]["accuracy"] = 0.0
    opened = schema.check(result)
    assert opened.schema == schema.SCHEMA
    assert result["verdict"]["outcome"] == "leaks"
    assert opened.verdict.outcome == "inconclusive"
    assert {row.measured.leaks["pictures"].share for row in opened.summary} == {0.0}
    (row, *_) = opened.summary
    assert row.measured.raw is None
    assert set(row.measured.prior_only) == {"psnr", "ssim"}
    with pytest.raises(InputError, match="it says 'leaks', they say 'inconclusive'"):
        schema.check(result | {"schema": 6})


def test_schema_2_is_judged_anew(real):
    opened, today = schema.check(schema_2(real)), schema.check(real)
    assert opened.schema == schema.SCHEMA
    assert opened.verdict == today.verdict
    assert opened.verdict.outcome == "leaks"
    assert opened.plan.audit.limit.labels == 0.5
    assert opened.explanation is None
    assert [entry.passed for entry in opened.control] == [entry.passed for entry in today.control]


def test_schema_1_opens_with_what_it_did_not_know_left_empty(real):
    opened = schema.check(schema_1(real))
    assert opened.schema == schema.SCHEMA
    assert opened.verdict is None
    assert opened.threat is None
    assert opened.explanation is None
    assert opened.sensitivity is None
    assert opened.control == opened.not_run == ()
    assert {"phong2018", "geiping2020"} <= {paper.key for paper in opened.references}
    assert opened.times.finished is None
    assert opened.federation.model == "mlp"
    trial, told = next(
        (t, old)
        for t, old in zip(opened.trials, schema_1(real)["trials"], strict=True)
        if t.status == "done"
    )
    assert trial.kind == "trial"
    assert trial.score.caveats == opened.summary[0].measured.caveats == ()
    assert plain(trial.score.scores) == told["scores"]


def test_schema_1_takes_the_model_s_name_from_a_table(real):
    old = schema_1(real)
    old["plan"]["federation"]["model"] = {"name": "vit", "depth": 2}
    assert schema.check(old).federation.model == "vit"


def test_a_damaged_schema_1_is_refused_too(real):
    old = schema_1(real)
    del old["trials"][0]["scores"]
    with pytest.raises(InputError, match=r"trials\[0\]: key 'scores' is missing"):
        schema.check(old)
    with pytest.raises(InputError, match="trials: expected a list"):
        schema.check(schema_1(real) | {"trials": {}})


def test_thousands_of_trials_are_read_without_looking_at_each_number(result, monkeypatch):
    asked = []
    convert = config.convert
    monkeypatch.setattr(config, "convert", lambda *a, **k: asked.append(a[2]) or convert(*a, **k))
    schema.check(result)
    assert asked
    assert not [where for where in asked if "history[" in where or "psnr[" in where]


@pytest.mark.parametrize("version", [7, 99])
def test_a_newer_version_is_refused_with_the_remedy(result, version):
    with pytest.raises(InputError, match=f"schema is {version}.*reads up to 6; upgrade"):
        schema.check(result | {"schema": version})


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_refused(result, version):
    with pytest.raises(InputError, match=f"schema: expected 1 to 6, got {version}"):
        schema.check(result | {"schema": version})


@pytest.mark.parametrize("version", ["2", None, True, 2.0])
def test_a_version_that_is_no_number_is_refused(result, version):
    with pytest.raises(InputError, match="schema: expected a whole number"):
        schema.check(result | {"schema": version})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"schema": 2, "name": "x', "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[1, 2]", "expected a table, got"),
        (b'{"schema": 2, "x": NaN}', "expected finite numbers, got NaN"),
        (b'{"schema": 2, "x": -Infinity}', "got -Infinity"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "key 'schema' is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, expected):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        schema.load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_half_a_file_is_never_a_result(folder, tmp_path):
    whole = (folder / "result.json").read_bytes()
    for share in (0.1, 0.5, 0.9, 0.999):
        path = tmp_path / "result.json"
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(InputError):
            schema.load(path)


def test_no_file_and_a_folder_are_refused_in_words(tmp_path):
    with pytest.raises(InputError, match="no result at"):
        schema.load(tmp_path / "result.json")
    with pytest.raises(InputError, match="is a folder"):
        schema.load(tmp_path)


def test_the_documentation_names_every_key(result):
    text = (Path(__file__).parents[1] / "docs" / "result-schema.md").read_text(encoding="utf-8")
    free = {*NAMES, *FREE, "leaks", "kinds"}
    named = {
        path[-1]
        for path in paths(result)
        if isinstance(path[-1], str) and not free & set(path[:-1])
    }
    named |= set(result["verdict"]["kinds"]) | set(result["verdict"]["kinds"]["found"])
    assert len(named) > 70
    assert {key for key in named if f"`{key}`" not in text} == set()


def test_save_and_load_agree(tmp_path, folder):
    whole = schema.load(folder / "result.json")
    assert schema.load(save(tmp_path, whole)) == whole
