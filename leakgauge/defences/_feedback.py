"""Error feedback: what a client did not send, it adds to its next update.

    p = u + e,   send C(p),   e ← p − C(p)

S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019, https://proceedings.mlr.press/v97/karimireddy19a.html
"""

from __future__ import annotations

from torch import Tensor

from leakgauge.types import Here, Named

OWED = "owed/"


def recalled(here: Here, key: str, like: Tensor) -> Tensor | None:
    """What is remembered under a key, if it is of this shape: a malicious server may send a model
    of other shapes for a round."""
    found = here.memory.get(key)
    return found.to(like) if found is not None and found.shape == like.shape else None


def with_owed(update: Named, here: Here) -> Named:
    """The update and what was held back of earlier ones."""
    whole = {}
    for name, value in update.items():
        owed = recalled(here, OWED + name, value)
        whole[name] = value if owed is None else value + owed
    return whole


def hold_back(whole: Named, sent: Named, here: Here) -> None:
    """Remember what was not sent."""
    here.memory.update({OWED + name: value - sent[name] for name, value in whole.items()})
