from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.deployment.place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    torch.set_num_threads(1)
    return Place(tmp_path)
