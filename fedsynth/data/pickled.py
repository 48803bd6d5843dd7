"""Pickles of plain containers and numeric arrays, read as data: nothing is imported, called or
built on a file's behalf.

A pickle is a program for a machine that can call anything. `pickletools` only lists its
instructions; the few that such files need are carried out here, on Python's own containers. What
would be calls of NumPy are recognised by name, and an array stays what the file says of it
(`PickledArray`): its type's code, its shape and its bytes, checked against each other. That covers
the official CIFAR files (protocol 2, Python 2) and what newer Python and NumPy write of the same
(protocols 0 to 5).

Time and memory are bounded by the file's size: arguments never reach beyond the file's end, nothing
is copied by reference, and instructions, containers, memo entries and dimensions are counted.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsynth.data.files import one_line

MOST_INSTRUCTIONS = 2**20  # CIFAR-100's training file has 400,000
MOST_CONTAINERS = 1000
MOST_REMEMBERED = 2**17
MOST_DIMENSIONS = 8

ITEM_BYTES = {
    **{f"{kind}{size}": size for kind in "iu" for size in (1, 2, 4, 8)},
    "b1": 1,
    "f2": 2,
    "f4": 4,
    "f8": 8,
}
"""Bytes of one number, for each type code that an array may have."""

_NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    # NumPy renamed its modules in version 2.
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "reconstruct" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},
    **{(module, "bytes"): "bytes" for module in ("builtins", "__builtin__")},
}


class PickleRefusedError(ValueError):
    """Not such a pickle; `str(error)` says why."""


@dataclass(frozen=True)
class _Name:
    """What the pickle asks for by module and name; never the thing itself."""

    name: str


@dataclass(frozen=True)
class _NumberType:
    code: str


@dataclass
class PickledArray:
    """What a pickle says of an array.

    Attributes:
        code: its type, a key of `ITEM_BYTES`.
        shape: its dimensions.
        content: its bytes, as many as type and shape need.
        by_columns: the bytes are in Fortran's order.
    """

    code: str = ""
    shape: tuple[int, ...] = ()
    content: bytes | bytearray = b""
    by_columns: bool = False

    def __str__(self) -> str:
        return f"{np.dtype(self.code).name if self.code else 'empty'} {list(self.shape)}"

    def fill(self, code: str, shape: object, content: object, by_columns: bool) -> None:
        """Sets everything, once.

        Raises:
            PickleRefusedError: a shape that is none, or as many bytes as type and shape do not
                need.
        """
        if self.code:
            raise PickleRefusedError("it fills an array twice")
        if isinstance(content, str):  # Python 2's strings are bytes
            content = content.encode("latin1")
        if not isinstance(content, bytes | bytearray):
            raise PickleRefusedError("it has an array of something else than bytes")
        if not (
            isinstance(shape, tuple)
            and len(shape) <= MOST_DIMENSIONS
            and all(type(n) is int and 0 <= n < 2**40 for n in shape)
            and math.prod(shape) * ITEM_BYTES[code] == len(content)
        ):
            raise PickleRefusedError(
                f"it has an array whose shape does not fit {len(content)} bytes"
            )
        self.code = code
        self.shape = shape
        self.content = content
        self.by_columns = by_columns


def read_pickle(content: bytes) -> object:
    """What the pickle `content` holds: None, bool, int, float, str, bytes, list, tuple, dict and
    `PickledArray`.

    Strings of Python 2 become str, a character for each byte (latin-1).

    Raises:
        PickleRefusedError: an instruction, a name or a size that such files have no use for.
        ValueError: an instruction that is cut off or malformed.
    """
    file = io.BytesIO(content)
    machine = _Machine(len(content))
    for number, (instruction, argument, position) in enumerate(pickletools.genops(file)):
        if number >= MOST_INSTRUCTIONS:
            raise PickleRefusedError(f"it has more than {MOST_INSTRUCTIONS:,} instructions")
        machine.step(instruction.name, argument, position or 0)
    if file.tell() != len(content):
        raise PickleRefusedError(f"it has {len(content) - file.tell()} bytes left over")
    return machine.result()


class _Machine:
    """The stack, its marks and the memo, as the pickle protocol describes them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.containers = 0

    def step(self, name: str, argument: object, position: int) -> None:
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _REMEMBERS:
            self.remember(len(self.memo) if name == "MEMOIZE" else argument)
        elif name in _RECALLS:
            if argument not in self.memo:
                raise PickleRefusedError("it recalls what it has not stored")
            self.stack.append(self.memo[argument])
        elif name == "FRAME":
            if not isinstance(argument, int) or position + 9 + argument > self.size:
                raise PickleRefusedError("it has a frame beyond the file's end")
        elif name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            self.stack.append(_named(module, attribute))
        elif name in _STEPS:
            _STEPS[name](self)
        elif name not in ("PROTO", "STOP"):
            raise PickleRefusedError(
                f"it has the instruction {name}, which image files have no use for"
            )

    def result(self) -> object:
        if len(self.stack) != 1 or self.marks:
            raise PickleRefusedError("it does not end with one value")
        return self.stack[0]

    def pop(self) -> object:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise PickleRefusedError("it takes more values than there are")
        return self.stack.pop()

    def since_mark(self) -> list[object]:
        if not self.marks:
            raise PickleRefusedError("it looks for a mark that is not there")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def container(self, made: list[object] | tuple[object, ...] | dict[object, object]) -> None:
        self.containers += 1
        if self.containers > MOST_CONTAINERS:
            raise PickleRefusedError(
                f"it has more than {MOST_CONTAINERS:,} lists, tuples and dicts"
            )
        self.stack.append(made)

    def mark(self) -> None:
        if len(self.marks) >= MOST_CONTAINERS:
            raise PickleRefusedError(f"it has more than {MOST_CONTAINERS:,} marks at once")
        self.marks.append(len(self.stack))

    def remember(self, place: object) -> None:
        if not (isinstance(place, int) and 0 <= place < MOST_INSTRUCTIONS):
            raise PickleRefusedError("it stores a value at a place that is none")
        if len(self.memo) >= MOST_REMEMBERED:
            raise PickleRefusedError(f"it stores more than {MOST_REMEMBERED:,} values")
        value = self.pop()
        self.stack.append(value)
        self.memo[place] = value

    def some(self, count: int) -> tuple[object, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def extend(self, items: list[object]) -> None:
        target = self.pop()
        if not isinstance(target, list):
            raise PickleRefusedError("it appends to what is no list")
        target += items
        self.stack.append(target)

    def update(self, items: list[object] | tuple[object, ...]) -> None:
        target = self.pop()
        if not isinstance(target, dict) or len(items) % 2:
            raise PickleRefusedError("it puts keys and values into what is no dict")
        target.update(_pairs(items))
        self.stack.append(target)

    def append(self) -> None:
        item = self.pop()
        self.extend([item])

    def find(self) -> None:
        module, attribute = self.some(2)
        if not (isinstance(module, str) and isinstance(attribute, str)):
            raise PickleRefusedError("it asks for something without a name")
        self.stack.append(_named(module, attribute))

    def call(self) -> None:
        """What would call a function: only the few that stand for arrays and their parts, which
        `_made` knows."""
        arguments = self.pop()
        name = self.pop()
        if not (isinstance(name, _Name) and isinstance(arguments, tuple)):
            raise PickleRefusedError("it calls what is no function")
        self.stack.append(_made(name.name, arguments))

    def build(self) -> None:
        """What would set an object's state: the parts of an array, or of a number's type."""
        state = self.pop()
        target = self.pop()
        if isinstance(target, PickledArray):
            if not (isinstance(state, tuple) and len(state) == 5):
                raise PickleRefusedError("it has an array without its five parts")
            _, shape, kind, by_columns, content = state
            if not (isinstance(kind, _NumberType) and isinstance(by_columns, int)):
                raise PickleRefusedError("it has an array without a type")
            target.fill(kind.code, shape, content, bool(by_columns))
        elif isinstance(target, _NumberType):
            _check_type_state(state)
        else:
            raise PickleRefusedError("it sets the state of what has none")
        self.stack.append(target)


def _named(module: str, attribute: str) -> _Name:
    try:
        return _Name(_NAMES[module, attribute])
    except KeyError:
        raise PickleRefusedError(
            f"it asks for {one_line(f'{module}.{attribute}', 80)}, which image files have no use "
            "for"
        ) from None


def _pairs(items: list[object] | tuple[object, ...]) -> dict[object, object]:
    keys = items[::2]
    # Nothing else, because the hash of nested tuples recurses, and those of integers can be made to
    # collide.
    if not all(isinstance(key, str | bytes) for key in keys):
        raise PickleRefusedError("it has a dict whose keys are no strings")
    return dict(zip(keys, items[1::2], strict=True))


def _made(name: str, arguments: tuple[object, ...]) -> object:
    """The value for which a call in the pickle stands."""
    match name, arguments:
        case "encode", (str(text), "latin1" | "latin-1"):  # bytes before protocol 3
            return text.encode("latin1")
        case "bytes", ():
            return b""
        case "dtype", (str(code), *_) if code in ITEM_BYTES:
            return _NumberType(code)
        case "dtype", (code, *_):
            raise PickleRefusedError(
                f"it has an array of type {one_line(code, 20)}, not of numbers"
            )
        case "reconstruct", (_Name("ndarray"), (0,), b"b" | "b"):
            return PickledArray()
        case "frombuffer", (content, _NumberType(code), shape, "C" | "F" as order, *rest) if (
            rest in ([], [None])
        ):
            array = PickledArray()
            array.fill(code, shape, content, order == "F")
            return array
    raise PickleRefusedError(f"it calls {name} in a way in which no array is stored")


def _check_type_state(state: object) -> None:
    """Refuses all but a plain number's state: version, byte order, no subarray, names or fields,
    then sizes and flags."""
    match state:
        case (int(), "|" | "<" | ">" | "=", None, None, None, *rest) if all(
            part is None or type(part) is int for part in rest
        ):
            return
    raise PickleRefusedError("it has an array of something else than plain numbers")


_PUSHED = frozenset(
    (
        *("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "BINFLOAT"),
        *("SHORT_BINSTRING", "BINSTRING"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_REMEMBERS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_RECALLS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_STEPS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "EMPTY_LIST": lambda machine: machine.container([]),
    "EMPTY_TUPLE": lambda machine: machine.container(()),
    "EMPTY_DICT": lambda machine: machine.container({}),
    "LIST": lambda machine: machine.container(machine.since_mark()),
    "TUPLE": lambda machine: machine.container(tuple(machine.since_mark())),
    "TUPLE1": lambda machine: machine.container(machine.some(1)),
    "TUPLE2": lambda machine: machine.container(machine.some(2)),
    "TUPLE3": lambda machine: machine.container(machine.some(3)),
    "DICT": lambda machine: machine.container(_pairs(machine.since_mark())),
    "APPEND": _Machine.append,
    "APPENDS": lambda machine: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine: machine.update(machine.some(2)),
    "SETITEMS": lambda machine: machine.update(machine.since_mark()),
    "STACK_GLOBAL": _Machine.find,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
