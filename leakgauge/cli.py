"""The command line: thin verbs over the library.

Exit codes: 0 done, 2 the plan or another input is wrong, 3 a trial failed, 130 interrupted.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
import warnings
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from leakgauge import audit as audits
from leakgauge import data
from leakgauge._version import __version__
from leakgauge.attacks import ATTACKS, LABEL_RULES
from leakgauge.audit.run import Case
from leakgauge.config import choose
from leakgauge.defences import DEFENCES
from leakgauge.errors import LeakGaugeError, PlanError
from leakgauge.fl import PARTITIONS
from leakgauge.metrics import METRICS, load_lpips
from leakgauge.models import INITS, MODELS

app = typer.Typer(
    help="How much of a client's private data does your federation's update give away?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets on disk.", no_args_is_help=True)
app.add_typer(data_app, name="data")
console = Console(emoji=False, highlight=False)  # paths and names are printed as they are
errors = Console(emoji=False, highlight=False, stderr=True)

LISTS: dict[str, dict[str, Any]] = {
    "attacks": dict(ATTACKS),
    "defences": dict(DEFENCES),
    "models": dict(MODELS),
    "initialisations": dict(INITS),
    "data": dict(data.DATASETS),
    "partitions": dict(PARTITIONS),
    "metrics": {**METRICS, "lpips": load_lpips},
    "labels": dict(LABEL_RULES),
}
FILLED = {"shape", "classes", "model", "rng", "guess", "truth", "weights", "head"}
"""Arguments of theirs that the audit fills in: no options of a plan."""


def main() -> None:
    """Run the command line; errors made by the input are one message and exit code 2."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # what libraries say to programmers
    try:
        app()
    except LeakGaugeError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"leakgauge {__version__}")
        raise typer.Exit


@app.command()
def audit(
    plan: Annotated[Path | None, typer.Argument(help="A plan (TOML).")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Audit an example on built-in photographs instead.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result (default: leakgauge-audit/NAME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the audit in that folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the audit in that folder.")
    ] = False,
) -> None:
    """Attack your own federation as PLAN (a TOML file) describes it, and measure what leaks.

    `module:callable` in a plan is code, and it is run: audit only plans you trust.
    """
    if (plan is None) != demo:
        raise PlanError("give either the path of a plan or --demo")
    if resume and overwrite:
        raise PlanError("give either --resume or --overwrite")
    if plan is None:
        text = resources.files("leakgauge.audit").joinpath("demo.toml").read_text("utf-8")
        checked = audits.parse(tomllib.loads(text), "demo", Path.cwd())
    else:
        checked = audits.read(plan)
    store = audits.Store(out or Path("leakgauge-audit") / checked.name)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        try:
            result = audits.run(
                checked, store, resume=resume, overwrite=overwrite, watch=_watch(progress)
            )
        except KeyboardInterrupt:
            progress.stop()
            errors.print("interrupted: the same command with --resume continues")
            raise typer.Exit(130) from None
    console.print(summary_table(result))
    for note in _notes(result):
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    console.print(f"result    {escape(str(store.result))}", soft_wrap=True)
    console.print(f"pictures  {escape(str(store.images))}", soft_wrap=True)
    failed = sum(trial["status"] == "failed" for trial in result["trials"])
    if failed:
        errors.print(
            f"[bold red]error:[/] {failed} of {len(result['trials'])} trials failed: their errors "
            "are in the result; --resume tries them again",
            soft_wrap=True,
        )
        raise typer.Exit(3)


def _watch(progress: Progress) -> audits.Watch:
    whole = progress.add_task("trials", total=None, note="")
    part = progress.add_task("", total=None, visible=False, note="")

    def begin(case: Case, index: int, total: int) -> None:
        nonlocal part
        progress.update(whole, total=total, completed=index)
        progress.remove_task(part)  # a reset would keep the total of the last attack
        part = progress.add_task(case.attack, total=None, note="")

    def train(done: int, total: int) -> None:
        progress.update(part, completed=done, total=total, note="honest rounds")

    def attack(done: int, total: int, objective: float) -> None:
        progress.update(part, completed=done, total=total, note=f"{objective:.2e}")

    def end(case: Case, trial: dict[str, Any]) -> None:
        progress.advance(whole)

    return audits.Watch(begin, train, attack, end)


def summary_table(result: dict[str, Any]) -> Table:
    """One row for each attack, below its stage and defence: 80 columns wide."""
    rows = result["summary"]
    counts = [row["records"] for row in rows if "scores" in row] or [0]
    images = " to ".join(map(str, sorted({min(counts), max(counts)})))
    table = Table(
        title=f"What leaks: {escape(result['name'])}",
        caption=(
            f"PSNR, SSIM: median over {images} images (quartiles); baseline: of a mean image.\n"
            "found: share told apart from other images; labels: share found (by guessing).\n"
            "risk: the median PSNR in words, – where it does not exceed the baseline."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("attack", overflow="fold")
    for name in ("PSNR dB", "baseline", "SSIM", "found", "labels", "risk"):
        table.add_column(name, justify="right", no_wrap=True)
    stages = len({row["round"] for row in rows}) > 1
    section = None
    for row in rows:
        if (row["round"], row["defence"]) != section:
            section = row["round"], row["defence"]
            after = f"round {row['round']}, " if stages else ""
            table.add_section()
            table.add_row(f"[bold]{after}{_defended(row['defence'])}[/]")
        table.add_row(f"  {row['attack']}", *_cells(row))
    return table


def _defended(defence: str) -> str:
    return "no defence" if defence == "none" else defence


def _cells(row: dict[str, Any]) -> list[str]:
    if "scores" not in row:
        return ["–"] * 5 + ["failed" if row["failed"] else "n/a"]
    scores, labels = row["scores"], row["labels"]
    psnr, ssim = scores.get("psnr"), scores.get("ssim")
    decibels = baseline = risk = "–"
    if psnr:
        low, high = psnr["quartiles"]
        limit = row["baselines"]["mean image"]["psnr"]
        decibels, baseline = f"{psnr['median']:.1f} ({low:.0f}–{high:.0f})", f"{limit:.1f}"
        risk = row["risk"]["median"] if psnr["median"] > limit else "–"
    return [
        decibels,
        baseline,
        f"{ssim['median']:.2f}" if ssim else "–",
        f"{scores['identified']['mean']:.0%}",
        f"{labels['accuracy']:.0%} ({labels['random']:.0%})" if labels else "–",
        risk,
    ]


def _notes(result: dict[str, Any], most: int = 8) -> list[str]:
    """What a reader of the table must know: reasons, errors and the attacks' own notes."""
    notes: dict[str, int] = {}
    for trial in result["trials"]:
        error = [trial["error"]] if trial["error"] else []
        for note in [*error, *trial.get("notes", [])]:
            key = f"{trial['attack']}: {note}"
            notes[key] = notes.get(key, 0) + 1
    lines = [note + (f" ({count} trials)" if count > 1 else "") for note, count in notes.items()]
    more = [f"{len(lines) - most} more notes are in the result"] if len(lines) > most else []
    return lines[:most] + more


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help=", ".join(LISTS))] = None,
) -> None:
    """What a plan can name, with the options it takes and their defaults.

    KIND is one of: attacks, defences, models, initialisations, data, partitions, metrics, labels.
    """
    kinds = LISTS if kind is None else {kind: choose(LISTS, kind, "list")}
    for name, items in kinds.items():
        table = Table(title=name, title_justify="left", show_header=False, box=None)
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for key, item in items.items():
            about, options = escape(_about(item)), escape(", ".join(_options(item)))
            table.add_row(key, about + ("\n" if about and options else "") + f"[dim]{options}[/]")
        console.print(table)
        console.print()


def _about(item: Any) -> str:
    """The first paragraph of what its author wrote about it."""
    if isinstance(item, partial):
        item = item.func
    text = item.__doc__ or ""
    if text.startswith(f"{item.__name__}("):  # a dataclass without words has its signature there
        text = sys.modules[item.__module__].__doc__ or ""
    return " ".join(text.split("\n\n")[0].split())


def _options(item: Callable[..., Any]) -> list[str]:
    """The keys that a plan may set, with their defaults as TOML writes them."""
    options = []
    for name, parameter in inspect.signature(item).parameters.items():
        if parameter.default in (parameter.empty, None):
            options += [name] if name not in FILLED else []
        else:
            options.append(f"{name}={_toml(parameter.default)}")
    return options


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[Literal["cifar10", "cifar100", "mnist", "fashion-mnist"], typer.Argument()],
    into: Annotated[
        Path | None, typer.Option(help="Folder (default: LEAKGAUGE_DATA, else in ~/.cache).")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Another address of the same files.")] = None,
) -> None:
    """Download a public data set from its home, and check its sum.

    Without a network it says which files to place where.
    """
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=None)
        path = data.fetch.fetch(
            name,
            into or data.data_root(),
            source=source,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(f"{name} is in {escape(str(path))}", soft_wrap=True)


if __name__ == "__main__":
    main()
