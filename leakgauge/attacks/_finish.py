"""From the activations of one node to the images, all records of a round together (our own).

Given t, what left a ReLU for every record, up to one common factor, and images to start from (a
decoder's), the images are searched whose pre-activations p explain t in the modes of the training:

    Σ_active (s·p − t)² + Σ_inactive relu(s·p)²  over  Σ t²,   at the factor s that makes it least

Active are the entries with t > 0. The sum runs over all steps of the round, each with its own
weights and, where batch norm is in train mode, its own batch. Behind group norms every record has
a factor s of its own. L-BFGS in single precision does it;
it is the start that decides: from a decoder's images the misfit falls to rounding, from noise the
search sticks. Where it does not fall that far, the search is made again with a total variation that
is lowered in stages. In trained networks many images explain t about as well, and the smoother ones
are taken. Elsewhere it was one image that had stuck, and kept the others from their own: from the
smooth ones the search ends at rounding.

Batch norm in train mode leaves the contrast of a batch open: a·x gives the activations of x, but
for the norm's ε; group norms leave that of each record open. Two things tell a:

1. Pictures are stored in 8 bits: with the right a all pixels are whole numbers of 1/255, with any
   other they are spread evenly between two of them. Where they clearly are such numbers, the images
   found are those, without what the search left of rounding.
2. Where they are not, the start: a decoder's image is about the mean of all images with such
   activations, so that what it lacks is orthogonal to it, and a = ‖d‖²/⟨d, x⟩; or less, so that
   pixels stay between black and white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leakgauge.attacks._matching import lbfgs
from leakgauge.attacks._priors import total_variation
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable
from leakgauge.records import Images

ROUNDING = 1e-9  # misfit at which single precision has nothing left to give
PATIENCE = 40  # evaluations without a tenth of progress after which the search ends
MEMORY = 30  # pairs of L-BFGS
EXACT = 1e-5  # misfit above which t does not single out the images
NEARLY = 1e-4  # and with the total variation, below which it may
LONGER = 2  # times that a search goes on which was cut short below EXACT
SMOOTH = (3e-2, 1e-2, 3e-3)  # weights of the total variation then, each for a third of the search
LOST = 100.0  # times the median misfit: a record that no image explains
NEAR = 0.5  # contrasts are tried up to this far from that of the start
EVEN = 0.25  # pixels with less than this share of an even spread are stored in 8 bits
SURE = 0.05  # with less than this, each of them is the level next to it
PROBE, OPEN = 1.1, 1e-4  # contrast is open if this factor changes the misfit by less than that


class _Ended(Exception):
    """Unwinds L-BFGS when nothing is left to find, or no time."""


def finish(
    traces: Sequence[Trace],
    groups: Sequence[Tensor],
    node: str,
    value: Tensor,
    start: Tensor,
    record: Images,
    *,
    free_scale: bool,
    evaluations: int = 600,
    go_on: Callable[[float], bool] = lambda misfit: True,
) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W), as they enter the model, with these values (N, …) at a node, and by how
    much each misses its own, Σ miss² / Σ t².

    Step k of the round ran `traces[k]` on the records `groups[k]`: every record is in one group.
    `start` are the decoder's images, as they enter the model. `free_scale` says that the values are
    known up to a factor, common to all or, behind group norms, each record's own. `go_on` hears of
    every evaluation, and says whether there is time for another.
    """
    misses = _Misses(traces, groups, node, value, free_scale)
    _check(groups, value, start)
    begin = start.detach().float()
    time_left = True

    def going_on(misfit: float) -> bool:
        nonlocal time_left
        time_left = time_left and go_on(misfit)
        return time_left

    found, each, used = _settled(misses, begin, evaluations, going_on)
    lost = each > max(LOST * float(each.median()), LOST * ROUNDING)
    if lost.any() and used < evaluations and time_left:
        # What no image explains drowns the others: they go on without it.
        misses.shares = misses.shares.masked_fill(lost, 0.0)
        found, _ = _searched(misses, found, evaluations - used, going_on)
        with torch.no_grad():
            each = misses.by_record(found)
    if time_left and float(each[~lost].median()) > EXACT:
        smooth = begin
        for weight in SMOOTH:
            smooth, _ = _searched(misses, smooth, -(-evaluations // len(SMOOTH)), going_on, weight)
        found = smooth if time_left else found  # not one that the time cut short
        with torch.no_grad():
            nearly = float(misses.by_record(smooth)[~lost].median()) < NEARLY
        if nearly and time_left:  # it led past where the first search stuck
            sharp, each, _ = _settled(misses, smooth, evaluations, going_on)
            found = sharp if time_left and float(each[~lost].median()) <= EXACT else found
    with torch.no_grad():
        found = _contrasted(misses, found, start.float(), record)
        return found, misses.by_record(found)


class _Misses:
    """What images lack to explain the values at a node."""

    def __init__(
        self, traces: Sequence[Trace], groups: Sequence[Tensor], node: str, value: Tensor,
        free_scale: bool,
    ) -> None:  # fmt: skip
        self.node, self._groups, self._free = node, groups, free_scale
        self._alone = bool(traces[0].norms) and traces[0].alone
        # Those whose contrast is one: batches or, behind group norms, single records.
        self.tied = list(torch.cat(list(groups))[:, None]) if self._alone else list(groups)
        self._relu = traces[0].kind[traces[0].named(node)] == "relu"
        self._light = [trace.single() for trace in traces]
        size = value.double().square().mean().sqrt().clamp_min(1e-30)
        unit = (value / size if free_scale else value).float()
        self._wanted = [unit[group].contiguous() for group in groups]
        self._order = torch.cat(list(groups)).argsort()
        sizes = [t.double().square().flatten(1).sum(1) for t in self._wanted]
        self._sizes = torch.cat(sizes)[self._order].clamp_min(1e-30)
        self.shares = self._sizes / self._sizes.sum()  # how much each record counts

    def _entering(self, images: Tensor, step: int) -> Tensor:
        """What enters the activation; of a pool, a sum or a layer, its value itself."""
        light = self._light[step]
        at = light.named(self.node)
        at = at.all_input_nodes[0] if self._relu else at
        batch = images[self._groups[step]].contiguous(memory_format=torch.channels_last)
        found: Tensor = light.forward(batch, [at])[at]
        return found

    def of(self, images: Tensor) -> list[Tensor]:
        """The misses of every group."""
        # Convex in what enters the ReLU: on what leaves it, an entry that should be active but is
        # not would have no slope.
        found = [self._entering(images, step) for step in range(len(self._groups))]
        if self._relu:
            found = [
                torch.where(t > 0, p, p.relu()) for p, t in zip(found, self._wanted, strict=True)
            ]
        if self._free and self._alone:
            pairs = zip(found, self._wanted, strict=True)
            found = [
                (inner(p, t).clamp_min(1e-30) / inner(p, p).clamp_min(1e-30)) * p for p, t in pairs
            ]
        elif self._free:
            alike = [(p * t).sum() for p, t in zip(found, self._wanted, strict=True)]
            sizes = [p.square().sum() for p in found]
            above, below = torch.stack(alike).sum(), torch.stack(sizes).sum()
            factor = above.clamp_min(1e-30) / below.clamp_min(1e-30)
            found = [factor * p for p in found]
        return [p - t for p, t in zip(found, self._wanted, strict=True)]

    def by_record(self, images: Tensor) -> Tensor:
        """Σ miss² / Σ t² of every record."""
        misfits = [miss.square().flatten(1).double().sum(1) for miss in self.of(images)]
        return torch.cat(misfits)[self._order] / self._sizes

    def total(self, images: Tensor) -> float:
        return float(self.by_record(images) @ self.shares)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of each record, in a shape that multiplies them (N, 1, …)."""
    return (one * other).flatten(1).sum(1).view(-1, *[1] * (one.dim() - 1))


def _settled(
    misses: _Misses, start: Tensor, evaluations: int, go_on: Callable[[float], bool]
) -> tuple[Tensor, Tensor, int]:
    """The best images, by how much each misses, and how many evaluations the last search took. One
    that was cut short where the values do single out images goes on: the last digits tell the
    contrast, and whether a pixel is of one level or the next."""
    found = start
    for _ in range(1 + LONGER):
        found, used = _searched(misses, found, evaluations, go_on)
        with torch.no_grad():
            each = misses.by_record(found)
        if used < evaluations or float(each.median()) > EXACT:
            break
    return found, each, used


def _searched(
    misses: _Misses,
    start: Tensor,
    evaluations: int,
    go_on: Callable[[float], bool],
    smooth: float = 0.0,
) -> tuple[Tensor, int]:
    """The best images, and how many evaluations it took: L-BFGS from the start, and again
    from the best point when its line search gives up. `smooth` is the weight of the total variation
    beside the misfit."""
    best, found = math.inf, start.clone()
    history: list[Tensor] = []  # the least misfit of every record so far
    ended = False
    while not ended and len(history) < evaluations:
        before = len(history)
        image = found.contiguous().clone().requires_grad_()
        search = lbfgs([image], evaluations - before, MEMORY)

        def evaluated(image: Tensor = image, search: torch.optim.LBFGS = search) -> Tensor:
            nonlocal best, found
            search.zero_grad()
            with torch.enable_grad():
                each = misses.by_record(image)
                loss = each @ misses.shares
                if smooth:
                    loss = loss + smooth * total_variation(image)
            if not loss.requires_grad:
                raise NotApplicable(f"no derivative leads from {misses.node!r} back to the image")
            loss.backward()  # type: ignore[no-untyped-call]
            if (now := float(loss.detach())) < best:
                best, found = now, image.detach().clone()
            least = each.detach().nan_to_num(math.inf).clamp_min(ROUNDING)
            history.append(torch.minimum(least, history[-1]) if history else least)
            # A record that cannot be explained must not end the search for the others.
            still = history[-1] <= ROUNDING
            if len(history) > PATIENCE:
                still |= history[-1] > 0.9 * history[-PATIENCE]
            if not go_on(best) or bool(still.all()):
                raise _Ended
            return loss

        try:
            search.step(evaluated)  # type: ignore[no-untyped-call]
            ended = len(history) - before < 3  # no progress is possible from here
        except _Ended:
            ended = True
    return found, len(history)


def _contrasted(misses: _Misses, found: Tensor, start: Tensor, record: Images) -> Tensor:
    """The images with the right contrast wherever their values leave it open; as they were stored,
    where that shows."""
    found = found.clone()
    for group in misses.tied:
        probe = found.clone()
        probe[group] *= PROBE
        if abs(misses.total(probe) - misses.total(found)) <= OPEN:
            d, x = start[group], found[group]
            share = float((d * d).sum() / (d * x).sum())
            if share > 0:
                x = share * x
                x = x * min(1.0, _room(x, record))
                found[group] = stored(x, record) * x
        found[group] = levelled(found[group], record)
    return found


def stretched(images: Tensor, record: Images) -> Tensor:
    """Images, as they enter the model, whose contrast nothing tells: each with the most that keeps
    its pixels between black and white or, if that makes them of 8 bits, with one near that."""
    found = []
    for one in images[:, None]:
        x = one * _room(one, record)
        found.append(levelled(stored(x, record) * x, record))
    return torch.cat(found)


def _room(images: Tensor, record: Images) -> float:
    """The largest factor by which these images, as they enter the model, stay between black and
    white, but for a thousandth of their pixels; at least a half."""
    zero = record.leaving(torch.zeros_like(images)).double()
    steps = record.leaving(images).double() - zero
    most = torch.where(steps > 0, 1 - zero, zero) / steps.abs().clamp_min(1e-9)
    return max(0.5, float(most.flatten().kthvalue(1 + most.numel() // 1000).values))


def spread(levels: Tensor) -> float:
    """How far pixels, in levels of 8 bits, are from whole numbers: 1 if they lie anywhere."""
    return float((levels - levels.round()).square().mean()) * 12


def levelled(images: Tensor, record: Images) -> Tensor:
    """Images, as they enter the model, with every pixel at the level of 8 bits next to it, if all
    are near enough to one to leave no doubt."""
    levels = 255 * record.leaving(images).double()
    if spread(levels) >= SURE:
        return images
    return record.entering(levels.round() / 255).to(images)


def stored(images: Tensor, record: Images) -> float:
    """The factor nearest to 1 by which these images, as they enter the model, have pixels of 8
    bits; 1 if none makes them so. Pictures of few levels have several such factors."""
    zero = 255 * record.leaving(torch.zeros_like(images)).double().flatten()
    steps = 255 * record.leaving(images).double().flatten() - zero

    def far(share: float) -> float:
        levels = zero + share * steps
        outside = float(levels.max()) > 256 or float(levels.min()) < -1
        return math.inf if outside else spread(levels)

    reach = float(steps.square().mean().sqrt().clamp_min(1.0))
    # Pixels are about `reach` levels from where contrast leaves them: shares an eighth of a level
    # apart there miss no minimum.
    count = min(int(8 * NEAR * reach) + 1, 4000)
    shares = [1 + NEAR * (k / count) for k in range(-count, count + 1)]
    near = [share for share in shares if far(share) < EVEN]
    if not near:
        return 1.0
    share = min(near, key=lambda share: abs(share - 1))
    share = min((one for one in near if abs(one - share) < 2 * NEAR / count), key=far)
    for _ in range(4):  # least squares to the levels next to them
        levels = (zero + share * steps).round()
        share = float(((levels - zero) * steps).sum() / steps.square().sum().clamp_min(1e-30))
    return share if far(share) < EVEN else 1.0


def _check(groups: Sequence[Tensor], value: Tensor, start: Tensor) -> None:
    rows = torch.cat(list(groups)).sort().values
    if len(value) != len(start) or not torch.equal(rows, torch.arange(len(value))):
        raise InputError(
            "the finish needs every record in one group, with its value and its start; got "
            f"{len(value)} values, {len(start)} starts and groups of {rows.tolist()}"
        )
