"""`fedsynth student`: from an exported set to a network and its accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth import (
    FedStats,
    PrivacySettings,
    RunSettings,
    export_run,
    load_model,
    load_synthetic,
    simulate,
)
from fedsynth.privacy.report.formatting import format_epsilon

Call = Callable[..., Any]
BRIEF = "--model linear --steps 20 --copies 1"


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("student")
    method = FedStats(ipc=2, drawn_ipc=4)
    settings = RunSettings(method, rounds=3, privacy=PrivacySettings(epsilon=20.0))
    run = simulate(settings, output=place / "runs", quiet=True)
    export_run(str(run.folder), place / "share", with_model=True)
    export_run(str(run.folder), place / "bare")
    return place / "share"


def test_it_prints_training_data_guarantee_and_accuracy(
    share: Path, fedsynth: Call, tmp_path: Path
) -> None:
    made = tmp_path / "mine.safetensors"
    run = fedsynth(f"student {share} {BRIEF} --dataset digits --output {made}")
    assert run.code == 0, run.stderr
    assert "trained on: 60 images, soft labels\n" in run.stdout
    assert "augmented copies: 1 of each image, with a model's labels" in run.stdout
    epsilon = format_epsilon(load_synthetic(share).epsilon or 0.0)
    assert f"guarantee: ε = {epsilon} at δ = 1e-05, as for the synthetic images" in run.stdout
    assert " % of 359 real test images" in run.stdout
    assert "step 20 of 20" in run.stderr
    assert run.stderr.count("step ") == 10
    assert load_model(made) is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--output .", ". is a folder"),
        ("--model net.py", "model.name must be FILE.py:NAME, got net.py"),
        ("--labels sof", "labels cannot be 'sof'"),
        ("--steps 0", "steps must be at least 1"),
        ("--copies -1", "views must be at least 0"),
        ("--width 0", "model.width must be at least 1"),
        ("--teacher nowhere", "nowhere must be a model file"),
        ("--dataset 'synthetic(1,1)'", "data.dataset=synthetic(1,1) must have the same"),
        (
            "--dataset digits --test-data x",
            "data.dataset must not be set together with data.test_folder",
        ),
    ],
)
def test_mistakes_are_one_line(options: str, text: str, share: Path, fedsynth: Call) -> None:
    run = fedsynth(f"student {share} {options}")
    assert (run.code, run.stderr.count("\n")) == (2, 1)
    assert run.stderr.startswith("fedsynth: error: ")
    assert text in run.stderr
