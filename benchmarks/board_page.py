"""The board as a page: `docs/board.md`, from the runs on disk. See `board.py`."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from board_figure import Panel
from board_rows import C2F, EXACT, IG, OURS, SETUPS, TWO_STAGES, Row, Setup
from board_state import Outcome, attack_of, code_of, forecast, outcomes, plain
from sources import commit

SUCCESS = 20.0  # dB: "very high" risk

HEAD = """\
# Reproduction board

Written by `python benchmarks/board.py --render` from the runs in `benchmarks/board`; the rows are
`benchmarks/board_rows.py`. Do not edit.

Each attack sees what a server sees (the global model, one client's update, the local training, the
number of records), infers its labels and keeps its best iterate by its own objective. PSNR in dB,
one number per image, under the optimal assignment of guesses to truths: median (lower quartile to
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

*Not run* rows take too long on two cores; the command below their table runs them. *Missing* rows
have no finished run yet.
"""

GLANCE = """## At a glance

Median PSNR in dB of the tables below, the highest search of a line in bold. Budgets are equal
within a line, not between lines; what does not exceed the mean image found nothing. *Of the rest*
is the best other attack or variant in that table; the exact recursion is no search.

The line with ReLU and train batch norm shows what *searches* find there: no more than a mean image.
That is no protection: linear algebra takes such updates apart.
[Separate and decode](methods/separate-and-decode.md#measured), which holds public images too, has
its rows on its own page: untrained ResNet-10, ReLU, train batch norm: every image of five draws at
83 dB or more in batches of 4, 8 and 16 and in four local steps of batch 4; in batches of 24 at 80
dB or more in four draws and 27 or more in the fifth; trained to 81 %, batch 8: 24 dB.
[GIT and LTI](methods/git.md#measured), which learn from public pairs and hold no weights, stand
beside the numbers of their papers on the page of GIT.
The [curious client](methods/curious-client.md#measured), who reads the mean of all clients, has its
rows beside what its paper says of each factor on its own page.

![every image's PSNR by attack, on six setups](images/board.png)

| setup | mean image | IG | C2F | smooth-to-sharp | of the rest | exact recursion |
|---|---|---|---|---|---|---|
"""


AGE = """\
**Age.** When this page was written{at}, {before} of {done} rows were from before runs noted their
commit (†), and of {since} the code had changed since the run, at the commit named beside ‡: the
attack, or what it imports of LeakGauge. Changed code need not change a result; marked rows have not
been run again to see. A test runs the rows of CI and holds them against this page.
"""


def render(state: Path, rows: list[Row]) -> str:
    parts = [HEAD, age(state, rows), *glance(state, rows)]
    for setup in SETUPS:
        own = [row for row in rows if row.setup == setup]
        if own:
            parts.append(section(state, setup, own))
    return "\n".join(parts)


def age(state: Path, rows: list[Row]) -> str:
    marks = [mark(row, list(done.values())) for row in rows if (done := _done(state, row))]
    at = "" if commit() == "unknown" else f" (commit {short(commit())})"
    before, since = (sum(m.startswith(sign) for m in marks) for sign in "†‡")
    return AGE.format(before=before, since=since, done=len(marks), at=at)


def mark(row: Row, done: list[Outcome]) -> str:
    """Whether runs of the row are older than the code that they measure; nothing if none is."""
    old = [o for o in done if o.get("code") != code_of(row)]
    if any("code" not in o for o in old):
        return "†"
    return "‡ " + ", ".join(dict.fromkeys(short(o["commit"]) for o in old)) if old else ""


def short(commit: str) -> str:
    """A commit in seven digits, and what is said behind it."""
    number, *words = commit.split(" ")
    return " ".join([number[:7], *words])


DRAWN = ("c2f-normal", "twin-normal", "twin-uniform", "twin-orthogonal", "twin-fan-in", "stage-30")
"""The setups of the figure: one image per batch, so that every dot has weights of its own."""


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
    runs = {run: outcome for row in rows for run, outcome in _done(state, row).items()}
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
    out = [f"{row.label} {mark(row, done)}".rstrip(), paper, spread(values), share(values)]
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
