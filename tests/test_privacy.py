"""Where users read what is spent: in a plan's check, in the result, and in every report."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_result import sample, save
from typer.testing import CliRunner

from leakgauge.accounting import Spent, shown, spent
from leakgauge.audit import parse, schema
from leakgauge.audit.exposed import begun
from leakgauge.audit.privacy import CAPTURED, guarantees
from leakgauge.audit.results import Guarantee, Result
from leakgauge.cli import app
from leakgauge.defences import Chain, ClipAndNoise, DecayingNoise, DpSgd, Prune
from leakgauge.errors import InputError, PlanError
from leakgauge.fl.simulate import initial_model, shards_of
from leakgauge.report import contents, html, markdown
from leakgauge.report.wording import NOTHING
from leakgauge.tensors import seeded

Table = dict[str, Any]


def table(*defences: Table, threat: Table | None = None, **federation: Any) -> Table:
    found: Table = {
        "federation": {"data": "digits", "model": "mlp"} | federation,
        "attack": [{"name": "analytic"}],
        "defence": list(defences),
        "audit": {"seeds": [0], "explain": False},
    }
    return found | ({"threat": threat} if threat else {})


def promise(*defences: Table, **options: Any) -> Spent | str:
    """What the plan says of its last defence."""
    return guarantees(parse(table(*defences, **options), "plan", Path()))[-1].spent


def training(**options: Any) -> Table:
    return {"lr": 0.1, "batch_size": 10} | options


# --- how many rounds ---------------------------------------------------------------------------


def test_the_planned_rounds_are_counted():
    found = promise({"name": "clip-and-noise", "epsilon": 1.0}, rounds=[0, 3], planned_rounds=40)
    assert found == spent(ClipAndNoise(1.0), rounds=40)


def test_without_them_the_last_attacked_round_is_and_the_words_say_so():
    found = promise({"name": "clip-and-noise", "epsilon": 1.0}, rounds=[0, 7, 3])
    bare = spent(ClipAndNoise(1.0), rounds=8)
    assert isinstance(found, Spent)
    assert isinstance(bare, Spent)
    assert found == replace(bare, words=found.words)
    assert found.words.startswith(bare.words)
    assert "no planned_rounds" in found.words
    assert "every further round spends more" in found.words


@pytest.mark.parametrize(
    ("rounds", "planned", "words"),
    [
        ([0, 5], 5, r"planned_rounds must be above the last attacked round, 5 .*, got 5"),
        ([0], 0, "planned_rounds must be above the last attacked round, 0 .*, got 0"),
        ([0], 10**9, r"planned_rounds must be between 1 and 100,000, got 1000000000"),
        ([0], "many", "planned_rounds: expected a whole number, got 'many'"),
    ],
)
def test_wrong_planned_rounds_are_refused(rounds, planned, words):
    with pytest.raises(PlanError, match=words):
        parse(table({"name": "none"}, rounds=rounds, planned_rounds=planned), "plan", Path())


# --- who is drawn ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "rate"),
    [
        # 1797 digits, nine clients: 199 or 200 each
        ({"training": training()}, 1, 10 / 199),
        ({"training": training(steps=2), "records": 20}, 1, 20 / 199),
        ({"training": training(epochs=1), "records": 25}, 1, 25 / 199),  # the last batch is short
        # A record that is used twice is in both steps or in none: nothing is taken off.
        ({"training": training(epochs=2), "records": 20}, 2, 1.0),
        ({"training": training(steps=3), "records": 20}, 2, 1.0),
        ({"training": training(epochs=1), "records": "all"}, 1, 1.0),
        ({"training": training(epochs=3, order="shuffled"), "records": "all"}, 3, 1.0),
    ],
)
def test_records_are_drawn_by_their_client(options, steps, rate):
    found = promise({"name": "dp-sgd"}, clients=9, planned_rounds=6, **options)
    assert found == spent(DpSgd(), rounds=6, steps=steps, rate=rate)


def test_of_clients_that_hold_different_numbers_the_smallest_counts():
    skew = {"name": "quantity-skew", "smallest": 40, "largest": 800}
    options = {"clients": 4, "planned_rounds": 6, "training": training(batch_size=1)}
    even, uneven = (promise({"name": "dp-sgd"}, partition=p, **options) for p in ("iid", skew))
    assert isinstance(even, Spent)
    assert isinstance(uneven, Spent)
    assert uneven.epsilon > even.epsilon


def test_the_shares_are_those_that_the_clients_of_the_trials_hold():
    plan = parse(
        table({"name": "dp-sgd"}, clients=4, planned_rounds=6, partition="dirichlet"),
        "plan", Path(),
    )  # fmt: skip
    scenario = plan.scenario(0, "dp-sgd")
    rng = seeded(0, "federation")
    initial_model(scenario, rng)
    fewest = min(len(shard) for shard in shards_of(scenario, rng))
    assert guarantees(plan)[0].spent == spent(DpSgd(), rounds=6, rate=1 / fewest)


@pytest.mark.parametrize(("actor", "rate"), [("server", 1.0), ("aggregate", 1.0), ("client", 0.4)])
def test_only_other_clients_cannot_tell_who_takes_part(actor, rate):
    found = promise({"name": "decaying-noise"}, threat={"actor": actor}, clients=5, participants=2,
                    planned_rounds=3)  # fmt: skip
    assert found == spent(DecayingNoise(), rounds=3, rate=rate)


# --- every defence of the plan -----------------------------------------------------------------

DEFENCES: list[Table] = [
    {"name": "none"},
    {"name": "clip-and-noise", "epsilon": 2.0},
    {"name": "clip-and-noise", "epsilon": 1000, "calibration": "papers"},
    {"name": "dp-sgd", "sigma": 2.0},
    {"name": "prune"},
    {"name": "chain", "defences": ["prune", {"name": "decaying-noise", "sigma": 3.0}]},
]


def test_each_defence_of_a_plan_has_its_line_in_order():
    plan = parse(table(*DEFENCES, planned_rounds=9, training=training()), "plan", Path())
    found = guarantees(plan)
    assert [one.defence for one in found] == list(plan.defences)
    assert [isinstance(one.spent, Spent) for one in found] == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    assert found[4].spent == spent(Prune(), rounds=9)
    assert found[5].spent == spent(Chain((Prune(), DecayingNoise(3.0))), rounds=9)


def test_captured_rounds_promise_nothing(monkeypatch):
    plan = parse(table({"name": "none"}), "plan", Path())
    captured = replace(plan, captured=(object(),))
    assert guarantees(captured) == (Guarantee("none", CAPTURED),)


def test_without_the_extra_the_line_names_it(monkeypatch):
    plan = parse(table({"name": "none"}, {"name": "dp-sgd"}), "plan", Path())

    def absent(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="opacus")

    monkeypatch.setattr(importlib, "import_module", absent)
    none, dp_sgd = (one.spent for one in guarantees(plan))
    assert "no noise" in str(none)
    assert str(dp_sgd).endswith("not installed: pip install 'leakgauge[dp]'.")


# --- a model that a defence cannot have --------------------------------------------------------


@pytest.mark.parametrize("name", ["dp-sgd", "adaptive-clip"])
@pytest.mark.parametrize("inside", [False, True])
def test_batch_norm_is_refused_before_anything_is_run(name, inside):
    defence = {"name": "chain", "defences": [name, "prune"]} if inside else {"name": name}
    made = {"model": "resnet-10", "data": {"name": "photos", "size": 16}}
    plan = parse(table({"name": "none"}, defence, **made), "plan", Path())
    with pytest.raises(InputError, match=f"{name} clips the gradient of each record, and .*group"):
        begun(plan)
    quiet = parse(table(defence, training=training(batch_norm="eval"), **made), "plan", Path())
    assert begun(quiet)


# --- reports -----------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path) -> Result:
    """A result with a promise and a sentence."""
    made = sample(tmp_path, defences=("none", "clip-and-noise", "prune"))
    promises = {"none": None, "clip-and-noise": ClipAndNoise(1.0), "prune": Prune()}
    privacy = tuple(Guarantee(name, spent(one, rounds=30)) for name, one in promises.items())
    made = replace(made, privacy=privacy)
    save(tmp_path, made)
    return made


def test_a_result_keeps_it(told, tmp_path):
    assert schema.load(tmp_path / "result.json").privacy == told.privacy
    whole = json.loads((tmp_path / "result.json").read_text("utf-8"))
    del whole["privacy"]
    assert schema.check(whole).privacy == ()  # as it was before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"defence": "x", "spent": 3}, r"privacy\[0\].spent"),
        ({"defence": "x"}, r"privacy\[0\]: key 'spent' is missing"),
        (
            {"defence": "x", "spent": {"epsilon": 1.0}},
            r"privacy\[0\].spent: key 'delta' is missing",
        ),
    ],
)
def test_a_damaged_one_is_refused(told, tmp_path, wrong, words):
    whole = json.loads((tmp_path / "result.json").read_text("utf-8"))
    with pytest.raises(InputError, match=words):
        schema.check(whole | {"privacy": [wrong]})


def test_every_report_has_the_table(told, tmp_path):
    _, noisy, pruned = contents.privacy(told)
    assert isinstance(told.privacy[1].spent, Spent)
    assert noisy.epsilon == shown(told.privacy[1].spent.epsilon)
    assert noisy.words == told.privacy[1].spent.words
    assert (pruned.epsilon, pruned.words) == (NOTHING, told.privacy[2].spent)
    page, text = html.render(told, tmp_path), markdown.render(told, tmp_path)
    for form in (page, text):
        assert "Epsilon over all rounds" in form
        assert noisy.epsilon in form
        assert "all updates of a client are protected" in form
        assert "prune adds no noise of a known size" in form
    assert page.index('id="verdict"') < page.index('id="findings"') < page.index('id="privacy"')
    assert 'href="#privacy"' in page
    assert f"epsilon over all rounds: clip-and-noise {noisy.epsilon}" in page  # while it is folded
    many = replace(told, privacy=told.privacy[1:2] * 5)
    assert f"clip-and-noise {noisy.epsilon} and 2 more" in html.render(many, tmp_path)
    older = replace(told, privacy=())
    assert 'id="privacy"' not in html.render(older, tmp_path)
    assert "Differential privacy" not in markdown.render(older, tmp_path).split("## References")[0]


def test_a_plan_without_a_promise_says_so_while_folded(told, tmp_path):
    silent = replace(told, privacy=told.privacy[:1])
    assert "no defence of this plan promises any" in html.render(silent, tmp_path)


def test_an_epsilon_of_one_round_never_stands_alone(told, tmp_path):
    whole = contents.privacy(told)[1].epsilon
    beside = f"epsilon = 100.0, norm = 0.05; over 30 rounds epsilon = {whole}"
    assert contents.protections(told)["clip-and-noise"] == beside
    assert contents.protections(told)["prune"] == "share = 0.99"
    chain = replace(told.privacy[1], defence="prune+clip-and-noise")  # no table has this name
    named = contents.protections(replace(told, privacy=(*told.privacy, chain)))
    assert named["prune+clip-and-noise"] == f"over 30 rounds epsilon = {whole}"
    older = contents.protections(replace(told, privacy=()))["clip-and-noise"]
    assert older.endswith("; its epsilon promises nothing over the rounds")
    assert beside in html.render(told, tmp_path)
    assert [
        one.settings for one in contents.trade_off(told) if one.defence == "clip-and-noise"
    ] == [beside]


# --- the command -------------------------------------------------------------------------------

PLAN = """
[federation]
model = "mlp"
data = "digits"
planned_rounds = 12
training = { batch_size = 4 }
[[attack]]
name = "analytic"
[[defence]]
name = "prune"
[[defence]]
name = "dp-sgd"
[audit]
seeds = [0]
explain = false
exact = false
"""


def test_the_check_and_the_result_of_a_plan_say_it(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    checked = CliRunner().invoke(app, ["check", str(path)])
    assert checked.exit_code == 0, checked.output
    first, second = (line for line in checked.output.splitlines() if line.startswith("privacy"))
    assert first.startswith("privacy with prune: prune adds no noise")
    whole = spent(DpSgd(), rounds=12, rate=4 / 1797)
    assert isinstance(whole, Spent)
    assert second == f"privacy with dp-sgd: {whole.words}"
    ran = CliRunner().invoke(app, ["audit", str(path), "--out", str(tmp_path / "out")])
    assert ran.exit_code in (0, 1, 4), ran.output
    assert schema.load(tmp_path / "out" / "result.json").privacy[1] == Guarantee("dp-sgd", whole)


def test_the_check_refuses_batch_norm_in_one_sentence(tmp_path):
    path = tmp_path / "plan.toml"
    wrong = PLAN.replace('"mlp"', '"resnet-10"')
    path.write_text(wrong, encoding="utf-8")
    for verb in ("check", "audit"):
        found = CliRunner().invoke(app, [verb, str(path)])
        assert isinstance(found.exception, InputError)
        assert "a batch norm in train mode" in str(found.exception)
