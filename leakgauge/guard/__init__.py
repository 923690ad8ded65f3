"""The guard of a client: is the model that it received fit to be trained on?"""

from leakgauge.guard.calibrate import calibrate
from leakgauge.guard.guard import Guard, Verdict
from leakgauge.guard.policy import Policy

__all__ = ["Guard", "Policy", "Verdict", "calibrate"]
