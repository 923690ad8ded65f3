"""The derivative of any gradient distance with respect to the candidates.

An attack looks for x with D(g'(x), g) small, where g'(x) = ∇_w L(x, w) is what a client holding x
would have sent. With v = ∂D/∂g' held fixed,

    dD/dx = ∇_x ⟨v, ∇_w L(x, w)⟩.

Three ways to compute it:

- `exact`: double backward with v as the outer gradient. The reference.
- `fast`: (∇_x L(x, w + εv) − ∇_x L(x, w)) / ε with ε = c‖w‖/‖v‖. The second term falls out of the
  backward pass that gives g', so a step costs one and a half ordinary backward passes. ReLUs and
  max-pools keep the choices of the first pass (see _gate.py), else the difference is useless.
- `central`: (∇_x L(x, w + εv) − ∇_x L(x, w − εv)) / 2ε, also gated: slower, more accurate.

Several local steps, and Adam, are unrolled. Forward keeps the state of each step; backward goes
through one step at a time, with the adjoint a of its gradient in place of v. `exact` recomputes the
step with a graph, so memory grows by a copy of the state per step, not by a graph. `fast`
and `central` take ∇_x ⟨a, ∇_w L⟩ and ∇_w ⟨a, ∇_w L⟩ from one difference of both gradients at
w ± εa; the optimiser's own arithmetic is differentiated exactly. They keep each step's gradient and
gates too.

`auto` begins with the cheapest rung of a ladder of modes and strides, and compares it with `exact`
at the first derivative of an attack and now and then. It takes the first rung that agrees; when
none does it is `exact`. On a sample of the records it also compares float32 with float64, and where
float32 itself is too coarse it goes on in float64. Notes say so. What was found out is kept in a
`Trust`, which the searches of one attack on one update share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.attacks._gate import Gate
from leakgauge.attacks._objectives import Distance, dot
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl.local import State, advance, logits, loss, minibatches, ready, start
from leakgauge.types import LocalTraining, Observation

Mode: TypeAlias = Literal["auto", "fast", "central", "exact"]

TOLERANCE = 4e-3  # relative error of the derivative above which `auto` goes down its ladder
RECHECK = 250  # derivatives of an attack between two self-checks

# c in ε = c‖w‖/‖v‖, from cheap to costly. Rounding wants a long stride, curvature a short one, and
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


@dataclass
class Trust:
    """What an attack has found out about its derivative on one update. Its searches share it, so
    that a later one neither checks again what an earlier one has checked nor starts on a rung that
    was left."""

    rungs: dict[torch.dtype, tuple[Mode, float]] = field(default_factory=dict)
    coarse: bool = False  # float32 is too coarse for this network
    derivatives: int = 0
    checks: int = 0
    differed: float | None = None  # the error of a derivative that was left

    def due(self, dtype: torch.dtype) -> bool:
        return dtype not in self.rungs or self.derivatives % RECHECK == 0


class Replay(Protocol):
    """Plays the training behind an update on candidates: what a search asks for. `target` is what
    was observed, `unit` what makes an update a gradient; `values` counts those of all candidates.
    """

    names: list[str]
    target: list[Tensor]
    unit: float
    values: int
    device: torch.device
    dtype: torch.dtype

    @property
    def notes(self) -> list[str]: ...

    @property
    def mode(self) -> str: ...

    @property
    def differed(self) -> float | None: ...

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope: ...


class Engine:
    """Replays the observed client's training on candidates, and differentiates the replay.

    With `errors` (N, C) the candidates' ∂L/∂logits is taken from there instead of from their
    softmax and labels: the loss is ⟨errors, logits⟩. For one step of SGD. Engines of one attack on
    one update share a `trust`.
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
        trust: Trust | None = None,
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
        self._setting = replace(seen.setting, model=self._model)
        named = {n: p.detach() for n, p in self._model.named_parameters() if n in seen.update}
        self.names, self._weights = list(named), list(named.values())
        self._size = float(dot(self._weights, self._weights).sqrt())
        self._buffers = dict(self._model.named_buffers())
        self._steps = minibatches(records, training)
        # What is observed, in units of a gradient, whatever the number of steps.
        unit = 1 / (training.lr * len(self._steps))
        self.target = [seen.update[n].to(self.device, dtype) * unit for n in self.names]
        self.unit = unit
        self.values = records * math.prod(seen.record.shape)  # of all candidates
        self._errors = None if errors is None else errors.to(self.device, dtype)
        self._gates = [Gate() for _ in self._steps]
        self._single = len(self._steps) == 1 and training.optimiser == "sgd"
        if errors is not None and not self._single:
            raise InputError(
                f"errors are those of one step of SGD; this client takes {len(self._steps)} steps "
                f"of {training.optimiser}: leave them out"
            )
        self._auto = mode == "auto"
        self._trust = trust or Trust()
        self._mode: Mode = mode
        self._stride = next((c for m, c in LADDER[dtype] if m == mode), 0.0)
        if self._auto:
            self._mode, self._stride = self._trust.rungs.get(dtype, LADDER[dtype][0])
        self.notes: list[str] = []
        # Takes over where float32 is too coarse.
        self._finer: Engine | None = None
        if self._auto and self._trust.coarse and dtype == torch.float32:
            self._finer = self._in_double()
        if dtype == torch.float64:
            self._try_double(seen)

    def _try_double(self, seen: Observation) -> None:
        """Refuse a model that cannot be run in float64."""
        values = dict(zip(self.names, self._weights, strict=True)) | self._buffers
        blank = torch.zeros(
            len(self._steps[0]), *seen.record.shape, dtype=self.dtype, device=self.device
        )
        try:
            with torch.no_grad():
                logits(self._setting, values, blank, self.training)
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

    @property
    def differed(self) -> float | None:
        """The error of a derivative that was found too coarse and left, if any was."""
        return self._trust.differed

    def gradient(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """The update a client with these records would send, in units of a gradient."""
        if self._single:
            weights = _leaves(self._weights)
            objective = self._loss(weights, inputs, labels)
            return self._decayed(_apart(_grad(objective, weights)))
        state = self._unroll(inputs, labels)[-1]
        return [u * self.unit for u in state.moved]

    def slope(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        """D and its derivative at the candidates. Labels are classes (N,) or probabilities (N, C);
        only the latter have a derivative."""
        found = None
        if self._auto and self._finer is None and self._trust.due(self.dtype):
            found = self._check(inputs, labels, distance)
        if self._finer is not None:
            return _cast(self._finer.slope(*_doubled(inputs, labels), distance), self.dtype)
        self._trust.derivatives += 1
        return found or self._by(self._mode, self._stride, inputs, labels, distance)

    def _by(
        self, mode: Mode, stride: float, inputs: Tensor, labels: Tensor, distance: Distance
    ) -> Slope:
        """D and its derivative by this rung."""
        if mode == "exact":
            return self._exact(inputs, labels, distance)
        difference = self._difference if self._single else self._unrolled_difference
        return difference(inputs, labels, distance, mode == "central", stride)

    def _exact(
        self, inputs: Tensor, labels: Tensor, distance: Distance, replay: bool = False
    ) -> Slope:
        """By double backward; with the gates as last recorded if `replay`."""
        way = self._double_backward if self._single else self._unrolled
        return way(inputs, labels, distance, replay)

    def _check(self, inputs: Tensor, labels: Tensor, distance: Distance) -> Slope:
        """Stay on the present rung if it agrees with `exact`, else take the first that does, else
        `exact`. Where float32 itself is too coarse, float64 takes over. D and its derivative."""
        trust, note, least = self._trust, "", 0.0
        v: list[Tensor] = []
        slope = self._by(self._mode, self._stride, inputs, labels, _noting(distance, v))
        exact, held = slope, held_to(v)
        if self._mode != "exact":
            exact = replace(self._exact(inputs, labels, held, replay=True), value=slope.value)
            errors = [relative_error(slope.inputs, exact.inputs)]
            rungs = [rung for rung in LADDER[self.dtype] if rung != (self._mode, self._stride)]
            while rungs and not errors[-1] <= TOLERANCE:  # NaN agrees with nothing
                self._mode, self._stride = rungs.pop(0)
                guess = self._by(self._mode, self._stride, inputs, labels, held)
                slope = replace(guess, value=slope.value)
                errors.append(relative_error(slope.inputs, exact.inputs))
            if not errors[-1] <= TOLERANCE:
                self._mode, self._stride, slope = "exact", 0.0, exact
                least = min(errors)
                note = (
                    f"the finite-difference derivative was off by {least:.1e} at best "
                    f"(iteration {trust.derivatives}): the exact one is used from there on"
                )
        off = self._coarseness(inputs, labels, held, exact) if self.dtype == torch.float32 else 0.0
        if off > TOLERANCE:
            trust.coarse, self._finer = True, self._in_double()
            note = (
                f"the derivative was off by {off:.1e} in float32, even the exact one (iteration "
                f"{trust.derivatives}): float64 is used from there on"
            )
        elif self.dtype == torch.float64 and self._mode == "exact":
            self._auto = False  # nothing is left to fall back to
        if note:
            self.notes.append(note)
            error = off if off > TOLERANCE else least
            trust.differed = error if error < 1e9 else 1e9  # NaN too
        trust.rungs[self.dtype] = self._mode, self._stride
        trust.checks += 1
        return slope

    def _coarseness(self, inputs: Tensor, labels: Tensor, held: Distance, exact: Slope) -> float:
        """How far float32's exact derivative is from float64's in one step on a sample, another at
        every check: one record, or two where batch norm ties records together.

        Where a ReLU is on in one precision and off in the other, the two disagree without either
        being wrong. One such place is chance; two are a network that float32 is too coarse for. So
        it is the smaller error of two places, the other one shifted by a pixel.
        """
        tied = any(isinstance(m, _BatchNorm) and m.training for m in self._model.modules())
        count = min(2 if tied else 1, len(inputs))
        chosen = (self._trust.checks * count + torch.arange(count)) % len(inputs)
        chosen = chosen.to(inputs.device)
        once = LocalTraining(
            batch_size=count,
            batch_norm=self.training.batch_norm,
            dropout=self.training.dropout,
            dropout_seed=self.training.dropout_seed,
        )
        errors = None if self._errors is None else self._errors[chosen]

        def sampled(dtype: torch.dtype, mode: Mode) -> Engine:
            return Engine(
                self._seen, once, count,
                device=str(self.device), dtype=dtype, mode=mode, errors=errors,
            )  # fmt: skip

        double = sampled(torch.float64, "fast")
        offs: list[float] = []
        for x in (inputs[chosen], inputs[chosen].roll(1, -1)):
            if self._single and count == len(inputs) and not offs:
                rough = exact.inputs
            else:
                rough = sampled(torch.float32, "exact").slope(x, labels[chosen], held).inputs
            wide = _doubled(x, labels[chosen])
            offs.append(relative_error(rough, double.slope(*wide, held).inputs))
            if offs[-1] <= TOLERANCE:  # it has checked float64's difference, too
                if self._single:
                    self._trust.rungs.setdefault(torch.float64, LADDER[torch.float64][0])
                break
            offs[-1] = relative_error(rough, double._exact(*wide, held).inputs)
            if offs[-1] <= TOLERANCE:
                break
        return min(offs)

    def _in_double(self) -> Engine:
        """This engine in float64, writing to the same notes."""
        finer = Engine(
            self._seen,
            self.training,
            self._records,
            device=str(self.device),
            dtype=torch.float64,
            errors=self._errors,
            trust=self._trust,
        )
        finer.notes = self.notes
        return finer

    def _loss(
        self, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor, step: int = 0
    ) -> Tensor:
        values = dict(zip(self.names, weights, strict=True)) | self._buffers
        if self._errors is not None:
            return (self._errors * logits(self._setting, values, inputs, self.training, step)).sum()
        return loss(self._setting, values, inputs, labels, self.training, step)

    def _decayed(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        if not self.training.weight_decay:
            return list(gradient)
        decay = self.training.weight_decay
        return list(torch._foreach_add(list(gradient), self._weights, alpha=decay))

    def _double_backward(
        self, inputs: Tensor, labels: Tensor, distance: Distance, replay: bool
    ) -> Slope:
        free = _free(inputs, labels)
        weights = _leaves(self._weights)
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
            with self._gates[0].replay() if replay else nullcontext():
                objective = self._loss(weights, *_filled(free, labels))
            gradient = _grad(objective, weights, create_graph=True)
            guess = self._decayed([g.detach().clone() for g in gradient])
            value, v = distance(guess, self.target)
            return _slope(value, _pulled(gradient, free, v))

    def _difference(
        self, inputs: Tensor, labels: Tensor, distance: Distance, central: bool, stride: float
    ) -> Slope:
        free = _free(inputs, labels)
        weights = _leaves(self._weights)
        with self._gates[0].record():
            objective = self._loss(weights, *_filled(free, labels))
        # ∇_x at w is the subtrahend of the one-sided difference; central does not need it.
        gradient = _apart(_grad(objective, weights if central else [*weights, *free]))
        del objective
        guess, here = gradient[: len(weights)], gradient[len(weights) :]
        del gradient
        value, v = distance(self._decayed(guess), self.target)
        del guess
        span = stride = self._stretched(stride, v)
        if central:
            here = self._at(torch._foreach_sub(self._weights, v, alpha=stride), free, labels)
            span = 2 * stride
        for w, d in zip(self._weights, v, strict=True):
            torch.add(w, d, alpha=stride, out=d)  # in place of v: no copy of the model, one pass
        there = self._at(v, free, labels)
        return _slope(value, [(b - a) / span for a, b in zip(here, there, strict=True)])

    def _stretched(self, stride: float, v: Sequence[Tensor]) -> float:
        """ε = c‖w‖/‖v‖."""
        return stride * self._size / max(float(dot(v, v).sqrt()), 1e-30)

    def _at(
        self, weights: Sequence[Tensor], free: Sequence[Tensor], labels: Tensor, step: int = 0
    ) -> list[Tensor]:
        """∇ of a local step's loss at other weights, with its gates as recorded: by the weights, if
        they require it, and by the free tensors."""
        with self._gates[step].replay():
            objective = self._loss(weights, *self._batch(step, *_filled(free, labels)), step)
        found = _pulled((objective,), [*free, *(w for w in weights if w.requires_grad)])
        return [*found[len(free) :], *found[: len(free)]]

    def _unroll(self, inputs: Tensor, labels: Tensor, replay: bool = False) -> list[State]:
        """The states before each local step and after the last."""
        inputs, labels = inputs.detach(), labels.detach()
        states = [start(self._weights, self.training)]
        for t in range(len(self._steps)):
            with self._gates[t].replay() if replay else nullcontext():
                states.append(self._step(states[-1], t, inputs, labels))
        return states

    def _step(self, state: State, t: int, inputs: Tensor, labels: Tensor) -> State:
        """Local step t, as a differentiable function of the candidates and the state when they
        require a derivative, else without a graph."""
        create = inputs.requires_grad
        weights = state.weights if create else _leaves(state.weights)
        objective = self._loss(weights, *self._batch(t, inputs, labels), t)
        gradient = _grad(objective, weights, create_graph=create)
        return advance(state, gradient, self.training)

    def _batch(self, step: int, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates of a local step."""
        if self._single:
            return inputs, labels
        chosen = self._steps[step].to(inputs.device)
        return inputs[chosen], labels[chosen]

    def _compared(self, last: State, distance: Distance) -> tuple[Tensor, list[Tensor]]:
        """D at the end of the local training, and its derivative by that state's tensors: only the
        accumulated update enters D."""
        value, v = distance([u * self.unit for u in last.moved], self.target)
        zeros = [torch.zeros_like(t) for t in last.tensors()]
        n = len(self._weights)
        return value, zeros[:n] + [d * self.unit for d in v] + zeros[2 * n :]

    def _unrolled(self, inputs: Tensor, labels: Tensor, distance: Distance, replay: bool) -> Slope:
        *states, last = self._unroll(inputs, labels, replay)
        value, adjoint = self._compared(last, distance)
        free = _free(inputs, labels)
        total = [torch.zeros_like(f) for f in free]
        for t, state in reversed(list(enumerate(states))):
            leaves = _leaves(state.tensors())
            with sdpa_kernel(SDPBackend.MATH):
                with self._gates[t].replay() if replay else nullcontext():
                    after = self._step(state.with_tensors(leaves), t, *_filled(free, labels))
                pulled = _pulled(after.tensors(), [*free, *leaves], adjoint)
            adjoint = pulled[len(free) :]
            total = [a + b for a, b in zip(total, pulled[: len(free)], strict=True)]
        return _slope(value, total)

    def _before(
        self, state: State, gradient: Sequence[Tensor], adjoint: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The adjoint of the state before a step of the optimiser and that of its gradient, from
        the adjoint of the state after it."""
        n, how = len(gradient), self.training
        if how.optimiser == "sgd":  # d = g + λw,  m ← μm + d,  w ← w − lr·m,  moved ← moved + lr·m
            kept = list(adjoint)
            a = list(torch._foreach_sub(kept[n : 2 * n], kept[:n]))
            torch._foreach_mul_(a, how.lr)
            if state.slots:
                torch._foreach_add_(a, kept[2 * n :])
                kept[2 * n :] = torch._foreach_mul(a, how.momentum)
            if how.weight_decay:
                kept[:n] = torch._foreach_add(kept[:n], a, alpha=how.weight_decay)
            return kept, a
        leaves, wanted = _leaves(state.tensors()), _leaves(gradient)
        after = advance(state.with_tensors(leaves), wanted, how)
        pulled = torch.autograd.grad(
            after.tensors(), [*leaves, *wanted], adjoint, materialize_grads=True
        )
        return list(pulled[:-n]), list(pulled[-n:])

    def _unrolled_difference(
        self, inputs: Tensor, labels: Tensor, distance: Distance, central: bool, stride: float
    ) -> Slope:
        free, n = _free(inputs, labels), len(self._weights)
        state = start(self._weights, self.training)
        walked = []  # of each step: the state before it, and ∇L there by weights and candidates
        for t, gate in enumerate(self._gates):
            weights = _leaves(state.weights)
            with gate.record():
                objective = self._loss(weights, *self._batch(t, *_filled(free, labels)), t)
            here = _grad(objective, weights if central else [*weights, *free])
            del objective
            walked.append((state, here))
            state = advance(state, here[:n], self.training)
        value, adjoint = self._compared(state, distance)
        del state
        total = [torch.zeros_like(f) for f in free]
        for t in reversed(range(len(walked))):
            state, here = walked.pop()
            # Through the optimiser exactly, through the gradient by a difference along its adjoint.
            adjoint, a = self._before(state, here[:n], adjoint)
            span = step = self._stretched(stride, a)
            # What lies before the first step needs no derivative.
            side = _leaves if t else list
            if central:
                back = side(torch._foreach_sub(state.weights, a, alpha=step))
                here, span = tuple(self._at(back, free, labels, t)), 2 * step
            elif t == 0:
                here = here[n:]
            there = self._at(
                side(torch._foreach_add(state.weights, a, alpha=step)), free, labels, t
            )
            torch._foreach_sub_(there, here)
            if t:
                adjoint[:n] = torch._foreach_add(adjoint[:n], there[:n], alpha=1 / span)
            torch._foreach_add_(total, there[-len(free) :], alpha=1 / span)
        return _slope(value, total)


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def _noting(distance: Distance, kept: list[Tensor]) -> Distance:
    """The distance; its slope is copied to `kept`."""

    def noted(guess: list[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        value, v = distance(guess, target)
        kept[:] = [d.clone() for d in v]
        return value, v

    return noted


def held_to(v: list[Tensor]) -> Distance:
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
    moving = [i for i, output in enumerate(outputs) if output.requires_grad]
    found: Sequence[Tensor | None] = (None,)
    if moving:
        found = torch.autograd.grad(
            [outputs[i] for i in moving],
            wanted,
            [seeds[i] for i in moving] if seeds else None,
            allow_unused=True,
        )
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
