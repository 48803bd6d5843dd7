"""A client's secret random generator: ChaCha20 with a 256-bit key from the operating system.

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

_forks = [0]  # forks since the program started: process numbers are reused, so they do not suffice


def _after_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_after_fork)


def this_process() -> tuple[int, int]:
    """Returns an identifier that differs between any two processes, including a process and its
    forks."""
    return os.getpid(), _forks[0]


def _fresh_generator() -> np.random.Generator:
    from randomgen import ChaCha

    key = np.frombuffer(secrets.token_bytes(32), dtype=np.uint64)
    return np.random.Generator(ChaCha(key=key, rounds=20))


class SecretGenerator:
    """A client's source of Gaussian noise and Poisson samples, which nobody else can predict.

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
        """The generator of this process.

        After a fork, the child process gets a generator with a new key. A generator that was
        passed as `test_only` is never replaced.
        """
        if self.is_secret and self._process != this_process():
            self._process = this_process()
            self._current = _fresh_generator()
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a secret generator must not be copied, pickled or saved, because a copy would draw "
            "the same noise again"
        )
