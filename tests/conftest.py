"""What all tests share: the devices that a test of mathematics runs on."""

from __future__ import annotations

import pytest
import torch

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU and, marked, a GPU."""
    return torch.device(request.param)
