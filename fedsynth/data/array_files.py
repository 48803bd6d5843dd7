"""Reads the array files of MNIST and similar data sets (idx), SVHN (.mat) and CIFAR (pickles).

The files have the names and folders that torchvision gives them. They are untrusted input, so each
reader checks sizes before it allocates memory, and raises a one-line error for a damaged file.

Python's own unpickler may call any function that a file names. `read_pickle` instead lists the
instructions of a pickle with `pickletools`, and executes only the few that CIFAR's files need. They
create built-in containers. Calls of NumPy functions are replaced by functions of this module, so a
file cannot import or call anything else. The published files (protocol 2, Python 2) can be read,
and also the same data written by newer versions of Python and NumPy (protocols 2 to 5). The size of
the file bounds time and memory. Instructions have a maximum number, and no argument can reach
beyond the end of the file.
"""

from __future__ import annotations

import hashlib
import math
import pickletools
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsynth.data.images import Bytes, IntArray
from fedsynth.errors import DataFilesCorruptError, one_line
from fedsynth.privacy.files import read_regular

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
        )
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = math.prod(shape)
    if size > max_bytes or len(content) != header + size:
        raise DataFilesCorruptError(
            f"{path} must have the {size:,} bytes of data that its header declares (at most "
            f"{max_bytes:,}), got {len(content) - header:,}"
        )
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
        OSError: the file cannot be read.
        DataFilesCorruptError: the file is not a CIFAR batch, or the pickle contains other objects
            than byte arrays and plain containers.
    """
    content = read_regular(path, MAX_CIFAR_BYTES)
    try:
        batch: Any = read_pickle(content)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as a CIFAR batch: {one_line(error)}"
        ) from None
    if not isinstance(batch, dict):
        raise DataFilesCorruptError(
            f"{path} is not a CIFAR batch. It must contain a dict, not a {type(batch).__name__}"
        )
    data = batch.get(b"data", batch.get("data"))
    x = getattr(data, "value", None)
    if x is None or x.shape[1:] != (3072,):
        raise DataFilesCorruptError(f"'data' in {path} must be an array of bytes [N, 3072]")
    labels = batch.get(label_key.encode(), batch.get(label_key))
    # Types are checked first: NumPy would make an array of text as wide as its longest string.
    if not isinstance(labels, list) or not set(map(type, labels)) <= {int}:
        raise DataFilesCorruptError(f"{label_key!r} in {path} must be a list of integers")
    y = np.array(labels)
    if y.dtype != np.int64 or len(y) != len(x):
        raise DataFilesCorruptError(
            f"{label_key!r} in {path} must have one integer of 64 bits for each image, got "
            f"{len(x)} images and {len(labels)} labels"
        )
    return x.reshape(-1, 3, 32, 32), y


MAX_INSTRUCTIONS = 2**20  # CIFAR-100's training file has 400,000


class PickledArray:
    """A byte array that a pickle creates. A pickle first creates an empty array, and fills it in a
    later instruction.

    Attributes:
        value: the array, or None before it is filled.
    """

    value: npt.NDArray[np.uint8] | None = None


class _Uint8:
    """The placeholder for NumPy's uint8 while a pickle is read. Arrays in a pickle may have no
    other type.
    """


def read_pickle(content: bytes) -> object:
    """Reads a pickle without executing code that the pickle names.

    The pickle may contain None, bool, int, str, bytes, list, tuple, dict and byte arrays.

    Arrays are returned as `PickledArray`. Strings of Python 2 become str, with one character for
    each byte (latin-1).

    Raises:
        ValueError, TypeError: the pickle has an instruction or a name that CIFAR's files do not
            need, or an instruction is truncated or malformed.
    """
    file = BytesIO(content)
    machine = _Machine()
    for number, (instruction, argument, _) in enumerate(pickletools.genops(file)):
        if number >= MAX_INSTRUCTIONS:
            raise ValueError(f"the pickle has more than {MAX_INSTRUCTIONS:,} instructions")
        machine.step(instruction.name, argument)
    if file.tell() != len(content):
        raise ValueError(f"the pickle has {len(content) - file.tell()} bytes after its end")
    if len(machine.stack) != 1 or machine.marks:
        raise ValueError("the pickle must contain exactly one value")
    return machine.stack[0]


class _Machine:
    """Executes the few pickle instructions that image files need, and refuses all other
    instructions.

    The attributes are the stack, the marks and the memo of the pickle protocol.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[object, object] = {}

    def step(self, name: str, argument: object) -> None:
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _STEPS:
            self.stack.append(_STEPS[name](self))
        elif name == "GLOBAL":
            self.stack.append(_named(*str(argument).split(" ", 1)))
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            (value,) = self.take(1)
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = value
            self.stack.append(value)
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise ValueError("the pickle reads an entry of its memo that it has not stored")
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the pickle instruction {name} is not allowed in an image file")

    def take(self, count: int) -> list[Any]:
        """Pops the last `count` values from the stack."""
        start = len(self.stack) - count
        if start < (self.marks or [0])[-1]:
            raise ValueError("a pickle instruction takes more values than the stack contains")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def since_mark(self) -> list[Any]:
        """Pops the last mark and the values after it from the stack."""
        if not self.marks:
            raise ValueError("a pickle instruction needs a mark that does not exist")
        values = self.stack[self.marks.pop() :]
        del self.stack[len(self.stack) - len(values) :]
        return values

    def extended(self, items: list[Any]) -> list[Any]:
        (target,) = self.take(1)
        if type(target) is not list:
            raise ValueError("the pickle appends to a value that is not a list")
        target += items
        return target

    def updated(self, items: list[Any]) -> dict[Any, Any]:
        (target,) = self.take(1)
        keys = items[::2]
        # Only these key types: hashing nested tuples recurses, and hashes of integers can collide.
        if type(target) is not dict or not {str, bytes}.issuperset(map(type, keys)):
            raise ValueError("the pickle must set items of a dict with text keys")
        target.update(zip(keys, items[1::2], strict=True))
        return target


def _named(module: object, attribute: object) -> Callable[..., object]:
    function = _FUNCTIONS.get(f"{module} {attribute}")
    if function is None:
        name = one_line(f"{module}.{attribute}", 80)
        raise ValueError(f"the pickle imports {name}, which is not allowed in an image file")
    return function


def _call(function: object, arguments: object) -> object:
    if function not in _FUNCTIONS.values() or type(arguments) is not tuple:
        raise ValueError("the pickle calls a value that is not a function")
    return function(*arguments)  # type: ignore[operator]


def _build(target: object, state: object) -> object:
    """Executes the instruction BUILD, which fills an array that was created empty.

    The instruction may also set the state of a data type. This state is ignored.
    """
    if isinstance(target, _Uint8):
        return target
    if not isinstance(target, PickledArray) or target.value is not None:
        raise ValueError("the pickle may fill only empty arrays")
    if type(state) is not tuple or len(state) != 5:
        raise ValueError("an array in the pickle must have a state of five values")
    _, shape, kind, by_columns, content = state
    target.value = _numbers(content, kind, shape, ("C", "F")[bool(by_columns)])
    return target


def _numbers(content: object, kind: object, shape: Any, order: Any) -> npt.NDArray[np.uint8]:
    if isinstance(content, str):  # Python 2's strings are bytes
        content = content.encode("latin1")
    if not isinstance(content, bytes | bytearray) or not isinstance(kind, _Uint8):
        raise ValueError("the pickle has an array that does not consist of bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order=order)


def _dtype(code: object, *_: object) -> _Uint8:
    if code not in ("u1", b"u1"):
        raise ValueError(f"an array in the pickle must have bytes, not type {one_line(code, 20)}")
    return _Uint8()


def _from_buffer(content: object, kind: object, shape: object, order: object) -> PickledArray:
    array = PickledArray()
    array.value = _numbers(content, kind, shape, order)
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Converts text to the bytes that the text represents.

    The pickle protocols 0 to 2 store bytes as latin-1 text.
    """
    if encoding != "latin1":
        raise ValueError("the pickle encodes text in an encoding other than 'latin1'")
    return text.encode("latin1")


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "numpy ndarray": PickledArray,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}
for _core in ("core", "_core"):  # NumPy renamed its modules in version 2
    _FUNCTIONS[f"numpy.{_core}.multiarray _reconstruct"] = lambda *_: PickledArray()
    _FUNCTIONS[f"numpy.{_core}.numeric _frombuffer"] = _from_buffer
_PUSHED = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1"),
        *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_STEPS: dict[str, Callable[[_Machine], object]] = {
    "NONE": lambda machine: None,
    "NEWTRUE": lambda machine: True,
    "NEWFALSE": lambda machine: False,
    "EMPTY_LIST": lambda machine: [],
    "EMPTY_TUPLE": lambda machine: (),
    "EMPTY_DICT": lambda machine: {},
    "TUPLE": lambda machine: tuple(machine.since_mark()),
    "TUPLE1": lambda machine: tuple(machine.take(1)),
    "TUPLE2": lambda machine: tuple(machine.take(2)),
    "TUPLE3": lambda machine: tuple(machine.take(3)),
    "APPEND": lambda machine: machine.extended(machine.take(1)),
    "APPENDS": lambda machine: machine.extended(machine.since_mark()),
    "SETITEM": lambda machine: machine.updated(machine.take(2)),
    "SETITEMS": lambda machine: machine.updated(machine.since_mark()),
    "STACK_GLOBAL": lambda machine: _named(*machine.take(2)),
    "REDUCE": lambda machine: _call(*machine.take(2)),
    "BUILD": lambda machine: _build(*machine.take(2)),
}
