"""Plans, trials and results."""

from leakgauge.audit.plan import Plan, parse, read
from leakgauge.audit.run import Watch, run
from leakgauge.audit.store import Store

__all__ = ["Plan", "Store", "Watch", "parse", "read", "run"]
