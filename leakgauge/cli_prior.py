"""`leakgauge prior`: train what pictures look like on public records, and look at it.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leakgauge.cli_guard import Output
from leakgauge.errors import PlanError

if TYPE_CHECKING:
    from leakgauge.types import Dataset, Kept

app = typer.Typer(
    help="Generative priors: what pictures look like, learned from public records.",
    no_args_is_help=True,
)
console = Output()
errors = Output(stderr=True)
TRIED = 8  # steps after which the whole is forecast


@app.command()
def train(
    data: Annotated[
        str,
        typer.Option(help="Public records: a folder of class folders, a .npz file, or a name."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the prior.")],
    kind: Annotated[
        str, typer.Option(help="Of which kind: leakgauge list priors names them.")
    ] = "ddpm",
    split: Annotated[
        Literal["train", "test"] | None,
        typer.Option(help="Which part of a data set that has parts (default: train)."),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of the pictures of a folder or of photos.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="1 makes the pictures of a folder grey (default: 3).")
    ] = None,
    records: Annotated[
        int | None, typer.Option(min=1, help="Take so many records, drawn by the seed.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the training (default: the kind's own).")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Another option of the kind, as in --option conditional=true."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="All chance follows from it.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the prior in that folder.")
    ] = False,
) -> None:
    """Train a prior, for attacks and restorers whose option `prior` names its folder.

    Says after a moment what it will cost. Stopped or killed, the same command goes on from the last
    checkpoint, to the same weights. Beside the prior it writes samples.png: what the prior shows
    without any update. Train on records that are no client's: a plan refuses a prior that was
    trained on one of its own.
    """
    from leakgauge.audit import prior

    asked: dict[str, Any] = {} if steps is None else {"steps": steps}
    asked |= dict(_option(text) for text in option or ())
    given = {"split": split, "size": size, "channels": channels}
    loaded = _load(data, {key: value for key, value in given.items() if value is not None})
    course = prior.Course(kind, asked, loaded, records, seed)
    began, cpu, first = time.monotonic(), time.process_time(), -1
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task(kind, total=None, note="")

        def step(done: int, total: int, objective: float) -> None:
            nonlocal first, cpu
            if first < 0:
                first, cpu = done, time.process_time()
            elif done == first + TRIED:
                each = (time.process_time() - cpu) / TRIED
                progress.console.print(
                    f"{total - first:,} steps, about {each * (total - first) / 60:.1f} CPU minutes"
                )
            progress.update(task, completed=done, total=total, note=f"{objective:.3g}")

        try:
            kept, there = prior.train(course, out, overwrite=overwrite, progress=step)
        except KeyboardInterrupt:
            errors.print("interrupted: the same command goes on from the last checkpoint")
            raise typer.Exit(130) from None
    if there:
        console.print(f"nothing to do: this prior is in {escape(str(out))}", soft_wrap=True)
    else:
        took = f"{kept.facts.get('cpu_seconds', 0.0) / 60:.1f} CPU minutes in all"
        wall = f"{(time.monotonic() - began) / 60:.1f} minutes now"
        console.print(f"trained in {took}, {wall}")
    _tell(kept, out)
    console.print(f"samples   {escape(str(out / prior.SHEET))}", soft_wrap=True)
    console.print(f'use it as prior = "{escape(str(out))}" in a plan', soft_wrap=True)


@app.command()
def show(
    prior: Annotated[str, typer.Argument(help="A prior's folder, or a name on the hub.")],
    sheet: Annotated[
        Path | None, typer.Option(help="Where to draw samples (default: samples.png in it).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=512, help="How many samples.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Samples follow from it.")] = 0,
) -> None:
    """Say what a prior is and was trained on, and draw what it shows without any update.

    A diffusers checkpoint is a prior, too: nobody can check what that was trained on.
    """
    from leakgauge import priors
    from leakgauge.audit import prior as audits
    from leakgauge.files import write_atomic

    kept = priors.load(prior)
    if sheet is None and "foreign" in kept.facts:
        sheet = Path(audits.SHEET)  # nothing is written into what is not ours
    sheet = sheet or priors.located(prior) / audits.SHEET
    _tell(kept, Path(prior))
    write_atomic(sheet, audits.sampled(kept, seed, count))
    console.print(f"samples   {escape(str(sheet))}", soft_wrap=True)


def _tell(kept: Kept, where: Path) -> None:
    facts = kept.facts
    shape = " × ".join(map(str, facts["shape"]))
    learned = f"{facts['records']:,} records of {facts['data']}"
    if "foreign" in facts:
        learned = "records that nobody here can check"
    lines = {
        "prior": str(where),
        "kind": f"{facts['kind']}, pictures of {shape}",
        "learned": learned,
    }
    if "parameters" in facts:
        lines["size"] = f"{facts['parameters']:,} parameters"
    if "score" in facts:
        lines["score"] = (
            f"{facts['score']:.2f} dB on records held out, after {facts['steps']:,} steps"
        )
    for key, words in lines.items():
        console.print(f"{key:<9} {escape(words)}", soft_wrap=True)


def _option(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as TOML writes it; a bare word is text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise PlanError(f"--option {text!r}: expected KEY=VALUE, as in conditional=true")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _load(data: str, options: dict[str, Any]) -> Dataset:
    from leakgauge import data as datasets

    if Path(data).expanduser().is_dir():
        return datasets.load("folder", path=data, **options)
    if data.endswith(".npz"):
        return datasets.load("npz", path=data, **options)
    return datasets.load(data, **options)
