"""Messages between server and clients: frozen dataclasses whose fields are tensors, numbers or mappings of names to tensors.

Any message flattens to named arrays, which gives byte counts, validation and serialisation for free. Every field says what it
is under differential privacy: `released()` for what came out of a charged mechanism (or is computed from such values alone),
`public(reason)` for what does not depend on private data. A field that says neither cannot be uploaded with DP on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


def released() -> Any:
    """A field made of released values only."""
    return field(metadata={"dp": "released"})


def public(reason: str) -> Any:
    """A field that is the same whatever the private data are; `reason` goes into the privacy report."""
    return field(metadata={"dp": "public", "reason": reason})


def unprotected() -> Any:
    """A field that no mechanism protects: refused with DP on."""
    return field(metadata={"dp": "unprotected"})


@dataclass(frozen=True)
class Message:
    """Base of all messages."""

    def arrays(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names, mappings flattened as `field.key`."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                yield f.name, value
            elif isinstance(value, Mapping):
                yield from ((f"{f.name}.{key}", tensor) for key, tensor in value.items())

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """`arrays`, and the plain numbers as float64 scalars."""
        yield from self.arrays()
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float):
                yield f.name, torch.tensor(value, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as sent; 8 for each plain number."""
        tensors = sum(t.numel() * t.element_size() for _, t in self.arrays())
        return tensors + 8 * sum(
            isinstance(getattr(self, f.name), int | float) for f in fields(self)
        )

    @property
    def floats(self) -> int:
        """Number of floating-point values: the unit of the papers' communication tables."""
        return sum(t.numel() for _, t in self.arrays() if t.is_floating_point())


def privacy_of_fields(message: type[Message]) -> dict[str, tuple[str, str]]:
    """What each field of a message type declares: name -> ("released" | "public" | "unprotected" | "undeclared", reason)."""
    return {
        f.name: (f.metadata.get("dp", "undeclared"), f.metadata.get("reason", ""))
        for f in fields(message)
    }


@dataclass(frozen=True)
class ModelParameters(Message):
    """A model on the wire: parameters and buffers by name."""

    parameters: Mapping[str, Tensor] = released()
    weight: float = public(
        "1 with DP on (0 for a straggler that is dropped, by a public draw), the number of examples with DP off"
    )


def parameters_of(message: Message) -> Mapping[str, Tensor]:
    """The parameters of a model message; TypeError for any other message, which would be a mistake of the method."""
    if not isinstance(message, ModelParameters):
        raise TypeError(f"expected ModelParameters, got {type(message).__name__}")
    return message.parameters
