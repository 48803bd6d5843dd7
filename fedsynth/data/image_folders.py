"""Readers of data sets that are folders of image files: Tiny-ImageNet and CINIC-10 by class, at
their published size; Office-Caltech-10 and DomainNet-10 by domain and class, resized to 64×64.

A reader returns the training and test splits. For a data set of several domains, a file users.csv
in its folder gives the user of each training image (`fedsynth.data.record_table`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsynth.data.folders import Reader, Split, images_in, read_images, read_lines
from fedsynth.data.record_table import USERS_FILE, numbered, read_users
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

_TINY = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there"
_CINIC = (
    "unpack CINIC-10.tar.gz of https://datashare.ed.ac.uk/handle/10283/3192 into CINIC-10/ there"
)


def read_tiny_imagenet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Tiny-ImageNet: tiny-imagenet-200/train/WNID/images/* for training, and val/images/*, as
    listed in val/val_annotations.txt, for testing, because `test` has no labels.

    Class c is the c-th of the sorted WordNet numbers in wnids.txt, as in readers that sort folder
    names (the file has another order). Grey images become colour images with three equal channels.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: a list or an image is missing or invalid.
    """
    folder = root / "tiny-imagenet-200"
    names = sorted(
        line.strip() for line in read_lines(folder / "wnids.txt", spec.name, _TINY) if line.strip()
    )
    wrong = [name for name in names if not re.fullmatch(r"n[0-9]{8}", name)]
    if wrong or len(set(names)) != spec.classes or len(names) != spec.classes:
        fault = (
            f"{wrong[0][:80]!r} is none"
            if wrong
            else f"it has {len(names)} lines, of which {len(set(names))} are different"
        )
        raise DataFilesCorruptError(
            f"{folder / 'wnids.txt'} must list {spec.classes} WordNet numbers such as n01443537: "
            f"{fault}"
        )
    train = _by_class([folder / "train" / name / "images" for name in names], spec, _TINY)
    return train, _annotated(folder / "val", names, spec)


def read_cinic10(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads CINIC-10: CINIC-10/train/CLASS/*.png for training and CINIC-10/test/CLASS/*.png for
    testing. CINIC-10/valid, of the same size, is not used.

    The authors call merging train and valid an option; federated papers use only train (90,000
    images).

    Raises:
        DataFilesMissingError, DataFilesCorruptError: a class is missing, or a file is not an image
            of 32×32.
    """
    folder = root / "CINIC-10"
    train, test = (
        _by_class([folder / split / name for name in spec.class_names], spec, _CINIC)
        for split in ("train", "test")
    )
    return train, test


def _by_class(folders: list[Path], spec: DatasetSpec, hint: str) -> Split:
    """Reads the images of each class's folder, sorted by file name."""
    paths: list[Path] = []
    counts = []
    for folder in folders:
        files = images_in(folder)
        if not files:
            raise DataFilesMissingError(f"{spec.name}: no image in {folder}; {hint}")
        paths += files
        counts.append(len(files))
    return Split(
        read_images(paths, spec), np.repeat(np.arange(len(folders), dtype=np.int64), counts)
    )


def _annotated(folder: Path, names: list[str], spec: DatasetSpec) -> Split:
    """Reads the images that val_annotations.txt lists, in its order. A line has FILE, WNID and a
    box, separated by tabs."""
    path = folder / "val_annotations.txt"
    number_of = {name: c for c, name in enumerate(names)}
    paths = []
    labels = []
    for number, line in enumerate(read_lines(path, spec.name, _TINY), 1):
        if not line.strip():
            continue
        file, _, rest = line.partition("\t")
        label = number_of.get(rest.split("\t")[0].strip())
        if label is None or file in ("", "..") or Path(file).name != file:
            raise DataFilesCorruptError(
                f"{path}, line {number}: expected FILE, tab, one of the WordNet numbers, got "
                f"{line[:80]!r}"
            )
        paths.append(folder / "images" / file)
        labels.append(label)
    if not paths:
        raise DataFilesCorruptError(f"{path} lists no image: unpack the data set again")
    return Split(read_images(paths, spec), np.array(labels, np.int64))


OTHER_NAMES = {"backpack": "back_pack"}
"""The other spelling of a class folder in some releases of Office-Caltech-10."""


def read_office_caltech(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Office-Caltech-10, office_caltech_10/DOMAIN/CLASS/*. There is no official split: every
    fifth image of a domain and class, by file name, is a test image."""
    rows: list[tuple[Path, int, int]] = []
    is_test: list[bool] = []
    for number, domain in enumerate(spec.domains):
        for label, name in enumerate(spec.class_names):
            files = _images_in(root / "office_caltech_10" / domain, name, spec)
            rows += [(file, label, number) for file in files]
            is_test += [position % 5 == 4 for position in range(len(files))]
    train = [row for row, tests in zip(rows, is_test, strict=True) if not tests]
    test = [row for row, tests in zip(rows, is_test, strict=True) if tests]
    folder = root / "office_caltech_10"
    return _with_users(_load(train, spec), [row[0] for row in train], folder), _load(test, spec)


def read_domainnet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads DomainNet-10 by the official lists domainnet/DOMAIN_train.txt and DOMAIN_test.txt of
    "DOMAIN/CLASS/FILE number", which are next to the unpacked folders."""
    splits = []
    train: list[Path] = []
    for split in ("train", "test"):
        rows: list[tuple[Path, int, int]] = []
        for number, domain in enumerate(spec.domains):
            path = root / "domainnet" / f"{domain}_{split}.txt"
            rows += _listed(path, read_lines(path, spec.name, _DOMAINNET), spec, number)
        splits.append(_load(rows, spec))
        train = train or [row[0] for row in rows]
    return _with_users(splits[0], train, root / "domainnet"), splits[1]


def _with_users(split: Split, files: Sequence[Path], folder: Path) -> Split:
    """Adds each image's user to a split, if `folder` has a users.csv."""
    if not (folder / USERS_FILE).exists():
        return split
    paths = [file.relative_to(folder).as_posix() for file in files]
    return replace(split, groups=numbered(read_users(folder / USERS_FILE, paths)))


def _listed(
    path: Path, lines: Sequence[str], spec: DatasetSpec, domain: int
) -> list[tuple[Path, int, int]]:
    """Returns the rows of the ten classes. The class comes from the folder's name, because the
    lists number all 345 classes."""
    rows = []
    for number, line in enumerate(lines, 1):
        name, _, label = line.strip().rpartition(" ")
        parts = name.split("/")
        if not line.strip():
            continue
        if (
            len(parts) != 3
            or parts[0] != spec.domains[domain]
            or ".." in parts
            or not (label.isascii() and label.isdigit())  # "²" is a digit, too, but not a number
        ):
            raise DataFilesCorruptError(
                f"{path}, line {number}: expected '{spec.domains[domain]}/CLASS/FILE NUMBER', got "
                f"{line[:80]!r}"
            )
        if parts[1] in spec.class_names:
            rows.append((path.parent / name, spec.class_names.index(parts[1]), domain))
    return rows


def _images_in(domain: Path, name: str, spec: DatasetSpec) -> list[Path]:
    folder = next(
        (f for f in (domain / name, domain / OTHER_NAMES.get(name, name)) if f.is_dir()),
        domain / name,
    )
    files = images_in(folder)
    if not files:
        raise DataFilesMissingError(
            f"{spec.name}: no image in {domain / name}; {_OFFICE}; set its folder with "
            "data.data_root or FEDSYNTH_DATA"
        )
    return files


def _load(rows: Sequence[tuple[Path, int, int]], spec: DatasetSpec) -> Split:
    table = np.array([row[1:] for row in rows], np.int64).reshape(-1, 2)
    return Split(
        read_images([row[0] for row in rows], spec, resize=True), table[:, 0], domains=table[:, 1]
    )


_OFFICE = (
    "expected office_caltech_10/DOMAIN/CLASS/* with the domains amazon, caltech, dslr and webcam"
)
_DOMAINNET = (
    "unpack the domains and lists of http://ai.bu.edu/M3SDA/ into domainnet/ in the data folder"
)

IMAGE_FOLDER_READERS: dict[str, Reader] = {
    "tiny-imagenet": Reader(
        tuple(
            f"tiny-imagenet-200/{file}"
            for file in ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
        ),
        _TINY,
        read_tiny_imagenet,
    ),
    "cinic10": Reader(("CINIC-10/train", "CINIC-10/test"), _CINIC, read_cinic10),
    "office-caltech-10": Reader(("office_caltech_10",), _OFFICE, read_office_caltech),
    "domainnet-10": Reader(("domainnet",), _DOMAINNET, read_domainnet),
}
