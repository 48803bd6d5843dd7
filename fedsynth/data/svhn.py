"""SVHN's published files of cropped digits (format 2): X and y in a .mat file."""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

MAX_BYTES = 2**28
MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
"""Of the published files, as torchvision lists them."""


def read_svhn(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns images uint8 [N, 3, 32, 32] and labels int64 [N] of X [32, 32, 3, N] and y [N, 1], in
    which 10 stands for the digit 0.

    SciPy's reader crashes on some damaged files, so it sees only the bytes that were published.

    Raises:
        DataFilesCorruptError: it is not the published file of this name.
    """
    from scipy.io import loadmat

    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {error}") from None
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise DataFilesCorruptError(
            f"{path} is not the published file: its MD5 is {found}, and should be {MD5[path.name]}"
        )
    variables = loadmat(BytesIO(content), variable_names=("X", "y"))
    return variables["X"].transpose(3, 2, 0, 1), variables["y"].reshape(-1).astype(np.int64) % 10
