"""How many clients behind a secure sum: what a server sees, and from which number on it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_protocol import plan_of

from leakgauge import threat
from leakgauge.audit import Store, exposures, protocol
from leakgauge.audit.cases import trials
from leakgauge.audit.protocol import Bench, Value
from leakgauge.errors import LeakGaugeError, PlanError
from leakgauge.fl import simulate
from leakgauge.report import protocol as words
from leakgauge.tensors import seeded

SECURE: dict[str, Any] = {
    "federation": {
        "data": "digits",
        "model": {"name": "cnn", "channels": 4, "hidden": 16},
        "clients": 2,
        "secure": {},
        "training": {"batch_size": 2},
    },
    "threat": {"actor": "aggregate"},
    "attack": [{"name": "inverting-gradients", "iterations": 3}],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = plan_of({"clients": [1, 2, 4]}, **SECURE)
    folder = tmp_path_factory.mktemp("clients") / "out"
    return protocol.run(Bench(plan), Store(folder, "protocol.json"))


def values(found: protocol.Protocol) -> list[Value]:
    (one,) = found.passes
    (step,) = one.steps
    return list(step.values)


def test_each_number_of_clients_is_audited_behind_their_sum(found):
    assert [value.words for value in values(found)] == ["1, no sum", "2", "4"]
    plans = {part.folder: part.plan.federation for part in found.parts}
    assert [plans[value.folder].clients for value in values(found)] == [1, 2, 4]
    records = [value.row.measured.records for value in values(found)]
    assert records == [4, 8, 16]  # all records behind the sum, of two seeds


def test_one_client_alone_has_no_sum_and_several_have(found):
    bench = Bench(plan_of({"clients": [1, 4]}, **SECURE))
    for clients, seen in ((1, None), (4, bench.seed.federation.secure)):
        document = replace(bench.seed, federation=replace(bench.seed.federation, clients=clients))
        plan = bench.derived(document)
        case = trials(plan)[0]
        assert case.scenario(plan).secure == seen
        round_ = simulate(case.scenario(plan), seeded(0, "federation"))
        assert len(round_.updates) == clients
        held = threat.observe(round_, case.threat(plan))
        assert held.records == 2 * clients


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threat": {"actor": "server"}}, "behind secure aggregation nobody"),
        ({"federation": SECURE["federation"] | {"secure": None}}, "and no such table"),
        ({"federation": SECURE["federation"] | {"participants": 2}}, "leave federation.part"),
        ({"federation": SECURE["federation"] | {"clients": 1}}, "use at least 2"),
    ],
)
def test_what_shows_single_updates_is_refused(change, message):
    with pytest.raises(LeakGaugeError, match=message):
        Bench(plan_of({"clients": [1, 2]}, **SECURE | change))


def test_more_clients_than_there_are_records_for_is_said(tmp_path):
    table = SECURE["federation"] | {"training": {"batch_size": 200}}
    plan = plan_of({"clients": [2, 16]}, **SECURE | {"federation": table}, audit={"seeds": [0]})
    made = protocol.run(Bench(plan), Store(tmp_path / "out", "protocol.json"))
    few, many = values(made)
    assert few.kept
    assert many.row is None
    assert "holds 11" in many.reason  # of 1797 records


def test_what_no_attack_showed_on_the_twin_is_not_below(found):
    """Three iterations break nothing, so that nothing was recovered says nothing."""
    assert not found.control[0].passed
    for value in values(found):
        assert value.leaks["pictures"].leak.state == "no control"
    assert found.exit_code == 4


# From which number on.


def at(found: protocol.Protocol, states: dict[int, str], exposed: tuple[int, ...] = ()):
    """The sentences on pictures, had the leak these states at these numbers of clients."""
    (one,) = found.passes
    first = values(found)[0]
    pictures = first.leaks["pictures"]
    made = tuple(
        replace(
            first,
            value=number,
            words=str(number),
            exposed=number in exposed,
            leaks={
                "pictures": replace(
                    pictures,
                    leak=replace(
                        pictures.leak, state=state, records=10 * number, interval=(0.0, 0.07)
                    ),
                )
            },
        )
        for number, state in states.items()
    )
    step = replace(one.steps[0], values=made)
    changed = replace(found, passes=(replace(one, steps=(step,)),))
    ((_, told),) = words.clients(changed)
    return told


def test_the_number_is_that_from_which_all_larger_ones_are_below(found):
    told = at(found, {8: "below", 4: "below", 2: "leaks"})
    assert told[0].startswith("Pictures recovered: below the limit of 10\N{NO-BREAK SPACE}% from 4")
    assert "on 40 records" in told[0]
    assert "at most 7\N{NO-BREAK SPACE}%" in told[0]
    assert "told apart" not in told[0]
    told = at(found, {2: "leaks", 4: "below"}, exposed=(2, 4))
    assert "can still be told apart exactly, so another attack may do better" in told[0]
    told = at(found, {2: "below", 4: "leaks", 8: "below"})
    assert "from 8 clients on" in told[0]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("leaks", "no number of clients that was tried was enough"),
        ("undecided", "not shown to be below the limit at the largest number"),
        ("no control", "not shown to be below the limit at the largest number"),
    ],
)
def test_no_number_is_called_enough_unless_the_largest_is(found, state, said):
    told = at(found, {2: "below", 4: "below", 8: state})
    assert said in told[0]
    assert "80 records" in told[0]
    assert "promised" in told[-1]


def test_exact_separation_is_told_by_the_numbers_that_were_tried(found):
    told = at(found, {1: "leaks", 2: "leaks", 4: "leaks"}, exposed=(1, 2))
    assert "up to 2 clients (of 1, 2, 4 that were tried)" in told[1]
    assert "at no number of clients" in at(found, {1: "leaks", 2: "leaks"})[1]


def test_exposure_falls_with_the_number_of_clients(tmp_path):
    """A layer that shows so many records shows those of two clients, and not of many."""
    table = SECURE["federation"] | {"model": {"name": "resnet-10", "width": 0.25}}
    plan = plan_of(
        {"clients": [2, 64], "batch_norm": ["eval"]},
        **SECURE | {"federation": table | {"data": {"name": "photos", "size": 16}}},
        audit={"seeds": [0]},
    )
    bench = Bench(plan)
    shown = []
    for clients in (2, 64):
        document = replace(bench.seed, federation=replace(bench.seed.federation, clients=clients))
        shown.append([one.exposed for one in exposures(bench.derived(document))])
    assert shown == [[True], [False]]


def test_the_report_has_the_sentences_and_the_curve(found):
    page, text = words.page(found, ""), words.text(found, "")
    ((_, told),) = words.clients(found)
    for line in told:
        assert line in page
    assert "How many clients" in text
    assert page.count('class="curve"') == 2


def test_without_the_table_there_is_no_section(tmp_path):
    made = protocol.run(
        Bench(plan_of({"batch_size": [1, 2]})), Store(tmp_path / "out", "protocol.json")
    )
    assert words.clients(made) == []
    assert "How many clients" not in words.page(made, "")
    with pytest.raises(PlanError):
        Bench(plan_of({"clients": [2]}))
