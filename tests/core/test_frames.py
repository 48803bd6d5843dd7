"""Frames: what is sent comes back, and whatever else comes is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.deployment.frames import LONGEST_HEADER, EndFacts, Frame, RoundFacts
from fedsynth.errors import MessageError

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
    with pytest.raises(MessageError, match="not a valid fedsynth frame"):
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
