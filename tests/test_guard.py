"""The guard: it fails closed, it disturbs nothing, and it remembers what it was told once."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import tomllib
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from nouns import setting
from torch import nn

from leakgauge import models
from leakgauge._version import __version__
from leakgauge.detectors import Continuity, Probe, WarmUp
from leakgauge.errors import InputError, PlanError
from leakgauge.fl.local import train
from leakgauge.guard import Guard, Policy, calibrate
from leakgauge.guard import guard as guards
from leakgauge.guard import policy as policies
from leakgauge.records import Scale
from leakgauge.tensors import parameters, subtract
from leakgauge.types import Batch, Detection, LocalTraining

TRAINING = LocalTraining(lr=0.1, batch_size=16, steps=2)
WHOLE = LocalTraining(lr=0.1, batch_size=64)  # all records in one step
LAX = Policy(require=())


def make() -> nn.Module:
    return nn.Sequential(
        OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(192, 48), act=nn.ReLU(), head=nn.Linear(48, 4))
    )


@pytest.fixture
def sent() -> nn.Module:
    """The server's model: the same network from another seed."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


@pytest.fixture
def records(easy) -> Batch:
    return Batch(easy.inputs, easy.labels)


def after(model: nn.Module, records: Batch, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """What a client sends back."""
    return subtract(
        parameters(model), train(setting(model, records), records, TRAINING, rng).update
    )


def fished(model: nn.Module) -> dict[str, torch.Tensor]:
    """The head of a class-fishing server, written by hand."""
    state = copy.deepcopy(model.state_dict())
    state["head.weight"][1:] = 0.0
    state["head.bias"][1:] = 1000.0
    return state


# --- verdicts -------------------------------------------------------------------------------------


def test_honest_rounds_are_accepted_and_remembered(sent, records, rng):
    guard = Guard(make, TRAINING, policy=LAX)
    for index in range(4):
        verdict = guard.check(sent.state_dict(), records)
        assert (verdict.decision, verdict.train, verdict.rounds) == ("ACCEPT", True, index)
        assert ("continuity" in verdict.untested) == (index == 0)
        back = after(sent, records, rng)
        guard.remember(verdict, back)
        sent.load_state_dict(back)


def test_a_model_from_another_world_is_rejected_once_there_is_a_memory(sent, records, rng):
    guard = Guard(make, TRAINING, policy=LAX)
    guard.remember(guard.check(sent.state_dict(), records), after(sent, records, rng))
    torch.manual_seed(8)
    verdict = guard.check(make().state_dict(), records)
    assert verdict.decision == "REJECT"
    assert [d.test for d in verdict.fired] == ["continuity"]


def test_fishing_is_rejected_with_the_tensor_and_in_words(sent, records):
    verdict = Guard(make, TRAINING, policy=LAX).check(fished(sent), records)
    assert verdict.decision == "REJECT"
    assert not verdict.train
    assert {"zero-rows", "bias-dominance"} <= {d.test for d in verdict.fired}
    assert {d.tensor for d in verdict.fired} == {"head.weight"}
    assert str(verdict).startswith("REJECT: ")


def zero_headed() -> nn.Module:
    """Ten classes, and a head that starts from zeros."""
    layers = OrderedDict(
        flat=nn.Flatten(), fc1=nn.Linear(192, 48), act=nn.ReLU(), head=nn.Linear(48, 10)
    )
    nn.init.zeros_(layers["head"].weight)
    nn.init.zeros_(layers["head"].bias)
    return nn.Sequential(layers)


def test_a_head_from_zeros_may_hold_copies_and_be_unbalanced(records, rng):
    """Six classes that nobody holds get the same rows; trained rows are far larger."""
    training = replace(TRAINING, optimiser="adam", lr=1e-3)
    guard = Guard(zero_headed, training, policy=LAX)
    model = zero_headed()
    for _ in range(3):
        verdict = guard.check(model.state_dict(), records)
        assert verdict.decision == "ACCEPT", str(verdict)
        update = train(setting(model, records), records, training, rng).update
        back = subtract(parameters(model), update)
        guard.remember(verdict, back)
        model.load_state_dict(back)
    rows = nn.functional.normalize(model.head.weight.detach()[4:])
    assert (rows @ rows.T).min() > 0.98  # they are copies


def test_fishing_in_a_head_from_zeros_is_rejected(records):
    verdict = Guard(zero_headed, TRAINING, policy=LAX).check(fished(zero_headed()), records)
    assert verdict.decision == "REJECT"
    assert "bias-dominance" in {d.test for d in verdict.fired}


def test_without_records_the_verdict_says_what_was_not_tested(sent):
    verdict = Guard(make, TRAINING, policy=LAX).check(sent.state_dict())
    assert verdict.decision == "ACCEPT"
    assert verdict.untested["probe"] == "no records were given"
    assert verdict.exposure is None
    assert "not tested" in str(verdict)


def isolating(model: nn.Module, records: Batch) -> dict[str, torch.Tensor]:
    """A first layer whose unit k is on for record k alone, of unremarkable size and bias."""
    state = copy.deepcopy(model.state_dict())
    x = records.inputs[:48].flatten(1).double()
    others = records.inputs.flatten(1).double()
    # Least squares: ⟨w_k, x_i⟩ + b is +1 for i = k and −1 for all others.
    design = torch.cat([others, torch.ones(len(others), 1)], 1)
    wanted = 2.0 * torch.eye(len(others), len(x)).double() - 1
    solved = torch.linalg.lstsq(design, wanted).solution
    state["fc1.weight"] = solved[:-1].T.float()
    state["fc1.bias"] = solved[-1].float()
    return state


def test_the_self_audit_counts_the_records_that_can_be_read(sent, records):
    """48 units, each on for one of the 64 records: 48 can be read."""
    state = isolating(sent, records)
    model = make()
    model.load_state_dict(state)
    on = (model.fc1(records.inputs.flatten(1)) > 0).float()
    assert torch.equal(on, torch.eye(64, 48))
    verdict = Guard(make, WHOLE, policy=LAX).check(state, records)
    assert verdict.exposure == "about 48 of your 64 images could be read exactly"
    assert verdict.decision != "ACCEPT"


def test_a_probe_that_found_nothing_does_not_say_that_nothing_can_be_read(records):
    def convolution() -> nn.Module:
        torch.manual_seed(0)
        width = records.inputs[0, 0].numel()
        channels = records.inputs.shape[1]
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * width, 10)
        )

    verdict = Guard(convolution, WHOLE, policy=LAX).check(convolution().state_dict(), records)
    assert verdict.exposure is not None
    assert "no proof that none can be read" in verdict.exposure
    assert "tokens" not in verdict.exposure


def test_what_a_head_of_zeros_hides_in_the_first_step_is_probed(records):
    """It passes nothing back, so no unit shows a record; after one step of training they do."""
    model = zero_headed()
    state = isolating(model, records)
    verdict = Guard(zero_headed, WHOLE, policy=LAX).check(state, records)
    assert verdict.exposure == "about 48 of your 64 images could be read exactly"
    assert verdict.decision != "ACCEPT"


def test_an_exposed_model_is_refused_unless_the_policy_says_otherwise(sent, records, monkeypatch):
    exposed = Detection("isolation", 0.5, 0.2, "exposed", "half of it")
    monkeypatch.setattr(Probe, "inspect", lambda *_: (exposed,))
    strict = Guard(make, TRAINING, policy=LAX)
    verdict = strict.check(sent.state_dict(), records)
    assert (verdict.decision, verdict.train) == ("EXPOSED", False)
    with pytest.raises(InputError, match=r"only if verdict\.train"):
        strict.remember(verdict, sent.state_dict())
    lenient = Guard(make, TRAINING, policy=Policy(refuse_exposed=False, require=()))
    verdict = lenient.check(sent.state_dict(), records)
    assert (verdict.decision, verdict.train) == ("EXPOSED", True)
    lenient.remember(verdict, sent.state_dict())
    assert lenient.check(sent.state_dict(), records).rounds == 1


# --- it fails closed ------------------------------------------------------------------------------


def test_a_broken_test_rejects_and_the_others_are_still_made(sent, records, monkeypatch):
    def breaks(*_):
        raise ZeroDivisionError("by the model")

    monkeypatch.setattr(Probe, "inspect", breaks)
    verdict = Guard(make, TRAINING, policy=LAX).check(sent.state_dict(), records)
    assert verdict.decision == "REJECT"
    assert [d.test for d in verdict.fired] == ["probe"]
    assert "ZeroDivisionError: by the model" in str(verdict)
    assert "zero-rows" in {d.test for d in verdict.detections}


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_rejects_and_fits_in_json(sent, records, monkeypatch, score):
    found = Detection("isolation", score, math.inf if math.isnan(score) else 0.2, "reject", "odd")
    monkeypatch.setattr(Probe, "inspect", lambda *_: (found,))
    verdict = Guard(make, TRAINING, policy=LAX).check(sent.state_dict(), records)
    assert verdict.decision == "REJECT"
    told = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert [d["score"] for d in told["detections"] if d["fired"]] == [str(score)]


def test_a_guard_that_fails_itself_rejects(sent, monkeypatch):
    monkeypatch.setattr(Policy, "tests", lambda *_: 1 / 0)
    verdict = Guard(make, TRAINING, policy=LAX).check(sent.state_dict())
    assert verdict.decision == "REJECT"
    assert "ZeroDivisionError" in str(verdict)


@pytest.mark.parametrize(
    "batch",
    [
        Batch(torch.full((4, 3, 8, 8), math.nan), torch.zeros(4, dtype=torch.long)),
        Batch(torch.rand(4, 3, 8, 8), torch.zeros(3, dtype=torch.long)),
        Batch(torch.rand(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)),
        Batch(torch.rand(4, 3, 9, 9), torch.zeros(4, dtype=torch.long)),
        Batch(torch.rand(4, 3, 8, 8), torch.full((4,), 99)),
        "not a batch",
    ],
)
def test_records_that_cannot_be_used_are_the_clients_mistake(sent, batch):
    """It says nothing about the model, so it is no verdict: also when the model is broken too."""
    for state in (sent.state_dict(), {}):
        with pytest.raises(InputError, match="your"):
            Guard(make, TRAINING, policy=LAX).check(state, batch)


def test_labels_of_any_whole_type_are_taken(sent, records):
    small = Batch(records.inputs, records.labels.to(torch.uint8))
    verdict = Guard(make, TRAINING).check(sent.state_dict(), small, first=True)
    assert verdict.decision == "ACCEPT", str(verdict)


def test_only_structure_looks_at_a_broken_model(sent, records):
    state = sent.state_dict()
    state["fc1.weight"][0, 0] = math.nan
    verdict = Guard(make, TRAINING, policy=LAX).check(state, records)
    assert verdict.decision == "REJECT"
    assert [d.test for d in verdict.detections] == ["structure"]
    assert set(verdict.untested) == set(Policy().tests(TRAINING))


def garbage() -> st.SearchStrategy:
    things = st.one_of(
        st.none(), st.integers(), st.text(max_size=3), st.floats(), st.binary(max_size=3),
        st.builds(object), st.builds(lambda: nn.Linear(2, 2)),
    )  # fmt: skip
    return st.one_of(
        things,
        st.lists(things, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), things, max_size=3),
    )


@given(garbage())
@examples(max_examples=40)
def test_garbage_is_rejected(thing):
    assert Guard(make, TRAINING, policy=LAX).check(thing).decision == "REJECT"


@st.composite
def networks(draw, least: int = 1) -> nn.Module:
    """Small networks of several kinds, in one of three types."""
    width = draw(st.integers(least, 12))
    act = draw(st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid]))
    kind = draw(st.sampled_from(["linear", "mlp", "conv", "norm", "group", "frozen"]))
    layers: list[nn.Module] = []
    if kind in ("conv", "norm", "group"):
        layers = [nn.Conv2d(3, 2 * width, 3, padding=1, bias=draw(st.booleans())), act()]
        layers += [nn.BatchNorm2d(2 * width)] * (kind == "norm")
        layers += [nn.GroupNorm(2, 2 * width)] * (kind == "group")
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 4)]
    elif kind == "linear":
        layers = [nn.Flatten(), nn.Linear(192, 4, bias=draw(st.booleans()))]
    else:
        layers = [nn.Flatten(), nn.Linear(192, width), act(), nn.Linear(width, 4)]
    net = nn.Sequential(*layers)
    if kind == "frozen":
        net[1].requires_grad_(False)
    return net.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))


BREAKS = {
    "missing": lambda s, k: s.pop(k),
    "extra": lambda s, k: s.update({k + "x": s[k]}),
    "nan": lambda s, k: s[k].view(-1)[:1].fill_(math.nan),
    "inf": lambda s, k: s[k].view(-1)[-1:].fill_(-math.inf),
    "shape": lambda s, k: s.update({k: s[k][None]}),
    "type": lambda s, k: s.update({k: s[k].to(torch.complex64)}),
    "number": lambda s, k: s.update({k: 1.0}),
    "none": lambda s, k: s.update({k: None}),
    "sparse": lambda s, k: s.update({k: s[k].to_sparse()}),
    "meta": lambda s, k: s.update({k: s[k].to("meta")}),
    "key": lambda s, k: s.update({7: s[k]}),
    "list": lambda s, k: s.update({k: s[k].tolist()}),
}


@given(networks(), st.sampled_from(sorted(BREAKS)), st.data())
@examples(max_examples=60)
def test_a_broken_state_of_any_network_is_rejected_and_disturbs_nothing(net, how, data):
    guard = Guard(lambda: net, TRAINING, policy=LAX)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    floats = [name for name, value in state.items() if value.is_floating_point()]
    BREAKS[how](state, data.draw(st.sampled_from(floats)))
    batch = Batch(torch.rand(8, 3, 8, 8), torch.arange(8) % 4)
    before = torch.get_rng_state()
    verdict = guard.check(state, batch)
    assert verdict.decision == "REJECT"
    assert [d.test for d in verdict.detections] == ["structure"]
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(InputError):
        guard.remember(verdict, net.state_dict())


@given(networks(least=6))  # a head that sees fewer features treats classes unequally by chance
@examples(max_examples=30)
def test_every_honest_fresh_network_gets_a_verdict_and_no_test_breaks(net):
    guard = Guard(lambda: net, TRAINING, policy=LAX)
    batch = Batch(torch.rand(20, 3, 8, 8), torch.arange(20) % 4)
    verdict = guard.check(net.state_dict(), batch)
    assert not [d for d in verdict.detections if "could not be made" in d.reason]
    assert verdict.decision in ("ACCEPT", "EXPOSED")


# --- it disturbs nothing --------------------------------------------------------------------------


def rude() -> nn.Module:
    """A constructor that draws from every generator and changes the default type."""
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    model = make().eval()
    torch.set_default_dtype(torch.float64)
    return model


@pytest.mark.parametrize(
    "policy", [LAX, Policy(warm_up=WarmUp(), require=())], ids=["default", "warm-up"]
)
def test_state_generators_modes_and_types_stay(sent, records, policy):
    torch.manual_seed(3)
    random.seed(3)
    state = sent.state_dict()
    copied = copy.deepcopy(state)
    inputs = records.inputs.clone()
    seen = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with torch.no_grad():
        guard = Guard(rude, TRAINING, policy=policy)
        verdict = guard.check(state, records)
        assert not torch.is_grad_enabled()
    assert verdict.decision == "ACCEPT"
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), seen[0])
    assert random.getstate() == seen[1]
    assert (np.random.get_state()[1] == seen[2]).all()  # noqa: NPY002
    assert all(torch.equal(state[name], copied[name]) for name in copied)
    assert torch.equal(records.inputs, inputs)
    assert sent.training


def test_the_verdict_does_not_depend_on_the_generators(sent, records):
    verdicts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        guard = Guard(make, TRAINING, policy=LAX, secret=b"one")
        verdicts.append(guard.check(sent.state_dict(), records))
    first, second = ([(d.test, d.score) for d in v.detections] for v in verdicts)
    assert first == second


def test_it_works_inside_inference_mode(sent, records):
    with torch.inference_mode():
        state = {name: value.clone() for name, value in sent.state_dict().items()}
        verdict = Guard(make, TRAINING, policy=LAX).check(state, records)
    assert verdict.decision == "ACCEPT"


def test_the_constructor_may_return_the_model_that_is_being_trained(sent, records):
    guard = Guard(lambda: sent, TRAINING, policy=LAX)
    state = {name: value.clone() for name, value in sent.state_dict().items()}
    nn.init.zeros_(sent.head.weight)  # training goes on
    assert guard.check(state, records).decision == "ACCEPT"
    assert not sent.head.weight.any()


def test_a_constructor_that_gives_no_network_is_an_error():
    with pytest.raises(InputError, match=r"gave a int, expected the client's own nn\.Module"):
        Guard(lambda: 3, TRAINING)


# --- memory ---------------------------------------------------------------------------------------


def scores(verdict) -> dict[str, float]:
    return {d.test: d.score for d in verdict.detections}


def shifted(state, size: float, name: str = "fc1.weight"):
    """The state with one entry of a tensor moved."""
    state = copy.deepcopy(state)
    state[name].view(-1)[0] += size
    return state


def test_sizes_of_own_updates_are_remembered_and_of_nothing_else(sent):
    """Known moves: 0.5 in one entry by the client, 0.3 by the server over three rounds."""
    guard = Guard(make, TRAINING, policy=LAX)
    state = copy.deepcopy(sent.state_dict())
    guard.remember(guard.check(state), shifted(state, 0.5, "head.bias"))
    memory = guard._memory
    assert memory.own["head.bias"] == pytest.approx(0.5)
    assert memory.own["fc1.weight"] == 0.0
    moved = shifted(state, -0.3, "head.bias")
    verdict = guard.check(moved, missed=3)
    assert scores(verdict)["continuity"] == pytest.approx(0.2)
    guard.remember(verdict, shifted(moved, 0.1, "head.bias"))
    memory = guard._memory
    assert (memory.rounds, memory.age) == (2, 3)
    assert memory.own["head.bias"] == pytest.approx(0.1)
    # Three rounds of 0.5, of which two were missed, and the last one.
    assert memory.since["head.bias"] == pytest.approx(0.5 + 2 * 0.5 + 0.1)
    assert torch.equal(memory.anchor["head.bias"], state["head.bias"])


def test_a_server_that_stretches_its_steps_is_stopped_in_its_second_round(sent):
    """Each step 4.8 times the last. Steps that were accepted must not feed the limit."""
    guard = Guard(make, TRAINING, policy=LAX)
    state, step, accepted = copy.deepcopy(sent.state_dict()), 0.1, 0
    while (verdict := guard.check(state)).train and accepted < 20:
        guard.remember(verdict, shifted(state, 0.1))  # the client's own work stays what it was
        accepted += 1
        step *= 4.8
        state = shifted(state, step)
    assert accepted == 2  # the first model, and one step of 4.8
    assert [d.test for d in verdict.fired] == ["continuity"]


def test_a_server_that_drifts_below_the_limit_of_a_round_is_stopped_by_the_sum(sent):
    """Every step 4.8 times the client's own: each passes, the third together does not."""
    guard = Guard(make, TRAINING, policy=LAX)
    state, accepted = copy.deepcopy(sent.state_dict()), 0
    while (verdict := guard.check(state)).train and accepted < 50:
        guard.remember(verdict, shifted(state, 0.1))
        accepted += 1
        state = shifted(state, 0.48)
    assert accepted == 3
    assert [d.test for d in verdict.fired] == ["drift"]
    slow, accepted = Guard(make, TRAINING, policy=LAX), 0
    state = copy.deepcopy(sent.state_dict())
    while (verdict := slow.check(state)).train and accepted < 45:
        slow.remember(verdict, shifted(state, 0.1))
        accepted += 1
        state = shifted(state, 0.29)
    assert accepted == 45  # a known limit: below three own updates per round it goes on
    assert slow._memory.age == 45 - 1 - 2 * guards.ANCHORED


def test_the_same_model_sent_again_is_noticed_and_does_not_tighten_the_next_round(
    sent, records, rng
):
    """A server resends after a dropped round; three times, and then the training goes on."""
    guard = Guard(make, TRAINING, policy=LAX)
    back = after(sent, records, rng)
    for index in range(4):
        verdict = guard.check(sent.state_dict(), records)
        assert verdict.decision == "ACCEPT"
        told = [d.reason for d in verdict.detections if d.test == "replay" and d.score]
        assert told == (["it is the model of the last round, sent again"] if index else [])
        guard.remember(verdict, back)
    assert guard._memory.age == 0
    assert len(guard._memory.digests) == 1
    sent.load_state_dict(back)
    assert guard.check(sent.state_dict(), records).decision == "ACCEPT"


def test_an_old_model_that_comes_back_is_refused_unless_the_policy_or_an_operator_says_so(
    sent, records, rng, tmp_path
):
    first = copy.deepcopy(sent.state_dict())
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    for _ in range(3):
        verdict = guard.check(sent.state_dict(), records)
        back = after(sent, records, rng)
        guard.remember(verdict, back)
        sent.load_state_dict(back)
    verdict = guard.check(first, records)
    assert verdict.decision == "REJECT"
    assert [d.test for d in verdict.fired] == ["replay"]
    assert "accepted 3 rounds ago" in str(verdict)
    lax = Guard(make, TRAINING, policy=replace(LAX, replay="off"), store=tmp_path)
    assert lax.check(first, records).decision == "ACCEPT"


def test_an_operators_restart_is_logged_and_excuses_memory_only(sent, records, rng, tmp_path):
    guard = Guard(make, TRAINING, policy=LAX, store=tmp_path)
    guard.remember(guard.check(sent.state_dict(), records), after(sent, records, rng))
    torch.manual_seed(8)
    other = make()
    assert guard.check(other.state_dict(), records).decision == "REJECT"
    assert not (tmp_path / "overrides.jsonl").exists()
    verdict = guard.check(other.state_dict(), records, restart="new initialisation, agreed by mail")
    assert (verdict.decision, verdict.excused) == ("ACCEPT", ("continuity",))
    (line,) = (tmp_path / "overrides.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told["restart"] == "new initialisation, agreed by mail"
    assert (told["excused"], told["model"]) == (["continuity"], verdict.model)
    back = after(other, records, rng)
    guard.remember(verdict, back)
    other.load_state_dict(back)
    assert guard.check(other.state_dict(), records).decision == "ACCEPT"  # from there on
    assert guard.check(fished(other), records, restart="trust me").decision == "REJECT"
    with pytest.raises(InputError, match="in words"):
        guard.check(other.state_dict(), records, restart=" ")


def test_what_the_policy_requires_is_not_accepted_when_it_is_missing(sent, records, rng):
    guard = Guard(make, TRAINING)
    verdict = guard.check(sent.state_dict(), first=True)
    assert (verdict.decision, verdict.train) == ("INCONCLUSIVE", False)
    assert list(verdict.missing) == ["batch"]
    assert "no records of yours were given" in str(verdict)
    verdict = guard.check(sent.state_dict(), records)
    assert (verdict.decision, list(verdict.missing)) == ("INCONCLUSIVE", ["memory"])
    assert "first=True" in str(verdict)
    with pytest.raises(InputError, match="latest verdict"):
        guard.remember(verdict, sent.state_dict())
    verdict = guard.check(sent.state_dict(), records, first=True)
    assert verdict.decision == "ACCEPT"
    back = after(sent, records, rng)
    guard.remember(verdict, back)
    sent.load_state_dict(back)
    with pytest.raises(InputError, match="memory holds 1"):
        guard.check(sent.state_dict(), records, first=True)
    assert guard.check(sent.state_dict(), records).decision == "ACCEPT"
    assert guard.check(fished(sent), records).decision == "REJECT"
    lost = Guard(make, TRAINING)
    assert lost.check(sent.state_dict(), records, restart="the disk died").decision == "ACCEPT"


def test_a_verdict_says_of_what_by_which_rules_and_when(sent, records, rng):
    guard = Guard(make, TRAINING)
    first = guard.check(sent.state_dict(), records, first=True).as_dict()
    assert len(first["model"]) == len(first["policy"]) == 64
    assert (first["version"], first["round"]) == (__version__, 1)
    other = Guard(make, TRAINING, policy=Policy(refuse_exposed=False))
    again = other.check(sent.state_dict(), records, first=True).as_dict()
    assert again["model"] == first["model"]
    assert again["policy"] != first["policy"]
    slower = Guard(make, replace(TRAINING, lr=0.01)).check(sent.state_dict(), records, first=True)
    assert slower.policy != first["policy"]
    guard.remember(guard.check(sent.state_dict(), records, first=True), after(sent, records, rng))
    moved = shifted(sent.state_dict(), 1e-6)
    verdict = guard.check(moved, records, missed=3)
    assert verdict.round == 4
    assert verdict.model != first["model"]
    assert guard.check({}, records).model is None


def test_what_is_sampled_is_drawn_from_the_clients_secret(sent, records, monkeypatch):
    """Two clients look at other rows and records; a store keeps its client's secret."""
    seen = []
    monkeypatch.setattr(
        Probe, "inspect", lambda self, got, rng: seen.append((got.batch, rng.initial_seed())) or ()
    )
    one, two = (Guard(make, TRAINING, policy=LAX) for _ in range(2))
    state = sent.state_dict()
    for guard in (one, one, two):
        guard.check(state, records)
    one.check(shifted(state, 1e-3), records)
    (a, s), (b, t), (c, u), (_, v) = seen
    assert torch.equal(a.inputs, b.inputs)
    assert s == t
    assert not torch.equal(a.inputs, c.inputs)
    assert len({s, u, v}) == 3


def normed() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 16, 3, stride=2), norm=nn.BatchNorm2d(16), act=nn.ReLU(),
            flat=nn.Flatten(), head=nn.Linear(144, 4),
        )
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_change_of_batch_norm_buffers_alone_is_rejected(records, rng, mode):
    training = replace(TRAINING, batch_norm=mode)
    guard = Guard(normed, training, policy=LAX)
    model = normed()
    for _ in range(2):
        verdict = guard.check(model.state_dict(), records)
        assert verdict.decision == "ACCEPT", str(verdict)
        local = train(setting(model, records), records, training, rng)
        back = subtract(parameters(model), local.update) | local.buffers
        guard.remember(verdict, back)
        model.load_state_dict(back)
    assert guard.check(model.state_dict(), records).decision == "ACCEPT"
    bad = copy.deepcopy(model.state_dict())
    bad["norm.running_mean"] += 3.0
    verdict = guard.check(bad, records)
    assert verdict.decision == "REJECT"
    assert "norm.running_mean" in {d.tensor for d in verdict.fired}
    without = Guard(normed, training, policy=LAX)
    without.remember(without.check(model.state_dict(), records), parameters(model))
    told = without.check(model.state_dict(), records).untested
    assert told["running statistics"] == "the weights that you last sent back held none of them"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_broadcast_in_another_precision_is_converted(records, rng, dtype):
    """And the next round, in full precision again, is no jump. Counters come as floats."""
    guard = Guard(normed, TRAINING, policy=LAX)
    model = normed()
    for index in range(4):
        state = model.state_dict()
        if index % 2:
            state = {n: v.to(dtype) if v.is_floating_point() else v.double()
                     for n, v in state.items()}  # fmt: skip
        verdict = guard.check(state, records)
        assert verdict.decision == "ACCEPT", str(verdict)
        told = next(d.reason for d in verdict.detections if d.test == "structure")
        assert ("were converted" in told) == bool(index % 2)
        local = train(setting(model, records), records, replace(TRAINING, lr=1e-4), rng)
        back = subtract(parameters(model), local.update) | local.buffers
        guard.remember(verdict, back)
        model.load_state_dict(back)


def test_a_learning_rate_that_starts_again_is_no_alarm(sent, records, rng):
    """A hundred times the last rate: the own update of that round says so too."""
    guard = Guard(make, TRAINING, policy=LAX)
    for lr in (0.1, 0.01, 0.001, 0.001, 0.001, 0.1, 0.1):
        verdict = guard.check(sent.state_dict(), records)
        assert verdict.decision == "ACCEPT", str(verdict)
        update = train(setting(sent, records), records, replace(TRAINING, lr=lr), rng).update
        back = subtract(parameters(sent), update)
        guard.remember(verdict, back)
        sent.load_state_dict(back)


def test_a_pruned_network_is_accepted_and_needs_an_operator_where_it_is_pruned_late(
    sent, records, rng
):
    """90 % of all weights are zero: sparsity alone is not a manipulation, a jump is."""
    whole = copy.deepcopy(sent)
    for name, value in sent.named_parameters():
        if name.endswith("weight"):
            cut = value.detach().abs().flatten().kthvalue(int(0.9 * value.numel())).values
            value.data[value.detach().abs() <= cut] = 0.0
    guard = Guard(make, TRAINING, policy=LAX)
    verdict = guard.check(sent.state_dict(), records)
    assert verdict.decision == "ACCEPT", str(verdict)
    assert scores(verdict)["near-zero-entries"] > 0.85
    late = Guard(make, TRAINING, policy=LAX)
    late.remember(late.check(whole.state_dict(), records), after(whole, records, rng))
    assert late.check(sent.state_dict(), records).decision == "REJECT"
    verdict = late.check(sent.state_dict(), records, restart="pruned to 10 %, as agreed")
    assert verdict.decision == "ACCEPT"


def test_a_network_with_zeros_has_slack_after_one_round():
    """Moved three times as far as the client itself: 3 / slack after one round, then 3."""
    guard = Guard(zero_headed, TRAINING, policy=LAX)
    state = zero_headed().state_dict()
    found = []
    for _ in range(3):
        verdict = guard.check(state)
        found.append(scores(verdict).get("continuity"))
        guard.remember(verdict, shifted(state, 0.1, "fc1.bias"))
        state = shifted(state, 0.3, "fc1.bias")
    assert found == [None, pytest.approx(1.0, rel=1e-3), pytest.approx(3.0, rel=1e-3)]


def test_missed_rounds_are_bounded_by_the_policy(sent):
    guard = Guard(make, TRAINING, policy=Policy(most_missed=4, require=()))
    state = copy.deepcopy(sent.state_dict())
    back = copy.deepcopy(state)
    back["head.bias"][0] += 0.5
    guard.remember(guard.check(state), back)
    state["head.bias"][0] += 1.0
    found = [scores(guard.check(state, missed=m))["continuity"] for m in (1, 4, 10_000, -5)]
    assert found == pytest.approx([2.0, 0.5, 0.5, 2.0])


def test_only_the_latest_verdict_is_remembered_and_once(sent, records, rng):
    guard = Guard(make, TRAINING, policy=LAX)
    first = guard.check(sent.state_dict(), records)
    second = guard.check(sent.state_dict(), records)
    back = after(sent, records, rng)
    with pytest.raises(InputError, match="latest verdict"):
        guard.remember(first, back)
    with pytest.raises(InputError, match="latest verdict"):
        Guard(make, TRAINING, policy=LAX).remember(second, back)
    guard.remember(second, back)
    with pytest.raises(InputError, match="once"):
        guard.remember(second, back)


@pytest.mark.parametrize("how", ["missing", "shape", "nan"])
def test_weights_that_cannot_be_the_clients_are_not_remembered(sent, records, rng, how):
    guard = Guard(make, TRAINING, policy=LAX)
    verdict = guard.check(sent.state_dict(), records)
    back = after(sent, records, rng)
    BREAKS[how](back, "head.weight")
    with pytest.raises(InputError, match=r"head\.weight"):
        guard.remember(verdict, back)
    guard.remember(verdict, after(sent, records, rng))  # it can be mended


def test_a_checked_state_that_changes_later_is_remembered_as_it_was_checked(sent, records, rng):
    guard = Guard(make, TRAINING, policy=LAX)
    verdict = guard.check(sent.state_dict(), records)
    back = after(sent, records, rng)
    kept = sent.head.weight.detach().clone()
    nn.init.zeros_(sent.head.weight)
    guard.remember(verdict, back)
    assert torch.equal(guard._memory.state["head.weight"], kept)


def test_the_warm_up_remembers_its_record(sent, records, rng):
    guard = Guard(make, TRAINING, policy=Policy(warm_up=WarmUp(at_start=False), require=()))
    for index in range(4):
        verdict = guard.check(sent.state_dict(), records)
        assert ("warm-up" in {d.test for d in verdict.detections}) == (index == 3)
        back = after(sent, records, rng)
        guard.remember(verdict, back)
        sent.load_state_dict(back)
    assert len(guard._memory.snapshots) == 4


# --- policy ---------------------------------------------------------------------------------------


def test_a_policy_is_built_from_a_table_and_strictly():
    settings = policies.parse(
        {
            "warm_up": {},
            "continuity": {"threshold": 7},
            "probe": "off",
            "thresholds": {"bias-dominance": 4},
            "training": {"lr": 0.5, "momentum": 0.9},
        }
    )
    policy = settings.policy
    assert policy == Policy(
        warm_up=WarmUp(),
        continuity=Continuity(threshold=7.0),
        probe="off",
        thresholds={"bias-dominance": 4.0},
    )
    assert settings.training == LocalTraining(lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"continuty": "off"}, "did you mean 'continuity'"),
        ({"probe": {"isolatoin": 1}}, "did you mean 'isolation'"),
        ({"probe": "of"}, "did you mean 'off'"),
        ({"thresholds": {"isolaton": 0.3}}, "did you mean 'isolation'"),
        ({"thresholds": {"structure": 5.0}}, "unknown test 'structure'"),
        ({"thresholds": {"isolation": -1.0}}, "must be 0 or more"),
        ({"thresholds": {"isolation": math.nan}}, "expected a finite number, got nan"),
        ({"most_missed": 0}, "at least 1"),
        ({"training": {"lrr": 1}}, "did you mean 'lr'"),
    ],
)
def test_a_wrong_policy_is_refused_in_words(table, message):
    with pytest.raises(PlanError, match=message):
        policies.parse(table)


def test_a_written_policy_reads_the_same(tmp_path):
    settings = policies.Settings(
        Policy(
            warm_up=WarmUp(at_start=False),
            exact_d_snr="off",
            probe=Probe(isolation=0.31),
            refuse_exposed=False,
            thresholds={"head-gain": 4.5},
        ),
        LocalTraining(lr=0.2),
        Scale(mean=(0.1, 0.2, 0.3)),
    )
    policies.write(tmp_path / "p.toml", settings, ["why it is so"])
    assert policies.read(tmp_path / "p.toml") == settings
    assert (tmp_path / "p.toml").read_text().startswith("# why it is so\n")


@pytest.mark.parametrize(
    ("policy", "training", "on"),
    [
        (Policy(averaging="plain"), TRAINING, True),
        (Policy(averaging="plain"), replace(TRAINING, momentum=0.9), True),
        (Policy(), TRAINING, False),
        (Policy(averaging="plain"), replace(TRAINING, weight_decay=1e-4), False),
        (Policy(averaging="plain"), replace(TRAINING, optimiser="adam"), False),
        (Policy(averaging="plain", head_invariant="off"), TRAINING, False),
    ],
)
def test_the_head_invariant_is_tested_only_where_it_holds(policy, training, on):
    assert isinstance(policy.tests(training)["head_invariant"], str) != on


def test_the_expensive_tests_are_off_by_default():
    off = {name for name, test in Policy().tests(TRAINING).items() if isinstance(test, str)}
    assert off == {"exact_d_snr", "head_invariant", "warm_up"}


def test_a_threshold_of_the_policy_overrules_the_detectors(sent, records):
    guard = Guard(make, TRAINING, policy=Policy(thresholds={"head-gain": 0.5}, require=()))
    verdict = guard.check(sent.state_dict(), records)
    assert [(d.test, d.threshold) for d in verdict.fired] == [("head-gain", 0.5)]


# --- calibration ----------------------------------------------------------------------------------


def test_calibration_raises_what_honest_training_needs_and_says_so(easy):
    tight = Policy(continuity=Continuity(threshold=1e-3), thresholds={"head-gain": 50.0})
    policy, said = calibrate(make, easy, TRAINING, tight)
    assert set(policy.thresholds) >= {"continuity", "head-gain"}
    assert policy.thresholds["continuity"] > 1e-3
    assert policy.thresholds["head-gain"] == 50.0  # never lowered
    assert any(line.startswith("continuity: raised from 0.001 to") for line in said)
    assert not any("head-gain" in line for line in said)
    again, more = calibrate(make, easy, TRAINING, policy)
    assert again == policy
    assert more == []


def test_a_network_that_needs_nothing_keeps_its_policy(easy):
    wide = Policy(probe=Probe(isolation=0.9))
    assert calibrate(make, easy, TRAINING, wide) == (wide, [])


def test_calibration_excuses_no_broken_model(easy):
    def diverged() -> nn.Module:
        model = make()
        nn.init.constant_(model.head.weight, math.nan)
        return model

    with pytest.raises(InputError, match="no threshold can mend that"):
        calibrate(diverged, easy, TRAINING)


def test_the_policy_in_the_documentation_is_one():
    page = Path(__file__).parents[1] / "docs" / "howto" / "guard.md"
    (table,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    settings = policies.parse(tomllib.loads(table))
    assert settings.policy.probe == Probe(isolation=0.3)
    assert settings.training.steps == 8


def test_the_self_audit_counts_what_exact_separation_reads() -> None:
    """The probe isolates no record of a convolutional network, and yet all can be read."""

    def small() -> nn.Module:
        rng = torch.Generator().manual_seed(0)
        return models.make("resnet-10", shape=(3, 16, 16), classes=10, width=0.5, rng=rng)

    batch = Batch(torch.rand(4, 3, 16, 16), torch.arange(4))
    guard = Guard(small, LocalTraining(batch_size=4))
    told = guard.check(small().state_dict(), batch, first=True).exposure
    assert told is not None
    assert "layer4.0.conv2 shows up to" in told
    large = Batch(torch.rand(80, 3, 16, 16), torch.arange(80) % 10)
    guard = Guard(small, LocalTraining(batch_size=80))
    told = guard.check(small().state_dict(), large, first=True).exposure
    assert told is not None
    assert "by counting" not in told
