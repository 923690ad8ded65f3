"""The parts that attacks are made of, for authors of attacks in other packages.

What each does stands with it, and an example in docs/howto/own-attack.md. Names of other modules of
this package that begin with an underscore may change at any time; these change as plans do.
"""

from leakgauge.attacks._engine import Engine, Mode, Slope, Trust
from leakgauge.attacks._labels import LabelRule, infer, knowledge
from leakgauge.attacks._layers import Linear, first_linear, last_linear
from leakgauge.attacks._matching import (
    OPTIMISERS,
    Adam,
    Blend,
    LabelledSearch,
    Lbfgs,
    Optimiser,
    Phases,
    Prior,
    Schedule,
    Search,
    constant,
    match,
    shared,
    staged,
    steps,
)
from leakgauge.attacks._matching import cosine as cosine_decay
from leakgauge.attacks._objectives import (
    Distance,
    by_autograd,
    cosine,
    dot,
    relative_l1,
    squared,
    weighted,
)
from leakgauge.attacks._priors import batch_norm, total_variation
from leakgauge.attacks._spaces import (
    SPACES,
    Generator,
    LowResolution,
    Pixels,
    Space,
    SpaceName,
    Start,
)

__all__ = [
    "OPTIMISERS",
    "SPACES",
    "Adam",
    "Blend",
    "Distance",
    "Engine",
    "Generator",
    "LabelRule",
    "LabelledSearch",
    "Lbfgs",
    "Linear",
    "LowResolution",
    "Mode",
    "Optimiser",
    "Phases",
    "Pixels",
    "Prior",
    "Schedule",
    "Search",
    "Slope",
    "Space",
    "SpaceName",
    "Start",
    "Trust",
    "batch_norm",
    "by_autograd",
    "constant",
    "cosine",
    "cosine_decay",
    "dot",
    "first_linear",
    "infer",
    "knowledge",
    "last_linear",
    "match",
    "relative_l1",
    "shared",
    "squared",
    "staged",
    "steps",
    "total_variation",
    "weighted",
]
