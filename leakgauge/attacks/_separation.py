"""Reading single records out of the gradient of one layer: rank, window overlap, sparsity.

1. The layer's gradient spans the windows that it saw, and their overlap leaves the span of the
   records' maps (`_span`).
2. Behind a ReLU the maps are the sparse non-negative vectors of that span (`_rays`).
3. What they leave of the gradient are the signals. Biases, or the sums that a batch norm in train
   mode makes zero, tell their sizes and who was in a step (`_steps`); what the head can send tells
   the labels, and refuses mixtures.

*Several steps.* SGD is linear in the gradients, so an update of several steps is again L·A, with
the windows of all steps: a record appears once per pass, at the weights of that step.
docs/methods/separation.md has the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from leakgauge.attacks._alone import OwnNorm
from leakgauge.attacks._layers import gradient_sum, told
from leakgauge.attacks._linear import least_squares
from leakgauge.attacks._path import Path
from leakgauge.attacks._rays import ROUNDING, rectified, sparse_rays
from leakgauge.attacks._span import common_maps, row_space, windows
from leakgauge.attacks._steps import APPROXIMATE, AtLayer, amounts_below, together
from leakgauge.attacks._trace import Trace
from leakgauge.errors import NotApplicable
from leakgauge.fl.local import minibatches
from leakgauge.records import pictures
from leakgauge.types import LocalTraining, Named, Observation

WHO = "the exact separation"
MISFIT = 1e-2  # share by which what was found may fail to explain what it should
SLACK = 20  # times as much as the span of the maps is rough
OWN = 0.1  # variance of features between records, as a share of their squared mean
HEAD_ROUNDS = 4  # times that errors are read, at weights of the head that follow from the last
ASSIGNED = 20  # times that entries of a signal are told active or not, at most


@dataclass
class Separated:
    """What the gradient of one layer told about each record; of several passes, about each of its
    appearances."""

    layer: fx.Node
    top: fx.Node  # the node up to which signals are known: before the ReLU above, or the logits
    signal: Tensor  # ∂L/∂top, (N, …)
    source: fx.Node  # the ReLU whose output the layer sees
    maps: Tensor  # that output, (N, …)
    unsure: Tensor  # its channels in which an entry may be zero or not
    labels: Tensor
    misfit: float  # share of the layer's gradient that the records found do not explain
    rough: float  # share by which noise may have moved the maps
    steps: tuple[Tensor, ...]  # which of them were in one local step, where that is told
    path: Path  # the weights of those steps, where the update tells them
    sizes: tuple[int, ...]  # how many records each step had, whether they were told apart or not

    def once(self, records: int) -> Tensor:
        """One appearance of each record: those of the first pass, or where steps are not told apart
        those that differ most."""
        if len(self.steps) > 1 or len(self.maps) <= records:
            return torch.cat(self.steps)[:records]
        rows = torch.nn.functional.normalize(self.maps.flatten(1))
        chosen = [0]
        while len(chosen) < records:
            chosen.append(int((rows @ rows[chosen].T).max(1).values.argmin()))
        return torch.tensor(chosen)


def traced(seen: Observation) -> Trace:
    """The graph of the observed model, in the modes of the training."""
    training, _ = told(seen, WHO)
    return Trace(seen.model, seen.record.shape, train=training.batch_norm == "train")


def separable(seen: Observation, rng: torch.Generator) -> Separated:
    """A client's check before sending: what a server could read of each record in this update,
    without any search. Raises NotApplicable, with the reason, when the records cannot be told apart
    in this way."""
    gradient = gradient_of(seen)
    training, records = told(seen, WHO)
    return separate(traced(seen), gradient, records, rng, training)


def gradient_of(seen: Observation) -> Named:
    """The sum of the gradients of all local steps behind an update, in double precision."""
    training, _ = told(seen, WHO)
    pictures(seen.record)
    _refuse(seen.model, training)
    return {name: gradient_sum(seen, name).cpu() / training.lr for name in seen.update}


def _refuse(model: nn.Module, training: LocalTraining) -> None:
    refusals = {
        f"an update by {training.optimiser!r} is rescaled entry by entry": (
            training.optimiser != "sgd"
        ),
        "dropout hides part of the network": training.dropout != "off" and _has(model, _DropoutNd),
    }
    for reason, holds in refusals.items():
        if holds:
            raise NotApplicable(f"{WHO} needs plain steps of SGD, but {reason}")


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def separate(
    trace: Trace,
    gradient: Named,
    records: int,
    rng: torch.Generator,
    training: LocalTraining | None = None,
) -> Separated:
    """Every record's activations, signal and label, from the highest layer that tells them. Without
    a training, of one step on all records."""
    training = training or LocalTraining(batch_size=records)
    sizes = tuple(len(batch) for batch in minibatches(records, training))
    refusals = []
    for layer in reversed(trace.layers()):
        try:
            return _labelled(trace, read(trace, gradient, sizes, training, layer, rng))
        except NotApplicable as reason:
            refusals.append(f"{layer.target}: {reason}")
    shown = "; ".join(refusals[:3]) + ("; …" if len(refusals) > 3 else "")
    raise NotApplicable(f"no layer of this model tells its records apart. {shown}")


def _top(trace: Trace, layer: fx.Node, records: int) -> fx.Node:
    """The last node before the activation above a layer, or the logits: where all signals pass."""
    sources = trace.sources[layer.all_input_nodes[0]]
    source = next(iter(sources))
    if len(sources) > 1 or not trace.only_reshaped(source, layer.all_input_nodes[0]):
        raise NotApplicable("its input mixes what activations put out")
    if trace.kind[source] == "input":
        raise NotApplicable("its input is the image, which has no zeros to tell records by")
    if records > 1 and not trace.rectified(source):
        raise NotApplicable(
            f"its input comes from {source.target}, not from a ReLU: no zeros to tell records by"
        )
    above = trace.activation_above(layer)
    if above is None and layer is not trace.output:
        raise NotApplicable("its output is mixed before the next activation")
    top = layer if above is None else above.all_input_nodes[0]
    if not trace.all_paths_meet(top):
        raise NotApplicable("other layers pass signals around it")
    node = layer
    while node is not top:
        before, (node,) = node, node.users
        if node in trace.norms and before is not layer:
            raise NotApplicable("the norm behind it sees a sum")
    return top


def read(
    trace: Trace,
    gradient: Named,
    sizes: tuple[int, ...],
    training: LocalTraining,
    node: fx.Node,
    rng: torch.Generator,
    path: Path | None = None,
) -> Separated:
    """Every record's activations and signal from the gradient of one layer, without their labels
    and not yet told from mixtures. `path` is what is known of the weights of these steps."""
    records = sum(sizes)  # as often as each appears
    top = _top(trace, node, records)
    layer = trace.layer(node)
    (source,) = trace.sources[node.all_input_nodes[0]]
    shape, out = trace.shape[source], trace.shape[node]
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        raise NotApplicable("it is a grouped convolution")
    name = trace.told(node, "weight", gradient)
    if name is None:
        raise NotApplicable(
            "its weight is frozen, shared with other layers or reached by no signal"
        )
    matrix = gradient[name].flatten(1)
    positions = out[1:].numel()
    centred = trace.centred(node)
    basis, edge = row_space(matrix, records, positions, lost=len(sizes) if centred else 0)
    span, apart = common_maps(basis, layer, tuple(shape), records, centred=centred)
    rough = max(apart or edge, ROUNDING)
    rays = sparse_rays(span, records, rng, rough)
    if len(rays) < records:
        raise NotApplicable(f"only {len(rays)} of {records} records could be told apart")
    maps = (rays / rays.norm(dim=1, keepdim=True)).view(records, *shape)
    unsure = torch.zeros(shape[0], dtype=torch.bool)
    if trace.rectified(source):
        maps, unsure = rectified(maps, rough)
    seen = windows(maps, layer).flatten(0, 1)  # (N·positions, inputs·k²)
    signals = least_squares(seen.T, matrix.T)  # (N·positions, outputs)
    misfit = float((signals.T @ seen - matrix).norm() / matrix.norm())
    # Contiguous: for a single record, PyTorch's batch norm misreads a gradient of other strides.
    signals = signals.view(records, positions, -1).transpose(1, 2).contiguous().view(records, *out)
    slack = slack_of(sizes, rough)
    norm = trace.norm_behind(node)
    count = len(sizes) if norm is not None else 1
    if path is None or path.steps != count:
        path = Path(trace.parameters(), gradient, training, count)
    if centred:
        amounts, steps = together(signals, sizes)
        found = AtLayer(trace, gradient, node, source, maps, signals, steps, path)
        found.times(amounts)
        if len(steps) > 1:
            found.order()
        found.times(found.amounts())
        maps, steps, at_top = found.maps, found.steps, found.behind_norm()
        if len(steps) > 1:
            at_top = found.behind_norm(_sent(trace, top, at_top, steps, path))
    elif norm is not None:
        maps, at_top, steps, path = _behind_own_norm(
            trace, gradient, node, norm, top, maps, signals, sizes, path, slack
        )
    else:
        steps = (torch.arange(records),)
        at_top = signals / _scale(trace, node, top)
        amounts = _amounts(trace, gradient, node, top, at_top, signals, slack)
        maps, at_top = _times(maps, 1 / amounts), _times(at_top, amounts)
    labels = torch.full((records,), -1)
    return Separated(
        node, top, at_top, source, maps, unsure, labels, misfit, rough, steps, path, sizes
    )


def slack_of(sizes: tuple[int, ...], rough: float) -> float:
    """The share by which what was found in these steps may fail to explain what it should."""
    return APPROXIMATE if len(sizes) > 1 else max(MISFIT, min(SLACK * rough, APPROXIMATE))


def _labelled(trace: Trace, found: Separated) -> Separated:
    """What was found with the labels that the signals tell at the head; refuses mixtures."""
    slack = slack_of(found.sizes, found.rough)
    errors = _all_errors(trace, found.top, found.signal, found.steps, found.path, slack)
    labels = errors.argmin(1)
    exact = len(found.sizes) == 1
    _check(trace, found.source if exact else None, found.maps, found.top, errors, labels, slack)
    return replace(found, labels=labels)


def _all_errors(
    trace: Trace,
    top: fx.Node,
    signal: Tensor,
    steps: tuple[Tensor, ...],
    path: Path,
    slack: float,
) -> Tensor:
    """The errors at the logits of all records, at the weights that the head had in the step of
    each. In several steps these follow from the errors, which in turn follow from them."""
    errors = signal.new_zeros(len(signal), trace.shape[trace.output].numel())
    for left in reversed(range(HEAD_ROUNDS if len(steps) > 1 else 1)):
        for step, weights in zip(steps, path.weights, strict=True):
            with trace.holding(weights):
                # Of a head that is known about, signals are only about what it sends.
                errors[step] = _errors(trace, top, signal[step], math.inf if left else slack)
        if left:
            _learn_head(trace, errors, steps, path)
    return errors


def _learn_head(trace: Trace, errors: Tensor, steps: tuple[Tensor, ...], path: Path) -> None:
    """Tell the path about what each step added to the gradient of the head, Σ_n e_n f_nᵀ. Of the
    features f only the sum is known: they are taken to differ as little as they can."""
    head = trace.output
    if trace.kind[head] != "layer" or not isinstance(trace.layer(head), nn.Linear):
        return
    name = trace.told(head, "weight", path.gradient)
    if name is not None:
        whole = path.gradient[name]
        alike = OWN * torch.eye(len(errors)).to(errors) + 1  # covariance between records
        inverse = torch.linalg.pinv(errors.T @ alike @ errors, rtol=1e-9)
        features = alike @ errors @ inverse @ whole
        path.learn(name, torch.stack([errors[step].T @ features[step] for step in steps]))
    name = trace.told(head, "bias", path.gradient)
    if name is not None:
        path.learn(name, torch.stack([errors[step].sum(0) for step in steps]))


def _behind_own_norm(
    trace: Trace,
    gradient: Named,
    node: fx.Node,
    norm: fx.Node,
    top: fx.Node,
    maps: Tensor,
    signals: Tensor,
    sizes: tuple[int, ...],
    path: Path,
    slack: float,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Path]:
    """Maps, the signals at the node above the group norm that a layer's output enters, who was in
    which step, and the weights of those. The norm leaves open how large maps are, but for its ε and
    a bias before it."""
    (source,) = trace.sources[node.all_input_nodes[0]]
    at = OwnNorm(trace, gradient, node, norm, source, path)
    bias = trace.layer(node).bias
    biased = bias is not None and bool(bias.any() or trace.told(node, "bias", gradient))

    def below(rows: Sequence[tuple[Tensor, Named]]) -> Tensor:
        return amounts_below(trace, gradient, node, source, maps, signals, rows)

    if biased:
        amounts = _amounts(trace, gradient, node, node, signals, signals, slack)
    else:  # about, as the weights of their steps are not known yet
        amounts = below([(row, {}) for row in torch.arange(len(maps))[:, None]])
    maps, signals = _times(maps, 1 / amounts), _times(signals, amounts)
    steps = at.in_steps(maps, signals, sizes) if len(sizes) > 1 else None
    if steps is None:  # they are taken for one
        steps = (torch.arange(len(maps)),)
        at.path = Path(path.before, gradient, path.training, 1)
    elif not biased:
        pairs = zip(steps, path.weights, strict=True)
        amounts = below([(row, weights) for step, weights in pairs for row in step[:, None]])
        maps, signals = _times(maps, 1 / amounts), _times(signals, amounts)
    found = at.behind(maps, signals, steps)
    for step, weights in zip(steps, at.path.weights, strict=True):
        with trace.holding(weights):
            found[step] = found[step] / _scale(trace, norm, top)
    return maps, found, steps, at.path


def _times(values: Tensor, amounts: Tensor) -> Tensor:
    """Every record's values by its own amount."""
    return values * amounts.view(-1, *[1] * (values.dim() - 1))


def _scale(trace: Trace, layer: fx.Node, top: fx.Node) -> Tensor:
    """∂top/∂(layer's output): a factor a channel (batch norm), 1 without one."""
    leaf = torch.zeros(1, *trace.shape[layer], dtype=torch.float64, requires_grad=True)
    values = {layer: leaf}
    memo: dict[fx.Node, Any] = {}
    for node in trace.sources[top]:
        values[node] = torch.zeros(1, *trace.shape[node], dtype=torch.float64)
    result = trace.affine(top, values, memo)
    if result is leaf:
        return torch.ones_like(leaf).detach()
    slope = torch.autograd.grad(result.sum(), leaf)[0].clone()
    slope[slope.abs() < 1e-12] = torch.inf  # a channel that is switched off carries no signal
    return slope


def _amounts(
    trace: Trace,
    gradient: Named,
    layer: fx.Node,
    top: fx.Node,
    at_top: Tensor,
    at_layer: Tensor,
    slack: float,
) -> Tensor:
    """How much of each record's signal there is: bias gradients are sums of signals."""
    equations, values = [], []
    node = layer
    while True:
        name = trace.told(node, "bias", gradient)
        if name is not None:
            signal = at_layer if node is layer else at_top
            equations.append(signal.flatten(2).sum(2).T if signal.dim() > 2 else signal.T)
            values.append(gradient[name])
        if node is top:
            break
        (node,) = node.users
    if not equations:
        raise NotApplicable(
            "neither it nor its batch norm has a trained bias that would tell the scale"
        )
    left, right = torch.cat(equations), torch.cat(values)
    found = least_squares(left, right[:, None])[:, 0]
    misfit = float((left @ found - right).norm() / right.norm())
    if misfit > slack:
        raise NotApplicable(
            f"the records found do not explain its bias gradient (misfit {misfit:.2g})"
        )
    if len(found) > 1 and not (found > 0).all():
        raise NotApplicable("the records found explain its bias gradient only by negative shares")
    return found


def _errors(trace: Trace, top: fx.Node, signal: Tensor, slack: float) -> Tensor:
    """The errors p − e_y at the logits that the signals carry, (N, classes), up to a factor."""
    if top is trace.output:
        return signal
    (above,) = top.users
    # From the last ReLU, or the max-pool of it, on all is affine: a signal is a sum of the classes'
    # slopes, by the error.
    while not _plain(trace, above) and len(above.users) == 1:
        (pool,) = above.users
        gathered = trace.gathered(pool, signal)
        if gathered is None:
            break
        above, signal = pool, gathered
    if not _plain(trace, above):
        raise NotApplicable("labels cannot be read through another non-linearity or norm above it")
    rows = _slopes(trace, above).flatten(1)
    errors = []
    for one in signal.flatten(1):
        # What the ReLU lets through is what the head sends, the rest is zero: each entry belongs to
        # what it is nearer to.
        active = one.abs() > 1e-3 * one.abs().max()
        for _ in range(ASSIGNED):
            error = least_squares(rows[:, active].T, one[active, None])[:, 0]
            sent = error @ rows
            before, active = active, (one - sent).abs() < one.abs()
            if (active == before).all() or int(active.sum()) < len(rows):
                break
        left = torch.where(active, one - sent, one)
        if not float(left.norm() / one.norm()) < slack:
            raise NotApplicable(
                "a signal found at it is not one that its head can send (off by "
                f"{float(left.norm() / one.norm()):.1g})"
            )
        errors.append(error)
    return torch.stack(errors)


def _plain(trace: Trace, above: fx.Node) -> bool:
    """Whether the logits of a record are affine in what leaves this node, whatever it is: nothing
    bends it further up, and no norm sees it."""
    if trace.sources[trace.output] != frozenset({above}):
        return False
    left = [trace.output]
    while left:
        node = left.pop()
        if node in trace.norms:
            return False
        left.extend(node.all_input_nodes if node is not above else ())
    return True


def _slopes(trace: Trace, above: fx.Node) -> Tensor:
    """Of each logit by what left the last non-linearity: (classes, …)."""
    leaf = torch.zeros(1, *trace.shape[above], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        logits = trace.affine(trace.output, {above: leaf}, {})[0]
    return torch.cat([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in logits])


def _sent(
    trace: Trace, top: fx.Node, signal: Tensor, steps: tuple[Tensor, ...], path: Path
) -> Tensor | None:
    """What comes to the last ReLU from the head, about, if these signals are about what it lets
    through; None where another non-linearity is above."""
    above = next(iter(top.users))
    if len(top.users) > 1 or not _plain(trace, above):
        return None
    errors = _all_errors(trace, top, signal, steps, path, math.inf)
    found = torch.zeros_like(signal)
    for step, weights in zip(steps, path.weights, strict=True):
        with trace.holding(weights):
            found[step] = torch.tensordot(errors[step], _slopes(trace, above), 1)
    return found


def _check(
    trace: Trace,
    source: fx.Node | None,
    maps: Tensor,
    top: fx.Node,
    errors: Tensor,
    labels: Tensor,
    slack: float,
) -> None:
    """Refuse mixtures of records: any basis of their span explains the gradient, but only the
    records themselves also send the errors that their own activations cause. Without a source
    (their weights are not known), only errors of a softmax."""
    wrong = errors / -errors.gather(1, labels[:, None])  # −1 at the label, else p/(1 − p_y)
    if source is not None and trace.sources[top] == frozenset({source}):
        chances = trace.affine(trace.output, {source: maps}, {}).softmax(1)
        chances[torch.arange(len(chances)), labels] -= 1
        expected = chances / -chances.gather(1, labels[:, None])
        off = float((wrong - expected).norm(dim=1).max())
    else:
        others = wrong.scatter(1, labels[:, None], 0.0)
        off = max(float(-others.min()), float((others.sum(1) - 1).abs().max()))
    if not off < slack:
        raise NotApplicable(
            f"the activations found at it do not cause the errors found at it (off by {off:.1g}): "
            "they are mixtures of records"
        )
