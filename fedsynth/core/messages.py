"""Messages between server and clients: frozen dataclasses of named tensors and plain numbers.

Every field of an upload declares its status under differential privacy: `released()` for the output
of a charged mechanism (or values computed only from such outputs), `public(reason)` for values that
do not depend on private data. A field that declares neither cannot be uploaded with DP on.

`Packed` gives any such dataclass byte counts and a wire format: one safetensors file, with the
tensors under their flat names, and a JSON header in its metadata with the type's name, the plain
numbers, the keys of mappings (so that empty ones are restored) and the fields that are None.
Nothing in it is executed. A server's state (`fedsynth.core.context`) is packed in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedsynth.data.files import one_line
from fedsynth.errors import MessageError
from fedsynth.privacy.errors import short_repr
from fedsynth.privacy.releases import is_real

WIRE_FORMAT = "2"
LARGEST = 2**63  # bound on integers
LENGTH_BYTES = 8  # size of a safetensors header's length field, little-endian
DAMAGED = (safetensors.SafetensorError, LookupError, ValueError, RuntimeError, TypeError)
"""Errors that reading damaged tensors raises: those of safetensors, and those of torch for dtypes
that it lacks and for sizes beyond its limits."""
LONGEST_HEADER = 8 * 2**20  # bytes (50,000 tensors' names): parsed JSON takes many times its length


def released() -> Any:
    """Returns a field for released values only."""
    return field(metadata={"dp": "released"})


def public(reason: str) -> Any:
    """Returns a field that does not depend on the private data; the privacy report prints
    `reason`."""
    return field(metadata={"dp": "public", "reason": reason})


def unprotected() -> Any:
    """Returns a field that no mechanism protects: refused with DP on."""
    return field(metadata={"dp": "unprotected"})


@dataclass(frozen=True)
class Packed:
    """A frozen dataclass whose fields are tensors, numbers, mappings of names to tensors, or
    None."""

    def arrays(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors with their names, mappings flattened as `field.key`."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                yield f.name, value
            elif isinstance(value, Mapping):
                yield from ((f"{f.name}.{key}", tensor) for key, tensor in value.items())

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields `arrays`, then the plain numbers as float64 scalars."""
        yield from self.arrays()
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float):
                yield f.name, torch.tensor(value, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the tensors as sent, plus 8 for each plain number."""
        return sum(t.nbytes for _, t in self.numbers())

    @property
    def floats(self) -> int:
        """Number of floating-point values, and of pixels sent as bytes: the unit of the papers'
        communication tables."""
        return sum(
            t.numel() for _, t in self.arrays() if t.is_floating_point() or t.dtype == torch.uint8
        )

    def to_bytes(self) -> bytes:
        """Returns the dataclass in its wire format; equal dataclasses give equal bytes. Tensors are
        copied to the CPU, and are received there.

        Raises:
            MessageError: a number is not finite, or a field has another type.

        >>> import torch
        >>> sent = ModelParameters({"weight": torch.ones(2, 3)}, weight=5.0).to_bytes()
        >>> ModelParameters.from_bytes(sent).weight
        5.0
        """
        numbers: dict[str, float] = {}
        keys: dict[str, list[str]] = {}
        none: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                none.append(f.name)
            elif isinstance(value, Mapping):
                keys[f.name] = list(value)
            elif isinstance(value, int | float) and math.isfinite(value):
                numbers[f.name] = value
            elif not isinstance(value, Tensor):
                raise MessageError(f"{type(self).__name__}.{f.name} cannot be sent: {value!r:.80}")
        header = {"type": type(self).__name__, "numbers": numbers, "keys": keys, "none": none}
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self.arrays()}
        metadata = {"fedsynth_message": WIRE_FORMAT, "header": json.dumps(header)}
        return _in_one_order(safetensors.torch.save(tensors, metadata))

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Returns the dataclass of this type that was sent.

        Raises:
            MessageError: the bytes are damaged or of another type, a field is missing, unexpected
                or of another type, or a number is not finite.
        """
        header = _header(sent)
        if header.get("type") != cls.__name__:
            raise MessageError(f"expected a message {cls.__name__}, got {header.get('type')!r:.80}")
        numbers, keys, none = (header.get(part) for part in ("numbers", "keys", "none"))
        if not (isinstance(numbers, dict) and isinstance(keys, dict) and isinstance(none, list)):
            raise MessageError(f"a message {cls.__name__} has no numbers and keys")
        try:
            tensors = safetensors.torch.load(sent)
        except DAMAGED as error:
            raise MessageError(f"a damaged message {cls.__name__}: {one_line(error)}") from None
        values: dict[str, Any] = {}
        forms = _forms(cls)
        for f in fields(cls):
            if f.default is None and f.name in none:
                none.remove(f.name)
                values[f.name] = None
                continue
            value = _pop_field(f"{cls.__name__}.{f.name}", f.name, numbers, keys, tensors)
            if not isinstance(value, forms[f.name]):
                kind_name = type(value).__name__
                raise MessageError(f"{cls.__name__}.{f.name} cannot be a {kind_name}")
            values[f.name] = value
        unused = sorted(map(str, [*tensors, *numbers, *keys, *none]))
        if unused:
            raise MessageError(f"a message {cls.__name__} has no field {unused[0]!r:.80}")
        return cls(**values)

    def to(self, device: torch.device | str) -> Self:
        """Returns a copy with all tensors on `device`."""
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = value.to(device)
            elif isinstance(value, Mapping):
                value = {key: tensor.to(device) for key, tensor in value.items()}
            moved[f.name] = value
        return type(self)(**moved)


@dataclass(frozen=True)
class Message(Packed):
    """Base of all messages.

    >>> @dataclass(frozen=True)
    ... class ClassSums(Message):
    ...     sums: Tensor = released()
    ...     classes: int = public("the data set's")
    >>> sent = ClassSums(torch.zeros(10, 64), classes=10)
    >>> sent.floats, sent.nbytes  # four bytes each, and eight for the plain number
    (640, 2568)
    >>> ClassSums.from_bytes(sent.to_bytes()).classes
    10
    """


def _in_one_order(saved: bytes) -> bytes:
    """Returns the file with its header's keys sorted: safetensors writes them in random order."""
    end = LENGTH_BYTES + int.from_bytes(saved[:LENGTH_BYTES], "little")
    parsed = json.loads(saved[LENGTH_BYTES:end])
    header = json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)  # tensors begin at a multiple of eight bytes
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + saved[end:]


def _header(sent: bytes) -> dict[str, Any]:
    """Returns the JSON header in the metadata, before any tensor is read."""
    try:
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"the header has {length} bytes, above the limit of {LONGEST_HEADER}")
        metadata = json.loads(sent[LENGTH_BYTES : LENGTH_BYTES + length])["__metadata__"]
        header = json.loads(metadata["header"])
        if metadata["fedsynth_message"] != WIRE_FORMAT or not isinstance(header, dict):
            raise ValueError(f"not of format {WIRE_FORMAT}")
        return header
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MessageError(f"not a valid fedsynth message: {error!r:.80}") from None


def _forms(kind: type[Packed]) -> dict[str, tuple[type, ...]]:
    """Returns the types that each field may have, by its annotation; an int is also a float."""
    hints = get_type_hints(kind)
    forms: dict[str, tuple[type, ...]] = {}
    for f in fields(kind):
        parts = get_args(hints[f.name]) if _is_union(hints[f.name]) else (hints[f.name],)
        allowed: list[type] = []
        for part in parts:
            if part is Any:
                allowed.append(object)
            elif part is float:
                allowed.extend((int, float))
            else:
                allowed.append(get_origin(part) or part)
        forms[f.name] = tuple(allowed)
    return forms


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _pop_field(
    what: str, name: str, numbers: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Tensor]
) -> Any:
    """Removes a field's value from the sent parts and returns it."""
    if name in numbers:
        number = numbers.pop(name)
        if not is_real(number) or (type(number) is int and abs(number) > LARGEST):
            raise MessageError(f"{what} must be a finite number, got {short_repr(number)}")
        return number
    if name in keys:
        listed = keys.pop(name)
        if not isinstance(listed, list) or len(set(map(str, listed))) != len(listed):
            raise MessageError(f"{what} must list its keys once each")
        missing = [key for key in listed if f"{name}.{key}" not in tensors]
        if missing:
            raise MessageError(f"{what} lacks {missing[0]!r:.80}")
        return {key: tensors.pop(f"{name}.{key}") for key in listed}
    if name in tensors:
        return tensors.pop(name)
    raise MessageError(f"{what} is missing")


def privacy_of_fields(message: type[Message]) -> dict[str, tuple[str, str]]:
    """Returns the declared privacy status of each field of a message type: name -> ("released" |
    "public" | "unprotected" | "undeclared", reason)."""
    return {
        f.name: (f.metadata.get("dp", "undeclared"), f.metadata.get("reason", ""))
        for f in fields(message)
    }


@dataclass(frozen=True)
class ModelParameters(Message):
    """A model on the wire: parameters and buffers by name.

    Args:
        parameters: as in the model's `state_dict`.
        weight: weight in the server's average: the client's number of examples; with differential
            privacy 1 (0 for a dropped straggler).

    >>> model = torch.nn.Linear(64, 10)
    >>> sent = ModelParameters(model.state_dict(), weight=480.0)
    >>> sent.floats, [name for name, _ in sent.arrays()]
    (650, ['parameters.weight', 'parameters.bias'])
    """

    parameters: Mapping[str, Tensor] = released()
    weight: float = public(
        "with DP on: 1, or 0 for a straggler that a public draw drops; with DP off: the "
        "number of examples"
    )
