"""The frames that a server and a data owner's node exchange, and the fields of each frame.

A frame is a JSON header, preceded by its length (8 bytes, little-endian). In requests and replies,
one packed message (`fedsynth.core.messages`) follows the header. Received frames are untrusted, and
nothing in them is executed. The server asks, and the node answers each frame with one frame:

    question  fields of the question          fields of the answer
    join      {proposal, last_round}          answer {size, history}, or refusal {reason, kind}
    refused   {reason}                        answer {}
    keys, shares, step, unmask                answer, or refusal; for a step also {history}
              {round, participants, phase, sizes, noise_multiplier}; for a secure sum also {sum}
    end       {rounds, sizes, noise_multiplier}     answer {history}

Every question has a {number}. Every answer repeats this number and states its {client}. A frame of
kind "error" has a {text}. Each message to a node takes seconds, whatever its size. Therefore each
question of a round also carries the settings agreed for the run, and the answer to a step also
carries the ledger that the server's report needs.
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
"""The maximum size of a header in bytes. It is large because a header may contain a ledger's
history.
"""
ANSWER, REFUSAL, ERROR = "answer", "refusal", "error"
JOIN, REFUSED, END = "join", "refused", "end"
KEYS, SHARES, STEP, UNMASK = "keys", "shares", "step", "unmask"
EXCHANGE = (KEYS, SHARES, STEP, UNMASK)
"""The questions of one exchange, in order. Without a secure sum, only `STEP` is asked."""


@dataclass(frozen=True)
class Frame:
    """One question or answer.

    Args:
        kind: the kind of question, or "answer", "refusal" or "error".
        facts: the fields of the header, as JSON values.
        payload: a packed message. It is empty if the frame carries no message.
    """

    kind: str
    facts: Mapping[str, Any]
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        header = json.dumps({"kind": self.kind, "facts": self.facts}, allow_nan=False).encode()
        return len(header).to_bytes(LENGTH_BYTES, "little") + header + self.payload

    @classmethod
    def from_bytes(cls, sent: bytes) -> Frame:
        """Decodes a frame from received bytes.

        Raises:
            MessageError: if the bytes are not a frame.
        """
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if len(sent) < LENGTH_BYTES or length > min(LONGEST_HEADER, len(sent) - LENGTH_BYTES):
            raise MessageError("not a valid fedsynth frame: the header is truncated")
        end = LENGTH_BYTES + length
        try:
            header = json.loads(sent[LENGTH_BYTES:end])
            kind = header["kind"]
            facts = header["facts"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MessageError(f"not a valid fedsynth frame: {error!r:.80}") from None
        if not (isinstance(kind, str) and isinstance(facts, dict)):
            raise MessageError(
                "not a valid fedsynth frame: the field kind or facts has the wrong type"
            )
        return cls(kind, facts, sent[end:])


Count = Annotated[int, Field(ge=0)]


class Facts(BaseModel):
    """The fields of a received frame that the receiver uses. Other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Reads and checks the fields of a received frame.

        Raises:
            MessageError: if a field is missing or has the wrong type.
        """
        try:
            return cls.model_validate(frame.facts)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise MessageError(
                f"the field {name:.80} of a frame of kind {frame.kind!r:.40} is not valid: "
                f"{first['msg']:.200}"
            ) from None


class JoinFacts(Facts):
    """The fields of a request to join: the server's proposal, and the last completed round if the
    run is resumed.
    """

    proposal: Any = None
    last_round: Count = 0


class TermsFacts(Facts):
    """The settings that the server fixes once all clients have joined: the clients' sizes and σ.

    σ is checked later, by `ClientRuntime.start`.
    """

    sizes: list[Count] | None = None
    noise_multiplier: Any = None

    @property
    def terms(self) -> RunTerms:
        """The settings as a `RunTerms` object."""
        return RunTerms(None if self.sizes is None else tuple(self.sizes), self.noise_multiplier)


class EndFacts(TermsFacts):
    """The fields of the message that ends a run, including the number of completed rounds."""

    rounds: Count


class RoundFacts(TermsFacts):
    """The fields of a question that belongs to a round.

    Args:
        round: the number of the round.
        participants: the clients that take part in the round.
        phase: the exchange of the round, "first" or "main".
        sum: the server's name for a secure sum. None: the exchange uses no secure sum.
        sealed: the other clients' encrypted shares. They are sent only with a step in a secure sum.
    """

    round: Count
    participants: Annotated[list[Count], Field(min_length=1)]
    phase: Literal["first", "main"]
    sum: str | None = None
    sealed: str = ""


class JoinAnswer(Facts):
    """The fields of a client's answer to the request to join."""

    client: Count
    size: Count | None = None
    history: Any = None


def history_to_json(history: History | None) -> dict[str, Any] | None:
    """Converts a client's ledger history to JSON. Returns None if the client has no ledger."""
    return None if history is None else history.to_json()


def parse_history(stated: Any) -> History | None:
    """Reads the ledger history that a client has stated. Returns None if the client stated none.

    Raises:
        MessageError: if the statement is damaged.
    """
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError, AttributeError, PrivacyError) as error:
        raise MessageError(f"the client's ledger history is damaged: {error!r:.80}") from None
