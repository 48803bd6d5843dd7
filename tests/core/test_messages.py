"""Serialisation of messages, states and frames, and refusals of malformed bytes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
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
    for (name, x), (other_value, y) in zip(a.arrays(), b.arrays(), strict=True):
        assert (name, x.dtype) == (other_value, y.dtype)
        assert torch.equal(x, y)
    for field in fields(a):
        value, other_value = getattr(a, field.name), getattr(b, field.name)
        if isinstance(value, Mapping):
            assert list(value) == list(other_value)
        elif not isinstance(value, Tensor):
            assert value == other_value
    assert a.nbytes == b.nbytes


def test_declared_types_have_unique_names() -> None:
    """A type is identified by its name in the bytes. Initial states have the declared type."""
    types = message_types()
    assert len({kind.__name__ for kind in types}) == len(types)
    assert sum(issubclass(kind, ServerState) for kind in types) >= 10
    assert sum(issubclass(kind, Message) for kind in types) >= 17
    model = build_model(ModelSettings(width=4, depth=1, norm="batch"), (1, 8, 8), 10, 0)
    for cls in map(method_class, METHODS):
        declared = {cls.downlink, cls.upload, cls.first_downlink, cls.first_upload, cls.state}
        assert declared <= {*types, None}
        state = cls().initial_state(model.state_dict())
        assert type(state) is cls.state
        assert_same(state, cls.state.from_bytes(state.to_bytes()))


def test_states_move_between_devices() -> None:
    state = AnchorState({"w": torch.ones(2)}, anchors=torch.eye(3))
    moved = state.to("meta")
    assert moved.has_anchor is None
    assert {t.device.type for _, t in moved.arrays()} == {"meta"}
    assert_same(state.to("cpu"), state)
    assert Scored({}, score=0.5).to("meta").score == 0.5


@pytest.mark.parametrize("kind", message_types())
def test_messages_survive_serialisation(kind: type[Packed]) -> None:
    for seed in range(8):
        message = random_message(kind, random.Random(seed))
        assert_same(message, kind.from_bytes(message.to_bytes()))


def test_shared_tensors_are_serialised_separately() -> None:
    shared = torch.arange(6.0).view(2, 3)
    message = ModelParameters({"a": shared, "a.b": shared.T, "": shared[0]}, 1.0)
    received = ModelParameters.from_bytes(message.to_bytes())
    assert list(received.parameters) == ["a", "a.b", ""]
    received.parameters["a"].zero_()
    assert torch.equal(received.parameters["a.b"], shared.T)


@dataclass(frozen=True)
class Text(Message):
    text: Any = public("a test's")


def test_unsupported_field_values_are_rejected() -> None:
    for value in ("words", float("nan"), float("inf"), [torch.ones(1)]):
        with pytest.raises(MessageError, match=r"Text\.text must be"):
            Text(value).to_bytes()
    with pytest.raises(MessageError, match=r"Text\.text is missing"):
        Text.from_bytes(Text(None).to_bytes())  # only a field whose default is None may be None


@dataclass(frozen=True)
class Scored(ServerState):
    """A state with a number that may be None, and one that may not."""

    score: float | None = None
    count: int = 0


GOOD = ModelParameters({"w": torch.ones(2)}, 3.0).to_bytes()
STATE = AnchorState({"w": torch.ones(2)}, anchors=torch.eye(2)).to_bytes()
SCORED = Scored({"w": torch.ones(2)}, score=0.5).to_bytes()


@dataclass(frozen=True)
class Forged(Message):
    """`ModelParameters` with a tensor as weight: steps rely on the declared types."""

    parameters: Mapping[str, Tensor] = released()
    weight: Tensor = released()


def edited(
    good: bytes = GOOD, version: str = "", shape: list[int] | None = None, **header: Any
) -> bytes:
    """Returns `good` with a changed JSON header, and optionally another version, or another shape
    of `parameters.w` without its numbers."""
    length = struct.unpack("<Q", good[:8])[0]
    outer = json.loads(good[8 : 8 + length])
    inner = {**json.loads(outer["__metadata__"]["header"]), **header}
    outer["__metadata__"]["header"] = json.dumps(inner)
    outer["__metadata__"]["fedsynth_message"] = version or outer["__metadata__"]["fedsynth_message"]
    tensors = good[8 + length :]
    if shape is not None:
        outer["parameters.w"].update(shape=shape, data_offsets=[0, 0])
        tensors = b""
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors


FORGED = edited(Forged({}, torch.ones(1)).to_bytes(), type="ModelParameters")
NO_SEEN, FIELDS = ["seen", "has_anchor"], ("has_anchor", "anchors", "cache")
INVALID, ENTRY = "not a valid fedsynth message", "must not have the entry"
FINITE = ({"weight": value} for value in ("3", True, float("nan"), 2**64, 10**400))
MALFORMED = (
    (edited(shape=[0, 2**63]), "message is damaged"),
    (edited(shape=[0, 2**64 - 1]), "message is damaged"),
    (b"", INVALID),
    (GOOD[:20], INVALID),
    (b"\xff" * 64, INVALID),
    (struct.pack("<Q", 2**63) + b"{}", INVALID),
    (struct.pack("<Q", 20_000) + b"[" * 20_000, INVALID),
    (GOOD[:-1], "message is damaged"),
    (edited(type="Words"), "expected a ModelParameters message, got 'Words'"),
    (edited(numbers={}), r"ModelParameters\.weight is missing"),
    *((edited(numbers=numbers), "finite number") for numbers in FINITE),
    (edited(parts=" " * 2**23), "the header has 8"),
    (edited(numbers={"weight": 3, "more": 1}), "must not have the entry 'more'"),
    (edited(numbers=[3]), "mappings `numbers`"),
    (edited(keys={"parameters": []}), r"must not have the entry 'parameters\.w'"),
    (edited(keys={"parameters": ["w", "v"]}), "a tensor for the key 'v'"),
    (edited(keys={"parameters": ["w", "w"]}), "exactly once"),
    (edited(keys={"parameters": "w"}), "exactly once"),
    (edited(keys={}), r"ModelParameters\.parameters is missing"),
    (edited(version="1"), INVALID),
    (edited(none=None), "mappings `numbers`"),
    (edited(none={"weight": 1}), "mappings `numbers`"),
    (edited(none=["weight"]), "must not have the entry 'weight'"),
    (edited(none=["weight"], numbers={}), r"ModelParameters\.weight is missing"),
    (edited(none=[["weight"]]), "must not have the entry"),
    (edited(numbers={"weight": 3, "parameters": 1}), r"parameters has the wrong type int"),
    (edited(numbers={}, keys={"parameters": ["w"], "weight": []}), "weight has the wrong type"),
    (FORGED, r"ModelParameters\.weight has the wrong type Tensor"),
)
MALFORMED_STATES = (
    (AnchorState, edited(STATE, none=[]), r"AnchorState\.seen is missing"),
    *((AnchorState, edited(STATE, none=[*NO_SEEN, name]), ENTRY) for name in FIELDS),
    (AnchorState, edited(STATE, none=["seen"], numbers={"has_anchor": 1}), "wrong type int"),
    (Scored, edited(SCORED, numbers={"score": "1", "count": 0}), "finite number"),
    (Scored, edited(SCORED, none=["count"]), "must not have the entry 'count'"),
    (ServerState, STATE, "expected a ServerState message, got 'AnchorState'"),
)


@pytest.mark.parametrize(
    ("kind", "sent", "match"),
    [*((ModelParameters, *case) for case in MALFORMED), *MALFORMED_STATES],
)
def test_malformed_messages_are_rejected(kind: type[Packed], sent: bytes, match: str) -> None:
    """Only optional fields may be None, once each, and instead of a value."""
    with pytest.raises(MessageError, match=match):
        kind.from_bytes(sent)


def test_equal_messages_have_equal_bytes() -> None:
    """A node recognises repeated requests by their bytes, also after reordering in safetensors."""
    message = ModelParameters({f"layer{k}": torch.ones(k + 1) for k in range(5)}, weight=2.0)
    (packed,) = {message.to_bytes() for _ in range(40)}
    assert (8 + int.from_bytes(packed[:8], "little")) % 8 == 0


def frame_bytes(header: bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(LENGTH_BYTES, "little") + header + payload


def test_frames_survive_serialisation() -> None:
    """A broken version would truncate the payload, or read it as part of the header."""
    facts = {"é\n": [1, None, True, {"": "κ"}], "a": {}}
    header = json.dumps({"kind": "\0κ", "facts": facts}).encode()
    for payload in (b"", b"{}", bytes(range(256))):
        data = Frame("\0κ", facts, payload).to_bytes()
        assert data == frame_bytes(header, payload)
        assert Frame.from_bytes(data) == Frame("\0κ", facts, payload)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01",
        frame_bytes(b"{}", length=3),
        frame_bytes(b"{}", length=2**63),
        *map(frame_bytes, (b"\xff", b"{}", b"[]", b'{"kind": 1, "facts": {}}')),
        *map(frame_bytes, (b'{"kind": "step", "facts": []}', b"[" * 100_000)),
    ],
)
def test_malformed_frames_are_rejected(sent: bytes) -> None:
    """Both sides expect a MessageError."""
    with pytest.raises(MessageError, match=r"header of the frame|text as kind"):
        Frame.from_bytes(sent)


def test_frames_are_short_and_finite() -> None:
    """Parsed JSON takes many times the memory of its text."""
    frame = json.dumps({"kind": "x" * LONGEST_HEADER, "facts": {}}).encode()
    with pytest.raises(MessageError, match="truncated"):
        Frame.from_bytes(frame_bytes(frame))
    with pytest.raises(ValueError, match="JSON"):
        Frame("answer", {"accuracy": float("nan")}).to_bytes()


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, [1]])
def test_integers_are_strict(value: Any) -> None:
    """True and 1.0 are not accepted as 1."""
    with pytest.raises(MessageError, match=r"'end' is not valid: rounds is wrong: Input"):
        EndFacts.of(Frame("end", {"rounds": value}))
    with pytest.raises(MessageError, match=r"'step' is not valid: participants\.1 is wrong: Input"):
        RoundFacts.of(Frame("step", {"round": 1, "participants": [0, value]}))
    assert EndFacts.of(Frame("end", {"rounds": 3, "other": value})).rounds == 3
