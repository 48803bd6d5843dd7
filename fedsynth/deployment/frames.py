"""Frames: the wire format between a server and a data owner's node, and the facts in them.

A frame is a JSON header (its length first, 8 bytes little-endian) and, for requests and
replies, one packed message (`fedsynth.core.messages`). Received frames are untrusted: nothing in
them is executed. A server asks, and a node answers each frame with one:

    join      {proposal, last_round}      answer {size, history}, or refusal {reason, kind}
    refused   {reason}                  answer {}
    keys, shares, step, unmask          answer, or refusal; a step's comes with {history}
              {round, participants, phase, sizes, noise_multiplier}; of a sum {sum}, too
    end       {rounds, sizes, noise_multiplier}     answer {history}

Every question has a {number}, and every answer this number and its {client}. An "error" has a
{text}. Each message to a node takes seconds, regardless of its size: so a question of a round
brings the run's terms, and the answer to a step the ledger that the report needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.errors import MessageError
from fedsynth.federation.protocol import RunTerms
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger.ledger import History

LONGEST_HEADER = 64 * 2**20
"""Largest header in bytes; a header may hold a ledger's history."""
ANSWER, REFUSAL, ERROR = "answer", "refusal", "error"
JOIN, REFUSED, END = "join", "refused", "end"
KEYS, SHARES, STEP, UNMASK = "keys", "shares", "step", "unmask"
EXCHANGE = (KEYS, SHARES, STEP, UNMASK)
"""The questions of an exchange; without a secure sum only the step."""


@dataclass(frozen=True)
class Frame:
    """One question or answer.

    Args:
        kind: the kind of question, or "answer", "refusal" or "error".
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
            raise MessageError("not a valid fedsynth frame: its header is truncated")
        end = LENGTH_BYTES + length
        try:
            header = json.loads(sent[LENGTH_BYTES:end])
            kind = header["kind"]
            facts = header["facts"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MessageError(f"not a valid fedsynth frame: {error!r:.80}") from None
        if not (isinstance(kind, str) and isinstance(facts, dict)):
            raise MessageError("not a valid fedsynth frame: its header has other types")
        return cls(kind, facts, sent[end:])


Count = Annotated[int, Field(ge=0)]


class Facts(BaseModel):
    """The facts of a frame that its receiver uses; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Returns a received frame's facts.

        Raises:
            MessageError: one is missing, or of another type.
        """
        try:
            return cls.model_validate(frame.facts)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise MessageError(f"{name:.80} of {frame.kind!r:.40}: {first['msg']:.200}") from None


class JoinFacts(Facts):
    """A server's proposal, and the last completed round of a run that is resumed."""

    proposal: Any = None
    last_round: Count = 0


class TermsFacts(Facts):
    """The run's terms; `ClientRuntime.start` checks σ."""

    sizes: list[Count] | None = None
    noise_multiplier: Any = None

    @property
    def terms(self) -> RunTerms:
        """The run's terms."""
        return RunTerms(None if self.sizes is None else tuple(self.sizes), self.noise_multiplier)


class EndFacts(TermsFacts):
    """The number of completed rounds."""

    rounds: Count


class RoundFacts(TermsFacts):
    """The facts of a question in an exchange of a round.

    Args:
        round: its number.
        participants: the clients that take part.
        phase: the exchange.
        sum: the server's name of a secure sum; None: there is none.
        sealed: of a step in a sum, the other clients' shares.
    """

    round: Count
    participants: Annotated[list[Count], Field(min_length=1)]
    phase: Literal["first", "main"]
    sum: str | None = None
    sealed: str = ""


class JoinAnswer(Facts):
    """A client's answer to the request to join."""

    client: Count
    size: Count | None = None
    history: Any = None


def history_to_json(history: History | None) -> dict[str, Any] | None:
    """Returns the statement of a client's ledger; None: it has none."""
    return None if history is None else history.to_json()


def parse_history(stated: Any) -> History | None:
    """Returns a client's statement of its ledger; None: it has none.

    Raises:
        MessageError: it is damaged.
    """
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError, AttributeError, PrivacyError) as error:
        raise MessageError(f"the history of a client is damaged: {error!r:.80}") from None
