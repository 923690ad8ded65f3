"""The reproduction board: every attack on the setups of the papers, *reported* beside *measured*.

    python benchmarks/board.py --list                  rows, what is done, forecast in CPU-seconds
    python benchmarks/board.py                         run what is missing; twice for two cores
    python benchmarks/board.py --rows 'c2f-*' --seconds 600
    python benchmarks/board.py --again --rows 'ci/*'   run anew what is older than its code
    python benchmarks/board.py --render                write docs/board.md and its figure
    python benchmarks/board.py --tune 4 --rows 'twin-*/smooth-to-sharp' --set 'errors="own"'
                                                       try options on four TUNE pairs, keep nothing

The rows are plain data in `board_rows.py`; what was run is kept by `board_state.py` and shown by
`board_page.py`. A *run* is one row on one batch of images with one draw of weights: the library
simulates the round, `threat.observe` hands over the observation, the attack infers its labels and
searches, and only then do guess and truth meet, under the optimal assignment.
Its outcome is one line of STATE/ROW.jsonl, with the commit and a digest of the code that made it;
the page marks rows whose code has changed since. Runs that have a line are skipped; a killed
process loses its running run only. Processes that share the state directory share the work: a run
is claimed by a lock on one byte of STATE/.lock, which the system releases when its process ends.
One thread a process, so that CPU-seconds of different attacks can be compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from board_figure import draw
from board_page import panels, render
from board_rows import OURS, ROWS, Row, Setup
from board_state import Outcome, attack_of, claims, code_of, forecast, keep, outcomes, paces, plain
from rich.console import Console
from rich.table import Table
from sources import commit
from torch import Tensor, nn

from leakgauge import (
    Dataset,
    LocalTraining,
    Resources,
    Scenario,
    ThreatModel,
    __version__,
    data,
    diagnostics,
    metrics,
    models,
    simulate,
    threat,
)
from leakgauge.errors import DataError, LeakGaugeError, NotApplicable, PlanError
from leakgauge.metrics.labels import multiset_accuracy
from leakgauge.records import Scale, record_of
from leakgauge.types import Batch

HERE = Path(__file__).parent
STATE = HERE / "board"
PAGE = HERE.parent / "docs" / "board.md"
FIGURE = "images/board.png"  # beside the page


# --- the pairs ------------------------------------------------------------------------------------


def judged(count: int, run: int) -> tuple[list[int], int]:
    """Test images and weight seed of a run: every tenth image, a new draw of weights a run."""
    return [10 * (j + 1) for j in range(run * count, (run + 1) * count)], run


def tuned(count: int, run: int) -> tuple[list[int], int]:
    """Training images and weight seed of a run on which settings may be chosen."""
    return list(range(run * count, (run + 1) * count)), 100 + run


# --- run ------------------------------------------------------------------------------------------


@functools.cache
def images(name: str, split: str, size: int) -> Dataset:
    """A data set, averaged down to `size`."""
    if name == "photos":  # comes with the installed packages: the rows of CI need no data
        return data.load("photos", size=size)
    if not os.environ.get("LEAKGAUGE_DATA"):
        raise DataError(
            f"the board reads {name} from the folder named by LEAKGAUGE_DATA, which is not set: "
            "set it to the folder that holds cifar-10-batches-py"
        )
    loaded = data.load(name, split=split)
    inputs = loaded.inputs
    if size != inputs.shape[-1]:
        inputs = F.interpolate(inputs, size=size, mode="area")
    return Dataset(loaded.name, inputs, loaded.labels, loaded.classes)


@functools.cache
def mean_image(name: str, size: int) -> Tensor:
    """The guess that knows nothing, from the training split."""
    return metrics.baselines.mean_image(images(name, "train", size).inputs[:10_000])


def rng_of(*key: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def make_model(setup: Setup, seed: int) -> nn.Module:
    size = setup.size
    return models.make(
        setup.model,
        shape=(3, size, size),
        classes=10,
        init=setup.init,
        rng=torch.Generator().manual_seed(seed),
        **setup.options,
    )


@functools.lru_cache(maxsize=2)
def trained(setup: Setup) -> tuple[nn.Module, float]:
    """The global model after `setup.rounds` honest rounds on training images, and its accuracy.

    Ten clients of 16 steps of 32 images, lr 0.05, train-mode batch norm: one federation for all
    runs of a setup.
    """
    training = LocalTraining(lr=0.05, batch_size=32, steps=16, batch_norm="train")
    scale = Scale(setup.mean, setup.std)
    scenario = Scenario(
        lambda: make_model(setup, 0),
        images(setup.data, "train", setup.size),
        training,
        clients=10,
        participants=2,
        records=512,
        rounds=setup.rounds,
        scale=scale,
    )
    model = simulate(scenario, rng_of("federation", setup.name)).model.eval()
    test = images(setup.data, "test", setup.size)
    with torch.no_grad():
        logits = model(record_of(test.inputs, scale).entering(test.inputs[-2000:]))
    return model, float((logits.argmax(1) == test.labels[-2000:]).double().mean())


def round_of(row: Row, run: int, *, judge: bool = True) -> tuple[Any, dict[str, Any]]:
    """The attacked round of a run, and what to note of it."""
    setup = row.setup
    chosen, seed = (judged if judge else tuned)(setup.batch * setup.steps, run)
    if setup.data == "photos":
        chosen = [i // 10 - 1 if judge else 100 + i for i in chosen]
    source = images(setup.data, "test" if judge else "train", setup.size)
    private = Dataset(source.name, source.inputs[chosen], source.labels[chosen], source.classes)
    training = LocalTraining(
        lr=setup.lr,
        batch_size=setup.batch,
        steps=setup.steps,
        batch_norm=setup.batch_norm,
    )
    facts: dict[str, Any] = {"images": chosen, "weights": seed}

    def model() -> nn.Module:
        return trained(setup)[0] if setup.rounds else make_model(setup, seed)

    if setup.rounds:
        facts["test_accuracy"] = trained(setup)[1]
    scale = Scale(setup.mean, setup.std)
    scenario = Scenario(model, private, training, records=len(chosen), scale=scale)
    return simulate(scenario, rng_of("round", run)), facts


def execute(row: Row, run: int, *, judge: bool = True) -> Outcome:
    """One run. An attack that cannot work here says so; every other error is kept as a failure."""
    attack = attack_of(row)
    actor = ThreatModel()
    threat.check(row.attack, attack, actor)
    round_, facts = round_of(row, run, judge=judge)
    seen = threat.observe(round_, actor)
    outcome: Outcome = facts | {"row": row.fingerprint, "run": run, "status": "done"}
    outcome |= {"options": plain(asdict(attack)), "version": __version__}  # type: ignore[call-overload]
    outcome |= {"commit": commit(), "code": code_of(row)}
    began = time.process_time()
    try:
        start = rng_of(f"{row.setup.name}/{row.attack}", run)  # variants share their start
        guess = attack.reconstruct(seen, start, Resources())
        outcome["cpu_seconds"] = round(time.process_time() - began, 2)
        outcome |= score(row.setup, guess, threat.covered(round_, actor))
    except NotApplicable as reason:
        outcome |= {"status": "not applicable", "error": str(reason)}
    except (LeakGaugeError, ArithmeticError, RuntimeError) as error:
        outcome |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    outcome["sparsity"] = round(diagnostics.sparsity(seen.update), 5)
    return outcome


def score(setup: Setup, guess: Any, truth: Batch) -> Outcome:
    """The measured part of an outcome: one number per image, beside its mean-image baseline."""
    blank = mean_image(setup.data, setup.size).expand_as(truth.inputs)
    index = metrics.assign.optimal(guess.inputs, truth.inputs)
    paired = blank.clone()  # a truth without a guess is scored as if nothing were known
    paired[index >= 0] = guess.inputs[index[index >= 0]].to(paired)
    measures = {"psnr": metrics.psnr, "affine_psnr": metrics.affine_psnr, "ssim": metrics.ssim}
    scores = {n: _rounded(m(paired, truth.inputs).tolist()) for n, m in measures.items()}
    scores |= {f"mean_image_{n}": _rounded(measures[n](blank, truth.inputs).tolist())
               for n in ("psnr", "affine_psnr")}  # fmt: skip
    return scores | {
        "labels": None
        if guess.labels is None
        else multiset_accuracy(guess.labels, truth.labels, 10),
        "residual": plain(guess.residual),
        "facts": {k: v for k, v in plain(guess.facts).items() if not isinstance(v, (list, dict))}
        | ({"iterations": guess.iterations} if guess.iterations else {}),
        "notes": list(guess.notes),
    }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def work(
    state: Path, rows: list[Row], seconds: float, console: Console, again: bool = False
) -> int:
    """Run what is missing, row by row, until it is done or the time is up; the failures' number.
    With `again`, what is older than its code is missing too."""
    ends, failures = time.monotonic() + seconds, 0
    for row in rows:
        code_of(row)  # a wrong row is an error before anything runs
    commit()  # of the code as it was when it was loaded
    with claims(state) as claim:
        for row in rows:
            for run in range(row.runs):
                if time.monotonic() >= ends:
                    console.print("the time is up; start again to go on")
                    return failures
                known = outcomes(state, row).get(run)
                old = again and known is not None and known.get("code") != code_of(row)
                if not claim(row, run) or (_settled(known) and not old):
                    continue
                outcome = execute(row, run)
                keep(state, row, outcome)
                failures += outcome["status"] == "failed"
                console.print(f"{row.id} {run}: {_brief(outcome)}", highlight=False)
    return failures


def tune(rows: list[Row], pairs: int, changes: list[str], console: Console) -> int:
    """Rows with changed options on TUNE pairs, printed and not kept; the failures' number."""
    try:
        options = tomllib.loads("\n".join(changes))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"--set takes key=value as in a plan, got {changes}: {error}") from error
    rows = [replace(row, options=row.options | options) for row in rows]
    for row in rows:
        attack_of(row)
    failures = 0
    for row in rows:
        runs = [execute(row, run, judge=False) for run in range(pairs)]
        done = [outcome for outcome in runs if outcome["status"] == "done"]
        failures += len(runs) - len(done)
        scores = [v for outcome in done for v in outcome["psnr"]]
        words = [f"median {statistics.median(scores):.1f} dB"] if scores else []
        console.print(f"{row.id}: " + "; ".join([*map(_brief, runs), *words]), highlight=False)
    return failures


def _settled(outcome: Outcome | None) -> bool:
    """Failures are tried again by the next process."""
    return outcome is not None and outcome["status"] != "failed"


def _brief(outcome: Outcome) -> str:
    if outcome["status"] != "done":
        return f"{outcome['status']}: {outcome['error']}"
    return f"{statistics.median(outcome['psnr']):.1f} dB, {outcome['cpu_seconds']:.0f} CPU-s"


# --- forecast -------------------------------------------------------------------------------------


class _Enough(Exception):
    """The pace is known."""


def pace(row: Row, probe: float = 1.0) -> float:
    """CPU-seconds a run of this row will take, from its first iterations on a TUNE pair."""
    stamps: list[float] = []
    total = 0

    def progress(done: int, steps: int, objective: float) -> None:
        nonlocal total
        total = steps
        stamps.append(time.process_time())
        if len(stamps) > 4 and stamps[-1] - stamps[0] > probe:
            raise _Enough

    seen = threat.observe(round_of(row, 0, judge=False)[0], ThreatModel())
    began = time.process_time()
    try:
        attack_of(row).reconstruct(seen, rng_of("pace"), Resources(progress=progress))
    except _Enough:
        gaps = [b - a for a, b in itertools.pairwise(stamps)]
        return stamps[0] - began + total * statistics.median(gaps)
    except NotApplicable:
        return 0.0
    return time.process_time() - began


def calibrate(state: Path, rows: list[Row], console: Console) -> None:
    known = paces(state)
    for row in rows:
        known[row.id] = round(pace(row), 2)
        console.print(f"{row.id}: {known[row.id]:.1f} CPU-s per run", highlight=False)
        state.mkdir(parents=True, exist_ok=True)
        (state / "pace.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def show(state: Path, rows: list[Row], console: Console) -> None:
    table = Table()
    for column in ("row", "runs", "done", "CPU-s per run", "CPU-s left"):
        table.add_column(column, justify="left" if column == "row" else "right")
    left, unknown = 0.0, 0
    for row in rows:
        done = sum(map(_settled, outcomes(state, row).values()))
        each = forecast(state, row)
        rest = (row.runs - done) * (each or 0.0)
        left += rest
        unknown += each is None and done < row.runs
        cells = (row.id, row.runs, done, "?" if each is None else f"{each:.0f}", f"{rest:.0f}")
        table.add_row(*map(str, cells), style=None if row.here else "dim")
    console.print(table)
    more = f", and {unknown} rows without a pace (--calibrate)" if unknown else ""
    console.print(f"to run: {left:.0f} CPU-seconds ({left / 60:.0f} minutes){more}")


# --- command line ---------------------------------------------------------------------------------


def select(patterns: list[str], *, cheap: bool) -> list[Row]:
    """The rows of these names; without names those to be run here, or those of CI."""
    if not patterns:
        return [row for row in ROWS if (row.setup.cheap if cheap else row.here)]
    chosen = [r for r in ROWS if any(fnmatch.fnmatchcase(r.id, p) for p in patterns)]
    if not chosen:
        raise PlanError(f"no row is called {' or '.join(patterns)}: see --list --rows '*'")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", default=[], metavar="GLOB", help="only these rows")
    parser.add_argument("--cheap", action="store_true", help="only the rows that CI runs")
    parser.add_argument("--again", action="store_true", help="run anew what is older than its code")
    parser.add_argument("--list", action="store_true", help="show rows and forecast, run nothing")
    parser.add_argument("--calibrate", action="store_true", help="measure the pace of the rows")
    parser.add_argument("--render", action="store_true", help="write docs/board.md, run nothing")
    parser.add_argument("--tune", type=int, metavar="PAIRS", help="run on TUNE pairs, keep nothing")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for --tune")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop starting runs")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    try:
        rows = select(options.rows, cheap=options.cheap)
        if options.list:
            show(options.state, rows, console)
        elif options.calibrate:
            calibrate(options.state, rows, console)
        elif options.render:
            options.page.write_text(render(options.state, ROWS), encoding="utf-8")
            figure = options.page.parent / FIGURE
            figure.parent.mkdir(parents=True, exist_ok=True)
            draw(panels(options.state, ROWS), OURS, figure)
        elif options.tune:
            return 3 if tune(rows, options.tune, options.set, console) else 0
        else:
            failed = work(options.state, rows, options.seconds, console, options.again)
            return 3 if failed else 0
    except LeakGaugeError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
