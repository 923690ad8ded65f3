"""The federation under audit."""

from leakgauge.fl.model import setting
from leakgauge.fl.partition import PARTITIONS
from leakgauge.fl.simulate import Scenario, played, simulate, tampered, target

__all__ = ["PARTITIONS", "Scenario", "played", "setting", "simulate", "tampered", "target"]
