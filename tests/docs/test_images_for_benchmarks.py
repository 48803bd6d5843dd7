"""The page on FedStats exports a released set as DPImageBench's evaluation reads it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedsynth import (
    FedStats,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    export_run,
    load_synthetic,
    simulate,
)

PAGE = Path(__file__).parents[2] / "docs" / "fedstats.md"
EACH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the exported images of the digits, `EACH` of each class."""
    place = tmp_path_factory.mktemp("released")
    settings = RunSettings(
        FedStats(ipc=4, drawn_ipc=EACH - 4, image_steps=2),
        rounds=2,
        partition=PartitionSettings(clients=3),
        privacy=PrivacySettings(epsilon=8),
    )
    run = simulate(settings, output=place / "runs", quiet=True)
    export_run(str(run.folder), place / "share")
    return place


def test_released_images_have_the_layout_of_dpimagebench(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.chdir(folder)
    exec(compile(code, "docs/fedstats.md", "exec"), {})
    with np.load(folder / "gen" / "gen.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["x", "y"]
        x, y = arrays["x"], arrays["y"]
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert x.shape == (10 * EACH, 1, 8, 8)
    assert 0 <= x.min() < x.max() <= 1
    assert x.std(axis=0).min() > 0  # images differ in every pixel
    assert np.bincount(y).tolist() == [EACH] * 10
    released = load_synthetic(folder / "share")
    assert np.allclose(x, released.images.clamp(0, 1).numpy())
    assert np.array_equal(y, released.labels.numpy())
