"""What is installed: the pinned versions, the files of the package, one version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import Distribution

import leakgauge
from leakgauge._version import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "leakgauge"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {
    f"{group}: {text}": Requirement(text)
    for group, texts in {
        "package": PROJECT["dependencies"],
        **PROJECT["optional-dependencies"],
    }.items()
    for text in texts
    if Requirement(text).name != PROJECT["name"]  # an extra that holds others
}
IMPORTED_AS = {
    "fpdf2": "fpdf",
    "pillow": "PIL",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
    "click": "typer",
}  # click is bounded for typer


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, equals, number = line.partition("==")
            assert equals, f"constraints.txt: {line!r} is not pinned with =="
            assert canonicalize_name(name) == name, f"constraints.txt: write {name!r} in lower case"
            assert name not in found, f"constraints.txt names {name} twice"
            found[name] = Version(number)
    return found


@pytest.fixture(scope="module")
def wheel():
    """The distribution as setuptools would build it, from pyproject.toml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        distribution = Distribution({"script_name": "setup.py"})
        distribution.parse_config_files()
        build = distribution.get_command_obj("build_py")
        build.ensure_finalized()
        modules = {Path(file).resolve() for _, _, file in build.find_all_modules()}
        data = {
            (Path(folder) / name).resolve()
            for _, folder, _, names in build.data_files
            for name in names
        }
        yield distribution, modules, data


def test_torch_is_pinned_exactly():
    pin = pins()["torch"]
    assert pin.local is None  # a build such as +cpu is a matter of the index
    assert not pin.is_prerelease


@pytest.mark.parametrize("requirement", REQUIREMENTS.values(), ids=REQUIREMENTS)
def test_every_requirement_of_every_extra_is_pinned_to_a_version_it_allows(requirement):
    pinned = pins()
    name = canonicalize_name(requirement.name)
    assert name in pinned, f"constraints.txt does not pin {name}"
    assert requirement.specifier.contains(pinned[name], prereleases=True)


@pytest.mark.parametrize("key", [key for key in REQUIREMENTS if not key.startswith("dev: ")])
def test_every_requirement_has_code_that_imports_it(key):
    """What nothing imports leaves pyproject.toml until its code exists."""
    name = REQUIREMENTS[key].name
    module = re.escape(IMPORTED_AS.get(name, name))
    use = re.compile(
        rf"^\s*(?:import|from) {module}\b|optional\(\"{module}\b|\"{module}\",? ", re.M
    )
    assert any(use.search(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py"))


def test_the_wheel_holds_every_module(wheel):
    _, modules, _ = wheel
    assert modules == {path.resolve() for path in PACKAGE.rglob("*.py")}


def test_the_wheel_holds_the_other_files_of_the_package(wheel):
    _, _, data = wheel
    wanted = {
        path.resolve()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.suffix != ".py"
    }
    assert {PACKAGE / "py.typed", PACKAGE / "audit" / "demo.toml"} <= wanted
    assert data == wanted, "say in pyproject.toml's package-data what belongs to the package"


def test_the_command_is_installed(wheel):
    distribution, _, _ = wheel
    assert distribution.entry_points["console_scripts"] == ["leakgauge = leakgauge.cli:main"]
    assert callable(__import__("leakgauge.cli", fromlist=["main"]).main)


def test_the_version_is_written_once(wheel):
    distribution, _, _ = wheel
    assert leakgauge.__version__ == __version__ == distribution.get_version()
    assert Version(__version__)
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    written = [
        path.relative_to(ROOT)
        for path in [*PACKAGE.rglob("*.py"), ROOT / "pyproject.toml"]
        if re.search(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])", path.read_text("utf-8"))
    ]
    assert written == [Path("leakgauge/_version.py")]
