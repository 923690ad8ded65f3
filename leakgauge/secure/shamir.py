"""Shamir's secret sharing: any `threshold` shares give the secret, fewer tell nothing about it.

A. Shamir: *How to share a secret*, Communications of the ACM 22(11), 1979,
https://doi.org/10.1145/359168.359176. The secret is f(0) of a polynomial of degree threshold − 1
with random coefficients modulo a prime; the share of client k is f(k + 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from leakgauge.errors import ProtocolError
from leakgauge.secure.primitives import SECRET, Entropy

PRIME = 2**256 + 297  # the smallest above all secrets of 32 bytes
SHARE = 33  # bytes of a number below it


def split(
    secret: bytes, threshold: int, clients: Iterable[int], entropy: Entropy
) -> dict[int, bytes]:
    """One share of 32 secret bytes for each client."""
    polynomial = [int.from_bytes(secret, "big"), *(_any(entropy) for _ in range(threshold - 1))]
    return {k: _value(polynomial, k + 1).to_bytes(SHARE, "big") for k in clients}


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret behind the shares of exactly as many clients as the threshold is."""
    factors = _at_zero(tuple(shares))
    numbers = [int.from_bytes(share, "big") for share in shares.values()]
    if any(len(share) != SHARE for share in shares.values()) or max(numbers) >= PRIME:
        raise ProtocolError(f"expected shares of {SHARE} bytes below the prime, got another number")
    secret = sum(f * n for f, n in zip(factors, numbers, strict=True)) % PRIME
    if secret >> (8 * SECRET):
        raise ProtocolError("these shares do not belong to one secret")
    return secret.to_bytes(SECRET, "big")


def _value(polynomial: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def _any(entropy: Entropy) -> int:
    """A number below the prime, all alike: what is not below it is drawn again."""
    while (drawn := int.from_bytes(entropy(SHARE), "big") >> 7) >= PRIME:
        pass
    return drawn


@lru_cache(maxsize=64)
def _at_zero(clients: tuple[int, ...]) -> tuple[int, ...]:
    """What the shares of these clients count in f(0): Π x_j / (x_j − x_i) over the others j."""
    points = [k + 1 for k in clients]
    factors = []
    for i, x in enumerate(points):
        above = below = 1
        for other in points[:i] + points[i + 1 :]:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
