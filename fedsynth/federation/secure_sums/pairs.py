"""What two clients have in common and the server has not: masks, and a closed channel through it.

Primitives are `cryptography`'s: X25519 for the agreement, HKDF-SHA256 for keys with one purpose
each, ChaCha20's key stream for masks, ChaCha20-Poly1305 for what goes through the server. Every
key is made for one sum: the zero nonces are each used with one key, once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from fedsynth.federation.secure_sums.errors import SecureSumError
from fedsynth.federation.secure_sums.fixed_point import Words

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY_BYTES = 32
_ZERO = bytes(16)
MASK, CHANNEL, OWN = b"mask", b"channel", b"own mask"


def new_key() -> X25519PrivateKey:
    """A key for one sum."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def key_of(secret: bytes) -> X25519PrivateKey:
    """The key with these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public(key: X25519PrivateKey) -> bytes:
    """Its public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def common(key: X25519PrivateKey, other: bytes, purpose: bytes, about: bytes) -> bytes:
    """The 32 bytes that the two of a pair, and nobody else, have for a purpose.

    Args:
        key: one's own.
        other: the other's public key.
        purpose: `MASK` or `CHANNEL`.
        about: what binds it to one sum and one pair, the same on both sides.

    Raises:
        SecureSumError: the other's key is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        secret = key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SecureSumError("a client's public key is none") from None
    return derived(secret, purpose, about)


def derived(secret: bytes, purpose: bytes, about: bytes) -> bytes:
    """A key for one purpose (HKDF-SHA256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"fedsynth secure sum " + purpose + b" " + about
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)


def mask(key: bytes, length: int) -> Words:
    """ChaCha20's key stream of a key that is used for nothing else, uint64 [length]."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(key, _ZERO), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Content that the pair alone can read, and nobody can change (ChaCha20-Poly1305).

    Args:
        key: for one message.
        content: what is sent.
        about: what it is bound to.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_ZERO[:12], content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """What was sealed.

    Raises:
        SecureSumError: it was changed on the way, or is for others.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_ZERO[:12], sealed, about)
    except InvalidTag:
        raise SecureSumError("shares were changed on the way, or are for others") from None


def about_pair(sum_name: bytes, one: int, other: int) -> bytes:
    """Binds a key to one sum and one pair; the same on both sides."""
    low = min(one, other)
    high = max(one, other)
    return hashlib.sha256(b"%s %d %d" % (sum_name, low, high)).digest()
