"""A finished run's model, from its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth import (
    FedAvg,
    FedStats,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    from_arrays,
    load_dataset,
    load_model,
    simulate,
)
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import OutputError

WIDTH = ModelSettings(width=4, depth=2)
RUNS = {
    "open": RunSettings(FedAvg(local_steps=1), rounds=1, model=WIDTH),
    "private": RunSettings(FedStats(), rounds=2, privacy=PrivacySettings(epsilon=8.0)),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_gives_the_logits_of_the_run_s_model(name: str, tmp_path: Path) -> None:
    run = simulate(RUNS[name], output=tmp_path, quiet=True)
    test = load_dataset("digits")[1]
    images = normalise(test.images[:20], test.spec)
    found = load_model(str(run.folder))
    assert not found.training
    with torch.no_grad():
        torch.testing.assert_close(found(images), run.model.eval()(images))


def test_of_images_of_one_s_own_the_folder_does_not_say_their_form(tmp_path: Path) -> None:
    spec = DatasetSpec("spots", 1, 8, 8, 2, 200, 40, (0.5,), (0.5,), ("a", "b"), "a test")
    pixels = np.random.default_rng(0).integers(0, 256, (200, 1, 8, 8)).astype(np.uint8)
    data = from_arrays(pixels, np.arange(200) % 2, spec)
    run = simulate(RUNS["open"], data=(data, None), output=tmp_path, quiet=True)
    found = load_model(str(run.folder), spec=spec)
    assert found(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


def test_a_folder_without_a_model_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="must be a model file"):
        load_model(tmp_path)
    run = simulate(RUNS["open"], output=tmp_path, quiet=True)
    assert run.folder is not None
    (run.folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OutputError, match="cannot be used"):
        load_model(run.folder)
