"""The idx files of MNIST and its kin: a magic number, big-endian sizes, then bytes. Plain or gzip-compressed."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.errors import DataFilesCorruptError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """The uint8 array with `ndim` axes in the idx file at `path`; a name that ends in `.gz` is decompressed.

    Raises:
        DataFilesCorruptError: not an idx file of bytes with `ndim` axes, or more or fewer bytes than it announces.
    """
    content = _read_bytes(path)
    header = 4 + 4 * ndim
    magic = bytes([0, 0, _UNSIGNED_BYTE, ndim])
    if len(content) < header:
        raise DataFilesCorruptError(
            f"{path} is truncated: {len(content)} bytes, the header alone has {header}"
        )
    if content[:4] != magic:
        raise DataFilesCorruptError(
            f"{path} is no idx file of bytes: it starts with {content[:4].hex()}, not {magic.hex()}"
        )
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim))
    announced, got = math.prod(shape), len(content) - header
    if got != announced:
        fault = "is truncated" if got < announced else "has bytes left over"
        raise DataFilesCorruptError(
            f"{path} {fault}: its header announces {list(shape)}, {announced} bytes, it has {got}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {error}") from None
