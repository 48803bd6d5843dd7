"""Frames: the wire format between a server and a remote client.

A frame is a JSON header (its length first, 8 bytes little-endian) and, for requests, replies and
models, one packed message (`fedsynth.core.messages`). Received frames are untrusted: nothing in
them is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.errors import MessageError

LONGEST_HEADER = 64 * 2**20
"""Largest header in bytes; a header may hold a ledger's history."""


@dataclass(frozen=True)
class Frame:
    """One request or reply.

    Args:
        kind: the kind of request, or "answer", "refusal" or "error".
        facts: JSON values.
        payload: a packed message, or none.
    """

    kind: str
    facts: Mapping[str, Any]
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        header = json.dumps({"kind": self.kind, "facts": self.facts}, allow_nan=False).encode()
        return len(header).to_bytes(LENGTH_BYTES, "little") + header + self.payload

    @classmethod
    def from_bytes(cls, sent: bytes) -> Frame:
        """Returns the frame that was sent.

        Raises:
            MessageError: the bytes are not a frame.
        """
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if len(sent) < LENGTH_BYTES or length > min(LONGEST_HEADER, len(sent) - LENGTH_BYTES):
            raise MessageError("these bytes are no frame of fedsynth: its header is cut off")
        end = LENGTH_BYTES + length
        try:
            header = json.loads(sent[LENGTH_BYTES:end])
            kind = header["kind"]
            facts = header["facts"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MessageError(f"these bytes are no frame of fedsynth: {error!r:.80}") from None
        if not (isinstance(kind, str) and isinstance(facts, dict)):
            raise MessageError("these bytes are no frame of fedsynth: its header has other types")
        return cls(kind, facts, sent[end:])


def parse_nonnegative_int(value: Any, what: str) -> int:
    """Returns a value of a frame's facts that must be an integer of at least 0.

    Raises:
        MessageError: it is not.
    """
    if type(value) is not int or value < 0:
        raise MessageError(f"a {what} must be a whole number of at least 0, got {value!r:.80}")
    return value
