"""Methods from outside the package: named by their code or offered by an installed package, held to
the same protocol, never in place of one of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakgauge import catalogue, cli, outside
from leakgauge.attacks import parts
from leakgauge.audit import Store, parse, run, schema
from leakgauge.defences import DEFENCES
from leakgauge.errors import LeakGaugeError, PlanError, Withheld
from leakgauge.guard import Guard, Policy
from leakgauge.guard import policy as policies
from leakgauge.records import Scale
from leakgauge.types import Batch, LocalTraining

ATTACK = '''
"""Guesses grey."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.types import Kept, Preparation, Reconstruction
from beside import VALUE


@dataclass(frozen=True)
class Grey:
    """Always answers the same grey.

    And nothing else."""

    value: float = VALUE
    needs: ClassVar = frozenset({"records"})

    def reconstruct(self, seen, rng, resources=None):
        shape = (seen.records, *seen.record.shape)
        return Reconstruction(torch.full(shape, self.value), None, residual=0.0)


@dataclass(frozen=True)
class Changing(Grey):
    """Changes the model."""

    manipulates: ClassVar = True

    def prepare(self, target, rng, resources=None):
        return Preparation(Kept(), (target.setting.model,))


@dataclass(frozen=True)
class Lying(Changing):
    """Changes the model, and says that it does not."""

    manipulates: ClassVar = False


@dataclass(frozen=True)
class Silent(Grey):
    def prepare(self, target, rng, resources=None):
        return Preparation(Kept())


@dataclass(frozen=True)
class dlg(Grey):
    pass


@dataclass(frozen=True)
class _Hidden(Grey):
    pass


class NoData:
    needs = frozenset()

    def reconstruct(self, seen, rng, resources=None):
        return None


@dataclass(frozen=True)
class Deaf:
    needs: ClassVar = frozenset()


@dataclass(frozen=True)
class Greedy(Grey):
    needs: ClassVar = frozenset({"labels"})


@dataclass(frozen=True)
class Wordy(Grey):
    needs: ClassVar = ["training"]


@dataclass(frozen=True)
class Asking(Grey):
    needs: ClassVar = frozenset({"everything"})


@dataclass(frozen=True)
class Broken(Grey):
    @property
    def needs(self):
        raise KeyError("lost")


@dataclass(frozen=True)
class Raising(Grey):
    def __post_init__(self):
        raise RuntimeError("not today")


@dataclass(frozen=True)
class Leaving(Grey):
    def __post_init__(self):
        raise SystemExit(0)


@dataclass(frozen=True)
class Refusing(Grey):
    def __post_init__(self):
        raise ValueError("value must be dark")


@dataclass(frozen=True)
class Unreadable(Grey):
    size: "Nonsense" = 1


number = 3


def function(seen, rng):
    return None
'''

DEFENCE = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Half:
    """Halves the update."""

    def announced(self):
        return {}

    def on_update(self, update, here, rng):
        return {name: value / 2 for name, value in update.items()}


@dataclass(frozen=True)
class none(Half):
    pass


@dataclass(frozen=True)
class Idle:
    pass
'''

DETECTOR = '''
import sys
from dataclasses import dataclass

from leakgauge.types import Detection


@dataclass(frozen=True)
class Largest:
    """The largest weight."""

    threshold: float = 1e9

    def inspect(self, received, rng):
        most = max(float(value.abs().max()) for value in received.model.state_dict().values())
        return (Detection("largest", most, self.threshold, "reject", "a weight is large"),)


@dataclass(frozen=True)
class Leaving(Largest):
    def inspect(self, received, rng):
        sys.exit(0)


@dataclass(frozen=True)
class Strange(Largest):
    def inspect(self, received, rng):
        return ["fine"]
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of a test and its folder are not those of the next."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    catalogue._offered.cache_clear()
    yield
    catalogue._offered.cache_clear()
    for name in set(sys.modules) - before:
        if name in ("theirs", "shields", "tests_of", "beside", "leaves", "gaps"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "theirs": ATTACK,
        "beside": "VALUE = 0.25\n",
        "shields": DEFENCE,
        "tests_of": DETECTOR,
        "leaves": "raise SystemExit(0)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


def offered(folder: Path, package: str, text: str) -> None:
    """As if that package were installed in the folder."""
    info = folder / f"{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(text)
    sys.path.insert(0, str(folder))


def planned(folder: Path, attacks: list[Any] | None = None, **more: Any) -> Any:
    table: dict[str, Any] = {
        "federation": {"data": "digits", "model": "mlp"},
        "attack": attacks or [{"name": "theirs:Grey"}],
        "audit": {"exact": False},
    }
    return parse(table | more, "plan", folder)


# ---------------------------------------------------------------- named by their code


def test_a_method_is_named_by_its_code_and_called_by_its_class(folder: Path) -> None:
    plan = planned(
        folder,
        [{"name": "theirs:Grey"}, {"name": "theirs:Grey", "value": 0.5}, {"name": "dlg"}],
        defence=[{"name": "none"}, {"name": "shields:Half"}],
    )
    assert list(plan.attacks) == ["Grey", "Grey-2", "dlg"]
    assert (plan.attacks["Grey"].value, plan.attacks["Grey-2"].value) == (0.25, 0.5)
    assert list(plan.defences) == ["none", "Half"]
    assert plan.asked == ("Grey", "Grey-2", "dlg")


def test_the_code_of_a_method_and_what_it_imports_is_in_the_fingerprint(folder: Path) -> None:
    first = planned(folder).fingerprint
    assert planned(folder).fingerprint == first
    (folder / "beside.py").write_text("VALUE = 0.25  # the same, but who knows\n")
    second = planned(folder).fingerprint
    assert second != first
    shielded = planned(folder, defence=[{"name": "shields:Half"}]).fingerprint
    (folder / "shields.py").write_text(DEFENCE.replace("/ 2", "/ 4"))
    assert planned(folder, defence=[{"name": "shields:Half"}]).fingerprint != shielded


def test_it_is_looked_for_beside_the_plan_first(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "theirs.py").write_text(ATTACK.replace("VALUE\n    needs", "0.75\n    needs"))
    (other / "beside.py").write_text("VALUE = 0.75\n")
    assert planned(folder).attacks["Grey"].value == 0.25
    assert planned(other).attacks["Grey"].value == 0.75
    assert planned(folder).attacks["Grey"].value == 0.25


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("theirs:Gray", "expected a class Gray in theirs, got nothing; did you mean 'Grey'?"),
        ("theirs:number", "expected a class number in theirs, got a int"),
        ("theirs:function", "expected a class function in theirs, got a function"),
        ("theirs:NoData", "no dataclass: write @dataclass"),
        ("theirs:Deaf", "'theirs:Deaf' has no reconstruct: expected what leakgauge.types.Attack"),
        ("shields:Half", "'shields:Half' has no needs"),
        ("theirs:Silent", "expected prepare and manipulates together"),
        (
            "theirs:Wordy",
            "records, statistics, training, weights; got ['tra",
        ),
        ("theirs:Asking", "got frozenset({'everything'})"),
        ("theirs:Broken", "its needs failed (KeyError: 'lost')"),
        ("theirs:Raising", "'theirs:Raising' could not be made (RuntimeError: not today)"),
        ("theirs:Leaving", "'theirs:Leaving' could not be made (SystemExit: 0)"),
        ("theirs:Refusing", "'theirs:Refusing': value must be dark"),
        ("theirs:Unreadable", "could not be made (NameError"),
        ("theirs:dlg", "'dlg' is a name of LeakGauge's own: choose another"),
        ("theirs:_Hidden", "'_Hidden' cannot name files: start with a letter"),
        ("leaves:Grey", "could not be imported (SystemExit: 0)"),
        ("nowhere:Grey", "could not be imported (ModuleNotFoundError"),
        ("theirs:", "expected a class  in theirs"),
        (":Grey", "could not be imported (ValueError"),
        ("theirs:Grey.value", "got nothing"),
        ("../theirs:Grey", "could not be imported"),
    ],
)
def test_what_is_no_attack_is_refused_in_words(folder: Path, name: str, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(folder, [{"name": name}])
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valeu": 1}, "attack 'theirs:Grey': unknown key 'valeu'; did you mean 'value'?"),
        ({"value": "dark"}, "expected a number, got 'dark'"),
        ({"value": float("nan")}, "value: expected a finite number"),
    ],
)
def test_options_from_outside_are_checked_as_ours(folder: Path, options: Any, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(folder, [{"name": "theirs:Grey", **options}])
    assert words in str(refusal.value)


def test_an_attack_from_outside_gets_no_more_than_the_threat_model_grants(folder: Path) -> None:
    with pytest.raises(Withheld, match="attack 'Greedy' needs 'labels'"):
        planned(folder, [{"name": "theirs:Greedy"}])
    with pytest.raises(Withheld, match="attack 'Changing' changes the model"):
        planned(folder, [{"name": "theirs:Changing"}])


def test_an_attack_that_says_it_is_honest_may_not_send_a_model(
    folder: Path, tmp_path_factory: Any
) -> None:
    audit = {"exact": False, "control": False, "explain": False, "seeds": [0]}
    plan = planned(folder, [{"name": "theirs:Lying"}], audit=audit)
    (trial,) = run(plan, Store(tmp_path_factory.mktemp("out"))).trials
    assert trial.status == "failed"
    assert "says that it changes no model, but its prepare() gave one" in str(trial.error)


def test_what_is_no_defence_is_refused(folder: Path) -> None:
    for name, words in (
        ("shields:Idle", "has no on_batch or on_gradient or on_update"),
        ("shields:none", "'none' is a name of LeakGauge's own"),
    ):
        with pytest.raises(PlanError, match=words):
            planned(folder, defence=[{"name": name}])


def test_code_that_ends_the_program_ends_the_command_with_2(folder: Path) -> None:
    text = '[federation]\ndata = "digits"\nmodel = "mlp"\n[[attack]]\nname = "theirs:Leaving"\n'
    (folder / "plan.toml").write_text(text)
    code = "from leakgauge.cli import main; main()"
    command = [sys.executable, "-c", code, "audit", "plan.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "could not be made (SystemExit: 0)" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# ---------------------------------------------------------------- offered by a package


ENTRIES = """
[leakgauge.attacks]
grey = theirs:Grey
changing = theirs:Changing
dlg = theirs:Grey
lost = nowhere:Grey
deaf = theirs:Deaf [fast]
leaves = leaves:Grey
a/b = theirs:Grey
plain = theirs

[leakgauge.defences]
half = shields:Half

[leakgauge.detectors]
largest = tests_of:Largest

[console_scripts]
theirs = theirs:function
"""


def test_an_offered_method_is_used_by_its_name(folder: Path) -> None:
    offered(folder, "their-package", ENTRIES)
    plan = planned(
        folder / "elsewhere", [{"name": "grey", "value": 0.5}], defence=[{"name": "half"}]
    )
    assert plan.attacks["grey"].value == 0.5
    assert plan.defences["half"].on_update({"w": torch.ones(1)}, None, None)["w"] == 0.5
    assert type(planned(folder, [{"name": "dlg"}]).attacks["dlg"]).__module__ == (
        "leakgauge.attacks.dlg"
    )


def test_another_version_of_what_is_offered_is_another_audit(folder: Path) -> None:
    offered(folder, "their-package", ENTRIES)
    first = planned(folder, [{"name": "grey"}]).fingerprint
    info = folder / "their-package-1.5.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.5", "Version: 1.6"))
    assert planned(folder, [{"name": "grey"}]).fingerprint != first


def test_a_name_that_nobody_or_two_packages_offer_is_refused(
    folder: Path, tmp_path_factory: Any
) -> None:
    offered(folder, "their-package", ENTRIES)
    with pytest.raises(PlanError, match=r"unknown attack 'gray'; did you mean 'grey'\?"):
        planned(folder, [{"name": "gray"}])
    offered(tmp_path_factory.mktemp("b"), "rival", "[leakgauge.attacks]\ngrey = theirs:Greedy\n")
    with pytest.raises(PlanError, match="offered by rival and by their-package: say which, as in"):
        planned(folder, [{"name": "grey"}])


def test_lists_show_what_is_offered_and_what_is_broken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offered(folder, "their-package", ENTRIES)
    offered(folder, "torn", "[leakgauge.attacks]\nno equals sign\n")
    found = {(e.package, e.name): e for e in catalogue.entries("attacks") if e.package}
    problems = {name: entry.problem for (_, name), entry in found.items()}
    assert problems.pop("grey") == ""
    assert "is a name of LeakGauge's own" in problems.pop("dlg")
    assert "ModuleNotFoundError" in problems.pop("lost")
    assert "has no reconstruct" in problems.pop("deaf")
    assert "SystemExit" in problems.pop("leaves")
    assert "cannot name files" in problems.pop("a/b")
    assert "expected an entry point \"module:NAME\", got 'theirs'" in problems.pop("plain")
    assert "expected an entry point" in problems.pop("?")
    assert not problems
    assert [e.name for e in catalogue.entries("malicious-servers") if e.package] == ["changing"]
    cli.list_("attacks", long=False)
    words = " ".join(capsys.readouterr().out.split())
    assert "grey Always answers the same grey. (from their-package)" in words
    assert "lost cannot be used (from their-package): attack 'nowhere:Grey' could not" in words
    cli.list_("grey", long=False)
    words = " ".join(capsys.readouterr().out.split())
    assert "And nothing else. (from their-package) options: value=0.25" in words
    for kind in catalogue.KINDS:
        cli.list_(kind, long=True)
    words = capsys.readouterr().out
    assert "Halves the update." in words
    assert "The largest weight." in words


def test_every_kind_that_can_be_offered_is_listed() -> None:
    listed = {kind.what.rpartition(" ")[2] for kind in catalogue.KINDS.values() if kind.what}
    assert listed == set(outside.MUST_HAVE)


# ---------------------------------------------------------------- detectors of a policy


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))


def decided(policy: Policy) -> Any:
    guard = Guard(network, LocalTraining(), policy=policy)
    records = Batch(torch.rand(8, 1, 8, 8), torch.arange(8) % 4)
    return guard.check(network().state_dict(), records, first=True)


def test_a_policy_names_a_detector_of_the_operators_own(folder: Path) -> None:
    path = folder / "policy.toml"
    base = 'probe = "off"\nweights = "off"\nrequire = []\n[[detector]]\nname = "tests_of:Largest"\n'
    path.write_text(base)
    lax = policies.read(path).policy
    assert decided(lax).decision == "ACCEPT"
    assert [one.test for one in decided(lax).detections][-1] == "largest"
    path.write_text(base + "threshold = 1e-9\n")
    strict = policies.read(path).policy
    assert decided(strict).decision == "REJECT"
    assert "a weight is large" in str(decided(strict))
    training = LocalTraining()
    digests = [policies.digest(one, training, Scale()) for one in (strict, lax)]
    assert digests[0] != digests[1]
    policies.write(folder / "again.toml", policies.Settings(strict), [])
    assert policies.read(folder / "again.toml").policy == strict
    path.write_text(base + base[base.index("[[") :])
    assert list(policies.read(path).policy.tests(training))[-2:] == ["Largest", "Largest-2"]


@pytest.mark.parametrize("name", ["Leaving", "Strange"])
def test_a_detector_that_breaks_has_fired(folder: Path, name: str) -> None:
    table = {"probe": "off", "require": [], "detector": [{"name": f"tests_of:{name}"}]}
    verdict = decided(policies.parse(table, folder=folder).policy)
    assert verdict.decision == "REJECT"
    assert not verdict.train
    assert "the test could not be made" in str(verdict)


def test_an_offered_detector_is_used_by_its_name(folder: Path) -> None:
    offered(folder, "their-package", ENTRIES)
    (one,) = policies.parse({"detector": [{"name": "largest", "threshold": 2}]}).policy.detector
    assert type(one).__name__ == "Largest"


@pytest.mark.parametrize(
    ("detector", "words"),
    [
        ([{"name": "probe"}], "'probe' is a key of the policy itself: probe = { … }"),
        ([{"name": "first-conv"}], "'first-conv' is a key of the policy itself"),
        ([{"threshold": 1}], 'expected name = "module:Class", got None'),
        ([{"name": "tests_of:Larger"}], "did you mean 'Largest'?"),
        ([{"name": "tests_of:Largest", "limit": 1}], "unknown key 'limit'"),
        ([{"name": "theirs:Grey"}], "has no inspect"),
        ([{"name": "larges"}], "unknown detector 'larges'"),
        ({"name": "tests_of:Largest"}, "detector: expected a list"),
        (["tests_of:Largest"], "expected a table"),
    ],
)
def test_what_is_no_detector_is_refused(folder: Path, detector: Any, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        policies.parse({"detector": detector}, folder=folder)
    assert words in str(refusal.value)


def test_a_detector_in_python_is_an_instance() -> None:
    with pytest.raises(ValueError, match="an instance of a dataclass"):
        Policy(detector=(object(),))  # type: ignore[arg-type]


def test_the_names_of_ours_are_no_errors() -> None:
    found = outside.find("defence", "clip", DEFENCES)
    assert (found.key, found.item, found.spec) == ("clip", DEFENCES["clip"], "")
    with pytest.raises(LeakGaugeError, match="did you mean 'clip'"):
        outside.find("defence", "clipp", DEFENCES)


# ---------------------------------------------------------------- metrics


METRIC = """
from leakgauge.types import Metric


def gap(guess, truth):
    "Largest difference."
    return (guess - truth).abs().flatten(1).amax(1)


GAP = Metric(gap, "largest gap", better="lower")
OTHER = gap
psnr = GAP
"""


def test_a_metric_is_named_by_its_code(folder: Path) -> None:
    (folder / "gaps.py").write_text(METRIC)
    audit = {"exact": False, "metrics": ["ssim", "gaps:GAP"], "limit": {"scores": {"GAP": 0.5}}}
    plan = planned(folder, [{"name": "dlg"}], audit=audit)
    assert list(plan.metrics) == ["psnr", "ssim", "GAP"]
    assert plan.metrics["GAP"].label == "largest gap"
    other = plan.fingerprint
    (folder / "gaps.py").write_text(METRIC + "# changed\n")
    assert planned(folder, [{"name": "dlg"}], audit=audit).fingerprint != other


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gaps:OTHER", "expected a Metric OTHER in gaps, got a function; known: GAP, psnr"),
        ("gaps:psnr", "'psnr' is a name of LeakGauge's own"),
        ("gapz", "unknown metric 'gapz'"),
    ],
)
def test_what_is_no_metric_is_refused(folder: Path, name: str, words: str) -> None:
    (folder / "gaps.py").write_text(METRIC)
    with pytest.raises(PlanError) as refusal:
        planned(folder, [{"name": "dlg"}], audit={"metrics": [name]})
    assert words in str(refusal.value)


# ---------------------------------------------------------------- the example package


EXAMPLE = Path(__file__).parents[1] / "examples" / "own-methods"


def command(folder: Path, *words: str, code: int, path: str = "") -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([path, *map(str, sys.path)]).strip(":")}
    run = "from leakgauge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", run, *words],
        cwd=folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_audited_without_being_installed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "*-audit"))
    words = command(folder, "audit", "plan.toml", "--out", "out", "--jobs", "2", code=1)
    assert "RelativeL1" in words
    appear(folder / "out", "RelativeL1", "RoundOff", "EDGES")
    shutil.rmtree(folder / "own_methods")  # a report needs none of it
    command(folder, "report", "out", code=0)
    appear(folder / "out", "RelativeL1", "RoundOff", "EDGES")


def test_the_example_is_audited_by_the_names_that_it_offers(tmp_path: Path) -> None:
    """As `pip install .` would put it there: the package, and its entry points."""
    target, folder = tmp_path / "target", tmp_path / "elsewhere"
    shutil.copytree(EXAMPLE / "own_methods", target / "own_methods")
    folder.mkdir()
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    lines = [f"[{group}]\n{name} = {spec}\n" for group in groups
             for name, spec in groups[group].items()]  # fmt: skip
    offered(target, project["name"], "".join(lines))
    text = (EXAMPLE / "plan.toml").read_text()
    for group in groups.values():
        for name, spec in group.items():
            assert spec in text
            text = text.replace(spec, name)
    (folder / "plan.toml").write_text(text.replace("[audit]", "[audit]\ncontrol = false"))
    words = " ".join(command(folder, "list", code=0, path=str(target)).split())
    for name, spec in {n: s for group in groups.values() for n, s in group.items()}.items():
        assert re.search(rf"\b{name} \w[^()]*\(from own-methods\)", words), spec
    command(folder, "audit", "plan.toml", "--out", "out", code=1, path=str(target))
    appear(folder / "out", "relative-l1", "round-off", "edges")


def appear(out: Path, attack: str, defence: str, metric: str) -> None:
    """In the result and in the reports that are made of it."""
    result = schema.load(out / "result.json")
    done = [trial for trial in result.trials if trial.status == "done"]
    assert {attack} <= {trial.attack for trial in done if trial.defence == defence}
    assert {one.name: one.label for one in result.metrics}[metric] == "edge error"
    assert all(trial.score and len(trial.score.scores[metric]) == 2 for trial in done
               if trial.kind == "trial")  # fmt: skip
    for report in ("report.html", "report.md"):
        words = (out / report).read_text(encoding="utf-8")
        assert attack in words
        assert defence in words
        assert "edge error" in words


@pytest.mark.parametrize(
    ("page", "file"),
    [("own-attack", "attack"), ("own-defence", "defence"), ("own-methods", "metric")],
)
def test_the_pages_show_the_files_of_the_example(page: str, file: str) -> None:
    text = (EXAMPLE / "own_methods" / f"{file}.py").read_text(encoding="utf-8")
    shown = EXAMPLE.parents[1] / "docs" / "howto" / f"{page}.md"
    assert text in shown.read_text(encoding="utf-8")


def test_the_parts_are_what_they_say() -> None:
    assert sorted(parts.__all__) == sorted(
        name for name, value in vars(parts).items()
        if not name.startswith("_") and not isinstance(value, type(parts))
    )  # fmt: skip
