"""A network as a graph of affine pieces between non-linearities, derived by torch.fx.

In eval mode a ReLU network is affine wherever it is not a ReLU: convolutions, linear layers, batch
norms with fixed statistics, sums, average pools. `Trace` names these pieces and evaluates any of
them from chosen values of the non-linear nodes, in double precision. With `train`, batch norms
normalise by the batch that is run, as in training: they are affine for one batch, not for another.
Group norms, in either mode, are so for one record.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leakgauge.errors import NotApplicable
from leakgauge.types import Named

Kind: TypeAlias = Literal["input", "layer", "affine", "relu", "smooth", "other"]

AFFINE_MODULES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.ZeroPad2d,
)
AFFINE_FUNCTIONS = {
    operator.add: operator.add,
    operator.iadd: operator.add,  # in place it would spoil the value of another node
    torch.add: torch.add,
    torch.flatten: torch.flatten,
    torch.mean: torch.mean,
    torch.cat: torch.cat,
    F.avg_pool2d: F.avg_pool2d,
    F.adaptive_avg_pool2d: F.adaptive_avg_pool2d,
}
AFFINE_METHODS = ("flatten", "view", "reshape", "mean", "add", "contiguous", "detach")
RESHAPING = (torch.flatten, "flatten", "view", "reshape", "detach")
PLAIN = ("size", "dim")  # methods whose value is no tensor of the data
SMOOTH: dict[Any, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    nn.Sigmoid: (torch.logit, lambda a: a * (1 - a)),
    nn.Tanh: (torch.atanh, lambda a: 1 - a * a),
}
"""Activations that can be undone: what entered and the slope there, from what left."""
RELUS = (torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_")


class Trace:
    """The graph of a model in eval mode, or with batch norms in train mode. Values are double; the
    model itself is left alone. `norms` are its nodes that normalise by what they see: batch norms
    in train mode, or, with `alone`, group norms."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], *, train: bool = False):
        try:
            copied = copy.deepcopy(model).eval()
            traced = fx.symbolic_trace(copied)
        except Exception as error:  # whatever tracing meets in the user's code
            raise NotApplicable(
                "the exact recursion follows the model's graph, and torch.fx cannot trace this "
                f"model ({type(error).__name__}: {error})"
            ) from error
        self.module = traced.double().cpu().requires_grad_(False)
        self.nodes = list(traced.graph.nodes)
        self.kind = {node: self._kind(node) for node in self.nodes}
        self.input = next(node for node in self.nodes if node.op == "placeholder")
        self.output: fx.Node = next(n for n in self.nodes if n.op == "output").args[0]
        self._own = self._owned({id(p): name for name, p in copied.named_parameters()})
        blank = torch.zeros(1, *shape, dtype=torch.float64)
        try:
            values = self.forward(blank, self.nodes)
        except Exception as error:  # whatever the user's code does in double precision
            raise NotApplicable(
                "the exact recursion runs the model in double precision, in which its forward "
                f"fails ({error}): let it take its precision from its input, as in .to(x.dtype) "
                "instead of .float()"
            ) from error
        self.shape = {
            node: value.shape[1:]
            for node, value in values.items()
            if isinstance(value, Tensor) and value.dim() > 1
        }
        batch = frozenset(n for n in self.nodes if train and self._module(n, _BatchNorm))
        for node in batch:
            self.module.get_submodule(str(node.target)).train()
        # Those that normalise by what they see: all of them a step's records together, or all each
        # record alone. Where a network has both, the latter are like any other non-linearity.
        self.alone = not batch
        self.norms = batch or frozenset(n for n in self.nodes if self._grouped(n))
        self.kind |= dict.fromkeys(self.norms, "affine")
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            below = (self.sources[n] for n in node.all_input_nodes)
            self.sources[node] = frozenset({node}) if self.bent(node) else frozenset().union(*below)

    def _grouped(self, node: fx.Node) -> bool:
        """Whether a node normalises groups of a record's channels. One channel per group would hide
        the mean of its windows; a layer norm is one group, if it sees vectors."""
        if node.op != "call_module" or node not in self.shape:
            return False
        norm = self.module.get_submodule(str(node.target))
        if isinstance(norm, nn.GroupNorm):
            return norm.num_groups < norm.num_channels
        vector = tuple(self.shape[node]) if len(self.shape[node]) == 1 else None
        return isinstance(norm, nn.LayerNorm) and norm.normalized_shape == vector

    def _kind(self, node: fx.Node) -> Kind:
        if node.op == "placeholder":
            return "input"
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            if isinstance(module, nn.Conv2d):
                plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
                return "layer" if plain else "other"
            if isinstance(module, nn.Linear):
                return "layer"
            if isinstance(module, nn.ReLU):
                return "relu"
            if type(module) in SMOOTH:
                return "smooth"
            return "affine" if isinstance(module, AFFINE_MODULES) else "other"
        if node.op in ("call_function", "call_method"):
            if node.target in RELUS:
                return "relu"
            affine = (*AFFINE_FUNCTIONS, *AFFINE_METHODS, *PLAIN)
            return "affine" if node.target in affine else "other"
        return "affine"  # the output, and constants of the model

    def _owned(self, names: dict[int, str]) -> dict[tuple[fx.Node, str], str]:
        """The parameters that one node alone uses, by node and attribute."""
        used: Counter[int] = Counter()
        for node in self.nodes:
            if node.op == "call_module":
                used.update(map(id, self.module.get_submodule(str(node.target)).parameters()))
            elif node.op == "get_attr":
                used[id(operator.attrgetter(str(node.target))(self.module))] += len(node.users)
        return {
            (node, attribute): names[id(value)]
            for node in self.nodes
            if node.op == "call_module"
            for attribute, value in self.module.get_submodule(str(node.target)).named_parameters()
            if used[id(value)] == 1
        }

    def told(self, node: fx.Node, attribute: str, gradient: Named) -> str | None:
        """The name of a parameter of a node (its "weight", its "bias") of which a gradient tells by
        itself: it is trained, no other node uses it, and a signal reached it."""
        name = self._own.get((node, attribute))
        return name if name in gradient and gradient[name].any() else None

    def parameters(self) -> Named:
        """Those that the network uses, by name."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    @contextmanager
    def holding(self, weights: Named | None) -> Iterator[None]:
        """Inside, the network has other weights: those of a later local step."""
        held = dict(self.module.named_parameters())
        changed = {name: held[name].data for name in weights or {} if name in held}
        for name in changed:
            held[name].data = (weights or {})[name].double()
        try:
            yield
        finally:
            for name, value in changed.items():
                held[name].data = value

    def moved(self, weights: Named) -> Trace:
        """The same graph with other weights."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        held = dict(other.module.named_parameters())
        for name in weights.keys() & held.keys():
            held[name].data = weights[name].double()
        return other

    def named(self, name: str) -> fx.Node:
        """The node of this name: traces of one network at different weights share their names."""
        found: fx.Node = next(node for node in self.nodes if node.name == name)
        return found

    def single(self) -> Trace:
        """The same graph in single precision, to run it fast; what batch norms in train mode see
        moves none of their running statistics."""
        light = copy.copy(self)
        light.module = copy.deepcopy(self.module).float()
        for node in () if self.alone else self.norms:
            norm: Any = light.module.get_submodule(str(node.target))
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        return light

    def bent(self, node: fx.Node) -> bool:
        """Whether a value of this node is not an affine function of others."""
        return self.kind[node] in ("input", "relu", "smooth", "other")

    def depth(self, node: fx.Node) -> int:
        """How many non-linear nodes come before one, the image included."""
        return sum(self.bent(n) for n in self.nodes[: self.nodes.index(node)])

    def layer(self, node: fx.Node) -> nn.Conv2d | nn.Linear:
        found = self.module.get_submodule(str(node.target))
        assert isinstance(found, nn.Conv2d | nn.Linear)
        return found

    def layers(self) -> list[fx.Node]:
        return [node for node in self.nodes if self.kind[node] == "layer"]

    def entered(self, node: fx.Node, value: Tensor) -> tuple[Tensor, Tensor]:
        """What entered an activation, from what left it, and where that is known (0 or 1)."""
        if self.kind[node] == "relu":
            return value, (value > 0).to(value)
        undo, _ = SMOOTH[type(self.module.get_submodule(str(node.target)))]
        return undo(value), torch.ones_like(value)

    def slope(self, node: fx.Node, value: Tensor) -> Tensor:
        """The slope of an activation, from what left it."""
        if self.kind[node] == "relu":
            return (value > 0).to(value)
        _, slope = SMOOTH[type(self.module.get_submodule(str(node.target)))]
        return slope(value)

    def only_reshaped(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether a node holds the very values of another, in whatever shape."""
        while node is not source:
            unchanged = self._module(node, nn.Flatten, nn.Identity, nn.Dropout)
            if not unchanged and node.target not in RESHAPING:
                return False
            node = node.all_input_nodes[0]
        return True

    def rectified(self, node: fx.Node) -> bool:
        """Whether a node's values are those of a ReLU, or the largest of some."""
        return self.kind[self.unpooled(node)] == "relu"

    def unpooled(self, node: fx.Node) -> fx.Node:
        """The node of whose values a max-pool takes the largest; any other node itself."""
        while self._module(node, nn.MaxPool2d) or node.target is F.max_pool2d:
            node = node.all_input_nodes[0]
        return node

    def gathered(self, node: fx.Node, signal: Tensor) -> Tensor | None:
        """The signal at the output of a max-pool, from that at its input: each window's sum, as a
        pool sends what it gets to one place. None for other nodes, and for windows that overlap."""
        if not self._module(node, nn.MaxPool2d):
            return None
        pool: Any = self.module.get_submodule(str(node.target))
        size, stride, padding, dilation = (
            (one, one) if isinstance(one, int) else tuple(one)
            for one in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        )
        if size != stride or padding != (0, 0) or dilation != (1, 1) or pool.ceil_mode:
            return None
        return F.avg_pool2d(signal, size, stride, divisor_override=1)

    def follows(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a node's value can be computed from that of another alone."""
        seen, left = {source, node}, [node]
        while left:
            one = left.pop()
            if one is self.input and one is not source:
                return False
            new = [] if one is source else [n for n in one.all_input_nodes if n not in seen]
            seen.update(new)
            left += new
        return True

    def channelwise(self, node: fx.Node) -> bool:
        """Whether a node passes each entry on by itself: batch norm, sum, identity."""
        sums = (operator.add, operator.iadd, torch.add, "add", "detach")
        modules = (nn.BatchNorm1d, nn.BatchNorm2d, nn.Identity, nn.Dropout)
        return node.target in sums or self._module(node, *modules)

    def centred(self, node: fx.Node) -> bool:
        """Whether the signals at a node sum to zero, channel by channel, over a batch: whatever it
        passes on enters a batch norm in train mode."""
        if self.alone or not node.users:
            return False
        return all(
            user in self.norms
            or ((self.channelwise(user) or user.target is torch.cat) and self.centred(user))
            for user in node.users
        )

    def norm_behind(self, layer: fx.Node) -> fx.Node | None:
        """The norm that a layer's output enters, and nothing else."""
        users = list(layer.users)
        return users[0] if len(users) == 1 and users[0] in self.norms else None

    def activation_above(self, layer: fx.Node) -> fx.Node | None:
        """The activation that a layer's output enters, entry by entry but for norms."""
        node = layer
        while len(node.users) == 1:
            (user,) = node.users
            if self.kind[user] in ("relu", "smooth"):
                return user
            if user not in self.norms and not self.channelwise(user):
                return None
            node = user
        return None

    def all_paths_meet(self, node: fx.Node) -> bool:
        """Whether everything from the image to the logits passes through this node."""
        seen, left = {self.input}, [self.input]
        while left:
            for user in left.pop().users:
                if user is not node and user not in seen:
                    seen.add(user)
                    left.append(user)
        return not any(n.op == "output" for n in seen) or node.op == "output"

    def _module(self, node: fx.Node, *kinds: type[nn.Module]) -> bool:
        return node.op == "call_module" and isinstance(
            self.module.get_submodule(str(node.target)), kinds
        )

    def apply(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """The value of a node from those of its inputs."""
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if self.kind[node] == "relu":
            return torch.relu(args[0])
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_function":
            function: Any = node.target
            return AFFINE_FUNCTIONS.get(function, function)(*args, **kwargs)
        if node.target == "detach":  # stops the client's gradient, not the reader of its graph
            return args[0]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.module)
        return args[0]  # the output

    def affine(
        self, wanted: fx.Node, values: Mapping[fx.Node, Tensor], memo: dict[fx.Node, Any]
    ) -> Any:
        """The value of a node by affine pieces from `values`, which hold its sources."""
        if wanted in values:
            return values[wanted]
        if wanted not in memo:
            below = {n: self.affine(n, values, memo) for n in wanted.all_input_nodes}
            memo[wanted] = self.apply(wanted, below)
        return memo[wanted]

    def forward(self, images: Tensor, wanted: list[fx.Node]) -> dict[fx.Node, Any]:
        """The values of these nodes for these (normalised) images."""
        values: dict[fx.Node, Any] = {}
        missing = set(wanted)
        for node in self.nodes:
            values[node] = images if node is self.input else self.apply(node, values)
            missing.discard(node)
            if not missing:
                break
        return {node: values[node] for node in wanted}
