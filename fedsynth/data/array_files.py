"""Reads the array files of MNIST and similar data sets (idx), SVHN (.mat) and CIFAR (pickles).

The files have the names and folders that torchvision gives them. They are untrusted input, so each
reader checks sizes before it allocates memory, and raises a one-line error for a damaged file.

Python's own unpickler may call any function that a file names. The instructions of CIFAR's files
are therefore only listed with `pickletools`: none is executed, and nothing that they name is
imported. The labels are the integers in the list after their key, and the images are the longest
byte string. The published files (protocol 2, Python 2) can be read, and also the same data written
by newer versions of Python and NumPy (protocols 2 to 5).
"""

from __future__ import annotations

import hashlib
import math
import pickletools
from io import BytesIO
from pathlib import Path

import numpy as np

from fedsynth.data.images import Bytes, IntArray
from fedsynth.errors import DataFilesCorruptError, one_line
from fedsynth.files import read_regular

# The MD5 hashes of the published files, as torchvision lists them.
SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

MAX_SVHN_BYTES = 2**28
# Size limit of a batch file. It allows for all 60,000 images with their labels and file names, and
# for two bytes per pixel, which pickles before protocol 3 need because they store bytes as text.
MAX_CIFAR_BYTES = 60_000 * (2 * 3072 + 256)


def read_idx(path: Path, ndim: int, max_bytes: int) -> Bytes:
    """Reads the uint8 array in an idx file.

    Args:
        path: the file.
        ndim: the number of axes that the array must have.
        max_bytes: the size limit of the array.

    Raises:
        OSError: the file cannot be read, or is too large.
        DataFilesCorruptError: the file is damaged, or the array is not uint8, does not have `ndim`
            axes, or is too large.
    """
    header = 4 + 4 * ndim
    content = read_regular(path, header + max_bytes)
    magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise DataFilesCorruptError(
            f"{path} is not an idx file of bytes. It must start with {magic.hex()}, but starts "
            f"with '{content[:4].hex()}'"
        ).with_code("data.header")
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = math.prod(shape)
    if size > max_bytes or len(content) != header + size:
        raise DataFilesCorruptError(
            f"{path} must have the {size:,} bytes of data that its header declares (at most "
            f"{max_bytes:,}), got {len(content) - header:,}"
        ).with_code("data.size")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_svhn(path: Path) -> tuple[Bytes, IntArray]:
    """Reads a file of SVHN, and returns images uint8 [N, 3, 32, 32] and labels int64 [N].

    The file stores the images as X [32, 32, 3, N] and the labels as y [N, 1], in which 10 is
    the digit 0. SciPy reads the file only if its hash is the published hash, because SciPy
    crashes on some damaged files.

    Raises:
        OSError: the file cannot be read.
        DataFilesCorruptError: the file is not the published file of this name.
    """
    from scipy.io import loadmat

    content = read_regular(path, MAX_SVHN_BYTES)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    expected = SVHN_MD5[path.name]
    if digest != expected:
        raise DataFilesCorruptError(
            f"{path} is not the published file. The MD5 of that file is {expected}, not {digest}"
        ).with_code("data.hash")
    variables = loadmat(BytesIO(content), variable_names=("X", "y"))
    images = np.ascontiguousarray(variables["X"].transpose(3, 2, 0, 1))
    return images, variables["y"].reshape(-1).astype(np.int64) % 10


def read_cifar_batch(path: Path, label_key: str) -> tuple[Bytes, IntArray]:
    """Reads one batch file of CIFAR, and returns images uint8 [N, 3, 32, 32] and labels int64 [N].

    Args:
        path: a file in `cifar-10-batches-py` or `cifar-100-python`.
        label_key: `labels` (CIFAR-10) or `fine_labels` (CIFAR-100).

    Raises:
        OSError: the file cannot be read.
        DataFilesCorruptError: the file is not a CIFAR batch.
    """
    content = read_regular(path, MAX_CIFAR_BYTES)
    try:
        x, labels = _rows_and_labels(content, label_key)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as a CIFAR batch: {one_line(error)}"
        ) from None
    return x.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


MAX_INSTRUCTIONS = 2**20  # CIFAR-100's training file has 400,000
# Instructions that may occur between the integers of a list.
_LIST_PARTS = ("MARK", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME")


def _rows_and_labels(content: bytes, label_key: str) -> tuple[Bytes, list[int]]:
    """Finds the longest byte string in a pickle, as rows of 3,072 bytes, and the integers in the
    list after `label_key`.

    Text is converted to bytes, because older protocols store bytes as text in latin-1.

    Raises:
        ValueError: an instruction is truncated or malformed, the pickle has not exactly one type of
            bytes and one longest text, or the number of rows is not that of the integers.
    """
    labels: list[int] = []
    texts, orders = [b""], [False]
    in_list = by_columns = False
    previous = ""
    file = BytesIO(content)
    for number, (instruction, argument, _) in enumerate(pickletools.genops(file)):
        if number == MAX_INSTRUCTIONS:
            raise ValueError(f"it has more than {MAX_INSTRUCTIONS:,} instructions")
        name = instruction.name
        if isinstance(argument, str):
            argument = argument.encode("latin1", "ignore")
        if isinstance(argument, bytes | bytearray) and argument != b"latin1":  # the encoding
            texts.append(bytes(argument))
            orders.append(by_columns)
        if in_list and name.startswith("BININT") and isinstance(argument, int):
            labels.append(argument)
        elif name not in _LIST_PARTS:
            in_list = name == "EMPTY_LIST" and texts[-1] == label_key.encode()
        if previous == "BUILD":  # the type of an array, whose order of rows follows
            by_columns = name == "NEWTRUE"
        previous = name
    if file.tell() != len(content):
        raise ValueError(f"it has {len(content) - file.tell():,} bytes after its end")
    longest = max(texts, key=len)
    pixels, place = np.frombuffer(longest, np.uint8), texts.index(longest)
    sizes = list(map(len, texts))
    unique = texts.count(b"u1") == sizes.count(len(longest)) == 1
    if not unique or len(pixels) != 3072 * len(labels):
        raise ValueError(
            f"it must have an array of 3,072 bytes for each image and a list {label_key!r} with an "
            f"integer for each image, got {len(pixels):,} bytes and {len(labels):,} labels"
        )
    by_columns = orders[place]
    if b"_frombuffer" in texts[:place]:  # protocol 5 names the order after the bytes
        by_columns = next(text for text in texts[place:] if text in (b"C", b"F")) == b"F"
    if by_columns:
        return pixels.reshape(3072, -1).T, labels
    return pixels.reshape(-1, 3072), labels
