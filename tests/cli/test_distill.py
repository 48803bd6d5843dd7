"""`fedsynth distill`: models from files into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsynth.models.registry import ModelSettings, build_model

Call = Callable[..., Any]
BASE = "distill --dataset digits --width 4 --depth 2"
FAST = (
    "--set server_epochs=2 --set generator_steps=2 --set generator_width=4 --set generator_batch=8"
)


def write(path: Path, name: str, seed: int) -> Path:
    model = build_model(ModelSettings(name, width=4, depth=2), (1, 8, 8), 10, seed)
    save_file(model.state_dict(), path)
    return path


@pytest.mark.parametrize("method", ["fedhydra --set stratification_steps=2", "dense"])
def test_models_of_different_architectures_become_one(
    method: str, tmp_path: Path, fedsynth: Call
) -> None:
    first = write(tmp_path / "a.safetensors", "convnet", 1)
    second = write(tmp_path / "b.safetensors", "resnet8", 2)
    made = tmp_path / "out" / "student.safetensors"
    run = fedsynth(
        f"{BASE} --models {first},{second} --arch convnet,resnet8 --student cnn1 {FAST} --evaluate "
        f"--method {method} --output {made}"
    )
    assert run.code == 0, run.stderr
    assert run.stdout.count("test accuracy") == 3
    assert "batch-norm loss skips models 0, 1" in run.stdout
    student = build_model(ModelSettings("cnn1"), (1, 8, 8), 10, 0)
    student.load_state_dict(load_file(made))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "--models a,b --arch convnet,convnet,convnet",
            "architectures must be one name for all 2 model files, or one name for each file; got "
            "3 names",
        ),
        ("--models a --arch resnet8", "is not a model of the given architecture"),
        ("--models a --arch convent", "did you mean convnet"),
        ("--models broken", "is not a model of the given architecture"),
        ("--models nan", "not finite"),
        ("--models complex", "complex64"),
        ("--models whole", "int32"),
        ("--models double", "not finite"),
        ("--models a --set crop=2", "method.crop must be between 0 and 0.5"),
    ],
)
def test_refusals_are_one_line(
    options: str, text: str, tmp_path: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").write_bytes(b"nonsense")
    state = load_file(write(Path("a"), "convnet", 1))
    save_file(state, "b")
    for name, dtype, value in (
        ("nan", torch.float32, float("nan")),
        ("complex", torch.complex64, 1.0),
        ("whole", torch.int32, 1.0),
        ("double", torch.float64, 1e300),
    ):
        weights = {key: torch.full_like(one, value, dtype=dtype) for key, one in state.items()}
        save_file(weights, name)
    run = fedsynth(f"{BASE} {options} {FAST} --output s")
    assert (run.code, run.stderr.count("\n")) == (2, 1), run.stdout
    assert text in run.stderr
