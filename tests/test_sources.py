"""What the board notes of the code that it runs: a digest by the import graph, and the commit."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import sources

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

PACKAGE = {
    "leakgauge/__init__.py": "from leakgauge import other",
    "leakgauge/attacks/__init__.py": "from leakgauge.attacks import dlg, loki",
    "leakgauge/attacks/dlg.py": "from ._loop import run\nimport torch\n",
    "leakgauge/attacks/_loop.py": "def run():\n    from leakgauge import tensors\n    return 1\n",
    "leakgauge/attacks/loki.py": "from leakgauge.attacks import dlg",
    "leakgauge/tensors.py": "SIZE = 1",
    "leakgauge/other.py": "SIZE = 2",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small package, and nothing read of it yet."""
    files = {}
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[name[:-3].replace("/", ".").removesuffix(".__init__")] = path
    monkeypatch.setattr(sources, "FILES", files)
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "leakgauge")
    monkeypatch.setattr(sources, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sources, "digest", sources.digest.__wrapped__)
    monkeypatch.setattr(sources, "commit", sources.commit.__wrapped__)
    return tmp_path


def test_a_module_reaches_what_it_imports_and_not_the_package_it_lies_in(tree):
    shared = ["leakgauge.attacks._loop", "leakgauge.attacks.dlg", "leakgauge.tensors"]
    assert sources.reached("leakgauge.attacks.dlg") == shared
    assert set(sources.reached("leakgauge.attacks.loki")) > set(shared)


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("tensors.py", "SIZE = 3", False),
        ("attacks/_loop.py", "def run():\n    return 1\n", False),
        ("attacks/loki.py", "SIZE = 3", True),
        ("other.py", "SIZE = 3", True),
        ("tensors.py", '"""Sizes.\n\nOf all kinds."""\n\n\nSIZE = 1  # one\n"""A size."""\n', True),
        ("tensors.py", 'SIZE = 1\nNAME = "# no comment"\n', False),
    ],
)
def test_a_digest_follows_the_code_that_is_reached_and_nothing_else(tree, name, text, same):
    before = sources.digest("leakgauge.attacks.dlg")
    (tree / "leakgauge" / name).write_text(text)
    assert (sources.digest("leakgauge.attacks.dlg") == before) is same


def test_strings_that_hold_a_hash_are_kept():
    assert sources.bare('a = "# kept"  # gone\n\n') == 'a = "# kept"'
    assert sources.bare('def f():\n    """Gone."""\n    return """\nkept"""') == (
        'def f():\n    return """\nkept"""'
    )


def git(tree, *words):
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *settings, *words], cwd=tree, check=True, capture_output=True, text=True
    ).stdout.strip()


@needs_git
def test_the_commit_of_a_clean_and_of_a_changed_tree(tree):
    git(tree, "init", "-q")
    assert sources.commit() == "unknown"  # nothing was committed yet
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "all")
    head = git(tree, "rev-parse", "HEAD")
    (tree / "benchmarks" / "board").mkdir(parents=True)
    (tree / "benchmarks" / "board" / "row.jsonl").write_text("{}")  # a run is no change of code
    (tree / "docs.md").write_text("")
    assert sources.commit() == head
    (tree / "benchmarks" / "new.py").write_text("")
    assert sources.commit() == f"{head} with changes"
    (tree / "benchmarks" / "new.py").unlink()
    (tree / "leakgauge" / "other.py").write_text("SIZE = 3")
    assert sources.commit() == f"{head} with changes"


@needs_git
def test_a_commit_that_is_not_of_this_code_is_unknown(tree, monkeypatch):
    assert sources.commit() == "unknown"  # no repository
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "all")
    monkeypatch.setattr(
        sources, "PACKAGE", tree / "site-packages" / "leakgauge"
    )  # an installed one
    assert sources.commit() == "unknown"
    inner = tree / "unpacked"
    inner.mkdir()
    monkeypatch.setattr(sources, "PACKAGE", inner / "leakgauge")
    monkeypatch.setattr(sources, "REPOSITORY", inner)
    assert sources.commit() == "unknown"  # inside a repository of something else


def test_without_git_the_commit_is_unknown(tree, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert sources.commit() == "unknown"
