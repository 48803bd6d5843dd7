"""The grid that a client's part of a sum is rounded to, where clients share the noise of that sum.

Masks hide whole numbers, so each client rounds what it has *after its noise*. Of one client's own
release that is post-processing; of the sum of several it is none, as what is rounded off depends on
each part. The lemma in docs/privacy.md ("Rounding on a grid") bounds what it can tell: with spacing
γ, and a part's noise of deviation τ, sums of H rounded parts are at total variation at most
2·D·H·exp(−2π²τ²/(γ²H)) from a function of the sum of the unrounded ones. A grid is fine enough
where τ ≥ 2¹⁰·γ·√H: then this is below 10⁻⁸⁰⁰⁰⁰⁰⁰, and neither sensitivity nor noise changes. The
coarsest such grid is taken, and not the finest: parts are float64, and where a step is not much
larger than float64's own, ties go to even numbers of steps, which the lemma does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedsynth.privacy.errors import PrivacySettingError

DIGITS = 52
"""Bits of a part: a float64 of at most so many grid steps is on the grid exactly."""
MOST_BITS = 63
SUM_DIGITS = 62
"""Bits of the sum, in a signed word of 64."""
TAIL = 40.0
"""So many deviations no noise is beyond: the odds are e⁻⁸⁰⁰ a coordinate."""
FINE = 2.0**10
"""A part's noise has at least so many grid steps times √H."""
SPARE = 4.0
"""So many times as many, where there is room."""


@dataclass(frozen=True)
class Grid:
    """Multiples of 2^-bits, up to a bound.

    Args:
        bits: behind the point; below 0, the steps are larger than 1.
        bound: of the absolute value of a part's coordinate.
    """

    bits: int
    bound: float

    @property
    def spacing(self) -> float:
        """γ."""
        return 2.0**-self.bits


@dataclass(frozen=True)
class Addends:
    """Whose releases are added up, and how large these are at most; public.

    Args:
        clients: how many they are at most.
        records: the bound on the units (records, or users) of all clients together.
    """

    clients: int
    records: int


def finest(bound: float, clients: int) -> Grid:
    """The finest grid on which sums of so many parts are exact, and never overflow.

    Args:
        bound: of the absolute value of a part's coordinate.
        clients: how many parts.

    >>> finest(1000.0, 10)
    Grid(bits=42, bound=1000.0)
    >>> 10 * 1000.0 * 2**42 < 2**62
    True
    """
    digits = min(DIGITS, SUM_DIGITS - math.ceil(math.log2(clients)))
    return Grid(min(MOST_BITS, digits - math.ceil(math.log2(bound))), bound)


def grid_of(clip: float, deviation: float, shares: int, addends: Addends) -> Grid:
    """The grid of a release whose noise is shared.

    Args:
        clip: 𝒞, of one unit's vector.
        deviation: τ, of the noise that one client adds to a coordinate.
        shares: H.
        addends: whose sum it is.

    Raises:
        PrivacySettingError: the noise is too small for the sums that it must hide: what rounding
            tells would not be negligible.
    """
    grid = finest(addends.records * clip + TAIL * deviation, addends.clients)
    enough = math.ceil(math.log2(SPARE * FINE * math.sqrt(shares) / deviation))
    grid = replace(grid, bits=min(grid.bits, max(0, enough)))
    if deviation < FINE * grid.spacing * math.sqrt(shares):
        raise PrivacySettingError(
            "privacy",
            "noise_multiplier",
            f"is too small for a sum of {addends.records} records of {addends.clients} clients in "
            f"64 bits: a client's noise of {deviation:.3g} has too few steps of {grid.spacing:.3g}",
        )
    return grid
