"""The registry's facts, and that it stays light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fedsynth.data.registry import DATASETS, DatasetSpec, dataset_spec
from fedsynth.errors import SettingError, UnknownNameError


def test_the_names_and_the_published_sizes() -> None:
    sizes = {name: (spec.image_shape, spec.classes, spec.train_size, spec.test_size) for name, spec in DATASETS.items()}
    assert sizes == {
        "digits": ((1, 8, 8), 10, 1_438, 359),
        "mnist": ((1, 28, 28), 10, 60_000, 10_000),
        "fashion-mnist": ((1, 28, 28), 10, 60_000, 10_000),
        "emnist-letters": ((1, 28, 28), 26, 124_800, 20_800),
        "cifar10": ((3, 32, 32), 10, 50_000, 10_000),
        "cifar100": ((3, 32, 32), 100, 50_000, 10_000),
        "svhn": ((3, 32, 32), 10, 73_257, 26_032),
        "office-caltech-10": ((3, 64, 64), 10, 2_042, 491),
        "domainnet-10": ((3, 64, 64), 10, 20_000, 9_000),  # round figures
    }


@pytest.mark.parametrize("spec", DATASETS.values(), ids=list(DATASETS))
def test_every_spec_fits_itself(spec: DatasetSpec) -> None:
    assert dataset_spec(spec.name) is spec
    assert len(set(spec.class_names)) == spec.classes
    assert all(0 < m < 1 for m in (*spec.mean, *spec.std))
    assert "\n" not in spec.source


def test_an_unknown_name_gets_the_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown data set 'fashon-mnist'; did you mean fashion-mnist"):
        dataset_spec("fashon-mnist")


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DATASETS["mine"] = dataset_spec("digits")  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset_spec("digits").classes = 11  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [{"channels": 0}, {"mean": (0.1, 0.2)}, {"std": (0.0,)}, {"mean": (float("nan"),)}, {"class_names": ("a",)}],
)
def test_a_spec_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="data set 'digits'"):
        dataclasses.replace(dataset_spec("digits"), **wrong)  # type: ignore[arg-type]


def test_the_registry_imports_neither_torch_nor_torchvision() -> None:
    code = "import sys, fedsynth.data.registry; print([m for m in ('torch', 'torchvision', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
