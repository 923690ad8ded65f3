"""Tables to frozen dataclasses: strict, typed, and every message names the key by its full path."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.config import build, choose, convert, did_you_mean
from leakgauge.errors import PlanError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    flag: bool = False
    limit: float | None = None
    level: Literal[1, 2] = 1
    size: tuple[int, int] = (8, 8)
    mean: tuple[float, ...] = ()
    tags: frozenset[str] = frozenset()
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    extra: dict[str, float] = field(default_factory=dict)
    either: str | dict[str, Any] = ""
    anything: Any = None
    made: int = field(init=False, default=7)


def refused(table: object, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        build(Outer, table, "plan")  # type: ignore[arg-type]
    assert re.search(words, str(caught.value)), caught.value


def test_defaults_are_the_dataclass_own():
    assert build(Outer, {"name": "a"}, "plan") == Outer("a")


def test_every_kind_of_value():
    built = build(
        Outer,
        {
            "name": "a", "count": 3, "flag": True, "limit": 2, "level": 2, "size": [4, 6],
            "mean": [1, 0.5], "tags": ["x", "y"], "inner": {"rate": 1, "mode": "slow"},
            "many": [{"rate": 2}, {}], "extra": {"k": 1}, "either": {"name": "b", "n": 1},
            "anything": [1, {"a": None}],
        },
        "plan",
    )  # fmt: skip
    assert built == Outer(
        name="a", count=3, flag=True, limit=2.0, level=2, size=(4, 6), mean=(1.0, 0.5),
        tags=frozenset({"x", "y"}), inner=Inner(1.0, "slow"), many=(Inner(2.0), Inner()),
        extra={"k": 1.0}, either={"name": "b", "n": 1}, anything=[1, {"a": None}],
    )  # fmt: skip
    floats = (built.limit, *built.mean, built.inner.rate, built.many[0].rate, built.extra["k"])
    assert all(type(value) is float for value in floats)
    assert type(built.size) is tuple
    assert build(Outer, {"name": "a", "either": "word", "limit": None}, "plan").either == "word"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        # unknown and missing keys
        ({"name": "a", "cuont": 3}, "^plan: unknown key 'cuont'; did you mean 'count'\\?$"),
        ({"name": "a", "zzzz": 3}, "^plan: unknown key 'zzzz'; known: anything, count, either"),
        ({"name": "a", "made": 3}, "^plan: unknown key 'made'"),  # not the user's to set
        ({"name": "a", "inner": {"rte": 3}}, "^plan.inner: unknown key 'rte'; did you mean 'rate'"),
        ({"name": "a", "many": [{}, {"rte": 3}]}, r"^plan.many\[1\]: unknown key 'rte'"),
        ({}, "^plan: key 'name' is missing$"),
        # kinds
        ({"name": 3}, "^plan.name: expected text, got 3$"),
        ({"name": "a", "count": "3"}, "^plan.count: expected a whole number, got '3'$"),
        ({"name": "a", "count": 3.0}, r"^plan.count: expected a whole number, got 3\.0$"),
        ({"name": "a", "count": True}, "^plan.count: expected a whole number, got True$"),
        ({"name": "a", "flag": 1}, "^plan.flag: expected true or false, got 1$"),
        ({"name": "a", "limit": "1"}, "^plan.limit: expected a number, got '1'$"),
        ({"name": "a", "limit": True}, "^plan.limit: expected a number, got True$"),
        ({"name": "a", "count": None}, "^plan.count: expected a whole number, got None$"),
        ({"name": "a", "either": 3}, "^plan.either: expected text, got 3 or .*expected a table"),
        # closed choices
        ({"name": "a", "level": 3}, "^plan.level: 3 is not a choice; known: 1, 2$"),
        ({"name": "a", "level": True}, "^plan.level: True is not a choice"),
        ({"name": "a", "level": 1.0}, r"^plan.level: 1\.0 is not a choice"),
        ({"name": "a", "inner": {"mode": "fas"}},
         "^plan.inner.mode: 'fas' is not a choice; did you mean 'fast'"),
        ({"name": "a", "inner": {"mode": ["fast"]}}, r"^plan.inner.mode: \['fast'\] is not a"),
        # lists and tables
        ({"name": "a", "size": [1, 2, 3]}, "^plan.size: expected 2 values, got 3$"),
        ({"name": "a", "size": [1, 2.5]}, r"^plan.size\[1\]: expected a whole number, got 2\.5$"),
        ({"name": "a", "mean": 0.5}, r"^plan.mean: expected a list, got 0\.5$"),
        ({"name": "a", "mean": "0.5"}, "^plan.mean: expected a list"),
        ({"name": "a", "mean": [0, "x"]}, r"^plan.mean\[1\]: expected a number, got 'x'$"),
        ({"name": "a", "tags": ["x", 1]}, r"^plan.tags\[1\]: expected text, got 1$"),
        ({"name": "a", "extra": [1]}, r"^plan.extra: expected a table, got \[1\]$"),
        ({"name": "a", "extra": {"k": "x"}}, "^plan.extra.k: expected a number, got 'x'$"),
        ({"name": "a", "inner": 3}, "^plan.inner: expected a table, got 3$"),
        ([("name", "a")], "^plan: expected a table"),
        # the dataclass's own check
        ({"name": "a", "inner": {"rate": -1}}, r"^plan.inner: rate must not be .*, got -1\.0$"),
        ({"name": "a", "many": [{}, {"rate": -1}]}, r"^plan.many\[1\]: rate must not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_path(table, words):
    refused(table, words)


def test_the_reason_of_a_refused_value_is_kept():
    with pytest.raises(PlanError) as caught:
        build(Inner, {"rate": -1}, "inner")
    assert isinstance(caught.value.__cause__, ValueError)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INNERS = st.builds(Inner, st.floats(0, 1e9), st.sampled_from(["fast", "slow"]))
OUTERS = st.builds(
    Outer,
    name=st.text(),
    count=st.integers(),
    flag=st.booleans(),
    limit=st.none() | NUMBERS,
    level=st.sampled_from([1, 2]),
    size=st.tuples(st.integers(), st.integers()),
    mean=st.lists(NUMBERS).map(tuple),
    tags=st.frozensets(st.text()),
    inner=INNERS,
    many=st.lists(INNERS, max_size=3).map(tuple),
    extra=st.dictionaries(st.text(), NUMBERS),
    either=st.text() | st.dictionaries(st.text(), st.integers()),
)


@given(OUTERS)
def test_a_written_plan_reads_back_the_same(outer):
    table = {key: value for key, value in asdict(outer).items() if key != "made"}
    written = json.dumps(table, default=list)  # a file knows lists only, neither tuples nor sets
    assert build(Outer, json.loads(written), "plan") == outer


def test_convert_keeps_the_kind():
    assert type(convert(1, int | float, "x")) is int
    assert type(convert(1.0, int | float, "x")) is float
    assert type(convert(1, float, "x")) is float
    assert convert([3, 3, 4], frozenset[int], "x") == frozenset({3, 4})


def test_suggestions():
    assert did_you_mean("resnet18", ["resnet-18", "mlp"]) == "; did you mean 'resnet-18'?"
    assert did_you_mean("x", ["b", "a"]) == "; known: a, b"
    assert did_you_mean("x", []) == "; it takes none"


def test_choose_finds_or_suggests():
    table = {"clip": 1, "prune": None}
    assert choose(table, "clip", "defence") == 1
    assert choose(table, "prune", "defence") is None
    with pytest.raises(PlanError, match="unknown defence 'clp'; did you mean 'clip'"):
        choose(table, "clp", "defence")
    for name in (None, 3, ["clip"]):
        with pytest.raises(PlanError, match="unknown defence"):
            choose(table, name, "defence")
