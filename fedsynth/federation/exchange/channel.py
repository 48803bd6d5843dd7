"""What carries frames between a server and its clients, and what both sides have agreed on.

`RemoteClient` answers frames where the client's data are, `OverWire` is the server's exchange, and
whatever carries them between the two (pipes, HTTP, Flower) is a `Channel`.

Both sides have the run's settings before: a client takes part by its own copy, caps included, and
refuses a server that has others (`agreement`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from fedsynth.core.messages import Message, Packed
from fedsynth.core.method import Method
from fedsynth.errors import MessageError
from fedsynth.federation.terms.settings import RunSettings

Side = Literal["downlink", "upload"]
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


def agreement(settings: RunSettings) -> str:
    """A hash of all settings that both sides must share: all but where they compute, and where a
    client keeps its ledgers."""
    shared = settings.to_mapping()
    for own in ("device", "memory_gb", "threads", "compile"):
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
