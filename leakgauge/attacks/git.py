"""GIT — "Gradient Inversion Transcript: Leveraging Robust Generated Priors to Reconstruct Training
Data from Gradient Leakage", under review at ICLR 2026, anonymous.

A network that goes from an update to the images behind it, built like the back-propagation of the
leaked model run backwards, and fitted to pairs of public records and their updates. One step of it
estimates what a layer reads:

    exact   a_{i−1} = (Wᵀ_{i+1} δ_{i+1} ⊙ σ'(a_i))⁺ · g_i,  δ from the step before      (Eq. 3, 8)
            with W as what is fitted; fully connected layers of one record
    coarse  a_{i−1} = f(a_i, g_{i+1}, g_i), f a small network                                (Eq. 9)
            with the gradients of the layer that a skip connection joins as well        (Eq. 11, 12)
    module  the same, with the layers of a residual block or an attention as one   (Eq. 4, 5, 13–15)

It begins with the error at the logits, which is the gradient of the last bias (a head without bias
is read by f from its weight's gradient, Appendix G.5). The steps are derived from the model's graph
(`print(GIT().recursion(model, shape))`), of which no weight is read.

Needs: the number of records, public records, and a client that tells what update they cause
(`Target.query`). Differs from the paper: where Eq. 3 has no unknown it is computed and not learned
(of one record, a linear layer with a bias reads ∂b⁺·g: `known=False` learns that too); f is one
hidden layer and a linear way past it for a_i; estimates have at most `latent` numbers; what is read
is standardised; large tensors pass a sparse random projection; 300 hidden units instead of 3,000.
Of the exact recursion, the share of g_i (the bias's gradient as a column) that δ_i · [aᵀ 1] does
not explain is lowered with the error of the images: that alone hardly tells W, since of one record
any δ gives the image but for a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakgauge.attacks._learned import Course, Network, Weights, learn, recall
from leakgauge.attacks._pairs import sketched
from leakgauge.attacks._recursion import IMAGE, Recursion, Step, derived
from leakgauge.errors import NotApplicable
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Knowledge,
    Named,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Setting,
    Target,
)

PAPER = Paper(
    "git2026",
    "Authors, Anonymous",
    "Gradient Inversion Transcript: Leveraging Robust Generated Priors to Reconstruct Training Data"
    " from Gradient Leakage",
    2026,
    "Under review at the International Conference on Learning Representations",
    "https://openreview.net/",
    kind="misc",
)


@dataclass(frozen=True)
class GIT:
    """Learns to run back-propagation backwards (GIT 2026)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    steps_of: Literal["coarse", "module", "exact"] = "coarse"
    pairs: int = option(10_000, count(100_000_000))
    hidden: int = option(300, count(100_000))
    latent: int = option(1024, count(10_000_000))  # numbers of an estimate, at most
    entries: int = option(8192, count(100_000_000))  # of one tensor, at most
    steps: int = option(1500, count(100_000_000))
    batch: int = option(128, count(1_000_000))
    lr: float = 1e-3
    known: bool = True  # computes what has no unknown, instead of learning it
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records", "public"})
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        course = Course(self.pairs, self.steps, self.batch, self.lr)
        network = self.network(target.setting, target.records)
        return Preparation(learn(network, course, target, rng, resources))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        return recall(self.network(seen.setting, seen.records or 1), seen)

    def recursion(
        self, model: nn.Module, shape: tuple[int, int, int], records: int = 1
    ) -> Recursion | Chain:
        """The steps from the last layer to the image, derived from a model; print it."""
        if self.steps_of == "exact":
            return chain(model, shape)
        modules, known = self.steps_of == "module", records if self.known else 2
        return derived(model, shape, modules=modules, records=known)

    def network(self, setting: Setting, records: int) -> Network:
        """The network for the updates of this model."""
        shape = pictures(setting.record).shape
        recursion = self.recursion(setting.model, shape, records)
        if isinstance(recursion, Chain):
            return recursion.network(setting, records)
        return _Coarse(self, recursion, _entries(setting.model), records * math.prod(shape)).network


def _entries(model: nn.Module) -> dict[str, int]:
    return {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class _Coarse:
    """Small networks, one per step of a recursion."""

    options: GIT
    recursion: Recursion
    entries: dict[str, int]  # of every trained parameter
    outputs: int

    @property
    def network(self) -> Network:
        shapes: dict[str, tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        for step in self.recursion.steps:
            sizes[step.name] = size = self._size(step)
            if step.known:
                continue
            before = sum(sizes[name] for name in step.after)
            inputs = before + sum(self._width(part) for part in self._read_by[step.name])
            shapes[f"{step.name}.in.weight"] = (self.options.hidden, inputs)
            shapes[f"{step.name}.in.bias"] = (self.options.hidden,)
            shapes[f"{step.name}.out.weight"] = (size, self.options.hidden)
            if before:
                shapes[f"{step.name}.out.past"] = (size, before)
            shapes[f"{step.name}.out.bias"] = (size,)
        return Network(
            self._read, shapes, self._forward, f"{IMAGE}.out.bias", words=str(self.recursion)
        )

    def _size(self, step: Step) -> int:
        if step.name == IMAGE:
            return self.outputs
        return step.entries if step.known else min(step.entries, self.options.latent)

    @cached_property
    def _known(self) -> dict[str, Step]:
        return {step.known: step for step in self.recursion.steps if step.known}

    @cached_property
    def _read_by(self) -> dict[str, list[str]]:
        return {step.name: self._reads(step) for step in self.recursion.steps}

    def _reads(self, step: Step) -> list[str]:
        """Gradients by their parameters; but of a linear layer whose input is known the error and,
        if it is not estimated already, that input."""
        parts: list[str] = []
        for name in step.parameters:
            layer = name.rpartition(".")[0]
            told = self._known.get(layer)
            if told is None:
                parts.append(name)
            else:
                parts.append(f"{layer}.bias")
                parts += [] if told.name in step.after else [f"{layer}.input"]
        return list(dict.fromkeys(parts))

    def _width(self, part: str) -> int:
        layer, _, kind = part.rpartition(".")
        if kind == "input" and layer in self._known:
            return self._known[layer].entries
        return min(self.entries[part], self.options.entries)

    @cached_property
    def _columns(self) -> dict[str, slice]:
        """Where each part stands in what is read."""
        unread = {f"{layer}.weight" for layer in self._known}
        parts = [name for name in self.entries if name not in unread]
        parts += [f"{layer}.input" for layer in self._known]
        found, end = {}, 0
        for part in parts:
            begin, end = end, end + self._width(part)
            found[part] = slice(begin, end)
        return found

    def _read(self, update: Named) -> Tensor:
        rows = []
        for part in self._columns:
            layer, _, kind = part.rpartition(".")
            if kind == "input" and layer in self._known:
                error, weight = update[f"{layer}.bias"], update[f"{layer}.weight"]
                rows.append(error @ weight / error.square().sum().clamp_min(1e-30))  # Eq. 3
            else:
                rows.append(sketched(part, update[part].flatten(), self.options.entries))
        return torch.cat(rows)

    def _forward(self, weights: Weights, rows: Tensor) -> Tensor:
        columns = self._columns
        found: dict[str, Tensor] = {}
        for step in self.recursion.steps:
            if step.known:
                found[step.name] = rows[:, columns[f"{step.known}.input"]]
                continue
            name = step.name
            before = [found[one] for one in step.after]
            told = [rows[:, columns[part]] for part in self._read_by[step.name]]
            inner = F.linear(
                torch.cat([rows[:, :0], *before, *told], 1),
                weights[f"{name}.in.weight"],
                weights[f"{name}.in.bias"],
            ).relu()
            value = F.linear(inner, weights[f"{name}.out.weight"], weights[f"{name}.out.bias"])
            if before:
                value = value + F.linear(torch.cat(before, 1), weights[f"{name}.out.past"])
            found[name] = value
        return found[IMAGE].sigmoid()


SLOPES: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.ReLU: lambda _, a: (a > 0).to(a),
    nn.LeakyReLU: lambda m, a: torch.where(a > 0, 1.0, m.negative_slope),
    nn.Sigmoid: lambda _, a: a * (1 - a),
    nn.Tanh: lambda _, a: 1 - a * a,
}
"""σ'(z) from a = σ(z) (Table 6)."""


@dataclass(frozen=True)
class Chain:
    """Fully connected layers, first to last, each but the last with the activation behind it."""

    names: tuple[str, ...]
    widths: tuple[tuple[int, int], ...]  # (outputs, inputs) of each
    activations: tuple[nn.Module, ...]

    def __str__(self) -> str:
        last = len(self.names) - 1
        lines = [f"a{last} = δ{last + 1}⁺ · g[{self.names[-1]}],  δ{last + 1} = ∂b"]
        for k in range(last - 1, -1, -1):
            value = f"a{k}" if k else IMAGE
            lines.append(
                f"{value} = δ{k + 1}⁺ · g[{self.names[k]}],  "
                f"δ{k + 1} = W[{self.names[k + 1]}]ᵀ · δ{k + 2} ⊙ σ'(a{k + 1})"
            )
        return "\n".join(lines)

    def network(self, setting: Setting, records: int) -> Network:
        if records != 1:
            raise NotApplicable(
                "GIT's exact recursion reads the update of one record, and this one is of "
                f'{records}: use steps_of = "coarse"'
            )
        shapes = {f"{n}.weight": w for n, w in zip(self.names[1:], self.widths[1:], strict=True)}
        record = pictures(setting.record)

        def read(update: Named) -> Tensor:
            parts = [(update[f"{n}.weight"], update[f"{n}.bias"][:, None]) for n in self.names]
            return torch.cat([torch.cat(part, 1).flatten() for part in parts])

        def entering(weights: Weights, rows: Tensor) -> tuple[Tensor, Tensor]:
            # An update is a gradient times a learning rate, which drops out: both sides have it.
            return self._inverted(weights, rows / rows.norm(dim=1, keepdim=True))

        def forward(weights: Weights, rows: Tensor) -> Tensor:
            found, _ = entering(weights, rows)
            return record.leaving(found.view(-1, *record.shape)).flatten(1)

        return Network(
            read, shapes, forward, raw=True, words=str(self),
            also=lambda weights, rows: entering(weights, rows)[1],
        )  # fmt: skip

    def _inverted(self, weights: Weights, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the first layer, and the share of the gradients that is not δ · [aᵀ 1]."""
        sizes = [outputs * (inputs + 1) for outputs, inputs in self.widths]
        gradients = [
            part.view(-1, outputs, inputs + 1)  # the bias's is the last column
            for part, (outputs, inputs) in zip(
                torch.split(rows, sizes, dim=1), self.widths, strict=True
            )
        ]
        error = gradients[-1][:, :, -1]
        value, unexplained = error, rows.new_zeros(())
        for k in range(len(self.names) - 1, -1, -1):
            if k < len(self.activations):
                act = self.activations[k]
                error = error @ weights[f"{self.names[k + 1]}.weight"]  # δ = Wᵀ δ ⊙ σ'(a)
                error = error * SLOPES[type(act)](act, value)
            gradient = gradients[k]
            square = error.square().sum(1, keepdim=True).clamp_min(1e-30)
            value = torch.einsum("no,noi->ni", error, gradient)[:, :-1] / square  # Eq. 3: δ⁺ · g
            read = F.pad(value, (0, 1), value=1.0)
            missing = (gradient - error[:, :, None] * read[:, None]).square().sum((1, 2))
            whole = gradient.square().sum((1, 2)).clamp_min(1e-30)
            unexplained = unexplained + (missing / whole).mean()
        return value, unexplained


def chain(model: nn.Module, shape: tuple[int, int, int]) -> Chain:
    """The layers of a fully connected network, or why it is not one."""
    why = (
        "GIT's exact recursion is for fully connected layers with ReLU, leaky ReLU, sigmoid or tanh"
    )
    names, layers, activations = [], [], []
    for name, module in model.named_modules():
        if next(module.children(), None) is not None or isinstance(
            module, nn.Flatten | nn.Identity | nn.Dropout
        ):
            continue
        if isinstance(module, nn.Linear):
            names.append(name)
            layers.append(module)
        elif type(module) in SLOPES:
            activations.append(module)
        else:
            raise NotApplicable(f"{why}, and this model has a {type(module).__name__}")
    steps = derived(model, shape, records=2).steps  # refuses what cannot be traced
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    plain = [step.after for step in steps] == [
        (steps[k - 1].name,) if k else () for k in range(len(steps))
    ]
    if not (plain and len(steps) == len(layers) == len(activations) + 1):
        raise NotApplicable(
            f"{why}, one after the other, each but the last with one of them behind"
        )
    needed = {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    if missing := sorted(needed - trained):
        raise NotApplicable(f"{why} that are trained, and {missing[0]} is not")
    widths = tuple((layer.out_features, layer.in_features) for layer in layers)
    return Chain(tuple(names), widths, tuple(activations))
