"""Fixtures of all tests: devices, and mechanisms with repeatable noise or none."""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; tiny networks wait less

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedsynth.privacy import randomness
from fedsynth.privacy.randomness import SecretGenerator

torch.set_num_threads(1)  # sums over more threads are rounded differently
settings.register_profile("fedsynth", deadline=None)  # busy cores may stop any example
settings.load_profile("fedsynth")
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where the mark `cuda` is selected."""
    return torch.device(request.param)


@pytest.fixture
def repeatable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and samples are the same in each run of a test, so that it cannot fail by chance."""
    seeds = itertools.count()
    fresh = lambda: np.random.default_rng(next(seeds))  # noqa: E731
    monkeypatch.setattr(randomness, "_fresh_generator", fresh)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms add no noise; clipping and charges are unchanged."""

    def zeros(_: SecretGenerator, shape: tuple[int, ...], *__: object) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(SecretGenerator, "normal", zeros)
