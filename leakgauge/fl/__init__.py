"""The federation under audit."""

from leakgauge.fl.model import setting
from leakgauge.fl.partition import PARTITIONS
from leakgauge.fl.simulate import Scenario, simulate, tampered, target

__all__ = ["PARTITIONS", "Scenario", "setting", "simulate", "tampered", "target"]
