"""Secure aggregation, measured: what it costs, and what its sum still shows.

    python benchmarks/secure.py cost    CPU time of a client and of the server
    python benchmarks/secure.py leak    records read from the sum of four clients, by rounding

Prints Markdown tables. `cost` needs the extra `secure`, `leak` the extra `demo`. Both use one
thread. `cost` takes the median of five runs, and of the clients of each; the sum of every run is
compared with the plain one, and must be the same.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch

from leakgauge import data, models
from leakgauge.attacks import Analytic, ExactRecursion
from leakgauge.errors import NotApplicable
from leakgauge.fl import Scenario, simulate
from leakgauge.secure import run
from leakgauge.threat import covered, observe
from leakgauge.types import Attack, LocalTraining, SecureSum, ThreatModel

CLIENTS = (5, 10, 20, 50)
LENGTHS = (10**5, 10**6)
DROPPED = 0.3  # when all have their shares: the server's hardest case
RUNS = 5
BITS = (None, 24, 20, 16, 12, 8)
CLIPS = (1.0, 0.1)
SEEDS = range(5)
AGGREGATE = ThreatModel("aggregate")


def cost() -> None:
    print("| clients | values | drop out | one client, s | server, s |")
    print("|---|---|---|---|---|")
    for clients in CLIENTS:
        for length in LENGTHS:
            rng = np.random.default_rng(clients)
            vectors = [rng.integers(0, 2**32, length, np.dtype("<u4")) for _ in range(clients)]
            for gone in (0, int(DROPPED * clients)):
                plain = np.add.reduce(vectors[gone:], dtype="<u4")
                done = [run(vectors, dropped={"mask": range(gone)}) for _ in range(RUNS)]
                assert all(np.array_equal(one.total, plain) for one in done), "a sum is wrong"
                one = statistics.median(s for d in done for s in d.client_seconds[gone:])
                server = statistics.median(d.server_seconds for d in done)
                row = f"| {clients} | {length:,} | {gone} | {one:.3f} | {server:.3f} |"
                print(row, flush=True)


def read(secure: SecureSum, attack: Attack, seed: int) -> int:
    """How many of the four records an attack reads from the sum, above 30 dB of PSNR."""
    scenario = Scenario(
        lambda: models.make(
            "mlp", shape=(1, 8, 8), classes=10, rng=torch.default_generator, hidden=[256, 256]
        ),
        data.load("digits"),
        LocalTraining(lr=0.1),
        clients=4,
        secure=secure,
    )
    played = simulate(scenario, torch.Generator().manual_seed(seed))
    try:
        guess = attack.reconstruct(
            observe(played, AGGREGATE), torch.Generator().manual_seed(seed)
        ).inputs
    except NotApplicable:
        return 0
    truth = covered(played, AGGREGATE).inputs
    errors = (guess[:, None] - truth[None]).square().flatten(2).mean(-1)  # (guesses, truths)
    return int((errors.amin(0) < 1e-3).sum())


def leak() -> None:
    attacks: dict[str, Attack] = {"exact recursion": ExactRecursion(), "analytic": Analytic()}
    print("| clip | bits | " + " | ".join(attacks) + " |")
    print("|---|---|" + "---|" * len(attacks))
    for bits in BITS:
        for clip in CLIPS if bits else (None,):
            secure = SecureSum(clip=clip, bits=bits or 16)
            found = [sum(read(secure, one, seed) for seed in SEEDS) for one in attacks.values()]
            said = f"±{clip:g} | {bits}" if clip else "not rounded | "
            print(f"| {said} | " + " | ".join(map(str, found)) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cost", "leak"))
    torch.set_num_threads(1)
    {"cost": cost, "leak": leak}[parser.parse_args().what]()
