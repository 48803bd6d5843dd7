"""Readers of data sets that are folders of image files: Tiny-ImageNet and CINIC-10 by class, at
their published size; Office-Caltech-10 and DomainNet-10 by domain and class, resized to 64×64.

A reader returns the training and test splits. For a data set of several domains, a file users.csv
in its folder gives the user of each training image (`fedsynth.data.record_table`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsynth.data.image_files import images_in, read_images
from fedsynth.data.record_table import USERS_FILE, users_of_images
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.splits import Reader, Split, read_lines
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

_TINY = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there"
_CINIC = (
    "unpack CINIC-10.tar.gz of https://datashare.ed.ac.uk/handle/10283/3192 into CINIC-10/ there"
)
_OFFICE = (
    "expected office_caltech_10/DOMAIN/CLASS/* with the domains amazon, caltech, dslr and webcam; "
    "set its folder with data.data_root or FEDSYNTH_DATA"
)
_DOMAINNET = (
    "unpack the domains and lists of http://ai.bu.edu/M3SDA/ into domainnet/ in the data folder"
)
_WORDNET_NUMBER = re.compile(r"n[0-9]{8}")
_ANNOTATION = re.compile(r"(?P<file>[^\t/]*[^\t/.][^\t/]*)\t(?P<name>n[0-9]{8})(\t.*)?")
_DOMAINNET_LINE = re.compile(r"(?P<domain>[a-z]+)/(?P<name>[^/]+)/(?P<file>[^/]+) [0-9]+", re.ASCII)


class LabelledFile(NamedTuple):
    """An image file, the number of its class and, if the data set has domains, of its domain."""

    path: Path
    label: int
    domain: int = 0


def read_tiny_imagenet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Tiny-ImageNet: tiny-imagenet-200/train/WNID/images/* for training, and val/images/*, as
    listed in val/val_annotations.txt, for testing, because `test` has no labels.

    Class c is the c-th of the sorted WordNet numbers in wnids.txt, as in readers that sort folder
    names (the file has another order). Grey images become colour images with three equal channels.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: a list or an image is missing or invalid.
    """
    folder = root / "tiny-imagenet-200"
    wnids = folder / "wnids.txt"
    names = sorted(set("\n".join(read_lines(wnids, spec.name, _TINY)).split()))
    if len(names) != spec.classes or not all(map(_WORDNET_NUMBER.fullmatch, names)):
        raise DataFilesCorruptError(
            f"{wnids} must list {spec.classes} different WordNet numbers such as n01443537: unpack "
            "the data set again"
        )
    train = []
    for label, name in enumerate(names):
        train += _files_of_class(folder / "train" / name / "images", label, spec, _TINY)
    number_of = dict(zip(names, count(), strict=False))
    annotations = folder / "val" / "val_annotations.txt"
    test = []
    for number, line in enumerate(read_lines(annotations, spec.name, _TINY), 1):
        match = _ANNOTATION.fullmatch(line)
        if match and match["name"] in number_of:
            path = folder / "val" / "images" / match["file"]
            test.append(LabelledFile(path, number_of[match["name"]]))
        elif line.strip():
            raise DataFilesCorruptError(
                f"{annotations}, line {number}: expected FILE, tab, one of the WordNet numbers, "
                f"got {line[:80]!r}"
            )
    if not test:
        raise DataFilesCorruptError(f"{annotations} lists no image: unpack the data set again")
    return _load(train, spec), _load(test, spec)


def read_cinic10(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads CINIC-10: CINIC-10/train/CLASS/*.png for training and CINIC-10/test/CLASS/*.png for
    testing. CINIC-10/valid, of the same size, is not used.

    The authors call merging train and valid an option; federated papers use only train (90,000
    images).

    Raises:
        DataFilesMissingError, DataFilesCorruptError: a class is missing, or a file is not an image
            of 32×32.
    """
    splits = []
    for split in ("train", "test"):
        files = []
        for label, name in enumerate(spec.class_names):
            files += _files_of_class(root / "CINIC-10" / split / name, label, spec, _CINIC)
        splits.append(_load(files, spec))
    return splits[0], splits[1]


OTHER_NAMES = {"backpack": "back_pack"}
"""The other spelling of a class folder in some releases of Office-Caltech-10."""


def read_office_caltech(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Office-Caltech-10, office_caltech_10/DOMAIN/CLASS/*. There is no official split: every
    fifth image of a domain and class, by file name, is a test image."""
    train: list[LabelledFile] = []
    test: list[LabelledFile] = []
    for number, domain in enumerate(spec.domains):
        for label, name in enumerate(spec.class_names):
            folder = root / "office_caltech_10" / domain / name
            if not folder.is_dir():
                folder = folder.with_name(OTHER_NAMES.get(name, name))
            files = _files_of_class(folder, label, spec, _OFFICE, domain=number)
            test += files[4::5]
            del files[4::5]
            train += files
    return _load(train, spec, root / "office_caltech_10"), _load(test, spec)


def read_domainnet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads DomainNet-10 by the official lists domainnet/DOMAIN_train.txt and DOMAIN_test.txt of
    "DOMAIN/CLASS/FILE number", which are next to the unpacked folders."""
    folder = root / "domainnet"
    train: list[LabelledFile] = []
    test: list[LabelledFile] = []
    for domain in range(len(spec.domains)):
        train += read_domainnet_list(folder, "train", domain, spec)
        test += read_domainnet_list(folder, "test", domain, spec)
    return _load(train, spec, folder), _load(test, spec)


def read_domainnet_list(
    folder: Path, split: str, domain: int, spec: DatasetSpec
) -> list[LabelledFile]:
    """Returns the listed files of the ten classes. The class comes from the folder's name, because
    the lists number all 345 classes."""
    path = folder / f"{spec.domains[domain]}_{split}.txt"
    files = []
    for number, line in enumerate(read_lines(path, spec.name, _DOMAINNET), 1):
        match = _DOMAINNET_LINE.fullmatch(line.strip())
        if match and match["domain"] == spec.domains[domain] and ".." not in match.groups():
            if match["name"] in spec.class_names:
                image = folder / match["domain"] / match["name"] / match["file"]
                files.append(LabelledFile(image, spec.class_names.index(match["name"]), domain))
        elif line.strip():
            raise DataFilesCorruptError(
                f"{path}, line {number}: expected '{spec.domains[domain]}/CLASS/FILE NUMBER', got "
                f"{line[:80]!r}"
            )
    return files


def _files_of_class(
    folder: Path, label: int, spec: DatasetSpec, instructions: str, domain: int = 0
) -> list[LabelledFile]:
    """Returns the images of a class's folder, sorted by file name."""
    files = [LabelledFile(path, label, domain) for path in images_in(folder)]
    if not files:
        raise DataFilesMissingError(f"{spec.name}: no image in {folder}; {instructions}")
    return files


def _load(
    files: Sequence[LabelledFile], spec: DatasetSpec, users_folder: Path | None = None
) -> Split:
    """Reads a split; with each image's user if `users_folder` has a users.csv.

    Images of data sets with domains are resized; the other data sets have one size.
    """
    paths, labels, domains = zip(*files, strict=True)
    images = read_images(paths, spec, resize=bool(spec.domains))
    users = None
    if users_folder and (users_folder / USERS_FILE).exists():
        relative = [path.relative_to(users_folder).as_posix() for path in paths]
        names = users_of_images(users_folder / USERS_FILE, relative)
        users = np.unique(names, return_inverse=True)[1]
    return Split(
        images,
        np.array(labels, np.int64),
        domains=np.array(domains, np.int64) if spec.domains else None,
        groups=users,
    )


IMAGE_FOLDER_READERS: dict[str, Reader] = {
    "tiny-imagenet": Reader(
        (
            "tiny-imagenet-200/wnids.txt",
            "tiny-imagenet-200/train",
            "tiny-imagenet-200/val/val_annotations.txt",
            "tiny-imagenet-200/val/images",
        ),
        _TINY,
        read_tiny_imagenet,
    ),
    "cinic10": Reader(("CINIC-10/train", "CINIC-10/test"), _CINIC, read_cinic10),
    "office-caltech-10": Reader(("office_caltech_10",), _OFFICE, read_office_caltech),
    "domainnet-10": Reader(("domainnet",), _DOMAINNET, read_domainnet),
}
