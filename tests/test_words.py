"""Plain English: what a user reads has none of the turns that readers stumbled over, and the tables
that name methods name all of them."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS
from leakgauge.attacks._labels import LabelRule

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "examples").rglob("*.toml"),
    *(ROOT / "leakgauge").rglob("*.toml"),
    *(ROOT / "leakgauge").rglob("*.html"),
]
SOURCES = sorted((ROOT / "leakgauge").rglob("*.py"))

COUNTED = (
    "attack|batch|bin|channel|class|client|column|commit|epoch|file|guess|image|iteration|label|layer|"
    "method|metric|paper|parameter|pixel|position|record|round|row|run|sample|second|seed|side|"
    "stage|step|token|trial|unit|update"
)
AMOUNT = (
    "averages|batches|bits|classes|columns|CPU s|CPU seconds|CPU-s|entry|file|folder|images|"
    "iterations|label|numbers|pixels|records|rows|score|seconds|steps|sub-folder|value"
)
NUMBER = r"one|two|three|four|five|six|eight|ten|several|\d[\d ,.]*"
BANNED = {
    "per": re.compile(
        rf"\b(?:(?:one|once|twice|several)|(?:{NUMBER}) (?:more )?(?:\w+ )?(?:{AMOUNT})) "
        rf"an? (?:{COUNTED})\b"
    ),
    "because there is no": re.compile(r"\bfor want of\b"),
    "costs too much, slower": re.compile(r"\bdear(?:er|est)?\b"),
    "cannot be undone": re.compile(r"\bbeyond repair\b"),
    "unless you set": re.compile(r"\bunless you say\b"),
    "is not one": re.compile(r"(?<!there )\bis none\b"),
    "a common word": re.compile(
        r"\b(?:albeit|ere|fain|lest|naught|thereof|thither|whence)\b", re.I
    ),
}
"""What is not written, by what is written instead."""


def found(text: str) -> list[str]:
    """The banned turns in a text; lines may break anywhere within them."""
    flowing = " ".join(text.split())
    return [
        f"{match.group()!r}: write {plain!r}"
        for plain, pattern in BANNED.items()
        for match in pattern.finditer(flowing)
    ]


def strings(source: str) -> list[str]:
    """Every text in a module: messages, help and docstrings."""
    tree = ast.parse(source)
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_in_plain_english(page):
    assert found(page.read_text("utf-8")) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_messages_are_in_plain_english(source):
    assert [turn for text in strings(source.read_text("utf-8")) for turn in found(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "one sub-folder a class",
        "scores, one a sample",
        "drawn once\nan iteration",
        "5 seconds a trial",
        "64 images a client",
        "stopped for want of time",
        "too dear to run",
        "blurred beyond repair",
        "a leak that is none",
    ],
)
def test_the_old_turns_would_be_found(text):
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "one file per class",
        "once a model has arrived",
        "In one run a client trains",
        "there is none",
        "two images an attacker holds",
    ],
)
def test_ordinary_sentences_pass(text):
    assert found(text) == []


# Tables that name methods.


def table(page: str, header: str) -> dict[str, str]:
    """First column (every name in it) to second column of the table below this header."""
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    rows: dict[str, str] = {}
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        names, said = line.split("|")[1:3]
        rows |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), said.strip())
    return rows


@pytest.mark.parametrize("name", [*ATTACKS, *ACTIVE_ATTACKS])
def test_the_page_of_an_attack_says_what_it_needs(name):
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8")
    section = re.search(r"^## Needs\n(.*?)(^## |\Z)", page, re.MULTILINE | re.DOTALL)
    said = " ".join(section[1].split()).partition("Knowledge: ")[2]
    attack = (ATTACKS | ACTIVE_ATTACKS)[name]()
    assert set(re.findall(r"`(\w+)`", re.split(r"[;.]", said)[0])) == attack.needs
    options = {field.name for field in fields(attack)}
    assert ("with `labels =" in said) == ("labels" in options)
    assert ("with `statistics =" in said) == ("statistics" in options)


def test_the_label_rules_are_all_described():
    assert set(table("methods/labels.md", "| rule | source | applies to |")) == {
        *get_args(LabelRule)
    }


def test_the_tree_in_contributing_is_that_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    package = ROOT / "leakgauge"
    for path in package.iterdir():
        public = not path.name.startswith(("_", "."))
        if public and path.is_dir():
            assert f"leakgauge/{path.name}/" in text
        elif public and path.suffix == ".py":
            assert re.search(rf"\b{path.name}\b", text), path.name
    for named in re.findall(r"^leakgauge/(\S+)", text, re.MULTILINE):
        assert (package / named).exists(), named


def test_pages_name_only_benchmarks_that_exist():
    for page in PAGES:
        for named in re.findall(r"benchmarks/[\w.-]+\.(?:py|toml)", page.read_text("utf-8")):
            assert (ROOT / named).is_file(), f"{page.name}: {named}"
