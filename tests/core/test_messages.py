"""Every message and state of every method goes to bytes and back, and frames do; bytes that are none
are refused by name."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.core.context import ServerState
from fedsynth.core.messages import LENGTH_BYTES, Message, ModelParameters, Packed, public, released
from fedsynth.deployment.frames import LONGEST_HEADER, EndFacts, Frame, RoundFacts
from fedsynth.errors import MessageError
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedfm import AnchorState
from fedsynth.models.registry import ModelSettings, build_model
from tests.message_examples import message_types, random_message


def assert_same(a: Packed, b: Packed) -> None:
    assert type(a) is type(b)
    for (name, x), (other, y) in zip(a.arrays(), b.arrays(), strict=True):
        assert (name, x.dtype) == (other, y.dtype)
        assert torch.equal(x, y)
    for f in fields(a):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if isinstance(one, Mapping):
            assert list(one) == list(other)
        elif not isinstance(one, Tensor):
            assert one == other
    assert a.nbytes == b.nbytes


def declared(name: str) -> set[type[Packed]]:
    """What a method declares to be sent and kept."""
    cls = method_class(name)
    some = {cls.downlink, cls.upload, cls.first_downlink, cls.first_upload, cls.state}
    return {kind for kind in some if kind is not None}


def test_declared_metrics_are_known_and_have_unique_names() -> None:
    """A type is told by its name: two with one name could be taken for each other."""
    known = set(message_types())
    assert set().union(*(declared(name) for name in METHODS)) <= known
    assert len({kind.__name__ for kind in known}) == len(known)
    assert sum(issubclass(kind, ServerState) for kind in known) >= 10
    assert sum(issubclass(kind, Message) for kind in known) >= 17


@pytest.mark.parametrize("name", METHODS)
def test_a_first_state_comes_back(name: str) -> None:
    """Every field but the model has a value before the first round; it is of the declared type."""
    model = build_model(ModelSettings(width=4, depth=1, norm="batch"), (1, 8, 8), 10, 0)
    cls = method_class(name)
    state = cls().initial_state(model.state_dict())
    assert type(state) is cls.state
    assert_same(state, cls.state.from_bytes(state.to_bytes()))


def test_what_is_moved_is_the_same_elsewhere() -> None:
    state = AnchorState({"w": torch.ones(2)}, anchors=torch.eye(3))
    moved = state.to("meta")
    assert moved.has_anchor is None
    assert {t.device.type for _, t in moved.arrays()} == {"meta"}
    assert_same(state.to("cpu"), state)
    assert Scored({}, score=0.5).to("meta").score == 0.5


@pytest.mark.parametrize("kind", message_types())
def test_a_received_message_equals_the_sent_one(kind: type[Packed]) -> None:
    for seed in range(8):
        message = random_message(kind, random.Random(seed))
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


def test_what_cannot_be_sent() -> None:
    for value in ("words", float("nan"), float("inf"), [torch.ones(1)]):
        with pytest.raises(MessageError, match=r"Words\.text must be"):
            Words(value).to_bytes()
    with pytest.raises(MessageError, match=r"Words\.text is missing"):
        Words.from_bytes(Words(None).to_bytes())  # only a field whose default is None may be None


@dataclass(frozen=True)
class Scored(ServerState):
    """A state with a number that may be None, and one that may not."""

    score: float | None = None
    count: int = 0


GOOD = ModelParameters({"w": torch.ones(2)}, 3.0).to_bytes()
STATE = AnchorState({"w": torch.ones(2)}, anchors=torch.eye(2)).to_bytes()
SCORED = Scored({"w": torch.ones(2)}, score=0.5).to_bytes()


def changed(good: bytes = GOOD, version: str = "", **header: Any) -> bytes:
    """`good` with its JSON header changed, and its version, if one is given."""
    length = struct.unpack("<Q", good[:8])[0]
    outer = json.loads(good[8 : 8 + length])
    inner = {**json.loads(outer["__metadata__"]["header"]), **header}
    outer["__metadata__"]["header"] = json.dumps(inner)
    outer["__metadata__"]["fedsynth_message"] = version or outer["__metadata__"]["fedsynth_message"]
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


def resized(shape: list[int]) -> bytes:
    """`GOOD` without its numbers, and with another shape of them."""
    length = struct.unpack("<Q", GOOD[:8])[0]
    outer = json.loads(GOOD[8 : 8 + length])
    outer["parameters.w"].update(shape=shape, data_offsets=[0, 0])
    text = json.dumps(outer).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (resized([0, 2**63]), "message is damaged"),
        (resized([0, 2**64 - 1]), "message is damaged"),
        (b"", "not a valid fedsynth message"),
        (GOOD[:20], "not a valid fedsynth message"),
        (b"\xff" * 64, "not a valid fedsynth message"),
        (struct.pack("<Q", 2**63) + b"{}", "not a valid fedsynth message"),
        (struct.pack("<Q", 20_000) + b"[" * 20_000, "not a valid fedsynth message"),
        (GOOD[:-1], "message is damaged"),
        (changed(type="Words"), "expected a message of type ModelParameters, got 'Words'"),
        (changed(numbers={}), r"ModelParameters\.weight is missing"),
        (changed(numbers={"weight": "3"}), "finite number"),
        (changed(numbers={"weight": True}), "finite number"),
        (changed(numbers={"weight": float("nan")}), "finite number"),
        (changed(numbers={"weight": 2**64}), "finite number"),
        (changed(numbers={"weight": 10**400}), "finite number"),
        (changed(parts=" " * 2**23), "the header has 8"),
        (changed(numbers={"weight": 3, "more": 1}), "unexpected entry 'more'"),
        (changed(numbers=[3]), "mappings `numbers`"),
        (changed(keys={"parameters": []}), r"unexpected entry 'parameters\.w'"),
        (changed(keys={"parameters": ["w", "v"]}), "a tensor for the key 'v'"),
        (changed(keys={"parameters": ["w", "w"]}), "exactly once"),
        (changed(keys={"parameters": "w"}), "exactly once"),
        (changed(keys={}), r"ModelParameters\.parameters is missing"),
        (changed(version="1"), "not a valid fedsynth message"),
        (changed(none=None), "mappings `numbers`"),
        (changed(none={"weight": 1}), "mappings `numbers`"),
        (changed(none=["weight"]), "unexpected entry 'weight'"),
        (changed(none=["weight"], numbers={}), r"ModelParameters\.weight is missing"),
        (changed(none=[["weight"]]), "unexpected entry"),
        (changed(numbers={"weight": 3, "parameters": 1}), r"parameters has the wrong type int"),
        (
            changed(numbers={}, keys={"parameters": ["w"], "weight": []}),
            "weight has the wrong type",
        ),
    ],
)
def test_bytes_that_are_no_such_message(sent: bytes, match: str) -> None:
    with pytest.raises(MessageError, match=match):
        ModelParameters.from_bytes(sent)


@pytest.mark.parametrize(
    ("kind", "sent", "match"),
    [
        (AnchorState, changed(STATE, none=[]), r"AnchorState\.seen is missing"),
        *(
            (AnchorState, changed(STATE, none=["seen", "has_anchor", name]), "unexpected entry")
            for name in ("has_anchor", "anchors", "cache")
        ),
        (AnchorState, changed(STATE, none=["seen"], numbers={"has_anchor": 1}), "wrong type int"),
        (Scored, changed(SCORED, numbers={"score": "1", "count": 0}), "finite number"),
        (Scored, changed(SCORED, none=["count"]), "unexpected entry 'count'"),
        (ServerState, STATE, "expected a message of type ServerState, got 'AnchorState'"),
    ],
)
def test_bytes_that_are_no_such_state(kind: type[Packed], sent: bytes, match: str) -> None:
    """None is for fields that may be None, once each, and in place of a value."""
    with pytest.raises(MessageError, match=match):
        kind.from_bytes(sent)


def test_a_tensor_in_a_numbers_place_is_refused() -> None:
    """A step reckons with what its message declares: a weight is no tensor."""

    @dataclass(frozen=True)
    class Forged(Message):
        parameters: Mapping[str, Tensor] = released()
        weight: Tensor = released()

    forged = changed(Forged({}, torch.ones(1)).to_bytes(), type="ModelParameters")
    with pytest.raises(MessageError, match=r"ModelParameters\.weight has the wrong type Tensor"):
        ModelParameters.from_bytes(forged)


def test_equal_messages_are_equal_bytes() -> None:
    """In any order of safetensors' header: a node recognises a repeated request by its bytes."""
    message = ModelParameters({f"layer{k}": torch.ones(k + 1) for k in range(5)}, weight=2.0)
    (packed,) = {message.to_bytes() for _ in range(40)}
    assert (8 + int.from_bytes(packed[:8], "little")) % 8 == 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def by_hand(header: bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    """A frame's bytes, as the format has them."""
    size = len(header) if length is None else length
    return size.to_bytes(LENGTH_BYTES, "little") + header + payload


@settings(max_examples=10)
@given(st.text(), st.dictionaries(st.text(), VALUES), st.binary())
def test_what_is_sent_comes_back(kind: str, facts: dict[str, Any], payload: bytes) -> None:
    """Catches: a payload that is cut, or taken for a part of the header."""
    sent = Frame(kind, facts, payload).to_bytes()
    assert sent == by_hand(json.dumps({"kind": kind, "facts": facts}).encode(), payload)
    assert Frame.from_bytes(sent) == Frame(kind, facts, payload)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01",
        by_hand(b"{}", length=3),
        by_hand(b"{}", length=2**63),
        by_hand(b"\xff"),
        by_hand(b"{}"),
        by_hand(b"[]"),
        by_hand(b'{"kind": 1, "facts": {}}'),
        by_hand(b'{"kind": "step", "facts": []}'),
        by_hand(b"[" * 100_000),
    ],
)
def test_other_bytes_are_no_frame(sent: bytes) -> None:
    """Catches: any other error than the one that both sides expect."""
    with pytest.raises(MessageError, match=r"header of the frame|kind and facts"):
        Frame.from_bytes(sent)


def test_a_header_has_a_bound() -> None:
    """Catches: reading a header of any size, as JSON takes many times its length."""
    frame = json.dumps({"kind": "x" * LONGEST_HEADER, "facts": {}}).encode()
    with pytest.raises(MessageError, match="truncated"):
        Frame.from_bytes(by_hand(frame))


def test_what_is_no_number_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Frame("answer", {"accuracy": float("nan")}).to_bytes()


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, [1]])
def test_a_whole_number_is_one(value: Any) -> None:
    """Catches: True as 1, and 1.0 as 1."""
    with pytest.raises(MessageError, match=r"rounds of .*'end' is not valid: Input should be"):
        EndFacts.of(Frame("end", {"rounds": value}))
    with pytest.raises(
        MessageError, match=r"participants\.1 of .*'step' is not valid: Input should be"
    ):
        RoundFacts.of(Frame("step", {"round": 1, "participants": [0, value]}))
    assert EndFacts.of(Frame("end", {"rounds": 3, "other": value})).rounds == 3
