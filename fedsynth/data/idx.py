"""The idx files of MNIST and its kin: a magic number, big-endian sizes, then bytes. Plain or
gzip-compressed."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import open_regular

_UNSIGNED_BYTE = 0x08
_AT_ONCE = 2**20  # bytes decompressed at a time
_SPARE = 2**16  # by which compression may make a file longer, and a header


def read_idx(path: Path, ndim: int, most: int) -> npt.NDArray[np.uint8]:
    """The uint8 array with `ndim` axes in the idx file at `path`; a name that ends in `.gz` is
    decompressed.

    No more is decompressed than the header announces and one byte.

    Args:
        most: bytes that the array may have.

    Raises:
        DataFilesCorruptError: not an idx file of bytes with `ndim` axes, one that announces more
            than `most`, or more or fewer bytes than it announces.
    """
    try:
        with open_regular(path, max_bytes=most + _SPARE) as file:
            if path.suffix != ".gz":
                return _array(file, path, ndim, most)
            with gzip.GzipFile(fileobj=file) as inflated:
                return _array(inflated, path, ndim, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {one_line(error)}") from None


def _array(
    file: BinaryIO | gzip.GzipFile, path: Path, ndim: int, most: int
) -> npt.NDArray[np.uint8]:
    size = 4 + 4 * ndim
    header = _bytes(file, size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, ndim])
    if len(header) < size:
        raise DataFilesCorruptError(
            f"{path} is truncated: {len(header)} bytes, the header alone has {size}"
        )
    if header[:4] != magic:
        raise DataFilesCorruptError(
            f"{path} is no idx file of bytes: it starts with {header[:4].hex()}, not {magic.hex()}"
        )
    shape = tuple(int.from_bytes(header[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim))
    announced = math.prod(shape)
    if announced > most:
        raise DataFilesCorruptError(
            f"{path}: its header announces {list(shape)}, {announced:,} bytes; such a file has at "
            f"most {most:,}"
        )
    content = _bytes(file, announced + 1)
    if len(content) != announced:
        fault = "is truncated" if len(content) < announced else "has bytes left over"
        got = f"{len(content)}" if len(content) < announced else "more"
        raise DataFilesCorruptError(
            f"{path} {fault}: its header announces {list(shape)}, {announced} bytes, it has {got}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _bytes(file: BinaryIO | gzip.GzipFile, most: int) -> bytearray:
    """The next `most` bytes, fewer at the end; the memory grows with what is there, not with
    `most`."""
    content = bytearray()
    while len(content) < most:
        piece = file.read(min(_AT_ONCE, most - len(content)))
        if not piece:
            break
        content += piece
    return content
