"""Continuity and drift — an honest model is a small step away from the last one, and not many steps
away from an older one. Our own.

For every parameter and running statistic W, with W' the last accepted model, u the size of the
client's own last update of it, and m the rounds since then (1: none missed),

    continuity = ‖W − W'‖ / max(m · u, f·‖W'‖ + 1e-8)

A server's step is the mean of the clients' updates, so that it is seldom larger than one of them.
The limit comes from the client's own updates alone: steps that were accepted before say nothing, so
that a server cannot stretch its steps round by round. The same against an older model, the anchor
A, with the sum of the client's own updates since then,

    drift = ‖W − A‖ / max(Σ u, f·‖A‖ + 1e-8)

from the third round after A on: what may add up is less than what one round may show. The guard
takes a new anchor every twenty rounds. f is 1e-4, or what half precision rounds off.

A layer that the client's own network starts from zeros passes nothing back in the first step, so
that the first own update understates the next rounds (measured: up to 5.8 times, honestly). After
one accepted round, scores of such networks are divided by `slack`.

Needs: one accepted round. Running statistics are compared if the client's own were in what it sent.
A client that does a tenth of the others' work, or whose server adds momentum .9, needs thresholds
ten times as large. Weak when rounds are long; a server may go on below the limit of drift for ever;
and a server that makes the client's own updates grow makes the limit grow with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakgauge.detectors._layers import judged, wide
from leakgauge.errors import InputError
from leakgauge.types import Detection, Received


@dataclass(frozen=True)
class Continuity:
    """Is the model a small step away from the last one?"""

    threshold: float = 5.0
    drift: float = 3.0
    settled: int = 3  # rounds after the anchor from which drift is tested
    floor: float = 1e-4  # a share of the weights' size
    slack: float = 3.0  # after one accepted round, of a network with layers that start from zeros

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        history, model = received.history, received.model
        if history is None or model is None or not history.rounds:
            return ()
        values: dict[str, Tensor] = dict(model.named_parameters())
        values |= {n: b for n, b in model.named_buffers() if n in history.own}
        missing = [n for n, v in values.items() if _other(history.state.get(n), v)]
        if missing:
            reason = f"{missing[0]!r} was not in the last accepted model in this shape"
            return (
                Detection("continuity", float("inf"), self.threshold, "reject", reason, missing[0]),
            )
        missed = max(history.missed, 1)
        slack = self.slack if history.rounds == 1 and _starts_from_zeros(received.fresh) else 1.0
        steps = {n: u * missed * slack for n, u in history.own.items()}
        ratios = self._ratios(values, history.state, steps, received)
        says = (
            "since the last accepted model {name} moved {score:.3g} times as far as your own "
            "last update moved it"
        )
        found = judged("continuity", ratios, self.threshold, "reject", says)
        if history.age + missed < self.settled or not history.anchor:
            return found
        values = {n: v for n, v in values.items() if not _other(history.anchor.get(n), v)}
        if not values:
            raise InputError("no tensor of this model is in the older one that is remembered")
        sums = {n: s + history.own.get(n, 0.0) * (missed - 1) for n, s in history.since.items()}
        ratios = self._ratios(values, history.anchor, sums, received)
        says = (
            f"over the last {history.age + missed} rounds "
            "{name} moved {score:.3g} times as far as all your own updates together"
        )
        return found + judged("drift", ratios, self.drift, "reject", says)

    def _ratios(
        self,
        values: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        usual: Mapping[str, float],
        received: Received,
    ) -> dict[str, float]:
        ratios = {}
        for name, value in values.items():
            came = received.state[name].dtype if name in received.state else value.dtype
            share = max(self.floor, torch.finfo(came).eps) if came.is_floating_point else self.floor
            old = wide(before[name])
            least = share * float(old.norm()) + 1e-8
            ratios[name] = float((wide(value) - old).norm()) / max(usual.get(name, 0.0), least)
        return ratios


def _other(before: Tensor | None, value: Tensor) -> bool:
    return before is None or before.shape != value.shape


def _starts_from_zeros(fresh: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) and not m.weight.any() for m in fresh.modules())
