"""Fixtures of the tests of privacy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released


@pytest.fixture
def unnoised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """Collects the sums without noise and the clip of each release, which becomes zero."""
    sums: list[tuple[Tensor, float]] = []

    def release_zeros(self: GaussianSumMechanism) -> Released:
        assert self._sums is not None
        self._users.close(self._sums)
        sums.append((self._sums.clone().cpu(), self.sensitivity))
        released = torch.zeros_like(self._sums, dtype=torch.float32)
        self._sums = None
        self.steps_left -= 1
        return Released(released)

    monkeypatch.setattr(GaussianSumMechanism, "release", release_zeros)
    return sums
