"""The guard of a client: is the model that it received fit to be trained on?"""

from leakgauge.guard.calibrate import calibrate
from leakgauge.guard.guard import Guard
from leakgauge.guard.policy import Policy
from leakgauge.guard.verdict import Verdict

__all__ = ["Guard", "Policy", "Verdict", "calibrate"]
