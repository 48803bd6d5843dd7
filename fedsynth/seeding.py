"""Reproducible randomness: every stream is derived from (run seed, purpose, numbers such as round
and client).

Two streams of one run never share state, so adding a client, a round or a consumer does not shift
the draws of others, and nothing reads or writes the global generators. The noise and the sampling
masks of differential privacy do *not* come from here: see `fedsynth.privacy.randomness`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Returns a 63-bit seed that depends on all arguments and collides only by chance (BLAKE2b)."""
    text = ":".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(
    seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Returns a `torch.Generator` on `device` for one purpose; draws are equal only on devices of
    one type."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *numbers))


def numpy_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Returns a NumPy generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, purpose, *numbers))


@contextmanager
def forked_rng(seed: int, purpose: str, *numbers: int) -> Iterator[None]:
    """Runs code that takes no generator (module constructors, dropout) under a derived seed, and
    then restores the global state.

    Module constructors draw on the CPU, so only the CPU generator is forked.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, purpose, *numbers))
        yield
