"""Fishing — Y. Wen, J. Geiping, L. Fowl, M. Goldblum, T. Goldstein: "Fishing for User Data in
Large-Batch Federated Learning via Gradient Magnification", ICML 2022,
https://arxiv.org/abs/2202.00580

Only the last layer is changed, so that the loss of all records but one has no gradient in front of
it: the averaged update is then that one record's.

by="class"    the rows of all classes but c are zero and their biases β are large. The error
              reaches the network as W^T(p − y) = w_c·(p_c − y_c), and p_c ≈ 0: only records of
              class c, with y_c = 1, pass one on
by="feature"  for records of one class: class c scores −γ·(f_k − θ), all others 0. A record with
              feature f_k below θ is sure to be c and passes nothing on; θ is the quantile over
              public images above which one record is expected

The row of c in the update holds that record's features exactly: f = (∂L/∂w_c) / (∂L/∂b_c). Its
pixels follow by the same division where a linear layer reads the image, and need an optimisation
attack on the isolated update elsewhere (`iterations`).

Needs: the local training and the number of records; public labelled images for by="feature".
Differs from the paper: one round, so θ is not narrowed down over rounds; the record with the
*highest* feature is fished, as behind a ReLU many share the lowest value, zero. `camouflage` fills
the other rows: all alike, plus noise, since equal rows cancel in W^T(p − y) as zero rows do.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from leakgauge.attacks._layers import first_linear, gradient_sum, last_linear, rehearsing, watch
from leakgauge.attacks.active._imprint import knowledge, public_images, read
from leakgauge.attacks.analytic import unexplained
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl.local import minibatches, ready
from leakgauge.papers import Paper
from leakgauge.ranges import FINITE, FROM_0, POSITIVE, count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Kept,
    Knowledge,
    LocalTraining,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

PAPER = Paper(
    "wen2022",
    "Wen, Yuxin and Geiping, Jonas and Fowl, Liam and Goldblum, Micah and Goldstein, Tom",
    "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification",
    2022,
    "International Conference on Machine Learning",
    "https://arxiv.org/abs/2202.00580",
)


@dataclass(frozen=True)
class Fishing:
    """One record's gradient drowns all others (Wen 2022)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    by: Literal["class", "feature"] = "class"
    label: int = option(0, count(1_000_000, 0))  # the class c
    bias: float = option(1000.0, FROM_0)  # β
    row: float | None = option(None, FINITE)  # every entry of w_c; None: as it is
    camouflage: float | None = option(None, FROM_0)  # relative noise on the other rows; None: zeros
    gain: float = option(100.0, POSITIVE)  # γ times the feature's standard deviation
    iterations: int = option(0, count(10_000_000, 0))  # of IG, where division gives no pixels
    restarts: ClassVar[int] = 1
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def shortened(self, iterations: int, restarts: int) -> Fishing:
        return replace(self, iterations=iterations)

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        if not 0 <= self.label < target.task.count:
            raise InputError(
                f"label is {self.label}; expected a class from 0 to {target.task.count - 1}"
            )
        model = copy.deepcopy(target.model)
        layer = last_linear(model, pictures(target.record).shape)
        if layer.weight is None or layer.bias is None:
            raise NotApplicable(
                "fishing changes and reads the weight and the bias of the last layer, and in "
                f"{layer.module!r} one of them is missing, frozen or shared with other layers"
            )
        weight, bias = model.get_parameter(layer.weight), model.get_parameter(layer.bias)
        with torch.no_grad():
            if self.by == "class":
                self._class(weight, bias, rng)
            else:
                unit, threshold, spread = _feature(model, layer.module, target, self.label)
                weight.zero_()
                bias.zero_()
                weight[self.label, unit] = -self.gain / spread
                bias[self.label] = self.gain / spread * threshold
        found = {"weight": layer.weight, "bias": layer.bias, "label": self.label}
        return Preparation(Kept(facts=found), (model,))

    def _class(self, weight: Tensor, bias: Tensor, rng: torch.Generator) -> None:
        kept = weight[self.label].clone() if self.row is None else self.row
        others = torch.arange(len(weight)) != self.label
        common = weight[others].mean(0)
        size = weight[others].square().mean().sqrt()
        weight.zero_()
        if self.camouflage is not None:
            noise = torch.randn(weight.shape, generator=rng)
            weight.add_(common + self.camouflage * size * noise)
        weight[self.label] = kept
        if not weight[self.label].any():
            raise NotApplicable(
                f"the row of class {self.label} in the last layer is zero, and would pass no error "
                "on: set row, for example row = 0.5"
            )
        bias.fill_(self.bias)
        bias[self.label] = 0.0

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        kept, training, records = knowledge(seen, "fishing")
        layers, label = kept.facts, kept.facts["label"]
        row, error = (gradient_sum(seen, layers[part])[label] for part in ("weight", "bias"))
        fished = _fished(float(error), records, training)
        if not error.abs() > 0:
            return _nothing(seen, "no record was caught: none passed an error on", {"fished": 0.0})
        facts = {"label": label, "fished": fished, "features": (row / error).float()}
        wanted = min(records, max(1, round(fished)))
        try:
            layer = first_linear(seen.model, seen.record.shape)
        except NotApplicable:
            return self._optimised(seen, facts, rng, resources)
        assert layer.weight is not None
        assert layer.bias is not None
        weight, bias = gradient_sum(seen, layer.weight), gradient_sum(seen, layer.bias)
        if layer.weight == layers["weight"]:  # a single layer: the other rows hold other records
            weight, bias = weight[label, None], bias[label, None]
        images, quotients, _ = read(weight, bias, seen.record, raw=False, records=wanted)
        return Reconstruction(
            inputs=images,
            labels=torch.full((len(images),), label),
            residual=unexplained(weight, quotients),
            facts=facts,
        )

    def _optimised(
        self,
        seen: Observation,
        facts: dict[str, Any],
        rng: torch.Generator,
        resources: Resources | None,
    ) -> Reconstruction:
        """The fished record by an optimisation attack on its update, if iterations are given."""
        assert seen.training is not None
        assert seen.kept is not None
        if not self.iterations:
            return _nothing(
                seen,
                "no linear layer of this model reads the image: the features of the fished record "
                "are known exactly, its pixels take an optimisation attack on the isolated update "
                "(set iterations)",
                facts,
            )
        # They hold the other records too.
        last = {seen.kept.facts["weight"], seen.kept.facts["bias"]}
        update = {name: value for name, value in seen.update.items() if name not in last}
        if not update:
            return _nothing(
                seen,
                "only the last layer is trained: the features of the fished record are known "
                "exactly, and the update holds nothing else of it",
                facts,
            )
        alone = replace(
            seen,
            update=update,
            records=1,
            labels=torch.tensor([facts["label"]]),
            training=replace(seen.training, batch_size=1, steps=1, epochs=None),
        )
        attack = InvertingGradients(iterations=self.iterations, labels="known")
        guess = attack.reconstruct(alone, rng, resources)
        return replace(guess, facts=guess.facts | facts)


def _nothing(seen: Observation, note: str, facts: dict[str, Any]) -> Reconstruction:
    """No guess of any pixels, and why."""
    return Reconstruction(torch.empty(0, *seen.record.shape), None, 1.0, notes=(note,), facts=facts)


def _fished(error: float, records: int, training: LocalTraining) -> float:
    """How many records class c passed an error of −1 on for; momentum makes it an overestimate."""
    steps = len(minibatches(records, training))
    visits = steps * training.batch_size / records  # of each record
    return -error * training.batch_size / (training.lr * visits)


def _feature(model: nn.Module, head: str, target: Target, label: int) -> tuple[int, float, float]:
    """The feature of class c that varies most over public images, a threshold which one record of
    the client is expected to exceed, and the feature's standard deviation."""
    public = public_images(target)
    images = public.inputs[public.labels == label]
    if len(images) < 2 * target.records:
        raise NotApplicable(
            f"a threshold that one of {target.records} records exceeds needs at least "
            f"{2 * target.records} public images of class {label}, got {len(images)}"
        )
    entering = target.record.entering(images)
    live = ready(model, rehearsing(target, "fishing"))
    runs, _ = watch(live, entering, nn.Linear)
    features = next(run.entered for run in runs if run.name == head)  # (images, features)
    spread, unit = features.std(0).max(0)
    if not spread > 0:
        raise NotApplicable("no feature varies over the public images: there is nothing to fish by")
    threshold = torch.quantile(features[:, unit], 1 - 1 / max(2, target.records))
    return int(unit), float(threshold), float(spread)
