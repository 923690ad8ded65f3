"""Soteria: hide the part of a representation that tells most of its record (J. Sun, A. Li, B. Wang,
H. Yang, H. Li, Y. Chen, "Soteria: Provable Defense against Privacy Leakage in Federated Learning
from Representation Perspective", CVPR 2021, https://arxiv.org/abs/2012.06043, §4).

The representation r is what enters the defended linear layer. In every local step each of its
elements f has the score

    a_f = Σ_n ‖∂r_nf/∂x_n‖ / (|r_nf| + 0.1)

and the columns of the layer's weight gradient that belong to the `share` of lowest scores become
zero: elements that are large and hardly change with the record. All else is sent as it is.

Differs from the paper: |r| where the authors' code has r, which is the same behind a ReLU and keeps
the score of other representations positive; the number of columns is exact where theirs is a
percentile. As in theirs, the derivative of one record's r crosses to the others of the batch where
batch norm is in train mode. An element that no record switches on has the score 0: its column,
which is zero anyway, counts as one of those that are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from leakgauge.config import did_you_mean
from leakgauge.defences._answers import sent_alone
from leakgauge.defences._local import copied, local_step
from leakgauge.errors import InputError
from leakgauge.fl.local import outputs
from leakgauge.papers import Paper
from leakgauge.ranges import SHARE, option
from leakgauge.records import floats
from leakgauge.types import Answer, Here, Local, Named, Observation

PAPER = Paper(
    "sun2021",
    "Sun, Jingwei and Li, Ang and Wang, Binghui and Yang, Huanrui and Li, Hai and Chen, Yiran",
    "Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation "
    "Perspective",
    2021,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "https://doi.org/10.1109/CVPR46437.2021.00919",
)


@dataclass(frozen=True)
class Soteria:
    """Hides the columns of a layer that tell most of a record."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    share: float = option(0.8, SHARE)
    layer: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}")

    def announced(self) -> dict[str, object]:
        return {"columns": self.share, "layer": self.layer or "the last linear layer"}

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        local = local_step(here, "soteria")
        name, scores = self._scores(local, set(gradient), here.step)
        hidden = max(1, round(self.share * len(scores)))
        columns = scores.argsort(stable=True)[:hidden]
        return {
            n: g.index_fill(1, columns, 0.0) if n == name else g.clone()
            for n, g in gradient.items()
        }

    def answered(self, seen: Observation) -> Answer:
        """Leave the hidden columns out of the comparison."""
        return Answer(
            "leaves the columns out that were hidden", seen.update, through=sent_alone(seen.update)
        )

    def _scores(self, local: Local, sent: set[str], step: int) -> tuple[str, Tensor]:
        """The name of the defended weight, and the score of each of its columns."""
        floats(local.setting.record)
        layers = self._layers(local.setting.model, sent)
        entered: list[tuple[str, Tensor]] = []  # in the order of the forward pass

        def note(name: str) -> Callable[[nn.Module, Any], None]:
            return lambda _, arguments: entered.append((name, arguments[0]))

        hooks = [layer.register_forward_pre_hook(note(name)) for layer, name in layers]
        entering = local.setting.record.entering(local.batch.inputs).detach().requires_grad_()
        try:
            outputs(local.setting.model, copied(local), entering, local.training, step)
        finally:
            for hook in hooks:
                hook.remove()
        if not entered:
            raise InputError("soteria: the model's forward does not call the defended linear layer")
        name, representation = entered[-1]
        # A layer that is used at several places of a record has the mean of what enters it there.
        flat = representation.flatten(1, -2).mean(1) if representation.dim() > 2 else representation
        scores = []
        for f in range(flat.shape[1]):
            slope = torch.zeros_like(entering)
            if flat.requires_grad:
                [slope] = torch.autograd.grad(flat[:, f].sum(), entering, retain_graph=True)
            scores.append((slope.flatten(1).norm(dim=1) / (flat[:, f].abs() + 0.1)).sum())
        return name, torch.stack(scores).detach()

    def _layers(self, model: nn.Module, sent: set[str]) -> list[tuple[nn.Module, str]]:
        """Linear layers whose weight is sent, with its name; one that is shared has one name."""
        names = {id(p): n for n, p in model.named_parameters()}
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        found = {n: (m, names[id(m.weight)]) for n, m in linear.items()
                 if names.get(id(m.weight)) in sent}  # fmt: skip
        if not found:
            raise InputError("soteria defends a linear layer, and the model trains none")
        if not self.layer:
            return list(found.values())
        if self.layer not in found:
            raise InputError(
                f"soteria: {self.layer!r} is no linear layer that the model trains"
                f"{did_you_mean(self.layer, found)}"
            )
        return [found[self.layer]]
