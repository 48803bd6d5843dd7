"""Reads the array files of MNIST and similar data sets (idx), SVHN (.mat) and CIFAR (pickles).

The files have the names and folders that torchvision gives them. They are untrusted input, so each
reader checks sizes before it allocates memory, and raises a one-line error for a damaged file.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.data.files import one_line
from fedsynth.data.images import Bytes, IntArray
from fedsynth.data.pickled import read_pickle
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import open_regular, read_regular

SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
"""The MD5 hashes of the published files, as torchvision lists them."""
MAX_SVHN_BYTES = 2**28
MAX_CIFAR_BYTES = 60_000 * (2 * 3072 + 256)
"""Size limit of a batch file. It allows for all 60,000 images with their labels and file names, and
for two bytes per pixel, which pickles before protocol 3 need because they store bytes as text."""
_HEADER_BYTES = 2**16  # for a header, and growth by compression


def read_idx(path: Path, ndim: int, max_bytes: int) -> Bytes:
    """Reads the uint8 array in an idx file. A file whose name ends in `.gz` is decompressed.

    Args:
        path: the file.
        ndim: the number of axes that the array must have.
        max_bytes: the size limit of the array. Reading stops soon after this limit.

    Raises:
        DataFilesCorruptError: the file is damaged, or the array is not uint8, does not have `ndim`
            axes, or is too large.
    """
    header = 4 + 4 * ndim
    try:
        with BufferedReader(open_regular(path, max_bytes=max_bytes + _HEADER_BYTES)) as file:
            source: Any = file
            if path.suffix == ".gz":
                source = gzip.GzipFile(fileobj=file)
            content = source.read(header + max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {one_line(error)}") from None
    magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise DataFilesCorruptError(
            f"{path} is not an idx file of bytes: it starts with {content[:4].hex()}, but must "
            f"start with {magic.hex()}"
        )
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = math.prod(shape)
    if size > max_bytes or len(content) != header + size:
        raise DataFilesCorruptError(
            f"{path} must have as many bytes of data as its header declares, and at most "
            f"{max_bytes:,}: the header declares {shape} ({size:,} bytes), and the file has "
            f"{len(content) - header:,}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_svhn(path: Path) -> tuple[Bytes, IntArray]:
    """Reads a file of SVHN, and returns images uint8 [N, 3, 32, 32] and labels int64 [N].

    The file stores the images as X [32, 32, 3, N] and the labels as y [N, 1], in which 10 stands
    for the digit 0. SciPy reads the file only if its hash is the published hash, because SciPy
    crashes on some damaged files.

    Raises:
        DataFilesCorruptError: the file is not the published file of this name.
    """
    from scipy.io import loadmat

    try:
        content = read_regular(path, MAX_SVHN_BYTES)
    except OSError as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {error}") from None
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    expected = SVHN_MD5[path.name]
    if digest != expected:
        raise DataFilesCorruptError(
            f"{path} is not the published file: its MD5 is {digest}, but must be {expected}"
        )
    variables = loadmat(BytesIO(content), variable_names=("X", "y"))
    images = np.ascontiguousarray(variables["X"].transpose(3, 2, 0, 1))
    return images, variables["y"].reshape(-1).astype(np.int64) % 10


def read_cifar_batch(path: Path, label_key: str) -> tuple[Bytes, IntArray]:
    """Reads one batch file of CIFAR, and returns images uint8 [N, 3, 32, 32] and labels int64 [N].

    Args:
        path: a file in `cifar-10-batches-py` or `cifar-100-python`.
        label_key: `labels` (CIFAR-10) or `fine_labels` (CIFAR-100).

    Raises:
        DataFilesCorruptError: the file is not a CIFAR batch, or the pickle contains other objects
            than byte arrays and plain containers.
    """
    try:
        batch: Any = read_pickle(read_regular(path, MAX_CIFAR_BYTES))
    except Exception as error:  # a damaged pickle may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as a CIFAR batch: {one_line(error)}"
        ) from None
    if not isinstance(batch, dict):
        raise DataFilesCorruptError(
            f"{path} is not a CIFAR batch: it contains a {type(batch).__name__} instead of a dict"
        )
    data = batch.get(b"data", batch.get("data"))
    x = getattr(data, "value", None)
    if x is None or x.shape[1:] != (3072,):
        raise DataFilesCorruptError(f"{path}: 'data' must be an array of bytes [N, 3072]")
    labels = batch.get(label_key.encode(), batch.get(label_key))
    # Types are checked first: NumPy would make an array of text as wide as its longest string.
    if not isinstance(labels, list) or not set(map(type, labels)) <= {int}:
        raise DataFilesCorruptError(f"{path}: {label_key!r} must be a list of integers")
    y = np.array(labels)
    if y.dtype != np.int64 or len(y) != len(x):
        raise DataFilesCorruptError(
            f"{path}: {label_key!r} must have one integer of at most 64 bits for each image, but "
            f"there are {len(x)} images and {len(labels)} labels"
        )
    return x.reshape(-1, 3, 32, 32), y
