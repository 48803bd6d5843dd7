"""Conversion of our messages to Flower's, and back: bytes and the run's name in a `ConfigRecord`.

Nothing else of Flower's records is used: its arrays are for models that are averaged, and ours are
checked against the methods' own declarations (`fedsynth.core.messages`).
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedsynth.errors import MessageError

RECORD = "fedsynth"
KIND = "query"
"""Flower's type of our messages: it names no training, so that no strategy processes them."""


def to_record(run: str, frame: bytes) -> RecordDict:
    """Returns the run's name and a frame in Flower's form."""
    return RecordDict({RECORD: ConfigRecord({"run": run, "frames": frame})})


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """Returns the run's name and the frame.

    Raises:
        MessageError: it is not our message.
    """
    try:
        record: Any = content[RECORD]
        run, frame = record["run"], record["frames"]
    except (KeyError, TypeError) as error:
        raise MessageError(f"not a valid fedsynth message: {error!r:.80}") from None
    if not (isinstance(run, str) and isinstance(frame, bytes)):
        raise MessageError("not a valid fedsynth message: its record has other types")
    return run, frame


def request(run: str, frame: bytes, node: int, seconds: float) -> Message:
    """Returns a message to a node, which expires after `seconds`."""
    return Message(to_record(run, frame), node, KIND, ttl=seconds)


def reply(run: str, frame: bytes, to: Message) -> Message:
    """Returns the answer to a message."""
    return Message(to_record(run, frame), reply_to=to)
