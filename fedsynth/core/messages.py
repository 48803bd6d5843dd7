"""Messages between the server and the clients, as frozen dataclasses of named tensors and numbers.

Every field of an upload declares its status under differential privacy (DP). `released()` marks the
output of a charged mechanism, or values that are computed only from such outputs. `public(reason)`
marks values that do not depend on private data. With DP, a field that declares neither cannot be
uploaded.

`Packed` gives each such dataclass byte counts and a wire format. The wire format is one safetensors
file that contains the tensors under flat names. The file's metadata holds a JSON header with the
type's name and the values of all other fields: numbers, None, and the keys of mappings (so that
empty mappings are restored). Nothing in the file is executed. A server's state
(`fedsynth.core.context`) is packed in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedsynth.data.files import unpack_tensors
from fedsynth.errors import MessageError, faults_as, one_line, short_repr
from fedsynth.privacy.releases import is_real

WIRE_FORMAT = "3"
LARGEST = 2**63  # bound on integers
LENGTH_BYTES = 8  # size of a safetensors header's length field, little-endian
LONGEST_HEADER = 8 * 2**20  # bytes (50,000 tensors' names): parsed JSON takes many times its length


# The type of tensors by name, such as the parameters of a model.
Tensors = Mapping[str, Tensor]


def flattened(models: Mapping[int, Tensors]) -> dict[str, Tensor]:
    """Gives each tensor of each model the name `number/name`.

    >>> list(flattened({3: {"weight": torch.ones(2)}}))
    ['3/weight']
    """
    return {f"{k}/{name}": t for k, tensors in models.items() for name, t in tensors.items()}


def unflattened(tensors: Tensors) -> dict[int, dict[str, Tensor]]:
    """Returns the models whose tensors `flattened` has named."""
    models: dict[int, dict[str, Tensor]] = {}
    for label, tensor in tensors.items():
        number, name = label.split("/", 1)
        models.setdefault(int(number), {})[name] = tensor
    return models


def released() -> Any:
    """Declares a dataclass field that holds only the noisy results of a privacy mechanism."""
    return field(metadata={"dp": "released"})


def public(reason: str) -> Any:
    """Declares a dataclass field that does not depend on private data.

    The privacy report prints `reason`.
    """
    return field(metadata={"dp": "public", "reason": reason})


def unprotected() -> Any:
    """Declares a dataclass field that no privacy mechanism protects.

    A message with such a field is refused with differential privacy.
    """
    return field(metadata={"dp": "unprotected"})


@dataclass(frozen=True)
class Packed:
    """A frozen dataclass that can be converted to bytes and back.

    Each field is a tensor, a number, a mapping of names to tensors, or None.
    """

    def arrays(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor with its name.

        A tensor in a mapping has the name `field.key`.
        """
        for name in _names_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, Mapping):
                for key, tensor in value.items():
                    yield f"{name}.{key}", tensor

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, value) for each tensor, then for each plain number as a float64 scalar."""
        yield from self.arrays()
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float):
                yield f.name, torch.tensor(value, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the sent tensors, plus 8 bytes for each plain number."""
        plain = sum(isinstance(getattr(self, n), int | float) for n in _names_of(type(self)))
        return sum(t.nbytes for _, t in self.arrays()) + 8 * plain

    @property
    def floats(self) -> int:
        """The number of floating-point values and uint8 pixels that are sent.

        Papers state communication costs in floats.
        """
        return sum(
            t.numel() for _, t in self.arrays() if t.is_floating_point() or t.dtype == torch.uint8
        )

    def to_bytes(self) -> bytes:
        """Converts the dataclass to bytes.

        Equal dataclasses give equal bytes. Tensors are copied to the CPU, and the receiver gets
        them on the CPU.

        Raises:
            MessageError: a number is not finite, or a field is not a tensor, a number, a mapping or
                None.

        >>> import torch
        >>> sent = ModelParameters({"weight": torch.ones(2, 3)}, weight=5.0).to_bytes()
        >>> ModelParameters.from_bytes(sent).weight
        5.0
        """
        values = self.header_values()
        _require_finite(type(self), values)
        header = {"fedsynth_message": WIRE_FORMAT, "type": type(self).__name__, "values": values}
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self.arrays()}
        # one entry, because safetensors writes several entries in random order
        return safetensors.torch.save(tensors, {"header": json.dumps(header)})

    def header_values(self) -> dict[str, Any]:
        """Returns the numbers, the Nones, and the keys of the mappings, by field.

        Raises:
            MessageError: a field is not a tensor, a number, a mapping or None.
        """
        values: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mapping):
                values[f.name] = list(value)
            elif value is None or isinstance(value, int | float):
                values[f.name] = value
            elif not isinstance(value, Tensor):
                raise MessageError(
                    f"the message field {type(self).__name__}.{f.name} must be a number, a tensor, "
                    f"a mapping or None, got {value!r:.80}"
                ).with_code("message.value")
        return values

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Creates an instance from the bytes that `to_bytes` returned.

        Raises:
            MessageError: the bytes are damaged or hold another type. Also raised if a field is
                missing, unexpected or of another type, or if a number is not finite.
        """
        tensors, header = _unpacked(sent)
        if header.type != cls.__name__:
            raise MessageError(f"expected a {cls.__name__} message, got {header.type!r:.80}")
        _require_finite(cls, header.values)
        return cls.made_of(tensors, header.values)

    @classmethod
    def made_of(cls, tensors: dict[str, Tensor], values: dict[str, Any]) -> Self:
        """Creates an instance from its `arrays` and `header_values`, which are emptied.

        Raises:
            MessageError: a field is missing, unexpected or of another type.
        """
        by_field: dict[str, Any] = {}
        hints = _hints_of(cls)
        for f in fields(cls):
            what = f"{cls.__name__}.{f.name}"
            value = _pop_field(what, f.name, values, tensors)
            if not _allows(hints[f.name], value):
                expected = getattr(hints[f.name], "__name__", hints[f.name])
                raise MessageError(
                    f"the received field {what} must have the type {expected}, got "
                    f"{type(value).__name__}"
                ).with_code("message.type")
            by_field[f.name] = value
        unused = sorted([*tensors, *values])
        if unused:
            raise MessageError(f"the {cls.__name__} contains the unknown entry {unused[0]!r:.80}")
        return cls(**by_field)

    def to(self, device: torch.device | str) -> Self:
        """Returns a copy of the dataclass with all tensors on `device`."""
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
    """The base class of all messages between the server and the clients.

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


class _Header(BaseModel):
    """The JSON header of a dataclass that was converted to bytes.

    Attributes:
        values: the value of each field that is not a tensor: a number, None, or the list of the
            keys of a mapping.
    """

    model_config = ConfigDict(strict=True)

    fedsynth_message: Literal["3"]
    type: str
    values: dict[str, Any]


def _unpacked(sent: bytes) -> tuple[dict[str, Tensor], _Header]:
    """Parses bytes into the tensors and the header of a dataclass."""
    try:
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if length > LONGEST_HEADER:
            raise ValueError(
                f"the header has {length} bytes, but may have at most {LONGEST_HEADER}"
            )
        tensors, metadata = unpack_tensors(sent)
        with faults_as(ValueError, "the header"):
            return tensors, _Header.model_validate_json(metadata["header"])
    except (ValueError, KeyError) as error:
        reason = f"the bytes are not a valid fedsynth message: {one_line(error)}"
        raise MessageError(reason) from None


# Each type's field names and type hints. They are cached, as a server needs them for each upload.
_names_of: Callable[[type], tuple[str, ...]] = lru_cache(maxsize=64)(
    lambda kind: tuple(f.name for f in fields(kind))
)
_hints_of: Callable[[type], dict[str, Any]] = lru_cache(maxsize=64)(get_type_hints)


def _allows(hint: Any, value: object) -> bool:
    """Returns True if a value has the type of a field's annotation.

    A field that is annotated as float may also be an int.
    """
    if get_origin(hint) in (Union, UnionType):
        return any(_allows(part, value) for part in get_args(hint))
    if hint is float:
        hint = (int, float)
    return hint is Any or isinstance(value, get_origin(hint) or hint)


def _pop_field(what: str, name: str, values: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Returns the value of one field, and removes it from the parsed message."""
    if name in tensors:
        return tensors.pop(name)
    if name not in values:
        raise MessageError(f"the message is missing the field {what}").with_code("message.missing")
    value = values.pop(name)
    if isinstance(value, list):
        mapping = {}
        for key in value:
            if type(key) is not str:
                raise MessageError(f"the received {what} contains a key that is not text")
            if f"{name}.{key}" not in tensors:
                raise MessageError(f"the received {what} is missing the tensor for key {key!r:.80}")
            mapping[key] = tensors.pop(f"{name}.{key}")
        return mapping
    if value is None or type(value) in (int, float):
        return value
    raise MessageError(f"{what} must be a number, got {short_repr(value)}")


def _require_finite(kind: type[Packed], values: Mapping[str, Any]) -> None:
    """Raises MessageError if a number is not finite, or is an integer above `LARGEST`."""
    for name in _names_of(kind):
        value = values.get(name)
        large = type(value) is int and abs(value) > LARGEST
        if isinstance(value, int | float) and (large or not is_real(value)):
            raise MessageError(
                f"{kind.__name__}.{name} must be a finite number, got {short_repr(value)}"
            ).with_code("message.value")


def privacy_of_fields(message: type[Message]) -> dict[str, tuple[str, str]]:
    """Returns each field's declared privacy status, and the reason for the status.

    The status is "released", "public", "unprotected" or "undeclared".
    """
    return {
        f.name: (f.metadata.get("dp", "undeclared"), f.metadata.get("reason", ""))
        for f in fields(message)
    }


@dataclass(frozen=True)
class ModelParameters(Message):
    """A message that holds a model's parameters and buffers by name.

    Args:
        parameters: the tensors, named as in the model's `state_dict`.
        weight: the model's weight in the server's average. Without differential privacy (DP) it is
            the client's number of examples. With DP it is 1, or 0 for a client that is dropped as a
            straggler.

    >>> model = torch.nn.Linear(64, 10)
    >>> sent = ModelParameters(model.state_dict(), weight=480.0)
    >>> sent.floats, [name for name, _ in sent.arrays()]
    (650, ['parameters.weight', 'parameters.bias'])
    """

    parameters: Mapping[str, Tensor] = released()
    weight: float = public(
        "with differential privacy 1, or 0 for a dropped straggler, which is drawn publicly. "
        "Without differential privacy the number of examples"
    )
