"""Reader of FEMNIST as written by LEAF's scripts: handwritten characters in JSON files, by writer
(Caldas et al., 2018, arXiv 1812.01097).

`femnist/train/*.json` and `femnist/test/*.json` are copies of LEAF's data/femnist/data/train and
test. Each file is {"users": [writer], "num_samples": [n], "user_data": {writer: {"x": [[784 numbers
in [0, 1]]], "y": [0 … 61]}}}.

As in LEAF, ink is dark on a white background, with white = 1 (NIST's scans, reduced to 28×28 and
divided by 255); MNIST and EMNIST are white on black. Labels 0–9 are digits, 10–35 upper-case and
36–61 lower-case letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.files import one_line
from fedsynth.data.folders import Bytes, Reader, Split
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from fedsynth.privacy.files import read_regular

_LEAF = (
    "create it with LEAF (https://github.com/TalwalkarLab/leaf, data/femnist: "
    "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample) and copy data/train and data/test to "
    "femnist/ there"
)

MOST_BYTES = 2**30
"""Size limit of a JSON file; LEAF writes a file of about 250 MB for each hundred writers."""

Writers = dict[str, tuple[Bytes, IntArray]]


def read_femnist(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads both splits, writer by writer; `groups` numbers the training split's writers, sorted by
    name.

    Writers with only test examples (LEAF's `-t user`) get the numbers after those.

    Raises:
        DataFilesMissingError: no such file.
        DataFilesCorruptError: a file is not as described above.
    """
    train, test = (_writers(root / "femnist" / split, spec) for split in ("train", "test"))
    number = {
        name: n for n, name in enumerate([*sorted(train), *sorted(test.keys() - train.keys())])
    }
    return _split(train, number), _split(test, number)


def _split(writers: Writers, number: Mapping[str, int]) -> Split:
    order = sorted(writers, key=number.__getitem__)
    images, labels = (np.concatenate([writers[name][part] for name in order]) for part in (0, 1))
    groups = np.repeat(
        np.array([number[name] for name in order], np.int64),
        [len(writers[name][1]) for name in order],
    )
    return Split(images, labels, groups=groups)


def _writers(folder: Path, spec: DatasetSpec) -> Writers:
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        raise DataFilesCorruptError(f"{folder} cannot be listed: {one_line(error)}") from None
    if not paths:
        raise DataFilesMissingError(f"{spec.name}: no *.json in {folder}; {_LEAF}")
    writers: Writers = {}
    for path in paths:
        for name, arrays in _file(path, spec).items():
            if name in writers:
                raise DataFilesCorruptError(
                    f"{path}: writer {one_line(repr(name), 80)} is also in another file of "
                    f"{folder}: create the files again"
                )
            writers[name] = arrays
    return writers


def _file(path: Path, spec: DatasetSpec) -> Writers:
    try:
        content = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataFilesCorruptError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    users, sizes, data = (
        content.get(key) if isinstance(content, dict) else None
        for key in ("users", "num_samples", "user_data")
    )
    if not (isinstance(users, list) and isinstance(sizes, list) and isinstance(data, dict)):
        raise DataFilesCorruptError(
            f"{path} is not a LEAF file: it must contain the lists users and num_samples and "
            "the object user_data"
        )
    if (
        len(users) != len(sizes)
        or not all(isinstance(user, str) for user in users)
        or sorted(users) != sorted(data)
    ):
        raise DataFilesCorruptError(
            f"{path}: users, num_samples and user_data must describe the same writers, got "
            f"{len(users)}, {len(sizes)} and {len(data)}"
        )
    return {
        user: _one_writer(data[user], size, f"{path}, writer {one_line(repr(user), 80)}", spec)
        for user, size in zip(users, sizes, strict=True)
    }


def _one_writer(
    data: object, size: object, context: str, spec: DatasetSpec
) -> tuple[Bytes, IntArray]:
    """Returns pixels uint8 [n, 1, 28, 28], rint(255x), and labels [n]."""
    if not (isinstance(data, dict) and "x" in data and "y" in data):
        raise DataFilesCorruptError(f"{context}: must have the keys x and y")
    x = _numbers(data["x"], "x", context)
    y = _numbers(data["y"], "y", context)
    pixels = spec.height * spec.width
    count = size if type(size) in (int, float) else type(size).__name__
    if x.ndim != 2 or x.shape[1] != pixels or y.shape != (len(x),) or count != len(x):
        raise DataFilesCorruptError(
            f"{context}: x must be n images of {pixels} numbers and y n labels, n = num_samples; "
            f"got {list(x.shape)}, {list(y.shape)} and {one_line(count, 40)}"
        )
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= spec.classes:
        raise DataFilesCorruptError(
            f"{context}: labels must be whole numbers in [0, {spec.classes})"
        )
    bad = int(np.count_nonzero(~((x >= 0) & (x <= 1))))  # NaN fails both
    if bad:
        raise DataFilesCorruptError(
            f"{context}: {bad} of {x.size} pixels are not numbers in [0, 1]"
        )
    return np.rint(255 * x).astype(np.uint8).reshape(-1, *spec.image_shape), y.astype(np.int64)


def _numbers(values: object, what: str, context: str) -> npt.NDArray[Any]:
    """Converts a list of numbers, or of equally long lists of numbers: to int64 if all are
    integers, else to float64.

    Types are checked before NumPy converts them, because it would make an array of text as wide as
    its longest string.
    """
    if not isinstance(values, list) or not values or values[0] == []:
        raise DataFilesCorruptError(
            f"{context}: {what} must be a list with at least one element; remove writers "
            "without examples"
        )
    rows = values if isinstance(values[0], list) else [values]
    if not all(isinstance(row, list) for row in rows) or len(set(map(len, rows))) != 1:
        raise DataFilesCorruptError(f"{context}: the rows of {what} differ in length")
    kinds: set[type] = set().union(*(map(type, row) for row in rows))
    try:
        if kinds <= {int, float}:
            return np.array(values, np.float64 if float in kinds else np.int64)
    except OverflowError:  # an integer too large for the type
        pass
    raise DataFilesCorruptError(f"{context}: {what} must hold numbers only")


LEAF_READERS: dict[str, Reader] = {
    "femnist": Reader(("femnist/train", "femnist/test"), _LEAF, read_femnist)
}
