"""The derivative of any gradient distance with respect to the candidates.

An attack looks for x with D(g'(x), g) small, where g'(x) = ∇_w L(x, w) is what a client holding x
would have sent. With v = ∂D/∂g' held fixed,

    dD/dx = ∇_x ⟨v, ∇_w L(x, w)⟩.

Three ways to compute it for one step of SGD:

- `exact`: double backward with v as the outer gradient. The reference.
- `fast`: (∇_x L(x, w + εv) − ∇_x L(x, w)) / ε with ε = c‖w‖/‖v‖. The second term falls out of the
  backward pass that gives g', so a step costs one and a half ordinary backward passes. ReLUs and
  max-pools keep the choices of the first pass (see _gate.py), else the difference is useless.
- `central`: (∇_x L(x, w + εv) − ∇_x L(x, w − εv)) / 2ε, also gated: dearer, more accurate.

`auto` compares itself with `exact` in float64 at the first step and now and then, and takes the
cheapest rung of a ladder of modes and strides that agrees; when none does it is `exact`; and where
float32 itself is too coarse it goes on in float64. Notes say so.

Several local steps are unrolled exactly: forward keeps the state of each step, backward recomputes
one step at a time, so memory grows by one copy of the state a step, not by one graph a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakgauge.attacks._gate import Gate
from leakgauge.attacks._objectives import Distance, dot
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl.local import State, advance, logits, loss, minibatches, ready, start
from leakgauge.types import LocalTraining, Observation

Mode: TypeAlias = Literal["auto", "fast", "central", "exact"]

TOLERANCE = 4e-3  # relative error of the derivative above which `auto` goes down its ladder
RECHECK = 250  # derivatives between two self-checks

# c in ε = c‖w‖/‖v‖, from cheap to dear. Rounding wants a long stride, curvature a short one, and
# batch norm in train mode is much more curved than in eval mode. Very deep and thin networks with
# hardly any curvature (MobileNetV2, eval mode) want the longest of all.
LADDER: dict[torch.dtype, tuple[tuple[Literal["fast", "central"], float], ...]] = {
    torch.float32: (
        ("fast", 2e-5),
        ("fast", 1e-5),
        ("fast", 5e-6),
        ("central", 3e-4),
        ("central", 1e-4),
        ("central", 3e-5),
        ("central", 1e-3),
    ),
    torch.float64: (("fast", 1e-8), ("central", 1e-6)),
}


@dataclass(frozen=True)
class Slope:
    """D at the candidates and its derivative by their inputs and label probabilities."""

    value: float
    inputs: Tensor
    labels: Tensor | None


class Engine:
    """Replays the observed client's training on candidates, and differentiates the replay.

    With `errors` (N, C) the candidates' ∂L/∂logits is taken from there instead of from their
    softmax and labels: the loss is ⟨errors, logits⟩. For one step of SGD.
    """

    def __init__(
        self,
        seen: Observation,
        training: LocalTraining,
        records: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        mode: Mode = "auto",
        errors: Tensor | None = None,
    ):
        if dtype not in LADDER:
            raise InputError(
                f"gradients are matched in float32 or float64, not in {dtype}: set dtype"
            )
        self.training = training
        self._seen, self._records = seen, records
        self.device, self.dtype = torch.device(device), dtype
        self._model = ready(seen.model, training).to(self.device, dtype)
        self._model.requires_grad_(False)
        named = {n: p.detach() for n, p in self._model.named_parameters() if n in seen.update}
        self._names, self._weights = list(named), list(named.values())
        self._size = float(dot(self._weights, self._weights).sqrt())
        self._buffers = dict(self._model.named_buffers())
        self._steps = minibatches(records, training)
        # What is observed, in units of a gradient, whatever the number of steps.
        unit = 1 / (training.lr * len(self._steps))
        self.target = [seen.update[n].to(self.device, dtype) * unit for n in self._names]
        self._unit = unit
        self._errors = None if errors is None else errors.to(self.device, dtype)
        self._gate = Gate()
        self._single = len(self._steps) == 1 and training.optimiser == "sgd"
        self._auto = mode == "auto" and self._single
        if mode == "auto":
            mode = "fast" if self._single else "exact"
        if mode != "exact" and not self._single:
            raise InputError(
                f"derivative mode {mode!r} is for one step of SGD; this client takes "
                f"{len(self._steps)} steps of {training.optimiser}: use 'exact' or 'auto'"
            )
        if errors is not None and not self._single:
            raise InputError(
                f"errors are those of one step of SGD; this client takes {len(self._steps)} steps "
                f"of {training.optimiser}: leave them out"
            )
        self._mode: Mode = mode
        self._stride = next((c for m, c in LADDER[dtype] if m == mode), 0.0)
        self.notes: list[str] = []
        self._calls = 0
        self._finer: Engine | None = None  # takes over where float32 is too coarse
        if dtype == torch.float64:
            self._try_double(seen)

    def _try_double(self, seen: Observation) -> None:
        """Refuse a model that cannot be run in float64."""
        values = dict(zip(self._names, self._weights, strict=True)) | self._buffers
        blank = torch.zeros(len(self._steps[0]), *seen.shape, dtype=self.dtype, device=self.device)
        try:
            with torch.no_grad():
                logits(self._model, values, blank, self.training)
        except RuntimeError as error:
            raise NotApplicable(
                "gradients are matched or checked in float64, in which this model's forward fails "
                f"({error}): let it take its precision from its input, as in .to(x.dtype) instead "
                "of .float()"
            ) from error

    @property
    def mode(self) -> str:
        """The mode in use and, where it was raised, the precision."""
        return self._mode if self._finer is None else f"{self._finer.mode}, float64"

    def gradient(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """The update a client with these records would send, in units of a gradient."""
        if self._single:
            weights = self._leaves()
            objective = self._loss(weights, inputs, labels)
            return self._decayed(_apart(_grad(objective, weights)))
        state = self._unroll(inputs, labels)[-1]
        return [u * self._unit for u in state.moved]

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        """D and its derivative at the candidates. Labels are classes (N,) or probabilities (N, C);
        only the latter have a derivative."""
        if not self._single:
            return self._unrolled(inputs, labels, distance)
        if self._auto and self._calls % RECHECK == 0:
            self._check(inputs, labels, distance)
        self._calls += 1
        if self._finer is not None:
            return _cast(self._finer.slope(*_doubled(inputs, labels), distance), self.dtype)
        if self._mode == "exact":
            return self._exact(inputs, labels, distance)
        return self._difference(inputs, labels, distance, *self._rung())

    def _check(self, inputs: Tensor, labels: Tensor, distance: Distance) -> None:
        """Stay on the present rung if it agrees with exact float64, else take the first that does,
        else `exact`. Where float32 itself is too coarse, float64 takes over; else it is let go."""
        finer = self._in_double()
        with self._gate.record():
            held = _held(distance(self.gradient(inputs, labels), self.target)[1])
        with self._gate.replay():
            reference = finer._exact(*_doubled(inputs, labels), held).inputs
        note = ""
        if self._mode != "exact":
            errors = []
            for mode, stride in (self._rung(), *LADDER[self.dtype]):
                guess = self._difference(inputs, labels, held, mode, stride)
                errors.append(relative_error(guess.inputs, reference))
                if errors[-1] <= TOLERANCE:
                    self._mode, self._stride = mode, stride
                    break
            else:
                self._mode = "exact"
                note = (
                    f"the finite-difference derivative was off by {min(errors):.1e} at best "
                    f"(iteration {self._calls}): the exact one is used from there on"
                )
        # Where a ReLU is on in one precision and off in the other, the two disagree without either
        # being wrong. One such place is chance; two are a network that float32 is too coarse for.
        off = self._coarseness(finer, inputs, labels, distance)
        if (
            off > TOLERANCE
            and self._coarseness(finer, inputs.roll(1, -1), labels, distance) > TOLERANCE
        ):
            self._auto, self._finer = False, finer
            note = (
                f"the derivative was off by {off:.1e} in float32, even the exact one (iteration "
                f"{self._calls}): float64 is used from there on"
            )
        elif finer is self and self._mode == "exact":
            self._auto = False  # in float64 nothing is left to fall back to
        if note:
            self.notes.append(note)

    def _coarseness(
        self, finer: Engine, inputs: Tensor, labels: Tensor, distance: Distance
    ) -> float:
        """How far float32's exact derivative is from float64's, for the same slope v."""
        held = _held(distance(self.gradient(inputs, labels), self.target)[1])
        ours = self._exact(inputs, labels, held).inputs
        return relative_error(ours, finer._exact(*_doubled(inputs, labels), held).inputs)

    def _in_double(self) -> Engine:
        """This engine in float64, at the same iteration, writing to the same notes."""
        if self.dtype == torch.float64:
            return self
        device = str(self.device)
        finer = Engine(
            self._seen,
            self.training,
            self._records,
            device=device,
            dtype=torch.float64,
            errors=self._errors,
        )
        finer.notes, finer._calls = self.notes, self._calls
        return finer

    def _rung(self) -> tuple[Literal["fast", "central"], float]:
        return ("central" if self._mode == "central" else "fast"), self._stride

    def _leaves(self) -> list[Tensor]:
        return [w.detach().requires_grad_() for w in self._weights]

    def _loss(
        self, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor, step: int = 0
    ) -> Tensor:
        values = dict(zip(self._names, weights, strict=True)) | self._buffers
        if self._errors is not None:
            return (self._errors * logits(self._model, values, inputs, self.training, step)).sum()
        return loss(self._model, values, inputs, labels, self.training, step)

    def _decayed(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        if not self.training.weight_decay:
            return list(gradient)
        decay = self.training.weight_decay
        return list(torch._foreach_add(list(gradient), self._weights, alpha=decay))

    def _exact(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        free = _free(inputs, labels)
        weights = self._leaves()
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
            objective = self._loss(weights, *_filled(free, labels))
            gradient = _grad(objective, weights, create_graph=True)
            guess = self._decayed([g.detach().clone() for g in gradient])
            value, v = distance(guess, self.target)
            moving = [(g, d) for g, d in zip(gradient, v, strict=True) if g.requires_grad]
            outputs, seeds = zip(*moving, strict=True) if moving else ((), ())
            return _slope(value, _pulled(outputs, free, seeds))

    def _difference(
        self,
        inputs: Tensor,
        labels: Tensor,
        distance: Distance,
        mode: Literal["fast", "central"],
        stride: float,
    ) -> Slope:
        free = _free(inputs, labels)
        weights = self._leaves()
        with self._gate.record():
            objective = self._loss(weights, *_filled(free, labels))
        # ∇_x at w is the subtrahend of the one-sided difference; central does not need it.
        wanted = [*weights, *free] if mode == "fast" else weights
        gradient = _apart(_grad(objective, wanted))
        del objective
        guess, here = gradient[: len(weights)], gradient[len(weights) :]
        del gradient
        value, v = distance(self._decayed(guess), self.target)
        del guess
        stride *= self._size / max(float(dot(v, v).sqrt()), 1e-30)
        if mode == "central":
            here = self._at(torch._foreach_sub(self._weights, v, alpha=stride), free, labels)
            span = 2 * stride
        else:
            span = stride
        for w, d in zip(self._weights, v, strict=True):
            torch.add(w, d, alpha=stride, out=d)  # in place of v: no copy of the model, one pass
        there = self._at(v, free, labels)
        return _slope(value, [(b - a) / span for a, b in zip(here, there, strict=True)])

    def _at(
        self, weights: Sequence[Tensor], free: Sequence[Tensor], labels: Tensor
    ) -> list[Tensor]:
        """∇ of the loss by the free tensors at other weights, with the gates as recorded."""
        with self._gate.replay():
            objective = self._loss(weights, *_filled(free, labels))
        return _pulled((objective,), free)

    def _unroll(self, inputs: Tensor, labels: Tensor) -> list[State]:
        """The states before each local step and after the last."""
        inputs, labels = inputs.detach(), labels.detach()
        states = [start(self._weights, self.training)]
        for t in range(len(self._steps)):
            states.append(self._step(states[-1], t, inputs, labels))
        return states

    def _step(self, state: State, t: int, inputs: Tensor, labels: Tensor) -> State:
        """Local step t, as a differentiable function of the candidates and the state when they
        require a derivative, else without a graph."""
        create = inputs.requires_grad
        weights = state.weights if create else [w.detach().requires_grad_() for w in state.weights]
        chosen = self._steps[t].to(inputs.device)
        objective = self._loss(weights, inputs[chosen], labels[chosen], t)
        gradient = _grad(objective, weights, create_graph=create)
        return advance(state, gradient, self.training)

    def _unrolled(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        *states, last = self._unroll(inputs, labels)
        guess = [u * self._unit for u in last.moved]
        value, v = distance(guess, self.target)
        free = _free(inputs, labels)
        # Adjoint of the final state: only the accumulated update enters D.
        zeros = [torch.zeros_like(t) for t in last.tensors()]
        n = len(self._weights)
        adjoint = zeros[:n] + [d * self._unit for d in v] + zeros[2 * n :]
        total = [torch.zeros_like(f) for f in free]
        for t, state in reversed(list(enumerate(states))):
            leaves = [s.detach().requires_grad_() for s in state.tensors()]
            with sdpa_kernel(SDPBackend.MATH):
                after = self._step(state.with_tensors(leaves), t, *_filled(free, labels))
                pulled = _pulled(after.tensors(), [*free, *leaves], adjoint)
            adjoint = pulled[len(free) :]
            total = [a + b for a, b in zip(total, pulled[: len(free)], strict=True)]
        return _slope(value, total)


def _held(v: list[Tensor]) -> Distance:
    """A distance with this slope everywhere. A check compares derivatives of the same ⟨v, g'⟩ with
    the same ReLUs on: the slope of an L1 distance and that of a ReLU jump where two precisions
    differ in a last bit, and neither is wrong."""

    def distance(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return guess[0].new_zeros(()), [d.to(g, copy=True) for d, g in zip(v, guess, strict=True)]

    return distance


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖, in double precision."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-300))


def _grad(
    objective: Tensor, wanted: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """The gradient, zero where the loss does not use a parameter (as in `fl.local.train`)."""
    return torch.autograd.grad(objective, wanted, create_graph=create_graph, materialize_grads=True)


def _pulled(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], seeds: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The derivative by all that is wanted, the candidates first; zero by what plays no part."""
    found = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True) if outputs else (None,)
    if found[0] is None:
        raise NotApplicable(
            "gradients are matched by their derivative by the image, and here they have none: the "
            "model's forward cuts it off (detach() or no_grad()). An attacker would leave that "
            "out: to audit the model, freeze layers by requires_grad_(False) instead"
        )
    return [torch.zeros_like(w) if f is None else f for f, w in zip(found, wanted, strict=True)]


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, copied where they share memory: with one record, autograd hands out a position
    embedding's gradient and, as a view of it, the class token's; a distance overwrites both."""
    taken: set[int] = set()
    apart = []
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        apart.append(tensor if place not in taken and tensor.is_contiguous() else tensor.clone())
        taken.add(place)
    return apart


def _free(inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Fresh leaves for what is differentiated: the inputs, and labels if they are probabilities."""
    free = [inputs.detach().requires_grad_()]
    if labels.is_floating_point():
        free.append(labels.detach().requires_grad_())
    return free


def _filled(free: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    return free[0], free[1] if len(free) > 1 else labels


def _doubled(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return inputs.double(), labels.double() if labels.is_floating_point() else labels


def _cast(slope: Slope, dtype: torch.dtype) -> Slope:
    labels = None if slope.labels is None else slope.labels.to(dtype)
    return Slope(slope.value, slope.inputs.to(dtype), labels)


def _slope(value: Tensor, pulled: Sequence[Tensor]) -> Slope:
    return Slope(float(value), pulled[0].detach(), pulled[1].detach() if len(pulled) > 1 else None)
