"""The papers' diagnostics, measured: why an update is hard or easy to invert.

    python benchmarks/diagnostics.py        writes docs/methods/diagnostics.md and its figure

CIFAR-10 images of the board's TUNE list, averaged down to 16 × 16, batch 1; sparsity against PSNR
comes from the board's finished runs. One thread, about a minute. Needs LEAKGAUGE_DATA.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import board
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from board_rows import C2F, IG, OURS, ROWS, Setup
from torch import Tensor

from leakgauge import LocalTraining, diagnostics, metrics, models
from leakgauge.attacks._engine import Engine
from leakgauge.attacks._objectives import Distance, squared
from leakgauge.attacks.fedleak import whole
from leakgauge.fl import setting
from leakgauge.fl.local import train
from leakgauge.tensors import norm
from leakgauge.types import Batch, Observation, Setting

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE = DOCS / "methods" / "diagnostics.md", DOCS / "images" / "diagnostics.png"
IMAGES = 5
STRENGTHS = (1, 2, 4, 8, 16)  # of 255
STEPS = 150
SHOWN = (0, 10, 50, 149)

NETWORKS: dict[str, tuple[str, dict[str, object], LocalTraining]] = {
    "three hidden layers, ReLU": ("mlp", {"hidden": [256, 256, 256]}, LocalTraining()),
    "ResNet-10, ReLU, eval": ("resnet-10", {"width": 0.25}, LocalTraining(batch_norm="eval")),
    "ResNet-10, ReLU, train": ("resnet-10", {"width": 0.25}, LocalTraining(batch_norm="train")),
    "ResNet-10, Sigmoid, train": (
        "resnet-10",
        {"width": 0.25, "activation": "sigmoid"},
        LocalTraining(batch_norm="train"),
    ),
}


def made(network: str, seed: int) -> tuple[Setting, LocalTraining]:
    name, options, training = NETWORKS[network]
    rng = torch.Generator().manual_seed(seed)
    model = models.make(name, shape=(3, 16, 16), classes=10, rng=rng, **options)
    return setting(model, (3, 16, 16), 10), training


def pairs() -> list[tuple[Batch, int]]:
    """TUNE images, each with its weight seed."""
    data = board.images("cifar10", "train", 16)
    chosen = [board.tuned(1, k) for k in range(IMAGES)]
    return [(Batch(data.inputs[i], data.labels[i]), seed) for i, seed in chosen]


# --- Fig. 1b --------------------------------------------------------------------------------------


def noise() -> dict[str, tuple[list[float], float]]:
    """Mean gradient distance as a share of the gradient's norm by strength, and the last distance
    itself."""
    found = {}
    for network in NETWORKS:
        shares, last = [], []
        for truth, seed in pairs():
            world, training = made(network, seed)
            rng = torch.Generator().manual_seed(seed)
            size = norm(diagnostics.gradient(world, truth, training))
            strengths = [s / 255 for s in STRENGTHS]
            moved = diagnostics.noise_distances(world, truth, training, strengths, rng)
            shares.append([m / size for m in moved])
            last.append(moved[-1])
        means = [statistics.mean(column) for column in zip(*shares, strict=True)]
        found[network] = means, statistics.mean(last)
    return found


# --- Fig. 1c–d ------------------------------------------------------------------------------------


def path(network: str, distance: Distance, blend: float) -> tuple[list[list[float]], list[float]]:
    """2μ/L along a search by Adam with step 0.01, and the PSNR at its end, for each image."""
    bounds, ends = [], []
    for truth, seed in pairs():
        world, training = made(network, seed)
        rng = torch.Generator().manual_seed(seed)
        update = train(world, truth, training, rng).update
        engine = Engine(Observation(world, update), training, 1)

        def slope(x: Tensor, engine: Engine = engine, labels: Tensor = truth.labels) -> Tensor:
            here = engine.slope(x, labels, distance).inputs
            if not blend:
                return here
            ahead = x + 0.1 * here / here.norm().clamp_min(1e-30)  # Eq. 14, k = 0.1
            return (1 - blend) * here + blend * engine.slope(ahead, labels, distance).inputs

        points, slopes = walk(torch.rand(truth.inputs.shape, generator=rng), slope)
        bounds.append(diagnostics.step_bounds(points, slopes, truth.inputs))
        ends.append(float(metrics.psnr(points[-1], truth.inputs)))
    return bounds, ends


def walk(x: Tensor, slope: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The points of a search by Adam in [0, 1], and the slope at each."""
    x = x.clone()
    search = torch.optim.Adam([x], lr=0.01)
    points, slopes = [], []
    for _ in range(STEPS):
        x.grad = slope(x)
        points.append(x.clone())
        slopes.append(x.grad.clone())
        search.step()
        x.clamp_(0, 1)
    return points, slopes


# --- Fig. 9 ---------------------------------------------------------------------------------------


def magnitude() -> tuple[list[float], tuple[Tensor, Tensor]]:
    """The correlation in the head of each image's network, and the last image's points."""
    found = []
    points = torch.empty(0), torch.empty(0)
    for truth, seed in pairs():
        world, training = made("ResNet-10, ReLU, eval", seed)
        points = diagnostics.magnitude_and_sensitivity(world, truth, training, "fc.weight")
        found.append(diagnostics.pearson(*points))
    return found, points


# --- C2F, Fig. 3 ----------------------------------------------------------------------------------


def sparsity(attack: str) -> dict[Setup, list[tuple[float, float]]]:
    """(sparsity, PSNR) of the board's finished runs of this attack on the twins."""
    found = {}
    for row in ROWS:
        if row.attack == attack and not row.variant and row.setup.name.startswith("twin-"):
            done = [o for o in board.outcomes(board.STATE, row).values() if o["status"] == "done"]
            if done:
                found[row.setup] = [(o["sparsity"], o["psnr"][0]) for o in done]
    return found


# --- the page -------------------------------------------------------------------------------------

TEXT = """\
# Diagnostics

Written by `python benchmarks/diagnostics.py`; do not edit. The functions are in
`leakgauge.diagnostics`, with sources and formulas. Only `sparsity` can be computed by one who sees
no more than the update; every trial of an audit records it. The others need the
truth: they explain an evaluation, and no attack may use them.

C2F: K. Zhu et al., *Cracking Federated Privacy: Initialization-Resilient Gradient Inversion with
Fine-Grained Reconstruction*, 2026. FedLeak: M. Fan et al., *Boosting Gradient Leakage Attacks: Data
Reconstruction in Realistic FL Settings*, USENIX Security 2025. All numbers below: CIFAR-10 averaged
down to 16 × 16, batch 1; ResNet-10 of a quarter width and PyTorch's own initialisation unless said.

![sparsity and PSNR, noise, step bound, magnitude and sensitivity](../images/diagnostics.png)
"""


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def words_of_sparsity(found: dict[str, dict[Setup, list[tuple[float, float]]]]) -> str:
    out = """\
## Sparsity of the update (C2F, Fig. 3)

The share of elements that are exactly zero. C2F reports for Inverting Gradients on CIFAR-10,
ResNet-18: 0.241, 0.266, 0.284 with 37.9, 28.2, 22.7 dB for Uniform, Orthogonal and Normal, and a
Pearson correlation of −0.478 over its runs. From the board's twins (ResNet-10 of half width):

"""
    rows = []
    for attack, setups in found.items():
        for setup, points in setups.items():
            shares, scores = zip(*points, strict=True)
            rows.append([attack, setup.init, f"{statistics.median(shares):.3f}",
                         f"{statistics.median(scores):.1f}", str(len(points))])  # fmt: skip
        pooled = [point for points in setups.values() for point in points]
        if len(pooled) > 2:
            overall = diagnostics.pearson(*zip(*pooled, strict=True))
            within = f"{within_groups(list(setups.values())):.2f} within an initialisation"
            rows.append([attack, "*correlation*", f"{overall:.2f}", within, str(len(pooled))])
    if not rows:
        return out + "The board has no finished run of them yet.\n"
    return out + table(["attack", "initialisation", "sparsity", "PSNR, dB", "runs"], rows)


def within_groups(groups: list[list[tuple[float, float]]]) -> float:
    """Correlation after each group's own means are taken away."""
    shares: list[float] = []
    scores: list[float] = []
    for points in groups:
        first, second = zip(*points, strict=True)
        shares += [s - statistics.mean(first) for s in first]
        scores += [s - statistics.mean(second) for s in second]
    return diagnostics.pearson(shares, scores)


def words_of_noise(found: dict[str, tuple[list[float], float]]) -> str:
    return f"""\
## Gradient distance against noise (FedLeak, Fig. 1b)

Every pixel moves up or down by the strength; the L2 distance of the gradient, as a share of the
gradient's own norm, mean over {IMAGES} images × 10 draws; and the distance itself at 16/255, which
FedLeak finds below 0.1 for three hidden layers. Where a change of pixels that nobody sees turns the
whole gradient, even a good guess leaves a large residual, and matching has little to follow.

""" + table(
        ["network", *(f"{s}/255" for s in STRENGTHS), "distance at 16/255"],
        [
            [name, *(f"{v:.3f}" for v in shares), f"{last:.2f}"]
            for name, (shares, last) in found.items()
        ],
    )


def words_of_steps(found: dict[str, tuple[list[list[float]], list[float]]]) -> str:
    rows = []
    for name, (bounds, ends) in found.items():
        at = [statistics.median(b[i] for b in bounds) for i in SHOWN]
        away = statistics.mean(v < 0 for b in bounds for v in b)
        rows.append([name, *(f"{v:.1e}" for v in at), f"{away:.0%}",
                     f"{statistics.median(ends):.1f}"])  # fmt: skip
    return f"""\
## Step bound 2μ/L (FedLeak, Eq. 5–6, Fig. 1c–d)

A gradient step from x' comes closer to the truth exactly if it is shorter than 2μ/L; where the
bound is negative every step leads away. Median over {IMAGES} images along a search by Adam (step
0.01, {STEPS} iterations, from uniform noise, labels known), the share of iterates with a negative
bound, and the PSNR at the end. FedLeak's Fig. 1 shows small, jumping bounds for plain matching and
larger ones for its own objective; 2μ/L scales with 1/D, so compare its course and sign, not its
height, between objectives.

""" + table(["objective", *(f"iteration {i}" for i in SHOWN), "negative", "PSNR, dB"], rows)


def words_of_magnitude(found: list[float]) -> str:
    return f"""\
## Magnitude and sensitivity (FedLeak, Fig. 9)

Pearson's correlation of |g_i| and Σ_j |∂g_i/∂x_j| over the elements of the last layer's weight
gradient: {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} over {len(found)} images,
each with its own weights. FedLeak reports 0.74 ± 0.06 (ResNet-10, 32 × 32, 100 images): its reason
to match the large elements.
"""


def draw(
    sparse: dict[Setup, list[tuple[float, float]]],
    noisy: dict[str, tuple[list[float], float]],
    searches: dict[str, tuple[list[list[float]], list[float]]],
    points: tuple[Tensor, Tensor],
) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    (a, b), (c, d) = axes
    for setup, runs in sparse.items():
        a.scatter(*zip(*runs, strict=True), s=14, label=setup.init)
    a.set(xlabel="share of zeros in the update", ylabel="PSNR, dB", title="C2F, Fig. 3 (IG)")
    for name, (shares, _) in noisy.items():
        b.plot(STRENGTHS, shares, marker="o", ms=3, label=name)
    b.set(xlabel="noise, of 255", ylabel="gradient distance / norm", title="FedLeak, Fig. 1b")
    for name, (bounds, _) in searches.items():
        c.plot([statistics.median(b) for b in zip(*bounds, strict=True)], lw=1, label=name)
    c.set_yscale("symlog", linthresh=1e-3)
    c.set(xlabel="iteration", ylabel="2μ/L, median", title="FedLeak, Fig. 1c–d")
    d.scatter(*points, s=2, alpha=0.4)
    d.set(xlabel="|g|", ylabel="sensitivity to the input", title="FedLeak, Fig. 9 (one image)")
    for axis in (a, b, c):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.savefig(FIGURE, dpi=110, metadata={"Software": None})


def main() -> None:
    torch.set_num_threads(1)
    sparse = {attack: sparsity(attack) for attack in (IG, C2F, OURS)}
    noisy = noise()
    searches = {
        "squared L2, all elements": path("ResNet-10, ReLU, eval", squared, 0.0),
        "FedLeak: L1 + cosine, top half, λ' = 0.7": path("ResNet-10, ReLU, eval", whole(0.5), 0.7),
        "squared L2, three hidden layers": path("three hidden layers, ReLU", squared, 0.0),
    }
    correlations, points = magnitude()
    PAGE.write_text(
        "\n".join(
            [
                TEXT,
                words_of_sparsity(sparse),
                words_of_noise(noisy),
                words_of_steps(searches),
                words_of_magnitude(correlations),
            ]
        ),
        encoding="utf-8",
    )
    draw(sparse[IG], noisy, searches, points)


if __name__ == "__main__":
    main()
