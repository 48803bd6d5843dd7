"""Frames: what a server and a client send each other where they are apart.

A frame is a JSON header (its length first, 8 bytes little-endian) and, for requests, replies and
models, one packed message (`fedsynth.core.messages`). Nothing in it is executed. `RemoteClient`
answers frames where the client's data are, `OverWire` is the server's exchange, and whatever
carries them between the two (pipes, HTTP, Flower) is a `Channel`.

Both sides have the run's settings before: a client takes part by its own copy, caps included, and
refuses a server that has others (`agreement`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from fedsynth.core.messages import LENGTH_BYTES, Message, Packed
from fedsynth.core.method import Method
from fedsynth.errors import MessageError
from fedsynth.federation.terms.settings import RunSettings

Side = Literal["downlink", "upload"]
LONGEST_HEADER = 64 * 2**20
"""Bytes; a ledger's history is in a header."""


LONGEST_FACTS = 2**20
"""Bytes of the header of an answer to a step, whose values are few and small."""
BROKEN_CHANNEL = (OSError, EOFError)
"""What a channel raises whose client is gone or does not answer in time (TimeoutError is an
OSError)."""


class Channel(Protocol):
    """Carries frames to one client and back, in order.

    Both raise OSError or EOFError where the client is gone, TimeoutError where it takes too long.
    """

    def send(self, frame: bytes) -> None: ...

    def receive(self, longest: int) -> bytes:
        """The next frame; OSError, before it is taken in, if it has more than `longest` bytes."""


@dataclass(frozen=True)
class Models(Packed):
    """One model to be tested: its parameters and buffers by name."""

    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Frame:
    """What is sent at once.

    Args:
        kind: what is asked, or "answer", "refusal" or "error".
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
        """The frame that was sent.

        Raises:
            MessageError: the bytes are none.
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


def agreement(settings: RunSettings) -> str:
    """A hash of all settings that both sides must share: all but where they compute, and where a
    client keeps its ledgers."""
    shared = settings.to_mapping()
    for own in ("device", "memory_gb", "compile"):
        shared["run"].pop(own, None)
    shared["data"].pop("data_root", None)
    shared.get("privacy", {}).pop("ledger", None)
    if not shared.get("privacy", True):  # an open run in which one side keeps a ledger
        del shared["privacy"]
    text = json.dumps(shared, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def declared(method: Method, phase: str, side: Side) -> type[Message]:
    """The type of what is sent, or of what comes back, in an exchange of a round.

    Raises:
        MessageError: the method has no such exchange.
    """
    types = method.exchange_types(phase)
    expected = types.downlink if side == "downlink" else types.upload
    if expected is None:
        raise MessageError(f"{method.name} has no {phase} exchange")
    return expected


def whole(value: Any, what: str) -> int:
    """A whole number of at least 0, of a frame's facts.

    Raises:
        MessageError: it is none.
    """
    if type(value) is not int or value < 0:
        raise MessageError(f"a {what} must be a whole number of at least 0, got {value!r:.80}")
    return value
