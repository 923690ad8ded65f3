"""Local training, written once: the client runs it, the attacker replays it.

Everything is a pure function of tensors, so that the same step can be run for real, simulated, and
differentiated. One step of SGD with momentum μ and weight decay λ, as in torch.optim:

    d = ∇L + λw,   m ← μm + d,   w ← w − lr·m

and of Adam (Kingma & Ba, 2015) with L2 weight decay, also as in torch.optim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.errors import InputError
from leakgauge.fl.forward import additions, sampling
from leakgauge.tensors import parameters, spawned, subtract
from leakgauge.types import (
    Among,
    Batch,
    BatchDefence,
    Defence,
    GradientDefence,
    Here,
    Local,
    LocalTraining,
    Memory,
    Named,
    Setting,
    UpdateDefence,
)


def ready(model: nn.Module, training: LocalTraining) -> nn.Module:
    """A copy of the model in the modes of the training: batch norm and dropout as it says."""
    model = copy.deepcopy(model)
    model.train(training.dropout == "replayed")
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(training.batch_norm == "train")
    return model


def loss(
    setting: Setting,
    values: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    training: LocalTraining,
    step: int = 0,
) -> Tensor:
    """The task's mean loss of a `ready` model with parameters (and buffers) `values`, and what its
    layers add to it."""
    with additions() as more:
        out = logits(setting, values, inputs, training, step)
    return sum(more, start=setting.task.loss(out, labels))


def attempt(
    setting: Setting,
    values: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    training: LocalTraining,
    step: int = 0,
) -> Tensor:
    """The loss, of which some parameter has a gradient; or in words why this model has none. It is
    the user's: whatever its forward raises becomes an InputError."""
    where = f"the model, in local training on a batch of {len(inputs)}"
    try:
        with additions() as more:
            out = logits(setting, values, inputs, training, step)
    except (Exception, SystemExit) as error:
        hint = ""
        if "more than 1 value per channel" in str(error):  # PyTorch's own words
            hint = (
                " Batch norm in train mode needs more than one value per channel: raise batch_size "
                'so that no batch has a single record, or set batch_norm = "eval".'
            )
        raise InputError(f"{where}, failed ({type(error).__name__}: {error}).{hint}") from error
    if not setting.task.check(out, labels, where).requires_grad:
        raise InputError(
            f"{where}, gave logits of which no trained parameter has a gradient. Leave detach() "
            "and no_grad() out of its forward, at least behind a trained layer."
        )
    return sum(more, start=setting.task.loss(out, labels))


def logits(
    setting: Setting,
    values: Mapping[str, Tensor],
    inputs: Tensor,
    training: LocalTraining,
    step: int = 0,
) -> Tensor:
    """What a `ready` model with parameters (and buffers) `values` says of records."""
    return outputs(setting.model, values, setting.record.entering(inputs), training, step)


def outputs(
    model: nn.Module,
    values: Mapping[str, Tensor],
    entering: Tensor,
    training: LocalTraining,
    step: int = 0,
) -> Tensor:
    """What it says of what enters it."""
    with _dropout(training, step, entering.device):
        out: Tensor = torch.func.functional_call(model, dict(values), (entering,))
    return out


@contextmanager
def _dropout(training: LocalTraining, step: int, device: torch.device) -> Iterator[None]:
    """Inside, the masks of `step` are drawn; outside, the global generator is as before."""
    if training.dropout == "off":
        yield
        return
    seed = training.dropout_seed + step
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed reseeds all GPUs too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@dataclass(frozen=True)
class State:
    """Parameters, the optimiser's memory, and the update accumulated so far (before − after).

    The update is summed step by step: it keeps digits that the difference of two float32 weights
    has lost.
    """

    weights: tuple[Tensor, ...]
    moved: tuple[Tensor, ...]
    slots: tuple[tuple[Tensor, ...], ...] = ()
    steps: int = 0

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weights, *self.moved, *(t for slot in self.slots for t in slot))

    def with_tensors(self, tensors: Sequence[Tensor]) -> State:
        n = len(self.weights)
        parts = [tuple(tensors[i : i + n]) for i in range(0, len(tensors), n)]
        return State(parts[0], parts[1], tuple(parts[2:]), self.steps)


def start(weights: Sequence[Tensor], training: LocalTraining) -> State:
    zeros = tuple(torch.zeros_like(w) for w in weights)
    slots = {"sgd": 1 if training.momentum else 0, "adam": 2}[training.optimiser]
    return State(tuple(weights), zeros, (zeros,) * slots)


def advance(state: State, gradient: Sequence[Tensor], training: LocalTraining) -> State:
    """One optimiser step; differentiable in the state and the gradient."""
    d = list(gradient)
    if training.weight_decay:
        d = [torch.add(g, w, alpha=training.weight_decay)
             for g, w in zip(d, state.weights, strict=True)]  # fmt: skip
    count = state.steps + 1
    slots = state.slots
    if training.optimiser == "adam":
        moves, slots = _adam(d, slots, count, training.lr)
        weights = tuple(w - m for w, m in zip(state.weights, moves, strict=True))
    else:
        if slots:
            d = [m * training.momentum + g for m, g in zip(slots[0], d, strict=True)]
            slots = (tuple(d),)
        moves = [g * training.lr for g in d]
        # One fused operation, as in torch.optim: w − (lr·d) rounds twice and differs in a last bit.
        weights = tuple(torch.sub(w, g, alpha=training.lr)
                        for w, g in zip(state.weights, d, strict=True))  # fmt: skip
    moved = tuple(u + m for u, m in zip(state.moved, moves, strict=True))
    return State(weights, moved, slots, count)


def _adam(
    gradient: Sequence[Tensor], slots: tuple[tuple[Tensor, ...], ...], count: int, lr: float
) -> tuple[list[Tensor], tuple[tuple[Tensor, ...], ...]]:
    """Moves lr·m̂/(√v̂ + ε) with β = (0.9, 0.999), ε = 1e-8."""
    first = tuple(m.lerp(g, 0.1) for m, g in zip(slots[0], gradient, strict=True))
    second = tuple(0.999 * v + 0.001 * g * g for v, g in zip(slots[1], gradient, strict=True))
    moves = []
    for m, v in zip(first, second, strict=True):
        # √ has no derivative at zero: where v is zero, so is m, and the move stays zero.
        root = torch.where(v > 0, v, torch.ones_like(v)).sqrt() * (v > 0)
        denominator = root / (1 - 0.999**count) ** 0.5 + 1e-8
        moves.append(m / denominator * (lr / (1 - 0.9**count)))
    return moves, (first, second)


def decay(training: LocalTraining, steps: int) -> float:
    """The share of every weight that weight decay takes away. SGD is linear in the weights and the
    gradients, so the rest of an update is a sum of gradients."""
    state = start([torch.ones((), dtype=torch.float64)], training)
    for _ in range(steps):
        state = advance(state, [torch.zeros((), dtype=torch.float64)], training)
    return float(state.moved[0])


def step_count(records: int, training: LocalTraining) -> int:
    """How many local steps a client takes on so many records."""
    if training.epochs is None:
        return training.steps
    return training.epochs * -(-records // training.batch_size)


def minibatches(
    records: int, training: LocalTraining, rng: torch.Generator | None = None
) -> list[Tensor]:
    """The indices of every local step, in order. Without `rng` the order is fixed."""
    for key in ("batch_size", "steps" if training.epochs is None else "epochs"):
        if getattr(training, key) < 1:
            raise InputError(f"{key} must be at least 1, got {getattr(training, key)}")
    if training.batch_size > records:
        raise InputError(
            f"batch_size is {training.batch_size} but the client trains on {records} records: "
            "lower batch_size or raise records"
        )
    total = step_count(records, training)
    steps: list[Tensor] = []
    while len(steps) < total:
        if training.order == "shuffled" and rng is not None:
            order = torch.randperm(records, generator=rng)
        else:
            order = torch.arange(records)
        steps.extend(torch.split(order, training.batch_size))
    return steps[:total]


def together(training: LocalTraining, clients: int) -> LocalTraining:
    """The training behind the update of so many clients. An aggregate looks like that of one
    *super-client* whose batches hold a batch of every client (exact for one step, an approximation
    beyond)."""
    return replace(training, batch_size=training.batch_size * clients)


@dataclass(frozen=True)
class Trained:
    """What local training leaves behind: the update that is sent, and the model's buffers."""

    update: Named
    buffers: Named


def train(
    setting: Setting,
    batch: Batch,
    training: LocalTraining,
    rng: torch.Generator,
    defence: Defence | None = None,
    *,
    round_: int = 0,
    memory: Memory | None = None,
    among: Among | None = None,
) -> Trained:
    """Run local training on a client's records; the model itself is left untouched. The defence
    draws from a generator of its own, and may change `memory` and the letters of `among`."""
    among = among or Among()
    here = Here(setting, round_, memory={} if memory is None else memory, among=among)
    own = spawned(rng, f"defence/{round_}/{among.client}")
    secret = int(torch.randint(2**62, (), generator=spawned(rng, f"drawn/{round_}/{among.client}")))
    if isinstance(defence, BatchDefence):
        batch = defence.on_batch(batch, here, own)
    before = parameters(setting.model)
    if not before:
        raise InputError("the model has no trainable parameter: a client would send no update")
    live = replace(setting, model=ready(setting.model, training))
    names = list(before)
    buffers = {name: b.clone() for name, b in live.model.named_buffers()}
    state = start(list(before.values()), training)
    for step, chosen in enumerate(minibatches(len(batch), training, rng)):
        weights = [w.detach().requires_grad_() for w in state.weights]
        values = dict(zip(names, weights, strict=True)) | buffers
        part = Batch(batch.inputs[chosen], batch.labels[chosen])
        with sampling(secret + step):
            objective = attempt(live, values, part.inputs, part.labels, training, step)
            gradient: Sequence[Tensor] = torch.autograd.grad(
                objective,
                weights,
                materialize_grads=True,  # a parameter the loss does not use stays
            )
            if isinstance(defence, GradientDefence):
                named = dict(zip(names, gradient, strict=True))
                seen = {name: value.detach().clone() for name, value in values.items()}
                local = Local(live, training, part, seen)
                shielded = defence.on_gradient(named, replace(here, step=step, local=local), own)
                gradient = [shielded[name] for name in names]
        with torch.no_grad():
            state = advance(state, gradient, training)
    if training.sends == "weights":
        update = subtract(before, dict(zip(names, state.weights, strict=True)))
    else:
        update = dict(zip(names, state.moved, strict=True))
    if isinstance(defence, UpdateDefence):
        update = defence.on_update(update, here, own)
    return Trained({n: u.detach() for n, u in update.items()}, buffers)
