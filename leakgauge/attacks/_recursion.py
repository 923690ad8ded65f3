"""The order in which a model's back-propagation can be run backwards, derived by torch.fx.

A *layer* is a module with a matrix or kernel (linear, convolution, attention); what it reads is
what the recursion estimates, from the last layer to the image. One step estimates the input of a
layer from

- the gradients of that layer, and of what lies between it and the next ones (norms, positions);
- the inputs of the layers behind it, estimated before, and the gradients of those layers;
- where a skip connection joins the output of the layer with that of a later one, the gradients of
  the later one: they tell the error at the sum (GIT, Eq. 11 and 12).

No weight is read: a model on PyTorch's `meta` device, which has no values, does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from leakgauge.errors import NotApplicable
from leakgauge.fl.model import stripped

IMAGE = "x"
ENTERING = "x~"  # what a linear layer that reads the image tells of it
NEAREST = 2  # layers behind one that a step looks at: the nearest

PRODUCTS = (F.linear, F.conv1d, F.conv2d, torch.matmul, operator.matmul, "matmul")
SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")


@dataclass(frozen=True)
class Step:
    """Estimates `name`, of `entries` numbers, from the estimates `after` and the gradients of these
    parameters. `known` names a linear layer whose bias's gradient tells it without estimate."""

    name: str
    entries: int
    after: tuple[str, ...]
    parameters: tuple[str, ...]  # of layers that read it, what follows, the next, and those joined
    known: str | None = None

    def __str__(self) -> str:
        if self.known:
            return f"{self.name} ({self.entries:,}) = ∂b⁺ · g[{self.known}]"
        told = [*self.after, *(f"g[{layer}]" for layer in _layers(self.parameters))]
        return f"{self.name} ({self.entries:,}) = f({', '.join(told)})"


@dataclass(frozen=True)
class Recursion:
    """Steps from the last layer to the image, which is estimated last."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def derived(
    model: nn.Module, shape: tuple[int, ...], *, modules: bool = False, records: int = 1
) -> Recursion:
    """The recursion of a model for records of this shape. With `modules`, layers of one module
    (a residual block, an attention) count as one."""
    graph = _Graph(model, shape, modules)
    steps = [
        step for name, readers in graph.stations() for step in graph.steps(name, readers, records)
    ]
    return Recursion(tuple(steps))


def _layers(parameters: Iterable[str]) -> list[str]:
    """The modules of parameters, in their order."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


class _Graph:
    def __init__(self, model: nn.Module, shape: tuple[int, ...], modules: bool):
        self.model = stripped(model).eval()
        try:
            traced = fx.symbolic_trace(self.model)
            self.shape = _shapes(traced, shape)
        except Exception as error:  # whatever tracing meets in the user's code
            raise NotApplicable(
                "GIT follows the model's graph, and torch.fx cannot trace this model "
                f"({type(error).__name__}: {error}); LTI needs no graph"
            ) from error
        self.nodes = list(traced.graph.nodes)
        self.place = {node: k for k, node in enumerate(self.nodes)}
        self.trained = {n for n, p in model.named_parameters() if p.requires_grad}
        self.layers = [node for node in self.nodes if self._is_layer(node)]
        if not self.layers:
            raise NotApplicable(
                "GIT goes back from layer to layer, and found no linear or convolutional layer in "
                "this model; LTI needs none"
            )
        self.upstream: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            before = [self.upstream[n] | ({n} & set(self.layers)) for n in node.all_input_nodes]
            some = self.shape[node] is not None  # else it is a size, which tells nothing of values
            self.upstream[node] = frozenset().union(*before) if some else frozenset()
        self.inner: set[fx.Node] = set()
        if modules:
            self.inner = {node for node in self.layers if self._within(node)}

    def stations(self) -> list[tuple[str, list[fx.Node]]]:
        """What the recursion estimates, last first, each with the layers that read it."""
        found: dict[str, list[fx.Node]] = {}
        for layer in self.layers:
            if layer not in self.inner:
                found.setdefault(self._station(layer), []).append(layer)
        return sorted(found.items(), key=lambda item: -self.place[item[1][0]])

    def steps(self, name: str, readers: list[fx.Node], records: int) -> list[Step]:
        """The step that estimates this. Of one record, what a linear layer reads is known from its
        own gradients; what is known of the image itself is learned on."""
        own, after, behind, joined = list[str](), list[fx.Node](), list[str](), list[str]()
        for reader in readers:
            own += self._parameters(reader)
        for reader in readers:
            region = self._region(reader)
            own += region.passed
            after += region.layers
            joined += region.joined
        nearest = sorted(dict.fromkeys(after), key=lambda node: self.place[node])
        names = list(dict.fromkeys(map(self._station, nearest)))[:NEAREST]
        for layer in nearest:
            if self._station(layer) in names:
                behind += self._parameters(layer)
        source = readers[0].all_input_nodes[0]
        entries = math.prod(self.shape[source] or ())
        told = tuple(dict.fromkeys((*own, *behind, *joined)))
        known = self._known(readers, source) if records == 1 else None
        if known is None:
            return [Step(name, entries, tuple(names), told)]
        if name != IMAGE:
            return [Step(name, entries, (), told, known)]
        first = Step(ENTERING, entries, (), told, known)
        return [first, Step(name, entries, (ENTERING, *names), told)]

    def _station(self, layer: fx.Node) -> str:
        """What a layer reads: the image, if no other layer comes before it."""
        source = layer.all_input_nodes[0]
        return source.name if self.upstream[layer] else IMAGE

    def _region(self, layer: fx.Node) -> _Region:
        """What the output of a layer meets on its ways, each up to the next layer."""
        found, seen, left = _Region([], [], []), {layer}, [layer]
        while left:
            node = left.pop(0)
            for user in node.users:
                if user in seen:
                    continue
                seen.add(user)
                if user in self.layers and user not in self.inner:
                    found.layers.append(user)
                    continue
                found.passed.extend(self._parameters(user))
                later = self._joined(user, node, layer)
                if later:
                    found.joined.extend(p for one in later for p in self._parameters(one))
                else:
                    left.append(user)
        return found

    def _joined(self, node: fx.Node, came: fx.Node, layer: fx.Node) -> list[fx.Node]:
        """At a sum: the layers whose outputs a skip connection from this layer meets there."""
        if node.target not in SUMS and node.target is not torch.cat:
            return []
        found = []
        for other in node.all_input_nodes:
            if other is not came and layer in self.upstream[other]:
                found += self._producers(other)
        return found

    def _producers(self, node: fx.Node) -> list[fx.Node]:
        """The nearest layers that a value comes from."""
        found, left = [], [node]
        while left:
            one = left.pop()
            if one in self.layers:
                found.append(one)
            else:
                left.extend(one.all_input_nodes)
        return list(dict.fromkeys(found))

    def _within(self, layer: fx.Node) -> bool:
        """Whether all that a layer reads comes from layers of its own module."""
        producers = self._producers(layer.all_input_nodes[0])
        own = self._module_of(layer)
        return bool(own and producers) and all(self._module_of(p) == own for p in producers)

    def _module_of(self, layer: fx.Node) -> str:
        """The module that a layer is part of, containers aside; "" for the model itself."""
        name = str(layer.target).rpartition(".")[0] if layer.op == "call_module" else ""
        containers = (nn.Sequential, nn.ModuleList)
        while name and isinstance(self.model.get_submodule(name), containers):
            name = name.rpartition(".")[0]
        return name

    def _known(self, readers: list[fx.Node], source: fx.Node) -> str | None:
        """A linear layer with a trained bias that reads one vector: g = ∂b · aᵀ tells a."""
        for reader in readers:
            name = str(reader.target)
            trained = {f"{name}.weight", f"{name}.bias"} <= self.trained
            if reader.op == "call_module" and trained and len(self.shape[source] or ()) == 1:
                return name if isinstance(self.model.get_submodule(name), nn.Linear) else None
        return None

    def _is_layer(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            parameters = self.model.get_submodule(str(node.target)).parameters()
            return any(p.dim() > 1 for p in parameters)
        if node.op in ("call_function", "call_method") and node.target in PRODUCTS:
            return any(n.op == "get_attr" for n in node.all_input_nodes)
        return False

    def _parameters(self, node: fx.Node) -> list[str]:
        """The trained parameters that a node uses itself."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            names = [f"{node.target}.{name}" for name, _ in module.named_parameters()]
        else:
            names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        return [name for name in names if name in self.trained]


@dataclass(frozen=True)
class _Region:
    layers: list[fx.Node]
    passed: list[str]
    joined: list[str]


def _shapes(
    traced: fx.GraphModule, shape: tuple[int, ...]
) -> dict[fx.Node, tuple[int, ...] | None]:
    """The shape of each value but for the batch, told without computing it; empty for several
    tensors, None for what is no tensor."""
    found: dict[fx.Node, tuple[int, ...] | None] = {}

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            several = isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)
            found[n] = tuple(value.shape[1:]) if isinstance(value, Tensor) else None
            if several:
                found[n] = ()
            return value

    Shapes(traced).run(torch.empty(1, *shape, device="meta"))
    return found
