"""The reproduction board: every attack on the setups of the papers, *reported* beside *measured*.

    python benchmarks/board.py --list                  rows, what is done, forecast in CPU-seconds
    python benchmarks/board.py                         run what is missing; twice for two cores
    python benchmarks/board.py --rows 'c2f-*' --seconds 600
    python benchmarks/board.py --render                write docs/board.md and its figure
    python benchmarks/board.py --tune 4 --rows 'twin-*/smooth-to-sharp' --set errors=false
                                                       try options on four TUNE pairs, keep nothing

The rows are plain data in `board_rows.py`. A *run* is one row on one batch of images with one draw
of weights: the library simulates the round, `threat.observe` hands over the observation, the attack
infers its labels and searches, and only then do guess and truth meet, under the optimal assignment.
Its outcome is one line of STATE/ROW.jsonl. Runs that have a line are skipped; a killed process
loses its running run only. Processes that share the state directory share the work: a run is
claimed by a lock on one byte of STATE/.lock, which the system releases whenever its process ends.
One thread a process, so that CPU-seconds of different attacks can be compared.
"""

from __future__ import annotations

import argparse
import fcntl
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from board_figure import Panel, draw
from board_rows import C2F, EXACT, IG, OURS, ROWS, SETUPS, TWO_STAGES, Row, Setup
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from leakgauge import (
    Dataset,
    LocalTraining,
    Resources,
    Scenario,
    ThreatModel,
    __version__,
    attacks,
    data,
    diagnostics,
    metrics,
    models,
    simulate,
    threat,
)
from leakgauge.config import build, choose
from leakgauge.errors import DataError, LeakGaugeError, NotApplicable, PlanError
from leakgauge.metrics.labels import multiset_accuracy
from leakgauge.types import Attack, Batch

HERE = Path(__file__).parent
STATE = HERE / "board"
PAGE = HERE.parent / "docs" / "board.md"
FIGURE = "images/board.png"  # beside the page
SUCCESS = 20.0  # dB: "very high" risk
Outcome = dict[str, Any]


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
    training = LocalTraining(
        lr=0.05, batch_size=32, steps=16, batch_norm="train", mean=setup.mean, std=setup.std
    )
    scenario = Scenario(
        lambda: make_model(setup, 0),
        images(setup.data, "train", setup.size),
        training,
        clients=10,
        participants=2,
        records=512,
        rounds=setup.rounds,
    )
    model = simulate(scenario, rng_of("federation", setup.name)).model.eval()
    test = images(setup.data, "test", setup.size)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (setup.mean, setup.std))
    with torch.no_grad():
        logits = model((test.inputs[-2000:] - mean) / std)
    return model, float((logits.argmax(1) == test.labels[-2000:]).double().mean())


def attack_of(row: Row) -> Attack:
    """The attack of a row with its options; an unknown name or option is an error."""
    return build(choose(attacks.ATTACKS, row.attack, "attack"), row.options, f"row {row.id}")


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
        mean=setup.mean,
        std=setup.std,
    )
    facts: dict[str, Any] = {"images": chosen, "weights": seed}

    def model() -> nn.Module:
        return trained(setup)[0] if setup.rounds else make_model(setup, seed)

    if setup.rounds:
        facts["test_accuracy"] = trained(setup)[1]
    scenario = Scenario(model, private, training, records=len(chosen))
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
    """The measured part of an outcome: one number an image, beside its mean-image baseline."""
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
        "facts": {k: v for k, v in plain(guess.facts).items() if not isinstance(v, (list, dict))},
        "notes": list(guess.notes),
    }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def plain(value: Any) -> Any:
    """What JSON can hold; what it cannot is written as words."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# --- state ----------------------------------------------------------------------------------------


def path_of(state: Path, row: Row) -> Path:
    return state / f"{row.id.replace('/', '.')}.jsonl"


def outcomes(state: Path, row: Row) -> dict[int, Outcome]:
    """The latest outcome of every run of the row as it stands today; torn lines are no runs."""
    found: dict[int, Outcome] = {}
    path = path_of(state, row)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            outcome = json.loads(line)
        except ValueError:
            continue
        if outcome.get("row") == row.fingerprint:
            found[outcome["run"]] = outcome
    return dict(sorted(found.items()))


def keep(state: Path, row: Row, outcome: Outcome) -> None:
    """Append one line in one write; a line that a crash left unended is ended first."""
    path = path_of(state, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(outcome, ensure_ascii=False, allow_nan=False) + "\n"
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("ab", buffering=0) as file:
        file.write((b"\n" if torn else b"") + line.encode())
        os.fsync(file.fileno())


@contextmanager
def claims(state: Path) -> Iterator[Any]:
    """A function that claims a run for this process, and says whether it could."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / ".lock").open("a+b") as file:

        def claim(row: Row, run: int) -> bool:
            digest = hashlib.sha256(f"{row.fingerprint}/{run}".encode()).digest()
            try:
                fcntl.lockf(
                    file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int.from_bytes(digest[:7], "big")
                )
            except OSError:
                return False
            return True

        yield claim


def work(state: Path, rows: list[Row], seconds: float, console: Console) -> int:
    """Run what is missing, row by row, until it is done or the time is up; the failures' number."""
    ends, failures = time.monotonic() + seconds, 0
    for row in rows:
        attack_of(row)  # a wrong row is an error before anything runs
    with claims(state) as claim:
        for row in rows:
            for run in range(row.runs):
                if time.monotonic() >= ends:
                    console.print("the time is up; start again to go on")
                    return failures
                if not claim(row, run) or _settled(outcomes(state, row).get(run)):
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


def paces(state: Path) -> dict[str, float]:
    path = state / "pace.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def calibrate(state: Path, rows: list[Row], console: Console) -> None:
    known = paces(state)
    for row in rows:
        known[row.id] = round(pace(row), 2)
        console.print(f"{row.id}: {known[row.id]:.1f} CPU-s a run", highlight=False)
        state.mkdir(parents=True, exist_ok=True)
        (state / "pace.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def forecast(state: Path, row: Row) -> float | None:
    """CPU-seconds a run: what finished runs took, else what was calibrated."""
    took = [o["cpu_seconds"] for o in outcomes(state, row).values() if o["status"] == "done"]
    return statistics.median(took) if took else paces(state).get(row.id)


def show(state: Path, rows: list[Row], console: Console) -> None:
    table = Table()
    for column in ("row", "runs", "done", "CPU-s a run", "CPU-s left"):
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


# --- render ---------------------------------------------------------------------------------------


HEAD = """\
# Reproduction board

Written by `python benchmarks/board.py --render` from the runs in `benchmarks/board`; the rows are
`benchmarks/board_rows.py`. Do not edit.

Each attack sees what a server sees (the global model, one client's update, the local training, the
number of records), infers its labels and keeps its best iterate by its own objective. PSNR in dB,
one number an image, under the optimal assignment of guesses to truths: median (lower quartile to
upper quartile), and the share of images at 20 dB or more. *Affine* is the PSNR after the best
change of contrast and brightness, shown where batch norm normalises by the batch: there the update
hardly carries contrast. CPU-s is the median CPU time of a run on one thread. *Paper* is the number
in the source named above each table, under the paper's own budget (thousands of iterations on
GPUs, often the best of several tries): compare orders, not digits. A dash means the paper does not
give it. A *twin* is a smaller network or image in place of the paper's, so that many pairs fit on
two CPU cores; its numbers are not the paper's setup.

**Pairs.** Settings were chosen on TUNE only: CIFAR-10 training images 0 to 7, weight seeds 100 to
107. Scores are on JUDGE: test images 10, 20, 30, … with weight seeds 0, 1, 2, …: run *k* of a row
whose update covers *n* images takes the *k*-th *n* of them and seed *k*. With batch 1 these are the
ten pairs (image 10, seed 0), (20, 1), (30, 2), (40, 3), (50, 4), (60, 5), (70, 6), (80, 7), (90, 8)
and (100, 9). The images of one batch share their weights; each is counted as a pair of its own.

*Not run* rows are too dear for two cores; the command below their table runs them. *Missing* rows
have no finished run yet.
"""

GLANCE = """## At a glance

Median PSNR in dB of the tables below, the highest search of a line in bold. Budgets are equal
within a line, not between lines; what does not exceed the mean image found nothing. *Of the rest*
is the best other attack or variant in that table; the exact recursion is no search.

![every image's PSNR by attack, on six setups](images/board.png)

| setup | mean image | IG | C2F | smooth-to-sharp | of the rest | exact recursion |
|---|---|---|---|---|---|---|
"""


def render(state: Path, rows: list[Row]) -> str:
    parts = [HEAD, *glance(state, rows)]
    for setup in SETUPS:
        own = [row for row in rows if row.setup == setup]
        if own:
            parts.append(section(state, setup, own))
    return "\n".join(parts)


DRAWN = ("c2f-normal", "twin-normal", "twin-uniform", "twin-orthogonal", "twin-fan-in", "stage-30")
"""The setups of the figure: one image a batch, so that every dot has weights of its own."""


def panels(state: Path, rows: list[Row]) -> list[Panel]:
    """What the figure shows: searches, without their variants."""
    found = []
    for name in DRAWN:
        own = [row for row in rows if row.setup.name == name and not row.variant]
        scores = {row.label: _scores(state, row) for row in own if row.attack != EXACT}
        scores = {label: values for label, values in scores.items() if values}
        if scores:
            found.append(Panel(own[0].setup.title, scores, _blank(state, own)))
    return found


def _done(state: Path, row: Row) -> dict[int, Outcome]:
    return {k: o for k, o in outcomes(state, row).items() if o["status"] == "done"}


def _scores(state: Path, row: Row) -> list[float]:
    return [value for outcome in _done(state, row).values() for value in outcome["psnr"]]


def _blank(state: Path, rows: list[Row], score: str = "psnr") -> list[float]:
    """Of the mean image, on every batch that any of the rows was run on."""
    runs = {run: outcome for row in reversed(rows) for run, outcome in _done(state, row).items()}
    return [value for run in sorted(runs) for value in runs[run][f"mean_image_{score}"]]


def glance(state: Path, rows: list[Row]) -> list[str]:
    """One line a setup in which two attacks or more were run."""
    medians: dict[Setup, dict[str, float]] = {}
    for row in rows:
        values = _scores(state, row)
        if values and not row.setup.cheap:
            medians.setdefault(row.setup, {})[row.label] = statistics.median(values)
    lines = []
    for setup in SETUPS:
        found = medians.get(setup, {})
        if len(found) < 2:
            continue
        exact = found.pop(EXACT, None)
        top = max(found.values())
        named = [found.pop(attack, None) for attack in (IG, C2F, OURS)]
        best = max(found, key=lambda label: found[label], default=None)
        cells = [_bold(value, top) for value in named]
        cells.append("–" if best is None else f"{_bold(found[best], top)} ({best})")
        cells.append(_bold(exact, None))
        blank = statistics.median(_blank(state, [row for row in rows if row.setup == setup]))
        lines.append(f"| {setup.title} | " + " | ".join([f"{blank:.1f}", *cells]) + " |")
    return [GLANCE + "\n".join([*lines, ""])] if lines else []


def _bold(value: float | None, top: float | None) -> str:
    if value is None:
        return "–"
    return f"**{value:.1f}**" if value == top else f"{value:.1f}"


def section(state: Path, setup: Setup, rows: list[Row]) -> str:
    affine = setup.batch_norm == "train"
    heads = ["attack", "paper", "median (quartiles)", "≥ 20 dB"]
    heads += ["affine"] if affine else []
    heads += ["iterations", "CPU-s", "images × runs"]
    lines = [f"## {setup.title}", "", f"`{setup.name}`. {setup.words}", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    notes: list[str] = []
    accuracies: set[float] = set()
    for row in rows:
        found = outcomes(state, row)
        done = [o for o in found.values() if o["status"] == "done"]
        accuracies |= {o["test_accuracy"] for o in done if "test_accuracy" in o}
        lines.append("| " + " | ".join(cells(row, done, affine)) + " |")
        notes += remarks(row, found)
    notes += left_out(state, setup, rows)
    values = _blank(state, rows)
    if values:
        blank = ["*mean image (knows nothing)*", "–", spread(values), share(values)]
        if affine:
            blank.append(f"{statistics.median(_blank(state, rows, 'affine_psnr')):.1f}")
        lines.append("| " + " | ".join([*blank, "–", "–", str(len(values))]) + " |")
    notes += second_stage(state, rows)
    notes += [f"the model's test accuracy was {accuracy:.0%}" for accuracy in sorted(accuracies)]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, ""])


def cells(row: Row, done: list[Outcome], affine: bool) -> list[str]:
    paper = "–" if row.paper is None else f"{row.paper:g}"
    if not done:
        state = "missing" if row.here else "not run"
        return [row.label, paper, state, "", *([""] if affine else []), "", "", ""]
    values = [v for o in done for v in o["psnr"]]
    steps = [o["facts"]["iterations"] for o in done if "iterations" in o["facts"]]
    out = [row.label, paper, spread(values), share(values)]
    if affine:
        out.append(f"{statistics.median([v for o in done for v in o['affine_psnr']]):.1f}")
    out.append(f"{statistics.median(steps):.0f}" if steps else "–")
    out.append(f"{statistics.median([o['cpu_seconds'] for o in done]):.0f}")
    runs = f" of {row.runs}" if len(done) < row.runs else ""
    out.append(f"{row.setup.batch * row.setup.steps} × {len(done)}{runs}")
    return out


def left_out(state: Path, setup: Setup, rows: list[Row]) -> list[str]:
    """The command that runs what was not run here."""
    left = [row for row in rows if not row.here and not outcomes(state, row)]
    if not left:
        return []
    each = [(row.runs, forecast(state, row)) for row in left]
    known = all(seconds is not None for _, seconds in each)
    cost = sum(runs * (seconds or 0.0) for runs, seconds in each) / 60
    words = f" (about {cost:.0f} CPU-minutes)" if known else ""
    return [f"what was not run: `python benchmarks/board.py --rows '{setup.name}/*'`{words}"]


def remarks(row: Row, found: dict[int, Outcome]) -> list[str]:
    """What a reader of the row must know beside its numbers."""
    notes = []
    done = [o for o in found.values() if o["status"] == "done"]
    for status in ("not applicable", "failed"):
        reasons = [o["error"] for o in found.values() if o["status"] == status]
        for reason in dict.fromkeys(reasons):
            notes.append(f"{row.label}: {status} in {reasons.count(reason)} runs: {reason}")
    for fact in row.facts:
        counts = Counter(str(o["facts"][fact]) for o in done if fact in o["facts"])
        if counts:
            said = ", ".join(f"{value} ({count} ×)" for value, count in counts.most_common())
            notes.append(f"{row.label}, {fact.replace('_', ' ')}: {said}")
    wrong = [o for o in done if o["labels"] is not None and o["labels"] < 1]
    if wrong:
        found_share = statistics.mean(o["labels"] for o in wrong)
        notes.append(
            f"{row.label}: labels were wrong in {len(wrong)} of {len(done)} runs "
            f"({found_share:.0%} of them right there)"
        )
    if any(changed(row, o) for o in done):
        notes.append(f"{row.label}: its default options have changed since it was run")
    return notes


def second_stage(state: Path, rows: list[Row]) -> list[str]:
    """What C2F's fine stage adds to its coarse one, where that had converged and where not."""
    by_variant = {row.variant: outcomes(state, row) for row in rows if row.attack == C2F}
    notes = []
    for whole, first in TWO_STAGES.items():
        coarse, both = by_variant.get(first, {}), by_variant.get(whole, {})
        pairs = [
            (coarse[run]["psnr"][0], both[run]["psnr"][0])
            for run in sorted(coarse.keys() & both.keys())
            if coarse[run]["status"] == both[run]["status"] == "done"
        ]
        near = [fine - rough for rough, fine in pairs if rough >= SUCCESS]
        far = [fine - rough for rough, fine in pairs if rough < SUCCESS]
        words = [
            f"{statistics.median(gains):+.1f} dB in the median of the {len(gains)} pairs {where}"
            for gains, where in ((near, "at 20 dB or more"), (far, "below"))
            if gains
        ]
        if words:
            notes.append(
                f"coarse-to-fine{', ' * bool(whole)}{whole}: its coarse stage alone, from the same "
                f"start, reached 20 dB in {len(near)} of {len(pairs)} pairs; the fine stage added "
                + ", ".join(words)
            )
    return notes


def changed(row: Row, outcome: Outcome) -> bool:
    """Whether an option that the outcome was made with has another value today."""
    today = plain(asdict(attack_of(row)))  # type: ignore[call-overload]
    then = outcome["options"]
    return any(then[key] != value for key, value in today.items() if key in then)


def spread(values: list[float]) -> str:
    tensor = torch.tensor(values, dtype=torch.float64)
    low, middle, high = tensor.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=tensor.dtype))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def share(values: list[float]) -> str:
    return f"{sum(value >= SUCCESS for value in values) / len(values):.0%}"


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
            return 3 if work(options.state, rows, options.seconds, console) else 0
    except LeakGaugeError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
