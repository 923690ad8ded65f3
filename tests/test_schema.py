"""result.json is read back whole, migrated from older versions, or refused naming the key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from sample_result import failed, rederive, sample, save

from leakgauge.audit import schema
from leakgauge.errors import InputError

FREE = {"plan", "facts"}  # the user's own content: any JSON
NAMES = {"versions", "knowledge", "scores", "mean image", "random image"}  # keys are data there
DERIVED = ("verdict", "summary", "control", "explanation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit")
    sample(path, attacks=("analytic",), defences=("none",), seeds=1, records=2)
    return path


@pytest.fixture
def result(folder) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def schema_1(result: dict[str, Any]) -> dict[str, Any]:
    """The same audit as the first version wrote it."""
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
    """The same audit as the second version wrote it: pictures alone were judged."""
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


def test_a_result_is_loaded_as_it_was_written(folder, result):
    assert schema.load(folder / "result.json") == result


def test_a_missing_key_is_named_wherever_it_is_missing(result):
    checked = 0
    for path in list(paths(result)):
        *above, key = path
        if above and (above[-1] in NAMES or path[0] in DERIVED):
            continue
        damaged = copy.deepcopy(result)
        del at(damaged, above)[key]
        with pytest.raises(InputError) as caught:
            schema.check(damaged)
        assert words(path) in str(caught.value)
        checked += 1
    assert checked > 100


def test_a_wrong_type_is_named_wherever_it_stands(result):
    for path in list(paths(result)):
        *above, key = path
        if above and path[0] in DERIVED:
            continue
        damaged = copy.deepcopy(result)
        at(damaged, above)[key] = [[]] if isinstance(at(result, path), dict) else {"wrong": True}
        with pytest.raises(InputError) as caught:
            schema.check(damaged)
        assert words(path) in str(caught.value)


@pytest.mark.parametrize("key", ["plan", "name", "summary", "trials", "times", "versions"])
def test_null_is_not_a_value(result, key):
    with pytest.raises(InputError, match=f"^{key}: expected .* got null"):
        schema.check(result | {key: None})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("trials", 0, "status"), "fine", "trials[0].status: expected one of 'done', 'failed'"),
        (("trials", 0, "kind"), "extra", "trials[0].kind: expected one of 'control'"),
        (("trials", 0, "records"), True, "trials[0].records: expected a whole number, got true"),
        (("trials", 0, "records"), 2.0, "trials[0].records: expected a whole number, got 2.0"),
        (("trials", 0, "records"), 3, "trials[0].scores.psnr: expected 3 numbers"),
        (("trials", 0, "scores", "psnr", 1), "9", "trials[0].scores.psnr[1]: expected a finite"),
        (("trials", 0, "scores", "psnr", 0), 10**400, "trials[0].scores.psnr[0]: expected a fin"),
        (("trials", 0, "images", "truths"), [], "trials[0].images: expected a guess beside each"),
        (("trials", 0, "baselines", "mean image"), {}, "baselines.mean image.psnr: expected, but"),
        (("trials", 0, "scores"), {"psnr": [9.0, 9.0]}, "trials[0].scores.identified: expected"),
        (("verdict", "outcome"), "safe", "verdict.outcome: expected one of 'below the limit'"),
        (("threat", "actor"), "nobody", "threat.actor: expected one of 'aggregate'"),
        (("federation", "shape"), [3, 16], "federation.shape: expected a list of 3"),
        (("name",), "\ud800", "name: expected text"),
        (("plan", "deep"), {"er": ["\ud800"]}, "plan.deep.er[0]: expected text"),
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
    pictures = result["trials"][0]["images"]
    if key == "sheet":
        pictures[key] = name
    else:
        pictures[key][0] = name
    with pytest.raises(InputError, match=r"trials\[0\].images: expected a path below the folder"):
        schema.check(result)


def test_trials_that_did_not_finish_need_no_scores(result):
    count = len(result["trials"])
    result["trials"].append(failed(result["trials"][0], "ValueError: x", "…"))
    assert len(schema.check(rederive(result))["trials"]) == count + 1


def test_unknown_keys_are_kept(result):
    result["later"] = result["trials"][0]["later"] = {"x": 1}
    opened = schema.check(result)
    assert opened["later"] == opened["trials"][0]["later"] == {"x": 1}


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
            trial["scores"]["psnr"] = [5.0] * trial["records"]
            trial["scores"]["identified"] = [0.0] * trial["records"]
            trial["labels"]["accuracy"] = 0.0
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
    assert schema.check(result) == true


# Older versions.


def test_schema_2_is_judged_anew(result):
    opened = schema.check(schema_2(result))
    assert opened["schema"] == schema.SCHEMA == 3
    assert opened["verdict"] == result["verdict"] | {"limit": opened["verdict"]["limit"]}
    assert opened["verdict"]["outcome"] == "leaks"
    assert opened["plan"]["audit"]["limit"]["labels"] == 0.5
    assert opened["explanation"] is None
    assert [entry["passed"] for entry in opened["control"]] == [True]


def test_schema_1_opens_with_what_it_did_not_know_left_empty(folder, result):
    opened = schema.check(schema_1(result))
    assert opened["schema"] == schema.SCHEMA
    assert opened["verdict"] is None
    assert opened["threat"] is None
    assert opened["explanation"] is None
    assert opened["sensitivity"] is None
    assert opened["control"] == opened["not_run"] == opened["references"] == []
    assert opened["times"]["finished"] is None
    assert opened["federation"]["model"] == "resnet-10"
    assert opened["trials"][0]["kind"] == "trial"
    assert opened["trials"][0]["caveats"] == opened["summary"][0]["caveats"] == []
    assert opened["trials"][0]["scores"] == result["trials"][0]["scores"]


def test_schema_1_takes_the_model_s_name_from_a_table(result):
    old = schema_1(result)
    old["plan"]["federation"]["model"] = {"name": "vit", "depth": 2}
    assert schema.check(old)["federation"]["model"] == "vit"


def test_a_damaged_schema_1_is_refused_too(result):
    old = schema_1(result)
    del old["trials"][0]["scores"]
    with pytest.raises(InputError, match=r"trials\[0\].scores: expected, but it is missing"):
        schema.check(old)
    with pytest.raises(InputError, match="trials: expected a list"):
        schema.check(schema_1(result) | {"trials": {}})


@pytest.mark.parametrize("version", [4, 99])
def test_a_newer_version_is_refused_with_the_remedy(result, version):
    with pytest.raises(InputError, match=f"schema is {version}.*reads up to 3; upgrade"):
        schema.check(result | {"schema": version})


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_refused(result, version):
    with pytest.raises(InputError, match=f"schema: expected 1 to 3, got {version}"):
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
        (b"{}", "schema: expected, but it is missing"),
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


def test_save_and_load_agree(tmp_path, result):
    assert schema.load(save(tmp_path, result)) == result
