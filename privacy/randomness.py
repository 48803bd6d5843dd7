"""The client's secret randomness: a ChaCha20 generator keyed with 256 bits from the operating
system.

Noise and sampling masks must be unpredictable to everybody who sees a release. torch's CPU
generator takes 32 bits of seed: a class that a client lacks is released as pure noise, so such a
seed could be found by search and all noise subtracted. Keys therefore come from `secrets`, are
never derived from the run's seed, and are never logged or saved: a generator refuses to be pickled
or copied.

A forked process would go on with a copy of its parent's generator and repeat its noise, so a
generator takes a new key in every process that it is used in. What copies a whole machine (a
snapshot that is started twice, a checkpoint of the process) cannot be seen from inside:
docs/privacy.md says what to do.

Tests may pass their own generator; `is_secret` is then False, and reports made with it say "not
private".
"""

from __future__ import annotations

import os
import secrets
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

DESCRIPTION = (
    "noise and sampling masks: NumPy Generator over randomgen's ChaCha (20 rounds), a 256-bit key "
    "for each client from the "
    "operating system, never derived from the run's seed, logged or saved"
)

_forks = [0]  # forks between the program's start and this process: process numbers alone come back


def _after_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_after_fork)


def this_process() -> tuple[int, int]:
    """What no other process has, its forks included."""
    return os.getpid(), _forks[0]


def _fresh_generator() -> np.random.Generator:
    from randomgen import ChaCha

    key = np.frombuffer(secrets.token_bytes(32), dtype=np.uint64)
    return np.random.Generator(ChaCha(key=key, rounds=20))


class SecretGenerator:
    """Gaussian noise and Bernoulli masks that nobody but the client can repeat.

    Args:
        four_sums: every Gaussian is the sum of four independent ones, halved: a mitigation (no
            proof) of the attack that reads which floating-point numbers a generator can produce
            (Haney et al. 2022; Opacus' "secure mode" does the same), at four times the cost.
        test_only: a seeded NumPy generator, for tests. Never use it on real data: the report then
            says "not private".
    """

    def __init__(
        self, *, four_sums: bool = False, test_only: np.random.Generator | None = None
    ) -> None:
        self.is_secret = test_only is None
        self.four_sums = four_sums
        self._process = this_process()
        self._generator = _fresh_generator() if test_only is None else test_only

    def _own(self) -> np.random.Generator:
        """The generator of this process; test-only ones are left as they are."""
        if self.is_secret and self._process != this_process():
            self._process = this_process()
            self._generator = _fresh_generator()
        return self._generator

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Independent N(0, standard_deviation²), float64, drawn on the CPU and then moved."""
        generator = self._own()
        noise = generator.standard_normal(shape)
        if self.four_sums:
            for _ in range(3):
                noise += generator.standard_normal(shape)
            noise /= 2
        noise *= standard_deviation
        return torch.from_numpy(noise).to(device)

    def poisson_sample(self, records: int, sample_rate: float) -> Tensor:
        """Indices (int64, ascending) of a Poisson sample: each record is in it independently with
        probability `sample_rate`.

        At rate 1 every record is in the sample, exactly.
        """
        return torch.from_numpy(np.flatnonzero(self._own().random(records) < sample_rate))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a secret generator must not be copied, pickled or saved: its noise could be drawn "
            "twice"
        )
