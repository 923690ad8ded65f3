"""How far the edges of a guess are from those of the record: an example."""

from torch import Tensor

from leakgauge.types import Metric


def edges(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean difference between neighbouring differences, one number per image."""
    across = (guess.diff(dim=-1) - truth.diff(dim=-1)).abs().flatten(1).mean(1)
    down = (guess.diff(dim=-2) - truth.diff(dim=-2)).abs().flatten(1).mean(1)
    return (across + down) / 2


EDGES = Metric(edges, "edge error", better="lower", limit=0.05)
