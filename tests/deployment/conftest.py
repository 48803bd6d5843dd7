from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.deployment.local_setup import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    torch.set_num_threads(1)
    return Setup(tmp_path)
