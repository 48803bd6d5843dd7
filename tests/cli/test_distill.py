"""`fedsynth distill`: models from files into one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsynth.cli.app import app
from fedsynth.methods import method_class
from fedsynth.models.registry import ModelSettings, build_model

FAST = (
    "--set",
    "server_epochs=2",
    "--set",
    "generator_steps=2",
    "--set",
    "generator_width=4",
    "--set",
    "generator_batch=8",
)


def write(path: Path, name: str, seed: int) -> str:
    model = build_model(ModelSettings(name, width=4, depth=2), (1, 8, 8), 10, seed)
    save_file(model.state_dict(), path)
    return str(path)


def call(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = 0
    try:
        app(["distill", "--dataset", "digits", "--width", "4", "--depth", "2", *options])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_what_the_generator_made_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"agreement": 0.25, "class_entropy": 1.0, "class_entropy_share": 0.5, "classes": 4}
    kind = method_class("dense")
    monkeypatch.setattr(kind, "facts", lambda self, state, context: {"generator": facts})
    made = str(tmp_path / "student.safetensors")
    model = write(tmp_path / "a.safetensors", "convnet", 1)
    code, out, err = call(
        capsys,
        "--models",
        model,
        "--arch",
        "convnet",
        "--student",
        "convnet",
        "--method",
        "dense",
        *FAST,
        "--output",
        made,
    )
    assert code == 0, err
    assert "generated: class entropy 0.50 of log C, 4 classes, 25.0 % as asked\n" in out


@pytest.mark.parametrize("method", ["fedhydra", "dense"])
def test_models_of_different_architectures_become_one(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ",".join(
        [
            write(tmp_path / "a.safetensors", "convnet", 1),
            write(tmp_path / "b.safetensors", "resnet8", 2),
        ]
    )
    fast = (*FAST, "--set", "stratification_steps=2") if method == "fedhydra" else FAST
    made = tmp_path / "out" / "student.safetensors"
    code, out, err = call(
        capsys,
        "--models",
        files,
        "--arch",
        "convnet,resnet8",
        "--student",
        "cnn1",
        "--method",
        method,
        *fast,
        "--evaluate",
        "--output",
        str(made),
    )
    assert code == 0, err
    assert out.count("test accuracy") == 3
    assert "no batch-norm term for models 0, 1" in out
    student = build_model(ModelSettings("cnn1"), (1, 8, 8), 10, 0)
    student.load_state_dict(load_file(made))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("--models", "{a},{missing}"), "no model file"),
        (
            ("--models", "{a},{b}", "--arch", "convnet,convnet,convnet"),
            "--arch must be one name for all 2 model files, or one each; got 3",
        ),
        (("--models", "{a}", "--arch", "resnet8"), "is not a model of this architecture"),
        (("--models", "{a}", "--method", "fedavg"), "does not distil without data"),
        (("--models", "{a}", "--arch", "convent"), "did you mean convnet"),
        (("--models", "{broken}"), "is not a model of this architecture"),
        (("--models", "{nan}"), "not finite"),
        (("--models", "{complex}"), "complex64"),
        (("--models", "{whole}"), "int32"),
        (("--models", "{double}"), "not finite"),
        (("--models", ","), "at least one model file"),
        (("--models", "{a}", "--set", "icp=2"), "unknown setting of fedhydra"),
    ],
    ids=str,
)
def test_refusals_are_one_line(
    change: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").write_bytes(b"nonsense")
    model = build_model(ModelSettings(width=4, depth=2), (1, 8, 8), 10, 0)
    for name, dtype, value in (
        ("nan", torch.float32, float("nan")),
        ("complex", torch.complex64, 1.0),
        ("whole", torch.int32, 1.0),
        ("double", torch.float64, 1e300),
    ):
        state = model.state_dict()
        weights = {key: torch.full_like(one, value, dtype=dtype) for key, one in state.items()}
        save_file(weights, tmp_path / name)
    names = {
        "a": write(tmp_path / "a", "convnet", 1),
        "b": write(tmp_path / "b", "convnet", 2),
        "missing": str(tmp_path / "none"),
        "broken": str(tmp_path / "broken"),
        **{one: str(tmp_path / one) for one in ("nan", "complex", "whole", "double")},
    }
    code, out, err = call(
        capsys,
        *(option.format(**names) for option in change),
        *FAST,
        "--output",
        str(tmp_path / "s"),
    )
    assert code == 2, out
    assert text in err
    assert err.count("\n") == 1
