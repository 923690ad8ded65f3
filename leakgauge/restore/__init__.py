"""What makes a better picture of an attack's guess, without the update: one file per method.

What a restorer adds is its own idea of a picture. Its *prior alone*, what it makes of pure noise,
therefore stands beside every number of a restored guess.
"""

from leakgauge.restore.ddrm import DDRM
from leakgauge.restore.mde import MDE
from leakgauge.restore.total_variation import TotalVariation
from leakgauge.types import Restorer

RESTORERS: dict[str, type[Restorer]] = {
    "ddrm": DDRM,
    "mde": MDE,
    "total-variation": TotalVariation,
}

__all__ = ["DDRM", "MDE", "RESTORERS", "TotalVariation"]
