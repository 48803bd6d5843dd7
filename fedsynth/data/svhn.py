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
_AT_ONCE = 2**20  # bytes inflated at a time
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


def _unpacked(content: bytes, most: int) -> BytesIO:
    """The same file without compression, so that no reader of it can be led beyond its end.

    Raises:
        ValueError: not such a file, or one that has more than `most` bytes unpacked.
    """
    order = _BYTE_ORDERS.get(content[_HEADER - 2 : _HEADER])
    if order is None:
        raise ValueError("it has no header of MATLAB 5")
    plain = BytesIO()
    plain.write(content[:_HEADER])
    at = _HEADER
    while at < len(content):
        kind, length = _tag(content[at : at + 8], order)
        end = at + 8 + length
        if length == 0 or end > len(content):
            raise ValueError("it is truncated")
        if kind == _COMPRESSED:
            _inflate(content[at + 8 : end], order, most, plain)
        else:
            plain.write(content[at:end])
        at = end
    return plain


def _inflate(packed: bytes, order: Literal["little", "big"], most: int, plain: BytesIO) -> None:
    """Adds one element's bytes to `plain`, as many as its own tag announces."""
    inflator = zlib.decompressobj()
    start = plain.tell()
    wanted = 8
    at = 0
    while plain.tell() - start < wanted:
        given = inflator.unconsumed_tail
        if not given:
            given = packed[at : at + _AT_ONCE]
            at += _AT_ONCE
        if not given:
            raise ValueError("it is truncated")
        missing = wanted - (plain.tell() - start)
        plain.write(inflator.decompress(given, min(missing, _AT_ONCE)))
        if wanted == 8 and plain.tell() - start == 8:
            wanted += _tag(bytes(plain.getbuffer()[start:]), order)[1]
            if start + wanted > most:
                raise ValueError(f"it unpacks to more than {most:,} bytes, which all examples have")


def _tag(given: bytes, order: Literal["little", "big"]) -> tuple[int, int]:
    """The type and the length of an element."""
    if len(given) < 8:
        raise ValueError("it is truncated")
    return int.from_bytes(given[:4], order), int.from_bytes(given[4:], order)


def _variables(plain: BytesIO) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """X and y, once the headers say that they are arrays of numbers of at most four axes.

    Raises:
        ValueError: they are something else, or not there once each.
    """
    from scipy.io import loadmat, whosmat

    plain.seek(0)
    found = [entry for entry in whosmat(plain) if entry[0] in ("X", "y")]
    if sorted(name for name, _, _ in found) != ["X", "y"]:
        raise ValueError("it must hold X and y once each")
    for name, shape, kind in found:
        if kind not in _KINDS:
            raise ValueError(f"{name} is of the kind {one_line(kind, 20)}, not numbers")
        if len(shape) > 4:
            raise ValueError(f"{name} has {len(shape)} dimensions")
    plain.seek(0)
    variables = loadmat(plain, variable_names=["X", "y"])
    return variables["X"], variables["y"]
