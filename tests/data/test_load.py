"""The loaders, on files that the tests write in the official formats, errors of missing files, the
real data sets in the folder that FEDSYNTH_DATA names, the registry, and Synthetic(α, β)."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from fedsynth.config.resolve import resolve
from fedsynth.data import load
from fedsynth.data.images import normalise, require_all_classes
from fedsynth.data.load import device_sizes, draw_device, load_dataset
from fedsynth.data.registry import DATASETS, DatasetSpec, dataset_spec, is_published
from fedsynth.errors import DataFilesMissingError, SettingError, UnknownNameError
from tests.raising import raises

FOLDER = os.environ.get("FEDSYNTH_DATA")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSYNTH_DATA", raising=False)


def test_idx_files_are_read(files: Any, tmp_path: Path) -> None:
    written = files.write_idx("FashionMNIST", ("train", "t10k"))
    train, test = load_dataset("fashion-mnist", tmp_path)
    loaded = [train.images[:, 0], train.labels, test.images[:, 0], test.labels]
    for actual, expected in zip(loaded, written, strict=True):
        assert np.array_equal(actual.numpy(), expected)
    assert train.spec.train_size == 60_000  # the published constant, not the size of the files


def test_emnist_letters_are_upright_with_labels_from_zero(files: Any, tmp_path: Path) -> None:
    x, y, *_ = files.write_idx("EMNIST", ("emnist-letters-train", "emnist-letters-test"), first=1)
    train, _ = load_dataset("emnist-letters", tmp_path)
    assert np.array_equal(train.images[:, 0].numpy(), x.transpose(0, 2, 1))
    assert np.array_equal(train.labels.numpy(), y - 1)


def test_cifar_batches_of_python_2_are_read(files: Any, tmp_path: Path) -> None:
    data = files.write_cifar10()
    train, test = load_dataset("cifar10", tmp_path)
    assert np.array_equal(train.images.numpy(), data[:5].reshape(20, 3, 32, 32))
    assert train.labels.tolist() == [i + k for i in range(5) for k in range(4)]
    assert np.array_equal(test.images.numpy(), data[5].reshape(4, 3, 32, 32))
    assert test.labels.tolist() == [5, 6, 7, 8]
    rows = data[0, :3]
    batch = pickle.dumps({"fine_labels": [99, 0, 50], "coarse_labels": [1, 2, 3], "data": rows}, 2)
    files.write_cifar("CIFAR100", {"train": batch, "test": batch})
    train, _ = load_dataset("cifar100", tmp_path)
    assert train.labels.tolist() == [99, 0, 50]
    assert np.array_equal(train.images.numpy(), rows.reshape(3, 3, 32, 32))


def test_svhn_label_ten_becomes_zero(files: Any, tmp_path: Path) -> None:
    x = files.write_svhn()
    train, test = load_dataset("svhn", tmp_path)
    assert train.labels.tolist() == test.labels.tolist() == [0, 1, 9, 0]
    assert np.array_equal(train.images.numpy(), x.transpose(3, 2, 0, 1))


def test_tiny_imagenet_numbers_classes_by_sorted_name(files: Any, tmp_path: Path) -> None:
    files.write_tiny_imagenet()
    train, test = load_dataset("tiny-imagenet", tmp_path)
    assert tuple(train.images.shape) == (200, 3, 64, 64)
    assert train.labels.tolist() == list(range(200))
    red = train.images[:, 0].float().mean((1, 2))
    mismatched = (red - train.labels).abs() > 3  # JPEG
    assert mismatched.nonzero().flatten().tolist() == [7]
    assert train.images[7].unique().tolist() == [77]  # grey, in three equal channels
    assert test.labels.tolist() == list(range(190, 200))
    assert (test.images[:, 0].float().mean((1, 2)) - test.labels).abs().max() < 3


def test_cinic10_ignores_validation_split(files: Any, tmp_path: Path) -> None:
    files.write_cinic10()
    for split, green in zip(load_dataset("cinic10", tmp_path), (0, 100), strict=True):
        assert tuple(split.images.shape) == (30, 3, 32, 32)
        assert split.labels.tolist() == [c for c in range(10) for _ in range(3)]
        assert torch.equal(split.images[:, 0, 5, 6].long(), 20 * split.labels)
        # without `valid`, whose green is 50
        assert split.images[:, 1].unique().tolist() == [green]
        assert split.images[:, 2, 0, 0].tolist() == [0, 1, 2] * 10


def test_office_caltech_tests_on_every_fifth_image(files: Any, tmp_path: Path) -> None:
    files.write_office_caltech()
    train, test = load_dataset("office-caltech-10", tmp_path)
    assert (len(train), len(test)) == (4 * 10 * 5, 4 * 10)
    assert torch.bincount(train.domains).tolist() == [50, 50, 50, 50]
    level = 50 * train.domains + 5 * train.labels
    # also the resized ones, which have one colour
    assert torch.equal(train.images[:, 0, 7, 9].long(), level)
    assert torch.equal(train.images[:, 2, 0, 0].long(), 255 - level)


def test_domainnet_follows_official_lists(files: Any, tmp_path: Path) -> None:
    files.write_domainnet()
    train, test = load_dataset("domainnet-10", tmp_path)
    assert train.labels.tolist() == [9, 0] * 6
    assert train.domains.tolist() == [d for d in range(6) for _ in range(2)]
    assert tuple(test.images.shape) == (12, 3, 64, 64)
    assert (train.images[:, 0].float().mean((1, 2)) - 40 * train.domains).abs().max() < 3  # JPEG


def test_digits_five_resizes_all_images_of_five_domains(files: Any, tmp_path: Path) -> None:
    """The oracle is Pillow, to a level. Each written image is in a split, with label and domain."""
    written = files.write_digits_five()
    train, test = load_dataset("digits-five", tmp_path)
    assert train.spec.domains == tuple(written)
    assert train.images.stride() == test.images.stride() == (3 * 28 * 28, 28 * 28, 28, 1)
    x, y, domains = (
        torch.cat([getattr(split, name) for split in (train, test)]).numpy()
        for name in ("images", "labels", "domains")
    )
    for number, (images, labels) in enumerate(written.values()):
        assert int((test.domains == number).sum()) == -(-len(labels) // 5)
        assert np.bincount(y[domains == number]).tolist() == np.bincount(labels).tolist()
        for image, label in zip(images, labels, strict=True):
            picture = Image.fromarray(image.transpose(1, 2, 0).squeeze())
            picture = picture.resize((28, 28), Image.Resampling.BILINEAR).convert("RGB")
            expected = np.asarray(picture, np.int64).transpose(2, 0, 1)
            loaded = x[(domains == number) & (y == label)]
            assert np.abs(loaded - expected).max((1, 2, 3)).min() <= 1
    # at most one of the two images of a class: a split without classes would often have two
    assert test.labels[test.domains == 4].bincount().max() == 1
    few = replace(train.spec, train_size=5 * 6)
    assert np.bincount(load._read_digits_five(few, tmp_path)[0].domains).tolist() == [6] * 5


def test_femnist_orders_writers_by_name(files: Any, tmp_path: Path) -> None:
    written, tested = files.write_femnist()
    train, test = load_dataset("femnist", tmp_path)
    pixels, labels = zip(*(written[name] for name in sorted(written)), strict=True)
    assert train.groups.tolist() == [0] * 5 + [1] * 3 + [2] * 4 + [3] * 2
    assert np.array_equal(train.images.reshape(14, 784).numpy(), np.concatenate(pixels))
    assert train.labels.tolist() == np.concatenate(labels).tolist()
    assert train.images.dtype == torch.uint8
    # the writer without training images has the last number
    assert test.groups.tolist() == [0, 1, 2, 4, 4]
    assert test.labels.tolist()[-2:] == tested["f0000_14"][1]


def test_digits_need_no_files() -> None:
    train, test = load_dataset("digits")
    assert (len(train), len(test)) == (train.spec.train_size, train.spec.test_size)
    assert train.images.stride() == (64, 64, 8, 1)  # other strides select other convolutions
    assert int(train.images.max()) == 255
    assert set(train.images.unique().tolist()) <= {round(level * 255 / 16) for level in range(17)}
    pixels = train.images.double() / 255
    assert train.spec.mean[0] == pytest.approx(float(pixels.mean()), abs=1e-4)
    assert train.spec.std[0] == pytest.approx(float(pixels.std()), abs=1e-4)
    assert test.labels[:2].tolist() == [4, 9]  # examples 4 and 9 of scikit-learn's list


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("svhn", "train_32x32.mat"),
        ("tiny-imagenet", "tiny-imagenet-200/wnids.txt"),
        ("cinic10", "CINIC-10/train/airplane"),
        ("femnist", "femnist/train/*.json"),
    ],
)
def test_missing_file_errors_name_source(name: str, missing: str, tmp_path: Path) -> None:
    with raises(DataFilesMissingError, "data.missing") as error:
        load_dataset(name, tmp_path)
    for part in (f"{tmp_path}/{missing} of {name} is missing", "data.data_root"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    with raises(DataFilesMissingError, "data.no_folder"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("name", "cls", "failure"),
    [("mnist", "MNIST", URLError("no\nnetwork")), ("svhn", "SVHN", OSError("no\nnetwork"))],
)
def test_failed_downloads_raise_one_line_errors(
    name: str, cls: str, failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, root: str, *args: object, download: bool) -> None:
        assert (root, download) == (str(tmp_path), True)
        raise failure

    monkeypatch.setattr(f"torchvision.datasets.{cls}.__init__", fail)
    with pytest.raises(DataFilesMissingError, match=r"cannot download .* into .*no network"):
        load_dataset(name, tmp_path, download=True)
    with pytest.raises(DataFilesMissingError, match="torchvision cannot download cinic10"):
        load_dataset("cinic10", tmp_path, download=True)


def test_downloads_happen_once(files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(root: str, *, download: bool) -> None:
        calls.append((root, download))
        files.write_idx("MNIST", ("train", "t10k"))

    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    assert len(load_dataset("mnist", tmp_path, download=True)[0]) == 20
    monkeypatch.setenv("FEDSYNTH_DATA", str(tmp_path))
    for download in (True, False):
        assert len(load_dataset("mnist", download=download)[0]) == 20
    assert calls == [(str(tmp_path), True)]


# --------------------------------------------------------------------------------- real data sets


ARRAYS = ("mnist", "fashion-mnist", "emnist-letters", "cifar10", "cifar100", "svhn")


@pytest.mark.data
@pytest.mark.parametrize("name", [*ARRAYS, "office-caltech-10", "femnist"])
def test_real_data_sets_match_registry(name: str) -> None:
    try:
        train, test = load_dataset(name, FOLDER)
    except DataFilesMissingError:
        pytest.skip(f"FEDSYNTH_DATA has no {name}, or is not set")
    spec = train.spec
    if name == "femnist":
        assert int(train.groups.max()) + 1 == len(train.groups.unique())
    else:
        assert (len(train), len(test)) == (spec.train_size, spec.test_size)
    if name in ARRAYS:
        require_all_classes(train)
        require_all_classes(test)
        balanced = name not in ("mnist", "svhn")
        assert len(set(train.class_counts().tolist())) == 1 or not balanced
    if name == "office-caltech-10":
        sizes = torch.bincount(train.domains) + torch.bincount(test.domains)
        assert sizes.tolist() == [958, 1123, 157, 295]
        return
    close = {"abs": 2e-4 if name in ARRAYS else 1e-2}
    for channel in range(spec.channels):
        levels = torch.bincount(train.images[:, channel].flatten(), minlength=256).double()
        share, pixel = levels / levels.sum(), torch.arange(256).double() / 255
        mean = float((share * pixel).sum())
        std = float((share * (pixel - mean).square()).sum().sqrt())
        assert mean == pytest.approx(spec.mean[channel], **close)
        # CIFAR-10's usual constants are not the pixels' deviations (see the registry)
        assert std == pytest.approx(spec.std[channel], **close) or name == "cifar10"
    if name == "emnist-letters":
        x = train.images[train.labels == spec.class_names.index("l")].float()
        # L has its stem at the left and its bar at the bottom; as stored, transposed, the stem lies
        # along the top.
        assert float(x[:, :, :14].mean()) < 0.8 * float(x[:, :, 14:].mean())
        assert float(x[..., :14].mean()) > 1.1 * float(x[..., 14:].mean())


# ---------------------------------------------------------------------------------- the registry


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
        "digits-five": ((3, 28, 28), 10, 37_190, 147_110),  # 5 × 7438; a fifth of each data set
        "cinic10": ((3, 32, 32), 10, 90_000, 90_000),
        "tiny-imagenet": ((3, 64, 64), 200, 100_000, 10_000),
        "femnist": ((1, 28, 28), 62, 724_737, 80_526),  # nine and one tenths of the published total
        "plays": ((1, 1, 80), 80, 816, 208),
        # four and one fifths of LEAF's totals
        "shakespeare": ((1, 1, 80), 80, 3_380_926, 845_232),
        "sent140": ((1, 1, 25), 2, 1_280_398, 320_100),
        "sent140-glove": ((300, 1, 25), 2, 1_280_398, 320_100),
        "office-caltech-10": ((3, 64, 64), 10, 2_042, 491),
        "domainnet-10": ((3, 64, 64), 10, 20_000, 9_000),  # round figures
        "prostate-mri": ((3, 384, 384), 2, 1_111, 369),
        "shapes": ((1, 32, 32), 2, 80, 40),
    } | {
        f"synthetic({variant})": ((1, 1, 60), 10, 6_743, 764)
        for variant in ("iid", "0,0", "0.5,0.5", "1,1")
    }


@pytest.mark.parametrize("spec", DATASETS.values(), ids=list(DATASETS))
def test_specs_are_consistent(spec: DatasetSpec) -> None:
    assert dataset_spec(spec.name) == spec
    assert resolve({"data": {"dataset": spec.name}}).dataset == spec.name
    assert len(set(spec.class_names)) == spec.classes
    assert all(0 < m < 1 for m in (*spec.mean, *spec.std))
    assert "\n" not in spec.source
    assert is_published(spec)
    for changes in ({"name": "scans"}, {"train_size": 1500}, {"source": "our clinic"}):
        assert not is_published(replace(spec, **changes))


def test_synthetic_names_are_normalised_or_rejected() -> None:
    for text, name in {
        "synthetic(0.5, 0.5)": "synthetic(0.5,0.5)",
        "synthetic( 1.0 ,1)": "synthetic(1,1)",
        "synthetic(0.0001,99.9999)": "synthetic(0.0001,99.9999)",
        "synthetic( iid )": "synthetic(iid)",
    }.items():
        assert dataset_spec(text).name == resolve({"data": {"dataset": text}}).dataset == name
        assert is_published(dataset_spec(text))
    for numbers in ("1", "-1,1", "1;1", "nan,1", "\u0661,1", "1e9,1", "100,1"):
        with raises(UnknownNameError, "data.dataset"):
            dataset_spec(f"synthetic({numbers})")


def test_inconsistent_specs_are_rejected() -> None:
    for key, wrong in (
        *(("channels", 0), ("mean", (0.1, 0.2)), ("std", (0.0,))),
        *(("mean", (float("nan"),)), ("class_names", ("a",)), ("bounds", (1.0, 1.0))),
        *(("bounds", (2.0, -2.0)), ("bounds", (0.0, float("inf")))),
    ):
        with pytest.raises(SettingError, match=f"{key} of data set 'digits'"):
            replace(dataset_spec("digits"), **{key: wrong})


# --------------------------------------------------------------------------------- Synthetic(α, β)


@pytest.mark.parametrize(
    ("name", "numbers"), [("iid", (None, None)), ("0,0", (0.0, 0.0)), ("2.5,7", (2.5, 7.0))]
)
def test_synthetic_labels_are_exact_for_model_inputs(name: str, numbers: Any) -> None:
    sizes = ([int(0.9 * n) for n in device_sizes()], [n - int(0.9 * n) for n in device_sizes()])
    for data, counts in zip(load_dataset(f"synthetic({name})"), sizes, strict=True):
        assert torch.bincount(data.groups).tolist() == counts
        assert len(data) in (data.spec.train_size, data.spec.test_size)
        x = normalise(data.images, data.spec).flatten(1).double().numpy()
        for device in (0, 4, 29):
            rows = (data.groups == device).numpy()
            _, W, b = draw_device(*numbers, device, 1)
            assert np.array_equal((x[rows] @ W + b).argmax(axis=1), data.labels.numpy()[rows])


def test_synthetic_devices_have_paper_moments() -> None:
    """Moments of 400 devices, α and β as standard deviations, within five standard errors."""
    alpha, beta, K, n = 3.0, 2.0, 400, 200
    drawn = zip(*(draw_device(alpha, beta, k, n) for k in range(K)), strict=True)
    x, W, b = map(np.stack, drawn)
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
    correlation = np.corrcoef((x - v[:, None]).reshape(-1, 60).T)
    assert np.abs(correlation - np.eye(60)).max() < 6 / np.sqrt(K * n)


def test_iid_synthetic_has_one_distribution() -> None:
    drawn = zip(*(draw_device(None, None, k, 500) for k in range(40)), strict=True)
    x, W, b = map(np.stack, drawn)
    assert np.ptp(W, axis=0).max() == np.ptp(b, axis=0).max() == 0
    deviations = np.arange(1, 61) ** -0.6
    assert np.abs(x.mean(axis=1) / deviations).max() < 5 / np.sqrt(500)
    np.testing.assert_allclose(x.std(axis=(0, 1)), deviations, rtol=5 / np.sqrt(2 * 20_000))
