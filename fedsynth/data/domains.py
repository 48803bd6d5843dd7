"""Data sets of several domains as folders of image files: Office-Caltech-10 and DomainNet-10,
resized to 64×64.

Each reader gives the training and the test split, in the order of file names. A file users.csv in
the data set's folder says whose the training images are (`fedsynth.data.record_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsynth.data.folders import Reader, Split, images_in, read_images, read_lines
from fedsynth.data.record_table import USERS_FILE, numbered, read_users
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

OTHER_NAMES = {"backpack": "back_pack"}
"""A class folder that some releases of Office-Caltech-10 spell otherwise."""


def read_office_caltech(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """office_caltech_10/DOMAIN/CLASS/*. There is no official split: every fifth image of a domain
    and class, by file name, tests."""
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
    """domainnet/DOMAIN_train.txt and DOMAIN_test.txt, the official lists of "DOMAIN/CLASS/FILE
    number", beside the unpacked folders."""
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
    """The split with whose each image is, where `folder` has a users.csv."""
    if not (folder / USERS_FILE).exists():
        return split
    paths = [file.relative_to(folder).as_posix() for file in files]
    return replace(split, groups=numbered(read_users(folder / USERS_FILE, paths)))


def _listed(
    path: Path, lines: Sequence[str], spec: DatasetSpec, domain: int
) -> list[tuple[Path, int, int]]:
    """The rows of the ten classes; the class is the folder's name, as the lists number all 345."""
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
            or not (label.isascii() and label.isdigit())  # "²" is a digit too, and no number
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
            f"{spec.name}: no image in {domain / name}; {_OFFICE}; say where with data.data_root "
            "or FEDSYNTH_DATA"
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
    "unpack the domains and lists of http://ai.bu.edu/M3SDA/ into domainnet/ below the data folder"
)

DOMAIN_READERS: dict[str, Reader] = {
    "office-caltech-10": Reader(("office_caltech_10",), _OFFICE, read_office_caltech),
    "domainnet-10": Reader(("domainnet",), _DOMAINNET, read_domainnet),
}
