"""LeakGauge as source text: who imports whom, a digest of what a module runs, and its commit."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import tokenize
from pathlib import Path

import leakgauge

PACKAGE = Path(leakgauge.__file__).resolve().parent
REPOSITORY = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(("leakgauge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(source: str, module: str) -> set[str]:
    """Full names of all modules that a source imports, also inside functions."""
    found = set()
    inside = FILES.get(module, Path()).name == "__init__.py"
    package = module if inside else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *([origin] if origin else [])])
            for alias in node.names:  # `from package import module` names a module
                name = f"{origin}.{alias.name}"
                found.add(name if name in FILES else origin)
    return found


def reached(module: str) -> list[str]:
    """The module and all of the package that it imports, directly or through others; not the
    packages that it merely lies in."""
    found, todo = {module}, [module]
    while todo:
        name = todo.pop()
        new = imports(FILES[name].read_text(encoding="utf-8"), name) & FILES.keys() - found
        found |= new
        todo += new
    return sorted(found)


@functools.cache
def digest(module: str) -> str:
    """Changes when the code of the module changes, or that of anything it reaches. It is read once
    for each process, so that an edit while a process runs is not taken for the code that it runs.
    """
    code = [f"{name}\n{bare(FILES[name].read_text(encoding='utf-8'))}" for name in reached(module)]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def bare(source: str) -> str:
    """A source without docstrings, comments and blank lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=last):
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def commit() -> str:
    """The commit of the code that runs; "… with changes" where files of the package or of the
    benchmarks differ from it, "unknown" outside a checkout of this repository."""
    if PACKAGE.parent != REPOSITORY or _git("rev-parse", "--show-toplevel") != str(REPOSITORY):
        return "unknown"
    files = ("leakgauge", "benchmarks", ":(exclude)benchmarks/board")  # there are the runs
    changed = _git("status", "--porcelain", "--", *files)
    head = _git("rev-parse", "HEAD")
    if not head or changed is None:
        return "unknown"
    return f"{head} with changes" if changed else head


def _git(*words: str) -> str | None:
    """What git says; None where there is no git, or it fails."""
    try:
        said = subprocess.run(
            ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()
