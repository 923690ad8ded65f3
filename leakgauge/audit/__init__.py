"""Plans, trials and results."""

from leakgauge.audit.cases import Case
from leakgauge.audit.exposed import exposures
from leakgauge.audit.forecast import Forecast, forecast
from leakgauge.audit.plan import Plan, parse, read
from leakgauge.audit.run import Watch, run
from leakgauge.audit.store import Store

__all__ = [
    "Case",
    "Forecast",
    "Plan",
    "Store",
    "Watch",
    "exposures",
    "forecast",
    "parse",
    "read",
    "run",
]
