"""CIFAR's batch files: pickles, read by an unpickler that can build arrays and plain containers and nothing else.

A pickle is a program. The standard unpickler would run whatever a tampered file says; this one refuses every name that
is not on the short list below, before anything is called.
"""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsynth.errors import DataFilesCorruptError


class _FromBuffer:
    """NumPy's `_frombuffer` for arrays pickled with protocol 5.

    An object without attributes instead of NumPy's function, because a pickle can set attributes on a function.
    """

    __slots__ = ()

    def __call__(
        self, buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
    ) -> npt.NDArray[Any]:
        return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


# NumPy renamed its modules in version 2, and files written by either must load under either: names map to objects here,
# and nothing is imported on a file's behalf.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
    **{
        (f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0]
        for core in ("core", "_core")
    },
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer() for core in ("core", "_core")},
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (dict, list, tuple, set, str, bytes, bytearray, int, float)
    },
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which image files have no use for"
            ) from None


def read_cifar_batch(
    path: Path, label_key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one batch file.

    Args:
        path: a file of `cifar-10-batches-py` or `cifar-100-python`.
        label_key: `labels` (CIFAR-10) or `fine_labels` (CIFAR-100).

    Raises:
        DataFilesCorruptError: not such a pickle, or one that wants more than arrays and plain containers.
    """
    batch = _unpickle(path)
    if not isinstance(batch, dict):
        raise DataFilesCorruptError(
            f"{path} is no CIFAR batch: it holds a {type(batch).__name__}, not a dict"
        )
    data, labels = _entry(batch, "data", path), _entry(batch, label_key, path)
    if not (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[1] == 3072
    ):
        got = (
            f"{data.dtype} {list(data.shape)}"
            if isinstance(data, np.ndarray)
            else type(data).__name__
        )
        raise DataFilesCorruptError(f"{path}: 'data' must be uint8 [N, 3072], got {got}")
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise DataFilesCorruptError(f"{path}: {label_key!r} must be a list of integers")
    if len(labels) != len(data):
        raise DataFilesCorruptError(f"{path} has {len(data)} images but {len(labels)} labels")
    try:
        y = np.array(labels, dtype=np.int64)
    except OverflowError:
        raise DataFilesCorruptError(f"{path}: {label_key!r} has a number beyond 64 bits") from None
    return data.reshape(-1, 3, 32, 32), y


def _unpickle(path: Path) -> object:
    try:
        # latin1, because the official files were written by Python 2, whose strings are bytes.
        return _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except Exception as error:  # damaged pickle code may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataFilesCorruptError(f"{path} cannot be read as a CIFAR batch: {reason}") from None


def _entry(batch: dict[Any, Any], key: str, path: Path) -> object:
    for spelling in (key, key.encode()):
        if spelling in batch:
            return batch[spelling]
    raise DataFilesCorruptError(f"{path} is no CIFAR batch: it has no {key!r}")
