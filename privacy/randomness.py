"""A client's secret random generator, ChaCha20 with a 256-bit key from the operating system.

Noise and sampling masks must be unpredictable to anyone who sees a release. torch's CPU generator
is seeded with only 32 bits. A class that a client lacks is released as pure noise, so an attacker
could find such a seed by exhaustive search and subtract all noise. Keys therefore come from
`secrets` and are never derived from the run's seed. They are never logged or saved, so a generator
refuses to be pickled or copied.

After a fork, the child process would hold a copy of the parent's generator and would draw the same
noise again. A generator therefore takes a new key in every process that uses it. However, a process
cannot detect that its whole machine was copied, for example by starting a snapshot twice.
docs/threat-model.md explains what to do in that case.

Tests may pass a seeded generator. `is_secret` is then False, and reports state "not private".

A `Grid` rounds a client's noisy vector before secure aggregation adds up the clients' vectors.

The masks of secure aggregation hide integers. Each client therefore rounds its vector to multiples
of a spacing γ *after adding its noise*. If a single client's vector is released, rounding is
post-processing. If only the sum of several clients' vectors is released, it is not, because the
rounding error depends on each vector. Lemma 4 in docs/privacy-proofs.md bounds what the rounding
reveals. If each of H clients adds noise of standard deviation τ, the sum of the H rounded vectors
is distributed as a function of the unrounded sum, up to total variation 2·D·H·exp(−2π²τ²/(γ²H)).

A grid is fine enough if τ ≥ 2¹²·γ·√H. The bound is then below 10⁻¹⁰⁰⁰⁰⁰⁰⁰⁰, and neither sensitivity
nor noise changes. Of all grids that are fine enough, the coarsest is used. The vectors are float64,
and on a grid about as fine as float64 itself, ties in the rounding would matter, and they would be
more frequent for larger values.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedsynth.errors import PrivacySettingError
from fedsynth.files import this_process

DESCRIPTION = (
    "noise and sampling masks: NumPy Generator over randomgen's ChaCha (20 rounds), a 256-bit key "
    "for each client from the "
    "operating system, never derived from the run's seed, logged or saved"
)


def _fresh_generator() -> np.random.Generator:
    from randomgen import ChaCha

    key = np.frombuffer(secrets.token_bytes(32), dtype=np.uint64)
    return np.random.Generator(ChaCha(key=key, rounds=20))


class SecretGenerator:
    """A random generator with a secret key, for a client's Gaussian noise and Poisson samples.

    The draws cannot be predicted or recomputed without the key.

    Args:
        four_sums: draw every Gaussian value as half the sum of four independent Gaussian values.
            This hinders an attack on the exact floating-point values of the noise (Haney et al.
            2022), although there is no proof that it prevents the attack. Opacus' "secure mode"
            does the same. Drawing noise then takes four times as long.
        test_only: a seeded NumPy generator for tests. Never use it on real data. The report then
            states "not private".
    """

    def __init__(
        self, *, four_sums: bool = False, test_only: np.random.Generator | None = None
    ) -> None:
        self.is_secret = test_only is None
        self.four_sums = four_sums
        self._process = this_process()
        self._current = test_only or _fresh_generator()

    @property
    def _generator(self) -> np.random.Generator:
        """The NumPy generator from which the current process draws.

        After a fork, the child process gets a generator with a new key. A generator that was
        passed as `test_only` is never replaced.
        """
        if self.is_secret and self._process != this_process():
            self._current = _fresh_generator()
            self._process = this_process()  # last: other threads of the child look here first
        return self._current

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns independent noise from N(0, standard_deviation²), as float64.

        The noise is drawn on the CPU and then moved to `device`.
        """
        generator = self._generator
        noise = generator.standard_normal(shape)
        if self.four_sums:
            for _ in range(3):
                noise += generator.standard_normal(shape)
            noise /= 2
        noise *= standard_deviation
        return torch.from_numpy(noise).to(device)

    def poisson_sample(self, records: int, sample_rate: float) -> Tensor:
        """Draws a Poisson sample and returns the indices of its records (int64, ascending).

        Each record is included independently with probability `sample_rate`. With rate 1, every
        record is included.
        """
        return torch.from_numpy(np.flatnonzero(self._generator.random(records) < sample_rate))

    def uniform(self) -> float:
        """Draws a number from [0, 1), for a private selection's secret choices."""
        return float(self._generator.random())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret generator cannot be copied, because a copy draws the same noise")


# The number of bits for one coordinate of a client's vector. A float64 can represent every
# multiple of the spacing up to 2^52 grid steps exactly.
DIGITS = 52

MAX_BITS = 63
# The number of bits for one coordinate of the sum over clients. The coordinate is a signed 64-bit
# integer.
SUM_DIGITS = 62
# The assumed bound on the noise of a coordinate, in standard deviations. The noise exceeds it with
# probability e⁻⁸⁰⁰.
TAIL = 40.0
# The smallest allowed ratio τ / (γ·√H) of noise to grid spacing (see the module's text).
FINE = 2.0**12
# The smallest allowed number of float64 values within one grid step. They are counted at the
# largest allowed coordinate, where float64 is least exact.
VALUES = 2.0**10


@dataclass(frozen=True)
class Grid:
    """The grid to which a client rounds its noisy vector before secure aggregation.

    They are the multiples of 2^-bits whose absolute value is at most `bound`.

    Args:
        bits: the number of fractional bits. It is negative if the grid steps are larger than 1.
        bound: the bound on the absolute value of a coordinate of one client's vector.
    """

    bits: int
    bound: float

    @property
    def spacing(self) -> float:
        """γ, the distance between neighbouring grid values."""
        return 2.0**-self.bits


@dataclass(frozen=True)
class Addends:
    """Public upper bounds on the numbers of clients and records that a sum contains.

    Args:
        clients: the maximum number of clients in the sum.
        records: the bound on the number of units (records or users) of all clients together.
    """

    clients: int
    records: int


def finest(bound: float, clients: int) -> Grid:
    """Returns the finest grid for an exact sum over the clients without overflow.

    Args:
        bound: the bound on the absolute value of a coordinate of one client's vector.
        clients: the number of clients.

    >>> finest(1000.0, 10)
    Grid(bits=42, bound=1000.0)
    >>> 10 * 1000.0 * 2**42 < 2**62
    True
    """
    digits = min(DIGITS, SUM_DIGITS - math.ceil(math.log2(clients)))
    return Grid(min(MAX_BITS, digits - math.ceil(math.log2(bound))), bound)


def grid_of(clip: float, noise_std: float, shares: int, addends: Addends) -> Grid:
    """Returns the coarsest grid that is fine enough for secure aggregation of noisy vectors.

    Each client adds noise to its vector and rounds the result to the grid. Then secure aggregation
    sums the vectors. The text of this module states which grids are fine enough.

    Args:
        clip: 𝒞, the bound on the norm of one unit's vector.
        noise_std: τ, the standard deviation of the noise that one client adds to a coordinate.
        shares: H, the number of clients that together add the charged noise.
        addends: the bounds on the numbers of clients and records in the sum.

    Raises:
        PrivacySettingError: the noise is too small compared with the sum. The sum would overflow
            64 bits, or the grid would be almost as fine as float64 itself.

    >>> grid_of(1.0, 5.0, 1, Addends(2, 1000))
    Grid(bits=10, bound=1200.0)
    """
    _, exponent = math.frexp(noise_std / (FINE * math.sqrt(shares)))
    grid = Grid(1 - exponent, addends.records * clip + TAIL * noise_std)
    overflows = addends.clients * grid.bound / grid.spacing > 2.0**SUM_DIGITS
    if overflows or grid.spacing < VALUES * math.ulp(grid.bound):
        reason = (
            f"is too small for an exact 64-bit sum over {addends.records} records and "
            f"{addends.clients} clients. Increase it, or lower privacy.max_records"
        )
        raise PrivacySettingError("privacy", "noise_multiplier", reason)
    return grid
