"""Real vectors as whole numbers modulo 2^64, and back: masks are uniform over these, and sums of
them are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsynth.errors import SettingError
from fedsynth.federation.secure_sums.errors import SecureSumError

Words = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]
BITS = 64


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point form of real numbers in [-bound, bound].

    Args:
        bound: of each coordinate's absolute value, public. Larger ones are an error, and never cut
            off: a sum of cut-off noise is no noise of any known distribution.
        clients: the most vectors of a sum: it must not overflow.
        fraction: bits behind the point; negative if the steps are larger than 1. A coordinate of
            the sum is off by at most clients / 2^(fraction + 1).
        wraps: words of larger ones are taken modulo 2^64, too. So it must be where they are
            private: an error would tell of one client's vector what its sum alone may tell.

    >>> form = FixedPoint(bound=4.0, clients=3)
    >>> words = form.encode(np.array([1.5, -0.25])) + form.encode(np.array([1.0, -3.0]))
    >>> form.decode(words).tolist()
    [2.5, -3.25]
    """

    bound: float
    clients: int
    fraction: int = 24
    wraps: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf or self.clients < 1 or abs(self.fraction) > 1000:
            raise SettingError(
                None, "bound, clients, fraction", "must be above 0, and within ±1000 bits"
            )
        if self.clients * (self.bound * 2.0**self.fraction + 1) >= 2.0 ** (BITS - 1):
            raise SettingError(
                None,
                "bound",
                f"of {self.bound:g} with {self.clients} clients and {self.fraction} bits overflows "
                f"{BITS} bits: fewer bits behind the point",
            )

    def encode(self, vector: npt.ArrayLike) -> Words:
        """A vector as uint64 [n].

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
        if self.wraps:  # exact: the remainder of whole numbers in float64 is one
            steps = np.fmod(steps, 2.0**BITS)
            steps -= np.where(steps >= 2.0 ** (BITS - 1), 2.0**BITS, 0.0)
            steps += np.where(steps < -(2.0 ** (BITS - 1)), 2.0**BITS, 0.0)
        return steps.astype(np.int64).view(np.uint64)

    def decode(self, words: Words) -> Reals:
        """The sum of at most `clients` encoded vectors, float64 [n]."""
        return words.view(np.int64).astype(np.float64) / 2.0**self.fraction
