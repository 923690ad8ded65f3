"""The weights of a client at each of its local steps, from what is known of each step's gradient.

SGD with momentum and weight decay is linear in the first weights and in the gradients: with known
numbers,

    w_t = (1 − d_t)·w_0 − lr·Σ_{s<t} m_ts·g_s,     update = d_T·w_0 + lr·Σ_s m_Ts·g_s.

An attacker who knows the *part* m_Ts·g_s of every step in the update of a parameter knows that
parameter at every step. Where the parts are not known, each step is given its even share.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakgauge.fl.local import advance, start
from leakgauge.types import LocalTraining, Named


@dataclass
class Path:
    """`before` are the weights that the client was sent, `gradient` the sum of all parts by lr."""

    before: Named
    gradient: Named
    training: LocalTraining
    steps: int
    weights: tuple[Named, ...] = ()
    _shares: Tensor = field(default_factory=lambda: torch.zeros(0))
    _kept: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        responses = [_response(self.training, self.steps, s) for s in range(self.steps)]
        moved = torch.stack(responses, 1)  # (steps + 1, steps): m_ts
        self._shares = moved[:-1] / moved[-1]
        self._kept = 1 - _response(self.training, self.steps, None)[:-1]
        even = moved[-1] / moved[-1].sum()
        self.weights = tuple({} for _ in range(self.steps))
        if self.steps > 1:
            for name, whole in self.gradient.items():
                self.learn(name, even.view(-1, *[1] * whole.dim()) * whole)

    def copied(self) -> Path:
        """One that learns for itself."""
        other = copy.copy(self)
        other.weights = tuple(dict(one) for one in self.weights)
        return other

    def learn(self, name: str, parts: Tensor) -> None:
        """Take the parts (steps, …) of a parameter's gradient as known."""
        if self.steps == 1:  # its weights are those that were sent
            return
        first = self.before[name]
        taken = torch.tensordot(self._shares, parts, 1) * self.training.lr
        for step, weights in enumerate(self.weights):
            weights[name] = self._kept[step] * first - taken[step]

    def rounding(self, name: str) -> Tensor:
        """By how much a parameter's gradient may be off where the client sends its weights: what is
        left of an update by the last digit of the float32 that it came in."""
        if self.training.sends == "update":
            return torch.zeros_like(self.before[name])
        return self.before[name].abs() * torch.finfo(torch.float32).eps / self.training.lr


def _response(training: LocalTraining, steps: int, to: int | None) -> Tensor:
    """By how much a weight has moved before each step and after the last: for a gradient of 1/lr in
    one step alone, or for none and a weight of one."""
    weight = torch.tensor(1.0 if to is None else 0.0, dtype=torch.float64)
    state = start([weight], training)
    found = [torch.zeros((), dtype=torch.float64)]
    for step in range(steps):
        gradient = 1 / training.lr if step == to else 0.0
        state = advance(state, [torch.tensor(gradient, dtype=torch.float64)], training)
        found.append(state.moved[0])
    return torch.stack(found)
