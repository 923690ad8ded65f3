"""Warm-up Z-score — F. Wang, B. Li: "Hear No Evil: Detecting Gradient Leakage by Malicious Servers
in Federated Learning", https://arxiv.org/abs/2506.20651, §5

Before local training the client takes five steps of gradient descent on 128 of its records and, of
the model as received and after each step, notes mean, standard deviation and largest magnitude of:
weight and bias of the first and the last linear layer, of the first convolution, of the first and
the last attention; what leaves the first three batch norms. Each number x is compared with those of
a record:

    Z = |x − μ| / (σ + 1e-8)

and the largest Z is the score. The paper does not say which record; two readings:

`reading="printed"`  this round's own earlier steps, which is what the text says. The baseline then
                     comes from the manipulated model itself, and the test is blind: honest models
                     score as high as attacked ones. Kept to show that. Threshold 4000, below which
                     the paper's honest models stay.
`reading="carried"`  the steps of all accepted rounds, once there are three. When there is none yet,
                     five networks as the client itself initialises them (`Received.make`), which is
                     right only if the training really starts: set `at_start=False` for a client
                     that joins later. Threshold 30.

Needs: the received model and records. Costs six passes over 128 records, a good part of an epoch.
Differs from the paper: as above; three measures are named by the text as four; the sign of Z is
dropped; the 1e-8, which the printed numbers imply, keeps a constant record from dividing by zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.detectors._layers import fitted, judged, prepared, wide, worst
from leakgauge.fl.local import advance, outputs, start
from leakgauge.types import Batch, Detection, LocalTraining, Received

Snapshot: TypeAlias = Mapping[str, tuple[float, float, float]]
EPSILON = 1e-8
RECORDS = 128
STEPS = 5


@dataclass(frozen=True)
class WarmUp:
    """Do the first training steps look as in earlier rounds?"""

    threshold: float | None = None  # of the reading: 30 carried, 4000 printed
    reading: Literal["carried", "printed"] = "carried"
    rounds: int = 3  # accepted ones, from which the record is used
    copies: int = 5  # own initialisations to compare the first model with
    at_start: bool = True

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None or received.batch is None or not len(received.batch):
            return ()
        records = _subset(received.batch, rng)
        if self.reading == "printed":
            now = snapshots(received.model, records, received.training)
            scores = _in_round(now)
            against = "the steps before it"
        else:
            record = self._record(received, records, rng)
            if not record:
                return ()
            now = snapshots(received.model, records, received.training)
            scores = z_scores(now, record)
            against = "the record of accepted rounds" if received.history else "own fresh networks"
        threshold = self.threshold
        if threshold is None:
            threshold = {"carried": 30.0, "printed": 4000.0}[self.reading]
        says = "in five steps of warm-up {name} lies {score:.3g} standard deviations from "
        return judged("warm-up", scores, threshold, "reject", says + against)

    def _record(self, received: Received, batch: Batch, rng: torch.Generator) -> list[Snapshot]:
        history = received.history
        if history is not None and history.rounds:
            if len(history.snapshots) < self.rounds:
                return []
            return [one for round_ in history.snapshots for one in round_]
        if not self.at_start or received.make is None:
            return []
        record: list[Snapshot] = []
        for _ in range(self.copies):
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would reseed the GPUs too.
                seed = int(torch.randint(2**62, (), generator=rng))
                torch.default_generator.manual_seed(seed)
                own = received.make()
            record += snapshots(own, batch, received.training)
        return record


def snapshots(model: nn.Module, batch: Batch, training: LocalTraining) -> tuple[Snapshot, ...]:
    """(mean, std, largest magnitude) of what is watched: as received, then after each step.

    The first 128 records are one batch; plain gradient descent with the client's learning rate.
    """
    model = prepared(model, training)
    records = fitted(Batch(batch.inputs[:RECORDS], batch.labels[:RECORDS]), model)
    watched, norms = _watched(model)
    left: dict[str, Tensor] = {}
    for name, module in norms.items():
        module.register_forward_hook(
            lambda module, args, out, name=name: left.__setitem__(name, out.detach().clone())
        )
    plain = replace(training, optimiser="sgd", momentum=0.0, weight_decay=0.0)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    state = start([values[n].detach() for n in names], plain)
    taken: list[Snapshot] = []
    for step in range(STEPS + 1):
        weights = [w.detach().requires_grad_() for w in state.weights]
        values |= dict(zip(names, weights, strict=True))
        with torch.enable_grad():
            said = outputs(model, values, records.inputs, plain, step)
            objective = cross_entropy(said, records.labels)
        tensors = {n: values[n] for n in watched} | {f"{n} (output)": t for n, t in left.items()}
        taken.append({n: _profile(t) for n, t in tensors.items()})
        if step < STEPS and weights:
            gradient = torch.autograd.grad(objective, weights, materialize_grads=True)
            with torch.no_grad():
                state = advance(state, gradient, plain)
    return tuple(taken)


def z_scores(now: Sequence[Snapshot], record: Sequence[Snapshot]) -> dict[str, float]:
    """The largest Z of each watched tensor, over its three measures and all of `now`."""
    scores: dict[str, float] = {}
    for name in now[0]:
        past = torch.tensor([one[name] for one in record if name in one], dtype=torch.float64)
        if not len(past):
            continue
        values = torch.tensor([one[name] for one in now], dtype=torch.float64)  # (steps, 3)
        z = (values - past.mean(0)).abs() / (past.std(0, correction=0) + EPSILON)
        scores[name] = float(z.max())  # NaN stays
    return scores


def _in_round(now: Sequence[Snapshot]) -> dict[str, float]:
    """Each step against those before it: the text of §5.2 taken by the letter."""
    steps = [z_scores(now[t : t + 1], now[:t]) for t in range(1, len(now))]
    return {name: worst({str(t): z[name] for t, z in enumerate(steps)})[1] for name in now[0]}


def _subset(batch: Batch, rng: torch.Generator) -> Batch:
    picked = torch.randperm(len(batch), generator=rng)[:RECORDS]
    return Batch(batch.inputs[picked], batch.labels[picked])


def _profile(value: Tensor) -> tuple[float, float, float]:
    value = wide(value)
    return (float(value.mean()), float(value.std(correction=0)), float(value.abs().max()))


def _watched(model: nn.Module) -> tuple[list[str], dict[str, nn.Module]]:
    """The parameters, and the batch norms, that the paper monitors."""
    modules = dict(model.named_modules())
    linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
    conv = [n for n, m in modules.items() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    attention = [n for n, m in modules.items() if type(m).__name__.endswith("Attention")]
    parts = {*linear[:1], *linear[-1:], *conv[:1], *attention[:1], *attention[-1:]}
    names = [
        name
        for name, value in model.named_parameters()
        if value.numel() and any(not part or name.startswith(f"{part}.") for part in parts)
    ]
    norms = [n for n, m in modules.items() if isinstance(m, _BatchNorm)][:3]
    return names, {n: modules[n] for n in norms}
