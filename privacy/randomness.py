"""The client's secret randomness: a ChaCha20 generator keyed with 256 bits from the operating system.

Noise and sampling masks must be unpredictable to everybody who sees a release. torch's CPU generator takes 32 bits of seed: a
class that a client lacks is released as pure noise, so such a seed could be found by search and all noise subtracted. Keys
therefore come from `secrets`, are never derived from the run's seed, and are never logged or saved: a generator refuses to be
pickled or copied.

Tests may pass their own generator; `is_secret` is then False, and reports made with it say "not private".
"""

from __future__ import annotations

import secrets
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

DESCRIPTION = (
    "noise and sampling masks: NumPy Generator over randomgen's ChaCha (20 rounds), a 256-bit key for each client from the "
    "operating system, never derived from the run's seed, logged or saved"
)


class SecretGenerator:
    """Gaussian noise and Bernoulli masks that nobody but the client can repeat.

    Args:
        four_sums: every Gaussian is the sum of four independent ones, halved: a mitigation (no proof) of the attack that reads which
            floating-point numbers a generator can produce (Haney et al. 2022; Opacus' "secure mode" does the same), at four times the cost.
        test_only: a seeded NumPy generator, for tests. Never use it on real data: the report then says "not private".
    """

    def __init__(
        self, *, four_sums: bool = False, test_only: np.random.Generator | None = None
    ) -> None:
        self.is_secret, self.four_sums = test_only is None, four_sums
        if test_only is not None:
            self._generator = test_only
            return
        from randomgen import ChaCha

        key = np.frombuffer(secrets.token_bytes(32), dtype=np.uint64)
        self._generator = np.random.Generator(ChaCha(key=key, rounds=20))

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Independent N(0, standard_deviation²), float64, drawn on the CPU and then moved."""
        noise = self._generator.standard_normal(shape)
        if self.four_sums:
            for _ in range(3):
                noise += self._generator.standard_normal(shape)
            noise /= 2
        noise *= standard_deviation
        return torch.from_numpy(noise).to(device)

    def poisson_sample(self, records: int, sample_rate: float) -> Tensor:
        """Indices (int64, ascending) of a Poisson sample: each record is in it independently with probability `sample_rate`.

        At rate 1 every record is in the sample, exactly.
        """
        return torch.from_numpy(np.flatnonzero(self._generator.random(records) < sample_rate))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a secret generator must not be copied, pickled or saved: its noise could be drawn twice"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def __repr__(self) -> str:
        return f"SecretGenerator(is_secret={self.is_secret})"
