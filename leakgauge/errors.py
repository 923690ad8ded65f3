"""Every error LeakGauge raises on purpose.

LeakGaugeError
├── PlanError        a plan or an option is wrong: unknown key, bad value, missing entry
├── InputError       a tensor, an update or a batch is not what was expected
├── DataError        a data set is missing, corrupt or unsafe to open
├── CheckpointError  a file of weights is missing, truncated, unsafe or for another model
├── ProtocolError    a message of secure aggregation is not what the protocol allows
├── MissingExtra     an optional package is not installed
├── Withheld         an attack needs knowledge that the threat model does not grant
└── NotApplicable    a method cannot work on this model or observation, and says why

Each message says what was expected, what was got and what to do. The command line prints it
without a traceback and exits with code 2.
"""


class LeakGaugeError(Exception):
    """Root of all errors raised on purpose."""


class PlanError(LeakGaugeError):
    """A plan or an option is wrong."""


class InputError(LeakGaugeError):
    """A tensor, an update or a batch is not what was expected."""


class DataError(LeakGaugeError):
    """A data set is missing, corrupt or unsafe to open."""


class CheckpointError(LeakGaugeError):
    """A file of weights is missing, truncated, unsafe or made for another model."""


class ProtocolError(LeakGaugeError):
    """A message of secure aggregation is not what the protocol allows: who got it stops there."""


class MissingExtra(LeakGaugeError):
    """An optional package is not installed."""


class Withheld(LeakGaugeError):
    """An attack needs knowledge that the threat model does not grant."""


class NotApplicable(LeakGaugeError):
    """A method cannot work on this model or observation."""
