"""Tests of floating-point data with public bounds, from scaling to release."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedsynth import (
    DatasetSpec,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    export_run,
    from_arrays,
    from_dataset,
    load_synthetic,
    simulate,
)
from fedsynth.data.images import ImageData, denormalise, normalise, record_digests
from fedsynth.data.registry import spec_from_json
from fedsynth.errors import DataError, SettingError
from fedsynth.methods import method_class
from fedsynth.results.verification import verify_run

DIMENSION = 12
SPEC = DatasetSpec(
    name="vectors",
    channels=1,
    height=1,
    width=DIMENSION,
    classes=3,
    train_size=600,
    test_size=90,
    mean=(0.5,),
    std=(0.25,),
    class_names=("a", "b", "c"),
    source="drawn by a test",
    bounds=(-4.0, 4.0),
)
SMALL: dict[str, Any] = {
    "local_epochs": 2,
    "batch": 32,
    "iterations": 5,
    "ipc": 3,
    "server_epochs": 20,
    "generator_steps": 3,
    "generator_width": 4,
}


def draw(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [N, 12] of three classes and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(number) % 3
    vectors = rng.normal(size=(number, DIMENSION))
    vectors[np.arange(number), labels] += 2
    return vectors, labels


def run(name: str, output: Path | None = None, privacy: PrivacySettings | None = None) -> Any:
    """Runs a method on the vectors."""
    cls = method_class(name)
    values = {key: value for key, value in SMALL.items() if key in cls.__dataclass_fields__}
    model = ModelSettings() if name == "fedstats" else ModelSettings("mlp", width=16)
    settings = RunSettings(
        cls(**values),
        rounds=1,
        model=model,
        partition=PartitionSettings(clients=3),
        privacy=privacy,
    )
    data = from_arrays(*draw(600, 0), SPEC), from_arrays(*draw(90, 1), SPEC)
    return simulate(settings, data=data, test="public", output=output, quiet=True)


def test_values_are_scaled_and_clipped_to_bounds() -> None:
    vectors = np.array([[-4.0, 0.0, 4.0, 9.0, -9.0, 1.0, *[0.0] * 6]])
    data = from_arrays(vectors, [0], SPEC)
    assert data.images.dtype == torch.float32
    assert data.images.shape == (1, 1, 1, DIMENSION)
    assert data.images.flatten()[:6].tolist() == [0.0, 0.5, 1.0, 1.0, 0.0, 0.625]
    inputs = normalise(data.images, SPEC)
    assert inputs.flatten()[:3].tolist() == [-2.0, 0.0, 2.0]
    torch.testing.assert_close(denormalise(inputs, SPEC), data.images)


def test_float64_integers_and_pairs_give_equal_data() -> None:
    vectors = np.arange(24).reshape(2, DIMENSION) % 4
    expected = from_arrays(vectors, [0, 1], SPEC).images
    assert torch.equal(from_arrays(vectors.astype(np.float64), [0, 1], SPEC).images, expected)
    pairs = TensorDataset(torch.tensor(vectors), torch.tensor([0, 1]))
    assert torch.equal(from_dataset(pairs, SPEC).images, expected)


def test_data_sets_without_pairs_are_refused() -> None:
    for pairs in ([], [1, 2], [(np.zeros(3), 0), (np.zeros(4), 1)]):
        with pytest.raises(DataError, match="pairs of an array and a label"):
            from_dataset(pairs, SPEC)  # type: ignore[arg-type]


def test_nan_and_unscaled_values_are_refused() -> None:
    with pytest.raises(DataError, match="NaN"):
        from_arrays(np.full((1, DIMENSION), np.nan), [0], SPEC)
    unscaled = torch.full((1, 1, 1, DIMENSION), 1.5)
    with pytest.raises(DataError, match="from_arrays"):
        ImageData(unscaled, torch.zeros(1, dtype=torch.int64), SPEC)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, -2.0), (0.0, float("inf"))])
def test_bounds_are_finite_and_ascending(bounds: tuple[float, float]) -> None:
    with pytest.raises(SettingError, match="bounds"):
        replace(SPEC, bounds=bounds)


def test_specifications_survive_json() -> None:
    assert spec_from_json(json.loads(json.dumps(asdict(SPEC)))) == SPEC


def test_digests_depend_only_on_float32_values() -> None:
    """A ledger recognises records under other bounds, as float64 and with negative zeros."""
    vectors, labels = draw(3, 0)
    vectors = vectors.astype(np.float32)
    vectors[0, 3] = 0.0
    changed = vectors.copy()
    changed[1, 5] = np.nextafter(vectors[1, 5], np.float32(9))
    negative_zero = vectors.astype(np.float64)
    negative_zero[0, 3] = -0.0

    def digests(values: np.ndarray, bounds: tuple[float, float] = (-4.0, 4.0)) -> np.ndarray:
        data = from_arrays(values, labels, replace(SPEC, bounds=bounds))
        return record_digests(data.subset([0, 1, 2]), np.arange(3), b"key")

    first = digests(vectors)
    for same in (digests(vectors, (0.0, 4.001)), digests(negative_zero)):
        assert (first == same).all()
    assert (first == digests(changed)).all(axis=1).tolist() == [True, False, True]


def test_arrays_of_different_types_are_rejected() -> None:
    """If they were joined, one record's type would change the stored pixels of another."""
    records = [(np.array([[0, 1]], np.uint8), 0), (np.array([[0.5, 1]], np.float32), 1)]
    spec = replace(SPEC, width=2, bounds=None)
    with pytest.raises(DataError, match="different types"):
        from_dataset(records, spec)


@pytest.mark.parametrize(
    ("name", "least"),
    [("fedavg", 0.0), ("feddm", 0.6), ("fedaf", 0.0), ("fedkf", 0.0), ("fedstats", 0.7)],
)
def test_methods_of_each_family_run_on_vectors(name: str, least: float) -> None:
    assert run(name).accuracy >= least


def test_image_networks_refuse_vectors() -> None:
    data = from_arrays(*draw(300, 0), SPEC)
    with pytest.raises(SettingError, match="must be linear or mlp, because the data are vectors"):
        simulate(RunSettings(method_class("fedavg")()), data=(data, None))


def test_private_vectors_are_released_in_original_units(tmp_path: Path) -> None:
    privacy = PrivacySettings(epsilon=8.0, ledger=tmp_path / "ledgers")
    result = run("feddm", tmp_path / "runs", privacy)
    assert result.folder is not None
    assert verify_run(Path(result.folder)).problems == []
    assert not list(Path(result.folder).rglob("synthetic*.png"))
    synthetic = load_synthetic(export_run(str(result.folder), tmp_path / "share"))
    assert synthetic.spec.bounds == SPEC.bounds
    torch.testing.assert_close(synthetic.values(), 8 * synthetic.images - 4)
