"""What makes an update hard or easy to invert, in numbers. All but `sparsity` need the truth.

C2F: K. Zhu et al., "Cracking Federated Privacy: Initialization-Resilient Gradient Inversion with
Fine-Grained Reconstruction", 2026, Fig. 3. FedLeak: M. Fan et al., "Boosting Gradient Leakage
Attacks: Data Reconstruction in Realistic FL Settings", USENIX Security 2025, Eq. 4–6, Fig. 1, 9.

    sparsity      share of the elements of the observed update that are exactly zero    C2F Fig. 3
    step bound    2μ/L, where at an iterate x' of an attack with objective D            Eq. 5
                  μ = ⟨x' − x, ∇D(x')⟩/‖x' − x‖²  and  L = ‖∇D(x')‖²/‖x' − x‖²:
                  gradient descent comes closer to the truth x exactly for steps
                  0 < η < 2μ/L (Eq. 4, 6); negative: it leads away                      Fig. 1c–d
    noise         ‖g(x + s·sign(n)) − g(x)‖₂, n normal, over strengths s                Fig. 1b
    magnitude     Pearson correlation of |g_i| and Σ_j |∂g_i/∂x_j|                      Fig. 9
    divergence    ‖u − u'‖ of the mean update u of K clients and that u' of one client
                  with all N records, after τ steps of η; the curious-client paper's
                  Lemma 1 says of its expectation: proportional to η²τ(τ−1)(K−1)/N

Facts:
- C2F does not say what it counts as sparse. Its Eq. 1 keeps the support {i: g_i ≠ 0}; sparsity is
  taken as the rest. ReLU units that no record activates make such zeros; Sigmoid makes none.
- Eq. 5 bounds μ and L over a path. Here they are the values at each iterate, which Fig. 1 must
  show too, since it plots them against the iterations.
- These are instruments of an evaluation: an attack cannot compute them, except `sparsity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.fl.aggregate import weights
from leakgauge.fl.local import loss, ready, train
from leakgauge.tensors import norm, parameters, subtract, weighted_mean
from leakgauge.types import Batch, LocalTraining, Named, Setting


def sparsity(update: Named) -> float:
    """Share of the elements that are exactly zero."""
    total = sum(value.numel() for value in update.values())
    if not total:
        raise InputError("sparsity: expected an update with elements, got an empty one")
    return sum(int((value == 0).sum()) for value in update.values()) / total


def step_bounds(points: Sequence[Tensor], slopes: Sequence[Tensor], truth: Tensor) -> list[float]:
    """2μ/L at each point of a path (Eq. 5), from the objective's derivative there.

    A derivative of zero bounds no step: infinity.
    """
    bounds = []
    for point, slope in zip(points, slopes, strict=True):
        if point.shape != truth.shape or slope.shape != truth.shape:
            raise InputError(
                f"step bounds: expected points and slopes of the truth's shape "
                f"{tuple(truth.shape)}, got {tuple(point.shape)} and {tuple(slope.shape)}"
            )
        slope = slope.double()
        towards = float(((point.double() - truth.double()) * slope).sum())
        steepness = float(slope.square().sum())
        bounds.append(2 * towards / steepness if steepness else torch.inf)
    return bounds


def gradient(setting: Setting, batch: Batch, training: LocalTraining) -> Named:
    """The gradient of the mean loss, by name: what one plain step of this training sends."""
    values = {n: p.requires_grad_() for n, p in parameters(setting.model).items()}
    live = replace(setting, model=ready(setting.model, training))
    objective = loss(live, values, batch.inputs, batch.labels, training)
    found = torch.autograd.grad(objective, list(values.values()), materialize_grads=True)
    return dict(zip(values, found, strict=True))


def noise_distances(
    setting: Setting,
    truth: Batch,
    training: LocalTraining,
    strengths: Sequence[float],
    rng: torch.Generator,
    draws: int = 10,
) -> list[float]:
    """Mean L2 distance of the gradient when every pixel moves by ±strength (Fig. 1b).

    The same signs serve all strengths, so that the curve is not rough by chance. Pixels may leave
    [0, 1], as the paper says nothing of a clamp.
    """
    if draws < 1:
        raise InputError(f"noise distances: expected at least one draw, got {draws}")
    clean = gradient(setting, truth, training)
    signs = [torch.randn(truth.inputs.shape, generator=rng).sign() for _ in range(draws)]

    def distance(strength: float, sign: Tensor) -> float:
        moved = Batch(truth.inputs + strength * sign, truth.labels)
        return norm(subtract(gradient(setting, moved, training), clean))

    return [sum(distance(s, sign) for sign in signs) / draws for s in strengths]


def magnitude_and_sensitivity(
    setting: Setting, truth: Batch, training: LocalTraining, name: str, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """|g_i| and Σ_j |∂g_i/∂x_j| of every element of the named parameter's gradient: flat (n,)."""
    live = replace(setting, model=ready(setting.model, training))
    values = {n: p for n, p in live.model.named_parameters() if p.requires_grad}
    if name not in values:
        raise InputError(
            f"parameter {name!r} is not in the update: choose one of {', '.join(sorted(values))}"
        )
    inputs = truth.inputs.detach().clone().requires_grad_()
    objective = loss(live, values, inputs, truth.labels, training)
    (found,) = torch.autograd.grad(
        objective, values[name], create_graph=True, materialize_grads=True
    )
    (reached,) = (
        torch.autograd.grad(found.sum(), inputs, retain_graph=True, allow_unused=True)
        if found.requires_grad
        else (None,)
    )
    if reached is None:
        raise InputError(
            f"the gradient of {name!r} does not depend on the image: the model's forward cuts the "
            "derivative off (detach() or no_grad())"
        )
    flat = found.flatten()
    sums = []
    for rows in torch.split(torch.eye(len(flat), dtype=flat.dtype), chunk):
        (jacobian,) = torch.autograd.grad(
            flat, inputs, rows, retain_graph=True, is_grads_batched=True
        )
        sums.append(jacobian.flatten(1).abs().sum(1))
    return flat.detach().abs(), torch.cat(sums).detach()


@dataclass(frozen=True)
class Divergence:
    """How far the update of a super-client is from the mean of the clients it stands for: as a
    Euclidean norm, relative to that mean, and what Lemma 1 says it is proportional to."""

    absolute: float
    relative: float
    predicted: float


def divergence(setting: Setting, truths: Sequence[Batch], training: LocalTraining) -> Divergence:
    """Of clients that take `training.steps` steps, each on all of its own records, and are weighted
    by their number. Computed in the precision of the model."""
    if len(truths) < 1 or training.order != "fixed":
        raise InputError(
            f"divergence: expected one client or more and a fixed order, got {len(truths)} and "
            f"order {training.order!r}"
        )
    rng = torch.Generator()
    sizes = [len(truth) for truth in truths]
    whole = Batch(torch.cat([t.inputs for t in truths]), torch.cat([t.labels for t in truths]))
    steps = replace(training, epochs=None)

    def update(batch: Batch) -> Named:
        return train(setting, batch, replace(steps, batch_size=len(batch)), rng).update

    mean = weighted_mean([update(truth) for truth in truths], weights(sizes, "records"))
    apart, size = norm(subtract(mean, update(whole))), norm(mean)
    tau, clients, records = training.steps, len(truths), sum(sizes)
    return Divergence(
        absolute=apart,
        relative=apart / size if size else 0.0,
        predicted=training.lr**2 * tau * (tau - 1) * (clients - 1) / records,
    )


def pearson(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """Pearson's correlation, in [−1, 1]; undefined where one side does not vary: an error."""
    a, b = (torch.as_tensor(v, dtype=torch.float64).flatten() for v in (first, second))
    if len(a) != len(b) or len(a) < 2:
        raise InputError(
            f"correlation: expected two lists of one length ≥ 2, got {len(a)}, {len(b)}"
        )
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    if not scale:
        raise InputError("correlation: one of the two lists is constant, so it has no correlation")
    return float(a @ b) / scale
