"""How much faster two jobs are than one: wall time of the same audit, in one run.

    python benchmarks/jobs.py [--jobs 2] [--seeds 12] [--iterations 400]

Prints a Markdown table. Needs an idle machine with as many cores as jobs. `trials` is the audit
without the calibration, `with forecast` as `leakgauge audit` runs it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from leakgauge.audit import Store, parse, run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--seeds", type=int, default=12)
    arguments.add_argument("--iterations", type=int, default=400)
    asked = arguments.parse_args()
    plan = parse(
        {
            "federation": {"data": {"name": "photos", "size": 32}, "model": "lenet-zhu"},
            "attack": [
                {"name": "inverting-gradients", "iterations": asked.iterations},
                {"name": "analytic"},
            ],
            "audit": {"seeds": list(range(asked.seeds)), "gallery": 50},
        },
        "jobs",
        Path.cwd(),
    )
    print(f"| audit | 1 job, s | {asked.jobs} jobs, s | ratio |")
    print("|---|---|---|---|")
    for name, calibrate in (("trials", False), ("with forecast", True)):
        walls = []
        for jobs in (1, asked.jobs):
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                run(plan, Store(Path(folder) / "out"), jobs=jobs, calibrate=calibrate)
                walls.append(time.monotonic() - began)
        print(f"| {name} | {walls[0]:.1f} | {walls[1]:.1f} | {walls[0] / walls[1]:.2f} |")


if __name__ == "__main__":
    main()
