"""What attackers do who know a defence: shared by the defences' own answers.

- `shrunk`: of a matrix with Gaussian noise of known size, the estimate with the least squared error
  that keeps its singular vectors (M. Gavish and D. L. Donoho, "Optimal Shrinkage of Singular
  Values", IEEE Transactions on Information Theory, 2017). With y = s / (σ√n) for a singular value s
  of an m × n matrix, m ≤ n, and β = m/n,

      s ← σ√n · √((y² − β − 1)² − 4β) / y   for y > 1 + √β,   else 0

- `completed`: a matrix of known rank is known whole from enough of its entries. The gradient of a
  linear layer has at most as many ranks as records went through it. Least squares for one factor
  and the other in turn; what comes out counts only if the entries that were sent are met, and those
  that were not are as small as the defence says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakgauge.fl.local import minibatches
from leakgauge.types import Answer, Named, Observation

SWEEPS = 300
MET = 1e-6  # relative error of entries that were sent: the matrix has the rank that was assumed
LARGEST = 1e10  # multiplications of a sweep: matrices beyond it are left as they are
STALLED = 0.9  # of the error ten sweeps before: no more is to be expected
SPARE = 1.3  # entries per unknown, at least


def shrunk(update: Named, spread: Mapping[str, float]) -> Named:
    """The update with Gaussian noise of the standard deviation `spread` of each tensor taken away,
    as far as that is possible. Where nothing at all stands out of it, the update stays as it is."""
    found = {name: _shrunk(value, spread[name]) for name, value in update.items()}
    return found if any(value.any() for value in found.values()) else dict(update)


def _shrunk(value: Tensor, spread: float) -> Tensor:
    if spread == 0 or value.numel() == 0:
        return value.clone()
    if value.dim() < 2:  # a vector has a length alone: the positive part of James and Stein
        left = 1 - value.numel() * spread**2 / max(float(value.double().square().sum()), 1e-300)
        return value * max(left, 0.0)
    matrix = value.flatten(1).double()
    short, long = sorted(matrix.shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    unit, beta = spread * math.sqrt(long), short / long
    y = s / unit
    kept = torch.where(
        y > 1 + math.sqrt(beta),
        ((y.square() - beta - 1).square() - 4 * beta).clamp_min(0).sqrt() / y.clamp_min(1e-300),
        0.0,
    )
    return torch.mm(u * (unit * kept), v).to(value.dtype).view_as(value)


@dataclass(frozen=True)
class Layer:
    """A layer whose update has at most `rank` ranks, its bias as one more column."""

    weight: str
    bias: str | None
    rank: int


def layers(seen: Observation) -> list[Layer]:
    """Convolutions and linear layers whose update must have fewer ranks than its sizes allow: one
    for each window of each record, each time a step uses it."""
    if seen.training is None or seen.records is None:
        return []
    views = sum(map(len, minibatches(seen.records, seen.training)))
    names = {id(p): name for name, p in seen.model.named_parameters()}
    windows: Counter[nn.Module] = Counter()

    def note(module: nn.Module, _: object, out: Tensor) -> None:
        windows[module] += (out[0, 0] if isinstance(module, nn.Conv2d) else out[0, ..., 0]).numel()

    fitting = [m for m in seen.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [module.register_forward_hook(note) for module in fitting]
    was = seen.model.training
    try:
        seen.model.eval()
        with torch.no_grad():
            seen.model(seen.record.entering(torch.zeros(1, *seen.record.shape)))
    finally:
        seen.model.train(was)
        for hook in hooks:
            hook.remove()
    shared = Counter(id(module.weight) for module in windows)
    found = []
    for module, count in windows.items():
        weight, bias = names.get(id(module.weight), ""), names.get(id(module.bias))
        whole = shared[id(module.weight)] == 1 and getattr(module, "groups", 1) == 1
        if weight in seen.update and whole:
            rank = count * views
            if rank < min(seen.update[weight].flatten(1).shape):
                found.append(Layer(weight, bias if bias in seen.update else None, rank))
    return found


def completed(update: Named, small: Mapping[str, float], known: Sequence[Layer]) -> Named:
    """The update with the entries that were not sent, which are 0 in it, as far as the ranks of
    layers tell them. Those of a tensor are at most `small` by magnitude."""
    whole = dict(update)
    for layer in known:
        names = [name for name in (layer.weight, layer.bias) if name]
        parts = [update[name].flatten(1) if update[name].dim() > 1 else update[name][:, None]
                 for name in names]  # fmt: skip
        bound = [
            torch.full_like(part, small[name]) for name, part in zip(names, parts, strict=True)
        ]
        found = _completed(torch.cat(parts, 1).double(), torch.cat(bound, 1).double(), layer.rank)
        widths = [part.shape[1] for part in parts]
        for name, part in zip(names, torch.split(found, widths, 1), strict=True):
            whole[name] = part.to(update[name].dtype).view_as(update[name])
    return whole


def _completed(sent: Tensor, small: Tensor, rank: int) -> Tensor:
    """The matrix of this rank that has these entries, in the rows and columns that they tell."""
    rows, columns = _told(sent != 0, rank)
    part, bound = sent[rows][:, columns], small[rows][:, columns]
    known = (part != 0).double()
    count, (high, wide) = int(known.sum()), part.shape
    free = rank * (high + wide - rank)
    if count in (0, part.numel()) or count < SPARE * free or high * wide * rank**2 > LARGEST:
        return sent
    size = float(part.norm())
    u, s, _ = torch.linalg.svd(part, full_matrices=False)
    left = u[:, :rank] * s[:rank].sqrt()
    errors: list[float] = []
    for _ in range(SWEEPS):
        right = _fitted(part.T, known.T, left)
        left = _fitted(part, known, right)
        whole = left @ right.T
        errors.append(float(((whole - part) * known).norm()))
        if errors[-1] <= MET * size:
            if not bool(((whole * (1 - known)).abs() <= 1.01 * bound).all()):
                return sent  # entries that were not sent are smaller
            return _extended(sent, small, columns, right)
        if len(errors) > 10 and errors[-1] > STALLED * errors[-11]:
            break
    return sent


def _extended(sent: Tensor, small: Tensor, columns: Tensor, right: Tensor) -> Tensor:
    """The matrix whose rows, in these columns, are combinations of the factor's: in all rows and
    columns that have as many known entries as that takes."""
    known, rank = (sent != 0).double(), right.shape[1]
    left = _fitted(sent[:, columns], known[:, columns], right)
    rows = known[:, columns].sum(1) >= rank
    right = _fitted(sent[rows].T, known[rows].T, left[rows])
    reached = known[rows].sum(0) >= rank
    whole = (left @ right.T).clamp(-small, small)
    told = rows[:, None] & reached & (sent == 0)
    return torch.where(told, whole, sent)


def _told(known: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rows and columns that have more known entries, in each other, than ranks."""
    rows, columns = known.any(1), known.any(0)
    while True:
        few = rows & (known[:, columns].sum(1) <= rank)
        rows = rows & ~few
        thin = columns & (known[rows].sum(0) <= rank)
        columns = columns & ~thin
        if not few.any() and not thin.any():
            return rows, columns


def _fitted(sent: Tensor, known: Tensor, factor: Tensor) -> Tensor:
    """For each row, the combination of the factor's columns that meets its known entries best."""
    normal = torch.einsum("mn,ni,nj->mij", known, factor, factor)
    ridge = 1e-12 * normal.diagonal(dim1=1, dim2=2).amax(1).clamp_min(1e-300)
    normal += ridge.view(-1, 1, 1) * torch.eye(factor.shape[1], dtype=factor.dtype)
    found: Tensor = torch.linalg.solve(normal, (sent @ factor).unsqueeze(-1)).squeeze(-1)
    return found


def beyond(value: Tensor, centre: Tensor, reach: Tensor | float) -> Tensor:
    """How far a value lies outside of centre ± reach: zero inside."""
    off = value - centre
    return off - off.clamp(-reach, reach)  # type: ignore[arg-type]


def unsent(seen: Observation) -> Answer:
    """The answer to a defence that sends the largest entries of each tensor and zeros for the rest:
    candidates are to meet what was sent, and to be no larger than its smallest where nothing was.
    """
    sent = {name: value != 0 for name, value in seen.update.items()}
    small = {name: _least(value) for name, value in seen.update.items()}

    def through(one: Named) -> Named:
        return {
            name: torch.where(
                sent[name].to(u.device), u, beyond(u, torch.zeros_like(u), small[name])
            )
            for name, u in one.items()
        }

    return Answer(
        "matches only what was sent, holds the rest to be smaller, and completes layers whose rank "
        "the number of records tells",
        completed(seen.update, small, layers(seen)),
        restored=True,
        through=through,
    )


def sent_alone(update: Named) -> Callable[[Named], Named]:
    """What is left of an update where nothing else than this was sent: its entries that are not
    zero."""
    sent = {name: value != 0 for name, value in update.items()}
    return lambda one: {name: u * sent[name].to(u) for name, u in one.items()}


def _least(value: Tensor) -> float:
    """The smallest magnitude that was sent."""
    sizes = value[value != 0].abs()
    return float(sizes.min()) if sizes.numel() else 0.0
