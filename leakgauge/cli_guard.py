"""`leakgauge guard`: the guard for operators.

What a command needs is imported when it runs, so that help is there at once.

Exit codes of `check` and `remember`: 0 the policy lets the client train on this model, 1 EXPOSED
and refused, 4 INCONCLUSIVE (what the policy requires is missing), 5 REJECT, 2 the command is wrong
or something of your own is (no such file, unknown option, unusable records, a damaged store).
A file of weights that cannot be read safely is no mistake of the operator's: it is REJECT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakgauge.config import imported
from leakgauge.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from torch import nn

    from leakgauge.guard import Guard, Verdict
    from leakgauge.types import Batch, Dataset

app = typer.Typer(
    help="Is a received model fit to be trained on? Before training, on the client.",
    no_args_is_help=True,
)


class Output(Console):
    """Paths and names are printed as they are. Whoever stops reading (`| head`) makes no error of
    the plan: rich would end the program with 1."""

    def __init__(self, *, stderr: bool = False):
        super().__init__(emoji=False, highlight=False, stderr=stderr)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = Output()
aside = Output(stderr=True)  # where --json - leaves stdout alone
CODES = {"EXPOSED": 1, "INCONCLUSIVE": 4, "REJECT": 5}
UNSAID = 64  # records of a round, where the policy has no table [training]

Make = Annotated[
    str, typer.Option(help="Your own network, module:callable without arguments. It is run.")
]
Data = Annotated[
    str | None,
    typer.Option(help="Your own records: a folder of class folders, a .npz file, or a name."),
]
Size = Annotated[int, typer.Option(min=1, help="Side of the images of a folder.")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Your policy (TOML).")]
Missed = Annotated[
    int, typer.Option(min=1, help="Rounds since the last remembered one, by your own count.")
]
First = Annotated[
    bool, typer.Option("--first", help="You have accepted no round of this training before.")
]
Restart = Annotated[
    str | None,
    typer.Option(
        help="Why this model may differ from those you remember (a restored checkpoint, pruning, a "
        "lost store). Tests against memory are excused, and the reason is logged."
    ),
]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the verdict to this file; - is stdout.")
]


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="The received weights: .safetensors, .pt, .pth.")],
    make: Make,
    data: Data = None,
    size: Size = 32,
    policy: PolicyFile = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder that remembers accepted rounds.")
    ] = None,
    missed: Missed = 1,
    first: First = False,
    restart: Restart = None,
    out: Json = None,
) -> None:
    """Test a received model. Nothing is changed, and nothing is remembered.

    Exit codes: 0 train on it, 1 EXPOSED (an update would show single records; your policy refuses
    that), 4 INCONCLUSIVE (what your policy requires is missing), 5 REJECT, 2 the command is wrong.
    """
    guard, batch = _guard(make, policy, store, data, size)
    verdict = _verdict(guard, model, batch, missed, first, restart)
    _tell(verdict, out)


@app.command()
def remember(
    model: Annotated[Path, typer.Argument(help="The received weights that you trained on.")],
    sent: Annotated[Path, typer.Argument(help="The weights that you send back.")],
    make: Make,
    store: Annotated[Path, typer.Option(help="Folder that remembers accepted rounds.")],
    data: Data = None,
    size: Size = 32,
    policy: PolicyFile = None,
    missed: Missed = 1,
    first: First = False,
    restart: Restart = None,
    out: Json = None,
) -> None:
    """After training: test the model once more and remember the round, if the policy accepts it.

    Exit codes as of `check`; only with 0 was anything remembered.
    """
    from leakgauge.files import read_tensors

    guard, batch = _guard(make, policy, store, data, size)
    back = read_tensors(sent)
    verdict = _verdict(guard, model, batch, missed, first, restart)
    if verdict.train:
        guard.remember(verdict, back)
    _tell(verdict, out)


@app.command()
def calibrate(
    make: Make,
    data: Annotated[str, typer.Option(help="Your own records: folder, .npz file, or a name.")],
    out: Annotated[Path, typer.Option(help="Where to write the policy.")],
    size: Size = 32,
    policy: PolicyFile = None,
) -> None:
    """Raise thresholds where your own honest training needs it, and write the policy.

    It needs the table [training] of a policy: what your local training does.
    """
    from leakgauge.guard import calibrate as calibrated
    from leakgauge.guard import policy as policies

    if out.exists():
        raise PlanError(f"{out} is there already: name another file")
    settings = policies.read(policy) if policy else policies.Settings()
    if settings.training is None:
        raise PlanError(
            "calibration trains as you do: give --policy with a table [training] (lr, batch_size, "
            "steps, …)"
        )
    new, said = calibrated(
        _make(make), _load(data, size), settings.training, settings.policy, settings.record
    )
    notes = said or ["no threshold had to be raised"]
    policies.write(out, replace(settings, policy=new), notes)
    for note in notes:
        console.print(escape(note), soft_wrap=True)
    console.print(f"wrote {escape(str(out))}", soft_wrap=True)


def _guard(
    make: str, policy: Path | None, store: Path | None, data: str | None, size: int
) -> tuple[Guard, Batch | None]:
    from leakgauge.guard import Guard
    from leakgauge.guard import policy as policies
    from leakgauge.types import Batch, LocalTraining

    settings = policies.read(policy) if policy else policies.Settings()
    batch = None
    if data is not None:
        loaded = _load(data, size)
        batch = Batch(loaded.inputs, loaded.labels)
    training = settings.training
    if training is None:
        training = LocalTraining(batch_size=min(UNSAID, len(batch)) if batch else UNSAID)
        aside.print(
            "[yellow]note:[/] the policy has no table \\[training]: one step of "
            f"{training.batch_size} records is probed, without normalisation.",
            soft_wrap=True,
        )
    made = Guard(_make(make), training, scale=settings.record, policy=settings.policy, store=store)
    return made, batch


def _make(spec: str) -> Callable[[], nn.Module]:
    """The operator's own code, from the folder they stand in. The guard tells what is wrong with
    what it builds."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    make: Callable[[], nn.Module] = imported(spec, "--make")
    return make


def _load(data: str, size: int) -> Dataset:
    from leakgauge import data as datasets

    if Path(data).is_dir():
        return datasets.load("folder", path=data, size=size)
    if data.endswith(".npz"):
        return datasets.load("npz", path=data)
    return datasets.load(data)


def _verdict(
    guard: Guard,
    path: Path,
    batch: Batch | None,
    missed: int,
    first: bool,
    restart: str | None,
) -> Verdict:
    """The verdict on a file. What cannot be read safely goes no further."""
    from leakgauge.files import read_tensors
    from leakgauge.guard import Verdict
    from leakgauge.guard import policy as policies
    from leakgauge.types import Detection

    if not path.is_file():
        raise PlanError(f"there is no model at {path}: check the path")
    try:
        state = read_tensors(path, guard.largest)
    except CheckpointError as error:
        unread = Detection("file", 1.0, 0.0, "reject", str(error))
        verdict = Verdict("REJECT", False, (unread,), {"everything else": "nothing was read"})
        return replace(verdict, policy=policies.digest(guard.policy, guard.training, guard.scale))
    return guard.check(state, batch, missed=missed, first=first, restart=restart)


def _tell(verdict: Verdict, out: str | None) -> NoReturn:
    """Print the verdict, write it down if asked, and end with its exit code."""
    from leakgauge.detectors import fires
    from leakgauge.files import json_text, write_json

    if out not in (None, "-"):
        write_json(Path(str(out)), verdict.as_dict())
    page = aside if out == "-" else console
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("test", "score", "threshold", "", "tensor"):
        table.add_column(name, justify="right" if name in ("score", "threshold") else "left")
    for one in verdict.detections:
        mark = f"[bold red]{one.means}[/]" if fires(one) else "[green]passed[/]"
        table.add_row(
            one.test,
            f"{one.score:.3g}",
            f"{one.threshold:.3g}",
            mark,
            _shown(one.tensor or "")[:60],
        )
    page.print(table)
    for name, reason in verdict.untested.items():
        page.print(f"[yellow]not tested:[/] {escape(name)}: {escape(reason)}", soft_wrap=True)
    if verdict.exposure:
        page.print(f"self-audit: {escape(verdict.exposure)}", soft_wrap=True)
    if verdict.override:
        names = ", ".join(verdict.excused) or "no test"
        page.print(f"[yellow]restart:[/] {_shown(verdict.override)} (excused: {names})")
    page.print(f"[bold]{_shown(str(verdict))}[/]", soft_wrap=True)
    if out == "-":
        print(json_text(verdict.as_dict()))
    raise typer.Exit(0 if verdict.train else CODES[verdict.decision])


def _shown(text: str) -> str:
    """Names come from the server: they may not speak to the terminal."""
    return escape("".join(c if c.isprintable() else "·" for c in text))
