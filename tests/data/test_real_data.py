"""Facts about the real data sets, read from the folder that FEDSYNTH_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth.data.images import denormalise, normalise, require_all_classes
from fedsynth.data.load import load_dataset, missing_files

FOLDER = os.environ.get("FEDSYNTH_DATA")

pytestmark = pytest.mark.data


def needs(name: str) -> pytest.MarkDecorator:
    missing = FOLDER is None or bool(missing_files(name, Path(FOLDER)))
    return pytest.mark.skipif(missing, reason=f"FEDSYNTH_DATA has no {name}, or is not set")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs(name))
        for name in ("mnist", "fashion-mnist", "emnist-letters", "cifar10", "cifar100", "svhn")
    ],
)
def test_sizes_constants_and_classes_match_registry(name: str) -> None:
    train, test = load_dataset(name)
    spec = train.spec
    assert (len(train), len(test)) == (spec.train_size, spec.test_size)
    require_all_classes(train)
    require_all_classes(test)
    # balanced by construction
    if name not in ("mnist", "svhn"):
        assert train.class_counts().tolist() == [spec.train_size // spec.classes] * spec.classes
    for channel in range(spec.channels):
        levels = torch.bincount(train.images[:, channel].flatten(), minlength=256).double()
        share, pixel = levels / levels.sum(), torch.arange(256).double() / 255
        mean = float((share * pixel).sum())
        std = float((share * (pixel - mean).square()).sum().sqrt())
        assert mean == pytest.approx(spec.mean[channel], abs=2e-4)
        # CIFAR-10's usual constants are not the pixels' deviations (see the registry)
        if name != "cifar10":
            assert std == pytest.approx(spec.std[channel], abs=2e-4)
    sample = train.images[:5000]
    assert torch.equal(denormalise(normalise(sample, spec), spec), sample)


@needs("cifar10")
def test_cifar10_matches_standard_unpickler() -> None:
    import pickle

    train, test = load_dataset("cifar10")
    folder = Path(FOLDER or "") / "cifar-10-batches-py"
    batches = [
        pickle.loads((folder / name).read_bytes(), encoding="latin1")
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
    ]
    images = torch.cat([train.images, test.images]).split(10_000)
    labels = torch.cat([train.labels, test.labels]).split(10_000)
    for batch, x, y in zip(batches, images, labels, strict=True):
        assert np.array_equal(batch["data"].reshape(-1, 3, 32, 32), x.numpy())
        assert batch["labels"] == y.tolist()


@needs("emnist-letters")
def test_emnist_letters_are_upright() -> None:
    train, _ = load_dataset("emnist-letters")
    x = train.images[train.labels == train.spec.class_names.index("l")].float()
    # L has its stem at the left and its bar at the bottom; as stored, transposed, the stem lies
    # along the top.
    assert float(x[:, :, :14].mean()) < 0.8 * float(x[:, :, 14:].mean())
    assert float(x[..., :14].mean()) > 1.1 * float(x[..., 14:].mean())


@needs("femnist")
def test_femnist_has_published_moments_and_writers() -> None:
    train, _ = load_dataset("femnist")
    assert int(train.groups.max()) + 1 == len(train.groups.unique())  # no number without a writer
    pixels = train.images[:: max(1, len(train) // 10_000)].double() / 255
    assert float(pixels.mean()) == pytest.approx(train.spec.mean[0], abs=5e-3)
    assert float(pixels.std()) == pytest.approx(train.spec.std[0], abs=1e-2)


@needs("office-caltech-10")
def test_office_caltech_has_its_published_domains() -> None:
    train, test = load_dataset("office-caltech-10")
    assert (len(train), len(test)) == (train.spec.train_size, train.spec.test_size)
    sizes = torch.bincount(train.domains) + torch.bincount(test.domains)
    assert sizes.tolist() == [958, 1123, 157, 295]
