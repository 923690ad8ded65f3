"""The whole protocol in one process: every role does what it would do on its own machine."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from leakgauge.errors import InputError
from leakgauge.fl.aggregate import RINGS, Whole, quorum
from leakgauge.secure.client import Client
from leakgauge.secure.messages import Session
from leakgauge.secure.primitives import SECRET, Entropy
from leakgauge.secure.server import Server

P = ParamSpec("P")
T = TypeVar("T")

Step: TypeAlias = Literal["advertise", "share", "mask", "unmask"]
STEPS: tuple[Step, ...] = ("advertise", "share", "mask", "unmask")


@dataclass(frozen=True)
class Outcome:
    """The sum, whose vectors are in it, and the CPU seconds of each client and of the server."""

    total: Whole
    included: tuple[int, ...]
    client_seconds: tuple[float, ...]
    server_seconds: float


def run(
    vectors: Sequence[Whole],
    *,
    threshold: int | None = None,
    dropped: Mapping[Step, Collection[int]] | None = None,
    entropy: Entropy = secrets.token_bytes,
) -> Outcome:
    """The sum of vectors of whole numbers mod 2**32 or 2**64, as their type is. `dropped` names, by
    the first step that they do not take, the clients that drop out."""
    if not vectors or vectors[0].dtype not in tuple(RINGS.values()):
        raise InputError("expected one vector per client, of the type uint32 or uint64")
    gone = {step: {*(dropped or {}).get(step, ())} for step in STEPS}
    if unknown := sorted({*(dropped or {})} - {*STEPS}):
        raise InputError(f"dropped names {unknown[0]!r}; expected steps: {', '.join(STEPS)}")
    if not {k for some in gone.values() for k in some} <= {*range(len(vectors))}:
        raise InputError(f"dropped: expected clients from 0 to {len(vectors) - 1}, got {dropped}")
    session = Session(
        entropy(SECRET),
        len(vectors),
        quorum(len(vectors), threshold),
        len(vectors[0]),
        32 if vectors[0].dtype == RINGS[32] else 64,
    )
    spent: defaultdict[int, float] = defaultdict(float)
    clients = {k: _timed(spent, k, Client)(session, k, entropy) for k in range(len(vectors))}
    server = Server(session)

    def there(step: Step) -> list[Client]:
        for k in gone[step]:
            clients.pop(k, None)
        return [*clients.values()]

    def at(k: int, call: Callable[P, T]) -> Callable[P, T]:
        return _timed(spent, k, call)

    keys = at(-1, server.keys)([at(c.number, c.advertise)() for c in there("advertise")])
    boxes = [one for c in there("share") for one in at(c.number, c.share)(keys)]
    routed = at(-1, server.shares)(boxes)
    masked = [at(c.number, c.mask)(routed[c.number], vectors[c.number]) for c in there("mask")]
    request = at(-1, server.vectors)(masked)
    opened = [at(c.number, c.unmask)(request) for c in there("unmask")]
    total = at(-1, server.total)(opened)
    each = tuple(spent[k] for k in range(len(vectors)))
    return Outcome(total, request.arrived, each, spent[-1])


def _timed(spent: defaultdict[int, float], who: int, call: Callable[P, T]) -> Callable[P, T]:
    """The same call, whose CPU seconds are counted for this client (−1: the server)."""

    def timed(*args: P.args, **kwargs: P.kwargs) -> T:
        began = time.process_time()
        try:
            return call(*args, **kwargs)
        finally:
            spent[who] += time.process_time() - began

    return timed
