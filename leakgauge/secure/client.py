"""A client of secure aggregation: four steps, in this order, each once.

    new ── advertise ──▶ advertised ── share ──▶ shared ── mask ──▶ masked ── unmask ──▶ done

A message that the protocol does not allow ends the client as *aborted*: it gives nothing more.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np

from leakgauge.errors import InputError, ProtocolError
from leakgauge.fl.aggregate import RINGS, Whole
from leakgauge.secure import primitives, shamir
from leakgauge.secure.messages import Keys, Masked, Opened, Request, Sealed, Session
from leakgauge.secure.primitives import SECRET, Entropy

State: TypeAlias = Literal["new", "advertised", "shared", "masked", "done", "aborted"]


class Client:
    """Holds the secrets of one client for one session. `entropy` is where they come from."""

    def __init__(
        self, session: Session, number: int, entropy: Entropy = secrets.token_bytes
    ) -> None:
        if not 0 <= number < session.clients:
            raise InputError(f"client {number}: expected a number from 0 to {session.clients - 1}")
        primitives.check()
        self.session, self.number = session, number
        self.state: State = "new"
        self._entropy = entropy
        self._seal, self._mask, self._seed = (entropy(SECRET) for _ in range(3))
        self._keys: dict[int, Keys] = {}
        self._key_shares: dict[int, bytes] = {}  # of others' private mask keys, and of its own
        self._seed_shares: dict[int, bytes] = {}  # likewise of the seeds of their own masks

    def advertise(self) -> Keys:
        """1. Its two public keys."""
        with self._step("new", "advertised"):
            return self._own_keys()

    def share(self, keys: Sequence[Keys]) -> tuple[Sealed, ...]:
        """2. With the keys of all: a share of its two secrets for each other client, sealed."""
        with self._step("advertised", "shared"):
            self._keys = {one.client: one for one in keys}
            self._enough(keys, "sent keys")
            if self._keys.get(self.number) != self._own_keys():
                self._refuse("its own keys came back changed: somebody may read what it sends")
            public = {part for one in keys for part in (one.seal, one.mask)}
            if len(self._keys) < len(keys) or len(public) < 2 * len(keys):
                self._refuse("one client, or one key, stands twice in the list of keys")
            if not all(0 <= k < self.session.clients for k in self._keys):
                self._refuse("the list of keys names clients that are not in the session")
            owed = [
                shamir.split(secret, self.session.threshold, self._keys, self._entropy)
                for secret in (self._mask, self._seed)
            ]
            self._key_shares[self.number], self._seed_shares[self.number] = (
                shares[self.number] for shares in owed
            )
            return tuple(
                Sealed(self.number, k, self._box(k, owed[0][k] + owed[1][k]))
                for k in self._others()
            )

    def mask(self, boxes: Sequence[Sealed], values: Whole) -> Masked:
        """3. With the shares of the others: its vector under its own mask and one for each client
        whose shares it holds."""
        session = self.session
        wanted = np.dtype(RINGS[session.ring])
        if values.dtype != wanted or values.shape != (session.length,):
            raise InputError(
                f"client {self.number}: expected {session.length} numbers of type {wanted}, got "
                f"{values.shape} of type {values.dtype}"
            )
        with self._step("shared", "masked"):
            for one in boxes:
                self._open(one)
            self._enough(self._key_shares, "shared their secrets")
            own = primitives.derived(self._seed, session.id, "own mask", self.number)
            masked = values + primitives.stream(own, session.length, session.ring)
            for k in self._key_shares.keys() - {self.number}:
                key = pair_key(session, self._mask, self._keys[k].mask, self.number, k)
                mask = primitives.stream(key, session.length, session.ring)
                masked = masked + mask if k > self.number else masked - mask
            return Masked(self.number, masked.tobytes())

    def unmask(self, request: Request) -> Opened:
        """4. For each client one of its two shares, never both: together they unmask it."""
        with self._step("masked", "done"):
            arrived, dropped = {*request.arrived}, {*request.dropped}
            if both := sorted(arrived & dropped):
                self._refuse(
                    f"the server asks for both shares of client {both[0]}, which would show its "
                    "vector"
                )
            if arrived | dropped != self._key_shares.keys():
                self._refuse("the server's lists are not those who shared their secrets")
            if self.number not in arrived:
                self._refuse("the server says that its vector did not arrive, and asks for shares")
            self._enough(arrived, "sent their vectors")
            return Opened(
                self.number,
                tuple((k, self._seed_shares[k]) for k in sorted(arrived)),
                tuple((k, self._key_shares[k]) for k in sorted(dropped)),
            )

    @contextmanager
    def _step(self, now: State, then: State) -> Iterator[None]:
        if self.state != now:
            raise ProtocolError(
                f"client {self.number} is {self.state}, but this step is for one that is {now}: "
                "each step is taken once, in order"
            )
        try:
            yield
        except ProtocolError:
            self.state = "aborted"
            raise
        self.state = then

    def _refuse(self, why: str) -> None:
        raise ProtocolError(f"client {self.number} stops: {why}")

    def _enough(self, there: Collection[object], what: str) -> None:
        if len(there) < self.session.threshold:
            self._refuse(
                f"{len(there)} clients {what}, but {self.session.threshold} must (threshold)"
            )

    def _own_keys(self) -> Keys:
        return Keys(self.number, *map(primitives.public_of, (self._seal, self._mask)))

    def _others(self) -> list[int]:
        return [k for k in self._keys if k != self.number]

    def _box(self, receiver: int, content: bytes) -> bytes:
        key, bound = self._sealing(self.number, receiver)
        return primitives.sealed(key, content, bound, self._entropy)

    def _open(self, one: Sealed) -> None:
        k = one.sender
        if one.receiver != self.number or k not in self._others() or k in self._key_shares:
            self._refuse(f"it got a share of client {k} that is not for it, or a second one")
        key, bound = self._sealing(k, self.number)
        content = primitives.opened(key, one.box, bound)
        self._key_shares[k], self._seed_shares[k] = content[: shamir.SHARE], content[shamir.SHARE :]

    def _sealing(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """The key of this direction between two clients, and what a box is bound to."""
        other = self._keys[receiver if sender == self.number else sender]
        secret = primitives.agreed(self._seal, other.seal)
        key = primitives.derived(secret, self.session.id, "seal", sender, receiver)
        return key, f"{sender}/{receiver}/".encode() + self.session.id


def pair_key(session: Session, private: bytes, public: bytes, one: int, other: int) -> bytes:
    """The key of the mask between two clients, from the private key of either."""
    secret = primitives.agreed(private, public)
    return primitives.derived(secret, session.id, "pair mask", *sorted((one, other)))
