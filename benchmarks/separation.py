"""Separation under ordinary training, measured: batch norm in train mode, ReLU, several steps.

    python benchmarks/separation.py peel         records told apart, labels, and the error of the
                                                 activations at every node reached
    python benchmarks/separation.py images       the whole attack, beside what knows less
    python benchmarks/separation.py rivals       other attacks with the same CPU-seconds
    python benchmarks/separation.py stops        defences and precision, batch 4
    python benchmarks/separation.py beyond       batches above the limit: what is said

Every run is one line of the file --out, written when it ends: start again to go on, runs that are
there are not made again; --show prints the tables of that file and runs nothing. Images and weight
seeds are the judged pairs of the board (board.py): CIFAR-10 test images, 32 × 32, from the folder
named by LEAKGAUGE_DATA, a new draw of weights per run, Kaiming-normal fan-out (VGG: PyTorch's own).
Nothing was chosen on them. Public images are those of the training split, or with --public photos
the photographs that an audit takes where it is given none. --net FILE takes trained weights instead
(train_network.py makes them). Truths enter the scores alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from board import images, judged, mean_image, rng_of
from exact import OWN, SCALE, SHARES, Noise, Quantise, network
from scipy.optimize import linear_sum_assignment
from sources import commit
from torch import Tensor, fx, nn

from leakgauge import metrics, models, threat
from leakgauge.attacks import ATTACKS, SeparateAndDecode, exposure, separable
from leakgauge.attacks._decoder import decode
from leakgauge.attacks._trace import Trace
from leakgauge.attacks.exact_recursion import Read
from leakgauge.defences import Clip, Prune
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, setting, simulate
from leakgauge.fl.local import advance, minibatches, outputs, ready, start
from leakgauge.fl.simulate import target
from leakgauge.kept import Checkpoint, key_of
from leakgauge.metrics.labels import multiset_accuracy
from leakgauge.tensors import parameters
from leakgauge.types import (
    Batch,
    Dataset,
    Defence,
    Iterative,
    Kept,
    LocalTraining,
    Named,
    Observation,
    Resources,
    Round,
    ThreatModel,
)

SEPARATED = 1e-6  # 1 − cos of a record's activations, at most
GALLERY = 1000
MOVING = {"momentum": 0.9, "weight_decay": 5e-4}
RIVALS: dict[str, dict[str, Any]] = {
    "inverting-gradients": {},
    "fedleak": {"space": "generator"},
    "gradinversion": {},
    "smooth-to-sharp": {},
}
DEFENCES: dict[str, Defence | None] = {
    "none": None,
    "clipped to norm 0.0001": Clip(norm=1e-4),
    **{f"noise {s:g}": Noise(s) for s in SHARES},
    **{f"pruned {s:.0%}": Prune(share=s) for s in (0.01, 0.1, 0.3, 0.5)},
    **{f"{b} bits": Quantise(b) for b in (16, 12, 8, 6, 4)},
}

Outcome = dict[str, Any]


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A federation to attack. `net` names trained weights, with a digest of their file."""

    model: str
    batch: int
    steps: int = 1
    epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    sends: str = "update"
    defence: str = "none"
    width: float = 1.0
    net: str = ""
    mode: str = "train"
    norm: str = "batch"

    @property
    def records(self) -> int:
        """An epoch is made of `steps` batches."""
        return self.batch * self.steps

    @property
    def training(self) -> LocalTraining:
        return LocalTraining(
            lr=0.01, batch_size=self.batch, steps=self.steps, epochs=self.epochs,
            momentum=self.momentum, weight_decay=self.weight_decay,
            batch_norm=self.mode,  # type: ignore[arg-type]
            sends=self.sends,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def title(self) -> str:
        words = [self.model + (f", width {self.width:g}" if self.width != 1 else "")]
        words += [f"trained ({self.net.split(':')[0]})"] if self.net else []
        size = f"batch {self.batch}" if self.steps == 1 else f"{self.steps} × {self.batch}"
        words += [size + (f", {self.epochs} epochs" if self.epochs else "")]
        words += [f"momentum {self.momentum:g}"] if self.momentum else []
        words += [f"decay {self.weight_decay:g}"] if self.weight_decay else []
        words += ["sends weights"] if self.sends == "weights" else []
        words += ["eval mode"] if self.mode == "eval" else []
        words += [f"{self.norm} norm"] if self.norm != "batch" else []
        return ", ".join(words + ([self.defence] if self.defence != "none" else []))

    def network(self, run: int, net: Path | None) -> nn.Module:
        options = {} if self.model in OWN else {"width": self.width, "norm": self.norm}
        model = network(self.model, run, **options)
        if net is not None:
            models.load(model, net)
        return model


def first(given: argparse.Namespace) -> Case:
    """What all cases have in common."""
    net = named(given.net)
    return Case("resnet-10", 4, width=given.width, net=net, mode=given.mode, norm=given.norm)


def chains(given: argparse.Namespace) -> list[Case]:
    """What `peel` measures: steps, epochs and what is sent, each with up to 24 appearances of
    records."""
    found = []
    for name in given.model or ("resnet-10", "resnet-18"):
        one = replace(first(given), model=name, batch=8)
        found += [replace(one, batch=batch) for batch in (4, 8, 16, 24)]
        found += [
            replace(one, batch=batch, steps=steps, **MOVING)
            for steps, batch in ((1, 8), (2, 4), (2, 8), (4, 4))
        ]
        found += [replace(one, epochs=2, **MOVING)]
        found += [
            replace(one, sends="weights"),
            replace(one, steps=2, sends="weights", **MOVING),
        ]
    return found


def shown(given: argparse.Namespace) -> list[Case]:
    """What `images` and `rivals` measure."""
    one = first(given)
    sizes = [(1, batch) for batch in (4, 8, 16, 24)] + [(4, 4)]
    return [
        replace(one, model=name, batch=batch, steps=steps, defence=defence)
        for name in given.model or ("resnet-10",)
        for steps, batch in sizes
        for defence in given.defence or ("none",)
    ]


def stopped(given: argparse.Namespace) -> list[Case]:
    one = first(given)
    more = [replace(one, sends="weights")]
    return [
        case
        for name in given.model or ("resnet-10",)
        for case in [replace(one, model=name, defence=d) for d in DEFENCES]
        + [replace(m, model=name) for m in more]
    ]


def beyond(given: argparse.Namespace) -> list[Case]:
    one = first(given)
    names = given.model or ("resnet-10", "resnet-18")
    return [replace(one, model=name, batch=batch) for name in names for batch in (32, 64)]


def named(net: Path | None) -> str:
    if net is None:
        return ""
    return f"{net.parent.name}/{net.stem}:{hashlib.sha256(net.read_bytes()).hexdigest()[:12]}"


# --- one run --------------------------------------------------------------------------------------


def played(case: Case, run: int, net: Path | None) -> tuple[Round, Observation, Batch]:
    chosen, _ = judged(case.records, run)
    source = images("cifar10", "test", 32)
    private = Dataset(source.name, source.inputs[chosen], source.labels[chosen], source.classes)
    scenario = Scenario(
        lambda: case.network(run, net), private, case.training, records=case.records,
        defence=DEFENCES[case.defence], scale=SCALE,
    )  # fmt: skip
    round_ = simulate(scenario, torch.Generator().manual_seed(run))
    actor = ThreatModel()
    return round_, threat.observe(round_, actor), threat.covered(round_, actor)


class Truth:
    """What the records caused inside the client: its steps, and the weights that each began with,
    from a replay in the client's own precision. (One in double precision has other masks here and
    there, and after a step other weights than the client's.)"""

    def __init__(self, seen: Observation, batch: Batch) -> None:
        training = seen.training
        assert training is not None
        self.entering = seen.record.entering(batch.inputs.double())
        self.steps = minibatches(len(batch), training)
        self.labels = torch.cat([batch.labels[step] for step in self.steps])
        live = ready(seen.model, training)
        before = parameters(live)
        entering = seen.record.entering(batch.inputs)
        buffers = {name: value.clone() for name, value in live.named_buffers()}
        state = start([value.detach() for value in before.values()], training)
        self.weights: list[Named] = []
        for number, step in enumerate(self.steps):
            now = dict(zip(before, state.weights, strict=True))
            self.weights.append({name: value.detach() for name, value in now.items()})
            leaves = {name: value.detach().requires_grad_() for name, value in now.items()}
            out = outputs(live, leaves | buffers, entering[step], training, number)
            loss = seen.task.loss(out, batch.labels[step])
            slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            with torch.no_grad():
                state = advance(state, slopes, training)

    def at(self, trace: Trace, node: fx.Node) -> list[Tensor]:
        """The values of a node, step by step."""
        found = []
        for step, weights in zip(self.steps, self.weights, strict=True):
            with trace.holding(weights), torch.no_grad():
                found.append(trace.forward(self.entering[step], [node])[node])
        return found


def paired(found: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Which row of `found` belongs to each row of `true`, and 1 − cos of the two."""
    found, true = (torch.nn.functional.normalize(one.flatten(1)) for one in (found, true))
    apart = torch.cdist(true, found, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    rows, columns = linear_sum_assignment(apart.numpy())
    return torch.from_numpy(columns), apart[rows, columns]


def told_apart(maps: Tensor, labels: Tensor, true: Tensor, truth: Truth) -> tuple[Outcome, Tensor]:
    index, apart = paired(maps, true)
    return {
        "separated": float((apart <= SEPARATED).double().mean()),
        "worst": float(apart.max()),
        "labels": float((labels[index] == truth.labels).double().mean()),
    }, index


def peeled(case: Case, run: int, given: argparse.Namespace) -> Outcome:
    """Records told apart, and the error at every node reached, of the worst step, after one scale
    per step."""
    _, seen, batch = played(case, run, given.net)
    began = time.process_time()
    read = Read(seen, rng_of("separation", run), Resources())
    seconds = time.process_time() - began
    truth = Truth(seen, batch)
    true = torch.cat(truth.at(read.trace, read.begun.source))
    told, index = told_apart(read.begun.maps, read.begun.labels, true, truth)
    sizes = [len(step) for step in truth.steps]
    errors = {}
    for node, value in read.done.known.items():
        parts = zip(truth.at(read.trace, node), value[index].split(sizes), strict=True)
        errors[node.name] = max(after_scale(found, wanted) for wanted, found in parts)
    return told | {
        "layer": str(read.begun.layer.target),
        "errors": errors,
        "stopped": read.done.stopped,
        "seconds": seconds,
    }


def after_scale(found: Tensor, wanted: Tensor) -> float:
    scale = (found * wanted).sum() / found.square().sum().clamp_min(1e-300)
    return float((scale * found - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class Watched(SeparateAndDecode):
    """The attack; `begun` is the node that it decoded, what it had read, and its first images."""

    begun: list[Any] = field(default_factory=list, init=False, compare=False)

    def _decoded(self, read: Read, kept: Kept) -> tuple[str, Tensor, list[str]]:
        node, images, notes = super()._decoded(read, kept)
        self.begun[:] = [node, read, images]
        return node, images, notes


def attacked(case: Case, run: int, given: argparse.Namespace) -> Outcome:
    """The whole attack, beside its decoder alone, its decoder on records that are not in the batch,
    and the mean image."""
    attack = Watched(steps=given.fit_steps, images=given.fit_images, evaluations=given.evaluations)
    round_, seen, batch = played(case, run, given.net)
    kept = prepared(attack, round_, given.public, given.keep)
    seen = replace(seen, kept=kept)
    began = time.process_time()
    guess = attack.reconstruct(seen, rng_of("images", run), Resources())
    seconds = time.process_time() - began
    outcome: Outcome = {
        "attack": scores(guess.inputs, batch),
        "labels": label_share(guess.labels, batch),
        "seconds": seconds,
        "fit_seconds": kept.facts["prepared_seconds"],
        "decoder_psnr": guess.facts.get("decoder_psnr"),
        "residual": guess.residual,
        "facts": {k: v for k, v in guess.facts.items() if isinstance(v, str | int | float)},
        "notes": list(guess.notes),
        "mean image": scores(mean_image("cifar10", 32).expand_as(batch.inputs), batch),
    }
    if attack.begun and (node := attack.begun[0]):
        read, begin = attack.begun[1:]
        begin = seen.record.leaving(begin).clamp(0, 1)[read.begun.once(len(batch))]
        outcome["decoder"] = scores(begin, batch)
        outcome["not in the batch"] = scores(
            strangers(case, run, seen, kept, read.trace.named(node), read.trace), batch
        )
    return outcome


def prepared(attack: SeparateAndDecode, round_: Round, public: str, folder: Path | None) -> Kept:
    """The decoder for this model and training: from the folder, or fitted and put there."""
    aim = target(round_, images(public, "train", 32))
    key = key_of(attack, aim)
    done = part = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        done = Checkpoint(folder / f"{key}.finished.safetensors", key)
        part = Checkpoint(folder / f"{key}.safetensors", key)
        if (kept := done.load()) is not None:
            return kept
    began = time.process_time()
    made = attack.prepare(aim, rng_of("prepare"), Resources(checkpoint=part)).kept
    seconds = time.process_time() - began
    # Of a fit that was interrupted, what came before counts too: the decoder keeps that count.
    seconds = max(seconds, float(made.facts.get("cpu_seconds", 0.0)))
    kept = Kept(made.tensors, dict(made.facts) | {"prepared_seconds": seconds})
    if done is not None and part is not None:
        done.save(kept)
        part.path.unlink(missing_ok=True)
    return kept


def strangers(
    case: Case, run: int, seen: Observation, kept: Kept, node: fx.Node, trace: Trace
) -> Tensor:
    """The decoder's images of test images that are not in the batch: what it shows of itself."""
    chosen = [i + 3 for i in judged(case.records, run)[0]]
    others = images("cifar10", "test", 32).inputs[chosen].double()
    found = []
    for part in others.split(case.batch):
        with torch.no_grad():
            value = trace.forward(seen.record.entering(part), [node])[node]
        found.append(decode(kept, node.name, value))
    return torch.cat(found)


@cache
def lpips() -> Callable[[Tensor, Tensor], Tensor] | None:
    return metrics.load_lpips() if os.environ.get("LEAKGAUGE_WEIGHTS") else None


def scores(guess: Tensor, batch: Batch) -> Outcome:
    """One number per image, under the optimal assignment; a truth without a guess has the mean."""
    truth = batch.inputs
    index = metrics.assign.optimal(guess, truth)
    shown = mean_image("cifar10", 32).expand_as(truth).clone()
    shown[index >= 0] = guess[index[index >= 0]].to(shown)
    # Judged images stand at multiples of ten, these do not.
    others = images("cifar10", "test", 32).inputs[5::10][: GALLERY - len(truth)]
    places = torch.arange(len(truth))
    found: Outcome = {
        "psnr": metrics.psnr(shown, truth).tolist(),
        "affine": metrics.affine_psnr(shown, truth).tolist(),
        "found": metrics.reidentified(shown, places, torch.cat([truth, others])).tolist(),
    }
    scorer = lpips()
    return found | ({"lpips": scorer(shown, truth).tolist()} if scorer else {})


def label_share(labels: Tensor | None, batch: Batch) -> float | None:
    return None if labels is None else multiset_accuracy(labels, batch.labels, 10)


class _Enough(Exception):
    """The pace is known."""


def rival(name: str, case: Case, run: int, seconds: float, given: argparse.Namespace) -> Outcome:
    """Another attack, with as many iterations as these seconds hold by its first ones."""
    options = dict(RIVALS[name])
    if name == "gradinversion" and case.net:
        options["statistics"] = "running"
    attack: Any = ATTACKS[name](**options)
    assert isinstance(attack, Iterative)
    _, seen, batch = played(case, run, given.net)
    stamps: list[float] = []
    total = 0

    def progress(done: int, steps: int, objective: float) -> None:
        nonlocal total
        total = steps
        stamps.append(time.process_time())
        if len(stamps) > 4 and stamps[-1] - stamps[0] > min(3.0, seconds / 10):
            raise _Enough

    began = time.process_time()
    try:
        attack.reconstruct(seen, rng_of("pace"), Resources(progress=progress))
    except _Enough:
        each = (stamps[-1] - stamps[0]) / (len(stamps) - 1)
        spared = max(seconds - (stamps[0] - began), 0.0)
        iterations = max(10, round(spared / each * attack.iterations / total))
        attack = attack.shortened(iterations, attack.restarts)
    began = time.process_time()
    guess = attack.reconstruct(seen, rng_of(name, run), Resources(seconds=3 * seconds))
    return {
        "attack": scores(guess.inputs, batch),
        "labels": label_share(guess.labels, batch),
        "seconds": time.process_time() - began,
        "iterations": guess.iterations,
        "given": seconds,
        "stopped": guess.stopped,
        "residual": guess.residual,
    }


def asked(case: Case, run: int, given: argparse.Namespace) -> Outcome:
    """A batch above the limit: what the exposure says beforehand, and the attack."""
    _, seen, batch = played(case, run, given.net)
    said = exposure(seen.setting, case.training, case.records)
    outcome: Outcome = {"exposed": said.exposed, "limit": said.limit, "at": said.layer}
    began = time.process_time()
    try:
        found = separable(seen, rng_of("separation", run))
        outcome |= {"labels": label_share(found.labels, batch), "words": ""}
    except NotApplicable as reason:
        outcome |= {"words": str(reason)}
    return outcome | {"seconds": time.process_time() - began}


# --- lines and tables -----------------------------------------------------------------------------


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def share(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1%}".replace(".0%", "%")


def refusal(lines: list[Outcome]) -> str:
    """What was said by the runs that were refused, once: of the layer that tells most."""
    refused = [line for line in lines if "refused" in line]
    if not refused:
        return ""
    words = said_of(refused[0]["refused"], refused[0]["at"])
    return f"refused {len(refused)} of {len(lines)}: {words}"


def said_of(words: str, layer: str | None) -> str:
    """The reason that a refusal names for a layer, or all of it."""
    _, found, rest = words.partition(f"{layer}: ")
    return rest.split("; ")[0] if found else words


def peel_row(title: str, lines: list[Outcome]) -> str:
    some = [line for line in lines if "refused" not in line]
    if not some:
        return f"| {title} | {len(lines)} | – | – | – | – | – | – | {refusal(lines)} |"
    names = list(max((o["errors"] for o in some), key=len))
    errors = []
    for name in names:
        values = [o["errors"][name] for o in some if name in o["errors"]]
        reached = "" if len(values) == len(some) else f" ({len(values)} of {len(some)})"
        errors.append(f"{name} {middle(values):.1e}{reached}")
    lowest = [list(o["errors"].values())[-1] for o in some]
    return (
        f"| {title} | {len(lines)} | {share([o['separated'] for o in some])} "
        f"| {middle([o['worst'] for o in some]):.0e} (≤ {max(o['worst'] for o in some):.0e}) "
        f"| {share([o['labels'] for o in some])} | {'; '.join(errors)} "
        f"| {middle(lowest):.1e} (≤ {max(lowest):.1e}) "
        f"| {middle([o['seconds'] for o in some]):.0f} | {refusal(lines)} |"
    )


def cells(parts: list[Outcome]) -> str:
    """Raw and affine PSNR, LPIPS and the share found, over all images of all runs."""

    def over(key: str, digits: int) -> str:
        values = [v for part in parts for v in part.get(key, [])]
        if not values:
            return "–"
        low, high = min(values), max(values)
        return f"{middle(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"

    found = [v for part in parts for v in part["found"]]
    return f"{over('psnr', 1)} | {over('affine', 1)} | {over('lpips', 3)} | {share(found)}"


def image_rows(title: str, lines: list[Outcome]) -> str:
    some = [line for line in lines if "refused" not in line]
    if not some:
        return f"| {title} | {len(lines)} | – | – | – | – | – | – | – | {refusal(lines)} |"
    labels = [o["labels"] for o in some if o["labels"] is not None]
    nodes = sorted({str(o.get("facts", {}).get("peeled_to", "")) for o in some} - {""})
    turns = [o["iterations"] for o in some if "iterations" in o]
    end = f"{middle(turns):.0f}" if turns else ", ".join(nodes)
    said = "; ".join(filter(None, [end, refusal(lines)]))
    fit = [o["fit_seconds"] for o in some if "fit_seconds" in o]
    rows = [
        f"| {title} | {len(lines)} | {cells([o['attack'] for o in some])} "
        f"| {share(labels) if labels else '–'} | {f'{middle(fit):.0f}' if fit else '–'} "
        f"| {middle([o['seconds'] for o in some]):.0f} | {said} |"
    ]
    for what, words in (
        ("decoder", "its decoder alone"),
        ("not in the batch", "its decoder on records not in the batch"),
        ("mean image", "the mean image"),
    ):
        parts = [o[what] for o in some if what in o]
        if parts:
            rows.append(f"| … {words} | {len(parts)} | {cells(parts)} | – | – | – | |")
    return "\n".join(rows)


def beyond_row(title: str, lines: list[Outcome]) -> str:
    one = lines[0]
    limits = sorted({o["limit"] for o in lines})
    words = (
        said_of(one["words"], one["at"])
        or f"separated, labels {share([o['labels'] for o in lines])}"
    )
    told = f"{', '.join(map(str, limits))} at {one['at']}"
    seconds = middle([o["seconds"] for o in lines])
    return f"| {title} | {len(lines)} | {told} | {words} | {seconds:.0f} |"


@dataclass(frozen=True)
class Table:
    """`cases` to measure, one `run` of one, and the `row` of all runs of it."""

    cases: Callable[[argparse.Namespace], list[Case]]
    run: Callable[[Case, int, argparse.Namespace], Outcome]
    row: Callable[[str, list[Outcome]], str]
    head: str


IMAGES_HEAD = (
    "case | runs | PSNR raw | PSNR affine | LPIPS | found in 1,000 | labels right | "
    "fit, CPU-s | attack, CPU-s | peeled to"
)
PEEL_HEAD = (
    "case | runs | separated | 1 − cos, worst | labels right | error at each node | "
    "at the lowest | CPU-s | said"
)
TABLES: dict[str, Table] = {
    "peel": Table(chains, peeled, peel_row, PEEL_HEAD),
    "images": Table(shown, attacked, image_rows, IMAGES_HEAD),
    "stops": Table(stopped, peeled, peel_row, PEEL_HEAD),
    "beyond": Table(
        beyond, asked, beyond_row, "case | runs | limit | said | CPU-s"
    ),
}  # fmt: skip


def written(path: Path) -> list[Outcome]:
    """The lines of a file; a last one that was cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def key_for(what: str, case: Case, given: argparse.Namespace) -> Outcome:
    """What a line is found by, but for its run."""
    key = {"what": what, "case": asdict(case)}
    for later, usual in (("mode", "train"), ("norm", "batch")):
        if key["case"][later] == usual:
            del key["case"][later]
    if what == "images":
        fit = {"steps": given.fit_steps, "images": given.fit_images}
        key["options"] = fit | {"evaluations": given.evaluations}
        if given.public != "cifar10":
            key["public"] = given.public
    return key


def lines_of(path: Path, key: Outcome) -> dict[int, Outcome]:
    """The lines with this key, by run; of two the later."""
    return {o["run"]: o for o in written(path) if all(o.get(k) == v for k, v in key.items())}


def measured(
    case: Case, key: Outcome, given: argparse.Namespace, run_of: Callable[[int], Outcome]
) -> list[Outcome]:
    """The lines of a row: those of the file, and those that were missing, which are added to it."""
    known = lines_of(given.out, key)
    if given.show:
        return [known[run] for run in sorted(known)]
    for run in range(given.first, given.first + given.runs):
        if run in known:
            continue
        outcome = key | {"run": run, "commit": commit()}
        try:
            outcome |= run_of(run)
        except NotApplicable as reason:
            model = setting(case.network(run, given.net), (3, 32, 32), classes=10)
            at = exposure(model, case.training, case.records).layer
            outcome |= {"refused": str(reason), "at": at}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome, ensure_ascii=False) + "\n")
        known[run] = outcome
    return [known[run] for run in range(given.first, given.first + given.runs)]


def chosen(cases: list[Case], given: argparse.Namespace) -> list[Case]:
    sizes = [case for case in cases if not given.batch or case.batch in given.batch]
    sizes = [case for case in sizes if not given.steps or case.steps in given.steps]
    return [case for case in sizes if fnmatch.fnmatchcase(case.title, given.only)]


def table(what: str, given: argparse.Namespace) -> None:
    one = TABLES[what]
    header(one.head)
    for case in chosen(one.cases(given), given):
        key = key_for(what, case, given)
        lines = measured(case, key, given, lambda run, case=case: one.run(case, run, given))
        if lines:
            print(one.row(case.title, lines), flush=True)


def rivals(given: argparse.Namespace) -> None:
    header(IMAGES_HEAD.replace("peeled to", "iterations"))
    for case in chosen(shown(given), given):
        ours = lines_of(given.out, key_for("images", case, given)).values()
        spent = [o["fit_seconds"] + o["seconds"] for o in ours if "seconds" in o]
        seconds = given.seconds or (middle(spent) if spent else None)
        if seconds is None:
            raise SystemExit(
                f"rivals: {case.title} has no line of `images` in {given.out} that would tell how "
                "many seconds to give: run `images` first, or set --seconds"
            )
        for name in RIVALS:
            title = f"{case.title}: {name}"
            key = key_for("rivals", case, given) | {"rival": name}

            def run_of(
                run: int, name: str = name, case: Case = case, s: float = seconds
            ) -> Outcome:
                return rival(name, case, run, s, given)

            lines = measured(case, key, given, run_of)
            if lines:
                print(image_rows(title, lines), flush=True)


def header(head: str) -> None:
    print(f"| {head} |\n|{'---|' * len(head.split(' | '))}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=[*TABLES, "rivals"])
    add("--out", type=Path, default=Path("separation.jsonl"), help="a line per run")
    add("--show", action="store_true", help="print what the file holds, run nothing")
    add("--runs", type=int, default=5)
    add("--first", type=int, default=0, help="the number of the first run")
    add("--model", nargs="+", help="resnet-10, resnet-18, vgg, vgg-pool (of exact.py), …")
    add("--width", type=float, default=1.0)
    add("--net", type=Path, help="trained weights of that model, for all runs")
    add("--mode", choices=["train", "eval"], default="train", help="of batch norm")
    add("--norm", choices=["batch", "group", "layer"], default="batch", help="of the network")
    add("--defence", nargs="+", choices=DEFENCES, help="of the images' clients")
    add("--batch", type=int, nargs="+", help="only these")
    add("--steps", type=int, nargs="+", help="only these")
    add("--only", default="*", metavar="GLOB", help="only cases with such a title")
    add("--public", choices=["cifar10", "photos"], default="cifar10", help="of the decoder's fit")
    add("--keep", type=Path, help="folder of decoders, by model, training and options")
    add("--fit-steps", type=int, default=SeparateAndDecode.steps)
    add("--fit-images", type=int, default=SeparateAndDecode.images)
    add("--evaluations", type=int, default=SeparateAndDecode.evaluations)
    add("--seconds", type=float, help="of every rival; without it, what `images` took in all")
    given = parser.parse_args(arguments)
    if given.net is not None and len(given.model or ()) != 1:
        parser.error("--net are the weights of one network: name it by --model")
    rivals(given) if given.what == "rivals" else table(given.what, given)


if __name__ == "__main__":
    main()
