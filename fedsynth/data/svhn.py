"""SVHN's .mat files (format 2), read by SciPy once it is known how much they hold and of what kind."""

from __future__ import annotations

import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line, read_regular
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError

_HEADER = 128  # bytes: text, version, and MI or IM by the byte order
_COMPRESSED = 15  # the type of an element that zlib has packed
_BYTE_ORDERS: dict[bytes, Literal["little", "big"]] = {b"IM": "little", b"MI": "big"}
_SPARE = 2**16  # for tags, names and padding
_KINDS = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "single",
    "double",
)


def read_svhn(path: Path, spec: DatasetSpec) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of X [32, 32, 3, N] and y [N, 1], in which 10 stands for the digit 0.

    Raises:
        DataFilesCorruptError: not such a file; one that unpacks to more than all examples of the data set; labels that are
            no whole numbers from 1 to 10.
    """
    # A label may have eight bytes.
    most = (spec.train_size + spec.test_size) * (spec.channels * spec.height * spec.width + 8)
    try:
        x, y = _variables(_unpacked(read_regular(path, most + _SPARE), most + _SPARE))
    except Exception as error:  # a damaged file may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as an SVHN file: {one_line(error)}"
        ) from None
    if x.dtype != np.uint8 or x.ndim != 4 or y.size != x.shape[3] or y.dtype.kind not in "iuf":
        raise DataFilesCorruptError(
            f"{path} must hold X uint8 [32, 32, 3, N] and y [N, 1], got {x.dtype} {list(x.shape)} and "
            f"{y.dtype} {list(y.shape)}"
        )
    digits = y.reshape(-1)
    wrong = digits[~np.isin(digits, np.arange(1, 11))]
    if len(wrong):
        raise DataFilesCorruptError(
            f"{path}: labels must be 1 to 10, {len(wrong)} are not, first {wrong[0]}"
        )
    return x.transpose(3, 2, 0, 1), digits.astype(np.int64) % 10


def _unpacked(content: bytes, most: int) -> bytes:
    """The same file without compression, so that no reader of it can be led beyond its end.

    Raises:
        ValueError: not such a file, or one that has more than `most` bytes unpacked.
    """
    order = _BYTE_ORDERS.get(content[_HEADER - 2 : _HEADER])
    if order is None:
        raise ValueError("it has no header of MATLAB 5")
    pieces = [content[:_HEADER]]
    size = 0
    at = _HEADER
    while at < len(content):
        kind, length = (int.from_bytes(content[at + 4 * i : at + 4 * i + 4], order) for i in (0, 1))
        end = at + 8 + length
        if length == 0 or end > len(content):
            raise ValueError("it is truncated")
        if kind == _COMPRESSED:
            packed = zlib.decompressobj()
            piece = packed.decompress(content[at + 8 : end], most + 1 - size)
        else:
            piece = content[at:end]
        size += len(piece)
        if size > most:
            raise ValueError(f"it unpacks to more than {most:,} bytes, which all examples have")
        pieces.append(piece)
        at = end
    return b"".join(pieces)


def _variables(content: bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """X and y, once the headers say that they are arrays of numbers that `content` can hold.

    Raises:
        ValueError: they are something else, or not there once each.
    """
    from scipy.io import loadmat, whosmat

    found = [entry for entry in whosmat(BytesIO(content)) if entry[0] in ("X", "y")]
    if sorted(name for name, _, _ in found) != ["X", "y"]:
        raise ValueError("it must hold X and y once each")
    for name, shape, kind in found:
        if kind not in _KINDS:
            raise ValueError(f"{name} is of the kind {one_line(kind, 20)}, not numbers")
        if len(shape) > 4:
            raise ValueError(f"{name} has {len(shape)} dimensions")
    variables = loadmat(BytesIO(content), variable_names=["X", "y"])
    return variables["X"], variables["y"]
