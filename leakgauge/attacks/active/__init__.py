"""Attacks by a server that changes the model it sends: one file per paper.

They exist to show what a guard must stop, and to test that it does.
"""

from leakgauge.attacks.active.decepticons import Decepticons
from leakgauge.attacks.active.fishing import Fishing
from leakgauge.attacks.active.loki import Loki
from leakgauge.attacks.active.robbing_the_fed import RobbingTheFed
from leakgauge.attacks.active.seer import Seer
from leakgauge.attacks.active.trap_weights import TrapWeights
from leakgauge.types import PreparedAttack

ACTIVE_ATTACKS: dict[str, type[PreparedAttack]] = {
    "robbing-the-fed": RobbingTheFed,
    "trap-weights": TrapWeights,
    "fishing": Fishing,
    "loki": Loki,
    "decepticons": Decepticons,
    "seer": Seer,
}

__all__ = [
    "ACTIVE_ATTACKS",
    "Decepticons",
    "Fishing",
    "Loki",
    "RobbingTheFed",
    "Seer",
    "TrapWeights",
]
