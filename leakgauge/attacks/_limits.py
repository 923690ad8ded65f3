"""How many records the weight gradient of one layer can tell apart: counting, on shapes alone.

The gradient is G = L·A with one row of A for each *view*: a record, each time a local step used it,
at each of the layer's P positions. Where the layer's output enters a batch norm in train mode, the
signals of each step sum to zero, and each step hides one direction. So with N views of records in S
steps the rank of G is P·N, or P·N − S, and G shows it while that is below both of its sides.
"""

from __future__ import annotations

import math

from torch import nn

ZEROS = 4
"""Entries that a map must have for each record, so that those that are zero (half of them) single
it out: the linear programs found nearly all records at a ninth of the entries, fewer and fewer
beyond, none at a third."""


def rank_limit(
    outputs: int, inputs: int, positions: int, steps: int = 1, centred: bool = False
) -> int:
    """The most views of records that a gradient (outputs × inputs, k² included) shows by its rank.
    `centred`: the signals of each step sum to zero. A layer of one position has no overlap that
    would tell what they then hide."""
    if centred and positions == 1:
        return 0
    return (min(outputs, inputs) - 1 + centred * steps) // positions


def held(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether the windows along one axis hold each other in place. They do not where neighbours
    share no pixel; nor where the map could be moved by one window: all that the first window shares
    with one before it lies over the padding, and the last window sees no padding (or the other way
    round)."""
    positions = _positions(size, kernel, stride, padding, dilation)
    if positions == 1:
        return True
    step, odd = divmod(stride, dilation)
    if odd or step >= kernel:
        return False
    last = (positions - 1) * stride - padding
    before = sum(dilation * i < padding for i in range(kernel))
    behind = sum(last + dilation * i >= size for i in range(kernel))
    shared = kernel - step
    return not ((before >= shared and not behind) or (behind >= shared and not before))


def overlap_limit(
    layer: nn.Conv2d, height: int, width: int, steps: int = 1, centred: bool = False
) -> int:
    """The most views of records that the overlap of a convolution's windows, of which there are
    several, can tell apart: there must be as many equations as unknowns. Each pixel is seen alike
    by all windows, and the padding is zero; unknown are the windows, in the basis of the
    gradient's rows."""
    assert not isinstance(layer.padding, str)  # the trace takes such a layer for no layer
    axes = [
        (size, layer.kernel_size[i], layer.stride[i], layer.padding[i], layer.dilation[i])
        for i, size in enumerate((height, width))
    ]
    if not all(held(*axis) for axis in axes):
        return 0
    counts = [_count(*axis) for axis in axes]
    positions, pixels, alike = (math.prod(one[i] for one in counts) for i in range(3))
    area = math.prod(layer.kernel_size)
    equations = positions * area - pixels
    free = positions
    if centred:  # a window that is the same everywhere is unknown too
        equations, free = equations - (area - alike), positions - 1
    # free·(P·N − S) unknowns, but for the N solutions that are the records
    return max(0, layer.in_channels * equations + centred * free * steps) // (free * positions - 1)


def _count(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int, int]:
    """Along an axis: windows, the pixels that they see, and in how many ways a window that is the
    same everywhere agrees with its neighbours and the padding."""
    positions = _positions(size, kernel, stride, padding, dilation)
    starts = range(-padding, -padding + positions * stride, stride)
    seen = {start + dilation * i for start in starts for i in range(kernel)}
    zero = {i for i in range(kernel) for s in starts if not 0 <= s + dilation * i < size}
    step = stride // dilation if positions > 1 else kernel
    alike = sum(zero.isdisjoint(range(first, kernel, step)) for first in range(step))
    return positions, sum(0 <= pixel < size for pixel in seen), alike


def _positions(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
