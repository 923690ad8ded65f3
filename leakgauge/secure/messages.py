"""What the roles know in common, and what travels: whole numbers, bytes, and tuples of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leakgauge.errors import InputError
from leakgauge.fl.aggregate import RINGS, quorum


@dataclass(frozen=True)
class Session:
    """What all know of a round: its number of clients, how many must stay to the end, how long the
    vectors are, and the ring. `id` is fresh for every round: keys are bound to it."""

    id: bytes
    clients: int
    threshold: int
    length: int
    ring: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        quorum(self.clients, self.threshold)
        if self.ring not in RINGS or self.length < 1 or len(self.id) < 16:
            raise InputError(
                f"expected a ring of 32 or 64, vectors of 1 or more and an id of 16 bytes or more, "
                f"got {self.ring}, {self.length} and {len(self.id)}"
            )


@dataclass(frozen=True)
class Keys:
    """1. Of each client, for all: one public key for sealed shares, one for masks."""

    client: int
    seal: bytes
    mask: bytes


@dataclass(frozen=True)
class Sealed:
    """2. From client to client through the server, who cannot open it: one share of the sender's
    private mask key and one of its own mask's seed."""

    sender: int
    receiver: int
    box: bytes


@dataclass(frozen=True)
class Masked:
    """3. Of each client, for the server: its vector under masks, little-endian."""

    client: int
    values: bytes


@dataclass(frozen=True)
class Request:
    """4. Of the server, for all who stay: whose vectors arrived, and who dropped out after its
    shares were out."""

    arrived: tuple[int, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class Opened:
    """4. Of each client, for the server: (owner, share) of the seeds of those who arrived, and of
    the mask keys of those who dropped out."""

    client: int
    seeds: tuple[tuple[int, bytes], ...]
    keys: tuple[tuple[int, bytes], ...]
