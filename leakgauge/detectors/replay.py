"""Replay — a model of an earlier round that comes back. Our own.

The digest of the received model is compared with those of all accepted ones. The model of the last
round may come again: a server sends it anew when a round was dropped, and that is reported. An
older one is *reject*: honest servers send it only when they restart from a checkpoint, which an
operator can vouch for.

Needs: one accepted round. One changed bit makes another model: what has drifted back, and is not
the same, is a matter for continuity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakgauge.detectors._layers import digest
from leakgauge.types import Detection, Received


@dataclass(frozen=True)
class Replay:
    """Is it a model of an earlier round, sent again?"""

    threshold: float = 0.0

    def inspect(self, received: Received, rng: torch.Generator) -> tuple[Detection, ...]:
        history, model = received.history, received.model
        if history is None or model is None or not history.digests:
            return ()
        found = digest(model.state_dict())
        if found == history.digests[-1]:
            reason = "it is the model of the last round, sent again"
            return (Detection("replay", 1.0, self.threshold, "report", reason),)
        if found in history.digests:
            ago = len(history.digests) - history.digests.index(found)
            reason = f"it is the model that you accepted {ago} rounds ago, sent again"
            return (Detection("replay", float(ago), self.threshold, "reject", reason),)
        return (Detection("replay", 0.0, self.threshold, "reject", "it was not seen before"),)
