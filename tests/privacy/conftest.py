"""A fixture that keeps the sums of private steps without noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released


@pytest.fixture
def unnoised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """Collects each release's sums without noise, and its clip; what is released is zero."""
    sums: list[tuple[Tensor, float]] = []

    def zeros(self: GaussianSumMechanism) -> Released:
        assert self._sums is not None
        self._users.close(self._sums)
        sums.append((self._sums.clone().cpu(), self.sensitivity))
        made = torch.zeros_like(self._sums, dtype=torch.float32)
        self._sums = None
        self.steps_left -= 1
        return Released(made)

    monkeypatch.setattr(GaussianSumMechanism, "release", zeros)
    return sums
