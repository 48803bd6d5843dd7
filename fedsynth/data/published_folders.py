"""Reads published data sets that are folders of files, such as Tiny-ImageNet and FEMNIST.

Tiny-ImageNet and CINIC-10 have class folders, and keep their published image size.
Office-Caltech-10 and DomainNet-10 have domain and class folders, and are resized to 64×64. MNIST-M
has lists of labelled images. Each reader returns a training and a test split.

FEMNIST, handwritten characters grouped by writer, consists of the JSON files that LEAF writes
(Caldas et al., 2018, arXiv 1812.01097). The files `femnist/train/*.json` and `femnist/test/*.json`
are copies of those in LEAF's folders data/femnist/data/train and data/femnist/data/test. Each file
has the form {"users": [writer], "num_samples": [n], "user_data": {writer: {"x": [[784 numbers in
[0, 1]]], "y": [0 … 61]}}}. As in LEAF, the characters are black (0) on white (1), whereas MNIST and
EMNIST are white on black. Labels 0–9 are digits, 10–35 are upper-case letters, and 36–61 are
lower-case letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field

from fedsynth.data.files import MAX_LIST_BYTES, Split, missing
from fedsynth.data.images import IntArray
from fedsynth.data.pixels import images_in, read_images
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, faults_as, one_line
from fedsynth.files import read_regular, read_text

_WORDNET_NUMBER = re.compile(r"n[0-9]{8}")
_ANNOTATION = re.compile(r"(?P<file>[^\t/]*[^\t/.][^\t/]*)\t(?P<name>n[0-9]{8})(\t.*)?")
_MNIST_M_LINE = re.compile(r"(?P<file>[0-9]+\.png) (?P<label>[0-9])", re.ASCII)
_DOMAINNET_LINE = re.compile(r"(?P<domain>[a-z]+)/(?P<name>[^/]+)/(?P<file>[^/]+) [0-9]+", re.ASCII)


class LabelledFile(NamedTuple):
    """An image file with its class and domain indices.

    Without domains, the index is 0.
    """

    path: Path
    label: int
    domain: int = 0


def read_tiny_imagenet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Tiny-ImageNet.

    The training images are tiny-imagenet-200/train/WNID/images/*. The test images are val/images/*,
    with the labels in val/val_annotations.txt, because the images in `test` have no labels. Classes
    are in the sorted order of the WordNet numbers in wnids.txt. The file's own order differs, but
    other readers also sort class folders by name. Grey channels are repeated for colour.

    Raises:
        OSError, DataFilesCorruptError: a list or an image is missing or invalid.
    """
    folder = root / "tiny-imagenet-200"
    wnids = folder / "wnids.txt"
    names = sorted(set("\n".join(_lines(wnids)).split()))
    if len(names) != spec.classes or not all(map(_WORDNET_NUMBER.fullmatch, names)):
        raise DataFilesCorruptError(
            f"{wnids} does not list {spec.classes} different WordNet numbers such as n01443537. "
            "Unpack the data set again"
        ).with_code("data.wordnet")
    train = []
    for label, name in enumerate(names):
        train += _files_of_class(folder / "train" / name / "images", label)
    number_of = dict(zip(names, count(), strict=False))
    annotations = folder / "val" / "val_annotations.txt"
    test = []
    for number, line in enumerate(_lines(annotations), 1):
        match = _ANNOTATION.fullmatch(line)
        if match and match["name"] in number_of:
            path = folder / "val" / "images" / match["file"]
            test.append(LabelledFile(path, number_of[match["name"]]))
        elif line.strip():
            raise DataFilesCorruptError(
                f"line {number} of {annotations} must be a file name, a tab and a WordNet number "
                f"from wnids.txt, got {line[:80]!r}"
            ).with_code("data.line")
    if not test:
        raise DataFilesCorruptError(f"{annotations} lists no images. Unpack the data set again")
    return _load(train, spec), _load(test, spec)


def read_cinic10(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads CINIC-10.

    The training images are CINIC-10/train/CLASS/*.png, and the test images are
    CINIC-10/test/CLASS/*.png. The images in CINIC-10/valid are not used. CINIC-10's authors mention
    merging valid into train, but federated papers use only the 90,000 train images.

    Raises:
        OSError, DataFilesCorruptError: a class is missing, or a file is not a 32×32 image.
    """
    splits = []
    for split in ("train", "test"):
        files = []
        for label, name in enumerate(spec.class_names):
            files += _files_of_class(root / "CINIC-10" / split / name, label)
        splits.append(_load(files, spec))
    return splits[0], splits[1]


# The class folders with other spellings in some releases of Office-Caltech-10.
OTHER_NAMES = {"backpack": "back_pack"}


def read_office_caltech(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Office-Caltech-10 from office_caltech_10/DOMAIN/CLASS/*.

    The data set has no official split. In each domain and class, every fifth image in the order of
    file names is a test image.
    """
    train: list[LabelledFile] = []
    test: list[LabelledFile] = []
    for number, domain in enumerate(spec.domains):
        for label, name in enumerate(spec.class_names):
            folder = root / "office_caltech_10" / domain / name
            if not folder.is_dir():
                folder = folder.with_name(OTHER_NAMES.get(name, name))
            files = _files_of_class(folder, label, number)
            test += files[4::5]
            del files[4::5]
            train += files
    return _load(train, spec), _load(test, spec)


def read_domainnet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads DomainNet-10 according to the official training and test lists.

    The lists are domainnet/DOMAIN_train.txt and domainnet/DOMAIN_test.txt, next to the unpacked
    folders. Their lines have the form "DOMAIN/CLASS/FILE number".
    """
    folder = root / "domainnet"
    train: list[LabelledFile] = []
    test: list[LabelledFile] = []
    for domain in range(len(spec.domains)):
        train += read_domainnet_list(folder, "train", domain, spec)
        test += read_domainnet_list(folder, "test", domain, spec)
    return _load(train, spec), _load(test, spec)


def read_domainnet_list(
    folder: Path, split: str, domain: int, spec: DatasetSpec
) -> list[LabelledFile]:
    """Reads the official list for one domain and split, and returns the ten classes' files.

    The class is the folder in the path. The listed number is not used, because it counts all 345
    classes of DomainNet.
    """
    path = folder / f"{spec.domains[domain]}_{split}.txt"
    files = []
    for number, line in enumerate(_lines(path), 1):
        match = _DOMAINNET_LINE.fullmatch(line.strip())
        if match and match["domain"] == spec.domains[domain] and ".." not in match.groups():
            if match["name"] in spec.class_names:
                image = folder / match["domain"] / match["name"] / match["file"]
                files.append(LabelledFile(image, spec.class_names.index(match["name"]), domain))
        elif line.strip():
            raise DataFilesCorruptError(
                f"line {number} of {path} must be '{spec.domains[domain]}/CLASS/FILE NUMBER', got "
                f"{line[:80]!r}"
            ).with_code("data.line")
    return files


def read_mnist_m(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads MNIST-M (Ganin et al., 2016) at the image size of Digits-Five.

    The 32×32 release has the lists mnist_m/mnist_m_train_labels.txt and
    mnist_m/mnist_m_test_labels.txt, next to the image folders.
    """
    folder = root / "mnist_m"
    train, test = (read_mnist_m_list(folder, split) for split in ("train", "test"))
    return _load(train, spec), _load(test, spec)


def read_mnist_m_list(folder: Path, split: str) -> list[LabelledFile]:
    """Reads one split's list, with lines such as "00000001.png 5"."""
    path = folder / f"mnist_m_{split}_labels.txt"
    files = []
    for number, line in enumerate(_lines(path), 1):
        match = _MNIST_M_LINE.fullmatch(line.strip())
        if match:
            image = folder / f"mnist_m_{split}" / match["file"]
            files.append(LabelledFile(image, int(match["label"])))
        elif line.strip():
            raise DataFilesCorruptError(
                f"line {number} of {path} must be 'NUMBER.png LABEL', got {line[:80]!r}"
            ).with_code("data.line")
    if not files:
        raise DataFilesCorruptError(f"{path} lists no images. Unpack the data set again")
    return files


def _files_of_class(folder: Path, label: int, domain: int = 0) -> list[LabelledFile]:
    """Lists the image files in one class folder by name."""
    return [LabelledFile(path, label, domain) for path in images_in(folder)]


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, MAX_LIST_BYTES).splitlines()
    except UnicodeDecodeError:
        raise DataFilesCorruptError(
            f"{path} is not UTF-8 text. Unpack the data set again"
        ) from None


def _load(files: Sequence[LabelledFile], spec: DatasetSpec) -> Split:
    """Reads one split's images.

    Only data sets with domains are resized, because the others have a single image size.
    """
    paths, labels, domains = zip(*files, strict=True)
    images = read_images(paths, spec, resize=bool(spec.domains))
    y = np.array(labels, np.int64)
    if not spec.domains:
        return Split(images, y)
    return Split(images, y, domains=np.array(domains, np.int64))


# Size limit for a JSON file. LEAF writes about 250 MB for each hundred writers.
MAX_JSON_BYTES = 2**30

# Each user's images (or tokens) and labels in LEAF's files.
Users = dict[str, tuple[npt.NDArray[Any], IntArray]]


class _WriterData(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    x: Annotated[
        list[Annotated[list[Annotated[float, Field(ge=0, le=1)]], FailFast()]],
        FailFast(),
        Field(min_length=1),
    ]
    y: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]


class _LeafFile(BaseModel):
    model_config = ConfigDict(strict=True)
    user_data: Annotated[dict[str, _WriterData], Field(min_length=1)]


def read_femnist(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads FEMNIST's training and test splits.

    The groups are the writers. Training writers are numbered in name order, followed by writers
    with only test examples (LEAF's option `-t user`).

    Raises:
        OSError: a split has no JSON file.
        DataFilesCorruptError: a file does not have LEAF's format.
    """
    folder = root / "femnist"
    read = partial(_read_file, spec=spec)
    return splits_of(*(read_users(folder / name, read) for name in ("train", "test")))


def splits_of(train: Users, test: Users) -> tuple[Split, Split]:
    """Joins all users' records into a training and a test split.

    The groups are the users. Training users are numbered in name order, followed by users with only
    test records.
    """
    names = [*sorted(train), *sorted(test.keys() - train.keys())]
    return _split(train, names), _split(test, names)


def _split(users: Users, names: list[str]) -> Split:
    images = []
    labels = []
    groups = []
    for number, name in enumerate(names):
        if name in users:
            x, y = users[name]
            images.append(x)
            labels.append(y)
            groups.append(np.full(len(y), number))
    return Split(np.concatenate(images), np.concatenate(labels), groups=np.concatenate(groups))


def read_users(folder: Path, read: Callable[[Path], Users], pattern: str = "*.json") -> Users:
    """Reads all files in a folder with the function `read`, and merges their records by user.

    Raises:
        FileNotFoundError: no file in the folder matches the pattern.
        OSError, DataFilesCorruptError: raised by `read`, or two files contain the same user.
    """
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise missing(folder / pattern)
    users: Users = {}
    for path in paths:
        file_users = read(path)
        duplicates = sorted(users.keys() & file_users.keys())
        if duplicates:
            user = one_line(repr(duplicates[0]), 80)
            raise DataFilesCorruptError(
                f"{path} and another file both contain user {user}. Create the files again"
            ).with_code("data.writer")
        users.update(file_users)
    return users


def _read_file(path: Path, spec: DatasetSpec) -> Users:
    """Reads images and labels by writer name from one of LEAF's JSON files.

    Images are uint8 [n, 1, 28, 28]: rint(255x) for the file's values x.
    """
    with faults_as(DataFilesCorruptError, f"{path} is not a LEAF file"):
        content = _LeafFile.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    pixels = spec.height * spec.width
    writers: Users = {}
    for name, data in content.user_data.items():
        writer = f"writer {one_line(repr(name), 80)} in {path}"
        if set(map(len, data.x)) != {pixels} or len(data.x) != len(data.y):
            raise DataFilesCorruptError(
                f"{writer} must have images of {pixels} numbers and one label per image. Create "
                "the files again"
            ).with_code("data.writer_images")
        images = np.rint(255 * np.array(data.x)).astype(np.uint8)
        writers[name] = (images.reshape(-1, *spec.image_shape), np.array(data.y, np.int64))
    return writers
