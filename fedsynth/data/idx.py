"""The idx files of MNIST and its kin: a magic number, big-endian sizes, then bytes. Plain or
gzip-compressed."""

from __future__ import annotations

import gzip
import math
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import open_regular

_SPARE = 2**16  # by which compression may make a file longer, and a header


def read_idx(path: Path, ndim: int, max_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns the uint8 array in an idx file; a name that ends in `.gz` is decompressed.

    Args:
        path: of the file.
        ndim: how many axes the array must have.
        max_bytes: size limit of the array; not much more is decompressed.

    Raises:
        DataFilesCorruptError: the file is damaged, or has another or a larger array.
    """
    header = 4 + 4 * ndim
    try:
        with BufferedReader(open_regular(path, max_bytes=max_bytes + _SPARE)) as file:
            source = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            content = source.read(header + max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {one_line(error)}") from None
    magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise DataFilesCorruptError(
            f"{path} is no idx file of bytes: it starts with {content[:4].hex()}, not {magic.hex()}"
        )
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = math.prod(shape)
    if size > max_bytes:
        raise DataFilesCorruptError(
            f"{path}: its header announces {shape}, {size:,} bytes; such a file has at most "
            f"{max_bytes:,}"
        )
    if len(content) - header != size:
        got = len(content) - header
        fault = "is truncated" if got < size else "has bytes left over"
        raise DataFilesCorruptError(
            f"{path} {fault}: its header announces {shape}, {size} bytes, it has {got}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
