"""Behind a batch norm in train mode: who was in a step, in which order, and with which signals.

The signals of a step sum to zero in every channel. That tells which records were together, and all
scales but one per step. The parts of each step in the gradient then tell the weights of the next,
and its zeros the means that the norm took off. docs/methods/separation.md has the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.attacks._linear import most, supports
from leakgauge.attacks._path import Path
from leakgauge.attacks._span import windows
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.types import Named

APPROXIMATE = 0.2  # share by which signals of several steps may fail to add up
LINED = 1e-3  # share by which they may miss both zero and what was sent
ALIKE = 3.0  # factor by which what was sent may be known wrongly


def together(signals: Tensor, sizes: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """How much of each record's signal there is, up to a factor per step, and which records were in
    one step: the signals of a step sum to zero in every channel.

    The amounts of the steps are the null space of the sums. They have disjoint supports, so that in
    any orthonormal basis of that space the rows of two records are parallel or orthogonal.
    """
    sums = signals.flatten(2).sum(2).T  # (channels, N)
    _, values, right = torch.linalg.svd(sums, full_matrices=True)
    count = len(sizes)
    null = right[-count:].T  # (N, steps)
    long = values.new_zeros(len(right)).index_copy_(0, torch.arange(len(values)), values)
    edge = float(long[-count] / long[-count - 1]) if len(long) > count else 0.0
    if edge > 0.1:
        raise NotApplicable(
            f"the signals found at it do not add up to zero in {count} steps (ratio {edge:.1g})"
        )
    if count == 1:
        amounts = null[:, 0] * null[:, 0].sum().sign()
        groups = [torch.arange(len(null))]
    else:
        parts = supports(null)
        groups = [(part != 0).nonzero()[:, 0] for part in parts]
        amounts = torch.stack(parts).sum(0)
    if sorted(map(len, groups)) != sorted(sizes):
        raise NotApplicable(
            f"the records found at it form steps of {sorted(map(len, groups))}, not {sorted(sizes)}"
        )
    if not (amounts > 1e-6 * amounts.max()).all():
        raise NotApplicable("the records found add up to zero only with negative shares")
    return amounts, tuple(groups)


def biases(trace: Trace, gradient: Named, relu: fx.Node) -> list[str]:
    """The biases that are added, channel by channel, to what enters a ReLU."""
    found, left = [], list(relu.all_input_nodes)
    while left:
        node = left.pop()
        name = trace.told(node, "bias", gradient)
        if name is not None:
            found.append(name)
        elif trace.channelwise(node):
            left.extend(node.all_input_nodes)
    return found


def usual_energy(trace: Trace, relu: fx.Node) -> float | None:
    """The mean square of what leaves a ReLU, if what enters it is normal: a sum of norms, each with
    the mean and variance that its bias and weight give it, and of skips; twice that of the largest
    of some. None where something else enters."""
    pooled, relu = relu, trace.unpooled(relu)
    if trace.kind[relu] != "relu":
        return None
    left = list(relu.all_input_nodes)
    mean, variance = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1e-12)
    while left:
        node = left.pop()
        if node in trace.norms:
            norm: Any = trace.module.get_submodule(str(node.target))
            mean = mean + (0.0 if norm.bias is None else norm.bias.double())
            variance = variance + (1.0 if norm.weight is None else norm.weight.double().square())
        elif trace.kind[node] == "relu":  # a skip: it adds as much as half a normal has
            mean, variance = mean + 0.4, variance + 0.34
        elif trace.channelwise(node):
            left.extend(node.all_input_nodes)
        else:
            return None
    ratio = mean / variance.sqrt()
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    active = torch.special.ndtr(ratio)
    energy = float(((mean**2 + variance) * active + mean * variance.sqrt() * density).mean())
    return energy if pooled is relu else 2 * energy


def amounts_below(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    source: fx.Node,
    maps: Tensor,
    signals: Tensor,
    parts: Sequence[tuple[Tensor, Named]],
) -> Tensor:
    """A factor per record, the same for all of a part, by which signals add up to the gradient of
    the bias below the ReLU `source` that the layer looks at. `parts` are records whose maps have
    one size in common, and the weights of their step. Where no bias tells it, maps become as large
    as such a ReLU's usually are: only the ε of norms depends on it. A max-pool sends each signal to
    one place, so that their sum is the same below it."""
    relu = trace.unpooled(source)
    names = biases(trace, gradient, relu)
    entered = layer.all_input_nodes[0]
    while entered is not relu and len(entered.users) == 1:
        entered = entered.all_input_nodes[0]
    found = torch.ones(len(maps), dtype=maps.dtype)
    energy = usual_energy(trace, source)
    if energy is not None:
        for part, _ in parts:
            found[part] = float((maps[part].square().mean() / energy).sqrt())
    if entered is not relu or len(relu.users) > 1 or not names:
        return found
    sums = []
    for part, weights in parts:
        leaf = maps[part].detach().requires_grad_()
        with trace.holding(weights), torch.enable_grad():
            left = trace.affine(layer, {source: leaf}, {})
            (slope,) = torch.autograd.grad(left, leaf, signals[part])
        sums.append((slope * (leaf > 0)).detach().transpose(0, 1).flatten(1).sum(1))
    every = torch.stack(sums, 1)
    for name in names:
        factors, misfit = most(every, gradient[name])
        if misfit < APPROXIMATE and (factors > 0).all():
            for (part, _), factor in zip(parts, factors.tolist(), strict=True):
                found[part] = factor
            break
    return found


@dataclass
class _Passed:
    """One step's signals at a layer, by which those behind its batch norm are x + a + b·û."""

    x: Tensor  # (channels, N·positions)
    normal: Tensor  # û
    shift: Tensor  # a, (channels, 1)
    slope: Tensor
    far: Tensor  # how far from zero a quarter of the signals is, as a share of all (channels,)

    def mend(self, sent: Tensor, records: int) -> None:
        """Find the lines anew of channels whose signals are neither zero nor what was sent."""
        wrong = _apart(self.x + self.shift + self.slope * self.normal, sent, records)[0] > LINED
        if not wrong.any():
            return
        x, u, sent = self.x[wrong], self.normal[wrong], sent[wrong]
        shift, slope, far = passing(x, u, sent, records)
        better = _apart(x + shift + slope * u, sent, records)[0] < LINED
        rows = wrong.nonzero()[:, 0][better]
        self.shift[rows], self.slope[rows] = shift[better], slope[better]
        self.far[rows] = (far / x.square().mean(1).sqrt().clamp_min(1e-30))[better]


@dataclass
class AtLayer:
    """What was found at one layer of each record: the `maps` that it sees, which left the ReLU
    `source`, and the `signals` at its output, whose product is known and not yet their sizes; the
    `steps` that records were in, and the `path` of the weights from one step to the next."""

    trace: Trace
    gradient: Named
    layer: fx.Node
    source: fx.Node
    maps: Tensor
    signals: Tensor
    steps: tuple[Tensor, ...]
    path: Path

    def __post_init__(self) -> None:
        (self.norm,) = self.layer.users

    def times(self, amounts: Tensor) -> None:
        """Every record's signals by its own amount, and its maps by the inverse."""
        each = amounts.view(-1, *[1] * (self.maps.dim() - 1))
        self.maps, self.signals = self.maps / each, self.signals * each

    def order(self) -> None:
        """Bring the steps into the order in which they were taken. `path` learns the parts of the
        layer and of the batch norm behind it.

        A step's gradient at the layer is known, and so are the weights that the next one began
        with. Only with the right ones does its batch norm leave zeros where the ReLU above is off.
        """
        weight = self.trace.told(self.layer, "weight", self.gradient)
        gamma = self.trace.told(self.norm, "weight", self.gradient)
        assert weight is not None
        shape = self.gradient[weight].shape
        parts = self.signals.new_zeros(len(self.steps), *shape)
        slopes = self.signals.new_zeros(len(self.steps), self.signals.shape[1])
        left, order = list(self.steps), []
        for number in range(len(self.steps)):
            with self.trace.holding(self.path.weights[number]):
                tried = [self._passed(step) for step in left]
            best = min(range(len(left)), key=lambda i: float(tried[i].far.median()))
            step = left.pop(best)
            order.append(step)
            seen = windows(self.maps[step], self.trace.layer(self.layer)).flatten(0, 1)
            sent = self.signals[step].flatten(2).transpose(1, 2).flatten(0, 1)
            parts[number] = (sent.T @ seen).view(shape)
            slopes[number] = tried[best].slope[:, 0] * tried[best].x.shape[1]
            self.path.learn(weight, parts)
            if gamma is not None:
                self.path.learn(gamma, slopes)
        self.steps = tuple(order)

    def amounts(self) -> Tensor:
        """A factor per record, the same in a step, by which signals are to be larger."""
        parts = list(zip(self.steps, self.path.weights, strict=True))
        return amounts_below(
            self.trace, self.gradient, self.layer, self.source, self.maps, self.signals, parts
        )

    def behind_norm(self, sent: Tensor | None = None) -> Tensor:
        """The signals behind the batch norm that the layer's output enters, at the weights of each
        step, of which `path` learns the norm's.

        Over all steps n·a adds up to the gradient of the norm's bias and n·b to that of its weight,
        where they are told: with them the step with the fewest zeros in a channel needs none. Zeros
        tell more than a gradient does that lacks no more than the rounding of weights.
        `sent` are the signals as they come to the ReLU above, about: in channels with too few zeros
        for their line to be seen, what it lets through lies on them.
        """
        bias, gamma = (self.trace.told(self.norm, key, self.gradient) for key in ("bias", "weight"))
        channels, *places = self.signals.shape[1:]
        passed: list[_Passed] = []
        slopes = self.signals.new_zeros(len(self.steps), channels)
        for number, step in enumerate(self.steps):
            with self.trace.holding(self.path.weights[number]):
                passed.append(self._passed(step))
            if sent is not None:
                passed[-1].mend(sent[step].transpose(0, 1).flatten(1), len(step))
            slopes[number] = passed[-1].slope[:, 0] * passed[-1].x.shape[1]
            if gamma is not None:
                self.path.learn(gamma, slopes)
        if bias is not None and gamma is not None:
            worst = torch.stack([one.far for one in passed]).argmax(0)
            for key, name in (("shift", bias), ("slope", gamma)):
                sums = torch.stack([getattr(one, key)[:, 0] * one.x.shape[1] for one in passed])
                lacking = self.gradient[name] - sums.sum(0)
                lacking = lacking.where(lacking.abs() > self.path.rounding(name), 0.0)
                for number, one in enumerate(passed):
                    getattr(one, key)[:, 0] += lacking * (worst == number) / one.x.shape[1]
            for name, key in ((gamma, "slope"), (bias, "shift")):
                parts = [getattr(one, key)[:, 0] * one.x.shape[1] for one in passed]
                self.path.learn(name, torch.stack(parts))
        found = torch.zeros_like(self.signals)
        for step, one in zip(self.steps, passed, strict=True):
            y = one.x + one.shift + one.slope * one.normal
            found[step] = y.view(channels, len(step), *places).transpose(0, 1)
        return found

    def _passed(self, step: Tensor) -> _Passed:
        """A batch norm in train mode passes back δ_u = γ/σ·(δ_y − mean δ_y − û·mean(δ_y û)); û
        follows from the maps. The means are what makes δ_y zero at the entries that the ReLU above
        has switched off."""
        maps, signals = self.maps[step], self.signals[step]
        norm = self.trace.module.get_submodule(str(self.norm.target))
        assert isinstance(norm, _BatchNorm)
        gamma: Tensor = signals.new_ones(signals.shape[1]) if norm.weight is None else norm.weight
        gamma = gamma.where(gamma.abs() > 1e-12, torch.inf)[:, None]  # a switched off one is silent
        u = self.trace.affine(self.layer, {self.source: maps}, {})
        u = u.transpose(0, 1).flatten(1)  # channels first
        u = u - u.mean(1, keepdim=True)
        sigma = (u.square().mean(1, keepdim=True) + norm.eps).sqrt()
        x = signals.transpose(0, 1).flatten(1) * sigma / gamma
        shift, slope, far = silent(x, u / sigma, len(maps))
        far = far / x.square().mean(1).sqrt().clamp_min(1e-30)
        return _Passed(x, u / sigma, shift, slope, far)


def _apart(y: Tensor, sent: Tensor, records: int) -> tuple[Tensor, Tensor]:
    """How far the entries of each row that are not zero are at the most from what was sent, as a
    share of their size; and which are zero. What was sent to a record is known up to a factor; all
    records together must have got about that."""
    size = y.square().mean(1).sqrt().clamp_min(1e-30)
    alike = (y * sent).sum(1) / sent.square().where(y.abs() > LINED * size[:, None], 0.0).sum(1)
    y, sent = (one.view(len(one), records, -1) for one in (y, sent))
    zeros = y.abs() <= LINED * size[:, None, None]
    ratio = (y / sent.where(sent != 0, torch.inf)).where(~zeros, torch.nan)
    factor = ratio.nanmedian(2, keepdim=True).values.nan_to_num(0.0)
    far = (y - factor * sent).abs().where(~zeros, 0.0).flatten(1).max(1).values / size
    return far.where((alike > 1 / ALIKE) & (alike < ALIKE), torch.inf), zeros.flatten(1)


def passing(
    x: Tensor, u: Tensor, sent: Tensor, records: int, tries: int = 300
) -> tuple[Tensor, Tensor, Tensor]:
    """a and b of each row, so that every entry of x + a + b·u is zero or what was sent, which is
    known up to a factor per record; and how far from zero its zeros are. A row with fewer than
    three zeros is infinitely far.

    Two entries i, j of one record that both passed, or neither, have y_i·sent_j = y_j·sent_i, and
    a third one, k, is taken for a zero: two equations for a and b. Of many such, those count that
    leave all entries at one or the other, and their zeros make the line exact.
    """
    rng = torch.Generator().manual_seed(0)
    positions = x.shape[1] // records
    best = torch.full((len(x), 1), torch.inf, dtype=x.dtype)
    shift, slope = torch.zeros_like(best), torch.zeros_like(best)
    for _ in range(tries if positions > 1 else 0):
        i, j = torch.randperm(positions, generator=rng)[:2].tolist()
        record, k = (int(torch.randint(n, (), generator=rng)) for n in (records, x.shape[1]))
        i, j = (record * positions + one for one in (i, j))
        (x_i, x_j, x_k), (u_i, u_j, u_k) = ((v[:, i], v[:, j], v[:, k]) for v in (x, u))
        even = sent[:, j] - sent[:, i]
        left = u_i * sent[:, j] - u_j * sent[:, i] - even * u_k
        right = x_j * sent[:, i] - x_i * sent[:, j] + even * x_k
        b = (right / left.where(left.abs() > 1e-30, torch.inf))[:, None]
        a = -x_k[:, None] - b * u_k[:, None]
        off = _apart(x + a + b * u, sent, records)[0][:, None]
        better = off < best
        best, shift, slope = (n.where(better, o) for n, o in ((off, best), (a, shift), (b, slope)))
    _, zeros = _apart(x + shift + slope * u, sent, records)
    enough = zeros.sum(1, keepdim=True) > 2
    a, b = _line(x, u, zeros)
    shift, slope = a.where(enough, shift), b.where(enough, slope)
    y = (x + shift + slope * u).where(zeros, 0.0)
    far = y.square().sum(1).div(zeros.sum(1).clamp_min(1)).sqrt()
    return shift, slope, far.where(enough[:, 0], torch.inf)


def _line(x: Tensor, u: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of each row, so that x + a + b·u is zero at these entries, by least squares."""
    near = zeros.to(x)
    count = near.sum(1, keepdim=True).clamp_min(1)
    mean_u, mean_x = (
        (near * u).sum(1, keepdim=True) / count,
        (near * x).sum(1, keepdim=True) / count,
    )
    du, dx = near * (u - mean_u), near * (x - mean_x)
    slope = -(du * dx).sum(1, keepdim=True) / du.square().sum(1, keepdim=True).clamp_min(1e-30)
    return -mean_x - slope * mean_u, slope


def silent(
    x: Tensor, u: Tensor, records: int, tries: int = 150, part: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """a and b of each row, so that as many entries of x + a + b·u as can be are zero: the line
    through two entries that has the nearest quarter of the others nearest, then through those; and
    how near that quarter is. Or another `part` than a fourth.

    A mean over positions sends the same signal to all entries of a record that are active, so that
    these lie on a line too: one that only a single record has does not count.
    """
    rng = torch.Generator().manual_seed(0)
    positions = x.shape[1] // records
    rank, own = max(3, x.shape[1] // part), min(positions, max(2, positions // 8))
    best = torch.full((len(x), 1), torch.inf, dtype=x.dtype)
    shift, slope = torch.zeros_like(best), torch.zeros_like(best)
    for _ in range(tries):
        i, j = torch.randperm(x.shape[1], generator=rng)[:2].tolist()
        apart = u[:, i] - u[:, j]
        b = -((x[:, i] - x[:, j]) / apart.where(apart.abs() > 1e-9, torch.inf))[:, None]
        a = -x[:, i : i + 1] - b * u[:, i : i + 1]
        far = (x + a + b * u).abs()
        off = far.kthvalue(rank, 1, keepdim=True).values
        if records > 1:
            each = far.view(len(x), records, positions).kthvalue(own, 2).values
            off = torch.maximum(off, each.kthvalue(2, 1, keepdim=True).values)
        better = off < best
        best, shift, slope = (n.where(better, o) for n, o in ((off, best), (a, shift), (b, slope)))
    shift, slope = _line(x, u, (x + shift + slope * u).abs() <= 3 * best)
    return shift, slope, best[:, 0]
