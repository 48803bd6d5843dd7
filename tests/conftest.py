"""Fixtures of all tests: devices, and mechanisms without noise."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; tiny networks wait less

import pytest
import torch

from fedsynth.privacy.randomness import SecretGenerator

torch.set_num_threads(1)  # sums over more threads are rounded differently
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where the mark `cuda` is selected."""
    return torch.device(request.param)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms add no noise; clipping and charges are unchanged."""

    def zeros(_: SecretGenerator, shape: tuple[int, ...], *__: object) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(SecretGenerator, "normal", zeros)
