"""The grid to which a client's part of a sum is rounded if clients share the noise of that sum.

Masks hide integers, so each client rounds its part *after adding its noise*. For a single client's
release this is post-processing. For the sum of several parts it is not, because the rounding error
depends on each part. Lemma 4 in docs/privacy-proofs.md bounds what it reveals:
with spacing γ and noise of standard deviation τ in each part, sums of H rounded parts are within
total variation 2·D·H·exp(−2π²τ²/(γ²H)) of a function of the sum of the unrounded parts. A grid is
fine enough if τ ≥ 2¹²·γ·√H: the bound is then below 10⁻¹⁰⁰⁰⁰⁰⁰⁰⁰, and neither sensitivity nor noise
changes. The coarsest such grid is used: parts are float64, and on a grid about as fine as float64,
ties would matter, more often in larger parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsynth.privacy.errors import PrivacySettingError

DIGITS = 52
"""Bits of a part: a float64 of up to 2^52 grid steps is exactly on the grid."""
MOST_BITS = 63
SUM_DIGITS = 62
"""Bits of the sum, in a signed 64-bit word."""
TAIL = 40.0
"""Noise exceeds this many standard deviations with probability e⁻⁸⁰⁰ per coordinate."""
FINE = 2.0**12
"""The smallest allowed τ / (γ·√H)."""
VALUES = 2.0**10
"""The smallest allowed number of float64 values in a grid step, at the bound."""


@dataclass(frozen=True)
class Grid:
    """The multiples of 2^-bits up to a bound.

    Args:
        bits: number of fractional bits; negative if the steps are larger than 1.
        bound: the bound on the absolute value of a part's coordinate.
    """

    bits: int
    bound: float

    @property
    def spacing(self) -> float:
        """γ."""
        return 2.0**-self.bits


@dataclass(frozen=True)
class Addends:
    """Public bounds on the clients and records whose releases are summed.

    Args:
        clients: the maximum number of clients.
        records: the bound on the units (records, or users) of all clients together.
    """

    clients: int
    records: int


def finest(bound: float, clients: int) -> Grid:
    """Returns the finest grid on which sums of that many parts are exact and never overflow.

    Args:
        bound: the bound on the absolute value of a part's coordinate.
        clients: the number of parts.

    >>> finest(1000.0, 10)
    Grid(bits=42, bound=1000.0)
    >>> 10 * 1000.0 * 2**42 < 2**62
    True
    """
    digits = min(DIGITS, SUM_DIGITS - math.ceil(math.log2(clients)))
    return Grid(min(MOST_BITS, digits - math.ceil(math.log2(bound))), bound)


def grid_of(clip: float, noise_std: float, shares: int, addends: Addends) -> Grid:
    """Returns the coarsest grid that is fine enough for a release whose noise is shared.

    Args:
        clip: 𝒞, the norm bound of one unit's vector.
        noise_std: τ, the standard deviation of the noise that one client adds to a coordinate.
        shares: H.
        addends: the bounds on the summed clients and records.

    Raises:
        PrivacySettingError: the noise is too small for the sums: grid steps would be too close to
            those of float64.

    >>> grid_of(1.0, 5.0, 1, Addends(2, 1000))
    Grid(bits=10, bound=1200.0)
    """
    _, exponent = math.frexp(noise_std / (FINE * math.sqrt(shares)))
    grid = Grid(1 - exponent, addends.records * clip + TAIL * noise_std)
    overflows = addends.clients * grid.bound / grid.spacing > 2.0**SUM_DIGITS
    if overflows or grid.spacing < VALUES * math.ulp(grid.bound):
        raise PrivacySettingError(
            "privacy",
            "noise_multiplier",
            f"is too small for a sum of {addends.records} records of {addends.clients} "
            f"clients in 64 bits: a client's noise is {noise_std:.3g}, in contributions of "
            f"up to {grid.bound:.3g}; add noise, or lower the bound on all records "
            "(max_records)",
        )
    return grid
