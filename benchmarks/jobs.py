"""How much faster two jobs are than one, and Ray beside them: wall time of the same audit, in one
run.

    python benchmarks/jobs.py [--jobs 2] [--seeds 12] [--iterations 400] [--ray]

Prints a Markdown table. Needs an idle machine with as many cores as jobs. `trials` is the audit
without the calibration, `with forecast` as `leakgauge audit` runs it. With `--ray`: what a Ray of
this machine with as many workers adds to the first trial, and to each of many short ones.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from leakgauge.audit import Plan, Store, Watch, parse, run
from leakgauge.audit.workers import local
from leakgauge.integrations import ray


def overhead(plan: Plan, jobs: int) -> None:
    """Seconds until the first trial has ended, and milliseconds of each after it."""
    print("| engine | first trial ended, s | each further trial, ms |")
    print("|---|---|---|")
    for name, engine in (("processes", local), ("Ray", ray.engine(None))):
        ended = [time.monotonic()]
        with tempfile.TemporaryDirectory() as folder:
            watch = Watch(end=lambda case, trial, ended=ended: ended.append(time.monotonic()))
            run(plan, Store(Path(folder) / "out"), jobs=jobs, engine=engine, watch=watch)
        began, first, *_, last = ended
        each = 1000 * (last - first) / (len(ended) - 2)
        print(f"| {name} | {first - began:.1f} | {each:.1f} |")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--seeds", type=int, default=12)
    arguments.add_argument("--iterations", type=int, default=400)
    arguments.add_argument("--ray", action="store_true")
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
    if asked.ray:
        table = {
            "federation": {"data": "digits", "model": {"name": "mlp", "hidden": [16]}},
            "attack": [{"name": "analytic"}],
            "audit": {"seeds": list(range(20 * asked.seeds)), "gallery": 20, "control": False},
        }
        print()
        overhead(parse(table, "short", Path.cwd()), asked.jobs)


if __name__ == "__main__":
    main()
