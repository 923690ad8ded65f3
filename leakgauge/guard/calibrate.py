"""Thresholds for a client's own network and records, from its own honest simulations.

For each of three seeds a fresh network is trained for a few rounds by two clients that share the
records, each behind a guard. Where twice the largest score of a test lies above its threshold, that
becomes the threshold. No threshold is ever lowered, and a fault of structure is never excused.

It makes false alarms rarer and the guard blunter: read the sentences that come with the policy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from leakgauge.errors import InputError
from leakgauge.fl import aggregate
from leakgauge.fl.local import train
from leakgauge.fl.model import setting
from leakgauge.guard.guard import Guard
from leakgauge.guard.policy import TESTS, Policy
from leakgauge.guard.verdict import Verdict
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.tensors import parameters, subtract
from leakgauge.types import Batch, Dataset, LocalTraining

SEEDS = 3
ROUNDS = 3
CLIENTS = 2
ROOM = 2.0  # threshold over the largest honest score


def calibrate(
    make_model: Callable[[], nn.Module],
    data: Dataset,
    training: LocalTraining,
    policy: Policy | None = None,
    scale: Scale = AS_THEY_ARE,
) -> tuple[Policy, list[str]]:
    """The policy with thresholds raised where honest training needs it, and what was raised."""
    policy = policy or Policy()
    largest: dict[str, float] = {}
    least: dict[str, float] = {}
    checks = 0
    for seed in range(SEEDS):
        for verdict in _simulate(make_model, data, training, policy, scale, seed):
            checks += 1
            for one in verdict.detections:
                if one.means != "report" and one.test in TESTS:
                    largest[one.test] = max(largest.get(one.test, 0.0), one.score)
                    least[one.test] = one.threshold
    raised = {t: ROOM * s for t, s in largest.items() if ROOM * s > least[t]}
    said = [
        f"{test}: raised from {least[test]:.3g} to {raised[test]:.3g}, twice the largest score of "
        f"{checks} honest checks ({largest[test]:.3g})"
        for test in sorted(raised)
    ]
    said += [
        f"{test} is a share and cannot exceed its new threshold: the test is off in effect"
        for test in sorted(raised)
        if test in SHARES and raised[test] >= 1
    ]
    return replace(policy, thresholds={**policy.thresholds, **raised}), said


SHARES = {"bins", "duplicate-rows", "isolation", "near-zero-entries", "zero-rows"}


def _simulate(
    make_model: Callable[[], nn.Module],
    data: Dataset,
    training: LocalTraining,
    policy: Policy,
    scale: Scale,
    seed: int,
) -> list[Verdict]:
    """The checks of one honest simulation, which goes on whatever they find."""
    rng = torch.Generator().manual_seed(seed)
    least = CLIENTS * training.batch_size
    if len(data) < least:
        raise InputError(
            f"{data.name} has {len(data)} records; calibration takes {least} at least: "
            f"{CLIENTS} clients of one batch ({training.batch_size})."
        )
    shards = torch.randperm(len(data), generator=rng).tensor_split(CLIENTS)
    guards = [
        Guard(make_model, training, scale=scale, policy=policy, secret=f"{seed}/{k}".encode())
        for k in range(len(shards))
    ]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1 + seed)  # the guard's own network has another seed
        model = copy.deepcopy(make_model())
    own = setting(model, data.inputs, len(data.classes), scale)
    verdicts = []
    for index in range(ROUNDS):
        trained = []
        for guard, shard in zip(guards, shards, strict=True):
            order = shard[torch.randperm(len(shard), generator=rng)]
            batch = Batch(data.inputs[order], data.labels[order])
            verdicts.append(guard.check(model.state_dict(), batch, first=not index))
            local = train(own, batch, training, rng)
            tolerated = _tolerated(guard, verdicts[-1], model, batch, not index)
            guard.remember(tolerated, subtract(parameters(model), local.update) | local.buffers)
            guard.policy = policy
            trained.append(local)
        shares = aggregate.weights([len(shard) for shard in shards], "records")
        after, buffers = aggregate.merge(parameters(model), trained, shares, 1.0)
        model.load_state_dict(after | buffers, strict=False)
    return verdicts


def _tolerated(
    guard: Guard, verdict: Verdict, model: nn.Module, batch: Batch, first: bool
) -> Verdict:
    """A verdict that can be remembered: what fires is raised until it does not."""
    while not verdict.train:
        fired = {one.test: ROOM * one.score for one in verdict.fired}
        for one in verdict.fired:
            if one.test not in TESTS or not math.isfinite(one.score):
                raise InputError(
                    f"the guard rejects the client's own honest model ({one.test}: {one.reason}); "
                    "no threshold can mend that."
                )
        guard.policy = replace(guard.policy, thresholds={**guard.policy.thresholds, **fired})
        verdict = guard.check(model.state_dict(), batch, first=first)
    return verdict
