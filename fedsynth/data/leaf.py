"""Reads FEMNIST, handwritten characters grouped by writer, from the JSON files that LEAF writes
(Caldas et al., 2018, arXiv 1812.01097).

The files `femnist/train/*.json` and `femnist/test/*.json` are copies of those in LEAF's folders
data/femnist/data/train and data/femnist/data/test. Each file has the form {"users": [writer],
"num_samples": [n], "user_data": {writer: {"x": [[784 numbers in [0, 1]]], "y": [0 … 61]}}}.

As in LEAF, the characters are black (0) on white (1), whereas MNIST and EMNIST are white on black.
Labels 0–9 are digits, 10–35 are upper-case letters, and 36–61 are lower-case letters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from fedsynth.data.files import first_fault, one_line
from fedsynth.data.images import Bytes, IntArray
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.splits import Reader, Split
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from fedsynth.privacy.files import read_regular

_LEAF = (
    "create it with LEAF (https://github.com/TalwalkarLab/leaf, data/femnist: "
    "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample) and copy data/train and data/test to "
    "femnist/ there"
)
MAX_JSON_BYTES = 2**30
"""Size limit of a JSON file. LEAF writes a file of about 250 MB for each hundred writers."""

Writers = dict[str, tuple[Bytes, IntArray]]


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
    users: Annotated[list[str], FailFast()]
    num_samples: Annotated[list[int], FailFast()]
    user_data: dict[str, _WriterData]


def read_femnist(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads the training and test splits of FEMNIST, whose groups are the writers.

    The writers of the training split are numbered in the order of their names. Writers who have
    only test examples, as LEAF's option `-t user` creates them, get the next numbers.

    Raises:
        DataFilesMissingError: a split has no JSON file.
        DataFilesCorruptError: a file does not have the form that LEAF writes.
    """
    train = _read_writers(root / "femnist" / "train", spec)
    test = _read_writers(root / "femnist" / "test", spec)
    names = [*sorted(train), *sorted(test.keys() - train.keys())]
    return _split(train, names), _split(test, names)


def _split(writers: Writers, names: list[str]) -> Split:
    images = []
    labels = []
    groups = []
    for number, name in enumerate(names):
        if name in writers:
            x, y = writers[name]
            images.append(x)
            labels.append(y)
            groups.append(np.full(len(y), number))
    return Split(np.concatenate(images), np.concatenate(labels), groups=np.concatenate(groups))


def _read_writers(folder: Path, spec: DatasetSpec) -> Writers:
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        raise DataFilesCorruptError(f"{folder} cannot be listed: {one_line(error)}") from None
    if not paths:
        raise DataFilesMissingError(f"{spec.name}: there is no *.json in {folder}; {_LEAF}")
    writers: Writers = {}
    for path in paths:
        file_writers = _read_file(path, spec)
        duplicates = sorted(writers.keys() & file_writers.keys())
        if duplicates:
            raise DataFilesCorruptError(
                f"{path}: writer {one_line(repr(duplicates[0]), 80)} is also in another file of "
                f"{folder}: create the files again"
            )
        writers.update(file_writers)
    return writers


def _read_file(path: Path, spec: DatasetSpec) -> Writers:
    """Reads a JSON file, and returns the images and labels of each writer by name.

    Images are uint8 [n, 1, 28, 28], with the values x of the file scaled to rint(255x).
    """
    try:
        content = _LeafFile.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    except ValidationError as error:
        raise DataFilesCorruptError(f"{path} is not a LEAF file: {first_fault(error)}") from None
    except OSError as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {one_line(error)}") from None
    sizes = dict(zip(content.users, content.num_samples, strict=False))
    if len(content.num_samples) != len(sizes) or sizes.keys() != content.user_data.keys():
        raise DataFilesCorruptError(
            f"{path}: users, num_samples and user_data must describe the same writers"
        )
    pixels = spec.height * spec.width
    writers: Writers = {}
    for name, data in content.user_data.items():
        lengths = set(map(len, data.x))
        if lengths != {pixels} or not len(data.x) == len(data.y) == sizes[name]:
            raise DataFilesCorruptError(
                f"{path}, writer {one_line(repr(name), 80)}: x must have num_samples images of "
                f"{pixels} numbers each, and y must have num_samples labels"
            )
        if max(data.y) >= spec.classes:
            raise DataFilesCorruptError(
                f"{path}, writer {one_line(repr(name), 80)}: labels must be below {spec.classes}"
            )
        images = np.rint(255 * np.array(data.x)).astype(np.uint8)
        writers[name] = (images.reshape(-1, *spec.image_shape), np.array(data.y, np.int64))
    return writers


LEAF_READERS: dict[str, Reader] = {
    "femnist": Reader(("femnist/train", "femnist/test"), _LEAF, read_femnist)
}
