"""Every message and state of the package, and valid examples of each by its annotations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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


def kinds() -> list[type[Packed]]:
    """All messages and states of the package, by name."""
    for name in METHODS:
        method_class(name)
    return sorted(set(_below(Packed)), key=lambda kind: kind.__qualname__)


def _below(of: type[Packed]) -> Iterator[type[Packed]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("fedsynth"):
            yield kind
            yield from _below(kind)


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The types that a field with this annotation takes."""
    union = get_origin(hint) is UnionType or "Union" in str(get_origin(hint))
    return get_args(hint) if union else (hint,)


def example(kind: type[Packed], rng: random.Random) -> Packed:
    """A valid one, with tensors of any type and shape, contiguous or not."""
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for f in fields(kind):
        choices = choices_of(hints[f.name])
        part = rng.choice([one for one in choices if f.default is None or one != NoneType])
        if part is NoneType:
            values[f.name] = None
        elif part is float:
            values[f.name] = rng.choice((0.5, 3.0, -0.0, 5e-324, -1e308, 1e15 + 0.125))
        elif part is int:
            values[f.name] = rng.choice((0, 9, 2**53, -(2**53)))
        elif part is Tensor:
            values[f.name] = tensor(rng)
        else:
            names = rng.sample(("a", "b.c", "", "é\n"), rng.randint(0, 3))
            values[f.name] = {name: tensor(rng) for name in names}
    return kind(**values)


def tensor(rng: random.Random) -> Tensor:
    shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
    made = torch.arange(math.prod(shape)).remainder(rng.randint(2, 9)).view(shape)
    made = made.to(rng.choice(list(DTYPES)))
    return made.transpose(0, -1) if made.dim() > 1 and rng.random() < 0.5 else made
