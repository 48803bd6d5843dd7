"""Loading of named data sets, with checks of their structure. Files in torchvision's layout are
read here, data sets in folders by their readers.

The checks are of structure, not of checksums: a mirror may have compressed or re-encoded the files,
which is fine as long as their content is valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedsynth.data.array_files import read_cifar_batch, read_idx, read_svhn
from fedsynth.data.files import expanded, one_line
from fedsynth.data.folders import Reader, Split
from fedsynth.data.image_folders import IMAGE_FOLDER_READERS
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.leaf import LEAF_READERS
from fedsynth.data.registry import DatasetSpec, dataset_spec, synthetic_parameters
from fedsynth.data.synthetic import make_synthetic
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError

_DOWNLOAD = "--download (download=True)"
ROOT_VARIABLE = "FEDSYNTH_DATA"
DIGITS = Path(__file__).with_name("digits.npz")
"""The only data set that the package ships; digits.LICENSE.txt names its authors and licence."""
READERS: dict[str, Reader] = {**IMAGE_FOLDER_READERS, **LEAF_READERS}

_Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
# The files that are read together: one batch file, or an idx file of images and one of labels.
_Group = tuple[str, ...]


def load_dataset(
    name: str, root: Path | None = None, *, download: bool = False
) -> tuple[ImageData, ImageData]:
    """Loads the training and test splits of a named data set, on the CPU.

    Args:
        name: a name that `fedsynth.data.registry.dataset_spec` accepts. `digits` comes with the
            package and the synthetic ones are computed, so they need no files.
        root: the data folder; None uses the environment variable FEDSYNTH_DATA.
        download: fetch missing files through torchvision. Existing files are never replaced.

    Returns:
        Training and test examples.

    Raises:
        UnknownNameError: no such data set.
        DataFilesMissingError: no folder was given, a file is missing, or the download failed.
        DataFilesCorruptError: a file is damaged or has unexpected content.

    >>> train, test = load_dataset("digits")
    >>> len(train), len(test), list(train.images.shape), train.spec.classes
    (1438, 359, [1438, 1, 8, 8], 10)
    """
    spec = dataset_spec(name)
    if name == "digits":
        return _load_digits(spec)
    if synthetic_parameters(name) is not None:
        return _of_both(make_synthetic(spec), spec)
    folder = _data_folder(name, root)
    if name in READERS:
        missing = missing_files(name, folder)
        if missing:
            hint = f" (set its folder with data.data_root or {ROOT_VARIABLE})"
            if download:
                hint = "; torchvision cannot download it"
            raise DataFilesMissingError(
                f"{name}: no {missing[0]} in {folder}; {READERS[name].where}{hint}"
            )
        return _of_both(READERS[name].read(spec, folder), spec)
    if download and missing_files(name, folder):
        _download(name, folder)
    missing = missing_files(name, folder)
    if missing:
        raise DataFilesMissingError(
            f"{name}: no {missing[0]} in {folder}; download it with {_DOWNLOAD}, or set its "
            f"folder with data.data_root or {ROOT_VARIABLE}"
        )
    layout = _TORCHVISION[name]
    return _load_split(spec, folder, layout.train), _load_split(spec, folder, layout.test)


def _download(name: str, root: Path) -> None:
    """Fetches a data set through torchvision, which has the addresses and checksums.

    Raises:
        DataFilesMissingError: the download failed; the message gives the reason.
    """
    from torchvision import datasets

    dataset, *options = _TORCHVISION[name].download
    try:
        calls: list[tuple[str, ...]] = [(option,) for option in options] or [()]
        for arguments in calls:
            getattr(datasets, dataset)(str(root), *arguments, download=True)
    except Exception as error:  # from the network, the disk, or an archive
        reason = one_line(error)
        raise DataFilesMissingError(f"{name}: the download into {root} failed: {reason}") from None


def _data_folder(name: str, root: Path | None) -> Path:
    folder = os.environ.get(ROOT_VARIABLE) if root is None else root
    if not folder:
        source = READERS[name].where if name in READERS else f"{_DOWNLOAD} fetches it"
        raise DataFilesMissingError(
            f"{name}: the data folder with {_first_file(name)} is not set; set "
            f"data.data_root or {ROOT_VARIABLE} ({source})"
        )
    return expanded(folder)


def _first_file(name: str) -> str:
    return READERS[name].needs[0] if name in READERS else _TORCHVISION[name].train[0][0]


def missing_files(name: str, folder: Path) -> list[str]:
    """Returns the files and folders of the data set `name` that `folder` lacks, as relative paths;
    empty if the data set needs no files.

    Raises:
        DataFilesMissingError: the folder cannot be read.
    """
    try:
        if name in READERS:
            return [path for path in READERS[name].needs if not (folder / path).exists()]
        if name not in _TORCHVISION:
            return []
        groups = (*_TORCHVISION[name].train, *_TORCHVISION[name].test)
        required = [relative for group in groups for relative in group]
        return [relative for relative in required if _locate(folder, relative) is None]
    except OSError as error:  # no permission, or the name is too long
        reason = one_line(error.strerror or error)
        raise DataFilesMissingError(
            f"{name}: cannot read the folder {one_line(folder)}: {reason}"
        ) from None


def _of_both(splits: tuple[Split, Split], spec: DatasetSpec) -> tuple[ImageData, ImageData]:
    """Converts splits to `ImageData` without `from_arrays`, which would copy: some data sets fill
    much of the memory."""

    def data(split: Split) -> ImageData:
        domains, groups = (
            None if array is None else torch.from_numpy(array)
            for array in (split.domains, split.groups)
        )
        return ImageData(
            torch.from_numpy(split.images), torch.from_numpy(split.labels), spec, domains, groups
        )

    return data(splits[0]), data(splits[1])


def _locate(folder: Path, relative: str) -> Path | None:
    """Returns the file, or for idx files its compressed form; prefers a regular file."""
    endings = ("", ".gz") if relative.endswith("-ubyte") else ("",)
    candidates = [
        path for path in (folder / f"{relative}{ending}" for ending in endings) if path.exists()
    ]
    return next(
        (path for path in candidates if path.is_file()), candidates[0] if candidates else None
    )


def _load_split(spec: DatasetSpec, folder: Path, groups: tuple[_Group, ...]) -> ImageData:
    parts = []
    for group in groups:
        paths = [_locate(folder, relative) or folder / relative for relative in group]
        try:
            images, labels = _TORCHVISION[spec.name].read(paths, spec)
            parts.append(from_arrays(images, labels, spec))
        except DataFilesCorruptError:
            raise
        except DataError as error:
            raise DataFilesCorruptError(
                f"{' and '.join(map(str, paths))} cannot be used: {error}"
            ) from None
    if len(parts) == 1:
        return parts[0]
    return ImageData(
        torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]), spec
    )


def _read_idx_pair(paths: list[Path], spec: DatasetSpec) -> _Arrays:
    limit = spec.train_size + spec.test_size
    images = read_idx(paths[0], 3, limit * spec.height * spec.width)
    labels = read_idx(paths[1], 1, limit)
    if len(images) != len(labels):
        raise DataFilesCorruptError(
            f"{paths[0]} has {len(images)} images but {paths[1]} has {len(labels)} labels"
        )
    return images, labels


def _read_emnist_letters(paths: list[Path], spec: DatasetSpec) -> _Arrays:
    """Reads EMNIST letters, whose images are stored transposed and whose labels start at 1."""
    images, labels = _read_idx_pair(paths, spec)
    return images.transpose(0, 2, 1), labels.astype(np.int64) - 1


def _load_digits(spec: DatasetSpec) -> tuple[ImageData, ImageData]:
    """Loads the digits of the package: levels 0..16 become 0..255; every fifth example
    (index % 5 == 4) is a test example."""
    with np.load(DIGITS) as file:
        images = np.rint(file["images"] * (255 / 16)).astype(np.uint8)
        labels = file["labels"].astype(np.int64)
    is_test = np.arange(len(images)) % 5 == 4
    train, test = (from_arrays(images[rows], labels[rows], spec) for rows in (~is_test, is_test))
    return train, test


def _idx_files(folder: str, split: str) -> tuple[_Group, ...]:
    return ((f"{folder}/raw/{split}-images-idx3-ubyte", f"{folder}/raw/{split}-labels-idx1-ubyte"),)


class _Layout(NamedTuple):
    """A data set in torchvision's layout: the files of the training and test splits, relative to
    the data folder; the reader of a group of files; and torchvision's class with the values of its
    second argument, if any."""

    train: tuple[_Group, ...]
    test: tuple[_Group, ...]
    read: Callable[[list[Path], DatasetSpec], _Arrays]
    download: tuple[str, ...]


_TORCHVISION: dict[str, _Layout] = {
    "mnist": _Layout(
        _idx_files("MNIST", "train"), _idx_files("MNIST", "t10k"), _read_idx_pair, ("MNIST",)
    ),
    "fashion-mnist": _Layout(
        _idx_files("FashionMNIST", "train"),
        _idx_files("FashionMNIST", "t10k"),
        _read_idx_pair,
        ("FashionMNIST",),
    ),
    "emnist-letters": _Layout(
        _idx_files("EMNIST", "emnist-letters-train"),
        _idx_files("EMNIST", "emnist-letters-test"),
        _read_emnist_letters,
        ("EMNIST", "letters"),
    ),
    "cifar10": _Layout(
        tuple((f"cifar-10-batches-py/data_batch_{i}",) for i in range(1, 6)),
        (("cifar-10-batches-py/test_batch",),),
        lambda paths, spec: read_cifar_batch(paths[0], "labels"),
        ("CIFAR10",),
    ),
    "cifar100": _Layout(
        (("cifar-100-python/train",),),
        (("cifar-100-python/test",),),
        lambda paths, spec: read_cifar_batch(paths[0], "fine_labels"),
        ("CIFAR100",),
    ),
    "svhn": _Layout(
        (("train_32x32.mat",),),
        (("test_32x32.mat",),),
        lambda paths, spec: read_svhn(paths[0]),
        ("SVHN", "train", "test"),
    ),
}
