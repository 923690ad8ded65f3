"""Analytic recovery from a linear layer — L. T. Phong, Y. Aono, T. Hayashi, L. Wang, S. Moriai:
"Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", IEEE TIFS 2018,
https://eprint.iacr.org/2017/715 (§3); anywhere in a network: Geiping et al., 2020, Prop. 3.1

For z = Wx + b the rows of the gradient are ∂L/∂W_i = Σ_n δ_in·x_n and ∂L/∂b_i = Σ_n δ_in, so with
one record

    x = (∂L/∂W_i) / (∂L/∂b_i)    for every i with ∂L/∂b_i ≠ 0,

exactly, after any number of steps of SGD: momentum only weighs gradients, and what weight decay
took away is known. With several records, a row that only one of them reached (a ReLU that only one
switched on) still gives that record; such rows agree with each other, mixtures do not, so rows are
grouped and the largest groups come first.

Needs: the local training, whose normalisation it undoes, and the number of records, as a cap. It
reads no weights but where weight decay took a share of them away.
The residual is the share of ∂L/∂W that the found records do not explain: 0 when all were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._layers import first_linear, gradient_sum, refuse_rescaled, told
from leakgauge.errors import NotApplicable
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.records import Images, floats
from leakgauge.types import Knowledge, Observation, Reconstruction, Resources

PAPER = Paper(
    "phong2018",
    "Phong, Le Trieu and Aono, Yoshinori and Hayashi, Takuya and Wang, Lihua and Moriai, Shiho",
    "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption",
    2018,
    "IEEE Transactions on Information Forensics and Security",
    "https://doi.org/10.1109/TIFS.2017.2787987",
    kind="article",
    fields=(("volume", "13"), ("number", "5"), ("pages", "1333--1345")),
)


@dataclass(frozen=True)
class Analytic:
    """Reads single records off a linear layer (Phong 2018)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    tolerance: float = option(1e-3, POSITIVE)  # relative distance of two rows of one record
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        training, records = told(seen, "the analytic attack", weights=False)
        refuse_rescaled(training, "the analytic attack")
        layer = first_linear(seen.model, floats(seen.record).shape)
        assert layer.weight is not None
        assert layer.bias is not None
        weight, bias = gradient_sum(seen, layer.weight), gradient_sum(seen, layer.bias)
        rows = bias.abs() > 1e-6 * bias.abs().max()
        if not rows.any():
            raise NotApplicable(
                f"the update of {layer.bias!r} is zero everywhere: no unit of the first layer "
                "passed on a gradient"
            )
        ratios = weight[rows] / bias[rows, None]  # (rows, pixels)
        order = bias[rows].abs().argsort(descending=True)
        found = grouped(ratios[order], self.tolerance)[:records]
        inputs = seen.record.leaving(found.view(-1, *seen.record.shape))
        if isinstance(seen.record, Images):
            inputs = inputs.clamp(0, 1)
        return Reconstruction(
            inputs=inputs.float(),
            labels=None,
            residual=unexplained(weight, found),
            facts={"rows": int(rows.sum())},
        )


def grouped(rows: Tensor, tolerance: float) -> Tensor:
    """One row for each group of agreeing rows, largest group first, first-come within a tie."""
    left = rows
    groups: list[tuple[int, Tensor]] = []
    while len(left):
        close = (left - left[0]).norm(dim=1) <= tolerance * left[0].norm()
        groups.append((int(close.sum()), left[0]))
        left = left[~close]
    groups.sort(key=lambda group: -group[0])
    return torch.stack([row for _, row in groups])


def unexplained(gradient: Tensor, found: Tensor) -> float:
    """Share of the gradient's norm outside the span of the found rows."""
    span = torch.linalg.qr(found.T).Q  # (pixels, records); least squares would differ in last bits
    return float((gradient - gradient @ span @ span.T).norm() / gradient.norm())
