"""SVHN's files of cropped digits (format 2): X and y in a .mat file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line
from fedsynth.data.matlab import read_arrays
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

_SPARE = 2**16  # bytes for headers, names and padding


def read_svhn(path: Path, spec: DatasetSpec) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of X [32, 32, 3, N] and y [N, 1], in which
    10 stands for the digit 0.

    Raises:
        DataFilesCorruptError: not such a file; one that unpacks to more than all examples of the
            data set; labels that are no whole numbers from 1 to 10.
    """
    # A label may have eight bytes.
    most = (spec.train_size + spec.test_size) * (spec.channels * spec.height * spec.width + 8)
    try:
        content = read_regular(path, most + _SPARE)
        variables = read_arrays(content, ("X", "y"), most + _SPARE)
    except Exception as error:  # a damaged file may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as an SVHN file: {one_line(error)}"
        ) from None
    x = variables["X"]
    y = variables["y"]
    if x.dtype != np.uint8 or x.ndim != 4 or y.size != x.shape[3]:
        raise DataFilesCorruptError(
            f"{path} must hold X uint8 [32, 32, 3, N] and y [N, 1], got {x.dtype} {list(x.shape)} "
            "and "
            f"{y.dtype} {list(y.shape)}"
        )
    digits = y.reshape(-1)
    wrong = digits[~np.isin(digits, np.arange(1, 11))]
    if len(wrong):
        raise DataFilesCorruptError(
            f"{path}: labels must be 1 to 10, {len(wrong)} are not, first {wrong[0]}"
        )
    return x.transpose(3, 2, 0, 1), digits.astype(np.int64) % 10
