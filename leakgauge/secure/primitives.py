"""The building blocks: keys of a pair, masks, sealed boxes. Only this module uses `cryptography`.

Every secret has 32 bytes and all of them count: a key is HKDF-SHA256 of the whole secret, salted
with the session and bound to its purpose and its clients; a mask is the stream of AES-256 in
counter mode under such a key, which makes one stream only. None of this is constant time in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from leakgauge.config import optional
from leakgauge.errors import ProtocolError
from leakgauge.fl.aggregate import RINGS, Whole

Entropy: TypeAlias = Callable[[int], bytes]
"""So many random bytes. Keys need 256 bits of chance, which no seeded generator of a simulation
has: the default everywhere is the operating system's."""

SECRET = 32  # bytes
NONCE = 12


def check() -> None:
    """Say at once if the package is missing."""
    optional("cryptography", "secure", "the protocol of secure aggregation")


def public_of(private: bytes) -> bytes:
    """The public X25519 key of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes) -> bytes:
    """The secret of the two owners of these keys, the same from both sides."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        other = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError as error:  # not 32 bytes, or a point that gives everybody the same secret
        raise ProtocolError(f"expected a safe public X25519 key, got another: {error}") from error


def derived(secret: bytes, session: bytes, purpose: str, *clients: int) -> bytes:
    """A key for one purpose between these clients, of the whole secret."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = f"leakgauge/{purpose}/{'/'.join(map(str, clients))}".encode()
    return HKDF(algorithm=SHA256(), length=SECRET, salt=session, info=info).derive(secret)


def stream(key: bytes, length: int, ring: int) -> Whole:
    """So many whole numbers mod 2**ring, uniform for whom the key is unknown."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(length * ring // 8)), RINGS[ring])


def sealed(key: bytes, content: bytes, bound: bytes, entropy: Entropy) -> bytes:
    """A box that only this key opens, unchanged and for the same `bound` bytes (AES-256-GCM)."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = entropy(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, content, bound)


def opened(key: bytes, box: bytes, bound: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(box[:NONCE], box[NONCE:], bound)
    except (InvalidTag, ValueError) as error:
        raise ProtocolError("a sealed share was changed on its way, or is not for me") from error
