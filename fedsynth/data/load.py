"""Loads the data sets that have a name, and checks their structure.

This module reads files in torchvision's layout. `image_folders` and `leaf` read the other data
sets. Most files are checked by their structure and not by a checksum, because a mirror may have
compressed or encoded them in another way.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedsynth.data.array_files import read_cifar_batch, read_idx, read_svhn
from fedsynth.data.files import expanded, one_line
from fedsynth.data.image_folders import IMAGE_FOLDER_READERS
from fedsynth.data.images import ImageData
from fedsynth.data.leaf import LEAF_READERS
from fedsynth.data.registry import DatasetSpec, dataset_spec, synthetic_parameters
from fedsynth.data.splits import Reader, Split
from fedsynth.data.synthetic import make_synthetic
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError

ROOT_VARIABLE = "FEDSYNTH_DATA"
DIGITS = Path(__file__).with_name("digits.npz")
"""The only data set that is part of the package. digits.LICENSE.txt names the authors and the
licence."""
_DOWNLOAD = "download it with --download (download=True)"


def load_dataset(
    name: str, root: Path | None = None, *, download: bool = False
) -> tuple[ImageData, ImageData]:
    """Loads the training and test splits of a named data set, on the CPU.

    Args:
        name: a name that `fedsynth.data.registry.dataset_spec` accepts. `digits` is part of the
            package and synthetic data sets are computed, so both need no files.
        root: the data folder. None uses the environment variable FEDSYNTH_DATA.
        download: whether to download missing files through torchvision. Existing files are never
            replaced.

    Returns:
        The training examples and the test examples.

    Raises:
        UnknownNameError: no data set has this name.
        DataFilesMissingError: no folder is set, a file is missing, or the download failed.
        DataFilesCorruptError: a file is damaged or has unexpected content.

    >>> train, test = load_dataset("digits")
    >>> len(train), len(test), list(train.images.shape), train.spec.classes
    (1438, 359, [1438, 1, 8, 8], 10)
    """
    spec = dataset_spec(name)
    if name == "digits":
        train, test = _read_digits()
    elif synthetic_parameters(name) is not None:
        train, test = make_synthetic(spec)
    else:
        train, test = _read_files(spec, root or os.environ.get(ROOT_VARIABLE), download)
    return _as_data(train, spec), _as_data(test, spec)


def _read_files(spec: DatasetSpec, root: Path | str | None, download: bool) -> tuple[Split, Split]:
    reader = READERS[spec.name]
    advice = f"{reader.instructions} (set its folder with data.data_root or {ROOT_VARIABLE})"
    if not root:
        raise DataFilesMissingError(
            f"{spec.name} needs a data folder with {reader.required[0]}, but none is set: {advice}"
        )
    folder = expanded(root)
    missing = missing_files(spec.name, folder)
    if missing and download:
        _download(spec.name, folder)
        missing = missing_files(spec.name, folder)
    if missing:
        raise DataFilesMissingError(f"{spec.name}: there is no {missing[0]} in {folder}; {advice}")
    return reader.read(spec, folder)


def missing_files(name: str, folder: Path) -> list[str]:
    """Lists the files and folders that the data set `name` needs and that are missing in `folder`.

    Paths are relative to `folder`. The list is empty if the data set needs no files.

    Raises:
        DataFilesMissingError: the folder cannot be read.
    """
    if name not in READERS:
        return []
    try:
        return [path for path in READERS[name].required if not _locate(folder / path).exists()]
    except OSError as error:  # no permission, or the name is too long
        reason = one_line(error.strerror or error)
        raise DataFilesMissingError(
            f"{name}: cannot read the folder {one_line(folder)}: {reason}"
        ) from None


def _locate(path: Path) -> Path:
    """Returns the path of the compressed file if only the compressed file exists."""
    compressed = path.with_name(f"{path.name}.gz")
    if compressed.exists() and not path.exists():
        return compressed
    return path


def _download(name: str, root: Path) -> None:
    """Downloads a data set through torchvision, which knows the addresses and checksums.

    Raises:
        DataFilesMissingError: the download failed. The message gives the reason.
    """
    from torchvision import datasets

    if name not in _DOWNLOADS:
        raise DataFilesMissingError(
            f"{name}: torchvision cannot download it: {READERS[name].instructions}"
        )
    dataset, variants = _DOWNLOADS[name]
    try:
        for arguments in variants:
            getattr(datasets, dataset)(str(root), *arguments, download=True)
    except Exception as error:  # from the network, the disk, or an archive
        reason = one_line(error)
        raise DataFilesMissingError(f"{name}: the download into {root} failed: {reason}") from None


def _as_data(split: Split, spec: DatasetSpec) -> ImageData:
    """Converts a split to `ImageData` without a copy, because some data sets are large."""
    try:
        data = ImageData(torch.from_numpy(split.images), torch.from_numpy(split.labels), spec)
        if split.domains is not None:
            data = replace(data, domains=torch.from_numpy(split.domains))
        if split.groups is not None:
            data = replace(data, groups=torch.from_numpy(split.groups))
        return data
    except DataError as error:
        raise DataFilesCorruptError(f"the files cannot be used: {error}") from None


def _read_digits() -> tuple[Split, Split]:
    """Reads the handwritten digits that are part of the package.

    Pixel values 0 to 16 are scaled to 0 to 255. Every fifth example (index % 5 == 4) is a test
    example.
    """
    with np.load(DIGITS) as file:
        images = np.rint(file["images"] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        labels = file["labels"].astype(np.int64)
    is_test = np.arange(len(images)) % 5 == 4
    return Split(images[~is_test], labels[~is_test]), Split(images[is_test], labels[is_test])


def _read_mnist(
    spec: DatasetSpec, root: Path, folder: str, prefixes: tuple[str, str]
) -> tuple[Split, Split]:
    """Reads MNIST or a data set that has MNIST's file format.

    The images of EMNIST's letters are transposed, and 1 is subtracted from their labels, because
    their files store transposed images and labels that start at 1.
    """
    limit = spec.train_size + spec.test_size
    splits = []
    for prefix in prefixes:
        stem = root / folder / "raw" / prefix
        path = _locate(Path(f"{stem}-images-idx3-ubyte"))
        images = read_idx(path, 3, limit * spec.height * spec.width)
        labels = read_idx(_locate(Path(f"{stem}-labels-idx1-ubyte")), 1, limit).astype(np.int64)
        if spec.name == "emnist-letters":
            images = images.transpose(0, 2, 1)
            labels = labels - 1
        splits.append(Split(images[:, None].copy(), labels))
    return splits[0], splits[1]


def _read_cifar(
    spec: DatasetSpec, root: Path, train: tuple[str, ...], test: str, label_key: str
) -> tuple[Split, Split]:
    splits = []
    for files in (train, (test,)):
        images, labels = zip(
            *(read_cifar_batch(root / file, label_key) for file in files), strict=True
        )
        splits.append(Split(np.concatenate(images), np.concatenate(labels)))
    return splits[0], splits[1]


def _read_svhn(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    train = Split(*read_svhn(root / "train_32x32.mat"))
    return train, Split(*read_svhn(root / "test_32x32.mat"))


def _mnist_reader(folder: str, prefixes: tuple[str, str] = ("train", "t10k")) -> Reader:
    required = []
    for prefix in prefixes:
        required.append(f"{folder}/raw/{prefix}-images-idx3-ubyte")
        required.append(f"{folder}/raw/{prefix}-labels-idx1-ubyte")
    return Reader(
        tuple(required), _DOWNLOAD, partial(_read_mnist, folder=folder, prefixes=prefixes)
    )


def _cifar_reader(train: tuple[str, ...], test: str, label_key: str) -> Reader:
    read = partial(_read_cifar, train=train, test=test, label_key=label_key)
    return Reader((*train, test), _DOWNLOAD, read)


READERS: dict[str, Reader] = {
    **IMAGE_FOLDER_READERS,
    **LEAF_READERS,
    "mnist": _mnist_reader("MNIST"),
    "fashion-mnist": _mnist_reader("FashionMNIST"),
    "emnist-letters": _mnist_reader("EMNIST", ("emnist-letters-train", "emnist-letters-test")),
    "cifar10": _cifar_reader(
        tuple(map("cifar-10-batches-py/data_batch_{}".format, range(1, 6))),
        "cifar-10-batches-py/test_batch",
        "labels",
    ),
    "cifar100": _cifar_reader(("cifar-100-python/train",), "cifar-100-python/test", "fine_labels"),
    "svhn": Reader(("train_32x32.mat", "test_32x32.mat"), _DOWNLOAD, _read_svhn),
}
_DOWNLOADS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "mnist": ("MNIST", [()]),
    "fashion-mnist": ("FashionMNIST", [()]),
    "emnist-letters": ("EMNIST", [("letters",)]),
    "cifar10": ("CIFAR10", [()]),
    "cifar100": ("CIFAR100", [()]),
    "svhn": ("SVHN", [("train",), ("test",)]),
}
"""The name of torchvision's class for each data set, and the arguments with which it is called."""
