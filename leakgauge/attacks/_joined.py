"""Weight gradients and the activations above together, behind batch norms in train mode.

Behind a layer that puts out u = W·t a ReLU that is known tells

    γ/σ·(u − ū) = e     where it is active; e is what the norm put out there, less its bias,

so that û = e/γ there. Elsewhere û follows from each solution, as σ does. Conjugate gradients solve
these equations and those of the gradients for t and for the share by which σ was off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from leakgauge.attacks._channels import NORM_SOLVED, RIDGE, System, grounded, usual_size
from leakgauge.attacks._known import Peeled, Rows, Solution, telling, told_of
from leakgauge.attacks._linear import Equation, solve, whitening
from leakgauge.errors import NotApplicable

SPARE_JOINED = 1.45  # and where they do, behind batch norms in train mode, all together
JOINED_ROUNDS = 40  # times that statistics follow from such a solution
JOINED_STEPS = 40  # of conjugate gradients in each
JOINED_FALLS = 0.9  # times the residual of the round before, at most
JOINED_SETTLES = 0.7  # and below this residual
JOINED_SMALL = 1e-5


def joined_at(
    done: Peeled, node: fx.Node, every: list[Rows], counted: float | None
) -> Joined | None:
    """The equations of gradients and activations together, if there are enough of them. `counted`
    are those of the gradients for each unknown."""
    trace = done.trace
    if not trace.norms or trace.alone or counted is None:
        return None
    if not every or any(rows.norm is None for rows in every):
        return None
    systems = [System(done, node, rows) for rows in every]
    told = [told_of(done, rows) for rows in every]
    skips = [above for above in telling(done, node) if not _normed(done, above)]
    count = sum(float(active.sum()) for _, active in told)
    count += sum(float((done.known[above] > 0).sum()) for above in skips)
    count /= len(done.start.maps) * trace.shape[node].numel()
    if not count or counted + count < SPARE_JOINED:
        return None
    return Joined(
        done,
        node,
        [Told(system, *one) for system, one in zip(systems, told, strict=True)],
        [_skip(done, node, above) for above in skips],
    )


def _skip(done: Peeled, node: fx.Node, above: fx.Node) -> Equation:
    """What a known activation tells of the node that it sees by a skip, at the weights of each
    step."""
    traces = [done.trace.moved(weights) for _, weights in done.steps]
    target, told = done.trace.entered(above, done.known[above])

    def entering(value: Tensor) -> Tensor:
        found = torch.zeros_like(target)
        for step, trace in zip(done.start.steps, traces, strict=True):
            known = {one: of[step] for one, of in done.known.items()} | {node: value[step]}
            found[step] = trace.affine(above.all_input_nodes[0], known, {})
        return found * told

    return entering, target * told


def _normed(done: Peeled, above: fx.Node) -> bool:
    """Whether a batch norm in train mode stands between an activation and what is not known."""
    trace, left = done.trace, list(above.all_input_nodes)
    while left:
        node = left.pop()
        if node in trace.norms and not trace.sources[node] <= done.known.keys():
            return True
        if not trace.bent(node):
            left.extend(node.all_input_nodes)
    return False


@dataclass
class Told:
    """What the activation behind a layer's batch norm tells of that: `value`, what the norm put
    out less its bias, where it is `active`; both (outputs, N, positions). The equations are linear
    in the layer's input t and in the shares s (steps, outputs) by which σ differs from what it was
    taken for."""

    system: System
    value: Tensor
    active: Tensor

    def __post_init__(self) -> None:
        """û is told where the activation is active, elsewhere it begins with what makes its sum in
        a step zero."""
        self.steps = self.system.done.start.steps
        elsewhere = torch.zeros_like(self.value)
        self._hold(elsewhere)
        for step in self.steps:
            open_ = (1 - self.active[:, step]).sum((1, 2)).clamp_min(1.0)
            rest = self.system.normal[:, step].sum((1, 2)) / open_
            elsewhere[:, step] = -rest[:, None, None]
        self._hold(elsewhere)
        self.system.behind()

    def _hold(self, elsewhere: Tensor) -> None:
        gamma = self.system.gamma()[:, :, None]
        told = torch.where(gamma.abs() > 1e-6, self.value / gamma, 0.0)
        self.system.normal = torch.where(self.active > 0, told, elsewhere)

    def follow(self, node: fx.Node, value: Tensor) -> float:
        moved = self.system.observe(node, value)
        self._hold(self.system.normal)
        self.system.behind()
        self.system.learn(value)
        return moved

    def prepare(self, value: Tensor) -> None:
        """For one solution from this value: γ/σ, signals that are mixed as in `_gradient_equation`,
        and the part of each step in the gradient; what they lack is shared among them."""
        system = self.system
        self.slope = system.gamma() / system.sigma
        signal = system.at_layer[system.good]
        self.mix = whitening(signal.flatten(1))
        self.signal = torch.einsum("kc,cnp->knp", self.mix, signal)
        parts = system.parts(value)
        self.parts = parts + (system.observed - parts.sum(0)) / len(parts)
        mixed = torch.einsum("kc,cij->kij", self.mix, system.observed[system.good])
        self.sizes = [1 / float(v.norm().clamp_min(1e-30)) for v in (self.value, mixed)]

    def equations(self, node: fx.Node, t: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """γ/σ·(u − ū) − (1 + s)·e and Σ t ⋆ δ − G − Σ s·(part of the step in G), each by the size
        of what is known."""
        system = self.system
        wider = torch.zeros_like(self.slope)
        for step, one in zip(self.steps, share, strict=True):
            wider[:, step] = one[:, None]
        above = self.slope[:, :, None] * system.centred(node, t)
        above = above - (1 + wider)[:, :, None] * self.value
        gradient = system.observed + torch.einsum("sc,scij->cij", share, self.parts)
        gradient = torch.einsum("kc,cij->kij", self.mix, gradient[system.good])
        own = system.weight_gradient(node, t, self.signal)
        return self.sizes[0] * self.active * above, self.sizes[1] * (own - gradient)

    def squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Their normal matrix, roughly: of a channel of t by the gradients, (N·pixels)², by the
        activations, (N, pixels), and of s, (steps, outputs)."""
        system, (above, below) = self.system, (size**2 for size in self.sizes)
        gradients = below * system.normal_matrix(self.signal)
        activations = above * float(self.active.mean()) * system.energy(self.slope)
        told = [self.value[:, step].square().sum((1, 2)) for step in self.steps]
        share = above * torch.stack(told)
        parts = self.parts[:, system.good].square().sum((2, 3))
        share[:, system.good] += below * self.mix.square().sum(0) * parts
        return gradients, activations, share


class Joined:
    """The equations of the gradients and of the activations above together, with batch norms in
    train mode. Behind a layer that puts out u = W·t a known activation tells

        γ/σ·(u − ū) = e     where it is active; e is what the norm put out there, less its bias,

    so that û = e/γ there. Elsewhere û follows from each solution, as σ does. All that is so in
    every local step, at its own weights, which follow from the solutions too.
    """

    def __init__(
        self, done: Peeled, node: fx.Node, told: list[Told], skips: list[Equation]
    ) -> None:
        self.done, self.node, self.told = done, node, told
        self.skips = [(one, 1 / float(one[1].norm().clamp_min(1e-30))) for one in skips]
        self.value = done.start.maps.new_zeros(len(done.start.maps), *done.trace.shape[node])
        self.pixels = told[0].system.pixels

    def solved(self, good: dict[fx.Node, Tensor]) -> Solution:
        """The activations of the node, the residual, and what the gradients lack."""
        systems = [one.system for one in self.told]
        for system in systems:
            system.good = good[system.rows.layer]
        null = [] if self.skips else _unseen(systems, self.done)
        residual = math.inf
        for _ in range(JOINED_ROUNDS):
            before = residual
            value, residual = self._round()
            value = grounded(self._flat(value), null).reshape(value.shape)
            if not self.skips:  # its size is not told
                value = usual_size(self.done, self.node, value)
            self.value = value
            moved = max(one.follow(self.node, value) for one in self.told)
            falls = JOINED_SETTLES if residual < JOINED_SMALL else JOINED_FALLS
            if moved < NORM_SOLVED or residual > falls * before:
                break
        for system in systems:
            system.sized(self._flat(self.value))
        lacks = {system.rows.layer: system.lack(self._flat(self.value)) for system in systems}
        kept = sum(float(lacks[s.rows.layer][s.good].square().sum()) for s in systems)
        size = sum(float(s.observed[s.good].square().sum()) for s in systems)
        return self.value, max(residual, (kept / size) ** 0.5), lacks

    def _flat(self, value: Tensor) -> Tensor:
        return value.reshape(len(value), -1, self.pixels)

    def _round(self) -> tuple[Tensor, float]:
        """The activations with the present û, and with σ up to a factor per channel: by conjugate
        gradients, conditioned by the normal matrix of the gradients, which all channels share, and
        the diagonal of that of the activations."""
        shape, count = self.value.shape, self.value.numel()
        for one in self.told:
            one.prepare(self.value)
        outputs = [len(one.value) for one in self.told]
        squares = [one.squares() for one in self.told]
        normal = torch.stack([gradients for gradients, _, _ in squares]).sum(0)
        energy = torch.stack([activations for _, activations, _ in squares]).sum(0)
        for (_, target), size in self.skips:
            energy = energy + size**2 * float((target != 0).double().mean())
        normal.diagonal().add_(energy.flatten())
        normal.diagonal().add_(RIDGE * float(normal.diagonal().mean()))
        factor = torch.linalg.cholesky(normal)
        own = torch.cat([share for _, _, share in squares], 1)  # (steps, outputs of all layers)
        own = own.clamp_min(1e-12 * float(own.max()))

        def function(z: Tensor) -> Tensor:
            # Without skips all equations hold for any size of t in a step: the mean of σ stays.
            t, shares = z[:count].view(shape), z[count:].view_as(own)
            shares = shares if self.skips else shares - shares.mean(1, keepdim=True)
            found = [
                part.flatten()
                for one, share in zip(self.told, torch.split(shares, outputs, 1), strict=True)
                for part in one.equations(self.node, t, share)
            ]
            found += [size * (f(t) - target).flatten() for (f, target), size in self.skips]
            return torch.cat(found)

        def condition(z: Tensor) -> Tensor:
            t = self._flat(z[:count].view(shape)).transpose(1, 2)
            t = torch.cholesky_solve(t.reshape(len(factor), -1), factor)
            t = t.view(len(self.value), self.pixels, -1).transpose(1, 2)
            return torch.cat([t.reshape(-1), z[count:] / own.flatten()])

        begin = torch.cat([self.value.flatten(), torch.zeros_like(own).flatten()])
        wanted = torch.zeros_like(function(begin))
        found, residual = solve([(function, wanted)], begin, JOINED_STEPS, condition)
        return found[:count].view(shape), residual


def _unseen(systems: list[System], done: Peeled) -> list[Tensor]:
    """The pattern of pixels that no equation sees behind batch norms in train mode, the same in all
    records of a step, one per step: at every offset of every layer it is a constant."""
    pixels = systems[0].pixels
    square = torch.zeros(pixels, pixels, dtype=torch.float64)
    for system in systems:
        for pixel in system.seen.T:
            views = nn.functional.one_hot(pixel, pixels + 1)[:, 1:].double()
            views = views - views.mean(0)
            square += views.T @ views
    values, vectors = torch.linalg.eigh(square)
    null = vectors[:, values < 1e-9 * float(values[-1])]
    if null.shape[1] > 1:
        raise NotApplicable("its equations leave more open than a constant per step")
    found = []
    for step in done.start.steps if null.shape[1] else ():
        found.append(null.new_zeros(len(done.start.maps), pixels))
        found[-1][step] = null[:, 0]
    return [one.flatten() for one in found]
