"""The parts of a secure sum: fixed-point numbers, Shamir's secret sharing, and the common secrets
of two clients that the server lacks: masks, and an encrypted channel through it.

Vectors are integers modulo 2^64, over which masks are uniform and sums exact. Secrets are shared
over the field of 2^521 - 1 ("How to share a secret", 1979): fewer shares than the threshold contain
no information on the secret. Other primitives are from `cryptography`: X25519 for the key
agreement, HKDF-SHA256 for keys with one purpose each, ChaCha20's key stream for masks,
ChaCha20-Poly1305 for messages through the server. Every key is made for one sum: the zero nonces
are each used with one key, once.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsynth.errors import FedsynthError, SettingError


class SecureSumError(FedsynthError):
    """A party's message is not what the protocol asks for, or too few parties are left."""


IntVector = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]
BITS = 64


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point form of real numbers in [-bound, bound].

    Args:
        bound: of each coordinate's absolute value, public. Larger values are an error, and never
            clipped: a sum of clipped noise has no known distribution.
        clients: the largest number of vectors in a sum: it must not overflow.
        fraction: bits after the point; negative if the steps are larger than 1. A coordinate of
            the sum is off by at most clients / 2^(fraction + 1).
        wraps: whether larger values are taken modulo 2^64. This is required where values are
            private: an error would reveal about one vector what only the sum may reveal.

    >>> form = FixedPoint(bound=4.0, clients=3)
    >>> vector = form.encode(np.array([1.5, -0.25])) + form.encode(np.array([1.0, -3.0]))
    >>> form.decode(vector).tolist()
    [2.5, -3.25]
    """

    bound: float
    clients: int
    fraction: int = 24
    wraps: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf or self.clients < 1 or abs(self.fraction) > 1000:
            raise SettingError(None, "bound, clients, fraction", "are out of range")
        if self.clients * (self.bound * 2.0**self.fraction + 1) >= 2.0 ** (BITS - 1):
            reason = f"of {self.bound:g} overflows {BITS} bits: use fewer fractional bits"
            raise SettingError(None, "bound", reason)

    def encode(self, vector: npt.ArrayLike) -> IntVector:
        """Returns a vector as uint64 [n].

        Raises:
            SecureSumError: a coordinate is not finite, or beyond the bound.
        """
        values = np.asarray(vector, np.float64)
        if values.ndim != 1:
            raise SecureSumError(f"a vector has one dimension, got {values.ndim}")
        inside = np.isfinite(values) if self.wraps else np.abs(values) <= self.bound
        if not bool(inside.all()):
            raise SecureSumError(f"a coordinate is not finite, or beyond ±{self.bound:g}")
        steps = np.rint(values * 2.0**self.fraction)
        if self.wraps:  # exact: the remainder of integers in float64 is an integer
            steps = np.fmod(steps, 2.0**BITS)
            steps -= np.where(steps >= 2.0 ** (BITS - 1), 2.0**BITS, 0.0)
            steps += np.where(steps < -(2.0 ** (BITS - 1)), 2.0**BITS, 0.0)
        return steps.astype(np.int64).view(np.uint64)

    def decode(self, encoded: IntVector) -> Reals:
        """Returns the sum of at most `clients` encoded vectors, float64 [n]."""
        return encoded.view(np.int64).astype(np.float64) / 2.0**self.fraction


PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, holders: list[int], threshold: int) -> dict[int, bytes]:
    """Returns a share for each holder; any `threshold` of them give the secret.

    Args:
        secret: 32 bytes.
        holders: numbers from 0, each once; the share is the polynomial's value at number + 1.
        threshold: from 1 to the number of holders.

    Raises:
        SecureSumError: invalid arguments.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) or min(holders) < 0:
        raise SecureSumError("a secret has 32 bytes and as many holders as its threshold, or more")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    shares: dict[int, bytes] = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:  # Horner's scheme
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Returns the secret of at least `threshold` holders' shares.

    Raises:
        SecureSumError: too few shares, or shares that do not give a secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise SecureSumError(f"{len(shares)} shares are fewer than the threshold {threshold}")
    points = [(k + 1, int.from_bytes(share, "big")) for k, share in sorted(shares.items())]
    points = points[:threshold]
    secret = 0
    for x, y in points:
        above = 1
        below = 1
        for other, _ in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        secret = (secret + y * above * pow(below, -1, PRIME)) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise SecureSumError("the shares do not reconstruct the secret: one of them was changed")
    return secret.to_bytes(SECRET_BYTES, "big")


KEY_BYTES = 32
_ZERO = bytes(16)
MASK, CHANNEL, SELF_MASK = b"mask", b"channel", b"own mask"
"""Purposes of derived keys."""


def key_of(secret: bytes) -> X25519PrivateKey:
    """Returns the key with these 32 bytes."""

    return X25519PrivateKey.from_private_bytes(secret)


def public(key: X25519PrivateKey) -> bytes:
    """Returns its public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def common(key: X25519PrivateKey, other: bytes, purpose: bytes, about: bytes) -> bytes:
    """Returns the 32 bytes that only the two clients of a pair have for a purpose.

    Args:
        key: this client's.
        other: the other's public key.
        purpose: `MASK` or `CHANNEL`.
        about: binds the result to one sum and one pair, the same on both sides.

    Raises:
        SecureSumError: the other's key is invalid.
    """

    try:
        secret = key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SecureSumError("a client's public key is not valid") from None
    return derived(secret, purpose, about)


def derived(secret: bytes, purpose: bytes, about: bytes) -> bytes:
    """Returns a key for one purpose (HKDF-SHA256)."""

    info = b"fedsynth secure sum " + purpose + b" " + about
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)


def mask(key: bytes, length: int) -> IntVector:
    """Returns ChaCha20's key stream of a key that is used for nothing else, uint64 [length]."""

    stream = Cipher(ChaCha20(key, _ZERO), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypts content so that only the pair can read it, and no one can change it
    (ChaCha20-Poly1305).

    Args:
        key: for one message.
        content: the plaintext.
        about: the context that it is bound to.
    """

    return ChaCha20Poly1305(key).encrypt(_ZERO[:12], content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Returns the sealed content.

    Raises:
        SecureSumError: it was changed on the way, or is for others.
    """

    try:
        return ChaCha20Poly1305(key).decrypt(_ZERO[:12], sealed, about)
    except InvalidTag:
        raise SecureSumError("shares were changed in transit, or belong to other clients") from None


def signed_mask(
    key: X25519PrivateKey, other: bytes, sum_name: bytes, pair: tuple[int, int], length: int
) -> IntVector:
    """Returns what the first client of a pair adds to its vector for the second one, uint64
    [length]: their common mask, negative if its index is the larger one.

    Args:
        key: the private key of one of them.
        other: the other's public key.
        sum_name: the sum's.
        pair: their indices.
        length: of vectors.
    """
    about = hashlib.sha256(b"%s %d %d" % (sum_name, min(pair), max(pair))).digest()
    stream = mask(common(key, other, MASK, about), length)
    if pair[0] > pair[1]:
        stream = np.negative(stream)  # modulo 2^64
    return stream
