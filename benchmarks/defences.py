"""Defences by strength: what leaks to an attacker who ignores them, and to one who knows them.

    python benchmarks/defences.py [--out FILE] [--only GLOB] [--runs 5]
    python benchmarks/defences.py --show --out FILE

One record of CIFAR-10 (32 × 32, the folder named by LEAKGAUGE_DATA) per draw, LeNet (Zhu) with a
new draw of weights, one step of SGD; the judged pairs of the board (board.py), on which nothing was
chosen. Two attacks: iDLG (L-BFGS on the squared distance, 300 evaluations) and Inverting Gradients
(cosine and total variation, 500 iterations). Each number is the median of the attack whose median
is the higher at that setting, by each kind of attacker. *From here on it fails* marks the first
strength at which that of the adaptive attacker is not above a mean image's. Every run is one line
of the file, written when it ends: start again to go on.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from board import images, judged, mean_image, rng_of
from exact import SCALE, network
from scipy.stats import spearmanr

from leakgauge import metrics, threat
from leakgauge.attacks import IDLG, InvertingGradients
from leakgauge.defences import (
    Censor,
    ClipAndNoise,
    Guardian,
    Outpost,
    Prune,
    Quantise,
    Soteria,
)
from leakgauge.fl import Scenario, simulate
from leakgauge.types import Attack, Dataset, Defence, LocalTraining, ThreatModel

ATTACKS: dict[str, Attack] = {
    "idlg": IDLG(iterations=300),
    "inverting-gradients": InvertingGradients(iterations=500),
}
NORM = 0.01  # below the length of the updates here: everything is clipped

# Of each defence the settings from weak to strong, by what the table calls them.
SWEEPS: dict[str, dict[str, Defence]] = {
    "clip-and-noise (noise scale ε)": {
        f"{e:g}": ClipAndNoise(epsilon=e, norm=NORM, calibration="papers")
        for e in (1e7, 1e6, 1e5, 1e4, 1e3)
    },
    "prune (share)": {f"{s:g}": Prune(share=s) for s in (0.1, 0.5, 0.9, 0.99, 0.999)},
    "quantise (bits, stochastic)": {str(b): Quantise(bits=b) for b in (16, 8, 4, 2, 1)},
    "quantise (bits, nearest)": {
        str(b): Quantise(bits=b, rounding="nearest") for b in (16, 8, 4, 2, 1)
    },
    "soteria (share)": {f"{s:g}": Soteria(share=s) for s in (0.1, 0.3, 0.5, 0.7, 0.9)},
    "outpost (prune)": {f"{s:g}": Outpost(prune=s) for s in (0.1, 0.3, 0.5, 0.7, 0.9)},
    "outpost (prune, without noise)": {
        f"{s:g}": Outpost(prune=s, noise=0.0) for s in (0.1, 0.3, 0.5, 0.7, 0.9)
    },
    "censor (trials)": {str(n): Censor(trials=n) for n in (1, 5, 20)},
    "guardian (β)": {f"{b:g}": Guardian(beta=b) for b in (1e-6, 1e-4, 1e-2, 1.0, 100.0)},
}


def run(defence: Defence | None, attack: Attack, draw: int) -> dict[str, float]:
    """PSNR of one record, by the attacker who ignores the defence and by the one who knows it."""
    chosen, _ = judged(1, draw)
    source = images("cifar10", "test", 32)
    private = Dataset(source.name, source.inputs[chosen], source.labels[chosen], source.classes)
    scenario = Scenario(
        lambda: network("lenet-zhu", draw, "torch"), private, LocalTraining(lr=0.01), records=1,
        defence=defence, scale=SCALE,
    )  # fmt: skip
    seen = threat.observe(simulate(scenario, torch.Generator().manual_seed(draw)), ThreatModel())
    found = {}
    for who, held in {"naive": seen, "adaptive": threat.adapted(seen, defence)}.items():
        if defence is None and who == "adaptive":
            found[who] = found["naive"]
            continue
        guess = attack.reconstruct(held, rng_of("defences", draw))
        found[who] = float(metrics.psnr(guess.inputs, private.inputs))
    base = metrics.psnr(mean_image("cifar10", 32).expand_as(private.inputs), private.inputs)
    return found | {"mean image": float(base)}


def cases(only: str) -> list[tuple[str, str, Defence | None]]:
    found: list[tuple[str, str, Defence | None]] = [("none", "–", None)]
    found += [(name, value, one) for name, sweep in SWEEPS.items() for value, one in sweep.items()]
    return [case for case in found if fnmatch.fnmatch(case[0], only)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(done: list[dict[str, Any]]) -> str:
    rows = [
        "| defence | setting | draws | naive, dB | adaptive, dB | attack | mean image, dB | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one["defence"] for one in done):
        mine = [one for one in done if one["defence"] == name]
        points, failed = [], False
        for setting in dict.fromkeys(one["setting"] for one in mine):
            runs = [one for one in mine if one["setting"] == setting]
            naive, adaptive = (strongest(runs, who) for who in ("naive", "adaptive"))
            base = statistics.median(one["mean image"] for one in runs)
            points.append(adaptive[0])
            fails = adaptive[0] <= base and not failed and name != "none"
            failed = failed or fails
            rows.append(
                f"| {name} | {setting} | {len({one['draw'] for one in runs})} | {naive[1]} | "
                f"{adaptive[1]} | {adaptive[2]} | {base:.1f} | "
                f"{'from here on it fails' if fails else ''} |"
            )
        if len(points) > 2 and max(points) - min(points) > 1.0:  # dB; less is no trend
            rank = spearmanr(range(len(points)), points).statistic
            rows.append(f"| {name} | rank correlation | | | {rank:.2f} | | | |")
    return "\n".join(rows)


def strongest(runs: list[dict[str, Any]], who: str) -> tuple[float, str, str]:
    """Of one setting, the median of the attack whose median is highest, in words, and its name."""
    found = []
    for attack in ATTACKS:
        scores = [one[who] for one in runs if one["attack"] == attack]
        middle = statistics.median(scores)
        found.append((middle, f"{middle:.1f} ({min(scores):.1f}–{max(scores):.1f})", attack))
    return max(found)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("defences.jsonl"))
    parser.add_argument("--show", action="store_true", help="print what the file holds")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only these defences")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    done = lines(given.out)
    known = {(o["defence"], o["setting"], o["attack"], o["draw"]) for o in done}
    for draw in () if given.show else range(given.runs):
        for name, value, defence in cases(given.only):
            for title, attack in ATTACKS.items():
                key = {"defence": name, "setting": value, "attack": title, "draw": draw}
                if tuple(key.values()) in known:
                    continue
                began = time.process_time()
                found = run(defence, attack, draw)
                line = key | found | {"seconds": time.process_time() - began}
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    print(table(lines(given.out)))


if __name__ == "__main__":
    main()
