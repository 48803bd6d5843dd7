"""Tiny-ImageNet and CINIC-10: folders of image files by class, at the size that they have."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedsynth.data.folders import Reader, Split, images_in, read_images, read_lines
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

_TINY = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there"
_CINIC = (
    "unpack CINIC-10.tar.gz of https://datashare.ed.ac.uk/handle/10283/3192 into CINIC-10/ there"
)


def read_tiny_imagenet(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """tiny-imagenet-200/train/WNID/images/* trains; val/images/*, which val/val_annotations.txt
    lists, tests: `test` has no labels.

    Class c is the c-th of the WordNet numbers in wnids.txt, sorted, as readers by folder name have
    it (the file itself is in another order). Some images are grey; they become colour images with
    three equal channels.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: a list or an image is missing, or not what it
            should be.
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
            else f"it has {len(names)} lines, {len(set(names))} different ones"
        )
        raise DataFilesCorruptError(
            f"{folder / 'wnids.txt'} must list {spec.classes} WordNet numbers such as n01443537: "
            f"{fault}"
        )
    train = _by_class([folder / "train" / name / "images" for name in names], spec, _TINY)
    return train, _annotated(folder / "val", names, spec)


def read_cinic10(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """CINIC-10/train/CLASS/*.png trains and CINIC-10/test/CLASS/*.png tests; CINIC-10/valid, of the
    same size, is left alone.

    The authors call merging train and valid an option; federated work trains on train alone (90,000
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


def _by_class(folders: list[Path], spec: DatasetSpec, where: str) -> Split:
    """The images of each class's folder, by file name."""
    paths: list[Path] = []
    counts = []
    for folder in folders:
        files = images_in(folder)
        if not files:
            raise DataFilesMissingError(f"{spec.name}: no image in {folder}; {where}")
        paths += files
        counts.append(len(files))
    return Split(
        read_images(paths, spec), np.repeat(np.arange(len(folders), dtype=np.int64), counts)
    )


def _annotated(folder: Path, names: list[str], spec: DatasetSpec) -> Split:
    """The images that val_annotations.txt lists, in its order: a line is FILE, WNID and a box,
    separated by tabs."""
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
        raise DataFilesCorruptError(f"{path} lists no image: unpack it anew")
    return Split(read_images(paths, spec), np.array(labels, np.int64))


CLASS_FOLDER_READERS: dict[str, Reader] = {
    "tiny-imagenet": Reader(
        tuple(
            f"tiny-imagenet-200/{file}"
            for file in ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
        ),
        _TINY,
        read_tiny_imagenet,
    ),
    "cinic10": Reader(("CINIC-10/train", "CINIC-10/test"), _CINIC, read_cinic10),
}
