"""The federation under audit."""

from leakgauge.fl.partition import PARTITIONS
from leakgauge.fl.simulate import Scenario, simulate, tampered, target

__all__ = ["PARTITIONS", "Scenario", "simulate", "tampered", "target"]
