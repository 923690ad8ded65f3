"""The curious client, measured: one factor at a time from a base.

    python benchmarks/curious_client.py factors      clients, images, local steps, networks, MNIST
    python benchmarks/curious_client.py uneven       uneven batches beside even ones
    python benchmarks/curious_client.py rate         wrong learning rates, and what the search takes
    python benchmarks/curious_client.py own          what is done with the client's own part; spaces
    python benchmarks/curious_client.py bound        every client played by itself (oracle)
    python benchmarks/curious_client.py rounds       one round of the same records, or several
    python benchmarks/curious_client.py divergence   Lemma 1: super-client against clients

The base: 2 clients × 4 CIFAR-10 images, 32 × 32, LeNet-5 as PyTorch initialises it, 3 local steps
of SGD at learning rate 0.03, 150 iterations. Every run is one line of the file --out, written when
it ends: start again to go on; --show prints the tables of that file and runs nothing. Images and
weight seeds are judged pairs as on the board (board.py): test images from the folder named by
LEAKGAUGE_DATA, a new draw of weights per run; settings were chosen on training images. LPIPS needs
its weights (LEAKGAUGE_WEIGHTS). Truths enter the scores alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from board import images, judged, mean_image, rng_of
from sources import commit
from torch import Tensor, nn

from leakgauge import diagnostics, metrics, models, threat
from leakgauge.attacks import CuriousClient
from leakgauge.attacks._own import apart
from leakgauge.errors import DataError, NotApplicable
from leakgauge.fl import Scenario, setting, simulate
from leakgauge.fl.local import train
from leakgauge.tensors import norm, subtract, weighted_mean
from leakgauge.types import Batch, Dataset, LocalTraining, Round, ThreatModel

Outcome = dict[str, Any]
SIDES = {"cifar10": 32, "mnist": 28}
ITERATIONS = 150  # of 300 by default: on training images LeNet-5 has converged


@dataclass(frozen=True)
class Case:
    """A federation and how it is attacked. `sizes` are the records of each client."""

    sizes: tuple[int, ...] = (4, 4)
    steps: int = 3
    lr: float = 0.03
    data: str = "cifar10"
    model: str = "lenet-5"
    width: float | None = None
    actor: str = "client"
    rounds: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def attack(self) -> CuriousClient:
        return CuriousClient(**({"exact": False, "iterations": ITERATIONS} | self.options))

    def network(self, run: int) -> nn.Module:
        source = images(self.data, "test", SIDES[self.data])
        options: dict[str, Any] = {} if self.width is None else {"width": self.width}
        if self.model == "lenet-5":
            options["padding"] = 2 if self.data == "mnist" else 0
        return models.make(
            self.model, shape=tuple(source.inputs.shape[1:]), classes=10,
            rng=torch.Generator().manual_seed(run), **options,
        )  # fmt: skip


def private(case: Case, run: int) -> Dataset:
    """The records of all clients of a run: judged pairs of the board."""
    chosen, _ = judged(sum(case.sizes), run)
    source = images(case.data, "test", SIDES[case.data])
    return Dataset(source.name, source.inputs[chosen], source.labels[chosen], source.classes)


def played(case: Case, run: int) -> Round:
    """The attacked round. Clients of different sizes take each step on all that they hold."""
    records = private(case, run)
    average = sum(case.sizes) // len(case.sizes)
    training = LocalTraining(lr=case.lr, steps=case.steps, batch_size=average, batch_norm="eval")
    scenario = Scenario(
        lambda: case.network(run), records, training, clients=len(case.sizes), rounds=case.rounds
    )
    round_ = simulate(scenario, rng_of("round", run), keep=case.rounds)
    if len({*case.sizes}) == 1:
        return round_
    parts = torch.arange(len(records)).split(list(case.sizes))
    truths = tuple(Batch(records.inputs[part], records.labels[part]) for part in parts)
    updates = tuple(
        train(round_.setting, t, replace(training, batch_size=len(t)), rng_of("round", run)).update
        for t in truths
    )
    weights = tuple(len(t) / len(records) for t in truths)
    mean = weighted_mean(updates, weights)
    before = dict(round_.model.named_parameters())
    after = {name: before[name].detach() - value for name, value in mean.items()}
    return replace(
        round_, truths=truths, updates=updates, weights=weights, sizes=case.sizes, after=after
    )


@cache
def lpips() -> Callable[[Tensor, Tensor], Tensor] | None:
    try:
        return metrics.load_lpips()
    except DataError:
        return None


def scores(guess: Tensor, truth: Tensor) -> Outcome:
    found: Outcome = {"psnr": metrics.psnr(guess, truth).tolist()}
    scorer = lpips()
    return found if scorer is None else found | {"lpips": scorer(guess, truth).tolist()}


def attacked(case: Case, run: int) -> Outcome:
    round_, attack = played(case, run), case.attack
    grants = threat.granted(ThreatModel()) | ({"clients"} if attack.explicit else set())
    if attack.counts or attack.clients:
        grants -= {"records"}
    who = ThreatModel(case.actor, frozenset(grants), rounds=case.rounds + 1)  # type: ignore[arg-type]
    threat.check("curious-client", attack, who)
    seen, truth = threat.observe(round_, who), threat.covered(round_, who)
    began = time.process_time()
    guess = attack.reconstruct(seen, rng_of("attack", run))
    seconds = time.process_time() - began
    guess = apart(guess, seen)
    index = metrics.assign.optimal(guess.inputs, truth.inputs)
    mean = mean_image(case.data, SIDES[case.data]).expand_as(truth.inputs)
    return {
        "seconds": round(seconds, 1),
        "residual": guess.residual,
        "tag": threat.realism(who, attack),
        "labels": sorted((guess.labels if guess.labels is not None else index).tolist())
        == sorted(truth.labels.tolist()),
        "facts": {k: guess.facts[k] for k in ("own", "chosen", "rounds") if k in guess.facts},
        "notes": list(guess.notes),
        "mean": scores(mean, truth.inputs),
        **scores(guess.inputs[index], truth.inputs),
    }


# --- tables ---------------------------------------------------------------------------------------


def even(clients: int, each: int, **more: Any) -> Case:
    return Case(sizes=(each,) * clients, **more)


def factors() -> Iterable[tuple[str, Case]]:
    yield "1 client × 4, seen by its server", even(1, 4, actor="server")
    for clients in (2, 4, 8):
        yield f"{clients} clients × 4", even(clients, 4)
    for each in (8, 16):
        yield f"2 clients × {each}", even(2, each)
    for steps in (1, 5):
        yield f"2 clients × 4, τ = {steps}", even(2, 4, steps=steps)
        yield f"4 clients × 4, τ = {steps}", even(4, 4, steps=steps)
    yield "2 clients × 4, behind an aggregate", even(2, 4, actor="aggregate")
    for clients in (2, 4):
        yield f"MNIST, {clients} clients × 4", even(clients, 4, data="mnist")
    for clients, steps in ((2, 1), (4, 1), (2, 3)):
        yield (
            f"ResNet-9 ¼ wide, {clients} clients × 4, τ = {steps}",
            even(clients, 4, steps=steps, model="resnet-9", width=0.25),
        )
    yield (
        "ResNet-10, 2 clients × 1, τ = 1, exact recursion first",
        even(2, 1, steps=1, model="resnet-10", options={"exact": True, "iterations": 50}),
    )


def uneven() -> Iterable[tuple[str, Case]]:
    for clients in (2, 4):
        half = clients // 2
        yield f"{clients} clients × 6", even(clients, 6, actor="aggregate")
        sizes = (8,) * half + (4,) * half
        yield f"{clients} clients, 8 and 4", Case(sizes=sizes, actor="aggregate")


def rate() -> Iterable[tuple[str, Case]]:
    lrs = [0.03 * factor for factor in (0.25, 0.5, 1, 2, 4)]
    for lr in sorted([*lrs, *(0.03 * factor for factor in (0.8, 0.9, 1.1, 1.25))]):
        yield f"takes {lr:g} for 0.03", Case(options={"lrs": (lr,)} if lr != 0.03 else {})
    yield "search over these five", Case(options={"lrs": tuple(lrs), "tries": 60})
    yield "search over 2, 3, 4 clients", Case(options={"clients": (2, 3, 4), "tries": 60})


def own() -> Iterable[tuple[str, Case]]:
    for clients in (2, 4):
        yield f"{clients} clients × 4, own: subtract", even(clients, 4)
        for way in ("candidates", "ignore"):
            yield f"{clients} clients × 4, own: {way}", even(clients, 4, options={"own": way})
    yield "factor 2", Case(options={"factor": 2})
    yield "all pixels", Case(options={"space": "pixels"})
    yield "cosine distance", Case(options={"distance": "cosine"})


def bound() -> Iterable[tuple[str, Case]]:
    for clients, steps, lr in ((4, 3, 0.03), (4, 5, 0.03), (4, 5, 0.3)):
        for explicit in (False, True):
            words = "each client by itself" if explicit else "super-client"
            options = {"explicit": True} if explicit else {}
            yield (
                f"{clients} clients × 4, τ = {steps}, lr {lr:g}: {words}",
                even(clients, 4, steps=steps, lr=lr, options=options),
            )


def rounds() -> Iterable[tuple[str, Case]]:
    for clients in (2, 4):
        for way in ("last", "all"):
            words = "the last of 3 rounds" if way == "last" else "all 3 rounds"
            yield (
                f"{clients} clients × 4, {words}",
                even(clients, 4, rounds=2, options={"rounds": way}),
            )


TABLES = {
    "factors": factors, "uneven": uneven, "rate": rate, "own": own, "bound": bound,
    "rounds": rounds,
}  # fmt: skip


def key_of(case: Case) -> str:
    """Of what is run: the tables share their rows."""
    return json.dumps(asdict(case), sort_keys=True)


def known(path: Path) -> dict[tuple[str, int], Outcome]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return {(line["key"], line["run"]): line for line in lines}


def keep(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome, ensure_ascii=False) + "\n")


def middle(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "–"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(title: str, lines: list[Outcome]) -> str:
    done = [line for line in lines if "psnr" in line]

    def pooled(name: str, of: str | None = None) -> list[float]:
        return [v for o in done for v in (o[of] if of else o).get(name, ())]

    chosen = [o["facts"]["chosen"] for o in done if "chosen" in o["facts"]]
    said = "; ".join(f"{c['lr']:g}, {c['records']}" for c in chosen)
    labels = sum(o["labels"] for o in done)
    cells = [
        title + (f" (took: {said})" if said else ""),
        middle(pooled("psnr"), 1),
        middle(pooled("lpips"), 3),
        middle(pooled("psnr", "mean"), 1),
        middle(pooled("lpips", "mean"), 3),
        f"{statistics.median([o['residual'] for o in done]):.1e}" if done else "–",
        f"{labels} of {len(done)}",
        f"{statistics.median([o['seconds'] for o in done]):.0f}" if done else "–",
        f"{len(pooled('psnr'))} × {len(done)}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| | PSNR in dB, median (quartiles) | LPIPS | PSNR of the mean image | its LPIPS | residual "
    "| all labels right | CPU-s | images, draws |\n|---|---|---|---|---|---|---|---|---|"
)


def table(what: str, given: argparse.Namespace) -> None:
    print(HEAD, flush=True)
    for title, case in TABLES[what]():
        if not fnmatch.fnmatchcase(title, given.only):
            continue
        held, lines = known(given.out), []
        for run in range(given.runs):
            key = key_of(case), run
            if key not in held and not given.show:
                outcome: Outcome = {"key": key[0], "run": run, "commit": commit()}
                try:
                    outcome |= attacked(case, run)
                except NotApplicable as reason:
                    outcome["refused"] = str(reason)
                keep(given.out, outcome)
                held[key] = outcome
            lines += [held[key]] if key in held else []
        if lines:
            print(row(title, lines), flush=True)


# --- Lemma 1 --------------------------------------------------------------------------------------


def divergence(given: argparse.Namespace) -> None:
    """Computed again at every call: it takes seconds. In float64. The lemma is about the mean over
    draws of records (a vector), one audit meets one draw: both norms are shown."""
    print("| K × n | τ | η | ‖δ‖/‖u‖, median of draws | ratio to τ = 2 | n(n−1)/2 | ‖mean of δ‖ "
          "| η²τ(τ−1)(K−1)/N |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for clients, each, lr in ((2, 4, 0.003), (4, 4, 0.003), (8, 4, 0.003), (4, 16, 0.003),
                              (4, 4, 0.03), (4, 4, 0.3)):  # fmt: skip
        first = None
        for steps in (1, 2, 3, 5):
            case = even(clients, each, steps=steps, lr=lr)
            found, deltas = [], []
            for run in range(given.draws):
                one, delta = diverged(case, run)
                found.append(one)
                deltas.append(delta)
            size = statistics.median(one.relative for one in found)
            mean = norm({n: torch.stack([d[n] for d in deltas]).mean(0) for n in deltas[0]})
            absolute = statistics.median(one.absolute for one in found)
            first = absolute if steps == 2 else first
            ratio = f"{absolute / first:.2f}" if first else "–"
            cells = [
                f"{clients} × {each}", f"{steps}", f"{lr:g}", f"{size:.1e}", ratio,
                f"{steps * (steps - 1) // 2}", f"{mean:.1e}", f"{found[0].predicted:.1e}",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


def diverged(case: Case, run: int) -> tuple[diagnostics.Divergence, dict[str, Tensor]]:
    """One draw of records at the same weights, and δ itself."""
    records = private(case, run)
    wide = setting(case.network(0).double(), tuple(records.inputs.shape[1:]), classes=10)
    parts = torch.arange(len(records)).split(list(case.sizes))
    truths = [Batch(records.inputs[p].double(), records.labels[p]) for p in parts]
    training = LocalTraining(lr=case.lr, steps=case.steps, batch_size=len(truths[0]))

    def update(batch: Batch) -> dict[str, Tensor]:
        how = replace(training, batch_size=len(batch))
        return train(wide, batch, how, rng_of("d", run)).update

    whole = Batch(records.inputs.double(), records.labels)
    mean = weighted_mean([update(t) for t in truths], [1 / len(truths)] * len(truths))
    return diagnostics.divergence(wide, truths, training), subtract(mean, update(whole))


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=[*TABLES, "divergence"])
    add("--out", type=Path, default=Path("curious_client.jsonl"), help="a line per run")
    add("--show", action="store_true", help="print what the file holds, run nothing")
    add("--only", default="*", metavar="GLOB", help="only rows with such a title")
    add("--runs", type=int, default=5)
    add("--draws", type=int, default=15, help="of records, for the divergence")
    given = parser.parse_args(arguments)
    divergence(given) if given.what == "divergence" else table(given.what, given)


if __name__ == "__main__":
    main()
