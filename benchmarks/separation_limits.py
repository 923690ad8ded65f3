"""Six limits of separation and peeling, checked on draws that are in no other table.

    python benchmarks/separation_limits.py layers     do several layers together raise the limit?
    python benchmarks/separation_limits.py forward    do forward equations carry on in train mode?
    python benchmarks/separation_limits.py joined     and how many equations does that take?
    python benchmarks/separation_limits.py steps      and after several steps?
    python benchmarks/separation_limits.py pools      does what is known tell the places of maxima?
    python benchmarks/separation_limits.py linear     how much noise do linear layers stand?

ResNet-10 of full width (joined and steps: of half), batch norm in train mode; for pools one
convolution of 32 to 128 channels, a ReLU and a max-pool on 8 × 8 maps of four images. Images from
the folder named by LEAKGAUGE_DATA; for linear the digits that come with scikit-learn, four records.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from board import images, tuned
from exact import SCALE, TRAINING, Noise, network
from separation import MOVING, Truth, after_scale, paired
from torch import Tensor
from torch.nn.grad import conv2d_weight

from leakgauge import data, models, threat
from leakgauge.attacks import separable
from leakgauge.attacks._channels import System
from leakgauge.attacks._known import signals_of
from leakgauge.attacks._linear import Equation, solve
from leakgauge.attacks._peeling import _counted, _gradient_equation
from leakgauge.attacks._separation import gradient_of
from leakgauge.attacks.exact_recursion import Read
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.types import Batch, Dataset, LocalTraining, Observation, Resources, ThreatModel

LAST = 9000  # training images from here on are the clients' of this script


def played(
    batch: int, run: int = 0, width: float = 1.0, steps: int = 1, **settings: float
) -> tuple[Observation, Batch]:
    records = steps * batch
    chosen, seed = tuned(records, run)
    source = images("cifar10", "train", 32)
    rows = [LAST + i for i in chosen]
    private = Dataset(source.name, source.inputs[rows], source.labels[rows], source.classes)
    training = replace(TRAINING, batch_size=batch, steps=steps, batch_norm="train", **settings)  # type: ignore[arg-type]
    scenario = Scenario(
        lambda: network("resnet-10", seed, width=width), private, training, records=records,
        scale=SCALE,
    )  # fmt: skip
    round_ = simulate(scenario, torch.Generator().manual_seed(seed))
    return threat.observe(round_, ThreatModel()), threat.covered(round_, ThreatModel())


def layers() -> None:
    """The ranks of the layers of the last block, two of which see the same input."""
    print("| batch | layer | gradient | windows − 1 | rank |\n|---|---|---|---|---|")
    for batch in (16, 24, 40):
        gradient = gradient_of(played(batch)[0])
        for name in ("layer4.0.conv1", "layer4.0.downsample.0", "layer4.0.conv2"):
            matrix = gradient[f"{name}.weight"].flatten(1)
            values = torch.linalg.svdvals(matrix)
            rank, (outputs, inputs) = int((values > 1e-6 * values[0]).sum()), matrix.shape
            print(f"| {batch} | {name} | {outputs} × {inputs} | {16 * batch - 1} | {rank} |")


def forward(batch: int = 8) -> None:
    """The node that gradients alone leave open, solved with the batch norms' true statistics: by
    gradients alone, and with the active entries of the two ReLUs above; and as it was peeled, with
    statistics that follow."""
    seen, truth = played(batch)
    read = Read(seen, torch.Generator().manual_seed(0), Resources())
    done, trace = read.done, read.trace
    true = Truth(seen, truth)
    order, _ = paired(read.begun.maps, torch.cat(true.at(trace, read.begun.source)))
    node = trace.named("layer2_0_act2")
    as_peeled = done.known.pop(node)
    wanted = torch.empty(batch, *trace.shape[node], dtype=torch.float64)
    wanted[order] = true.at(trace, node)[0]
    every = signals_of(done, node)
    print(f"{node.name}: {_counted(done, node, every):.2f} gradient equations per unknown")
    gradients: list[Equation] = []
    above: list[Equation] = []
    relus = [trace.named("layer3_0_act1"), trace.named("layer3_0_act2")]
    for rows, relu in zip(every, relus, strict=True):
        system = System(done, node, rows)
        system.follow(node, wanted)
        signal = system.at_layer.transpose(0, 1).reshape(rows.signal.shape)
        good = torch.ones(signal.shape[1], dtype=torch.bool)
        gradients.append(_gradient_equation(done, node, rows.layer, signal, good))
        layer, active = trace.layer(rows.layer), (done.known[relu] > 0).double()
        with torch.no_grad():
            told = layer(wanted) * active
        above.append((lambda v, layer=layer, active=active: layer(v) * active, told))
    print("| equations | residual | error | most negative | CPU-s |\n|---|---|---|---|---|")
    for title, equations in (("gradients", gradients), ("and forward", gradients + above)):
        began = time.process_time()
        found, residual = solve(equations, torch.zeros_like(wanted), 1200)
        error = float((found - wanted).norm() / wanted.norm())
        negative = float(-found.min() / found.max())
        seconds = time.process_time() - began
        print(f"| {title} | {residual:.1e} | {error:.1e} | {negative:.1e} | {seconds:.0f} |")
    print(f"as it was peeled: {after_scale(as_peeled, wanted):.1e}")


def joined(draws: int = 1) -> None:
    """That node in batches of four to seven, and the equations that it has for each unknown, with
    half of the entries above active."""
    print("| batch | equations | draw | error | said | CPU-s |\n|---|---|---|---|---|---|")
    for batch in (4, 5, 6, 7):
        for run in range(draws):
            print(f"| {batch} {joined_row(batch, run)}", flush=True)


def steps(draws: int = 3) -> None:
    """That node after several steps with momentum and weight decay."""
    print("| steps | equations | draw | error | said | CPU-s |\n|---|---|---|---|---|---|")
    for lr in (0.01, 0.05, 0.1):
        for run in range(draws):
            row = joined_row(2, run, 2, lr=lr, **MOVING)
            print(f"| 2 × 2, lr {lr:g} {row}", flush=True)


def joined_row(batch: int, run: int, steps: int = 1, **settings: float) -> str:
    """Equations, draw, error of the worst step after one scale per step, words and seconds."""
    name, records = "layer2_0_act2", steps * batch
    count = (128 * 9 + 128) / (records * 256) + 2 * 128 * 64 / 2 / (64 * 256)
    seen, truth = played(batch, run, 0.5, steps, **settings)
    began = time.process_time()
    try:
        read = Read(seen, torch.Generator().manual_seed(0), Resources())
    except NotApplicable:
        return f"| {count:.2f} | {run} | – | not separated | {time.process_time() - began:.0f} |"
    seconds = time.process_time() - began
    true, trace = Truth(seen, truth), read.trace
    order, _ = paired(read.begun.maps, torch.cat(true.at(trace, read.begun.source)))
    known = {node.name: value for node, value in read.done.known.items()}
    error, said = "–", read.done.stopped
    if name in known:
        parts = zip(known[name][order].split(batch), true.at(trace, trace.named(name)), strict=True)
        error, said = f"{max(after_scale(found, wanted) for found, wanted in parts):.1e}", ""
    return f"| {count:.2f} | {run} | {error} | {said} | {seconds:.0f} |"


def pools(rounds: int = 30) -> None:
    """The input of a convolution behind which a max-pool stands, when the values and signals that
    leave the pool are known: with some places of maxima wrong, and with none known, where places
    and input follow from each other in turn."""
    rng = torch.Generator().manual_seed(0)
    x = 4 * (images("cifar10", "train", 32).inputs[LAST : LAST + 4].double() - 0.47)
    first = 0.3 * torch.randn(32, 3, 3, 3, generator=rng).double()
    wanted = F.avg_pool2d(F.conv2d(x, first, padding=1).relu(), 4)
    weight = torch.randn(128, 32, 3, 3, generator=rng).double() / 12
    pooled, places = F.max_pool2d(
        F.conv2d(wanted, weight, padding=1).relu(), 2, return_indices=True
    )
    active = pooled > 0
    signal = torch.randn(pooled.shape, generator=rng).double() * active

    def spread(at: Tensor) -> Tensor:
        empty = torch.zeros(4, 128, 64, dtype=torch.float64)
        return empty.scatter(2, at.flatten(2), signal.flatten(2)).view(4, 128, 8, 8)

    def gradient(value: Tensor, at: Tensor) -> Tensor:
        found: Tensor = conv2d_weight(value, weight.shape, spread(at), 1, 1)
        return found

    observed = gradient(wanted, places).float().double()

    def solved(at: Tensor, begin: Tensor) -> Tensor:
        def leaving(value: Tensor) -> Tensor:
            out = F.conv2d(value, weight, padding=1).flatten(2)
            return out.gather(2, at.flatten(2)).view_as(pooled) * active

        equations: list[Equation] = [(lambda v: gradient(v, at), observed), (leaving, pooled)]
        return solve(equations, begin, 200)[0]

    def told(title: str, at: Tensor, value: Tensor) -> None:
        wrong = float(((at != places) & active).sum() / active.sum())
        print(f"| {title} | {wrong:.1%} | {float((value - wanted).norm() / wanted.norm()):.1e} |")

    print("| places | wrong | error of the input |\n|---|---|---|")
    row, column = places // 8, places % 8
    for share in (0.0, 0.001, 0.01, 0.1):
        turn = torch.randint(1, 4, places.shape, generator=rng)
        cell = (row % 2 * 2 + column % 2 + turn) % 4
        other = (row // 2 * 2 + cell // 2) * 8 + column // 2 * 2 + cell % 2
        at = torch.where(torch.rand(places.shape, generator=rng) < share, other, places)
        told("told", at, solved(at, torch.zeros_like(wanted)))
    cell = torch.randint(4, places.shape, generator=rng)
    at = (row // 2 * 2 + cell // 2) * 8 + column // 2 * 2 + cell % 2
    value = torch.zeros_like(wanted)
    for number in itertools.count():
        value = solved(at, value.relu())
        if number % 10 == 0:
            told(f"not known, round {number}", at, value)
        if number == rounds:
            break
        out = F.conv2d(value.relu(), weight, padding=1)
        at = F.max_pool2d(out, 2, return_indices=True)[1]


def linear(draws: int = 5) -> None:
    """How often the records are told apart with all labels right, under noise."""
    print("| network | noise | told apart, labels right |\n|---|---|---|")
    training = LocalTraining(batch_size=4)
    for name, share in itertools.product(("mlp", "cnn"), (0.01, 0.03, 0.1, 0.3, 1.0)):
        right = 0
        for run in range(draws):
            rng = torch.Generator().manual_seed(run)
            make = partial(models.make, name, shape=(1, 8, 8), classes=10, rng=rng)
            scenario = Scenario(make, data.load("digits"), training, defence=Noise(share))
            round_ = simulate(scenario, rng)
            try:
                found = separable(threat.observe(round_, ThreatModel()), rng).labels
            except NotApplicable:
                continue
            right += sorted(found.tolist()) == sorted(round_.truths[0].labels.tolist())
        print(f"| {name} | {share:g} | {right} of {draws} |", flush=True)


CHECKS = {
    "layers": layers, "forward": forward, "joined": joined, "steps": steps, "pools": pools,
    "linear": linear,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(CHECKS))
    CHECKS[parser.parse_args().what]()


if __name__ == "__main__":
    main()
