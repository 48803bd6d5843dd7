"""Messages between a server and nodes: several frames each way, and the parsing of nodes' answers,
which are untrusted.

Each message to a node takes seconds, regardless of its size. So each exchange of a round is one
message: the client receives the terms if it has not yet, prepares, begins, takes its step, and
states what the round's metrics and the report need. It answers the frames in order and stops at the
first one that it cannot answer (`fedsynth.deployment.frames`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.core.uploads import LARGEST
from fedsynth.deployment.frames import Frame, parse_nonnegative_int
from fedsynth.errors import MessageError
from fedsynth.federation.protocol import Evaluated
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.plans import MAIN

if TYPE_CHECKING:
    from fedsynth.deployment.client_records import JoinedClient

MOST_FRAMES = 16


def pack(frames: Sequence[bytes]) -> bytes:
    """Returns the frames packed into one message.

    >>> unpack(pack([b"one", b""]))
    [b'one', b'']
    """
    parts = [len(frames).to_bytes(LENGTH_BYTES, "little")]
    for frame in frames:
        parts += [len(frame).to_bytes(LENGTH_BYTES, "little"), frame]
    return b"".join(parts)


def unpack(sent: bytes) -> list[bytes]:
    """Returns the frames of a message.

    Raises:
        MessageError: the bytes are not a message.
    """
    count = int.from_bytes(sent[:LENGTH_BYTES], "little")
    if len(sent) < LENGTH_BYTES or not 1 <= count <= MOST_FRAMES:
        raise MessageError("these bytes are no frames of fedsynth")
    frames = []
    position = LENGTH_BYTES
    for _ in range(count):
        end = position + LENGTH_BYTES
        length = int.from_bytes(sent[position:end], "little")
        if end > len(sent) or length > len(sent) - end:
            raise MessageError("these bytes are no frames of fedsynth: they are cut off")
        frames.append(sent[end : end + length])
        position = end + length
    if position != len(sent):
        raise MessageError("these bytes are no frames of fedsynth: there are more than they say")
    return frames


def parse_reply(frame: Frame) -> Frame:
    """Returns an answer or a refusal unchanged.

    Raises:
        MessageError: it is an error.
    """
    if frame.kind not in ("answer", "refusal"):
        raise MessageError(f"answers with an error: {frame.facts.get('text')!s:.200}")
    return frame


def parse_history(stated: Any) -> History | None:
    """Returns a client's statement of its ledger; None: it has none.

    Raises:
        MessageError: it is damaged.
    """
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a client's history is damaged: {error!r:.80}") from None


def parse_evaluation(
    client: int, models: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> Evaluated:
    """Returns models' results on a client's test split, from its answer for each model.

    Raises:
        MessageError, LookupError, TypeError: the answers are damaged.
    """
    size = parse_nonnegative_int(answers[0]["size"], "size")
    tested = parse_nonnegative_int(answers[0]["tested"], "count")
    right: dict[str, int] = {}
    for name, answer in zip(models, answers, strict=True):
        right[name] = parse_nonnegative_int(answer["right"]["model"], "count")
        if right[name] > tested:
            raise MessageError(f"{right[name]} of {tested} are right")
    return Evaluated(client, size, tested, right)


def majority_schema(stated: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns the facts that a method can merge: those with the schema of most clients.

    Facts are finite numbers by name, or mappings of such by name.
    """
    schemas = {
        position: form for position, values in enumerate(stated) if (form := _schema(values))
    }
    majority = Counter(schemas.values()).most_common(1)
    return [stated[position] for position, form in schemas.items() if form == majority[0][0]]


def _schema(value: Any, depth: int = 2) -> str:
    """Returns the schema of a client's facts; empty: there are none, or they are invalid."""
    if not isinstance(value, dict) or not depth:
        return ""
    parts = []
    for name, item in sorted(value.items()):
        number = type(item) in (int, float) and abs(item) <= LARGEST
        inner = "" if number else _schema(item, depth - 1)
        if not (number or inner):
            return ""
        parts.append(f"{name!r}:{inner}")
    return f"{{{','.join(parts)}}}" if parts else ""


MAX_FRAMES = 6
"""The limit of frames in a message: start, prepare, begin, the question, facts and history."""


@dataclass(frozen=True)
class Request:
    """A message to one client.

    Args:
        client: its index.
        question: the frame whose answer is wanted.
        before: frames that the client answers first.
        first: the number of the message's first frame; later frames count up from it.
    """

    client: int
    question: Frame
    before: Sequence[Frame]
    first: int

    @property
    def is_step(self) -> bool:
        """Returns whether it asks for a step, for which the client may be charged."""
        return self.question.kind == "step"

    def to_bytes(self) -> bytes:
        """Returns the frames as one message."""
        frames = [*self.before, self.question, *_following(self.question)]
        return pack(
            [
                replace(frame, facts={**frame.facts, "number": self.first + position}).to_bytes()
                for position, frame in enumerate(frames)
            ]
        )

    def read(self, sent: bytes | str, client: JoinedClient, max_bytes: int) -> Frame:
        """Returns the answer to the question.

        Args:
            sent: the received bytes, or the reason why there are none.
            client: the client, whose statements are updated from the message.
            max_bytes: the size limit.

        Raises:
            MessageError: there is no answer.
        """
        if isinstance(sent, str):
            raise MessageError(sent)
        if len(sent) > max_bytes + LENGTH_BYTES:
            raise MessageError(f"sends {len(sent)} bytes, above the {max_bytes} that it may")
        frames = [Frame.from_bytes(packed) for packed in unpack(sent)]
        for number, frame in enumerate(frames, self.first):
            stated = (frame.facts.get("client"), frame.facts.get("number"))
            if stated != (self.client, number):
                raise MessageError(f"was asked request {number}, and {stated!r:.80} answers")
        client.started = client.started or frames[0].kind == "answer"
        question = len(self.before)
        if len(frames) <= question:
            if self.is_step:
                client.unstated.pop()  # the client refused a frame before the step
            reply = parse_reply(frames[-1])
            if reply.kind == "answer":
                raise MessageError("does not answer all that it was asked")
            return reply
        for position, frame in enumerate(frames):
            if position != question and frame.kind == "answer":
                _take_statements(client, frame)
        return parse_reply(frames[question])


def _following(frame: Frame) -> list[Frame]:
    """Returns the frames that follow a question: after a round's step, those for its metrics."""
    if frame.kind != "step" or frame.facts["phase"] != MAIN:
        return []
    header = {key: frame.facts[key] for key in ("round", "participants")}
    return [Frame("facts", header), Frame("history", {})]


def _take_statements(client: JoinedClient, frame: Frame) -> None:
    """Stores the facts and the ledger that came with an answer.

    Raises:
        MessageError: the ledger is damaged, or does not continue the one that was stated before.
    """
    if "facts" in frame.facts:
        client.facts = frame.facts
    if "history" in frame.facts:
        client.state(parse_history(frame.facts["history"]))
