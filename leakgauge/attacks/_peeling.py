"""Peeling a ReLU network from the top: layer after layer by least squares.

Once the activations above are known, the signal runs back through their masks (`_known`), and what
a layer sees, t, solves linear equations for the whole batch:

    Σ_n t_n ⋆ Δ_n = G     its weight gradient; Δ_n are the known signals at its output
    affine(t_n) = a_n     wherever a known ReLU output a above it is active

Where the gradients alone determine a layer, one factor solves them for all its channels
(`_channels`), elsewhere conjugate gradients do; all in double precision. Behind group norms and
batch norms in train mode their statistics are unknown too: they follow from each solution, and the
next from them (`_joined` has both kinds of equations there). A ReLU output is non-negative, so that
equations that leave it open announce themselves by negative entries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from leakgauge.attacks._alone import groups_of
from leakgauge.attacks._anew import anew
from leakgauge.attacks._channels import System, by_channel
from leakgauge.attacks._joined import joined_at
from leakgauge.attacks._known import (
    Peeled,
    Rows,
    forward_equation,
    signals_of,
    slopes_at,
    telling,
    weight_gradient,
)
from leakgauge.attacks._linear import Equation, most, solve, whitening
from leakgauge.attacks._rays import rectified
from leakgauge.attacks._separation import Separated
from leakgauge.attacks._span import windows
from leakgauge.attacks._steps import biases
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.types import Named, Resources

NEGATIVE = 1e-3  # a peeled ReLU output may be negative by this share of its largest entry
RESIDUAL = 1e-4  # and its equations unsatisfied by this share
STEPPED = 3e-3  # both for several steps by gradients alone: all but the first had other weights
ROUGH = 0.03  # both for noise, at the most
NOISE = 3  # times the roughness of the separated maps that equations may be unsatisfied by
SPARE = 1.02  # times as many equations as unknowns that solve a layer by its gradients alone
SPARE_FORWARD = 1.5  # where the activations above could give more equations
ANCHORED = 0.1  # share by which signals may fail to add up to a bias's gradient
SILENT = 1e-4  # a pool's entries below this share of the largest are zeros: it has few to judge by
ANCHORINGS = 2  # times that the size is set: the ε of batch norms bends the first
ROUNDING = 3e-5  # a residual below this is float32's
GROUPED = 1e-2  # or, behind group norms, one wrong entry's
NOTICED = 1e-4  # and what a row lacks is so below this share of it
LEFT_OUT = 0.25  # share of rows that may be; behind group norms half, if equations abound
ROUNDS = 4  # times that rows which do not fit are left out; entries put right in one row
EXPLAINED = 0.2  # share of what a row lacks that may stay: batch norm spreads a wrong entry so far
AGAIN = 6  # times that a node is solved anew with entries put right
TRIES = 8  # such times where one factor solves a layer for all channels
SMALL = 1e-3  # entries above this share of the largest are not switched off


class Watch:
    """Progress and time of one reconstruction: it hears of every step with its misfit, and says
    whether there is time for another."""

    def __init__(self, resources: Resources, total: int):
        self._resources, self._total, self._done = resources, total, 0
        self._began = time.monotonic()
        self.notes: list[str] = []

    def __call__(self, misfit: float) -> None:
        self._done += 1
        if self._resources.progress:
            self._resources.progress(min(self._done, self._total), self._total, misfit)

    def open(self) -> bool:
        seconds = self._resources.seconds
        if seconds is None or time.monotonic() - self._began < seconds:
            return True
        self.notes = [f"stopped by the time budget of {seconds:g} s"]
        return False


def peel(
    trace: Trace,
    gradient: Named,
    start: Separated,
    watch: Watch,
    reach: str = "",
    rng: torch.Generator | None = None,
    enough: float = math.inf,
    *,
    brief: bool = False,
) -> Peeled:
    """Solve for one non-linear node after another, from the separated layer down to the image. What
    comes next is worth nothing without the node `reach`: that one is solved for if the time is up,
    too. Where no equations lead further, a layer below may tell the records apart by itself; not
    without an `rng`. Once a node with `enough` values of a record is known, the activations above
    are not joined with the gradients, which costs more than all the rest; a `brief` peeling behind
    norms ends there."""
    known, unsure = {start.source: start.maps}, {start.source: start.unsure}
    done = Peeled(trace, gradient, start, known, unsure, enough=enough, brief=brief)
    if len(trace.unpooled(start.source).users) > 1:  # the separation leaves its size open
        _hold(done, start.source, start.maps)
    _down(done, watch, reach)
    while done.stopped and rng is not None and _on(done, watch, reach):
        try:
            again = anew(done, rng)
        except NotApplicable as reason:
            done.stopped += f"; {reason}"
            break
        watch(again.misfit)
        done.again.append(again.layer)
        done.start, done.stopped = again, ""
        done.known[again.source], done.unsure[again.source] = again.maps, again.unsure
        _down(done, watch, reach)
    return done


def _hold(done: Peeled, node: fx.Node, value: Tensor) -> None:
    """Take this value for that of the node, in the size that the bias below tells."""
    done.known[node] = value
    for _ in range(ANCHORINGS if done.trace.norms else 0):
        done.known[node] = _anchored(done, node, done.known[node])


def _on(done: Peeled, watch: Watch, reach: str) -> bool:
    """Whether to go on: there is time, or what must be reached is not."""
    wanted = bool(reach) and all(one.name != reach for one in done.known)
    return not _ended(done) and (wanted or watch.open())


def _ended(done: Peeled) -> bool:
    """Whether a brief peeling has what it is for."""
    return done.brief and bool(done.trace.norms) and done.suffices


def _down(done: Peeled, watch: Watch, reach: str) -> None:
    """Solve for one node after another, from the layer separated last."""
    trace = done.trace
    for node in reversed(trace.nodes[: trace.nodes.index(done.start.source)]):
        if not trace.bent(node):
            continue
        if not _on(done, watch, reach):
            why = "enough was known" if _ended(done) else "the time was up"
            done.stopped = f"{node.name}, as {why}"
            break
        try:
            found = _solved(done, node)
        except NotApplicable as reason:
            done.stopped = f"{node.name}: {reason}"
            break
        if found is None:
            done.stopped = f"{node.name}: no layer with a known signal looks at it"
            break
        value, residual, negative, joined = found
        watch(residual)
        residual_limit, negative_limit = _limits(done.start, joined)
        if residual > residual_limit or negative > negative_limit:
            done.stopped = (
                f"{node.name}, which its equations leave open (residual {residual:.1e}, negative "
                f"by {negative:.1e} of its largest entry)"
            )
            break
        if trace.rectified(node):
            value, done.unsure[node] = rectified(value, done.start.rough)
        _hold(done, node, value)


def _limits(start: Separated, joined: bool) -> tuple[float, float]:
    """By how much the equations of a node may be unsatisfied, and a ReLU's output negative. Noise
    in the update is in its equations too."""
    least = min(NOISE * start.rough, ROUGH)
    if len(start.steps) > 1 and not joined:
        least = max(least, STEPPED)
    return max(RESIDUAL, least), max(NEGATIVE, least)


def _solved(
    done: Peeled, node: fx.Node, again: int = AGAIN, before: Sequence[System] = ()
) -> tuple[Tensor, float, float, bool] | None:
    """The activations of `node`, the residual of their equations, by how much a ReLU's are negative
    and whether equations were joined behind batch norms; None if there are no equations.

    Rounding hides which of the smallest activations above are zero. One wrong mask spoils the
    signal of its channel, and so one row of a weight gradient: rows that are unsure or do not fit
    are left out, and what is then found tells which entries were wrong. They are put right. Behind
    a group norm the other rows of the group are spoilt a little too: the node is solved `again`,
    from the statistics found `before`.
    """
    trace = done.trace
    every = signals_of(done, node)
    forward = [] if trace.norms else [forward_equation(done, node, a) for a in telling(done, node)]
    if not every and not forward:
        return None
    counted = _counted(done, node, every)
    joined = None if done.suffices else joined_at(done, node, every, counted)
    direct = counted is not None and counted > (SPARE_FORWARD if forward or joined else SPARE)
    if direct and trace.norms:
        counted = _fewest(done, node, every)
        direct = counted > SPARE
    if trace.norms and not direct and not joined:
        if counted is None or not every:
            return None
        also = "" if done.suffices else ", also with what the activations above tell"
        raise NotApplicable(
            f"its gradients give {counted:.2f} equations for each of its unknowns, too few{also}"
        )
    if counted is not None and counted < 1 and not forward and not joined:
        raise NotApplicable(
            f"its gradients give {counted:.2f} equations for each of its unknowns, and no known "
            "activation looks at it alone"
        )
    grouped = bool(trace.norms) and trace.alone
    most = max(LEFT_OUT, min(0.5, 1 - 2 / counted)) if grouped and counted else LEFT_OUT
    spoilt = {}
    for rows in every:
        above = trace.activation_above(rows.layer)
        none = torch.zeros(rows.signal.shape[1], dtype=torch.bool)
        unsure = done.unsure.get(above, none) if above else none
        spoilt[rows.layer] = unsure if float(unsure.double().mean()) < most else none
    systems = [System(done, node, rows) for rows in every] if direct else []
    for system, last in zip(systems, before, strict=False):
        system.begin(last)
    value = done.start.maps.new_zeros(len(done.start.maps), *trace.shape[node])
    residual = math.inf
    left: dict[fx.Node, Tensor] = {}
    for _ in range((2 if grouped and again else TRIES) if direct else ROUNDS):
        good = {layer: ~rows for layer, rows in spoilt.items()}
        if direct:
            value, residual, left = by_channel(done, node, systems, good)
        elif joined:
            value, residual, left = joined.solved(good)
        else:
            equations = forward + [
                _gradient_equation(done, node, r.layer, r.signal, good[r.layer]) for r in every
            ]
            value, residual = solve(equations, value)
            left = {r.layer: _misfit(done, node, r.layer, r.signal, value) for r in every}
        count = sum(int(rows.sum()) for rows in spoilt.values())
        for layer, lack in left.items():
            out = _stands_out(lack, good[layer])
            if residual < ROUNDING:  # a row of small signals can be wrong and hardly be seen in it
                out &= _share(lack, done.observed(layer)) > NOTICED
            more = spoilt[layer] | out
            if float(more.double().mean()) < most:
                spoilt[layer] = more
            elif not grouped:  # one wrong entry does not make so many stand out
                spoilt[layer] = torch.zeros_like(more)
        if sum(int(rows.sum()) for rows in spoilt.values()) == count:
            break
    negative = float(-value.min() / value.max()) if trace.rectified(node) else 0.0
    usual = max(GROUPED if grouped else ROUNDING, done.start.rough)
    if residual < usual and (grouped or negative < NEGATIVE):
        switched = [
            _correct(done, node, layer, value, lack, spoilt[layer])
            for layer, lack in left.items()
            if spoilt[layer].any()
        ]
        if grouped and again and any(switched):
            return _solved(done, node, again - 1, systems)
    return value, residual, negative, joined is not None and not direct


def _anchored(done: Peeled, node: fx.Node, value: Tensor) -> Tensor:
    """The value in the size, step by step or record by record, with which the signals below it add
    up to the gradient of the bias there. Norms pass signals on by the inverse of that size, skips
    by themselves.
    It stays as it is where no bias tells, or no ReLU. A max-pool sends each signal to one place, so
    that below it their sum is that of its own signals, where it is not zero."""
    trace, relu = done.trace, done.trace.unpooled(node)
    names = biases(trace, done.gradient, relu)
    if not names or not trace.rectified(node) or (relu is not node and len(relu.users) > 1):
        return value
    below = node if relu is not node else node.all_input_nodes[0]
    own, normed = [], []
    for step, weights in done.steps:
        sums = []
        for size in (1.0, 0.5):
            done.known[node] = value * size
            with trace.holding(weights):
                slope = slopes_at(done, node, step, {below: below})[below]
            if below is node:
                slope = slope * (value[step] > SILENT * value.max())
            each = slope.flatten(2).sum(2) if slope.dim() > 2 else slope  # (N, channels)
            sums.append(each.T if trace.alone else each.sum(0)[:, None])
        own.append(2 * sums[0] - sums[1])
        normed.append(sums[1] - sums[0])
    left, sure = torch.cat(normed, 1), ~done.unsure[node]
    if sure.sum() < 2 * left.shape[1]:
        sure = torch.ones_like(sure)
    value = value.clone()
    for name in names:
        right = done.gradient[name] - torch.cat(own, 1).sum(1)
        found, misfit = most(left[sure], right[sure])
        if misfit < ANCHORED and (found > 0.5).all() and (found < 2).all():
            for part, amount in zip(done.sized, found.tolist(), strict=True):
                value[part] /= amount
            break
    return value


def _counted(done: Peeled, node: fx.Node, every: list[Rows]) -> float | None:
    """How many equations the weight gradients alone give for each unknown of a channel; None where
    channels cannot be solved one by one. A channel of the layer's input has its own equations:
    each row of a gradient is the sum of the windows in it, by the signals of that row."""
    trace = done.trace
    pixels = trace.shape[node][1:].numel()
    count = 0
    for rows in every:
        layer = trace.layer(rows.layer)
        if not trace.only_reshaped(node, rows.layer.all_input_nodes[0]):
            return None
        if isinstance(layer, nn.Linear):
            pixels = 1
            count += layer.out_features
        else:
            if layer.groups > 1:
                return None
            count += layer.out_channels * math.prod(layer.kernel_size)
    return count / (len(done.start.maps) * pixels)


def _fewest(done: Peeled, node: fx.Node, every: list[Rows]) -> float:
    """The least of these counts over groups of pixels that the same offsets of the kernels see:
    behind a stride some pixels are seen by fewer offsets than others."""
    seen, outputs = [], []
    for rows in every:
        system = System(done, node, rows)
        offsets = system.seen.T  # the pixels of each, numbered from one; zero is the padding
        seen += [torch.bincount(o, minlength=system.pixels + 1)[1:] > 0 for o in offsets]
        outputs += [rows.signal.shape[1]] * len(offsets)
    groups, sizes = np.unique(torch.stack(seen, 1).numpy(), axis=0, return_counts=True)
    return float((groups @ np.array(outputs) / sizes).min()) / len(done.start.maps)


def _stands_out(lack: Tensor, good: Tensor) -> Tensor:
    """The rows that lack far more than others do, of those that were not left out. With few
    equations to spare the others take up most of what a wrong one lacks, so that it may stand out
    by little: then it is at least the worst."""
    size = lack.flatten(1).norm(dim=1).where(good, 0.0)
    usual, most = float(size[good].median()), float(size.max())
    found: Tensor = size > min(max(10 * usual, 0.1 * most), max(3 * usual, 0.5 * most))
    return found


def _share(lack: Tensor, whole: Tensor) -> Tensor:
    """What each row lacks, as a share of it."""
    found: Tensor = lack.flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1).clamp_min(1e-30)
    return found


def _correct(
    done: Peeled, node: fx.Node, layer: fx.Node, value: Tensor, lack: Tensor, spoilt: Tensor
) -> bool:
    """Switch the entries of the ReLU above a layer whose windows are what its rows lack. The rows
    are looked at again with every entry switched, as the weights of later steps follow from them
    too; a row that is not explained in the end was spoilt by something else, and stays as it was.
    Behind a group norm an entry spoils all rows of its group, and its own most: that is switched.
    Tells whether any entry was.
    """
    trace, known = done.trace, done.known
    above = trace.activation_above(layer)
    if above is None or above not in known or trace.kind[above] != "relu":
        return False
    views = windows(done.entering(layer, node, value), trace.layer(layer))
    if trace.norm_behind(layer) is not None and not trace.alone:
        views = views.clone()
        for step, _ in done.steps:
            views[step] -= views[step].mean((0, 1))
    views = views.flatten(0, 1)  # (N·positions, inputs·k²)
    sizes = views.norm(dim=1).clamp_min(1e-30)
    was, begun, most = known[above], lack.flatten(1), float(known[above].max())
    limits = (EXPLAINED * begun.norm(dim=1)).maximum(
        NOTICED * done.observed(layer).flatten(1).norm(dim=1)
    )
    norm = trace.norm_behind(layer)
    groups = groups_of(trace.module.get_submodule(str(norm.target))) if norm is not None else 0
    each = len(begun) // groups if groups else 1  # rows that an entry spoils
    rows, left = spoilt.nonzero().flatten().tolist(), begun
    for _ in range(ROUNDS):
        rows = [row for row in rows if left[row].norm() > limits[row]]
        if not rows:
            break
        known[above] = known[above].clone()
        for row in {
            row // each: row for row in sorted(rows, key=lambda r: left[r].norm())
        }.values():
            entries = known[above][:, row]
            small = (was[:, row] < SMALL * most).flatten()  # a larger one is no zero
            best = int((views @ left[row] / sizes * small).abs().argmax())
            entry = torch.unravel_index(torch.tensor(best), entries.shape)
            entries[entry] = 0.0 if entries[entry] > 0 else 1e-9 * most
        left = _lacking(done, node, layer, value, ~spoilt).flatten(1)
    for row in rows:
        if left[row].norm() > limits[row]:
            known[above][:, row] = was[:, row]
    _lacking(done, node, layer, value, ~spoilt)  # the path is that of the masks as they are now
    return not torch.equal(known[above] > 0, was > 0)


def _lacking(done: Peeled, node: fx.Node, at: fx.Node, value: Tensor, good: Tensor) -> Tensor:
    """What a layer's weight gradient lacks with the masks that are known now, when `node` has this
    value; the path learns the parts of each step in it."""
    rows = next(rows for rows in signals_of(done, node) if rows.layer is at)
    if rows.norm is None:
        return _misfit(done, node, at, rows.signal, value)
    system = System(done, node, rows)
    system.good = good
    for _ in range(done.start.path.steps):  # a step's weights follow from the parts before it
        system.follow(node, value)
    flat = value.reshape(len(value), -1, system.pixels)
    system.sized(flat)
    return system.lack(flat)


def _misfit(done: Peeled, node: fx.Node, at: fx.Node, signal: Tensor, value: Tensor) -> Tensor:
    """What a layer's weight gradient lacks when `node` has this value."""
    seen = done.entering(at, node, value)
    return done.observed(at) - weight_gradient(done.trace.layer(at), seen, signal)


def _gradient_equation(
    done: Peeled, node: fx.Node, at: fx.Node, signal: Tensor, rows: Tensor
) -> Equation:
    layer, target = done.trace.layer(at), done.observed(at)
    if not isinstance(layer, nn.Conv2d) or layer.groups == 1:
        # Outputs are mixed so that every combination of signals counts alike: far fewer iterations.
        # Weak ones, which rounding drowns, count less.
        target, signal = target[rows], signal[:, rows]
        flat = signal.flatten(2).transpose(0, 1).flatten(1) if signal.dim() > 2 else signal.T
        mix = whitening(flat)
        target = torch.einsum("kc,c...->k...", mix, target)
        signal = torch.einsum("kc,nc...->nk...", mix, signal)

    return lambda value: weight_gradient(layer, done.entering(at, node, value), signal), target
