"""Does the guard hold? Honest federations and every active attack, through the guard itself.

    python benchmarks/guard_evaluate.py [--out FOLDER] [--seed N] [--most N] [--policy FILE]
    python benchmarks/guard_evaluate.py --quick        a small one, on built-in photographs

About 40 CPU-minutes, a minute with --quick; the same command continues what was interrupted.
CIFAR-10 is used where LEAKGAUGE_DATA is set, else the photographs.

A *unit* of work is one federation: four clients, each with a guard and a store of its own, and
honest rounds in which every client checks the model, trains, and remembers. Where the unit says so,
each attack is also sent: to clients without a memory before the first round, and to clients that
remember honest rounds after the last. Other units measure the cost of a check beside a local epoch,
and set the guard's self-audit beside what the attacks recover. The last send models of a server
that has studied the guard, and count what it reads, also off an update with noise.

A finished unit is one line of FOLDER/records.jsonl; units that have a line are not run again.
FOLDER gets result.json, table.md and figure.png. `guard_cases.py` has what is evaluated,
`guard_units.py` one unit each, `guard_findings.py` the rates and `guard_page.py` their table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from guard_cases import DENSE, HOSTS, RECOVERIES, VARIANTS, Data, federations, load_data
from guard_findings import summarise
from guard_page import figure, markdown
from guard_studied import STUDIED
from guard_units import cost, play, recover, studied
from rich.console import Console

from leakgauge._version import __version__
from leakgauge.errors import LeakGaugeError
from leakgauge.files import write_atomic, write_json
from leakgauge.guard import Policy
from leakgauge.guard import policy as policies

Unit = Callable[[], dict[str, Any]]


def units(
    data: Data, seed: int, quick: bool, policy: Policy, most: int | None = None
) -> dict[str, Unit]:
    """Every unit by its name; of the federations the first `most`."""
    todo: dict[str, Unit] = {}
    for name in STUDIED:
        todo[f"studied/{name}"] = partial(studied, name, data, seed, policy)
    for case in federations(quick)[:most]:
        todo[case.id] = partial(play, case, data, seed, policy)
    for variant in RECOVERIES:
        todo[f"recovery/{variant.name}/{variant.hosts[0]}"] = partial(
            recover, variant, data, seed, policy
        )
    for host in DENSE if quick else HOSTS:
        todo[f"cost/{host}"] = partial(cost, host, data, seed, policy)
    return todo


def run(
    out: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    policy: Policy | None = None,
    most: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Run the units that OUT does not hold yet, and write result.json, table.md and figure.png."""
    policy = policy or Policy()
    data = load_data(quick)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    done = {line["id"]: line for line in _read(path)}
    todo = units(data, seed, quick, policy, most)
    run_ = hashlib.sha256(
        repr((__version__, policy, VARIANTS, STUDIED, quick)).encode()
    ).hexdigest()[:8]
    records = []
    for number, (name, unit) in enumerate(todo.items()):
        key = f"{data.private.name}/{run_}/{seed}/{name}"
        if progress:
            progress(number, len(todo), name)
        if key not in done:
            began = time.process_time()
            line: dict[str, Any] = {"id": key} | unit()
            line["cpu_seconds"] = time.process_time() - began
            with path.open("a", encoding="utf-8") as file:
                torn = file.tell() and not path.read_bytes().endswith(b"\n")  # by a crash
                file.write("\n" * bool(torn) + json.dumps(line, allow_nan=False) + "\n")
            done[key] = line
        records.append(done[key])
    facts = {"data": data.private.name, "seed": seed, "quick": quick, "version": __version__}
    result = summarise(records, facts)
    write_json(out / "result.json", result)
    write_atomic(out / "table.md", markdown(result).encode())
    figure(records, out / "figure.png")
    return result


def _read(path: Path) -> list[dict[str, Any]]:
    """The finished units. A last line that was cut off by a crash is run again."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("guard-evaluation"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a small one, in about a minute")
    parser.add_argument("--seed", type=int, default=0, help="of federations, clients and attacks")
    parser.add_argument("--most", type=_count, help="only so many of the honest federations")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="your policy (TOML)")
    options = parser.parse_args(arguments)
    aside = Console(stderr=True, highlight=False)
    try:
        settings = policies.read(options.policy) if options.policy else policies.Settings()
        with aside.status("") as status:
            result = run(
                options.out,
                quick=options.quick,
                seed=options.seed,
                policy=settings.policy,
                most=options.most,
                progress=lambda done, total, name: status.update(f"{done} of {total}: {name}"),
            )
    except LeakGaugeError as error:
        aside.print(str(error), style="red", markup=False)
        return 2
    print(markdown(result))
    print(f"result    {options.out / 'result.json'}")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
