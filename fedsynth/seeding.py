"""Creates reproducible random generators.

The seed of each generator is derived from the run's seed, a purpose, and numbers such as the round
and the client. Two generators in a run never share state. Adding a client or round therefore does
not change the random numbers of existing ones. Global generators are not used. The noise and
sampling masks of differential privacy do *not* come from here, but from
`fedsynth.privacy.randomness`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Derives a seed for one purpose from the run's seed.

    The result is a 63-bit BLAKE2b hash of all arguments, so different arguments give the same seed
    only by chance.
    """
    text = ":".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(
    seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Returns a PyTorch random generator for one purpose, on the given device.

    Random numbers are the same only on devices of the same type.
    """
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *numbers))


def numpy_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Returns a NumPy random generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, purpose, *numbers))


@contextmanager
def forked_rng(
    seed: int, purpose: str, *numbers: int, device: torch.device | None = None
) -> Iterator[None]:
    """Returns a context manager that seeds PyTorch's global generators from the arguments.

    Use it for module constructors and dropout layers, which accept no generator. The previous state
    is restored afterwards.

    Args:
        seed, purpose, numbers: as for `derive_seed`.
        device: a device whose generator is seeded in addition to that of the CPU.
    """
    devices = []
    if device is not None and device.type == "cuda":
        devices = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(devices=devices):
        derived = derive_seed(seed, purpose, *numbers)
        torch.default_generator.manual_seed(derived)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(derived)
        yield
