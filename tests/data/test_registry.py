"""The registry of data sets, and Synthetic(α, β): its distributions and its exact labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth.config.resolve import resolve
from fedsynth.data.images import normalise
from fedsynth.data.load import device_sizes, draw_device, load_dataset, missing_files
from fedsynth.data.registry import DATASETS, DatasetSpec, dataset_spec, is_published
from fedsynth.errors import SettingError, UnknownNameError


def test_data_sets_have_published_sizes() -> None:
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
        f"synthetic({variant})": ((1, 1, 60), 10, 6_743, 764)
        for variant in ("iid", "0,0", "0.5,0.5", "1,1")
    }


@pytest.mark.parametrize("spec", DATASETS.values(), ids=list(DATASETS))
def test_specs_are_consistent(spec: DatasetSpec) -> None:
    assert dataset_spec(spec.name) is spec
    assert resolve({"data": {"dataset": spec.name}}).dataset == spec.name
    assert len(set(spec.class_names)) == spec.classes
    assert all(0 < m < 1 for m in (*spec.mean, *spec.std))
    assert "\n" not in spec.source
    assert is_published(spec)
    for changes in ({"name": "scans"}, {"train_size": 1500}, {"source": "our clinic"}):
        assert not is_published(dataclasses.replace(spec, **changes))


def test_synthetic_names_are_normalised() -> None:
    for text, name in (
        ("synthetic(0.5, 0.5)", "synthetic(0.5,0.5)"),
        ("synthetic( 1.0 ,1)", "synthetic(1,1)"),
        ("synthetic(0.0001,99.9999)", "synthetic(0.0001,99.9999)"),
        ("synthetic( iid )", "synthetic(iid)"),
    ):
        assert dataset_spec(text).name == resolve({"data": {"dataset": text}}).dataset == name
        assert is_published(dataset_spec(text))


@pytest.mark.parametrize("numbers", ["1", "-1,1", "1;1", "nan,1", "\u0661,1", "1e9,1", "100,1"])
def test_invalid_synthetic_names_are_rejected(numbers: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown data set .*did you mean .*synthetic\("):
        dataset_spec(f"synthetic({numbers})")


def test_inconsistent_specs_are_rejected() -> None:
    for key, wrong in (
        *(("channels", 0), ("mean", (0.1, 0.2)), ("std", (0.0,))),
        *(("mean", (float("nan"),)), ("class_names", ("a",)), ("bounds", (1.0, 1.0))),
        *(("bounds", (2.0, -2.0)), ("bounds", (0.0, float("inf")))),
    ):
        with pytest.raises(SettingError, match=f"{key} of data set 'digits'"):
            dataclasses.replace(dataset_spec("digits"), **{key: wrong})


# --------------------------------------------------------------------------------- Synthetic(α, β)


NAMES = ["synthetic(iid)", "synthetic(0,0)", "synthetic(2.5,7)"]


@pytest.mark.parametrize("name", NAMES)
def test_synthetic_labels_are_exact_for_model_inputs(name: str) -> None:
    alpha, beta = None if "iid" in name else 0, None
    if "iid" not in name:
        alpha, beta = (float(number) for number in name[10:-1].split(","))  # type: ignore[assignment]
    sizes = ([int(0.9 * n) for n in device_sizes()], [n - int(0.9 * n) for n in device_sizes()])
    for data, counts in zip(load_dataset(name), sizes, strict=True):
        assert torch.bincount(data.groups).tolist() == counts
        assert len(data) in (data.spec.train_size, data.spec.test_size)
        x = normalise(data.images, data.spec).flatten(1).double().numpy()
        for device in (0, 4, 29):
            rows = (data.groups == device).numpy()
            _, W, b = draw_device(alpha, beta, device, 1)
            logits = x[rows] @ W + b
            assert np.array_equal(logits.argmax(axis=1), data.labels.numpy()[rows])


def test_synthetic_devices_have_paper_moments() -> None:
    """Moments of 400 devices, α = 3 and β = 2 as standard deviations, within five standard errors."""
    alpha, beta, K, n = 3.0, 2.0, 400, 200
    drawn = [draw_device(alpha, beta, k, n) for k in range(K)]
    W, b = np.stack([d[1] for d in drawn]), np.stack([d[2] for d in drawn])
    x = np.stack([d[0] for d in drawn])
    u = np.concatenate([W.reshape(K, -1), b], axis=1).mean(axis=1)  # of 610 entries: u_k to 0.04
    assert u.std() == pytest.approx(alpha, rel=5 / np.sqrt(2 * K))
    assert u.mean() == pytest.approx(0, abs=5 * alpha / np.sqrt(K))
    assert W.shape == (K, 60, 10)
    assert b.shape == (K, 10)
    assert (W - u[:, None, None]).std() == pytest.approx(1, rel=0.01)
    assert (b - u[:, None]).std() == pytest.approx(1, rel=0.06)
    v = x.mean(axis=1)  # to at most 0.07
    B = v.mean(axis=1)
    assert B.std() == pytest.approx(np.sqrt(beta**2 + 1 / 60), rel=5 / np.sqrt(2 * K))
    assert (v - B[:, None]).std() == pytest.approx(1, rel=0.03)
    assert abs(np.corrcoef(u, B)[0, 1]) < 5 / np.sqrt(K)
    within = (x - v[:, None]).std(axis=(0, 1)) * np.sqrt(n / (n - 1))
    np.testing.assert_allclose(within, np.arange(1, 61) ** -0.6, rtol=5 / np.sqrt(2 * K * n))
    centred = (x - v[:, None]).reshape(-1, 60)
    correlation = np.corrcoef(centred.T) - np.eye(60)
    assert np.abs(correlation).max() < 6 / np.sqrt(K * n)


def test_iid_synthetic_has_one_distribution() -> None:
    drawn = [draw_device(None, None, k, 500) for k in range(40)]
    assert all(
        np.array_equal(W, drawn[0][1]) and np.array_equal(b, drawn[0][2]) for _, W, b in drawn
    )
    x = np.stack([d[0] for d in drawn])
    assert np.abs(x.mean(axis=1) / np.arange(1, 61) ** -0.6).max() < 5 / np.sqrt(500)
    np.testing.assert_allclose(
        x.std(axis=(0, 1)), np.arange(1, 61) ** -0.6, rtol=5 / np.sqrt(2 * 20_000)
    )


def test_synthetic_data_ignore_global_random_state() -> None:
    first, _ = load_dataset("synthetic(1, 1)")
    torch.rand(3)
    second, _ = load_dataset("synthetic(1,1)")
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert missing_files("synthetic(1,1)", Path()) == []
