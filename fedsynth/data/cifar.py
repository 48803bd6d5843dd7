"""CIFAR's batch files: pickles, of which only the parts that describe arrays and plain containers
are read (`pickled`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line
from fedsynth.data.pickled import PickledArray, read_pickle
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

MAX_BYTES = 60_000 * (2 * 3072 + 256)
"""Size limit of a batch file: all images, as text (two bytes for one) before protocol 3, with their
labels and file names."""


def read_cifar_batch(
    path: Path, label_key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one batch file.

    Args:
        path: a file of `cifar-10-batches-py` or `cifar-100-python`.
        label_key: `labels` (CIFAR-10) or `fine_labels` (CIFAR-100).

    Raises:
        DataFilesCorruptError: not such a pickle, or one that wants more than numeric arrays and
            plain containers.
    """
    try:
        batch = read_pickle(read_regular(path, MAX_BYTES))
    except Exception as error:  # damaged pickle code may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as a CIFAR batch: {one_line(error)}"
        ) from None
    if not isinstance(batch, dict):
        raise DataFilesCorruptError(
            f"{path} is no CIFAR batch: it holds a {type(batch).__name__}, not a dict"
        )
    data = _entry(batch, "data", path)
    labels = _entry(batch, label_key, path)
    x = data.value if isinstance(data, PickledArray) else None
    if x is None or x.ndim != 2 or x.shape[1] != 3072:
        got = type(data).__name__ if x is None else f"uint8 {list(x.shape)}"
        raise DataFilesCorruptError(f"{path}: 'data' must be uint8 [N, 3072], got {got}")
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise DataFilesCorruptError(f"{path}: {label_key!r} must be a list of integers")
    if len(labels) != len(x):
        raise DataFilesCorruptError(f"{path} has {len(x)} images but {len(labels)} labels")
    try:
        y = np.array(labels, dtype=np.int64)
    except OverflowError:
        raise DataFilesCorruptError(f"{path}: {label_key!r} has a number beyond 64 bits") from None
    return x.reshape(-1, 3, 32, 32), y


def _entry(batch: dict[Any, Any], key: str, path: Path) -> object:
    for spelling in (key, key.encode()):
        if spelling in batch:
            return batch[spelling]
    raise DataFilesCorruptError(f"{path} is no CIFAR batch: it has no {key!r}")
