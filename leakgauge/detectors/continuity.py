"""Continuity — an honest model is a small step away from the last one. Our own.

For every parameter W, with W' the last accepted model and m the rounds since then (1: none missed),

    r = ‖W − W'‖ / max(m · usual, 1e-4·‖W'‖ + 1e-8)

Until three steps are stored, `usual` is the larger of the client's own last update and the largest
accepted step so far: the own update alone makes a false alarm for a client that does less work than
the others. From then on it is the median of the last five accepted steps, which is tighter, because
own updates grow with local work while averaged steps do not; or, if larger, the smaller of the last
step and the own last update. The latter is for training that speeds up: a fresh LeNet doubled its
steps four rounds running and reached 4.1 by the median alone, 2.2 with it. The server cannot use it
to stretch its steps round by round, because it does not choose the client's own update.

A layer that the client's own network starts from zeros passes nothing back in the first step, so
that the first own update understates the next rounds (measured: up to 5.8 times, honestly). Until a
step is stored, scores of such networks are divided by `slack`.

Needs: one accepted round. Running statistics of batch norm are not compared.
Weak when rounds are long, blind to a server that drifts over many rounds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakgauge.detectors._layers import wide, worst
from leakgauge.types import Detection, History, Received


@dataclass(frozen=True)
class Continuity:
    """Is the model a small step away from the last one?"""

    threshold: float = 5.0
    stored: int = 3  # accepted steps from which the median is used
    window: int = 5  # of the median, in accepted steps
    floor: float = 1e-4  # a share of the weights' size
    slack: float = 3.0  # after one accepted round, of a network with layers that start from zeros

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        history, model = received.history, received.model
        if history is None or model is None or not history.rounds:
            return ()
        young = not history.steps and _starts_from_zeros(received.fresh)
        slack = self.slack if young else 1.0
        scores, unknown = {}, []
        for name, value in model.named_parameters():
            before = history.state.get(name)
            if before is None or before.shape != value.shape:
                unknown.append(name)
            else:
                scores[name] = self._ratio(name, wide(value), wide(before), history) / slack
        if unknown:
            reason = f"{unknown[0]!r} was not in the last accepted model in this shape"
            return (
                Detection("continuity", float("inf"), self.threshold, "reject", reason, unknown[0]),
            )
        if not scores:
            return ()
        name, score = worst(scores)
        reason = (
            f"since the last accepted model {name!r} moved {score:.3g} times as far as a round "
            "usually moves it"
        )
        return (Detection("continuity", score, self.threshold, "reject", reason, name),)

    def _ratio(self, name: str, value: Tensor, before: Tensor, history: History) -> float:
        own = history.own.get(name, 0.0)
        steps = [step[name] for step in history.steps if name in step]
        if len(steps) >= self.stored:
            usual = max(statistics.median(steps[-self.window :]), min(steps[-1], own))
        else:
            usual = max(own, *steps, 0.0)
        least = self.floor * _norm(before) + 1e-8
        return _norm(value - before) / max(usual * max(history.missed, 1), least)


def _starts_from_zeros(fresh: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) and not m.weight.any() for m in fresh.modules())


def _norm(value: Tensor) -> float:
    return float(value.norm())
