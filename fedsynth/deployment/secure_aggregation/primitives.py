"""Building blocks of secure sums: fixed-point numbers, secret sharing, key agreement and messages.

Two clients share secrets that the server does not know. From these secrets they derive masks, and
keys that encrypt the messages that the server passes on between them.

Vectors are integers modulo 2^64, where masks are uniform and sums are exact. Secrets are shared
over the field of 2^521 - 1 ("How to share a secret", 1979), where fewer shares than the threshold
contain no information about the secret. The other algorithms come from `cryptography`: X25519 for
key agreement, HKDF-SHA256 to derive a key for each purpose, ChaCha20's key stream for masks, and
ChaCha20-Poly1305 for messages through the server. Each key is made for one sum and used once, so
nonces of zero are safe.

Masked vectors are sent as raw numbers, and all other messages as JSON with bytes in hexadecimal.
All received bytes are untrusted. A client is stored between messages in the same form
(`SumClient`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field

from fedsynth.errors import FedsynthError, faults_as
from fedsynth.privacy.randomness import Grid


class SecureSumError(FedsynthError, code="sums.secure"):
    """Raised if a message does not follow the protocol, or if too few clients are left."""


IntVector = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]
BITS = 64


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point encoding of real numbers for sums without overflow.

    Args:
        grid: the grid (`fedsynth.privacy.randomness`). Values above its bound are an error and are
            never clipped, because a sum of clipped noise has no known distribution. A coordinate of
            the sum is off by at most half a spacing for each client.
        wraps: whether larger values are taken modulo 2^64 instead of raising an error. This is
            required for private values, because an error would reveal something about one client's
            vector.

    >>> form = FixedPoint(Grid(bits=24, bound=4.0))
    >>> vector = form.encode(np.array([1.5, -0.25])) + form.encode(np.array([1.0, -3.0]))
    >>> form.decode(vector).tolist()
    [2.5, -3.25]
    """

    grid: Grid
    wraps: bool = False

    def encode(self, vector: npt.ArrayLike) -> IntVector:
        """Encodes a vector of real numbers as integers modulo 2^64, uint64 [n].

        Raises:
            SecureSumError: if a coordinate is not finite, or if it is beyond the bound and `wraps`
                is False.
        """
        values = np.asarray(vector, np.float64)
        if values.ndim != 1:
            raise SecureSumError(f"the vector to sum must have 1 dimension, got {values.ndim}")
        inside = np.isfinite(values) if self.wraps else np.abs(values) <= self.grid.bound
        if not bool(inside.all()):
            raise SecureSumError(f"the vector contains NaN or values beyond ±{self.grid.bound:g}")
        steps = np.rint(values / self.grid.spacing)
        if self.wraps:  # exact: the remainder of integers in float64 is an integer
            steps = np.fmod(steps, 2.0**BITS)
            steps -= np.where(steps >= 2.0 ** (BITS - 1), 2.0**BITS, 0.0)
            steps += np.where(steps < -(2.0 ** (BITS - 1)), 2.0**BITS, 0.0)
        return steps.astype(np.int64).view(np.uint64)

    def decode(self, encoded: IntVector) -> Reals:
        """Decodes the sum of encoded vectors to float64 [n]."""
        return encoded.view(np.int64).astype(np.float64) * self.grid.spacing


PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, holders: list[int], threshold: int) -> dict[int, bytes]:
    """Splits a secret into one share for each holder.

    Any `threshold` shares suffice to reconstruct the secret.

    Args:
        secret: 32 bytes.
        holders: the numbers of the holders, from 0, without repetitions. A holder's share is the
            value of the polynomial at number + 1.
        threshold: a number from 1 to the number of holders.

    Raises:
        SecureSumError: if an argument is invalid.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) or min(holders) < 0:
        raise SecureSumError(
            f"a secret of {len(secret)} bytes cannot be split among {len(set(holders))} clients "
            f"with the threshold {threshold}"
        ).with_code("sums.split")
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
    """Reconstructs a secret from the shares of at least `threshold` holders.

    Raises:
        SecureSumError: if there are too few shares, or if they do not give a secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise SecureSumError(f"got {len(shares)} secret shares, but {threshold} are needed")
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
        raise SecureSumError(f"one of the clients {sorted(shares)} sent a wrong secret share")
    return secret.to_bytes(SECRET_BYTES, "big")


KEY_BYTES = 32
_ZERO = bytes(16)
# The purposes of derived keys.
MASK, CHANNEL, SELF_MASK = b"mask", b"channel", b"own mask"


def public(key: bytes) -> bytes:
    """Returns a private key's public key, as 32 bytes."""
    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


def common(key: bytes, other: bytes, purpose: bytes, about: bytes) -> bytes:
    """Derives a 32-byte key that two clients share for one purpose.

    Args:
        key: the private key of this client.
        other: the public key of the other client.
        purpose: `MASK` or `CHANNEL`.
        about: bytes that bind the secret to one sum and one pair of clients. Both clients use the
            same bytes.

    Raises:
        SecureSumError: if the other client's public key is invalid.
    """
    try:
        private_key = X25519PrivateKey.from_private_bytes(key)
        secret = private_key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SecureSumError("the other client's public key is not a valid X25519 key") from None
    return derived(secret, purpose, about)


def derived(secret: bytes, purpose: bytes, about: bytes) -> bytes:
    """Derives a key from a secret by HKDF-SHA256, with a different key for each purpose."""
    info = b"fedsynth secure sum " + purpose + b" " + about
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)


def mask(key: bytes, length: int) -> IntVector:
    """Computes a mask of random integers from a key (ChaCha20's key stream), uint64 [length].

    The key must not be used for anything else.
    """
    stream = Cipher(ChaCha20(key, _ZERO), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypts bytes for another client, by ChaCha20-Poly1305.

    No other party can read the bytes, or change them unnoticed.

    Args:
        key: the key. It encrypts only this message.
        content: the bytes to encrypt.
        about: the context to which the message is bound.
    """
    return ChaCha20Poly1305(key).encrypt(_ZERO[:12], content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Decrypts bytes encrypted by `seal`.

    Raises:
        SecureSumError: if the bytes were changed in transit, or are meant for another client.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_ZERO[:12], sealed, about)
    except InvalidTag:
        raise SecureSumError("the received secret shares were changed in transit") from None


def signed_mask(
    key: bytes, other: bytes, sum_name: bytes, pair: tuple[int, int], length: int
) -> IntVector:
    """Computes the pairwise mask that a client adds to its vector, uint64 [length].

    The first client of `pair` adds the mask. The mask is negated if the first client has the larger
    index. The masks of the two clients therefore cancel in the sum.

    Args:
        key: the private key of one of the two clients.
        other: the public key of the other client.
        sum_name: the name of the sum.
        pair: the indices of the two clients.
        length: the length of the vectors.
    """
    about = hashlib.sha256(b"%s %d %d" % (sum_name, min(pair), max(pair))).digest()
    stream = mask(common(key, other, MASK, about), length)
    if pair[0] > pair[1]:
        stream = np.negative(stream)  # modulo 2^64
    return stream


Index = Annotated[int, Field(ge=0, lt=10**9)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Secret = Annotated[Key, Field(repr=False)]
IN_HEX = ConfigDict(strict=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")


class Parcel(BaseModel):
    """Base class for secure-sum messages. Fields are validated on creation."""

    model_config = IN_HEX

    def to_bytes(self) -> bytes:
        """Encodes the message as JSON bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Decodes a message from received bytes.

        Raises:
            SecureSumError: if the bytes are damaged, or are another kind of message.
        """
        with faults_as(SecureSumError, f"received an invalid {cls.__name__} message"):
            return cls.model_validate_json(sent)


class Keys(Parcel):
    """A client's public keys for one secure sum.

    Args:
        client: the index of the client.
        mask: the public key for pairwise masks.
        channel: the public key for encrypted messages that the server passes on between clients.
        commitment: the SHA-256 hash of the seed of the client's self mask.
        signature: the signature with the client's identity key. It is empty if the parties use no
            identity keys.
    """

    client: Index
    mask: Key
    channel: Key
    commitment: Key
    signature: Annotated[bytes, Field(max_length=64)] = b""

    def signed(self, sum_name: bytes) -> bytes:
        """Returns the bytes that the client signs with its identity key."""
        return b"fedsynth keys %s %d " % (sum_name, self.client) + (
            self.mask + self.channel + self.commitment
        )


class Roster(Parcel):
    """All clients' public keys, as sent by the server to each client.

    Args:
        keys: the public keys, by client.
    """

    keys: dict[Index, Keys]


class Sealed(Parcel):
    """Encrypted secret shares, which the server forwards between clients.

    A message contains the shares of one sender for each receiver, or of each sender for one
    receiver.

    Args:
        of: the encrypted shares, by receiver or by sender.
    """

    of: dict[Index, bytes]


class Present(Parcel):
    """The server's list of the clients whose masked vectors have arrived.

    The server's request for the shares that remove the masks.

    Args:
        clients: the indices of the clients, ascending.
    """

    clients: tuple[Index, ...]


class Shares(Parcel):
    """One client's secret shares, which the server needs to remove masks.

    The message contains one share for each client: of the self mask or of the key, and never both.

    Args:
        seeds: for each present client, a share of the seed of its self mask.
        keys: for each failed client, a share of the key of its pairwise masks.
    """

    seeds: dict[Index, bytes]
    keys: dict[Index, bytes]


def to_vector(sent: bytes) -> IntVector:
    """Decodes a masked vector from received bytes, uint64 [n].

    Raises:
        SecureSumError: if the bytes end within a number.
    """
    try:
        return np.frombuffer(sent, "<u8").astype(np.uint64)
    except ValueError:
        raise SecureSumError(
            f"the masked vector must have a multiple of 8 bytes, got {len(sent)}"
        ) from None
