"""The message format between a server and data owners' nodes.

A frame is a JSON header, preceded by its length (8 bytes, little-endian). In requests and replies,
a packed message (`fedsynth.core.messages`) follows the header. Received frames are untrusted, and
nothing in them is executed. The server sends requests, and the node answers each frame with one
frame:

    request   request fields                  answer fields
    join      {proposal, last_round}          answer {size, history}, or refusal {reason, kind}
    refused   {reason}                        answer {}
    keys, shares, step, unmask                answer, or refusal; for a step also {history}
              {round, participants, exchange, sizes, noise_multiplier}; for a secure sum also {sum}
    end       {rounds, sizes, noise_multiplier}     answer {history}

Every request has a {number}. Every answer repeats this number and states its {client}. A frame of
kind "error" has a {text}. Each message to a node takes seconds, whatever its size. Therefore each
request in a round also carries the settings that the server fixed when all clients had joined. The
answer to a step also carries the ledger history that the server's report needs.

The server stores the clients that have joined in a file, which persists across restarts. A client
that stays away after a restart can no longer send its ledger history. Therefore, before the server
asks a client for a step, it writes the client's latest history and the request to this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.deployment.proposal import damage_is_named
from fedsynth.errors import MessageError, PrivacyError, faults_as
from fedsynth.federation.protocol import RunTerms
from fedsynth.files import read_regular, with_hash, without_hash, write_whole
from fedsynth.privacy.ledger.ledger import History
from fedsynth.validation import MAX_SECONDS, check_number

# The maximum size of a header in bytes. It is large because a header may contain a ledger's
# history.
LONGEST_HEADER = 64 * 2**20

ANSWER, REFUSAL, ERROR = "answer", "refusal", "error"
JOIN, REFUSED, END = "join", "refused", "end"
KEYS, SHARES, STEP, UNMASK = "keys", "shares", "step", "unmask"
# The requests of one exchange, in order. Without a secure sum, only `STEP` is sent.
EXCHANGE = (KEYS, SHARES, STEP, UNMASK)


# The remedy in messages about frames that no node or server of this version sends.
SAME_VERSION = "Use one version of fedsynth on all machines"

# The header of a frame: its kind and its fields.
_HEADER = TypeAdapter(tuple[str, dict[str, Any]], config=ConfigDict(strict=True))


@dataclass(frozen=True)
class Frame:
    """A server's request or a node's answer.

    Args:
        kind: the kind of request, such as "join" or "step". An answer has the kind "answer",
            "refusal" or "error".
        facts: the fields of the header, as JSON values.
        payload: a packed message. It is empty if the frame carries no message.
    """

    kind: str
    facts: Mapping[str, Any]
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        header = json.dumps([self.kind, self.facts], allow_nan=False).encode()
        return len(header).to_bytes(LENGTH_BYTES, "little") + header + self.payload

    @classmethod
    def from_bytes(cls, sent: bytes) -> Frame:
        """Decodes a frame from received bytes.

        Raises:
            MessageError: if the bytes are not a frame.
        """
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if len(sent) < LENGTH_BYTES or length > min(LONGEST_HEADER, len(sent) - LENGTH_BYTES):
            raise MessageError(
                f"a received frame of {len(sent)} bytes has an invalid header length. "
                f"{SAME_VERSION}"
            )
        end = LENGTH_BYTES + length
        with faults_as(MessageError, "the frame's header is not valid"):
            kind, facts = _HEADER.validate_json(sent[LENGTH_BYTES:end])
        return cls(kind, facts, sent[end:])


Count = Annotated[int, Field(ge=0)]


class Facts(BaseModel):
    """Base class for pydantic models that validate the fields of received frames.

    A model lists the fields that the receiver uses. All other fields are ignored.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Reads and checks the fields of a received frame.

        Raises:
            MessageError: if a field is missing or has the wrong type.
        """
        with faults_as(MessageError, f"the frame {frame.kind!r:.40} is not valid"):
            return cls.model_validate(frame.facts)


class JoinFacts(Facts):
    """The fields of the server's request to join a run.

    They are the proposal, and the last completed round if the run is resumed.
    """

    proposal: Any = None
    last_round: Count = 0


class TermsFacts(Facts):
    """The header fields that contain the run terms (`RunTerms`).

    The terms are the client sizes and the noise multiplier σ. The server fixes them after all
    clients have joined, and `ClientRuntime.start` checks them.
    """

    sizes: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    noise_multiplier: Any = None

    @property
    def terms(self) -> RunTerms:
        """The run terms in the fields."""
        return RunTerms(self.sizes, self.noise_multiplier)


class EndFacts(TermsFacts):
    """The fields of the message that ends a run, including the number of completed rounds."""

    rounds: Count


class RoundFacts(TermsFacts):
    """The fields common to all of a server's requests in a round.

    Args:
        round: the number of the round.
        participants: the clients that take part in the round.
        exchange: the exchange of the round, "first" or "main".
        sum: the server's name for a secure sum. None: the exchange uses no secure sum.
        sealed: the other clients' encrypted shares. They are sent only with a step in a secure sum.
    """

    round: Count
    participants: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    exchange: Literal["first", "main"]
    sum: str | None = None
    sealed: str = ""


def _parse_history(stated: Any) -> History:
    if isinstance(stated, History):
        return stated
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError, AttributeError, PrivacyError) as error:
        raise ValueError(f"the client's ledger history is damaged: {error!r:.80}") from None


# The history of a client's ledger, which is JSON outside of this process.
StatedHistory = Annotated[History, PlainValidator(_parse_history), PlainSerializer(History.to_json)]


class Statement(Facts):
    """The header fields in which a client states its index, size and ledger history.

    Args:
        client: the index of the client.
        size: the number of examples, in the answer to the request to join. None with differential
            privacy.
        history: the history of the client's ledger. None: the client has no ledger.
    """

    client: Count
    size: Count | None = None
    history: StatedHistory | None = None


# The name of the file of joined clients, in the folder of the run's checkpoint.
FILE = "clients.json"


class JoinedClient(BaseModel):
    """A client that has joined the run.

    It may have joined before a restart of the server.

    Attributes:
        size: the number of examples n_k. None with differential privacy.
        history: the ledger history in the client's latest answer. None: the client has no ledger.
        unstated: the (round, exchange) pairs of all steps that were requested since `history` was
            received.
        node: the transport's number of the client's node. None: the node has not joined this server
            process.
    """

    size: int | None
    history: StatedHistory | None
    unstated: list[tuple[int, str]] = []
    node: int | None = Field(default=None, exclude=True)

    def update(self, history: History | None) -> None:
        """Replaces the client's ledger history with a newer one.

        The newer history may only add entries to the history that the client has sent before.

        Raises:
            MessageError: if the newer history does not begin with the entries of the previous
                history.
        """
        previous = self.history
        if previous is not None:
            rows = len(previous.releases)
            if (
                history is None
                or history.client != previous.client
                or history.releases[:rows] != previous.releases
                or (len(history.releases) == rows and previous.chain not in (None, history.chain))
            ):
                raise MessageError(
                    f"the client's ledger does not begin with the {rows} rows that the client sent "
                    "before. Restore the ledger from a backup"
                )
        self.history = history
        self.unstated = []


_CLIENTS = TypeAdapter(dict[int, JoinedClient])


def read_clients(file: Path) -> dict[int, JoinedClient]:
    """Reads the file of joined clients, and returns the clients by index.

    No client is connected yet. The dictionary is empty if the file does not exist.

    Raises:
        CheckpointError: if the file is damaged.
    """
    if not file.exists():
        return {}
    with damage_is_named(file):
        return _CLIENTS.validate_json(without_hash(read_regular(file)))


def write_clients(file: Path, clients: Mapping[int, JoinedClient]) -> None:
    """Writes the clients that have joined the run to a file, and flushes the file to the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, with_hash(_CLIENTS.dump_json(dict(clients))))


class Transport(Protocol):
    """Transports the server's messages to the nodes, and the nodes' answers to the server.

    The transport chooses a number for each node. This number is not the client's index.

    Attributes:
        run: the name of the run that the messages belong to. The server sets it before it sends
            anything.
    """

    run: str

    def nodes(self) -> Sequence[int]:
        """Returns the connected nodes' ids."""

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | str]:
        """Sends a message to each node, waits at most `seconds`, and returns the answers by node.

        If a node does not answer in time, the result contains a text with the reason instead of the
        answer, or no entry for this node.
        """


@dataclass(frozen=True)
class Timeouts:
    """A server's timeouts in seconds.

    Args:
        join: how long the server waits for all clients to join.
        answer: how long the server waits for the answer to a message. This includes the client's
            computation.
        poll: the time between two checks for newly connected nodes.

    Raises:
        SettingError: if a number is negative, not finite, or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    poll: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)


@dataclass(frozen=True)
class Connection:
    """The server's connection to the nodes: the transport, the timeouts and the known keys.

    Args:
        transport: carries messages to the nodes.
        timeouts: how long the server waits for the nodes.
        clients: maps each node to its client, according to the key that the node authenticates
            with. If it is empty, each node states which client it is.
    """

    transport: Transport
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: Mapping[int, int] = field(default_factory=dict)
