"""Damaged messages: each is refused in one line, or is of exactly the types, shapes and names that
its own header declares."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsynth.core.messages import Packed
from fedsynth.federation.protocol import Models
from fedsynth.methods import METHODS, method_class
from tests.fuzz.mutations import (
    HOSTILE,
    Faults,
    altered,
    altered_json,
    fuzzed,
    generator,
    json_bytes,
)

CASES = 600
NUMBERS = tuple(v for v in HOSTILE if isinstance(v, (int, float)))
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


def kinds(of: type[Packed] = Packed) -> Iterator[type[Packed]]:
    """All messages and states of the package."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("fedsynth"):
            yield kind
            yield from kinds(kind)


def parts(hint: Any) -> tuple[Any, ...]:
    union = get_origin(hint) is UnionType or "Union" in str(get_origin(hint))
    return get_args(hint) if union else (hint,)


def example(kind: type[Packed], rng: random.Random) -> Packed:
    """A valid one, by its annotations."""
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for f in fields(kind):
        choices = [part for part in parts(hints[f.name]) if f.default is None or part != NoneType]
        part = rng.choice(choices)
        shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        tensor = torch.zeros(shape, dtype=rng.choice(list(DTYPES)))
        if part is NoneType:
            values[f.name] = None
        elif part is float:
            values[f.name] = rng.choice((0.5, 3.0))
        elif part is int:
            values[f.name] = rng.randint(0, 9)
        elif part is Tensor:
            values[f.name] = tensor
        else:
            values[f.name] = {name: tensor for name in ("a", "b.c")[: rng.randint(0, 2)]}
    return kind(**values)


def with_header(sent: bytes, change: Any) -> bytes:
    """The file with another JSON header before the same tensors."""
    length = int.from_bytes(sent[:8], "little")
    header = change(json.loads(sent[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + sent[8 + length :]


def damaged(sent: bytes, rng: random.Random) -> bytes:
    """Bytes, the header of the file, or fedsynth's own header inside it."""

    def inside(header: Any) -> Any:
        own = json.loads(header["__metadata__"]["header"])
        changed = json_bytes(altered_json(own, rng), rng).decode(errors="replace")
        return {**header, "__metadata__": {**header["__metadata__"], "header": changed}}

    def number(header: Any) -> Any:
        own = json.loads(header["__metadata__"]["header"])
        if not own["numbers"]:
            return inside(header)
        own["numbers"][rng.choice(list(own["numbers"]))] = rng.choice(NUMBERS)
        metadata = {**header["__metadata__"], "header": json.dumps(own)}
        return {**header, "__metadata__": metadata}

    match rng.randrange(5):
        case 0:
            return altered(sent, rng)
        case 1:
            return with_header(sent, lambda header: json_bytes(altered_json(header, rng), rng))
        case 2:
            return with_header(sent, number)
        case _:
            return with_header(sent, inside)


def wrong(made: Packed, sent: bytes) -> str:
    """In what a decoded message is not what its bytes declare; empty: in nothing."""
    header = json.loads(sent[8 : 8 + int.from_bytes(sent[:8], "little")])
    hints = get_type_hints(type(made))
    declared = {name: one for name, one in header.items() if name != "__metadata__"}
    for f in fields(made):
        value = getattr(made, f.name)
        choices = parts(hints[f.name])
        if isinstance(value, bool) or (type(value) is float and float not in choices):
            return f"{f.name} is {value!r}"
        if isinstance(value, int | float) and not math.isfinite(value):
            return f"{f.name} is {value!r}"
        if isinstance(value, Mapping) and not any(get_origin(c) for c in choices):
            return f"{f.name} is a mapping"
        if isinstance(value, Tensor) and Tensor not in choices:
            return f"{f.name} is a tensor"
        if value is None and NoneType not in choices:
            return f"{f.name} is missing"
    for name, tensor in made.arrays():
        one = declared.pop(name)
        if list(tensor.shape) != one["shape"] or DTYPES.get(tensor.dtype) != one["dtype"]:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, declared {one}"
    return f"{sorted(declared)} were left out" if declared else ""


@fuzzed(CASES)
def test_damaged_messages(cases: range) -> None:
    for name in METHODS:
        method_class(name)
    all_kinds = sorted({*kinds(), Models}, key=lambda kind: kind.__qualname__)
    assert len(all_kinds) > 25
    faults = Faults()
    for number in cases:
        rng = generator(number)
        kind = all_kinds[number % len(all_kinds)]
        sent = damaged(example(kind, rng).to_bytes(), rng)
        made = faults.of(f"{number} {kind.__name__}", lambda k=kind, s=sent: k.from_bytes(s))
        if made is not None:
            said = wrong(made, sent)
            faults.unless(not said, f"{number} {kind.__name__}", said)
    faults.check(cases, refused=0.33, accepted=0.02)
