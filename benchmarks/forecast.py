"""How far the forecast of an audit is off: forecast and actual CPU seconds of several plans.

    python benchmarks/forecast.py [name …]

Prints a Markdown table. CPU time of all trials, controls and ladder included, on the threads of the
plan (one). Every plan is audited whole, in a folder that is thrown away; without names all of them,
in about four CPU minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from leakgauge.audit import Store, parse, run

PHOTOS = {"name": "photos", "size": 32, "per_photo": 12}
LENET = {"data": PHOTOS, "model": "lenet-zhu"}
DIGITS = {"data": "digits", "model": {"name": "mlp", "hidden": [64]}}
CONVNET = {"data": PHOTOS, "model": {"name": "convnet", "width": 0.25}}
PLANS: dict[str, dict[str, Any]] = {
    "LeNet, Inverting Gradients, batch 1": {
        "federation": LENET,
        "attack": [{"name": "inverting-gradients", "iterations": 300}],
    },
    "MLP, analytic and DLG, batch 4, 2 steps": {
        "federation": DIGITS | {"training": {"batch_size": 4, "steps": 2, "lr": 0.1}},
        "attack": [{"name": "analytic"}, {"name": "dlg", "iterations": 150}],
    },
    "LeNet, smooth to sharp and coarse to fine, batch 2": {
        "federation": LENET | {"training": {"batch_size": 2}},
        "attack": [
            {"name": "smooth-to-sharp", "iterations": 120},
            {"name": "coarse-to-fine", "iterations": 120},
        ],
    },
    "ConvNet, Inverting Gradients, batch 4, 2 restarts": {
        "federation": CONVNET | {"training": {"batch_size": 4}},
        "attack": [{"name": "inverting-gradients", "iterations": 40, "restarts": 2}],
        "audit": {"seeds": [0], "exact": False},
    },
    "MLP, aggregate of 4 after 0 and 40 rounds, 2 defences": {
        "federation": DIGITS | {"clients": 4, "rounds": [0, 40], "training": {"batch_size": 2}},
        "threat": {"actor": "aggregate"},
        "attack": [{"name": "inverting-gradients", "iterations": 150}],
        "defence": [{"name": "none"}, {"name": "clip-and-noise"}],
    },
}


def main(wanted: list[str]) -> None:
    print("| plan | forecast | interval | actual | forecast / actual | audit, wall s |")
    print("|---|---|---|---|---|---|")
    for name, table in PLANS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        audit = {"seeds": [0, 1], "gallery": 50} | table.get("audit", {})
        plan = parse(table | {"audit": audit}, "forecast", Path.cwd())
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            times = run(plan, Store(Path(folder) / "out"), calibrate=True)["times"]
            wall = time.monotonic() - began
        told, actual = times["forecast"], times["cpu_seconds"]
        print(
            f"| {name} | {told['cpu_seconds']:.1f} | {told['low']:.1f} to {told['high']:.1f} | "
            f"{actual:.1f} | {told['cpu_seconds'] / actual:.2f} | {wall:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
