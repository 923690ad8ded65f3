"""Attacks by a server that changes the model it sends: one file a paper.

They exist to show what a guard must stop, and to test that it does.
"""

from leakgauge.types import ActiveAttack

ACTIVE_ATTACKS: dict[str, type[ActiveAttack]] = {}

__all__ = ["ACTIVE_ATTACKS"]
