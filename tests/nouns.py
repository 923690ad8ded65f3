"""Short ways to the library's nouns, for tests."""

from __future__ import annotations

from torch import Tensor, nn

from leakgauge import fl
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.types import Batch, Setting


def setting(
    model: nn.Module,
    records: Batch | Tensor | tuple[int, ...],
    classes: int = 10,
    scale: Scale = AS_THEY_ARE,
) -> Setting:
    """A setting whose number of classes does not matter, as in local training."""
    return fl.setting(model, records, classes, scale)
