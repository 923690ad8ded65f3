"""Static weight tests — the marks that hand-made models bear. Our own.

On every parameter matrix (rows: units or filters; queries, keys and values apart):

    duplicate rows      share of the non-zero rows with |cos| > .98 to another row
    zero rows           share of rows with a norm below 1e-6 of the largest
    near-zero entries   share of entries below 1e-6 of the root mean square
    bias dominance      max|b| / median row norm
    stable rank         k·σ₁²/‖W‖² of k ≤ 64 rows: 1 for orthogonal rows, k for parallel ones
    magnitude pairs     share of 8 rows whose negative entries are their positive ones, rescaled

The stable rank is reported and decides nothing: overfitted networks have a low one too. So are
zeros where more than half of the matrices have more than half of their entries zero: that is a
pruned network, and sparsity alone is not a manipulation. Only naive trap weights pair exactly, and
honest rows never do. Rows are sampled by `rng`, which the guard draws from the client's secret. A
tensor that bears a mark in the client's own fresh network (a zero-initialised head) or in the last
accepted model (a pruned one) is exempt from that test.

Needs: the received model; neither data nor history.
Cheap because only the *share* of duplicate rows matters: up to 256 rows, drawn by `rng`, are
compared with all rows in a sketch of 64 numbers per row (columns summed under random signs, which
keeps inner products), and the four nearest of each are compared exactly. A row that is counted is
a duplicate for certain; one that is not counted would need a sketch off by seven standard
deviations; and the share of a sample of 256 is within .1 of that of all rows but once in a
thousand. Shares measured: 0 for honest models, .9 to 1 for imprints, threshold .5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from leakgauge.detectors._layers import judged, matrices
from leakgauge.types import Detection, Received

SKETCH = 64
Test = Callable[[Tensor, Tensor | None], float | None]


@dataclass(frozen=True)
class Weights:
    """Do the weights look written by hand?"""

    duplicate_rows: float = 0.5
    zero_rows: float = 0.5
    near_zero_entries: float = 0.5
    bias_dominance: float = 3.0
    stable_rank: float = 30.0
    magnitude_pairs: float = 0.5
    cosine: float = 0.98  # from which two rows are the same
    fan_in: int = 16  # shorter rows are alike by chance
    rows: int = 8  # of fewer, as of a head for two classes, training makes copies honestly
    sample: int = 256

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        if received.model is None:
            return ()
        seed = int(torch.randint(2**62, (), generator=rng))
        thin = pruned(dict(received.model.named_parameters()))
        return tuple(
            replace(found, means="report") if thin and test in SPARSE else found
            for test, threshold, means, says, score in self._tests(seed)
            for found in judged(test, _scores(received, threshold, score), threshold, means, says)
        )

    def _tests(
        self, seed: int
    ) -> tuple[tuple[str, float, Literal["reject", "report"], str, Test], ...]:
        def drawn() -> torch.Generator:
            return torch.Generator().manual_seed(seed)

        return (
            ("duplicate-rows", self.duplicate_rows, "reject",
             "a share of {score:.2f} of the rows of {name} are copies of each other, as in a layer "
             "made to sort inputs into bins",
             lambda rows, bias: duplicate_share(
                 rows, drawn(), self.cosine, self.sample, self.fan_in, self.rows)),
            ("zero-rows", self.zero_rows, "reject",
             "a share of {score:.2f} of the rows of {name} is zero, as in a layer made to let one "
             "class or feature through", _zero_rows),
            ("near-zero-entries", self.near_zero_entries, "reject",
             "a share of {score:.2f} of the entries of {name} is zero, as in a layer made to copy "
             "its input", _near_zero),
            ("bias-dominance", self.bias_dominance, "reject",
             "the largest bias of {name} is {score:.3g} times its usual row: its units are "
             "switched by thresholds", _bias_dominance),
            ("stable-rank", self.stable_rank, "report",
             "the rows of {name} lie {score:.3g} times as close to one line as independent rows",
             lambda rows, bias: _parallel(_some(rows, SKETCH, drawn()))),
            ("magnitude-pairs", self.magnitude_pairs, "reject",
             "in a share of {score:.2f} of the rows of {name} the negative entries are the "
             "positive ones rescaled", lambda rows, bias: _paired(_some(rows, 8, drawn()))),
        )  # fmt: skip


SPARSE = ("zero-rows", "near-zero-entries")


def pruned(named: Mapping[str, Tensor]) -> bool:
    """Whether zeros are all over the network, not in the one layer that an attack changed."""
    shares = sorted(_near_zero(rows, bias) for _, rows, bias in matrices(named))
    return bool(shares) and shares[(len(shares) - 1) // 2] > 0.5


def _scores(received: Received, threshold: float, score: Test) -> dict[str, float]:
    """Of every tensor that can be tested, and is not exempt."""
    assert received.model is not None
    scores = {}
    for name, rows, bias in matrices(dict(received.model.named_parameters())):
        found = score(rows, bias)
        if found is not None:
            scores[name] = found
    for name in [n for n, found in scores.items() if not found <= threshold]:
        if exempt(received, name, threshold, score):
            del scores[name]
    return scores


def exempt(received: Received, name: str, threshold: float, score: Test) -> bool:
    """Whether the client's own fresh network or the last accepted one bears the same mark."""
    known: list[dict[str, Tensor]] = [dict(received.fresh.named_parameters())]
    if received.history is not None:
        known.append({n: v for n, v in received.history.state.items() if n in known[0]})
    same = (part for named in known for part in matrices(named) if part[0] == name)
    scores = (score(rows, bias) for _, rows, bias in same)
    return any(found is not None and found > threshold for found in scores)


def duplicate_share(
    rows: Tensor, rng: torch.Generator, cosine: float, sample: int, fan_in: int = 1, least: int = 2
) -> float | None:
    """The share of (up to `sample`) non-zero rows that have |cos| > `cosine` to another row.

    1 when all are zero: where a client starts from zeros itself, the rows of classes that nobody
    holds stay copies of each other, and the test is exempt.
    """
    size = rows.norm(dim=1)
    if len(rows) >= least and rows.shape[1] >= fan_in and not rows.any():
        return 1.0
    rows = rows[size >= 1e-6 * size.max()]
    if len(rows) < least or rows.shape[1] < fan_in or not torch.isfinite(size).all():
        return None
    picked = torch.randperm(len(rows), generator=rng)[:sample]
    short = normalize(sketch(rows, rng))
    near = (short[picked] @ short.T).abs()  # (picked, rows)
    near[torch.arange(len(picked)), picked] = -1.0  # not itself
    nearest = near.topk(min(4, len(rows) - 1)).indices
    # Only those whose sketch comes near are worth an exact comparison; honest models have none.
    close = (near.gather(1, nearest) > cosine - 0.2).any(1)
    if not close.any():
        return 0.0
    one, others = normalize(rows[picked[close]]), normalize(rows[nearest[close]], dim=2)
    exact = torch.einsum("id,ikd->ik", one, others).abs().amax(1)
    return float((exact > cosine).sum()) / len(picked)


def sketch(rows: Tensor, rng: torch.Generator) -> Tensor:
    """(n, d) → (n, 64): every 64th column summed under random signs. Inner products of rows are
    kept on average, with a standard deviation of about an eighth of their norms."""
    columns = rows.shape[1]
    if columns <= SKETCH:
        return rows
    signs = torch.randint(2, (columns,), generator=rng).to(rows.dtype) * 2 - 1
    signed = pad(rows * signs, (0, -columns % SKETCH))
    return signed.view(len(rows), -1, SKETCH).sum(1)


def _zero_rows(rows: Tensor, bias: Tensor | None) -> float | None:
    size = rows.norm(dim=1)
    return int((size <= 1e-6 * size.max()).sum()) / len(rows)


def _near_zero(rows: Tensor, bias: Tensor | None) -> float:
    size = float(rows.norm()) / rows.numel() ** 0.5
    return int(torch.count_nonzero(rows.abs() <= 1e-6 * size)) / rows.numel()


def _bias_dominance(rows: Tensor, bias: Tensor | None) -> float | None:
    if bias is None:
        return None
    largest, usual = float(bias.abs().max()), float(rows.norm(dim=1).median())
    return largest / usual if usual else float("inf") if largest else 0.0


def _some(rows: Tensor, count: int, rng: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=rng)[:count]]


def _parallel(rows: Tensor) -> float | None:
    gram = (rows @ rows.T).double()
    size = float(gram.trace())
    if len(rows) < 2 or rows.shape[1] < 2 or not size or not torch.isfinite(gram).all():
        return None
    return min(rows.shape) * float(torch.linalg.eigvalsh(gram)[-1]) / size


def _paired(rows: Tensor) -> float | None:
    if rows.shape[1] < SKETCH:  # short rows pair by chance
        return None
    rows = rows.sort(dim=1).values
    half = rows.shape[1] // 2
    negative, positive = -rows[:, :half], rows[:, -half:].flip(1)  # both from large to small
    scale = positive.norm(dim=1, keepdim=True) / negative.norm(dim=1, keepdim=True)
    apart = (positive - scale * negative).norm(dim=1) / positive.norm(dim=1)
    signs = (negative[:, -1] >= 0) & (positive[:, -1] >= 0)
    return float(((apart < 1e-3) & signs).double().mean())
