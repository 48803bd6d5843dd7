"""Arrays of numbers in MATLAB's files of level 5 (its "MAT-File Format"), read within what the file
and the caller allow.

SciPy's compiled reader ends the process (signal 11) on some damaged files, and takes what they
announce; hence these few lines for the only kind of variable that a data set needs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from io import BytesIO
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Order = Literal["little", "big"]

_HEADER = 128  # bytes: text, version, and the byte order as it writes MI
_ORDERS: dict[bytes, Order] = {b"IM": "little", b"MI": "big"}
_AT_ONCE = 2**20  # bytes inflated at a time

_MATRIX, _COMPRESSED = 14, 15  # types of elements; those of numbers by NumPy's codes:
_STORED = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
_INT8, _INT32, _UINT32 = 1, 5, 6
# Classes of variables: those of numbers by NumPy's codes, and what the others hold.
_NUMBERS = {
    6: "f8",
    7: "f4",
    8: "i1",
    9: "u1",
    10: "i2",
    11: "u2",
    12: "i4",
    13: "u4",
    14: "i8",
    15: "u8",
}
_OTHERS = {1: "cells", 2: "structs", 3: "objects", 4: "text", 5: "sparse numbers", 16: "functions"}
_COMPLEX = 0x800


def read_arrays(content: bytes, names: Collection[str], most: int) -> dict[str, npt.NDArray[Any]]:
    """The variables `names` of a file, each an array of real numbers in the class and the shape
    that it has in MATLAB.

    Args:
        content: the whole file, with or without compression.
        names: of variables; what the file holds beside them is not looked at.
        most: bytes that the file may have unpacked.

    Raises:
        ValueError: not such a file, one that unpacks to more than `most`, or a name that does not
            stand there once as numbers.
        zlib.error: a damaged part.
    """
    order = _ORDERS.get(content[_HEADER - 2 : _HEADER])
    if order is None:
        raise ValueError("it has no header of MATLAB 5")
    plain = _unpacked(content, order, most).getbuffer()
    found: dict[str, npt.NDArray[Any]] = {}
    at = 0
    while at < len(plain):
        kind, element, at = _element(plain, at, order)
        # Of an element that is no array there is no name.
        name = _name(element, order) if kind == _MATRIX else ""
        if name in found:
            raise ValueError(f"it holds {name} twice")
        if name in names:
            found[name] = _numbers(element, name, order)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"it does not hold {missing[0]}")
    return found


def _unpacked(content: bytes, order: Order, most: int) -> BytesIO:
    """The file's elements one after another, without compression."""
    plain = BytesIO()
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


def _inflate(packed: bytes, order: Order, most: int, plain: BytesIO) -> None:
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


def _name(matrix: memoryview, order: Order) -> str:
    """A variable's name; empty for kinds of variables that have none."""
    try:
        _, _, at = _element(matrix, 0, order)
        _, _, at = _element(matrix, at, order)
        kind, name, _ = _element(matrix, at, order)
    except ValueError:
        return ""
    return bytes(name).decode("latin1") if kind == _INT8 else ""


def _numbers(matrix: memoryview, name: str, order: Order) -> npt.NDArray[Any]:
    """The array of a variable: flags, dimensions, name, numbers, each an element of its own."""
    kind, flags, at = _element(matrix, 0, order)
    if kind != _UINT32 or len(flags) != 8:
        raise ValueError(f"{name} has no flags")
    word = int.from_bytes(flags[:4], order)
    made = _NUMBERS.get(word & 0xFF)
    if made is None:
        raise ValueError(
            f"{name} is of {_OTHERS.get(word & 0xFF, 'an unknown class')}, not numbers"
        )
    if word & _COMPLEX:
        raise ValueError(f"{name} is of complex numbers")
    mark = "<" if order == "little" else ">"
    kind, sizes, at = _element(matrix, at, order)
    if kind != _INT32 or not 8 <= len(sizes) <= 32 or len(sizes) % 4:
        raise ValueError(f"{name} has not two to eight dimensions")
    shape = tuple(np.frombuffer(sizes, f"{mark}i4").tolist())
    _, _, at = _element(matrix, at, order)
    kind, content, _ = _element(matrix, at, order)
    stored = np.dtype(mark + _STORED[kind]) if kind in _STORED else None
    # MATLAB stores numbers in a smaller type where all of them fit.
    if stored is None or not np.can_cast(stored, made):
        raise ValueError(f"{name} is stored as another type than its own")
    if min(shape) < 0 or math.prod(shape) * stored.itemsize != len(content):
        raise ValueError(f"{name} has a shape that does not fit its {len(content)} bytes")
    numbers = np.frombuffer(content, stored).reshape(shape, order="F")
    return numbers.astype(made, order="F", copy=False)


def _element(content: memoryview, at: int, order: Order) -> tuple[int, memoryview, int]:
    """The type and the bytes of the element at `at`, and where the next one starts."""
    word = int.from_bytes(content[at : at + 4], order)
    if word >> 16:  # up to four bytes stand in the tag itself
        kind = word & 0xFFFF
        length = word >> 16
        start = at + 4
        after = at + 8
    else:
        kind, length = _tag(bytes(content[at : at + 8]), order)
        start = at + 8
        after = start + length + -length % 8
    if start + length > len(content) or (word >> 16 and length > 4):
        raise ValueError("it is truncated")
    return kind, content[start : start + length], after


def _tag(given: bytes, order: Order) -> tuple[int, int]:
    """The type and the length of an element."""
    if len(given) < 8:
        raise ValueError("it is truncated")
    return int.from_bytes(given[:4], order), int.from_bytes(given[4:], order)
