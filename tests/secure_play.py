"""The protocol of secure aggregation step by step, with chance that is the same again."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from leakgauge.secure import Client, Server, Session
from leakgauge.secure.messages import Keys, Masked, Request, Sealed

TYPES = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


def drawn(seed: int) -> Callable[[int], bytes]:
    """Bytes that are the same again: for tests alone."""
    return random.Random(seed).randbytes


def vectors(clients: int, length: int = 50, ring: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Any numbers of the ring: most sums wrap around."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**ring, length, TYPES[ring], endpoint=False) for _ in range(clients)]


def summed(some: list[np.ndarray], ring: int) -> list[int]:
    """Their sum in whole numbers of Python."""
    return [sum(map(int, column)) % 2**ring for column in zip(*some, strict=True)]


class Play:
    """The protocol step by step, so that a test can stop it, or change what travels."""

    def __init__(self, clients: int = 5, threshold: int = 3, length: int = 40, seed: int = 0):
        entropy = drawn(seed)
        self.session = Session(entropy(32), clients, threshold, length)
        self.clients = [Client(self.session, k, entropy) for k in range(clients)]
        self.server = Server(self.session)
        self.vectors = vectors(clients, length, seed=seed)

    def keys(self) -> tuple[Keys, ...]:
        return self.server.keys([one.advertise() for one in self.clients])

    def routed(self) -> dict[int, tuple[Sealed, ...]]:
        keys = self.keys()
        return self.server.shares([box for one in self.clients for box in one.share(keys)])

    def masked(self, absent: tuple[int, ...] = ()) -> list[Masked]:
        routed = self.routed()
        there = [one for one in self.clients if one.number not in absent]
        return [one.mask(routed[one.number], self.vectors[one.number]) for one in there]

    def request(self, absent: tuple[int, ...] = ()) -> Request:
        return self.server.vectors(self.masked(absent))
