"""What a server and its clients share where frames pass between them (`fedsynth.core.frames`).

Both sides have the run's settings before: a client takes part by its own copy, caps included, and
refuses a server that has others (`agreement`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedsynth.core.messages import Message, Packed
from fedsynth.core.method import Method
from fedsynth.errors import MessageError
from fedsynth.federation.terms.settings import RunSettings

Side = Literal["downlink", "upload"]
MAX_FACTS_BYTES = 2**20
"""Size limit of the header of an answer to a step, whose values are few and small."""


@dataclass(frozen=True)
class Models(Packed):
    """One model to be tested: its parameters and buffers by name."""

    parameters: Mapping[str, Tensor]


def agreement(settings: RunSettings) -> str:
    """Returns a hash of all settings that both sides share.

    Where a party computes, and where a client keeps its ledgers, is its own.
    """
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
    """Returns the type of the messages of one exchange of a round.

    Raises:
        MessageError: the method has no such exchange.
    """
    types = method.exchange_types(phase)
    expected = types.downlink if side == "downlink" else types.upload
    if expected is None:
        raise MessageError(f"{method.name} has no {phase} exchange")
    return expected
