"""The command line: thin verbs over the library.

What a verb needs is imported when it runs: PyTorch alone takes seconds, and neither help nor a list
needs it.

Exit codes: 0 below the limit, 1 above it, 2 the plan or another input is wrong, 3 a trial failed,
4 inconclusive, 5 a received model was rejected, 70 an error that LeakGauge did not expect, 130
interrupted, 141 the reader of its output is gone.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer
from rich import box
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from leakgauge import catalogue
from leakgauge._version import __version__
from leakgauge.cli_guard import Output
from leakgauge.cli_guard import app as guard_app
from leakgauge.cli_prior import app as prior_app
from leakgauge.config import choose, no_exit, toml
from leakgauge.errors import LeakGaugeError, NotApplicable, PlanError

if TYPE_CHECKING:
    from leakgauge import audit as audits
    from leakgauge.audit import Plan
    from leakgauge.audit import protocol as protocols
    from leakgauge.audit.bench import Bench
    from leakgauge.audit.cases import Work
    from leakgauge.audit.engine import Engine
    from leakgauge.audit.results import Result, Trained, Trial

app = typer.Typer(
    help="How much of a client's private data does your federation's update give away?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets on disk.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(guard_app, name="guard")
app.add_typer(prior_app, name="prior")
console = Output()
errors = Output(stderr=True)

FILLED = {"shape", "classes", "model", "rng", "guess", "truth", "weights", "head"}
"""Arguments of theirs that the audit fills in: no options of a plan."""


def main() -> None:
    """Run the command line; errors made by the input are one message and exit code 2. Nothing that
    goes wrong by itself ends with 0 or 1, which are verdicts."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # what libraries say to programmers
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know fewer characters than we
    try:
        with no_exit():
            code = app(standalone_mode=False)
    except LeakGaugeError as error:
        code = _say(str(error), 2)
    except click.ClickException as error:  # the command itself is not well formed
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = _say("interrupted", 130)
    except BrokenPipeError:  # whoever read the output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nor may flushing it complain
        code = 141
    except Exception as error:
        code = _say(_unexpected(error), 70)
    sys.exit(code or 0)


def _say(words: str, code: int) -> int:
    errors.print(f"[bold red]error:[/] {escape(words)}", soft_wrap=True)
    return code


def _unexpected(error: Exception) -> str:
    """An error that LeakGauge did not expect, in words; its traceback goes to a file, or to the
    terminal with --debug."""
    what = f"LeakGauge did not expect this error: {type(error).__name__}: {error}."
    ask = "Please report it, with the plan if you can, where you got LeakGauge from"
    if "--debug" in sys.argv[1:]:
        traceback.print_exception(error)
        return f"{what} {ask}."
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", errors="replace", prefix="leakgauge-", suffix=".log", delete=False
    ) as log:
        traceback.print_exception(error, file=log)
    return f"{what} {ask}, with the details in {log.name} (or run `leakgauge --debug …`)."


@app.callback(invoke_without_command=True)
def version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an unexpected error.")
    ] = False,
) -> None:
    if version:
        console.print(f"leakgauge {__version__}")
        raise typer.Exit


Images = Literal["show", "blur", "hide"]


@app.command()
def audit(
    plan: Annotated[
        Path | None, typer.Argument(help="A plan (TOML), or a folder of captured rounds.")
    ] = None,
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
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials at a time, one process each (default: 1; with Ray one per free CPU).",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where trials run: processes here, or Ray.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster: auto or HOST:PORT (default: a Ray on this machine)."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Start no trial beyond this time: 90s, 10m, 2h (default: the plan's)."),
    ] = None,
    images: Annotated[
        Images | None, typer.Option(help="Pictures in the report (default: blur; demo: show).")
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write report.pdf.")] = False,
) -> None:
    """Attack your own federation as PLAN describes it, and report what leaks.

    Exit codes: 0 below the plan's limit, 1 above it, 2 the plan is wrong, 3 a trial failed,
    4 inconclusive, 70 an unexpected error, 130 interrupted. `module:callable` in a plan, or
    in a captured round, is code, and it is run: audit only what you trust.
    """
    from leakgauge import audit as audits
    from leakgauge.audit.workers import local
    from leakgauge.integrations import ray

    if (plan is None) != demo:
        raise PlanError("give either the path of a plan or --demo")
    if address is not None and engine != "ray":
        raise PlanError("--address names a Ray cluster: give --engine ray with it")
    workers = ray.engine(address) if engine == "ray" else local

    def checked() -> Plan:
        if plan is None:
            return audits.parse(tomllib.loads(_template("demo.toml")), "demo", Path.cwd())
        return audits.read(plan)

    shown = images or ("show" if demo else "blur")
    options = _Options(out, resume, overwrite, jobs, budget, shown, pdf)
    result = _run(checked, options, workers, tradeoff=False)
    assert result.verdict is not None  # an audit that was run has one
    if demo and result.verdict.exit_code == 1:
        return  # the example is meant to leak
    raise typer.Exit(result.verdict.exit_code)


@app.command()
def tradeoff(
    plan: Annotated[Path, typer.Argument(help="A plan (TOML) with a table [tradeoff].")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result (default: leakgauge-audit/NAME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what is in that folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in that folder.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials and trainings at a time, one process each (default: 1).",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Start nothing beyond this time: 90s, 10m, 2h (default: the plan's)."),
    ] = None,
    images: Annotated[Images, typer.Option(help="Pictures in the report.")] = "blur",
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write report.pdf.")] = False,
) -> None:
    """Train your federation under each defence of PLAN, attack it, and say which defence to take.

    The audit of PLAN, and beside it the accuracy that each defence leaves, on records that nobody
    else holds. Exit codes: 0 a setting meets the plan's limit and is recommended, 1 none meets it,
    2 the plan is wrong, 3 a trial or a training failed, 4 inconclusive, 70 an unexpected error, 130
    interrupted. `module:callable` in a plan is code, and it is run: use only plans that you trust.
    """
    from leakgauge import audit as audits
    from leakgauge.audit.workers import local

    options = _Options(out, resume, overwrite, jobs, budget, images, pdf)
    result = _run(partial(audits.read, plan), options, local, tradeoff=True)
    if result.tradeoff is None:
        errors.print("the budget ended before a federation was trained: raise it, and --resume")
        raise typer.Exit(4)
    raise typer.Exit(result.tradeoff.exit_code)


@app.command()
def fit(
    plan: Annotated[Path, typer.Argument(help="A plan (TOML), or a folder of captured rounds.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the audit (default: leakgauge-audit/NAME, as there)."),
    ] = None,
) -> None:
    """Prepare what the attacks of PLAN learn before they see an update, and nothing else.

    Lists every preparation that trials share with its forecast cost, then makes those that are not
    there yet. `leakgauge audit PLAN` with the same --out goes on from there; it makes what is
    missing itself. Stopped or killed, the same command goes on from the last checkpoint. Exit
    codes: 0 all is made, 2 the plan is wrong or nothing can be made, 3 some could not be made, 70
    an unexpected error, 130 interrupted. `module:callable` in a plan is code, and it is run.
    """
    from leakgauge import audit as audits
    from leakgauge.audit import fit as fits
    from leakgauge.report import terminal

    read = audits.read(plan)
    store = audits.Store(out or Path("leakgauge-audit") / read.name)
    with _progress() as progress:
        whole = progress.add_task("calibrating", total=None, note="")
        bars: list[TaskID] = []

        def calibrate(attack: str) -> None:
            progress.update(whole, note=f"trying {attack} for a moment")

        def listed(found: tuple[fits.Fit, ...]) -> None:
            if found:
                progress.console.print(terminal.fit_table(read.name, found))
            left = sum(not one.done and one.reason is None for one in found)
            progress.update(whole, description="fits", total=left, note="")

        def begin(one: fits.Fit) -> None:
            bars.append(progress.add_task(one.case.attack, total=None, note=""))

        def step(done: int, total: int, objective: float) -> None:
            progress.update(bars[-1], completed=done, total=total, note=f"{objective:.2e}")

        def end(one: fits.Fit) -> None:
            progress.remove_task(bars.pop())
            progress.advance(whole)

        watch = fits.Watch(listed, calibrate, begin, step, end)
        try:
            found = fits.fit(read, store, watch)
        except KeyboardInterrupt:
            errors.print("interrupted: the same command goes on from the last checkpoint")
            raise typer.Exit(130) from None
    if not found:
        console.print(
            f"nothing to fit: no attack of {read.name} prepares what several trials share",
            soft_wrap=True, markup=False,
        )  # fmt: skip
        return
    for one in found:
        if one.reason is not None:
            console.print(f"[yellow]note:[/] {escape(f'{one.case.attack}: {one.reason}')}")
    made = [one for one in found if one.done]
    if not made:
        raise NotApplicable("nothing that the attacks of the plan prepare can be made")
    spent = sum(one.cpu_seconds for one in made)
    then = f"leakgauge audit {plan}" + (f" --out {out}" if out else "")
    console.print(
        f"{len(made)} of {len(found)} fits are there, {spent:.1f} CPU seconds in all: "
        f"{store.prepared}\n`{then}` goes on from here",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip
    if len(made) < len(found):
        raise typer.Exit(3)


@dataclass(frozen=True)
class _Options:
    """What audits and trade-offs are told on the command line."""

    out: Path | None
    resume: bool
    overwrite: bool
    jobs: int | None
    budget: str | None
    images: Images
    pdf: bool


def _run(
    read: Callable[[], Plan],
    options: _Options,
    engine: Callable[[Bench, int | None, Callable[[str], None]], Engine],
    *,
    tradeoff: bool,
) -> Result:
    """Run a plan, print what was found and write the reports."""
    from leakgauge import audit as audits
    from leakgauge import report
    from leakgauge.audit.document import duration
    from leakgauge.report import terminal

    if options.resume and options.overwrite:
        raise PlanError("give either --resume or --overwrite")
    if options.pdf:
        report.pdf.check()
    limit = duration(options.budget, "--budget") if options.budget else None
    plan = read()
    store = audits.Store(options.out or Path("leakgauge-audit") / plan.name)
    with _progress() as progress:
        result = audits.run(
            plan,
            store,
            resume=options.resume,
            overwrite=options.overwrite,
            jobs=options.jobs,
            budget=limit or plan.budget,
            calibrate=True,
            tradeoff=tradeoff,
            watch=_watch(progress),
            engine=engine,
        )
    console.print(terminal.summary_table(result))
    if result.tradeoff:
        console.print(terminal.tradeoff_table(result, result.tradeoff))
    for note in terminal.notes(result):
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    for line in terminal.verdict(result):
        console.print(line)
    for path in report.write(store.out, options.images, with_pdf=options.pdf):
        console.print(f"report    {escape(str(path))}", soft_wrap=True)
    console.print(f"result    {escape(str(store.result))}", soft_wrap=True)
    if result.interrupted:
        errors.print("interrupted: the same command with --resume continues")
        raise typer.Exit(130)
    failed = sum(trial.status == "failed" for trial in result.trials)
    if failed:
        errors.print(
            f"[bold red]error:[/] {failed} of {len(result.trials)} trials failed: their errors "
            "are in the result; --resume tries them again",
            soft_wrap=True,
        )
    return result


def _template(name: str) -> str:
    return resources.files("leakgauge").joinpath("audit", name).read_text("utf-8")


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        _Counted(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, transient=True, expand=True)


class _Counted(MofNCompleteColumn):
    """How many of how many are done; nothing while their number is not known."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


def _watch(progress: Progress) -> audits.Watch:
    """A bar for the whole audit and one for each running trial."""
    from leakgauge import audit as audits

    whole = progress.add_task("calibrating", total=None, note="trying each attack for a moment")
    running: dict[Work, TaskID] = {}

    def expect(total: int) -> None:
        progress.update(whole, description="trials", total=total, note="")

    def begin(work: Work) -> None:
        if isinstance(work, audits.Case):
            running[work] = progress.add_task(work.attack, total=None, note=work.kind)
        else:
            running[work] = progress.add_task(work.defence, total=None, note="training")

    def step(work: Work, done: int, total: int, objective: float) -> None:
        rounds = "honest rounds" if isinstance(work, audits.Case) else "training"
        note = f"{objective:.2e}" if objective else rounds
        progress.update(running[work], completed=done, total=total, note=note)

    def end(work: Work, ended: Trial | Trained) -> None:
        progress.remove_task(running.pop(work))
        progress.advance(whole)

    def say(words: str) -> None:
        progress.console.print(f"[yellow]note:[/] {escape(words)}", soft_wrap=True)

    def calibrate(attack: str) -> None:
        progress.update(whole, description="calibrating", note=f"trying {attack} for a moment")

    return audits.Watch(expect, begin, step, end, say, calibrate)


@app.command("protocol")
def protocol_(
    plan: Annotated[Path, typer.Argument(help="A plan (TOML) with a table [protocol].")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result (default: leakgauge-protocol/NAME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the protocol in that folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the protocol in that folder.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at a time (default: 1).", show_default=False),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Start no trial beyond this time: 90s, 10m, 2h (default: the plan's)."),
    ] = None,
) -> None:
    """Audit one factor of PLAN at a time, keeping the value that leaks least.

    Factors: heterogeneity, initialisation, architecture, stage, batch size, local steps, knowledge,
    defence, and the clients behind a secure sum. Exit codes: 0 it ended, 2 the plan is wrong, 3 a
    trial failed, 4 part was not run or no attack broke the known-weak twin, 130 interrupted.
    """
    from leakgauge import audit as audits
    from leakgauge import report
    from leakgauge.audit import protocol as protocols
    from leakgauge.audit.document import duration
    from leakgauge.report import terminal

    if resume and overwrite:
        raise PlanError("give either --resume or --overwrite")
    limit = duration(budget, "--budget") if budget else None
    checked = audits.read(plan)
    bench = protocols.Bench(checked)
    store = audits.Store(out or Path("leakgauge-protocol") / checked.name, "protocol.json")
    with _progress() as progress:
        whole = progress.add_task("calibrating", total=None, note="trying each model for a moment")

        begun: list[str] = []

        def expect(told: protocols.Outlook) -> None:
            progress.update(whole, description="audits", total=told.audits, note="")
            progress.console.print(_outlook(told), soft_wrap=True)

        def watch(words: str) -> audits.Watch:
            for task in progress.task_ids:
                if task != whole:
                    progress.remove_task(task)
            progress.update(whole, completed=len(begun), note=words)
            begun.append(words)
            return _watch(progress)

        found = protocols.run(
            bench,
            store,
            resume=resume,
            overwrite=overwrite,
            jobs=jobs,
            budget=limit or checked.budget,
            expect=expect,
            watch=watch,
        )
    console.print(terminal.protocol_tables(found))
    words = report.protocol
    said = [*words.headlines(found), words.rests_on(found), words.control(found)]
    said += [f"{name}. {line}" for name, told in words.clients(found) for line in told]
    for line in (*said, words.not_varied(found)):
        console.print(escape(line), soft_wrap=True)
    for path in words.write(store.out):
        console.print(f"report    {escape(str(path))}", soft_wrap=True)
    console.print(f"result    {escape(str(store.result))}", soft_wrap=True)
    if found.unfinished:
        errors.print("part of it was not run: the same command with --resume continues")
    if found.failed:
        errors.print(f"[bold red]error:[/] {found.failed} trials failed: --resume tries them again")
    raise typer.Exit(130 if found.interrupted else found.exit_code)


def _outlook(told: protocols.Outlook) -> str:
    return (
        f"at most {told.audits} audits of {told.trials} trials each, about {told.low:.0f} to "
        f"{told.high:.0f} CPU seconds"
    )


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("plan.toml"),
) -> None:
    """Write a commented plan to start from."""
    from leakgauge.files import write_atomic

    if path.exists():
        raise PlanError(f"{path} is there already: name another file")
    write_atomic(path, _template("starter.toml").encode())
    console.print(f"wrote {escape(str(path))}: edit it, then `leakgauge check {path}`")


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(help="A plan (TOML), or a folder of captured rounds.")],
) -> None:
    """Check a plan, say which of its attacks apply and what an update shows before any of them,
    and forecast time and memory."""
    from leakgauge import audit as audits
    from leakgauge.audit import protocol as protocols
    from leakgauge.audit import public
    from leakgauge.audit.cases import trainings
    from leakgauge.audit.exposed import begun
    from leakgauge.audit.privacy import guarantees
    from leakgauge.audit.result import described
    from leakgauge.report import contents, terminal

    checked = audits.read(plan)
    start = begun(checked)
    table = Table(title=f"{escape(checked.name)}: valid", box=box.SIMPLE_HEAD)
    with console.status("trying each attack for a moment"):
        found = audits.forecast(checked, trainings=trainings(checked))
    costs = {"CPU s per trial": "cpu_seconds"}
    if any(one.preparing for one in found.attacks):
        costs["CPU s to prepare, once per model"] = "preparing"
    for name in ("attack", "applies", *costs):
        table.add_column(name, justify="right" if name in costs else "left")
    for one in found.attacks:
        applies = "yes" if one.reason is None else f"no: {one.reason}"
        numbers = (
            f"{getattr(one, key):.1f}" if one.reason is None else "–" for key in costs.values()
        )
        table.add_row(one.attack, escape(applies), *numbers)
    console.print(table)
    if records := described(checked):
        console.print(f"public records: {escape(public.told(records))}", soft_wrap=True)
    also = f" and {found.trainings} trainings" if found.trainings else ""
    console.print(
        f"{found.trials} trials{also}, about {found.cpu_seconds:.0f} CPU seconds "
        f"({found.low:.0f} to {found.high:.0f}) and {found.megabytes:.0f} MB",
        soft_wrap=True,
    )
    for promise in guarantees(checked):
        console.print(escape(contents.promised(promise)), soft_wrap=True)
    if found.trainings:
        console.print(
            f"`leakgauge tradeoff` trains, of this {found.training_seconds:.0f} CPU seconds; "
            "`leakgauge audit` does not",
            soft_wrap=True,
            markup=False,
        )
    if checked.document.protocol is not None:
        told = protocols.Bench(checked).outlook()
        console.print(f"[protocol], besides: {_outlook(told)}", soft_wrap=True, markup=False)
    for exposure in audits.exposures(checked, start):
        console.print(terminal.exposure_table(exposure))
    if all(one.reason for one in found.attacks):
        raise NotApplicable("no attack of the plan applies")


@app.command("report")
def report_(
    folder: Annotated[Path, typer.Argument(help="The folder of an audit.")],
    images: Annotated[Images, typer.Option(help="Pictures in the report.")] = "blur",
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write report.pdf.")] = False,
) -> None:
    """Write the reports of a finished audit again, with other pictures or as PDF."""
    from leakgauge import report

    for path in report.write(folder, images, with_pdf=pdf):
        console.print(f"report    {escape(str(path))}", soft_wrap=True)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="The folder of an audit.")],
    new: Annotated[Path, typer.Argument(help="The folder of a later one.")],
    gate: Annotated[bool, typer.Option("--gate", help="End with 1 if NEW is worse.")] = False,
) -> None:
    """Compare two audits: what leaks more, what less, and how their plans differ."""
    from leakgauge import report

    before, after = _result(old), _result(new)
    worse = report.diff.worse(before, after) if gate else []
    for table in report.diff.tables(report.diff.compare(before, after)):
        console.print(table)
    for sentence in worse:
        console.print(f"worse: {sentence}", style="red", markup=False, highlight=False)
    if gate and not worse:
        console.print("Nothing got worse.")
    raise typer.Exit(1 if worse else 0)


@app.command()
def cite(folder: Annotated[Path, typer.Argument(help="The folder of an audit.")]) -> None:
    """Print BibTeX for the methods an audit used."""
    print("\n\n".join(paper.bibtex() for paper in _result(folder).references))


def _result(path: Path) -> Result:
    from leakgauge.audit import schema

    return schema.load(path / "result.json" if path.is_dir() else path)


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(help=f"A method, or a kind: {', '.join(catalogue.KINDS)}."),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Everything about each method.")] = False,
) -> None:
    """What a plan can name: one line per method, or all about one of them.

    All about a method is where it comes from, what it does, and the options that a plan may set,
    with their defaults.
    """
    known = {kind: catalogue.entries(kind) for kind in catalogue.KINDS}
    if what in known:
        known = {what: known[what]}
    elif what is not None:
        choose(
            dict.fromkeys([*known, *(e.name for es in known.values() for e in es)]), what, "name"
        )
        known = {kind: [e for e in es if e.name == what] for kind, es in known.items()}
        long = True
    for kind, found in known.items():
        if found:
            console.print(f"[bold]{kind}[/]: {catalogue.KINDS[kind].about}", soft_wrap=True)
            table = Table(show_header=False, box=None)
            table.add_column(no_wrap=True, style="bold")
            table.add_column(overflow="fold")
            for entry in found:
                table.add_row(escape(entry.name), _details(kind, entry, long))
            console.print(table)
            console.print()


def _details(kind: str, entry: catalogue.Entry, long: bool) -> str:
    """What its author wrote about it, and its options; or the first line of that."""
    origin = f" (from {entry.package})" if entry.package else ""
    if entry.problem:
        return escape(f"cannot be used{origin}: {entry.problem}")
    if not long:
        return escape(entry.summary + origin)
    from leakgauge.types import Metric

    item = catalogue.load(entry)
    item = item.score if isinstance(item, Metric) else item
    made = item.func if isinstance(item, partial) else item
    paragraphs = f"{inspect.getdoc(made)}{origin}".split("\n\n")
    if [e.module for e in catalogue.entries(kind)].count(entry.module) == 1:  # a file of its own
        paragraphs.append(str(inspect.getdoc(sys.modules[entry.module])).split("\n\n")[0])
    if options := _options(item):
        paragraphs.append(f"options: {', '.join(options)}")
    return escape("\n".join(" ".join(text.split()) for text in paragraphs))


def _options(item: Callable[..., Any]) -> list[str]:
    """The keys that a plan may set, with their defaults as TOML writes them."""
    options = []
    for name, parameter in inspect.signature(item).parameters.items():
        if parameter.default in (parameter.empty, None):
            options += [name] if name not in FILLED else []
        else:
            options.append(f"{name}={toml(parameter.default)}")
    return options


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        Literal["cifar10", "cifar100", "mnist", "fashion-mnist"],
        typer.Argument(help="The data set."),
    ],
    into: Annotated[
        Path | None, typer.Option(help="Folder (default: LEAKGAUGE_DATA, else in ~/.cache).")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Another address of the same files.")] = None,
) -> None:
    """Download a public data set from its home, and check its sum.

    Without a network it says which files to place where.
    """
    from leakgauge import data

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
