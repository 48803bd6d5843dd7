"""Every message of every method goes to bytes and back, and bytes that are none are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.errors import MessageError
from fedsynth.methods import METHODS, method_class

for _name in METHODS:
    method_class(_name)


def kinds(of: type[Message] = Message) -> Iterator[type[Message]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("fedsynth"):
            yield kind
            yield from kinds(kind)


DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    made = torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))
    )
    made = (made * draw(st.integers(1, 9))).to(draw(st.sampled_from(DTYPES)))
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


NUMBERS = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
MAPPINGS = st.dictionaries(st.text(max_size=6), tensors(), max_size=3)


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for f in fields(kind):
        hint = hints[f.name]
        if hint is Tensor:
            values[f.name] = draw(tensors())
        elif get_origin(hint) is Mapping:
            values[f.name] = draw(MAPPINGS)
        else:
            assert hint in (int, float), f"{kind.__name__}.{f.name} has no way over a wire"
            values[f.name] = draw(NUMBERS)
    return kind(**values)


def assert_same(a: Message, b: Message) -> None:
    assert type(a) is type(b)
    for (name, x), (other, y) in zip(a.arrays(), b.arrays(), strict=True):
        assert name == other
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    for f in fields(a):
        if isinstance(getattr(a, f.name), int | float):
            assert getattr(a, f.name) == getattr(b, f.name)
    assert a.nbytes == b.nbytes


def test_all_methods_messages_are_known() -> None:
    assert len(set(kinds())) >= 17
    declared = {method_class(name).upload for name in METHODS}
    assert declared <= set(kinds())


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=lambda k: k.__name__))
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_is_sent_arrives(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert_same(message, kind.from_bytes(message.to_bytes()))


def test_one_tensor_under_two_names_arrives_twice() -> None:
    shared = torch.arange(6.0).view(2, 3)
    sent = ModelParameters({"a": shared, "a.b": shared.T, "": shared[0]}, 1.0)
    got = ModelParameters.from_bytes(sent.to_bytes())
    assert list(got.parameters) == ["a", "a.b", ""]
    got.parameters["a"].zero_()
    assert torch.equal(got.parameters["a.b"], shared.T)


@dataclass(frozen=True)
class Words(Message):
    text: Any = public("a test's")


@dataclass(frozen=True)
class One(Message):
    images: Tensor = released()


def test_what_cannot_be_sent() -> None:
    for value in ("words", None, float("nan"), float("inf"), [torch.ones(1)]):
        with pytest.raises(MessageError, match=r"Words\.text cannot be sent"):
            Words(value).to_bytes()


GOOD = ModelParameters({"w": torch.ones(2)}, 3.0).to_bytes()


def changed(**header: Any) -> bytes:
    """GOOD with its JSON header changed."""
    length = struct.unpack("<Q", GOOD[:8])[0]
    outer = json.loads(GOOD[8 : 8 + length])
    inner = {**json.loads(outer["__metadata__"]["header"]), **header}
    outer["__metadata__"]["header"] = json.dumps(inner)
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + GOOD[8 + length :]


@pytest.mark.parametrize(("sent", "match"), [
    (b"", "no message of fedsynth"),
    (GOOD[:20], "no message of fedsynth"),
    (b"\xff" * 64, "no message of fedsynth"),
    (struct.pack("<Q", 2**63) + b"{}", "no message of fedsynth"),
    (struct.pack("<Q", 20_000) + b"[" * 20_000, "no message of fedsynth"),
    (GOOD[:-1], "damaged message"),
    (changed(type="One"), "expected a message ModelParameters, got 'One'"),
    (changed(numbers={}), r"ModelParameters\.weight is missing"),
    (changed(numbers={"weight": "3"}), "finite number"),
    (changed(numbers={"weight": True}), "finite number"),
    (changed(numbers={"weight": float("nan")}), "finite number"),
    (changed(numbers={"weight": 3, "more": 1}), "no field 'more'"),
    (changed(numbers=[3]), "without its numbers"),
    (changed(keys={"parameters": []}), r"no field 'parameters\.w'"),
    (changed(keys={"parameters": ["w", "v"]}), "lacks 'v'"),
    (changed(keys={"parameters": ["w", "w"]}), "once each"),
    (changed(keys={"parameters": "w"}), "once each"),
    (changed(keys={}), r"ModelParameters\.parameters is missing"),
])  # fmt: skip
def test_bytes_that_are_no_such_message(sent: bytes, match: str) -> None:
    with pytest.raises(MessageError, match=match):
        ModelParameters.from_bytes(sent)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_is_another_message(place: int, value: int) -> None:
    """Never anything but MessageError; never more than was there."""
    sent = bytearray(GOOD)
    sent[place] = value
    try:
        got = ModelParameters.from_bytes(bytes(sent))
    except MessageError:
        return
    assert sum(t.numel() for _, t in got.arrays()) <= len(GOOD)
