"""A server that moves its clients' model towards a manipulated one, a step per round.

    python benchmarks/guard_drift.py [ROUNDS]      prints the table of docs/guard-evaluation.md

CIFAR-10, one client, 8 steps of 32 per round, SGD .02 with momentum .9, on a perceptron
3072-512-256-10. The server sees the client's updates, knows the rules, and moves every tensor as
far as they allow towards its goal; it does nothing else, so that only continuity and drift can stop
it. Rules:

    growing   each step 4.8 times the last, by the rule of an earlier guard: usual is the larger of
              the own update and the largest accepted step, from three steps on the median of the
              last five or the smaller of the last step and the own update
    own       4.9 times the client's own last update
    drift     the same, with the limit of drift: 2.9 times all own updates since the anchor

The last two go through the guard itself, all other tests off. A server has arrived when every
tensor is within 1 % of its goal. Needs LEAKGAUGE_DATA.
"""

from __future__ import annotations

import copy
import statistics
import sys

import torch
from torch import Tensor, nn

from leakgauge import data, models
from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.detectors import Continuity
from leakgauge.fl import setting
from leakgauge.fl.local import train
from leakgauge.guard import Guard, Policy
from leakgauge.records import Scale
from leakgauge.tensors import parameters, subtract
from leakgauge.types import Batch, Dataset, LocalTraining, Target

TRAINING = LocalTraining(lr=0.02, batch_size=32, steps=8, momentum=0.9)
SCALE = Scale(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
Named = dict[str, Tensor]


def make(seed: int = 0) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return models.make("mlp", shape=(3, 32, 32), classes=10, rng=rng, hidden=[512, 256])


def sizes(named: Named) -> dict[str, float]:
    return {name: float(value.norm()) for name, value in named.items()}


def earlier(own: dict[str, float], steps: list[dict[str, float]]) -> dict[str, float]:
    """How far an earlier guard let each tensor move."""
    limits = {}
    for name, mine in own.items():
        past = [step[name] for step in steps]
        usual = max([mine, *past])
        if len(past) >= 3:
            usual = max(statistics.median(past[-5:]), min(past[-1], mine))
        limits[name] = 4.8 * usual
    return limits


def towards(state: Named, goal: Named, limits: dict[str, float]) -> Named:
    moved = {}
    for name, value in state.items():
        way = goal[name] - value
        moved[name] = value + way * min(1.0, limits[name] / max(float(way.norm()), 1e-12))
    return moved


def left(state: Named, goal: Named, start: Named) -> float:
    """The largest share of its way that a tensor has before it."""
    return max(
        float((goal[n] - state[n]).norm() / (goal[n] - start[n]).norm().clamp_min(1e-12))
        for n in goal
    )


def played(rule: str, goal: Named, batches: list[Batch], rounds: int) -> tuple[int, float, float]:
    """Rounds played, the share of the way that is left, and growth of the own update."""
    model, rng = make(), torch.Generator().manual_seed(0)
    begun = state = parameters(model)
    off: dict[str, object] = {"weights": "off", "probe": "off", "first_conv": "off"}
    drift = 3.0 if rule == "drift" else float("inf")
    policy = Policy(continuity=Continuity(drift=drift), require=(), **off)  # type: ignore[arg-type]
    guard = Guard(make, TRAINING, scale=SCALE, policy=policy)
    first, own, steps = 0.0, {}, []
    for index in range(rounds):
        model.load_state_dict(state)
        batch = batches[index % len(batches)]
        update = train(setting(model, batch, 10, SCALE), batch, TRAINING, rng).update
        if rule != "growing":
            verdict = guard.check(dict(model.state_dict()))
            if not verdict.train:
                raise SystemExit(f"the guard stopped a server that keeps its rules: {verdict}")
            guard.remember(verdict, subtract(state, update))
        own = sizes(update)
        first = first or sum(own.values())
        if rule == "growing":
            limits = earlier(own, steps)
        else:
            limits = {n: 4.9 * u for n, u in own.items()}
            memory = guard._memory
            assert memory is not None
            if rule == "drift" and memory.age >= 1:  # the guard tests the third round after
                for name in limits:
                    room = 2.9 * memory.since[name]
                    done = float((state[name] - memory.anchor[name]).norm())
                    limits[name] = max(0.0, min(limits[name], room - done))
            elif rule == "drift":
                limits = {n: 2.9 * u for n, u in own.items()}
        new = towards(state, goal, limits)
        steps.append(sizes(subtract(new, state)))
        state = new
        if left(state, goal, begun) < 0.01:
            return index + 1, 0.0, sum(own.values()) / first
    return rounds, left(state, goal, begun), sum(own.values()) / first


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    images, test = (data.load("cifar10", split=s) for s in ("train", "test"))
    public = Dataset("public", test.inputs[:2000], test.labels[:2000], test.classes)
    batches = [
        Batch(images.inputs[k : k + 256], images.labels[k : k + 256]) for k in range(0, 5120, 256)
    ]
    for name in ("robbing-the-fed", "trap-weights", "fishing"):
        attack = ACTIVE_ATTACKS[name]()
        held = Target(setting(make(), (3, 32, 32), 10, SCALE), TRAINING, 256, 1, public)
        sent = attack.prepare(held, torch.Generator().manual_seed(0)).models[0]
        goal = parameters(sent)
        for rule in ("growing", "own", "drift"):
            count, rest, growth = played(rule, copy.deepcopy(goal), batches, rounds)
            end = f"arrives in {count} rounds" if not rest else f"{rest:.1%} of the way left"
            print(f"{name:16} {rule:8} {end} (own update × {growth:.3g})", flush=True)


if __name__ == "__main__":
    main()
