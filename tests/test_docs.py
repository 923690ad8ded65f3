"""Every example in the documentation runs.

Python blocks of README.md and docs/ are executed, those of one file in one namespace, from top to
bottom, in an empty folder. TOML blocks with a [federation] are parsed as plans. A block is left out
only by a comment on the line before it that says why: <!-- not executed: reason -->
"""

from __future__ import annotations

import re
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from leakgauge import audit
from leakgauge.errors import PlanError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXCUSE = re.compile(r"<!-- not executed: \S.* -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it starts in, and whether it is excused."""

    language: str
    text: str
    line: int
    excused: bool


def blocks(page: str) -> list[Block]:
    found = []
    lines = iter(enumerate(page.splitlines(), start=1))
    before = ""
    for number, line in lines:
        fence = re.fullmatch(r"( *)(```+)(\w*)\s*", line)
        if fence:
            indent, ticks, language = fence.groups()
            inside = []
            for _, text in lines:
                if text.strip() == ticks:
                    break
                inside.append(text.removeprefix(indent))
            else:
                raise ValueError(f"the block in line {number} has no end")
            text = "\n".join(inside) + "\n"
            excused = EXCUSE.fullmatch(before.strip()) is not None
            found.append(Block(language, text, number + 1, excused))
        before = line
    return found


def execute(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the examples of a page in the current folder; how many there were."""
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # where dataclasses look for their names
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    ran = 0
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.excused:
            continue
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.text  # so that a traceback names the line
            exec(compile(source, str(path), "exec"), module.__dict__)
            ran += 1
        elif block.language == "toml":
            table = tomllib.loads(block.text)
            if "federation" in table:
                audit.parse(table, f"{path.name}:{block.line}", Path.cwd())
            ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(page, monkeypatch)


# The examiner examined.

FENCE = "```"


def page(tmp_path, *parts: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def fenced(language: str, text: str) -> str:
    return f"{FENCE}{language}\n{text}\n{FENCE}"


def test_a_block_that_raises_fails_and_names_its_line(tmp_path, monkeypatch):
    path = page(tmp_path, "# Title", "", fenced("python", "x = 1\n1 / 0"))
    with pytest.raises(ZeroDivisionError) as error:
        execute(path, monkeypatch)
    last = error.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (path, 5)


def test_blocks_of_a_page_share_their_names_in_order(tmp_path, monkeypatch):
    path = page(tmp_path, fenced("python", "x = 20"), "words", fenced("python", "assert x == 20"))
    assert execute(path, monkeypatch) == 2
    path = page(tmp_path, fenced("python", "assert x == 20"), fenced("python", "x = 20"))
    with pytest.raises(NameError):
        execute(path, monkeypatch)


def test_only_a_reason_on_the_line_before_excuses(tmp_path, monkeypatch):
    bad = fenced("python", "1 / 0")
    assert execute(page(tmp_path, "<!-- not executed: needs a GPU -->", bad), monkeypatch) == 0
    for excuse in ("<!-- not executed -->", "<!-- not executed: -->", "not executed: needs a GPU"):
        with pytest.raises(ZeroDivisionError):
            execute(page(tmp_path, excuse, bad), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        execute(page(tmp_path, "<!-- not executed: needs a GPU -->", "", bad), monkeypatch)


def test_an_indented_block_is_run_too(tmp_path, monkeypatch):
    path = page(tmp_path, "- item", "", "  ```python", "  if True:", "      1 / 0", "  ```")
    with pytest.raises(ZeroDivisionError):
        execute(path, monkeypatch)


def test_other_blocks_are_left_alone(tmp_path, monkeypatch):
    text = page(tmp_path, fenced("sh", "rm -rf x"), fenced("", "1 / 0"), fenced("text", "1 / 0"))
    assert execute(text, monkeypatch) == 0


def test_a_wrong_plan_fails(tmp_path, monkeypatch):
    good = '[federation]\nmodel = "mlp"\ndata = "digits"\n[[attack]]\nname = "analytic"'
    assert execute(page(tmp_path, fenced("toml", good)), monkeypatch) == 1
    with pytest.raises(PlanError, match=r"page\.md:2.*unknown key 'modle'"):
        execute(page(tmp_path, fenced("toml", good.replace("model", "modle"))), monkeypatch)
    assert execute(page(tmp_path, fenced("toml", "[tool]\nx = 1")), monkeypatch) == 1
    with pytest.raises(tomllib.TOMLDecodeError):
        execute(page(tmp_path, fenced("toml", "x = ")), monkeypatch)


def test_a_block_without_an_end_fails(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="line 1 has no end"):
        execute(page(tmp_path, "```python", "x = 1"), monkeypatch)
