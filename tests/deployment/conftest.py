from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployment.local_setup import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)
