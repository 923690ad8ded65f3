"""Plans: strict tables, the user's own files and code, and errors that name the remedy."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leakgauge import models
from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, Analytic, ExactRecursion, InvertingGradients
from leakgauge.attacks._matching import Search
from leakgauge.audit import parse, read
from leakgauge.audit.cases import controls, trials
from leakgauge.config import plain
from leakgauge.defences import Prune
from leakgauge.errors import DataError, LeakGaugeError, PlanError, Withheld
from leakgauge.fl.partition import Dirichlet, Iid
from leakgauge.metrics import lpips
from leakgauge.outside import own_files
from leakgauge.types import Iterative, LocalTraining, ThreatModel

TINY = {
    "federation": {"data": "digits", "model": "mlp"},
    "attack": [{"name": "analytic"}],
    "audit": {"exact": False},
}
MOVED = (
    r"^federation\.training: mean and std say how records are normalised: move them to the table "
    r"\[federation\.record\]$"
)


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Plans put their folder on the path of imports; give it back."""
    monkeypatch.setattr(sys, "path", sys.path[:])


def table(path: str = "", value: object = None) -> dict:
    """The tiny plan with the value at a dotted path."""
    made = copy.deepcopy(TINY)
    *inner, last = path.split(".")
    place = made
    for key in inner:
        place = place.setdefault(key, {})
    if last:
        place[last] = value
    return made


def parsed(path: str = "", value: object = None, folder: Path | None = None):
    return parse(table(path, value), "plan", folder or Path.cwd())


def test_the_demo_parses_and_its_federation_can_be_built():
    text = resources.files("leakgauge.audit").joinpath("demo.toml").read_text("utf-8")
    plan = parse(tomllib.loads(text), "demo", Path.cwd())
    assert plan.attacks == {
        "exact-recursion": ExactRecursion(),
        "inverting-gradients": InvertingGradients(iterations=300),
        "inverting-gradients-blind": InvertingGradients(iterations=300),
    }
    assert plan.blind == {"inverting-gradients-blind": "inverting-gradients"}
    assert plan.defences == {"none": None, "prune": Prune(share=0.99)}
    assert plan.data.inputs.shape[1:] == (3, 16, 16)
    scenario = plan.scenario(0, "prune")
    assert scenario.make_model()(plan.data.inputs[:2]).shape == (2, len(plan.data.classes))


def test_a_short_plan_has_the_defaults():
    plan = parsed()
    federation, audit = plan.document.federation, plan.document.audit
    assert federation.training == LocalTraining()
    assert plan.document.threat == ThreatModel(grants=frozenset({"training", "records"}))
    assert plan.defences == {"none": None}
    assert plan.partition == Iid()
    assert federation.rounds == (0,)
    assert audit.assignment == "optimal"
    assert audit.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("path", "value", "close"),
    [
        ("thread", {}, "threat"),
        ("federation.modle", "mlp", "model"),
        ("federation.training.batchsize", 2, "batch_size"),
        ("threat.grant", [], "grants"),
        ("audit.seed", 1, "seeds"),
        ("attack", [{"name": "dlg", "iteration": 3}], "iterations"),
        ("defence", [{"name": "prune", "shares": 0.5}], "share"),
        ("federation.partition", {"name": "dirichlet", "alfa": 1.0}, "alpha"),
        ("federation.data", {"name": "photos", "siz": 8}, "size"),
        # names and choices
        ("attack", [{"name": "idlgg"}], "idlg"),
        ("defence", [{"name": "prunes"}], "prune"),
        ("federation.model", "lenet-zu", "lenet-zhu"),
        ("federation.data", "digit", "digits"),
        ("federation.partition", "dirichlets", "dirichlet"),
        ("federation.init", "torhc", "torch"),
        ("federation.weighting", "record", "records"),
        ("federation.training.batch_norm", "trian", "train"),
        ("threat.actor", "sever", "server"),
        ("threat.grants", ["trainings"], "training"),
        ("audit.metrics", ["pnsr"], "psnr"),
        ("audit.metrics", ["lpip"], "lpips"),
        ("audit.assignment", "optimum", "optimal"),
        # a table without its name
        ("attack", [{"nam": "dlg"}], "name"),
        ("federation.model", {"nme": "mlp"}, "name"),
        ("federation.data", {"foldr": "x"}, "folder"),
        ("federation.partition", {"nane": "iid"}, "name"),
    ],
)
def test_every_wrong_key_and_name_has_its_suggestion(path, value, close):
    with pytest.raises(PlanError, match=f"did you mean '{close}'"):
        parsed(path, value)


def test_a_wrong_model_option_has_its_suggestion():
    plan = parsed("federation.model", {"name": "mlp", "hiden": [4]})
    with pytest.raises(PlanError, match="did you mean 'hidden'"):
        plan.scenario(0, "none").make_model()


def test_the_model_has_the_initialisation_and_options_of_the_plan():
    made = table("federation.init", "orthogonal")
    made["federation"]["model"] = {"name": "mlp", "hidden": [4]}
    model = parse(made, "plan", Path.cwd()).scenario(0, "none").make_model()
    assert torch.allclose(model.fc1.weight @ model.fc1.weight.T, torch.eye(4), atol=1e-5)


def test_a_message_names_the_key_by_its_path():
    with pytest.raises(PlanError, match=r"^plan\.federation\.training: unknown key 'rl'"):
        parsed("federation.training.rl", 1)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("federation.rounds", [], "rounds"),
        ("federation.rounds", [-1], "rounds"),
        ("federation.rounds", [3, 3], "different stages"),
        ("federation.clients", 0, "clients"),
        ("federation.training.lr", 0, "lr must be positive"),
        ("federation.training.lr", -0.1, "lr must be positive"),
        ("federation.training.lr", math.inf, "lr: expected a finite number, got inf"),
        ("federation.training.lr", math.nan, "lr: expected a finite number, got nan"),
        ("federation.record.std", [0.0], "std must be positive"),
        ("federation.record.mean", [0.1, 0.2], "1 channels"),
        ("federation.record.std", [0.1, 0.2, 0.3], "1 channels"),
        ("federation.training.mean", [0.5], MOVED),
        ("federation.training.std", [0.5], MOVED),
        ("federation.model", 3, "expected text"),
        ("federation.model", {"name": 3}, "expected text"),
        ("federation.data", {"name": 3}, "expected text"),
        ("federation.data", {"folder": 3}, "path must be a path"),
        ("federation.data", {"name": "digits", "folder": "x"}, "unknown option 'folder'"),
        ("audit.seeds", [], "seeds"),
        ("audit.seeds", [1, 1], "different"),
        ("audit.gallery", 1, "gallery"),
        ("audit.seconds", 0, "seconds"),
        ("audit.seconds", math.inf, "seconds"),
        ("audit.threads", 0, "threads"),
        ("audit.device", "abacus", "device 'abacus'"),
        ("attack", [], r"no \[\[attack\]\]"),
        ("attack", {"name": "dlg"}, r"write \[\[attack\]\] with two brackets"),
        ("defence", {"name": "prune"}, r"write \[\[defence\]\] with two brackets"),
        ("defence", [], r"no \[\[defence\]\]"),
        ("defence", [{"name": "none", "share": 1}], "takes no options, got share"),
        ("defence", [{"name": "prune", "share": 2}], r"share must lie in \[0, 1\)"),
    ],
)
def test_a_wrong_value_is_refused_in_words(path, value, words):
    with pytest.raises(LeakGaugeError, match=words):
        parsed(path, value)


def test_a_plan_without_a_federation_says_so():
    with pytest.raises(PlanError, match="key 'federation' is missing"):
        parse({"attack": [{"name": "dlg"}]}, "plan", Path.cwd())


def test_tables_become_the_methods_they_name():
    made = table("federation.partition", {"name": "dirichlet", "alpha": 2})
    made["attack"] = [{"name": "inverting-gradients", "iterations": 7, "tv": 0}]
    made["defence"] = [{"name": "none"}, {"name": "prune", "share": 0.5, "scope": "whole"}]
    plan = parse(made, "plan", Path.cwd())
    assert plan.partition == Dirichlet(alpha=2.0)
    assert plan.asked == ("inverting-gradients",)
    assert plan.attacks["inverting-gradients"] == InvertingGradients(iterations=7, tv=0.0)
    assert plan.defences == {"none": None, "prune": Prune(0.5, "whole")}


def test_a_name_used_again_gets_a_number_in_the_order_of_the_file():
    made = table("attack", [{"name": "inverting-gradients", "iterations": n} for n in (1, 2, 3)])
    made["defence"] = [{"name": "prune", "share": 0.1}, {"name": "none"}, {"name": "prune"}]
    plan = parse(made, "plan", Path.cwd())
    assert [(k, plan.attacks[k].iterations) for k in plan.asked] == [
        ("inverting-gradients", 1),
        ("inverting-gradients-2", 2),
        ("inverting-gradients-3", 3),
    ]
    assert list(plan.defences) == ["prune", "none", "prune-2"]
    assert plan.defences["prune"].share == 0.1


def test_the_scenario_is_the_federation_of_the_plan():
    made = table()
    made["federation"] |= {
        "training": {"lr": 0.5, "batch_size": 2, "steps": 3},
        "clients": 5,
        "participants": 4,
        "records": 6,
        "server_lr": 0.25,
        "weighting": "equal",
        "partition": {"name": "dirichlet", "alpha": 9},
        "rounds": [0, 7],
    }
    made["defence"] = [{"name": "prune"}]
    plan = parse(made, "plan", Path.cwd())
    scenario = plan.scenario(7, "prune")
    assert scenario.data is plan.data
    assert scenario.training == LocalTraining(lr=0.5, batch_size=2, steps=3)
    assert (scenario.clients, scenario.participants, scenario.records) == (5, 4, 6)
    assert (scenario.server_lr, scenario.weighting, scenario.rounds) == (0.25, "equal", 7)
    assert (scenario.partition, scenario.defence) == (Dirichlet(9.0), Prune())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_that_needs_what_is_withheld_is_refused_before_the_data_are_read(name):
    made = table("federation.data", {"folder": "not there"})
    made |= {"attack": [{"name": name}], "threat": {"grants": []}}
    with pytest.raises(Withheld, match=f"attack '{name}' needs .*threat.grants"):
        parse(made, "plan", Path.cwd())
    made["threat"] = {"grants": ["training", "records"]}
    with pytest.raises(DataError, match="not there"):
        parse(made, "plan", Path.cwd())


# The attack that nobody has to ask for.


def test_the_exact_recursion_is_there_without_being_asked_and_comes_first():
    plan = parsed("audit.exact", True)
    assert list(plan.attacks) == ["exact-recursion", "analytic"]
    assert plan.asked == ("analytic",)
    assert [case.attack for case in trials(plan)[:2]] == ["exact-recursion", "analytic"]
    assert {case.attack for case in controls(plan)} == {"analytic"}
    del (made := table())["audit"]
    assert list(parse(made, "plan", Path.cwd()).attacks) == list(plan.attacks)  # the default


def test_the_exact_recursion_can_be_left_out():
    plan = parsed("audit.exact", False)
    assert list(plan.attacks) == list(plan.asked) == ["analytic"]


@pytest.mark.parametrize("exact", [True, False])
def test_a_plan_that_asks_for_the_exact_recursion_has_its_own_once_and_its_control(exact):
    made = table("audit.exact", exact)
    made["attack"].append({"name": "exact-recursion", "restarts": 5})
    plan = parse(made, "plan", Path.cwd())
    assert len(plan.attacks) == 2
    assert plan.attacks["exact-recursion"] == ExactRecursion(restarts=5)
    assert {case.attack for case in controls(plan)} == {"analytic", "exact-recursion"}


class Modest(Analytic):
    """An attack that asks for nothing."""

    needs = frozenset()


@pytest.mark.parametrize("grants", [["training"], ["records"], ["training", "records"]])
def test_the_exact_recursion_is_left_out_where_its_needs_are_withheld(monkeypatch, grants):
    monkeypatch.setitem(ATTACKS, "modest", Modest)
    made = table("audit.exact", True)
    made["threat"] = {"grants": grants}
    made["attack"] = [{"name": "modest"}]
    plan = parse(made, "plan", Path.cwd())
    assert ("exact-recursion" in plan.attacks) == (len(grants) == 2)


# The user's own files and code.


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def toml(data: str, model: str = '"mlp"', more: str = "") -> str:
    return f'[federation]\ndata = {data}\nmodel = {model}\n{more}\n[[attack]]\nname = "analytic"\n'


def save_images(folder: Path, levels: dict[str, int]) -> None:
    for name, level in levels.items():
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (level, 0, 255)).save(folder / name / "1.png")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder `plans` beside which we do not stand."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path


def test_a_folder_is_looked_for_beside_the_plan(home):
    save_images(home / "plans" / "pictures", {"dark": 0, "light": 255})
    plan = read(write(home / "plans" / "own.toml", toml('{ folder = "pictures", size = 4 }')))
    assert plan.name == "own"
    assert plan.data.classes == ("dark", "light")
    assert plan.data.inputs.shape == (2, 3, 4, 4)
    assert plan.data.inputs[:, 0, 0, 0].tolist() == [0, 1]


def test_an_npz_is_looked_for_beside_the_plan(home):
    images = np.random.default_rng(0).random((5, 6, 6)).astype(np.float32)
    (home / "plans").mkdir()
    np.savez(home / "plans" / "scans.npz", images=images, labels=np.array([0, 1, 2, 1, 0]))
    plan = read(write(home / "plans" / "own.toml", toml('{ npz = "scans.npz" }')))
    assert torch.equal(plan.data.inputs[:, 0], torch.from_numpy(images))
    assert plan.data.labels.tolist() == [0, 1, 2, 1, 0]


def test_paths_may_be_absolute_or_in_the_home(home):
    save_images(home / "home" / "pictures", {"a": 1, "b": 2})
    for path in ("~/pictures", home / "home" / "pictures"):
        plan = read(write(home / "plans" / "own.toml", toml(f'{{ folder = "{path}", size = 2 }}')))
        assert plan.data.classes == ("a", "b")


MODEL = """
from torch import nn

def make(shape, classes, width=3):
    model = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], width),
                          nn.Tanh(), nn.Linear(width, classes))
    model.tag = "{tag}"
    return model
"""

DATA = """
import torch

def load(count, path=None):
    rng = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 4, 4, generator=rng) * {scale}, torch.arange(count) % 3
"""


def own_code(folder: Path, tag: str, scale: float, package: str = "") -> Path:
    inside = folder / package
    write(inside / "model.py", MODEL.format(tag=tag))
    write(inside / "records.py", DATA.format(scale=scale))
    prefix = f"{package}." if package else ""
    model = f'{{ name = "{prefix}model:make", width = 5 }}'
    return write(
        folder / "plan.toml", toml(f'{{ name = "{prefix}records:load", count = 9 }}', model)
    )


@pytest.mark.parametrize("package", ["", "hospital"])
def test_own_model_and_data_beside_the_plan(home, package):
    plan = read(own_code(home / "plans", "mine", 0.5, package))
    model = plan.scenario(0, "none").make_model()
    assert model.tag == "mine"
    assert model[1].weight.shape == (5, 16)
    assert plan.data.inputs.shape == (9, 1, 4, 4)
    assert 0.4 < float(plan.data.inputs.max()) <= 0.5


@pytest.mark.parametrize("package", ["", "hospital"])
def test_plans_of_two_folders_with_modules_of_one_name_do_not_mix(home, package):
    first = read(own_code(home / "one", "one", 0.5, package))
    second = read(own_code(home / "two", "two", 0.25, package))
    assert float(second.data.inputs.max()) <= 0.25 < float(first.data.inputs.max())
    for plan, tag in ((first, "one"), (second, "two"), (first, "one")):
        assert plan.scenario(0, "none").make_model().tag == tag


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def load():\n    raise RuntimeError('no disk')", "RuntimeError: no disk"),
        ("def load(:", "SyntaxError"),
        ("def lod():\n    pass", "did you mean 'lod'"),
        ("load = 3", "expected a callable load"),
    ],
)
def test_own_data_code_that_fails_is_said_in_words(home, source, words):
    write(home / "plans" / "broken.py", source)
    with pytest.raises(PlanError, match=words):
        read(write(home / "plans" / "plan.toml", toml('"broken:load"')))


def test_an_own_module_that_is_not_there(home):
    with pytest.raises(PlanError, match="no_such_module"):
        read(write(home / "plans" / "plan.toml", toml('"no_such_module:load"')))


def test_a_checkpoint_beside_the_plan_is_loaded(home):
    path = home / "plans" / "own.toml"
    write(path, toml('"digits"', '{ name = "mlp", hidden = [3] }', 'checkpoint = "w.safetensors"'))
    saved = models.make(
        "mlp", shape=(1, 8, 8), classes=10, hidden=[3], rng=torch.Generator().manual_seed(5)
    )
    models.save(saved, home / "plans" / "w.safetensors")
    made = read(path).scenario(0, "none").make_model()
    for name, value in saved.state_dict().items():
        assert torch.equal(made.state_dict()[name], value)


# Reading and printing.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[federation\ndata = 1", "not valid TOML"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"\xff\xfe\x00", "not valid TOML"),
    ],
)
def test_a_file_that_is_not_toml(tmp_path, content, words):
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=words):
        read(path)


def test_no_file_or_a_folder(tmp_path):
    with pytest.raises(PlanError, match="no plan at"):
        read(tmp_path / "none.toml")
    with pytest.raises(PlanError, match="is a folder"):
        read(tmp_path)
    write(tmp_path / "file", "")
    with pytest.raises(PlanError, match="cannot be read"):
        read(tmp_path / "file" / "plan.toml")


def test_the_fingerprint_is_of_all_that_changes_a_trial(home):
    images = np.random.default_rng(0).random((5, 6, 6))
    path, weights = home / "plans" / "own.toml", home / "plans" / "w.safetensors"
    write(path, toml('{ npz = "scans.npz" }', '"mlp"', 'checkpoint = "w.safetensors"'))

    def fingerprint(pixels=images, bias=0.0, text=None):
        np.savez(home / "plans" / "scans.npz", images=pixels, labels=np.arange(5))
        model = models.make("mlp", shape=(1, 6, 6), classes=5, rng=torch.Generator())
        torch.nn.init.constant_(model.fc2.bias, bias)
        models.save(model, weights)
        if text:
            write(path, text)
        return read(path).fingerprint

    same = fingerprint()
    assert fingerprint() == same
    assert fingerprint(pixels=images[:, ::-1]) != same
    assert fingerprint(bias=0.5) != same
    assert fingerprint(text=path.read_text().replace("analytic", "dlg")) != same


OWN = """
from pathlib import Path
import torch
from torch import nn
from parts import Head

def word():
    return (Path(__file__).parent / "word.txt").read_text()

def make():
    width = 9 if word() == "wider" else 8
    act = nn.Sigmoid() if word() == "sigmoid" else nn.ReLU()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), act, Head(width, 10))
    if word() == "zero":
        nn.init.zeros_(model[1].bias)
    if word() == "frozen":
        model[1].bias.requires_grad_(False)
    if word() == "buffer":
        model.register_buffer("extra", torch.ones(1))
    return model

def load():
    images, labels = torch.linspace(0, 1, 640).reshape(10, 1, 8, 8), torch.arange(10)
    if word() == "darker":
        images = images / 2
    if word() == "flipped":
        labels = labels.flip(0)
    if word() == "strided":
        labels = torch.arange(20).flip(0)[::2] // 2
    return images, labels
"""
PARTS = """
from torch import nn

class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        *(
            ("word.txt", "plain", word)
            for word in
            ("wider", "sigmoid", "zero", "frozen", "buffer", "darker", "flipped", "strided")
        ),
        ("own.py", "linspace(0, 1", "linspace(0, .9"),
        ("parts.py", "forward(x)", "forward(2 * x)"),
    ],
)  # fmt: skip
def test_the_fingerprint_is_of_what_own_code_builds(home, monkeypatch, file, old, new):
    folder = home / "plans"
    for name, text in (("word.txt", "plain"), ("own.py", OWN), ("parts.py", PARTS)):
        write(folder / name, text)
    path = write(folder / "own.toml", toml('"own:load"', '"own:make"'))

    def fingerprint():
        for name in ("own", "parts"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        return read(path).fingerprint

    before = fingerprint()
    assert fingerprint() == before
    changed = (folder / file).read_text()
    assert old in changed
    write(folder / file, changed.replace(old, new))
    assert fingerprint() != before


def test_the_files_of_own_code_are_its_own(home, monkeypatch):
    folder = home / "plans"
    for name in ("own", "parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in (("word.txt", "plain"), ("own.py", OWN), ("parts.py", PARTS)):
        write(folder / name, text)
    read(write(folder / "own.toml", toml('"own:load"', '"own:make"')))
    assert own_files("own:make", folder) == [folder / "own.py", folder / "parts.py"]
    assert own_files("mlp", folder) == []


def test_the_fingerprint_is_not_of_how_it_is_written():
    first = table("federation.training", {"lr": 1, "batch_size": 2})
    second = table("federation.training", {"batch_size": 2, "lr": 1.0})
    first["attack"] = [{"name": "dlg", "iterations": 3}]
    second["attack"] = [{"iterations": 3, "name": "dlg"}]
    second = dict(reversed(second.items()))
    prints = [parse(t, name, Path.cwd()).fingerprint for t, name in ((first, "a"), (second, "b"))]
    assert prints[0] == prints[1]


def test_plain_is_what_json_can_hold():
    value = plain(
        {
            "threat": ThreatModel(grants=frozenset({"records", "labels", "training"})),
            "tuple": (1, (math.nan, -math.inf, 0.5)),
        }
    )
    assert value == {
        "threat": {
            "actor": "server",
            "grants": ["labels", "records", "training"],
            "client": 0,
            "malicious": False,
            "rounds": 1,
        },
        "tuple": [1, [None, None, 0.5]],
    }
    assert json.loads(json.dumps(value, allow_nan=False)) == value


WHOLE = {"analytic", "exact-recursion", "git", "guided-diffusion", "lti", "separate-and-decode"}
"""Linear algebra, learned networks, a search that ends by itself, draws from a prior: a forecast
times such a trial whole. What the last four of them prepare is long, and is timed apart by its
signs of progress."""
SEARCHES = sorted(ATTACKS.keys() - WHOLE)
OWN_SPACE = {"fedinverse", "ggl", "gias", "rog"}
"""They search the latents, weights or codes of a prior, and no space that a plan could choose."""


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_attacks_that_a_forecast_times_whole_cannot_be_shortened(name: str) -> None:
    """One that is shortened would be another attack, and share no preparation with the whole."""
    assert not isinstance(ATTACKS[name](), Iterative)


@pytest.mark.parametrize("name", [*SEARCHES, "fishing", "seer"])
def test_a_forecast_can_shorten_every_attack_that_searches(name: str) -> None:
    attack = (ATTACKS | ACTIVE_ATTACKS)[name]()
    assert isinstance(attack, Iterative)
    short = attack.shortened(3, 2)
    assert isinstance(short, Iterative)
    assert short.iterations == 3
    assert short.restarts == (2 if name in SEARCHES else 1)


@pytest.mark.parametrize("name", sorted(set(SEARCHES) - OWN_SPACE))
def test_a_plan_sets_the_shared_knobs_of_every_search(name: str) -> None:
    knobs = {"iterations": 7, "restarts": 2, "start": "grey", "space": "low-resolution"}
    knobs |= {"derivative": "exact"}
    attack = parsed("attack", [{"name": name, **knobs}]).attacks[name]
    assert isinstance(attack, Search)
    assert {key: getattr(attack, key) for key in knobs} == knobs


# Metrics.


def test_lpips_is_measured_where_its_weights_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_WEIGHTS", str(tmp_path))
    without = parse(TINY, "without", tmp_path)
    assert "lpips" not in without.metrics
    (tmp_path / lpips.FILE).touch()  # it is read when an audit begins
    found = parse(TINY, "found", tmp_path)
    assert list(found.metrics) == ["psnr", "affine-psnr", "ssim", "mse", "lpips"]
    assert found.document.audit.metrics == tuple(found.metrics)
    # What is said in a result or resumed says what is measured.
    assert found.fingerprint != without.fingerprint
    again = parse(plain(found.document), "again", tmp_path)
    assert list(again.metrics) == list(found.metrics)
    named = TINY | {"audit": {"metrics": ["ssim"]}}
    assert list(parse(named, "named", tmp_path).metrics) == ["psnr", "ssim"]
    monkeypatch.setattr(lpips, "CHANNELS", (3,))  # digits are grey
    assert "lpips" not in parse(TINY, "grey", tmp_path).metrics


def test_a_limit_of_lpips_needs_its_name(tmp_path, monkeypatch):
    """Or the verdict would depend on the machine."""
    monkeypatch.setenv("LEAKGAUGE_WEIGHTS", str(tmp_path))
    (tmp_path / lpips.FILE).touch()
    table = TINY | {"audit": {"limit": {"scores": {"lpips": 0.2}}}}
    with pytest.raises(PlanError, match="names 'lpips', which is not measured"):
        parse(table, "limit", tmp_path)
