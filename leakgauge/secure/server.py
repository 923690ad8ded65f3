"""The server of secure aggregation: it passes messages on, adds up, and takes the masks off.

    keys ── keys() ──▶ shares ── shares() ──▶ vectors ── vectors() ──▶ opening ── total() ──▶ done

Who sends nothing in a step has dropped out; fewer than the threshold end the session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np

from leakgauge.errors import ProtocolError
from leakgauge.fl.aggregate import RINGS, Whole
from leakgauge.secure import primitives, shamir
from leakgauge.secure.client import pair_key
from leakgauge.secure.messages import Keys, Masked, Opened, Request, Sealed, Session

State: TypeAlias = Literal["keys", "shares", "vectors", "opening", "done", "aborted"]


class Server:
    """Holds no secret: what it learns beyond what is sent to it is the sum."""

    def __init__(self, session: Session) -> None:
        primitives.check()
        self.session = session
        self.state: State = "keys"
        self._keys: dict[int, Keys] = {}
        self._shared: set[int] = set()
        self._arrived: list[int] = []
        self._sum: Whole = np.zeros(session.length, RINGS[session.ring])

    def keys(self, sent: Sequence[Keys]) -> tuple[Keys, ...]:
        """1. The keys of all who sent some, for each of them."""
        with self._step("keys", "shares"):
            self._enough([one.client for one in sent], range(self.session.clients), "keys")
            self._keys = {one.client: one for one in sent}
            return tuple(self._keys[k] for k in sorted(self._keys))

    def shares(self, sent: Sequence[Sealed]) -> dict[int, tuple[Sealed, ...]]:
        """2. The boxes by their receivers, for those who sent boxes themselves."""
        with self._step("shares", "vectors"):
            receivers = defaultdict(list)
            for one in sent:
                receivers[one.sender].append(one.receiver)
            self._enough([*receivers], self._keys, "shares")
            for sender, found in receivers.items():
                if sorted(found) != sorted(self._keys.keys() - {sender}):
                    raise ProtocolError(f"client {sender} did not send one box to each other one")
            self._shared = {*receivers}
            return {
                k: tuple(one for one in sent if one.receiver == k) for k in sorted(self._shared)
            }

    def vectors(self, sent: Sequence[Masked]) -> Request:
        """3. Adds up what arrived, and says what it needs to take the masks off."""
        with self._step("vectors", "opening"):
            self._arrived = sorted(one.client for one in sent)
            self._enough(self._arrived, self._shared, "vectors")
            for one in sent:
                if len(one.values) != self._sum.nbytes:
                    raise ProtocolError(
                        f"client {one.client} sent {len(one.values)} bytes, expected "
                        f"{self._sum.nbytes}"
                    )
                self._sum = self._sum + np.frombuffer(one.values, self._sum.dtype)
            dropped = self._shared - {*self._arrived}
            return Request(tuple(self._arrived), tuple(sorted(dropped)))

    def total(self, sent: Sequence[Opened]) -> Whole:
        """4. The sum of the vectors that arrived, mod 2**ring."""
        session = self.session
        with self._step("opening", "done"):
            self._enough([one.client for one in sent], self._arrived, "shares")
            helpers = sorted(sent, key=lambda one: one.client)[: session.threshold]
            total = self._sum
            for k in self._arrived:
                seed = shamir.join({one.client: _of(k, one.seeds, one) for one in helpers})
                key = primitives.derived(seed, session.id, "own mask", k)
                total = total - primitives.stream(key, session.length, session.ring)
            for gone in sorted(self._shared - {*self._arrived}):
                private = shamir.join({one.client: _of(gone, one.keys, one) for one in helpers})
                if primitives.public_of(private) != self._keys[gone].mask:
                    raise ProtocolError(
                        f"the shares of client {gone}'s mask key do not give its key: one is wrong"
                    )
                for k in self._arrived:
                    key = pair_key(session, private, self._keys[k].mask, gone, k)
                    mask = primitives.stream(key, session.length, session.ring)
                    total = total - mask if gone > k else total + mask  # k added it, or took it off
            return total

    @contextmanager
    def _step(self, now: State, then: State) -> Iterator[None]:
        if self.state != now:
            raise ProtocolError(
                f"the server waits for {self.state}, but this step is for {now}: each step is "
                "taken once, in order"
            )
        try:
            yield
        except ProtocolError:
            self.state = "aborted"
            raise
        self.state = then

    def _enough(self, clients: Sequence[int], known: Collection[int], what: str) -> None:
        if len({*clients}) < len(clients) or not all(k in known for k in clients):
            raise ProtocolError(f"{what} came twice from one client, or from one not in this step")
        if len(clients) < self.session.threshold:
            raise ProtocolError(
                f"{len(clients)} clients sent {what}, but {self.session.threshold} must "
                "(threshold): there is no sum"
            )


def _of(owner: int, shares: Sequence[tuple[int, bytes]], sender: Opened) -> bytes:
    found = dict(shares).get(owner)
    if found is None:
        raise ProtocolError(f"client {sender.client} did not send its share of client {owner}")
    return found
