"""The registry's facts, and that it stays light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.data.registry import DATASETS, DatasetSpec, dataset_spec, is_published
from fedsynth.errors import SettingError, UnknownNameError


def test_the_names_and_the_published_sizes() -> None:
    sizes = {
        name: (spec.image_shape, spec.classes, spec.train_size, spec.test_size)
        for name, spec in DATASETS.items()
    }
    assert sizes == {
        "digits": ((1, 8, 8), 10, 1_438, 359),
        "mnist": ((1, 28, 28), 10, 60_000, 10_000),
        "fashion-mnist": ((1, 28, 28), 10, 60_000, 10_000),
        "emnist-letters": ((1, 28, 28), 26, 124_800, 20_800),
        "cifar10": ((3, 32, 32), 10, 50_000, 10_000),
        "cifar100": ((3, 32, 32), 100, 50_000, 10_000),
        "svhn": ((3, 32, 32), 10, 73_257, 26_032),
        "cinic10": ((3, 32, 32), 10, 90_000, 90_000),
        "tiny-imagenet": ((3, 64, 64), 200, 100_000, 10_000),
        "femnist": ((1, 28, 28), 62, 724_737, 80_526),  # nine and one tenths of the published total
        "office-caltech-10": ((3, 64, 64), 10, 2_042, 491),
        "domainnet-10": ((3, 64, 64), 10, 20_000, 9_000),  # round figures
    } | {
        f"synthetic({which})": ((1, 1, 60), 10, 6_743, 764)
        for which in ("iid", "0,0", "0.5,0.5", "1,1")
    }


@pytest.mark.parametrize("spec", DATASETS.values(), ids=list(DATASETS))
def test_every_spec_fits_itself(spec: DatasetSpec) -> None:
    assert dataset_spec(spec.name) is spec
    assert resolve({"data": {"dataset": spec.name}}).dataset == spec.name
    assert len(set(spec.class_names)) == spec.classes
    assert all(0 < m < 1 for m in (*spec.mean, *spec.std))
    assert "\n" not in spec.source


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("synthetic(0.5, 0.5)", "synthetic(0.5,0.5)"),
        ("synthetic( 1.0 ,1)", "synthetic(1,1)"),
        ("synthetic(0,99.9999)", "synthetic(0,99.9999)"),
        ("synthetic(0.0001,12)", "synthetic(0.0001,12)"),
        ("synthetic( iid )", "synthetic(iid)"),
    ],
)
def test_synthetic_data_sets_of_any_numbers(given: str, name: str) -> None:
    spec = dataset_spec(given)
    assert spec.name == name
    assert dataset_spec(name) is spec
    assert resolve({"data": {"dataset": given}}).dataset == name


@pytest.mark.parametrize("numbers", ["1", "-1,1", "1;1", "nan,1", "\u0661,1", "1e9,1", "100,1"])
def test_invalid_synthetic_data_sets(numbers: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown data set .*did you mean .*synthetic\("):
        dataset_spec(f"synthetic({numbers})")


@pytest.mark.parametrize(
    "wrong",
    [
        {"channels": 0},
        {"mean": (0.1, 0.2)},
        {"std": (0.0,)},
        {"mean": (float("nan"),)},
        {"class_names": ("a",)},
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="data set 'digits'"):
        dataclasses.replace(dataset_spec("digits"), **wrong)  # type: ignore[arg-type]


def test_the_registry_imports_neither_torch_nor_torchvision() -> None:
    code = (
        "import sys, fedsynth.data.registry; print([m for m in ('torch', 'torchvision', 'numpy') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_specification_is_published_only_as_it_is() -> None:
    for name in ("digits", "mnist", "synthetic(1,1)", "synthetic(0.5,0.25)", "synthetic(iid)"):
        assert is_published(dataset_spec(name))
    digits = dataset_spec("digits")
    for own in ({"name": "scans"}, {"train_size": 1500}, {"source": "our clinic"}):
        assert not is_published(dataclasses.replace(digits, **own))
