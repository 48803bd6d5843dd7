"""Tests of ONNX files: executed by ONNX's reference implementation, they match PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from torch import nn

from fedsynth import (
    FedAvg,
    FedStats,
    ModelSettings,
    PrivacySettings,
    RunResult,
    RunSettings,
    export_onnx,
    from_arrays,
    load_dataset,
    simulate,
)
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import OutputError
from fedsynth.results.onnx_export import _checked_program

BOUNDS = (-4.0, 4.0)


def run(method: Any, place: Path, **more: Any) -> RunResult:
    model = ModelSettings() if isinstance(method, FedStats) else ModelSettings("linear")
    rounds = 3 if isinstance(method, FedStats) else 1
    privacy = more.pop("privacy", PrivacySettings(epsilon=20.0))
    settings = RunSettings(method, rounds=rounds, model=model, privacy=privacy)
    return simulate(settings, output=place / "runs", quiet=True, **more)


def logits(file: Path, values: np.ndarray) -> Any:
    onnx.checker.check_model(onnx.load(file), full_check=True)
    return ReferenceEvaluator(str(file)).run(None, {"images": values})[0]


@pytest.mark.parametrize("method", [FedAvg(local_steps=1), FedStats(features="pixels")])
def test_onnx_model_matches_pytorch_on_pixels(method: Any, tmp_path: Path) -> None:
    """A broken version would leave the normalisation out, or fix the number of images."""
    result = run(method, tmp_path)
    file = export_onnx(str(result.folder), tmp_path / "new" / "model.onnx")
    _, test = load_dataset("digits")
    expected = result.model.eval()(normalise(test.images[:7], test.spec)).detach().numpy()
    pixels = test.images[:7].float().numpy() / 255
    assert logits(file, pixels) == pytest.approx(expected, abs=1e-4)
    assert logits(file, pixels[:1]) == pytest.approx(expected[:1], abs=1e-4)
    facts = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert json.loads(facts["epsilon"]) == result.summary["differential_privacy"]["epsilon"]
    assert json.loads(facts["class_names"]) == list(test.spec.class_names)


def test_onnx_model_takes_vectors_in_their_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, labels = rng.normal(size=(200, 6)) * 3, np.arange(200) % 3
    spec = DatasetSpec(
        "vectors", 1, 1, 6, 3, 200, 200, (0.5,), (0.25,), ("a", "b", "c"), "test", bounds=BOUNDS
    )
    data = from_arrays(vectors, labels, spec)
    settings = RunSettings(FedAvg(), rounds=1, model=ModelSettings("linear"))
    result = simulate(settings, data=(data, data), output=tmp_path, quiet=True)
    with pytest.raises(OutputError, match=r"no privacy guarantee.*unprotected=True"):
        export_onnx(str(result.folder), tmp_path / "model.onnx", spec=spec)
    file = export_onnx(str(result.folder), tmp_path / "model.onnx", spec=spec, unprotected=True)
    expected = result.model(normalise(data.images, spec)).detach().numpy()
    values = vectors.astype(np.float32).reshape(200, 1, 1, 6)
    assert np.abs(values).max() > BOUNDS[1]
    assert logits(file, values) == pytest.approx(expected, abs=1e-4)


def test_onnx_file_has_no_code_and_no_paths(tmp_path: Path) -> None:
    """Regression: the exporter stores lines of the source code, with the paths of the machine."""
    result = run(FedAvg(local_steps=1), tmp_path)
    content = export_onnx(str(result.folder), tmp_path / "model.onnx").read_bytes()
    words = ["def forward", "return self", ".py", str(tmp_path), sys.prefix, "stack_trace"]
    assert [word for word in words if word.encode() in content] == []


def test_models_without_onnx_form_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(run(FedStats(), tmp_path).folder)
    with pytest.raises(OutputError, match="has no form of one of its operations"):
        export_onnx(folder, tmp_path / "model.onnx")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    spec = load_dataset("digits")[1].spec
    _checked_program(network, spec)
    network.forward = lambda x: network[1](x.reshape(len(x), 64))  # type: ignore[method-assign]
    with pytest.raises(OutputError, match="fixes the number of images"):
        _checked_program(network, spec)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(OutputError, match=r"pip install 'fedsynth\[onnx\]'"):
        export_onnx(folder, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
