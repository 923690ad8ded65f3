"""A layer's input from its weight gradient alone: the same small matrix for all its channels.

For each channel c of the input t, output j and offset o of the kernel,

    G_jco = Σ_n Σ_p δ_njp · t_nc[pixel of (p, o)].

One Cholesky factor solves that for all channels, in double precision. Behind a norm the signals
depend on what the layer puts out, which is sought: its statistics follow from each solution, and
the next solution from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from leakgauge.attacks._alone import groups_of, means
from leakgauge.attacks._known import Peeled, Rows, Solution, told_of, weight_gradient
from leakgauge.attacks._linear import least_squares, smallest, supports
from leakgauge.attacks._span import windows
from leakgauge.attacks._steps import usual_energy
from leakgauge.errors import NotApplicable

NOISY = 1e-5  # roughness of the separated maps from which on noise outweighs rounding
RIDGE = 1e-12  # added to the normal equations, as a share of their diagonal
NORM_ROUNDS = 150  # times that a batch norm's statistics follow from what was solved with them
MIXED = 6  # solutions of which the next one to try is mixed
NORM_SOLVED = 1e-7  # by how much they may still move at the end
SIZED = 0.1  # share by which signals whose size no bias told may be off
GROUND = 3e-4  # entries this near a channel's least, as a share of its range, are its zeros


def by_channel(
    done: Peeled, node: fx.Node, systems: list[System], good: dict[fx.Node, Tensor]
) -> Solution:
    """The activations of `node` by least squares, the same small matrix for all its channels; the
    residual, and what the gradients lack.

    Behind a norm a signal is (γδ − mean γδ − û·mean(γδû))/σ, over a step behind a batch norm in
    train mode, over a group of each record's channels behind a group norm. σ and û are those of
    what the layer puts out, which is sought: they begin as constants, or as they were with other
    rows, and follow from each solution.
    """
    trace, records = done.trace, len(done.start.maps)
    shape, pixels = trace.shape[node], systems[0].pixels
    flat = (shape.numel() // pixels, pixels)
    for system in systems:
        system.good = good[system.rows.layer]
    value, null = torch.zeros(()), None
    mixed = Mixed()
    for _ in range(NORM_ROUNDS):
        before = value
        sums = [system.equations(flat[0]) for system in systems]
        normal, right = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
        normal.diagonal().add_(RIDGE * float(normal.diagonal().mean()))
        solved = torch.cholesky_solve(right, torch.linalg.cholesky(normal))  # (N·pixels, channels)
        if null is None:
            null = _open(normal, len(done.start.steps))
        value = solved.view(records, flat[1], flat[0]).transpose(1, 2)
        value = grounded(value, null).reshape(records, *shape)
        if not trace.norms:
            break
        if all(system.rows.norm for system in systems):  # without one its size is told
            value = usual_size(done, node, value)
        value = mixed(before, value)
        moved = max(system.follow(node, value) for system in systems)
        if moved < NORM_SOLVED:
            break
    if trace.norms:
        for system in systems:
            system.sized(value.reshape(records, *flat))
    lacks = {system.rows.layer: system.lack(value.reshape(records, *flat)) for system in systems}
    kept = [lacks[s.rows.layer][good[s.rows.layer]] for s in systems]
    size = sum(float(s.target[s.good].square().sum()) for s in systems) ** 0.5
    residual = sum(float(k.square().sum()) for k in kept) ** 0.5 / size
    return value, residual, lacks


class Mixed:
    """What x = G(x) is tried at next: of the last few tries the combination whose misses G(x) − x
    cancel best (Anderson's mixing), which takes a fraction of the rounds of x ← G(x). Where a miss
    has grown it begins anew."""

    def __init__(self) -> None:
        self.misses: list[Tensor] = []
        self.found: list[Tensor] = []

    def __call__(self, tried: Tensor, found: Tensor) -> Tensor:
        if tried.shape != found.shape:  # the first has nothing before it
            return found
        miss = (found - tried).flatten()
        if self.misses and miss.norm() > self.misses[-1].norm():
            self.misses, self.found = [], []
        self.misses, self.found = [*self.misses, miss][-MIXED:], [*self.found, found][-MIXED:]
        if len(self.found) == 1:
            return found
        pairs = zip(self.misses, self.misses[1:], strict=False)
        steps = torch.stack([one - other for one, other in pairs])
        sizes = steps.norm(dim=1, keepdim=True).clamp_min(1e-300)
        steps = steps / sizes
        gram = steps @ steps.T + 1e-10 * torch.eye(len(steps)).to(steps)
        shares = torch.linalg.solve(gram, steps @ miss)[:, None] / sizes
        pairs = zip(self.found, self.found[1:], strict=False)
        moves = torch.stack([(one - other).flatten() for one, other in pairs])
        next_: Tensor = found - (shares * moves).sum(0).view(found.shape)
        return next_


class System:
    """The equations that one layer's weight gradient gives of its input."""

    def __init__(self, done: Peeled, node: fx.Node, rows: Rows):
        self.done, self.rows = done, rows
        self.good = torch.ones(rows.signal.shape[1], dtype=torch.bool)  # rows that count
        trace = done.trace
        layer = trace.layer(rows.layer)
        self.observed = done.observed(rows.layer)
        self.pixels = 1
        self.sides: tuple[int, ...] = (1, 1)  # of the layer's input
        self.places: tuple[int, ...] = (1, 1)  # and of its output
        self.seen = torch.ones(1, 1, dtype=torch.long)
        if not isinstance(layer, nn.Linear):
            self.pixels = trace.shape[node][1:].numel()
            self.sides = tuple(trace.shape[rows.layer.all_input_nodes[0]][1:])
            self.places = tuple(trace.shape[rows.layer][1:])
            numbers = torch.arange(1, self.pixels + 1, dtype=torch.float64).view(1, 1, *self.sides)
            self.seen = windows(numbers, layer)[0].long()
        self.observed = self.observed.view(len(self.observed), -1, self.seen.shape[1])
        self.signal = rows.signal.flatten(2) if rows.signal.dim() > 2 else rows.signal[:, :, None]
        self.signal = self.signal.transpose(0, 1)  # (outputs, N, positions)
        self.target = self.observed
        self.at_layer = self.signal
        if rows.norm is not None:
            self.norm: Any = trace.module.get_submodule(str(rows.norm.target))
            self.groups = groups_of(self.norm)
            if self.groups and layer.bias is not None and layer.bias.any():
                raise NotApplicable(
                    f"a group norm follows {rows.layer.target}, whose bias makes it depend on the "
                    "size of its input"
                )
            self.normal = torch.zeros_like(self.signal)  # û
            if self.groups:
                self.told, self.active = told_of(done, rows)
                self._hold()
                open_ = means(1 - self.active, self.groups).clamp_min(1e-9)
                self.normal = self.normal - means(self.normal, self.groups) / open_
                self._hold()
            sizes = layer.weight.detach().flatten(1).norm(dim=1)
            if self.groups:
                sizes = means(sizes.square()[:, None, None], self.groups).sqrt().flatten()
            self.sigma = sizes[:, None].expand(-1, self.signal.shape[1]).clone()
            self._learn("bias", self.signal)
            self.behind()

    def _hold(self) -> None:
        """Take û from the activation behind a group norm, where that is active."""
        gamma = self.gamma()[:, :, None]
        told = torch.where(gamma.abs() > 1e-6, self.told / gamma, 0.0)
        self.normal = torch.where(self.active > 0, told, self.normal)

    def begin(self, other: System) -> None:
        """Take û and σ from where another solution of this layer ended."""
        if self.rows.norm is not None:
            self.normal, self.sigma = other.normal, other.sigma
            self.behind()

    def gamma(self) -> Tensor:
        """The weights of the norm in the step of each record: (outputs, N)."""
        found = self.signal.new_ones(self.signal.shape[:2])
        for step, weights in self.done.steps:
            with self.done.trace.holding(weights):
                if self.norm.weight is not None:
                    found[:, step] = self.norm.weight.detach()[:, None]
        return found

    def weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The records of each step, and the weight that the layer had in it."""
        trace, layer = self.done.trace, self.rows.layer
        name = trace.told(layer, "weight", self.done.gradient)
        for step, weights in self.done.steps:
            yield step, weights.get(name or "", trace.layer(layer).weight.detach()).double()

    def behind(self) -> None:
        """The signals at the layer itself, from those behind its norm."""
        found, passed = torch.zeros_like(self.signal), self.signal * self.gamma()[:, :, None]
        for step in self.done.start.steps:
            signal, normal = passed[:, step], self.normal[:, step]
            signal = signal - means(signal, self.groups)
            signal = signal - normal * means(signal * normal, self.groups)
            signal = signal - means(signal, self.groups)
            found[:, step] = signal / self.sigma[:, step, None]
        self.at_layer = found

    def equations(self, channels: int) -> tuple[Tensor, Tensor]:
        """The normal matrix (N·pixels)², and the right side for every channel."""
        # Rounding goes with the size of a row, so that every row counts alike: its signals are
        # brought to one size. Noise does not: what it drowns counts less.
        size = self.at_layer.flatten(1).norm(dim=1)
        keep = self.good & (size > 1e-9 * size.max())
        noise = (self.done.start.rough / NOISY) ** 2 * size.square().mean().sqrt()
        weight = size.hypot(noise)
        signal = self.at_layer[keep] / weight[keep, None, None]
        target = self.target[keep] / weight[keep, None, None]
        right = signal.new_zeros(signal.shape[1] * self.pixels, channels)
        for offset in range(self.seen.shape[1]):
            right += self._spread(signal, offset).T @ target[:, :, offset]
        return self.normal_matrix(signal), right

    def normal_matrix(self, signal: Tensor) -> Tensor:
        """(N·pixels)², the same for every channel of the input, of these signals."""
        records, flat = signal.shape[1], signal.flatten(1)
        # Every offset of the kernel sees the same products of signals, each at its own pixels.
        products = (flat.T @ flat).view(records, *self.places, records, *self.places)
        found = signal.new_zeros(records, *self.sides, records, *self.sides)
        for offset in range(self.seen.shape[1]):
            at, pixels = self._grids(offset)
            found[(slice(None), *pixels) * 2] += products[(slice(None), *at) * 2]
        return found.view(records * self.pixels, -1)

    def _grids(self, offset: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """The positions, down and across, whose windows have a kernel's offset inside the input,
        and the pixels that they see there."""
        pixel = self.seen[:, offset].view(self.places) - 1
        down, across = ((pixel >= 0).any(side).nonzero()[:, 0] for side in (1, 0))
        inside = pixel[down][:, across]
        if not inside.numel():
            return (slice(0), slice(0)), (slice(0), slice(0))
        rows, columns = inside[:, 0] // self.sides[1], inside[0] % self.sides[1]
        return (_evenly(down), _evenly(across)), (_evenly(rows), _evenly(columns))

    def _spread(self, signal: Tensor, offset: int) -> Tensor:
        """The signals, at the pixels that a kernel's offset sees: (outputs, N·pixels)."""
        outputs, records, _ = signal.shape
        inside = (self.seen[:, offset] > 0).nonzero()[:, 0]
        spread = signal.new_zeros(outputs, records, self.pixels)
        spread[:, :, self.seen[inside, offset] - 1] = signal[:, :, inside]
        return spread.view(outputs, -1)

    def follow(self, node: fx.Node, value: Tensor) -> float:
        """Take û and σ from what the layer puts out of this value; by how much û moved."""
        if self.rows.norm is None:
            return 0.0
        moved = self.observe(node, value)
        self.behind()
        self.learn(value)
        return moved

    def observe(self, node: fx.Node, value: Tensor) -> float:
        """û and σ of what the layer puts out of this value; by how much û moved."""
        before, out = self.normal, self.centred(node, value)
        self.normal, self.sigma = torch.zeros_like(before), torch.zeros_like(self.sigma)
        for step in self.done.start.steps:
            deviation = (means(out[:, step].square(), self.groups) + self.norm.eps).sqrt()
            self.normal[:, step] = out[:, step] / deviation
            self.sigma[:, step] = deviation[:, :, 0].expand(-1, len(step))
        if self.groups:
            self._hold()
        return float((self.normal - before).norm() / self.normal.norm())

    def centred(self, node: fx.Node, value: Tensor) -> Tensor:
        """What the layer puts out of this value of the node, at the weights of each step and less
        the mean of that: (outputs, N, …)."""
        layer = self.done.trace.layer(self.rows.layer)
        seen = self.done.entering(self.rows.layer, node, value)
        found = seen.new_zeros(self.signal.shape)
        for step, weight in self.weights():
            # Not by `holding`: the slopes of this are taken later, and want these very weights.
            out = functional_call(layer, {"weight": weight}, (seen[step],)).transpose(0, 1)
            out = out.flatten(2) if out.dim() > 2 else out[:, :, None]
            found[:, step] = out - means(out, self.groups)
        return found

    def weight_gradient(self, node: fx.Node, value: Tensor, signal: Tensor) -> Tensor:
        """The gradient (outputs, channels, offsets) that signals (outputs, N, positions) give."""
        layer = self.done.trace.layer(self.rows.layer)
        seen = self.done.entering(self.rows.layer, node, value)
        given = signal.transpose(0, 1)
        flat = isinstance(layer, nn.Linear)
        given = given[:, :, 0] if flat else given.reshape(*given.shape[:2], *self.places)
        return weight_gradient(layer, seen, given).reshape(len(signal), -1, self.seen.shape[1])

    def energy(self, slope: Tensor) -> Tensor:
        """The mean square over channels with which each pixel (N, pixels) enters the layer's
        outputs, each of them by its slope (outputs, N), added up."""
        found = slope.new_zeros(slope.shape[1], self.pixels + 1)
        for step, weight in self.weights():
            size = weight.reshape(len(weight), -1, self.seen.shape[1]) * slope[:, step[:1], None]
            each = size.square().sum(0).mean(0)  # by offset
            for offset, amount in enumerate(each.tolist()):
                count = torch.bincount(self.seen[:, offset], minlength=self.pixels + 1)
                found[step] += amount * count
        return found[:, 1:]

    def learn(self, value: Tensor) -> None:
        """Tell the path what each step added to the gradients of the layer and its norm."""
        path, name = self.done.start.path, self.done.trace.told
        if path.steps == 1:
            return
        weight = name(self.rows.layer, "weight", self.done.gradient)
        assert weight is not None
        parts = self.parts(value)
        path.learn(weight, parts.view(len(parts), *self.done.gradient[weight].shape))
        self._learn("weight", self.signal * self.normal)

    def _learn(self, attribute: str, sums: Tensor) -> None:
        """Tell the path the parts of a parameter of the norm: sums over records and positions."""
        assert self.rows.norm is not None
        name = self.done.trace.told(self.rows.norm, attribute, self.done.gradient)
        if name is not None:
            parts = [sums[:, step].sum((1, 2)) for step in self.done.start.steps]
            self.done.start.path.learn(name, torch.stack(parts))

    def parts(self, value: Tensor) -> Tensor:
        """What each step adds to the layer's gradient: (steps, outputs, channels, offsets)."""
        flat = value.reshape(len(value), -1, self.pixels)
        steps = self.done.start.steps
        return torch.stack([self._gradient(self.at_layer[:, s], flat[s]) for s in steps])

    def sized(self, value: Tensor) -> None:
        """Give the signals of each step the size with which they explain the gradient: where no
        bias told how large the activations above are, it is not known before."""
        if self.done.trace.alone:  # their own amounts were told
            return
        steps = self.done.start.steps
        parts = self.parts(value)[:, self.good].flatten(1)
        found = least_squares(parts.T, self.observed[self.good].flatten()[:, None])
        for step, amount in zip(steps, found[:, 0].tolist(), strict=True):
            if abs(amount - 1) < SIZED:
                self.at_layer[:, step] *= amount

    def _gradient(self, signal: Tensor, value: Tensor) -> Tensor:
        """The layer's weight gradient (outputs, channels, offsets) of these records."""
        columns = value.transpose(1, 2).reshape(-1, value.shape[1])
        offsets = range(self.seen.shape[1])
        return torch.stack([self._spread(signal, o) @ columns for o in offsets], 2)

    def lack(self, value: Tensor) -> Tensor:
        """What the layer's gradient lacks when its input (N, channels, pixels) is this."""
        return self.observed - self._gradient(self.at_layer, value)


def _evenly(numbers: Tensor) -> slice:
    """The slice of these numbers, which are evenly spaced."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    return slice(int(numbers[0]), int(numbers[-1]) + 1, step)


def _open(normal: Tensor, steps: int) -> list[Tensor]:
    """The combinations of pixels that no equation sees, each by its own pixels: behind a batch norm
    in train mode a constant at an offset that is seen once per window, one per step."""
    count = steps + 2
    if len(normal) <= count:
        return []
    values, vectors = smallest(normal.numpy(), count)
    none = values < 10 * RIDGE * float(normal.diagonal().mean())
    if not none.any():
        return []
    if none.all():
        raise NotApplicable("its equations leave more open than a constant per step")
    null = torch.from_numpy(vectors[:, none])
    return [null[:, 0]] if null.shape[1] == 1 else supports(null)


def grounded(value: Tensor, null: list[Tensor]) -> Tensor:
    """The value (N, channels, pixels) with what is open in it such that each channel's smallest
    entries there are zero, as behind a ReLU."""
    if not null:
        return value
    flat = value.transpose(1, 2).reshape(-1, value.shape[1])
    for one in null:
        shape = one * one.sum().sign()
        there = shape > 1e-3 * shape.max()
        shape = shape / shape[there].mean()
        flat = flat - shape[:, None] * (shape @ flat / shape.square().sum())
        # Zeros are taken often, and rounding spreads them: their middle, not the least of them.
        seen = flat[there]
        low, high = seen.min(0).values, seen.max(0).values
        zeros = seen <= low + GROUND * (high - low)
        lowest = seen.where(zeros, torch.nan).nanmedian(0).values
        flat = flat - shape[:, None] * lowest
    return flat.view(len(value), -1, value.shape[1]).transpose(1, 2)


def usual_size(done: Peeled, node: fx.Node, value: Tensor) -> Tensor:
    """The value with the size, step by step or record by record, of a ReLU behind norms: only the ε
    of those that see it depends on that."""
    energy = usual_energy(done.trace, node)
    if energy is None:
        return value
    value = value.clone()
    for part in done.sized:
        value[part] *= (energy / float(value[part].square().mean())) ** 0.5
    return value
