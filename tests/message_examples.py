"""The package's messages and states, and random valid instances by their annotations."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsynth.core.messages import Packed
from fedsynth.methods import METHODS, method_class

DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def message_types() -> list[type[Packed]]:
    """Returns all messages and states of the package, sorted by name."""
    list(map(method_class, METHODS))
    found: list[type[Packed]] = [Packed]
    for kind in found:  # grows in the loop
        found += (sub for sub in kind.__subclasses__() if sub.__module__.startswith("fedsynth"))
    return sorted({*found} - {Packed}, key=lambda kind: kind.__qualname__)


def field_types(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a field with this annotation accepts."""
    union = get_origin(hint) is UnionType or "Union" in str(get_origin(hint))
    return get_args(hint) if union else (hint,)


def random_message(message_type: type[Packed], rng: random.Random) -> Packed:
    """Returns a valid message, with tensors of any type and shape, contiguous or not."""
    values: dict[str, Any] = {}
    hints = get_type_hints(message_type)
    for field in fields(message_type):
        types = field_types(hints[field.name])
        field_type = rng.choice([t for t in types if field.default is None or t != NoneType])
        if field_type is NoneType:
            values[field.name] = None
        elif field_type is float:
            values[field.name] = rng.choice((0.5, 3.0, -0.0, 5e-324, -1e308, 1e15 + 0.125))
        elif field_type is int:
            values[field.name] = rng.choice((0, 9, 2**53, -(2**53)))
        elif field_type is Tensor:
            values[field.name] = random_tensor(rng)
        else:
            names = rng.sample(("a", "b.c", "", "é\n"), rng.randint(0, 3))
            values[field.name] = {name: random_tensor(rng) for name in names}
    return message_type(**values)


def random_tensor(rng: random.Random) -> Tensor:
    shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
    tensor = torch.arange(math.prod(shape)).remainder(rng.randint(2, 9)).view(shape)
    tensor = tensor.to(rng.choice(list(DTYPES)))
    return tensor.transpose(0, -1) if tensor.dim() > 1 and rng.random() < 0.5 else tensor
