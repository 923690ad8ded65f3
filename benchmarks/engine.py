"""Cost and accuracy of the derivative engine against the plain double-backward loop.

    python benchmarks/engine.py [--model resnet-18] [--batch 1] [--steps 1] [--json]

Interleaved in one process and timed by CPU time, so that ratios mean something on a busy machine.
*Plain* is what most public code does: gradients with create_graph, through all local steps, a
Python loop over the tensors for the cosine distance, autograd through all of it. *Fast* is a
derivative without a self-check; *with checks* is the mean over a search of `--iterations`, in which
the engine checks itself at the first and at every 250th derivative.

Memory is the peak of live tensor bytes, from the allocator's own events, with the weights and the
observed update that every way must hold. Errors are relative, against exact float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would chat on stderr

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from leakgauge import models
from leakgauge.attacks._engine import RECHECK, Engine, relative_error
from leakgauge.attacks._objectives import cosine
from leakgauge.fl import setting
from leakgauge.fl.local import loss, ready, train
from leakgauge.types import Batch, LocalTraining, Observation


def plain(seen: Observation, training: LocalTraining) -> Callable[[Tensor, Tensor], Tensor]:
    """The textbook loop: d(1 − cos)/dx by double backward through all local steps of SGD."""
    model = ready(seen.model, training)
    live = replace(seen.setting, model=model)
    buffers, names = dict(model.named_buffers()), list(seen.update)
    before = [model.get_parameter(name) for name in names]
    target = [seen.update[name] / (training.lr * training.steps) for name in names]

    def derivative(inputs: Tensor, labels: Tensor) -> Tensor:
        inputs = inputs.detach().requires_grad_()
        weights, total = before, None
        for step in range(training.steps):
            values = dict(zip(names, weights, strict=True)) | buffers
            objective = loss(live, values, inputs, labels, training, step)
            gradient = torch.autograd.grad(objective, weights, create_graph=True)
            total = (
                gradient if total is None else [a + g for a, g in zip(total, gradient, strict=True)]
            )
            if step + 1 < training.steps:
                weights = [w - training.lr * g for w, g in zip(weights, gradient, strict=True)]
        inner, ours, theirs = (inputs.new_zeros(()) for _ in range(3))
        for g, t in zip(total or (), target, strict=True):
            inner = inner + (g * t).sum()
            ours = ours + g.pow(2).sum()
            theirs = theirs + t.pow(2).sum()
        distance = 1 - inner / (ours.sqrt() * theirs.sqrt())
        return torch.autograd.grad(distance, inputs)[0]

    return derivative


def peak_bytes(run: Callable[[], object]) -> int:
    """Highest number of tensor bytes alive beyond those at the start, from allocation events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(
    model_name: str,
    batch: int,
    batch_norm: str,
    size: int,
    repeats: int,
    steps: int = 1,
    iterations: int = 600,
) -> dict[str, object]:
    rng = torch.Generator().manual_seed(0)
    shape, classes = (3, size, size), 10
    model = models.make(model_name, shape=shape, classes=classes, rng=rng)
    training = LocalTraining(
        batch_size=batch,
        steps=steps,
        batch_norm=batch_norm,  # type: ignore[arg-type]
    )
    truth = Batch(
        torch.rand(batch, *shape, generator=rng),
        torch.randint(0, classes, (batch,), generator=rng),
    )
    update = train(setting(model, truth, 10), truth, training, rng).update
    seen = Observation(setting(model, shape, classes), update)
    x = torch.rand(batch, *shape, generator=rng)

    def engine(mode: str, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
        made = Engine(seen, training, batch, dtype=dtype, mode=mode)  # type: ignore[arg-type]
        engines[mode] = made
        return lambda: made.slope(x.to(dtype), truth.labels, cosine).inputs

    engines: dict[str, Engine] = {}
    reference = engine("exact", torch.float64)()
    loop = plain(seen, training)
    ways = {
        "plain": lambda: loop(x, truth.labels),
        "exact": engine("exact"),
        "central": engine("central"),
        "fast": engine("auto"),
    }
    errors = {name: relative_error(way(), reference) for name, way in ways.items()}  # warms up too
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            times[name].append(time.process_time() - begin)
    # A fresh engine checks itself at its first derivative.
    checked = []
    for _ in range(3):
        first = Engine(seen, training, batch)
        begin = time.process_time()
        first.slope(x, truth.labels, cosine)
        checked.append(time.process_time() - begin)
    medians = {name: statistics.median(t) for name, t in times.items()}
    held = sum(2 * u.numel() * u.element_size() for u in update.values())
    memory = {name: held + peak_bytes(way) for name, way in ways.items()}
    if engines["auto"].mode.endswith("float64"):  # it holds them a second time, twice as wide
        memory["fast"] += 2 * held
    check = max(0.0, statistics.median(checked) - medians["fast"])
    checks = -(-iterations // RECHECK)
    searched = medians["fast"] + check * checks / iterations
    result: dict[str, object] = {
        "model": model_name,
        "batch": batch,
        "steps": steps,
        "iterations": iterations,
        "batch_norm": batch_norm,
        "chosen": engines["auto"].mode,
        "plain_ms": 1e3 * medians["plain"],
        "plain_mb": memory["plain"] / 2**20,
        "plain_error": errors["plain"],
        "check_ratio": check / medians["plain"],
        "checked_ratio": searched / medians["plain"],
    }
    for name in ("fast", "central", "exact"):
        result[f"{name}_ms"] = 1e3 * medians[name]
        result[f"{name}_ratio"] = medians[name] / medians["plain"]
        result[f"{name}_memory_ratio"] = memory[name] / memory["plain"]
        result[f"{name}_error"] = errors[name]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="resnet-18")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batch-norm", choices=["train", "eval"], default="eval")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1, help="local steps of SGD")
    parser.add_argument("--iterations", type=int, default=600, help="of the search with checks")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    result = measure(
        options.model,
        options.batch,
        options.batch_norm,
        options.size,
        options.repeats,
        options.steps,
        options.iterations,
    )
    if options.json:
        print(json.dumps(result))
        return
    table = Table(
        title=f"{options.model}, batch {options.batch}, {options.steps} steps, "
        f"{options.batch_norm} BN, {options.size}×{options.size}; fast chose {result['chosen']}; "
        f"a check costs {result['check_ratio']:.1f} plain derivatives"
    )
    for column in ("way", "CPU ms", "time ratio", "memory ratio", "error"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name in ("plain", "exact", "central", "fast"):
        table.add_row(
            name,
            f"{result[f'{name}_ms']:.0f}",
            f"{result.get(f'{name}_ratio', 1.0):.2f}",
            f"{result.get(f'{name}_memory_ratio', 1.0):.2f}",
            f"{result[f'{name}_error']:.1e}",
        )
    mean = f"{result['checked_ratio']:.3f}"
    table.add_row(f"fast with checks, {options.iterations} iterations", "", mean, "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
