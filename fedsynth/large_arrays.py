"""Arrays that need not fit into memory.

Images, and the vectors that an encoder computes for them, may be larger than memory. An array of
`MAPPED_BYTES` or more is therefore stored in a temporary file that is mapped into memory. If memory
is short, the operating system writes the file's pages to disk.

The file is in the folder for temporary files (`TMPDIR`), which should be on a disk as private as
the images. It has no name that another program could open (on Windows: no other program can open
it), and is deleted with the array, even if the process is killed.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsynth.errors import OutputError, one_line

MAPPED_BYTES = 2**29
# Rows of a table that are read at a time.
ROWS = 4096
# Numbers that are converted at a time, so that temporaries in float64 take some 100 MB.
NUMBERS = 2**21
# Bytes that are read at a time.
BLOCK = 2**24


def new_array(shape: Sequence[int], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Creates an array of zeros, in memory or, from `MAPPED_BYTES` on, in a temporary file.

    Raises:
        OutputError: the folder for temporary files has too little space.

    >>> new_array((2, 3)).sum()
    np.uint64(0)
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < MAPPED_BYTES:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):  # a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=tuple(shape))  # keeps the file open
    except OSError as error:
        folder = one_line(tempfile.gettempdir())
        raise OutputError(
            f"the folder for temporary files, {folder}, has no space for {size:,} bytes of data: "
            f"{error.strerror}. Set TMPDIR to a folder with more space"
        ).with_code("files.space") from None


def is_mapped(array: object) -> bool:
    """Returns whether `new_array` has stored an array in a temporary file."""
    return isinstance(array, np.memmap) and array.mode == "w+"


def read_array(file: IO[bytes], size: int) -> npt.NDArray[np.uint8]:
    """Reads the next `size` bytes from a file.

    Raises:
        ValueError: the file ends earlier.
    """
    values = new_array((size,))
    for first in range(0, size, BLOCK):
        block = file.read(min(BLOCK, size - first))
        values[first : first + len(block)] = np.frombuffer(block, np.uint8)
        if len(block) < min(BLOCK, size - first):
            raise ValueError(f"the file ends {size - first - len(block):,} bytes too early")
    return values


_LARGEST = float(np.finfo(np.float32).max)


def new_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Creates a tensor of zeros. On the CPU, its values are stored as by `new_array`."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < MAPPED_BYTES:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(new_array((size,))).view(dtype).view(*shape)


def rows_at_once(shape: Sequence[int]) -> int:
    """Returns how many rows of an array [N, …] have about `NUMBERS` numbers, at least 1."""
    return max(1, NUMBERS // max(1, math.prod(shape[1:])))


def some_rows(x: Tensor) -> Sequence[Tensor]:
    """Splits a tensor [N, …] into parts of `rows_at_once` rows."""
    return x.split(rows_at_once(x.shape))


def as_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Converts an array [N, …] to float32, some rows at a time. Returns a float32 array itself.

    Finite values beyond float32 become its largest value, not infinity.
    """
    if array.dtype == np.float32:
        return array
    result = new_array(array.shape, np.float32)
    step = rows_at_once(array.shape)
    for first in range(0, len(array), step):
        rows = array[first : first + step]
        if array.dtype.kind == "f" and array.dtype.itemsize > 4:
            rows = np.where(np.isfinite(rows), rows.clip(-_LARGEST, _LARGEST), rows)
        result[first : first + step] = rows
    return result


def converted(x: Tensor, convert: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Applies a function to the rows of a tensor, some at a time.

    Args:
        x: the tensor [N, …].
        convert: maps rows [M, …] to a tensor of the same shape.
        dtype: the type of the result.
    """
    result = new_tensor(x.shape, dtype, x.device)
    for rows, target in zip(some_rows(x), some_rows(result), strict=True):
        target.copy_(convert(rows))
    return result


def selected(array: Tensor, index: Tensor) -> Tensor:
    """Copies rows of a tensor, in the order of `index` [M]."""
    rows = new_tensor((len(index), *array.shape[1:]), array.dtype, array.device)
    return torch.index_select(array, 0, index, out=rows)
