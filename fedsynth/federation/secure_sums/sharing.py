"""Shamir's secret sharing ("How to share a secret", 1979) of 32 bytes, over the field of 2^521 - 1.

Fewer shares than the threshold say nothing of the secret, whatever is known of it: for every secret
there are as many polynomials that pass through them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from fedsynth.federation.secure_sums.errors import SecureSumError

PRIME = 2**521 - 1  # a Mersenne prime, above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, holders: list[int], threshold: int) -> dict[int, bytes]:
    """A share for each holder, of which `threshold` give the secret.

    Args:
        secret: 32 bytes.
        holders: numbers from 0, each once; the share is the polynomial's value at number + 1.
        threshold: at least 1, at most as many as holders.

    Raises:
        SecureSumError: anything else.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) == len(holders):
        raise SecureSumError("a secret of 32 bytes is shared by its threshold or more holders")
    if min(holders) < 0:
        raise SecureSumError("a holder's number is at least 0")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return {k: _value(coefficients, k + 1).to_bytes(SHARE_BYTES, "big") for k in holders}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, of at least `threshold` holders' shares.

    Raises:
        SecureSumError: too few shares, or such as give no secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise SecureSumError(f"{len(shares)} shares are fewer than the threshold {threshold}")
    points = [(k + 1, int.from_bytes(share, "big")) for k, share in sorted(shares.items())]
    points = points[:threshold]
    found = 0
    for x, y in points:
        above = 1
        below = 1
        for other, _ in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        found = (found + y * above * pow(below, -1, PRIME)) % PRIME
    if found >= 2 ** (8 * SECRET_BYTES):
        raise SecureSumError("the shares give no secret: one of them is not what was shared")
    return found.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], x: int) -> int:
    """The polynomial's value (Horner)."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
